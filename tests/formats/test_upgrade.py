"""``upgrade``: training checkpoints between torchtitan's key schemas, judged by torch and by torchtitan's Trainer.

Old states are spelled from first principles (``real_checkpoints``) or renamed from what torchtitan 0.3.0 saved
(``older_titan``); neither imports the product. Measured: a resumed run's losses, weights and moments are those of the
uninterrupted one, bit for bit (torch 2.13.0, CPU).
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from qwen3conv.converters import planning
from qwen3conv.converters.conversion import carry_out, prepare
from qwen3conv.converters.detection import open_checkpoint
from qwen3conv.converters.errors import ConversionError, MappingError, PolicyError, SourceError
from qwen3conv.converters.manifest import Manifest, read_manifest
from qwen3conv.converters.policies import Choices, settle
from qwen3conv.converters.stores.contents import Blob
from qwen3conv.converters.stores.dcp import read_dcp
from qwen3conv.converters.stores.dcp_values import read_blob
from qwen3conv.converters.stores.staging import partial_path
from qwen3conv.converters.verification import verify
from qwen3conv.tools.cli.main import cli
from tests.cli.conftest import environment, process
from tests.conversions import convert, differing, fingerprint, load_dcp, policies
from tests.laws.tiny import content_of
from tests.models import once, saved_model
from tests.older_titan import load_nested, save_older
from tests.real_checkpoints import (
    FUSING_SCHEMAS,
    SCHEMAS,
    WHOLE_SCHEDULER,
    State,
    read_model,
    save_dcp,
    titan_session,
    titan_training_state,
    wrapped,
)
from tests.titan_resume import SAVED, STEPS, Resume, losses, refusal, resume_all, step_folder

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing")

Source = Callable[[str], Path]
MODELS = {"dense": "dense", "tied": "dense-tied", "moe": "moe"}
OF_MOE = [("moe", schema, fused) for schema in SCHEMAS[1:-1] for fused in (False, True) if not fused or schema >= "T3"]
OF_DENSE = [
    ("dense", "T1", False),
    ("dense", "T3", True),
    ("dense", "T6", False),
    ("tied", "T1", False),
    ("tied", "T4", True),
]
"""Model, schema of the checkpoint, whether the model that trained had fused QKV. Each rule is in one of these."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """The model folder of a key of ``MODELS``."""
    return lambda model: saved_model(tmp_path_factory, MODELS[model])


def state_of(model: str, schema: str, fused: bool, source: Source) -> State:
    tensors, config = read_model(source(model))
    return titan_training_state(schema, tensors, config, fused_qkv=fused, expert_bias=0.01)


def schema_id(schema: str, fused: bool) -> str:
    """What ``--titan-schema`` calls it."""
    return f"{schema}-fused" if fused and schema in FUSING_SCHEMAS else schema


def upgrade(folder: Path, destination: Path, **choices: Any) -> Manifest:
    return convert(folder, destination, "titan", **{"optimizer": "default", **choices})


def flat(state: Mapping[str, Any], prefix: str = "") -> State:
    """A nested state dict with slashes between its keys: names have dots."""
    found: State = {}
    for name, value in state.items():
        found |= flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def assert_same_state(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """The same nesting, names, values, dtypes and bits."""
    left, right = flat(found), flat(expected)
    assert sorted({*left} ^ {*right}) == []
    tensors = {name for name, value in right.items() if isinstance(value, torch.Tensor)}
    assert [name for name, value in left.items() if isinstance(value, torch.Tensor) != (name in tensors)] == []
    assert differing({n: left[n] for n in tensors}, {n: right[n] for n in tensors}) == []
    assert [name for name in right if name not in tensors and left[name] != right[name]] == []


# --- from schema to schema --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "schema", "fused"), OF_MOE + OF_DENSE)
def test_an_old_training_state_becomes_that_of_torchtitan_0_3(
    model: str, schema: str, fused: bool, source: Source, room: Path
) -> None:
    save_dcp(state_of(model, schema, fused, source), room / "old")
    upgrade(room / "old", room / "new")
    assert_same_state(load_nested(room / "new"), state_of(model, "T7", True, source))


@pytest.mark.parametrize(
    ("model", "schema", "fused", "apart"),
    [*((*old, False) for old in OF_MOE), *((*old, True) for old in OF_DENSE), ("moe", "T2", False, True)],
)
def test_it_goes_down_and_comes_back_byte_for_byte(
    model: str, schema: str, fused: bool, apart: bool, source: Source, room: Path
) -> None:
    new = state_of(model, "T7", not apart, source)
    save_dcp(new, room / "new")
    form = {"optimizer": "fused" if fused else "separate"} if schema == "T6" else {}
    upgrade(room / "new", room / "old", titan_schema=schema_id(schema, fused), **form)
    assert_same_state(load_nested(room / "old"), state_of(model, schema, fused, source))
    upgrade(room / "old", room / "back", optimizer="separate" if apart else "default")
    assert_same_state(load_nested(room / "back"), new)
    assert_same_bytes(room / "back", room / "new")


def assert_same_bytes(folder: Path, other: Path, *, loaders: bool = True) -> None:
    """Names and places, tensors bit for bit, everything else byte for byte as it is stored.

    Without ``loaders`` the place in the text is compared as far as torchtitan 0.2 can save it.
    """
    ours, theirs = read_dcp(folder), read_dcp(other)
    assert ours.paths == theirs.paths
    assert set(ours.blobs) == set(theirs.blobs)
    stored, expected = archives(folder, ours.blobs), archives(other, theirs.blobs)
    different = {name for name in expected if stored[name] != expected[name]}
    if not loaders:
        places = {name for name in different if name.startswith("dataloader.dp_rank_")}
        assert [name for name in places if tokens_left(folder, name) != tokens_left(other, name)] == []
        different -= places
    assert different == set()
    assert differing(load_dcp(folder), load_dcp(other)) == []


def tokens_left(folder: Path, name: str) -> tuple[object, ...]:
    """Of a rank's loader: samples read, and the tokens of which the next sequences are made."""
    state = pickle.loads(load_nested(folder)["dataloader"][name.removeprefix("dataloader.")])["dataset_state"]
    return state["sample_idx"], state["inputs_buffer"], state["labels_buffer"]


