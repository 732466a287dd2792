"""DCP folders (``torch.distributed.checkpoint``, FileSystemWriter): what they hold, and the plan of a new one.

A folder is ``.metadata`` and data files ``__{rank}_{n}.distcp``. A data file is a row of archives: ``torch.save`` of
one chunk of a tensor, or of one non-tensor value. Only ``.metadata`` says which is where. Placements and meshes are
not stored, and torch checks neither overlaps nor holes when it loads: that is for whoever reads ``Contents``.

Source: torch 2.13, ``torch/distributed/checkpoint/filesystem.py`` and ``default_planner.py``.
"""

from __future__ import annotations

import math
import os
import re
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from ..boxes import Box, Chunk, Shape, StoredTensor, TensorSpec
from ..dtypes import FROM_TORCH_NAME, itemsize
from ..errors import MappingError, SourceError, enumerate_problems
from . import torch_zip
from .contents import Arrangement, Blob, Contents, OutputFile, PathTuple
from .dcp_metadata import (
    BytesStorageMetadata,
    Metadata,
    Placed,
    StorageInfo,
    TensorStorageMetadata,
    extent,
    metadata_bytes,
    read_metadata,
)
from .pickles import Callee, Table, Unfit, load

METADATA_FILE = ".metadata"
UNLOCATED = -1
"""``Chunk.offset`` of a chunk whose archive has not been opened."""

MAX_BLOB = 1 << 28
"""Largest non-tensor entry that is read into memory, bytes."""

# --- reading ---------------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """A chunk as ``.metadata`` describes it."""

    spec: TensorSpec
    box: Box
    info: StorageInfo


def read_dcp(folder: Path, locate: bool = True) -> Contents:
    """What a DCP folder holds. Only ``.metadata`` and, with ``locate``, the archives' frames are read.

    Without ``locate`` the data files are only measured and every ``Chunk.offset`` is ``UNLOCATED``. Chunks without
    elements, which the last ranks of an uneven cut write, are left out unless the tensor has none at all.
    Raises ``SourceError`` for an incomplete, truncated, damaged or hostile folder; all problems of a kind at once.
    """
    metadata = read_metadata(metadata_path(folder))
    specs, parts, blobs = _described(folder, metadata)
    sizes = _measure(folder, parts, blobs)
    offsets = _locate(folder, parts) if locate else {}
    chunks: dict[str, list[Chunk]] = {name: [] for name in specs}
    for part in parts:
        if part.box.volume or 0 in part.spec.shape:
            at = offsets.get(part.info, UNLOCATED)
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
                problems += _misplaced(fqn, info)
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
        problems += _misplaced(fqn, info)
        yield box, info


def _misplaced(fqn: str, info: StorageInfo) -> list[str]:
    """What is wrong with a storage place by itself: at most one line."""
    path = info.relative_path
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or re.search(r"[\\\0]|^[A-Za-z]:", path):
        return [f"{fqn!r}: file {path!r} is not a plain path inside the folder"]
    if info.transforms:
        return [f"{fqn!r}: stored through {', '.join(info.transforms)!r}; save without extensions of the file writer"]
    return []


def _measure(folder: Path, parts: Sequence[_Part], blobs: Mapping[str, StorageInfo]) -> dict[str, int]:
    """Sizes in bytes of all data files, each long enough for what ``.metadata`` places in it."""
    sizes: dict[str, int] = {}
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
        except OSError as error:
            missing.append(f"{path!r} ({error.strerror})")
            continue
        if not stat.S_ISREG(status.st_mode):
            missing.append(f"{path!r} (not a regular file)")
        elif status.st_size < end:
            short.append(f"{path!r}: {status.st_size} bytes, but {fqn!r} ends at {end}")
        sizes[path] = status.st_size
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
            descriptor = os.open(folder / path, os.O_RDONLY)
            try:
                while at < len(parts) and parts[at].info.relative_path == path:
                    part = parts[at]
                    at += 1
                    try:
                        offsets[part.info] = _locate_part(descriptor, part)
                    except SourceError as error:
                        problems.append(str(error))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise SourceError(f"{folder / path}: cannot be read ({error.strerror})") from None
    if problems:
        raise SourceError(enumerate_problems(f"{folder}: archives that cannot be read:", problems))
    return offsets


