"""Files of a checkpoint as open descriptors: positioned reads and writes, flushes, one error message for each fault."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from pathlib import Path
from types import TracebackType

from .errors import DestinationError, SourceError
from .remote import remote_of

WRITE_BYTES = 1 << 16
"""Bytes per call that writes. For larger ones Linux looks for larger runs of free memory, which on virtual machines are
the ones that were given back to the host: 512 KiB took 1.5 times the CPU and the time (ext4, Linux 6.18).
"""

EARLY_BYTES = 8 << 20
"""Written bytes after which the disk is told to begin, so that a flush finds little left to wait for."""


class Files:
    """Open files of one folder, by relative name, shared by all workers. Every offset is explicit.

    An absolute name, which no checkpoint can bring along, is that of a file elsewhere: an adapter's.
    """

    def __init__(self, folder: Path, flags: int) -> None:
        self._folder, self._flags = folder, flags
        self._remote = remote_of(folder)
        self._open: dict[str, int] = {}
        self._writing: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Files:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def descriptor(self, name: str) -> int:
        """The descriptor of ``name``, opened at first use, of a file elsewhere when it has come."""
        if self._remote is not None and name not in self._open and name in self._remote.files:
            self._remote.fetch(name)
        with self._lock:
            found = self._open.get(name)
            if found is None:
                found = self._open[name] = self._opened(self._folder / name)
            return found

    def _opened(self, path: Path) -> int:
        flags = self._flags | os.O_CLOEXEC
        try:
            try:
                return os.open(path, flags)
            except OSError as error:
                # a checkpoint of thousands of rank files needs more than the customary 1024 descriptors
                soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
                if error.errno != errno.EMFILE or soft == hard:
                    raise
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
                return os.open(path, flags)
        except OSError as error:
            if self._flags & (os.O_RDWR | os.O_WRONLY):
                raise write_failed(path, error) from error
            raise SourceError(f"{path} cannot be opened: {error.strerror}") from error

    def give_up(self) -> None:
        """Let a worker that waits for a file from elsewhere wait no longer."""
        if self._remote is not None:
            self._remote.give_up()

    def finished(self, name: str) -> None:
        """Nothing of the file is wanted any more: one that was fetched can go."""
        if self._remote is None or name not in self._remote.files:
            return
        with self._lock:
            descriptor = self._open.pop(name, None)
        if descriptor is not None:
            os.close(descriptor)
        self._remote.release(name)

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """Fill ``view`` from ``offset`` bytes into the file; a file that ends early is a ``SourceError``."""
        if self._remote is not None and not self._remote.fetches and name in self._remote.files:
            data = self._remote.read(name, offset, len(view))
            if len(data) < len(view):
                raise SourceError(
                    f"{self._folder / name} ends at byte {offset + len(data)}, but a tensor goes on there"
                )
            view[:] = data
            return
        descriptor, done = self.descriptor(name), 0
        while done < len(view):
            try:
                count = os.preadv(descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise SourceError(
                    f"{self._folder / name}: reading at byte {offset + done} failed: {error.strerror}"
                ) from error
            if count == 0:
                raise SourceError(
                    f"{self._folder / name} ends at byte {offset + done}, but a tensor goes on there; it was cut short"
                )
            done += count

    def write_from(self, name: str, offset: int, view: memoryview) -> None:
        """Write all of ``view`` at ``offset`` bytes into the file.

        One thread at a time: the kernel lets no more into a file, and those who wait there spin.
        """
        descriptor, done = self.descriptor(name), 0
        with self._turn(name):
            while done < len(view):
                try:
                    done += os.pwrite(descriptor, view[done : done + WRITE_BYTES], offset + done)
                except OSError as error:
                    raise write_failed(self._folder / name, error) from error

    def _turn(self, name: str) -> threading.Lock:
        with self._lock:
            return self._writing.setdefault(name, threading.Lock())

    def copy_range(self, source: int, begin: int, name: str, offset: int, count: int) -> int:
        """Bytes, of ``count`` at most, that the kernel copied here from another file's descriptor; 0 if it cannot."""
        if not hasattr(os, "copy_file_range"):
            return 0
        try:
            with self._turn(name):
                return os.copy_file_range(source, self.descriptor(name), count, begin, offset)
        except OSError:  # another file system, a kernel or a file that has no such thing, a full disk
            return 0

    def begin_flush(self, name: str, offset: int, count: int) -> None:
        """Have the disk begin to take ``count`` bytes at ``offset``, without waiting for it; a hint.

        Linux starts writing dirty pages when they are said to be unneeded, and keeps them cached until they are clean
        (``mm/fadvise.c``, ``generic_fadvise``). Asked for at once, none has become clean: the output stays cached.
        """
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.descriptor(name), offset, count, os.POSIX_FADV_DONTNEED)

    def flush(self, name: str) -> None:
        """Return once the file's bytes are on the disk."""
        try:
            os.fdatasync(self.descriptor(name))
        except OSError as error:
            raise write_failed(self._folder / name, error) from error


class Output:
    """What one worker writes. Every ``EARLY_BYTES`` that follow one another in a file, the disk is told to begin."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._runs: dict[str, tuple[int, int]] = {}

    def write_from(self, name: str, offset: int, view: memoryview) -> None:
        """Write all of ``view`` at ``offset`` bytes into the file."""
        self._files.write_from(name, offset, view)
        self._wrote(name, offset, len(view))

    def copy_from(self, reads: Files, source: str, begin: int, name: str, offset: int, count: int) -> bool:
        """Have the kernel copy ``count`` bytes at ``begin`` of a file of ``reads`` to ``offset`` of one written here.

        ``False`` if it did not, for whatever reason: reading and writing them will find out whose fault that is.
        """
        done = 0
        while done < count:
            copied = self._files.copy_range(reads.descriptor(source), begin + done, name, offset + done, count - done)
            if not copied:
                return False
            done += copied
        self._wrote(name, offset, count)
        return True

    def _wrote(self, name: str, offset: int, count: int) -> None:
        begin, end = self._runs.get(name, (offset, offset))
        if not end <= offset < end + EARLY_BYTES:  # frames of archives are left out, so runs have gaps
            begin = offset
        end = offset + count
        if end - begin >= EARLY_BYTES:
            self._files.begin_flush(name, begin, end - begin)
            begin = end
        self._runs[name] = begin, end


def write_failed(path: Path, error: OSError) -> DestinationError:
    """What to tell the user when ``path`` cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DestinationError(f"no space left while writing {path}: free some and start again")
    return DestinationError(f"{path} cannot be written: {error.strerror}")
