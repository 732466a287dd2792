"""Boxes: axis-aligned rectangles of tensors, and where their bytes lie.

Everything a checkpoint says is a set of boxes: a chunk of a stored tensor is a box with a file and an offset, and a
logical parameter is a box of a stored tensor. Converting is intersecting such sets (``planning``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from .dtypes import itemsize

Shape = tuple[int, ...]


class Box(NamedTuple):
    """The rectangle ``[start, start + size)`` of a tensor, one entry per dim, in elements."""

    start: Shape
    size: Shape

    @classmethod
    def whole(cls, shape: Shape) -> Box:
        """The box that is all of a tensor of ``shape``."""
        return cls((0,) * len(shape), shape)

    @property
    def stop(self) -> Shape:
        """First index past the box, per dim."""
        return tuple(start + size for start, size in zip(self.start, self.size, strict=True))

    @property
    def volume(self) -> int:
        """Elements in the box; 1 for the box of a scalar."""
        return math.prod(self.size)

    def intersect(self, other: Box) -> Box | None:
        """The common part, or ``None`` when the two share no element."""
        start, size = [], []
        for low_a, size_a, low_b, size_b in zip(self.start, self.size, other.start, other.size, strict=True):
            low = low_a if low_a > low_b else low_b
            extent = min(low_a + size_a, low_b + size_b) - low
            if extent <= 0:
                return None
            start.append(low)
            size.append(extent)
        found = Box(tuple(start), tuple(size))
        return self if found == self else found  # the same numbers need not be kept twice

    def shifted(self, by: Shape) -> Box:
        """The box moved by ``by``, one entry per dim."""
        return Box(tuple(start + step for start, step in zip(self.start, by, strict=True)), self.size)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{low}:{high}" for low, high in zip(self.start, self.stop, strict=True)) + "]"


class Chunk(NamedTuple):
    """A box of a stored tensor whose elements lie contiguously, row-major, from ``offset`` bytes into ``file``."""

    box: Box
    file: str
    """Path relative to the checkpoint's folder, ``/``-separated."""
    offset: int
    column_major: bool = False
    """Of a matrix: its columns follow one another instead of its rows."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype code and shape of a tensor; no bytes."""

    name: str
    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, dense."""
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a store holds it: its spec and the chunks that together make it up, in file order."""

    spec: TensorSpec
    chunks: tuple[Chunk, ...]
    replicated: bool = False
    """Several ranks hold the same chunks, so that a box may occur more than once; otherwise that is an error."""

    @property
    def name(self) -> str:
        """The stored FQN."""
        return self.spec.name
