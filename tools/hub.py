"""A checkpoint that a user names: a folder here, or a repository on the Hugging Face hub, which is downloaded.

huggingface_hub does the work, with its cache and its own settings (``HF_HOME``, ``HF_TOKEN``, ``HF_HUB_OFFLINE`` ...).
Safetensors, DCP and the text files beside them are fetched; other pickles, GGUF and code never are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from qwen3conv import __version__
from qwen3conv.converters.errors import SourceError, TransferError
from qwen3conv.converters.manifest import ASSETS

from .hub_client import (
    LIBRARY,
    Announce,
    Listing,
    MissingHubError,
    explained,
    is_offline,
    library,
    list_files,
    quiet_off_terminals,
)
from .hub_id import HubId, parse_hub_id

__all__ = ["MissingHubError", "Source", "resolve_adapter", "resolve_like", "resolve_source"]

SIDECARS = (
    "*.json",
    "*.jinja",
    "*.md",
    "*.model",
    "*.tiktoken",
    "*.txt",
    "[Ll][Ii][Cc][Ee][Nn][CcSs][Ee]*",
    "NOTICE*",
    "COPYING*",
)
"""Config, index, tokenizer, chat templates, licence: file name patterns as ``snapshot_download`` takes them."""

WEIGHTS = ("*.safetensors",)
DCP = (".metadata", "*.distcp")

_BELOW = tuple(f"*/{pattern}" for pattern in (*WEIGHTS, *SIDECARS) if pattern != "*.jinja")
"""Not fetched: other models' weights live in subfolders. The one folder that travels, of chat templates, is jinja."""

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a named checkpoint is, and what a manifest says of where it came from."""

    path: Path
    origin: Mapping[str, str]
    """``path``; or ``hub`` (the repository), ``revision`` (as asked for), ``commit`` (the sha) and ``subfolder``."""


def resolve_source(text: str, *, announce: Announce = lambda message: None) -> Source:
    """The folder that ``text`` names; a hub id is downloaded to the hub's cache.

    A hub id is ``org/name[@revision][:subfolder]``; of a subfolder, nothing outside it is fetched.

    A path that exists wins over a hub id. ``announce`` is told before anything is fetched.

    Raises:
        SourceError: it is neither, the repository or revision is not there or may not be read, or the hub cannot be
            reached.
        DestinationError: the disk that holds the cache is full.
    """
    return find_here(text) or _resolve(text, (*WEIGHTS, *SIDECARS), announce)


def resolve_like(text: str, *, announce: Announce = lambda message: None) -> Source:
    """The same without weights: of a hub id, only config, index and sidecars are fetched. ``text`` may name a file."""
    return find_here(text) or _resolve(text, SIDECARS, announce)


def resolve_adapter(text: str, *, announce: Announce = lambda message: None) -> Source:
    """The same for a LoRA adapter, whose repository has an adapter_config.json in place of a model's config."""
    here = find_here(text)
    return here or _resolve(text, (*WEIGHTS, *SIDECARS), announce, config="adapter_config.json", of="a LoRA adapter")


def find_here(text: str) -> Source | None:
    """The folder or file of that name; ``None`` for what can only be a hub id.

    Raises:
        SourceError: an unfinished conversion has that name.
    """
    path = Path(os.path.expanduser(text))
    if os.path.lexists(path):
        return Source(path, {"path": str(path)})
    _refuse_unfinished(path)
    return None


def _resolve(
    text: str, patterns: tuple[str, ...], announce: Announce, config: str = "config.json", of: str = "a whole model"
) -> Source:
    asked = parse_hub_id(text)
    announce(f"{text}: not a folder here, asking the hub")
    return download(text, asked, patterns, announce=announce, config=config, of=of)


