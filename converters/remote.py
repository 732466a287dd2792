"""Checkpoints that are elsewhere: a folder here with what is small, and somebody who reads or fetches the rest.

In a mounted folder data files are cut off behind their headers, so no program takes them for weights. To the readers of
headers they have the size that they have there; ``files.Files`` has whole ones fetched before it opens them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol


class RemoteFile(NamedTuple):
    """A data file as the place it lies in tells of it."""

    size: int
    """Bytes."""
    id: str
    """A hash of its content."""


class Remote(Protocol):
    """The place that a mounted folder stands for. Its methods are called from many threads."""

    @property
    def label(self) -> str:
        """Which place and which state of it; the same again only for the same content."""

    @property
    def files(self) -> Mapping[str, RemoteFile]:
        """Data files by name relative to the folder."""

    @property
    def fetches(self) -> bool:
        """Whether files are fetched whole; if not, ``read`` serves what little is asked of them."""

    def fetch(self, name: str) -> None:
        """Return once the whole file lies in the folder.

        Raises:
            TransferError: it cannot be fetched, or is not what it should be.
        """

    def release(self, name: str) -> None:
        """The file is not needed any more."""

    def read(self, name: str, offset: int, count: int) -> bytes:
        """``count`` bytes at ``offset``, fewer where the file ends. Raises as ``fetch`` does."""

    def disk_bytes(self, workers: int) -> int:
        """The most that fetched files take at a time."""

    def give_up(self) -> None:
        """Let fetches that are under way fail soon: the work is stopped."""


_MOUNTED: dict[str, Remote] = {}


@contextmanager
def mounted(folder: Path, remote: Remote) -> Iterator[Path]:
    """Have ``folder`` stand for ``remote`` until the block ends."""
    key = os.path.abspath(folder)
    _MOUNTED[key] = remote
    try:
        yield folder
    finally:
        del _MOUNTED[key]


def remote_of(folder: Path) -> Remote | None:
    """What ``folder`` stands for; ``None`` for one that is what it is."""
    return _MOUNTED.get(os.path.abspath(folder)) if _MOUNTED else None


def has_headers_only(folder: Path) -> bool:
    """Whether the bytes of tensors in ``folder`` are elsewhere and not to be fetched."""
    remote = remote_of(folder)
    return remote is not None and not remote.fetches


def remote_size(path: Path) -> int | None:
    """Bytes of the data file that ``path`` stands for; ``None`` for one that is here."""
    remote = remote_of(path.parent)
    file = remote.files.get(path.name) if remote is not None else None
    return None if file is None else file.size