def _locate_part(descriptor: int, part: _Part) -> int:
    spec, box, info = part
    where = f"{info.relative_path}: {spec.name!r}"
    payload = torch_zip.locate(lambda at, size: os.pread(descriptor, size, at), info.offset, info.length, where)
    if payload.dtype != spec.dtype or payload.shape != box.size:
        raise SourceError(
            f"{where}: the archive holds {payload.dtype} {payload.shape}, .metadata says {spec.dtype} {box.size}; data "
            "files and .metadata come from different saves"
        )
    return payload.offset


def read_blob(folder: Path, fqn: str) -> bytes:
    """One non-tensor entry, as stored: a ``torch.save`` archive, not unpickled. At most ``MAX_BLOB`` bytes."""
    metadata = read_metadata(metadata_path(folder))
    info = metadata.places.get((fqn, None))
    if info is None or not isinstance(metadata.entries.get(fqn), BytesStorageMetadata):
        raise SourceError(f"{folder}: has no non-tensor entry {fqn!r}")
    problems = _misplaced(fqn, info)
    if problems or info.length > MAX_BLOB:
        raise SourceError(f"{folder}: {(problems or [f'{fqn!r} has {info.length} bytes, more than {MAX_BLOB}'])[0]}")
    _measure(folder, (), {fqn: info})
    try:
        with open(folder / info.relative_path, "rb") as file:
            file.seek(info.offset)
            return file.read(info.length)
    except OSError as error:
        raise SourceError(f"{folder / info.relative_path}: cannot be read ({error.strerror})") from None


def read_blobs(folder: Path, blobs: Mapping[str, Blob]) -> dict[str, bytes]:
    """Non-tensor entries as stored: ``torch.save`` archives, not unpickled. Equal ones are one object.

    Raises:
        SourceError: a file ends early or cannot be read, or there is more than ``MAX_BLOB`` bytes of different ones.
    """
    found: dict[str, bytes] = {}
    distinct: dict[bytes, bytes] = {}
    held = 0
    by_place = sorted(blobs.items(), key=lambda item: item[1])
    for path, group in groupby(by_place, key=lambda item: item[1].file):
        try:
            with open(folder / path, "rb") as file:
                for fqn, blob in group:
                    if blob.length > MAX_BLOB - held:
                        raise SourceError(
                            f"{folder}: its non-tensor entries hold more than {MAX_BLOB} bytes (up to {fqn!r}), which "
                            "no training state does"
                        )
                    file.seek(blob.offset)
                    data = file.read(blob.length)
                    if len(data) != blob.length:
                        raise SourceError(f"{folder / path} ends inside of {fqn!r}; it was cut short")
                    found[fqn] = distinct.setdefault(data, data)
                    held += blob.length if found[fqn] is data else 0
        except OSError as error:
            raise SourceError(f"{folder / path}: cannot be read ({error.strerror})") from None
    return {fqn: found[fqn] for fqn in blobs}


def read_simple_blob(folder: Path, fqn: str) -> object:
    """One non-tensor entry as numbers, strings, bytes, ``None``, lists, tuples and dicts of them.

    A tensor of one element becomes a number, an ``OrderedDict`` a dict. Nothing else is built: ``SourceError``.
    """
    data = read_blob(folder, fqn)
    where = f"{folder}: {fqn!r}"
    archive = torch_zip.Archive(lambda at, size: data[at : at + size], 0, len(data), where)
    value = load(archive.content("data.pkl", MAX_BLOB), _SIMPLE, where, torch_zip.storage_ref)
    try:
        return _plain(value, archive, [_MAX_VALUES])
    except Unfit as reason:
        raise SourceError(f"{where}: {reason}") from None


_MAX_VALUES = 1_000_000
_MAX_DEPTH = 50
_STRUCT_CODE = {"BOOL": "?", "U8": "B", "I8": "b", "I16": "h", "U16": "H", "F16": "e", "I32": "i", "U32": "I"}
_STRUCT_CODE |= {"F32": "f", "I64": "q", "U64": "Q", "F64": "d"}


