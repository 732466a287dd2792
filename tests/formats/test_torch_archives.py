"""Files that ``torch.save`` writes, read without torch: every tensor is found, and nothing in a pickle runs."""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import pickle
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import Replicate, Shard

from qwen3conv.converters.dtypes import TORCH_NAME
from qwen3conv.converters.errors import SourceError
from qwen3conv.converters.stores.dtensors import Grid, Mesh, Placement, Spread
from qwen3conv.converters.stores.pickles import Unfit
from qwen3conv.converters.stores.torch_archives import TorchFile, read_torch_file
from qwen3conv.converters.stores.torch_zip import StorageRef, TensorRef


def saved(value: object, path: Path, **options: Any) -> Path:
    torch.save(value, path, **options)
    return path


def elements(path: Path, content: TorchFile) -> dict[str, torch.Tensor]:
    """What lies at the places that were found."""
    found = {}
    raw = path.read_bytes()
    for name, tensor in content.tensors.items():
        dtype = getattr(torch, TORCH_NAME[tensor.dtype])
        size = math.prod(tensor.shape) * dtype.itemsize
        data = bytearray(raw[tensor.offset : tensor.offset + size])
        found[name] = (torch.frombuffer(data, dtype=dtype) if size else torch.empty(0, dtype=dtype)).reshape(
            tensor.shape
        )
    return found


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    expected = expected.detach().cpu()
    return found.dtype == expected.dtype and torch.equal(
        found.contiguous().view(torch.uint8) if found.dim() else found.reshape(1).view(torch.uint8),
        expected.contiguous().view(torch.uint8) if expected.dim() else expected.reshape(1).view(torch.uint8),
    )


