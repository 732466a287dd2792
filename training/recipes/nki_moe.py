"""The native recipes with experts by ``qwen3conv::moe_experts``: NKI kernels on a Neuron device, PyTorch elsewhere.

The kernels were never compiled for or run on hardware.
"""

from __future__ import annotations

from collections.abc import Callable

from qwen3conv.training.recipes import native
from qwen3conv.training.recipes.sizes import recipes_of_sizes
from qwen3conv.training.trainer import QwenTrainer

_OVERRIDE = "qwen3conv.training.overrides.nki_moe.nki_moe"


def _with_operator(config: QwenTrainer.Config) -> QwenTrainer.Config:
    config.override.imports = [*config.override.imports, _OVERRIDE]
    return config


def pretrain() -> QwenTrainer.Config:
    """``native.pretrain``."""
    return _with_operator(native.pretrain())


def sft() -> QwenTrainer.Config:
    """``native.sft``."""
    return _with_operator(native.sft())


def tiny() -> QwenTrainer.Config:
    """``native.tiny``."""
    return _with_operator(native.tiny())


def tiny_sft() -> QwenTrainer.Config:
    """``native.tiny_sft``."""
    return _with_operator(native.tiny_sft())


_SIZES = recipes_of_sizes(pretrain, sft)


def __getattr__(name: str) -> Callable[[], QwenTrainer.Config]:
    """``qwen3_8b``, ``qwen3_8b_sft`` and so on."""
    if name in _SIZES:
        return _SIZES[name]
    raise AttributeError(name)


def __dir__() -> list[str]:
    return ["pretrain", "sft", "tiny", "tiny_sft", *_SIZES]
