"""A config made for weights that had none: what it takes from the shapes, what it asks for, and what it offers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qwen3conv.converters.config import Geometry, parse_config
from qwen3conv.converters.config_derive import SETTABLE, derive_config, parse_setting
from qwen3conv.converters.config_styles import render_config
from qwen3conv.converters.errors import PolicyError
from qwen3conv.converters.variants import GEOMETRIES

torch_free = pytest.mark.torch_free

DENSE = Geometry(330, 48, 3, 6, 2, 16, intermediate_size=100)
MOE = Geometry(330, 48, 3, 6, 2, 16, moe_intermediate_size=20, num_experts=5)
KNOWN: dict[str, Any] = {
    "rope_theta": 5e6,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "dtype": "BF16",
}
ROUTING: dict[str, Any] = {"num_experts_per_tok": 2, "norm_topk_prob": True}


def refusal(geometry: Geometry, known: dict[str, Any]) -> str:
    with pytest.raises(PolicyError) as caught:
        derive_config(geometry, known)
    return str(caught.value)


@pytest.mark.parametrize(
    ("geometry", "known"),
    [
        (DENSE, {**KNOWN, "eos_token_id": [2, 0], "bos_token_id": 0, "pad_token_id": None}),
        (MOE, {**KNOWN, **ROUTING, "intermediate_size": 60}),
        (DENSE, {**KNOWN, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    ],
    ids=["dense", "moe", "yarn"],
)
def test_transformers_builds_the_model_that_a_derived_config_describes(
    tmp_path: Path, geometry: Geometry, known: dict[str, Any]
) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = derive_config(geometry, known)
    text = render_config(config)
    (tmp_path / "config.json").write_bytes(text)
    judge = AutoConfig.from_pretrained(tmp_path)
    for key, value in known.items():
        if key not in ("rope_theta", "rope_scaling", "dtype"):
            assert getattr(judge, key) == value
    assert judge.rope_parameters["rope_theta"] == 5e6
    assert judge.dtype == torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(judge)
    assert sum(parameter.numel() for parameter in model.parameters()) == geometry.parameter_count(tied=True)
    assert type(model).__name__ == config.raw["architectures"][0]  # type: ignore[index]
    assert parse_config(json.loads(text), "x") == config
    assert (config.geometry, config.style) == (geometry, "v4")


@torch_free
def test_all_values_that_shapes_do_not_tell_are_asked_for_at_once() -> None:
    message = refusal(MOE, {})
    for key in (*KNOWN, *ROUTING):
        assert f"--set {key}=" in message
    assert "released" not in message
    dense = refusal(DENSE, {"rope_theta": 1e6})
    assert "rope_theta" not in dense
    assert "num_experts_per_tok" not in dense


@torch_free
def test_released_values_are_offered_ready_to_type() -> None:
    message = refusal(GEOMETRIES["4B"], {"dtype": "BF16", "rms_norm_eps": 1e-6})
    april, base, later = (line for line in message.splitlines() if "Qwen3-4B" in line)
    assert "Qwen3-4B: --set rope_theta=1000000 --set max_position_embeddings=40960" in april
    assert "Qwen3-4B-Base: --set rope_theta=1000000 --set max_position_embeddings=32768" in base
    assert "Qwen3-4B-Instruct-2507, Qwen3-4B-Thinking-2507: --set rope_theta=5000000" in later
    assert "--set max_position_embeddings=262144 --set tie_word_embeddings=true" in later
    assert "rms_norm_eps" not in message


@torch_free
def test_the_offered_options_make_the_config_of_the_release() -> None:
    message = refusal(GEOMETRIES["30B-A3B"], {})
    (line,) = (line for line in message.splitlines() if "Qwen3-Coder-30B-A3B" in line)
    known = dict(parse_setting(option) for option in line.split(": ")[1].removeprefix("--set ").split(" --set "))
    config = derive_config(GEOMETRIES["30B-A3B"], known)
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


@torch_free
def test_releases_that_contradict_what_was_given_are_not_offered() -> None:
    message = refusal(GEOMETRIES["4B"], {"rope_theta": 5e6})
    assert "Qwen3-4B-Instruct-2507" in message
    assert "40960" not in message
    assert "40960" in refusal(GEOMETRIES["4B"], {"rope_theta": 7e6})


@torch_free
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden_size": 64}, "'hidden_size' is not one that can be made"),
        ({"rope_thetas": 1e6}, "did you mean rope_theta?"),
        ({"num_experts_per_tok": 2}, "num_experts_per_tok: this model is dense"),
        ({"intermediate_size": 2}, "intermediate_size: this model is dense"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"dtype": "int5"}, "torch_dtype is 'int5'"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "'spiral'"),
        ({"eos_token_id": "two"}, "neither a token id"),
        ({"eos_token_id": [2, True]}, "neither a token id"),
        ({"bos_token_id": -1}, "neither a token id"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(change: dict[str, Any], text: str) -> None:
    assert text in refusal(DENSE, {**KNOWN, **change})


@torch_free
@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("rope_theta=1e6", "rope_theta", 1e6),
        ("rope_theta = 5000000 ", "rope_theta", 5e6),
        ("rms_norm_eps=1e-06", "rms_norm_eps", 1e-6),
        ("max_position_embeddings=262144", "max_position_embeddings", 262144),
        ("norm_topk_prob=true", "norm_topk_prob", True),
        ("tie_word_embeddings=False", "tie_word_embeddings", False),
        ("dtype=bfloat16", "dtype", "BF16"),
        ("dtype=torch.float32", "dtype", "F32"),
        ("dtype=F16", "dtype", "F16"),
        ("eos_token_id=[2, 0]", "eos_token_id", [2, 0]),
        ("bos_token_id=null", "bos_token_id", None),
        ('rope_scaling={"rope_type": "yarn", "factor": 4}', "rope_scaling", {"rope_type": "yarn", "factor": 4}),
    ],
)
def test_a_setting_has_the_type_of_its_key(text: str, key: str, value: object) -> None:
    found = parse_setting(text)
    assert found == (key, value)
    assert type(found[1]) is type(value)
    assert key in SETTABLE


@torch_free
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("rope_theta", "expected KEY=VALUE"),
        ("rope_theta=big", "is not a number"),
        ("rope_theta=nan", "is not a number"),
        ("rope_theta=inf", "is not a number"),
        ("max_position_embeddings=1e5", "is not a whole number"),
        ("norm_topk_prob=1", "is not true or false"),
        ("dtype=bf16", "is not a dtype"),
        ('eos_token_id=2, "x": 3', "is not a JSON value"),
        ("rope_scaling={", "is not a JSON value"),
        ("rope_scaling=NaN", "is not a JSON value"),
        ("vocab_size=5", "is not one that can be made"),
        ("\ud800=5", "is not one that can be made"),
        ("eos_token_id=\ud800", "is not a JSON value"),
    ],
)
def test_a_setting_of_another_type_is_refused(text: str, reason: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse_setting(text)
    assert reason in str(caught.value)
    assert str(caught.value).isascii()
