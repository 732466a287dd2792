"""Adapters that are broken, hostile, of another kind or for another base: one message, and not a byte out of place."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen3conv.converters import planning
from qwen3conv.converters.errors import ConversionError, DestinationError, MappingError, PolicyError, SourceError
from qwen3conv.converters.lora_config import compile_pattern
from qwen3conv.converters.parameters import logical_parameters
from qwen3conv.converters.policies import Choices
from qwen3conv.converters.stores.staging import JOURNAL, partial_path
from tests.adapters import PREFIX, factors, write_adapter
from tests.faults.conftest import DENSE, MOE, Run, convert, write_source
from tests.faults.kill_at import snapshot

pytestmark = pytest.mark.torch_free

Tensors = dict[str, Any]

SHAPES = {name: shape for name, shape in logical_parameters(DENSE, tied=False) if len(shape) == 2}
Q0, Q1, DOWN1 = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"
STACK = "model.layers.0.mlp.experts"


@pytest.fixture
def base(place: Path) -> Path:
    return write_source(place / "base", "titan", geometry=DENSE)


@pytest.fixture
def moe(place: Path) -> Path:
    return write_source(place / "moe", "titan", geometry=MOE)


def for_modules(*modules: str, rank: int = 2) -> Tensors:
    """Factors that fit the dense base."""
    made: Tensors = {}
    for module in modules:
        made |= factors(module, *SHAPES[f"{module}.weight"], rank)
    return made


def adapter(place: Path, tensors: Tensors | None = None, **config: Any) -> Path:
    """A sound adapter of rank 2 for both q_proj of the dense base, but for what is given."""
    chosen = {"r": 2, "target_modules": ["q_proj"], **config}
    return write_adapter(place / "adapter", for_modules(Q0, Q1) if tensors is None else tensors, **chosen)


def refused(
    place: Path, base: Path, added: Path, kind: type[ConversionError] = SourceError, to: str = "hf", **choices: Any
) -> str:
    """The message of a refusal that changes nothing in ``place``."""
    before = snapshot(place)
    with pytest.raises(kind) as caught:
        convert(base, place / "target", to, choices=Choices(adapter=added, **choices))
    assert snapshot(place) == before
    return str(caught.value)


def test_the_sound_adapter_of_these_tests_is_merged_and_leaves_both_sources_as_they_are(
    place: Path, base: Path
) -> None:
    added = adapter(place)
    before = snapshot(base), snapshot(added)
    manifest = convert(base, place / "target", "hf", choices=Choices(adapter=added))
    plain = convert(base, place / "plain", "hf")
    assert {n for n, r in manifest.tensors.items() if r != plain.tensors[n]} == {f"{Q0}.weight", f"{Q1}.weight"}
    assert (snapshot(base), snapshot(added)) == before


# -- places ------------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_no_adapter_is_refused_and_one_inside_is_pointed_at(place: Path, base: Path) -> None:
    assert "not there" in refused(place, base, place / "nothing")
    (place / "empty").mkdir()
    assert "no adapter_config.json: found nothing" in refused(place, base, place / "empty")
    assert "no adapter_config.json: found LICENSE, config.json" in refused(place, base, base)
    adapter(place / "empty").rename(place / "empty" / "checkpoint-500")
    assert f"{place / 'empty' / 'checkpoint-500'} has one" in refused(place, base, place / "empty")
    path = place / "empty" / "checkpoint-500" / "adapter_config.json"
    assert "is a file" in refused(place, base, path)


def test_pickled_or_absent_weights_are_refused(place: Path, base: Path) -> None:
    added = adapter(place)
    (added / "adapter_model.safetensors").rename(added / "adapter_model.bin")
    assert "found adapter_model.bin, which is not read" in refused(place, base, added)
    (added / "adapter_model.bin").unlink()
    assert "has no adapter_model.safetensors: found none" in refused(place, base, added)


def test_base_and_adapter_in_the_wrong_order_are_told_apart(place: Path, base: Path) -> None:
    assert "merge-lora BASE ADAPTER DST" in refused(place, adapter(place), base)


def test_the_output_is_neither_in_the_adapter_nor_around_it(place: Path, base: Path) -> None:
    added = adapter(place)
    before = snapshot(place)
    for target in (added, added / "merged"):
        with pytest.raises(DestinationError, match="inside each other"):
            convert(base, target, "hf", choices=Choices(adapter=added), overwrite=True)
    assert snapshot(place) == before


# -- config ------------------------------------------------------------------------------------------------------------

KINDS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only LORA"),
    ({"peft_type": None}, "peft_type is None; only LORA"),
    ({"use_dora": True}, "DoRA"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"bias": "lora_only"}, "bias is 'lora_only'"),
    ({"lora_bias": True}, "lora_bias"),
    ({"trainable_token_indices": [3]}, "trainable_token_indices"),
    ({"trainable_token_indices": {"embed_tokens": [3]}}, "trainable_token_indices"),
    ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    ({"use_qalora": True}, "QALoRA"),
    ({"loftq_config": {"loftq_bits": 4}}, "LoftQ"),
    ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
    ({"arrow_config": {"top_k": 2}}, "Arrow"),
    ({"kasa_config": {"beta": 1}}, "KaSA"),
    ({"monteclora_config": {"num_samples": 8}}, "MonteCLoRA"),
    ({"velora_config": {"scale": 1.0}}, "VeLoRA"),
    ({"megatron_config": {"a": 1}}, "Megatron"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
    ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq'"),
    ({"init_lora_weights": 1}, "init_lora_weights is 1"),
    ({"init_lora_weights": ["pissa"]}, "init_lora_weights is ['pissa']"),
    ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
    ({"use_tomorrows_method": True}, "'use_tomorrows_method' is True, and what that means is not known here"),
    ({"r": 0}, "'r' is 0, expected a rank"),
    ({"r": None}, "'r' is missing"),
    ({"r": "8"}, "'r' is '8', expected a rank"),
    ({"r": True}, "'r' is True, expected a rank"),
    ({"r": 10**30}, "expected a rank"),
    ({"lora_alpha": None}, "'lora_alpha' is missing"),
    ({"lora_alpha": "16"}, "'lora_alpha' is '16', expected a number"),
    ({"lora_alpha": 10**400}, "expected a number"),
    ({"use_rslora": "yes"}, "use_rslora is 'yes'"),
    ({"rank_pattern": [1]}, "rank_pattern is [1], expected an object"),
    ({"rank_pattern": {"q_proj": 0}}, "'q_proj' is 0, expected a rank"),
    ({"alpha_pattern": {"q_proj": None}}, "'q_proj' is missing"),
    ({"alpha_pattern": {"(a+)+$": 3}}, "alpha_pattern has '(a+)+$'"),
    ({"target_modules": [1]}, "target_modules is [1]"),
    ({"target_modules": {"q_proj": 1}}, "target_modules is"),
    ({"target_parameters": "q_proj.weight"}, "target_parameters is 'q_proj.weight'"),
    ({"base_model_name_or_path": 7}, "base_model_name_or_path is 7"),
]


@pytest.mark.parametrize(("config", "said"), KINDS, ids=[next(iter(c)) + f"-{i}" for i, (c, _) in enumerate(KINDS)])
def test_a_config_of_another_kind_or_with_impossible_values_is_refused_by_name(
    config: dict[str, Any], said: str, place: Path, base: Path
) -> None:
    text = refused(place, base, adapter(place, **config))
    assert said in text
    assert str(place / "adapter" / "adapter_config.json") in text


def test_all_reasons_are_listed_at_once(place: Path, base: Path) -> None:
    text = refused(place, base, adapter(place, use_dora=True, bias="all", modules_to_save=["lm_head"], r=0))
    assert all(word in text for word in ("DoRA", "bias is 'all'", "modules_to_save"))


def test_what_is_switched_off_or_only_of_interest_in_training_is_no_reason(place: Path, base: Path) -> None:
    off: dict[str, Any] = dict.fromkeys(("use_dora", "lora_bias", "use_qalora"), False)
    off |= dict.fromkeys(("modules_to_save", "layer_replication", "corda_config", "layers_pattern", "new_key"))
    off |= {"loftq_config": {}, "trainable_token_indices": [], "another_new_key": 0}
    off |= {"lora_dropout": 0.1, "inference_mode": True, "eva_config": {"rho": 2.0}, "init_lora_weights": True}
    off |= {"peft_version": "0.99", "auto_mapping": {"unsloth_fixed": True}, "revision": "main"}
    off |= {"qalora_group_size": 16, "megatron_core": "megatron.core", "fan_in_fan_out": True}
    added = adapter(place, **off)
    convert(base, place / "target", "hf", choices=Choices(adapter=added))


def test_hostile_json_is_refused(place: Path, base: Path) -> None:
    path = adapter(place) / "adapter_config.json"
    for text in ("", "[]", "{", '{"peft_type": "LORA", "peft_type": "LORA"}', "{" * 9999, '{"r": NaN}', "\x00"):
        path.write_text(text)
        assert str(path) in refused(place, base, place / "adapter")


def test_the_dearest_pattern_that_is_read_takes_no_time() -> None:
    """Four quantifiers over the longest name there is, which they do not fit."""
    pattern = compile_pattern(".*.*.*.*x")
    assert pattern is not None
    begun = time.monotonic()
    assert not any(pattern.match("model.layers.93.mlp.experts.127.gate_proj") for _ in range(10))
    assert time.monotonic() - begun < 5


# -- tensors -----------------------------------------------------------------------------------------------------------


def edited(change: Callable[[Tensors], object], *modules: str) -> Tensors:
    tensors = for_modules(*(modules or (Q0, Q1)))
    change(tensors)
    return tensors


def test_a_half_of_a_module_is_named(place: Path, base: Path) -> None:
    added = adapter(place, edited(lambda t: t.pop(f"{Q1}.lora_B.weight")))
    assert f"{Q1} has lora_A, expected lora_A and lora_B" in refused(place, base, added, MappingError)
    added = adapter(place, edited(lambda t: t.pop(f"{Q0}.lora_A.weight")))
    assert f"{Q0} has lora_B, expected lora_A and lora_B" in refused(place, base, added, MappingError)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        (f"{Q0}.lora_magnitude_vector", (4,), "the magnitudes of DoRA"),
        (f"{Q0}.lora_B.bias", (4,), "a trained bias"),
        ("model.embed_tokens.token_adapter.trainable_tokens_delta", (2, 4), "trained token embeddings"),
        (f"{Q0}.lora_A.default.weight", (2, 4), "nothing that a LoRA adapter holds"),
        (f"{Q0}.weight", (4, 4), "nothing that a LoRA adapter holds"),
        ("score.weight", (2, 4), "nothing that a LoRA adapter holds"),
        (f"{Q0}.lora_C.weight", (2, 4), "nothing that a LoRA adapter holds"),
        (f"{Q0}.lora_embedding_A", (2, 4), "lora_A and lora_B and lora_embedding_A"),
        ("model.norm.lora_A.weight", (2, 4), "model.norm has lora_A"),
        (".lora_A.weight", (2, 4), " has lora_A"),
    ],
)
def test_a_tensor_too_many_is_named_and_explained(
    name: str, shape: tuple[int, ...], said: str, place: Path, base: Path
) -> None:
    added = adapter(place, edited(lambda t: t.update({name: np.ones(shape, np.float32)})))
    text = refused(place, base, added, MappingError)
    assert said in text
    assert name.rpartition(".lora_")[0] in text


def test_everything_that_is_for_another_base_is_listed(place: Path, base: Path) -> None:
    tensors = factors(Q0, 4, 6, 2) | factors(Q1, 8, 4, 2) | factors("model.layers.7.self_attn.q_proj", 4, 4, 2)
    tensors |= factors("model.layers.0.mlp.experts.0.up_proj", 3, 4, 2) | factors(DOWN1, 4, 3, 3)
    tensors |= factors("model.norm", 4, 1, 2) | factors("lm_head", 9, 4, 2)
    text = refused(place, base, adapter(place, tensors, target_modules=".*"), MappingError)
    for line in (
        f"{PREFIX}{Q0}.lora_A.weight: expected [2, 4] (rank 2 by adapter_config.json), found [2, 6]",
        f"{PREFIX}{Q1}.lora_B.weight: expected [4, 2] (rank 2 by adapter_config.json), found [8, 2]",
        "model.layers.7.self_attn.q_proj is not in the base, which has 2 layers, all dense",
        "model.layers.0.mlp.experts.0.up_proj is not in the base",
        f"{PREFIX}{DOWN1}.lora_A.weight: expected [2, 3] (rank 2 by adapter_config.json), found [3, 3]",
        f"{PREFIX}{DOWN1}.lora_B.weight: expected [4, 2] (rank 2 by adapter_config.json), found [4, 3]",
        "model.norm is not in the base",
        f"{PREFIX}lm_head.lora_B.weight: expected [7, 2] (rank 2 by adapter_config.json), found [9, 2]",
    ):
        assert f"  - {line}" in text
    assert text.count("  - ") == 8
    assert f"does not fit the base {base}" in text


def test_fused_experts_that_do_not_fit_are_named_with_what_would(place: Path, moe: Path, base: Path) -> None:
    added = adapter(place, factors(f"{STACK}.base_layer", 6, 4, 4), target_modules="x")
    assert f"{STACK} is not in the base" in refused(place, base, added, MappingError)
    added = adapter(place, factors(STACK, 6, 5, 4), target_modules="x")
    text = refused(place, moe, added, MappingError)
    assert "[_, 4] and [6, _] (gate_up_proj) or [_, 3] and [4, _] (down_proj), found [4, 5] and [6, 4]" in text
    added = adapter(place, factors(STACK, 6, 4, 6), target_modules="x")
    text = refused(place, moe, added, MappingError)
    assert f"{PREFIX}{STACK}.lora_A.weight: expected [4, 4] (rank 2 by adapter_config.json), found [6, 4]" in text
    twice = factors(STACK, 6, 4, 4) | factors(f"{STACK}.1.up_proj", 3, 4, 2)
    text = refused(place, moe, adapter(place, twice, target_modules="x"), MappingError)
    assert f"{STACK}.1.up_proj.weight is changed twice" in text


def test_a_layer_that_lacks_what_others_have_is_named(place: Path, base: Path) -> None:
    """As when the base has more layers than the one that the adapter was trained for."""
    text = refused(place, base, adapter(place, for_modules(Q0)), MappingError)
    assert f"nothing is there for {Q1}.weight, which adapter_config.json targets (layer 1, q_proj)" in text
    for config in (
        {"layers_to_transform": [0]},
        {"layers_to_transform": 0},
        {"target_modules": ["layers.0.self_attn.q_proj"]},
    ):
        added = adapter(place, for_modules(Q0), **{"target_modules": ["q_proj"], **config})
        convert(base, place / "target", "hf", choices=Choices(adapter=added), overwrite=True)


def test_what_the_config_does_not_target_is_named(place: Path, base: Path) -> None:
    """PEFT would leave it out without an error."""
    text = refused(place, base, adapter(place, for_modules(Q0, Q1, DOWN1)), MappingError)
    assert f"{DOWN1}.weight is changed, but adapter_config.json does not target it" in text


def test_a_target_of_which_nothing_is_there_is_said_aloud(place: Path, base: Path) -> None:
    added = adapter(place, target_modules=["q_proj", "up_proj", "lm_head", "nonsense"])
    manifest = convert(base, place / "target", "hf", choices=Choices(adapter=added))
    policy = next(policy for policy in manifest.policies if policy["name"] == "merge-lora")
    assert policy["targets_without_tensors"] == ["up_proj", "lm_head"]
    assert "it targets up_proj, lm_head too, but holds nothing for that" in policy["summary"]


def test_an_adapter_of_nothing_is_refused(place: Path, base: Path) -> None:
    assert "it changes nothing" in refused(place, base, adapter(place, {}), MappingError)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_named_and_counted(value: float, place: Path, base: Path) -> None:
    def break_two(tensors: Tensors) -> None:
        tensors[f"{Q0}.lora_A.weight"][1, 2] = value
        tensors[f"{Q1}.lora_B.weight"][:, 0] = value

    text = refused(place, base, adapter(place, edited(break_two)))
    assert f"{PREFIX}{Q0}.lora_A.weight: 1 of 8 values" in text
    assert f"{PREFIX}{Q1}.lora_B.weight: 4 of 8 values" in text
    assert "not finite" in text


def test_numbers_that_are_too_large_together_stop_the_merge(place: Path, base: Path) -> None:
    added = adapter(place, edited(lambda t: t[f"{Q1}.lora_B.weight"].fill(3e38)), lora_alpha=1e9)
    assert f"{Q1}.weight: base and adapter add up to values that are not finite" in refused(place, base, added)
    added = adapter(place, edited(lambda t: t[f"{Q1}.lora_B.weight"].fill(1e6)))
    assert f"{Q1}.weight" in refused(place, base, added, PolicyError, dtype="F16")


def test_integers_and_eight_bits_are_no_factors(place: Path, base: Path) -> None:
    added = adapter(place)
    path = added / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))
    text = refused(place, base, added, MappingError)
    assert text.count("is I32, expected BF16, F16, F32") == 4


def test_the_training_state_does_not_come_along(place: Path, base: Path) -> None:
    text = refused(place, base, adapter(place), PolicyError, to="titan", optimizer="default")
    assert "training state" in text


def test_a_damaged_file_is_refused(place: Path, base: Path) -> None:
    path = adapter(place) / "adapter_model.safetensors"
    whole = path.read_bytes()
    for content in (b"", whole[:20], whole[:-1], whole + b"x", b"\xff" * 8 + whole[8:]):
        path.write_bytes(content)
        assert str(path) in refused(place, base, place / "adapter")


# -- on the way --------------------------------------------------------------------------------------------------------


def test_an_adapter_that_changes_while_it_is_added_stops_the_merge(place: Path, base: Path) -> None:
    added = adapter(place)

    def touch(count: int) -> None:
        path = added / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes())

    with pytest.raises(SourceError, match=r"changed while it was being read[^$]*adapter_model\.safetensors"):
        convert(base, place / "target", "hf", choices=Choices(adapter=added), advance=touch)
    assert not (place / "target").exists()


@pytest.fixture
def half_way(place: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Choices:
    """A merge into ``target`` that was interrupted after some of its units, and a whole one beside it."""
    monkeypatch.setattr(planning, "UNIT_BYTES", 100)
    tensors = for_modules(*(name.removesuffix(".weight") for name in SHAPES))
    choices = Choices(adapter=adapter(place, tensors, target_modules=".*"), shard_bytes=300)
    convert(base, place / "whole", "hf", choices=choices)
    left = [250]

    def interrupt(count: int) -> None:
        left[0] -= count
        if left[0] <= 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(base, place / "target", "hf", choices=choices, advance=interrupt)
    assert len((partial_path(place / "target") / JOURNAL).read_text().splitlines()) > 2
    return choices


def test_interrupted_it_resumes_to_the_same_bytes(place: Path, base: Path, half_way: Choices) -> None:
    convert(base, place / "target", "hf", choices=half_way, resume=True)
    assert snapshot(place / "target", stamps=False) == snapshot(place / "whole", stamps=False)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_it_does_not_resume_with_another_adapter(file: str, place: Path, base: Path, half_way: Choices) -> None:
    path = place / "adapter" / file
    content = path.read_bytes()
    path.write_bytes(
        content.replace(b'"lora_alpha": 6', b'"lora_alpha": 7') if file.endswith("json") else content[:-1] + b"\x3d"
    )
    assert path.read_bytes() != content
    with pytest.raises(DestinationError, match="another"):
        convert(base, place / "target", "hf", choices=half_way, resume=True)
    with pytest.raises(DestinationError, match="another"):
        convert(base, place / "target", "hf", choices=Choices(shard_bytes=300), resume=True)
    assert not (place / "target").exists()


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_refuses_with_one_message_and_leaves_everything_as_it_was(
    place: Path, base: Path, command: Run
) -> None:
    added = adapter(place, edited(lambda t: t.pop(f"{Q1}.lora_B.weight")))
    before = snapshot(place)
    ended = command("merge-lora", base, added, "target", code=1)
    assert ended.stdout == ""
    assert ended.stderr.startswith(f"Error: {added / 'adapter_model.safetensors'} does not fit the base {base}:\n")
    assert "Traceback" not in ended.stderr
    assert snapshot(place) == before
    command("merge-lora", base, added, code=2)
    command("merge-lora", base, added, "target", "--to", "nonsense", code=2)
