"""What a rank holds by our arithmetic is what torch's DTensor gives it: shapes and offsets on meshes of fake ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from qwen3conv.converters.errors import PolicyError
from qwen3conv.converters.geometry import Geometry
from qwen3conv.converters.layouts import Binding, bind, titan_layout
from qwen3conv.converters.placement import Mesh, check_mesh, rank_bindings
from qwen3conv.converters.variants import GEOMETRIES

DENSE = Geometry(330, 48, 2, 8, 4, 16, intermediate_size=72)
MOE = Geometry(330, 48, 2, 8, 4, 16, moe_intermediate_size=24, num_experts=6)
MESHES = [Mesh(tp=2), Mesh(fsdp=3), Mesh(tp=2, fsdp=2), Mesh(tp=4, fsdp=3), Mesh(fsdp=7), Mesh(tp=4, fsdp=16)]
EXPERT_MESHES = [
    Mesh(fsdp=2, ep=2),
    Mesh(tp=2, fsdp=2, ep=2),
    Mesh(fsdp=6, ep=3),
    Mesh(fsdp=12, ep=6),  # more ranks than experts: dim 1
    Mesh(tp=4, fsdp=3, ep=3),
]
T7 = titan_layout("T7")


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def torch_mesh(names: tuple[str, ...], sizes: tuple[int, ...], rank: int) -> DeviceMesh:
    """A mesh of ranks that do not exist, seen from ``rank``."""
    if dist.is_initialized():
        dist.destroy_process_group()
    world = 1
    for size in sizes:
        world *= size
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def placements(binding: Binding, mesh: Mesh) -> tuple[tuple[str, ...], tuple[int, ...], list[Placement]]:
    """What torchtitan 0.3.0 declares for a tensor: mesh axes, their sizes, placements."""
    stack, kind = len(binding.shape) == 3, binding.rule.parts[0].rsplit(".", 2)[-2]
    tp_dim = {
        **dict.fromkeys(("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0),
        **dict.fromkeys(("o_proj", "down_proj"), 1),
    }.get(kind)
    if stack:
        tp_dim = {0: 1, 1: 2}[tp_dim or 0]
        if mesh.ep > 1:
            dim = 1 if mesh.efsdp * mesh.ep > binding.shape[0] else 0
            fsdp: Placement = _StridedShard(0, split_factor=mesh.ep) if dim == 0 else Shard(1)
            return ("efsdp", "ep"), (mesh.efsdp, mesh.ep), [fsdp, Shard(0)]
    fsdp_dim = 1 if stack and mesh.fsdp > binding.shape[0] else 0
    tp: Placement = Replicate() if tp_dim is None else Shard(tp_dim)
    fsdp = _StridedShard(fsdp_dim, split_factor=mesh.tp) if tp_dim == fsdp_dim else Shard(fsdp_dim)
    return ("fsdp", "tp"), (mesh.fsdp, mesh.tp), [fsdp, tp]


def boxes(bindings: Iterator[Binding]) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Local shape and global offset of each stored tensor, read off its pieces."""
    found = {}
    for binding in bindings:
        if binding.rule.optional:
            continue
        first = binding.pieces[0]
        experts = [int(p.name.split(".experts.")[1].split(".")[0]) for p in binding.pieces if ".experts." in p.name]
        lead = (min(experts),) if len(binding.shape) == 3 else ()
        found[binding.name] = (binding.shape, (*lead, *first.box.start))
    return found


def check(geometry: Geometry, mesh: Mesh, ranks: Iterator[int] | range) -> None:
    whole = [binding for binding in bind(T7, geometry, tied=False) if not binding.rule.optional]
    for rank in ranks:
        ours = boxes(rank_bindings(T7, geometry, mesh, rank, tied=False))
        theirs = {}
        seen: dict[tuple[str, ...], DeviceMesh] = {}
        for binding in whole:
            names, sizes, placed = placements(binding, mesh)
            if names not in seen:
                seen[names] = torch_mesh(names, sizes, rank)
            shape, offset = compute_local_shape_and_global_offset(binding.shape, seen[names], placed)
            if all(shape):
                theirs[binding.name] = (tuple(shape), tuple(offset))
        assert ours == theirs, rank


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("geometry", [DENSE, MOE], ids=["dense", "moe"])
def test_every_rank_holds_what_dtensor_gives_it(geometry: Geometry, mesh: Mesh) -> None:
    check(geometry, mesh, range(mesh.ranks))


@pytest.mark.parametrize(
    "mesh",
    [Mesh(fsdp=2, ep=2), Mesh(tp=2, fsdp=2, ep=2), Mesh(fsdp=6, ep=3), Mesh(fsdp=12, ep=6), Mesh(tp=4, fsdp=3, ep=3)],
    ids=str,
)
def test_every_rank_holds_the_experts_that_dtensor_gives_it(mesh: Mesh) -> None:
    check(MOE, mesh, range(mesh.ranks))


@pytest.mark.parametrize("size", GEOMETRIES)
def test_real_sizes_on_64_ranks(size: str) -> None:
    geometry = replace(GEOMETRIES[size], num_hidden_layers=1)
    for mesh in (Mesh(tp=4, fsdp=16), *([Mesh(tp=4, fsdp=16, ep=16)] if geometry.is_moe else [])):
        check_mesh(mesh, geometry)
        check(geometry, mesh, range(0, 64, 7))


def test_a_mesh_that_divides_nothing_is_refused_with_every_reason() -> None:
    with pytest.raises(PolicyError) as caught:
        check_mesh(Mesh(tp=3, ep=4, fsdp=1, pp=3), MOE)
    for reason in ("tp 3 does not divide the 8", "4 key-value heads", "ep 4 does not divide the 6 experts", "pp 3"):
        assert reason in str(caught.value)
    with pytest.raises(PolicyError, match="dense"):
        check_mesh(Mesh(ep=2, fsdp=2), DENSE)


def test_fewer_key_value_heads_than_ranks_are_repeated_for_neighbours() -> None:
    mesh = Mesh(tp=8)
    starts = []
    for rank in range(8):
        held = {b.name: b for b in rank_bindings(T7, DENSE, mesh, rank, tied=False)}
        key = held["layers.0.attention.qkv_linear.wk.weight"]
        assert key.shape == (16, 48)
        starts.append(key.pieces[0].box.start[0])
    assert starts == [0, 0, 16, 16, 32, 32, 48, 48]
