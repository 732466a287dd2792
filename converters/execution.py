"""Walk a plan: read each parameter in row blocks, digest, cast, write. Nothing is decided here.

A parameter passes in logical, row-major order whatever the source and the target cut it into, so its digest depends on
its values alone. Bytes move by positioned reads and writes of contiguous runs through a few reused, page-aligned
buffers; strides are resolved in memory, inside one block.

Not ``copy_file_range``: tensors lie at other offsets inside a page on either side, and then it took 1.4 times the CPU
of reading and writing blocks, hashing included (ext4, Linux 6.18; as much on tmpfs).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import threading
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import xxhash

from .casts import RowStep, ScaledRows, decoder
from .dtypes import itemsize
from .errors import DestinationError, SourceError
from .low_rank import Addition
from .planning import Copy, Entry, Extent, Move, Unit

BLOCK_BYTES = 1 << 19
"""Default bytes of rows in flight per worker, on the wider side of a cast. They stay in a core's L2 from the read to
the write. Smaller writes cost more calls; for larger ones Linux looks for larger runs of free memory, which on virtual
machines are the ones that were given back to the host (1 MiB: 1.4 times the CPU, 2 MiB: three times).
"""

BUFFERS_PER_WORKER = 6
"""Blocks that one worker can hold at once in the worst case (a widening cast and its temporaries)."""

EARLY_BYTES = 8 << 20
"""Written bytes after which the disk is told to begin, so that a flush finds little left to wait for."""


class Digest(NamedTuple):
    """xxh3_128 of a parameter's bytes, row-major: as written, and as read (equal without a cast)."""

    written: str
    read: str


Done = Callable[[int, Mapping[str, Digest]], None]
Advance = Callable[[int], None]


class Stopped(Exception):
    """Raised inside a worker when the run has been given up elsewhere."""


class Files:
    """Open files of one folder, by relative name, shared by all workers. Every offset is explicit.

    An absolute name, which no checkpoint can bring along, is that of a file elsewhere: an adapter's.
    """

    def __init__(self, folder: Path, flags: int) -> None:
        self._folder, self._flags = folder, flags
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Files:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def descriptor(self, name: str) -> int:
        """The descriptor of ``name``, opened at first use."""
        with self._lock:
            found = self._open.get(name)
            if found is None:
                found = self._open[name] = self._opened(self._folder / name)
            return found

    def _opened(self, path: Path) -> int:
        flags = self._flags | os.O_CLOEXEC
        try:
            try:
                return os.open(path, flags)
            except OSError as error:
                # a checkpoint of thousands of rank files needs more than the customary 1024 descriptors
                soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
                if error.errno != errno.EMFILE or soft == hard:
                    raise
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
                return os.open(path, flags)
        except OSError as error:
            if self._flags & (os.O_RDWR | os.O_WRONLY):
                raise write_failed(path, error) from error
            raise SourceError(f"{path} cannot be opened: {error.strerror}") from error

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """Fill ``view`` from ``offset`` bytes into the file; a file that ends early is a ``SourceError``."""
        descriptor, done = self.descriptor(name), 0
        while done < len(view):
            try:
                count = os.preadv(descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise SourceError(
                    f"{self._folder / name}: reading at byte {offset + done} failed: {error.strerror}"
                ) from error
            if count == 0:
                raise SourceError(
                    f"{self._folder / name} ends at byte {offset + done}, but a tensor goes on there; it was cut short"
                )
            done += count

    def write_from(self, name: str, offset: int, view: memoryview) -> None:
        """Write all of ``view`` at ``offset`` bytes into the file."""
        descriptor, done = self.descriptor(name), 0
        while done < len(view):
            try:
                done += os.pwrite(descriptor, view[done:], offset + done)
            except OSError as error:
                raise write_failed(self._folder / name, error) from error

    def begin_flush(self, name: str, offset: int, count: int) -> None:
        """Have the disk begin to take ``count`` bytes at ``offset``, without waiting for it; a hint.

        Linux starts writing dirty pages when they are said to be unneeded, and keeps them cached until they are clean
        (``mm/fadvise.c``, ``generic_fadvise``). Asked for at once, none has become clean: the output stays cached.
        """
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.descriptor(name), offset, count, os.POSIX_FADV_DONTNEED)

    def flush(self, name: str) -> None:
        """Return once the file's bytes are on the disk."""
        try:
            os.fdatasync(self.descriptor(name))
        except OSError as error:
            raise write_failed(self._folder / name, error) from error


