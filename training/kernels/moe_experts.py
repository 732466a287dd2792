"""``qwen3conv::moe_experts`` and its backward: routed SwiGLU experts as torch operators.

On a ``neuron`` device both compute by the NKI kernels, which were never compiled for or run on hardware, elsewhere by
the PyTorch reference; ``dispatch`` decides. Shapes and legend: ``reference``.
"""

from __future__ import annotations

from typing import Any

import torch

from . import dispatch, nki_experts
from .errors import KernelError
from .reference import experts_backward, experts_forward

__all__ = ["KernelError", "compute_dtype", "moe_experts", "moe_experts_backward"]


@torch.library.custom_op("qwen3conv::moe_experts", mutates_args=())
def moe_experts(
    x: torch.Tensor,
    counts: torch.Tensor,
    gate: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    affinity: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows x (R, D), sorted by expert, through their experts; (R, D). ``affinity`` (R, 1) multiplies the results.

    counts (E,) must sum to R: KernelError where the reference finds that it does not. The kernels do not look, which
    would wait for the device. Autocast is ignored: cast before, see ``compute_dtype``.
    """
    target = dispatch.target_of(x)
    if target is not None:
        return nki_experts.forward(target, x, counts, gate, down, up, affinity)
    if int(counts.sum()) != x.shape[0]:
        raise KernelError(f"moe_experts: counts sum to {int(counts.sum())}, x has {x.shape[0]} rows; they must agree")
    return experts_forward(x, counts, gate, down, up, affinity)


@moe_experts.register_fake
def _(x: Any, counts: Any, gate: Any, down: Any, up: Any, affinity: Any = None) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("qwen3conv::moe_experts_backward", mutates_args=())
def moe_experts_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    counts: torch.Tensor,
    gate: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    affinity: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, gate, down, up and affinity; the last is empty where there is no affinity."""
    target = dispatch.target_of(x)
    dx, d_gate, d_down, d_up, d_affinity = (
        nki_experts.backward(target, dy, x, counts, gate, down, up, affinity)
        if target is not None
        else experts_backward(dy, x, counts, gate, down, up, affinity)
    )
    return dx, d_gate, d_down, d_up, x.new_empty(0) if d_affinity is None else d_affinity


@moe_experts_backward.register_fake
def _(dy: Any, x: Any, counts: Any, gate: Any, down: Any, up: Any, affinity: Any = None) -> tuple[torch.Tensor, ...]:
    d_affinity = x.new_empty(0) if affinity is None else torch.empty_like(affinity)
    return torch.empty_like(x), torch.empty_like(gate), torch.empty_like(down), torch.empty_like(up), d_affinity


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype that x and the weights should be cast to: autocast's where that is on, else x's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _save(ctx: Any, inputs: tuple[torch.Tensor | None, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: activation checkpointing computes them anew when they are asked for
    dx, d_gate, d_down, d_up, d_affinity = moe_experts_backward(dy.contiguous(), *saved)
    return dx, None, d_gate, d_down, d_up, None if saved[-1] is None else d_affinity


moe_experts.register_autograd(_backward, setup_context=_save)
