"""A run that goes on under other settings says so, and its record keeps what each of its legs was trained with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qwen3conv.training.run_record import RunRecord
from tests.cli.conftest import write_model
from tests.models import even_texts, saved_model
from tests.training.test_native import run, train, write_texts

FACTS: dict[str, Any] = {"device": "cpu"}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory, "dense")


@pytest.fixture(scope="module")
def data(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("data") / "text.jsonl", even_texts(dense, 64, 24))


def record_steps(path: Path, first: int, last: int, **settings: Any) -> dict[str, tuple[object, object]]:
    """A leg from ``first`` to ``last``; what it changed."""
    record = RunRecord.start(path, FACTS, settings)
    changed = record.begin(first)
    for step in range(first, last + 1):
        record.step(step, tokens_per_second=100.0, loss=1.0, grad_norm=1.0)
    return changed


def legs_of(path: Path) -> list[tuple[object, ...]]:
    legs = json.loads(path.read_text())["legs"]
    return [(leg["first"], leg["last"], leg["settings"]["learning_rate"], leg["changed"]) for leg in legs]


def test_every_leg_keeps_its_settings_and_the_steps_that_were_kept_of_it(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    assert record_steps(path, 1, 5, learning_rate=1e-3, betas=(0.9, 0.95)) == {}
    assert record_steps(path, 4, 6, learning_rate=1e-3, betas=(0.9, 0.95)) == {}  # killed after 5, saved at 3
    assert record_steps(path, 7, 8, learning_rate=2e-3, betas=(0.9, 0.95)) == {"learning_rate": (1e-3, 2e-3)}
    legs = [(1, 3, 1e-3, {}), (4, 6, 1e-3, {}), (7, 8, 2e-3, {"learning_rate": [1e-3, 2e-3]})]
    assert legs_of(path) == legs
    RunRecord.start(path, FACTS, {"learning_rate": 5.0})  # which ends before its first step
    assert legs_of(path) == legs
    assert record_steps(path, 1, 2, learning_rate=3e-3) == {}  # begun anew, which goes on from nothing
    assert legs_of(path) == [(1, 2, 3e-3, {})]
    leg = json.loads(path.read_text())["legs"][0]
    assert leg["versions"]["torchtitan"] == "0.3.0"
    assert (leg["device"], leg["tokens_per_second"]) == ("cpu", 100.0)


def test_steps_that_are_done_are_not_trained_again_and_fewer_are_refused(tmp_path: Path) -> None:
    model, rows = write_model(tmp_path / "model"), write_texts(tmp_path / "text.jsonl", ["x"])
    (tmp_path / "run").mkdir()
    run("convert", model, tmp_path / "run" / "source", "--to", "titan")
    manifest = tmp_path / "run" / "source" / "qwen3conv.json"
    content = json.loads(manifest.read_text())
    content["source"]["trains"] = str(model.resolve())
    manifest.write_text(json.dumps(content))
    step = tmp_path / "run" / "checkpoint" / "step-4"
    step.parent.mkdir()
    run("convert", model, step, "--to", "titan")
    refused = train(model, rows, tmp_path / "run", steps=2, code=1).stderr
    assert "is already at step 4, beyond --steps 2" in refused
    ended = train(model, rows, tmp_path / "run", steps=4)
    assert "is already at step 4: no step is left to train" in ended.stderr
    assert "The trained model" in ended.stdout
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()


def test_a_run_that_fails_before_its_first_step_ends_with_one_message(
    dense: Path, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = train(dense, data, tmp_path / "run", "--fsdp", 2, "--training.stepz", 9, code=1)
    said, shown = ended.stderr, capfd.readouterr().err
    assert "Unrecognized options: --training.stepz, 9; perhaps --training.steps" in said
    assert "Nothing was saved" in said
    assert "goes on from" not in said
    assert "Traceback" not in said + shown
    assert "Unrecognized" not in shown  # the command says it, and no rank


@pytest.mark.slow
def test_other_settings_of_a_later_leg_are_warned_of_and_recorded(
    dense: Path, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(dense, data, tmp_path / "run", "--no-export", steps=2)
    capfd.readouterr()
    train(dense, data, tmp_path / "run", "--no-export", "--learning-rate", 2e-3, "--local-batch-size", 1, steps=4)
    shown = capfd.readouterr().err
    assert "Warning: from step 3 on learning_rate is 0.002; up to step 2 it was 0.001" in shown
    assert "Warning: from step 3 on sequences_per_step is 1; up to step 2 it was 2" in shown
    assert shown.count("Warning: from step 3 on") == 2
    first, second = json.loads((tmp_path / "run" / "run.json").read_text())["legs"]
    assert (first["first"], first["last"], second["first"], second["last"]) == (1, 2, 3, 4)
    assert second["changed"] == {"learning_rate": [0.001, 0.002], "sequences_per_step": [2, 1]}
    refused = train(dense, data, tmp_path / "run", steps=2, code=1).stderr
    assert "is already at step 4" in refused
