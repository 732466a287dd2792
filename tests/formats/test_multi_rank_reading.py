"""Checkpoints that four ranks wrote are read bit for bit, and damaged ones are named.

The writers are torch 2.13's (FSDP2, DTensor, ``dcp.save``, ``HuggingFaceStorageWriter``), see ``multi_rank``.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from qwen3conv.converters.errors import SourceError
from qwen3conv.converters.inspection import inspect
from tests.conversions import convert, differing, fingerprint
from tests.models import read_tensors, saved_model
from tests.real_checkpoints import (
    RANKED,
    RealCheckpoint,
    ranked_session,
    read_model,
    save_dcp,
    titan_state_dict,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing")

READ = [name for name, _, _, writer in RANKED if writer in ("dcp", "hf-shards")]


class Ranked(NamedTuple):
    """What the ranks wrote, and the model folders that they started from."""

    made: dict[str, RealCheckpoint]
    sources: dict[str, Path]

    def source(self, name: str) -> Path:
        return self.sources["moe" if "moe" in name else "dense"]


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Ranked:
    sources = {name: saved_model(tmp_path_factory, name) for name in ("dense", "moe")}
    return Ranked(ranked_session(tmp_path_factory), sources)


@pytest.fixture(scope="module")
def whole(ranked: Ranked, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The fingerprint of a checkpoint's truth, stored whole: in a Hugging Face folder, or a DCP if there is a bias."""

    @cache
    def print_of(source: Path, biased: bool, truth: bytes) -> str:
        folder = tmp_path_factory.mktemp("whole")
        tensors, (_, config) = load(truth), read_model(source)
        if biased:
            return fingerprint(save_dcp(titan_state_dict("T7", tensors, config, expert_bias=0.01), folder / "dcp"))
        (folder / "model.safetensors").write_bytes(truth)
        shutil.copy(source / "config.json", folder)
        return fingerprint(folder)

    return lambda name: print_of(ranked.source(name), has_bias(name), ranked.made[name].truth.read_bytes())


def has_bias(name: str) -> bool:
    return name.startswith("titan-moe")


def pieces(folder: Path) -> dict[str, int]:
    """Stored chunks per tensor that have elements."""
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: sum(chunk.sizes.numel() > 0 for chunk in entry.chunks)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


# --- whole ones -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", READ)
def test_it_is_recognised_and_whole(name: str, ranked: Ranked) -> None:
    report = inspect(ranked.made[name].folder)
    expected = "torch-shards" if name.endswith("shards") else "titan" if name.startswith("titan") else "dcp-hf"
    assert (report.complete, report.format, report.problems) == (True, expected, ())


@pytest.mark.parametrize("name", READ)
def test_every_bit_arrives_in_a_hugging_face_folder(name: str, ranked: Ranked, room: Path) -> None:
    convert(ranked.made[name].folder, room / "hf", "hf", like=ranked.source(name), drop_expert_bias=has_bias(name))
    truth = ranked.made[name].tensors()
    expected = {key: tensor for key, tensor in truth.items() if not key.endswith("expert_bias")}
    assert (len(truth) > len(expected)) == has_bias(name)
    assert differing(read_tensors(room / "hf"), expected) == []


@pytest.mark.parametrize("name", [name for name in READ if name.startswith("titan-moe")])
def test_a_routing_bias_arrives_in_another_schema(name: str, ranked: Ranked, room: Path) -> None:
    convert(ranked.made[name].folder, room / "out", "titan", titan_schema="T2")
    biases = {f"layers.{n}.moe.expert_bias": torch.empty(5) for n in range(3)}
    dcp.load(biases, checkpoint_id=room / "out", no_dist=True)
    truth = ranked.made[name].tensors()
    assert differing(biases, {fqn: truth[f"model.{fqn.replace('.moe.', '.mlp.')}"] for fqn in biases}) == []


@pytest.mark.parametrize("name", READ)
def test_its_fingerprint_is_that_of_the_whole_tensors(name: str, ranked: Ranked, whole: Callable[[str], str]) -> None:
    assert fingerprint(ranked.made[name].folder) == whole(name)


