"""The bytes around a tensor in the ``torch.save`` archive that holds it. The layout: ``torch_zip``."""

from __future__ import annotations

import math
import pickle
import struct
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from ..boxes import Shape, TensorSpec
from ..dtypes import TORCH_NAME, itemsize
from .pickle_writing import integer
from .torch_zip import ALIGNMENT, CENTRAL, DESCRIPTOR_FOLLOWS, END, END64, LOCAL, LOCATOR, MAX32, STORAGE_CLASS

_ROOT = "archive"
_UTF8_NAME = 0x0800


@lru_cache(maxsize=1024)
def frame(dtype: str, shape: Shape) -> tuple[bytes, bytes]:
    """(prefix, suffix): ``prefix + elements + suffix`` is a file that ``torch.load(weights_only=True)`` reads.

    The prefix is, byte for byte, what torch 2.13 writes; its length is a multiple of 64.
    """
    nbytes = math.prod(shape) * itemsize(dtype)
    prefix, directory = _beginning(_tensor_pickle(dtype, shape))
    header, descriptor, entry = _record("data/0", len(prefix), nbytes, 0)
    prefix += header
    directory += entry
    suffix = descriptor + _ending(len(prefix) + nbytes + len(descriptor), directory, 6)
    return bytes(prefix), suffix


def value_archive(value: object) -> bytes:
    """The archive of numbers, strings, bytes, lists, tuples and dicts, as torch pickles them."""
    content, directory = _beginning(pickle.dumps(value, protocol=2))
    return bytes(content) + _ending(len(content), directory, 5)


class StateArchive(NamedTuple):
    """The archive of a dict of tensors: all its bytes but the tensors' elements, and where these go."""

    frames: list[tuple[int, bytes]]
    offsets: dict[str, int]
    size: int

    def places(self) -> tuple[dict[str, int], int]:
        """Bytes from the file's start to each tensor's first element, and the size of the file."""
        return self.offsets, self.size

    def seals(self) -> Iterator[tuple[int, bytes]]:
        """What is not a tensor's elements."""
        return iter(self.frames)


def state_archive(specs: Sequence[TensorSpec], key: str | None = None) -> StateArchive:
    """What ``torch.save`` makes of a dict of tensors, each with a storage of its own; CRCs as in ``frame``.

    With ``key`` the dict is the value of that key in another one.
    """
    content, directory = _beginning(_state_pickle(specs, key))
    frames, offsets, at = [(0, bytes(content))], {}, len(content)
    for number, spec in enumerate(specs):
        header, descriptor, entry = _record(f"data/{number}", at, spec.nbytes, 0)
        frames.append((at, header))
        offsets[spec.name] = at + len(header)
        at += len(header) + spec.nbytes
        frames.append((at, descriptor))
        at += len(descriptor)
        directory += entry
    end = _ending(at, directory, 5 + len(specs))
    frames.append((at, end))
    return StateArchive(frames, offsets, at + len(end))


def _state_pickle(specs: Sequence[TensorSpec], key: str | None) -> bytes:
    """``data.pkl`` of a dict of tensors, pickle protocol 2."""

    def text(value: str) -> bytes:
        raw = value.encode()
        return b"X" + struct.pack("<L", len(raw)) + raw

    out = bytearray(b"\x80\x02}(")
    out += text(key) + b"}(" if key is not None else b""
    for number, spec in enumerate(specs):
        shape = spec.shape
        strides = tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))
        out += text(spec.name) + b"ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage")
        out += f"ctorch\n{STORAGE_CLASS[spec.dtype]}\n".encode() + text(str(number)) + text("cpu")
        out += integer(math.prod(shape)) + b"tQ" + integer(0)
        out += b"(" + b"".join(map(integer, shape)) + b"t(" + b"".join(map(integer, strides)) + b"t"
        out += b"\x89ccollections\nOrderedDict\n)RtR"
    return bytes(out + (b"uu." if key is not None else b"u."))


