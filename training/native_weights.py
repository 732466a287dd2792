"""torchtitan's own Qwen3, filled from a DCP folder for evaluation: every name and every element accounted for.

Import this module after ``devices.prepare_torchtitan``: it imports torchtitan.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from qwen3conv.converters.boxes import StoredTensor
from qwen3conv.converters.config import Qwen3Config
from qwen3conv.converters.errors import MappingError, SourceError, enumerate_problems

from .native_model import native_config
from .titan import Qwen3Model, ScaledDotProductAttention, set_default_dtype

_TRAINING_STATE = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")
"""Prefixes of what a training checkpoint holds beside the model."""
_EXPERT_BIAS = ".moe.expert_bias_E"
_LOAD_BALANCE_COEFF = 1e-3
"""torchtitan's default: the routing bias exists, and is trained, whenever this is not ``None``."""


def load_native(
    folder: Path, config: Qwen3Config, *, max_seq_len: int, dtype: torch.dtype, device: str = "cpu"
) -> Qwen3Model:
    """torchtitan's Qwen3 in ``dtype`` on ``device`` holding exactly the model weights of the DCP ``folder``.

    Plain causal attention over whole rows (no packed documents). Weights are read by
    ``torch.distributed.checkpoint.load`` without a process group, after the folder's pickle passed our own reader.
    Queries, keys and values stay three matrices, so that nothing is held twice. Experts are ``ReferenceExperts`` unless
    ``dtype`` is bfloat16, in which the stock ones compute anyway.

    Raises ``SourceError`` for a folder that cannot be read safely or whole, ``MappingError`` when its names or shapes
    are not those of torchtitan 0.3's Qwen3 for ``config``.
    """
    from qwen3conv.converters.stores.dcp import read_dcp

    stored = read_dcp(folder).tensors
    with torch.device("meta"), set_default_dtype(dtype):
        model = native_config(
            config,
            max_seq_len=max_seq_len,
            inner_attention=ScaledDotProductAttention.Config(),
            reference_experts=dtype != torch.bfloat16,
            fuse_qkv=False,
            load_balance_coeff=_LOAD_BALANCE_COEFF if any(name.endswith(_EXPERT_BIAS) for name in stored) else None,
            initialize=False,
        ).build()
    model.to_empty(device=device)
    with torch.device(device):
        model.init_states(buffer_device=torch.device(device))
    state = model.state_dict()
    _check_names_and_shapes(folder, stored, {name: tuple(tensor.shape) for name, tensor in state.items()})
    if config.tie_word_embeddings:
        _load_tied(folder, state)
    else:
        _load(folder, state)
    model.load_state_dict(state, strict=True)
    return model.eval().requires_grad_(False)


def largest_expert_bias(model: Qwen3Model) -> float | None:
    """Largest magnitude of any routing bias in ``model``; ``None`` when it has no such buffers."""
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias_E")]
    return max((float(bias.abs().max()) for bias in biases), default=None)


class _CheckedReader(dcp.FileSystemReader):
    """torch's reader held to the ``.metadata`` that was checked: no fallback to a rank's own, unchecked pickle."""

    def read_metadata(self) -> Metadata:
        # Without **kwargs in the signature, dcp.load does not try __<rank>.metadata (torch 2.13, state_dict_loader.py).
        return super().read_metadata()


def _load(folder: Path, state: dict[str, Any]) -> None:
    # Every failure arrives as CheckpointException, which is no Exception (torch 2.13, checkpoint/api.py).
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(state, storage_reader=_CheckedReader(folder), no_dist=True)
    except dcp.CheckpointException as error:
        causes = [str(cause[0]) for cause in error.failures.values()]
        heading = f"{folder}: torch.distributed.checkpoint cannot load it:"
        raise SourceError(enumerate_problems(heading, causes)) from error


def _load_tied(folder: Path, state: dict[str, Any]) -> None:
    """``_load`` for a model whose head is its embedding: the two stored copies must be equal."""
    head = state.pop("lm_head.weight")
    _load(folder, state)
    stored_head = torch.empty_like(head)
    _load(folder, {"lm_head.weight": stored_head})
    if not torch.equal(stored_head, state["tok_embeddings.weight"]):
        raise SourceError(
            f"{folder}: the config says tie_word_embeddings, but tok_embeddings.weight and lm_head.weight differ; "
            "one of them would be lost. Pass the config of an untied model, or repair the checkpoint"
        )
    state["lm_head.weight"] = head


def _check_names_and_shapes(
    folder: Path, stored: Mapping[str, StoredTensor], wanted: dict[str, tuple[int, ...]]
) -> None:
    problems = [f"missing: {name}" for name in wanted if name not in stored]
    problems += [
        f"{name}: stored {stored[name].spec.shape}, the config asks for {shape}"
        for name, shape in wanted.items()
        if name in stored and stored[name].spec.shape != shape
    ]
    extra = (name for name in stored if name not in wanted and not name.startswith(_TRAINING_STATE))
    problems += [f"no such parameter in the model: {name}" for name in extra]
    if problems:
        heading = f"{folder}: names or shapes are not those of torchtitan 0.3's Qwen3 for this config:"
        advice = (
            "If the names are those of an older torchtitan, bring them up first: qwen3conv upgrade SRC DST; "
            "if the shapes differ, pass the config.json that belongs to this checkpoint"
        )
        raise MappingError(f"{enumerate_problems(heading, problems)}\n{advice}")
    holes = [name for name in wanted if not _is_whole(stored[name])]
    if holes:
        raise SourceError(enumerate_problems(f"{folder}: chunks do not cover these tensors:", holes))


def _is_whole(tensor: StoredTensor) -> bool:
    return sum(chunk.box.volume for chunk in tensor.chunks) >= math.prod(tensor.spec.shape)
