"""Progress in bytes, on stderr: a bar with rate and time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from .output import format_bytes, format_seconds, note

INTERVAL = 0.1
"""Seconds between two looks at the display; ``advance`` is called far more often."""

LINE_SECONDS = 2.0
"""A line is written when this long has passed and a tenth more is done ..."""

LINE_SECONDS_AT_MOST = 10.0
"""... or when this long has passed."""


class Display(Protocol):
    """Where progress is shown."""

    def show(self, done: int) -> None:
        """Show that ``done`` bytes are done."""

    def close(self) -> None:
        """Leave nothing half drawn."""


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield ``advance(count)``, to be called from any thread with each count of ``total`` bytes done."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    display: Display = Bar(label, total) if is_terminal else Lines(label, total)
    try:
        yield Meter(total, display).advance
    finally:
        with suppress(OSError, ValueError):
            display.close()


class Meter:
    """Counts bytes from many threads and passes the sum on, ten times a second."""

    def __init__(self, total: int, display: Display, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.done = 0
        self._total, self._display, self._clock = total, display, clock
        self._lock = threading.Lock()
        self._next = clock() + INTERVAL

    def advance(self, count: int) -> None:
        """Add ``count`` bytes."""
        with self._lock:
            self.done += count
            now = self._clock()
            if now < self._next:
                return
            self._next = now + INTERVAL
            try:
                # what a resumed conversion re-reads is counted as well
                self._display.show(min(self.done, self._total))
            except (OSError, ValueError):  # the terminal is gone: no reason to stop the work
                self._next = math.inf


class Lines:
    """Plain lines, for logs."""

    def __init__(self, label: str, total: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._label, self._total, self._clock = label, max(total, 1), clock
        self._start = self._last = clock()
        self._shown = 0.0

    def show(self, done: int) -> None:
        """Write a line when it is time for one."""
        now, share = self._clock(), done / self._total
        passed = now - self._last
        if passed < LINE_SECONDS or (share - self._shown < 0.1 and passed < LINE_SECONDS_AT_MOST):
            return
        self._last, self._shown = now, share
        rate = done / max(now - self._start, 1e-9)
        left = f", {format_seconds((self._total - done) / rate)} left" if rate else ""
        amount = f"{format_bytes(done)} of {format_bytes(self._total)}"
        note(f"{self._label}: {share:.0%} ({amount}, {format_bytes(rate)}/s{left})")

    def close(self) -> None:
        """Nothing is half drawn."""


class Bar:
    """A bar that is erased at the end."""

    def __init__(self, label: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
        )
        self._task = self._progress.add_task(label, total=max(total, 1))
        with suppress(OSError):
            self._progress.start()

    def show(self, done: int) -> None:
        """Draw the bar."""
        self._progress.update(self._task, completed=done, refresh=True)

    def close(self) -> None:
        """Erase the bar."""
        self._progress.stop()
