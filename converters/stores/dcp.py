"""DCP folders (``torch.distributed.checkpoint``, FileSystemWriter): what they hold.

A folder is ``.metadata`` and data files ``__{rank}_{n}.distcp``. A data file is a row of archives: ``torch.save`` of
one chunk of a tensor, or of one non-tensor value. Only ``.metadata`` says which is where. Placements and meshes are
not stored, and torch checks neither overlaps nor holes when it loads: that is for whoever reads ``Contents``.

Source: torch 2.13, ``torch/distributed/checkpoint/filesystem.py`` and ``default_planner.py``.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from ..boxes import Box, Chunk, Shape, StoredTensor, TensorSpec
from ..dtypes import FROM_TORCH_NAME, itemsize
from ..errors import SourceError, enumerate_problems
from ..remote import has_headers_only, remote_of
from . import torch_zip
from .contents import Blob, Contents
from .dcp_metadata import BytesStorageMetadata, Metadata, StorageInfo, TensorStorageMetadata, read_metadata

METADATA_FILE = ".metadata"
_BIAS = "expert_bias"

_REQUESTS, _STRETCH = 8, 32
"""Of files elsewhere: so many requests at a time, each for so many archives one after another."""


class _Part(NamedTuple):
    """A chunk as ``.metadata`` describes it."""

    spec: TensorSpec
    box: Box
    info: StorageInfo


def read_dcp(folder: Path, locate: bool = True) -> Contents:
    """What a DCP folder holds. Only ``.metadata`` and, with ``locate``, the archives' frames are read.

    Without ``locate`` the data files are only measured, and a chunk's offset is -1 minus that of its archive, which was
    not opened; so it is of files that are elsewhere and stay there, but for small ones that decisions need. Chunks
    without elements, which the last ranks of an uneven cut write, are left out unless the tensor has none at all.
    Raises ``SourceError`` for an incomplete, truncated, damaged or hostile folder; all problems of a kind at once.
    """
    metadata = read_metadata(metadata_path(folder))
    specs, parts, blobs = _described(folder, metadata)
    sizes = measured(folder, parts, blobs)
    wanted = parts if locate else []
    if has_headers_only(folder):  # a request each: only what is looked at before anything moves
        wanted = [part for part in wanted if _BIAS in part.spec.name]
    offsets = _locate_elsewhere(folder, wanted) if remote_of(folder) is not None else _locate(folder, wanted)
    chunks: dict[str, list[Chunk]] = {name: [] for name in specs}
    for part in parts:
        if part.box.volume or 0 in part.spec.shape:
            at = offsets.get(part.info, -1 - part.info.offset)
            chunks[part.spec.name].append(Chunk(part.box, part.info.relative_path, at))
    tensors = {name: StoredTensor(spec, tuple(chunks.pop(name))) for name, spec in specs.items()}
    return Contents(
        tensors,
        sizes,
        {name: f"bytes, {info.length} B" for name, info in blobs.items()},
        {name: Blob(info.relative_path, info.offset, info.length) for name, info in blobs.items()},
        {name: path for name, path in metadata.paths.items() if path != (name,)},
    )


def metadata_path(folder: Path) -> Path:
    """``folder/.metadata``; when there is none, ``SourceError`` says which kind of unfinished save this is."""
    path = folder / METADATA_FILE
    try:
        if path.is_file():
            return path
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise SourceError(f"{folder}: cannot be read as a folder ({error.strerror})") from None
    if f"{METADATA_FILE}.tmp" in names:
        raise SourceError(
            f"{folder}: the save was interrupted: {METADATA_FILE}.tmp is there, {METADATA_FILE} is not. Use an earlier "
            "checkpoint"
        )
    if any(re.fullmatch(r"__\d+\.metadata(\.tmp)?", name) for name in names):
        raise SourceError(
            f"{folder}: each rank wrote its own __(rank).metadata, as dcp.save does with use_collectives=False; that "
            "form is not read. Load it on as many ranks and save it with collectives"
        )
    if any(name.endswith(".distcp") for name in names):
        raise SourceError(
            f"{folder}: incomplete save: data files but no {METADATA_FILE}, which is written last. Use an earlier "
            "checkpoint, or copy the file from where this folder comes from"
        )
    raise SourceError(f"{folder}: not a DCP folder: it has no {METADATA_FILE}")


def _described(folder: Path, metadata: Metadata) -> tuple[dict[str, TensorSpec], list[_Part], dict[str, StorageInfo]]:
    """(specs by FQN, chunks ordered by file and offset, non-tensors by FQN); boxes, paths and places checked."""
    specs: dict[str, TensorSpec] = {}
    parts: list[_Part] = []
    blobs: dict[str, StorageInfo] = {}
    problems: list[str] = []
    # Ranks and layers repeat the same few boxes: share them.
    boxes: dict[Box, Box] = {}
    for fqn, entry in metadata.entries.items():
        if isinstance(entry, BytesStorageMetadata):
            info = metadata.places.get((fqn, None))
            if info is None:
                problems.append(f"{fqn!r}: no place in storage_data")
            else:
                blobs[fqn] = info
                problems += misplaced(fqn, info)
            continue
        dtype = FROM_TORCH_NAME.get(entry.properties.dtype)
        if dtype is None or entry.properties.layout != "torch.strided":
            found = f"{entry.properties.layout} tensor of dtype torch.{entry.properties.dtype}"
            problems.append(f"{fqn!r}: a {found}; only dense tensors of real and integer dtypes are read")
            continue
        specs[fqn] = spec = TensorSpec(fqn, dtype, entry.size)
        for box, at in _boxes(fqn, entry, metadata, problems):
            parts.append(_Part(spec, boxes.setdefault(box, box), at))
    if problems:
        raise SourceError(enumerate_problems(f"{folder / METADATA_FILE}: describes what cannot be read:", problems))
    parts.sort(key=lambda part: (part.info.relative_path, part.info.offset))
    return specs, parts, blobs


def _boxes(
    fqn: str, entry: TensorStorageMetadata, metadata: Metadata, problems: list[str]
) -> Iterator[tuple[Box, StorageInfo]]:
    seen: set[Shape] = set()
    for chunk in entry.chunks:
        start, size = chunk.offsets, chunk.sizes
        if len(start) != len(entry.size) or len(size) != len(entry.size):
            problems.append(f"{fqn!r}: a chunk at {start} of size {size} does not have the dims of shape {entry.size}")
            continue
        box = Box(start, size)
        if any(low + n > total for low, n, total in zip(start, size, entry.size, strict=True)):
            problems.append(f"{fqn!r}: chunk {box} reaches outside of shape {entry.size}")
            continue
        if box.volume and start in seen:
            problems.append(f"{fqn!r}: chunk {box} is listed twice")
            continue
        info = metadata.places.get((fqn, start))
        if info is None:
            problems.append(f"{fqn!r}: chunk {box} has no place in storage_data")
            continue
        if box.volume:
            seen.add(start)
        problems += misplaced(fqn, info)
        yield box, info


def misplaced(fqn: str, info: StorageInfo) -> list[str]:
    """What is wrong with a storage place by itself: at most one line."""
    path = info.relative_path
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or re.search(r"[\\\0]|^[A-Za-z]:", path):
        return [f"{fqn!r}: file {path!r} is not a plain path inside the folder"]
    if info.transforms:
        return [f"{fqn!r}: stored through {', '.join(info.transforms)!r}; save without extensions of the file writer"]
    return []


def measured(folder: Path, parts: Sequence[_Part], blobs: Mapping[str, StorageInfo]) -> dict[str, int]:
    """Sizes in bytes of all data files, each long enough for what ``.metadata`` places in it."""
    sizes: dict[str, int] = {}
    remote = remote_of(folder)
    ends: dict[str, tuple[int, str]] = {}
    small: list[str] = []
    for fqn, info, nbytes in (
        *((part.spec.name, part.info, part.box.volume * itemsize(part.spec.dtype)) for part in parts),
        *((fqn, info, 0) for fqn, info in blobs.items()),
    ):
        ends[info.relative_path] = max(ends.get(info.relative_path, (0, "")), (info.offset + info.length, fqn))
        if nbytes > info.length:
            small.append(f"{fqn!r} in {info.relative_path}: {nbytes} bytes do not fit into {info.length}")
    missing: list[str] = []
    short: list[str] = []
    for path, (end, fqn) in sorted(ends.items()):
        try:
            status = os.stat(folder / path)
            size = remote.files[path].size if remote is not None and path in remote.files else status.st_size
        except OSError as error:
            missing.append(f"{path!r} ({error.strerror})")
            continue
        if not stat.S_ISREG(status.st_mode):
            missing.append(f"{path!r} (not a regular file)")
        elif size < end:
            short.append(f"{path!r}: {size} bytes, but {fqn!r} ends at {end}")
        sizes[path] = size
    if missing:
        heading = f"{folder}: {len(missing)} of {len(ends)} data files are missing; copy them from where it was saved:"
        raise SourceError(enumerate_problems(heading, missing))
    if short or small:
        heading = f"{folder}: data files are cut short; copy them again from where the checkpoint was saved:"
        raise SourceError(enumerate_problems(heading, short or small))
    return sizes


def _locate(folder: Path, parts: Sequence[_Part]) -> dict[StorageInfo, int]:
    """Storage place -> bytes from the file's start to the chunk's first element. ``parts`` are in file order."""
    offsets: dict[StorageInfo, int] = {}
    problems: list[str] = []
    at = 0
    while at < len(parts):
        path = parts[at].info.relative_path
        try:
            with reader(folder, path) as read:
                while at < len(parts) and parts[at].info.relative_path == path:
                    part = parts[at]
                    at += 1
                    try:
                        offsets[part.info] = _locate_part(read, part)
                    except SourceError as error:
                        problems.append(str(error))
        except OSError as error:
            raise SourceError(f"{folder / path}: cannot be read ({error.strerror})") from None
    if problems:
        raise SourceError(enumerate_problems(f"{folder}: archives that cannot be read:", problems))
    return offsets


def _locate_elsewhere(folder: Path, parts: Sequence[_Part]) -> dict[StorageInfo, int]:
    """The same where each look is a request: many at a time, each for a stretch of one file."""
    stretches = [list(group) for _, group in groupby(parts, key=lambda part: part.info.relative_path)]
    pieces = [stretch[at : at + _STRETCH] for stretch in stretches for at in range(0, len(stretch), _STRETCH)]
    offsets: dict[StorageInfo, int] = {}
    with ThreadPoolExecutor(_REQUESTS) as pool:
        for found in pool.map(lambda piece: _locate(folder, piece), pieces):
            offsets |= found
    return offsets


@contextmanager
def reader(folder: Path, path: str) -> Iterator[Callable[[int, int], bytes]]:
    """What reads few bytes at an offset of a data file, be it here or elsewhere, without fetching it whole."""
    remote = remote_of(folder)
    if remote is not None and path in remote.files:
        yield partial(remote.read, path)
        return
    descriptor = os.open(folder / path, os.O_RDONLY)
    try:
        yield lambda at, size: os.pread(descriptor, size, at)
    finally:
        os.close(descriptor)


def _locate_part(read: Callable[[int, int], bytes], part: _Part) -> int:
    spec, box, info = part
    where = f"{info.relative_path}: {spec.name!r}"
    payload = torch_zip.locate(read, info.offset, info.length, where)
    if payload.dtype != spec.dtype or payload.shape != box.size:
        raise SourceError(
            f"{where}: the archive holds {payload.dtype} {payload.shape}, .metadata says {spec.dtype} {box.size}; data "
            "files and .metadata come from different saves"
        )
    return payload.offset