def write_failed(path: Path, error: OSError) -> DestinationError:
    """What to tell the user when ``path`` cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DestinationError(f"no space left while writing {path}: free some and start again")
    return DestinationError(f"{path} cannot be written: {error.strerror}")


def run(
    units: Sequence[Unit],
    *,
    source: Path,
    target: Path | None,
    workers: int = 1,
    block_bytes: int = BLOCK_BYTES,
    digests: bool = True,
    skip: Mapping[int, object] | None = None,
    done: Done = lambda index, digests: None,
    advance: Advance = lambda count: None,
) -> dict[str, Digest]:
    """Carry out ``units`` and return each parameter's digest (none with ``digests=False``).

    ``skip`` holds the indices of units that are already there. ``done`` is called, by one worker at a time, after a
    unit's bytes are on the disk; ``advance`` with the bytes read, often. ``target`` is ``None`` if nothing is written.

    Raises:
        SourceError: the source cannot be read, or ends early.
        DestinationError: the target cannot be written.
    """
    found: dict[str, Digest] = {}
    stop, lock = threading.Event(), threading.Lock()
    pending = Pending(units, skip or {})

    with contextlib.ExitStack() as stack:
        reads = stack.enter_context(Files(source, os.O_RDONLY))
        writes = stack.enter_context(Files(target, os.O_RDWR)) if target is not None else None

        def work() -> None:
            worker = Worker(reads, writes, block_bytes, digests, stop, advance)
            file: str | None = None
            while True:
                with lock:
                    taken = pending.take(file)
                if taken is None or stop.is_set():
                    return
                file, index = taken
                result = worker.carry(units[index])
                if writes is not None:
                    for name in {extent.file for move in units[index] for copy in move.targets for extent in copy}:
                        writes.flush(name)
                with lock:
                    found.update(result)
                    done(index, result)

        with ThreadPoolExecutor(workers, thread_name_prefix="qwen3conv") as pool:
            futures = [pool.submit(work) for _ in range(workers)]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                stop.set()  # also on Ctrl-C: the workers leave at their next block
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, Stopped)):
            raise error
    return found


class Pending:
    """Units that wait for a worker, by file: each file has one writer as long as there are files enough.

    The kernel lets one writer at a time into a file, and those who wait for it spin.
    """

    def __init__(self, units: Sequence[Unit], skip: Container[int]) -> None:
        self._left: dict[str, deque[int]] = {}
        self._workers: Counter[str] = Counter()
        for index, unit in enumerate(units):
            if index not in skip:
                extents = unit[0].targets[0] if unit[0].targets else unit[0].source
                self._left.setdefault(extents[0].file, deque()).append(index)

    def take(self, file: str | None) -> tuple[str, int] | None:
        """The next unit for a worker that is on ``file``: of that file, or else of the one with fewest workers."""
        if file is None or file not in self._left:
            if file is not None:
                self._workers[file] -= 1
            file = min(self._left, key=lambda name: self._workers[name], default=None)
            if file is None:
                return None
            self._workers[file] += 1
        waiting = self._left[file]
        index = waiting.popleft()
        if not waiting:
            del self._left[file]
        return file, index


class Worker:
    """One thread's buffers and what it does with them."""

    def __init__(
        self,
        reads: Files,
        writes: Files | None,
        block_bytes: int,
        digests: bool,
        stop: threading.Event,
        advance: Advance,
    ) -> None:
        self._reads, self._digests, self._stop, self._advance = reads, digests, stop, advance
        self._output = None if writes is None else Output(writes)
        self._block = Buffer(block_bytes)
        self._strided = Buffer(block_bytes)

    def carry(self, unit: Unit) -> dict[str, Digest]:
        """Move every parameter of ``unit``."""
        result = {}
        for move in unit:
            digest = self._carry(move)
            if self._digests:
                result[move.name] = digest
        return result

    def _carry(self, move: Move) -> Digest:
        width = move.columns * itemsize(move.source_dtype)
        step = max(1, self._block.size // max(width, move.columns * itemsize(move.target_dtype)))
        decode = decoder(move.source_dtype, move.target_dtype, move.name, row_steps(move, self._reads))
        written = xxhash.xxh3_128()
        read = written if decode is None else xxhash.xxh3_128()
        for row in range(0, move.rows, step):
            rows = min(step, move.rows - row)
            block = self._block.view(rows * width)
            gather(move.source, row, rows, move.columns, itemsize(move.source_dtype), block, self._reads, self._strided)
            out = block if decode is None else decode(block, row)
            if self._digests:
                written.update(out)
                if decode is not None:
                    read.update(block)
            if self._output is not None:
                for copy in move.targets:
                    scatter(
                        copy, row, rows, move.columns, itemsize(move.target_dtype), out, self._output, self._strided
                    )
            self._tick(len(block))
        if self._digests and move.target_rows > move.rows:
            _update_with_zeros(written, (move.target_rows - move.rows) * move.columns * itemsize(move.target_dtype))
        return Digest(written.hexdigest(), read.hexdigest())

    def _tick(self, count: int) -> None:
        self._advance(count)
        if self._stop.is_set():
            raise Stopped


class Output:
    """What one worker writes. Every ``EARLY_BYTES`` that follow one another in a file, the disk is told to begin."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._runs: dict[str, tuple[int, int]] = {}

    def write_from(self, name: str, offset: int, view: memoryview) -> None:
        """Write all of ``view`` at ``offset`` bytes into the file."""
        self._files.write_from(name, offset, view)
        begin, end = self._runs.get(name, (offset, offset))
        if not end <= offset < end + EARLY_BYTES:  # frames of archives are left out, so runs have gaps
            begin = offset
        end = offset + len(view)
        if end - begin >= EARLY_BYTES:
            self._files.begin_flush(name, begin, end - begin)
            begin = end
        self._runs[name] = begin, end


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


def row_steps(move: Move, files: Files) -> list[RowStep]:
    """What is done to the values of a parameter on their way: block scales, then what is added to them."""
    steps: list[RowStep] = []
    if (scales := load_scales(move, files)) is not None:
        steps.append(scales)
    if move.delta is not None:
        steps.append(Addition(move.delta, files.read_into, move.name))
    return steps


def load_scales(move: Move, files: Files) -> ScaledRows | None:
    """The scale grid of a block-quantised parameter, read whole (1/16384 of its matrix); ``None`` for the others."""
    if move.scale is None:
        return None
    grid = move.scale
    raw = bytearray(grid.shape[0] * grid.shape[1] * itemsize(grid.dtype))
    files.read_into(grid.file, grid.offset, memoryview(raw))
    return ScaledRows(
        bytes(raw), grid.dtype, (grid.shape[0], grid.shape[1]), (grid.rows, grid.columns), move.columns, move.name
    )


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
    step = max(1, BLOCK_BYTES // width)
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


def first_difference(entry: Entry, folder: Path) -> int | None:
    """The first row in which two copies of a parameter differ, ``None`` when all are the same bytes."""
    first, *rest = dict.fromkeys(entry.copies)
    half = -(-entry.rows // 2)
    ranges = range(half), range(half, entry.rows)
    with Files(folder, os.O_RDONLY) as files, ThreadPoolExecutor(len(ranges)) as pool:
        for copy in rest:
            rows = pool.map(lambda span, copy=copy: _first_difference(entry, first, copy, span, files), ranges)
            found = next((row for row in rows if row is not None), None)
            if found is not None:
                return found
    return None


def _first_difference(entry: Entry, first: Copy, second: Copy, span: range, files: Files) -> int | None:
    """The first row of ``span`` in which two copies differ."""
    width = entry.columns * itemsize(entry.dtype)
    step = max(1, BLOCK_BYTES // width)
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


def _update_with_zeros(digest: xxhash.xxh3_128, count: int) -> None:
    zeros = bytes(min(count, 1 << 16))
    while count > 0:
        digest.update(zeros[:count])
        count -= len(zeros)
