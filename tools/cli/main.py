"""The ``qwen3conv`` command: its group, and the one place where an error becomes a message and an exit code.

Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 compared and different, 130 interrupted,
143 ended by SIGTERM (``train``). Data goes to stdout,
everything else to stderr; of a command that fails, stdout holds nothing, with ``--json`` as without (``verify --json``
alone lists there what it found). Only click and these files are loaded until a command runs.
"""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import ClassVar, NoReturn

import click

from qwen3conv import __version__
from qwen3conv.converters.errors import ConversionError

from .command import DEBUG, Command, debug_option
from .completion import completion
from .conversion import convert, dcp_to_hf, hf_to_dcp, plan
from .doctor import doctor
from .hub import pull, push
from .inspection import formats, inspect
from .kernel_check import kernel_check
from .ladder import ladder
from .lora import merge_lora
from .output import WIDTH, printable
from .parity import parity
from .proof import diff, fingerprint, verify
from .runs import runs
from .sharding import merge, reshard, shard
from .simulate import simulate
from .train import train
from .upgrade import upgrade

NAME = "qwen3conv"

_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": WIDTH}


class Failure(click.ClickException):
    """Something was refused or failed; exit code 1."""

    def format_message(self) -> str:
        """The message, safe to show: it may quote names from a hostile checkpoint."""
        return printable(self.message)


class Interrupted(Failure):
    """Ctrl-C; the exit code is that of a shell."""

    exit_code: ClassVar[int] = 130


class Main(click.Group):
    """Runs a command; whatever it raises ends here."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Commands as they were added: what people need first comes first."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command, and turn its errors into ``Failure``. A reader that closed the pipe is left to click."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError):
            raise
        except KeyboardInterrupt as stop:
            raise Interrupted(str(stop) or self._interrupted(ctx)) from None
        except Exception as error:
            if ctx.meta.get(DEBUG):
                click.echo(printable(traceback.format_exc()), err=True, nl=False)
            raise Failure(_message(error)) from error

    def _interrupted(self, ctx: click.Context) -> str:
        command = self.commands.get(ctx.invoked_subcommand or "")
        can_resume = command is not None and any(
            parameter.name == "resume" and isinstance(parameter, click.Option) and parameter.is_flag
            for parameter in command.params
        )
        return "interrupted; run again with --resume" if can_resume else "interrupted"


@click.group(cls=Main, params=[debug_option()], context_settings=_SETTINGS)
@click.version_option(__version__, prog_name=NAME)
def cli() -> None:
    """Convert, check and compare Qwen3 checkpoints, bit for bit.

    A SRC or PATH is a folder, or a hub id (org/name[@revision][:subfolder]), of which no more is fetched than is
    needed. A folder of that name wins over the hub.
    """


_CONVERTING = (hf_to_dcp, dcp_to_hf, convert, shard, reshard, merge, merge_lora, upgrade, plan)
_PROVING = (inspect, fingerprint, verify, diff, parity, formats)

for _command in (*_CONVERTING, *_PROVING, pull, push, train, runs, ladder, simulate, doctor, kernel_check, completion):
    cli.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run ``arguments`` (default: the process's own) and leave the process with the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError, ValueError):
                stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is no failure
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    cli.main(args=None if arguments is None else list(arguments), prog_name=NAME)


def _stop(number: int, frame: object) -> NoReturn:
    """Stop in order at the first Ctrl-C. Another one ends the process there and then, without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt


def _message(error: Exception) -> str:
    if isinstance(error, ConversionError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    if isinstance(error, MemoryError):
        return "out of memory; fewer --workers or a smaller --max-memory need less"
    return (
        f"internal error, {type(error).__name__}: {error}\n"
        "This is a fault of qwen3conv: run it again with --debug and report what it prints."
    )
