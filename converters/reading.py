"""Single parameters, read where a decision needs their values: whole, or until the first row that tells."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from .blocks import BLOCK_BYTES, Buffer, gather, rows_per_block
from .dtypes import itemsize
from .files import Files
from .planning import Copy, Entry

_WORTH_A_THREAD = 1 << 20
"""Bytes of a parameter from which on two threads compare faster than one."""


def read_whole(entry: Entry, folder: Path) -> bytearray:
    """The bytes of a small parameter, row-major."""
    raw = bytearray(entry.nbytes)
    with Files(folder, os.O_RDONLY) as files:
        width = itemsize(entry.dtype)
        gather(entry.copies[0], 0, entry.rows, entry.columns, width, memoryview(raw), files, Buffer(1 << 16))
    return raw


def last_nonzero_row(entry: Entry, folder: Path) -> int:
    """The last row of a parameter that is not all zero bits; -1 when every row is."""
    width = entry.columns * itemsize(entry.dtype)
    step = rows_per_block(entry.copies[:1], width, BLOCK_BYTES)
    buffer, strided = Buffer(step * width), Buffer(BLOCK_BYTES)
    with Files(folder, os.O_RDONLY) as files:
        for high in range(entry.rows, 0, -step):
            low = max(0, high - step)
            block = buffer.view((high - low) * width)
            gather(entry.copies[0], low, high - low, entry.columns, itemsize(entry.dtype), block, files, strided)
            kept = bytes(block).rstrip(b"\0")
            if kept:
                return low + (len(kept) - 1) // width
    return -1


def first_difference(entry: Entry, files: Files) -> int | None:
    """The first row in which two copies of a parameter differ, ``None`` when all are the same bytes.

    ``files`` are those of its checkpoint.
    """
    first, *rest = dict.fromkeys(entry.copies)
    if entry.nbytes < _WORTH_A_THREAD:
        spans = (_first_difference(entry, first, copy, range(entry.rows), files) for copy in rest)
        return next((row for row in spans if row is not None), None)
    half = -(-entry.rows // 2)
    ranges = range(half), range(half, entry.rows)
    with ThreadPoolExecutor(len(ranges)) as pool:
        try:
            for copy in rest:
                rows = pool.map(lambda span, copy=copy: _first_difference(entry, first, copy, span, files), ranges)
                found = next((row for row in rows if row is not None), None)
                if found is not None:
                    return found
        except BaseException:
            files.give_up()  # on Ctrl-C too: the pool waits for its threads
            raise
    return None


def _first_difference(entry: Entry, first: Copy, second: Copy, span: range, files: Files) -> int | None:
    """The first row of ``span`` in which two copies differ."""
    width = entry.columns * itemsize(entry.dtype)
    step = rows_per_block((first, second), width, BLOCK_BYTES)
    mine, theirs, strided = Buffer(step * width), Buffer(step * width), Buffer(BLOCK_BYTES)
    for row in span[::step]:
        rows = min(step, span.stop - row)
        blocks = mine.view(rows * width), theirs.view(rows * width)
        for extents, block in zip((first, second), blocks, strict=True):
            gather(extents, row, rows, entry.columns, itemsize(entry.dtype), block, files, strided)
        if xxhash.xxh3_128_digest(blocks[0]) != xxhash.xxh3_128_digest(blocks[1]):
            cuts = ((i * width, (i + 1) * width) for i in range(rows))
            unequal = (i for i, (low, high) in enumerate(cuts) if blocks[0][low:high] != blocks[1][low:high])
            return row + next(unequal)
    return None
