"""The header of one safetensors file, read strictly.

A file is an 8-byte little-endian length, a JSON header of that length, then the data. The header maps each tensor to
``dtype``, ``shape`` and ``data_offsets`` (bytes, counted from the start of the data). Format and limits: safetensors
0.8, ``SafeTensors`` and ``Metadata``.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeGuard

from ..boxes import Shape
from ..config_json import unique_keys
from ..dtypes import ITEMSIZE
from ..errors import SourceError, enumerate_problems, few, short
from ..remote import remote_size

MAX_HEADER = 100_000_000  # bytes; the reference library refuses longer headers
_MAX_DIMS = 64  # torch's limit
_CODES = {code: code for code in ITEMSIZE}  # one string object per dtype, however many tensors have it


class Entry(NamedTuple):
    """A tensor in one file; ``begin`` and ``end`` in bytes from the start of the file's data."""

    dtype: str
    shape: Shape
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """The checked header of one file. ``tensors`` is in file order and covers the data without hole or overlap."""

    tensors: Mapping[str, Entry]
    metadata: Mapping[str, str]
    data_start: int
    size: int
    """Bytes of the whole file."""


def read_header(path: Path) -> Header:
    """The header of ``path``, checked against the file's size.

    Stricter than the library: a repeated key and a dtype outside ``dtypes.ITEMSIZE`` are refused too. Raises
    ``SourceError`` with every problem of the file.
    """
    problems: list[str] = []
    header = scan_header(path, path.name, problems)
    if header is None:
        raise SourceError(enumerate_problems(f"{path} cannot be used; download or copy it again:", problems))
    return header


def scan_header(path: Path, label: str, problems: list[str]) -> Header | None:
    """As ``read_header``, but what is wrong is added to ``problems``, each beginning with ``label``: then ``None``."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            problems.append(f"{label}: is not a file")
            return None
        elsewhere = remote_size(path)
        size = status.st_size if elsewhere is None else elsewhere
        with path.open("rb") as stream:
            head = stream.read(512)
            length = int.from_bytes(head[:8], "little")
            if len(head) < 8 or length > min(MAX_HEADER, size - 8):
                problems.append(f"{label}: {_start_problem(head, size)}")
                return None
            stream.seek(8)
            raw = stream.read(length)
    except FileNotFoundError:
        problems.append(f"{label}: does not exist" + (" (a link to nowhere)" if path.is_symlink() else ""))
        return None
    except (OSError, ValueError) as error:
        problems.append(f"{label}: cannot be read: {error}")
        return None
    try:
        document = parse_object(raw)
    except ValueError as error:
        problems.append(f"{label}: the header ({length} bytes) is not the JSON object expected: {error}")
        return None
    found: list[str] = []
    metadata = _read_metadata(document.pop("__metadata__", None), found)
    entries = [(name, entry) for name, value in document.items() if (entry := _read_entry(name, value, found))]
    if not found:
        entries.sort(key=lambda item: (item[1].begin, item[1].end))
        found.extend(_check_coverage(entries, size - 8 - length))
    if found:
        problems.extend(f"{label}: {problem}" for problem in found)
        return None
    return Header(dict(entries), metadata, 8 + length, size)


def parse_object(raw: bytes | str) -> dict[str, object]:
    """The JSON object in ``raw``; ``ValueError`` for anything else, for a repeated key, for text that is not UTF-8."""
    try:
        text = raw if isinstance(raw, str) else raw.decode()
        document = json.loads(text, object_pairs_hook=_text_keys, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError(f"found a {type(document).__name__} at the top")
    return document


def are_sizes(value: object) -> TypeGuard[list[int]]:
    """Whether ``value`` is a list of sizes or offsets: integers (``True`` is none) of 0 up to 2**63."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def foreign_kind(head: bytes) -> str | None:
    """What a file that begins with ``head`` is instead of what its name says."""
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer (`git lfs pull` fetches the file)"
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html", b"<?xml")):
        return "a web page (a login or error page was saved instead of the file)"
    if head.startswith(b"PK\x03\x04"):
        return "a zip archive (as torch.save writes; save it as safetensors first)"
    return None


def is_text(name: str) -> bool:
    """Whether ``name`` can be written as UTF-8: JSON escapes can make strings that cannot, of lone surrogates."""
    return name.isascii() or not any("\ud800" <= char <= "\udfff" for char in name)


def _text_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = unique_keys(pairs)
    for key in result:
        if not is_text(key):
            raise ValueError(f"the key {key!r} is not text")
    return result


def _refuse_constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")


def _start_problem(head: bytes, size: int) -> str:
    """Why a file of ``size`` bytes that begins with ``head`` has no whole header."""
    foreign = foreign_kind(head)
    if foreign is not None:
        return f"is {foreign}, not the tensors themselves ({size} bytes)"
    if len(head) < 8:
        return f"has {size} bytes; even the header's length takes 8"
    length = int.from_bytes(head[:8], "little")
    if length > MAX_HEADER:
        return f"gives its header a length of {length} bytes, over the limit of {MAX_HEADER}: not a safetensors file?"
    missing = 8 + length - size
    return f"ends inside its header: at least {missing} bytes are missing ({size} bytes, header to byte {8 + length})"


def _read_metadata(value: object, problems: list[str]) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        problems.append(f"__metadata__ should map strings to strings, found a {type(value).__name__}")
        return {}
    texts = {key: text for key, text in value.items() if isinstance(text, str) and is_text(text)}
    if len(texts) < len(value):
        bad = (repr(key) for key in value if key not in texts)
        problems.append(f"__metadata__ should map strings to strings, and does not for {few(bad)}")
    return texts


def _read_entry(name: str, value: object, problems: list[str]) -> Entry | None:
    if not isinstance(value, dict):
        problems.append(f"{name!r}: expected dtype, shape and data_offsets, found a {type(value).__name__}")
        return None
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        problems.append(f"{name!r}: dtype {short(dtype)} is not one that is read here ({', '.join(ITEMSIZE)})")
        return None
    if not are_sizes(shape) or len(shape) > _MAX_DIMS:
        problems.append(f"{name!r}: shape should be a list of up to {_MAX_DIMS} sizes, found {short(shape)}")
        return None
    if not are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        problems.append(f"{name!r}: data_offsets should be [begin, end], found {short(offsets)}")
        return None
    begin, end = offsets
    expected = math.prod(shape) * ITEMSIZE[dtype]
    if end - begin != expected:
        problems.append(
            f"{name!r}: {dtype} {short(shape)} takes {expected} bytes, data_offsets {offsets} hold {end - begin}"
        )
        return None
    return Entry(_CODES[dtype], tuple(shape), begin, end)


def _check_coverage(entries: Sequence[tuple[str, Entry]], data_bytes: int) -> Iterator[str]:
    position, before = 0, "the header"
    cut: str | None = None
    for name, entry in entries:
        if entry.begin < position:
            yield f"{name!r}: its data, bytes {entry.begin} to {entry.end}, overlaps that of {before}"
        elif entry.begin > position:
            yield f"{name!r}: the {entry.begin - position} bytes before it belong to no tensor"
        if entry.end >= position:
            position, before = entry.end, repr(name)
        if cut is None and entry.end > data_bytes:
            cut = name
    if cut is not None:
        yield f"is truncated: {position - data_bytes} bytes are missing at its end, {cut!r} is the first tensor cut"
    elif position < data_bytes:
        yield f"is {data_bytes - position} bytes too long: they follow the last tensor, {before}"
