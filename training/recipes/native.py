"""torchtitan's own Qwen3, dense and MoE. Each recipe states what differs from the one it begins with."""

from __future__ import annotations

from collections.abc import Callable

from qwen3conv.training.data.loader import ChatDataLoader
from qwen3conv.training.recipes.sizes import recipes_of_sizes
from qwen3conv.training.text import TextDataLoader
from qwen3conv.training.titan import (
    CheckpointManager,
    DebugConfig,
    LRSchedulersContainer,
    MetricsProcessor,
    ParallelismConfig,
    SelectiveAC,
    TrainingConfig,
    Validator,
)
from qwen3conv.training.trainer import WARM_UP_SHARE, QwenTrainer


def pretrain() -> QwenTrainer.Config:
    """Continued pre-training on text. The model is that of ``--hf_assets_path``, whose config.json says every size.

    A published full fine-tune of Qwen3-4B states a rate of 1e-5, a weight decay of 0.1 and a warm-up over 5% of the
    steps (ms-swift, commit a54622f, examples/train/tiled_mlp/train_deepspeed.sh); it names neither optimizer nor
    schedule. AdamW, with that decay, is torchtitan's default; the cosine to a tenth of the rate is our choice.
    """
    return QwenTrainer.Config(
        metrics=MetricsProcessor.Config(log_freq=1),
        dataloader=TextDataLoader.Config(),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=WARM_UP_SHARE, decay_type="cosine", min_lr_factor=0.1),
        training=TrainingConfig(local_batch_size=1, seq_len=2048, steps=1000),
        # torchtitan's default backend holds parameters that FSDP2 of torch 2.13 cannot shard on more than one rank
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(enable=True, interval=500, async_mode="async", last_save_model_only=False),
        activation_checkpoint=SelectiveAC.Config(),
        validator=Validator.Config(freq=50, dataloader=ChatDataLoader.Config(infinite=False)),
        debug=DebugConfig(seed=42),  # of adapters; all other numbers are loaded
    )


def sft() -> QwenTrainer.Config:
    """Fine-tuning on chats or on prompts and completions, with loss on the answers alone."""
    config = pretrain()
    config.dataloader = ChatDataLoader.Config()
    return config


def tiny() -> QwenTrainer.Config:
    """``pretrain`` for models that a CPU trains in seconds."""
    return _small(pretrain())


def tiny_sft() -> QwenTrainer.Config:
    """``sft`` for the same."""
    return _small(sft())


def _small(config: QwenTrainer.Config) -> QwenTrainer.Config:
    config.learning_rate = 1e-3
    config.lr_scheduler.warmup_steps, config.validator.freq = 1, 5
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 64, 10
    return config


_SIZES = recipes_of_sizes(pretrain, sft)


def __getattr__(name: str) -> Callable[[], QwenTrainer.Config]:
    """``qwen3_8b``, ``qwen3_8b_sft`` and so on."""
    if name in _SIZES:
        return _SIZES[name]
    raise AttributeError(name)


def __dir__() -> list[str]:
    return ["pretrain", "sft", "tiny", "tiny_sft", *_SIZES]
