"""Whole or absent: an output grows beside its destination and takes the destination's name last.

``DST.partial`` holds a journal of what is on the disk and, in a folder of its own, the data files at full size, without
their headers. Nothing in it passes for a checkpoint until ``finish`` has written sidecars, headers, and last the index
or ``.metadata``; then that inner folder becomes ``DST`` in one step, while the journal still says unfinished.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import DestinationError, TransferError
from .contents import OutputFile

JOURNAL = "qwen3conv.journal"
"""Present only in a folder whose conversion has not finished."""

_OUTPUT = "output"
"""What becomes the destination, inside ``DST.partial``."""

_REPLACED = "replaced"
"""What the destination was before, inside ``DST.partial``, where the two cannot be exchanged in one step."""

_NO_FOLDER_FLUSH = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_LOCKED = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


def partial_path(destination: Path) -> Path:
    """Where the output for ``destination`` grows."""
    return destination.with_name(destination.name + ".partial")


def check_name(destination: Path) -> None:
    """Refuse a path that no new folder can have.

    Raises:
        DestinationError: it is the root, the current folder or one above, or has characters that no path has.
    """
    if destination.name in ("", ".."):
        raise DestinationError(f"{destination} cannot be written as a whole; name a new folder, in it or beside it")
    try:
        bad = b"\0" in os.fsencode(destination)
    except UnicodeEncodeError:
        bad = True
    if bad:
        raise DestinationError(f"{str(destination)!r} has characters that no path can have; choose another name")


def check_destination(destination: Path, *, overwrite: bool, resume: bool) -> None:
    """Refuse a destination that cannot or must not be written, before anything is read at length.

    Raises:
        DestinationError: it exists, is not a folder, its parent is missing or read-only, something that is not an
            unfinished conversion lies where the output would grow, or one does and neither ``resume`` nor
            ``overwrite`` was asked for.
    """
    check_name(destination)
    try:
        _check_destination(destination, partial_path(destination), overwrite=overwrite, resume=resume)
    except OSError as error:
        raise DestinationError(f"{error.filename or destination} cannot be used: {error.strerror}") from error


def _check_destination(destination: Path, partial: Path, *, overwrite: bool, resume: bool) -> None:
    parent = destination.parent
    if not parent.is_dir():
        raise DestinationError(f"{parent} is not a folder; create it first, then {destination.name} is written into it")
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise DestinationError(f"{destination} exists and is not a folder; choose another place")
    if destination.is_dir():
        if os.path.ismount(destination):
            raise DestinationError(f"{destination} is where a file system is mounted; name a new folder in it")
        empty = not os.listdir(destination)
        if not empty and not overwrite:
            raise DestinationError(f"{destination} exists; choose another place, or pass --overwrite to replace it")
        if not empty and not _holds_a_checkpoint(destination):
            raise DestinationError(
                f"{destination} does not look like a checkpoint (no weights, no manifest), so --overwrite spares it; "
                "choose another place, or remove it yourself"
            )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise DestinationError(f"{parent} is read-only for this user; choose another place")
    if not os.path.lexists(partial):
        return
    if partial.is_symlink() or not partial.is_dir() or not _is_unfinished(partial):
        raise DestinationError(
            f"the output would grow in {partial}, and what is there is no unfinished conversion; "
            "move it away, or choose another place"
        )
    if not (resume or overwrite):
        raise DestinationError(
            f"{partial} is an unfinished conversion; pass --resume to go on with it, or --overwrite to begin again"
        )


def check_space(parent: Path, needed: int) -> None:
    """Refuse, before the first byte, an output of ``needed`` bytes that the file system of ``parent`` cannot take.

    Raises:
        DestinationError: with both numbers.
    """
    try:
        total, _, free = shutil.disk_usage(parent)
    except OSError as error:
        raise DestinationError(f"{parent} cannot be used: {error.strerror}") from error
    if needed > free and total:  # some network file systems do not know their size and say 0
        raise DestinationError(
            f"the output takes {needed:,} bytes, and {parent} has {free:,} free; "
            f"free {needed - free:,} bytes or choose another place"
        )


class Stage:
    """The growing output. Used as a context: on an error it is removed, on an interrupt it is kept for ``--resume``.

    It is kept too when the source stops coming: it may have come for hours.
    """

    def __init__(self, destination: Path, plan_id: str, *, resume: bool, overwrite: bool = False) -> None:
        self.destination, self.folder = destination, partial_path(destination)
        self.path = self.folder / _OUTPUT
        """Where the output's files are, until it takes its name."""
        self.completed: dict[int, dict[str, tuple[str, str]]] = {}
        """What an earlier try says of the units that it finished: parameter -> digests as written and as read."""
        self._plan_id, self._overwrite = plan_id, overwrite
        self._spare = resume
        """Whether a failure leaves everything as it is: nothing was changed yet, or all of it is there."""
        try:
            self.folder.mkdir(exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._journal = os.open(self.folder / JOURNAL, flags, 0o644)
        except OSError as error:
            with contextlib.suppress(OSError):
                self.folder.rmdir()  # if it is empty
            raise DestinationError(f"{self.folder} cannot be written: {error.strerror}") from error
        try:
            self._lock()
        except DestinationError:
            os.close(self._journal)
            raise
        try:
            self._begin(resume)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, TransferError) and not self._spare:
            self._remove()
        os.close(self._journal)  # last, so that nobody else begins while files are being removed
        if isinstance(error, OSError):
            raise DestinationError(f"{error.filename or self.folder} cannot be written: {error.strerror}") from error

    def create(self, files: Iterable[OutputFile]) -> None:
        """Make every data file at its full size, as holes. Of an earlier try they are kept, without their headers."""
        self._spare = False
        files = list(files)
        self._remove_all_but({file.name for file in files})
        for file in files:
            path = self.path / file.name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
                try:
                    if os.fstat(descriptor).st_size:
                        os.pwrite(descriptor, bytes(min(8, file.size)), 0)  # that try may have got as far as headers
                    os.ftruncate(descriptor, file.size)
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise DestinationError(f"{path} cannot be created: {error.strerror}") from error

    def blank(self, names: Iterable[str]) -> None:
        """Make data files that ``create`` made holes again from end to end."""
        for name in names:
            path = self.path / name
            try:
                size = path.stat().st_size
                os.truncate(path, 0)
                os.truncate(path, size)
            except OSError as error:
                raise DestinationError(f"{path} cannot be written: {error.strerror}") from error

    def record(self, unit: int, digests: Mapping[str, tuple[str, ...]]) -> None:
        """Note that ``unit`` is on the disk."""
        self._append({"unit": unit, "digests": {name: list(pair) for name, pair in digests.items()}})

    def finish(
        self, files: Iterable[OutputFile], extras: Iterable[tuple[str, bytes]], trailers: Iterable[tuple[str, bytes]]
    ) -> None:
        """Write headers, then ``extras``, then ``trailers``; flush all; take the destination's name."""
        try:
            for file in files:
                self._seal(file)
            for name, content in [*extras, *trailers]:
                write_flushed(self.path / name, content)
            for folder in {self.path, *(path.parent for path in self.path.rglob("*"))}:
                flush_folder(folder)
        except OSError as error:
            raise DestinationError(f"{error.filename or self.path} cannot be written: {error.strerror}") from error
        self._spare = True
        self._take_the_name()
        with whole(self.destination):
            flush_folder(self.destination.parent)
            self._remove()

    def _seal(self, file: OutputFile) -> None:
        descriptor = os.open(self.path / file.name, os.O_RDWR | os.O_CLOEXEC)
        try:
            for offset, content in file.seals():
                done = 0
                while done < len(content):
                    done += os.pwrite(descriptor, content[done:], offset + done)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _take_the_name(self) -> None:
        """In one step where the system can; what came to be there meanwhile is looked at as it was at first."""
        old = self.folder / _REPLACED
        try:
            if not (self._overwrite and self.destination.is_dir() and _holds_a_checkpoint(self.destination)):
                os.rename(self.path, self.destination)  # which may be an empty folder, and nothing else
            elif not _exchange(self.path, self.destination):
                os.rename(self.destination, old)
                os.rename(self.path, self.destination)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._restore()
            raise DestinationError(
                f"the output is whole in {self.folder}, but cannot take the name {self.destination} "
                f"({error.strerror}); make room for it, then repeat the command with --resume"
            ) from error

    def _restore(self) -> None:
        """Give the destination back what was moved away for an output that then did not take its place."""
        old = self.folder / _REPLACED
        if old.exists() and not self.destination.exists():
            os.rename(old, self.destination)

    def _lock(self) -> None:
        """Keep others out of the folder, as long as the journal is open."""
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _LOCKED:
                raise DestinationError(
                    f"another conversion is writing {self.folder} right now; wait for it, or choose another place"
                ) from None
            # some network file systems have no locks; there, two at once are the user's to avoid
        mine = os.fstat(self._journal)
        try:
            there = os.stat(self.folder / JOURNAL)
        except OSError:
            there = None
        if there is None or (mine.st_dev, mine.st_ino) != (there.st_dev, there.st_ino):
            raise DestinationError(f"another conversion has just left {self.folder}; look what it made, and try again")

    def _begin(self, resume: bool) -> None:
        """Take over the units of an earlier try of the same plan; without ``resume``, or of none, begin anew."""
        lines, good = self._read_journal() if resume else ([], 0)
        if lines and lines[0] != self._plan_id:
            raise DestinationError(
                f"{self.folder} was begun from another source or with other options; "
                "pass --overwrite without --resume to begin again, or repeat the command that began it with --resume"
            )
        self._restore()
        os.ftruncate(self._journal, good)
        if lines:
            self.completed = dict(lines[1:])
        else:
            self._spare = False
            self._append({"plan": self._plan_id})
            self._remove_all_but(set())
        self.path.mkdir(exist_ok=True)

    def _read_journal(self) -> tuple[list[Any], int]:
        """The plan and the finished units, and the bytes that they take: what follows was cut short by the kill."""
        raw = b""
        while block := os.pread(self._journal, 1 << 20, len(raw)):
            raw += block
        lines: list[Any] = []
        good = 0
        for line in raw.split(b"\n")[:-1]:
            entry = _parsed(line, first=not lines)
            if entry is None:
                break
            lines.append(entry)
            good += len(line) + 1
        return lines, good

    def _append(self, line: Mapping[str, object]) -> None:
        content = json.dumps(line).encode() + b"\n"
        try:
            while content:
                content = content[os.write(self._journal, content) :]
            os.fdatasync(self._journal)
        except OSError as error:
            raise DestinationError(f"{self.folder / JOURNAL} cannot be written: {error.strerror}") from error

    def _remove_all_but(self, names: set[str]) -> None:
        """Remove what is neither the journal nor a file of the output in ``names``, such as another try's sidecars."""
        for path in self.folder.iterdir():
            if path.name == _OUTPUT and names:
                kept = {path / name for name in names}
                for below in sorted(path.rglob("*"), reverse=True):
                    if below.is_symlink() or not below.is_dir():
                        if below not in kept:
                            below.unlink()
                    elif not any(below in other.parents for other in kept):
                        below.rmdir()
            elif path.name != JOURNAL:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def _remove(self) -> None:
        """Remove the folder, the journal last: what a kill leaves of it can be told from other people's folders."""
        for name in (_OUTPUT, _REPLACED):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        with contextlib.suppress(OSError):
            (self.folder / JOURNAL).unlink()
            self.folder.rmdir()


