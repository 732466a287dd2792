"""Ranks of a run: started through torchrun, watched to their end, and never left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, NoReturn

from qwen3conv.converters.errors import ConversionError
from qwen3conv.training.launch import ERRORS, JOINS, Run
from qwen3conv.training.run_lock import RunLock

_POLL_SECONDS = 0.5
_ROOM = ".torchrun"
"""In the folder of a run, while it trains: torchrun's files, and the reason that a rank leaves when it fails."""


def launch(run: Run, lock: RunLock, meanwhile: Callable[[], None] = lambda: None, *, log: int | IO[bytes] = 2) -> None:
    """Run ``torchrun`` to its end, calling ``meanwhile`` now and then; its output goes to ``log``, stderr by default.

    ``lock`` is shared with rank 0. However this process ends, torchrun and its ranks do too.

    Raises:
        ConversionError: it ended with an error; the message has the reason that a rank left.
        KeyboardInterrupt: Ctrl-C, once the ranks have ended; ``SystemExit`` in the same way for SIGTERM.
    """
    room = run.folder / _ROOM
    shutil.rmtree(room, ignore_errors=True)  # of a run that was killed
    room.mkdir(parents=True)
    errors = room / "errors"
    lock.share()
    interpreter, _, _, *words = run.command(log_dir=room)
    command = [interpreter, "-m", "qwen3conv.training.torchrun", str(os.getpid()), *words]
    variables = {**os.environ, ERRORS: str(errors), JOINS: "1"}
    try:
        with _ending_in_order(run):
            # torchtitan's log is no result, so it goes to stderr
            process = subprocess.Popen(command, stdout=log, stderr=log, env=variables)
            try:
                while process.poll() is None:
                    time.sleep(_POLL_SECONDS)
                    meanwhile()
            except BaseException:
                process.terminate()
                process.wait()
                raise
        if process.returncode:
            said = errors.read_text(encoding="utf-8") if errors.is_file() else "what it said is above"
            raise ConversionError(f"training ended with code {process.returncode}: {said.strip()}\n{goes_on(run)}")
    finally:
        shutil.rmtree(room, ignore_errors=True)


def goes_on(run: Run) -> str:
    """From where the same command goes on."""
    checkpoints = run.checkpoints()
    if not checkpoints:
        return "Nothing was saved: the same command begins anew"
    step, folder = checkpoints[-1]
    return f"Step {step} is saved in {folder}: the same command goes on from there"


@contextlib.contextmanager
def _ending_in_order(run: Run) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the ranks first, and say how the run goes on."""

    def terminate(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    # handlers belong to the main thread; elsewhere the ranks end when this process has
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, terminate) if is_main else None
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted. {goes_on(run)}") from None
    except SystemExit:
        sys.stderr.write(f"Terminated. {goes_on(run)}\n")
        raise
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)
