"""Rows of JSONL, Parquet or a hub dataset, each with the name of the place it came from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from qwen3conv.converters.errors import SourceError


class Row(NamedTuple):
    """One row: ``where`` is ``file:line`` (or ``source, row N``); ``problem`` is set when it could not be read."""

    where: str
    value: dict[str, Any]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of a source that are trained on, or those held out of it to validate with.

    What a row says decides, not its place: a row added or moved sends no other to the other side, and copies of a row
    are on the same one.
    """

    fraction: float = 0.0
    """Of the rows, 0 to 1, that is held out."""
    held_out: bool = False

    def has(self, value: Mapping[str, Any], kind: str) -> bool:
        """Whether a row of ``kind`` belongs to it."""
        if not self.fraction:
            return not self.held_out
        said = value.get("text") if kind == "text" else None
        text = said if isinstance(said, str) else json.dumps(value, sort_keys=True, default=str)
        return (xxhash.xxh3_64_intdigest(text.encode()) < self.fraction * 2**64) is self.held_out


ALL_ROWS = Part()
"""Nothing is held out."""

FILES = (".jsonl", ".parquet")
"""Files of rows; everything else is the name of a data set of the hub, or a folder that ``datasets`` reads."""


def read_rows(source: str, split: str) -> Iterator[Row]:
    """Every row of ``source``; a JSONL line that is no JSON object comes with its ``problem``.

    Raises:
        SourceError: a local file is missing, or the dataset cannot be loaded.
    """
    if Path(source).suffix == ".jsonl":
        yield from _read_jsonl(Path(source))
        return
    for number, value in enumerate(load_table(source, split), start=1):
        yield Row(f"{source}, row {number}", dict(value))


def load_table(source: str, split: str = "train") -> Any:
    """``source`` by the ``datasets`` library: a .jsonl or .parquet file, ``org/name``, ``org/name:split`` or a folder.

    Raises:
        SourceError: it cannot be loaded.
    """
    from datasets import load_dataset

    path, kinds = Path(source), dict(zip(FILES, ("json", "parquet"), strict=True))
    if path.suffix in kinds and not path.is_file():
        raise SourceError(f"{path}: no such file")
    try:
        if path.suffix in kinds:
            return load_dataset(kinds[path.suffix], data_files={split: str(path)}, split=split)
        name, _, part = source.partition(":") if not path.exists() else (source, "", "")
        return load_dataset(name, split=part or split)
    except Exception as error:  # the library raises many kinds, pyarrow's included
        raise SourceError(f"{source}: split {split!r} cannot be loaded: {error}") from error


def digest_rows(source: str, split: str = "train") -> str:
    """xxh3_128 of a file's bytes, or what ``datasets`` calls the fingerprint of anything else.

    Raises:
        SourceError: it cannot be read.
    """
    path = Path(source)
    if path.suffix not in FILES:
        return str(load_table(source, split)._fingerprint)
    found = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                found.update(block)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error
    return found.hexdigest()


def _read_jsonl(path: Path) -> Iterator[Row]:
    if not path.is_file():
        raise SourceError(f"{path}: no such file")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                value = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                yield Row(where, {}, f"invalid UTF-8 at byte {error.start}")
            except (ValueError, RecursionError):
                yield Row(where, {}, "not JSON" if line.strip() else "empty line")
            else:
                yield Row(where, value) if isinstance(value, dict) else Row(where, {}, "not a JSON object")