def download(
    text: str,
    asked: HubId,
    patterns: tuple[str, ...],
    *,
    announce: Announce,
    listing: Listing | None = None,
    config: str = "config.json",
    of: str = "a whole model",
) -> Source:
    """The files of ``asked`` that match ``patterns``, in the hub's cache; of a DCP its own files instead of weights.

    Raises as ``resolve_source`` does.
    """
    if listing is None and not is_offline():
        with suppress(TransferError):  # the cache may hold it all the same
            listing = list_files(asked, text, announce=announce)
    is_dcp, has_assets = (_holds(text, asked, listing, name) for name in (DCP[0], f"{ASSETS}/config.json"))
    snapshot = _download(text, asked, patterns, is_dcp=is_dcp, has_assets=has_assets)
    folder = snapshot / asked.subfolder if asked.subfolder else snapshot
    where = f"{asked.repository} on the hub"
    if not folder.is_dir():
        raise SourceError(f"{where} has no files of a model in a folder {asked.subfolder}; check its spelling")
    if not is_dcp:
        if WEIGHTS[0] in patterns:
            refuse_without_weights(asked, any(folder.glob(WEIGHTS[0])))
        refuse_without_config(asked, has_assets or (folder / config).is_file(), config, of)
    return Source(folder, origin_of(asked, snapshot.name))


def refuse_without_weights(asked: HubId, has_weights: bool) -> None:
    """Raise ``SourceError`` for a repository that holds none that are read."""
    if not has_weights:
        place = f"in {asked.subfolder}" if asked.subfolder else "at its top"
        raise SourceError(
            f"{asked.repository} on the hub has no safetensors {place}; .bin, .pt and .gguf files are not fetched: "
            "name a repository with safetensors, or org/name:subfolder if they lie in another folder"
        )


def refuse_without_config(
    asked: HubId, has_config: bool, config: str = "config.json", of: str = "a whole model"
) -> None:
    """Raise ``SourceError`` for a repository that is not that of a model."""
    if not has_config:
        inside = f" in {asked.subfolder}" if asked.subfolder else ""
        raise SourceError(f"{asked.repository} on the hub has no {config}{inside}: name the repository of {of}")


def origin_of(asked: HubId, commit: str) -> dict[str, str]:
    """What a manifest says of it."""
    origin = {"hub": asked.repository, "revision": asked.revision or "main"}
    if _COMMIT.fullmatch(commit):
        origin["commit"] = commit
    if asked.subfolder:
        origin["subfolder"] = asked.subfolder
    return origin


def _refuse_unfinished(path: Path) -> None:
    """A conversion to ``path`` that was killed is not a spelling mistake, and not a hub id."""
    from qwen3conv.converters.stores.staging import partial_path

    if path.name and partial_path(path).is_dir():
        raise SourceError(
            f"{path} does not exist, but {partial_path(path)} does: a conversion that did not finish; "
            "run the command that began it again with --resume"
        )


def _holds(text: str, asked: HubId, listing: Listing | None, name: str) -> bool:
    """Whether a file lies there, or in the cache where the hub was not asked."""
    if listing is not None:
        return asked.below + name in listing.files
    with library(text):
        from huggingface_hub import try_to_load_from_cache
    return isinstance(try_to_load_from_cache(asked.repository, asked.below + name, revision=asked.revision), str)


def _download(text: str, asked: HubId, patterns: tuple[str, ...], *, is_dcp: bool, has_assets: bool) -> Path:
    with library(text):
        from huggingface_hub import snapshot_download

    quiet_off_terminals()
    allowed, ignored = [asked.below + pattern for pattern in patterns], [asked.below + pattern for pattern in _BELOW]
    if is_dcp or has_assets:  # of a conversion's output or a run; what other folders there hold is small
        allowed += [f"{asked.below}{ASSETS}/*", *(asked.below + p for p in DCP if WEIGHTS[0] in patterns)]
        ignored = []
    with explained(asked, text):
        folder = snapshot_download(
            asked.repository,
            revision=asked.revision,
            allow_patterns=allowed,
            ignore_patterns=ignored,
            library_name=LIBRARY,
            library_version=__version__,
        )
    return Path(folder)
