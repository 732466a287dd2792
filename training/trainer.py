"""torchtitan's Trainer with the model of the checkpoint it starts from, and a record of what it did.

Import this module after ``devices.prepare_torchtitan``: it imports torchtitan. Source of the names: torchtitan 0.3.0,
``trainer.py``, ``models/qwen3/__init__.py``.
"""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from qwen3conv.converters.config import Qwen3Config, read_config
from qwen3conv.converters.errors import PolicyError, enumerate_problems
from qwen3conv.converters.placement import Mesh, check_mesh

from .data.loader import ChatDataLoader
from .launch import JOINS
from .layouts import check_size
from .lora import add_adapters, check_targets, split_targets
from .native_model import native_config
from .overrides.attention import DocumentAttention
from .recording import record_run, warn_of_changes
from .run_checks import shape_problems
from .run_lock import lock_run
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

_RATE, _ADAPTER_RATE = 1e-5, 1e-4
WARM_UP_SHARE = -1
"""For ``lr_scheduler.warmup_steps``: a twentieth of the schedule's steps, and at least one."""
_LOAD_BALANCE_COEFF = 1e-3
"""torchtitan's default for the flavors."""


class QwenTrainer(Trainer):
    """torchtitan's Trainer. The model comes from the config.json in ``hf_assets_path``, never from a flavor."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's fields and a few more."""

        learning_rate: float | None = None
        """AdamW's peak rate; None is 1e-5, of adapters 1e-4. torchtitan keeps it in parameter groups, which its command
        line does not reach. 1e-4 of adapters: LLaMA-Factory, commit 77e7f47, examples/train_lora/qwen3_lora_sft.yaml.
        """
        model_size: str = ""
        """Size that the source must have, such as 8B; without one any."""
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
        self._lock = None
        if os.environ.get("RANK", "0") == "0":
            self._lock = lock_run(Path(config.dump_folder), "rank 0", joins=JOINS in os.environ)
        place = Path(config.hf_assets_path) / "config.json"
        source = read_config(place)
        if config.model_size:
            check_size(config.model_size, source.geometry, str(place))
        check_shapes(source, config)
        self._fit(config, source)
        self._shapes: list[tuple[int, ...]] = []
        self._run_record: RunRecord | None = None
        super().__init__(config)
        self._run_record = record_run(self)

    @classmethod
    def _fit(cls, config: Config, source: Qwen3Config) -> None:
        """Give ``config`` the model, loss and precision that ``source`` and the device ask for."""
        device = titan_utils.device_type
        config.model_spec = cls._spec(config, source, device)
        loss = CrossEntropyLoss.Config(global_vocab_size=source.geometry.vocab_size)
        config.loss = ChunkedLossWrapper.Config(loss_fn=loss)
        if config.learning_rate is None:
            config.learning_rate = _ADAPTER_RATE if config.lora_rank else _RATE
        config.optimizer = default_adamw(lr=config.learning_rate)
        schedule = config.lr_scheduler
        if schedule.warmup_steps == WARM_UP_SHARE:
            schedule.warmup_steps = max(1, round(0.05 * (schedule.total_steps or config.training.steps)))
        for loader in (config.dataloader, config.validator.dataloader):
            if isinstance(loader, ChatDataLoader.Config):
                loader.tokenizer_path = loader.tokenizer_path or config.hf_assets_path
                loader.cache = loader.cache or str(Path(config.dump_folder) / "encoded")
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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after the step of ``state_dict``; settings that are not those of the steps before are warned of."""
        super().load_state_dict(state_dict)
        if self._run_record is not None and self.step < self.config.training.steps:
            warn_of_changes(self.step, self._run_record.begin(self.step + 1))

    def should_continue_training(self) -> bool:
        """Whether a step is left.

        Raises:
            PolicyError: the run went further than it is asked to go.
        """
        steps = self.config.training.steps
        if self.step > steps:
            raise PolicyError(
                f"{self.config.dump_folder} is already at step {self.step}, and is to go to step {steps}, counted from "
                "its beginning: ask for more steps, or for another folder"
            )
        if self.step == steps and not self._shapes and self._run_record is not None:
            sys.stderr.write(f"{self.config.dump_folder} is already at step {steps}: no step is left to train\n")
        return bool(super().should_continue_training())

    def close(self) -> None:
        """End, and let another process train this run."""
        super().close()
        if self._lock is not None:
            self._lock.release()

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """What the Trainer does. A batch of a new shape is warned of: compilers begin again for each."""
        shape = tuple(input_dict["input"].shape)
        if shape not in self._shapes:
            self._shapes.append(shape)
            if len(self._shapes) > 1:
                message = f"step {self.step}: a batch of a new shape {shape}, after {self._shapes[0]}"
                warnings.warn(message, stacklevel=2)
            if self._run_record is not None:
                self._run_record.add(shapes=self._shapes)
        found: tuple[torch.Tensor, torch.Tensor, dict[str, Any]] = super().post_dataloading_process(input_dict, labels)
        return found


def check_shapes(source: Qwen3Config, config: QwenTrainer.Config) -> None:
    """Refuse degrees and sequences that do not fit the model, before torchtitan trips over them.

    Raises:
        PolicyError: everything that does not fit, at once.
    """
    degrees = config.parallelism
    fsdp = degrees.data_parallel_shard_degree
    if fsdp < 1:  # what the other degrees leave
        others = degrees.data_parallel_replicate_degree * degrees.context_parallel_degree
        others *= degrees.tensor_parallel_degree * degrees.pipeline_parallel_degree
        fsdp = int(os.environ.get("WORLD_SIZE", "1")) // others
    mesh = Mesh(tp=degrees.tensor_parallel_degree, fsdp=fsdp, ep=degrees.expert_parallel_degree)
    check_mesh(mesh, source.geometry)
    problems = shape_problems(source, mesh, config.training.seq_len)
    if problems:
        raise PolicyError(enumerate_problems("this run cannot be:", problems))


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
