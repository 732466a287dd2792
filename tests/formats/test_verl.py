"""verl's per-rank pickles, written by four real ranks (FSDP2, HSDP, TP on gloo), are read bit for bit.

The truth is the whole tensors that the ranks cut up; nothing of the reader takes part in writing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

from qwen3conv.converters.errors import SourceError
from qwen3conv.converters.files import Files
from qwen3conv.converters.layouts import HF, bind, solve_geometry
from qwen3conv.converters.planning import Table, tabulate
from qwen3conv.converters.reading import first_difference
from qwen3conv.converters.stores.verl import read_verl
from tests.conversions import differing
from tests.laws.tiny import scratch
from tests.real_checkpoints import RANKED, RealCheckpoint, ranked_session
from tests.stored import assemble

VERL = [name for name, _, _, writer in RANKED if writer == "verl"]
KEPT = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"
State = dict[str, Any]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RealCheckpoint]:
    return ranked_session(tmp_path_factory)


def rank_file(rank: int, world: int = 4) -> str:
    return f"model_world_size_{world}_rank_{rank}.pt"


def small(source: RealCheckpoint, folder: Path) -> Path:
    """A copy with two tensors."""
    folder.mkdir()
    for path in source.folder.glob("*.json"):
        shutil.copy(path, folder)
    for rank in range(4):
        change(folder, rank, lambda state: None, source.folder)
        shutil.copy(source.folder / f"extra_state_world_size_4_rank_{rank}.pt", folder)
    return folder


def change(folder: Path, rank: int, edit: Callable[[State], object], source: Path | None = None) -> None:
    """Let torch load one rank's file, ``edit`` it and save it again."""
    state = torch.load((source or folder) / rank_file(rank), weights_only=False)
    state = {name: value for name, value in state.items() if name in KEPT or source is None}
    for value in state.values():
        if isinstance(value, DTensor):
            value._local_tensor = value._local_tensor.clone()  # or a slice drags the whole block's storage along
    edit(state)
    torch.save(state, folder / rank_file(rank))


@pytest.fixture(scope="module")
def sound(ranked: dict[str, RealCheckpoint], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small(ranked["verl"], tmp_path_factory.mktemp("small") / "checkpoint")


@pytest.fixture
def folder(sound: Path, room: Path) -> Path:
    return shutil.copytree(sound, room / "checkpoint")


def refusal(folder: Path) -> str:
    with pytest.raises(SourceError) as caught:
        read_verl(folder)
    return str(caught.value)


def table(folder: Path) -> Table:
    contents = read_verl(folder)
    geometry = solve_geometry(HF, {name: stored.spec.shape for name, stored in contents.tensors.items()})
    return tabulate(bind(HF, geometry, tied=False), contents.tensors, label="hf", where=str(folder))


# --- whole ones -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VERL)
def test_every_bit_is_found(name: str, ranked: dict[str, RealCheckpoint]) -> None:
    source = ranked[name]
    assert differing(assemble(source.folder, read_verl(source.folder)), source.tensors()) == []


def test_the_real_placements_are_among_them(ranked: dict[str, RealCheckpoint]) -> None:
    """Or the test above would prove less than it seems to."""

    def placed(name: str) -> str:
        return (ranked[name].folder.parent / "placements.json").read_text()

    assert "_StridedShard" in placed("verl-fsdp-tp")
    assert "Replicate" in placed("verl-hybrid")
    assert "Shard(dim=1)" in placed("verl-tp4")
    state = torch.load(ranked["verl"].folder / rank_file(3), weights_only=False)
    sizes = {tuple(value._local_tensor.shape) for value in state.values()}
    assert {shape[0] for shape in sizes} >= {81}  # 330 rows over four ranks: 83 each, 81 on the last


def test_a_single_rank_holds_plain_tensors(ranked: dict[str, RealCheckpoint], room: Path) -> None:
    truth = ranked["verl"].tensors()
    torch.save(truth, room / rank_file(0, 1))
    assert differing(assemble(room, read_verl(room)), truth) == []


def test_replicas_are_copies_of_each_parameter(ranked: dict[str, RealCheckpoint]) -> None:
    assert {len(entry.copies) for entry in table(ranked["verl"].folder).values()} == {1}
    copies = table(ranked["verl-hybrid"].folder)
    assert {len(entry.copies) for entry in copies.values()} == {2}
    with Files(ranked["verl-hybrid"].folder, os.O_RDONLY) as files:
        assert {first_difference(entry, files) for entry in copies.values()} == {None}


def test_replicas_that_differ_are_found(ranked: dict[str, RealCheckpoint], room: Path) -> None:
    folder = Path(shutil.copytree(ranked["verl-hybrid"].folder, room / "checkpoint"))
    weight = "model.layers.1.mlp.up_proj.weight"

    def edit(state: State) -> None:
        state[weight]._local_tensor[3, 5] += 1

    change(folder, 3, edit)
    with Files(folder, os.O_RDONLY) as files:
        found = {name: first_difference(entry, files) for name, entry in table(folder).items()}
    assert found.pop(weight) == 50 + 3  # the second half of 100 rows
    assert set(found.values()) == {None}


def test_what_is_no_tensor_is_listed(folder: Path) -> None:
    for rank in range(4):
        change(folder, rank, lambda state: state.update(step=7))
    assert read_verl(folder).others == {"step": "7"}


# --- broken ones ------------------------------------------------------------------------------------------------------


def test_missing_ranks_are_named(folder: Path) -> None:
    (folder / rank_file(1)).unlink()
    (folder / rank_file(3)).unlink()
    text = refusal(folder)
    assert "lacks the files of 2 of 4 ranks" in text
    assert rank_file(1) in text
    assert rank_file(3) in text
    assert rank_file(0) not in text


def test_two_world_sizes_are_refused(folder: Path) -> None:
    shutil.copy(folder / rank_file(0), folder / rank_file(0, 8))
    assert "mixes checkpoints of 4 and 8 ranks" in refusal(folder)


def test_an_impossible_rank_is_refused(folder: Path) -> None:
    shutil.copy(folder / rank_file(0), folder / rank_file(4))
    assert f"{rank_file(4)}: no such rank among 4" in refusal(folder)


def test_a_huge_world_size_is_refused_at_once(room: Path) -> None:
    (room / rank_file(0, 9999999)).touch()
    text = refusal(room)
    assert "lacks the files of 9999998 of 9999999 ranks" in text
    assert len(text) < 4000


def test_fsdp_config_of_another_world_size_is_refused(folder: Path) -> None:
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 8}))
    assert "world_size 8, but the files are those of 4 ranks" in refusal(folder)


