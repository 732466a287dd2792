"""Walk a plan: read each parameter in row blocks, digest, cast, write. Nothing is decided here.

A parameter passes in logical, row-major order whatever the source and the target cut it into, so its digest depends on
its values alone.

Where nobody needs to see the bytes, the kernel copies them (``copy_file_range``).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import xxhash

from .blocks import BLOCK_BYTES, Buffer, copy_rows, gather, holds_whole_rows, rows_per_block, scatter
from .casts import RowStep, ScaledRows, decoder
from .dtypes import itemsize
from .files import Files, Output
from .low_rank import Addition
from .planning import Move, Unit, source_files
from .remote import remote_of

COPY_BYTES = 8 << 20
"""Bytes that the kernel is asked to copy at once: few calls, and still a progress bar that moves."""

BUFFERS_PER_WORKER = 6
"""Blocks that one worker can hold at once in the worst case (a widening cast and its temporaries)."""


class Digest(NamedTuple):
    """xxh3_128 of a parameter's bytes, row-major: as written, and as read (equal without a cast)."""

    written: str
    read: str


Done = Callable[[int, Mapping[str, Digest]], None]
Advance = Callable[[int], None]


class Stopped(Exception):
    """Raised inside a worker when the run has been given up elsewhere."""


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
    is_remote = remote_of(source) is not None
    pending = Pending(units, skip or {}, in_order=is_remote)
    wanted = Counter(n for i, unit in enumerate(units) if i not in (skip or {}) for n in source_files(unit))

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
                    for name in source_files(units[index]):
                        wanted[name] -= 1
                        if not wanted[name]:
                            reads.finished(name)

        count = max(1, min(workers, len(units)))
        with ThreadPoolExecutor(count, thread_name_prefix="qwen3conv") as pool:
            futures = [pool.submit(work) for _ in range(count)]
            first: set[Future[None]] = set()
            try:
                first = wait(futures, return_when=FIRST_EXCEPTION).done
            finally:
                stop.set()  # also on Ctrl-C: the workers leave at their next block
                if any(not future.done() for future in futures):
                    reads.give_up()
        in_order = sorted(futures, key=lambda future: future not in first)  # what stopped the others, before these
        errors = [error for future in in_order if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, Stopped)):
            raise error
    return found


class Pending:
    """Units that wait for a worker, by file: each file has one writer as long as there are files enough.

    The kernel lets one writer at a time into a file, and those who wait for it spin. ``in_order`` they are taken as
    they come: of a source that is fetched file by file, as few files as can be are needed at a time.
    """

    def __init__(self, units: Sequence[Unit], skip: Container[int], *, in_order: bool = False) -> None:
        self._left: dict[str, deque[int]] = {}
        self._workers: Counter[str] = Counter()
        for index, unit in enumerate(units):
            if index not in skip:
                extents = unit[0].targets[0] if unit[0].targets else unit[0].source
                self._left.setdefault("" if in_order else extents[0].file, deque()).append(index)

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
        self._block_bytes = block_bytes
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
        widest = max(width, move.columns * itemsize(move.target_dtype))
        step = rows_per_block((move.source, *move.targets), widest, self._block_bytes)
        decode = decoder(move.source_dtype, move.target_dtype, move.name, row_steps(move, self._reads))
        written = xxhash.xxh3_128()
        read = written if decode is None else xxhash.xxh3_128()
        copied = self._copy(move) if decode is None and not self._digests else 0
        for row in range(copied, move.rows, step):
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

    def _copy(self, move: Move) -> int:
        """Have the kernel copy the rows of a parameter that has none cut; how many it did."""
        width, output = itemsize(move.source_dtype), self._output
        if output is None or not all(holds_whole_rows(c, move.columns, width) for c in (move.source, *move.targets)):
            return 0
        step = max(1, COPY_BYTES // (move.columns * width))
        for row in range(0, move.rows, step):
            rows = min(step, move.rows - row)
            if not all(copy_rows(move.source, copy, row, rows, self._reads, output) for copy in move.targets):
                return row
            self._tick(rows * move.columns * width)
        return move.rows

    def _tick(self, count: int) -> None:
        self._advance(count)
        if self._stop.is_set():
            raise Stopped


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


def _update_with_zeros(digest: xxhash.xxh3_128, count: int) -> None:
    zeros = bytes(min(count, 1 << 16))
    while count > 0:
        digest.update(zeros[:count])
        count -= len(zeros)
