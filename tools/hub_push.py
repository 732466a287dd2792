"""A model to the hub: a Hugging Face folder as it is, anything else converted to one on the way."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from qwen3conv.converters.checkpoint import Checkpoint
from qwen3conv.converters.conversion import carry_out, prepare
from qwen3conv.converters.detection import open_checkpoint
from qwen3conv.converters.errors import SourceError
from qwen3conv.converters.manifest import MANIFEST, Manifest, fingerprint_of
from qwen3conv.converters.policies import DEFAULTS, Settled, settle
from qwen3conv.converters.stores.safetensors import INDEX
from qwen3conv.converters.stores.sidecars import list_sidecars
from qwen3conv.converters.verification import check, compute_records, verify

from .hub_card import joined_card, new_card, public_source
from .hub_client import Announce
from .hub_id import HubId
from .hub_sending import Files, Sent, make_repository, send

CARD = "README.md"


@contextmanager
def hugging_face_folder(folder: Path, origin: Mapping[str, Any], *, announce: Announce) -> Iterator[Settled]:
    """The model in ``folder`` as a whole Hugging Face checkpoint; another format is converted beside it for the block.

    Raises:
        ConversionError: it is not whole, or cannot be converted without a decision.
    """
    checkpoint = open_checkpoint(folder)
    if checkpoint.format.startswith("hf"):
        if checkpoint.config is None:
            raise SourceError(f"{folder} has no config.json, without which nobody can load it")
        yield settle(checkpoint, DEFAULTS)
        return
    if checkpoint.manifest is not None and checkpoint.manifest.fingerprint is not None:
        check(verify(settle(checkpoint, DEFAULTS)), folder)
    made = folder.with_name(f"{folder.name}.push")
    announce(f"{folder}: {checkpoint.format}, converting it to Hugging Face in {made}")
    from qwen3conv import __version__

    tool = f"qwen3conv {__version__}"
    if checkpoint.manifest is not None:  # what it was made from is what people know
        origin = {**checkpoint.manifest.source, "path": str(folder)}
    carry_out(prepare(folder, made, "hf", origin=origin), overwrite=True, tool=tool)
    try:
        yield settle(open_checkpoint(made), DEFAULTS)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def push_model(
    asked: HubId,
    settled: Settled,
    *,
    public: bool,
    revision: str | None,
    pull_request: bool,
    message: str | None,
    record: Mapping[str, Any] | None,
    announce: Announce,
) -> tuple[Sent, str | None]:
    """Send a whole Hugging Face checkpoint, with a card if it has none; the commit and the fingerprint.

    Raises:
        VerifyError: it is not what its manifest says.
        ConversionError: of the kind that says what to do; a commit is made last, or not at all.
    """
    checkpoint = settled.checkpoint
    manifest = checkpoint.manifest
    if manifest is not None and manifest.fingerprint is not None:
        check(verify(settled), checkpoint.path)
        fingerprint: str | None = manifest.fingerprint
    else:
        fingerprint = fingerprint_of(compute_records(settled))
    files, left = files_of(checkpoint)
    if left:
        announce(f"not sent, because no model needs them: {', '.join(left[:6])}")
    files = {**files, **_written(asked, checkpoint.path, manifest, fingerprint, record, files)}
    make_repository(asked, public=public, revision=None if pull_request else revision)
    said = message or f"Upload {asked.repository.rpartition('/')[2]}, fingerprint {fingerprint}"
    sent = send(asked, files, said, revision=revision, pull_request=pull_request, announce=announce)
    return sent, fingerprint


def files_of(checkpoint: Checkpoint) -> tuple[Files, tuple[str, ...]]:
    """The weights, their index, config and sidecars; and the names of files that are none of these."""
    folder = checkpoint.path
    sidecars = list_sidecars(folder)
    names = [*checkpoint.contents.files, *sidecars.carried, "config.json"]
    names += [name for name in (INDEX,) if (folder / name).is_file() and len(checkpoint.contents.files) > 0]
    return {name: Path(os.path.realpath(folder / name)) for name in names}, sidecars.left


def _written(
    asked: HubId,
    folder: Path,
    manifest: Manifest | None,
    fingerprint: str | None,
    record: Mapping[str, Any] | None,
    files: Files,
) -> dict[str, bytes]:
    """Card and manifest as they are sent."""
    written = {}
    card: str | None = None
    if CARD not in files:
        card = new_card(asked.repository, manifest, fingerprint, record)
    elif manifest is not None and CARD in manifest.files:  # it came along, and speaks of what this was made from
        text = (folder / CARD).read_bytes()
        if xxhash.xxh3_128_hexdigest(text) == manifest.files[CARD]:
            decoded = text.decode("utf-8", errors="replace")
            card = joined_card(decoded, asked.repository, manifest, fingerprint, record)
    if card is not None:
        written[CARD] = card.encode()
    if manifest is not None:
        digests = dict(manifest.files)
        if card is not None and CARD in digests:
            digests[CARD] = xxhash.xxh3_128_hexdigest(written[CARD])
        public = replace(manifest, source=public_source(manifest.source), files=digests)
        written[MANIFEST] = public.to_json()
    return written
