"""One writer per run: what ``train`` starts ends with it, however it ends, and a second one is not let in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qwen3conv.converters.errors import DestinationError
from qwen3conv.training import run_lock
from qwen3conv.training.launch import Run
from qwen3conv.training.run_lock import LOCK, lock_run
from tests.cli.conftest import environment
from tests.models import even_texts, saved_model
from tests.training.test_killed_runs import children
from tests.training.test_native import run, train, write_texts

HOLD = "import sys; from pathlib import Path; from qwen3conv.training.run_lock import lock_run; "
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""
CHILD = """
import signal, sys, time
from qwen3conv.training import lifeline
lifeline.%s
lifeline.end_with_parent(int(sys.argv[1]), signal.SIGKILL)
print("bound", flush=True)
time.sleep(60)
"""


def until(found: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of ``tmp_path``, as a rank does that outlived its command."""
    code = HOLD + f"lock = lock_run(Path({str(tmp_path)!r}), 'rank 0'); print('held', flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, env=environment(), **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "_PATIENCE_SECONDS", 0.0)


@pytest.mark.usefixtures("impatient")
def test_a_run_has_one_writer_and_the_message_names_it(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    with pytest.raises(DestinationError, match=rf"in use: rank 0, process {holder.pid} on \S+, since .*another folder"):
        lock_run(tmp_path, "qwen3conv train")
    with pytest.raises(DestinationError, match="is in use"):
        lock_run(tmp_path, "rank 0", joins=True)  # the holder shares with nobody
    holder.kill()
    holder.wait()
    lock_run(tmp_path, "qwen3conv train").release()
    assert not list(tmp_path.iterdir())  # a folder that nothing else was written to can go


def test_a_holder_that_is_being_killed_is_waited_for(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    threading.Timer(0.5, holder.kill).start()
    lock_run(tmp_path, "qwen3conv train").release()


@pytest.mark.usefixtures("impatient")
def test_a_rank_joins_its_command_and_holds_on_when_that_is_gone(tmp_path: Path) -> None:
    command = lock_run(tmp_path, "qwen3conv train")
    with pytest.raises(DestinationError):
        lock_run(tmp_path, "rank 0", joins=True)
    command.share()
    rank = lock_run(tmp_path, "rank 0", joins=True)
    command.release()
    assert (tmp_path / LOCK).is_file()
    with pytest.raises(DestinationError, match=f"rank 0, process {os.getpid()} on"):
        lock_run(tmp_path, "qwen3conv train")
    rank.release()
    lock_run(tmp_path, "qwen3conv train").release()


@pytest.mark.parametrize("how", ["LIBC_DEATH_SIGNAL", "POLLING"])
def test_a_process_ends_with_the_one_that_started_it(how: str) -> None:
    bind = "is_linux = True" if how == "LIBC_DEATH_SIGNAL" else "is_linux = False"
    ways = {"stdout": subprocess.PIPE, "text": True, "env": environment(), "start_new_session": True}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD % bind], **ways)  # type: ignore[call-overload]
    child = int(parent.stdout.readline())
    assert parent.stdout.readline() == "bound\n"
    parent.kill()
    parent.wait()
    until(lambda: not is_alive(child), 10)


def test_ctrl_c_advises_no_option_that_the_command_lacks(
    dense: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--resume`` of train names a run on the hub, and is no flag as that of a conversion is."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("qwen3conv.tools.training_run.check_memory", interrupt)
    ended = train(dense, data, tmp_path / "run", code=130)
    assert ended.stderr.splitlines()[-1] == "Error: interrupted"


# --- for real ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory, "dense")


@pytest.fixture(scope="module")
def data(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("data") / "text.jsonl", even_texts(dense, 64, 24))


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGKILL))],
)
def test_nothing_of_a_run_outlives_its_command(number: signal.Signals, dense: Path, data: Path, tmp_path: Path) -> None:
    output, temporary = tmp_path / "run", tmp_path / "tmp"
    temporary.mkdir()
    words = ["train", "--from", dense, "--data", data, "--output", output, "--recipe", "tiny", "--device", "cpu"]
    process = subprocess.Popen(
        [sys.executable, "-m", "qwen3conv", *map(str, words), "--steps", "100000", "--save-every", "3"],
        env=environment(OMP_NUM_THREADS="1", TMPDIR=str(temporary)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until((output / "checkpoint" / "step-3" / ".metadata").is_file)
        family = children(process.pid)
        assert len(family) >= 3
        said = train(dense, data, output, code=1).stderr
        assert f"{output} is in use: qwen3conv train, process {process.pid} on" in said
        assert "rank 0, process" in said
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
        until(lambda: not any(map(is_alive, family)), 20)
    finally:
        for pid in children(process.pid):
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number
        assert "Traceback" not in stderr
        assert "the same command goes on from there" in stderr.splitlines()[-1]
        assert "--resume" not in stderr
        assert not any((output / name).exists() for name in (LOCK, ".torchrun"))
    assert not [path for path in temporary.iterdir() if path.name.startswith("qwen3conv")]
    lock_run(output, "qwen3conv train").release()
    if number == signal.SIGKILL:
        reached = Run(output, "").checkpoints()[-1][0]
        run(*words, "--steps", reached + 1, "--no-export")
