"""Training checkpoints of torchtitan 0.3.0 as older releases would have written them: renamed, with torch ops alone.

Nothing here imports the product. Sources: torchtitan git history, as in ``real_checkpoints``; 0.2.2,
``components/lr_scheduler.py`` (the scheduler's whole state).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.real_checkpoints import FUSING_SCHEMAS, SCHEMAS, State, fuse_qkv, save_dcp

if TYPE_CHECKING:
    import torch

WQKV = ".attention.qkv_linear.wqkv.weight"


def load_nested(folder: Path) -> State:
    """A whole DCP as the nested state dict that was saved, by torch's own converter."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory() as scratch:
        dcp_to_torch_save(folder, Path(scratch) / "all.pt")
        state: State = torch.load(Path(scratch) / "all.pt", weights_only=False)
    return state


def older(state: Mapping[str, Any], schema: str, config: Mapping[str, Any], *, fused: bool) -> State:
    """A T7 training state under the names of ``schema``; ``fused`` says whether its optimizer has q, k and v as one."""
    age = SCHEMAS.index(schema)
    renamed: State = {}
    for name, value in state.items():
        if not isinstance(value, dict):
            renamed[_older_name(name, age)] = value
    if fused and schema in FUSING_SCHEMAS:
        _fuse(renamed, "", "", config)
    optimizer = {_older_name(name, age): value for name, value in state["optimizer"].items()}
    is_fused = any(WQKV in name for name in optimizer)
    if is_fused and not fused:
        _unfuse(optimizer, config, ".attention" if age < 2 else ".attention.qkv_linear")
    elif fused and not is_fused:
        raise ValueError("start from a run of a fused model")
    scheduler = dict(state["lr_scheduler"])
    if age < 2:
        rates = [
            next(value for name, value in optimizer.items() if name.endswith(end)) for end in (".initial_lr", ".lr")
        ]
        scheduler |= {"base_lrs": [rates[0]], "_step_count": scheduler["last_epoch"] + 1, "_last_lr": [rates[1]]}
        scheduler |= {"_get_lr_called_within_step": False, "_is_initial": False, "lr_lambdas": [{}]}
    rest = {name: value for name, value in state.items() if isinstance(value, dict)}
    return {**renamed, **rest, "optimizer": optimizer, "lr_scheduler": scheduler}


def save_older(source: Path, folder: Path, schema: str, config: Mapping[str, Any], *, fused: bool) -> Path:
    """``source``, a T7 training checkpoint, as ``schema`` in ``folder``."""
    return save_dcp(older(load_nested(source), schema, config, fused=fused), folder)


def _older_name(name: str, age: int) -> str:
    """A T7 name in the schema of this age."""
    if age < 6:
        name = name.replace(".moe.routed_experts.inner_experts.", ".moe.experts.")
    if age < 4:
        name = name.replace("_EFD", "").replace("_EDF", "").replace("expert_bias_E", "expert_bias")
    if age < 3:
        name = name.replace("lm_head.weight", "output.weight")
    if age < 2 and WQKV not in name:
        name = name.replace(".attention.qkv_linear.", ".attention.")
    return name


def _fuse(state: State, before: str, after: str, config: Mapping[str, Any]) -> None:
    for layer in range(config["num_hidden_layers"]):
        own = f"{before}layers.{layer}"
        parts = [state.pop(f"{own}.attention.qkv_linear.w{part}.weight{after}") for part in "qkv"]
        state[f"{own}{WQKV}{after}"] = fuse_qkv(parts, config)


def _unfuse(optimizer: State, config: Mapping[str, Any], place: str) -> None:
    """Give q, k and v of each layer what the optimizer has of them together."""
    for name in [name for name in optimizer if WQKV in name]:
        value = optimizer.pop(name)
        head, tail = name.split(WQKV)
        is_moment = tail in (".exp_avg", ".exp_avg_sq")
        parts = _qkv_rows(value, config) if is_moment else [value] * 3
        for letter, part in zip("qkv", parts, strict=True):
            optimizer[f"{head}{place}.w{letter}.weight{tail}"] = part


def _qkv_rows(fused: torch.Tensor, config: Mapping[str, Any]) -> list[torch.Tensor]:
    """q, k and v of a fused tensor: of each KV group its last two heads are k and v."""
    groups, head_dim = config["num_key_value_heads"], config["head_dim"]
    heads = fused.reshape(groups, -1, head_dim, fused.shape[1])
    parts = heads[:, :-2], heads[:, -2], heads[:, -1]
    return [part.reshape(-1, fused.shape[1]).contiguous() for part in parts]
