"""``doctor`` on a machine that can train, and on ones that cannot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from qwen3conv.tools import doctor
from qwen3conv.tools.cli.main import cli


def run(*words: object, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, [*map(str, words)], prog_name="qwen3conv")
    assert result.exit_code == code, result.output
    return result


def test_a_cpu_trains_and_every_check_says_what_it_found(tmp_path: Path) -> None:
    document = json.loads(run("doctor", "--device", "cpu", "--model", "0.6B", "--folder", tmp_path, "--json").stdout)
    assert document["usable"] is True
    checks = {check["name"]: check for check in document["checks"]}
    order = ["device", "python", "torch", "torchtitan", "transformers", "torch-neuronx", "nki"]
    assert list(checks) == [*order, "collective", "step", "checkpoint", "disk", "memory"]
    assert checks["device"]["found"].startswith("cpu, ")
    assert "two processes added up" in checks["collective"]["found"]
    assert checks["step"]["found"].startswith("loss ")
    assert checks["checkpoint"]["found"] == "saved and loaded, the same bits"


def test_a_model_that_no_disk_holds_fails_and_says_what_it_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 10**9})
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    disk, memory = doctor._resources("235B-A22B", tmp_path)
    assert (disk.status, memory.status) == ("failed", "warning")
    assert disk.found == "1 GB free, 5,642 GB wanted for two checkpoints of 235B-A22B"
    assert "simulate --suggest" in memory.advice


def test_a_probe_that_hangs_or_crashes_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._probe(["step", "cpu"], 0.01) == (None, "no answer in 0.01 s")
    found, said = doctor._probe(["collective", "no-such-device"], 60)
    assert found is None
    assert said
    assert "\n" not in said


def test_an_unknown_size_is_refused_before_anything_is_tried() -> None:
    assert "9B is no released model" in run("doctor", "--model", "9B", code=1).stderr
