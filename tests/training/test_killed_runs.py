"""A run that is killed goes on from its last whole checkpoint as if nothing had been, on another mesh too."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import environment
from tests.models import even_texts, saved_model
from tests.training.test_native import run, steps_of, write_texts

STEPS = 8
WHOLE = ("--save-every", "2", "--no-export", "--lr_scheduler.total_steps", str(STEPS))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory, "dense")


@pytest.fixture(scope="module")
def data(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("data") / "text.jsonl", even_texts(dense, 64, 24))


def words(dense: Path, data: Path, output: Path, *flags: str) -> list[str]:
    base = ["train", "--from", str(dense), "--data", str(data), "--output", str(output), "--recipe", "tiny"]
    return [*base, "--device", "cpu", "--steps", str(STEPS), *WHOLE, *flags]


def kill_when(ready: Callable[[Path], bool], dense: Path, data: Path, output: Path, *flags: str) -> None:
    """Start a run, and kill it and all its ranks as soon as its folder is ``ready``."""
    command = [sys.executable, "-m", "qwen3conv", *words(dense, data, output, *flags)]
    process = subprocess.Popen(
        command,
        env=environment(OMP_NUM_THREADS="1"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + 120
        while not ready(output):
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < until
            time.sleep(0.001)
    finally:
        for pid in children(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def children(pid: int) -> list[int]:
    """``pid`` and every process that descends from it, which torchrun puts into sessions of their own."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = [tuple(map(int, line.split())) for line in listed.splitlines()]
    found = [pid]
    for one in found:
        found += [child for child, parent in parents if parent == one]
    return found[::-1]


def between_steps(folder: Path) -> bool:
    """Step 2 is saved, and a later one was made."""
    return (folder / "checkpoint" / "step-2" / ".metadata").is_file() and "3" in (folder / "run.json").read_text()


def in_a_save(folder: Path) -> bool:
    """The second checkpoint is begun and has no ``.metadata`` yet."""
    step = folder / "checkpoint" / "step-4"
    return step.is_dir() and not (step / ".metadata").exists()


@pytest.mark.slow
@pytest.mark.parametrize("ready", [between_steps, in_a_save])
@pytest.mark.parametrize("flags", [(), ("--tp", "2")], ids=["alone", "tp2"])
def test_the_same_command_goes_on_as_if_nothing_had_been(
    ready: Callable[[Path], bool], flags: tuple[str, ...], dense: Path, data: Path, tmp_path: Path
) -> None:
    run(*words(dense, data, tmp_path / "whole", *flags))
    kill_when(ready, dense, data, tmp_path / "killed", *flags)
    shutil.copytree(tmp_path / "killed", tmp_path / "moved")
    run(*words(dense, data, tmp_path / "killed", *flags))
    assert steps_of(tmp_path / "killed") == steps_of(tmp_path / "whole")
    run(*words(dense, data, tmp_path / "moved", *([] if flags else ["--tp", "2"])))
    for step, found in steps_of(tmp_path / "whole").items():
        assert steps_of(tmp_path / "moved")[step] == pytest.approx(found, rel=1e-4), step


@pytest.mark.slow
def test_a_killed_run_on_tensor_parallel_ranks_goes_on_on_fsdp_ranks_in_the_same_rows(
    dense: Path, tmp_path: Path
) -> None:
    """TP 2 to FSDP 2: same step, same place in the chats, same losses as the run that nothing befell."""
    rows = [{"prompt": f"{text[:40]} {number}", "completion": text[40:120]} for number, text in enumerate(texts(dense))]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ("--recipe", "tiny_sft", "--no-packing", "--seq-len", "128", "--batch-size", "2")
    run(*words(dense, data, tmp_path / "whole", *common))
    kill_when(between_steps, dense, data, tmp_path / "killed", *common, "--tp", "2")
    run(*words(dense, data, tmp_path / "killed", *common, "--fsdp", "2", "--local-batch-size", "1"))
    assert list(steps_of(tmp_path / "killed")) == [str(step) for step in range(1, STEPS + 1)]
    for step, found in steps_of(tmp_path / "whole").items():
        assert steps_of(tmp_path / "killed")[step] == pytest.approx(found, rel=1e-4), step
    first, second = json.loads((tmp_path / "killed" / "run.json").read_text())["legs"]
    assert (first["degrees"]["tp"], second["degrees"]["tp"], second["degrees"]["fsdp"]) == (2, 1, 2)
    assert second["first"] == first["last"] + 1
    assert second["changed"] == {}


def texts(dense: Path) -> list[str]:
    return even_texts(dense, 64, 24)
