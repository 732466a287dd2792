"""How a mesh of ranks cuts a layout: tensor, expert, data (FSDP2) and pipeline parallelism as boxes.

Ranks count as torchtitan's do, tp fastest: rank = (pp * fsdp + fsdp index) * tp + tp index. Inside the experts the same
ranks of a stage form (efsdp, ep), ep fastest, with efsdp = fsdp * tp / ep. Context parallelism cuts no parameter.

A tensor is cut in the order in which torch applies placements: first tensor or expert parallelism on the logical
parameters (so a fused pair is cut per half), then the layout fuses what is left, then FSDP2 cuts rows of the result.
Under TP an FSDP rank therefore holds rows inside a TP block, not of the whole (torch's ``_StridedShard``).

Sources: torch 2.13, ``distributed/tensor/placement_types.py`` (``Shard``, ``_StridedShard``), ``distributed/fsdp``;
torchtitan 0.3.0, ``distributed/parallel_dims.py`` (mesh order), ``distributed/fsdp.py`` (experts on dim 1).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import NamedTuple

from .boxes import Box, Shape
from .errors import PolicyError, enumerate_problems
from .geometry import Geometry
from .layouts import Binding, Layout, bind
from .layouts.vllm import VOCAB_PADDING
from .ops import Piece
from .parameters import BY_NAME, EMBEDDING, HEAD


class Boxes(dict[Box, Box]):
    """One object per box: layers and ranks repeat the same few."""

    def __missing__(self, box: Box) -> Box:
        self[box] = box
        return box


CUT_BY_TP = frozenset("VQKIM")
"""Axes that tensor parallelism cuts. Each parameter has at most one of them: column-parallel where it is dim 0,
row-parallel where it is dim 1; norms and router have none and are replicated."""


class Place(NamedTuple):
    """Where one rank stands on each mesh axis."""

    pp: int
    fsdp: int
    tp: int
    efsdp: int
    ep: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """Degrees of parallelism."""

    tp: int = 1
    fsdp: int = 1
    ep: int = 1
    pp: int = 1

    @property
    def ranks(self) -> int:
        """Ranks of the whole mesh."""
        return self.pp * self.fsdp * self.tp

    @property
    def efsdp(self) -> int:
        """Ranks that share the experts of one expert-parallel rank."""
        return self.fsdp * self.tp // self.ep

    def place(self, rank: int) -> Place:
        """The coordinates of ``rank``."""
        stage, inside = divmod(rank, self.fsdp * self.tp)
        fsdp, tp = divmod(inside, self.tp)
        efsdp, ep = divmod(inside, self.ep)
        return Place(stage, fsdp, tp, efsdp, ep)

    def __str__(self) -> str:
        axes = (("pp", self.pp), ("fsdp", self.fsdp), ("tp", self.tp), ("ep", self.ep))
        return " x ".join(f"{name}{size}" for name, size in axes if size > 1) or "1 rank"


ONE_RANK = Mesh()
"""The mesh of a checkpoint that is not cut."""


def check_mesh(mesh: Mesh, geometry: Geometry) -> None:
    """Refuse a mesh that cannot hold the model.

    Raises:
        PolicyError: every degree that divides nothing, with the number that it would have to divide.
    """
    heads, kv_heads, experts = geometry.num_attention_heads, geometry.num_key_value_heads, geometry.num_experts
    problems = [f"{name} is {size}; expected at least 1" for name, size in _degrees(mesh) if size < 1]
    if not problems:
        if heads % mesh.tp:
            problems.append(f"tp {mesh.tp} does not divide the {heads} attention heads")
        if kv_heads % mesh.tp and mesh.tp % kv_heads:
            problems.append(f"tp {mesh.tp} neither divides the {kv_heads} key-value heads nor is a multiple of them")
        if mesh.ep > 1 and experts is None:
            problems.append(f"ep {mesh.ep}: the model is dense and has no experts to distribute")
        elif mesh.ep > 1 and experts is not None and experts % mesh.ep:
            problems.append(f"ep {mesh.ep} does not divide the {experts} experts")
        if mesh.ep > 1 and mesh.fsdp * mesh.tp % mesh.ep:
            problems.append(f"ep {mesh.ep} does not divide fsdp * tp = {mesh.fsdp * mesh.tp}, whose ranks it shares")
        if mesh.pp > geometry.num_hidden_layers:
            problems.append(f"pp {mesh.pp} is more than the {geometry.num_hidden_layers} layers")
    if problems:
        raise PolicyError(enumerate_problems(f"the mesh {mesh} does not fit this model:", problems))


def check_vllm(mesh: Mesh, geometry: Geometry) -> None:
    """Refuse what vLLM's ``sharded_state`` does not hold: other axes than tp, and a vocabulary that it would pad.

    Raises:
        PolicyError: with what to do instead.
    """
    if mesh != Mesh(tp=mesh.tp):
        raise PolicyError(f"vLLM's sharded_state is cut by tensor parallelism alone, not by {mesh}; give only --tp")
    rows = geometry.moe_intermediate_size or geometry.intermediate_size or 0
    if rows % mesh.tp:
        raise PolicyError(f"vLLM cuts evenly, and tp {mesh.tp} does not divide the {rows} rows of gate and up")
    if geometry.vocab_size % VOCAB_PADDING or geometry.vocab_size % mesh.tp:
        step = math.lcm(VOCAB_PADDING, mesh.tp)
        rows = -(-geometry.vocab_size // step) * step
        raise PolicyError(
            f"vLLM pads {geometry.vocab_size} vocabulary rows to a multiple of {VOCAB_PADDING}; "
            f"add them with --vocab-rows {rows}"
        )


def chunk(size: int, ranks: int, rank: int) -> range:
    """The part of ``size`` that ``rank`` holds: ceil(size / ranks) each, the last ones fewer or none.

    Source: torch 2.13, ``torch.chunk`` and ``Shard.local_shard_size_and_offset``.
    """
    each = -(-size // ranks)
    return range(min(size, rank * each), min(size, (rank + 1) * each))


def rank_bindings(layout: Layout, geometry: Geometry, mesh: Mesh, rank: int, *, tied: bool) -> Iterator[Binding]:
    """What ``rank`` stores of each of the layout's tensors: its local shape, and the pieces in it.

    A tensor of which the rank holds nothing (another stage's layer, another rank's experts, an empty FSDP shard) is
    left out.
    """
    place, boxes = mesh.place(rank), Boxes()
    for binding in _parallel_bindings(layout, geometry, mesh, place, tied=tied):
        local = _cut_fsdp(binding, geometry, mesh, place, boxes)
        if local is not None:
            yield local


def bindings_by_rank(layout: Layout, geometry: Geometry, mesh: Mesh, *, tied: bool) -> Iterator[tuple[int, Binding]]:
    """The same for all ranks, a rank's in order. What ranks share before FSDP cuts it is worked out once."""
    boxes = Boxes()
    groups: dict[tuple[int, int, int], list[tuple[int, Place]]] = {}
    for rank in range(mesh.ranks):
        place = mesh.place(rank)
        groups.setdefault((place.pp, place.tp, place.ep), []).append((rank, place))
    for members in groups.values():
        for binding in _parallel_bindings(layout, geometry, mesh, members[0][1], tied=tied):
            for rank, place in members:
                local = _cut_fsdp(binding, geometry, mesh, place, boxes)
                if local is not None:
                    yield rank, local


