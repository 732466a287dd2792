"""torchtitan's command line, with one line for what is wrong with it.

Import this module after ``devices.prepare_torchtitan``. Source of the forms: torchtitan 0.3.0, ``config/manager.py``,
and tyro, which writes a page with a frame and ends the process.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re

from qwen3conv.converters.errors import ConversionError

from .titan import ConfigManager

_SHOWN = 3


class CommandLineError(ConversionError):
    """A flag that torchtitan does not have, or a value that it does not take."""


def check_command_line(arguments: list[str]) -> None:
    """Return when torchtitan takes ``arguments``; a request for help is answered there.

    Raises:
        CommandLineError: it does not; the message has the flag, and those that are like it.
    """
    if any(word in ("-h", "--help") for word in arguments):
        return
    said = io.StringIO()
    logging.disable()  # torchtitan parses again, and says then what it has to say
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            ConfigManager().parse_args(list(arguments))
    except SystemExit as stop:
        if stop.code:
            raise CommandLineError(f"torchtitan's command line: {_in_one_line(said.getvalue())}") from None
    finally:
        logging.disable(logging.NOTSET)


def _in_one_line(page: str) -> str:
    """What tyro's page says first, and the flags that it proposes. Its frame is of box characters, or of hyphens."""
    rows = [re.sub(r"[\u2500-\u257f]", " ", line).rstrip() for line in page.splitlines()]
    parts = [row.strip() if row.strip("- ") else "" for row in rows]
    title = next((number for number, part in enumerate(parts) if part), 0)
    begin = next((number for number in range(title + 1, len(parts)) if parts[number]), title)
    end = next((number for number in range(begin, len(parts)) if not parts[number]), len(parts))
    alike = [match[1] for row in rows[end:] if (match := re.match(r"\s{4,8}(--[\w.-]+)", row))]
    proposed = f"; perhaps {' or '.join(dict.fromkeys(alike[:_SHOWN]))}" if alike else ""
    return " ".join(parts[begin:end]) + proposed
