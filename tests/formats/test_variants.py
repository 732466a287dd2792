"""Released sizes are what the hub has, and torchtitan's flavors are what the installed torchtitan has."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from qwen3conv.converters.config import Qwen3Config, parse_config
from qwen3conv.converters.config_derive import derive_config
from qwen3conv.converters.geometry import Geometry
from qwen3conv.converters.variants import (
    FLAVORS,
    GEOMETRIES,
    RELEASES,
    Release,
    flavor_like,
    flavor_traps,
    released_like,
)

torch_free = pytest.mark.torch_free


def config_of(release: Release) -> Qwen3Config:
    return derive_config(release.geometry, {**release.settings(), "dtype": "BF16"})


def release(name: str) -> Release:
    return next(release for release in RELEASES if name in release.names)


# -- releases ----------------------------------------------------------------------------------------------------------


@torch_free
@pytest.mark.parametrize(
    ("size", "tied", "tensors", "parameters"),
    [
        ("0.6B", True, 310, 596_049_920),
        ("1.7B", True, 310, 1_720_574_976),
        ("4B", True, 398, 4_022_468_096),
        ("8B", False, 399, 8_190_735_360),
        ("14B", False, 443, 14_768_307_200),
        ("32B", False, 707, 32_762_123_264),
        ("30B-A3B", False, 18_867, 30_532_122_624),
        ("235B-A22B", False, 36_945, 235_093_634_560),
        ("Coder-480B-A35B", False, 30_321, 480_154_875_392),
    ],
)
def test_released_sizes_have_the_published_counts(size: str, tied: bool, tensors: int, parameters: int) -> None:
    geometry = GEOMETRIES[size]
    assert geometry.parameter_count(tied) == parameters
    assert geometry.tensor_count(tied) == tensors
    assert {release.tie_word_embeddings for release in RELEASES if release.geometry == geometry} == {tied}


@torch_free
def test_releases_of_one_size_are_told_apart_by_theta_and_context() -> None:
    assert [(r.names[0], r.rope_theta, r.max_position_embeddings) for r in released_like(GEOMETRIES["4B"])] == [
        ("Qwen3-4B", 1e6, 40960),
        ("Qwen3-4B-Base", 1e6, 32768),
        ("Qwen3-4B-Instruct-2507", 5e6, 262144),
    ]
    assert released_like(Geometry(330, 48, 3, 6, 2, 16, intermediate_size=100)) == []


@torch_free
def test_every_released_name_stands_once_and_its_config_is_readable() -> None:
    names = [name for release in RELEASES for name in release.names]
    assert len(names) == len(set(names)) == 22
    for entry in RELEASES:
        config = config_of(entry)
        assert config.geometry == entry.geometry
        assert {key: config.maths()[key] for key in entry.settings()} == entry.settings()


# -- torchtitan's flavors ----------------------------------------------------------------------------------------------


def titan_config(name: str) -> Any:
    from torchtitan.models.qwen3 import qwen3_configs

    return qwen3_configs[name]("flex")


def test_flavors_are_those_of_the_installed_torchtitan() -> None:
    from torchtitan.models.qwen3 import qwen3_configs

    assert [flavor.name for flavor in FLAVORS] == list(qwen3_configs)
    for flavor in FLAVORS:
        model = titan_config(flavor.name)
        for layer in model.layers:
            attention, rope = layer.attention, layer.attention.rope
            experts = layer.moe.routed_experts.inner_experts if layer.moe else None
            found = Geometry(
                vocab_size=model.vocab_size,
                hidden_size=model.dim,
                num_hidden_layers=len(model.layers),
                num_attention_heads=attention.n_heads,
                num_key_value_heads=attention.n_kv_heads,
                head_dim=attention.head_dim,
                intermediate_size=layer.feed_forward.w1.out_features if layer.feed_forward else None,
                moe_intermediate_size=experts.hidden_dim if experts else None,
                num_experts=experts.num_experts if experts else None,
            )
            assert found == flavor.geometry, flavor.name
            assert (rope.theta, rope.max_seq_len, rope.scaling) == (flavor.rope_theta, flavor.max_seq_len, "none")
            norms = (model.norm, layer.attention_norm, layer.ffn_norm, attention.qk_norm)
            assert {norm.eps for norm in norms} == {flavor.rms_norm_eps}
            router = layer.moe.router if layer.moe else None
            assert (router.top_k if router else None) == flavor.top_k
            assert (router.route_norm if router else None) == flavor.route_norm
        assert model.enable_weight_tying == flavor.tied


# -- traps -------------------------------------------------------------------------------------------------------------


@torch_free
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen3-8B", {}),
        ("Qwen3-30B-A3B", {}),
        ("Qwen3-8B-Base", {"max_position_embeddings": (32768, 40960)}),
        ("Qwen3-235B-A22B", {"rope_theta": (1e6, 5e6)}),
        ("Qwen3-235B-A22B-Thinking-2507", {"max_position_embeddings": (262144, 40960)}),
        ("Qwen3-4B-Instruct-2507", {"rope_theta": (5e6, 1e6), "max_position_embeddings": (262144, 40960)}),
        ("Qwen3-Coder-30B-A3B-Instruct", {"rope_theta": (1e7, 1e6), "max_position_embeddings": (262144, 40960)}),
        ("Qwen3-Coder-480B-A35B-Instruct", {}),
    ],
)
def test_the_traps_of_a_release_are_the_values_its_flavor_has_otherwise(
    name: str, expected: dict[str, tuple[object, object]]
) -> None:
    traps = flavor_traps(config_of(release(name)))
    assert {trap.key: (trap.config_value, trap.flavor_value) for trap in traps} == expected
    for trap in traps:
        assert trap.flavor in name
        mine, theirs = (str(value).removesuffix(".0") for value in (trap.config_value, trap.flavor_value))
        assert str(trap).startswith(f"{trap.key} is {mine}, torchtitan's flavor {trap.flavor} has {theirs}: ")


@torch_free
def test_a_size_without_a_flavor_has_no_traps_to_tell() -> None:
    assert flavor_like(release("Qwen3-Coder-480B-A35B-Instruct").geometry) is None
    assert flavor_like(release("Qwen3-235B-A22B").geometry) is not None


def everything_else() -> Qwen3Config:
    """A 30B-A3B in which every value that shapes do not tell is unlike the flavor's."""
    known = {
        "rope_theta": 3e6,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096},
        "dtype": "BF16",
    }
    return derive_config(GEOMETRIES["30B-A3B"], known)


