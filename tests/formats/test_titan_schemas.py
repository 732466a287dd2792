"""torchtitan's key schemas T1 to T7, fused or not, under any prefix and wrapper: recognised, read, written.

The state dicts are spelled from first principles (``real_checkpoints``) and saved and loaded by torch's own DCP.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp

from qwen3conv.converters.detection import open_checkpoint
from qwen3conv.converters.errors import MappingError, PolicyError, SourceError
from qwen3conv.converters.inspection import inspect
from tests.conversions import convert, differing, fingerprint, load_dcp, policies
from tests.laws.tiny import content_of
from tests.models import read_tensors, saved_model
from tests.real_checkpoints import (
    FUSING_SCHEMAS,
    SCHEMAS,
    WRAPPERS,
    State,
    read_model,
    save_dcp,
    titan_state_dict,
    titan_training_state,
    wrapped,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing")

Source = Callable[[str], Path]
MODELS = {"dense": "dense", "tied": "dense-tied", "moe": "moe"}


class Saved(NamedTuple):
    """A schema as a model of it saves itself."""

    model: str
    schema: str
    fused: bool

    @property
    def own_id(self) -> str:
        """What ``--titan-schema`` calls it."""
        return f"{self.schema}-fused" if self.fused else self.schema

    @property
    def detected(self) -> str:
        """What it is recognised as: of schemas whose names are the same for a model, the newest."""
        return DETECTED[self.own_id]["moe" if self.model == "moe" else "dense"]

    def __str__(self) -> str:
        return f"{self.model}-{self.own_id}"


SAVED = [
    Saved(model, schema, fused)
    for model in MODELS
    for schema in SCHEMAS
    for fused in (False, True)
    if (model, schema) != ("moe", "T1") and (not fused or schema in FUSING_SCHEMAS)
]
DETECTED = {
    "T1": {"dense": "T2"},
    "T2": {"dense": "T2", "moe": "T2"},
    "T3": {"dense": "T3", "moe": "T3"},
    "T3-fused": {"dense": "T3-fused", "moe": "T3-fused"},
    "T4": {"dense": "T7", "moe": "T4"},
    "T4-fused": {"dense": "T5-fused", "moe": "T4-fused"},
    "T5": {"dense": "T7", "moe": "T6"},
    "T5-fused": {"dense": "T5-fused", "moe": "T5-fused"},
    "T6": {"dense": "T7", "moe": "T6"},
    "T7": {"dense": "T7", "moe": "T7"},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """The model folder of a key of ``MODELS``."""
    return lambda model: saved_model(tmp_path_factory, MODELS[model])


def state_of(saved: Saved, source: Source, *, bias: float | None = 0.0) -> State:
    tensors, config = read_model(source(saved.model))
    return titan_state_dict(saved.schema, tensors, config, fused_qkv=saved.fused, expert_bias=bias)


def assert_is_the_model(folder: Path, saved: Saved, source: Source, room: Path) -> None:
    """Converted to Hugging Face it is the source, down to the file; and it has the source's fingerprint."""
    convert(folder, room / "hf", "hf", like=source(saved.model))
    assert differing(read_tensors(room / "hf"), read_tensors(source(saved.model))) == []
    assert fingerprint(folder, like=source(saved.model)) == fingerprint(source(saved.model))


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved", SAVED, ids=str)
def test_every_schema_is_recognised_and_read(saved: Saved, source: Source, room: Path) -> None:
    save_dcp(state_of(saved, source), room / "dcp")
    report = inspect(room / "dcp")
    assert (report.format, report.schema, report.complete) == ("titan", saved.detected, True)
    assert_is_the_model(room / "dcp", saved, source, room)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    "saved",
    [Saved("moe", "T7", False), Saved("moe", "T3", True), Saved("tied", "T2", False), Saved("dense", "T5", True)],
    ids=str,
)
def test_a_prefix_or_wrapper_changes_nothing(saved: Saved, wrapper: str, source: Source, room: Path) -> None:
    plain = state_of(saved, source)
    renamed = wrapped(plain, wrapper)
    assert not set(renamed) <= set(plain)
    save_dcp(renamed, room / "dcp")
    assert open_checkpoint(room / "dcp").layout.schema == saved.detected
    assert_is_the_model(room / "dcp", saved, source, room)


