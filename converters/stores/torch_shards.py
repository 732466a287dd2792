"""The folder that torch's ``HuggingFaceStorageWriter(save_distributed=True)`` writes: safetensors files per rank.

``shard-<rank>-model-<i>-of-<n>.safetensors`` holds what one rank had of the tensors mapped to file ``i``; the header's
``DCP_SHARDING_INFO`` gives each tensor's ``saved_offsets``, where its piece begins in the whole tensor. Ranks count
from 1. With consolidation on, the files lie in ``sharded/``. No global shape is stored. Source: torch 2.13,
torch/distributed/checkpoint/hf_storage.py, _hf_utils.py, and filesystem.py, ``_write_files_from_queue``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..boxes import Box, Chunk, Shape, StoredTensor, TensorSpec
from ..errors import SourceError, enumerate_problems
from .contents import Contents
from .safetensors import WARNING
from .safetensors_header import are_sizes, parse_object, scan_header

SUBFOLDER = "sharded"
_SHARD = re.compile(r"shard-([0-9]{5,})-model-([0-9]{5,})-of-([0-9]{5,})\.safetensors")
_INFO = "DCP_SHARDING_INFO"


class _Piece(NamedTuple):
    """What one rank's file holds of a tensor."""

    rank: int
    dtype: str
    chunk: Chunk


def read_torch_shards(folder: Path) -> Contents:
    """What the per-rank files in ``folder``, or in its ``sharded/``, hold together, from their headers.

    A tensor's shape is the least one that has room for all of its pieces, and the pieces must fill it without overlap.
    Files hold no list of what was saved: a loss that takes whole tensors, or only shortens them (all files of the last
    rank), shows only when names and shapes are compared with the config. Raises ``SourceError`` with all problems.
    """
    subfolder, found = _find_shards(folder)
    problems = list(_check_numbers(found))
    pieces: dict[str, list[_Piece]] = {}
    fqns: dict[int, set[str]] = {}
    sizes: dict[str, int] = {}
    metadata: dict[str, str] = {}
    boxes: dict[Box, Box] = {}
    for (rank, index), name in sorted(found.items()):
        file = f"{subfolder}{name}"
        header = scan_header(folder / file, file, problems)
        if header is None:
            continue
        sizes[file] = header.size
        offsets = _read_offsets(file, header.metadata, problems)
        metadata.update((key, value) for key, value in header.metadata.items() if key != _INFO)
        for fqn, entry in header.tensors.items():
            start = offsets.pop(fqn, None)
            if start is None or len(start) != len(entry.shape):
                problems.append(f"{file}: {_INFO} gives {fqn!r} no offset of {len(entry.shape)} numbers")
                continue
            box = Box(start, entry.shape)
            chunk = Chunk(boxes.setdefault(box, box), file, header.data_start + entry.begin)
            pieces.setdefault(fqn, []).append(_Piece(rank, entry.dtype, chunk))
            fqns.setdefault(index, set()).add(fqn)
        problems.extend(f"{file}: does not hold {fqn!r}, for which {_INFO} gives an offset" for fqn in offsets)
    tensors: dict[str, StoredTensor] = {}
    if not problems:
        problems.extend(_check_gaps(found, pieces, fqns))
        for fqn in list(pieces):
            stored = _assemble(fqn, pieces.pop(fqn), problems)
            if stored is not None:
                tensors[fqn] = stored
    if problems:
        heading = f"{folder} is not a whole set of torch shards; copy again, or save again, what is named here:"
        raise SourceError(enumerate_problems(heading, problems))
    metadata.pop(WARNING, None)
    return Contents(tensors, sizes, metadata=metadata)


def _find_shards(folder: Path) -> tuple[str, dict[tuple[int, int], str]]:
    """Prefix of the files, and their names by (rank, file number)."""
    here, below = _match_shards(folder), _match_shards(folder / SUBFOLDER)
    if here and below:
        raise SourceError(f"{folder} holds shards and so does its {SUBFOLDER}/; move one set away")
    matches = here or below
    if not matches:
        raise SourceError(
            f"neither {folder} nor its {SUBFOLDER}/ holds a file named shard-<rank>-model-<i>-of-<n>.safetensors"
        )
    counts = sorted({int(match[3]) for match in matches})
    names = {(int(match[1]), int(match[2])): match[0] for match in matches}
    if len(counts) > 1 or len(names) != len(matches):
        raise SourceError(
            f"{folder} mixes the files of several saves: they say 'of' {', '.join(map(str, counts))}; keep one save"
        )
    return "" if here else f"{SUBFOLDER}/", names


def _match_shards(folder: Path) -> list[re.Match[str]]:
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise SourceError(f"{folder} cannot be listed: {error.strerror}") from None
    return [match for match in map(_SHARD.fullmatch, sorted(names)) if match]