def elements_by_rank(
    layout: Layout, geometry: Geometry, mesh: Mesh, *, tied: bool, ranks: Sequence[int] | None = None
) -> dict[int, int]:
    """How many elements of the layout's tensors each of ``ranks`` (default: all) holds; buffers are left out.

    A tied head is the embeddings, unless pipeline stages part them.
    """
    found = dict.fromkeys(range(mesh.ranks) if ranks is None else ranks, 0)
    groups: dict[tuple[int, int, int], list[tuple[int, Place]]] = {}
    for rank in found:
        place = mesh.place(rank)
        groups.setdefault((place.pp, place.tp, place.ep), []).append((rank, place))
    for members in groups.values():
        steps = {False: [0] * (mesh.fsdp + 1), True: [0] * (mesh.efsdp + 1)}  # where a count of the next index differs
        for binding in _parallel_bindings(layout, geometry, mesh, members[0][1], tied=tied):
            if binding.rule.optional or (tied and mesh.pp == 1 and binding.rule.parts == (HEAD,)):
                continue
            dim, count, is_sparse = _fsdp_axis(binding, geometry, mesh)
            size = binding.shape[dim]
            each, rest = -(-size // count), math.prod(binding.shape) // size
            whole, left = divmod(size, each)
            step = steps[is_sparse]
            step[0] += each * rest
            step[whole] -= (each - left) * rest
            if left:
                step[whole + 1] -= left * rest
        dense, sparse = (list(accumulate(steps[kind])) for kind in (False, True))
        for rank, place in members:
            found[rank] = dense[place.fsdp] + sparse[place.efsdp]
    return found


def _fsdp_axis(binding: Binding, geometry: Geometry, mesh: Mesh) -> tuple[int, int, bool]:
    """The dim that FSDP2 cuts, among how many ranks, and whether these are those of one expert-parallel rank."""
    is_sparse = "{expert}" in binding.rule.parts[0] and mesh.ep > 1
    ranks = mesh.efsdp if is_sparse else mesh.fsdp
    is_stack = len(binding.shape) == 3
    return 1 if is_stack and ranks * mesh.ep > (geometry.num_experts or 0) else 0, ranks, is_sparse


def _parallel_bindings(
    layout: Layout, geometry: Geometry, mesh: Mesh, place: Place, *, tied: bool
) -> Iterator[Binding]:
    """What pipeline, tensor and expert parallelism leave of each tensor."""

    def cut(template: str, shape: Shape, indices: Mapping[str, int]) -> Box | None:
        if _stage(template, indices, geometry, mesh) != place.pp:
            return None
        return _cut_parallel(template, shape, indices, geometry, mesh, place)

    return bind(layout, geometry, tied=tied, cut=cut)


def rank_name(rank: int, fqn: str) -> str:
    """How tables call what ``rank`` holds of the tensor ``fqn``."""
    return f"{rank}/{fqn}"


def mesh_bindings(layout: Layout, geometry: Geometry, mesh: Mesh, *, tied: bool) -> Iterator[Binding]:
    """What every rank stores, each tensor under its ``rank_name``."""
    for rank, binding in bindings_by_rank(layout, geometry, mesh, tied=tied):
        yield binding._replace(name=rank_name(rank, binding.name))


def _degrees(mesh: Mesh) -> Iterator[tuple[str, int]]:
    yield from (("tp", mesh.tp), ("fsdp", mesh.fsdp), ("ep", mesh.ep), ("pp", mesh.pp))


def _stage(template: str, indices: Mapping[str, int], geometry: Geometry, mesh: Mesh) -> int:
    """The pipeline stage of a parameter: layers in equal runs, the embeddings first, norm and head last."""
    if "layer" in indices:
        return indices["layer"] // -(-geometry.num_hidden_layers // mesh.pp)
    return 0 if template == EMBEDDING else mesh.pp - 1


def _cut_parallel(
    template: str, shape: Shape, indices: Mapping[str, int], geometry: Geometry, mesh: Mesh, place: Place
) -> Box | None:
    """The box that tensor and expert parallelism leave of a logical parameter."""
    is_expert = "expert" in indices
    if is_expert and mesh.ep > 1:
        mine = chunk(geometry.num_experts or 0, mesh.ep, place.ep)
        return Box.whole(shape) if indices["expert"] in mine else None
    axes = BY_NAME[template].axes
    dim = next((i for i, axis in enumerate(axes) if axis in CUT_BY_TP), None)
    if dim is None or mesh.tp == 1:
        return Box.whole(shape)
    part = _heads(axes[dim], geometry, mesh.tp, place.tp) or chunk(shape[dim], mesh.tp, place.tp)
    if not part:
        return None
    start, size = [0] * len(shape), list(shape)
    start[dim], size[dim] = part.start, len(part)
    return Box(tuple(start), tuple(size))


def _heads(axis: str, geometry: Geometry, tp: int, rank: int) -> range | None:
    """Rows of the heads that a tensor-parallel rank holds. Beyond the key-value heads, neighbours share one."""
    heads = {"Q": geometry.num_attention_heads, "K": geometry.num_key_value_heads}.get(axis)
    if heads is None:
        return None
    if tp > heads:
        first, count = rank * heads // tp, 1
    else:
        first, count = rank * (heads // tp), heads // tp
    return range(first * geometry.head_dim, (first + count) * geometry.head_dim)


def _cut_fsdp(binding: Binding, geometry: Geometry, mesh: Mesh, place: Place, boxes: Boxes) -> Binding | None:
    """What FSDP2 leaves of a rank's tensor: rows, or dim 1 of stacked experts if there are more ranks than experts."""
    if binding.rule.optional:  # a buffer, which FSDP does not shard
        return binding
    dim, ranks, is_sparse = _fsdp_axis(binding, geometry, mesh)
    if ranks == 1:
        return binding
    mine = chunk(binding.shape[dim], ranks, place.efsdp if is_sparse else place.fsdp)
    if not mine:
        return None
    start, size = [0] * len(binding.shape), list(binding.shape)
    start[dim], size[dim] = mine.start, len(mine)
    local = Box(tuple(start), tuple(size))
    return Binding(binding.name, local.size, tuple(_inside(binding.pieces, local, boxes)), binding.rule)


def _inside(pieces: Sequence[Piece], local: Box, boxes: Boxes) -> Iterator[Piece]:
    """What of ``pieces``, which are in order of their first dim, lies in ``local``, counted from its start."""
    back = tuple(-start for start in local.start)
    first = bisect_right(pieces, local.start[0], key=lambda piece: piece.stored.stop[0])
    for piece in islice(pieces, first, None):
        if piece.stored.start[0] >= local.stop[0]:
            return
        common = piece.stored.intersect(local)
        if common is None:
            continue
        dims = len(piece.box.size)
        inner = tuple(c - s for c, s in zip(common.start[-dims:], piece.stored.start[-dims:], strict=True))
        box = Box(tuple(a + b for a, b in zip(piece.box.start, inner, strict=True)), common.size[-dims:])
        yield Piece(piece.name, boxes[box], boxes[common.shifted(back)])
