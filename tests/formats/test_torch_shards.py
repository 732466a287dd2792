"""Folders of torch's distributed safetensors writer, written by torch itself in two processes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qwen3conv.converters.boxes import Box
from qwen3conv.converters.dtypes import TORCH_NAME
from qwen3conv.converters.errors import SourceError
from qwen3conv.converters.stores.contents import Contents
from qwen3conv.converters.stores.safetensors import read_safetensors
from qwen3conv.converters.stores.torch_shards import read_torch_shards

FILE_OF = {"rows": 1, "columns": 1, "one_row": 1, "whole": 2, "scalar": 2, "cube": 2, "plain": 2}


def originals() -> dict[str, Tensor]:
    return {
        "rows": torch.arange(15.0).reshape(5, 3),
        "columns": (100 + torch.arange(24)).reshape(4, 6).bfloat16(),
        "one_row": 200 + torch.arange(4.0).reshape(1, 4),
        "whole": 300 + torch.arange(7.0),
        "scalar": torch.tensor(400.5),
        "cube": 500 + torch.arange(30).reshape(3, 5, 2).double(),
        "plain": (600 + torch.arange(3)).half(),
    }


def write_as_rank(rank: int, out: Path) -> None:
    """One of two processes: the same state dict in one file, in two files, and consolidated by torch as well."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    placements: dict[str, Placement] = {
        "rows": Shard(0),
        "columns": Shard(1),
        "one_row": Shard(0),  # rank 1 holds none of it
        "whole": Replicate(),
        "scalar": Replicate(),
        "cube": Shard(1),
    }
    state = originals()
    for name, files, consolidate in (("one", None, False), ("two", FILE_OF, False), ("consolidated", FILE_OF, True)):
        writer = dcp.HuggingFaceStorageWriter(
            str(out / name), fqn_to_index_mapping=files, save_distributed=True, enable_consolidation=consolidate
        )
        dcp.save(
            {
                fqn: distribute_tensor(tensor, mesh, [placements[fqn]]) if fqn in placements else tensor
                for fqn, tensor in state.items()
            },
            storage_writer=writer,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.start_processes(write_as_rank, (Path(sys.argv[1]),), nprocs=2, start_method="fork")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("saved")
    subprocess.run([sys.executable, __file__, str(out)], check=True)
    return out


@pytest.fixture
def two(saved: Path, tmp_path: Path) -> Path:
    """A copy of the two-file save, to be damaged."""
    return shutil.copytree(saved / "two", tmp_path / "two")


def rebuild(folder: Path, contents: Contents) -> dict[str, Tensor]:
    """Every tensor, put together from the bytes that its chunks point to."""
    tensors = {}
    for name, stored in contents.tensors.items():
        dtype = getattr(torch, TORCH_NAME[stored.spec.dtype])
        whole = torch.full(stored.spec.shape, 77, dtype=dtype)
        for chunk in stored.chunks:
            with (folder / chunk.file).open("rb") as stream:
                stream.seek(chunk.offset)
                raw = bytearray(stream.read(chunk.box.volume * dtype.itemsize))
            part = torch.frombuffer(raw, dtype=dtype).reshape(chunk.box.size)
            whole[tuple(slice(a, b) for a, b in zip(chunk.box.start, chunk.box.stop, strict=True))] = part
        tensors[name] = whole
    return tensors


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("kind", ["one", "two"])
def test_pieces_of_two_ranks_rebuild_every_tensor(saved: Path, kind: str) -> None:
    contents = read_torch_shards(saved / kind)
    assert_same(rebuild(saved / kind, contents), originals())
    assert contents.metadata == {"format": "pt", "DCP_VERSION": "1.0"}
    assert contents.files == {path.name: path.stat().st_size for path in (saved / kind).iterdir()}
    rows = contents.tensors["rows"]
    assert [chunk.box for chunk in rows.chunks] == [Box((0, 0), (3, 3)), Box((3, 0), (2, 3))]
    assert len(contents.tensors["one_row"].chunks) == 1  # the empty piece of rank 1 is no chunk
    assert len(contents.tensors["whole"].chunks) == 1


def test_shards_below_a_consolidated_model_are_found(saved: Path) -> None:
    folder = saved / "consolidated"
    contents = read_torch_shards(folder)
    assert all(file.startswith("sharded/shard-0000") for file in contents.files)
    assert_same(rebuild(folder, contents), originals())
    # What torch made of them has headers that are not padded to 8 bytes, and zeros for scalars (torch 2.13).
    consolidated = rebuild(folder, read_safetensors(folder))
    assert_same(consolidated, {**originals(), "scalar": torch.tensor(0.0)})


def refusal(folder: Path) -> str:
    with pytest.raises(SourceError) as caught:
        read_torch_shards(folder)
    return str(caught.value)


def shard(rank: int, index: int = 1, count: int = 2) -> str:
    return f"shard-{rank:05d}-model-{index:05d}-of-{count:05d}.safetensors"


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("index", [1, 2])
def test_a_file_that_one_rank_lost_is_named(two: Path, rank: int, index: int) -> None:
    (two / shard(rank, index)).unlink()
    assert f"file {index} of 2 is missing for rank {rank}" in refusal(two)


def test_a_file_that_every_rank_lost_is_named(two: Path) -> None:
    (two / shard(1, 1)).unlink()
    (two / shard(2, 1)).unlink()
    assert "file 1 of 2 is missing for every rank" in refusal(two)


def test_a_lost_rank_is_named(two: Path) -> None:
    (two / shard(1, 1)).unlink()
    (two / shard(1, 2)).unlink()
    assert "no file of rank 1 (2 is there)" in refusal(two)


def test_ranks_of_other_pipeline_stages_need_no_file(tmp_path: Path) -> None:
    """Ranks 1 and 2 hold the first stage, 3 and 4 the second; no tensor of file 2 lies in the first."""
    put(tmp_path, 1, {"a": (torch.tensor([1, 2]), [0])}, 1)
    put(tmp_path, 2, {"a": (torch.tensor([3]), [2])}, 1)
    put(tmp_path, 3, {"b": (torch.tensor([4]), [0]), "norm": (torch.tensor([5]), [0])}, 1)
    put(tmp_path, 4, {"b": (torch.tensor([6]), [1])}, 1)
    put(tmp_path, 3, {"c": (torch.tensor([7]), [0])}, 2)
    put(tmp_path, 4, {"c": (torch.tensor([8]), [1])}, 2)
    expected = {"a": [1, 2, 3], "b": [4, 6], "norm": [5], "c": [7, 8]}
    found = rebuild(tmp_path, read_torch_shards(tmp_path))
    assert {name: tensor.tolist() for name, tensor in found.items()} == expected
    (tmp_path / shard(4, 2)).unlink()
    assert "file 2 of 2 is missing for rank 4" in refusal(tmp_path)


def put(folder: Path, rank: int, pieces: dict[str, tuple[Tensor, object]], index: int = 1, count: int = 2) -> None:
    """Write one rank's file as torch does."""
    info = {name: {"saved_offsets": offsets} for name, (_, offsets) in pieces.items()}
    tensors = {name: tensor for name, (tensor, _) in pieces.items()}
    metadata = {"DCP_SHARDING_INFO": json.dumps(info), "format": "pt"}
    save_file(tensors, folder / shard(rank, index, count), metadata=metadata)


def put_pair(folder: Path, one: tuple[Tensor, object], two: tuple[Tensor, object]) -> Path:
    """One tensor ``x`` in two ranks."""
    put(folder, 1, {"x": one}, count=1)
    put(folder, 2, {"x": two}, count=1)
    return folder


def test_pieces_that_overlap_are_refused(tmp_path: Path) -> None:
    text = refusal(put_pair(tmp_path, (torch.ones(2, 3), [0, 0]), (torch.ones(2, 2), [1, 2])))
    assert f"'x': [0:2, 0:3] in {shard(1, 1, 1)} overlaps [1:3, 2:4] in {shard(2, 1, 1)}" in text


def test_a_scalar_held_twice_is_refused(tmp_path: Path) -> None:
    assert "overlaps" in refusal(put_pair(tmp_path, (torch.tensor(1.0), []), (torch.tensor(1.0), [])))


def test_a_hole_between_pieces_is_refused(tmp_path: Path) -> None:
    text = refusal(put_pair(tmp_path, (torch.ones(2, 3), [0, 0]), (torch.ones(2, 3), [3, 0])))
    assert "'x': 3 elements of shape [5, 3] are in none of the pieces (ranks [1, 2])" in text


def test_pieces_of_a_checkerboard_meet_without_overlap(tmp_path: Path) -> None:
    whole = torch.arange(35).reshape(5, 7)
    rank = 0
    for rows in ((0, 3), (3, 5)):
        for columns in ((0, 2), (2, 6), (6, 7)):
            rank += 1
            piece = whole[rows[0] : rows[1], columns[0] : columns[1]].contiguous()
            put(tmp_path, rank, {"x": (piece, [rows[0], columns[0]])}, count=1)
    assert torch.equal(rebuild(tmp_path, read_torch_shards(tmp_path))["x"], whole)


@pytest.mark.parametrize("other", [torch.ones(2, dtype=torch.bfloat16), torch.ones(2, 1)])
def test_pieces_of_different_kinds_are_refused(tmp_path: Path, other: Tensor) -> None:
    text = refusal(put_pair(tmp_path, (torch.ones(2), [0]), (other, [2] + [0] * (other.dim() - 1))))
    assert "'x': its pieces differ" in text


@pytest.mark.parametrize("offsets", [None, "0", [], [0, 0], [-1], [True], [0.0]])
def test_an_offset_that_is_none_is_refused(tmp_path: Path, offsets: object) -> None:
    put(tmp_path, 1, {"x": (torch.ones(2), offsets)}, count=1)
    assert f"{shard(1, 1, 1)}: DCP_SHARDING_INFO" in refusal(tmp_path)


@pytest.mark.parametrize("info", [None, "{", "[]", '{"x": {"saved_offsets": [0]}, "y": {"saved_offsets": [0]}}', "{}"])
def test_sharding_info_that_does_not_match_the_file_is_refused(tmp_path: Path, info: str | None) -> None:
    metadata = {"format": "pt"} if info is None else {"DCP_SHARDING_INFO": info}
    save_file({"x": torch.ones(2)}, tmp_path / shard(1, 1, 1), metadata=metadata)
    text = refusal(tmp_path)
    assert f"{shard(1, 1, 1)}: " in text
    assert "DCP_SHARDING_INFO" in text


def test_files_of_two_saves_are_not_mixed(two: Path) -> None:
    other = two / shard(3, 1, 3)
    shutil.copy(two / shard(1, 1), other)
    assert "mixes the files of several saves: they say 'of' 2, 3" in refusal(two)
    other.rename(two / shard(1, 1).replace("00001-of", "000001-of"))  # another spelling of a file that is there
    assert "mixes the files of several saves" in refusal(two)


def test_two_sets_of_shards_are_ambiguous(two: Path) -> None:
    shutil.copytree(two, two / "sharded")
    assert "holds shards and so does its sharded/" in refusal(two)


def test_a_number_beyond_the_count_is_refused(two: Path) -> None:
    shutil.copy(two / shard(1, 2), two / shard(0, 3))
    assert f"{shard(0, 3)}: ranks and files count from 1, and files up to 2" in refusal(two)


def test_a_folder_without_shards_is_refused(tmp_path: Path) -> None:
    assert "holds a file named shard-<rank>-model-<i>-of-<n>.safetensors" in refusal(tmp_path)
    assert "holds a file named" in refusal(tmp_path / "absent")


def test_a_truncated_shard_is_named(two: Path) -> None:
    path = two / shard(2, 2)
    path.write_bytes(path.read_bytes()[:-5])
    assert f"{shard(2, 2)}: is truncated: 5 bytes" in refusal(two)
