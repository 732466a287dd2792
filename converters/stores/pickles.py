"""A pickle machine that can only build what a table names.

``load`` interprets protocols 2 to 5 itself instead of subclassing ``pickle.Unpickler``: there is no import, no
attribute access and no call in it besides the table's own functions, so a blocked name is refused before anything
happens. It also closes what an overridden ``find_class`` leaves open in CPython 3.11 to 3.13: a tuple nested some
100,000 deep and used as a dict key overflows the C stack, and a 12-byte file with one large memo index takes
gigabytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import SourceError


class Unfit(Exception):
    """Raised inside ``load`` by a table's functions and records: what they were given is not what belongs there."""


class Record:
    """Base of what NEWOBJ makes and BUILD fills. As a dict key it counts by identity."""

    __slots__ = ()

    def build(self, state: object) -> None:
        """Take over ``state``; raises ``Unfit`` when it is not of the expected form."""
        raise Unfit(f"a {type(self).__name__} has no state")


@dataclass(frozen=True, slots=True)
class Callee:
    """A name that a pickle may call: ``call`` takes the arguments of REDUCE, and those of NEWOBJ (a named tuple's) when
    there are any; ``new`` makes the empty record of a NEWOBJ without arguments.
    """

    call: Callable[[tuple[object, ...]], object] | None = None
    new: Callable[[], Record] | None = None


Table = Mapping[tuple[str, str], object]
"""(module, name) -> a ``Callee``, or any other value, which the name then simply stands for."""

_PLAIN_KEYS = frozenset({str, int, float, bool, bytes, type(None)})
_DAMAGE = (IndexError, ValueError, TypeError, KeyError, AttributeError, OverflowError, struct.error)


def load(
    data: bytes, table: Table, what: str, persistent: Callable[[tuple[object, ...]], object] | None = None
) -> object:
    """The value that the pickle ``data`` describes, made only of plain values and what ``table`` gives.

    ``what`` names the file in errors; ``persistent`` resolves persistent ids (torch's storages). Whatever is wrong
    with ``data`` comes out as ``SourceError``: a name that ``table`` lacks, a cut, a flipped byte, a wrong type.
    """
    try:
        return _run(data, table, persistent)
    except Unfit as reason:
        raise SourceError(f"{what}: {reason}") from None
    except (MemoryError, RecursionError):
        raise SourceError(f"{what}: its pickle does not fit into memory; nothing in it was executed") from None
    except _DAMAGE:
        raise SourceError(
            f"{what}: its pickle is cut short or damaged ({len(data)} bytes); copy it again from where it was saved"
        ) from None


def _run(data: bytes, table: Table, persistent: Callable[[tuple[object, ...]], object] | None) -> object:
    """The interpreter. A read past the end of ``data`` shows up as ``IndexError`` at the next opcode."""
    stack: list[Any] = []
    outer: list[list[Any]] = []
    memo: list[Any] = []
    number = int.from_bytes
    i = 0
    while True:
        op = data[i]
        i += 1
        # In order of frequency on either side of 0x80, for speed.
        if op >= 0x80:
            if op == 0x94:  # MEMOIZE
                memo.append(stack[-1])
            elif op == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif op == 0x81:  # NEWOBJ
                args, callee = stack.pop(), stack[-1]
                if type(callee) is Callee and callee.new is not None and type(args) is tuple and not args:
                    stack[-1] = callee.new()
                elif type(callee) is Callee and callee.call is not None and type(args) is tuple and args:
                    stack[-1] = callee.call(args)
                else:
                    raise Unfit("it makes an object of something that is not a known class; nothing was executed")
            elif op == 0x86:  # TUPLE2
                last = stack.pop()
                stack[-1] = (stack[-1], last)
            elif op == 0x8C:  # SHORT_BINUNICODE
                end = i + 1 + data[i]
                stack.append(data[i + 1 : end].decode())
                i = end
            elif op == 0x89:  # NEWFALSE
                stack.append(False)
            elif op == 0x8A:  # LONG1
                end = i + 1 + data[i]
                stack.append(number(data[i + 1 : end], "little", signed=True))
                i = end
            elif op == 0x87:  # TUPLE3
                last, middle = stack.pop(), stack.pop()
                stack[-1] = (stack[-1], middle, last)
            elif op == 0x93:  # STACK_GLOBAL
                name, module = stack.pop(), stack.pop()
                stack.append(_find(table, module, name))
            elif op == 0x95:  # FRAME
                i += 8
            elif op == 0x88:  # NEWTRUE
                stack.append(True)
            elif op == 0x80:  # PROTO
                if not 2 <= data[i] <= 5:
                    raise Unfit(f"pickle protocol {data[i]} is not one that is read here (2 to 5)")
                i += 1
            elif op == 0x8D:  # BINUNICODE8
                end = i + 8 + number(data[i : i + 8], "little")
                stack.append(data[i + 8 : end].decode())
                i = end
            elif op == 0x8E:  # BINBYTES8
                end = i + 8 + number(data[i : i + 8], "little")
                stack.append(data[i + 8 : end])
                i = end
            else:
                raise _unknown(op, i)
        elif op == 0x68:  # BINGET
            stack.append(memo[data[i]])
            i += 1
        elif op == 0x6A:  # LONG_BINGET
            stack.append(memo[number(data[i : i + 4], "little")])
            i += 4
        elif 0x71 <= op <= 0x72:  # BINPUT, LONG_BINPUT: after every object in protocol 2
            width = 1 if op == 0x71 else 4
            index = number(data[i : i + width], "little")
            i += width
            if index == len(memo):
                memo.append(stack[-1])
            elif index < len(memo):
                memo[index] = stack[-1]
            else:
                raise Unfit(f"memo index {index} is out of turn; nothing was executed")
        elif op == 0x28:  # MARK
            outer.append(stack)
            stack = []
        elif op == 0x4B:  # BININT1
            stack.append(data[i])
            i += 1
        elif op == 0x52:  # REDUCE
            args, callee = stack.pop(), stack[-1]
            if type(callee) is not Callee or callee.call is None or type(args) is not tuple:
                raise Unfit("it calls something that is not a known function; nothing was executed")
            stack[-1] = callee.call(args)
        elif op == 0x29:  # EMPTY_TUPLE
            stack.append(())
        elif op == 0x62:  # BUILD
            state = stack.pop()
            target = stack[-1]
            if not isinstance(target, Record):
                raise Unfit(f"it sets attributes of a {type(target).__name__}; nothing was executed")
            target.build(state)
        elif op == 0x75:  # SETITEMS
            items = stack
            stack = outer.pop()
            _set_items(stack[-1], items)
        elif op == 0x7D:  # EMPTY_DICT
            stack.append({})
        elif op == 0x4D:  # BININT2
            stack.append(data[i] | data[i + 1] << 8)
            i += 2
        elif op == 0x4A:  # BININT
            stack.append(number(data[i : i + 4], "little", signed=True))
            i += 4
        elif op == 0x5D:  # EMPTY_LIST
            stack.append([])
        elif op == 0x61:  # APPEND
            last = stack.pop()
            _extend(stack[-1], [last])
        elif op == 0x65:  # APPENDS
            items = stack
            stack = outer.pop()
            _extend(stack[-1], items)
        elif op == 0x74:  # TUPLE
            items = stack
            stack = outer.pop()
            stack.append(tuple(items))
        elif op == 0x4E:  # NONE
            stack.append(None)
        elif op == 0x73:  # SETITEM
            last, middle = stack.pop(), stack.pop()
            _set_items(stack[-1], [middle, last])
        elif op == 0x63:  # GLOBAL
            middle = data.index(10, i)
            end = data.index(10, middle + 1)
            stack.append(_find(table, data[i:middle].decode(), data[middle + 1 : end].decode()))
            i = end + 1
        elif op == 0x58:  # BINUNICODE
            end = i + 4 + number(data[i : i + 4], "little")
            stack.append(data[i + 4 : end].decode())
            i = end
        elif op == 0x47:  # BINFLOAT
            stack.append(struct.unpack(">d", data[i : i + 8])[0])
            i += 8
        elif op == 0x51:  # BINPERSID
            last = stack.pop()
            if persistent is None or type(last) is not tuple:
                raise Unfit("it refers to an object outside the pickle, which does not belong there")
            stack.append(persistent(last))
        elif op == 0x43 or op == 0x42:  # SHORT_BINBYTES, BINBYTES
            width = 1 if op == 0x43 else 4
            end = i + width + number(data[i : i + width], "little")
            stack.append(data[i + width : end])
            i = end
        elif op == 0x30:  # POP
            stack.pop()
        elif op == 0x31:  # POP_MARK
            stack = outer.pop()
        elif op == 0x2E:  # STOP
            (result,) = stack
            if outer or i != len(data):
                raise Unfit("there is more in it than one pickled object")
            return result
        else:
            raise _unknown(op, i)


def _unknown(op: int, end: int) -> Unfit:
    return Unfit(f"pickle opcode 0x{op:02x} at byte {end - 1} has no place in a checkpoint; nothing was executed")


def _find(table: Table, module: object, name: object) -> object:
    if type(module) is not str or type(name) is not str:
        raise Unfit("it names a class by something that is not text; nothing was executed")
    try:
        return table[module, name]
    except KeyError:
        raise Unfit(
            f"it asks for {module + '.' + name!r}, which is not among the classes that belong there; nothing was "
            "executed. Do not load this file with torch either, unless you trust whoever wrote it"
        ) from None


def _set_items(target: object, items: list[Any]) -> None:
    keys = items[::2]
    if not isinstance(target, dict) or len(items) % 2:
        raise Unfit(f"it sets items of a {type(target).__name__}")
    for key in keys:
        # Only keys whose hash cannot recurse.
        if type(key) not in _PLAIN_KEYS and not isinstance(key, Record):
            raise Unfit(f"it has a dict key of type {type(key).__name__}")
    target.update(zip(keys, items[1::2], strict=True))


def _extend(target: object, items: list[Any]) -> None:
    if type(target) is not list:
        raise Unfit(f"it appends to a {type(target).__name__}")
    target.extend(items)