def test_the_cuts_are_what_their_names_say(ranked: Ranked) -> None:
    """Or the tests above would prove less than they seem to."""

    def placed(name: str) -> dict[str, str]:
        found: dict[str, str] = json.loads((ranked.made[name].folder.parent / "placements.json").read_text())
        return found

    assert "_StridedShard(dim=0" in placed("titan-fsdp-tp")["layers.0.attention.qkv_linear.wq.weight"]
    assert "Shard(dim=1)" in placed("titan-fsdp-tp")["layers.0.attention.wo.weight"]
    assert "Shard(dim=2)" in placed("titan-moe-fsdp-tp")["layers.0.moe.routed_experts.inner_experts.w2_EDF"]
    assert "Shard(dim=1)" in placed("titan-moe-ep-dim-1")["layers.0.moe.routed_experts.inner_experts.w1_EFD"]
    assert pieces(ranked.made["titan-fsdp"].folder)["layers.0.feed_forward.w1.weight"] == 4
    # five experts over four ranks, two each: the last rank holds none
    assert pieces(ranked.made["titan-moe-ep4"].folder)["layers.0.moe.routed_experts.inner_experts.w1_EFD"] == 3
    metadata = dcp.FileSystemReader(ranked.made["titan-moe-fsdp"].folder).read_metadata()
    chunks = [
        c for e in metadata.state_dict_metadata.values() if isinstance(e, TensorStorageMetadata) for c in e.chunks
    ]
    assert any(chunk.sizes.numel() == 0 for chunk in chunks)  # some ranks hold nothing of some tensors
    by_file: dict[str, set[str]] = {}
    for index, info in dcp.FileSystemReader(ranked.made["titan-pp"].folder).read_metadata().storage_data.items():
        by_file.setdefault(info.relative_path, set()).add(index.fqn.split(".")[1])
    assert not any({"0", "2"} <= layers for layers in by_file.values())  # first and last layer on different ranks


# --- damaged ones -----------------------------------------------------------------------------------------------------