def refusal(path: Path) -> str:
    with pytest.raises(SourceError) as caught:
        read_torch_file(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


# --- what is read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", sorted(TORCH_NAME))
def test_every_dtype_is_found(room: Path, code: str) -> None:
    tensor = torch.arange(24).to(torch.uint8).reshape(4, 6).repeat(1, 8).view(getattr(torch, TORCH_NAME[code]))
    if code == "BOOL":
        tensor = torch.arange(24).reshape(4, 6) % 3 == 0
    path = saved({"w": tensor, "v": tensor[1:3]}, room / "x.pt")
    content = read_torch_file(path)
    assert {name: t.dtype for name, t in content.tensors.items()} == {"w": code, "v": code}
    found = elements(path, content)
    assert same(found["w"], tensor)
    assert same(found["v"], tensor[1:3])


def test_a_state_dict_of_modules_is_read_with_shared_storage_and_buffers(room: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 3)
            self.head = nn.Linear(3, 7, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("bias", torch.tensor(2.5))
            self.register_buffer("none", torch.empty(0, 4))

    state = Model().state_dict()
    path = saved(state, room / "x.bin")
    content = read_torch_file(path)
    found = elements(path, content)
    assert list(found) == list(state)
    assert all(same(found[name], state[name]) for name in state)
    assert content.tensors["embed.weight"].offset == content.tensors["head.weight"].offset
    assert content.others == {}


def test_parameters_with_attributes_and_subclasses_are_tensors(room: Path) -> None:
    parameter = nn.Parameter(torch.arange(3.0))
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    tensor = torch.arange(4.0)
    tensor.partition_dim = 0  # type: ignore[attr-defined]
    path = saved({"p": parameter, "t": tensor, "q": nn.Parameter(torch.ones(2))}, room / "x.pt")
    found = elements(path, read_torch_file(path))
    assert same(found["p"], parameter)
    assert same(found["t"], tensor)
    assert same(found["q"], torch.ones(2))


def test_nested_dicts_are_flattened_and_the_rest_is_described(room: Path) -> None:
    shared = {"w": torch.arange(2.0)}
    value = {
        "model": OrderedDict({"layers": {0: {"w": torch.arange(5.0)}}}),
        "step": 7,
        "name": "run",
        "list": [torch.zeros(1)],
        "empty": {},
        "a": shared,
        "b": shared,
    }
    content = read_torch_file(saved(value, room / "x.pt"))
    assert list(content.tensors) == ["model.layers.0.w", "a.w"]
    assert content.others == {
        "step": "7",
        "name": "'run'",
        "list": "list of 1",
        "empty": "dict of 0",
        "b": "dict of 1",
    }


@pytest.mark.slow
def test_more_records_than_16_bits_count_are_found(room: Path) -> None:
    """The zip64 end record gives their number."""
    state = {f"n.{i}": torch.tensor([i]) for i in range(66_000)}
    path = saved(state, room / "x.pt")
    found = elements(path, read_torch_file(path))
    assert [int(tensor) for tensor in found.values()] == list(range(66_000))


def test_offsets_beyond_four_gib_are_found(tmp_path: Path) -> None:
    """zip64: two storages in front of the last, sparse so that no space is taken."""
    path = tmp_path / "x.pt"
    with torch.serialization.skip_data():
        torch.save({"big": torch.empty(5 << 30, dtype=torch.uint8), "last": torch.empty(3)}, path)
    content = read_torch_file(path)
    assert content.tensors["big"].shape == (5 << 30,)
    assert content.tensors["last"].offset > 5 << 30
    with path.open("r+b") as file:
        file.seek(content.tensors["last"].offset)
        file.write(torch.arange(3.0).numpy().tobytes())
    assert torch.equal(torch.load(path, mmap=True)["last"], torch.arange(3.0))


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_legacy_file_is_refused_by_name(room: Path) -> None:
    path = saved({"w": torch.ones(2)}, room / "x.pt", _use_new_zipfile_serialization=False)
    assert "legacy torch.save" in refusal(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty or begins with zeros"),
        (bytes(300), "is empty or begins with zeros"),
        (bytes(257).replace(b"\0", b"a") + b"ustar" + bytes(500), "tar file"),
        (b"hello", "is not a torch.save archive"),
        (b"PK\x03\x04", "cut short or damaged"),
    ],
)
def test_other_files_are_refused(room: Path, content: bytes, words: str) -> None:
    (room / "x.pt").write_bytes(content)
    assert words in refusal(room / "x.pt")


def test_no_file_a_folder_and_a_pipe_are_refused(room: Path) -> None:
    assert "No such file" in refusal(room / "x.pt")
    (room / "folder").mkdir()
    assert "not a regular file" in refusal(room / "folder")
    os.mkfifo(room / "pipe")
    assert "not a regular file" in refusal(room / "pipe")


def test_a_compressed_archive_is_refused(room: Path) -> None:
    with zipfile.ZipFile(saved({"w": torch.ones(9)}, room / "x.pt")) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(room / "x.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    assert "compressed" in refusal(room / "x.pt")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"w": torch.arange(6).reshape(2, 3).t()}, "call"),
        ({"w": torch.arange(9)[::2]}, "not row by row"),
        ({"w": torch.eye(3).to_sparse()}, "asks for 'torch._utils._rebuild_sparse_tensor'"),
        ({"w": torch.ones(2, dtype=torch.complex64)}, "'torch.ComplexFloatStorage'"),
        ({"w": argparse.Namespace(a=1)}, "asks for 'argparse.Namespace'"),
        ({"w": Path("x")}, "asks for 'pathlib"),
        ({("a", 1): torch.ones(1)}, "key of type tuple"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "holds 'a.b' twice"),
        ({"x" * 600: torch.ones(1)}, "impossible name"),
        ({"a\nb": torch.ones(1)}, "impossible name"),
        ([torch.ones(1)], "holds a list, not a dict"),
        (torch.ones(1), "not a dict"),
    ],
)
def test_what_is_no_state_dict_is_refused(room: Path, value: object, words: str) -> None:
    assert words in refusal(saved(value, room / "x.pt"))


