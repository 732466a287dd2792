"""A merged adapter is what PEFT merges, within one rounding; PEFT's and transformers' own models are the judges."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file

from qwen3conv.converters.conversion import carry_out, prepare
from qwen3conv.converters.detection import open_checkpoint
from qwen3conv.converters.errors import MappingError, PolicyError, SourceError
from qwen3conv.converters.lora_config import compile_pattern, read_adapter_config
from qwen3conv.converters.policies import Choices, settle
from qwen3conv.converters.verification import verify
from tests.adapters import (
    ATTENTION,
    DEFAULTS,
    MLP,
    fill,
    load,
    magnitudes,
    merge_with_peft,
    modules_of,
    quiet,
    save_with_peft,
    with_adapter,
)
from tests.conversions import convert, differing, fingerprint, policies
from tests.models import MOE, VARIANTS, make_fp8, make_moe, once, read_tensors, saved_model

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("dense", {"target_modules": ATTENTION}),
    "every matrix": ("dense", {"target_modules": [*ATTENTION, *MLP, "lm_head", "embed_tokens"]}),
    "rslora": ("dense", {"target_modules": [*ATTENTION, *MLP], "use_rslora": True, "r": 5}),
    "patterns": (
        "dense",
        {
            "target_modules": [*ATTENTION, *MLP],
            "rank_pattern": {"q_proj": 3, r"layers\.[12]\.mlp\.(up|down)_proj": 7, "^model.layers.0.mlp.up_proj": 2},
            "alpha_pattern": {r".*\.1\..*_proj": 20, "k_proj": 0.5, "down_proj": 11},
        },
    ),
    "patterns and rslora": (
        "dense",
        {
            "target_modules": ATTENTION,
            "rank_pattern": {"v_proj": 9},
            "alpha_pattern": {"o_proj": 1},
            "use_rslora": True,
        },
    ),
    "some layers": ("dense", {"target_modules": ATTENTION, "layers_to_transform": [0, 2]}),
    "one layer": ("dense", {"target_modules": ATTENTION, "layers_to_transform": 0}),
    "one module": ("dense", {"target_modules": ["model.layers.1.mlp.up_proj", "layers.2.self_attn.q_proj"]}),
    "excluded": ("dense", {"target_modules": ATTENTION, "exclude_modules": ["model.layers.1.self_attn.k_proj"]}),
    "a regular expression": ("dense", {"target_modules": r".*\.(0|2)\.self_attn\.[qv]_proj"}),
    "all linear": ("dense", {"target_modules": "all-linear"}),
    "parameters": (
        "dense",
        {
            "target_modules": [],
            "target_parameters": ["q_proj.weight", "embed_tokens.weight"],
            "rank_pattern": {"q_proj": 7, "q_proj.weight": 2},
            "alpha_pattern": {"embed_tokens.weight": 3},
        },
    ),
    "fan_in_fan_out": ("dense", {"target_modules": ATTENTION, "fan_in_fan_out": True}),
    "rank one": ("dense", {"target_modules": ["lm_head", "embed_tokens", "o_proj"], "r": 1}),
    "no change": ("dense", {"target_modules": ["q_proj"], "lora_alpha": 0}),
    "experts by their old names": ("moe", {"target_modules": [*ATTENTION, *MLP, "gate"]}),
    "experts, rslora": ("moe", {"target_modules": MLP, "use_rslora": True}),
    "experts as parameters": (
        "moe",
        {
            "target_modules": ["q_proj"],
            "target_parameters": EXPERTS,
            "rank_pattern": {"experts.down_proj": 3, r".*\.1\.mlp\.experts\.gate_up_proj": 6},
            "alpha_pattern": {"gate_up_proj": 3},
        },
    ),
    "gate and up of experts alone": ("moe", {"target_modules": [], "target_parameters": EXPERTS[:1]}),
    "down of experts alone": ("moe", {"target_modules": ["down_proj"]}),
    "router as a parameter": ("moe", {"target_modules": ["k_proj"], "target_parameters": ["mlp.gate.weight"]}),
    "all linear experts": ("moe", {"target_modules": "all-linear"}),
    "one expert": ("one-expert", {"target_modules": MLP}),
}
"""Base and ``LoraConfig`` by name."""

BASES: dict[str, Callable[[Path], object]] = {
    "dense": VARIANTS["dense-fp32"],
    "moe": VARIANTS["moe-fp32"],
    "one-expert": lambda folder: make_moe(folder, sizes=replace(MOE, experts=1, top_k=1), dtype="float32"),
}

Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """The float32 base of a case, and its adapter; each made once."""

    def made(case: str) -> Pair:
        kind, config = CASES[case]
        base = once(tmp_path_factory, f"lora/{kind}", BASES[kind])
        place = f"lora/adapter-{case.replace(' ', '-')}"
        return base, once(tmp_path_factory, place, lambda folder: save_with_peft(base, folder, **config))

    return made


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return lambda variant: saved_model(tmp_path_factory, variant)


def assert_close(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], scale: dict[str, torch.Tensor]
) -> None:
    """Two merges in float32 differ by roundings only: in units of the last place of ``|W| + scale * |B| @ |A|``, which
    is where the terms of a sum of products are rounded, by at most one for 995 of 1000 elements, and by 4 at most.

    Measured over all cases here: at most 3; by more than one in 0.15 % of the elements; and at most 2 units of the last
    place of a tensor's largest weight. A module of rank one is equal bit for bit.
    """
    assert ours.keys() == theirs.keys() == scale.keys()
    for name in ours:
        step = torch.from_numpy(np.spacing(scale[name].float().numpy())).double()
        error = (ours[name].double() - theirs[name].double()).abs() / step
        assert error.max() <= 4, name
        assert (error > 1).double().mean() <= 0.005, name


# --- float32: PEFT's merge, within one rounding -----------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_a_float32_merge_is_pefts_within_one_rounding(case: str, pair: Callable[[str], Pair], room: Path) -> None:
    base, adapter = pair(case)
    convert(base, room / "out", "hf", adapter=adapter)
    before, ours = read_tensors(base), read_tensors(room / "out")
    theirs = merge_with_peft(base, adapter, torch.float32)
    assert_close(ours, theirs, magnitudes(base, adapter))
    touched = {name for name in before if not torch.equal(before[name], theirs[name])}
    assert {name for name in before if not torch.equal(before[name], ours[name])} == touched
    assert bool(touched) == (case != "no change")
    assert (
        differing({n: t for n, t in ours.items() if n not in touched}, {n: before[n] for n in before.keys() - touched})
        == []
    )


@pytest.mark.parametrize("case", ["every matrix", "experts as parameters"])
def test_the_merged_model_computes_what_base_and_adapter_compute(
    case: str, pair: Callable[[str], Pair], room: Path
) -> None:
    """The adapter beside its base, not merged by anybody, is the judge: transformers loads ours."""
    base, adapter = pair(case)
    convert(base, room / "out", "hf", adapter=adapter)
    tokens = torch.arange(3, 43).reshape(2, 20)
    with torch.no_grad():
        merged = load(room / "out", torch.float32)(tokens).logits
        apart = with_adapter(base, adapter, torch.float32)(tokens).logits
        without = load(base, torch.float32)(tokens).logits
    assert (merged - apart).abs().max() < 2e-5
    assert (without - apart).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", ["every matrix", "experts as parameters"])
def test_an_adapter_of_16_bits_is_widened_exactly(
    case: str, dtype: str, pair: Callable[[str], Pair], room: Path
) -> None:
    base, adapter = pair(case)
    shutil.copytree(adapter, room / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    narrow = {name: t if "base_layer.weight" in name else t.to(getattr(torch, dtype)) for name, t in tensors.items()}
    save_file(narrow, room / "adapter" / "adapter_model.safetensors")
    convert(base, room / "out", "hf", adapter=room / "adapter")
    theirs = merge_with_peft(base, room / "adapter", torch.float32)
    assert_close(read_tensors(room / "out"), theirs, magnitudes(base, room / "adapter"))


def test_adapters_of_transformers_4_with_one_module_per_expert(pair: Callable[[str], Pair], room: Path) -> None:
    """PEFT on plain linear layers, as transformers 4 had them, is the judge. In transformers 5 it fuses such adapters,
    which with rslora multiplies gate and up by the square root of two: rank and alpha double, and so alpha / sqrt(r)
    does not stay. Without rslora both ways agree."""
    base, _ = pair("experts as parameters")
    before = read_tensors(base)
    for use_rslora in (False, True):
        adapter = room / f"adapter-{use_rslora}"
        config = {**DEFAULTS, "task_type": None, "use_rslora": use_rslora}
        config |= {
            "rank_pattern": {r"experts\.3\.up_proj": 2},
            "alpha_pattern": {r".*\.1\.mlp\.experts\.0\.down_proj": 9},
        }
        if not use_rslora:
            del config["rank_pattern"], config["alpha_pattern"]
        with quiet():
            model = get_peft_model(modules_of(before), LoraConfig(**config, target_modules=[*ATTENTION, *MLP, "gate"]))
            fill(model, 0.05)
            model.save_pretrained(str(adapter))
            merged = model.merge_and_unload().state_dict()
        names = load_file(adapter / "adapter_model.safetensors").keys()
        assert "base_model.model.model.layers.1.mlp.experts.4.up_proj.lora_B.weight" in names
        convert(base, room / f"out-{use_rslora}", "hf", adapter=adapter)
        ours = read_tensors(room / f"out-{use_rslora}")
        scale = {name: before[name].abs() + (merged[name] - before[name]).abs() + 0.02 for name in before}
        assert_close(ours, merged, scale)
        assert sum(not torch.equal(ours[n], before[n]) for n in ours) == 3 * (4 + 1 + 3 * MOE.experts)
        if not use_rslora:
            assert_close(ours, merge_with_peft(base, adapter, torch.float32), scale)


def test_scales_and_ranks_are_those_that_peft_gives_a_module(room: Path) -> None:
    patterns = {
        "q_proj": 1,
        "^model.layers.0.self_attn.k_proj": 2,
        r".*\.gate_up_proj": 3,
        r"layers\.(0|1|11)\.mlp\.(?:gate|up)_proj": 4,
        r"model.layers.1\d.self_attn.v_proj": 5,
        "layers.[3-5]..*o_proj": 6,
        r"(self_attn.o_proj|mlp.down_proj)$": 7,
        r".*experts\.\d+\.up_proj": 8,
        "xperts.2.down_proj": 9,
        "k_proj|gate": 10,
        "lm_hea?d": 11,
        r"embed_toke.{2}": 12,
    }
    (room / "adapter_config.json").write_text(
        json.dumps(
            {"peft_type": "LORA", "r": 99, "lora_alpha": 99, "rank_pattern": patterns, "alpha_pattern": patterns}
        )
    )
    config = read_adapter_config(room)
    modules = [f"self_attn.{x}" for x in ATTENTION] + [f"mlp.{x}" for x in (*MLP, "gate")]
    modules += [f"mlp.experts.{x}" for x in ("gate_up_proj", "down_proj", "2.down_proj", "12.down_proj", "7.up_proj")]
    keys = [f"model.layers.{layer}.{module}" for layer in range(14) for module in modules]
    found = set()
    for key in [*keys, "lm_head", "model.embed_tokens", "model.layers.0.mlp.gate.weight"]:
        wanted = patterns.get(get_pattern_key(patterns.keys(), key), 99)
        assert config.scale_of(key) == (wanted, 1.0), key
        found.add(wanted)
    assert found == {*range(1, 13), 99} - {9}, "each pattern decides somewhere, but the one that begins inside a name"


@pytest.mark.parametrize(
    "pattern",
    [
        *("(a+)+b", "(a|b)*c", "a*b*c*d*e*", "(a|aa)(a|aa)(a|aa)(a|aa)(a|aa)", "a?b?c?d?e?", "a" * 301),
        *(r"(a)\1", "(?=a)b", "((a))", "(", "[z-a]", "a b", "*"),
    ],
)
def test_patterns_that_could_take_for_ever_or_mean_more_are_not_compiled(pattern: str) -> None:
    assert compile_pattern(pattern) is None


# --- bfloat16: rounded once -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "case"), [("dense", "every matrix"), ("moe", "experts by their old names")])
def test_a_bfloat16_base_is_added_to_in_float32_and_rounded_once(
    variant: str, case: str, base: Callable[[str], Path], room: Path
) -> None:
    """PEFT itself rounds what it adds to experts and embeddings to bfloat16 first, and then the sum."""
    save_with_peft(base(variant), room / "adapter", **CASES[case][1])
    convert(base(variant), room / "wide", "hf", adapter=room / "adapter", dtype="F32")
    manifest = convert(base(variant), room / "out", "hf", adapter=room / "adapter")
    ours, wide = read_tensors(room / "out"), read_tensors(room / "wide")
    assert differing(ours, wide, lambda tensor: tensor.bfloat16()) == []
    assert {tensor.dtype for tensor in ours.values()} == {torch.bfloat16}
    assert fingerprint(room / "wide", dtype="BF16") == manifest.fingerprint == fingerprint(room / "out")

    once_rounded = {n: t.bfloat16() for n, t in merge_with_peft(base(variant), room / "adapter", torch.float32).items()}
    total = sum(tensor.numel() for tensor in ours.values())
    assert unequal(ours, once_rounded) < total / 2000  # where PEFT's float32 and ours lie on two sides of a half
    theirs = merge_with_peft(base(variant), room / "adapter", torch.bfloat16)
    assert unequal(theirs, once_rounded) > total / 100


def unequal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> int:
    """Elements that are not equal."""
    return sum(int((a[name] != b[name]).sum()) for name in a)


# --- any format, any memory -------------------------------------------------------------------------------------------


def test_any_source_and_any_target_give_the_same_merged_model(pair: Callable[[str], Pair], room: Path) -> None:
    base, adapter = pair("experts as parameters")
    wanted = convert(base, room / "merged", "hf", adapter=adapter).fingerprint
    for source in ("hf-fused", "titan", "accelerate"):
        convert(base, room / source, source)
        assert convert(room / source, room / f"from-{source}", "hf", adapter=adapter).fingerprint == wanted
        assert differing(read_tensors(room / f"from-{source}"), read_tensors(room / "merged")) == []
    for target in ("hf-fused", "titan", "accelerate-per-expert"):
        assert convert(base, room / f"to-{target}", target, adapter=adapter).fingerprint == wanted
        settled = settle(open_checkpoint(room / f"to-{target}"))
        assert verify(settled, workers=1).problems == ()
        assert fingerprint(room / f"to-{target}") == wanted
    assert wanted != fingerprint(base)


def test_neither_memory_nor_workers_nor_digests_change_a_bit(pair: Callable[[str], Pair], room: Path) -> None:
    for case in ("every matrix", "experts as parameters"):
        base, adapter = pair(case)
        first = None
        for index, (workers, memory) in enumerate([(1, None), (2, None), (1, 6 << 16), (3, 18 << 16)]):
            conversion = prepare(base, room / f"{case}-{index}", "hf", Choices(adapter=adapter))
            carry_out(conversion, workers=workers, max_memory=memory, digests=index < 2)
            found = read_tensors(room / f"{case}-{index}")
            first = first or found
            assert differing(found, first) == []


def test_names_without_what_peft_puts_in_front_are_read_too(pair: Callable[[str], Pair], room: Path) -> None:
    """transformers leaves it out with ``save_peft_format=False``."""
    base, adapter = pair("experts as parameters")

    def shorten(held: dict[str, torch.Tensor]) -> None:
        for name in list(held):
            held[name.removeprefix("base_model.model.")] = held.pop(name)

    changed(adapter, room / "adapter", tensors=shorten)
    wanted = convert(base, room / "out", "hf", adapter=adapter).fingerprint
    assert convert(base, room / "again", "hf", adapter=room / "adapter").fingerprint == wanted


def test_a_tokenizer_beside_the_adapter_that_is_not_the_bases_is_told(pair: Callable[[str], Pair], room: Path) -> None:
    base, adapter = pair("attention")
    changed(adapter, room / "adapter")
    for name in ("tokenizer.json", "README.md"):
        shutil.copy(base / name, room / "adapter" / name)
    (room / "adapter" / "README.md").write_text("an adapter")
    convert(base, room / "dcp", "titan")
    for source in (base, room / "dcp"):
        conversion = prepare(source, room / "out", "hf", Choices(adapter=room / "adapter"))
        assert "lora-files" not in {policy.name for policy in conversion.policies}
    (room / "adapter" / "chat_template.jinja").write_text("{{ messages }}")
    conversion = prepare(base, room / "out", "hf", Choices(adapter=room / "adapter"))
    policy = next(policy for policy in conversion.policies if policy.name == "lora-files")
    assert (policy.values["files"], policy.warning) == (["chat_template.jinja"], True)


def test_plan_and_manifest_say_what_is_added(pair: Callable[[str], Pair], room: Path) -> None:
    base, adapter = pair("patterns")
    before = {path: path.read_bytes() for folder in (base, adapter) for path in folder.iterdir()}
    conversion = prepare(base, room / "out", "hf", Choices(adapter=adapter))
    policy = next(policy for policy in conversion.policies if policy.name == "merge-lora")
    manifest = carry_out(conversion, workers=1)
    assert policies(manifest)["merge-lora"] == policy.to_dict()
    assert (policy.values["modules"], policy.values["parameters"]) == (21, 21)
    assert policy.values["ranks"] == [2, 3, 4, 7]
    pairs = {(2, 6), (3, 6), (3, 20), (4, 0.5), (4, 6), (4, 11), (4, 20), (7, 6), (7, 11), (7, 20)}
    assert policy.values["scales"] == sorted(alpha / rank for rank, alpha in pairs)
    assert str(adapter) in policy.summary
    assert {path: path.read_bytes() for path in before} == before
    assert json.loads((room / "out" / "config.json").read_text()) == json.loads((base / "config.json").read_text())
    assert (room / "out" / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert not (room / "out" / "adapter_config.json").exists()


def test_a_base_of_another_name_is_noted_and_one_of_the_same_is_not(pair: Callable[[str], Pair], room: Path) -> None:
    base, adapter = pair("attention")
    for called, noted in ((None, False), ("", False), ("Qwen/Qwen3-8B", True), (f"/elsewhere/{base.name}/", False)):
        changed(adapter, room / "adapter", config={"base_model_name_or_path": called})
        manifest = convert(base, room / "out", "hf", adapter=room / "adapter")
        assert ("lora-base" in policies(manifest)) == noted
        shutil.rmtree(room / "out")
    conversion = prepare(
        base, room / "out", "hf", Choices(adapter=room / "adapter"), origin={"hub": "Qwen/Qwen3-8B", "commit": "0" * 40}
    )
    assert conversion.source.label["hub"] == "Qwen/Qwen3-8B"


def changed(
    adapter: Path,
    copy: Path,
    config: dict[str, Any] | None = None,
    tensors: Callable[[dict[str, torch.Tensor]], object] | None = None,
) -> Path:
    """A copy of an adapter with other config values or tensors."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(adapter, copy)
    path = copy / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **(config or {})}))
    if tensors is not None:
        held = load_file(copy / "adapter_model.safetensors")
        tensors(held)
        save_file(held, copy / "adapter_model.safetensors", metadata={"format": "pt"})
    return copy


