"""A process that ends with the one that started it, so that none trains on when its command is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time

is_linux = sys.platform == "linux"

_PR_SET_PDEATHSIG = 1
"""Linux, ``include/uapi/linux/prctl.h``."""
_POLL_SECONDS = 0.5


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Send this process ``number`` when ``parent``, which started it, ends; at once if it has ended already.

    Linux does it by itself (``PR_SET_PDEATHSIG``); elsewhere a thread looks twice a second whether this process was
    given to another parent.
    """
    if not (is_linux and _ask_linux(number)):
        threading.Thread(target=_watch, args=(parent, number), name="lifeline", daemon=True).start()
    elif os.getppid() != parent:
        os.kill(os.getpid(), number)


def _ask_linux(number: signal.Signals) -> bool:
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        return not ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    return False


def _watch(parent: int, number: signal.Signals) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), number)
