"""vLLM's ``sharded_state``: fused as its modules are, one tensor-parallel rank per set of files.

q, k and v rows follow each other in ``qkv_proj``, gate and up rows in ``gate_up_proj``, both within a rank; experts are
stacked, gate then up, in ``w13_weight``. Beyond the key-value heads, neighbouring ranks hold the same head.

Source: vLLM main of 2026-08, ``model_executor/model_loader/sharded_state_loader.py``, ``models/qwen3.py``,
``models/qwen3_moe.py``, ``layers/linear.py`` (``QKVParallelLinear``), ``layers/vocab_parallel_embedding.py``. Read from
source; vLLM itself was not run.
"""

from __future__ import annotations

from ..ops import Experts, Rows
from .hf import DOWN, GATE, HF, UP
from .layout import Layout, Rule

_LAYER = "model.layers.{layer}"
_FUSED = ("q_proj", "k_proj", "v_proj", "mlp.gate_proj", "mlp.up_proj", "{expert}")
_QKV = tuple(f"{_LAYER}.self_attn.{name}_proj.weight" for name in "qkv")
_GATE_UP = tuple(f"{_LAYER}.mlp.{name}_proj.weight" for name in ("gate", "up"))

VLLM = Layout(
    "vllm",
    rules=(
        *(rule for rule in HF.rules if not any(part in rule.stored for part in _FUSED)),
        Rule(f"{_LAYER}.self_attn.qkv_proj.weight", _QKV, Rows()),
        Rule(f"{_LAYER}.mlp.gate_up_proj.weight", _GATE_UP, Rows()),
        Rule(f"{_LAYER}.mlp.experts.w13_weight", (GATE, UP), Experts()),
        Rule(f"{_LAYER}.mlp.experts.w2_weight", (DOWN,), Experts()),
    ),
)

VOCAB_PADDING = 64
"""vLLM pads vocabularies to multiples of this; every released Qwen3 already is one."""
