"""Which boxes of each stored tensor the ranks of a mesh hold: for DCP chunks and for a per-rank folder's index."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .boxes import Box, Shape
from .layouts import Binding, Layout, Rule
from .ops import Piece
from .parameters import BY_NAME
from .placement import CUT_BY_TP, Mesh


def stored_boxes(local: Binding, whole: Binding) -> list[Box]:
    """The boxes of the global tensor ``whole`` that make up a rank's ``local`` one (a fused pair has several)."""
    return merged(_piece_boxes(local, whole))


def _piece_boxes(local: Binding, whole: Binding) -> list[Box]:
    pieces: dict[str, list[Piece]] = {}
    for piece in whole.pieces:
        pieces.setdefault(piece.name, []).append(piece)
    return [_in_global(piece, pieces[piece.name]) for piece in local.pieces]


def merged(boxes: Iterable[Box]) -> list[Box]:
    """Boxes that lie side by side, joined: the fewest that this gives, in order of their start."""
    found = list(boxes)
    for dim in reversed(range(len(found[0].size))):
        found.sort(key=lambda box: (box.start[:dim] + box.start[dim + 1 :], box.start[dim]))
        joined: list[Box] = []
        for box in found:
            last = joined[-1] if joined else None
            if last is not None and _continues(last, box, dim):
                size = (*last.size[:dim], last.size[dim] + box.size[dim], *last.size[dim + 1 :])
                joined[-1] = Box(last.start, size)
            else:
                joined.append(box)
        found = joined
    return sorted(found)


def describe_cut(rule: Rule, mesh: Mesh) -> dict[str, Any]:
    """How tensor or expert parallelism cuts a stored tensor: ``kind`` and ``dim``."""
    is_stack = len(rule.axes) == 3
    if "{expert}" in rule.parts[0] and mesh.ep > 1:
        return {"kind": "expert", "dim": 0 if is_stack else None}
    axes = BY_NAME[rule.parts[0]].axes
    dim = next((index for index, axis in enumerate(axes) if axis in CUT_BY_TP), None)
    if dim is None or mesh.tp == 1:
        return {"kind": "replicated", "dim": None}
    return {"kind": ("column", "row")[dim], "dim": dim + is_stack}


def index_json(
    layout: Layout, mesh: Mesh, whole: Sequence[Binding], held: Sequence[Sequence[Binding]], dtypes: Mapping[str, str]
) -> dict[str, Any]:
    """The content of a per-rank folder's index. ``held[rank]`` are local bindings, ``dtypes`` by FQN."""
    globals_ = {binding.name: binding for binding in whole}
    held_elements: dict[str, dict[str, int]] = {}
    ranks = []
    for rank, bindings in enumerate(held):
        tensors = {}
        for binding in bindings:
            boxes = stored_boxes(binding, globals_[binding.name])
            tensors[binding.name] = [[list(box.start), list(box.size)] for box in boxes]
            counts = held_elements.setdefault(binding.name, {})
            for part, count in _elements(binding).items():
                counts[part] = counts.get(part, 0) + count
        ranks.append({"place": mesh.place(rank)._asdict(), "tensors": tensors})
    return {
        "layout": layout.name,
        "schema": layout.schema,
        "mesh": {"tp": mesh.tp, "fsdp": mesh.fsdp, "ep": mesh.ep, "pp": mesh.pp},
        "tensors": {
            name: {
                "dtype": dtypes[name],
                "shape": list(binding.shape),
                **describe_cut(binding.rule, mesh),
                "replicas": _replicas(held_elements[name], _elements(binding)),
            }
            for name, binding in globals_.items()
        },
        "ranks": ranks,
    }


def chunk_owners(
    whole: Sequence[Binding], held: Sequence[Sequence[Binding]]
) -> Iterator[tuple[str, list[tuple[Box, int]]]]:
    """For each tensor boxes that cover it once, each with the first rank that holds it."""
    globals_ = {binding.name: binding for binding in whole}
    owners: dict[str, dict[Box, int]] = {name: {} for name in globals_}
    for rank, bindings in enumerate(held):
        for binding in bindings:
            # joined, boxes of q, k and v would overlap where ranks share k and v and not q
            boxes_of = _piece_boxes if _has_unequal_parts(binding) else stored_boxes
            for box in boxes_of(binding, globals_[binding.name]):
                owners[binding.name].setdefault(box, rank)
    for name, boxes in owners.items():
        if not _has_unequal_parts(globals_[name]):
            yield name, sorted(boxes.items())
            continue
        by_rank: dict[int, list[Box]] = {}
        for box, rank in boxes.items():
            by_rank.setdefault(rank, []).append(box)
        yield name, sorted((box, rank) for rank, own in by_rank.items() for box in merged(own))


def _has_unequal_parts(binding: Binding) -> bool:
    """Whether ranks may share some of the parts and not the others: q, k and v fused in one."""
    return len(binding.rule.parts) > 2


def _elements(binding: Binding) -> dict[str, int]:
    """Elements of a tensor, of each part by itself where ranks may share one and not another."""
    if not _has_unequal_parts(binding):
        return {"": math.prod(binding.shape)}
    counts: dict[str, int] = {}
    for piece in binding.pieces:
        counts[piece.name] = counts.get(piece.name, 0) + piece.box.volume
    return counts


def _replicas(held: Mapping[str, int], whole: Mapping[str, int]) -> int | None:
    """How many ranks hold each element; ``None`` where that is not the same for all of them."""
    found = {held[part] // count for part, count in whole.items()}
    return found.pop() if len(found) == 1 else None


def _in_global(piece: Piece, pieces: Sequence[Piece]) -> Box:
    """Where a rank's piece lies in the global tensor, whose own ``pieces`` of that parameter are given."""
    home = next(
        p for p in pieces if all(a <= b < c for a, b, c in zip(p.box.start, piece.box.start, p.box.stop, strict=True))
    )
    dims = len(piece.box.size)
    moved = (s + b - h for s, b, h in zip(home.stored.start[-dims:], piece.box.start, home.box.start, strict=True))
    lead: Shape = home.stored.start[:-dims]
    return Box((*lead, *moved), (*(1,) * len(lead), *piece.box.size))


def _continues(a: Box, b: Box, dim: int) -> bool:
    return b.start[dim] == a.start[dim] + a.size[dim] and all(
        i == dim or (a.start[i] == b.start[i] and a.size[i] == b.size[i]) for i in range(len(a.size))
    )
