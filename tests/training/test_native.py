"""``qwen3conv train`` with torchtitan's native Qwen3 on the CPU: from a checkpoint to steps and out, for real."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from qwen3conv.tools.cli.main import cli
from tests.conversions import differing, fingerprint
from tests.models import even_texts, once, read_tensors, saved_model

STEPS = 4
OVERFITTED = 0.3
"""Loss, in nats per token, that 50 steps on 8 texts must reach. Begins at 6."""
WHOLE = ("--lr_scheduler.total_steps", str(STEPS))
"""The same schedule for a run that stops early."""


def run(*words: object, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, [*map(str, words)], prog_name="qwen3conv")
    assert result.exit_code == code, result.output
    return result


def train(source: Path, data: Path, output: Path, *more: object, steps: int = STEPS, code: int = 0) -> Result:
    base = ["train", "--from", source, "--data", data, "--output", output, "--recipe", "tiny", "--device", "cpu"]
    return run(*base, "--steps", steps, *more, *WHOLE, code=code)


def write_texts(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def steps_of(folder: Path) -> dict[str, tuple[float, float]]:
    """Step -> loss and gradient norm."""
    record: Mapping[str, Any] = json.loads((folder / "run.json").read_text())
    return {step: (found["loss"], found["grad_norm"]) for step, found in record["steps"].items()}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory, "dense-tied")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory, "moe-trainable")


@pytest.fixture(scope="module")
def texts(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return even_texts(dense, 64, 24)


@pytest.fixture(scope="module")
def data(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("data") / "text.jsonl", texts)


@pytest.fixture(scope="module")
def trained(dense: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that went through, and one that stopped on its way and went on."""

    def build(folder: Path) -> None:
        train(dense, data, folder / "whole")
        train(dense, data, folder / "resumed", "--no-export", steps=2)
        shutil.copytree(folder / "resumed", folder / "stopped")
        train(dense, data, folder / "resumed")

    return once(tmp_path_factory, "native-trained", build)


def test_the_loss_falls_and_every_step_is_recorded(trained: Path, dense: Path) -> None:
    losses = [loss for loss, _ in steps_of(trained / "whole").values()]
    assert list(steps_of(trained / "whole")) == [str(step) for step in range(1, STEPS + 1)]
    assert losses[-1] < losses[0]
    record = json.loads((trained / "whole" / "run.json").read_text())
    assert (record["device"], record["ranks"], record["tokens_per_step"]) == ("cpu", 1, 128)
    assert record["versions"]["torchtitan"] == "0.3.0"
    keys = ["data", "versions", "device", "ranks", "degrees", "tokens_per_step", "learning_rate", "lora"]
    assert list(record) == [*keys, "rows_left_out", "legs", "shapes", "seconds", "source", "export", "steps"]
    (leg,) = record["legs"]
    assert (leg["first"], leg["last"], leg["changed"]) == (1, STEPS, {})
    assert leg["tokens_per_second"] > 0
    assert record["shapes"] == [[2, 64]]
    assert record["source"]["fingerprint"] == fingerprint(dense)
    assert record["export"]["fingerprint"] == fingerprint(trained / "whole" / "export")
    manifest = json.loads((trained / "whole" / "export" / "qwen3conv.json").read_text())
    assert manifest["source"]["trained_from"] == fingerprint(dense)
    assert manifest["source"]["training"]["tokens_per_step"] == 128


def test_a_resumed_run_is_the_uninterrupted_one(trained: Path) -> None:
    assert steps_of(trained / "resumed") == steps_of(trained / "whole")
    assert fingerprint(trained / "resumed" / "export") == fingerprint(trained / "whole" / "export")
    legs = json.loads((trained / "resumed" / "run.json").read_text())["legs"]
    assert [(leg["first"], leg["last"], leg["changed"]) for leg in legs] == [(1, 2, {}), (3, STEPS, {})]


def test_the_start_is_the_source_and_the_export_is_what_was_trained(trained: Path, dense: Path) -> None:
    whole = trained / "whole"
    assert fingerprint(whole / "source") == fingerprint(dense)
    step = whole / "checkpoint" / f"step-{STEPS}"
    run("convert", step, whole / "again", "--to", "hf", "--like", dense, "--dtype", "bfloat16", "--overwrite")
    assert differing(read_tensors(whole / "export"), read_tensors(whole / "again")) == []
    assert fingerprint(whole / "export") != fingerprint(dense)
    assert (whole / "export" / "tokenizer.json").read_bytes() == (dense / "tokenizer.json").read_bytes()