# --- embeddings and head ----------------------------------------------------------------------------------------------

TIED: dict[str, dict[str, Any]] = {
    "head": {"target_modules": ["lm_head"]},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
}


@pytest.mark.parametrize(
    ("targets", "variant"),
    [("head", "dense-tied"), ("embeddings", "dense-tied-head-stored"), ("both", "dense-tied")],
)
def test_a_tied_head_parts_from_the_embeddings_only_when_asked_to(
    targets: str, variant: str, base: Callable[[str], Path], room: Path
) -> None:
    """PEFT's own merge adds what is meant for one of the two to both; what the unmerged model computes is the judge."""
    source = base(variant)
    save_with_peft(source, room / "adapter", std=0.2, **TIED[targets])
    with pytest.raises(PolicyError, match="--untie"):
        convert(source, room / "out", "hf", adapter=room / "adapter")
    assert not (room / "out").exists()
    manifest = convert(source, room / "out", "hf", adapter=room / "adapter", untie=True, dtype="F32")
    assert policies(manifest)["untie"]
    assert json.loads((room / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    before, after = read_tensors(source), read_tensors(room / "out")
    shared = before["model.embed_tokens.weight"].float()
    assert torch.equal(after["model.embed_tokens.weight"], shared) == (targets == "head")
    assert torch.equal(after["lm_head.weight"], shared) == (targets == "embeddings")
    tokens = torch.arange(3, 43).reshape(2, 20)
    with torch.no_grad():
        apart = with_adapter(source, room / "adapter", torch.float32)(tokens).logits
        merged = load(room / "out", torch.float32)(tokens).logits
    assert (merged - apart).abs().max() < 1e-4
    convert(source, room / "dcp", "titan", adapter=room / "adapter", untie=True, dtype="F32")
    assert fingerprint(room / "dcp") == manifest.fingerprint


@pytest.mark.parametrize("to", ["hf", "titan"])
def test_weights_that_were_trained_as_one_stay_one(to: str, base: Callable[[str], Path], room: Path) -> None:
    source = base("dense-tied")
    save_with_peft(source, room / "adapter", std=0.2, target_modules=["embed_tokens"], ensure_weight_tying=True)
    assert any("lm_head.lora_A" in name for name in load_file(room / "adapter" / "adapter_model.safetensors"))
    manifest = convert(source, room / "out", to, adapter=room / "adapter", dtype="F32")
    assert "untie" not in policies(manifest)
    assert policies(manifest)["merge-lora"]["parameters"] == 1
    tokens = torch.arange(3, 43).reshape(2, 20)
    convert(room / "out", room / "hf", "hf")
    merged = load(room / "hf", torch.float32)
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    with torch.no_grad():
        apart = with_adapter(source, room / "adapter", torch.float32)(tokens).logits
        assert (merged(tokens).logits - apart).abs().max() < 1e-4


def test_a_copy_of_the_embeddings_must_be_the_bases(pair: Callable[[str], Pair], room: Path) -> None:
    """PEFT saves the base's own values beside an adapter that targets them, and a resized vocabulary in their place."""
    base, adapter = pair("every matrix")
    name = "base_model.model.lm_head.base_layer.weight"
    assert name in load_file(adapter / "adapter_model.safetensors")
    changed(adapter, room / "adapter", tensors=lambda held: held[name][200].mul_(1.01))
    with pytest.raises(MappingError, match=r"values of its own for lm_head\.weight, the base's differ from row 200"):
        convert(base, room / "out", "hf", adapter=room / "adapter")
    changed(adapter, room / "adapter", tensors=lambda held: held.update({name: torch.ones(331, 48)}))
    with pytest.raises(MappingError, match=r"expected \[330, 48\], found \[331, 48\]"):
        convert(base, room / "out", "hf", adapter=room / "adapter")


def test_rows_of_the_vocabulary_are_not_changed_in_the_same_breath(pair: Callable[[str], Pair], room: Path) -> None:
    base, adapter = pair("every matrix")
    with pytest.raises(PolicyError, match="--vocab-rows"):
        convert(base, room / "out", "hf", adapter=adapter, vocab_rows=400)
    base, adapter = pair("attention")
    convert(base, room / "out", "hf", adapter=adapter, vocab_rows=400)
    assert len(read_tensors(room / "out")["model.embed_tokens.weight"]) == 400


# --- what PEFT saves and is not merged --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa"}, "'pissa', which takes a part out of the base"),
        ({"init_lora_weights": "olora"}, "'olora', which takes a part out of the base"),
    ],
)
def test_what_peft_saves_of_another_kind_is_refused_by_name(
    config: dict[str, Any], said: str, base: Callable[[str], Path], room: Path
) -> None:
    save_with_peft(base("dense"), room / "adapter", target_modules=["q_proj"], **config)
    with pytest.raises(SourceError) as refused:
        convert(base("dense"), room / "out", "hf", adapter=room / "adapter")
    assert said in str(refused.value)
    assert str(room / "adapter" / "adapter_config.json") in str(refused.value)
    assert not (room / "out").exists()


