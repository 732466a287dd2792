"""Row blocks of a parameter: gathered from the extents that hold them, scattered to those that shall.

Bytes move by positioned reads and writes of contiguous runs through a few reused, page-aligned buffers; strides are
resolved in memory, inside one block.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

from .files import Files, Output
from .planning import Extent

BLOCK_BYTES = 1 << 19
"""Default bytes of rows in flight per worker, on the wider side of a cast. They stay in a core's L2 from the read to
the write. Smaller writes cost more calls; for larger ones Linux looks for larger runs of free memory, which on virtual
machines are the ones that were given back to the host (1 MiB: 1.4 times the CPU, 2 MiB: three times).
"""


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
        if extent.columns == columns and extent.pitch == full:
            files.read_into(extent.file, start, block[(low - row) * full : (high - row) * full])
            continue
        import numpy as np

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
        if extent.columns == columns and extent.pitch == full:
            output.write_from(extent.file, start, block[(low - row) * full : (high - row) * full])
            continue
        import numpy as np

        left, part_width = extent.column * width, extent.columns * width
        here = np.frombuffer(block, np.uint8).reshape(rows, full)[low - row : high - row, left : left + part_width]
        if extent.pitch != part_width:  # neighbours of the row belong to somebody else
            for index in range(high - low):
                output.write_from(extent.file, start + index * extent.pitch, memoryview(here[index]))
            continue
        for first, count, view in _strips(extent, high - low, width, strided):
            np.frombuffer(view, np.uint8).reshape(count, -1)[:] = here[first : first + count]
            output.write_from(extent.file, start + first * extent.pitch, view)


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
    return all(extent.columns == columns and extent.pitch == columns * width for extent in extents)


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
