"""torchtitan's routed experts computed by ``qwen3conv::moe_experts``.

Activate ``qwen3conv.training.overrides.nki_moe.nki_moe`` in ``override.imports``. ``NkiGroupedExperts`` has the
parameters and state dict names of ``GroupedExperts``; routing, load balancing and ``expert_bias`` stay torchtitan's.
On a ``neuron`` device the operator computes by NKI kernels, which were never compiled for or run on hardware.
Import after ``devices.prepare_torchtitan``.
Source: torchtitan 0.3.0, ``models/common/moe.py`` and ``config/override.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from qwen3conv.training.kernels.moe_experts import compute_dtype, moe_experts
from qwen3conv.training.titan import GroupedExperts, derive, override


class NkiGroupedExperts(GroupedExperts):
    """``GroupedExperts`` through the operator, in the dtype of the rows, or autocast's."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """The fields of ``GroupedExperts.Config``."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Rows (R, D) sorted by expert, counts (E,): ``w2(silu(x w1) * (x w3))``, (R, D)."""
        dtype = compute_dtype(x_RD)
        gate_EFD, down_EDF, up_EFD = (
            (weight.to_local() if isinstance(weight, DTensor) else weight).to(dtype)
            for weight in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        rows_RD = x_RD.to(dtype).contiguous()
        return moe_experts(rows_RD, num_tokens_per_expert_E, gate_EFD, down_EDF, up_EFD).to(x_RD.dtype)


@override(target=GroupedExperts.Config, description="experts by qwen3conv::moe_experts")
def nki_moe(config: GroupedExperts.Config) -> NkiGroupedExperts.Config:
    """``config`` for ``NkiGroupedExperts``."""
    return derive(config, NkiGroupedExperts.Config)
