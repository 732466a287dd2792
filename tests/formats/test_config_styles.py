"""A config.json is written so that every reader computes the same, and so that what did not change did not change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3conv.converters.config import Qwen3Config, compare_maths, parse_config, read_config
from qwen3conv.converters.config_styles import render_config

torch_free = pytest.mark.torch_free

V4 = {"torch_dtype", "rope_theta", "rope_scaling"}
V5 = {"dtype", "rope_parameters"}

YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "rope_type": "yarn"}


def dense(**changes: object) -> dict[str, Any]:
    raw = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 48,
        "intermediate_size": 100,
        "max_position_embeddings": 256,
        "model_type": "qwen3",
        "num_attention_heads": 6,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 330,
    }
    return dict(sorted({**raw, **changes}.items()))


def moe(**changes: object) -> dict[str, Any]:
    raw = dense(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        moe_intermediate_size=20,
        norm_topk_prob=True,
        num_experts=5,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    return dict(sorted({**raw, **changes}.items()))


def config_of(text: bytes) -> Qwen3Config:
    return parse_config(json.loads(text), "x", source=text)


def hub_text(raw: dict[str, Any]) -> bytes:
    """As the hub's config.json files are: two spaces, no sorting of ours, one newline."""
    return (json.dumps(raw, indent=2) + "\n").encode()