def _check_numbers(found: Mapping[tuple[int, int], str]) -> Iterator[str]:
    """Ranks and file numbers of which there is no file at all."""
    count = int(next(match for match in map(_SHARD.fullmatch, found.values()) if match)[3])
    ranks, indices = {rank for rank, _ in found}, {index for _, index in found}
    for (rank, index), name in found.items():
        if rank < 1 or not 1 <= index <= count:
            yield f"{name}: ranks and files count from 1, and files up to {count}"
    yield from (f"no file of rank {rank} ({max(ranks)} is there)" for rank in _absent(max(ranks), ranks))
    yield from (f"file {index} of {count} is missing for every rank" for index in _absent(count, indices))


def _absent(count: int, present: set[int]) -> Iterator[int]:
    # A name may claim any number: no save has 100,000 files, so do not count further.
    return (number for number in range(1, min(count, 10**5) + 1) if number not in present)


def _read_offsets(file: str, metadata: Mapping[str, str], problems: list[str]) -> dict[str, Shape]:
    text = metadata.get(_INFO)
    if text is None:
        problems.append(f"{file}: the header has no {_INFO}, so where its pieces belong is unknown")
        return {}
    try:
        document = parse_object(text)
    except ValueError as error:
        problems.append(f"{file}: {_INFO} is not the JSON object expected: {error}")
        return {}
    offsets: dict[str, Shape] = {}
    for fqn, value in document.items():
        start = value.get("saved_offsets") if isinstance(value, dict) else None
        if are_sizes(start):
            offsets[fqn] = tuple(start)
        else:
            problems.append(f"{file}: {_INFO} of {fqn!r} has no list of saved_offsets")
    return offsets


def _check_gaps(
    found: Mapping[tuple[int, int], str], pieces: Mapping[str, Sequence[_Piece]], fqns: Mapping[int, Iterable[str]]
) -> Iterator[str]:
    """Files that a rank should have written too.

    A rank writes no file ``i`` when it has no tensor of it, as under pipeline parallelism, so a gap alone proves
    nothing. But ranks that share one tensor share others: a file is missing where the holders of one of its tensors
    are some, not all, of the holders of another tensor, and the rank without the file is among the rest.
    """
    ranks, count = {rank for rank, _ in found}, max(index for _, index in found)
    if len(found) == len(ranks) * count:
        return
    holders = {fqn: frozenset(piece.rank for piece in held) for fqn, held in pieces.items()}
    groups = set(holders.values())
    for index in sorted(fqns):
        own = {holders[fqn] for fqn in fqns[index]}
        expected = {rank for few in own for group in groups if few < group for rank in group}
        for rank in sorted(expected):
            if (rank, index) not in found:
                yield f"file {index} of {count} is missing for rank {rank}, which shares tensors with its holders"


def _assemble(fqn: str, held: Sequence[_Piece], problems: list[str]) -> StoredTensor | None:
    """The whole tensor; ``None`` and a problem if its pieces do not make one up."""
    dtypes = sorted({piece.dtype for piece in held})
    dims = sorted({len(piece.chunk.box.size) for piece in held})
    if len(dtypes) > 1 or len(dims) > 1:
        problems.append(f"{fqn!r}: its pieces differ: dtypes {dtypes}, numbers of dims {dims}")
        return None
    shape = tuple(map(max, zip(*(piece.chunk.box.stop for piece in held), strict=True)))
    solid = [piece.chunk for piece in held if piece.chunk.box.volume] or [held[0].chunk]
    chunks = sorted(solid, key=lambda chunk: (chunk.file, chunk.offset))
    clash = _find_overlap(chunks)
    if clash is not None:
        first, second = clash
        problems.append(f"{fqn!r}: {first.box} in {first.file} overlaps {second.box} in {second.file}")
        return None
    missing = math.prod(shape) - sum(chunk.box.volume for chunk in chunks)
    if missing:
        # The writer keys a file's tensors by name: of two pieces that a rank holds, the last one is kept (torch 2.13).
        ranks = sorted({piece.rank for piece in held})
        problems.append(f"{fqn!r}: {missing} elements of shape {list(shape)} are in none of the pieces (ranks {ranks})")
        return None
    return StoredTensor(TensorSpec(fqn, held[0].dtype, shape), tuple(chunks))


def _find_overlap(chunks: Sequence[Chunk]) -> tuple[Chunk, Chunk] | None:
    """Two chunks that share an element. None of them is empty."""
    if len(chunks) < 2:
        return None
    dims = range(len(chunks[0].box.size))
    dim = max(dims, key=lambda d: len({chunk.box.start[d] for chunk in chunks}), default=None)
    if dim is None:
        return chunks[0], chunks[1]
    ordered = sorted(chunks, key=lambda chunk: chunk.box.start[dim])
    for position, chunk in enumerate(ordered):
        stop = chunk.box.stop[dim]
        for other in ordered[position + 1 :]:
            if other.box.start[dim] >= stop:
                break
            if chunk.box.intersect(other.box):
                return chunk, other
    return None
