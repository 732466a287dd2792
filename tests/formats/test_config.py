"""config.json is read as transformers means it, and refused by name where it is not a plain Qwen3."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3conv.converters.config import (
    Fp8Blocks,
    Geometry,
    compare_geometry,
    compare_maths,
    parse_config,
    read_config,
)
from qwen3conv.converters.errors import MappingError, SourceError
from qwen3conv.converters.quantization import quantization_of_tensors, refuse_quantized_tensors

torch_free = pytest.mark.torch_free

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def dense(**changes: object) -> dict[str, Any]:
    """The config.json of Qwen3-8B (its hub repository, transformers 4.51 spelling), with changes."""
    raw = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    return {**raw, **changes}


def moe(**changes: object) -> dict[str, Any]:
    """The config.json of Qwen3-Coder-480B-A35B-Instruct, whose extra keys are all off, with changes."""
    raw = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 6144,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 262144,
        "max_window_layers": 62,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 2560,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "num_experts": 160,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 62,
        "num_key_value_heads": 8,
        "output_router_logits": False,
        "qkv_bias": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "router_aux_loss_coef": 0.0,
        "shared_expert_intermediate_size": 0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_qk_norm": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    return {**raw, **changes}


def without(raw: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in keys}


def fp8(**changes: object) -> dict[str, Any]:
    block = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    return dense(quantization_config={**block, **changes})


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(SourceError) as caught:
        parse_config(raw, "here/config.json")
    assert str(caught.value).startswith("here/config.json: ")
    return str(caught.value)


# -- what is read ------------------------------------------------------------------------------------------------------


@torch_free
def test_a_hub_config_gives_every_value_it_states() -> None:
    config = parse_config(moe(), "x")
    assert config.geometry == Geometry(
        151936, 6144, 62, 96, 8, 128, intermediate_size=None, moe_intermediate_size=2560, num_experts=160
    )
    assert config.maths() == {
        "rope_theta": 1e7,
        "rope_scaling": None,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "head_dim": 128,
    }
    assert (config.dtype, config.quantization, config.style, config.model_type) == ("BF16", None, "v4", "qwen3_moe")
    assert config.raw["shared_expert_intermediate_size"] == 0


@torch_free
def test_the_dense_size_that_a_moe_does_not_use_is_not_part_of_its_geometry() -> None:
    assert parse_config(moe(intermediate_size=5472), "x").geometry == parse_config(moe(), "x").geometry
    parse_config(without(moe(), "intermediate_size"), "x")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e6},
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
        {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
    ],
    ids=["default", "yarn", "yarn-without-original", "linear"],
)
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_configs_that_transformers_saves_are_read_with_its_own_values(
    tmp_path: Path, kind: str, rope: dict[str, Any]
) -> None:
    from transformers import AutoConfig, Qwen3Config, Qwen3MoeConfig

    sizes: dict[str, Any] = {
        "vocab_size": 330,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 100,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": kind == "dense",
        "dtype": "float32",
    }
    if kind == "dense":
        Qwen3Config(rope_parameters=dict(rope), **sizes).save_pretrained(tmp_path)
    else:
        Qwen3MoeConfig(
            rope_parameters=dict(rope),
            moe_intermediate_size=20,
            num_experts=5,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            **sizes,
        ).save_pretrained(tmp_path)
    config, judge = read_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert config == read_config(tmp_path / "config.json")
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        assert getattr(config.geometry, key) == getattr(judge, key)
    assert config.geometry.head_dim == judge.head_dim
    if kind == "dense":
        assert (config.geometry.intermediate_size, config.geometry.is_moe) == (judge.intermediate_size, False)
    else:
        assert config.geometry.moe_intermediate_size == judge.moe_intermediate_size
        assert config.geometry.num_experts == judge.num_experts == 5
        assert (config.num_experts_per_tok, config.norm_topk_prob) == (judge.num_experts_per_tok, judge.norm_topk_prob)
    parameters = dict(judge.rope_parameters)
    assert config.rope_theta == parameters.pop("rope_theta")
    assert config.rope_scaling == (None if rope["rope_type"] == "default" else parameters)
    assert config.max_position_embeddings == judge.max_position_embeddings
    assert config.rms_norm_eps == judge.rms_norm_eps
    assert config.tie_word_embeddings == judge.tie_word_embeddings
    assert (config.dtype, config.style) == ("F32", "v5")


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_parameter_count_is_that_of_the_model_transformers_builds(kind: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    sizes: dict[str, Any] = {
        "vocab_size": 331,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 100,
    }
    for tied in (True, False):
        settings = (
            Qwen3Config(tie_word_embeddings=tied, **sizes)
            if kind == "dense"
            else Qwen3MoeConfig(
                tie_word_embeddings=tied, moe_intermediate_size=20, num_experts=5, num_experts_per_tok=2, **sizes
            )
        )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(settings)
        geometry = Geometry(
            331,
            48,
            3,
            6,
            2,
            16,
            intermediate_size=100 if kind == "dense" else None,
            moe_intermediate_size=None if kind == "dense" else 20,
            num_experts=None if kind == "dense" else 5,
        )
        assert geometry.parameter_count(tied) == sum(parameter.numel() for parameter in model.parameters())


@torch_free
@pytest.mark.parametrize(
    ("change", "drop", "style"),
    [
        ({}, (), "v4"),
        ({"dtype": "bfloat16", "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, (), "both"),
        (
            {"dtype": "bfloat16", "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
            ("torch_dtype", "rope_theta", "rope_scaling"),
            "v5",
        ),
        ({"dtype": "torch.bfloat16"}, ("torch_dtype",), "v4"),
        ({"rope_scaling": {"type": "default"}}, (), "v4"),
        ({"rope_parameters": {"rope_theta": 1000000}}, ("rope_theta", "rope_scaling"), "v5"),
    ],
    ids=["v4", "both", "v5", "v4-with-dtype", "default-scaling", "v5-without-type"],
)
def test_every_spelling_of_one_model_reads_alike(change: dict[str, Any], drop: tuple[str, ...], style: str) -> None:
    config = parse_config(without(dense(**change), *drop), "x")
    assert compare_maths(config, parse_config(dense(), "x")) == []
    assert (config.dtype, config.style, config.geometry) == ("BF16", style, parse_config(dense(), "x").geometry)


@torch_free
def test_both_spellings_of_yarn_and_of_the_expert_count_read_alike() -> None:
    old = parse_config(moe(rope_scaling=dict(YARN)), "x")
    legacy = parse_config(moe(rope_scaling={**without(YARN, "rope_type"), "type": "yarn"}), "x")
    new = parse_config(
        without(
            moe(rope_parameters={**YARN, "rope_theta": 1e7}, num_local_experts=160),
            "rope_theta",
            "rope_scaling",
            "num_experts",
        ),
        "x",
    )
    assert old.rope_scaling == YARN
    assert compare_maths(old, legacy) == compare_maths(old, new) == []
    assert old.geometry == new.geometry


@torch_free
def test_a_file_without_a_dtype_has_none() -> None:
    assert parse_config(without(dense(), "torch_dtype"), "x").dtype is None


# -- what contradicts itself -------------------------------------------------------------------------------------------


@torch_free
@pytest.mark.parametrize(
    ("raw", "texts"),
    [
        (dense(dtype="float32"), ["torch_dtype is 'bfloat16'", "dtype is 'float32'"]),
        (dense(rope_parameters={"rope_theta": 5e6}), ["rope_theta is 1e+06", "rope_parameters.rope_theta is 5e+06"]),
        (moe(num_local_experts=128), ["num_experts is 160", "num_local_experts is 128"]),
        (
            dense(rope_scaling=YARN, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}),
            ["rope_scaling is {'rope_type': 'yarn'", "rope_parameters is {'rope_theta'"],
        ),
        # v4 readers of this file would see no scaling.
        (dense(rope_parameters={**YARN, "rope_theta": 1e6}), ["rope_scaling is None", "'yarn'"]),
        (
            dense(rope_scaling={**YARN, "type": "linear"}),
            ["rope_scaling.rope_type is 'yarn'", "rope_scaling.type is 'linear'"],
        ),
    ],
    ids=["dtype", "theta", "experts", "scaling", "scaling-in-v5-only", "rope-type"],
)
def test_two_spellings_that_disagree_are_refused_with_both_values(raw: dict[str, Any], texts: list[str]) -> None:
    message = refusal(raw)
    for text in texts:
        assert text in message


# -- what is missing or impossible -------------------------------------------------------------------------------------

NEEDED = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "tie_word_embeddings",
    "rms_norm_eps",
    "rope_theta",
]


@torch_free
@pytest.mark.parametrize("raw", [dense(), moe()], ids=["dense", "moe"])
@pytest.mark.parametrize("null", [False, True], ids=["absent", "null"])
def test_each_value_that_is_not_there_is_named_and_never_defaulted(raw: dict[str, Any], null: bool) -> None:
    own = (
        ["intermediate_size"]
        if raw["model_type"] == "qwen3"
        else ["moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob"]
    )
    for key in NEEDED + own:
        lacking = {**raw, key: None} if null else without(raw, key)
        assert f"missing: {key}" in refusal(lacking)


@torch_free
def test_all_missing_values_are_told_at_once() -> None:
    message = refusal({"model_type": "qwen3_moe"})
    for key in [*NEEDED, "moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob"]:
        assert re.search(rf"\b{key}\b", message), key


@torch_free
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 36.0}, "num_hidden_layers is 36.0"),
        ({"vocab_size": "151936"}, "vocab_size is '151936'"),
        ({"head_dim": 10**30}, "head_dim is 1000"),
        ({"vocab_size": [151936]}, "vocab_size is [151936]"),
        ({"tie_word_embeddings": 0}, "tie_word_embeddings is 0"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": True}, "rope_theta is True"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06"),
        ({"rms_norm_eps": 1.5}, "rms_norm_eps is 1.5"),
        ({"max_position_embeddings": 2**40}, "max_position_embeddings is 1099511627776"),
        ({"num_key_value_heads": 7}, "no multiple of num_key_value_heads 7"),
        ({"torch_dtype": "bf16"}, "torch_dtype is 'bf16'"),
        ({"torch_dtype": 16}, "torch_dtype is 16"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope_type is 'mrope'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "missing: rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "rope_scaling.factor is '4'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "one set per layer type"),
    ],
)
def test_impossible_values_are_refused_with_what_was_found(change: dict[str, Any], text: str) -> None:
    assert text in refusal(dense(**change))


@torch_free
def test_more_experts_per_token_than_experts_is_refused() -> None:
    assert "num_experts_per_tok is 161, of 160 experts" in refusal(moe(num_experts_per_tok=161))


@torch_free
def test_a_forged_size_cannot_ask_for_billions_of_tensors() -> None:
    assert "tensors; at most" in refusal(moe(num_hidden_layers=2**14, num_experts=2**14))


@torch_free
def test_every_problem_of_a_config_is_told_in_one_error() -> None:
    raw = without(dense(head_dim=-3, attention_bias=True, dtype="float16"), "rope_theta")
    message = refusal(raw)
    for text in ("missing: rope_theta", "head_dim is -3", "attention_bias is True", "dtype is 'float16'"):
        assert text in message


# -- what is not a plain Qwen3 -----------------------------------------------------------------------------------------


@torch_free
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("qwen2", "biases"),
        ("qwen2_5_vl", "biases"),
        ("qwen2_moe", "biases"),
        ("qwen3_next", "Qwen3-Next"),
        ("qwen3_5_moe", "Qwen3.5"),
        ("qwen3_vl", "vision"),
        ("qwen3_vl_moe_text", "transposed"),
        ("qwen3_omni_moe", "audio"),
        ("llama", "'qwen3' and 'qwen3_moe'"),
        (None, "model_type is missing"),
        (3, "model_type is 3"),
        (["qwen3"], "model_type is ['qwen3']"),
    ],
)
def test_other_models_are_refused_by_their_model_type(kind: object, text: str) -> None:
    message = refusal(dense(model_type=kind))
    assert text in message
    assert "'qwen3' and 'qwen3_moe'" in message


@torch_free
@pytest.mark.parametrize(
    ("architectures", "text"),
    [
        (["Qwen3ForSequenceClassification"], "reranker"),
        (["Qwen3ForTokenClassification"], "token classifier"),
        (["Qwen3ForQuestionAnswering"], "question answering"),
        (["Qwen3Model"], "embedding"),
        (["Qwen3MoeForCausalLM"], "Qwen3MoeForCausalLM' with model_type 'qwen3'"),
        (["LlamaForCausalLM"], "LlamaForCausalLM"),
        ("Qwen3ForCausalLM", "expected a list"),
        ([7], "expected a list"),
    ],
)
def test_other_heads_are_refused_by_their_architecture(architectures: object, text: str) -> None:
    assert text in refusal(dense(architectures=architectures))


@torch_free
def test_a_config_without_architectures_is_read() -> None:
    assert parse_config(without(dense(), "architectures"), "x").model_type == "qwen3"


@torch_free
def test_a_multimodal_config_is_refused_whatever_its_model_type_says() -> None:
    assert "text_config" in refusal(dense(text_config=dense()))


@torch_free
@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (moe(decoder_sparse_step=2), "decoder_sparse_step is 2"),
        (moe(mlp_only_layers=[0]), "mlp_only_layers is [0]"),
        (moe(shared_expert_intermediate_size=128), "shared_expert_intermediate_size is 128"),
        (moe(num_shared_experts=1), "num_shared_experts is 1"),
        (moe(n_shared_experts=1), "n_shared_experts is 1"),
        (moe(qkv_bias=True), "qkv_bias is True"),
        (dense(attention_bias=True), "attention_bias is True"),
        (dense(use_qk_norm=False), "use_qk_norm is False"),
        (dense(use_sliding_window=True, sliding_window=4096), "use_sliding_window is True"),
        (dense(layer_types=["full_attention"] * 35 + ["sliding_attention"]), "layer_types has 'sliding_attention'"),
        (dense(layer_types=["full_attention"] * 35), "layer_types lists 35 layers, num_hidden_layers is 36"),
        (dense(layer_types=[{}] * 36), "layer_types has {}"),
        (dense(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (dense(partial_rotary_factor=0.25), "partial_rotary_factor is 0.25"),
        (dense(rope_scaling={**YARN, "partial_rotary_factor": 0.5}), "rope_scaling.partial_rotary_factor is 0.5"),
        (dense(attn_output_gate=True), "attn_output_gate is True"),
        (dense(per_layer_config={"0": {}}), "per_layer_config"),
        (dense(num_experts=8), "num_experts is 8, but model_type 'qwen3' is dense"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_features_that_a_plain_qwen3_lacks_are_refused_by_name(raw: dict[str, Any], text: str) -> None:
    assert text in refusal(raw)


@torch_free
def test_a_sliding_window_that_is_off_is_no_reason_to_refuse() -> None:
    config = parse_config(dense(sliding_window=4096, layer_types=["full_attention"] * 36), "x")
    assert config.geometry.num_hidden_layers == 36


# -- quantisation ------------------------------------------------------------------------------------------------------


@torch_free
@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("gptq", "GPTQ"),
        ("awq", "AWQ"),
        ("bitsandbytes", "bitsandbytes"),
        ("compressed-tensors", "compressed-tensors"),
        ("modelopt", "ModelOpt"),
        ("mxfp4", "MXFP4"),
        ("nvfp4", "NVFP4"),
        ("auto-round", "AutoRound"),
        ("hqq", "'hqq'"),
    ],
)
def test_quantised_formats_are_refused_by_name_with_the_next_step(method: str, name: str) -> None:
    message = refusal(dense(quantization_config={"quant_method": method, "bits": 4}))
    assert name in message
    assert "convert the repository it was quantised from" in message


@torch_free
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"quantization": {"bits": 8, "group_size": 64}}, "MLX"),
        ({"compression_config": {"format": "pack-quantized"}}, "compressed-tensors"),
        ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"bits": 4}}, "no quant_method"),
        ({"quantization_config": "fp8"}, "expected an object"),
        ({"quantization_config": {"quant_method": ["fp8"]}}, "no quant_method"),
    ],
)
def test_other_marks_of_quantisation_are_refused(change: dict[str, Any], text: str) -> None:
    assert text in refusal(dense(**change))


@torch_free
def test_the_file_that_modelopt_leaves_beside_the_config_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dense()))
    read_config(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(SourceError, match="ModelOpt"):
        read_config(tmp_path)


@torch_free
def test_block_fp8_is_read_with_its_block_and_skipped_modules() -> None:
    skipped = ["lm_head", "model.layers.0.mlp.gate"]
    config = parse_config(fp8(weight_block_size=[128, 64], modules_to_not_convert=skipped), "x")
    assert config.quantization == Fp8Blocks((128, 64), tuple(skipped))
    assert parse_config(fp8(), "x").quantization == Fp8Blocks((128, 128))
    assert parse_config(dense(quantization_config=None), "x").quantization is None


@torch_free
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"weight_block_size": None}, "without weight_block_size"),
        ({"weight_block_size": [128]}, "weight_block_size is [128]"),
        ({"weight_block_size": [128, 0]}, "weight_block_size is [128, 0]"),
        ({"weight_block_size": [True, 128]}, "weight_block_size is [True, 128]"),
        ({"weight_block_size": 128}, "weight_block_size is 128"),
        ({"activation_scheme": "static"}, "activation_scheme 'static'"),
        ({"fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'"),
    ],
)
def test_other_kinds_of_fp8_are_refused(change: dict[str, Any], text: str) -> None:
    assert text in refusal(fp8(**change))


@torch_free
@pytest.mark.parametrize(
    ("suffixes", "name"),
    [
        ([".qweight", ".qzeros", ".scales", ".g_idx"], "GPTQ"),
        ([".qweight", ".qzeros", ".scales"], "GPTQ or AWQ"),
        ([".weight", ".weight.absmax", ".weight.quant_state.bitsandbytes__nf4"], "bitsandbytes"),
        ([".weight.quant_state.bitsandbytes__nf4"], "bitsandbytes"),
        ([".weight_packed", ".weight_scale"], "compressed-tensors or ModelOpt"),
        ([".weight", ".weight_scale_2", ".input_scale"], "compressed-tensors or ModelOpt"),
        (["_blocks", "_scales"], "MXFP4"),
        ([".weight", ".scales", ".biases"], "MLX"),
        ([".weight", ".weight_scale_inv"], None),
        ([".weight"], None),
    ],
)
def test_tensor_names_betray_the_quantisation_that_a_config_hides(suffixes: list[str], name: str | None) -> None:
    names = ["model.norm.weight", *(f"model.layers.0.mlp.up_proj{suffix}" for suffix in suffixes)]
    assert quantization_of_tensors(names) == name
    if name is None:
        refuse_quantized_tensors(names, "x")
    else:
        with pytest.raises(SourceError, match=name):
            refuse_quantized_tensors(names, "x")


# -- hostile files -----------------------------------------------------------------------------------------------------


@torch_free
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"[1, 2]", "found a list"),
        (b"null", "found null"),
        (b'"qwen3"', "found a string"),
        (b"", "not valid JSON"),
        (b'{"model_type": "qwen3"', "not valid JSON"),
        (b'{"a": 1, "b": 2, "a": 1}', "key 'a' is there twice"),
        (b'{"x": {"a": 1, "a": 2}}', "key 'a' is there twice"),
        (b'{"rope_theta": NaN}', "NaN is not a JSON number"),
        (b'{"rope_theta": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"rope_theta": 1e999}', "1e999 is too large"),
        (b'{"rope_theta": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "nested more than"),
        (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
        (b'{"a": "\xff"}', "not UTF-8 text at byte 7"),
        (b'\xef\xbb\xbf{"a": 1}', "not valid JSON"),
        (b'{"a": "' + b"x" * (17 * 2**20) + b'"}', "bytes is read"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_hostile_file_is_refused_with_the_reason(tmp_path: Path, text: bytes, reason: str) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(SourceError) as caught:
        read_config(tmp_path)
    assert reason in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert len(str(caught.value)) < 500


@torch_free
def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**33)
    with pytest.raises(SourceError, match="8589934592 bytes"):
        read_config(tmp_path)


@torch_free
def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file"):
        read_config(tmp_path)
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(SourceError, match="not a regular file"):
        read_config(tmp_path)


@torch_free
def test_a_refusal_can_be_printed_whatever_the_file_says() -> None:
    raw = dense(model_type="qwen3\ud800\n\x1b[31m" + "x" * 10_000)
    message = refusal(raw)
    assert message.isascii()
    assert message.isprintable()
    assert len(message) < 300


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@torch_free
@settings(max_examples=300, deadline=None)
@given(
    base=st.sampled_from([dense(), moe(), fp8()]),
    key=st.sampled_from(sorted({*dense(), *moe(), "quantization_config", "rope_parameters", "dtype", "layer_types"})),
    inner=st.sampled_from(["", "rope_type", "rope_theta", "factor", "quant_method", "weight_block_size"]),
    value=JSON,
)
def test_no_value_whatever_gets_past_the_reader_as_another_error(
    base: dict[str, Any], key: str, inner: str, value: object
) -> None:
    old = base.get(key)
    changed = {**(old if isinstance(old, dict) else {}), inner: value} if inner else value
    try:
        config = parse_config({**base, key: changed}, "x")
    except SourceError:
        return
    assert config.geometry.problems() == []
    assert config.rope_theta > 0


# -- geometry ----------------------------------------------------------------------------------------------------------

SIZE = st.integers(1, 5)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    kv = draw(SIZE)
    experts = draw(st.none() | SIZE)
    return Geometry(
        vocab_size=draw(SIZE),
        hidden_size=draw(SIZE),
        num_hidden_layers=draw(SIZE),
        num_attention_heads=kv * draw(SIZE),
        num_key_value_heads=kv,
        head_dim=draw(SIZE),
        intermediate_size=draw(SIZE) if experts is None else None,
        moe_intermediate_size=draw(SIZE) if experts is not None else None,
        num_experts=experts,
    )


@torch_free
@given(geometry=geometries())
def test_axes_determine_the_geometry(geometry: Geometry) -> None:
    assert Geometry.from_axes(geometry.axes, geometry.num_hidden_layers) == geometry


@torch_free
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"Q": 100}, "axis Q has 100 rows, no multiple of head_dim 16"),
        ({"K": 17}, "axis K has 17 rows"),
        ({"K": 64}, "num_attention_heads 6 is no multiple of num_key_value_heads 4"),
        ({"V": 0}, "axis V is 0"),
        ({"E": 5, "M": 20}, "some layers are dense"),
        ({"E": 5}, "no tensor tells axis M"),
        ({"V": 2**40}, "vocab_size is 1099511627776"),
    ],
)
def test_axes_that_fit_no_model_are_refused_with_the_axis(change: dict[str, int], text: str) -> None:
    axes = {"V": 330, "H": 48, "Q": 96, "K": 32, "D": 16, "I": 100, **change}
    with pytest.raises(MappingError) as caught:
        Geometry.from_axes(axes, 3)
    assert text in str(caught.value)


@torch_free
def test_missing_axes_are_all_named() -> None:
    with pytest.raises(MappingError) as caught:
        Geometry.from_axes({"V": 1}, 3)
    for axis in "HQKDI":
        assert f"axis {axis}" in str(caught.value)


@torch_free
def test_geometries_are_compared_by_the_names_in_the_config() -> None:
    one = parse_config(dense(), "x").geometry
    other = parse_config(dense(num_hidden_layers=28, head_dim=64), "x").geometry
    assert compare_geometry(one, one) == []
    assert compare_geometry(one, other) == [
        "num_hidden_layers: expected 36, found 28",
        "head_dim: expected 128, found 64",
    ]
    assert "num_experts: expected none (the model is dense), found 160" in compare_geometry(
        one, parse_config(moe(), "x").geometry
    )


# -- what the model computes -------------------------------------------------------------------------------------------


@torch_free
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_theta", 5e6),
        ("max_position_embeddings", 40960),
        ("rms_norm_eps", 1e-5),
        ("num_experts_per_tok", 4),
        ("norm_topk_prob", False),
        ("tie_word_embeddings", True),
        ("head_dim", 64),
    ],
)
def test_each_value_that_changes_the_maths_is_a_difference(key: str, value: object) -> None:
    (difference,) = compare_maths(parse_config(moe(), "x"), parse_config(moe(**{key: value}), "x"))
    assert (difference.key, difference.a, difference.b) == (key, moe()[key], value)
    assert str(difference).startswith(f"{key}: ")


@torch_free
def test_rope_scaling_is_a_difference() -> None:
    plain, yarn = parse_config(moe(), "x"), parse_config(moe(rope_scaling=YARN), "x")
    assert [(d.key, d.a, d.b) for d in compare_maths(plain, yarn)] == [("rope_scaling", None, YARN)]


@torch_free
def test_values_that_change_no_maths_are_no_difference() -> None:
    other = parse_config(moe(torch_dtype="float32", eos_token_id=1, intermediate_size=5472), "x")
    assert compare_maths(parse_config(moe(), "x"), other) == []
