"""The non-tensor entries of a DCP folder: ``torch.save`` archives of steps, seeds, schedules and loaders.

They are carried as they are; only plain values are ever built from one.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

from ..dtypes import itemsize
from ..errors import SourceError
from . import torch_zip
from .contents import Blob
from .dcp import measured, metadata_path, misplaced, reader
from .dcp_metadata import BytesStorageMetadata, extent, read_metadata
from .pickles import Callee, Table, Unfit, load

MAX_BLOB = 1 << 28
"""Largest non-tensor entry that is read into memory, bytes."""


def read_blob(folder: Path, fqn: str) -> bytes:
    """One non-tensor entry, as stored: a ``torch.save`` archive, not unpickled. At most ``MAX_BLOB`` bytes."""
    metadata = read_metadata(metadata_path(folder))
    info = metadata.places.get((fqn, None))
    if info is None or not isinstance(metadata.entries.get(fqn), BytesStorageMetadata):
        raise SourceError(f"{folder}: has no non-tensor entry {fqn!r}")
    problems = misplaced(fqn, info)
    if problems or info.length > MAX_BLOB:
        raise SourceError(f"{folder}: {(problems or [f'{fqn!r} has {info.length} bytes, more than {MAX_BLOB}'])[0]}")
    measured(folder, (), {fqn: info})
    try:
        with reader(folder, info.relative_path) as read:
            return read(info.offset, info.length)
    except OSError as error:
        raise SourceError(f"{folder / info.relative_path}: cannot be read ({error.strerror})") from None


def read_blobs(folder: Path, blobs: Mapping[str, Blob]) -> dict[str, bytes]:
    """Non-tensor entries as stored: ``torch.save`` archives, not unpickled. Equal ones are one object.

    Raises:
        SourceError: a file ends early or cannot be read, or there is more than ``MAX_BLOB`` bytes of different ones.
    """
    found: dict[str, bytes] = {}
    distinct: dict[bytes, bytes] = {}
    held = 0
    by_place = sorted(blobs.items(), key=lambda item: item[1])
    for path, group in groupby(by_place, key=lambda item: item[1].file):
        try:
            with reader(folder, path) as read:
                for fqn, blob in group:
                    if blob.length > MAX_BLOB - held:
                        raise SourceError(
                            f"{folder}: its non-tensor entries hold more than {MAX_BLOB} bytes (up to {fqn!r}), which "
                            "no training state does"
                        )
                    data = read(blob.offset, blob.length)
                    if len(data) != blob.length:
                        raise SourceError(f"{folder / path} ends inside of {fqn!r}; it was cut short")
                    found[fqn] = distinct.setdefault(data, data)
                    held += blob.length if found[fqn] is data else 0
        except OSError as error:
            raise SourceError(f"{folder / path}: cannot be read ({error.strerror})") from None
    return {fqn: found[fqn] for fqn in blobs}


def read_simple_blob(folder: Path, fqn: str) -> object:
    """One non-tensor entry as numbers, strings, bytes, ``None``, lists, tuples and dicts of them.

    A tensor of one element becomes a number, an ``OrderedDict`` a dict. Nothing else is built: ``SourceError``.
    """
    return simple_value(read_blob(folder, fqn), f"{folder}: {fqn!r}")


def simple_value(data: bytes, where: str) -> object:
    """The value in a ``torch.save`` archive, as ``read_simple_blob`` gives it; ``where`` is for errors."""
    archive = torch_zip.Archive(lambda at, size: data[at : at + size], 0, len(data), where)
    value = load(archive.content("data.pkl", MAX_BLOB), _SIMPLE, where, torch_zip.storage_ref)
    try:
        return _plain(value, archive, [_MAX_VALUES])
    except Unfit as reason:
        raise SourceError(f"{where}: {reason}") from None


def unpickled(data: bytes, where: str) -> object:
    """The numbers, strings, bytes, ``None``, lists, tuples and dicts in a bare pickle; ``SourceError`` for others."""
    try:
        return _plain(load(data, {}, where), None, [_MAX_VALUES])
    except Unfit as reason:
        raise SourceError(f"{where}: {reason}") from None


_MAX_VALUES = 1_000_000
_MAX_DEPTH = 50
_STRUCT_CODE = {"BOOL": "?", "U8": "B", "I8": "b", "I16": "h", "U16": "H", "F16": "e", "I32": "i", "U32": "I"}
_STRUCT_CODE |= {"F32": "f", "I64": "q", "U64": "Q", "F64": "d"}


def _plain(value: object, archive: torch_zip.Archive | None, left: list[int], depth: int = 0) -> object:
    """``value`` with one-element tensors replaced by numbers. A pickle can nest shared parts: both are bounded."""
    left[0] -= 1
    if left[0] < 0 or depth > _MAX_DEPTH:
        raise Unfit(f"more than {_MAX_VALUES} values, or nested deeper than {_MAX_DEPTH}")
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if type(value) is list or type(value) is tuple:
        items = [_plain(item, archive, left, depth + 1) for item in value]
        return items if type(value) is list else tuple(items)
    if type(value) is dict:
        return {key: _plain(item, archive, left, depth + 1) for key, item in value.items()}
    if type(value) is torch_zip.TensorRef and archive is not None and math.prod(value.shape) == 1:
        width = itemsize(value.dtype)
        record = archive.locate(f"data/{value.storage.key}")
        raw = archive.bytes_at(record + value.offset * width, width)
        if value.dtype == "BF16":
            return struct.unpack("<f", b"\0\0" + raw)[0]
        if value.dtype in _STRUCT_CODE:
            return struct.unpack("<" + _STRUCT_CODE[value.dtype], raw)[0]
    raise Unfit(f"holds a {type(value).__name__}, which is more than plain values")


def _encode(args: tuple[object, ...]) -> bytes:
    """``_codecs.encode(text, "latin1")``: how pickle protocol 2 spells bytes."""
    if len(args) != 2 or type(args[0]) is not str or args[1] != "latin1":
        raise Unfit("it calls _codecs.encode in a way that pickle does not")
    return args[0].encode("latin1")


def _no_bytes(args: tuple[object, ...]) -> bytes:
    if args:
        raise Unfit("it makes bytes from arguments, as pickle does not")
    return b""


_SIMPLE: Table = {
    **torch_zip.TENSOR_TABLE,
    ("_codecs", "encode"): Callee(call=_encode),
    ("__builtin__", "bytes"): Callee(call=_no_bytes),
    ("builtins", "bytes"): Callee(call=_no_bytes),
    ("torch", "Size"): Callee(call=lambda args: extent(args[0])),
}
