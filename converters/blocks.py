"""Row blocks of a parameter: gathered from the extents that hold them, scattered to those that shall.

Bytes move by positioned reads and writes of contiguous runs through a few reused, page-aligned buffers; strides are
resolved in memory, inside one block, and so are axes that are stored the other way round.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from .files import Files, Output
from .planning import Copy, Extent

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

BLOCK_BYTES = 1 << 19
"""Default bytes of rows in flight per worker, on the wider side of a cast. They stay in a core's L2 from the read to
the write.
"""


TRANSPOSED_BLOCKS = 4
"""Blocks in flight of a parameter that is stored column by column. A block of rows is then a few elements of every
column, and they come and go a column at a time."""


def rows_per_block(copies: Iterable[Copy], width: int, block_bytes: int) -> int:
    """Rows of ``width`` bytes that pass at once between ``copies`` of a parameter."""
    is_transposed = any(extent.transposed for copy in copies for extent in copy)
    return max(1, block_bytes * (TRANSPOSED_BLOCKS if is_transposed else 1) // width)


class Buffer:
    """Reused anonymous memory, page-aligned: the kernel copies several times slower into memory that is not."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = memoryview(mmap.mmap(-1, size))

    def view(self, count: int) -> memoryview:
        """The first ``count`` bytes; grows for the rare row that is larger than a block."""
        if count > self.size:
            self.size = count
            self._memory = memoryview(mmap.mmap(-1, count))
        return self._memory[:count]


def gather(
    source: Sequence[Extent],
    row: int,
    rows: int,
    columns: int,
    width: int,
    block: memoryview,
    files: Files,
    strided: Buffer,
) -> None:
    """Fill ``block`` with whole rows ``row .. row + rows`` of a parameter, ``width`` bytes per element."""
    full = columns * width
    for extent, low, high in _overlapping(source, row, rows):
        start = extent.offset + (low - extent.row) * extent.pitch
        if extent.columns == columns and extent.pitch == full and not extent.transposed:
            files.read_into(extent.file, start, block[(low - row) * full : (high - row) * full])
            continue
        import numpy as np

        if extent.transposed:
            _gather_columns(extent, low, high, _elements(block, width, columns)[low - row : high - row], files, strided)
            continue
        here = np.frombuffer(block, np.uint8).reshape(rows, full)[low - row : high - row]
        left = extent.column * width
        for first, count, view in _strips(extent, high - low, width, strided):
            files.read_into(extent.file, start + first * extent.pitch, view)
            part = np.frombuffer(view, np.uint8).reshape(count, -1)
            here[first : first + count, left : left + extent.columns * width] = part[:, : extent.columns * width]


def scatter(
    target: Sequence[Extent],
    row: int,
    rows: int,
    columns: int,
    width: int,
    block: memoryview,
    output: Output,
    strided: Buffer,
) -> None:
    """Write whole rows ``row .. row + rows`` of a parameter, held in ``block``, to the extents that share them."""
    full = columns * width
    for extent, low, high in _overlapping(target, row, rows):
        start = extent.offset + (low - extent.row) * extent.pitch
        if extent.columns == columns and extent.pitch == full and not extent.transposed:
            output.write_from(extent.file, start, block[(low - row) * full : (high - row) * full])
            continue
        import numpy as np

        if extent.transposed:
            part = _elements(block, width, columns)[low - row : high - row]
            _scatter_columns(extent, low, high, part, output, strided)
            continue
        left, part_width = extent.column * width, extent.columns * width
        here = np.frombuffer(block, np.uint8).reshape(rows, full)[low - row : high - row, left : left + part_width]
        if extent.pitch != part_width:  # neighbours of the row belong to somebody else
            for index in range(high - low):
                output.write_from(extent.file, start + index * extent.pitch, memoryview(here[index]))
            continue
        for first, count, view in _strips(extent, high - low, width, strided):
            np.frombuffer(view, np.uint8).reshape(count, -1)[:] = here[first : first + count]
            output.write_from(extent.file, start + first * extent.pitch, view)


