"""torchtitan's routed experts computed by ``qwen3conv::moe_experts``.

Activate ``qwen3conv.training.overrides.nki_moe.nki_moe`` in ``override.imports``. ``NkiGroupedExperts`` has the
parameters and state dict names of ``GroupedExperts``; routing, load balancing and ``expert_bias`` stay torchtitan's.
The operator has no NKI kernel yet (see ``kernels.moe_experts``). Import after ``devices.prepare_torchtitan``.
Source: torchtitan 0.3.0, ``models/common/moe.py`` and ``config/override.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from qwen3conv.training.kernels.moe_experts import moe_experts
from qwen3conv.training.titan import GroupedExperts, derive, override


class NkiGroupedExperts(GroupedExperts):
    """``GroupedExperts`` through the operator, in the dtype of the rows."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """The fields of ``GroupedExperts.Config``."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Rows (R, D) sorted by expert, counts (E,): ``w2(silu(x w1) * (x w3))``, (R, D)."""
        gate_EFD, down_EDF, up_EFD = (
            (weight.to_local() if isinstance(weight, DTensor) else weight).to(x_RD.dtype)
            for weight in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        return moe_experts(x_RD.contiguous(), num_tokens_per_expert_E, gate_EFD, down_EDF, up_EFD)


@override(target=GroupedExperts.Config, description="experts by qwen3conv::moe_experts")
def nki_moe(config: GroupedExperts.Config) -> NkiGroupedExperts.Config:
    """``config`` for ``NkiGroupedExperts``."""
    return derive(config, NkiGroupedExperts.Config)
