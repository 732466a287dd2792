"""Training shards of neuronx-distributed and optimum-neuron, built with torch from the conventions of their sources.

Neither library can be installed here (both need torch_xla), so the shards are made as their code makes them: ``repeat``
and ``chunk`` for key-value heads, the converter's reshape for query heads, ``cat`` of a rank's parts for fused weights.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qwen3conv.converters.dtypes import TORCH_NAME
from qwen3conv.converters.errors import ConversionError, MappingError, PolicyError, SourceError
from qwen3conv.converters.geometry import Geometry
from qwen3conv.converters.layouts import nxd_layout
from qwen3conv.converters.parameters import logical_parameters
from qwen3conv.converters.planning import Table, tabulate
from qwen3conv.converters.stores.nxd_bindings import Queries, nxd_bindings, nxd_heads
from qwen3conv.converters.stores.nxd_training import locate_nxd, read_nxd
from tests.conversions import differing
from tests.laws.tiny import scratch

GEOMETRY = Geometry(
    vocab_size=40,
    hidden_size=10,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=4,
    intermediate_size=24,
)
State = dict[str, torch.Tensor]
LAYER = "model.layers.0"


def truth(*, tied: bool = False) -> State:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).bfloat16()
        for name, shape in logical_parameters(GEOMETRY, tied=tied)
    }


# --- how NxD and optimum-neuron cut -----------------------------------------------------------------------------------


def query_order(tp: int, multiplier: int, pattern: str) -> list[int]:
    """Query heads in the order of the ranks. Tiled: each query goes to a slot of its own key-value head, as
    ``compute_query_indices_for_rank`` and the converter's trn1 branch have it."""
    heads, kv = GEOMETRY.num_attention_heads, GEOMETRY.num_key_value_heads
    if pattern != "tiled" or multiplier == 1:
        return list(range(heads))
    groups = torch.arange(heads).reshape(kv * multiplier, -1)  # the converter: weights.reshape(-1, q / (kv * m), ...)
    starts = torch.arange(kv) * multiplier  # of each key-value head's groups
    return torch.cat([groups[starts + i] for i in range(multiplier)]).flatten().tolist()


def repeated(weight: torch.Tensor, multiplier: int, pattern: str) -> torch.Tensor:
    if pattern == "interleaved":
        return weight.unflatten(0, (-1, GEOMETRY.head_dim)).repeat_interleave(multiplier, 0).flatten(0, 1)
    return weight.repeat(multiplier, 1)


def shard(
    tensors: State, tp: int, rank: int, *, multiplier: int, pattern: str = "tiled", style: str = "qkv", order: str = ""
) -> State:
    """What tensor-parallel ``rank`` holds. ``style``: ``plain``, ``qkv`` (weight_q/_k/_v) or ``fused`` (weight_qkv)."""
    queries = query_order(tp, multiplier, order or pattern)
    size = GEOMETRY.head_dim
    mine: State = {}
    for name, weight in tensors.items():
        if weight.dim() == 1:
            mine[name] = weight
        elif name.endswith(("q_proj.weight", "o_proj.weight")):
            dim = int("o_proj" in name)
            moved = weight.transpose(0, dim).unflatten(0, (-1, size))[queries].flatten(0, 1).transpose(0, dim)
            mine[name] = moved.chunk(tp, dim)[rank]
        elif name.endswith(("k_proj.weight", "v_proj.weight")):
            mine[name] = repeated(weight, multiplier, pattern).chunk(tp)[rank]
        else:
            mine[name] = weight.chunk(tp, int("down_proj" in name))[rank]
    for prefix in [name.removesuffix("q_proj.weight") for name in tensors if name.endswith(".q_proj.weight")]:
        parts = [mine.pop(f"{prefix}{part}_proj.weight") for part in "qkv"] if style != "plain" else []
        if style == "qkv":
            mine |= {f"{prefix}qkv_proj.weight_{part}": tensor for part, tensor in zip("qkv", parts, strict=True)}
        elif style == "fused":
            mine[f"{prefix}qkv_proj.weight_qkv"] = torch.cat(parts)
        mlp = prefix.replace("self_attn", "mlp")
        if style != "plain":
            pair = [mine.pop(f"{mlp}{part}_proj.weight") for part in ("gate", "up")]
            mine[f"{mlp}gate_up_proj.weight"] = torch.cat(pair)
    return {name: tensor.contiguous().clone() for name, tensor in mine.items()}


