"""``torchrun ... -m qwen3conv.training``: torchtitan's own command line, on a device that is settled first.

``--device neuron|cuda|cpu`` chooses it; everything else is torchtitan's.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from qwen3conv.converters.errors import ConversionError

from .devices import prepare_torchtitan, why_no_neuron
from .launch import ERRORS, CommandLineError
from .lifeline import end_with_parent
from .torchrun import report


def main(arguments: list[str]) -> None:
    """Train as torchtitan's command line says."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun leaves its ranks running when it is killed
        end_with_parent(os.getppid(), signal.SIGKILL)
    try:
        device = _take_device(arguments)
        chosen = prepare_torchtitan(device)
        from .command_line import check_command_line
        from .titan import train

        reason = why_no_neuron(device, chosen)
        if reason and ERRORS not in os.environ and os.environ.get("LOCAL_RANK", "0") == "0":
            sys.stderr.write(f"Warning: {reason}\n")
        check_command_line(arguments, ranks=int(os.environ.get("WORLD_SIZE", "1")))
        sys.argv[1:] = arguments
        train()
    except CommandLineError as error:  # it is the same on every rank
        _end(str(error), is_shown=os.environ.get("LOCAL_RANK", "0") == "0")
    except ConversionError as error:  # the user's data or degrees: their lines, not where they were noticed
        _end(str(error))


def _end(message: str, *, is_shown: bool = True) -> NoReturn:
    """Leave the message to the command that launched this rank, which shows it once; without one, show it here."""
    sys.exit(1 if report(message) or not is_shown else f"Error: {message}")


def _take_device(arguments: list[str]) -> str | None:
    """Remove ``--device X`` or ``--device=X`` from the arguments, and return X."""
    for at, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name == "--device":
            given = [value] if equals else arguments[at + 1 : at + 2]
            if given and given[0] in ("neuron", "cuda", "cpu"):
                del arguments[at : at + (1 if equals else 2)]
                return given[0]
            raise CommandLineError(f"--device takes neuron, cuda or cpu, not {(given or ['nothing'])[0]}")
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
