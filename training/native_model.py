"""torchtitan's own Qwen3, configured by a Hugging Face config instead of a flavor table.

A flavor's rope theta and context are constants per size, while checkpoints of one size differ in both; so every number
here comes from the config. Import this module after ``devices.prepare_torchtitan``: it imports torchtitan.

Legend of shape suffixes: E experts, F expert hidden size, D hidden size, R routed rows sorted by expert.
Source of torchtitan's names and shapes: torchtitan 0.3.0, ``models/qwen3`` and ``models/common``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from qwen3conv.converters.config import Qwen3Config
from qwen3conv.converters.errors import SourceError

from .titan import (
    CosSinRoPE,
    Embedding,
    GroupedExperts,
    Linear,
    Module,
    Qwen3Model,
    Qwen3TransformerBlock,
    RMSNorm,
    derive,
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
    skip_param_init,
)


class ReferenceExperts(GroupedExperts):
    """torchtitan's routed experts with the same parameters, computed in the dtype they have.

    The stock class casts rows and weights to bfloat16 whatever their dtype (0.3.0, ``GroupedExperts.forward``), which
    moves fp32 logits by some 6e-3. One expert at a time: a reference, not a fast path.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """The fields of ``GroupedExperts.Config``."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Rows (R, D) through their experts: ``w2(silu(x w1) * (x w3))``; returns (R, D), same dtype and row order."""
        gate_EFD, down_EDF, up_EFD = (
            weight.to_local() if isinstance(weight, DTensor) else weight
            for weight in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        rows = x_RD.split([int(count) for count in num_tokens_per_expert_E.tolist()])
        parts = [
            F.linear(F.silu(F.linear(row, gate_EFD[e])) * F.linear(row, up_EFD[e]), down_EDF[e])
            for e, row in enumerate(rows)
        ]
        return torch.cat(parts)


def native_config(
    config: Qwen3Config,
    *,
    max_seq_len: int,
    inner_attention: Module.Config,
    reference_experts: bool = False,
    fuse_qkv: bool = True,
    load_balance_coeff: float | None = None,
    initialize: bool = True,
) -> Qwen3Model.Config:
    """torchtitan's Qwen3 configuration with every number taken from ``config``.

    ``max_seq_len`` sizes the RoPE caches, in positions (one per layer, fp32). ``load_balance_coeff=None`` leaves out
    the routing bias, for which Hugging Face models have no place. ``initialize=False`` gives initializers that do
    nothing, for weights that are loaded next. Raises ``SourceError`` for a config with RoPE scaling.
    """
    if config.rope_scaling is not None:
        # CosSinRoPE has YaRN without the attention factor by which transformers scales cos and sin, and no other kind.
        raise SourceError(f"torchtitan 0.3's native Qwen3 cannot compute RoPE scaling {dict(config.rope_scaling)}")
    g = config.geometry
    wide = config.raw.get("initializer_range")
    std = wide if isinstance(wide, float) and wide > 0 else 0.02
    linear = _initializer(std if initialize else None)
    residual = _initializer(std / math.sqrt(2 * g.num_hidden_layers) if initialize else None)
    rope = CosSinRoPE.Config(dim=g.head_dim, max_seq_len=max_seq_len, theta=float(config.rope_theta))

    def norm(size: int) -> Any:
        ones: Callable[..., Any] = nn.init.ones_ if initialize else skip_param_init
        return RMSNorm.Config(normalized_shape=size, eps=config.rms_norm_eps, param_init={"weight": ones})

    def experts() -> Any:
        routed = make_routed_experts_config(
            dim=g.hidden_size,
            hidden_dim=_required(g.moe_intermediate_size),
            num_experts=_required(g.num_experts),
            top_k=_required(config.num_experts_per_tok),
            param_init={"w1_EFD": linear["weight"], "w2_EDF": residual["weight"], "w3_EFD": linear["weight"]},
            comm_backend="standard",
        )
        if reference_experts:
            routed.inner_experts = derive(routed.inner_experts, ReferenceExperts.Config)
        router = make_router_config(
            dim=g.hidden_size,
            num_experts=_required(g.num_experts),
            gate_param_init=linear,
            top_k=_required(config.num_experts_per_tok),
            score_func="softmax",
            route_norm=bool(config.norm_topk_prob),
        )
        return make_moe_config(
            num_experts=_required(g.num_experts),
            router=router,
            routed_experts=routed,
            load_balance_coeff=load_balance_coeff,
        )

    def mlp() -> Any:
        return make_ffn_config(
            dim=g.hidden_size,
            hidden_dim=_required(g.intermediate_size),
            w1_param_init=linear,
            w2w3_param_init=linear,
        )

    layers = [
        Qwen3TransformerBlock.Config(
            attention_norm=norm(g.hidden_size),
            ffn_norm=norm(g.hidden_size),
            attention=make_gqa_config(
                dim=g.hidden_size,
                n_heads=g.num_attention_heads,
                n_kv_heads=g.num_key_value_heads,
                head_dim=g.head_dim,
                wqkv_param_init=linear,
                wo_param_init=residual if g.is_moe else linear,
                inner_attention=inner_attention,
                fuse_qkv=fuse_qkv,
                rope=rope,
                qk_norm=norm(g.head_dim),
            ),
            feed_forward=None if g.is_moe else mlp(),
            moe=experts() if g.is_moe else None,
        )
        for _ in range(g.num_hidden_layers)
    ]
    # A tied embedding is initialized through lm_head (torchtitan 0.3.0, Decoder.init_states).
    embedding = _initializer(std if initialize and not config.tie_word_embeddings else None)
    return Qwen3Model.Config(
        dim=g.hidden_size,
        vocab_size=g.vocab_size,
        enable_weight_tying=config.tie_word_embeddings,
        tok_embeddings=Embedding.Config(num_embeddings=g.vocab_size, embedding_dim=g.hidden_size, param_init=embedding),
        layers=layers,
        norm=norm(g.hidden_size),
        lm_head=Linear.Config(in_features=g.hidden_size, out_features=g.vocab_size, param_init=linear),
    )


def _initializer(std: float | None) -> dict[str, Callable[..., Any]]:
    """``param_init`` of a weight: normal with ``std``, or nothing at all."""
    return {"weight": skip_param_init if std is None else partial(nn.init.normal_, std=std)}


def _required(value: int | None) -> int:
    assert value is not None, "read_config gives every size that this kind of model has"
    return value