def archives(folder: Path, blobs: Mapping[str, Blob]) -> dict[str, bytes]:
    """Stored bytes of every entry that is not a tensor."""
    files = {name: (folder / name).read_bytes() for name in {blob.file for blob in blobs.values()}}
    return {name: files[blob.file][blob.offset : blob.offset + blob.length] for name, blob in blobs.items()}


@pytest.mark.parametrize(
    ("schema", "fused", "optimizer", "becomes"),
    [
        ("T2", False, "default", True),
        ("T2", False, "keep", False),
        ("T4", True, "keep", True),
        ("T4", True, "separate", False),
        ("T7", False, "default", True),
        ("T7", False, "keep", False),
        ("T7", True, "separate", False),
    ],
)
def test_the_optimizer_has_qkv_as_asked_and_the_plan_says_so(
    schema: str, fused: bool, optimizer: str, becomes: bool, source: Source, room: Path
) -> None:
    save_dcp(state_of("moe", schema, fused, source), room / "old")
    manifest = upgrade(room / "old", room / "new", optimizer=optimizer)
    said = policies(manifest)["optimizer-qkv"]
    assert (said["fused"], said["source_fused"]) == (becomes, fused)
    assert_same_state(load_nested(room / "new"), state_of("moe", "T7", becomes, source))


@pytest.mark.parametrize(
    ("schema", "optimizer", "words"),
    [
        ("0.2", "fused", "T2 had q, k and v apart"),
        ("T4", "fused", "use --titan-schema T4-fused"),
        ("T3-fused", "separate", "use --titan-schema T3$"),
    ],
)
def test_a_form_that_a_schema_never_had_is_refused(
    schema: str, optimizer: str, words: str, source: Source, room: Path
) -> None:
    save_dcp(state_of("dense", "T7", True, source), room / "new")
    with pytest.raises(PolicyError, match=words):
        upgrade(room / "new", room / "old", titan_schema=schema, optimizer=optimizer)
    assert [path.name for path in room.iterdir()] == ["new"]


