"""The ``torch.save`` archive of one contiguous CPU tensor: its bytes around the payload, and where the payload lies.

An archive is a zip file with stored, uncompressed records, laid out by torch 2.13's writer (``torch/serialization.py``
``_save`` and ``caffe2/serialize/inline_container``) as::

    data.pkl  .format_version  .storage_alignment  byteorder  data/0 (the payload)  version  central directory

Every record's content begins at a multiple of 64 bytes from the archive's start; the gap is a zip extra field ``FB``.

CRCs: ``frame`` writes the true CRC-32 of every record but the payload's, which is 0, as torch itself writes with
``torch.serialization.set_crc32_options(False)``: the payload is not known yet when its frame is made, and torch's
reader never checks (a zip tool that does will call ``data/0`` damaged). ``locate`` checks the CRC of ``data.pkl``.
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

from ..boxes import Shape
from ..dtypes import FROM_TORCH_NAME, TORCH_NAME, itemsize
from ..errors import SourceError
from .dcp_metadata import DTYPE_NAMES, TorchDtype, count, extent
from .pickles import Callee, Table, Unfit, load

ALIGNMENT = 64
"""Bytes; torch's default. Payloads are aligned in a file when their archive begins at a multiple of it."""

Read = Callable[[int, int], bytes]
"""``(offset, size) -> bytes``, fewer than ``size`` only at the end of the file."""

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_MAX32 = 0xFFFFFFFF
_DESCRIPTOR_FOLLOWS = 0x0008
_UTF8_NAME = 0x0800
_ROOT = "archive"
_SMALL_BYTES = 4096
_HEAD_BYTES = 1024
_TAIL_BYTES = 1536
_MAX_DIRECTORY = 1 << 20
_MAX_PICKLE = 1 << 20
_MAX_DIMS = 64

_STORAGE_CLASS = {
    "BOOL": "BoolStorage",
    "U8": "ByteStorage",
    "I8": "CharStorage",
    "I16": "ShortStorage",
    "F16": "HalfStorage",
    "BF16": "BFloat16Storage",
    "I32": "IntStorage",
    "F32": "FloatStorage",
    "I64": "LongStorage",
    "F64": "DoubleStorage",
}
# The others have no storage class of their own: torch saves them as bytes plus a dtype (_rebuild_tensor_v3).


class Record(NamedTuple):
    """A record of an archive: where its content lies in the file, and the CRC-32 its directory states."""

    header: int
    """Offset of the local header from the archive's start, bytes."""
    nbytes: int
    crc: int


class Payload(NamedTuple):
    """The elements of an archived tensor, contiguous and row-major."""

    offset: int
    """Bytes from the start of the file (not of the archive) to the first element."""
    nbytes: int
    dtype: str
    shape: Shape


class StorageRef(NamedTuple):
    """A storage that a ``data.pkl`` refers to: record ``data/<key>``, dtype code or None for bytes, elements."""

    key: str
    dtype: str | None
    numel: int


class TensorRef(NamedTuple):
    """A dense tensor over a storage; ``offset`` in elements."""

    storage: StorageRef
    dtype: str
    offset: int
    shape: Shape


# --- writing ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def frame(dtype: str, shape: Shape) -> tuple[bytes, bytes]:
    """(prefix, suffix): ``prefix + elements + suffix`` is a file that ``torch.load(weights_only=True)`` reads.

    The prefix is, byte for byte, what torch 2.13 writes; its length is a multiple of 64.
    """
    nbytes = math.prod(shape) * itemsize(dtype)
    prefix, directory = bytearray(), bytearray()
    records = (
        ("data.pkl", _tensor_pickle(dtype, shape)),
        (".format_version", b"1"),
        (".storage_alignment", b"%d" % ALIGNMENT),
        ("byteorder", b"little"),
    )
    for name, content in records:
        header, descriptor, entry = _record(name, len(prefix), len(content), zlib.crc32(content))
        prefix += header + content + descriptor
        directory += entry
    header, descriptor, entry = _record("data/0", len(prefix), nbytes, 0)
    prefix += header
    directory += entry

    suffix = bytearray(descriptor)
    at = len(prefix) + nbytes + len(suffix)
    header, descriptor, entry = _record("version", at, 2, zlib.crc32(b"3\n"))
    suffix += header + b"3\n" + descriptor
    directory += entry
    at = len(prefix) + nbytes + len(suffix)
    entries = len(records) + 2
    suffix += directory
    suffix += _END64.pack(b"PK\x06\x06", 44, 0x031E, 45, 0, 0, entries, entries, len(directory), at)
    suffix += _LOCATOR.pack(b"PK\x06\x07", 0, at + len(directory), 1)
    suffix += _END.pack(b"PK\x05\x06", 0, 0, entries, entries, len(directory), min(at, _MAX32), 0)
    return bytes(prefix), bytes(suffix)