@torch_free
def test_every_value_that_a_flavor_fixes_can_be_a_trap() -> None:
    config = everything_else()
    traps = {trap.key: trap for trap in flavor_traps(config)}
    assert set(traps) == set(config.maths()) - {"head_dim"}
    for key, trap in traps.items():
        assert trap.config_value == config.maths()[key]


def test_remedies_name_attributes_that_torchtitan_has_and_the_value_to_set() -> None:
    model = titan_config("30B-A3B")
    roots = {"layer": model.layers[0], "model": model}
    config = everything_else()
    checked = set()
    for trap in flavor_traps(config):
        if trap.key == "rope_scaling":
            continue
        found = re.findall(r"\b(layer|model)((?:\.[a-z_]+)+)", trap.remedy)
        assert found, trap
        for root, path in found:
            functools.reduce(getattr, path.strip(".").split("."), roots[root])
        assert f"= {trap.config_value}".removesuffix(".0") in trap.remedy
        checked.add(trap.key)
    assert len(checked) == 6
    dispatcher = model.layers[0].moe.routed_experts.token_dispatcher
    assert (dispatcher.top_k, model.layers[0].moe.router.top_k) == (8, 8)


@torch_free
def test_a_resized_vocabulary_is_no_longer_a_released_size() -> None:
    config = config_of(release("Qwen3-8B"))
    resized = parse_config({**config.raw, "vocab_size": 152064}, "x")
    assert released_like(resized.geometry) == []
    assert flavor_traps(resized) == []
