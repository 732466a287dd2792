"""Names and fusion of neuronx-distributed (NxD), in training and in NxD Inference.

Training (optimum-neuron's models and NxD's examples): gate and up of a dense layer are one module, q, k and v one or
three; experts are stacked and stored (in, out), gate columns before up columns. A tied head is in a state dict twice.
NxD Inference drops ``model.`` in front of the names, renames q_norm and k_norm, and nests the projections of attention.

Sources: optimum-neuron, ``models/training/llama/modeling_llama.py``; neuronx-distributed,
``modules/moe/moe_parallel_layers.py``, ``scripts/checkpoint_converter.py``; neuronx-distributed-inference,
``models/qwen3/modeling_qwen3.py``, ``models/qwen3_moe/modeling_qwen3_moe.py``, ``modules/attention/gqa.py``. Read from
source; none of them was run.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..names import skeleton_of, split_indices
from ..ops import ExpertColumns
from .hf import DERIVED, DOWN, GATE, HF, UP
from .layout import Layout, Rule

_LAYER = "model.layers.{layer}"
_ATTENTION = f"{_LAYER}.self_attn"
_Q, _K, _V, _O = (f"{_ATTENTION}.{name}_proj.weight" for name in "qkvo")
_ROUTER = f"{_LAYER}.mlp.gate.weight"
_MLP_GATE, _MLP_UP = (f"{_LAYER}.mlp.{name}_proj.weight" for name in ("gate", "up"))
_EXPERTS = (
    Rule(f"{_LAYER}.mlp.router.linear_router.weight", (_ROUTER,)),
    Rule(f"{_LAYER}.mlp.expert_mlps.mlp_op.gate_up_proj.weight", (GATE, UP), ExpertColumns()),
    Rule(f"{_LAYER}.mlp.expert_mlps.mlp_op.down_proj.weight", (DOWN,), ExpertColumns()),
)

NXD_VARIANTS = (
    Rule(f"{_ATTENTION}.qkv_proj.weight_qkv", (_Q, _K, _V)),
    *(Rule(f"{_ATTENTION}.qkv_proj.weight_{n}", (part,)) for n, part in zip("qkv", (_Q, _K, _V), strict=True)),
    Rule(f"{_LAYER}.mlp.gate_up_proj.weight", (_MLP_GATE, _MLP_UP)),
)
"""What training stores in place of single projections, as the model's modules and ``fuse_qkv`` have it."""


def _renamed(rules: Iterable[Rule], instead: Iterable[Rule]) -> tuple[Rule, ...]:
    """``rules`` with those in ``instead`` in the place of what they hold the parts of."""
    instead = list(instead)
    taken = {part for rule in instead for part in rule.parts}
    return (*(rule for rule in rules if not taken & set(rule.parts)), *instead)


def _inner(rule: Rule) -> Rule:
    """A rule of the training layout with NxD Inference's names."""
    name = rule.stored.removeprefix("model.")
    for old, new in (
        ("self_attn.q_proj", "self_attn.qkv_proj.q_proj"),
        ("self_attn.k_proj", "self_attn.qkv_proj.k_proj"),
        ("self_attn.v_proj", "self_attn.qkv_proj.v_proj"),
        ("self_attn.o_proj", "self_attn.o_proj.o_proj"),
        ("self_attn.q_norm", "self_attn.q_layernorm"),
        ("self_attn.k_norm", "self_attn.k_layernorm"),
    ):
        name = name.replace(old, new)
    return Rule(name, rule.parts, rule.op)


_PLAIN = _renamed(HF.rules, _EXPERTS)

NXD = Layout("nxd", _renamed(_PLAIN, (NXD_VARIANTS[-1],)), derived=DERIVED, stores_tied_head=True)
"""As it is written where tensor parallelism divides the key-value heads."""

NXD_GQA = Layout("nxd", _renamed(NXD.rules, NXD_VARIANTS[1:4]), derived=DERIVED, stores_tied_head=True)
"""As it is written where key-value heads are repeated: NxD's ``GQAQKVColumnParallelLinear`` holds q, k and v."""

_RANK_UTIL = ("rank_util.rank", "layers.{layer}.self_attn.rank_util.rank", "embed_tokens.rank_util.rank")
_INVERSE = ("layers.{layer}.self_attn.rotary_emb.inv_freq", "layers.{layer}.self_attn.inv_freq")

NXD_INFERENCE = Layout(
    "nxd-inference", tuple(map(_inner, _PLAIN)), derived=(*_RANK_UTIL, *_INVERSE), stores_tied_head=True
)

_INFERENCE_VARIANTS = (Rule("layers.{layer}.self_attn.qkv_proj.Wqkv.weight", (_Q, _K, _V)),)

_SECOND_NAMES = tuple(
    Rule(f"layers.{{layer}}.self_attn.{name}.weight", (f"{_ATTENTION}.{name}.weight",)) for name in ("q_norm", "k_norm")
)
"""The dense model's conversion renames copies of these norms and leaves them beside."""


def nxd_layout(names: Iterable[str]) -> Layout:
    """The training layout that ``names`` (FQNs) are of: which projections are fused or renamed."""
    met = {split_indices(name)[0] for name in names}
    return Layout(
        "nxd",
        _renamed(_PLAIN, (rule for rule in NXD_VARIANTS if skeleton_of(rule.stored) in met)),
        derived=DERIVED,
        stores_tied_head=True,
    )


def nxd_inference_layout(names: Iterable[str]) -> Layout:
    """The layout of NxD Inference that ``names`` (FQNs) are of."""
    met = {split_indices(name)[0] for name in names}
    fused = [rule for rule in _INFERENCE_VARIANTS if skeleton_of(rule.stored) in met]
    seconds = tuple(rule for rule in _SECOND_NAMES if skeleton_of(rule.stored) in met)
    rules = (*_renamed(NXD_INFERENCE.rules, fused), *seconds)
    return Layout("nxd-inference", rules, derived=NXD_INFERENCE.derived, stores_tied_head=True)
