"""torchtitan's own Qwen3, dense and MoE. Each recipe states what differs from the one it begins with."""

from __future__ import annotations

from qwen3conv.training.data import ChatDataLoader
from qwen3conv.training.text import text_loader
from qwen3conv.training.titan import (
    CheckpointManager,
    DebugConfig,
    LRSchedulersContainer,
    MetricsProcessor,
    ParallelismConfig,
    SelectiveAC,
    TrainingConfig,
)
from qwen3conv.training.trainer import QwenTrainer


def pretrain() -> QwenTrainer.Config:
    """Continued pre-training on text. The model is that of ``--hf_assets_path``, whose config.json says every size."""
    return QwenTrainer.Config(
        metrics=MetricsProcessor.Config(log_freq=1),
        dataloader=text_loader(),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=10, decay_type="cosine", min_lr_factor=0.1),
        training=TrainingConfig(local_batch_size=1, seq_len=2048, steps=1000),
        # torchtitan's default backend holds parameters that FSDP2 of torch 2.13 cannot shard on more than one rank
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(enable=True, interval=500, last_save_model_only=False),
        activation_checkpoint=SelectiveAC.Config(),
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
    config.lr_scheduler.warmup_steps = 1
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 64, 10
    return config