def zip_of(pickled: bytes, path: Path) -> Path:
    """A ``torch.save`` archive with ``pickled`` as its ``data.pkl``."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(zipfile.ZipInfo("archive/data.pkl"), pickled)
        file.writestr(zipfile.ZipInfo("archive/byteorder"), "little")
    path.write_bytes(buffer.getvalue())
    return path


class Attack:
    """Runs ``call`` on ``args`` when it is unpickled the ordinary way."""

    def __init__(self, call: Callable[..., object], *args: object) -> None:
        self.what = call, args

    def __reduce__(self) -> Any:
        return self.what


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("call", [os.system, eval, exec, __import__, getattr, torch.load, torch.hub.load, pickle.loads])
def test_no_attack_runs(room: Path, protocol: int, call: Callable[..., object]) -> None:
    marker = room / "ran"
    for argument in (f"touch {marker}", f"open({str(marker)!r}, 'w')"):
        raw = pickle.dumps({"w": Attack(call, argument)}, protocol)
        assert "nothing was executed" in refusal(zip_of(raw, room / "x.pt"))
    assert not marker.exists()


def test_loops_depth_and_repetition_stay_small(room: Path) -> None:
    loop: dict[str, object] = {}
    loop["self"] = loop
    assert read_torch_file(zip_of(pickle.dumps(loop, 2), room / "x.pt")).others == {"self": "dict of 1"}
    deep: dict[str, object] = {}
    for _ in range(40):
        deep = {"d": deep}
    deep["d"] = {**deep}
    nested: object = 1
    for _ in range(40):
        nested = {"d": nested}
    assert "nested more than 16 deep" in refusal(zip_of(pickle.dumps(nested, 2), room / "x.pt"))
    wide: dict[str, object] = {"x": 1}
    for _ in range(14):
        wide = {f"k{i}": wide for i in range(50)}
    tracemalloc.start()
    content = read_torch_file(zip_of(pickle.dumps(wide, 2), room / "x.pt"))
    assert tracemalloc.get_traced_memory()[1] < 3 << 20
    tracemalloc.stop()
    assert len(content.others) < 1000


def test_a_shape_of_a_million_dims_is_refused_at_once(room: Path) -> None:
    path = saved({"w": torch.ones(2)}, room / "x.pt")
    with zipfile.ZipFile(path) as archive:
        raw = archive.read("x/data.pkl")
    # K\x02 \x85 is the shape (2,); a tuple of a million 2s takes its place
    forged = raw.replace(b"K\x02\x85", b"(" + b"K\x02" * 1_000_000 + b"t", 1)
    assert forged != raw
    assert "1000000 dims" in refusal(zip_of(forged, path))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "x.pt"
    state = nn.Linear(5, 3).state_dict()
    return saved({"model": state, "step": 7, "half": torch.arange(3).bfloat16()}, path).read_bytes()


@given(data=st.data())
def test_cuts_and_flips_give_a_source_error_or_the_same_tensors(whole: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(whole) - 1))
    raw = bytearray(whole)
    if data.draw(st.booleans()):
        raw = raw[:at]
    else:
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
    path = Path("/dev/shm" if Path("/dev/shm").is_dir() else ".") / f"qwen3conv-flip-{os.getpid()}.pt"
    try:
        path.write_bytes(raw)
        with contextlib.suppress(SourceError):
            assert list(read_torch_file(path).tensors) == ["model.weight", "model.bias", "half"]
    finally:
        path.unlink()


# --- DTensor arithmetic -----------------------------------------------------------------------------------------------


@given(
    mesh=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    shape=st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
    data=st.data(),
)
def test_boxes_are_those_of_torch(mesh: tuple[int, ...], shape: tuple[int, ...], data: st.DataObject) -> None:
    """torch's own arithmetic, for any mesh and any mix of Shard and Replicate, several cuts of one dim too."""
    dims = [data.draw(st.none() | st.integers(0, len(shape) - 1)) for _ in mesh]
    placements: list[TorchPlacement] = [Replicate() if dim is None else Shard(dim) for dim in dims]
    order = tuple(tuple(axis for axis, dim in enumerate(dims) if dim == d) for d in range(len(shape)))
    grid = Grid((), mesh, tuple(range(math.prod(mesh))))
    spread = Spread(shape, tuple(Placement(dim) for dim in dims), order, grid)
    for rank in grid.ranks:
        position = grid.position(rank)
        assert grid.rank(position) == rank
        sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, position.__getitem__, placements)
        box = spread.box(position)
        assert box.size == tuple(sizes)
        if box.volume:
            assert box.start == tuple(offsets)


def ranks_tensor(count: int, shape: tuple[int, ...]) -> TensorRef:
    return TensorRef(StorageRef("0", "I32", count), "I32", 0, shape)


def test_a_mesh_of_older_torch_is_understood() -> None:
    """torch 2.2 to 2.8: the ranks as a tensor of the mesh's shape."""
    mesh = Mesh()
    mesh.build({"device_type": "cuda", "mesh": ranks_tensor(4, (2, 2)), "mesh_dim_names": ("ddp", "fsdp")})
    assert mesh.grid((0, 1, 2, 3)) == Grid(("ddp", "fsdp"), (2, 2), (0, 1, 2, 3))
    assert mesh.grid((3, 2, 1, 0)).position(3) == (0, 0)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"mesh": 1},
        {"mesh": ranks_tensor(4, (2, 2)), "mesh_dim_names": ("a",)},
        {"mesh": ranks_tensor(1 << 30, (1 << 30,)), "mesh_dim_names": None},
        {"_layout": 1, "_rank_map": ranks_tensor(4, (4,))},
    ],
)
def test_an_impossible_mesh_is_refused(state: dict[object, object]) -> None:
    with pytest.raises(Unfit):
        Mesh().build(state)
