"""Low-rank additions: ``W + scale * left @ right``, whole rows of W at a time, with both factors read from a file.

Arithmetic in float32, every product and every sum rounded on its own, ranks added up in order. A matrix product of
numpy would be faster, but its last bits depend on the processor and on how many rows are asked for at a time (seen with
OpenBLAS 0.3.31), and a merged model must have one fingerprint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from .casts import widen
from .dtypes import itemsize
from .errors import SourceError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from .casts import Float32

_READ_BYTES = 1 << 20
"""Bytes of a factor that are read at a time."""

_TILE = 1 << 16
"""Elements of the sum that are worked on at a time: with one product beside them they stay in a core's cache."""

Read = Callable[[str, int, memoryview], None]
"""Fills a view from an offset, in bytes, of a file on."""


class Factor(NamedTuple):
    """A matrix in a file: element (i, j) begins ``offset + i * pitch + j * step`` bytes into it.

    ``file`` is an absolute path, for an adapter has a folder of its own. ``step`` is larger than an element where only
    some columns of what is stored are meant, and larger than ``pitch`` where it is stored transposed.
    """

    file: str
    offset: int
    dtype: str
    rows: int
    columns: int
    pitch: int
    step: int

    @classmethod
    def whole(cls, file: str, offset: int, dtype: str, rows: int, columns: int) -> Factor:
        """All of a matrix that is stored row-major."""
        width = itemsize(dtype)
        return cls(file, offset, dtype, rows, columns, columns * width, width)

    @property
    def transposed(self) -> Factor:
        """The same elements with rows and columns exchanged."""
        return self._replace(rows=self.columns, columns=self.rows, pitch=self.step, step=self.pitch)

    def part(self, row: int, rows: int, column: int, columns: int, every: int = 1) -> Factor:
        """``rows`` rows from ``row`` on; of the columns from ``column`` on every ``every``-th, ``columns`` in all."""
        offset = self.offset + row * self.pitch + column * self.step
        return self._replace(offset=offset, rows=rows, columns=columns, step=self.step * every)

    def read(self, read: Read, row: int, rows: int) -> npt.NDArray[np.float32]:
        """Rows ``row .. row + rows`` as float32, exactly. Reads what lies between two of its elements too."""
        import numpy as np

        width = itemsize(self.dtype)
        raw = np.empty((rows, self.columns), f"u{width}")
        lines, place = (raw, self) if self.step <= self.pitch else (raw.T, self.transposed)
        first, other = (row, 0) if place is self else (0, row)
        count, length = lines.shape
        reach = (length - 1) * place.step + width
        at_once = max(1, 1 + (_READ_BYTES - reach) // place.pitch) if place.pitch <= 2 * reach else 1
        for low in range(0, count, at_once):
            many = min(at_once, count - low)
            block = bytearray((many - 1) * place.pitch + reach)
            offset = place.offset + (first + low) * place.pitch + other * place.step
            read(place.file, offset, memoryview(block))
            lines[low : low + many] = np.ndarray((many, length), raw.dtype, block, 0, (place.pitch, place.step))
        return widen(raw.data.cast("B"), self.dtype).reshape(rows, self.columns)


class LowRank(NamedTuple):
    """``scale * left @ right``: left is (rows of the parameter, rank), right is (rank, columns of the parameter)."""

    left: Factor
    right: Factor
    scale: float

    @property
    def rank(self) -> int:
        """Columns of left, rows of right."""
        return self.right.rows

    @property
    def resident_bytes(self) -> int:
        """Bytes that are held while the parameter passes: the right factor and one tile of the sum, in float32."""
        return 4 * self.right.rows * self.right.columns + 8 * max(_TILE, self.right.columns)


class Addition:
    """A low-rank addition on its way into a parameter; the right factor is held, the left one is read as rows pass."""

    def __init__(self, delta: LowRank, read: Read, name: str) -> None:
        self._left, self._read, self._name, self._scale = delta.left, read, name, delta.scale
        self._right = delta.right.read(read, 0, delta.right.rows)

    def apply(self, values: Float32, row: int) -> Float32:
        """``values``, whole rows of the parameter from ``row`` on, with their part of the product added.

        Raises:
            SourceError: a sum is not a finite number.
        """
        import numpy as np

        rank, columns = self._right.shape
        before = values.reshape(-1, columns)
        after = np.empty_like(before)
        left = self._left.read(self._read, row, before.shape[0])
        scale = np.float32(self._scale)
        tile = max(1, _TILE // columns)
        product = np.empty((min(tile, before.shape[0]), columns), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # told below, with the parameter's name
            for low in range(0, before.shape[0], tile):
                part, out = left[low : low + tile], after[low : low + tile]
                term = product[: len(part)]
                np.multiply(part[:, :1], self._right[0], out=out)
                for k in range(1, rank):
                    np.multiply(part[:, k : k + 1], self._right[k], out=term)
                    out += term
                out *= scale
                out += before[low : low + tile]
        if not np.isfinite(after).all():
            raise SourceError(f"{self._name}: base and adapter add up to values that are not finite")
        return after.reshape(-1)
