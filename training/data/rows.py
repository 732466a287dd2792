"""Rows of JSONL, Parquet or a hub dataset, each with the name of the place it came from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from qwen3conv.converters.errors import SourceError


class Row(NamedTuple):
    """One row: ``where`` is ``file:line`` (or ``source, row N``); ``problem`` is set when it could not be read."""

    where: str
    value: dict[str, Any]
    problem: str = ""


def read_rows(source: str, split: str) -> Iterator[Row]:
    """Every row of ``source``; a JSONL line that is no JSON object comes with its ``problem``.

    Raises:
        SourceError: a local file is missing, or the dataset cannot be loaded.
    """
    path = Path(source)
    if path.suffix == ".jsonl":
        yield from _read_jsonl(path)
        return
    if path.suffix == ".parquet" and not path.is_file():
        raise SourceError(f"{path}: no such file")
    from datasets import load_dataset

    try:
        if path.suffix == ".parquet":
            table = load_dataset("parquet", data_files={split: str(path)}, split=split)
        else:
            table = load_dataset(source, split=split)
    except Exception as error:  # the library raises many kinds, pyarrow's included
        raise SourceError(f"{source}: split {split!r} cannot be loaded: {error}") from error
    for number, value in enumerate(table, start=1):
        yield Row(f"{source}, row {number}", dict(value))


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
