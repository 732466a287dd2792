"""torchtitan's native Qwen3, in every key schema it has saved.

======  ==========  ==================================================================================================
schema  from        what differs from the one before
======  ==========  ==================================================================================================
T1      2025-08     dense only; ``attention.wq/wk/wv``; the head is ``output.weight``
T2      2025-10     (v0.2.0 to v0.2.2) MoE: ``moe.experts.w1/w2/w3``, ``moe.expert_bias``
T3      2026-04-16  ``attention.qkv_linear.wq/wk/wv``, or fused ``attention.qkv_linear.wqkv``
T4      2026-04-27  the head is ``lm_head.weight``
T5      2026-06-10  ``moe.experts.w1_EFD/w2_EDF/w3_EFD``, ``moe.expert_bias_E``
T6      2026-06-19  the fused form is no longer saved
T7      2026-07-16  (0.3.0) ``moe.routed_experts.inner_experts.w1_EFD`` and so on
======  ==========  ==================================================================================================

Source: torchtitan's git history of ``models/qwen3`` and ``models/common``, 2025-08 to 2026-08. Schemas are told apart
by their keys, never by date. w1 = gate, w3 = up, w2 = down.
"""

from __future__ import annotations

from ..errors import PolicyError
from ..ops import Experts, GroupedHeads
from ..parameters import EMBEDDING, EXPERT_BIAS, HEAD
from .hf import DOWN, GATE, UP
from .layout import Layout, Rule

_HF = "model.layers.{layer}"
_TT = "layers.{layer}"

_QKV = tuple(f"{_HF}.self_attn.{name}_proj.weight" for name in "qkv")

_COMMON = (
    Rule("tok_embeddings.weight", (EMBEDDING,)),
    Rule(f"{_TT}.attention_norm.weight", (f"{_HF}.input_layernorm.weight",)),
    Rule(f"{_TT}.attention.wo.weight", (f"{_HF}.self_attn.o_proj.weight",)),
    Rule(f"{_TT}.attention.q_norm.weight", (f"{_HF}.self_attn.q_norm.weight",)),
    Rule(f"{_TT}.attention.k_norm.weight", (f"{_HF}.self_attn.k_norm.weight",)),
    Rule(f"{_TT}.ffn_norm.weight", (f"{_HF}.post_attention_layernorm.weight",)),
    Rule(f"{_TT}.feed_forward.w1.weight", (f"{_HF}.mlp.gate_proj.weight",)),
    Rule(f"{_TT}.feed_forward.w2.weight", (f"{_HF}.mlp.down_proj.weight",)),
    Rule(f"{_TT}.feed_forward.w3.weight", (f"{_HF}.mlp.up_proj.weight",)),
    Rule("norm.weight", ("model.norm.weight",)),
)
_ROUTER = Rule(f"{_TT}.moe.router.gate.weight", (f"{_HF}.mlp.gate.weight",))


def _separate(prefix: str) -> tuple[Rule, ...]:
    return tuple(Rule(f"{_TT}.{prefix}.w{n}.weight", (part,)) for n, part in zip("qkv", _QKV, strict=True))


def _moe(experts: str, names: tuple[str, str, str], bias: str) -> tuple[Rule, ...]:
    stacked = zip(names, (GATE, DOWN, UP), strict=True)
    return (
        _ROUTER,
        Rule(f"{_TT}.moe.{bias}", (EXPERT_BIAS,), optional=True),
        *(Rule(f"{_TT}.moe.{experts}.{name}", (part,), Experts()) for name, part in stacked),
    )


_OLD_QKV, _QKV_LINEAR = _separate("attention"), _separate("attention.qkv_linear")
_FUSED_QKV = (Rule(f"{_TT}.attention.qkv_linear.wqkv.weight", _QKV, GroupedHeads()),)
_OUTPUT, _LM_HEAD = (Rule("output.weight", (HEAD,)),), (Rule("lm_head.weight", (HEAD,)),)
_PLAIN_EXPERTS = _moe("experts", ("w1", "w2", "w3"), "expert_bias")
_SUFFIXED_EXPERTS = _moe("experts", ("w1_EFD", "w2_EDF", "w3_EFD"), "expert_bias_E")
_INNER_EXPERTS = _moe("routed_experts.inner_experts", ("w1_EFD", "w2_EDF", "w3_EFD"), "expert_bias_E")

_RULES: dict[str, tuple[Rule, ...]] = {
    "T7": (*_QKV_LINEAR, *_LM_HEAD, *_INNER_EXPERTS),
    "T6": (*_QKV_LINEAR, *_LM_HEAD, *_SUFFIXED_EXPERTS),
    "T5": (*_QKV_LINEAR, *_LM_HEAD, *_SUFFIXED_EXPERTS),
    "T5-fused": (*_FUSED_QKV, *_LM_HEAD, *_SUFFIXED_EXPERTS),
    "T4": (*_QKV_LINEAR, *_LM_HEAD, *_PLAIN_EXPERTS),
    "T4-fused": (*_FUSED_QKV, *_LM_HEAD, *_PLAIN_EXPERTS),
    "T3": (*_QKV_LINEAR, *_OUTPUT, *_PLAIN_EXPERTS),
    "T3-fused": (*_FUSED_QKV, *_OUTPUT, *_PLAIN_EXPERTS),
    "T2": (*_OLD_QKV, *_OUTPUT, *_PLAIN_EXPERTS),
    "T1": (*_OLD_QKV, *_OUTPUT),
}

TITAN_SCHEMAS: dict[str, Layout] = {
    schema: Layout("titan", (*_COMMON, *rules), schema=schema, stores_tied_head=True)
    for schema, rules in _RULES.items()
}
"""Newest first: of schemas whose names are the same for a given model, the newest is reported."""

FUSED = "-fused"
"""End of the id of a schema whose q, k and v are stored as one."""


def _of_optimizer(schema: str, rules: tuple[Rule, ...]) -> Layout:
    """Names of what AdamW keeps per parameter: those of the parameters, without the routing bias, which is none."""
    trained = tuple(rule for rule in (*_COMMON, *rules) if rule.parts != (EXPERT_BIAS,))
    return Layout("titan optimizer", trained, schema=schema)


TITAN_OPTIMIZERS: dict[str, Layout] = {
    schema: _of_optimizer(schema, rules)
    for schema, rules in {
        **_RULES,
        f"T7{FUSED}": (*_FUSED_QKV, *_LM_HEAD, *_INNER_EXPERTS),
        f"T6{FUSED}": (*_FUSED_QKV, *_LM_HEAD, *_SUFFIXED_EXPERTS),
    }.items()
}
"""The optimizer's names in each schema. They follow the parameters of the model in memory, which stayed fused when T6
began to save q, k and v apart (torchtitan 0.3.0, ``models/common/attention.py``, state dict hooks of fused QKV)."""

_ALIASES = {"0.3": "T7", "0.3.0": "T7", "0.2": "T2", "0.2.0": "T2", "0.2.1": "T2", "0.2.2": "T2", "latest": "T7"}


def titan_layout(schema: str) -> Layout:
    """The layout of a schema id (``T7``, ``T4-fused``) or of a torchtitan release (``0.3``, ``0.2``)."""
    found = TITAN_SCHEMAS.get(_ALIASES.get(schema, schema))
    if found is None:
        known = ", ".join([*TITAN_SCHEMAS, *_ALIASES])
        raise PolicyError(f"torchtitan schema {schema!r} is not known; --titan-schema takes one of: {known}")
    return found