def _beginning(data: bytes) -> tuple[bytearray, bytearray]:
    """The first four records of an archive, and their directory entries."""
    content, directory = bytearray(), bytearray()
    for name, record in (
        ("data.pkl", data),
        (".format_version", b"1"),
        (".storage_alignment", b"%d" % ALIGNMENT),
        ("byteorder", b"little"),
    ):
        header, descriptor, entry = _record(name, len(content), len(record), zlib.crc32(record))
        content += header + record + descriptor
        directory += entry
    return content, directory


def _ending(at: int, directory: bytearray, entries: int) -> bytes:
    """The last record of an archive, which begins ``at`` there, and the directory of ``entries`` with it."""
    header, descriptor, entry = _record("version", at, 2, zlib.crc32(b"3\n"))
    record = header + b"3\n" + descriptor
    whole = bytes(directory) + entry
    at += len(record)
    end64 = END64.pack(b"PK\x06\x06", 44, 0x031E, 45, 0, 0, entries, entries, len(whole), at)
    locator = LOCATOR.pack(b"PK\x06\x07", 0, at + len(whole), 1)
    end = END.pack(b"PK\x05\x06", 0, 0, entries, entries, len(whole), min(at, MAX32), 0)
    return record + whole + end64 + locator + end


def _record(name: str, at: int, nbytes: int, crc: int) -> tuple[bytes, bytes, bytes]:
    """(local header with padding, data descriptor, directory entry) of a record whose local header lies at ``at``.

    An empty record has no descriptor; from 4 GiB on, sizes and offsets go into zip64 extra fields.
    """
    path = f"{_ROOT}/{name}".encode()
    flags = _UTF8_NAME | (DESCRIPTOR_FOLLOWS if nbytes else 0)
    large, far = nbytes >= MAX32, at >= MAX32
    extra = b""
    if large or far:
        values = ([nbytes, 0] if large else []) + ([at] if far else [])
        extra = struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values)
    padding = -(at + LOCAL.size + len(path) + len(extra) + 4) % ALIGNMENT
    extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    header = LOCAL.pack(b"PK\x03\x04", 0, flags, 0, 0, 0, 0, 0, 0, len(path), len(extra)) + path + extra

    descriptor = struct.pack("<4sLQQ" if large or far else "<4sLLL", b"PK\x07\x08", crc, nbytes, nbytes)
    size = MAX32 if large else nbytes
    extra = b""
    if large or far:
        values = ([nbytes, nbytes] if large else []) + ([at] if far else [])
        extra = struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values)
    entry = CENTRAL.pack(
        *(b"PK\x01\x02", 0, 0, flags, 0, 0, 0, crc, size, size, len(path), len(extra), 0, 0, 0, 0, min(at, MAX32))
    )
    return header, descriptor if nbytes else b"", entry + path + extra


def _tensor_pickle(dtype: str, shape: Shape) -> bytes:
    """``data.pkl``, pickle protocol 2, memo numbers as torch's pickler gives them."""
    memo = 0

    def put() -> bytes:
        nonlocal memo
        memo += 1
        return b"q" + bytes((memo - 1,))

    def pair(sizes: Shape) -> bytes:
        items = b"".join(map(integer, sizes))
        if not sizes:
            return b")"
        return (items + bytes((0x84 + len(sizes),)) if len(sizes) <= 3 else b"(" + items + b"t") + put()

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<L", len(value)) + value.encode() + put()

    numel = math.prod(shape)
    strides = tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))
    typed = STORAGE_CLASS.get(dtype)
    out = b"\x80\x02" + f"ctorch._utils\n_rebuild_tensor_v{2 if typed else 3}\n".encode() + put()
    out += b"((" + text("storage")
    out += (f"ctorch\n{typed}\n" if typed else "ctorch.storage\nUntypedStorage\n").encode() + put()
    out += text("0") + text("cpu") + integer(numel if typed else numel * itemsize(dtype)) + b"t" + put() + b"Q"
    out += integer(0) + pair(shape) + pair(strides) + b"\x89"
    out += b"ccollections\nOrderedDict\n" + put() + b")R" + put()
    if not typed:
        out += f"ctorch\n{TORCH_NAME[dtype]}\n".encode() + put()
    out += b"t" + put() + b"R" + put() + b"."
    return out