# -- judged by transformers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        dense(),
        moe(),
        dense(rope_scaling=YARN),
        moe(rope_scaling={"factor": 2.0, "type": "linear"}),
        dense(rope_scaling={"factor": 4.0, "rope_type": "yarn"}),
    ],
    ids=["dense", "moe", "yarn", "linear-legacy", "yarn-without-original"],
)
def test_transformers_reads_every_style_as_the_same_model(tmp_path: Path, raw: dict[str, Any]) -> None:
    from transformers import AutoConfig

    config = config_of(hub_text(raw))
    readings = {}
    for style in ("source", "v4", "v5", "both"):
        (tmp_path / style).mkdir()
        (tmp_path / style / "config.json").write_bytes(render_config(config, style=style))  # type: ignore[arg-type]
        reading = AutoConfig.from_pretrained(tmp_path / style).to_dict()
        reading["rope_parameters"].pop("type", None)  # the legacy spelling of rope_type, kept beside it
        assert reading.pop("_name_or_path") == str(tmp_path / style)
        readings[style] = reading
    source = readings["source"]
    assert source["rope_parameters"]["rope_theta"] == 1e6
    assert source["dtype"] == "bfloat16"
    assert source.get("num_local_experts") == raw.get("num_experts")
    for style, reading in readings.items():
        assert reading == source, style


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_config_that_transformers_5_saved_gets_every_key_that_4_looks_for(tmp_path: Path, kind: str) -> None:
    from transformers import Qwen3Config as Dense
    from transformers import Qwen3MoeConfig as Moe

    rope = {"rope_theta": 5e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    if kind == "dense":
        Dense(rope_parameters=rope, dtype="bfloat16").save_pretrained(tmp_path)
    else:
        Moe(rope_parameters=rope, dtype="bfloat16", head_dim=64, num_experts=160).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    v4, both = (json.loads(render_config(config, style=style)) for style in ("v4", "both"))  # type: ignore[arg-type]
    for rendered in (v4, both):
        assert rendered["rope_theta"] == 5e6
        assert rendered["rope_scaling"] == {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        assert rendered["torch_dtype"] == "bfloat16"
        assert rendered.get("num_experts") == (160 if kind == "moe" else None)
    assert not {*V5, "num_local_experts"} & set(v4)
    assert {*V5} <= set(both)
    assert both["rope_parameters"] == config.raw["rope_parameters"]


# -- what does not change ----------------------------------------------------------------------------------------------


@torch_free
@pytest.mark.parametrize(
    "text",
    [
        hub_text(dense()),
        json.dumps(moe()).encode(),
        json.dumps(dense(), indent=4).encode() + b"\n\n",
        hub_text(dense()).replace(b"1e-06", b"0.000001").replace(b"1000000", b"1.0e6"),
        hub_text(dense(note="\u4e2d\u6587")),
        json.dumps(dense(note="\u4e2d\u6587"), indent="\t", ensure_ascii=False).encode(),
        hub_text(dense()).replace(b"\n", b"\r\n"),
    ],
    ids=["hub", "one-line", "four-spaces", "other-numbers", "escaped", "unescaped-tabs", "crlf"],
)
def test_an_unchanged_config_is_the_same_bytes(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    config = read_config(tmp_path)
    assert render_config(config) == text
    assert render_config(config, style="v4") == text
    assert render_config(config, dtype="BF16", tie=config.tie_word_embeddings, vocab_size=330) == text


@torch_free
@pytest.mark.parametrize("raw", [dense(), moe(), moe(rope_scaling=YARN)], ids=["dense", "moe", "yarn"])
def test_v4_to_v5_to_v4_is_the_same_bytes(raw: dict[str, Any]) -> None:
    text = hub_text(raw)
    v5 = render_config(config_of(text), style="v5")
    assert not {*V4, "num_experts"} & set(json.loads(v5))
    assert json.loads(v5)["rope_parameters"]["rope_theta"] == 1000000
    assert render_config(config_of(v5), style="v4") == text
    both = render_config(config_of(v5), style="both")
    assert render_config(config_of(text), style="both") == both
    assert render_config(config_of(both), style="v4") == text
    assert render_config(config_of(both), style="v5") == v5


@torch_free
def test_unknown_keys_keep_their_value_and_order() -> None:
    raw = {
        "zeta": {"b": 1, "a": [None, 2]},
        **dense(),
        "alpha": "x",
        "torch_dtype": "float16",
        "auto_map": {"AutoConfig": "x"},
    }
    rendered = json.loads(render_config(config_of(hub_text(raw)), style="v5"))
    kept = [key for key in raw if key not in V4]
    assert [key for key in rendered if key not in V5] == kept
    assert all(rendered[key] == raw[key] for key in kept)
    assert list(rendered["zeta"]) == ["b", "a"]


@torch_free
def test_new_keys_take_the_place_of_their_like_in_a_file_that_is_not_sorted() -> None:
    raw = {"torch_dtype": "bfloat16", **{k: v for k, v in moe().items() if k != "torch_dtype"}}
    keys = list(json.loads(render_config(config_of(hub_text(raw)), style="v5")))
    old = list(raw)
    assert keys[0] == "dtype"
    assert keys.index("num_local_experts") == old.index("num_experts")
    assert keys.index("rope_parameters") == old.index("rope_scaling")


@torch_free
def test_new_keys_are_sorted_into_a_file_that_is_sorted() -> None:
    for style in ("v5", "both"):
        keys = list(json.loads(render_config(config_of(hub_text(moe())), style=style)))  # type: ignore[arg-type]
        assert keys == sorted(keys)


@torch_free
@pytest.mark.parametrize(
    ("text", "start", "end"),
    [
        (json.dumps(dense(), indent=4).encode(), b'{\n    "arch', b"}"),
        (json.dumps(dense()).encode() + b"\n", b'{"arch', b"}\n"),
        (json.dumps(dense(note="\u4e2d"), indent=2, ensure_ascii=False).encode(), b'{\n  "arch', b"}"),
    ],
    ids=["four-spaces", "one-line", "unescaped"],
)
def test_a_changed_config_keeps_the_form_of_the_file(text: bytes, start: bytes, end: bytes) -> None:
    rendered = render_config(config_of(text), tie=False)
    assert rendered == text.replace(b'"tie_word_embeddings": true', b'"tie_word_embeddings": false')
    assert rendered.startswith(start)
    assert rendered.endswith(end)


@torch_free
def test_a_lone_surrogate_in_an_unknown_key_survives() -> None:
    text = hub_text(dense(note="\u4e2d")).replace(b'"\\u4e2d"', '"\u4e2d\\ud800"'.encode())
    assert json.loads(render_config(config_of(text), tie=False))["note"] == "\u4e2d\ud800"


# -- what is asked for -------------------------------------------------------------------------------------------------


@torch_free
@pytest.mark.parametrize("style", ["source", "v4", "v5", "both"])
@pytest.mark.parametrize("source", ["v4", "v5", "both"])
def test_a_new_dtype_is_written_in_every_key_that_tells_it(source: Any, style: Any) -> None:
    config = config_of(render_config(config_of(hub_text(dense())), style=source))
    rendered = json.loads(render_config(config, style=style, dtype="F32"))
    expected = {"v4": {"torch_dtype"}, "v5": {"dtype"}, "both": {"torch_dtype", "dtype"}}
    keys = expected[source if style == "source" else style]
    assert {key: rendered[key] for key in ("torch_dtype", "dtype") if key in rendered} == dict.fromkeys(keys, "float32")


@torch_free
@pytest.mark.parametrize(("style", "key"), [("source", "torch_dtype"), ("v5", "dtype")])
def test_a_dtype_is_added_to_a_file_that_had_none(style: Any, key: str) -> None:
    raw = {name: value for name, value in dense().items() if name != "torch_dtype"}
    assert json.loads(render_config(config_of(hub_text(raw)), style=style, dtype="F16"))[key] == "float16"


@torch_free
def test_tie_and_vocabulary_change_alone() -> None:
    text = hub_text(dense())
    assert json.loads(render_config(config_of(text), tie=False)) == dense(tie_word_embeddings=False)
    assert json.loads(render_config(config_of(text), vocab_size=384)) == dense(vocab_size=384)


@torch_free
def test_dequantised_weights_lose_their_quantisation_mark() -> None:
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
    config = config_of(hub_text(dense(quantization_config=fp8)))
    assert config.quantization is not None
    assert json.loads(render_config(config, dtype="F32", drop_quantization=True)) == dense(torch_dtype="float32")
    assert json.loads(render_config(config, dtype="F32"))["quantization_config"] == fp8


# -- odd spellings -----------------------------------------------------------------------------------------------------


@torch_free
@pytest.mark.parametrize(
    "raw",
    [
        # theta outside of rope_parameters, as hand-edited v5 files have it
        {**{k: v for k, v in moe().items() if k != "rope_scaling"}, "rope_parameters": {"rope_type": "default"}},
        {**moe(rope_scaling={**YARN, "rope_theta": 1e6})},
        {**{k: v for k, v in moe().items() if k != "rope_theta"}, "rope_scaling": {**YARN, "rope_theta": 1e6}},
        {**{k: v for k, v in moe().items() if k != "num_experts"}, "num_local_experts": 5},
        {**moe(num_experts=None), "num_local_experts": 5},
        {**moe(rope_scaling={"type": "yarn", "factor": 4.0, "rope_type": None})},
        {**moe(rope_scaling={"type": "default"})},
    ],
    ids=["theta-outside", "theta-twice", "theta-in-scaling", "v5-count", "null-count", "null-type", "default-type"],
)
def test_odd_spellings_come_out_complete_in_every_style(raw: dict[str, Any]) -> None:
    config = config_of(hub_text(raw))
    for style in ("v4", "v5", "both"):
        rendered = json.loads(render_config(config, style=style))  # type: ignore[arg-type]
        back = parse_config(rendered, style)
        assert compare_maths(config, back) == []
        assert (back.geometry, back.dtype, back.style) == (config.geometry, config.dtype, style)
        if style != "v4":
            assert rendered["rope_parameters"]["rope_theta"] == 1e6
            assert rendered["num_local_experts"] == 5
        if style != "v5":
            assert rendered["rope_theta"] == 1e6
            assert rendered["num_experts"] == 5


# -- the law -----------------------------------------------------------------------------------------------------------

SCALINGS = st.sampled_from(
    [
        None,
        YARN,
        {"rope_type": "yarn", "factor": 2.5},
        {"type": "linear", "factor": 2},
        {"rope_type": "dynamic", "factor": 3.0},
        {"rope_type": "default"},
    ]
)
STYLES: Any = st.sampled_from(["v4", "v5", "both"])


@torch_free
@settings(max_examples=150, deadline=None)
@given(
    is_moe=st.booleans(),
    theta=st.sampled_from([1000000, 1e6, 5e6, 10000.5]),
    scaling=SCALINGS,
    dtype=st.sampled_from([None, "bfloat16", "float32", "torch.float16"]),
    extra=st.dictionaries(st.text(max_size=3), st.integers() | st.none() | st.text(max_size=3), max_size=3),
    order=st.randoms(use_true_random=False),
    path=st.lists(STYLES, min_size=1, max_size=4),
)
def test_no_path_through_the_styles_changes_what_is_computed(
    is_moe: bool, theta: float, scaling: Any, dtype: Any, extra: dict[str, Any], order: Any, path: list[Any]
) -> None:
    raw = {**extra, **(moe if is_moe else dense)(rope_theta=theta, rope_scaling=scaling, torch_dtype=dtype)}
    keys = list(raw)
    order.shuffle(keys)
    config = config_of(hub_text({key: raw[key] for key in keys}))
    last = config
    for style in path:
        last = config_of(render_config(last, style=style))
        assert last.style == style
    assert compare_maths(config, last) == []
    assert (last.geometry, last.dtype, last.tie_word_embeddings) == (
        config.geometry,
        config.dtype,
        config.tie_word_embeddings,
    )
    assert {key: last.raw[key] for key in extra if key in last.raw} == extra
    assert render_config(last, style=path[-1]) == last.source
