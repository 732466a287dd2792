"""Recipes named after the released sizes: their layout, and that the source must be of the size."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from qwen3conv.training.layouts import LAYOUT, recipe_name
from qwen3conv.training.trainer import QwenTrainer

C = TypeVar("C", bound=QwenTrainer.Config)


def recipes_of_sizes(pretrain: Callable[[], C], sft: Callable[[], C]) -> dict[str, Callable[[], C]]:
    """``qwen3_8b`` and ``qwen3_8b_sft``, and so for every size: the bases with its layout and sequences of 4096."""
    return {recipe_name(size, sft=base is sft): _sized(size, base) for size in LAYOUT for base in (pretrain, sft)}


def _sized(size: str, base: Callable[[], C]) -> Callable[[], C]:
    def recipe() -> C:
        config, mesh = base(), LAYOUT[size]
        config.model_size = size
        config.parallelism.tensor_parallel_degree = mesh.tp
        config.parallelism.data_parallel_shard_degree = mesh.fsdp
        config.training.seq_len = 4096
        return config

    return recipe
