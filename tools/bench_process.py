"""One timed process: wall, CPU and peak memory of a command and of all it starts, with its inputs in the page cache.

A process's peak memory, as the kernel reports it, is at least that of whoever started it (Linux counts what it held
before ``exec``). So every command is started by a bare Python of some 10 MB, which is the least that can be measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

_LAUNCHER = """
import json, os, sys, time
log, *command = sys.argv[1:]
actions = [(os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), (os.POSIX_SPAWN_DUP2, 1, 2)]
begun = time.perf_counter()
process = os.posix_spawnp(command[0], command, os.environ, file_actions=actions)
_, status, usage = os.wait4(process, 0)
wall = time.perf_counter() - begun
print(json.dumps([os.waitstatus_to_exitcode(status), wall, usage.ru_utime, usage.ru_stime, usage.ru_maxrss]))
"""

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
_BLOCK = 1 << 20


class Usage(NamedTuple):
    """What a command took. ``system`` includes the kernel's copying of pages, not its writing to the disk."""

    wall: float
    """Seconds."""
    user: float
    """CPU seconds outside the kernel."""
    system: float
    """CPU seconds inside the kernel."""
    peak: int
    """Peak resident bytes of the largest process."""
    others: float
    """CPUs that the rest of the machine kept busy meanwhile; 0 where that is not known."""


class CommandFailed(Exception):
    """A timed command did not exit with 0; the message is the end of what it wrote."""


def measure(command: Sequence[str], log: Path, *, first_on_path: Path | None = None) -> Usage:
    """Run ``command``, its output to the file ``log``; ``first_on_path`` is where its Python looks first for modules.

    Raises:
        CommandFailed: it exited with something else than 0.
    """
    environment = dict(os.environ)
    if first_on_path is not None:
        known = [entry for entry in (environment.get("PYTHONPATH"),) if entry]
        environment["PYTHONPATH"] = os.pathsep.join([str(first_on_path), *known])
    before = _busy_seconds()
    launched = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(log), *command],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    code, wall, user, system, peak = json.loads(launched.stdout)
    if code != 0:
        raise CommandFailed(f"exit code {code}: {_last_words(log)}")
    others = max(0.0, (_busy_seconds() - before - user - system) / max(wall, 1e-9))
    return Usage(wall, user, system, peak * _RSS_UNIT, others)


def warm(folders: Iterable[Path]) -> None:
    """Read every file of ``folders``, so that they lie in the page cache as far as it is large enough."""
    block = bytearray(_BLOCK)
    for path in (path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(block):
                pass


def size_of(folder: Path) -> int:
    """Bytes of all files in ``folder``."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def available_memory() -> int | None:
    """Bytes that can be had without swapping; ``None`` where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _busy_seconds() -> float:
    """CPU seconds that the whole machine has spent busy since it started; 0 where the system does not say."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, file.readline().split()[1:])
    except OSError:
        return 0.0
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it wrote nothing"