def _plain(value: object, archive: torch_zip.Archive, left: list[int], depth: int = 0) -> object:
    """``value`` with one-element tensors replaced by numbers. A pickle can nest shared parts: both are bounded."""
    left[0] -= 1
    if left[0] < 0 or depth > _MAX_DEPTH:
        raise Unfit(f"more than {_MAX_VALUES} values, or nested deeper than {_MAX_DEPTH}")
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if type(value) is list or type(value) is tuple:
        items = [_plain(item, archive, left, depth + 1) for item in value]
        return items if type(value) is list else tuple(items)
    if type(value) is dict:
        return {key: _plain(item, archive, left, depth + 1) for key, item in value.items()}
    if type(value) is torch_zip.TensorRef and math.prod(value.shape) == 1:
        width = itemsize(value.dtype)
        record = archive.locate(f"data/{value.storage.key}")
        raw = archive.bytes_at(record + value.offset * width, width)
        if value.dtype == "BF16":
            return struct.unpack("<f", b"\0\0" + raw)[0]
        if value.dtype in _STRUCT_CODE:
            return struct.unpack("<" + _STRUCT_CODE[value.dtype], raw)[0]
    raise Unfit(f"holds a {type(value).__name__}, which is more than plain values")


def _encode(args: tuple[object, ...]) -> bytes:
    """``_codecs.encode(text, "latin1")``: how pickle protocol 2 spells bytes."""
    if len(args) != 2 or type(args[0]) is not str or args[1] != "latin1":
        raise Unfit("it calls _codecs.encode in a way that pickle does not")
    return args[0].encode("latin1")


def _no_bytes(args: tuple[object, ...]) -> bytes:
    if args:
        raise Unfit("it makes bytes from arguments, as pickle does not")
    return b""


_SIMPLE: Table = {
    **torch_zip.TENSOR_TABLE,
    ("_codecs", "encode"): Callee(call=_encode),
    ("__builtin__", "bytes"): Callee(call=_no_bytes),
    ("builtins", "bytes"): Callee(call=_no_bytes),
    ("torch", "Size"): Callee(call=lambda args: extent(args[0])),
}

# --- writing ---------------------------------------------------------------------------------------------------------

Parts = tuple[TensorSpec, Sequence[tuple[Box, str]]]
"""A tensor and its chunks: box and data file of each."""


def arrange_dcp(
    specs: Sequence[TensorSpec],
    *,
    file_bytes: int,
    aliases: Mapping[str, str] | None = None,
    blobs: Mapping[str, bytes] | None = None,
    paths: Mapping[str, PathTuple] | None = None,
) -> Arrangement:
    """Where every byte of a new DCP folder goes: whole tensors in the given order, in ``__0_{n}.distcp`` files.

    A file is closed before it passes ``file_bytes``; a larger tensor has a file of its own. See ``arrange_chunks``
    for the rest.
    """
    parts: list[Parts] = []
    used = number = 0
    for spec in specs:
        size = _archive_bytes(spec.dtype, spec.shape)
        if used and used + size > file_bytes:
            used, number = 0, number + 1
        used += size
        parts.append((spec, ((Box.whole(spec.shape), f"__0_{number}.distcp"),)))
    return arrange_chunks(parts, aliases=aliases, blobs=blobs, paths=paths)


