"""Plain text for torchtitan's own loader: rows with a column ``text``, from a file, the hub or a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qwen3conv.converters.errors import SourceError, enumerate_problems

from .data.encoded import BAD_ROWS
from .data.rows import Part, Row, digest_rows, load_table, read_rows
from .titan import DATASETS, DatasetConfig, HuggingFaceTextDataLoader

DATASET = "text"
"""Its name in torchtitan's table of data sets; ``--dataloader.dataset_path`` is the file."""


class TextDataLoader(HuggingFaceTextDataLoader):
    """torchtitan's text loader for the rows at ``--dataloader.dataset_path``; ``bad_rows`` names those left out.

    Raises:
        SourceError: bad rows under ``on_bad_row="stop"`` (all named), or no usable row.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTextDataLoader.Config):
        """torchtitan's fields, and what to do with rows that are no text."""

        dataset: str = DATASET
        on_bad_row: Literal["stop", "skip"] = "stop"
        validation_fraction: float = 0.0
        """Of the rows, 0 to 1, that is not trained on; by what they say, so that copies of a row stay together."""

    def __init__(self, config: Config, **options: Any) -> None:
        source = config.dataset_path or ""
        table, bad = load_texts(source)
        if bad and config.on_bad_row == "stop":
            raise SourceError(enumerate_problems(BAD_ROWS, bad))
        self.bad_rows = tuple(bad)
        if config.validation_fraction:
            part = Part(config.validation_fraction)
            table = table.select([i for i, text in enumerate(table["text"]) if part.has({"text": text}, "text")])
        if not len(table):
            raise SourceError(enumerate_problems(f"{source}: no usable row is left to train on", bad))
        DATASETS[DATASET] = DatasetConfig(path=source, loader=lambda path: table, sample_processor=_text)
        super().__init__(config, **options)


def load_texts(source: str) -> tuple[Any, list[str]]:
    """The rows of ``source`` that hold a text, as a table of ``datasets``, and the others by place and fault.

    Raises:
        SourceError: it cannot be read.
    """
    from datasets import Dataset, Features, Value

    is_jsonl = Path(source).suffix == ".jsonl"
    try:
        table = load_table(source)
    except SourceError:
        if not is_jsonl:
            raise
    else:
        if _is_clean(table):
            return table, []
    if is_jsonl:
        rows = [(row.where, _fault(row)) for row in read_rows(source, "train")]
        bad = [f"{where}: {fault}" for where, fault in rows if fault]
        if len(bad) == len(rows):
            return Dataset.from_dict({"text": []}), bad
        wanted = {"source": source, "digest": digest_rows(source)}  # which name it in the cache
        return Dataset.from_generator(_good_texts, gen_kwargs=wanted, features=Features({"text": Value("string")})), bad
    faults = {n: fault for n, row in enumerate(table) if (fault := _fault(Row("", dict(row))))}
    bad = [f"{source}, row {number + 1}: {fault}" for number, fault in faults.items()]
    return table.select([number for number in range(len(table)) if number not in faults]), bad


def _is_clean(table: Any) -> bool:
    """Whether every row has a text, found without a look at each in Python."""
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    if "text" not in table.column_names or table.features["text"].dtype not in ("string", "large_string"):
        return False
    column = table.data.column("text")
    return not column.null_count and bool(pc.all(pc.greater(pc.binary_length(column), 0)).as_py())


def _good_texts(source: str, digest: str) -> Iterator[dict[str, str]]:
    for row in read_rows(source, "train"):
        if not _fault(row):
            yield {"text": row.value["text"]}


def _fault(row: Row) -> str:
    text = row.value.get("text")
    if row.problem:
        return row.problem
    if not isinstance(text, str):
        return f"no string field 'text', only {', '.join(sorted(map(str, row.value))) or 'nothing'}"
    return "" if text else "text is empty"


def _text(sample: Mapping[str, Any]) -> str:
    return str(sample["text"])
