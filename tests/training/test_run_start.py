"""A run's own checkpoint is a start like any other: config and tokenizer are those of what the run began with."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from qwen3conv.converters.checkpoint import find_config
from qwen3conv.converters.config import read_config
from qwen3conv.tools.training_run import look, make_source, release_dtype
from qwen3conv.training.launch import Run
from tests.cli.conftest import write_model
from tests.conversions import fingerprint
from tests.training.test_native import run


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A step as torchtitan saves it, weights and nothing else, in the folder of a run."""
    (tmp_path / "run").mkdir()
    run("convert", write_model(tmp_path / "model"), tmp_path / "run" / "source", "--to", "titan")
    step = tmp_path / "run" / "checkpoint" / "step-3"
    shutil.copytree(tmp_path / "run" / "source", step)
    shutil.rmtree(step / "hf_assets")
    (step / "qwen3conv.json").unlink()
    return step


def test_the_step_that_inspect_proposes_next_works_as_typed(step: Path, tmp_path: Path) -> None:
    line = next(line for line in run("inspect", step).stdout.splitlines() if line.startswith("Next: "))
    words = shlex.split(line.removeprefix("Next: qwen3conv "))
    typed = [str(tmp_path / "made") if word == "DST" else word for word in words]
    run(*typed)
    said = run(*(word for word in typed if word != "--dry-run")).stderr
    assert fingerprint(tmp_path / "made") == fingerprint(tmp_path / "model")
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "made" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
    policies = json.loads((tmp_path / "made" / "qwen3conv.json").read_text())["policies"]
    assert "config-run" in {policy["name"] for policy in policies}
    assert "Warning" not in said


def test_a_checkpoint_without_a_config_is_proposed_with_like(step: Path, tmp_path: Path) -> None:
    shutil.move(step, tmp_path / "bare")
    assert "Next: qwen3conv dcp-to-hf" in run("inspect", tmp_path / "bare").stdout
    assert "DST --like 'FOLDER|HUB_ID'" in run("inspect", tmp_path / "bare").stdout


def test_only_a_folder_that_a_run_made_speaks_for_its_steps(step: Path) -> None:
    assert find_config(step) == step.parents[1] / "source" / "hf_assets" / "config.json"
    named = step.rename(step.with_name("last"))
    assert find_config(named) is None
    named.rename(step)
    (step.parents[1] / "source" / "qwen3conv.json").unlink()
    assert find_config(step) is None


def test_training_starts_from_a_step_and_from_a_bare_dcp_with_like(step: Path, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "x"}\n')
    base = ["--data", tmp_path / "text.jsonl", "--output", tmp_path / "next", "--recipe", "tiny", "--print"]
    assert "torch.distributed.run" in run("train", "--from", step, *base).stdout
    shutil.move(step, tmp_path / "bare")
    said = run("train", "--from", tmp_path / "bare", *base, code=1).stderr
    assert "has no config.json" in said
    assert "--like" in said
    assert (
        "torch.distributed.run" in run("train", "--from", tmp_path / "bare", "--like", tmp_path / "model", *base).stdout
    )
    said = run("train", "--from", tmp_path / "model", "--like", tmp_path / "model", *base, code=1).stderr
    assert "has a config.json of its own" in said


def test_a_run_that_goes_on_from_a_run_that_went_on_exports_in_the_dtype_of_the_first(tmp_path: Path) -> None:
    """bfloat16 model -> run -> float32 step -> run -> float32 step -> run."""
    place = write_model(tmp_path / "model")
    for name in ("one", "two", "three"):
        began = Run(tmp_path / name, "text.jsonl")
        found, config = look(str(place))
        assert release_dtype(found.path, config) == "BF16", name
        make_source(began, found, str(place))
        step = tmp_path / name / "checkpoint" / "step-3"
        step.parent.mkdir()
        run("convert", began.source, step, "--to", "titan", "--dtype", "float32")
        shutil.rmtree(step / "hf_assets")
        (step / "qwen3conv.json").unlink()
        place = step
    assert read_config(tmp_path / "three" / "source" / "hf_assets" / "config.json").dtype == "F32"
