"""Errors a user can cause, cut by what the user does next. The message is the whole story."""

from __future__ import annotations

from collections.abc import Iterable

_LONGEST_LINE = 1000


class ConversionError(Exception):
    """Base of every error a user can cause: the command line prints it and exits 1, without a traceback."""


class SourceError(ConversionError):
    """The input is broken, incomplete, hostile or of a kind that is not read: fix the input."""


class TransferError(SourceError):
    """A source that is elsewhere stopped coming, or came damaged: what is done is kept, try again."""


class MappingError(ConversionError):
    """Tensor names or shapes do not fit the layout: the input is not the model it claims to be."""


class PolicyError(ConversionError):
    """Going on would drop, change or invent a number: choose the option that the message names."""


class DestinationError(ConversionError):
    """The output cannot be written there: choose another place, free space, or pass the named option."""


class VerifyError(ConversionError):
    """Stored bytes are not what the manifest promises: do not use them."""


def enumerate_problems(heading: str, problems: Iterable[str], limit: int = 20) -> str:
    """``heading`` and one indented line per problem; past ``limit`` lines, how many more there are.

    A line is cut where only a hostile name could make it so long.
    """
    lines = list(problems)
    shown = [f"  - {line if len(line) <= _LONGEST_LINE else line[:_LONGEST_LINE] + '...'}" for line in lines[:limit]]
    if len(lines) > limit:
        shown.append(f"  - and {len(lines) - limit} more")
    return "\n".join([heading, *shown])


def few(items: Iterable[str], limit: int = 5) -> str:
    """The first ``limit`` of ``items``, and how many more there are."""
    names = list(items)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def short(value: object) -> str:
    """``repr`` of a value that a file brings along, cut to a length that a line can hold."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
