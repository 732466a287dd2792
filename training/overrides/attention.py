"""Attention within documents through torch's SDPA, for devices that torchtitan's own kinds do not run on.

torchtitan 0.3.0 has flex attention, which has no backward on a CPU, and varlen attention, which has no CPU kernel; its
plain SDPA ignores where documents end. This one can go when varlen attention runs on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from qwen3conv.training.titan import VarlenAttention, VarlenMetadata


class DocumentAttention(VarlenAttention):
    """Causal attention that stays inside of a document, with the same inputs as torchtitan's varlen attention.

    It is a kind of ``VarlenAttention`` because the Trainer decides by that which masks to make (0.3.0,
    ``Trainer.post_dataloading_process``): cumulative document lengths of the flattened batch.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """The fields of ``VarlenAttention.Config``."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        out_transform: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        **unused: object,
    ) -> torch.Tensor:
        """Queries (B, L, N, H) over keys and values (B, L, fewer heads, H); returns (B, L, N, H)."""
        if out_transform is not None:
            raise NotImplementedError("attention sinks and the like, which no Qwen3 has")
        batch, length = q_BLNH.shape[:2]
        places = torch.arange(batch * length, device=q_BLNH.device)
        document = torch.bucketize(places, attention_masks.cu_seq_q[1:].to(places.dtype), right=True)
        document_BL = document.view(batch, length)
        causal_LL = torch.ones(length, length, dtype=torch.bool, device=q_BLNH.device).tril()
        mask_BLL = causal_LL & (document_BL[:, :, None] == document_BL[:, None, :])
        out_BNLH = F.scaled_dot_product_attention(
            q_BLNH.transpose(1, 2),
            k_BLNH.transpose(1, 2),
            v_BLNH.transpose(1, 2),
            attn_mask=mask_BLL[:, None],
            scale=scale,
            enable_gqa=True,
        )
        return out_BNLH.transpose(1, 2)