def _record(name: str, at: int, nbytes: int, crc: int) -> tuple[bytes, bytes, bytes]:
    """(local header with padding, data descriptor, directory entry) of a record whose local header lies at ``at``.

    An empty record has no descriptor; from 4 GiB on, sizes and offsets go into zip64 extra fields.
    """
    path = f"{_ROOT}/{name}".encode()
    flags = _UTF8_NAME | (_DESCRIPTOR_FOLLOWS if nbytes else 0)
    large, far = nbytes >= _MAX32, at >= _MAX32
    extra = b""
    if large or far:
        values = ([nbytes, 0] if large else []) + ([at] if far else [])
        extra = struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values)
    padding = -(at + _LOCAL.size + len(path) + len(extra) + 4) % ALIGNMENT
    extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    header = _LOCAL.pack(b"PK\x03\x04", 0, flags, 0, 0, 0, 0, 0, 0, len(path), len(extra)) + path + extra

    descriptor = struct.pack("<4sLQQ" if large or far else "<4sLLL", b"PK\x07\x08", crc, nbytes, nbytes)
    size = _MAX32 if large else nbytes
    extra = b""
    if large or far:
        values = ([nbytes, nbytes] if large else []) + ([at] if far else [])
        extra = struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values)
    entry = _CENTRAL.pack(
        *(b"PK\x01\x02", 0, 0, flags, 0, 0, 0, crc, size, size, len(path), len(extra), 0, 0, 0, 0, min(at, _MAX32))
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
        items = b"".join(map(_integer, sizes))
        if not sizes:
            return b")"
        return (items + bytes((0x84 + len(sizes),)) if len(sizes) <= 3 else b"(" + items + b"t") + put()

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<L", len(value)) + value.encode() + put()

    numel = math.prod(shape)
    strides = tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))
    typed = _STORAGE_CLASS.get(dtype)
    out = b"\x80\x02" + f"ctorch._utils\n_rebuild_tensor_v{2 if typed else 3}\n".encode() + put()
    out += b"((" + text("storage")
    out += (f"ctorch\n{typed}\n" if typed else "ctorch.storage\nUntypedStorage\n").encode() + put()
    out += text("0") + text("cpu") + _integer(numel if typed else numel * itemsize(dtype)) + b"t" + put() + b"Q"
    out += _integer(0) + pair(shape) + pair(strides) + b"\x89"
    out += b"ccollections\nOrderedDict\n" + put() + b")R" + put()
    if not typed:
        out += f"ctorch\n{TORCH_NAME[dtype]}\n".encode() + put()
    out += b"t" + put() + b"R" + put() + b"."
    return out


def _integer(value: int) -> bytes:
    if value < 1 << 8:
        return b"K" + bytes((value,))
    if value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if value < 1 << 31:
        return b"J" + struct.pack("<l", value)
    width = value.bit_length() // 8 + 1
    return b"\x8a" + bytes((width,)) + value.to_bytes(width, "little")


# --- reading ---------------------------------------------------------------------------------------------------------


