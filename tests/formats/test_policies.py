"""What is not a bijection is decided by name: tied heads, vocabulary rows, whose config, flavors, derived buffers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from qwen3conv.converters.config_derive import parse_setting
from qwen3conv.converters.detection import open_checkpoint
from qwen3conv.converters.errors import ConversionError, MappingError, PolicyError, SourceError
from qwen3conv.converters.inspection import inspect
from qwen3conv.converters.policies import Choices, settle
from qwen3conv.converters.preparation import prepare
from qwen3conv.converters.verification import diff
from qwen3conv.tools.generate import generate
from tests.conversions import convert, differing, fingerprint, load_dcp, policies
from tests.laws.tiny import content_of
from tests.models import read_tensors, saved_model, with_v4_keys

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Variant = Callable[[str], Path]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
WHOLE = ["hf", "hf-fused", "titan", "accelerate", "accelerate-per-expert", "titan-transformers"]
"""Formats of whole tensors that take any model as it is; per-rank ones have tests of their own."""


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Variant:
    return lambda name: saved_model(tmp_path_factory, name)


def load(folder: Path) -> Any:
    """transformers' model; it must want what is stored, and nothing else."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def with_config(source: Path, copy: Path, **changes: object) -> Path:
    """A copy whose config.json says something else; ``None`` takes a key away."""
    shutil.copytree(source, copy)
    config = {**config_of(copy), **changes}
    (copy / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return copy


def differences(a: Path, b: Path) -> list[str]:
    ours, theirs = content_of(a), content_of(b)
    return [file for file in sorted({*ours, *theirs}) if ours.get(file) != theirs.get(file)]


# --- the tied head ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["hf", "titan", "accelerate"])
@pytest.mark.parametrize(
    ("name", "choice", "stored"),
    [
        ("dense-tied", "keep", False),
        ("dense-tied", "drop", False),
        ("dense-tied", "write", True),
        ("dense-tied-head-stored", "keep", True),
        ("dense-tied-head-stored", "drop", False),
        ("dense-tied-head-stored", "write", True),
    ],
)
def test_the_head_is_stored_as_the_source_did_or_as_asked(
    name: str, choice: str, stored: bool, way: str, variant: Variant, room: Path
) -> None:
    source = variant(name)
    if way != "hf":
        convert(source, room / "between", way)
        source = room / "between"
    manifest = convert(source, room / "out", "hf", lm_head=choice)
    assert policies(manifest)["tied-head"]["written"] == stored
    tensors = read_tensors(room / "out")
    assert (HEAD in tensors) == stored
    assert not stored or torch.equal(tensors[HEAD], tensors[EMBEDDING])
    assert config_of(room / "out")["tie_word_embeddings"] is True
    model = load(room / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    # nothing but the head is at stake: these are the files of the variant that stores it so
    assert differences(room / "out", variant("dense-tied-head-stored" if stored else "dense-tied")) == []


def test_a_head_that_is_not_tied_cannot_be_dropped(variant: Variant, room: Path) -> None:
    for name in ("dense", "moe"):
        with pytest.raises(PolicyError, match="leaving it out would lose it"):
            convert(variant(name), room / "out", "hf", lm_head="drop")
    manifest = convert(variant("dense"), room / "out", "hf", lm_head="write")
    assert "tied-head" not in policies(manifest)


@pytest.mark.parametrize("to", WHOLE)
def test_a_head_that_differs_though_it_is_called_tied_is_refused(to: str, variant: Variant, room: Path) -> None:
    with pytest.raises(PolicyError) as refused:
        convert(variant("dense-tied-head-differs"), room / "out", to)
    assert "lm_head.weight and model.embed_tokens.weight differ from row 0 on" in str(refused.value)
    assert "--untie" in str(refused.value)
    assert list(room.iterdir()) == []
    report = inspect(variant("dense-tied-head-differs"))
    assert not report.complete
    assert "--untie" in report.problems[0]


@pytest.mark.parametrize("way", ["hf", "titan", "accelerate"])
def test_untie_keeps_both_and_says_so_in_the_config(way: str, variant: Variant, room: Path) -> None:
    source = variant("dense-tied-head-differs")
    manifest = convert(source, room / "first", way, untie=True)
    assert policies(manifest)["untie"]["row"] == 0
    convert(room / "first", room / "out", "hf")
    assert differing(read_tensors(room / "out"), read_tensors(source)) == []
    assert config_of(room / "out") == {**config_of(source), "tie_word_embeddings": False}
    model = load(room / "out")
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_the_first_row_in_which_the_heads_differ_is_named(variant: Variant, room: Path) -> None:
    source = shutil.copytree(variant("dense-tied-head-stored"), room / "source")
    tensors = load_file(source / "model.safetensors")
    tensors[HEAD][321, 47] += 1
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PolicyError, match="differ from row 321 on"):
        convert(source, room / "out", "titan")
    convert(source, room / "out", "titan", untie=True)
    assert differing({HEAD: load_dcp(room / "out")[HEAD]}, {HEAD: tensors[HEAD]}) == []


def test_untie_alone_changes_nothing_where_heads_are_equal(variant: Variant, room: Path) -> None:
    manifest = convert(variant("dense-tied-head-stored"), room / "out", "hf", untie=True)
    assert "untie" not in policies(manifest)
    assert differences(room / "out", variant("dense-tied-head-stored")) == []


def test_an_untied_model_without_its_head_is_incomplete(variant: Variant, room: Path) -> None:
    """transformers draws such a head at random."""
    source = with_config(variant("dense-tied"), room / "source", tie_word_embeddings=False)
    for to in ("hf", "titan"):
        with pytest.raises(MappingError, match=r"missing: lm_head\.weight"):
            convert(source, room / "out", to)
    assert not inspect(source).complete


# --- vocabulary rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["hf", "titan"])
@pytest.mark.parametrize("name", ["dense", "dense-tied", "dense-tied-head-stored", "moe-v4", "dense-sharded"])
def test_vocabulary_rows_are_added_as_zeros_and_taken_away_again(
    name: str, way: str, variant: Variant, room: Path
) -> None:
    source, more = variant(name), 384
    manifest = convert(source, room / "padded", way, vocab_rows=more)
    assert policies(manifest)["vocab-rows"]["from"] == 330
    convert(room / "padded", room / "as-hf", "hf")
    padded, plain = read_tensors(room / "as-hf"), read_tensors(source)
    for key, tensor in plain.items():
        if key in (HEAD, EMBEDDING):
            tensor = torch.cat([tensor, torch.zeros(more - 330, 48, dtype=tensor.dtype)])
        assert differing({key: padded[key]}, {key: tensor}) == []
    assert config_of(room / "as-hf") == {**config_of(source), "vocab_size": more}
    assert load(room / "as-hf").model.embed_tokens.weight.shape == (more, 48)
    assert fingerprint(room / "as-hf") == fingerprint(room / "padded") != fingerprint(source)
    convert(room / "as-hf", room / "back", "hf", vocab_rows=330)
    assert differences(room / "back", source) == []


def test_rows_that_are_not_zero_are_not_taken_away(variant: Variant, room: Path) -> None:
    with pytest.raises(PolicyError) as refused:
        convert(variant("dense"), room / "out", "hf", vocab_rows=320)
    assert "would drop row 329 of model.embed_tokens.weight, which is not zero" in str(refused.value)
    assert "loses nothing is 330" in str(refused.value)


@pytest.mark.parametrize(("tensor", "value"), [(EMBEDDING, 1e-30), (HEAD, 1e-30), (HEAD, float("nan"))])
def test_one_number_in_the_last_row_is_enough_to_keep_it(
    tensor: str, value: float, variant: Variant, room: Path
) -> None:
    convert(variant("dense"), room / "padded", "hf", vocab_rows=336)
    tensors = load_file(room / "padded" / "model.safetensors")
    tensors[tensor][333, 40] = value
    save_file(tensors, room / "padded" / "model.safetensors", metadata={"format": "pt"})
    (room / "padded" / "qwen3conv.json").unlink()
    with pytest.raises(PolicyError, match=rf"drop row 333 of {tensor}.*loses nothing is 334"):
        convert(room / "padded", room / "out", "hf", vocab_rows=330)
    convert(room / "padded", room / "out", "hf", vocab_rows=334)
    expected = {**tensors, EMBEDDING: tensors[EMBEDDING][:334], HEAD: tensors[HEAD][:334]}
    assert differing(read_tensors(room / "out"), expected) == []


def test_no_vocabulary_is_no_choice(variant: Variant, room: Path) -> None:
    for rows in (0, -5):
        with pytest.raises(PolicyError, match="expected at least 1"):
            convert(variant("dense"), room / "out", "hf", vocab_rows=rows)


# --- whose config -----------------------------------------------------------------------------------------------------


def without_config(source: Path, room: Path, to: str = "titan") -> Path:
    """A DCP of ``source`` that has nothing beside it."""
    convert(source, room / "bare", to)
    shutil.rmtree(room / "bare" / "hf_assets")
    (room / "bare" / "qwen3conv.json").unlink()
    return room / "bare"


@pytest.mark.parametrize("name", ["dense", "dense-tied-head-stored", "dense-sharded", "moe-v4", "moe-sharded"])
def test_like_brings_config_tokenizer_split_and_the_habit_of_the_head(name: str, variant: Variant, room: Path) -> None:
    bare = without_config(variant(name), room)
    manifest = convert(bare, room / "out", "hf", like=variant(name))
    assert "config-like" in policies(manifest)
    assert differences(room / "out", variant(name)) == []


def test_like_may_be_the_config_alone(variant: Variant, room: Path) -> None:
    bare = without_config(variant("dense"), room)
    convert(bare, room / "out", "hf", like=variant("dense") / "config.json")
    assert content_of(room / "out").keys() == {"config.json", "model.safetensors"}
    assert config_of(room / "out") == config_of(variant("dense"))


def test_a_like_of_another_size_is_refused_with_the_sizes(variant: Variant, room: Path) -> None:
    bare = without_config(variant("dense"), room)
    other = with_config(variant("dense"), room / "other", num_attention_heads=12, head_dim=8, intermediate_size=96)
    with pytest.raises(MappingError) as refused:
        convert(bare, room / "out", "hf", like=other)
    assert all(key in str(refused.value) for key in ("num_attention_heads", "head_dim", "intermediate_size"))


@pytest.mark.parametrize("chosen", ["source", "like"])
def test_two_configs_that_compute_different_things_need_a_choice(chosen: str, variant: Variant, room: Path) -> None:
    rope = {"rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}}
    other = with_config(variant("dense"), room / "other", **rope, max_position_embeddings=262144)
    convert(variant("dense"), room / "dcp", "titan")
    with pytest.raises(PolicyError) as refused:
        convert(room / "dcp", room / "out", "hf", like=other)
    message = str(refused.value)
    assert re.search(r"rope_theta: 1000000\S* in the source, 5000000\S* in ", message)
    assert "max_position_embeddings: 256 in the source, 262144 in " in message
    assert "--config-from source" in message
    manifest = convert(room / "dcp", room / "out", "hf", like=other, config_from=chosen)
    assert set(policies(manifest)["config-from"]["keys"]) == {"rope_theta", "max_position_embeddings"}
    assert config_of(room / "out") == config_of(variant("dense") if chosen == "source" else other)


def test_two_spellings_of_one_config_are_no_conflict(variant: Variant, room: Path) -> None:
    old = with_config(variant("dense"), room / "old")
    (old / "config.json").write_text(json.dumps(with_v4_keys(config_of(old), keep_v5=False)))
    convert(variant("dense"), room / "dcp", "titan")
    manifest = convert(room / "dcp", room / "out", "hf", like=old)
    assert "config-from" not in policies(manifest)


DENSE_SETTINGS = ("rope_theta=1e6", "rms_norm_eps=1e-6", "max_position_embeddings=256")
MOE_SETTINGS = (*DENSE_SETTINGS, "num_experts_per_tok=2", "norm_topk_prob=true")


@pytest.mark.parametrize(
    ("name", "settings"), [("dense", DENSE_SETTINGS), ("dense-tied", DENSE_SETTINGS), ("moe", MOE_SETTINGS)]
)
def test_a_config_is_derived_from_shapes_and_what_was_set(
    name: str, settings: tuple[str, ...], variant: Variant, room: Path
) -> None:
    bare = without_config(variant(name), room)
    convert(bare, room / "out", "hf", settings=dict(map(parse_setting, settings)))
    ours, theirs = AutoConfig.from_pretrained(room / "out"), AutoConfig.from_pretrained(variant(name))
    free = {
        "_name_or_path",
        "transformers_version",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "max_window_layers",
    }
    free |= {"intermediate_size", "shared_expert_intermediate_size"} if name == "moe" else set()
    mine, wanted = ({k: v for k, v in c.to_dict().items() if k not in free} for c in (ours, theirs))
    assert mine == wanted
    assert differing(load(room / "out").state_dict(), load(variant(name)).state_dict()) == []


@pytest.mark.parametrize(("name", "settings"), [("dense", DENSE_SETTINGS), ("moe", MOE_SETTINGS)])
def test_all_values_that_are_still_missing_are_listed(
    name: str, settings: tuple[str, ...], variant: Variant, room: Path
) -> None:
    bare = without_config(variant(name), room)
    for given in ((), settings[:1], settings[1:3]):
        with pytest.raises(PolicyError) as refused:
            convert(bare, room / "out", "hf", settings=dict(map(parse_setting, given)))
        asked = set(re.findall(r"--set (\w+)=", str(refused.value)))
        assert asked == {text.partition("=")[0] for text in settings if text not in given}


def test_settings_beside_a_config_are_refused(variant: Variant, room: Path) -> None:
    with pytest.raises(PolicyError, match="--set is for a checkpoint without config"):
        convert(variant("dense"), room / "out", "hf", settings={"rope_theta": 1e7})


def test_the_configs_dtype_follows_tensors_that_have_another(variant: Variant, room: Path) -> None:
    """As a Trainer's fp32 weights beside the bf16 model's config.json."""
    convert(variant("dense"), room / "dcp", "titan", dtype="F32")
    shutil.copy(variant("dense") / "config.json", room / "dcp" / "hf_assets")
    manifest = convert(room / "dcp", room / "out", "hf")
    assert "config-dtype" in policies(manifest)
    assert config_of(room / "out") == {**config_of(variant("dense")), "dtype": "float32"}
    assert load(room / "out").dtype == torch.float32


def test_a_tied_head_that_shares_its_bytes_is_measured_once(room: Path, variant: Variant) -> None:
    convert(variant("dense-tied"), room / "dcp", "titan")
    report = inspect(room / "dcp")
    assert report.bytes == 2 * report.parameters
    assert report.tensors == len(read_tensors(variant("dense-tied"))) + 1


# --- derived buffers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["hf", "titan"])
@pytest.mark.parametrize("name", ["dense", "moe"])
def test_rotary_buffers_are_left_out_and_named(name: str, to: str, variant: Variant, room: Path) -> None:
    source = variant(f"{name}-inv-freq")
    manifest = convert(source, room / "out", to)
    dropped = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(3)]
    assert sorted(policies(manifest)["drop-derived"]["tensors"]) == dropped
    assert set(read_tensors(source)) - set(read_tensors(variant(name))) == set(dropped)
    convert(room / "out", room / "back", "hf")
    assert differing(read_tensors(room / "back"), read_tensors(variant(name))) == []
    assert fingerprint(source) == fingerprint(variant(name))


# --- flavors ----------------------------------------------------------------------------------------------------------


def test_a_2507_model_does_not_pass_for_the_flavor_of_its_size(room: Path) -> None:
    """Same tensors, another theta and context: 18,867 tensors of Qwen3-30B-A3B-Instruct-2507, hollow."""
    source = generate(room / "model", "Qwen3-30B-A3B-Instruct-2507", sparse=True).folder
    plan = prepare(source, room / "dcp", "titan")
    traps = [policy for policy in plan.policies if policy.name == "flavor-trap"]
    assert all(trap.warning for trap in traps)
    text = " ".join(trap.summary for trap in traps)
    assert re.search(r"rope_theta is 10000000\S*, torchtitan's flavor 30B-A3B has 1000000\D", text)
    assert "max_position_embeddings is 262144, torchtitan's flavor 30B-A3B has 40960" in text


@pytest.mark.parametrize(("size", "fits"), [("Qwen3-4B", True), ("Qwen3-4B-Instruct-2507", False)])
def test_a_flavor_is_taken_where_it_computes_the_same(size: str, fits: bool, room: Path) -> None:
    source = generate(room / "model", size, sparse=True).folder
    assert fits != any("torchtitan's flavor 4B has 1000000" in trap for trap in inspect(source).traps)
    if fits:
        plan = prepare(source, room / "dcp", "titan", Choices(flavor="4B"))
        assert not any(policy.name == "flavor-trap" for policy in plan.policies)
    else:
        with pytest.raises(PolicyError, match=r"flavor 4B would compute something else; ") as caught:
            prepare(source, room / "dcp", "titan", Choices(flavor="4B"))
        lines = str(caught.value).splitlines()[1:]
        assert [line.split()[1] for line in lines] == ["rope_theta", "max_position_embeddings"]


def test_a_flavor_of_another_size_or_no_flavor_is_refused(variant: Variant, room: Path) -> None:
    with pytest.raises(PolicyError, match="hidden_size"):
        convert(variant("dense"), room / "out", "titan", flavor="0.6B")
    with pytest.raises(PolicyError, match=r"no Qwen3 flavor 'nope'; --flavor takes one of: debugmodel"):
        convert(variant("dense"), room / "out", "titan", flavor="nope")


# --- fingerprints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dense", "dense-tied", "dense-tied-head-stored", "moe", "moe-fp32", "dense-sharded"])
def test_the_fingerprint_is_the_same_in_every_format(name: str, variant: Variant, room: Path) -> None:
    own = fingerprint(variant(name))
    for to in WHOLE:
        manifest = convert(variant(name), room / to, to)
        assert manifest.fingerprint == own == fingerprint(room / to)
        assert diff(settle(open_checkpoint(variant(name))), settle(open_checkpoint(room / to))).equal
    bare = without_config(variant(name), room)
    assert fingerprint(bare) == own  # nobody says that it is tied


def test_a_stored_tied_head_changes_no_fingerprint(variant: Variant, room: Path) -> None:
    assert fingerprint(variant("dense-tied")) == fingerprint(variant("dense-tied-head-stored"))
    untied = with_config(variant("dense-tied-head-stored"), room / "untied", tie_word_embeddings=False)
    assert fingerprint(untied) == fingerprint(variant("dense-tied"))
    convert(variant("dense-tied-head-differs"), room / "different", "hf", untie=True)
    assert fingerprint(room / "different") != fingerprint(variant("dense-tied"))


def test_one_flipped_bit_anywhere_changes_the_fingerprint(variant: Variant, room: Path) -> None:
    convert(variant("moe"), room / "dcp", "titan")
    before = fingerprint(room / "dcp")
    for name in ("tok_embeddings.weight", "layers.2.moe.routed_experts.inner_experts.w2_EDF"):
        (chunk,) = open_checkpoint(room / "dcp").tensors[name].chunks
        with (room / "dcp" / chunk.file).open("r+b") as file:
            file.seek(chunk.offset + 77)
            byte = file.read(1)[0] ^ 1
            file.seek(chunk.offset + 77)
            file.write(bytes([byte]))
        after = fingerprint(room / "dcp")
        assert after != before
        before = after


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("model.layers.1.mlp.experts.3.up_proj.weight"),
        lambda tensors: tensors.update({"model.layers.9.mlp.gate.weight": torch.ones(5, 48)}),
        lambda tensors: tensors.update({"model.layers.1.mlp.experts.3.up_proj.weight": torch.ones(25, 48).bfloat16()}),
        lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(96)}),
    ],
    ids=["missing", "a layer too many", "shape", "a bias"],
)
def test_what_does_not_make_up_the_model_has_no_fingerprint(
    change: Callable[[dict[str, torch.Tensor]], object], variant: Variant, room: Path
) -> None:
    source = shutil.copytree(variant("moe"), room / "source")
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConversionError) as refused:
        fingerprint(source)
    assert isinstance(refused.value, MappingError | SourceError)
    assert re.search(r"layers\.[019]\.|layer [019]", str(refused.value))