def stage_of(name: str, pp: int) -> int:
    if ".layers." in name:
        return int(name.split(".")[2]) * pp // GEOMETRY.num_hidden_layers
    return 0 if "embed" in name else pp - 1


def save_v2(folder: Path, tp: int, pp: int = 1, save: Callable[[State, Path], None] | None = None, **cut: Any) -> Path:
    """``folder/model/dp_rank_00_tp_rank_TT_pp_rank_PP.pt`` and the marks of a finished save."""
    (folder / "model").mkdir(parents=True)
    (folder / "optim").mkdir()
    for mark in ("checkpoint", "done"):
        (folder / mark).write_text("1")
    tensors = cut.pop("tensors", None) or truth()
    for stage in range(pp):
        own = {name: tensor for name, tensor in tensors.items() if stage_of(name, pp) == stage}
        for rank in range(tp):
            path = folder / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt"
            (save or torch.save)(shard(own, tp, rank, **cut), path)
    return folder


@contextlib.contextmanager
def fake_reference() -> Iterator[type]:
    """``torch_xla.utils.serialization.TensorReference``, as pickle sees it."""
    names = ("torch_xla", "torch_xla.utils", "torch_xla.utils.serialization")
    modules = {name: types.ModuleType(name) for name in names}
    kind = type("TensorReference", (), {"__module__": names[-1]})
    modules[names[-1]].TensorReference = kind  # type: ignore[attr-defined]
    sys.modules.update(modules)
    try:
        yield kind
    finally:
        for name in names:
            del sys.modules[name]


def save_xser(state: State, path: Path) -> None:
    """Tensors in files of their own, references in their place."""
    path.with_name(f"{path.name}.tensors").mkdir()
    with fake_reference() as kind:
        references = {}
        for number, (name, tensor) in enumerate(state.items()):
            references[name] = kind()
            references[name].tid = number
            torch.save(tensor, path.with_name(f"{path.name}.tensors") / f"tensor_{number}.pt")
        torch.save(references, path)


# --- reading ----------------------------------------------------------------------------------------------------------


def read_file(folder: Path) -> Callable[[str, int, int], bytes]:
    return lambda file, offset, size: (folder / file).read_bytes()[offset : offset + size]


def table(folder: Path, *, tied: bool = False, queries: Queries | None = None) -> Table:
    shards = read_nxd(folder)
    heads = nxd_heads(shards, GEOMETRY, read_file(folder), queries=queries)
    layout = nxd_layout(shards.stages)
    stages = shards.stages
    bindings = nxd_bindings(layout, GEOMETRY, heads, shards.mesh, lambda fqn: stages.get(fqn, (0,)), tied=tied)
    return tabulate(bindings, shards.contents.tensors, label=layout.label, where=str(folder))


def copies(folder: Path, found: Table) -> list[State]:
    """Every copy of every parameter, from the extents alone; the i-th state has the i-th copies."""
    states: list[State] = []
    for name, entry in found.items():
        dtype = getattr(torch, TORCH_NAME[entry.dtype])
        for i, copy in enumerate(entry.copies):
            whole = torch.full((entry.rows, entry.columns), float("nan"), dtype=dtype)
            for extent in copy:
                raw = (folder / extent.file).read_bytes()
                for row in range(extent.rows):
                    begin = extent.offset + row * extent.pitch
                    line = bytearray(raw[begin : begin + extent.columns * dtype.itemsize])
                    columns = slice(extent.column, extent.column + extent.columns)
                    whole[extent.row + row, columns] = torch.frombuffer(line, dtype=dtype)
            if i == len(states):
                states.append({})
            states[i][name] = whole.reshape(entry.shape)
    return states


def check(folder: Path, expected: State, *, tied: bool = False, queries: Queries | None = None) -> Table:
    found = table(folder, tied=tied, queries=queries)
    first, *more = copies(folder, found)
    assert differing(first, expected) == []
    for state in more:
        assert differing(state, {name: expected[name] for name in state}) == []
    return found


