"""Text, sizes, tables and progress, without a conversion behind them."""

from __future__ import annotations

import itertools
import threading
import time

import click
import pytest

from qwen3conv.tools.cli.options import Options, usable_cores
from qwen3conv.tools.cli.output import (
    WIDTH,
    format_bytes,
    format_count,
    format_seconds,
    print_json,
    print_lines,
    print_table,
    printable,
)
from qwen3conv.tools.cli.progress import Lines, Meter
from qwen3conv.tools.cli.values import Size

pytestmark = pytest.mark.torch_free


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("two\nlines", "two\nlines"),
        ("Qwen-\u5343\u95ee", "Qwen-\u5343\u95ee"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\rb\tc\x00", "a\\rb\\tc\\x00"),
        ("\u202e", "\\u202e"),
        ("\udcff", "\\udcff"),
        ("\x9b2J", "\\x9b2J"),
    ],
)
def test_printable_escapes_what_a_terminal_would_obey(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (1_503_300_328, "1.50 GB"),
        (470_000_000_000, "470 GB"),
        (3e18, "3000 PB"),
    ],
)
def test_bytes_are_shown_with_three_digits_in_thousands(count: float, shown: str) -> None:
    assert format_bytes(count) == shown


def test_counts_and_times_read_as_people_say_them() -> None:
    assert [format_count(n, "file") for n in (0, 1, 36945)] == ["0 files", "1 file", "36,945 files"]
    times = {0.04: "0.0 s", 9.96: "10.0 s", 59.4: "59 s", 59.6: "1 min 0 s", 312: "5 min 12 s", 7380: "2 h 3 min"}
    assert {seconds: format_seconds(seconds) for seconds in times} == times


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("5GB", 5_000_000_000),
        ("5gb", 5_000_000_000),
        ("500MB", 500_000_000),
        ("2GiB", 2 << 30),
        ("1.5 KiB", 1536),
        ("0.5TB", 500_000_000_000),
        ("7B", 7),
    ],
)
def test_a_size_is_bytes(text: str, size: int) -> None:
    assert Size().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "GB", "5G", "-1", "0", "0.1", "5 apples", "1e9", "5GBB", "nan", "9" * 400])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a size"):
        Size().convert(text, None, None)


def test_the_defaults_of_the_options_are_the_engines_own() -> None:
    from qwen3conv.converters.policies import Choices

    assert Options().choices(None) == Choices()
    assert usable_cores() >= 1


def test_a_table_fits_the_width_and_loses_no_character(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    long = "y" * 150
    print_table([("name", long, "12"), ("[bold]markup[/]", ":smile: \x1b[2J", "3,456")], ("A", "B", "C"), right=(2,))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert "".join(lines).count("y") == 150
    assert "[bold]markup[/]  :smile: \\x1b[2J" in lines[-1]
    assert lines[-1].endswith("3,456")


def test_a_table_follows_a_narrow_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    print_table([("name", "word " * 40)])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 50


def test_many_lines_come_out_whole_and_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    print_lines((f"line {n}" for n in range(2500)), at_once=1000)
    assert capsys.readouterr().out.splitlines() == [f"line {n}" for n in range(2500)]
    print_lines([])
    assert capsys.readouterr().out == ""


def test_json_is_ascii_whatever_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": ("x", "\udcff\u202e"), "b": {"c"}})
    out = capsys.readouterr().out
    assert out.isascii()
    assert '"\\udcff\\u202e"' in out


class Shown:
    """A display that remembers."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def show(self, done: int) -> None:
        self.seen.append(done)

    def close(self) -> None:
        pass


def test_the_meter_counts_every_byte_of_every_thread_and_looks_up_seldom() -> None:
    shown = Shown()
    meter = Meter(10**9, shown)
    begun = time.monotonic()

    def work() -> None:
        for _ in range(20_000):
            meter.advance(3)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meter.done == 240_000
    assert len(shown.seen) <= (time.monotonic() - begun) / 0.1 + 1


def test_the_meter_never_shows_more_than_all() -> None:
    shown, ticks = Shown(), itertools.count()
    meter = Meter(100, shown, clock=lambda: float(next(ticks)))
    for _ in range(5):
        meter.advance(30)
    assert shown.seen == [30, 60, 90, 100, 100]


def test_a_display_that_breaks_is_left_alone() -> None:
    class Broken(Shown):
        def show(self, done: int) -> None:
            super().show(done)
            raise BrokenPipeError

    display, ticks = Broken(), itertools.count()
    meter = Meter(100, display, clock=lambda: float(next(ticks)))
    for _ in range(5):
        meter.advance(10)
    assert (display.seen, meter.done) == ([10], 50)


def test_plain_lines_come_with_each_tenth_but_not_more_often_than_people_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = [0.0]
    lines = Lines("converting", 1_000_000, clock=lambda: now[0])

    def at(seconds: float, done: int) -> str:
        now[0] = seconds
        lines.show(done)
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err

    assert at(1, 500_000) == ""  # half is done, but a second ago nothing was
    assert at(2, 500_000) == "converting: 50% (500 kB of 1.00 MB, 250 kB/s, 2.0 s left)\n"
    assert at(5, 550_000) == ""  # less than a tenth more
    assert at(12, 560_000) == "converting: 56% (560 kB of 1.00 MB, 46.7 kB/s, 9.4 s left)\n"
    assert at(14, 1_000_000) == "converting: 100% (1.00 MB of 1.00 MB, 71.4 kB/s, 0.0 s left)\n"
