"""How each format names and fuses the parameters: one table per file."""

from __future__ import annotations

from .accelerate import ACCELERATE, ACCELERATE_PER_EXPERT, TITAN_TRANSFORMERS
from .hf import HF, HF_FUSED
from .layout import Binding, Layout, Rule, bind, solve_geometry
from .neuron import NXD, NXD_GQA, NXD_INFERENCE, nxd_inference_layout, nxd_layout
from .torchtitan import FUSED, TITAN_OPTIMIZERS, TITAN_SCHEMAS, titan_layout
from .vllm import VLLM

__all__ = [
    "ACCELERATE",
    "ACCELERATE_PER_EXPERT",
    "FUSED",
    "HF",
    "HF_FUSED",
    "NXD",
    "NXD_GQA",
    "NXD_INFERENCE",
    "TITAN_OPTIMIZERS",
    "TITAN_SCHEMAS",
    "TITAN_TRANSFORMERS",
    "VLLM",
    "Binding",
    "Layout",
    "Rule",
    "bind",
    "nxd_inference_layout",
    "nxd_layout",
    "solve_geometry",
    "titan_layout",
]