@pytest.mark.parametrize("style", ["plain", "qkv", "fused"])
@pytest.mark.parametrize("tp", [1, 2])
def test_every_bit_is_found_without_repeated_heads(room: Path, tp: int, style: str) -> None:
    found = check(save_v2(room / "tag", tp, multiplier=1, style=style), truth())
    assert len(found[f"{LAYER}.self_attn.k_proj.weight"].copies) == 1
    assert len(found[f"{LAYER}.input_layernorm.weight"].copies) == tp


@pytest.mark.parametrize("style", ["qkv", "fused"])
@pytest.mark.parametrize(("tp", "multiplier"), [(4, 2), (8, 4), (2, 2), (4, 4), (1, 2)])
def test_tiled_heads_are_found_when_the_order_of_queries_is_given(
    room: Path, tp: int, multiplier: int, style: str
) -> None:
    folder = save_v2(room / "tag", tp, multiplier=multiplier, style=style)
    found = check(folder, truth(), queries="follow")
    assert len(found[f"{LAYER}.self_attn.v_proj.weight"].copies) == multiplier
    with pytest.raises(PolicyError, match="--query-heads follow or natural"):
        table(folder)


def test_queries_follow_as_worked_out_by_hand(room: Path) -> None:
    """8 query and 2 key-value heads stored twice: each of two ranks has both key heads, and half of their queries."""
    folder = save_v2(room / "tag", 2, multiplier=2)
    heads = nxd_heads(read_nxd(folder), GEOMETRY, read_file(folder), queries="follow")
    assert heads.keys == (0, 1, 0, 1)
    assert heads.queries == ((0, 1), (4, 5), (2, 3), (6, 7))


def test_the_converter_for_trn2_leaves_queries_in_order(room: Path) -> None:
    folder = save_v2(room / "tag", 4, multiplier=2, order="natural")
    check(folder, truth(), queries="natural")


@pytest.mark.parametrize(("tp", "multiplier"), [(4, 2), (8, 4), (2, 2)])
def test_interleaved_heads_are_recognised(room: Path, tp: int, multiplier: int) -> None:
    check(save_v2(room / "tag", tp, multiplier=multiplier, pattern="interleaved"), truth())


def test_heads_repeated_in_another_way_are_refused(room: Path) -> None:
    def swapped(state: State, path: Path) -> None:
        if "tp_rank_03" in path.name:
            state[f"{LAYER}.self_attn.qkv_proj.weight_k"] += 1
        torch.save(state, path)

    with pytest.raises(SourceError, match="as NxD does"):
        table(save_v2(room / "tag", 4, multiplier=2, save=swapped))


def test_equal_heads_cannot_tell_the_pattern(room: Path) -> None:
    tensors = truth()
    tensors[f"{LAYER}.self_attn.k_proj.weight"].zero_()
    with pytest.raises(SourceError, match="cannot be told"):
        table(save_v2(room / "tag", 4, multiplier=2, tensors=tensors))


def test_pipeline_stages_keep_their_layers_apart(room: Path) -> None:
    folder = save_v2(room / "tag", 2, 3, multiplier=1)
    shards = read_nxd(folder)
    assert (shards.mesh.tp, shards.mesh.pp) == (2, 3)
    assert shards.stages["model.layers.1.self_attn.o_proj.weight"] == (1,)
    check(folder, truth())


def test_a_tied_head_may_be_stored_or_not(room: Path) -> None:
    tensors = truth(tied=True)
    check(save_v2(room / "without", 2, 2, multiplier=1, tensors=tensors), tensors, tied=True)
    both = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    found = check(save_v2(room / "with", 2, 2, multiplier=1, tensors=both), tensors, tied=True)
    assert len(found["model.embed_tokens.weight"].copies) == 2


def test_xser_files_are_followed(room: Path) -> None:
    folder = save_v2(room / "tag", 2, multiplier=1, save=save_xser)
    check(folder, truth())
    path = folder / "model" / "dp_rank_00_tp_rank_01_pp_rank_00.pt.tensors" / "tensor_3.pt"
    path.unlink()
    with pytest.raises(SourceError, match=r"tensor_3\.pt: cannot be read"):
        read_nxd(folder)


