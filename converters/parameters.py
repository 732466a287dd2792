"""The logical parameters of Qwen3: what the model has, whatever a format calls it or fuses it into.

A logical parameter bears the name that the hub gives it, one per expert and projection. Axes, slowest first; sizes come
from ``Geometry.axes``:

=====  =====================================================  =====  ====================================
V      vocabulary rows                                        D      head_dim
H      hidden_size                                            I      intermediate_size (dense)
Q      num_attention_heads * head_dim                         M      moe_intermediate_size
K      num_key_value_heads * head_dim                         E      num_experts
=====  =====================================================  =====  ====================================

Source: transformers 5.24, ``models/qwen3/modeling_qwen3.py`` and ``models/qwen3_moe/modeling_qwen3_moe.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .boxes import Shape
from .geometry import Geometry

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
EXPERT_BIAS = "model.layers.{layer}.mlp.expert_bias"


def _always(geometry: Geometry) -> bool:
    return True


def _is_dense(geometry: Geometry) -> bool:
    return not geometry.is_moe


def _is_moe(geometry: Geometry) -> bool:
    return geometry.is_moe


@dataclass(frozen=True, slots=True)
class Parameter:
    """One row of the parameter table: a name template and its axes."""

    name: str
    axes: tuple[str, ...]
    when: Callable[[Geometry], bool] = _always


PARAMETERS: tuple[Parameter, ...] = (
    Parameter(EMBEDDING, ("V", "H")),
    Parameter("model.layers.{layer}.input_layernorm.weight", ("H",)),
    Parameter("model.layers.{layer}.self_attn.q_proj.weight", ("Q", "H")),
    Parameter("model.layers.{layer}.self_attn.k_proj.weight", ("K", "H")),
    Parameter("model.layers.{layer}.self_attn.v_proj.weight", ("K", "H")),
    Parameter("model.layers.{layer}.self_attn.o_proj.weight", ("H", "Q")),
    Parameter("model.layers.{layer}.self_attn.q_norm.weight", ("D",)),
    Parameter("model.layers.{layer}.self_attn.k_norm.weight", ("D",)),
    Parameter("model.layers.{layer}.post_attention_layernorm.weight", ("H",)),
    Parameter("model.layers.{layer}.mlp.gate_proj.weight", ("I", "H"), when=_is_dense),
    Parameter("model.layers.{layer}.mlp.up_proj.weight", ("I", "H"), when=_is_dense),
    Parameter("model.layers.{layer}.mlp.down_proj.weight", ("H", "I"), when=_is_dense),
    Parameter("model.layers.{layer}.mlp.gate.weight", ("E", "H"), when=_is_moe),
    Parameter(EXPERT_BIAS, ("E",), when=_is_moe),
    Parameter("model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight", ("M", "H"), when=_is_moe),
    Parameter("model.layers.{layer}.mlp.experts.{expert}.up_proj.weight", ("M", "H"), when=_is_moe),
    Parameter("model.layers.{layer}.mlp.experts.{expert}.down_proj.weight", ("H", "M"), when=_is_moe),
    Parameter("model.norm.weight", ("H",)),
    Parameter(HEAD, ("V", "H")),
)
"""Every parameter there can be. The expert bias is torchtitan's routing buffer, which the hub's model has no place for
(torchtitan 0.3.0, ``models/common/moe.py``); the head is a second name of the embeddings when the two are tied."""

BY_NAME: dict[str, Parameter] = {parameter.name: parameter for parameter in PARAMETERS}


def logical_parameters(geometry: Geometry, *, tied: bool, expert_bias: bool = False) -> Iterator[tuple[str, Shape]]:
    """Name and shape of every logical parameter, in model order. Tied: the head is no parameter of its own."""
    axes = geometry.axes
    rows = [p for p in PARAMETERS if p.when(geometry)]
    inside = [p for p in rows if "{layer}" in p.name and (expert_bias or p.name != EXPERT_BIAS)]
    per_layer = [p for p in inside if "{expert}" not in p.name]
    per_expert = [p for p in inside if "{expert}" in p.name]

    def shape(parameter: Parameter) -> Shape:
        return tuple(axes[axis] for axis in parameter.axes)

    yield EMBEDDING, shape(BY_NAME[EMBEDDING])
    for layer in range(geometry.num_hidden_layers):
        for parameter in per_layer:
            yield parameter.name.format(layer=layer), shape(parameter)
        for expert in range(geometry.num_experts or 0):
            for parameter in per_expert:
                yield parameter.name.format(layer=layer, expert=expert), shape(parameter)
    yield "model.norm.weight", shape(BY_NAME["model.norm.weight"])
    if not tied:
        yield HEAD, shape(BY_NAME[HEAD])


def describe(name: str) -> str:
    """A logical name in words: ``model.layers.3.mlp.experts.17.up_proj.weight`` -> ``layer 3, expert 17, up_proj``."""
    segments = name.split(".")
    words = []
    for label, key in (("layer", "layers"), ("expert", "experts")):
        if key in segments[:-1]:
            words.append(f"{label} {segments[segments.index(key) + 1]}")
    tail = [
        s for s in segments if s not in {"model", "weight", "self_attn", "mlp", "layers", "experts"} and not s.isdigit()
    ]
    return ", ".join([*words, ".".join(tail)])
