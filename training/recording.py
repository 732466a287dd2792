"""What a Trainer writes down of its run, and the settings that decide what it computes.

Import this module after ``devices.prepare_torchtitan``. Source of the names: torchtitan 0.3.0, ``trainer.py``,
``components/metrics.py``, ``config/configs.py``, ``components/optimizer/lr_scheduler.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .lora import split_targets
from .progress import Progress
from .run_record import RunRecord
from .titan import titan_utils

if TYPE_CHECKING:
    from .trainer import QwenTrainer


def record_run(trainer: QwenTrainer) -> RunRecord | None:
    """The record of the run, kept by rank 0, to which every step that ``trainer`` logs is added from now on."""
    config, dims = trainer.config, trainer.parallel_dims
    sequences = config.training.local_batch_size * trainer.gradient_accumulation_steps
    sequences *= dims.dp_shard * dims.dp_replicate
    facts: dict[str, Any] = {
        "device": titan_utils.device_type,
        "ranks": dist.get_world_size(),
        "degrees": {"fsdp": dims.dp_shard, "tp": dims.tp, "ep": dims.ep, "pp": dims.pp, "cp": dims.cp},
        "tokens_per_step": sequences * config.training.seq_len,
        "learning_rate": config.learning_rate,
        "lora": _lora_facts(config),
        "rows_left_out": len(getattr(trainer.dataloader, "bad_rows", ())),
    }
    if dist.get_rank():
        return None
    record = RunRecord.start(Path(config.dump_folder) / config.record, facts, settings_of(config, sequences))
    log, monitor = trainer.metrics_processor.log, trainer.metrics_processor.device_memory_monitor
    progress = Progress(steps=config.training.steps, tokens_per_step=facts["tokens_per_step"])

    def log_and_record(step: int, loss: float, largest: float, norm: float, *args: Any, **more: Any) -> None:
        seconds, memory = progress.took(step), round(monitor.get_peak_stats().max_reserved_gib * 2**30)
        found = {"loss": loss, "grad_norm": norm, "seconds": round(seconds, 3), "memory_bytes": memory}
        record.step(step, tokens_per_second=progress.tokens_per_second(), **found)
        log(step, loss, largest, norm, *args, **more)
        sys.stderr.write(progress.line(step, loss, memory) + "\n")

    trainer.metrics_processor.log = log_and_record
    log_validation = trainer.metrics_processor.log_validation

    def log_and_record_validation(loss: float, step: int, *args: Any, **more: Any) -> None:
        record.add_to_step(step, validation_loss=loss)
        log_validation(loss, step, *args, **more)

    trainer.metrics_processor.log_validation = log_and_record_validation
    return record


def settings_of(config: QwenTrainer.Config, sequences_per_step: int) -> dict[str, Any]:
    """What decides the numbers of a step, by flat names; not the mesh, which changes them by rounding alone."""
    groups = [
        [
            group.pattern,
            group.optimizer_name,
            {key: value for key, value in group.optimizer_kwargs.items() if key != "lr"},
        ]
        for group in config.optimizer.param_groups
    ]
    schedule, training = config.lr_scheduler, config.training
    return {
        "optimizer": groups,
        "learning_rate": config.learning_rate,
        "warmup_steps": schedule.warmup_steps,
        "schedule_steps": schedule.total_steps or training.steps,
        "decay": [schedule.decay_type, schedule.decay_ratio, schedule.min_lr_factor],
        "sequence_length": training.seq_len,
        "sequences_per_step": sequences_per_step,
        "max_norm": training.max_norm,
        "parameter_dtype": training.dtype,
        "compute_dtype": training.mixed_precision_param,
        "balance_experts": config.balance_experts,
    }


def warn_of_changes(step: int, changed: Mapping[str, tuple[object, object]]) -> None:
    """Say which settings change what is computed after ``step``."""
    for key, (before, now) in changed.items():
        sys.stderr.write(f"Warning: from step {step + 1} on {key} is {now}; up to step {step} it was {before}\n")


def _lora_facts(config: QwenTrainer.Config) -> dict[str, Any] | None:
    if not config.lora_rank:
        return None
    return {"rank": config.lora_rank, "alpha": config.lora_alpha, "targets": split_targets(config.lora_targets)}
