"""Hugging Face folders that came out of a conversion, judged by transformers and by the files they were made from.

Logits, measured with transformers 5.24 and torch 2.13 in fp32 on the CPU: 0.0 apart from the source model's in every
case here, dense and MoE. Equal weights in one implementation leave no room for a tolerance, so none is asked for;
``test_titan_judges`` compares implementations.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.conversions import convert, differing
from tests.laws.tiny import content_of
from tests.models import read_tensors, saved_model

Variant = Callable[[str], Path]
LOGITS_TOLERANCE = 0.0

# What is converted, and the ways that lead back to Hugging Face.
ROUTES = [
    *((variant, route) for variant in ("dense", "dense-tied", "moe") for route in ("titan hf", "accelerate hf")),
    ("dense", "hf"),
    ("dense-fp32", "titan hf"),
    ("dense-v4", "titan hf"),
    ("dense-sharded", "titan hf"),
    ("dense-tied-head-stored", "titan hf"),
    ("dense-tied-sharded-head-stored", "accelerate-per-expert hf"),
    ("dense-both-styles", "titan hf-fused"),
    ("dense-inv-freq", "titan hf"),
    ("moe", "titan hf-fused"),
    ("moe-fused", "hf"),
    ("moe-fused", "titan hf"),
    ("moe-v4", "hf-fused"),
    ("moe-sharded", "titan-transformers hf"),
    ("moe-both-styles", "titan hf"),
    ("moe-fp32", "titan hf"),
]
HARMLESS = [variant for variant, _ in ROUTES if not variant.endswith("inv-freq")]
"""Variants of which a way there and back leaves nothing out."""


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Variant:
    return lambda name: saved_model(tmp_path_factory, name)


def along(source: Path, route: str, room: Path) -> Path:
    """The end of a chain of conversions."""
    for step, to in enumerate(route.split()):
        convert(source, room / f"{step}-{to}", to)
        source = room / f"{step}-{to}"
    return source


def load(folder: Path, dtype: Any = "auto") -> Any:
    """The model that transformers makes of ``folder``; it must find every tensor it wants, and want every one."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert {key: list(value) for key, value in info.items()} == {
        "missing_keys": [],
        "unexpected_keys": [],
        "mismatched_keys": [],
        "error_msgs": [],
    }
    return model