@pytest.mark.parametrize("xser", [False, True])
def test_v1_files_and_training_states_are_read(room: Path, xser: bool) -> None:
    tensors = truth()
    for rank in range(2):
        state: Any = {"model": shard(tensors, 2, rank, multiplier=1), "step": 7}
        if xser:
            save_xser(state["model"], room / f"tp_rank_{rank:02d}_pp_rank_00")
        else:
            (room / f"tp_rank_{rank:02d}_pp_rank_00").mkdir()
            torch.save(state, room / f"tp_rank_{rank:02d}_pp_rank_00" / "checkpoint.pt")
    check(room, tensors)
    assert read_nxd(room).contents.others == ({} if xser else {"step": "7"})


# --- optimum-neuron's metadata ----------------------------------------------------------------------------------------


def metadata(tp: int, multiplier: int, **changes: Any) -> dict[str, Any]:
    """What optimum-neuron writes for one stage, as far as it matters."""
    attention = {
        "gqa_qkv_projection_name": "qkv_proj",
        "query_projection_name": "q_proj",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "kv_size_multiplier": multiplier,
        "fuse_qkv": False,
        "bias": False,
        "tp_size": tp,
        "peft_type": None,
    }
    fused = {
        "fused_linear_name": "gate_up_proj",
        "linear_names": ["gate_proj", "up_proj"],
        "bias": False,
        "fuse_axis": 0,
        "original_dims": [24, 24],
        "tp_size": tp,
        "peft_type": None,
    }
    for key, value in changes.items():
        (attention if key in attention else fused)[key] = value
    cut = {"tensor_model_parallel": True, "partition_stride": 1, "num_partitions": tp}
    return {
        "parameters": {
            "model.norm.weight": {"tensor_model_parallel": False},
            f"{LAYER}.self_attn.o_proj.weight": {**cut, "partition_dim": 1},
            f"{LAYER}.self_attn.qkv_proj.weight_q": {**cut, "partition_dim": 0},
        },
        "model_weight_transformation_specs": [
            {
                "module_fully_qualified_name": f"{LAYER}.self_attn",
                "specs": [["GQAQKVColumnParallelLinearSpec", attention]],
            },
            {"module_fully_qualified_name": f"{LAYER}.mlp", "specs": [["FusedLinearsSpec", fused]]},
        ],
    }


def optimum(folder: Path, tp: int, multiplier: int, document: object) -> Path:
    save_v2(folder / "shards", tp, multiplier=multiplier)
    (folder / "shards" / "mp_metadata_pp_rank_0.json").write_text(json.dumps(document))
    return folder


def test_metadata_say_the_order_of_queries(room: Path) -> None:
    folder = optimum(room / "run", 4, 2, metadata(4, 2))
    assert locate_nxd(folder) == folder / "shards" / "model"
    check(folder, truth())
    check(folder, truth(), queries="follow")
    with pytest.raises(PolicyError, match="natural contradicts the metadata beside the shards, which says follow"):
        table(folder, queries="natural")


def test_queries_cannot_follow_heads_that_are_repeated_in_a_row(room: Path) -> None:
    folder = save_v2(room / "tag", 4, multiplier=2, pattern="interleaved")
    check(folder, truth(), queries="natural")
    with pytest.raises(PolicyError, match="leaves query heads in natural order"):
        table(folder, queries="follow")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_size_multiplier": 4}, "state kv_size_multiplier 4"),
        ({"tp_size": 8}, "is for tp 8, but there are 4 tensor ranks"),
        ({"linear_names": ["up_proj", "gate_proj"]}, "as no Qwen3 does"),
        ({"fuse_axis": 1}, "as no Qwen3 does"),
        ({"peft_type": "lora"}, "lora adapters"),
        ({"kv_size_multiplier": "x"}, "is not metadata that optimum-neuron writes"),
    ],
)
def test_metadata_that_contradict_are_refused(room: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SourceError, match=words):
        table(optimum(room / "run", 4, 2, metadata(4, 2, **changes)))


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "expected a JSON object"),
        ({}, "is not metadata"),
        ({"parameters": {}, "model_weight_transformation_specs": [7]}, "is not metadata"),
        ({"parameters": 7, "model_weight_transformation_specs": []}, "is not metadata"),
        (
            {"parameters": {}, "model_weight_transformation_specs": [{"specs": [["NewSpec", {"tp_size": 4}]]}]},
            "'NewSpec' is not known",
        ),
        (
            {
                "parameters": {"lm_head.weight": {"tensor_model_parallel": True, "partition_dim": 1}},
                "model_weight_transformation_specs": [],
            },
            "lm_head.weight is cut along dim 1",
        ),
    ],
)
def test_other_json_is_refused(room: Path, document: object, words: str) -> None:
    with pytest.raises(SourceError, match=words):
        table(optimum(room / "run", 4, 2, document))


