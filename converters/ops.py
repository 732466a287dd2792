"""How logical parameters make up one stored tensor. An op yields boxes; it has no direction, so it needs no inverse.

Ops move elements and never compute on them. What loses or invents numbers is a policy, not an op.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .boxes import Box, Shape
from .geometry import Geometry

Axis = tuple[str, ...]
"""A stored dim as the axis names that add up to it: ``("M", "M")`` is gate rows plus up rows."""


class Part(NamedTuple):
    """A logical parameter with its shape."""

    name: str
    shape: Shape


class Piece(NamedTuple):
    """A box of a logical parameter and the box of the stored tensor that holds it.

    The stored box may have leading dims of size 1 (the expert of a stacked tensor); the trailing dims correspond.
    """

    name: str
    box: Box
    stored: Box
    transposed: bool = False
    """The last two dims of the stored box are those of the parameter's the other way round."""


class Op(Protocol):
    """One way of storing parameters. ``runs_over`` is the brace of the parts that the stored name lacks."""

    @property
    def runs_over(self) -> str | None:
        """The template brace that one stored tensor runs over (``expert``), or ``None``."""

    def axes(self, parts: Sequence[tuple[str, ...]]) -> tuple[Axis, ...]:
        """The stored tensor's dims in terms of the parts' axis names."""

    def pieces(self, parts: Sequence[Sequence[Part]], geometry: Geometry) -> Iterator[Piece]:
        """Every piece, in stored order. ``parts[i]``: the parts at index ``i`` of what is run over."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Parts one after another along dim 0; of a single part, the part itself."""

    runs_over = None

    def axes(self, parts: Sequence[tuple[str, ...]]) -> tuple[Axis, ...]:
        """See ``Op``."""
        return (tuple(part[0] for part in parts), *((axis,) for axis in parts[0][1:]))

    def pieces(self, parts: Sequence[Sequence[Part]], geometry: Geometry) -> Iterator[Piece]:
        """See ``Op``."""
        (group,) = parts
        yield from _stacked_rows(group, leading=())


@dataclass(frozen=True, slots=True)
class Experts:
    """A leading expert dim; row e holds expert e's parts along the next dim.

    With one part this is ``w1_EFD``; with gate and up, transformers 5's ``gate_up_proj`` (gate rows, then up rows).
    """

    runs_over = "expert"

    def axes(self, parts: Sequence[tuple[str, ...]]) -> tuple[Axis, ...]:
        """See ``Op``."""
        return (("E",), *Rows().axes(parts))

    def pieces(self, parts: Sequence[Sequence[Part]], geometry: Geometry) -> Iterator[Piece]:
        """See ``Op``."""
        for expert, group in enumerate(parts):
            yield from _stacked_rows(group, leading=(expert,))


@dataclass(frozen=True, slots=True)
class ExpertColumns:
    """A leading expert dim; of expert e every part transposed, (in, out), one after another along the last dim."""

    runs_over = "expert"

    def axes(self, parts: Sequence[tuple[str, ...]]) -> tuple[Axis, ...]:
        """See ``Op``."""
        return (("E",), (parts[0][1],), tuple(part[0] for part in parts))

    def pieces(self, parts: Sequence[Sequence[Part]], geometry: Geometry) -> Iterator[Piece]:
        """See ``Op``."""
        for expert, group in enumerate(parts):
            column = 0
            for part in group:
                rows, columns = part.shape
                stored = Box((expert, 0, column), (1, columns, rows))
                yield Piece(part.name, Box.whole(part.shape), stored, transposed=True)
                column += rows


@dataclass(frozen=True, slots=True)
class GroupedHeads:
    """Fused q, k, v: per key-value head its query heads, then the key head, then the value head.

    Source: torchtitan 0.3.0, ``models/common/attention.py``, fused QKV linear.
    """

    runs_over = None

    def axes(self, parts: Sequence[tuple[str, ...]]) -> tuple[Axis, ...]:
        """See ``Op``."""
        return Rows().axes(parts)

    def pieces(self, parts: Sequence[Sequence[Part]], geometry: Geometry) -> Iterator[Piece]:
        """See ``Op``."""
        (group,) = parts
        groups = group[1].shape[0] // geometry.head_dim  # key heads: fewer than the model's on a tensor-parallel rank
        columns = group[0].shape[1]
        row = 0
        for index in range(groups):
            for part in group:
                rows = part.shape[0] // groups
                yield Piece(part.name, Box((index * rows, 0), (rows, columns)), Box((row, 0), (rows, columns)))
                row += rows


def _stacked_rows(group: Sequence[Part], leading: Shape) -> Iterator[Piece]:
    row = 0
    for part in group:
        rest = len(part.shape) - 1
        stored = Box((*leading, row, *(0,) * rest), (*(1,) * len(leading), *part.shape))
        yield Piece(part.name, Box.whole(part.shape), stored)
        row += part.shape[0]
