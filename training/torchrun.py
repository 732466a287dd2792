"""``python -m qwen3conv.training.torchrun PID ...``: ``torchrun ...`` that ends when process PID does.

torchrun has no such option, and ends its ranks when it is asked to end. What it says of a rank that failed is one line
for the command that reads ``ERRORS``, unless a rank has left a better one, and no traceback of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import NoReturn

from .launch import ERRORS
from .lifeline import end_with_parent


def main(parent: int, arguments: list[str]) -> NoReturn:
    """Run torchrun; exit with its code, 128 and the number of the signal that ended it, or 1 if a rank failed."""
    end_with_parent(parent, signal.SIGTERM)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(arguments)
    except SignalException as stop:
        sys.exit(128 + int(stop.sigval))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        ended = f"was ended by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with {failure.exitcode}"
        report(f"rank {rank} {ended}; what it said is above")
        sys.exit(1)
    sys.exit(0)


def report(message: str) -> bool:
    """Leave the reason for the command that launched this process, unless there is one; torchrun tells only a code.

    Returns whether there is such a command, which shows it.
    """
    place = os.environ.get(ERRORS)
    if place is None:
        return False
    with contextlib.suppress(FileExistsError), open(place, "x", encoding="utf-8") as file:
        file.write(message)
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
