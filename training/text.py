"""Plain text for torchtitan's own loader: rows with a column ``text``, from a file, the hub or a folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .data.rows import load_table
from .titan import DATASETS, DatasetConfig, HuggingFaceTextDataLoader

DATASET = "text"
"""Its name in torchtitan's table of data sets; ``--dataloader.dataset_path`` is the file."""


def text_loader(path: str | None = None) -> HuggingFaceTextDataLoader.Config:
    """torchtitan's text loader for the rows at ``path``, or at ``--dataloader.dataset_path``."""
    DATASETS[DATASET] = DatasetConfig(path="", loader=load_table, sample_processor=_text)
    return HuggingFaceTextDataLoader.Config(dataset=DATASET, dataset_path=path)


def _text(sample: Mapping[str, Any]) -> str:
    if not isinstance(sample.get("text"), str):
        raise ValueError(f"a row has no text under 'text', only {', '.join(sorted(sample))}")
    return str(sample["text"])
