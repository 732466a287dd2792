"""What every command has: one example at the end of its help, and ``--debug`` behind it as well as before it."""

from __future__ import annotations

from typing import Any

import click

DIFFERENT = 3
"""Exit code: compared, and not the same."""

DEBUG = "qwen3conv.debug"
"""Key in ``ctx.meta``, which a group shares with its commands: show tracebacks."""


class Command(click.Command):
    """A command whose help ends with ``example``, one line to type."""

    def __init__(self, *args: Any, example: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.example = example
        self.params.append(debug_option())

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the example unwrapped, so that it can be copied."""
        with formatter.section("Example"):
            formatter.write(f"{'':{formatter.current_indent}}{self.example}\n")


def debug_option() -> click.Option:
    """``--debug``, for the group and for each command."""

    def remember(ctx: click.Context, option: click.Parameter, value: bool) -> None:
        if value:
            ctx.meta[DEBUG] = True

    return click.Option(
        ["--debug"], is_flag=True, expose_value=False, is_eager=True, callback=remember, help="Show tracebacks."
    )
