"""DCP of a wrapped transformers model: the in-memory names with ``model.`` in front.

Accelerate and the Trainer wrap it in ``{"model": state_dict}`` (accelerate 1.15, ``utils/fsdp_utils.py``); torchtitan's
transformers backend holds it as the attribute ``model`` (torchtitan 0.3.0,
``experiments/transformers_modeling_backend``), where MoE blocks may be replaced by torchtitan's own.
"""

from __future__ import annotations

from dataclasses import replace

from ..ops import Experts
from ..parameters import EXPERT_BIAS
from .hf import DOWN, GATE, HF, HF_FUSED, UP
from .layout import Layout, Rule


def _wrapped(name: str, layout: Layout) -> Layout:
    rules = tuple(replace(rule, stored=f"model.{rule.stored}") for rule in layout.rules)
    derived = tuple(f"model.{stored}" for stored in layout.derived)
    return Layout(name, rules, derived, stores_tied_head=True, nested_in="model")


ACCELERATE = _wrapped("accelerate", HF_FUSED)
ACCELERATE_PER_EXPERT = _wrapped("accelerate-per-expert", HF)

_MOE = "model.model.layers.{layer}.mlp"
TITAN_TRANSFORMERS = Layout(
    "titan-transformers",
    rules=(
        *(
            rule
            for rule in ACCELERATE.rules
            if ".mlp.gate.weight" not in rule.stored and ".experts." not in rule.stored
        ),
        Rule(f"{_MOE}.router.gate.weight", ("model.layers.{layer}.mlp.gate.weight",)),
        Rule(f"{_MOE}.expert_bias_E", (EXPERT_BIAS,), optional=True),
        Rule(f"{_MOE}.routed_experts.inner_experts.w1_EFD", (GATE,), Experts()),
        Rule(f"{_MOE}.routed_experts.inner_experts.w2_EDF", (DOWN,), Experts()),
        Rule(f"{_MOE}.routed_experts.inner_experts.w3_EFD", (UP,), Experts()),
    ),
    stores_tied_head=True,
)
"""The transformers backend with torchtitan's MoE (``TitanMoeModelConfig``). Dense names equal ``ACCELERATE``'s."""