@pytest.mark.parametrize(
    "prefix", ["module.", "model.module.", "module.model.", "model.model.", "state_dict.", "app.model.", "app."]
)
def test_prefixes_of_other_trainers_are_seen_through(prefix: str, source: Source, room: Path) -> None:
    saved = Saved("tied", "T7", False)
    save_dcp({f"{prefix}{name}": tensor for name, tensor in state_of(saved, source).items()}, room / "dcp")
    assert_is_the_model(room / "dcp", saved, source, room)


def test_wrappers_in_one_another_are_seen_through(source: Source, room: Path) -> None:
    """FSDP1 around activation checkpointing around ``torch.compile``, in a trainer that has it as ``model``."""
    saved = Saved("moe", "T6", False)
    state = state_of(saved, source)
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "model."):
        state = wrapped(state, wrapper)
    block = "model._fsdp_wrapped_module.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module._orig_mod"
    assert f"{block}.attention.wo.weight" in state
    save_dcp(state, room / "dcp")
    assert_is_the_model(room / "dcp", saved, source, room)


def test_a_name_under_two_wrappers_is_named_and_refused(source: Source, room: Path) -> None:
    state = state_of(Saved("dense", "T7", False), source)
    state["layers.0._orig_mod.attention.wo.weight"] = state["layers.0.attention.wo.weight"].clone()
    save_dcp(state, room / "dcp")
    with pytest.raises(SourceError, match=r"holds layers\.0\.attention\.wo\.weight twice"):
        open_checkpoint(room / "dcp")


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("saved", [s for s in SAVED if s.schema in ("T2", "T4", "T7")], ids=str)
def test_a_training_state_beside_the_model_does_not_mislead(
    saved: Saved, prefix: str, source: Source, room: Path
) -> None:
    """Optimizer names keep the fused form and older names; only the model's own decide."""
    tensors, config = read_model(source(saved.model))
    fused = saved.fused or saved.schema == "T7"  # T7 saves q, k and v apart, its optimizer does not
    state = titan_training_state(saved.schema, tensors, config, fused_qkv=fused)
    model = state_of(saved, source)
    rest = {name: value for name, value in state.items() if name not in model}
    save_dcp({**(wrapped(model, prefix) if prefix else model), **rest}, room / "dcp")
    found = open_checkpoint(room / "dcp")
    assert found.layout.schema == saved.detected
    assert sum(name.endswith("exp_avg") for name in found.others) == sum(
        name.endswith("exp_avg") for name in state["optimizer"]
    )
    assert "train_state.step" in found.others
    assert_is_the_model(room / "dcp", saved, source, room)


def test_a_moe_without_load_balancing_has_no_bias_and_is_whole(source: Source, room: Path) -> None:
    saved = Saved("moe", "T7", False)
    save_dcp(state_of(saved, source, bias=None), room / "dcp")
    assert inspect(room / "dcp").complete
    assert_is_the_model(room / "dcp", saved, source, room)


@pytest.mark.parametrize("saved", [s for s in SAVED if s.model == "moe"], ids=str)
def test_an_expert_bias_of_every_schema_is_found(saved: Saved, source: Source, room: Path) -> None:
    save_dcp(state_of(saved, source, bias=0.01), room / "dcp")
    with pytest.raises(PolicyError, match=r"3 of 3 layers .* the largest 0\.15 in layer 2, expert_bias"):
        convert(room / "dcp", room / "hf", "hf", like=source("moe"))


