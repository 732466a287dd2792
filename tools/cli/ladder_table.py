"""The rungs of a ladder as a table: at the end, and on a terminal while they are climbed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from .output import note

if TYPE_CHECKING:
    from rich.table import Table

    from qwen3conv.tools.ladder import Climbed, Rung

HEADERS = ("RUNG", "RANKS", "RESULT", "LOSS APART", "NORM APART", "S / STEP")

Show = Callable[[Sequence["Climbed"], "Rung | None"], None]
"""Takes what was climbed so far, and the rung that runs."""


def row(one: Climbed) -> tuple[str, ...]:
    """A rung that was climbed, as text."""
    return (
        one.rung.name,
        str(one.rung.mesh.ranks),
        one.status,
        "" if one.loss_difference is None else f"{one.loss_difference:.1e}",
        "" if one.norm_difference is None else f"{one.norm_difference:.1e}",
        "" if one.step_seconds is None else f"{one.step_seconds:.3f}",
    )


@contextmanager
def live_table(names: Sequence[str], stream: IO[str] | None = None) -> Iterator[Show]:
    """A table of ``names`` on a terminal (default: that of stderr) that fills; elsewhere a line for each news."""
    stream = stream or sys.stderr
    if not stream.isatty():
        yield _tell
        return
    from rich.console import Console
    from rich.live import Live

    with Live(_table(names, [], None), console=Console(file=stream), refresh_per_second=2) as live:
        yield lambda climbed, running: live.update(_table(names, climbed, running), refresh=True)


def _tell(climbed: Sequence[Climbed], running: Rung | None) -> None:
    if running is not None:
        note(f"{running.name}: {running.axis}")
        return
    found = climbed[-1]
    apart = "" if found.loss_difference is None else f", loss apart {found.loss_difference:.1e}"
    note(f"{found.rung.name}: {found.status}{apart}")


def _table(names: Sequence[str], climbed: Sequence[Climbed], running: Rung | None) -> Table:
    from rich.table import Table

    table = Table(*HEADERS, box=None)
    done = {one.rung.name: row(one) for one in climbed}
    for name in names:
        if name in done:
            table.add_row(*done[name])
        elif running is not None and name == running.name:
            table.add_row(name, str(running.mesh.ranks), f"runs: {running.axis}")
        else:
            table.add_row(name, "", "waits")
    return table
