"""``train --backend transformers``: the model of transformers computes and learns what torchtitan's own does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qwen3conv.converters.detection import open_checkpoint
from qwen3conv.converters.layouts import ACCELERATE, TITAN_OPTIMIZERS, bind
from qwen3conv.converters.reading import read_whole
from qwen3conv.converters.state_tables import STATE, Column, state_table
from tests.conversions import differing
from tests.models import even_texts, once, read_tensors, saved_model
from tests.training.test_native import for_two_ranks, run, steps_of, write_texts

STEPS = 20
FIRST_TOLERANCE = 1e-4
"""Relative, of the first step's loss, in float32."""
TOLERANCE = 1e-4
"""The same of every step's loss and gradient norm. Found: 4e-7 over 20 steps, dense and MoE."""
GRADIENT_TOLERANCE = 1e-5
"""Largest difference of a parameter's gradient, by its own largest element. Found: 6e-7."""


def train(source: Path, data: Path, output: Path, *more: object, steps: int = STEPS, code: int = 0) -> Any:
    base = ["train", "--from", source, "--data", data, "--output", output, "--recipe", "tiny", "--device", "cpu"]
    return run(*base, "--steps", steps, "--lr_scheduler.total_steps", STEPS, *more, code=code)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory, "dense")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory, "moe-trainable")


@pytest.fixture(scope="module")
def texts(dense: Path) -> list[str]:
    return even_texts(dense, 64, 48)


@pytest.fixture(scope="module")
def data(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("data") / "text.jsonl", texts)


@pytest.fixture(scope="module")
def trained(dense: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model after 20 steps of each backend."""

    def build(folder: Path) -> None:
        for backend in ("native", "transformers"):
            train(dense, data, folder / backend, "--backend", backend)

    return once(tmp_path_factory, "both-backends", build)


def assert_same_course(found: Path, expected: Path, tolerance: float = TOLERANCE) -> None:
    ours, theirs = steps_of(found), steps_of(expected)
    assert list(ours) == list(theirs)
    for step, values in theirs.items():
        assert ours[step] == pytest.approx(values, rel=tolerance), step


def test_both_backends_see_the_same_loss_and_stay_together_for_20_steps(trained: Path) -> None:
    ours, theirs = steps_of(trained / "transformers"), steps_of(trained / "native")
    assert ours["1"][0] == pytest.approx(theirs["1"][0], rel=FIRST_TOLERANCE)
    assert theirs["20"][0] < theirs["1"][0] - 0.1  # it learns
    assert_same_course(trained / "transformers", trained / "native")


def test_transformers_loads_the_export_without_a_word(trained: Path) -> None:
    from transformers import AutoModelForCausalLM

    _, loading = AutoModelForCausalLM.from_pretrained(trained / "transformers" / "export", output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def gradients(run_folder: Path, backend: str) -> dict[str, npt.NDArray[np.float32]]:
    """Logical parameter -> AdamW's first moment after one step: a tenth of the gradient, clipped as a whole."""
    checkpoint = open_checkpoint(run_folder / "checkpoint" / "step-1")
    layout = ACCELERATE if backend == "transformers" else TITAN_OPTIMIZERS["T7-fused"]
    bindings = list(bind(layout, checkpoint.geometry, tied=False))
    column = Column(STATE, "exp_avg")
    tensors = checkpoint.contents.tensors
    table = state_table(bindings, {column: {b.name: tensors[column.fqn(b.name)] for b in bindings}}, "the test")
    read: Mapping[str, bytes] = {name: bytes(read_whole(entry, checkpoint.path)) for name, entry in table.items()}
    return {name: np.frombuffer(raw, np.float32) for name, raw in read.items()}


def test_every_parameter_of_a_moe_gets_the_same_gradient_and_a_step_of_no_length_changes_no_bit(
    moe: Path, data: Path, tmp_path: Path
) -> None:
    for backend in ("native", "transformers"):
        train(moe, data, tmp_path / backend, "--backend", backend, "--learning_rate", "0.0", steps=1)
        assert differing(read_tensors(tmp_path / backend / "export"), read_tensors(moe)) == []
    ours, theirs = gradients(tmp_path / "transformers", "transformers"), gradients(tmp_path / "native", "native")
    assert ours.keys() == theirs.keys()
    assert len(ours) == 3 + 3 * 12  # embeddings, norm and head; 9 of attention, norms and router, 3 of experts
    for name, expected in theirs.items():
        largest = float(np.abs(expected).max())
        assert largest > 0, name
        assert float(np.abs(ours[name] - expected).max()) <= GRADIENT_TOLERANCE * largest, name


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--balance-experts"], "are for torchtitan's experts"),
        (["--fsdp", 2, "--ep", 2], "are for torchtitan's experts"),
    ],
)
def test_what_the_backend_does_not_do_is_refused(
    flags: list[object], words: str, moe: Path, data: Path, tmp_path: Path
) -> None:
    assert words in train(moe, data, tmp_path / "run", "--backend", "transformers", *flags, code=1).stderr
    assert not (tmp_path / "run").exists()