def _elements(block: memoryview, width: int, columns: int) -> npt.NDArray[np.unsignedinteger]:
    """The block as rows of elements, whatever they mean."""
    import numpy as np

    found: npt.NDArray[np.unsignedinteger] = np.frombuffer(block, f"u{width}").reshape(-1, columns)
    return found


def _gather_columns(
    extent: Extent,
    low: int,
    high: int,
    rows: npt.NDArray[np.unsignedinteger],
    files: Files,
    strided: Buffer,
) -> None:
    """Fill ``rows``, which are rows ``low .. high`` of a parameter, from an extent that is stored column by column.

    Columns are read with what lies between them as long as that is at most as much as three times themselves.
    """
    import numpy as np

    width = rows.itemsize
    run = (high - low) * width
    start = extent.offset + (low - extent.row) * width
    together = run * 4 >= extent.pitch
    pitch = extent.pitch if together else run
    step = max(1, strided.size // pitch)
    for first in range(0, extent.columns, step):
        count = min(step, extent.columns - first)
        view = strided.view((count - 1) * pitch + run)
        if together:
            files.read_into(extent.file, start + first * extent.pitch, view)
        else:
            for i in range(count):
                files.read_into(extent.file, start + (first + i) * extent.pitch, view[i * run : (i + 1) * run])
        lines = np.ndarray((count, high - low), rows.dtype, view, 0, (pitch, width))
        rows[:, extent.column + first : extent.column + first + count] = lines.T


def _scatter_columns(
    extent: Extent,
    low: int,
    high: int,
    rows: npt.NDArray[np.unsignedinteger],
    output: Output,
    strided: Buffer,
) -> None:
    """Write ``rows``, which are rows ``low .. high`` of a parameter, to an extent that is stored column by column."""
    import numpy as np

    run = (high - low) * rows.itemsize
    start = extent.offset + (low - extent.row) * rows.itemsize
    step = max(1, strided.size // run)
    for first in range(0, extent.columns, step):
        count = min(step, extent.columns - first)
        view = strided.view(count * run)
        lines = np.frombuffer(view, rows.dtype).reshape(count, -1)
        lines[:] = rows[:, extent.column + first : extent.column + first + count].T
        at_once = count if run == extent.pitch else 1  # else what lies between them belongs to somebody else
        for i in range(0, count, at_once):
            place = start + (first + i) * extent.pitch
            output.write_from(extent.file, place, view[i * run : (i + at_once) * run])


def copy_rows(
    source: Sequence[Extent], target: Sequence[Extent], row: int, rows: int, files: Files, output: Output
) -> bool:
    """Have the kernel copy rows that lie whole and back to back on either side; ``False`` if it did not copy all."""
    for extent, low, high in _overlapping(source, row, rows):
        begin = extent.offset + (low - extent.row) * extent.pitch
        for other, first, last in _overlapping(target, low, high - low):
            skipped, count = (first - low) * extent.pitch, (last - first) * extent.pitch
            offset = other.offset + (first - other.row) * other.pitch
            if not output.copy_from(files, extent.file, begin + skipped, other.file, offset, count):
                return False
    return True


def holds_whole_rows(extents: Sequence[Extent], columns: int, width: int) -> bool:
    """Whether every row of a parameter is one run of bytes, and follows the row before it in its extent."""
    return all(e.columns == columns and e.pitch == columns * width and not e.transposed for e in extents)


def _overlapping(extents: Sequence[Extent], row: int, rows: int) -> Iterator[tuple[Extent, int, int]]:
    for extent in extents:
        low, high = max(row, extent.row), min(row + rows, extent.row + extent.rows)
        if low < high:
            yield extent, low, high


def _strips(extent: Extent, rows: int, width: int, strided: Buffer) -> Iterator[tuple[int, int, memoryview]]:
    """Cut ``rows`` of an extent into runs that fit the buffer: first row, rows, a view to hold them.

    A run reaches from its first element to its last: with a pitch wider than the extent, the rows are read one by one.
    """
    part = extent.columns * width
    step = max(1, strided.size // part) if extent.pitch == part else 1
    for first in range(0, rows, step):
        count = min(step, rows - first)
        yield first, count, strided.view(count * part)
