"""A repository on the hub as a mounted folder: config and headers are here, weights come when they are read.

``headers_of`` never fetches weights: it answers ``inspect`` and ``plan``. ``streamed`` fetches each file when the
conversion comes to it, checks it against the hub's sha256, and removes it after its last use; what came is kept when
the hub stops answering or the process is killed, for ``--resume``.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

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
    Announce,
    HubFile,
    Listing,
    UnreachableError,
    is_offline,
    list_files,
    quiet_off_terminals,
)
from .hub_download import fetch_file
from .hub_files import HubFiles
from .hub_id import HubId, parse_hub_id

MARK = "qwen3conv.download"
"""File in a folder of downloads that says whose it is."""

_ROOM = "qwen3conv-"
"""How folders in ``HF_HOME`` begin that hold files for the time of a command."""


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


@contextmanager
def read_once(text: str, *, keeps: bool = False, announce: Announce = lambda message: None) -> Iterator[Source]:
    """The same for what reads every byte once and writes nothing: files come to a folder in ``HF_HOME``, and go.

    What an earlier process of these, which was killed, left there is removed.
    """
    asked, listing, sidecars = _ask(text, announce)
    if listing is None:
        yield sidecars
        return
    from huggingface_hub import constants

    quiet_off_terminals()
    home = Path(constants.HF_HOME)
    try:
        home.mkdir(parents=True, exist_ok=True)
        _remove_left(home)
        room = Path(tempfile.mkdtemp(prefix=_ROOM, dir=home))
        mark = open(room / MARK, "w")  # noqa: SIM115  # its lock says that somebody is at work
        fcntl.flock(mark, fcntl.LOCK_EX)
    except OSError as error:
        raise DestinationError(f"{error.filename or home} cannot be written: {error.strerror}") from error
    try:
        folder = room / asked.repository.replace("/", "--")
        fetched = None if keeps else room / "fetched"
        remote = _fill(folder, asked, listing, sidecars.path, announce, fetched=fetched, keeps=keeps)
        with mounted(folder, remote):
            yield Source(folder, origin_of(asked, listing.commit))
    finally:
        shutil.rmtree(room, ignore_errors=True)
        mark.close()


def _remove_left(home: Path) -> None:
    for room in home.glob(f"{_ROOM}*"):
        try:
            with open(room / MARK, "r+") as mark:
                fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(room, ignore_errors=True)
        except OSError:  # another is at work there, or has just begun
            continue


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
        place = fetch_file(asked, listing.commit, DCP[0], names[DCP[0]], None)
        (folder / DCP[0]).unlink(missing_ok=True)
        (folder / DCP[0]).symlink_to(place)
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
