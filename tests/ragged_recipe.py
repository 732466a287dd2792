"""A recipe whose second batch has another shape, for ``--module tests.ragged_recipe``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from qwen3conv.training.recipes.native import tiny
from qwen3conv.training.text import TextDataLoader
from qwen3conv.training.titan import derive
from qwen3conv.training.trainer import QwenTrainer

SHORTER = 8


class RaggedLoader(TextDataLoader):
    """Every batch but the first is shorter by some tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(TextDataLoader.Config):
        """The same fields."""

    def __iter__(self) -> Iterator[Any]:
        for number, (inputs, labels) in enumerate(super().__iter__()):
            end = None if number == 0 else -SHORTER
            yield {name: tensor[:, :end] for name, tensor in inputs.items()}, labels[:, :end]


def ragged() -> QwenTrainer.Config:
    """``tiny`` with that loader."""
    config = tiny()
    config.dataloader = derive(config.dataloader, RaggedLoader.Config)
    return config
