"""``torchrun ... -m qwen3conv.training``: torchtitan's own command line, on a device that is settled first.

``--device neuron|cuda|cpu`` chooses it; everything else is torchtitan's.
"""

from __future__ import annotations

import os
import signal
import sys

from qwen3conv.converters.errors import ConversionError

from .devices import prepare_torchtitan
from .lifeline import end_with_parent
from .torchrun import report


def main(arguments: list[str]) -> None:
    """Train as torchtitan's command line says."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun leaves its ranks running when it is killed
        end_with_parent(os.getppid(), signal.SIGKILL)
    device: str | None = None
    if "--device" in arguments:
        at = arguments.index("--device")
        device, arguments[at : at + 2] = arguments[at + 1], []
    try:
        prepare_torchtitan(device)
    except ConversionError as error:
        report(str(error))
        sys.exit(f"Error: {error}")
    from .titan import train

    sys.argv[1:] = arguments
    try:
        train()
    except ConversionError as error:  # the user's data or degrees: their lines, not where they were noticed
        report(str(error))
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