def test_transformers_loads_and_runs_the_export(trained: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = trained / "whole" / "export"
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    made = model.generate(**tokenizer("the sun", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert made.shape[1] > 4


def test_a_step_of_no_length_gives_the_source_back_bit_for_bit(moe: Path, data: Path, tmp_path: Path) -> None:
    """bfloat16 to torchtitan's float32 parameters, through a step, a save and an export, and back."""
    train(moe, data, tmp_path / "run", "--learning_rate", "0.0", steps=1)
    assert differing(read_tensors(tmp_path / "run" / "export"), read_tensors(moe)) == []


@pytest.fixture(scope="module")
def moe_trained(moe: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe") / "run"
    train(moe, data, folder, steps=2)
    return folder


def test_a_moe_trains_without_a_bias_that_its_export_could_not_hold(moe: Path, moe_trained: Path) -> None:
    found = steps_of(moe_trained)
    assert list(found) == ["1", "2"]
    assert found["2"][0] < found["1"][0]
    assert read_tensors(moe_trained / "export").keys() == read_tensors(moe).keys()


def test_experts_by_the_operator_train_as_torchtitans_own(
    moe: Path, moe_trained: Path, data: Path, tmp_path: Path
) -> None:
    train(moe, data, tmp_path / "run", "--no-export", "--backend", "nki-moe", steps=2)
    ours = steps_of(tmp_path / "run")
    for step, found in steps_of(moe_trained).items():
        assert ours[step] == pytest.approx(found, rel=1e-5), step  # both in float32, expert by expert


def chat(number: int) -> dict[str, Any]:
    words = ("sun", "moon", "river", "stone", "bird", "tree")
    messages = [{"role": "user", "content": f"the {words[number % 6]}?"}, {"role": "assistant", "content": words[-1]}]
    return {"messages": [{"role": "system", "content": "be short"}, *messages, *messages]}


def test_chats_are_trained_on_their_answers_and_bad_rows_are_named(dense: Path, tmp_path: Path) -> None:
    rows = [json.dumps(chat(number)) for number in range(12)]
    (tmp_path / "chats.jsonl").write_text("\n".join([*rows, '{"messages": []}']) + "\n")
    base = ["train", "--from", dense, "--data", tmp_path / "chats.jsonl", "--recipe", "tiny_sft", "--device", "cpu"]
    base += ["--seq-len", 128, "--steps", 3, "--output", tmp_path / "run"]
    run(*base, "--on-bad-row", "skip", "--no-packing")
    found = steps_of(tmp_path / "run")
    assert found["3"][0] < found["1"][0]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["rows_left_out"] == 1
    assert (tmp_path / "run" / "export" / "config.json").is_file()


# --- on several ranks -------------------------------------------------------------------------------------------------


def for_two_ranks(texts: Sequence[str]) -> list[str]:
    """Texts in such an order that two data-parallel ranks, each with one half, read in turn what one rank reads."""
    return [*texts[::2], *texts[1::2]]


@pytest.fixture(scope="module")
def alone(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied model trained by one rank."""
    model, folder = saved_model(tmp_path_factory, "dense"), tmp_path_factory.mktemp("alone")
    train(model, write_texts(folder / "text.jsonl", texts), folder / "run", "--no-export")
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"fsdp": 2}, {"tp": 2, "fsdp": 2}], ids=str)
def test_ranks_share_the_work_of_one(
    degrees: dict[str, int], alone: Path, texts: list[str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    split = degrees.get("fsdp", 1) == 2
    data = write_texts(tmp_path / "text.jsonl", for_two_ranks(texts) if split else texts)
    flags = [word for axis, size in degrees.items() for word in (f"--{axis}", size)]
    flags += ["--local-batch-size", 1 if split else 2, "--batch-size", 2, "--no-export"]
    train(saved_model(tmp_path_factory, "dense"), data, tmp_path / "run", *flags)
    whole, shared = steps_of(alone), steps_of(tmp_path / "run")
    assert list(shared) == list(whole)
    for step, found in whole.items():
        assert shared[step] == pytest.approx(found, rel=1e-4), step  # float32, summed in another order


@pytest.mark.slow
def test_expert_parallel_ranks_share_the_work_of_one(moe: Path, texts: list[str], tmp_path: Path) -> None:
    alone, halves = write_texts(tmp_path / "a.jsonl", texts), write_texts(tmp_path / "b.jsonl", for_two_ranks(texts))
    train(moe, alone, tmp_path / "one", "--no-export")
    train(moe, halves, tmp_path / "two", "--no-export", "--fsdp", 2, "--ep", 2, "--local-batch-size", 1)
    whole, shared = steps_of(tmp_path / "one"), steps_of(tmp_path / "two")
    for step, found in whole.items():
        assert shared[step] == pytest.approx(found, rel=2e-4), step


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh(trained: Path, dense: Path, data: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "stopped", tmp_path / "run")
    train(dense, data, tmp_path / "run", "--tp", 2)
    for step, found in steps_of(trained / "whole").items():
        assert steps_of(tmp_path / "run")[step] == pytest.approx(found, rel=1e-4), step
    shutil.copytree(trained / "stopped", tmp_path / "other")
    said = train(dense, data, tmp_path / "other", "--fsdp", 2, "--local-batch-size", 1).stderr
    assert "places in the text do not fit" in said
    assert list(steps_of(tmp_path / "other")) == [str(step) for step in range(1, STEPS + 1)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "transformers", "nki-moe"])
def test_eight_texts_are_learned_by_heart_in_50_steps_and_come_back_from_the_export(
    backend: str, dense: Path, moe: Path, texts: list[str], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    data = write_texts(tmp_path / "text.jsonl", texts[:8])
    source = moe if backend == "nki-moe" else dense
    base = ["train", "--from", source, "--data", data, "--output", tmp_path / "run", "--recipe", "tiny"]
    base += ["--backend", backend, "--device", "cpu", "--steps", 50, "--local-batch-size", 8]
    run(*base, "--learning-rate", 1e-2, "--dtype", "float32")
    assert steps_of(tmp_path / "run")["50"][0] < OVERFITTED
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "export")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export")
    tokens = tokenizer(texts[0], return_tensors="pt").input_ids
    made = model.generate(tokens[:, :24], max_new_tokens=8, do_sample=False)
    assert made[0, 24:32].tolist() == tokens[0, 24:32].tolist()


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tp", 3], "tp 3 neither divides the 2 key-value heads"),
        (["--seq-len", 100_000], "longer than the model's 256"),
        (["--seq-len", 60], "do not divide among 8"),
        (["--fsdp", 2, "--batch-size", 3], "no multiple of 2"),
        (["--balance-experts"], "is for MoE models"),
        (["--backend", "nki-moe"], "--backend nki-moe is for MoE models"),
        (["--ep", 2, "--fsdp", 2], "dense and has no experts"),
        (["--tp", 2, "--fsdp", 2], "rows of tied embeddings do not divide among tp x fsdp = 4"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_it_begins(
    flags: list[object], words: str, dense: Path, data: Path, tmp_path: Path
) -> None:
    ended = train(dense, data, tmp_path / "run", *flags, code=1)
    assert words in ended.stderr
    assert ended.stdout == ""
    assert not (tmp_path / "run").exists()


def test_other_data_other_folders_and_other_runs_are_refused(
    dense: Path, moe: Path, data: Path, trained: Path, tmp_path: Path
) -> None:
    for absent in (tmp_path / "absent.jsonl", dense / "config.json.txt", tmp_path / "absent.parquet"):
        assert "is not a file of rows" in train(dense, absent, tmp_path / "run", code=1).stderr
    said = train(dense, data, tmp_path / "run", "--validate-every", 2, code=1).stderr
    assert "--validate-every is for rows to validate with" in said
    assert "is not a file of rows" in train(dense, data, tmp_path / "run", "--validation", "x.jsonl", code=1).stderr
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    assert "is no run" in train(dense, data, tmp_path / "mine", code=1).stderr
    assert "run of another checkpoint" in train(moe, data, trained / "whole", code=1).stderr
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(dense / name, bare)
    assert "has no tokenizer.json" in train(bare, data, tmp_path / "run", code=1).stderr
    assert not (tmp_path / "run").exists()


def test_exports_on_the_way_are_those_of_their_steps(dense: Path, data: Path, tmp_path: Path) -> None:
    refused = train(dense, data, tmp_path / "run", "--export-every", 3, "--save-every", 2, code=1)
    assert "--export-every 3 is no multiple of --save-every 2" in refused.stderr
    said = train(dense, data, tmp_path / "run", "--export-every", 2).stderr
    assert "exported step 2" in said
    exports = tmp_path / "run" / "exports"
    assert {path.name for path in exports.iterdir()} == {"step-2", "step-4"}
    assert fingerprint(exports / "step-4") == fingerprint(tmp_path / "run" / "export")
    step = tmp_path / "run" / "checkpoint" / "step-2"
    run("convert", step, tmp_path / "again", "--to", "hf", "--like", dense, "--dtype", "bfloat16")
    assert fingerprint(exports / "step-2") == fingerprint(tmp_path / "again")


def test_a_validation_loss_is_recorded_and_training_does_not_feel_it(
    trained: Path, dense: Path, data: Path, texts: list[str], tmp_path: Path
) -> None:
    held_out = write_texts(tmp_path / "held-out.jsonl", texts[-8:])
    train(dense, data, tmp_path / "run", "--validation", held_out, "--validate-every", 2, "--no-export")
    assert steps_of(tmp_path / "run") == steps_of(trained / "whole")
    steps = json.loads((tmp_path / "run" / "run.json").read_text())["steps"]
    found = {step: values["validation_loss"] for step, values in steps.items() if "validation_loss" in values}
    assert list(found) == ["1", "2", "4"]  # torchtitan begins with the first step
    assert found["4"] < found["1"]
    assert found["1"] == pytest.approx(steps["1"]["loss"], abs=0.5)
    assert (tmp_path / "run" / "loss.png").stat().st_size > 10_000


def test_a_run_does_not_go_on_with_other_rows(trained: Path, dense: Path, texts: list[str], tmp_path: Path) -> None:
    shutil.copytree(trained / "stopped", tmp_path / "run")
    other = write_texts(tmp_path / "other.jsonl", texts[:-1])
    assert "is not what" in train(dense, other, tmp_path / "run", code=1).stderr
    train(dense, other, tmp_path / "run", "--no-export", "--checkpoint.exclude_from_loading", "dataloader")


def test_rows_without_text_end_the_run_with_a_word(dense: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "x"}\n')
    ended = train(dense, rows, tmp_path / "run", code=1)
    assert f"{rows}:1: no string field 'text', only prompt" in ended.stderr
    assert "--on-bad-row skip" in ended.stderr
    assert "goes on from" not in ended.stderr
    bad = write_texts(tmp_path / "bad.jsonl", [""])
    chats = ["train", "--from", dense, "--data", bad, "--output", tmp_path / "chats", "--recipe", "tiny_sft"]
    ended = run(*chats, "--device", "cpu", code=1)
    assert "training ended with code 1: " in ended.stderr
    assert f"{bad}:1: text is empty" in ended.stderr


def test_an_option_that_is_nearly_one_of_ours_is_not_handed_on(dense: Path, data: Path, tmp_path: Path) -> None:
    for wrong, right in (("--save-evry", "--save-every"), ("--learning-rat=1", "--learning-rate"), ("--fsd", "--fsdp")):
        said = train(dense, data, tmp_path / "run", wrong, 2, "--print", code=2).stderr
        assert "Did you mean" in said
        assert right in said.partition("Did you mean")[2]
    handed_on = (
        "--learning_rate",
        "0.1",
        "--profiler.enable_profiling",
        "--training.max_norm=2",
        "--override.imports",
        "x",
    )
    assert train(dense, data, tmp_path / "run", *handed_on, "--print").stdout.count(" ".join(handed_on)) == 1


def test_the_command_is_printed_and_nothing_is_done(dense: Path, data: Path, tmp_path: Path) -> None:
    shown = train(dense, data, tmp_path / "run", "--print", "--tp", 2, "--fsdp", 3).stdout
    assert "torch.distributed.run" in shown
    assert "--nproc_per_node 6" in shown
    assert "--module qwen3conv.training.recipes.native --config tiny" in shown
    assert "--parallelism.tensor_parallel_degree 2" in shown
    assert shown.endswith("--lr_scheduler.total_steps 4\n")
    assert not (tmp_path / "run").exists()
