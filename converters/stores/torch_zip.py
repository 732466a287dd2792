"""The ``torch.save`` archive of one contiguous CPU tensor: its bytes around the payload, and where the payload lies.

An archive is a zip file with stored, uncompressed records, laid out by torch 2.13's writer (``torch/serialization.py``
``_save`` and ``caffe2/serialize/inline_container``) as::

    data.pkl  .format_version  .storage_alignment  byteorder  data/0 (the payload)  version  central directory

Every record's content begins at a multiple of 64 bytes from the archive's start; the gap is a zip extra field ``FB``.

CRCs: ``torch_zip_writing.frame`` writes the true CRC-32 of every record but the payload's, which is 0, as torch itself
does with ``torch.serialization.set_crc32_options(False)``: the payload is not known yet when its frame is made, and
torch's reader never checks (a zip tool that does will call ``data/0`` damaged). ``locate`` checks the CRC of
``data.pkl``.
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
from ..dtypes import FROM_TORCH_NAME, itemsize
from ..errors import SourceError
from .dcp_metadata import DTYPE_NAMES, TorchDtype, count, extent
from .pickles import Callee, Table, Unfit, load

ALIGNMENT = 64
"""Bytes; torch's default. Payloads are aligned in a file when their archive begins at a multiple of it."""

Read = Callable[[int, int], bytes]
"""``(offset, size) -> bytes``, fewer than ``size`` only at the end of the file."""

LOCAL = struct.Struct("<4s5H3L2H")
CENTRAL = struct.Struct("<4s6H3L5H2L")
END = struct.Struct("<4s4H2LH")
END64 = struct.Struct("<4sQ2H2L4Q")
LOCATOR = struct.Struct("<4sLQL")
MAX32 = 0xFFFFFFFF
DESCRIPTOR_FOLLOWS = 0x0008
_SMALL_BYTES = 4096
_HEAD_BYTES = 1024
_TAIL_BYTES = 1536
_MAX_DIRECTORY = 1 << 20
_MAX_PICKLE = 1 << 20
_MAX_DIMS = 64

STORAGE_CLASS = {
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
    is_column_major: bool = False
    """Of a matrix: its columns follow one another in the storage instead of its rows."""


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
        header = self.bytes_at(record.header, LOCAL.size)
        magic, _, flags, method, _, _, _, _, _, name_size, extra_size = LOCAL.unpack(header)
        if magic != b"PK\x03\x04" or flags & 1 or method:
            raise self.damaged(f"record {name!r} has no plain local header, or is compressed or encrypted")
        path = self.bytes_at(record.header + LOCAL.size, name_size)
        if path.rpartition(b"/" + name.encode())[1:] != (b"/" + name.encode(), b""):
            raise self.damaged(f"the local header of record {name!r} names {path!r}")
        at = record.header + LOCAL.size + name_size + extra_size
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
        if len(tail) < END.size:
            raise self.damaged("its end lies past the end of the file")
        end: list[int]
        magic, _, _, _, *end, comment = END.unpack_from(tail, len(tail) - END.size)
        if magic != b"PK\x05\x06" or comment:
            raise self.damaged("no end record where it should end")
        entries, directory_size, directory_at = end
        if entries == 0xFFFF or MAX32 in (directory_size, directory_at):
            entries, directory_size, directory_at = self._end64(tail)
        if directory_size > self._largest_directory or entries * CENTRAL.size > directory_size:
            raise self.damaged(f"a directory of {entries} records in {directory_size} bytes is not plausible")
        begin = directory_at - (self.length - len(tail))
        if begin >= 0 and begin + directory_size <= len(tail):
            directory = tail[begin : begin + directory_size]
        else:
            directory = self.bytes_at(directory_at, directory_size)
        return self._entries(directory, entries, directory_at)

    def _end64(self, tail: bytes) -> tuple[int, int, int]:
        if len(tail) < END.size + LOCATOR.size:
            raise self.damaged("no zip64 end record")
        magic, _, at, _ = LOCATOR.unpack_from(tail, len(tail) - END.size - LOCATOR.size)
        if magic != b"PK\x06\x07":
            raise self.damaged("no zip64 end record")
        magic, _, _, _, _, _, _, entries, size, offset = END64.unpack(self.bytes_at(at, END64.size))
        if magic != b"PK\x06\x06":
            raise self.damaged("no zip64 end record")
        return entries, size, offset

    def _entries(self, directory: bytes, entries: int, directory_at: int) -> dict[str, Record]:
        records: dict[str, Record] = {}
        root = None
        at = 0
        for _ in range(entries):
            if at + CENTRAL.size > len(directory):
                raise self.damaged("its directory holds fewer records than it states")
            fields = CENTRAL.unpack_from(directory, at)
            magic, _, _, flags, method, _, _, crc, packed, nbytes, name_size, extra_size, comment_size = fields[:13]
            header = fields[16]
            at += CENTRAL.size
            path = directory[at : at + name_size]
            if packed == MAX32 or nbytes == MAX32 or header == MAX32:
                extra = directory[at + name_size : at + name_size + extra_size]
                nbytes, packed, header = self._zip64(extra, nbytes, packed, header)
            at += name_size + extra_size + comment_size
            top, _, name = path.partition(b"/")
            root = top if root is None else root
            if magic != b"PK\x01\x02" or not name or not name.isascii() or top != root or len(path) != name_size:
                raise self.damaged(f"directory entry {path!r} is not one that torch writes")
            if flags & 1 or method or packed != nbytes:
                raise self.damaged(f"record {path!r} is compressed or encrypted")
            if header + LOCAL.size + name_size + nbytes > directory_at:
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
                    if value == MAX32:
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


def place(archive: Archive, tensor: TensorRef, *, by_columns: bool = False) -> tuple[int, int]:
    """(offset from the archive's start, size) of a tensor's elements, bytes.

    Raises ``SourceError`` if they are not there, or lie column by column and not ``by_columns``.
    """
    if tensor.is_column_major and not by_columns:
        strides = (1, tensor.shape[0])
        raise SourceError(
            f"{archive.where}: the tensor of shape {tensor.shape} is stored with strides {strides}, {_NOT_DENSE}"
        )
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
    if _is_dense(shape, strides):
        return TensorRef(storage, dtype, count(args[1]), shape)
    if len(shape) == 2 and _is_dense(shape[::-1], strides[::-1]):
        return TensorRef(storage, dtype, count(args[1]), shape, is_column_major=True)
    raise Unfit(f"the tensor of shape {shape} is stored with strides {strides}, {_NOT_DENSE}")


_NOT_DENSE = "not row by row; save it again after calling contiguous() on it"


def _is_dense(shape: Shape, strides: Shape) -> bool:
    """Whether the last dim runs through the storage element by element, and each other dim over whole ones."""
    dense = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != dense and 0 not in shape:
            return False
        dense *= size
    return True


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
    **{("torch", name): _StorageKind(code) for code, name in STORAGE_CLASS.items()},
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
