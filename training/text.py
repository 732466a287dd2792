"""Plain text for torchtitan's own loader: JSON lines or Parquet with a column ``text``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .titan import DATASETS, DatasetConfig, HuggingFaceTextDataLoader

DATASET = "text"
"""Its name in torchtitan's table of data sets; ``--dataloader.dataset_path`` is the file."""

_KINDS = {".jsonl": "json", ".parquet": "parquet"}


def text_loader(path: str | None = None) -> HuggingFaceTextDataLoader.Config:
    """torchtitan's text loader for the file at ``path``, or at ``--dataloader.dataset_path``."""
    DATASETS[DATASET] = DatasetConfig(path="", loader=_load, sample_processor=_text)
    return HuggingFaceTextDataLoader.Config(dataset=DATASET, dataset_path=path)


def _load(path: str) -> Any:
    from datasets import load_dataset

    suffix = Path(path).suffix
    if suffix not in _KINDS:
        raise ValueError(f"{path}: expected a file that ends in {', '.join(_KINDS)}; give --dataloader.dataset_path")
    return load_dataset(_KINDS[suffix], data_files=path, split="train")


def _text(sample: Mapping[str, Any]) -> str:
    if not isinstance(sample.get("text"), str):
        raise ValueError(f"a row has no text under 'text', only {', '.join(sorted(sample))}")
    return str(sample["text"])
