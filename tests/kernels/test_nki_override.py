"""torchtitan's own tiny Qwen3-MoE, with and without the override, trained from one state dict by a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from qwen3conv.converters.config import parse_config
from qwen3conv.training.devices import prepare_torchtitan

STEPS, VOCAB = 20, 64
CONFIG = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "initializer_range": 0.2,
}


def build(*, overridden: bool, fp32: bool) -> Any:
    prepare_torchtitan("cpu")
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.attention import ScaledDotProductAttention

    from qwen3conv.training.native_model import native_config

    config = native_config(
        parse_config(CONFIG, "test"),
        max_seq_len=64,
        inner_attention=ScaledDotProductAttention.Config(),
        reference_experts=fp32,
        load_balance_coeff=1e-3,
    )
    if overridden:
        apply_overrides(OverrideConfig(imports=["qwen3conv.training.overrides.nki_moe.nki_moe"]), config)
    torch.manual_seed(0)
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    return model


def losses(model: Any) -> list[float]:
    tokens = torch.randint(VOCAB, (2, 33), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(32).expand(2, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for _ in range(STEPS):
        logits = model(tokens[:, :-1], positions=positions, attention_masks=None)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


# Relative. The stock experts compute in bf16, the operator in the fp32 of these rows: measured 1.2e-2 apart by step 13.
@pytest.mark.parametrize(("fp32", "tolerance"), [(True, 1e-5), (False, 3e-2)], ids=["fp32-experts", "stock-bf16"])
def test_losses_equal_the_native_backends_for_20_steps(fp32: bool, tolerance: float) -> None:
    native, ours = build(overridden=False, fp32=fp32), build(overridden=True, fp32=fp32)
    ours.load_state_dict(native.state_dict(), strict=True)
    shapes = {name: tensor.shape for name, tensor in native.state_dict().items()}
    assert {name: tensor.shape for name, tensor in ours.state_dict().items()} == shapes
    assert {type(layer.moe.routed_experts.inner_experts).__name__ for layer in ours.layers.values()} == {
        "NkiGroupedExperts"
    }
    expected, found = losses(native), losses(ours)
    assert expected[-1] < expected[0] - 0.1
    assert found == pytest.approx(expected, rel=tolerance)
