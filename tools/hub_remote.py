"""A repository on the hub as a mounted folder: config and headers are here, weights come when they are read.

``headers_of`` never fetches weights: it answers ``inspect`` and ``plan``. ``streamed`` fetches each file when the
conversion comes to it, checks it against the hub's sha256, and removes it after its last use; what came is kept when
the hub stops answering or the process is killed, for ``--resume``.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from qwen3conv import __version__
from qwen3conv.converters.errors import DestinationError, SourceError, TransferError, enumerate_problems
from qwen3conv.converters.manifest import ASSETS
from qwen3conv.converters.remote import RemoteFile, mounted
from qwen3conv.converters.stores.safetensors import INDEX

from .hub import (
    DCP,
    SIDECARS,
    WEIGHTS,
    Source,
    download,
    find_here,
    origin_of,
    refuse_without_config,
    refuse_without_weights,
    resolve_source,
)
from .hub_client import (
    LIBRARY,
    Announce,
    HubFile,
    Listing,
    UnreachableError,
    explained,
    is_offline,
    list_files,
    quiet_off_terminals,
)
from .hub_download import fetch_file
from .hub_id import HubId, parse_hub_id
from .hub_ranges import Blocks, read_header, read_range

MARK = "qwen3conv.download"
"""File in a folder of downloads that says whose it is."""

_AT_ONCE = 8
"""Requests for headers under way at a time."""

_BLOCK = 1 << 20


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
        if name in self._cached:
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

    def _came(self, count: int) -> None:
        if self._given_up.is_set():
            raise TransferError(f"{self._asked}: stopped while it was being fetched")
        self.advance(count)

    def _link(self, name: str, target: Path) -> None:
        path = self._folder / name
        path.unlink(missing_ok=True)
        path.symlink_to(os.path.abspath(target))


@contextmanager
def headers_of(text: str, *, announce: Announce = lambda message: None) -> Iterator[Source]:
    """The folder that ``text`` names; for a hub id, one of headers for the time of the block.

    Raises as ``hub.resolve_source`` does.
    """
    asked, listing, sidecars = _ask(text, announce)
    if listing is None:
        yield sidecars
        return
    with tempfile.TemporaryDirectory(prefix="qwen3conv-") as room:
        folder = Path(room) / asked.repository.replace("/", "--")
        with mounted(folder, _fill(folder, asked, listing, sidecars.path, announce)):
            yield Source(folder, origin_of(asked, listing.commit))


@contextmanager
def streamed(
    text: str, destination: Path, *, resume: bool, keeps: bool = False, announce: Announce = lambda message: None
) -> Iterator[Source]:
    """The same for a conversion to ``destination``: each weight file comes when it is read, and goes after that.

    ``keeps`` leaves them in the hub's cache. Otherwise they are for a while in ``DST.download``, which an interrupt or
    a failing hub leaves there for ``resume``.

    Raises:
        DestinationError: something else has that name.
    """
    asked, listing, sidecars = _ask(text, announce)
    if listing is None:
        yield sidecars
        return
    room = download_path(destination)
    make_room(room, resume=resume)
    quiet_off_terminals()
    try:
        folder = room / asked.repository.replace("/", "--")
        shutil.rmtree(folder, ignore_errors=True)
        fetched = None if keeps else room / "fetched"
        remote = _fill(folder, asked, listing, sidecars.path, announce, fetched=fetched, keeps=keeps)
        with mounted(folder, remote):
            yield Source(folder, origin_of(asked, listing.commit))
    except (TransferError, KeyboardInterrupt):
        raise
    except BaseException:
        shutil.rmtree(room, ignore_errors=True)
        raise
    shutil.rmtree(room, ignore_errors=True)


def download_path(destination: Path) -> Path:
    """Where files for ``destination`` are fetched."""
    return destination.with_name(destination.name + ".download")


def _ask(text: str, announce: Announce) -> tuple[HubId, Listing | None, Source]:
    """What lies on the hub, and its small files; or with no listing what is here, be it in the hub's cache."""
    if (here := find_here(text)) is not None:
        return HubId(""), None, here
    asked = parse_hub_id(text)
    if is_offline():
        return asked, None, resolve_source(text, announce=announce)
    announce(f"{text}: not a folder here, asking the hub")
    try:
        listing = list_files(asked, text, announce=announce)
    except UnreachableError:
        return asked, None, resolve_source(text)
    names = _names(asked, listing)
    if asked.subfolder and not names:
        raise SourceError(
            f"{asked.repository} on the hub has no files of a model in a folder {asked.subfolder}; check its spelling"
        )
    if DCP[0] not in names:
        refuse_without_weights(asked, any(name.endswith(".safetensors") for name in names))
        has_assets = f"{asked.below}{ASSETS}/config.json" in listing.files
        refuse_without_config(asked, has_assets or "config.json" in names)
    return asked, listing, download(text, asked, SIDECARS, announce=announce, listing=listing)