def damaged(folder: Path, copy: Path, damage: Callable[[Metadata], None]) -> Path:
    """A copy of a DCP folder whose ``.metadata`` went through ``damage`` as torch's own object."""
    shutil.copytree(folder, copy)
    with (copy / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    assert isinstance(metadata, Metadata)
    damage(metadata)
    with (copy / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)
    return copy


def move_chunk(metadata: Metadata, fqn: str, number: int, offsets: tuple[int, ...]) -> None:
    """Say that a chunk lies elsewhere in its tensor. Its bytes stay."""
    entry = metadata.state_dict_metadata[fqn]
    assert isinstance(entry, TensorStorageMetadata)
    chunk = entry.chunks[number]
    entry.chunks[number] = ChunkStorageMetadata(torch.Size(offsets), chunk.sizes)
    places = metadata.storage_data
    (index,) = (index for index in places if index.fqn == fqn and index.offset == chunk.offsets)
    places[MetadataIndex(fqn, torch.Size(offsets))] = places.pop(index)


def drop_chunk(metadata: Metadata, fqn: str, number: int) -> None:
    """Forget a chunk."""
    entry = metadata.state_dict_metadata[fqn]
    assert isinstance(entry, TensorStorageMetadata)
    chunk = entry.chunks.pop(number)
    for index in [i for i in metadata.storage_data if i.fqn == fqn and i.offset == chunk.offsets]:
        del metadata.storage_data[index]


def shifted(metadata: Metadata, fqn: str, by: int) -> tuple[int, tuple[int, ...]]:
    """The last chunk with elements that does not begin at the start, and where it would begin after a shift."""
    entry = metadata.state_dict_metadata[fqn]
    assert isinstance(entry, TensorStorageMetadata)
    number = max(n for n, chunk in enumerate(entry.chunks) if any(chunk.offsets) and chunk.sizes.numel())
    offsets = list(entry.chunks[number].offsets)
    dim = next(d for d, at in enumerate(offsets) if at)
    offsets[dim] += by
    return number, tuple(offsets)


def refusal(folder: Path, name: str, ranked: Ranked, room: Path) -> str:
    """What a conversion says; nothing is written, and ``inspect`` says the same."""
    with pytest.raises(SourceError) as refused:
        convert(folder, room / "hf", "hf", like=ranked.source(name), drop_expert_bias=True)
    assert not (room / "hf").exists()
    report = inspect(folder)
    assert not report.complete
    assert [str(refused.value)] == list(report.problems)
    return str(refused.value)


CUT = [
    ("titan-fsdp", "layers.1.feed_forward.w2.weight", "model.layers.1.mlp.down_proj.weight"),
    ("titan-fsdp-tp", "layers.0.attention.qkv_linear.wq.weight", "model.layers.0.self_attn.q_proj.weight"),
    ("titan-fsdp-tp", "layers.2.attention.wo.weight", "model.layers.2.self_attn.o_proj.weight"),
    ("titan-tp", "layers.2.feed_forward.w2.weight", "model.layers.2.mlp.down_proj.weight"),
    (
        "titan-moe-fsdp-tp",
        "layers.1.moe.routed_experts.inner_experts.w2_EDF",
        "model.layers.1.mlp.experts.4.down_proj.weight",
    ),
    (
        "titan-moe-ep",
        "layers.0.moe.routed_experts.inner_experts.w3_EFD",
        "model.layers.0.mlp.experts.4.up_proj.weight",
    ),
    ("hf-tp4", *("model.layers.1.mlp.down_proj.weight",) * 2),
    ("hf-moe-fsdp", *("model.layers.2.mlp.experts.3.up_proj.weight",) * 2),
]
"""Checkpoint, a tensor that was cut, and the parameter (the last one of a stack) that its last chunk holds."""


@pytest.mark.parametrize(("name", "fqn", "parameter"), CUT)
def test_a_shifted_chunk_is_named(name: str, fqn: str, parameter: str, ranked: Ranked, room: Path) -> None:
    """One place back: it overlaps what is there, and leaves a hole behind itself."""

    def damage(metadata: Metadata) -> None:
        number, offsets = shifted(metadata, fqn, -1)
        move_chunk(metadata, fqn, number, offsets)

    message = refusal(damaged(ranked.made[name].folder, room / "damaged", damage), name, ranked, room)
    if name == "titan-moe-ep":  # one expert back is where another begins
        assert f"'{fqn}': chunk [3:4, 0:24, 0:48] is listed twice" in message
    elif "_E" in fqn:  # the chunk of the last expert lies on those before it
        assert f"{parameter.replace('.4.', '.2.')}: chunks overlap: rows " in message
        assert f"{parameter}: chunks leave a hole: " in message
    else:
        assert f"{parameter}: chunks overlap: rows " in message


@pytest.mark.parametrize(("name", "fqn", "parameter"), CUT)
def test_a_forgotten_chunk_is_named(name: str, fqn: str, parameter: str, ranked: Ranked, room: Path) -> None:
    lost = []

    def damage(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata[fqn]
        assert isinstance(entry, TensorStorageMetadata)
        number, _ = shifted(metadata, fqn, 0)
        lost.append(entry.chunks[number].sizes.numel())
        drop_chunk(metadata, fqn, number)

    message = refusal(damaged(ranked.made[name].folder, room / "damaged", damage), name, ranked, room)
    assert f"{parameter}: chunks leave a hole: " in message
    assert f"{lost[0]} of " in message or "_E" in fqn  # what was stacked is told one by one


@pytest.mark.parametrize(("name", "fqn"), [case[:2] for case in CUT])
def test_a_chunk_that_reaches_outside_is_named(name: str, fqn: str, ranked: Ranked, room: Path) -> None:
    def damage(metadata: Metadata) -> None:
        number, offsets = shifted(metadata, fqn, 1)
        move_chunk(metadata, fqn, number, offsets)

    folder = damaged(ranked.made[name].folder, room / "damaged", damage)
    with pytest.raises(SourceError, match="reaches outside of shape") as refused:
        convert(folder, room / "hf", "hf", like=ranked.source(name))
    assert fqn in str(refused.value)


def test_every_damaged_tensor_is_named_at_once(ranked: Ranked, room: Path) -> None:
    """torch's own ``dcp.load`` fills what it can and says nothing of the rest."""
    broken = [f"layers.{layer}.feed_forward.w1.weight" for layer in range(3)]

    def damage(metadata: Metadata) -> None:
        for fqn in broken[:2]:
            drop_chunk(metadata, fqn, shifted(metadata, fqn, 0)[0])
        number, offsets = shifted(metadata, broken[2], -1)
        move_chunk(metadata, broken[2], number, offsets)

    folder = damaged(ranked.made["titan-fsdp"].folder, room / "damaged", damage)
    message = refusal(folder, "titan-fsdp", ranked, room)
    assert all(f"model.layers.{layer}.mlp.gate_proj.weight: chunks " in message for layer in range(3))
    state = {broken[0]: torch.full((100, 48), float("nan"))}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert state[broken[0]].isnan().any()


def test_swapped_chunks_of_one_size_are_beyond_any_check_but_the_fingerprint(ranked: Ranked, room: Path) -> None:
    """Placements are not stored, so two boxes that change places make up a whole tensor, of another model."""
    fqn = "layers.1.feed_forward.w1.weight"

    def damage(metadata: Metadata) -> None:
        places = metadata.storage_data
        first, second = (index for index in places if index.fqn == fqn and index.offset in ((0, 0), (25, 0)))
        places[first], places[second] = places[second], places[first]

    folder = damaged(ranked.made["titan-fsdp"].folder, room / "damaged", damage)
    assert inspect(folder).complete
    assert fingerprint(folder) != fingerprint(ranked.made["titan-fsdp"].folder)
