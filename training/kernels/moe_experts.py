"""``qwen3conv::moe_experts`` and its backward: routed SwiGLU experts as torch operators.

Both compute by the PyTorch reference. There is no NKI kernel yet: on a ``neuron`` device they refuse, so that nobody
takes a fallback for a kernel. Shapes and legend: ``reference``.
"""

from __future__ import annotations

from typing import Any

import torch

from qwen3conv.converters.errors import ConversionError

from .reference import experts_backward, experts_forward


class KernelError(ConversionError):
    """The experts cannot be computed on this device or in these shapes: follow the message."""


@torch.library.custom_op("qwen3conv::moe_experts", mutates_args=())
def moe_experts(
    x: torch.Tensor, counts: torch.Tensor, gate: torch.Tensor, down: torch.Tensor, up: torch.Tensor
) -> torch.Tensor:
    """Rows x (R, D), sorted by expert, through their experts; (R, D). counts (E,) must sum to R."""
    _check_device(x)
    if int(counts.sum()) != x.shape[0]:
        raise KernelError(f"moe_experts: counts sum to {int(counts.sum())}, x has {x.shape[0]} rows; they must agree")
    return experts_forward(x, counts, gate, down, up)


@moe_experts.register_fake
def _(x: Any, counts: Any, gate: Any, down: Any, up: Any) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("qwen3conv::moe_experts_backward", mutates_args=())
def moe_experts_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    counts: torch.Tensor,
    gate: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, gate, down and up."""
    _check_device(x)
    return experts_backward(dy, x, counts, gate, down, up)


@moe_experts_backward.register_fake
def _(dy: Any, x: Any, counts: Any, gate: Any, down: Any, up: Any) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(x), torch.empty_like(gate), torch.empty_like(down), torch.empty_like(up)


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    dx, d_gate, d_down, d_up = moe_experts_backward(dy.contiguous(), *ctx.saved_tensors)
    return dx, None, d_gate, d_down, d_up


moe_experts.register_autograd(_backward, setup_context=_save)


def _check_device(x: torch.Tensor) -> None:
    if x.device.type == "neuron":
        raise KernelError("moe_experts: there is no NKI kernel yet; train with torchtitan's own experts on Trainium")
