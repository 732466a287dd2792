"""The native recipes with the transformers model, through torchtitan's transformers backend."""

from __future__ import annotations

from collections.abc import Callable

from qwen3conv.training.recipes import native
from qwen3conv.training.recipes.sizes import recipes_of_sizes
from qwen3conv.training.titan import derive
from qwen3conv.training.trainer import QwenTrainer, TransformersTrainer


def _with_transformers(config: QwenTrainer.Config) -> TransformersTrainer.Config:
    return derive(config, TransformersTrainer.Config)


def pretrain() -> TransformersTrainer.Config:
    """``native.pretrain``."""
    return _with_transformers(native.pretrain())


def sft() -> TransformersTrainer.Config:
    """``native.sft``."""
    return _with_transformers(native.sft())


def tiny() -> TransformersTrainer.Config:
    """``native.tiny``."""
    return _with_transformers(native.tiny())


def tiny_sft() -> TransformersTrainer.Config:
    """``native.tiny_sft``."""
    return _with_transformers(native.tiny_sft())


_SIZES = recipes_of_sizes(pretrain, sft)


def __getattr__(name: str) -> Callable[[], TransformersTrainer.Config]:
    """``qwen3_8b``, ``qwen3_8b_sft`` and so on."""
    if name in _SIZES:
        return _SIZES[name]
    raise AttributeError(name)


def __dir__() -> list[str]:
    return ["pretrain", "sft", "tiny", "tiny_sft", *_SIZES]
