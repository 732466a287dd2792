"""What people and programs read: text, tables and JSON on stdout, notes and warnings on stderr.

Names and paths come from checkpoints, which are hostile: everything is passed through ``printable``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence

import click

WIDTH = 100
"""Columns that tables fit into, on a wider terminal too and where there is none."""

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def printable(text: str) -> str:
    """``text`` with control characters, bidi marks and undecodable bytes as escapes; line ends stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text
    )


def say(text: str = "") -> None:
    """A line of results, to stdout."""
    click.echo(printable(text))


def note(text: str) -> None:
    """A line for people, to stderr."""
    click.echo(printable(text), err=True)


def warn(text: str) -> None:
    """A line that people should see even if they did not ask, to stderr."""
    note(f"Warning: {text}")


def print_json(value: object) -> None:
    """One JSON document, to stdout."""
    click.echo(json.dumps(value, indent=2, default=list))


def print_lines(lines: Iterable[str], *, at_once: int = 1000) -> None:
    """Many lines, to stdout, in few writes."""
    pending: list[str] = []
    for line in lines:
        pending.append(printable(line))
        if len(pending) == at_once:
            click.echo("\n".join(pending))
            pending.clear()
    if pending:
        click.echo("\n".join(pending))


def print_table(
    rows: Iterable[Sequence[str]], headers: Sequence[str] = (), *, right: Sequence[int] = (), indent: int = 2
) -> None:
    """Rows in columns, to stdout; long cells are wrapped, the columns in ``right`` hold numbers."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    rows = [list(row) for row in rows]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(headers), header_style="bold")
    for index in range(max(map(len, [*rows, headers]))):
        title = headers[index] if index < len(headers) else ""
        table.add_column(title, justify="right" if index in right else "left", overflow="fold", no_wrap=index in right)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    width = max(40, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(Padding(table, (0, 0, 0, indent)))
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def format_bytes(count: float) -> str:
    """``1.19 GB``: three digits, in thousands as disks and the hub count."""
    for unit in _UNITS:
        if abs(count) < 999.5 or unit == _UNITS[-1]:
            break
        count /= 1000
    if unit == "bytes":
        return f"{count:.0f} bytes" if count != 1 else "1 byte"
    return f"{count:.{0 if count >= 99.95 else 1 if count >= 9.995 else 2}f} {unit}"


def format_count(count: int, noun: str) -> str:
    """``1 file``, ``36,945 tensors``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_seconds(seconds: float) -> str:
    """``3.4 s``, ``5 min 12 s``, ``2 h 3 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