@pytest.mark.parametrize("wrapper", ["model.", "_orig_mod.", "_checkpoint_wrapped_module."])
def test_prefixes_and_wrappers_go_from_all_names(wrapper: str, source: Source, room: Path) -> None:
    state = state_of("moe", "T2", False, source)
    model = {name: value for name, value in state.items() if not isinstance(value, dict)}
    wrapping = {}
    for name, value in state["optimizer"].items():
        section, _, rest = name.partition(".")
        (inner,) = wrapped({rest: value}, wrapper)
        wrapping[f"{section}.{inner}"] = value
    rest = {name: value for name, value in state.items() if name not in model}
    save_dcp({**wrapped(model, wrapper), **rest, "optimizer": wrapping}, room / "old")
    upgrade(room / "old", room / "new")
    assert_same_state(load_nested(room / "new"), state_of("moe", "T7", True, source))


def test_an_optimizer_that_is_nested_further_stays_so(source: Source, room: Path) -> None:
    def nest(state: State) -> State:
        nested: State = {"state": {}, "param_groups": {}}
        for name, value in state["optimizer"].items():
            section, _, rest = name.partition(".")
            fqn, _, key = rest.rpartition(".")
            nested[section].setdefault(fqn, {})[key] = value
        return {**state, "optimizer": nested}

    save_dcp(nest(state_of("moe", "T2", False, source)), room / "old")
    upgrade(room / "old", room / "new", optimizer="keep")
    assert_same_state(load_nested(room / "new"), nest(state_of("moe", "T7", False, source)))


def test_every_dtype_is_kept(source: Source, room: Path) -> None:
    """Weights bf16 in all these; moments too, as ``fused_opt_states_bf16`` keeps them."""

    def narrow(state: State) -> State:
        values = state["optimizer"].items()
        return {**state, "optimizer": {n: v.bfloat16() if ".exp_avg" in n else v for n, v in values}}

    save_dcp(narrow(state_of("moe", "T4", False, source)), room / "old")
    manifest = upgrade(room / "old", room / "new")
    assert_same_state(load_nested(room / "new"), narrow(state_of("moe", "T7", True, source)))
    assert manifest.tensors["exp_avg:model.norm.weight"].dtype == "BF16"
    assert manifest.tensors["step:model.norm.weight"].dtype == "F32"


def test_other_optimizers_go_along_when_their_names_map(source: Source, room: Path) -> None:
    """Muon for matrices, AdamW with amsgrad for the rest; ``lr`` as a tensor, ``step`` as a plain number."""

    def other(state: State) -> State:
        found: State = {}
        for name, value in state["optimizer"].items():
            is_matrix = ".attention.w" in name or ".qkv_linear." in name or ".moe." in name
            if not is_matrix:
                found[name] = torch.tensor(0.5) if name.endswith(".lr") else value
                if name.endswith(".exp_avg_sq"):
                    found[name.replace(".exp_avg_sq", ".max_exp_avg_sq")] = value + 1
            elif name.endswith(".exp_avg"):
                found[f"{name.removesuffix('.exp_avg')}.momentum_buffer"] = value - 1
            elif name.endswith(".step"):
                found[name.replace(".step", ".count")] = 3
            elif name.endswith((".lr", ".weight_decay")):
                found[name.replace(".weight_decay", ".ns_steps")] = value
        return {**state, "optimizer": found}

    save_dcp(other(state_of("moe", "T2", False, source)), room / "old")
    upgrade(room / "old", room / "new")
    assert_same_state(load_nested(room / "new"), other(state_of("moe", "T7", True, source)))