def _names(asked: HubId, listing: Listing) -> dict[str, HubFile]:
    """The files of the folder asked for, without those in folders below. Names are hostile data."""
    found = {
        path.removeprefix(asked.below): file for path, file in listing.files.items() if path.startswith(asked.below)
    }
    return {name: file for name, file in found.items() if "/" not in name and "\\" not in name and name.isprintable()}


def _fill(
    folder: Path,
    asked: HubId,
    listing: Listing,
    sidecars: Path,
    announce: Announce,
    *,
    fetched: Path | None = None,
    keeps: bool = False,
) -> HubFiles:
    """Make the folder to mount: links to what is in the hub's cache, headers of the rest."""
    names = _names(asked, listing)
    is_dcp = DCP[0] in names
    ending = DCP[1][1:] if is_dcp else WEIGHTS[0][1:]
    data = {name: RemoteFile(file.size, file.id) for name, file in names.items() if name.endswith(ending)}
    meant = None if is_dcp else _meant(asked, sidecars / INDEX, data)
    remote = HubFiles(asked, listing.commit, data, folder, fetched=fetched, keeps=keeps, announce=announce)
    folder.mkdir(parents=True)
    for path in sidecars.iterdir():
        if path.name not in data:
            (folder / path.name).symlink_to(os.path.abspath(path))
    missing = [name for name in data if not remote.link_cached(name)]
    for name in missing:
        (folder / name).touch()
    if is_dcp:
        _fetch_metadata(folder, asked, listing)
    else:
        remote.write_headers([name for name in missing if meant is None or name in meant])
    return remote


def _meant(asked: HubId, index: Path, data: Mapping[str, RemoteFile]) -> set[str] | None:
    """The files that the index names; ``None`` without one, or where it is for the reader of indices to refuse."""
    try:
        named = set(json.loads(index.read_bytes())["weight_map"].values())
        absent = sorted(str(name) for name in named if name not in data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if absent:
        raise SourceError(
            enumerate_problems(
                f"{asked} on the hub is half uploaded: of {len(named)} files that its index names, {len(absent)} are "
                "not there; wait until its owner has sent them, or name another revision:",
                absent,
                5,
            )
        )
    return {str(name) for name in named}


def _fetch_metadata(folder: Path, asked: HubId, listing: Listing) -> None:
    from huggingface_hub import hf_hub_download

    with explained(asked, str(asked)):
        found = hf_hub_download(
            asked.repository,
            asked.below + DCP[0],
            revision=listing.commit,
            library_name=LIBRARY,
            library_version=__version__,
        )
    path = folder / DCP[0]
    path.unlink(missing_ok=True)
    path.symlink_to(found)


def make_room(room: Path, *, resume: bool) -> None:
    """``DST.download``, empty unless an earlier try is resumed."""
    try:
        if os.path.lexists(room):
            if not (room / MARK).is_file():
                raise DestinationError(f"downloads would go to {room}, which is something else; move it away")
            if not resume:
                shutil.rmtree(room)
        room.mkdir(exist_ok=True)
        (room / MARK).touch()
    except OSError as error:
        raise DestinationError(f"{error.filename or room} cannot be written: {error.strerror}") from error