@cache
def source_model(folder: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """State dict as stored, and fp32 logits, of a source that transformers saved itself. Loaded without our checks."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model.state_dict(), logits_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def logits_of(model: Any) -> torch.Tensor:
    ids = torch.arange(2 * 24).reshape(2, 24) * 7 % model.config.vocab_size
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids).logits
    assert logits.std() > 0.05  # a dead model agrees with anything
    return logits


@pytest.mark.parametrize(("name", "route"), ROUTES)
def test_transformers_finds_every_key_every_bit_and_the_same_logits(
    name: str, route: str, variant: Variant, room: Path
) -> None:
    state, logits = source_model(variant(name))
    out = along(variant(name), route, room)
    assert differing(load(out).state_dict(), state) == []
    gap = (logits_of(load(out, torch.float32)) - logits).abs().max().item()
    assert gap <= LOGITS_TOLERANCE


@pytest.mark.parametrize("name", ["dense", "dense-tied", "moe"])
def test_fused_output_has_the_keys_of_the_model_in_memory(name: str, variant: Variant, room: Path) -> None:
    convert(variant(name), room / "out", "hf-fused")
    in_memory = load(variant(name)).state_dict()
    if name == "dense-tied":
        del in_memory["lm_head.weight"]  # the same tensor as the embeddings, which are saved once
    assert differing(read_tensors(room / "out"), in_memory) == []


@pytest.mark.parametrize("name", ["dense", "dense-tied", "moe"])
def test_plain_output_has_the_keys_that_transformers_saves(name: str, variant: Variant, room: Path) -> None:
    along(variant(name), "hf-fused hf", room).rename(room / "out")
    load(variant(name)).save_pretrained(room / "saved")
    assert differing(read_tensors(room / "out"), read_tensors(room / "saved")) == []


@pytest.mark.parametrize("name", sorted({*HARMLESS} - {"moe-fused"}))
def test_to_torchtitan_and_back_gives_every_file_back_byte_for_byte(name: str, variant: Variant, room: Path) -> None:
    source = content_of(variant(name))
    assert {"config.json", "generation_config.json", "tokenizer.json", "vocab.json", "LICENSE"} <= source.keys()
    assert "model.safetensors" in source or "model.safetensors.index.json" in source
    back = content_of(along(variant(name), "titan hf", room))
    assert [file for file in sorted({*source, *back}) if source.get(file) != back.get(file)] == []


@pytest.mark.parametrize(("name", "to", "like"), [("moe", "hf-fused", "moe-fused"), ("moe-fused", "hf", "moe")])
@pytest.mark.parametrize("way", ["", "titan "])
def test_both_forms_of_experts_are_the_files_that_transformers_writes(
    name: str, to: str, like: str, way: str, variant: Variant, room: Path
) -> None:
    """``save_pretrained`` with and without ``save_original_format`` is the judge, byte for byte."""
    ours, theirs = content_of(along(variant(name), way + to, room)), content_of(variant(like))
    assert [file for file in sorted({*ours, *theirs}) if ours.get(file) != theirs.get(file)] == []


def test_a_sharded_output_has_the_index_of_the_files_that_are_there(variant: Variant, room: Path) -> None:
    manifest = convert(variant("moe"), room / "out", "hf", shard_bytes=60_000)
    index = json.loads((room / "out" / "model.safetensors.index.json").read_text())
    stored = {path.name: load_file(path) for path in (room / "out").glob("*.safetensors")}
    assert len(stored) > 3
    assert index["weight_map"] == {name: file for file, tensors in stored.items() for name in tensors}
    assert list(index["weight_map"]) == sorted(index["weight_map"])
    every = [tensor for tensors in stored.values() for tensor in tensors.values()]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in every)
    assert len(manifest.tensors) == len(every)
    for path in (room / "out").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
    assert differing(load(room / "out").state_dict(), source_model(variant("moe"))[0]) == []


def test_torchtitan_gets_an_index_of_the_names_it_exports_or_none(variant: Variant, room: Path) -> None:
    # Its Hugging Face export looks every name up in the index (0.3.0, components/checkpointer/dcp.py): a KeyError at
    # the end of a training run for one of fused experts.
    for to in ("hf", "hf-fused"):
        convert(variant("moe"), room / to, to, shard_bytes=60_000)
        assert (room / to / "model.safetensors.index.json").is_file()
        convert(room / to, room / f"{to}-dcp", "titan")
        convert(room / f"{to}-dcp", room / f"{to}-back", to)
        assert differing(read_tensors(room / f"{to}-back"), read_tensors(room / to)) == []
    index = "hf_assets/model.safetensors.index.json"
    assert (room / "hf-dcp" / index).read_bytes() == (room / "hf" / "model.safetensors.index.json").read_bytes()
    assert not (room / "hf-fused-dcp" / index).exists()


def test_tokenizer_and_generation_settings_come_along(variant: Variant, room: Path) -> None:
    out = along(variant("dense"), "titan hf", room)
    chat = [{"role": "user", "content": "bird and stone"}]
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (out, variant("dense")))
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)
    assert ours("wind, rain")["input_ids"] == theirs("wind, rain")["input_ids"]
    assert GenerationConfig.from_pretrained(out).eos_token_id == [2, 0]


@pytest.mark.parametrize("style", ["v4", "v5", "both"])
@pytest.mark.parametrize("name", ["dense", "moe", "moe-v4"])
def test_every_config_style_is_the_same_model_to_transformers(
    name: str, style: str, variant: Variant, room: Path
) -> None:
    convert(variant(name), room / "out", "hf", config_style=style)
    ours, theirs = AutoConfig.from_pretrained(room / "out"), AutoConfig.from_pretrained(variant(name))
    left_out = ("_name_or_path", "transformers_version")
    mine, wanted = ({k: v for k, v in c.to_dict().items() if k not in left_out} for c in (ours, theirs))
    assert mine == wanted
    assert ours.rope_parameters["rope_theta"] == 1e6
    raw = json.loads((room / "out" / "config.json").read_text())
    assert ("rope_theta" in raw, "rope_parameters" in raw) == (style != "v5", style != "v4")
    assert torch.equal(logits_of(load(room / "out", torch.float32)), source_model(variant(name))[1])