def test_names_of_two_schemas_at_once_are_refused_with_the_odd_ones(source: Source, room: Path) -> None:
    state = state_of(Saved("moe", "T7", False), source)
    older = state_of(Saved("moe", "T2", False), source)
    for part in ("w1", "w2", "w3"):
        del state[f"layers.1.moe.routed_experts.inner_experts.{part}_{'EDF' if part == 'w2' else 'EFD'}"]
        state[f"layers.1.moe.experts.{part}"] = older[f"layers.1.moe.experts.{part}"]
    save_dcp(state, room / "dcp")
    with pytest.raises(MappingError) as refused:
        open_checkpoint(room / "dcp")
    assert "layers.1.moe.experts.w1" in str(refused.value)
    assert "T7" in str(refused.value)


@pytest.mark.parametrize("saved", [Saved("moe", "T7", False), Saved("dense", "T3", True)], ids=str)
def test_everything_that_is_missing_or_misshapen_is_listed_at_once(saved: Saved, source: Source, room: Path) -> None:
    state = state_of(saved, source)
    gone = ["norm.weight", "layers.2.attention.wo.weight", "layers.0.ffn_norm.weight"]
    for name in gone:
        del state[name]
    state["layers.1.attention.k_norm.weight"] = torch.ones(17)
    save_dcp(state, room / "dcp")
    with pytest.raises(MappingError) as refused:
        convert(room / "dcp", room / "hf", "hf", like=source(saved.model))
    message = str(refused.value)
    assert all(f"missing: {name}" in message for name in gone)
    assert "layers.1.attention.k_norm.weight" in message
    assert "expected [16], found [17]" in message
    assert not inspect(room / "dcp").complete


# --- writing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved", SAVED, ids=str)
def test_every_schema_is_written_as_a_model_of_it_saves_itself(saved: Saved, source: Source, room: Path) -> None:
    manifest = convert(source(saved.model), room / "dcp", "titan", titan_schema=saved.own_id)
    assert manifest.schema == saved.own_id
    assert ("expert-bias-zero" in policies(manifest)) == (saved.model == "moe")
    assert differing(load_dcp(room / "dcp"), state_of(saved, source)) == []


@pytest.mark.parametrize("saved", [s for s in SAVED if s.model != "tied"], ids=str)
def test_a_written_schema_loads_strictly_into_a_state_dict_of_it(saved: Saved, source: Source, room: Path) -> None:
    """``dcp.load`` raises for every name that the folder lacks: here the names come from the model, not the folder."""
    convert(source(saved.model), room / "dcp", "titan", titan_schema=saved.own_id)
    truth = state_of(saved, source)
    state = {name: torch.full_like(tensor, float("nan")) for name, tensor in truth.items()}
    dcp.load(state, checkpoint_id=room / "dcp", no_dist=True)
    assert differing(state, truth) == []


@pytest.mark.parametrize("old", [s for s in SAVED if s.model == "moe" and s.schema != "T7"], ids=str)
def test_an_old_checkpoint_comes_up_to_the_schema_of_today_and_back(old: Saved, source: Source, room: Path) -> None:
    state = state_of(old, source, bias=0.01)
    save_dcp(state, room / "old")
    convert(room / "old", room / "new", "titan")
    assert differing(load_dcp(room / "new"), state_of(Saved("moe", "T7", False), source, bias=0.01)) == []
    convert(room / "new", room / "back", "titan", titan_schema=old.own_id)
    assert differing(load_dcp(room / "back"), state) == []


@pytest.mark.parametrize(
    ("alias", "schema"), [("0.3", "T7"), ("0.3.0", "T7"), ("latest", "T7"), ("0.2", "T2"), ("0.2.2", "T2")]
)
def test_a_release_stands_for_its_schema(alias: str, schema: str, source: Source, room: Path) -> None:
    convert(source("moe"), room / "by-release", "titan", titan_schema=alias)
    convert(source("moe"), room / "by-id", "titan", titan_schema=schema)
    assert content_of(room / "by-release") == content_of(room / "by-id")


def test_an_unknown_schema_is_refused_with_those_there_are(source: Source, room: Path) -> None:
    with pytest.raises(PolicyError, match=r"'T9' is not known; --titan-schema takes one of: T7, T6, .*0\.3"):
        convert(source("dense"), room / "dcp", "titan", titan_schema="T9")