def test_a_run_without_load_balancing_gets_no_bias(source: Source, room: Path) -> None:
    tensors, config = read_model(source("moe"))
    states = [
        titan_training_state(schema, tensors, config, fused_qkv=schema == "T7", expert_bias=None)
        for schema in ("T2", "T7")
    ]
    save_dcp(states[0], room / "old")
    upgrade(room / "old", room / "new")
    assert_same_state(load_nested(room / "new"), states[1])


def test_a_scheduler_that_does_not_follow_goes_up_as_it_is_and_one_that_cannot_be_made_is_announced(
    source: Source, room: Path
) -> None:
    old, new = state_of("dense", "T2", False, source), state_of("dense", "T7", True, source)
    whole = {**WHOLE_SCHEDULER, "_last_lr": [5e-4]}  # which is not the rate that the optimizer has
    save_dcp({**old, "lr_scheduler": whole}, room / "old")
    upgrade(room / "old", room / "new")
    assert_same_state(load_nested(room / "new"), {**new, "lr_scheduler": whole})
    back = upgrade(room / "new", room / "back", titan_schema="0.2")
    assert "scheduler" not in policies(back)
    name = "param_groups.norm.weight.initial_lr"
    save_dcp({**new, "optimizer": {**new["optimizer"], name: 2e-3}}, room / "modern")
    down = prepare(room / "modern", room / "down", "titan", Choices(optimizer="default", titan_schema="0.2"))
    (said,) = [policy for policy in down.policies if policy.name == "scheduler"]
    assert said.warning
    assert "exclude_from_loading lr_scheduler" in said.summary


def test_a_model_without_training_state_is_upgraded_and_that_is_said(source: Source, room: Path) -> None:
    state = {n: v for n, v in state_of("moe", "T2", False, source).items() if not isinstance(v, dict)}
    save_dcp(state, room / "old")
    manifest = upgrade(room / "old", room / "new")
    assert "no-optimizer" in policies(manifest)
    assert "training-state" not in policies(manifest)
    expected = {n: v for n, v in state_of("moe", "T7", False, source).items() if not isinstance(v, dict)}
    assert_same_state(load_nested(room / "new"), expected)


# --- proof, files, interruptions --------------------------------------------------------------------------------------


@pytest.fixture
def old(source: Source, room: Path) -> Path:
    """A MoE run of 0.2, to be changed at will."""
    return save_dcp(state_of("moe", "T2", False, source), room / "old")


def test_the_fingerprint_stays_that_of_the_weights(old: Path, source: Source, room: Path) -> None:
    whole = upgrade(old, room / "whole")
    model = upgrade(old, room / "model", optimizer=None)
    assert whole.fingerprint == model.fingerprint == fingerprint(old) == fingerprint(room / "whole")
    assert {name.partition(":")[0] for name in whole.tensors if ":" in name} == {"exp_avg", "exp_avg_sq", "step"}
    assert "exp_avg:model.layers.2.mlp.experts.down_proj.weight" in whole.tensors
    assert set(whole.values) == {"optimizer", "lr_scheduler", "train_state", "dataloader"}
    again = read_manifest(room / "whole")
    assert again == whole


def test_a_moment_has_the_same_digest_in_every_schema(old: Path, room: Path) -> None:
    first = upgrade(old, room / "new")
    second = upgrade(room / "new", room / "back", titan_schema="T4")
    digests = [{n: r.digest for n, r in manifest.tensors.items()} for manifest in (first, second)]
    assert digests[0] == digests[1]
    assert len(set(digests[0].values())) > len(digests[0]) // 2  # all steps are one number


