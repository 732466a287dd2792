"""The experts by NKI kernels: torch tensors in and out around one launch, forward and backward.

These kernels were never compiled for or run on hardware. Nothing here looks at a value: all shapes, and the choice of
block, follow from shapes. Legend: R rows sorted by expert, H hidden size, I intermediate size, E experts.

HBM beside the operands, until a call returns: the padded copy of the rows, and the slots' rows, C x N x B x H of x's
dtype on one core and float32 on two: 803 MB for 4096 tokens of Qwen3-30B-A3B, B 128, LNC 2.
"""

from __future__ import annotations

import torch

from .capacity import ExpertShape, choose_block, fit
from .dispatch import Target
from .errors import KernelError
from .schedule import Schedule, schedule_blocks

Tensor = torch.Tensor

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def forward(
    target: Target, x: Tensor, counts: Tensor, gate: Tensor, down: Tensor, up: Tensor, affinity: Tensor | None
) -> Tensor:
    """(R, H) in x's dtype; raises KernelError where shapes or dtypes do not fit the kernels."""
    shape = _shape(target, x, gate, down, up, affinity)
    resident = fit(shape).resident
    schedule = schedule_blocks(counts, shape.rows, shape.block)
    load = schedule.load_expert if resident else schedule.block_expert
    tensors = (
        _padded(x),
        gate.contiguous(),
        up.contiguous(),
        down.contiguous(),
        schedule.slot_row,
        schedule.used,
        load,
    )
    if affinity is None:
        y = target.launch("nki_forward", "forward", *tensors, resident=resident)
    else:
        factors = _padded(affinity.to(torch.float32))
        y = target.launch("nki_forward", "forward_scaled", *tensors, factors, resident=resident)
    return _rows(y, schedule, x.dtype)


def backward(
    target: Target,
    dy: Tensor,
    x: Tensor,
    counts: Tensor,
    gate: Tensor,
    down: Tensor,
    up: Tensor,
    affinity: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of x, gate, down, up and affinity, in their shapes and dtypes; raises KernelError like ``forward``."""
    shape = _shape(target, x, gate, down, up, affinity)
    chunk = fit(shape).chunk
    schedule = schedule_blocks(counts, shape.rows, shape.block)
    tables = (schedule.slot_row, schedule.used, schedule.load_expert, schedule.store_expert, schedule.keep)
    weights = (gate.contiguous(), up.contiguous(), down.contiguous())
    tensors = (_padded(x), _padded(dy.to(x.dtype)), *weights, *tables)
    if affinity is None:
        dx, d_gate, d_up, d_down = target.launch("nki_backward", "backward", *tensors, chunk=chunk)
        return _rows(dx, schedule, x.dtype), d_gate, d_down, d_up, None
    factors = _padded(affinity.to(torch.float32))
    dx, d_gate, d_up, d_down, da = target.launch("nki_backward", "backward_scaled", *tensors, factors, chunk=chunk)
    return _rows(dx, schedule, x.dtype), d_gate, d_down, d_up, _rows(da, schedule, affinity.dtype)


def _shape(target: Target, x: Tensor, gate: Tensor, down: Tensor, up: Tensor, affinity: Tensor | None) -> ExpertShape:
    if x.dtype not in _DTYPES or {gate.dtype, down.dtype, up.dtype} != {x.dtype}:
        found = ", ".join(f"{name} {t.dtype}" for name, t in (("x", x), ("gate", gate), ("down", down), ("up", up)))
        raise KernelError(f"the NKI expert kernels take one of {_DTYPES} for all of x and the weights, not {found}")
    experts, inner, hidden = gate.shape
    return choose_block(
        ExpertShape(
            rows=x.shape[0],
            hidden=hidden,
            inner=inner,
            experts=experts,
            lnc=target.lnc,
            itemsize=x.element_size(),
            scaled=affinity is not None,
        )
    )


def _padded(rows: Tensor) -> Tensor:
    """With the row of zeros that padding slots read."""
    return torch.cat((rows, rows.new_zeros(1, rows.shape[1])))


def _rows(slots: Tensor, schedule: Schedule, dtype: torch.dtype) -> Tensor:
    """(R, W) from (C, N, B, W): each row's slot, the cores' partial sums added, rounded once."""
    cores = [core.flatten(0, 1).index_select(0, schedule.row_slot) for core in slots.unbind(0)]
    return sum(cores[1:], start=cores[0]).to(dtype)
