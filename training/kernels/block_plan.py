"""Which rows each block of an expert kernel computes: static shapes, everything data-dependent in tensors.

Legend: E experts, R routed rows sorted by expert, B rows per block, N blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .padding import num_blocks as num_blocks


class BlockPlan(NamedTuple):
    """Blocks of B rows, each of one expert."""

    slot_row: torch.Tensor
    """(N * B,) int32: the row in each slot; R where a slot is padding."""
    block_expert: torch.Tensor
    """(N,) int32: the expert of each block. Blocks nobody needs hold padding only and go to the last expert."""


def plan_blocks(counts: torch.Tensor, rows: int, block: int, *, least: int = 0) -> BlockPlan:
    """The plan for ``counts`` (E,), rows per expert summing to ``rows``; N is ``num_blocks(rows, E, block)``.

    ``least``: 1 gives every expert a block, see ``num_blocks``.

    Shapes follow from ``rows``, E and ``block`` alone, so one compiled kernel serves every routing.
    """
    experts = counts.shape[0]
    blocks = num_blocks(rows, experts, block, least=least)
    counts = counts.to(torch.int32)
    owned = ((counts + block - 1) // block).clamp_(min=least)
    ends = torch.cumsum(owned, 0, dtype=torch.int32)
    index = torch.arange(blocks, device=counts.device, dtype=torch.int32)
    # What ``searchsorted`` finds, by operations that every device has.
    owner = (index[:, None] >= ends).sum(1).clamp_(max=experts - 1)
    first_block = (ends - owned).index_select(0, owner)
    first_row = (torch.cumsum(counts, 0, dtype=torch.int32) - counts).index_select(0, owner)
    rank = (index - first_block)[:, None] * block + torch.arange(block, device=counts.device, dtype=torch.int32)
    is_row = rank < counts.index_select(0, owner)[:, None]
    slots = torch.where(is_row, first_row[:, None] + rank, rows)
    return BlockPlan(slots.reshape(-1).to(torch.int32), owner.to(torch.int32))