def test_pickled_metadata_are_refused_and_do_not_run(room: Path) -> None:
    folder = optimum(room / "run", 4, 2, metadata(4, 2))
    (folder / "shards" / "mp_metadata_pp_rank_0.pt").write_bytes(pickle.dumps({}))
    with pytest.raises(SourceError, match="older optimum-neuron"):
        read_nxd(folder)


# --- broken ones ------------------------------------------------------------------------------------------------------


def test_an_unfinished_save_is_refused(room: Path) -> None:
    folder = save_v2(room / "tag", 2, multiplier=1)
    (folder / "done").unlink()
    for place in (folder, folder / "model"):
        with pytest.raises(SourceError, match="no file 'done'"):
            read_nxd(place)


def test_the_converter_leaves_no_marks(room: Path) -> None:
    folder = save_v2(room / "tag", 2, multiplier=1)
    for name in ("done", "checkpoint"):
        (folder / name).unlink()
    (folder / "optim").rmdir()
    check(folder, truth())


def test_missing_ranks_are_named(room: Path) -> None:
    folder = save_v2(room / "tag", 4, 2, multiplier=2)
    (folder / "model" / "dp_rank_00_tp_rank_01_pp_rank_01.pt").unlink()
    with pytest.raises(SourceError, match="1 of 8 ranks:\n  - tensor rank 1 of pipeline rank 1"):
        read_nxd(folder)


def test_a_lost_last_rank_shows_in_the_shapes(room: Path) -> None:
    folder = save_v2(room / "tag", 4, multiplier=2)
    (folder / "model" / "dp_rank_00_tp_rank_03_pp_rank_00.pt").unlink()
    with pytest.raises(MappingError):
        table(folder, queries="follow")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda state: state.pop("model.norm.weight"), "lacks model.norm.weight, which another rank"),
        (lambda state: state.update(extra=torch.ones(1)), "lacks extra, which another rank"),
        (lambda state: state.update({"model.norm.weight": torch.ones(10)}), "is F32"),
        (lambda state: state.update({"model.norm.weight": torch.ones(11).bfloat16()}), "they are of different runs"),
    ],
)
def test_a_rank_of_another_run_is_named(room: Path, edit: Callable[[State], object], words: str) -> None:
    folder = save_v2(room / "tag", 2, multiplier=1)
    path = folder / "model" / "dp_rank_00_tp_rank_01_pp_rank_00.pt"
    state = torch.load(path)
    edit(state)
    torch.save(state, path)
    with pytest.raises(SourceError, match=words):
        read_nxd(folder)


def test_hostile_references_stay_inside(room: Path) -> None:
    def hostile(state: State, path: Path) -> None:
        with fake_reference() as kind:
            reference = kind()
            reference.tid = "../../../../etc/passwd"
            torch.save({"model.norm.weight": reference}, path)

    with pytest.raises(SourceError, match="TensorReference has no number"):
        read_nxd(save_v2(room / "tag", 1, multiplier=1, save=hostile))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = save_v2(tmp_path_factory.mktemp("nxd") / "tag", 1, multiplier=1)
    return (folder / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt").read_bytes()


@given(data=st.data())
def test_cuts_and_flips_are_read_or_refused(whole: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(whole) - 1))
    raw = bytearray(whole)
    if data.draw(st.booleans()):
        raw = raw[:at]
    else:
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
    with scratch() as room:
        (room / "model").mkdir()
        (room / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt").write_bytes(raw)
        with contextlib.suppress(ConversionError):
            table(room)
