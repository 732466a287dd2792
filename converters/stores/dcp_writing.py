"""Lay out a new DCP folder as ``torch.distributed.checkpoint`` reads it: data files of archives, and ``.metadata``.

Source: torch 2.13, ``torch/distributed/checkpoint/filesystem.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..boxes import Box, Chunk, Shape, StoredTensor, TensorSpec
from ..dtypes import itemsize
from ..errors import MappingError, enumerate_problems
from .contents import Arrangement, OutputFile, PathTuple
from .dcp import METADATA_FILE
from .dcp_metadata import Placed, metadata_bytes
from .torch_zip import ALIGNMENT
from .torch_zip_writing import frame

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
            prefix, _ = frame(spec.dtype, box.size)
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
            yield at, data + bytes(-len(data) % ALIGNMENT)
        for at, dtype, shape in self.archives:
            prefix, suffix = frame(dtype, shape)
            yield at, prefix
            end = at + len(prefix) + math.prod(shape) * itemsize(dtype)
            yield end, suffix + bytes(-(end + len(suffix)) % ALIGNMENT)


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
    prefix, suffix = frame(dtype, chunk.box.size)
    length = len(prefix) + chunk.box.volume * itemsize(dtype) + len(suffix)
    return Placed(chunk.box, chunk.file, chunk.offset - len(prefix), length)


def _archive_bytes(dtype: str, shape: Shape) -> int:
    """Bytes that an archive takes in a data file, padding to the next one included."""
    prefix, suffix = frame(dtype, shape)
    return _aligned(len(prefix) + math.prod(shape) * itemsize(dtype) + len(suffix))


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT
