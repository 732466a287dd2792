"""JSON objects from files that nobody vouches for, and back to bytes in the style they had."""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from .errors import SourceError

LARGEST_FILE = 16 * 2**20
"""Bytes. A config.json has some 1 KB; the skip list of a 235B FP8 repository makes it some 20 KB."""

DEEPEST = 32
"""Levels of nesting that are read; a real config.json has two or three."""


def read_json_object(path: Path) -> tuple[dict[str, object], bytes]:
    """The object in a JSON file, key order kept, and the file's bytes.

    Raises:
        SourceError: no regular file, too large, not UTF-8, not JSON, not an object, a key twice, a number that is not
            finite, or nested too deeply.
    """
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise SourceError(f"{path}: not a regular file")
        if info.st_size > LARGEST_FILE:
            raise SourceError(f"{path}: {info.st_size} bytes; a JSON file of at most {LARGEST_FILE} bytes is read")
        with path.open("rb") as file:
            text = file.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        raise SourceError(f"{path}: no such file") from None
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error
    return parse_json_object(text, str(path)), text


def parse_json_object(text: bytes, where: str) -> dict[str, object]:
    """The JSON object that ``text`` (UTF-8) spells; ``where`` names it in errors.

    Raises:
        SourceError: as ``read_json_object`` does.
    """
    if len(text) > LARGEST_FILE:
        raise SourceError(f"{where}: more than {LARGEST_FILE} bytes of JSON")
    try:
        value = json.loads(
            text.decode("utf-8"), object_pairs_hook=unique_keys, parse_float=_finite, parse_constant=_not_a_number
        )
    except UnicodeDecodeError as error:
        raise SourceError(f"{where}: not UTF-8 text at byte {error.start}") from None
    except RecursionError:
        raise SourceError(f"{where}: nested too deeply to be read") from None
    except ValueError as error:  # json.JSONDecodeError, the hooks below, integers of thousands of digits
        raise SourceError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise SourceError(f"{where}: expected a JSON object, found {_kind(value)}")
    if _depth(value) > DEEPEST:
        raise SourceError(f"{where}: nested more than {DEEPEST} levels deep")
    return value


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An ``object_pairs_hook`` that raises ``ValueError`` for a key that is there twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key!a:.80} is there twice in one object")
            seen.add(key)
    return found


def render_json(value: Mapping[str, object], like: bytes = b"") -> bytes:
    """``value`` as JSON with the indentation, the final newline and the escaping that ``like`` has.

    Without ``like``: two spaces, a newline, ASCII. Lines end in LF.
    """
    indent: int | str | None = 2
    if like:
        found = re.match(rb"\s*\{[ \t]*\r?\n([ \t]+)", like)
        indent = found[1].decode() if found else None
    end = b"\n" if not like or like.endswith(b"\n") else b""
    try:
        return json.dumps(value, indent=indent, ensure_ascii=like.isascii(), allow_nan=False).encode() + end
    except UnicodeEncodeError:  # a lone surrogate: it can only be escaped, as it was in ``like``
        return json.dumps(value, indent=indent, allow_nan=False).encode() + end


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {text:.40} is too large")
    return value


def _not_a_number(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _kind(value: object) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _depth(value: object) -> int:
    """Levels of nesting, counted without recursion."""
    level: list[object] = [value]
    depth = 0
    while level:
        depth += 1
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        level = [item for item in below if isinstance(item, dict | list)]
    return depth
