"""The lock on the folder of a run: one writer at a time, whatever became of the command that began it.

``train`` holds it alone while it makes the start, and shares it with rank 0 while ranks train: a rank that outlives its
command still keeps others out. It is a ``flock``, which the system lets go of when its holder ends, however that ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from qwen3conv.converters.errors import DestinationError

LOCK = ".lock"
"""In the folder of a run. Its lines name those that hold the lock; it goes with the last of them that ends in order."""

_PATIENCE_SECONDS = 5.0
"""A holder that was killed lets go when its memory is given back, a moment later."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""What file systems say that have none, such as Lustre mounted without ``flock``."""


@dataclass(slots=True)
class RunLock:
    """A held lock."""

    path: Path
    file: int | None
    """Its descriptor; ``None`` where the file system has no locks."""
    made_folder: bool = False
    """Whether the folder was made for it, and goes with it if nothing else came into it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def share(self) -> None:
        """Let rank 0 hold it too.

        Raises:
            DestinationError: another process took it in between.
        """
        import fcntl

        if self.file is not None and not _flock(self.file, fcntl.LOCK_SH):
            raise DestinationError(_in_use(self.path))

    def release(self) -> None:
        """Let go of it. The file goes too, unless another holds it still."""
        import fcntl

        if self.file is not None:
            if _flock(self.file, fcntl.LOCK_EX):
                self.path.unlink(missing_ok=True)
            os.close(self.file)
            self.file = None
        if self.made_folder:
            with contextlib.suppress(OSError):  # something else is in it
                self.path.parent.rmdir()


def lock_run(folder: Path, who: str, *, joins: bool = False) -> RunLock:
    """Take the lock of ``folder``, as ``who`` in the words of a message; made if it is not there.

    ``joins`` shares it with the command that began this process.

    Raises:
        DestinationError: another process holds it; the message says which.
    """
    try:
        import fcntl
    except ImportError:  # not on Windows
        return RunLock(folder / LOCK, None)
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        try:
            taken = _flock(file, fcntl.LOCK_SH if joins else fcntl.LOCK_EX)
        except OSError as error:
            os.close(file)
            if error.errno not in _NO_LOCKS:
                raise
            return RunLock(path, None, made)
        if not taken:
            os.close(file)
            if time.monotonic() < until:
                time.sleep(0.1)
                continue
            raise DestinationError(_in_use(path))
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(path)):
                break
        os.close(file)  # its holder ended and removed it between our two calls
    if not joins:
        os.ftruncate(file, 0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    os.write(file, f"{who}, process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode())
    return RunLock(path, file, made)


def _flock(file: int, kind: int) -> bool:
    import fcntl

    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_use(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    holders = "; ".join(filter(_may_live, lines)) or "by another process"
    return f"{path.parent} is in use: {holders}. Wait for its end, stop it, or name another folder"


def _may_live(line: str) -> bool:
    """Whether the process that a line names still runs, as far as this machine can tell."""
    words = line.split(", ")
    with contextlib.suppress(IndexError, ValueError):
        _, pid, _, host = words[1].split(" ")
        if host == socket.gethostname():
            try:
                os.kill(int(pid), 0)
            except ProcessLookupError:
                return False
            except PermissionError:
                return True
    return True
