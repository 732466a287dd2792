"""The data files of a repository on the hub, for a folder that is mounted in their place."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Container, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from qwen3conv.converters.errors import TransferError
from qwen3conv.converters.remote import RemoteFile

from .hub_client import Announce
from .hub_download import fetch_file
from .hub_id import HubId
from .hub_ranges import Blocks, read_header, read_range

_AT_ONCE = 8
"""Requests for headers under way at a time."""


class HubFiles:
    """The data files of a repository at one commit: ``converters.remote.Remote`` for a mounted folder."""

    def __init__(
        self,
        asked: HubId,
        commit: str,
        files: Mapping[str, RemoteFile],
        folder: Path,
        *,
        fetched: Path | None = None,
        keeps: bool = False,
        announce: Announce = lambda message: None,
    ) -> None:
        self.label = f"{asked.repository}@{commit}:{asked.below}"
        self.files = files
        self.fetches = fetched is not None or keeps
        self._asked, self._commit, self._folder = asked, commit, folder
        self._fetched, self._announce = fetched, announce
        self._blocks = Blocks(asked, commit)
        self.advance: Callable[[int], None] = lambda count: None
        """Called with the bytes that came, often."""
        self._given_up = threading.Event()
        self._cached: set[str] = set()
        self._here: set[str] = set()
        self._locks = {name: threading.Lock() for name in files}

    def link_cached(self, name: str) -> bool:
        """Take the file from the hub's cache, if it is there."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self._asked.repository, self._asked.below + name, revision=self._commit)
        if not isinstance(found, str) or os.path.getsize(found) != self.files[name].size:
            return False
        self._link(name, Path(found))
        self._cached.add(name)
        return True

    def fetch(self, name: str) -> None:
        """Return once the whole file lies in the folder, with the hash that the hub promises."""
        with self._locks[name]:
            if name in self._cached or name in self._here:
                return
            self._came(0)
            if not sys.stderr.isatty():  # there the bar moves
                self._announce(f"fetching {name} ({self.files[name].size:,} bytes)")
            path = fetch_file(self._asked, self._commit, name, self.files[name], self._fetched, came=self._came)
            self._check_header(name, path)
            self._link(name, path)
            self._here.add(name)

    def release(self, name: str) -> None:
        """Remove a fetched file that is not to be kept."""
        with self._locks[name]:
            if name in self._here and self._fetched is not None:
                (self._folder / name).unlink()
                (self._fetched / (self._asked.below + name)).unlink()
                self._here.remove(name)

    def read(self, name: str, offset: int, count: int) -> bytes:
        """Few bytes of a file that is not fetched."""
        if name in self._cached or name in self._here:
            with open(self._folder / name, "rb") as file:
                file.seek(offset)
                return file.read(count)
        return self._blocks.read(name, offset, count)

    def disk_bytes(self, workers: int) -> int:
        """Bytes of the largest files that are still to come, one for each worker."""
        return sum(sorted(self._missing(), reverse=True)[:workers]) if self._fetched is not None else 0

    def bytes_to_fetch(self, wanted: Iterable[str]) -> int:
        """Bytes of those of the files that are still to come."""
        return sum(self._missing(set(wanted)))

    def give_up(self) -> None:
        """Let downloads under way end with the next bytes that come."""
        self._given_up.set()

    def _missing(self, wanted: Container[str] | None = None) -> list[int]:
        return [
            file.size
            for name, file in self.files.items()
            if name not in self._cached and name not in self._here and (wanted is None or name in wanted)
        ]

    def write_headers(self, names: list[str]) -> None:
        """Have the headers of these safetensors files in the folder, and nothing behind them."""

        def write(name: str) -> None:
            header = read_header(partial(read_range, self._asked, self._commit, name), self.files[name].size)
            (self._folder / name).write_bytes(header)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for _ in pool.map(write, names):
                pass

    def _check_header(self, name: str, path: Path) -> None:
        """Refuse a file that begins otherwise than the header by which everything was planned."""
        known = (self._folder / name).read_bytes()
        with open(path, "rb") as file:
            if file.read(len(known)) != known:
                raise TransferError(f"{name} of {self._asked} has another header than the hub gave before; try again")

    def _came(self, count: int) -> None:
        if self._given_up.is_set():
            raise TransferError(f"{self._asked}: stopped while it was being fetched")
        self.advance(count)

    def _link(self, name: str, target: Path) -> None:
        path = self._folder / name
        path.unlink(missing_ok=True)
        path.symlink_to(os.path.abspath(target))