def test_initialisations_that_leave_the_base_alone_are_merged_as_peft_merges_them(
    base: Callable[[str], Path], room: Path
) -> None:
    for init in ("gaussian", "orthogonal", "mica"):
        config = {**DEFAULTS, "init_lora_weights": init, "target_modules": ["q_proj"]}
        with quiet():
            model = get_peft_model(load(base("dense-fp32"), torch.float32), LoraConfig(**config))
            fill(model, 0.05)
            model.save_pretrained(str(room / init))
        convert(base("dense-fp32"), room / f"out-{init}", "hf", adapter=room / init)
        theirs = merge_with_peft(base("dense-fp32"), room / init, torch.float32)
        assert_close(read_tensors(room / f"out-{init}"), theirs, magnitudes(base("dense-fp32"), room / init))


def test_another_method_of_peft_is_refused_by_name(base: Callable[[str], Path], room: Path) -> None:
    from peft import AdaLoraConfig, IA3Config, LoHaConfig, PrefixTuningConfig

    configs = {
        "ADALORA": AdaLoraConfig(target_modules=["q_proj"], total_step=10, task_type="CAUSAL_LM"),
        "IA3": IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM"),
        "LOHA": LoHaConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"),
        "PREFIX_TUNING": PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    }
    for name, config in configs.items():
        with quiet():
            get_peft_model(load(base("dense"), torch.float32), config).save_pretrained(str(room / name))
        with pytest.raises(SourceError, match=f"peft_type is '{name}'; only LORA"):
            convert(base("dense"), room / "out", "hf", adapter=room / name)


