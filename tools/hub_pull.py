"""A repository of the hub as a folder here: whole and checked, or absent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

from qwen3conv.converters.errors import DestinationError, SourceError
from qwen3conv.converters.manifest import ASSETS
from qwen3conv.converters.stores.sidecars import TEMPLATES
from qwen3conv.converters.stores.staging import check_destination, check_space

from .hub import DCP, SIDECARS, WEIGHTS, refuse_without_weights
from .hub_client import Announce, HubFile, Listing, list_files, quiet_off_terminals
from .hub_download import fetch_file
from .hub_id import HubId
from .hub_remote import download_path, make_room

_AT_ONCE = 4


def pull(
    asked: HubId,
    destination: Path,
    *,
    announce: Announce,
    arrange: Callable[[Path, Listing], None] = lambda folder, listing: None,
) -> Listing:
    """Fetch a model or a training state to ``destination``; what was fetched by an earlier try is not fetched again.

    ``arrange`` may look at the folder, and change it, before it takes its name.

    Raises:
        SourceError: it is not there, is no checkpoint, or may not be read.
        TransferError: it stopped coming, or a file is not what the hub says; what came is kept for the next try.
        DestinationError: ``destination`` cannot be written.
    """
    check_destination(destination, overwrite=False, resume=False)
    listing = list_files(asked, str(asked), announce=announce)
    wanted = _wanted(asked, listing)
    if DCP[0] not in wanted:
        refuse_without_weights(asked, any(name.endswith(".safetensors") for name in wanted))
    room = download_path(destination)
    make_room(room, resume=True)
    folder = room / "fetched"
    kept = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    check_space(destination.parent, sum(file.size for file in wanted.values()) - kept)
    announce(f"fetching {len(wanted)} files of {asked} ({sum(file.size for file in wanted.values()):,} bytes)")
    quiet_off_terminals()
    _fetch(asked, listing, wanted, folder)
    made = folder / asked.below if asked.subfolder else folder
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    _remove_strangers(made, set(wanted))
    try:
        arrange(made, listing)
        os.rename(made, destination)
    except OSError as error:
        raise DestinationError(f"{destination} cannot be written: {error.strerror}") from error
    shutil.rmtree(room, ignore_errors=True)
    return listing


def _wanted(asked: HubId, listing: Listing) -> dict[str, HubFile]:
    """The files of a model or a state, by name below the folder asked for. No code, and no pickle but DCP's."""
    found = {}
    for path, file in listing.files.items():
        name = path.removeprefix(asked.below)
        folder, _, last = name.rpartition("/")
        is_here = path.startswith(asked.below) and folder in ("", ASSETS, TEMPLATES, f"{ASSETS}/{TEMPLATES}")
        is_plain = name.isprintable() and "\\" not in name and last not in ("", ".", "..")
        if is_here and is_plain and any(fnmatch(last, pattern) for pattern in (*SIDECARS, *WEIGHTS, *DCP)):
            found[name] = file
    if not found:
        raise SourceError(f"{asked} on the hub holds no model and no training state")
    return found


def _fetch(asked: HubId, listing: Listing, wanted: Mapping[str, HubFile], folder: Path) -> None:
    def fetch(name: str) -> None:
        fetch_file(asked, listing.commit, name, wanted[name], folder)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for _ in pool.map(fetch, wanted):
            pass


def _remove_strangers(folder: Path, names: set[str]) -> None:
    """Remove what an earlier try of another commit has fetched."""
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in names:
            path.unlink()
