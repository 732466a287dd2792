"""A folder in memory to break things in, and the two main directions of a conversion."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from qwen3conv.converters.conversion import carry_out, prepare
from qwen3conv.converters.geometry import Geometry
from qwen3conv.converters.manifest import Manifest
from qwen3conv.converters.policies import Choices
from tests.laws.tiny import scratch, write_tiny

Run = Callable[..., subprocess.CompletedProcess[str]]

MOE = Geometry(7, 4, 1, 2, 1, 2, moe_intermediate_size=3, num_experts=2)
DENSE = Geometry(7, 4, 2, 2, 1, 2, intermediate_size=3)


def convert(
    source: Path, target: Path, to: str, *, resume: bool = False, overwrite: bool = False, **options: Any
) -> Manifest:
    """One conversion by the engine. ``options`` are ``carry_out``'s, and ``choices``."""
    choices = options.pop("choices", Choices(shard_bytes=300))
    prepared = prepare(source, target, to, choices)
    return carry_out(prepared, **{"workers": 1, "resume": resume, "overwrite": overwrite, **options})


def write_source(folder: Path, to: str, *, geometry: Geometry = MOE, tied: bool = False) -> Path:
    """A tiny checkpoint at ``folder`` to be converted to ``to``: a Hugging Face folder, or a DCP made of one."""
    if to == "titan":
        write_tiny(folder, geometry, tied=tied, shard_bytes=300)
        return folder
    hub = folder.with_name("hub")
    write_tiny(hub, geometry, tied=tied, shard_bytes=300)
    convert(hub, folder, "titan", choices=Choices(shard_bytes=6000))
    return folder


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """A file system in memory of its own at ``folder``; skips where this user may not mount."""
    folder.mkdir(exist_ok=True)
    words = ["mount", "-t", "tmpfs", *(word for option in options for word in ("-o", option)), "none", str(folder)]
    try:
        ended = subprocess.run(words, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"mount: {error}")
    if ended.returncode:
        pytest.skip(f"this user may not mount: {ended.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def as_ordinary_user() -> None:
    """For ``preexec_fn``: root keeps its name and its files, and loses what lets it pass by permissions."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        drop_from_bounding_set, may_write_all, may_read_all = 24, 1, 2
        for capability in (may_write_all, may_read_all):
            if libc.prctl(drop_from_bounding_set, capability, 0, 0, 0):
                raise OSError(ctypes.get_errno(), "prctl")


@pytest.fixture
def place() -> Iterator[Path]:
    """An empty folder, in memory where possible."""
    with scratch() as folder:
        yield folder


@pytest.fixture
def command(place: Path) -> Run:
    """The command line in a process of its own, in ``place``; an exit code other than ``code`` fails the test."""

    def run(*arguments: str | Path, code: int = 0, **popen: Any) -> subprocess.CompletedProcess[str]:
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "qwen3conv", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            **{"cwd": place, "env": {**os.environ, "HF_HUB_OFFLINE": "1"}, **popen},
        )
        assert ended.returncode == code, f"exit {ended.returncode}\n{ended.stdout}{ended.stderr}"
        return ended

    return run