def test_a_quantised_base_is_refused_and_its_dequantised_copy_is_not(base: Callable[[str], Path], room: Path) -> None:
    make_fp8(room / "fp8")
    convert(room / "fp8", room / "hf", "hf")
    save_with_peft(room / "hf", room / "adapter", target_modules=["q_proj"])
    with pytest.raises(SourceError, match="quantised"):
        convert(room / "fp8", room / "out", "hf", adapter=room / "adapter")
    convert(room / "hf", room / "out", "hf", adapter=room / "adapter")


def test_pissa_converted_as_peft_advises_is_merged(base: Callable[[str], Path], room: Path) -> None:
    """What the message of the refusal says to do works, and gives the model that was trained."""
    source = base("dense-fp32")
    with quiet():
        config = LoraConfig(**{**DEFAULTS, "init_lora_weights": "pissa", "target_modules": ["q_proj"]})
        model = get_peft_model(load(source, torch.float32), config)
        model.peft_config["default"].init_lora_weights = True
        model.save_pretrained(str(room / "initial"))
        fill(model, 0.05)
        model.save_pretrained(str(room / "adapter"), path_initial_model_for_weight_conversion=str(room / "initial"))
        tokens = torch.arange(3, 43).reshape(2, 20)
        with torch.no_grad():
            trained = model(tokens).logits
    assert json.loads((room / "adapter" / "adapter_config.json").read_text())["r"] == 2 * DEFAULTS["r"]
    convert(source, room / "out", "hf", adapter=room / "adapter")
    with torch.no_grad():
        assert (load(room / "out", torch.float32)(tokens).logits - trained).abs().max() < 1e-4


def test_every_layers_scale_is_the_one_that_peft_computes(pair: Callable[[str], Pair]) -> None:
    for case in ("patterns", "patterns and rslora", "experts by their old names"):
        base, adapter = pair(case)
        config = read_adapter_config(adapter)
        model = with_adapter(base, adapter, torch.float32)
        count = 0
        for name, module in model.base_model.model.named_modules():
            if isinstance(module, LoraLayer):
                key = name.replace(".base_layer", "")
                if hasattr(module, "parameter_name"):
                    key += f".{module.parameter_name}"
                rank, factor = config.scale_of(key)
                assert rank == module.r["default"]
                assert factor == pytest.approx(module.scaling["default"], rel=1e-15)
                count += 1
        assert count == len(load_file(adapter / "adapter_model.safetensors")) // 2
