"""Our per-rank folder: one safetensors file per rank, and an index that says which mesh cut what.

``rank-00003-of-00008.safetensors`` holds what rank 3 keeps in memory, under the layout's own names and in local shapes,
so a rank loads it with nothing but safetensors. ``qwen3conv-ranks.json``, written last, holds::

    {"ranks_version": 1, "layout": "hf-fused", "schema": null, "mesh": {"tp": 4, "fsdp": 2, "ep": 1, "pp": 1},
     "tensors": {FQN: {"dtype": "BF16", "shape": [global], "kind": "column", "dim": 0, "replicas": 1}},
     "ranks": [{"file": "rank-00000-of-00008.safetensors", "place": {"pp": 0, "fsdp": 0, "tp": 0, "efsdp": 0, "ep": 0},
                "tensors": {FQN: [[[start], [size]], ...]}}],
     "index_digest": "..."}

``kind`` and ``dim`` say how tensor or expert parallelism cuts a tensor, ``replicas`` how many ranks hold each element
(null for fused qkv of which only k and v are repeated), and a rank's entry the boxes of the global tensor that follow
each other in its local one: one, or several for a fused pair. Digests are per logical parameter and do not depend on
the mesh: ``qwen3conv.json`` has them. ``index_digest`` is the xxh3_128 of the JSON without it, to notice an edit.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ..boxes import Box, Chunk, Shape, StoredTensor, TensorSpec
from ..config_json import read_json_object
from ..errors import SourceError, enumerate_problems
from ..placement import Mesh, rank_name
from .contents import Arrangement, Contents, OutputFile
from .safetensors_header import read_header, scan_header
from .safetensors_writing import arrange_safetensors

RANKS_INDEX = "qwen3conv-ranks.json"

_VERSION = 1


@dataclass(frozen=True, slots=True)
class RankFolder:
    """What the index and the headers of a per-rank folder say. Tensors are named ``rank/FQN``."""

    contents: Contents
    layout: str
    schema: str | None
    mesh: Mesh
    shapes: Mapping[str, Shape]
    """Global shape of every stored tensor, by FQN."""


def rank_file(rank: int, ranks: int) -> str:
    """The file of one rank."""
    return f"rank-{rank:05d}-of-{ranks:05d}.safetensors"


def read_ranks(folder: Path) -> RankFolder:
    """Read the index and every rank's header.

    Raises:
        SourceError: the index is not one of ours, or files are missing, foreign or of another shape; all are named.
    """
    path = folder / RANKS_INDEX
    raw, _ = read_json_object(path)
    try:
        if raw["ranks_version"] != _VERSION:
            raise SourceError(f"{path} has version {raw['ranks_version']!r}, this program reads {_VERSION}")
        written_as = raw.pop("index_digest")
        mesh = _read_mesh(raw["mesh"])
        shapes = {str(name): _sizes(entry["shape"]) for name, entry in _object(raw["tensors"]).items()}
        dtypes = {str(name): entry["dtype"] for name, entry in _object(raw["tensors"]).items()}
        listed = [
            {str(name): [_sizes(size) for _, size in _list(boxes)] for name, boxes in _object(rank["tensors"]).items()}
            for rank in _list(raw["ranks"])
        ]
        layout, schema = str(raw["layout"]), None if raw["schema"] is None else str(raw["schema"])
    except (KeyError, TypeError, ValueError) as error:
        raise SourceError(f"{path} is not a whole index of rank files ({type(error).__name__}: {error})") from error
    if written_as != _digest(raw):
        raise SourceError(f"{path} was edited: its index_digest does not follow from it; shard the model again")
    if len(listed) != mesh.ranks:
        raise SourceError(f"{path} lists {len(listed)} ranks, but its mesh {mesh} has {mesh.ranks}")
    files = [rank_file(rank, mesh.ranks) for rank in range(mesh.ranks)]
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise SourceError(enumerate_problems(f"{folder} lacks the files of {len(missing)} ranks:", missing))
    tensors: dict[str, StoredTensor] = {}
    sizes: dict[str, int] = {}
    problems: list[str] = []
    for rank, file in enumerate(files):
        header = scan_header(folder / file, file, problems)
        if header is None:
            continue
        sizes[file] = header.size
        problems += [
            f"{file}: lacks {name}, which the index lists" for name in listed[rank] if name not in header.tensors
        ]
        for name, entry in header.tensors.items():
            if name not in listed[rank]:
                problems.append(f"{file}: holds {name}, which the index does not list for rank {rank}")
            elif entry.dtype != dtypes.get(name, entry.dtype):
                problems.append(f"{file}: {name} is {entry.dtype}, the index says {dtypes[name]}")
            elif math.prod(entry.shape) != sum(map(math.prod, listed[rank][name])):
                expected = " and ".join(str(list(size)) for size in listed[rank][name])
                problems.append(f"{file}: {name} is {list(entry.shape)}, the index says {expected}")
            from_start = header.data_start + entry.begin
            spec = TensorSpec(rank_name(rank, name), entry.dtype, entry.shape)
            tensors[spec.name] = StoredTensor(spec, (Chunk(Box.whole(spec.shape), file, from_start),))
    strays = sorted(p.name for p in folder.glob("rank-*.safetensors") if p.name not in files)
    problems += [f"{name}: is of another mesh than {mesh}" for name in strays]
    if problems:
        raise SourceError(enumerate_problems(f"the rank files in {folder} do not fit together:", problems))
    return RankFolder(Contents(tensors, sizes), layout, schema, mesh, shapes)


def read_vllm(folder: Path) -> tuple[Contents, int]:
    """vLLM's ``model-rank-{rank}-part-{part}.safetensors``: contents named ``rank/FQN``, and the number of ranks.

    Raises:
        SourceError: a rank or a part is missing, or a tensor occurs twice in a rank; all are named.
    """
    parts: dict[int, set[int]] = {}
    for path in folder.iterdir():
        if match := _VLLM_FILE.fullmatch(path.name):
            parts.setdefault(int(match[1]), set()).add(int(match[2]))
    ranks = max(parts) + 1
    most = max(len(numbers) for numbers in parts.values())
    missing = [
        vllm_file(rank, part) for rank in range(ranks) for part in range(most) if part not in parts.get(rank, set())
    ]
    if missing:
        raise SourceError(enumerate_problems(f"{folder} holds {ranks} ranks of {most} parts, but lacks:", missing))
    tensors: dict[str, StoredTensor] = {}
    sizes: dict[str, int] = {}
    for rank, part in ((rank, part) for rank in range(ranks) for part in range(most)):
        file = vllm_file(rank, part)
        header = read_header(folder / file)
        sizes[file] = header.size
        for fqn, entry in header.tensors.items():
            spec = TensorSpec(rank_name(rank, fqn), entry.dtype, entry.shape)
            if spec.name in tensors:
                raise SourceError(f"{folder / file} holds {fqn}, which an earlier part of rank {rank} holds too")
            chunk = Chunk(Box.whole(spec.shape), file, header.data_start + entry.begin)
            tensors[spec.name] = StoredTensor(spec, (chunk,))
    return Contents(tensors, sizes), ranks


def vllm_file(rank: int, part: int = 0) -> str:
    """vLLM's name for a part of one rank's tensors (``ShardedStateLoader.DEFAULT_PATTERN``)."""
    return f"model-rank-{rank}-part-{part}.safetensors"


_VLLM_FILE = re.compile(r"model-rank-(0|[1-9][0-9]{0,4})-part-(0|[1-9][0-9]{0,4})\.safetensors", re.ASCII)


def arrange_ranks(
    held: Sequence[Sequence[TensorSpec]], mesh: Mesh, index: Callable[[], Mapping[str, Any]]
) -> Arrangement:
    """Where every byte of a per-rank folder goes. ``held[rank]`` are local tensors by FQN; ``index`` makes the JSON."""
    names = [rank_file(rank, mesh.ranks) for rank in range(mesh.ranks)]

    def trailers() -> Iterator[tuple[str, bytes]]:
        content = {"ranks_version": _VERSION, **index()}
        content["ranks"] = [{"file": name, **rank} for name, rank in zip(names, content["ranks"], strict=True)]
        content["index_digest"] = _digest(content)
        yield RANKS_INDEX, (json.dumps(content) + "\n").encode()

    return _arrange(held, names, trailers)


def arrange_vllm(held: Sequence[Sequence[TensorSpec]]) -> Arrangement:
    """Where every byte of a vLLM ``sharded_state`` folder goes: one part per rank, no index."""
    return _arrange(held, [vllm_file(rank) for rank in range(len(held))], lambda: iter(()))


def _arrange(
    held: Sequence[Sequence[TensorSpec]], names: Sequence[str], trailers: Callable[[], Iterable[tuple[str, bytes]]]
) -> Arrangement:
    tensors: dict[str, StoredTensor] = {}
    files: list[OutputFile] = []
    for rank, (name, specs) in enumerate(zip(names, held, strict=True)):
        one = arrange_safetensors([(name, specs)], index=False)
        files += one.files
        for fqn, stored in one.tensors.items():
            spec = TensorSpec(rank_name(rank, fqn), stored.spec.dtype, stored.spec.shape)
            tensors[spec.name] = StoredTensor(spec, stored.chunks)
    return Arrangement(tensors, tuple(files), trailers)


def _digest(content: Mapping[str, object]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content).encode())


def _read_mesh(raw: object) -> Mesh:
    sizes = _object(raw)
    degrees = {name: sizes[name] for name in ("tp", "fsdp", "ep", "pp")}
    if not all(type(size) is int and 0 < size <= 1 << 16 for size in degrees.values()):
        raise ValueError(f"mesh {degrees}")
    return Mesh(**degrees)


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, found {type(value).__name__}")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, found {type(value).__name__}")
    return value


def _sizes(value: object) -> Shape:
    if not all(type(size) is int and size >= 0 for size in _list(value)):
        raise ValueError(f"shape {value!r}")
    return tuple(_list(value))