def arrange_chunks(
    parts: Sequence[Parts],
    *,
    aliases: Mapping[str, str] | None = None,
    blobs: Mapping[str, bytes] | None = None,
    paths: Mapping[str, PathTuple] | None = None,
) -> Arrangement:
    """Where every byte of a new DCP folder goes, given the data file of each chunk; each file in the order given.

    ``aliases``: FQN -> FQN in ``parts`` whose shape, dtype and bytes it shares (a tied head); readers see a tensor of
    its own, ``Arrangement.tensors`` does not have it because nothing is to be written for it.
    ``blobs``: FQN -> ``torch.save`` archive of a non-tensor value, copied as it is, first in ``__0_0.distcp``.
    ``paths``: FQN -> path in the nested state dict, where it is not at top level under its own name.
    Raises ``MappingError`` for a name that occurs twice or an alias of nothing.
    """
    aliases, blobs, paths = aliases or {}, blobs or {}, paths or {}
    _check_names([spec.name for spec, _ in parts], aliases, blobs)
    files: dict[str, _File] = {}
    blob_places: dict[str, Placed] = {}
    for fqn, data in blobs.items():
        file = files.setdefault("__0_0.distcp", _File())
        blob_places[fqn] = Placed(Box((), ()), "__0_0.distcp", file.size, len(data))
        file.blobs.append((file.size, data))
        file.size += _aligned(len(data))
    tensors: dict[str, StoredTensor] = {}
    for spec, cuts in parts:
        chunks = []
        for box, name in cuts:
            file = files.setdefault(name, _File())
            prefix, _ = torch_zip.frame(spec.dtype, box.size)
            chunks.append(Chunk(box, name, file.size + len(prefix)))
            file.archives.append((file.size, spec.dtype, box.size))
            file.size += _archive_bytes(spec.dtype, box.size)
        tensors[spec.name] = StoredTensor(spec, tuple(chunks))

    def placed() -> Iterator[tuple[TensorSpec, Sequence[Placed]]]:
        for name, source in (*zip(tensors, tensors, strict=True), *aliases.items()):
            stored = tensors[source]
            spec = TensorSpec(name, stored.spec.dtype, stored.spec.shape)
            yield spec, [_placed(spec.dtype, chunk) for chunk in stored.chunks]

    def trailers() -> Iterable[tuple[str, bytes]]:
        yield METADATA_FILE, metadata_bytes(placed, blob_places, paths)

    outputs = tuple(OutputFile(name, file.size, file.seals) for name, file in files.items())
    return Arrangement(tensors, outputs, trailers, len(aliases))


class _File:
    """A data file as it fills up: ``size`` bytes so far, a multiple of the alignment."""

    __slots__ = ("archives", "blobs", "size")

    def __init__(self) -> None:
        self.size = 0
        self.archives: list[tuple[int, str, Shape]] = []
        self.blobs: list[tuple[int, bytes]] = []

    def seals(self) -> Iterator[tuple[int, bytes]]:
        """All bytes that are not tensor elements, zeros between archives included."""
        for at, data in self.blobs:
            yield at, data + bytes(-len(data) % torch_zip.ALIGNMENT)
        for at, dtype, shape in self.archives:
            prefix, suffix = torch_zip.frame(dtype, shape)
            yield at, prefix
            end = at + len(prefix) + math.prod(shape) * itemsize(dtype)
            yield end, suffix + bytes(-(end + len(suffix)) % torch_zip.ALIGNMENT)


def _check_names(names: Sequence[str], aliases: Mapping[str, str], blobs: Mapping[str, bytes]) -> None:
    seen: set[str] = set()
    problems: list[str] = []
    for name in (*names, *aliases, *blobs):
        if name in seen:
            problems.append(f"{name!r} occurs twice")
        seen.add(name)
    known = set(names)
    for name, source in aliases.items():
        if source not in known:
            problems.append(f"{name!r} shares the bytes of {source!r}, which is not written")
    if problems:
        raise MappingError(enumerate_problems("these tensors cannot be laid out as a DCP folder:", problems))


def _placed(dtype: str, chunk: Chunk) -> Placed:
    prefix, suffix = torch_zip.frame(dtype, chunk.box.size)
    length = len(prefix) + chunk.box.volume * itemsize(dtype) + len(suffix)
    return Placed(chunk.box, chunk.file, chunk.offset - len(prefix), length)


def _archive_bytes(dtype: str, shape: Shape) -> int:
    """Bytes that an archive takes in a data file, padding to the next one included."""
    prefix, suffix = torch_zip.frame(dtype, shape)
    return _aligned(len(prefix) + math.prod(shape) * itemsize(dtype) + len(suffix))


def _aligned(size: int) -> int:
    return size + -size % torch_zip.ALIGNMENT