@contextlib.contextmanager
def whole(destination: Path) -> Iterator[None]:
    """Have an interrupt say that the output is there."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted when {destination} was whole already") from None


def write_flushed(path: Path, content: bytes) -> None:
    """Write a small file and return once it is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """Return once the folder's own entries are on the disk, where the file system can flush folders."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_FLUSH:
            raise
    finally:
        os.close(descriptor)


def _parsed(line: bytes, *, first: bool) -> Any:
    """The plan's id that the first line of a journal holds, else ``(unit, digests)``; ``None`` for anything else."""
    try:
        value = json.loads(line)
        if first:
            return value["plan"] if set(value) == {"plan"} and isinstance(value["plan"], str) else None
        unit = value["unit"]
        digests = {str(name): (str(written), str(read)) for name, (written, read) in value["digests"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return (unit, digests) if type(unit) is int else None


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders' names in one step, if the system can (Linux: ``renameat2`` with ``RENAME_EXCHANGE``)."""
    import ctypes

    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    here, exchange = -100, 2
    if rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _is_unfinished(folder: Path) -> bool:
    """Whether ``folder`` is what a conversion leaves: a journal, or nothing yet."""
    names = {entry.name for entry in os.scandir(folder)}
    return not names or JOURNAL in names


def _holds_a_checkpoint(folder: Path) -> bool:
    names = {entry.name for entry in os.scandir(folder)}
    endings = (".safetensors", ".distcp", ".safetensors.index.json")
    return bool(names & {".metadata", "qwen3conv.json"}) or any(name.endswith(endings) for name in names)
