"""Training state between torchtitan's native model and its transformers backend: the same moments under other names.

The states are those of ``real_checkpoints``: moments are functions of the parameters, so that what a parameter's should
be in a layout is told by that parameter there, which other tests hold against transformers and torchtitan.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qwen3conv.converters.detection import open_checkpoint
from qwen3conv.converters.errors import PolicyError
from qwen3conv.converters.policies import Choices, settle
from qwen3conv.converters.verification import verify
from tests.conversions import convert, load_dcp, policies
from tests.formats.test_upgrade import assert_same_bytes, assert_same_state
from tests.models import saved_model
from tests.older_titan import load_nested
from tests.real_checkpoints import ADAMW, State, read_model, save_dcp, titan_training_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing")


def native_state(variant: str, tmp_path_factory: pytest.TempPathFactory, bias: float | None = None) -> State:
    """A run of torchtitan 0.3's native model, whose optimizer has q, k and v as one."""
    tensors, config = read_model(saved_model(tmp_path_factory, variant))
    return titan_training_state("T7", tensors, config, fused_qkv=True, expert_bias=bias)


@pytest.mark.parametrize("variant", ["dense", "dense-tied", "moe"])
def test_moments_go_with_their_parameters_and_come_back_byte_for_byte(
    variant: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    state = native_state(variant, tmp_path_factory)
    save_dcp(state, tmp_path / "native")
    manifest = convert(tmp_path / "native", tmp_path / "transformers", "accelerate", optimizer="default")
    assert "optimizer-backend" in policies(manifest)
    found = load_dcp(tmp_path / "transformers")
    parameters = {name for name in found if not name.startswith("optimizer.")}
    trained = parameters - ({"model.lm_head.weight"} if variant == "dense-tied" else set())
    expected: dict[str, Any] = {}
    for name in trained:
        expected |= {f"optimizer.state.{name}.exp_avg": found[name].float() / 2}
        expected |= {f"optimizer.state.{name}.exp_avg_sq": found[name].float() ** 2}
        expected |= {f"optimizer.state.{name}.step": torch.tensor(7.0)}
    assert {name for name in found if name not in parameters} == {*expected}
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
    nested = load_nested(tmp_path / "transformers")
    assert all(nested["optimizer"][f"param_groups.{name}.{key}"] == ADAMW[key] for name in trained for key in ADAMW)
    for group in ("lr_scheduler", "train_state", "dataloader"):
        assert nested[group] == state[group]
    assert verify(settle(open_checkpoint(tmp_path / "transformers"), Choices())).problems == ()

    convert(tmp_path / "transformers", tmp_path / "back", "titan", optimizer="default")
    assert_same_state(load_nested(tmp_path / "back"), state)
    assert_same_bytes(tmp_path / "back", tmp_path / "native")


def test_a_trained_routing_bias_has_no_place_there(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    save_dcp(native_state("moe", tmp_path_factory, bias=0.01), tmp_path / "native")
    with pytest.raises(PolicyError, match="--drop-expert-bias"):
        convert(tmp_path / "native", tmp_path / "transformers", "accelerate", optimizer="default")
