"""Routed SwiGLU experts in plain PyTorch, forward and backward: what every kernel is compared with.

Legend: E experts, F expert hidden size, D hidden size, R routed rows sorted by expert. bf16 and fp16 are computed in
fp32 and rounded once at the end; fp32 and fp64 in themselves. One expert at a time: a reference, not a fast path.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

Tensor = torch.Tensor


def experts_forward(
    x: Tensor, counts: Tensor, gate: Tensor, down: Tensor, up: Tensor, affinity: Tensor | None = None
) -> Tensor:
    """``affinity * down(silu(gate(x)) * up(x))``, (R, D).

    For x (R, D), counts (E,), gate and up (E, F, D), down (E, D, F), affinity (R, 1) or None for ones.
    """
    y = torch.zeros_like(x)
    wide = _compute_dtype(x)
    with _without_autocast(x):
        for e, rows in _runs(counts):
            xe = x[rows].to(wide)
            g, u = xe @ gate[e].to(wide).T, xe @ up[e].to(wide).T
            ye = g * torch.sigmoid(g) * u @ down[e].to(wide).T
            y[rows] = (ye if affinity is None else ye * affinity[rows].to(wide)).to(x.dtype)
    return y


def experts_backward(
    dy: Tensor, x: Tensor, counts: Tensor, gate: Tensor, down: Tensor, up: Tensor, affinity: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of x, gate, down, up and affinity, in their shapes and dtypes; g and u are computed again, not kept."""
    dx, d_gate, d_down, d_up = (torch.zeros_like(tensor) for tensor in (x, gate, down, up))
    d_affinity = None if affinity is None else torch.zeros_like(affinity)
    wide = _compute_dtype(x)
    with _without_autocast(x):
        for e, rows in _runs(counts):
            xe, dye = x[rows].to(wide), dy[rows].to(wide)
            wg, wd, wu = gate[e].to(wide), down[e].to(wide), up[e].to(wide)
            g, u = xe @ wg.T, xe @ wu.T
            s = torch.sigmoid(g)
            h, dh = g * s * u, dye @ wd
            if affinity is not None and d_affinity is not None:
                factor = affinity[rows].to(wide)
                d_affinity[rows] = (h * dh).sum(1, keepdim=True).to(affinity.dtype)
                h, dh = h * factor, dh * factor
            dg, du = dh * u * s * (1 + g * (1 - s)), dh * g * s
            dx[rows] = (dg @ wg + du @ wu).to(x.dtype)
            d_gate[e], d_up[e] = (dg.T @ xe).to(gate.dtype), (du.T @ xe).to(up.dtype)
            d_down[e] = (dye.T @ h).to(down.dtype)
    return dx, d_gate, d_down, d_up, d_affinity


def _without_autocast(x: Tensor) -> torch.autocast:
    return torch.autocast(x.device.type, enabled=False)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _runs(counts: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            yield expert, slice(start, start + count)
        start += count
