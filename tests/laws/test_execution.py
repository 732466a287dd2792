"""Laws of the engine's moving parts: who works on what, when the disk is told to begin, where two copies differ."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen3conv.converters import execution, reading
from qwen3conv.converters import files as open_files
from qwen3conv.converters.execution import Pending, run
from qwen3conv.converters.files import EARLY_BYTES, Files, Output
from qwen3conv.converters.planning import Entry, Extent, Move, Unit
from qwen3conv.converters.reading import first_difference
from tests.laws.tiny import scratch

pytestmark = pytest.mark.torch_free


def unit_in(file: str) -> Unit:
    return (
        Move("x", 1, 1, (Extent(0, 1, 0, 1, "source", 0, 2),), "BF16", ((Extent(0, 1, 0, 1, file, 0, 2),),), "BF16", 1),
    )


@given(
    files=st.lists(st.sampled_from("abcd"), max_size=20),
    skip=st.sets(st.integers(0, 19)),
    turns=st.lists(st.integers(0, 2), min_size=60, max_size=60),
)
def test_every_unit_is_handed_out_once_and_no_file_is_shared_while_another_waits(
    files: list[str], skip: set[int], turns: list[int]
) -> None:
    pending = Pending([unit_in(file) for file in files], skip)
    at: dict[int, str | None] = {0: None, 1: None, 2: None}
    left = [index for index in range(len(files)) if index not in skip]
    for worker in turns:
        taken = pending.take(at[worker])
        if taken is None:
            assert not left
            at[worker] = None
            continue
        file, index = taken
        assert files[index] == file
        others = {at[other] for other in at if other != worker}
        waiting = {files[i] for i in left}
        if file != at[worker]:
            assert file not in others or waiting <= others
        else:
            assert file in waiting
        assert index == min(i for i in left if files[i] == file)
        left.remove(index)
        at[worker] = file


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=30), st.integers(4, 12))
def test_the_disk_is_told_of_every_long_run_once_and_of_written_bytes_only(
    writes: list[tuple[int, int]], early: int
) -> None:
    told: list[tuple[int, int]] = []

    class Recorded(Files):
        def begin_flush(self, name: str, offset: int, count: int) -> None:
            told.append((offset, offset + count))

    with scratch() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_files, "EARLY_BYTES", early)
        (root / "file").touch()
        expected = bytearray()
        with Recorded(root, os.O_RDWR) as files:
            output, at = Output(files), 0
            for number, (gap, size) in enumerate(writes):
                expected += bytes(gap) + bytes([number + 1]) * size
                output.write_from("file", at + gap, memoryview(expected)[at + gap :])
                at += gap + size
        assert (root / "file").read_bytes() == bytes(expected)
    assert told == sorted(told)
    assert all(early <= end - begin and end <= at for begin, end in told)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(told))
    end = told[-1][1] if told else 0
    assert at - max(end, writes[0][0] if writes else 0) < early


def test_an_early_start_drops_nothing_that_was_written(tmp_path: Path) -> None:
    content = os.urandom(1 << 20) * (3 * EARLY_BYTES >> 20)
    (tmp_path / "file").touch()
    with Files(tmp_path, os.O_RDWR) as files:
        output = Output(files)
        for at in range(0, len(content), 1 << 20):
            output.write_from("file", at, memoryview(content)[at : at + (1 << 20)])
        files.flush("file")
    assert (tmp_path / "file").read_bytes() == content


@given(rows=st.integers(1, 9), differing=st.sets(st.integers(0, 8)))
def test_the_first_row_that_differs_is_found_wherever_it_is(rows: int, differing: set[int]) -> None:
    with scratch() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "BLOCK_BYTES", 12)  # two rows of three BF16
        mine = bytes(range(6 * rows))
        theirs = bytearray(mine)
        for row in differing:
            if row < rows:
                theirs[6 * row + 5] ^= 0x80
        (root / "file").write_bytes(mine + theirs)
        copies = tuple((Extent(0, rows, 0, 3, "file", at, 6),) for at in (0, len(mine)))
        entry = Entry("x", "BF16", (rows, 3), copies)
        expected = min((row for row in differing if row < rows), default=None)
        for alone in (0, len(mine) + 1):  # two threads, or one
            patch.setattr(reading, "_WORTH_A_THREAD", alone)
            with Files(root, os.O_RDONLY) as files:
                assert first_difference(entry, files) == expected


def cut(rows: int, at: list[int], file: str, start: int, gap: int) -> tuple[Extent, ...]:
    """Extents of whole rows of three BF16, cut before the rows ``at``, ``gap`` bytes apart."""
    ends = sorted({0, rows, *(row for row in at if row < rows)})
    return tuple(
        Extent(low, high - low, 0, 3, file, start + low * 6 + index * gap, 6)
        for index, (low, high) in enumerate(pairwise(ends))
    )


@pytest.mark.skipif(not hasattr(os, "copy_file_range"), reason="Linux has it")
@given(
    rows=st.integers(1, 9),
    source=st.lists(st.integers(1, 8), max_size=3),
    target=st.lists(st.integers(1, 8), max_size=3),
    calls=st.integers(0, 12),
)
def test_the_kernel_copies_what_blocks_would_and_blocks_what_the_kernel_will_not(
    rows: int, source: list[int], target: list[int], calls: int
) -> None:
    made: list[int] = []
    ticks: list[int] = []
    kernel = os.copy_file_range

    def sometimes(here: int, there: int, count: int, begin: int, offset: int) -> int:
        made.append(count)
        if len(made) > calls:
            raise OSError(38, "not here")
        return kernel(here, there, min(count, 7), begin, offset)  # as at a signal: less than it was asked for

    with scratch() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "copy_file_range", sometimes)
        patch.setattr(execution, "COPY_BYTES", 18)
        content = os.urandom(200)
        (root / "in").write_bytes(content)
        (root / "out").write_bytes(bytes(200))
        reads, writes = cut(rows, source, "in", 3, 5), cut(rows, target, "out", 8, 2)
        move = Move("x", rows, 3, reads, "BF16", (writes,), "BF16", rows)
        assert run([(move,)], source=root, target=root, digests=False, advance=ticks.append) == {}
        found = (root / "out").read_bytes()
    expected = bytearray(200)
    for row in range(rows):
        (here,) = (e for e in reads if e.row <= row < e.row + e.rows)
        (there,) = (e for e in writes if e.row <= row < e.row + e.rows)
        begin, end = here.offset + (row - here.row) * 6, there.offset + (row - there.row) * 6
        expected[end : end + 6] = content[begin : begin + 6]
    assert found == bytes(expected)
    assert sum(ticks) == rows * 6
    assert made
