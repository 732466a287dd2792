"""LoRA by torchtitan's own component: which matrices get an adapter, and a trained one as PEFT saves it.

Import after ``devices.prepare_torchtitan`` for ``add_adapters``; ``export_adapter`` needs torch and safetensors alone.

Source of names: torchtitan 0.3.0, ``components/lora.py`` (``lora_a`` (rank, in), ``lora_b`` (out, rank), their product
scaled by alpha / rank); PEFT 0.21, ``utils/save_and_load.py`` and ``tuners/lora/config.py``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qwen3conv.converters.errors import PolicyError, SourceError
from qwen3conv.converters.names import natural_key

TARGETS = {
    "q_proj": ("attention.qkv_linear.wq", "self_attn.q_proj"),
    "k_proj": ("attention.qkv_linear.wk", "self_attn.k_proj"),
    "v_proj": ("attention.qkv_linear.wv", "self_attn.v_proj"),
    "o_proj": ("attention.wo", "self_attn.o_proj"),
    "gate_proj": ("feed_forward.w1", "mlp.gate_proj"),
    "up_proj": ("feed_forward.w3", "mlp.up_proj"),
    "down_proj": ("feed_forward.w2", "mlp.down_proj"),
}
"""Name of a matrix as PEFT's configs have it -> its module in a layer of torchtitan's, and of transformers' Qwen3."""

_CONFIGS = {"k_proj": "wkv", "v_proj": "wkv"}
"""What torchtitan's config calls a module that is not named as in the model: keys and values share one entry."""

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def split_targets(text: str) -> list[str]:
    """``"q_proj, v_proj"`` as names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def check_targets(names: Sequence[str], *, is_moe: bool) -> tuple[str, ...]:
    """``names`` in order, or all there are without any.

    Raises:
        PolicyError: one is unknown, or is of experts, which are no linear layers of torchtitan's, or ``k_proj`` and
            ``v_proj`` are not named together.
    """
    possible = ATTENTION if is_moe else tuple(TARGETS)
    odd = [name for name in names if name not in possible]
    if odd:
        why = " (experts get no adapters in torchtitan 0.3)" if is_moe and set(odd) <= TARGETS.keys() else ""
        raise PolicyError(f"--lora-targets {', '.join(odd)}: expected some of {', '.join(possible)}{why}")
    if ("k_proj" in names) != ("v_proj" in names):
        raise PolicyError("--lora-targets: torchtitan 0.3 adapts k_proj and v_proj together; name both or neither")
    return tuple(name for name in possible if name in names or not names)


def add_adapters(model: Any, *, rank: int, alpha: float, targets: Sequence[str]) -> Any:
    """torchtitan's model config with everything frozen but adapters of ``targets``."""
    from .titan import LoRAConverter

    modules = [_CONFIGS.get(name, TARGETS[name][0].rpartition(".")[2]) for name in targets]
    return LoRAConverter(LoRAConverter.Config(rank=rank, alpha=alpha, target_modules=modules)).convert(model)


def export_adapter(step: Path, destination: Path, *, rank: int, alpha: float, targets: Sequence[str]) -> None:
    """Write the adapter in the checkpoint ``step`` as a PEFT adapter: ``destination`` is replaced as a whole.

    Raises:
        SourceError: ``step`` holds no adapter, or not of these targets.
    """
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file
    from torch.distributed.checkpoint import FileSystemReader

    from qwen3conv.converters.stores.dcp import read_dcp

    shapes = {name: tensor.spec.shape for name, tensor in read_dcp(step).tensors.items() if _is_adapter(name)}
    names = {name: _peft_name(name) for name in sorted(shapes, key=natural_key)}
    found = {name.split(".")[-3] for name in names.values()}
    if found != {*targets}:
        held = ", ".join(sorted(found)) or "nothing"
        raise SourceError(
            f"{step} holds adapters of {held}; expected those of {', '.join(targets)}, as this run trains"
        )
    state = {name: torch.empty(shape) for name, shape in shapes.items()}
    dcp.load(state, storage_reader=FileSystemReader(step), no_dist=True)
    partial = destination.with_name(f".{destination.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    save_file(
        {names[name]: tensor for name, tensor in state.items()},
        partial / "adapter_model.safetensors",
        {"format": "pt"},
    )
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
    (partial / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if destination.exists():
        import shutil

        shutil.rmtree(destination)
    os.replace(partial, destination)


def _is_adapter(name: str) -> bool:
    return name.endswith((".lora_a.weight", ".lora_b.weight")) and name.startswith("layers.")


def _peft_name(name: str) -> str:
    """``layers.3.attention.wo.lora_a.weight`` -> ``base_model.model.model.layers.3.self_attn.o_proj.lora_A.weight``."""
    head, _, kind = name.removesuffix(".weight").rpartition(".")
    _, layer, module = head.split(".", 2)
    hub = next((hub for titan, hub in TARGETS.values() if titan == module), module)
    return f"base_model.model.model.layers.{layer}.{hub}.{kind[:-1]}{kind[-1].upper()}.weight"