class Archive:
    """One archive inside a file, its directory parsed: usually two reads, one of a small archive."""

    __slots__ = ("_head", "_largest_directory", "_read", "length", "records", "start", "where")

    def __init__(
        self, read: Read, start: int, length: int, where: str, *, largest_directory: int = _MAX_DIRECTORY
    ) -> None:
        self._read, self.start, self.length, self.where = read, start, length, where
        self._largest_directory = largest_directory
        self._head = read(start, length if length <= _SMALL_BYTES else _HEAD_BYTES)
        if self._head[:4] != b"PK\x03\x04":
            raise SourceError(f"{where}: {_what_it_is(self._head)}")
        self.records: Mapping[str, Record] = self._directory()
        order = self.content("byteorder", 16) if "byteorder" in self.records else b"little"
        if order != b"little":
            raise SourceError(f"{where}: byte order is {order!r}, only little-endian archives are read")

    def bytes_at(self, offset: int, size: int) -> bytes:
        """``size`` bytes at ``offset`` from the archive's start; raises ``SourceError`` past its end."""
        if offset >= 0 and offset + size <= len(self._head):
            return self._head[offset : offset + size]
        data = self._read(self.start + offset, size) if 0 <= offset <= self.length - size else b""
        if len(data) != size:
            raise self.damaged(f"{size} bytes at {offset} lie past its end")
        return data

    def locate(self, name: str) -> int:
        """Offset of a record's content from the archive's start, by its local header."""
        record = self.records.get(name)
        if record is None:
            raise self.damaged(f"record {name!r} is missing")
        header = self.bytes_at(record.header, _LOCAL.size)
        magic, _, flags, method, _, _, _, _, _, name_size, extra_size = _LOCAL.unpack(header)
        if magic != b"PK\x03\x04" or flags & 1 or method:
            raise self.damaged(f"record {name!r} has no plain local header, or is compressed or encrypted")
        path = self.bytes_at(record.header + _LOCAL.size, name_size)
        if path.rpartition(b"/" + name.encode())[1:] != (b"/" + name.encode(), b""):
            raise self.damaged(f"the local header of record {name!r} names {path!r}")
        at = record.header + _LOCAL.size + name_size + extra_size
        if at + record.nbytes > self.length:
            raise self.damaged(f"record {name!r} runs past its end")
        return int(at)

    def content(self, name: str, limit: int) -> bytes:
        """A small record's bytes, compared with the CRC that the directory states, if it states one."""
        at = self.locate(name)
        record = self.records[name]
        if record.nbytes > limit:
            raise self.damaged(f"record {name!r} has {record.nbytes} bytes, more than the {limit} that are plausible")
        data = self.bytes_at(at, record.nbytes)
        if record.crc and zlib.crc32(data) != record.crc:
            raise self.damaged(f"record {name!r} does not have the CRC that the directory states")
        return data

    def damaged(self, detail: str) -> SourceError:
        """The error for an archive that is not what ``torch.save`` wrote."""
        return SourceError(f"{self.where}: archive of {self.length} bytes is cut short or damaged: {detail}")

    def _directory(self) -> dict[str, Record]:
        """Record name (without the archive's own name) -> record."""
        size = min(self.length, _TAIL_BYTES)
        tail = self._head if size <= len(self._head) else self._read(self.start + self.length - size, size)
        if len(tail) < _END.size:
            raise self.damaged("its end lies past the end of the file")
        end: list[int]
        magic, _, _, _, *end, comment = _END.unpack_from(tail, len(tail) - _END.size)
        if magic != b"PK\x05\x06" or comment:
            raise self.damaged("no end record where it should end")
        entries, directory_size, directory_at = end
        if entries == 0xFFFF or _MAX32 in (directory_size, directory_at):
            entries, directory_size, directory_at = self._end64(tail)
        if directory_size > self._largest_directory or entries * _CENTRAL.size > directory_size:
            raise self.damaged(f"a directory of {entries} records in {directory_size} bytes is not plausible")
        begin = directory_at - (self.length - len(tail))
        if begin >= 0 and begin + directory_size <= len(tail):
            directory = tail[begin : begin + directory_size]
        else:
            directory = self.bytes_at(directory_at, directory_size)
        return self._entries(directory, entries, directory_at)

    def _end64(self, tail: bytes) -> tuple[int, int, int]:
        if len(tail) < _END.size + _LOCATOR.size:
            raise self.damaged("no zip64 end record")
        magic, _, at, _ = _LOCATOR.unpack_from(tail, len(tail) - _END.size - _LOCATOR.size)
        if magic != b"PK\x06\x07":
            raise self.damaged("no zip64 end record")
        magic, _, _, _, _, _, _, entries, size, offset = _END64.unpack(self.bytes_at(at, _END64.size))
        if magic != b"PK\x06\x06":
            raise self.damaged("no zip64 end record")
        return entries, size, offset

    def _entries(self, directory: bytes, entries: int, directory_at: int) -> dict[str, Record]:
        records: dict[str, Record] = {}
        root = None
        at = 0
        for _ in range(entries):
            if at + _CENTRAL.size > len(directory):
                raise self.damaged("its directory holds fewer records than it states")
            fields = _CENTRAL.unpack_from(directory, at)
            magic, _, _, flags, method, _, _, crc, packed, nbytes, name_size, extra_size, comment_size = fields[:13]
            header = fields[16]
            at += _CENTRAL.size
            path = directory[at : at + name_size]
            if packed == _MAX32 or nbytes == _MAX32 or header == _MAX32:
                extra = directory[at + name_size : at + name_size + extra_size]
                nbytes, packed, header = self._zip64(extra, nbytes, packed, header)
            at += name_size + extra_size + comment_size
            top, _, name = path.partition(b"/")
            root = top if root is None else root
            if magic != b"PK\x01\x02" or not name or not name.isascii() or top != root or len(path) != name_size:
                raise self.damaged(f"directory entry {path!r} is not one that torch writes")
            if flags & 1 or method or packed != nbytes:
                raise self.damaged(f"record {path!r} is compressed or encrypted")
            if header + _LOCAL.size + name_size + nbytes > directory_at:
                raise self.damaged(f"record {path!r} overlaps the directory")
            if records.setdefault(name.decode(), record := Record(header, nbytes, crc)) is not record:
                raise self.damaged(f"record {path!r} appears twice")
        return records

    def _zip64(self, extra: bytes, nbytes: int, packed: int, header: int) -> tuple[int, int, int]:
        """The three values, those of ``0xFFFFFFFF`` replaced from the zip64 extra field, in the order it has them."""
        values = [nbytes, packed, header]
        at = 0
        while at + 4 <= len(extra):
            kind, size = struct.unpack_from("<2H", extra, at)
            if kind == 1:
                body = extra[at + 4 : at + 4 + size]
                wide = list(struct.unpack(f"<{len(body) // 8}Q", body[: len(body) // 8 * 8]))
                for i, value in enumerate(values):
                    if value == _MAX32:
                        if not wide:
                            break
                        values[i] = wide.pop(0)
                return values[0], values[1], values[2]
            at += 4 + size
        raise self.damaged("a record of 4 GiB or more has no zip64 sizes")


def locate(read: Read, start: int, length: int, where: str) -> Payload:
    """The payload of the archive in ``[start, start + length)`` of a file, as its directory and ``data.pkl`` state it.

    ``where`` names file and tensor in errors. Raises ``SourceError`` for anything but one dense, contiguous, stored
    and complete little-endian tensor of a known dtype. A tensor that begins inside a larger storage is found.
    """
    archive = Archive(read, start, length, where)
    pickle = archive.content("data.pkl", _MAX_PICKLE)
    try:
        tensor = _parse_tensor(pickle)
    except SourceError as error:
        raise SourceError(f"{where}: {error}") from None
    offset, nbytes = place(archive, tensor)
    return Payload(start + offset, nbytes, tensor.dtype, tensor.shape)


def place(archive: Archive, tensor: TensorRef) -> tuple[int, int]:
    """(offset from the archive's start, size) of a tensor's elements, bytes; ``SourceError`` if they are not there."""
    at = archive.locate(f"data/{tensor.storage.key}")
    stored = archive.records[f"data/{tensor.storage.key}"].nbytes
    width = itemsize(tensor.dtype)
    offset, nbytes = tensor.offset * width, math.prod(tensor.shape) * width
    promised = tensor.storage.numel * (itemsize(tensor.storage.dtype) if tensor.storage.dtype else 1)
    if promised != stored:
        raise archive.damaged(f"its storage has {stored} bytes where data.pkl states {promised}")
    if offset + nbytes > stored:
        raise archive.damaged(f"{nbytes} bytes of tensor at {offset} do not fit into {stored} bytes of storage")
    return at + offset, nbytes


@lru_cache(maxsize=4096)
def _parse_tensor(pickle: bytes) -> TensorRef:
    tensor = load(pickle, TENSOR_TABLE, "data.pkl", storage_ref)
    if type(tensor) is not TensorRef:
        raise SourceError("data.pkl holds something that is not one dense tensor")
    return tensor


def storage_ref(pid: tuple[object, ...]) -> StorageRef:
    """The storage that torch's persistent id ``("storage", class, key, location, numel)`` names."""
    if len(pid) != 5 or pid[0] != "storage":
        raise Unfit("it refers to something that is not a storage")
    _, kind, key, _, numel = pid
    if type(kind) is not _StorageKind or type(key) is not str or not re.fullmatch(r"[0-9]{1,9}", key):
        raise Unfit("it refers to a storage of an unknown kind")
    return StorageRef(key, kind.dtype, count(numel))


class _StorageKind(NamedTuple):
    dtype: str | None


def dims(value: object) -> Shape:
    """``value`` as a shape; raises ``Unfit`` for more dims than torch has, whose product would take for ever."""
    if (type(value) is tuple or type(value) is list) and len(value) > _MAX_DIMS:
        raise Unfit(f"a shape of {len(value)} dims; torch has at most {_MAX_DIMS}")
    return extent(value)


def _rebuild(args: tuple[object, ...], untyped: bool) -> TensorRef:
    """``_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks)``; v3 appends a dtype to them."""
    fixed = 7 if untyped else 6
    if not fixed <= len(args) <= fixed + 1 or type(args[0]) is not StorageRef:
        raise Unfit("a tensor is not made from the values that torch writes")
    if len(args) > fixed and args[fixed]:
        raise Unfit("the tensor is a conjugate or negative view, or has other properties that change its values")
    storage, shape, strides = args[0], dims(args[2]), dims(args[3])
    dtype = storage.dtype
    if untyped:
        kind = args[6]
        if type(kind) is not TorchDtype:
            raise Unfit("a tensor is not made from the values that torch writes")
        dtype = FROM_TORCH_NAME.get(kind.name)
        if dtype is None:
            raise Unfit(f"dtype torch.{kind.name} is not one that is read here")
        if storage.dtype is not None:
            storage = storage._replace(dtype=None, numel=storage.numel * itemsize(storage.dtype))
    if dtype is None or len(strides) != len(shape):
        raise Unfit("a tensor is not made from the values that torch writes")
    dense = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != dense and 0 not in shape:
            raise Unfit(
                f"the tensor of shape {shape} is stored with strides {strides}, not row by row; save it again after "
                "calling contiguous() on it"
            )
        dense *= size
    return TensorRef(storage, dtype, count(args[1]), shape)


def _hooks(args: tuple[object, ...]) -> dict[object, object]:
    if args:
        raise Unfit("an OrderedDict made from arguments, as torch never writes it")
    return {}


TENSOR_TABLE: Table = {
    **DTYPE_NAMES,
    ("torch._utils", "_rebuild_tensor_v2"): Callee(call=lambda args: _rebuild(args, untyped=False)),
    ("torch._utils", "_rebuild_tensor_v3"): Callee(call=lambda args: _rebuild(args, untyped=True)),
    ("collections", "OrderedDict"): Callee(call=_hooks),
    ("torch.storage", "UntypedStorage"): _StorageKind(None),
    ("torch", "UntypedStorage"): _StorageKind(None),
    **{("torch", name): _StorageKind(code) for code, name in _STORAGE_CLASS.items()},
}
"""The names in the ``data.pkl`` of one plain tensor."""


def _what_it_is(head: bytes) -> str:
    """Why bytes are not a ``torch.save`` archive."""
    if head[:1] == b"\x80":
        return "legacy torch.save (a pickle, not a zip archive), which is not read; load and save it with torch >= 1.6"
    if re.match(rb"[\s\S]{3}\0{5}\{", head):
        return (
            "a safetensors file (SerializationFormat.SAFETENSORS), which torch's own FileSystemReader cannot read "
            "either; save with SerializationFormat.TORCH_SAVE"
        )
    if head and not head.strip(b"\0"):
        return "only zeros where a torch.save archive should begin; the file was not written completely"
    return "no torch.save archive begins here; the file is damaged, or .metadata belongs to another one"
