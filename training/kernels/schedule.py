"""What the NKI kernels are told about a routing: the block plan, and when to load weights and store their gradients.

All of it is tensors of shapes that follow from R, E and B, computed on the device of the counts without a look at them.
Legend: R routed rows sorted by expert, E experts, N blocks of B slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .block_plan import plan_blocks

PARTITIONS = 128


class Schedule(NamedTuple):
    """Tables of the N blocks. Each expert owns at least one, so that each gets a weight gradient, if only zeros."""

    slot_row: torch.Tensor
    """(N, B, 1) int32: the row in each slot; R, which the kernels find to be a row of zeros, where it is padding."""
    used: torch.Tensor
    """(1, 1) int32: how many blocks this routing needs; those after them are not computed."""
    block_expert: torch.Tensor
    """(N, 1) int32."""
    load_expert: torch.Tensor
    """(N, 1) int32: the expert whose weights a block loads; E, out of bounds, where the block before left them."""
    store_expert: torch.Tensor
    """(N, 1) int32: the expert whose weight gradients a used block completes; E where another of its blocks follows."""
    keep: torch.Tensor
    """(N, 128, 1) float32: 0 in the first block of an expert, where its gradients start, else 1."""
    row_slot: torch.Tensor
    """(R,) int64: the slot of each row."""


def schedule_blocks(counts: torch.Tensor, rows: int, block: int) -> Schedule:
    """The schedule for ``counts`` (E,), rows per expert summing to ``rows``."""
    experts = counts.shape[0]
    plan = plan_blocks(counts, rows, block, least=1)
    owner = plan.block_expert
    used = ((counts + block - 1) // block).clamp(min=1).sum().to(torch.int32)
    edge = owner.new_full((1,), -1)
    starts = owner != torch.cat((edge, owner[:-1]))
    ends = owner != torch.cat((owner[1:], edge))
    ends |= torch.arange(1, owner.shape[0] + 1, device=owner.device, dtype=torch.int32) == used
    nobody = torch.full_like(owner, experts)
    slots = torch.arange(plan.slot_row.shape[0], device=counts.device)
    row_slot = torch.zeros(rows + 1, dtype=slots.dtype, device=counts.device)
    row_slot = row_slot.scatter(0, plan.slot_row.to(slots.dtype), slots)
    return Schedule(
        slot_row=plan.slot_row.view(-1, block, 1),
        used=used.view(1, 1),
        block_expert=owner[:, None],
        load_expert=torch.where(starts, owner, nobody)[:, None],
        store_expert=torch.where(ends, owner, nobody)[:, None],
        keep=(~starts).to(torch.float32)[:, None, None].expand(-1, PARTITIONS, 1).contiguous(),
        row_slot=row_slot[:rows],
    )
