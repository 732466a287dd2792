"""``torchrun ... -m qwen3conv.training``: torchtitan's own command line, on a device that is settled first.

``--device neuron|cuda|cpu`` chooses it; everything else is torchtitan's.
"""

from __future__ import annotations

import contextlib
import os
import sys

from qwen3conv.converters.errors import ConversionError

from .devices import prepare_torchtitan
from .launch import ERRORS


def main(arguments: list[str]) -> None:
    """Train as torchtitan's command line says."""
    device: str | None = None
    if "--device" in arguments:
        at = arguments.index("--device")
        device, arguments[at : at + 2] = arguments[at + 1], []
    try:
        prepare_torchtitan(device)
    except ConversionError as error:
        _report(str(error))
        sys.exit(f"Error: {error}")
    from .titan import train

    sys.argv[1:] = arguments
    try:
        train()
    except ConversionError as error:  # the user's data or degrees: their lines, not where they were noticed
        _report(str(error))
        sys.exit(f"Error: {error}")


def _report(message: str) -> None:
    """Leave the reason for the command that launched this rank, which torchrun tells only an exit code."""
    if place := os.environ.get(ERRORS):
        with contextlib.suppress(OSError), open(place, "x", encoding="utf-8") as file:
            file.write(message)


if __name__ == "__main__":
    main(sys.argv[1:])
