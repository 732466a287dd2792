"""The native recipes with the transformers model, through torchtitan's transformers backend."""

from __future__ import annotations

from qwen3conv.training.recipes import native
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
