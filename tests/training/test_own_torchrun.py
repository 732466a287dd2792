"""``torchrun`` of one's own: what is wrong with its words, degrees, recipe or installation is one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qwen3conv.converters.config import read_config
from qwen3conv.converters.errors import PolicyError
from qwen3conv.training.devices import prepare_torchtitan
from qwen3conv.training.launch import CommandLineError
from qwen3conv.training.run_lock import LOCK
from tests.cli.conftest import environment, write_model
from tests.models import even_texts, saved_model
from tests.training.test_native import run, write_texts
from tests.training.test_neuron_probe import KINDS, fake, python

NATIVE = "qwen3conv.training.recipes.native"


def refused(*words: str, ranks: int = 1, module: str = NATIVE, recipe: str = "tiny") -> str:
    prepare_torchtitan("cpu")
    from qwen3conv.training.command_line import check_command_line

    with pytest.raises(CommandLineError) as caught:
        check_command_line(["--module", module, "--config", recipe, *words], ranks=ranks)
    message = str(caught.value)
    assert "\n" not in message
    assert "\u2500" not in message
    return message


def accepted(*words: str, ranks: int = 1, module: str = NATIVE, recipe: str = "tiny") -> None:
    prepare_torchtitan("cpu")
    from qwen3conv.training.command_line import check_command_line

    check_command_line([f"--module={module}", "--config", recipe, *words], ranks=ranks)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--training.step", "4"], "Unrecognized options: --training.step, 4; perhaps --training.steps or"),
        (["--training.seq_len", "x"], "invalid literal for int() with base 10: 'x'"),
        (["--training.steps"], "Missing value for argument '--training.steps'"),
        (["activation-checkpoint:ful"], "Unrecognized options: activation-checkpoint:ful"),
    ],
)
def test_a_flag_that_torchtitan_does_not_take_is_one_line(words: list[str], said: str) -> None:
    assert said in refused(*words)
    accepted("--training.steps", "4")


def degrees(**given: int) -> list[str]:
    return [word for name, size in given.items() for word in (f"--parallelism.{name}_degree", str(size))]


def test_degrees_that_do_not_multiply_to_the_ranks_are_named_with_the_number_that_would_do() -> None:
    both = degrees(tensor_parallel=2, data_parallel_shard=2)
    accepted(*both, ranks=4)
    said = refused(*both, ranks=3)
    assert "data_parallel_shard 2 x tensor_parallel 2 needs 4 ranks" in said
    assert "torchrun started 3: give it --nproc_per_node 4" in said
    rest = degrees(tensor_parallel=2)  # sharded over what is left
    accepted(*rest, ranks=6)
    assert "tensor_parallel 2 needs 2 ranks, or a multiple" in refused(*rest, ranks=3)
    assert "tensor_parallel_degree 0: a degree is 1 or more" in refused(*degrees(tensor_parallel=0))


def test_the_nearest_recipe_is_named_and_nothing_but_recipes() -> None:
    assert f"{NATIVE} has no recipe tiny_stf; did you mean tiny_sft" in refused(recipe="tiny_stf")
    assert "did you mean qwen3_8b" in refused(recipe="qwen_8b")
    known = refused(recipe="xxxxxxxx").partition("there are ")[2].split(", ")
    assert {"pretrain", "sft", "tiny", "tiny_sft", "qwen3_8b", "qwen3_8b_sft"} <= set(known)
    assert all(name.startswith("qwen3_") or name in ("pretrain", "sft", "tiny", "tiny_sft") for name in known)
    for name in ("QwenTrainer", "Validator", "recipes_of_sizes", "annotations", "_small"):
        assert "has no recipe" in refused(recipe=name)


def test_the_nearest_backend_is_named() -> None:
    assert f"did you mean {NATIVE}?" in refused(module="qwen3conv.training.recipes.nativ")
    assert f"did you mean {NATIVE}" in refused(module="qwen3conv.recipes.native")
    assert "did you mean qwen3conv.training.recipes.nki_moe" in refused(module="qwen3conv.training.recipes.nki-moe")
    accepted(module="qwen3conv.training.recipes.transformers")


def test_recipes_of_ones_own_are_taken_and_their_faults_are_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_recipes.py").write_text(f"from {NATIVE} import tiny\ndef mine():\n    return tiny()\n")
    (tmp_path / "my_broken.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    accepted(module="my_recipes", recipe="mine")
    accepted(module="my_recipes", recipe="tiny")
    assert "my_recipes has no recipe mein; did you mean mine?" in refused(module="my_recipes", recipe="mein")
    assert "my_broken cannot be imported: No module named 'a_package" in refused(module="my_broken")


def test_what_does_not_fit_the_model_is_refused_before_torchtitan_trips_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    prepare_torchtitan("cpu")
    from qwen3conv.training.recipes import native
    from qwen3conv.training.trainer import check_shapes

    source = read_config(write_model(tmp_path / "model") / "config.json")

    def check(**given: Any) -> None:
        config = native.tiny()
        config.training.seq_len = given.get("seq_len", 64)
        config.parallelism.tensor_parallel_degree = given.get("tp", 1)
        check_shapes(source, config)

    check()
    for given, said in (({"tp": 3}, "tp 3"), ({"seq_len": 4096}, "longer than"), ({"seq_len": 60}, "among 8")):
        with pytest.raises(PolicyError, match=said):
            check(**given)


@pytest.mark.slow
def test_torchrun_says_it_once_for_all_ranks_and_shows_no_traceback(tmp_path: Path) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "qwen3conv.training"]
    words += ["--device", "cpu", "--module", NATIVE, "--config", "tiny", *degrees(tensor_parallel=3)]
    ran = subprocess.run(
        [sys.executable, *words], env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, cwd=tmp_path
    )
    assert ran.returncode
    assert ran.stderr.count("Error: tensor_parallel 3 needs 3 ranks") == 1
    assert "training/__main__.py" not in ran.stderr.partition("ChildFailedError")[0].replace(os.sep, "/")


@pytest.mark.slow
def test_a_batch_of_another_shape_is_warned_of_with_its_step_and_recorded(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = saved_model(tmp_path_factory, "dense")
    data = write_texts(tmp_path / "text.jsonl", even_texts(model, 64, 12))
    run("convert", model, tmp_path / "source", "--to", "titan")
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1", "-m", "qwen3conv.training"]
    words += ["--device=cpu", "--module", "tests.ragged_recipe", "--config", "ragged", "--training.steps", "3"]
    words += ["--hf_assets_path", str(tmp_path / "source" / "hf_assets"), "--dump_folder", str(tmp_path / "run")]
    words += ["--checkpoint.initial_load_path", str(tmp_path / "source"), "--dataloader.dataset_path", str(data)]
    variables = environment(OMP_NUM_THREADS="1")
    variables["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), variables.get("PYTHONPATH", "")])
    ran = subprocess.run([sys.executable, *words], env=variables, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "step 2: a batch of a new shape (2, 56), after (2, 64)" in ran.stderr
    assert ran.stderr.count("a batch of a new shape") == 1
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["shapes"] == [[2, 64], [2, 56]]
    assert list(record["steps"]) == ["1", "2", "3"]
    assert not (tmp_path / "run" / LOCK).exists()


# --- a torch-neuronx that is not there --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["placeholder", "broken", "native", "legacy"])
def test_train_does_not_take_a_neuron_installation_for_a_cpu_without_a_word(kind: str, tmp_path: Path) -> None:
    from qwen3conv.training.neuron_probe import ADVICE

    folder, model = fake(tmp_path / "site", KINDS[kind]), write_model(tmp_path / "model")
    (tmp_path / "chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    base = [
        "-m",
        "qwen3conv",
        "train",
        "--from",
        model,
        "--data",
        tmp_path / "chats.jsonl",
        "--output",
        tmp_path / "run",
    ]
    words = [*map(str, base), "--recipe", "tiny_sft"]  # of a model without a chat template, so that nothing is trained
    ran = python(folder, *words)
    assert ran.returncode == 1
    advice = ADVICE.get(kind, "native TorchNeuron is here and reports no device")
    if kind == "legacy":
        assert f"Error: {advice}; or give --device cpu" in ran.stderr
    else:
        assert f"Warning: running on the CPU, which --device cpu asks for without this warning: {advice}" in ran.stderr
        assert "has no chat template" in ran.stderr.splitlines()[-1]
    if kind == "legacy":
        asked = python(folder, *words, "--device", "cpu")
        assert "Warning" not in asked.stderr
        assert "has no chat template" in asked.stderr