@pytest.mark.parametrize(
    ("fqn", "words"),
    [
        ("optimizer.state.layers.1.attention.qkv_linear.wqkv.weight.exp_avg_sq", "exp_avg_sq:model.layers.1.self_attn"),
        ("optimizer.state.norm.weight.step", "step:model.norm.weight: its bytes changed"),
        ("optimizer.param_groups.norm.weight.lr", "optimizer .* changed"),
        ("dataloader.dp_rank_0", "dataloader .* changed"),
    ],
)
def test_verify_finds_a_changed_byte(fqn: str, words: str, old: Path, room: Path) -> None:
    upgrade(old, room / "new")
    assert verify(settle(open_checkpoint(room / "new")), workers=1).problems == ()
    contents = read_dcp(room / "new")
    if fqn in contents.blobs:
        blob = contents.blobs[fqn]
        raw = read_blob(room / "new", fqn)
        file, at = blob.file, blob.offset + len(raw) // 2
    else:
        chunk = contents.tensors[fqn].chunks[0]
        file, at = chunk.file, chunk.offset
    content = bytearray((room / "new" / file).read_bytes())
    content[at] ^= 1
    (room / "new" / file).write_bytes(content)
    problems = verify(settle(open_checkpoint(room / "new")), workers=1).problems
    assert any(re.search(words, problem) for problem in problems), problems


def test_files_are_cut_where_asked_and_two_workers_make_the_same(old: Path, room: Path) -> None:
    plans = [prepare(old, room / str(n), "titan", Choices(optimizer="default", shard_bytes=60_000)) for n in (1, 2)]
    for workers, plan in enumerate(plans, 1):
        carry_out(plan, workers=workers)
    assert len(plans[0].arrangement.files) > 5
    assert content_of(room / "1") == content_of(room / "2")


def test_every_process_makes_the_same_files(old: Path, room: Path) -> None:
    """So that one can go on where another was stopped; the order of a set differs from process to process."""
    for seed in ("1", "2"):
        ran = process("upgrade", old, room / seed, cwd=room, env=environment(PYTHONHASHSEED=seed))
        assert ran.returncode == 0, ran.stderr
    assert content_of(room / "1") == content_of(room / "2")


@pytest.mark.parametrize("at", [1, 20, 60])
def test_an_interrupted_upgrade_goes_on(at: int, old: Path, room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "UNIT_BYTES", 2000)
    upgrade(old, room / "whole")
    calls = 0

    def interrupt(count: int) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt

    plan = prepare(old, room / "new", "titan", Choices(optimizer="default"))
    with pytest.raises(KeyboardInterrupt):
        carry_out(plan, workers=1, advance=interrupt)
    assert partial_path(room / "new").is_dir()
    assert not (room / "new").exists()
    carry_out(prepare(old, room / "new", "titan", Choices(optimizer="default")), workers=1, resume=True)
    assert content_of(room / "new") == content_of(room / "whole")
    assert read_manifest(room / "new") == read_manifest(room / "whole")


