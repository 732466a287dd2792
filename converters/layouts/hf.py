"""The hub's layout, and the one that transformers 5 holds in memory (and writes with ``save_original_format=False``).

Source: transformers 5.24, ``models/qwen3_moe/modeling_qwen3_moe.py`` (``Qwen3MoeExperts``).
"""

from __future__ import annotations

from ..ops import Experts
from ..parameters import EXPERT_BIAS, PARAMETERS
from .layout import Layout, Rule

GATE, UP, DOWN = (
    f"model.layers.{{layer}}.mlp.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down")
)

DERIVED = ("model.layers.{layer}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
"""RoPE buffers that some dumps carry; they follow from the config, so they are dropped by a named policy."""

HF = Layout(
    "hf",
    rules=tuple(Rule(p.name, (p.name,)) for p in PARAMETERS if p.name != EXPERT_BIAS),
    derived=DERIVED,
)

HF_FUSED = Layout(
    "hf-fused",
    rules=(
        *(rule for rule in HF.rules if "{expert}" not in rule.stored),
        Rule("model.layers.{layer}.mlp.experts.gate_up_proj", (GATE, UP), Experts()),
        Rule("model.layers.{layer}.mlp.experts.down_proj", (DOWN,), Experts()),
    ),
    derived=DERIVED,
)
