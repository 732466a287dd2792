"""Pickles that name classes which are never imported: what torch reads, written without torch."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple, cast


class Name(NamedTuple):
    """A class or function to be named, by module and name, in what ``dump`` writes."""

    module: str
    name: str


class Call(NamedTuple):
    """``callee(*args)``, evaluated when the pickle is read."""

    callee: Name
    args: tuple[object, ...]


class New(NamedTuple):
    """An object of ``cls`` made without ``__init__``; ``state`` is for its ``__dict__`` or ``__setstate__``."""

    cls: Name
    state: object = None


class Pairs(NamedTuple):
    """A dict whose items are produced while they are written, so that they never exist all at once."""

    items: Iterable[tuple[object, object]]


_BATCH = 1000


def dump(value: object) -> bytes:
    """Pickle, protocol 4, of plain values and of ``Name``, ``Call``, ``New`` and ``Pairs``, importing nothing.

    Names and strings repeated in ``value`` are written once. No other object is shared, as in what torch writes.
    """
    body = bytearray()
    _emit(body, {}, value)
    body += b"."
    return b"\x80\x04\x95" + struct.pack("<Q", len(body)) + bytes(body)


def _emit(out: bytearray, memo: dict[object, int], value: object) -> None:
    kind = type(value)
    if kind is str or kind is Name:
        seen = memo.get(value)
        if seen is not None:
            out += b"h" + bytes((seen,)) if seen < 256 else b"j" + struct.pack("<I", seen)
            return
        if isinstance(value, Name):
            _emit(out, memo, value.module)
            _emit(out, memo, value.name)
            out += b"\x93\x94"
        else:
            text = str(value).encode()
            out += b"\x8c" + bytes((len(text),)) if len(text) < 256 else b"X" + struct.pack("<I", len(text))
            out += text + b"\x94"
        memo[value] = len(memo)
    elif kind is int:
        out += integer(cast(int, value))
    elif kind is tuple:
        items = cast(tuple[object, ...], value)
        if len(items) > 3:
            out += b"("
        for item in items:
            _emit(out, memo, item)
        out += _TUPLE[len(items)] if len(items) <= 3 else b"t"
    elif isinstance(value, Call):
        _emit(out, memo, value.callee)
        _emit(out, memo, value.args)
        out += b"R"
    elif isinstance(value, New):
        _emit(out, memo, value.cls)
        out += b")\x81"
        if value.state is not None:
            _emit(out, memo, value.state)
            out += b"b"
    elif isinstance(value, dict):
        _emit_pairs(out, memo, value.items())
    elif isinstance(value, Pairs):
        _emit_pairs(out, memo, value.items)
    elif isinstance(value, list):
        out += b"]("
        for item in value:
            _emit(out, memo, item)
        out += b"e"
    elif value is None:
        out += b"N"
    elif kind is bool:
        out += b"\x88" if value else b"\x89"
    else:
        raise TypeError(f"no way to pickle a {kind.__name__}")


_TUPLE = (b")", b"\x85", b"\x86", b"\x87")


def _emit_pairs(out: bytearray, memo: dict[object, int], pairs: Iterable[tuple[object, object]]) -> None:
    out += b"}"
    pending = 0
    for key, item in pairs:
        if pending == 0:
            out += b"("
        _emit(out, memo, key)
        _emit(out, memo, item)
        pending += 1
        if pending == _BATCH:
            out += b"u"
            pending = 0
    if pending:
        out += b"u"


def integer(value: int) -> bytes:
    """An ``int`` as pickle spells it, protocol 2 on."""
    if 0 <= value < 1 << 8:
        return b"K" + bytes((value,))
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    width = value.bit_length() // 8 + 1
    return b"\x8a" + bytes((width,)) + value.to_bytes(width, "little", signed=True)