def test_a_try_with_another_optimizer_form_is_not_gone_on_with(old: Path, room: Path) -> None:
    def stop(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        carry_out(prepare(old, room / "new", "titan", Choices(optimizer="fused")), workers=1, advance=stop)
    with pytest.raises(ConversionError, match="was begun from another source or with other options"):
        carry_out(prepare(old, room / "new", "titan", Choices(optimizer="separate")), workers=1, resume=True)


# --- bad input --------------------------------------------------------------------------------------------------------

Change = Callable[[State], None]


def drop(*names: str) -> Change:
    def change(state: State) -> None:
        for name in [name for name in state["optimizer"] if name.startswith(names)]:
            del state["optimizer"][name]

    return change


def drop_all(key: str) -> Change:
    def change(state: State) -> None:
        state["optimizer"] = {n: v for n, v in state["optimizer"].items() if not n.endswith(f".{key}")}

    return change


def put(name: str, value: object) -> Change:
    def change(state: State) -> None:
        state["optimizer"][name] = value

    return change


def rename(old: str, new: str) -> Change:
    def change(state: State) -> None:
        state["optimizer"] = {name.replace(old, new): value for name, value in state["optimizer"].items()}

    return change


WQ = "layers.1.attention.wq.weight"
BAD: dict[str, tuple[Change, type[ConversionError], str]] = {
    "exp_avg missing": (drop(f"state.{WQ}.exp_avg"), MappingError, rf"{WQ}: has no exp_avg, exp_avg_sq"),
    "step missing": (drop(f"state.{WQ}.step"), MappingError, rf"{WQ}: has no step"),
    "a parameter missing": (drop(f"state.{WQ}", f"param_groups.{WQ}"), MappingError, rf"{WQ}: has no entry at all"),
    "a setting missing": (drop(f"param_groups.{WQ}.betas"), MappingError, rf"{WQ}: has no param_groups\.betas"),
    "all settings missing": (drop("param_groups."), MappingError, r"param_groups: has no entries"),
    "all exp_avg missing": (drop_all("exp_avg"), MappingError, r"norm\.weight: has no exp_avg\b"),
    "of LoRA": (put(f"state.{WQ[:-6]}lora_a.weight.exp_avg", torch.ones(2)), MappingError, r"lora_a.*no parameter"),
    "of a layer too many": (
        rename("layers.2.", "layers.9."),
        MappingError,
        r"layers\.9\.attention\.wk\.weight: the model has no such parameter",
    ),
    "fused beside separate": (
        put("state.layers.0.attention.qkv_linear.wqkv.weight.exp_avg", torch.ones(2)),
        MappingError,
        r"wqkv\.weight: is a name of another schema than T2",
    ),
    "of two schemas": (
        rename("layers.0.moe.experts.w1", "layers.0.moe.experts.w1_EFD"),
        MappingError,
        r"layers\.0\.moe\.experts\.w1_EFD: is a name of another schema than T2",
    ),
    "of a foreign shape": (
        put(f"state.{WQ}.exp_avg_sq", torch.ones(5)),
        MappingError,
        rf"{WQ}\.exp_avg_sq: expected shape \[96, 48\] or one number, found \[5\]",
    ),
    "in another section": (put(f"stats.{WQ}.exp_avg", torch.ones(2)), MappingError, rf"optimizer\.stats\.{WQ}"),
    "twice": (
        put("state.layers.1._orig_mod.attention.wq.weight.exp_avg", torch.ones(2)),
        SourceError,
        rf"holds exp_avg of {WQ} twice",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_broken_optimizer_state_is_refused_by_name(case: str, source: Source, room: Path) -> None:
    change, error, words = BAD[case]
    state = state_of("moe", "T2", False, source)
    change(state)
    save_dcp(state, room / "old")
    with pytest.raises(error, match=words):
        upgrade(room / "old", room / "new")
    assert [path.name for path in room.iterdir()] == ["old"]
    upgrade(room / "old", room / "new", optimizer=None)  # the way that the message names


UNEQUAL: dict[str, Callable[[str], Change]] = {
    "step": lambda fqn: put(f"state.{fqn}.step", torch.tensor(8.0)),
    "param_groups.weight_decay": lambda fqn: put(f"param_groups.{fqn}.weight_decay", 0.0),
    "exp_avg": lambda fqn: put(f"state.{fqn}.exp_avg", torch.arange(96 * 48.0).reshape(96, 48).double()),
}


@pytest.mark.parametrize("column", UNEQUAL)
def test_what_differs_between_q_k_and_v_is_not_joined(column: str, source: Source, room: Path) -> None:
    state = state_of("moe", "T2", False, source)
    UNEQUAL[column](WQ)(state)
    save_dcp(state, room / "old")
    with pytest.raises(PolicyError) as refused:
        upgrade(room / "old", room / "new")
    message = str(refused.value)
    assert f"{column}: " in message
    assert all(f"layers.1.attention.w{part}.weight" in message for part in "qkv")
    assert "layers.0" not in message
    assert "--optimizer separate" in message
    upgrade(room / "old", room / "new", optimizer="separate")
    expected = state_of("moe", "T7", False, source)
    UNEQUAL[column](WQ.replace(".attention.", ".attention.qkv_linear."))(expected)
    assert_same_state(load_nested(room / "new"), expected)


def test_entries_of_parameters_under_foreign_names_are_refused(source: Source, room: Path) -> None:
    state = state_of("dense", "T2", False, source)
    optimizer = state.pop("optimizer")
    save_dcp({**state, "optim": optimizer}, room / "old")
    with pytest.raises(MappingError, match=r"not named as torchtitan's optimizer names its own:\n  - optim\.state\."):
        upgrade(room / "old", room / "new")


def test_a_checkpoint_that_is_not_torchtitans_is_refused(source: Source, room: Path) -> None:
    with pytest.raises(SourceError, match="is hf, not torchtitan's native Qwen3"):
        upgrade(source("dense"), room / "new")
    convert(source("dense"), room / "accelerate", "accelerate")
    with pytest.raises(SourceError, match="is accelerate, not torchtitan's native Qwen3"):
        upgrade(room / "accelerate", room / "new")


def test_a_schema_without_experts_is_refused_for_a_moe(source: Source, room: Path) -> None:
    save_dcp(state_of("moe", "T7", True, source), room / "new")
    with pytest.raises(MappingError, match=r"T1.*no place for .*experts"):
        upgrade(room / "new", room / "old", titan_schema="T1")


class Payload:
    """Executes when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.place,)


def test_hostile_values_are_copied_and_never_executed(source: Source, room: Path) -> None:
    state = state_of("dense", "T2", False, source)
    state["train_state"]["step"] = Payload(room / "executed")
    state["optimizer"]["param_groups.norm.weight.lr"] = Payload(room / "executed")
    save_dcp(state, room / "old")
    upgrade(room / "old", room / "new")
    verify(settle(open_checkpoint(room / "new")), workers=1)
    assert not (room / "executed").exists()
    for fqn in ("train_state.step", "optimizer.param_groups.norm.weight.lr"):
        assert read_blob(room / "new", fqn) == read_blob(room / "old", fqn)
    load_nested(room / "new")  # or the payload is none
    assert (room / "executed").exists()


# --- what torchtitan wrote, and what it makes of it -------------------------------------------------------------------

RESUMES = (
    Resume("dense-tied", "T1", fused=False),
    Resume("moe-trainable", "T2", fused=False),
    Resume("moe-trainable", "T3"),
    Resume("dense", "T4", fused=False, fuse_qkv=False),
    Resume("moe-trainable", "T5", change="forget"),
    Resume("moe-trainable", "T6", change="as it is"),
)
UPGRADED = [job for job in RESUMES if not job.change]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of ``RESUMES`` by torchtitan's Trainer, in one launch."""
    sources = {job.model: saved_model(tmp_path_factory, job.model) for job in RESUMES}
    return once(tmp_path_factory, "titan-resumed", lambda folder: resume_all(folder, sources, RESUMES))


@pytest.mark.parametrize("job", UPGRADED, ids=str)
def test_torchtitan_resumes_an_upgraded_run_as_if_it_had_not_stopped(job: Resume, resumed: Path) -> None:
    whole, rest = losses(resumed, job.run), losses(resumed, str(job))
    assert list(whole) == [str(step) for step in range(1, STEPS + 1)]
    assert list(rest) == [str(step) for step in range(SAVED + 1, STEPS + 1)]
    assert rest == {step: whole[step] for step in rest}
    assert whole["3"] != whole["4"]
    folders = [step_folder(resumed, name, STEPS) for name in (str(job), job.run)]
    assert differing(load_dcp(folders[0]), load_dcp(folders[1])) == []
    state, expected = (load_nested(folder) for folder in folders)
    for part in ("train_state", "lr_scheduler", "dataloader"):
        assert state[part] == expected[part]
    assert state["train_state"]["step"] == STEPS


def test_a_lost_moment_would_have_shown(resumed: Path) -> None:
    (job,) = [job for job in RESUMES if job.change == "forget"]
    whole, rest = losses(resumed, job.run), losses(resumed, str(job))
    assert rest["3"] == whole["3"]
    assert rest["4"] != whole["4"]


def test_torchtitan_refuses_the_old_checkpoint_itself(resumed: Path) -> None:
    (job,) = [job for job in RESUMES if job.change == "as it is"]
    assert "Missing key in checkpoint state_dict" in refusal(resumed, str(job))


@pytest.mark.parametrize("schema", ["T2", "T3-fused", "T6"])
@pytest.mark.parametrize("run", sorted({job.run for job in RESUMES}))
def test_what_torchtitan_saved_goes_down_and_back_byte_for_byte(
    run: str, schema: str, resumed: Path, room: Path
) -> None:
    saved = step_folder(resumed, run, SAVED)
    upgrade(saved, room / "old", titan_schema=schema)
    upgrade(room / "old", room / "back", optimizer="separate" if "apart" in run else "default")
    assert_same_bytes(room / "back", saved, loaders=schema != "T2")


@pytest.mark.parametrize(("schema", "fused"), [("T2", False), ("T4", True), ("T5", False)])
def test_a_renamed_run_of_torchtitan_is_what_we_write_for_that_schema(
    schema: str, fused: bool, resumed: Path, tmp_path_factory: pytest.TempPathFactory, room: Path
) -> None:
    config = json.loads((saved_model(tmp_path_factory, "moe-trainable") / "config.json").read_text())
    saved = step_folder(resumed, "moe-trainable", SAVED)
    expected = load_nested(save_older(saved, room / "renamed", schema, config, fused=fused))
    upgrade(saved, room / "ours", titan_schema=schema_id(schema, fused))
    found = load_nested(room / "ours")
    if schema == "T2":
        assert found["lr_scheduler"].items() <= expected["lr_scheduler"].items()
        expected["lr_scheduler"] = found["lr_scheduler"]
        for state in (found, expected):  # the text that is left over, see test_release_state
            del state["dataloader"]["dp_rank_0"]
    assert_same_state(found, expected)


@pytest.mark.parametrize("name", ["trained-tied-fsdp-tp", "trained-moe-fsdp-tp-ep"])
def test_what_four_ranks_saved_goes_down_and_back(
    name: str, tmp_path_factory: pytest.TempPathFactory, room: Path
) -> None:
    saved = titan_session(tmp_path_factory)[name].folder
    assert max(len(tensor.chunks) for tensor in read_dcp(saved).tensors.values()) == 4
    upgrade(saved, room / "old", titan_schema="T3-fused" if "moe" in name else "0.2")
    upgrade(room / "old", room / "back")
    assert_same_bytes(room / "back", saved, loaders="moe" in name)


# --- command ----------------------------------------------------------------------------------------------------------


def run(*arguments: str | Path, code: int = 0) -> Any:
    result = CliRunner().invoke(cli, [*map(str, arguments)], prog_name="qwen3conv")
    assert result.exit_code == code, result.output
    return result


def test_the_command_upgrades_plans_and_leaves_behind(old: Path, room: Path, source: Source) -> None:
    plan = json.loads(run("upgrade", old, room / "new", "--dry-run", "--json").stdout)
    assert not (room / "new").exists()
    assert {"optimizer-qkv", "training-state"} <= {policy["name"] for policy in plan["policies"]}
    made = run("upgrade", old, room / "new", "--json")
    assert json.loads(made.stdout)["schema"] == "T7"
    assert "fuse_qkv=False needs --optimizer separate" in made.stderr
    assert_same_state(load_nested(room / "new"), state_of("moe", "T7", True, source))
    assert "verified" in run("verify", room / "new").stdout
    run("upgrade", old, room / "apart", "--optimizer", "separate", "--like", source("moe"))
    assert (room / "apart" / "hf_assets" / "tokenizer.json").is_file()
    assert json.loads((room / "apart" / "hf_assets" / "config.json").read_text())["model_type"] == "qwen3_moe"
    assert_same_state(load_nested(room / "apart"), state_of("moe", "T7", False, source))
    run("upgrade", old, room / "model", "--model-only")
    assert not any(isinstance(value, dict) for value in load_nested(room / "model").values())
    run("upgrade", old, room / "x", "--model-only", "--optimizer", "keep", code=2)
    refused = run("upgrade", source("moe"), room / "x", code=1)
    assert "not torchtitan's native Qwen3" in refused.stderr
