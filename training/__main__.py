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
        from .command_line import check_command_line
        from .titan import train

        check_command_line(arguments)
        sys.argv[1:] = arguments
        train()
    except ConversionError as error:  # the user's data or degrees: their lines, not where they were noticed
        # the command that launched this rank says it, once for all ranks
        sys.exit(1 if report(str(error)) else f"Error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
