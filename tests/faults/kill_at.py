"""Run one conversion again and again, stopped at its first change to the disk, its second, and so on to its last.

A process of its own, torch-free: ``python -m tests.faults.kill_at JOB`` with a JSON object (``Job``). Every attempt is
a fork of it, so a kill costs milliseconds. After each it checks what must hold, then lets the conversion go on with
``resume`` and compares. Prints the names of the calls at which it stopped; a promise that does not hold is an
``AssertionError`` that says at which call.
"""

from __future__ import annotations

import builtins
import hashlib
import io
import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from qwen3conv import __version__
from qwen3conv.converters import conversion as engine
from qwen3conv.converters import planning
from qwen3conv.converters.detection import open_checkpoint
from qwen3conv.converters.errors import ConversionError, DestinationError, SourceError
from qwen3conv.converters.policies import Choices
from qwen3conv.converters.stores import staging

_CHANGES = (
    *("pwrite", "write", "copy_file_range", "ftruncate", "fdatasync", "fsync"),
    *("mkdir", "unlink", "rmdir", "rename", "replace", "link", "symlink"),
)
_WRITES = ("pwrite", "write", "copy_file_range")
_FOR_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


Act = Callable[[int, str, tuple[Any, ...]], None]


@dataclass(frozen=True, slots=True)
class Job:
    """What to convert, in ``folder``: ``source`` is there, and ``old`` too when it is to be overwritten."""

    folder: str
    to: str
    digests: bool = True
    torn: bool = False
    """Stop inside the writes, half of each done, instead of before every call."""
    interrupt: bool = False
    """Send SIGINT to the command line, instead of SIGKILL to the engine."""
    workers: int = 1
    """With more than one, the calls come in another order each time."""
    every: int = 1
    """Take every so-many-th call only, and the last ones all."""
    only: int = 0
    """Kill at this call and no other, and leave everything as it then is; 0 is for the sweep, -1 for the names."""
    overwrite: bool = False
    exchange: bool = True
    """Whether the system can exchange two folders in one step."""
    unit_bytes: int = 100
    shard_bytes: int = 300


def main(job: Job) -> list[str]:
    """Stop at every call; return the names of the calls at which it was stopped."""
    planning.UNIT_BYTES = job.unit_bytes
    if not job.exchange:
        staging._exchange = lambda one, other: False
    root = Path(job.folder)
    source, reference, target = root / "source", root / "reference", root / "target"
    if job.only > 0:
        attempt(job, source, target, job.only)
        return []
    before = snapshot(source)
    convert(job, source, reference, resume=False, overwrite=False)
    whole = snapshot(reference, stamps=False)
    old = snapshot(root / "old", stamps=False) if job.overwrite else None
    if job.overwrite:
        shutil.copytree(root / "old", target)
    names = attempt(job, source, target, 0)
    assert snapshot(target, stamps=False) == whole
    shutil.rmtree(target)
    if job.only:
        return names
    chosen = [at for at in range(1, len(names) + 1) if at % job.every == 0 or at > len(names) - 15]
    if job.torn:
        chosen = [at for at in chosen if names[at - 1] in _WRITES]
    for at in chosen:
        if job.overwrite:
            shutil.copytree(root / "old", target)
        (name,) = attempt(job, source, target, at)
        assert job.workers > 1 or name == names[at - 1]
        try:
            check(job, source, target, whole, old)
            assert snapshot(source) == before, "the source changed"
        except AssertionError as error:
            raise AssertionError(f"killed at call {at}, {name}: {error}") from error
        shutil.rmtree(target)
    return [names[at - 1] for at in chosen]


def check(job: Job, source: Path, target: Path, whole: dict[str, Any], old: dict[str, Any] | None) -> None:
    """What must hold after a kill, and after going on."""
    partial = staging.partial_path(target)
    if partial.is_dir():
        for path in (partial, *(p for p in partial.rglob("*") if p.is_dir())):
            try:
                open_checkpoint(path)
            except SourceError:
                continue
            raise AssertionError(f"{path} was taken for a checkpoint")
        assert {p.name for p in partial.iterdir()} <= {staging.JOURNAL, "output", "replaced"}
    if os.path.lexists(target):
        found = snapshot(target, stamps=False)
        assert found in (whole, old), "the destination is neither the old nor the whole new output"
        if found == whole:
            shutil.rmtree(partial, ignore_errors=True)
            return
    else:
        assert old is None or not job.exchange, "the old output is gone, the new one is not there"
    if os.path.lexists(partial) and not job.overwrite:
        said = ""
        try:
            convert(job, source, target, resume=False, overwrite=False)
        except DestinationError as error:
            said = str(error)
        assert "--resume" in said, f"without --resume: {said or 'written over'}"
        assert "--overwrite" in said, said
    convert(job, source, target, resume=True, overwrite=job.overwrite)
    assert snapshot(target, stamps=False) == whole, "the resumed output differs from an uninterrupted one"
    assert not os.path.lexists(partial), "the partial folder is still there"


