"""torchtitan's Trainer with the model of the checkpoint it starts from, and a record of what it did.

Import this module after ``devices.prepare_torchtitan``: it imports torchtitan. Source of the names: torchtitan 0.3.0,
``trainer.py``, ``models/qwen3/__init__.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from qwen3conv.converters.config import Qwen3Config, read_config

from .data import ChatDataLoader
from .lora import add_adapters, check_targets, split_targets
from .native_model import native_config
from .overrides.attention import DocumentAttention
from .run_record import RunRecord
from .titan import (
    ChunkedLossWrapper,
    CrossEntropyLoss,
    FullAC,
    ModelSpec,
    Qwen3StateDictAdapter,
    SelectiveAC,
    Trainer,
    VarlenAttention,
    default_adamw,
    parallelize_qwen3,
    register_moe_load_balancing_hook,
    titan_utils,
)

_LOAD_BALANCE_COEFF = 1e-3
"""torchtitan's default for the flavors."""


class QwenTrainer(Trainer):
    """torchtitan's Trainer. The model comes from the config.json in ``hf_assets_path``, never from a flavor."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's fields and a few more."""

        learning_rate: float = 1e-5
        """AdamW's peak rate. torchtitan keeps it in parameter groups, which its command line does not reach."""
        balance_experts: bool = False
        """Train MoE's routing bias, for which an exported Hugging Face model has no place."""
        lora_rank: int = 0
        """Rank of LoRA's adapters; with 0 every parameter is trained."""
        lora_alpha: float = 0.0
        """Their product counts ``lora_alpha / lora_rank`` times."""
        lora_targets: str = ""
        """Matrices that get an adapter, by PEFT's names, with commas; all linear ones of the layers without any."""
        record: str = "run.json"
        """Where the run is recorded, in ``dump_folder``."""

    def __init__(self, config: Config) -> None:
        source = read_config(Path(config.hf_assets_path) / "config.json")
        self._fit(config, source)
        super().__init__(config)
        self._record(config)

    @classmethod
    def _fit(cls, config: Config, source: Qwen3Config) -> None:
        """Give ``config`` the model, loss and precision that ``source`` and the device ask for."""
        device = titan_utils.device_type
        config.model_spec = cls._spec(config, source, device)
        loss = CrossEntropyLoss.Config(global_vocab_size=source.geometry.vocab_size)
        config.loss = ChunkedLossWrapper.Config(loss_fn=loss)
        config.optimizer = default_adamw(lr=config.learning_rate)
        if isinstance(config.dataloader, ChatDataLoader.Config) and not config.dataloader.tokenizer_path:
            config.dataloader.tokenizer_path = config.hf_assets_path
        if device == "cpu":
            config.training.mixed_precision_param = "float32"  # bfloat16 takes 15 times as long there
            config.training.disable_cuda_graphs = True

    @classmethod
    def _spec(cls, config: Config, source: Qwen3Config, device: str) -> ModelSpec:
        spec = native_spec(
            source,
            max_seq_len=config.training.seq_len,
            device=device,
            balance_experts=config.balance_experts,
            fuse_qkv=not config.lora_rank,
        )
        if not config.lora_rank:
            return spec
        targets = check_targets(split_targets(config.lora_targets), is_moe=source.geometry.is_moe)
        model = add_adapters(spec.model, rank=config.lora_rank, alpha=config.lora_alpha, targets=targets)
        return replace(spec, model=model)

    def _record(self, config: Config) -> None:
        dims = self.parallel_dims
        degrees = {"fsdp": dims.dp_shard, "tp": dims.tp, "ep": dims.ep, "pp": dims.pp, "cp": dims.cp}
        batch = config.training.local_batch_size * self.gradient_accumulation_steps * dims.dp_shard * dims.dp_replicate
        facts = {
            "device": titan_utils.device_type,
            "ranks": dist.get_world_size(),
            "degrees": degrees,
            "tokens_per_step": batch * config.training.seq_len,
            "shape": [config.training.local_batch_size, config.training.seq_len],
            "learning_rate": config.learning_rate,
            "lora": {
                "rank": config.lora_rank,
                "alpha": config.lora_alpha,
                "targets": split_targets(config.lora_targets),
            }
            if config.lora_rank
            else None,
            "rows_left_out": len(getattr(self.dataloader, "bad_rows", ())),
        }
        if dist.get_rank():
            return
        record = RunRecord.start(Path(config.dump_folder) / config.record, facts)
        log = self.metrics_processor.log

        def log_and_record(step: int, loss: float, largest: float, norm: float, *args: Any, **more: Any) -> None:
            record.step(step, loss=loss, grad_norm=norm)
            log(step, loss, largest, norm, *args, **more)

        self.metrics_processor.log = log_and_record


def _lora_facts(config: QwenTrainer.Config) -> dict[str, Any] | None:
    if not config.lora_rank:
        return None
    return {"rank": config.lora_rank, "alpha": config.lora_alpha, "targets": split_targets(config.lora_targets)}


class TransformersTrainer(QwenTrainer):
    """The same with the model that transformers has for the checkpoint."""

    @dataclass(kw_only=True, slots=True)
    class Config(QwenTrainer.Config):
        """The fields of ``QwenTrainer.Config``."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)

    @classmethod
    def _spec(cls, config: QwenTrainer.Config, source: Qwen3Config, device: str) -> ModelSpec:
        from .transformers_model import transformers_spec

        if source.geometry.is_moe and isinstance(config.activation_checkpoint, SelectiveAC.Config):
            # torch 2.13 finds a cached tensor changed in transformers' experts
            config.activation_checkpoint = FullAC.Config()
        return _reducing_by_sums(transformers_spec(source, device=device))


def native_spec(
    config: Qwen3Config, *, max_seq_len: int, device: str, balance_experts: bool = False, fuse_qkv: bool = True
) -> ModelSpec:
    """torchtitan's native Qwen3 for the sizes of ``config``, in the parts that run on ``device``.

    Off CUDA, attention is ``DocumentAttention``; on a CPU, experts compute in their own dtype, because torchtitan's
    grouped matrix product casts to bfloat16 whatever they have.
    """
    model = native_config(
        config,
        max_seq_len=max_seq_len,
        inner_attention=VarlenAttention.Config() if device == "cuda" else DocumentAttention.Config(),
        reference_experts=device == "cpu",
        fuse_qkv=fuse_qkv,
        load_balance_coeff=_LOAD_BALANCE_COEFF if balance_experts else None,
    )
    return _reducing_by_sums(
        ModelSpec(
            name="qwen3",
            flavor="from config.json",
            model=model,
            parallelize_fn=parallelize_qwen3,
            pipelining_fn=None,
            post_optimizer_build_fn=register_moe_load_balancing_hook if balance_experts else None,
            state_dict_adapter=Qwen3StateDictAdapter,
        )
    )


def _reducing_by_sums(spec: ModelSpec) -> ModelSpec:
    """``spec`` that reduces gradients by sums where gloo does it, which has no scaled ones (torch 2.13)."""

    def parallelize(model: nn.Module, **options: Any) -> nn.Module:
        parallel: nn.Module = spec.parallelize_fn(model, **options)
        if dist.get_backend() == "gloo" or torch.device(titan_utils.device_type).type == "cpu":
            for module in parallel.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
        return parallel

    return replace(spec, parallelize_fn=parallelize)