def test_code_beside_the_weights_is_not_run(dense: Path, data: Path, tmp_path: Path) -> None:
    shutil.copytree(dense, tmp_path / "model")
    config = json.loads((dense / "config.json").read_text())
    code = f"open({str(tmp_path / 'was-here')!r}, 'w')\nfrom transformers import Qwen3Config as C\n"
    (tmp_path / "model" / "configuration_x.py").write_text(code)
    auto_map = {"AutoConfig": "configuration_x.C"}
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "auto_map": auto_map}))
    ended = train(tmp_path / "model", data, tmp_path / "run", "--backend", "transformers", steps=1, code=1)
    assert "auto_map" in ended.stderr
    assert not (tmp_path / "was-here").exists()


# --- on several ranks -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"fsdp": 2}, {"tp": 2, "fsdp": 2}], ids=str)
def test_ranks_share_the_work_of_one(
    degrees: dict[str, int], kind: str, dense: Path, moe: Path, texts: list[str], tmp_path: Path
) -> None:
    source, split = (moe if kind == "moe" else dense), degrees.get("fsdp", 1) == 2
    common: list[object] = ["--backend", "transformers", "--no-export", "--batch-size", 2]
    train(source, write_texts(tmp_path / "a.jsonl", texts), tmp_path / "one", *common, steps=4)
    data = write_texts(tmp_path / "b.jsonl", for_two_ranks(texts) if split else texts)
    flags = [word for axis, size in degrees.items() for word in (f"--{axis}", size)]
    train(source, data, tmp_path / "more", *common, *flags, "--local-batch-size", 1 if split else 2, steps=4)
    assert_same_course(tmp_path / "more", tmp_path / "one")


@pytest.mark.slow
def test_a_run_goes_on_where_it_stopped_on_the_same_mesh_and_on_another(
    dense: Path, data: Path, tmp_path: Path
) -> None:
    common: list[object] = ["--backend", "transformers", "--no-export"]
    train(dense, data, tmp_path / "whole", *common, "--tp", 2, steps=4)
    train(dense, data, tmp_path / "stopped", *common, "--tp", 2, steps=2)
    shutil.copytree(tmp_path / "stopped", tmp_path / "moved")
    train(dense, data, tmp_path / "stopped", *common, "--tp", 2, steps=4)
    assert steps_of(tmp_path / "stopped") == steps_of(tmp_path / "whole")
    train(dense, data, tmp_path / "moved", *common, steps=4)
    assert_same_course(tmp_path / "moved", tmp_path / "whole")


@pytest.mark.slow
def test_each_backend_starts_from_the_others_checkpoint(trained: Path, dense: Path, data: Path, tmp_path: Path) -> None:
    for backend, other in (("native", "transformers"), ("transformers", "native")):
        step = trained / other / "checkpoint" / f"step-{STEPS}"
        train(step, data, tmp_path / backend, "--backend", backend, "--no-export", steps=1)
        train(step, data, tmp_path / f"{backend}-too", "--backend", other, "--no-export", steps=1)
        assert_same_course(tmp_path / backend, tmp_path / f"{backend}-too")


@pytest.mark.slow
def test_a_run_goes_on_in_the_other_backend_with_its_optimizer(dense: Path, data: Path, tmp_path: Path) -> None:
    """Four steps in one backend and four in the other, each way: the losses of eight in one."""
    common: list[object] = ["--no-export", "--lr_scheduler.total_steps", 8, "--save-every", 4]
    for backend, other in (("native", "transformers"), ("transformers", "native")):
        whole, moved = tmp_path / f"{backend}-whole", tmp_path / f"{backend}-moved"
        train(dense, data, whole, *common, "--backend", backend, steps=8)
        step = whole / "checkpoint" / "step-4"
        train(step, data, moved, *common, "--backend", other, "--keep-optimizer", steps=8)
        found, expected = steps_of(moved), steps_of(whole)
        assert list(found) == ["5", "6", "7", "8"]
        for number, values in found.items():
            assert values == pytest.approx(expected[number], rel=TOLERANCE), number
    other_rows = write_texts(tmp_path / "other.jsonl", ["the sun"])
    step = tmp_path / "native-whole" / "checkpoint" / "step-4"
    assert "is not what" in train(step, other_rows, tmp_path / "new", "--keep-optimizer", steps=8, code=1).stderr


def test_an_optimizer_that_is_not_there_is_not_kept(dense: Path, data: Path, tmp_path: Path) -> None:
    refused = train(dense, data, tmp_path / "new", "--keep-optimizer", steps=8, code=1).stderr
    assert "--keep-optimizer is for a step of a run of train" in refused
    step = tmp_path / "old" / "checkpoint" / "step-4"
    step.parent.mkdir(parents=True)
    run("convert", dense, step, "--to", "titan")
    (tmp_path / "old" / "run.json").write_text('{"steps": {}}')
    assert "holds no optimizer state" in train(step, data, tmp_path / "new", "--keep-optimizer", steps=8, code=1).stderr
    assert not (tmp_path / "new").exists()
