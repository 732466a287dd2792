"""Sizes of the released models, and how each is laid over logical NeuronCores. Nothing heavy loads.

The layout of 8B is AWS's, of TorchTitan Neuron's Qwen3 tutorial (Neuron SDK 2.33: TP 4 x FSDP 16, the 64 logical cores
of a trn2.48xlarge). The others follow it: TP 4 divides every size's heads, small models go without, and parameters,
gradients and AdamW's moments in float32 (16 bytes per parameter) take at most two thirds of a core's 24 GiB. None was
run on Trainium.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qwen3conv.converters.errors import PolicyError
from qwen3conv.converters.geometry import Geometry
from qwen3conv.converters.placement import Mesh
from qwen3conv.converters.variants import GEOMETRIES

STUDY = "moe-study"
"""30B-A3B's widths in 4 layers of 64 experts. Its router takes 4 of them, which its config.json says."""

GEOMETRY: Mapping[str, Geometry] = {
    **GEOMETRIES,
    STUDY: replace(GEOMETRIES["30B-A3B"], num_hidden_layers=4, num_experts=64),
}

LAYOUT: Mapping[str, Mesh] = {
    "0.6B": Mesh(fsdp=64),
    "1.7B": Mesh(fsdp=64),
    "4B": Mesh(fsdp=64),
    "8B": Mesh(tp=4, fsdp=16),
    "14B": Mesh(tp=4, fsdp=16),
    "32B": Mesh(tp=4, fsdp=16),
    "30B-A3B": Mesh(tp=4, fsdp=16),
    "235B-A22B": Mesh(tp=4, fsdp=64),
    STUDY: Mesh(tp=4, fsdp=16),
}
"""Ranks of every size. 235B-A22B takes four such machines."""


def recipe_name(size: str, *, sft: bool) -> str:
    """``"0.6B"`` -> ``"qwen3_0_6b"``, or ``"qwen3_0_6b_sft"``: what ``--config`` calls the recipe of a size."""
    return "qwen3_" + size.lower().replace(".", "_").replace("-", "_") + ("_sft" if sft else "")


def check_size(size: str, geometry: Geometry, where: str) -> None:
    """Refuse a model of other shapes than the recipe's.

    Raises:
        PolicyError: with what differs.
    """
    expected = GEOMETRY[size]
    odd = [key for key in expected.__dataclass_fields__ if getattr(expected, key) != getattr(geometry, key)]
    if odd:
        lines = ", ".join(f"{key} {getattr(geometry, key)} and not {getattr(expected, key)}" for key in odd)
        raise PolicyError(f"{where} is not of size {size}: it has {lines}; name its own size, or none")