def test_files_of_a_smaller_run_renamed_are_refused(folder: Path) -> None:
    for rank in range(2):
        (folder / rank_file(rank)).rename(folder / rank_file(rank, 2))
    for path in (folder / rank_file(2), folder / rank_file(3), folder / "fsdp_config.json"):
        path.unlink()
    assert "but there are ranks 0 to 1" in refusal(folder)


def test_ranks_with_swapped_names_are_refused(folder: Path) -> None:
    """Their shapes are the same, but each file says which rank wrote it."""
    (folder / rank_file(3)).rename(folder / "away")
    (folder / rank_file(0)).rename(folder / rank_file(3))
    (folder / "away").rename(folder / rank_file(0))
    text = refusal(folder)
    assert f"{rank_file(0)}: was written by rank 3, not by rank 0" in text
    assert f"{rank_file(3)}: was written by rank 0, not by rank 3" in text


def resized(state: State) -> None:
    tensor = state[KEPT[1]]
    tensor._spec.tensor_meta = tensor._spec.tensor_meta._replace(shape=torch.Size((96, 100)))
    tensor._local_tensor = torch.zeros(24, 100, dtype=torch.bfloat16)


def widened(state: State) -> None:
    tensor = state[KEPT[1]]
    tensor._local_tensor = tensor._local_tensor.float()
    tensor._spec.tensor_meta = tensor._spec.tensor_meta._replace(dtype=torch.float32)


def shortened(state: State) -> None:
    state[KEPT[1]]._local_tensor = state[KEPT[1]]._local_tensor[:-1].clone()


def half_widened(state: State) -> None:
    state[KEPT[1]]._local_tensor = state[KEPT[1]]._local_tensor.float()


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (resized, "[96, 100] by (Shard(0)) over fsdp 4, on rank 0 it is BF16 [48, 100]"),
        (widened, "is F32 [48, 100] by (Shard(0)) over fsdp 4, on rank 0 it is BF16"),
        (shortened, "has shape [11, 100], but rank 2's part of [48, 100] by (Shard(0)) over fsdp 4 has [12, 100]"),
        (half_widened, "a DTensor of bfloat16 has a local tensor of float32"),
        (lambda state: state.pop(KEPT[1]), f"lacks '{KEPT[1]}', which rank 0 has"),
        (lambda state: state.update(extra=torch.zeros(2)), "'extra' is a plain tensor, but there are ranks 0 to 3"),
        (lambda state: state.update(extra=state[KEPT[0]]), "holds 'extra', which rank 0 does not"),
    ],
)
def test_a_rank_of_another_run_is_named(folder: Path, edit: Callable[[State], object], words: str) -> None:
    change(folder, 2, edit)
    text = refusal(folder)
    assert rank_file(2) in text
    assert words in text
    assert rank_file(1) not in text


def test_a_rank_of_another_step_is_named(folder: Path) -> None:
    path = folder / "extra_state_world_size_4_rank_1.pt"
    state = torch.load(path, weights_only=False)
    state["lr_scheduler"]["last_epoch"] = 2
    torch.save(state, path)
    assert f"{path.name}: the scheduler is at step 2, on rank 0 at 3" in refusal(folder)


def test_an_unreadable_extra_state_is_only_mentioned(folder: Path) -> None:
    name = "extra_state_world_size_4_rank_1.pt"
    torch.save({"lr_scheduler": Path("x")}, folder / name)
    assert "'pathlib" in read_verl(folder).others[name]


def test_partial_sums_are_refused(folder: Path) -> None:
    from torch.distributed.tensor import Partial

    def edit(state: State) -> None:
        tensor: DTensor = state[KEPT[0]]
        tensor._spec.placements = (Partial(),)

    change(folder, 0, edit)
    assert "Partial: its ranks hold terms of a sum" in refusal(folder)


@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_and_nothing_else_happens(sound: Path, data: st.DataObject) -> None:
    raw = bytearray((sound / rank_file(1)).read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        raw = raw[:at]
    else:
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
    with scratch() as room:
        folder = Path(shutil.copytree(sound, room / "checkpoint"))
        (folder / rank_file(1)).write_bytes(raw)
        with contextlib.suppress(SourceError):
            assert len(read_verl(folder).tensors) == len(KEPT)