def convert(job: Job, source: Path, target: Path, *, resume: bool, overwrite: bool) -> None:
    """The conversion, as the command line would do it."""
    staging.check_destination(target, overwrite=overwrite, resume=resume)
    prepared = engine.prepare(source, target, job.to, Choices(shard_bytes=job.shard_bytes))
    tool = f"qwen3conv {__version__}"
    engine.carry_out(prepared, workers=job.workers, digests=job.digests, resume=resume, overwrite=overwrite, tool=tool)


def attempt(job: Job, source: Path, target: Path, at: int) -> list[str]:
    """Convert in a fork that dies at its ``at``-th change to the disk; that call's name. With 0, all calls' names."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if job.interrupt:
                type_command(job, source, target, lambda: arm(at, writing, torn=False, number=signal.SIGINT))
            arm(at, writing, torn=job.torn, number=signal.SIGKILL)
            convert(job, source, target, resume=False, overwrite=job.overwrite)
            os._exit(0)
        except ConversionError as error:
            os.write(2, f"{error}\n".encode())
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as pipe:
        names = pipe.read().decode().split()
    _, status = os.waitpid(child, 0)
    expected = 0 if not at else 130 if job.interrupt else -signal.SIGKILL
    assert os.waitstatus_to_exitcode(status) == expected, f"status {status}"
    return names


def type_command(job: Job, source: Path, target: Path, ready: Callable[[], None]) -> None:
    """The conversion as the command line does it, in a forked process, which ends here."""
    from qwen3conv.tools.cli.main import main as command

    said = Path(job.folder) / "said"
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    flags = ["--shard-size", str(job.shard_bytes), "--workers", "1", *(["--overwrite"] if job.overwrite else [])]
    ready()
    try:
        command(["convert", str(source), str(target), "--to", job.to, *flags])
    except SystemExit as error:
        sys.stderr.flush()
        lines = said.read_text().splitlines()
        words = (
            f" when {target} was whole already"
            if target.exists() and not job.overwrite
            else "; run again with --resume"
        )
        told = lines[-1:] == [f"Error: interrupted{words}"] and "Traceback" not in said.read_text()
        os._exit(error.code if told or error.code == 0 else 1)  # type: ignore[arg-type]


def arm(at: int, report: int, *, torn: bool, number: int) -> None:
    """Have this process send itself a signal at its ``at``-th change to the disk, and ``report`` the call's name."""
    real_write, real_pwrite, real_copy = os.write, os.pwrite, getattr(os, "copy_file_range", None)

    def act(count: int, name: str, args: tuple[Any, ...]) -> None:
        if at and count != at:
            return
        if torn and name == "pwrite":
            real_pwrite(args[0], memoryview(args[1])[: len(args[1]) // 2], args[2])
        elif torn and name == "write":
            real_write(args[0], memoryview(args[1])[: len(args[1]) // 2])
        elif torn and real_copy and name == "copy_file_range":
            source, written, size, *offsets = args
            real_copy(source, written, size // 2, *offsets)
        real_write(report, f"{name}\n".encode())
        if at:
            os.kill(os.getpid(), number)

    watch_changes(act, setattr)


def watch_changes(act: Act, patch: Callable[[Any, str, Any], None]) -> None:
    """Have ``act`` called before every call that changes the disk, with its number, its name and its arguments."""
    numbers = itertools.count(1)

    def watch(module: Any, name: str, counts: Callable[..., bool] = lambda *args, **named: True) -> None:
        real = getattr(module, name)

        def call(*args: Any, **named: Any) -> Any:
            if counts(*args, **named):
                act(next(numbers), name, args)
            return real(*args, **named)

        patch(module, name, call)

    for name in filter(partial(hasattr, os), _CHANGES):
        watch(os, name)
    watch(os, "open", lambda path, flags, *rest, **named: bool(flags & _FOR_WRITING))
    opened = io.open

    def open_file(file: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
        if set(mode) & set("wxa+"):
            act(next(numbers), "open", (file,))
        return opened(file, mode, *args, **named)

    patch(io, "open", open_file)
    patch(builtins, "open", open_file)
    watch(staging, "_exchange")


def snapshot(folder: Path, *, stamps: bool = True) -> dict[str, Any]:
    """Digest of every file below ``folder``; with ``stamps`` the times and modes too, of folders as well."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        stamp = (status.st_mtime_ns, status.st_mode) if stamps else ()
        found[str(path.relative_to(folder))] = (content, *stamp)
    return found


if __name__ == "__main__":
    print(json.dumps(main(Job(**json.loads(sys.argv[1])))))
