"""What torchtitan's transformers backend does as it is. A test that fails here says: mended there, take it out here.

Each fault is named with the part of ``training/transformers_model.py`` that is there because of it.
"""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen3conv.training.devices import prepare_torchtitan
from tests.models import saved_model


@pytest.fixture(scope="module")
def backend() -> Any:
    prepare_torchtitan("cpu")
    from torchtitan.experiments import transformers_modeling_backend

    return transformers_modeling_backend


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: saved_model(tmp_path_factory, kind) for kind in ("dense", "moe-trainable")}


def options(folder: Path) -> Any:
    """What the Trainer hands to ``update_from_config``."""
    return types.SimpleNamespace(
        training=types.SimpleNamespace(seq_len=64),
        parallelism=None,
        debug=types.SimpleNamespace(deterministic=False),
        loss=None,
        hf_model=str(folder),
        hf_assets_path=str(folder),
    )


def built(config: Any, folder: Path) -> Any:
    """A model as the Trainer makes it: on the meta device, then in memory that holds anything, then initialised."""
    config.update_from_config(config=options(folder))
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    model.init_states()
    return model


def inverse_frequencies(folder: Path) -> torch.Tensor:
    config = json.loads((folder / "config.json").read_text())
    theta = config["rope_parameters"]["rope_theta"]
    return theta ** -(torch.arange(0, config["head_dim"], 2, dtype=torch.float32) / config["head_dim"])


def test_stock_rope_is_dead_and_ours_turns(backend: Any, folders: dict[str, Path]) -> None:
    """``TransformersModel.init_states``."""
    from qwen3conv.training.transformers_model import TransformersModel

    right = inverse_frequencies(folders["dense"])
    stock = built(backend.HFTransformerModel.Config(model_config=backend.TitanModelConfig()), folders["dense"])
    assert not torch.allclose(stock.rotary_emb.inv_freq, right)
    ours = built(TransformersModel.Config(loops=True), folders["dense"])
    assert torch.allclose(ours.rotary_emb.inv_freq, right, rtol=1e-6)
    assert torch.allclose(ours.rotary_emb.original_inv_freq, right, rtol=1e-6)


def test_stock_attention_is_flex_alone(backend: Any, folders: dict[str, Path]) -> None:
    """``TransformersModel.Config._configure_hf_attention`` and ``get_attention_masks``."""
    config = backend.HFTransformerModel.Config(model_config=backend.TitanModelConfig())
    config.update_from_config(config=options(folders["dense"]))
    assert config._attn_implementation == "flex_torchtitan"


def test_stock_parallelism_takes_types_of_sharding_alone(backend: Any, folders: dict[str, Path]) -> None:
    """``parallelize_transformers``."""
    dims = types.SimpleNamespace(seq_len_divisor=1, tp=1, spmd_backend="partial_dtensor")
    arguments: dict[str, Any] = dict.fromkeys(["parallelism", "compile_config", "ac_config", "dump_folder"])
    with pytest.raises(ValueError, match="only supports"):
        backend.parallelize_hf_transformers(None, parallel_dims=dims, training=options(Path()).training, **arguments)


def test_stock_parallelism_replaces_experts_by_ones_that_no_hugging_face_folder_fills(
    backend: Any, folders: dict[str, Path]
) -> None:
    """``TransformersModel.Config``: with ``TitanModelConfig`` experts stay those of transformers."""
    from torchtitan.distributed import ParallelDims
    from torchtitan.experiments.transformers_modeling_backend.moe_replacement import build_and_swap_native_moe

    from qwen3conv.training.transformers_model import TransformersModel

    stock = built_on_meta(backend.HFTransformerModel.Config(model_config=backend.TitanMoeModelConfig()), folders)
    degrees = dict.fromkeys(["dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"], 1)
    build_and_swap_native_moe(stock, ParallelDims(**degrees, world_size=1, spmd_backend="spmd_types"))
    assert "model.model.layers.0.mlp.expert_bias_E" in stock.state_dict()
    ours = built_on_meta(TransformersModel.Config(loops=True), folders).state_dict()
    assert "model.model.layers.0.mlp.experts.gate_up_proj" in ours
    assert not any("expert_bias" in name for name in ours)


def built_on_meta(config: Any, folders: dict[str, Path]) -> Any:
    config.update_from_config(config=options(folders["moe-trainable"]))
    with torch.device("meta"):
        return config.build()
