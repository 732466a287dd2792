"""``runs``: what differs between two records, and where their losses part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from qwen3conv.tools.cli.main import cli
from tests.cli.conftest import Run

FACTS: dict[str, Any] = {"device": "cpu", "degrees": {"tp": 1, "fsdp": 1}, "learning_rate": 1e-3}


def write(folder: Path, losses: list[float], **facts: Any) -> Path:
    folder.mkdir()
    steps = {str(step): {"loss": loss, "grad_norm": 2 * loss, "time": 0.0} for step, loss in enumerate(losses, 1)}
    (folder / "run.json").write_text(json.dumps({**FACTS, **facts, "steps": steps}))
    return folder


def run(*words: object, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, ["runs", *map(str, words)], prog_name="qwen3conv")
    assert result.exit_code == code, result.output
    return result


def test_the_first_step_at_which_losses_part_is_named_and_what_was_set_otherwise(tmp_path: Path) -> None:
    one = write(tmp_path / "a", [6.0, 5.5, 5.0, 4.5])
    other = write(tmp_path / "b", [6.0, 5.5001, 5.2, 4.0], degrees={"tp": 2, "fsdp": 1})
    said = run(one, other, code=3).stdout
    assert "losses part at step 3" in said
    assert "degrees" in said
    assert "learning_rate" not in said
    document = json.loads(run(one, other, "--json", code=3).stdout)
    assert document == {
        "equal": False,
        "first_difference": 3,
        "common_steps": 4,
        "settings": {"degrees": [{"tp": 1, "fsdp": 1}, {"tp": 2, "fsdp": 1}]},
        "exports": [None, None],
    }


def test_runs_within_the_tolerance_are_the_same(tmp_path: Path) -> None:
    one, other = write(tmp_path / "a", [6.0, 5.5]), write(tmp_path / "b", [6.0, 5.52, 5.0])
    run(one, other, code=3)
    said = run(one / "run.json", other, "--tolerance", 0.01).stdout
    assert "the same over 2 steps" in said


def test_exports_are_named_by_fingerprint_and_settings_of_the_last_leg_compared(tmp_path: Path) -> None:
    legs = [{"first": 1, "last": 2, "settings": {"max_norm": 1.0, "warmup_steps": steps}} for steps in (1, 2)]
    one = write(tmp_path / "a", [6.0, 5.5], legs=legs[:1], export={"fingerprint": "q3:aa"})
    other = write(tmp_path / "b", [6.0, 5.5], legs=legs, export={"fingerprint": "q3:bb"})
    same = write(tmp_path / "c", [6.0, 5.5], legs=legs[:1], export={"fingerprint": "q3:aa"})
    said = run(one, other).stdout
    assert "exports: different models" in said
    assert "q3:aa" in said
    assert "q3:bb" in said
    document = json.loads(run(one, other, "--json").stdout)
    assert document["exports"] == ["q3:aa", "q3:bb"]
    assert document["settings"] == {"warmup_steps": [1, 2]}
    assert "exports: the same model" in run(one, same).stdout
    assert "no export" in run(one, write(tmp_path / "d", [6.0])).stdout


def test_a_loss_that_is_no_number_differs(tmp_path: Path) -> None:
    assert (
        "part at step 2"
        in run(write(tmp_path / "a", [6.0, float("nan")]), write(tmp_path / "b", [6.0, 5.0]), code=3).stdout
    )


def test_both_are_drawn(tmp_path: Path) -> None:
    one, other = write(tmp_path / "a", [6.0, 5.5]), write(tmp_path / "b", [6.0, 5.5])
    run(one, other, "--picture", tmp_path / "both.png")
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    one = write(tmp_path / "a", [6.0])
    (tmp_path / "other.json").write_text("[]")
    assert "is not the record of a run" in run(one, tmp_path / "other.json", code=1).stderr
    for absent in ("absent", "absent.json"):
        assert f"{tmp_path / absent} does not exist" in run(one, tmp_path / absent, code=1).stderr
    (tmp_path / "empty").mkdir()
    assert f"{tmp_path / 'empty'} has no run.json: it is no run of train" in run(one, tmp_path / "empty", code=1).stderr
    assert "Errno" not in run(one, tmp_path / "absent", code=1).stderr
    assert "no step in common" in run(one, write(tmp_path / "b", []), code=1).stderr
    run(one, one, code=2)


@pytest.mark.parametrize("content", ['{"steps": []}', '{"steps": {"1": 5}}', '{"steps": {"x": {"loss": 1}}}'])
def test_a_broken_record_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text(content)
    assert "record of a run" in run(write(tmp_path / "a", [6.0]), tmp_path / "broken.json", code=1).stderr


def test_what_a_leg_changed_is_a_setting_that_differs(run: Run, tmp_path: Path) -> None:
    for name, legs in (
        ("in-two", [{"first": 1, "last": 3, "settings": {"schedule_steps": 3}}]),
        ("at-once", []),
    ):
        last = {"first": len(legs) * 3 + 1, "last": 5, "settings": {"schedule_steps": 5}}
        if legs:
            last["changed"] = {"schedule_steps": [3, 5]}
        steps = {str(step): {"loss": 2.0 + (step > 3 and bool(legs)), "grad_norm": 1.0} for step in range(1, 6)}
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({"legs": [*legs, last], "steps": steps}))
    told = json.loads(run("runs", "in-two", "at-once", "--json", code=3).stdout)
    assert told["first_difference"] == 4
    assert told["settings"] == {"schedule_steps, at step 4": ["3 -> 5", None]}
