"""Laws over generated tiny models and meshes: cut, cut anew and joined is the same model, and each rank's file is what
the index says that it is.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3conv.converters.conversion import carry_out, prepare
from qwen3conv.converters.detection import open_checkpoint
from qwen3conv.converters.geometry import Geometry
from qwen3conv.converters.layouts import TITAN_SCHEMAS
from qwen3conv.converters.manifest import fingerprint_of
from qwen3conv.converters.placement import ONE_RANK, Mesh
from qwen3conv.converters.policies import Choices, settle
from qwen3conv.converters.verification import compute_records, verify
from tests.laws.tiny import content_of, geometries, scratch, write_tiny

pytestmark = pytest.mark.torch_free

INDEX = "qwen3conv-ranks.json"
LAYOUTS = ["hf", "hf-fused", "titan"]
SCHEMAS = [schema for schema in TITAN_SCHEMAS if schema != "T1"]

Tensors = dict[str, Any]
"""Arrays of 16-bit patterns by FQN."""


@st.composite
def meshes(draw: st.DrawFn, geometry: Geometry, *, tied: bool = False) -> Mesh:
    """Any mesh that can hold the model: uneven and empty FSDP shards, repeated KV heads, EP over a stage's ranks.

    A tied head is not for pipelines.
    """
    heads, kv_heads = geometry.num_attention_heads, geometry.num_key_value_heads
    tp = draw(
        st.sampled_from([n for n in range(1, heads + 1) if not heads % n and not (kv_heads % n and n % kv_heads)])
    )
    fsdp = draw(st.integers(1, 4))
    degrees = [n for n in range(1, (geometry.num_experts or 1) + 1) if not (geometry.num_experts or 1) % n]
    ep = draw(st.sampled_from([n for n in degrees if not fsdp * tp % n]))
    stages = 1 if tied else min(2, geometry.num_hidden_layers)
    return Mesh(tp=tp, fsdp=fsdp, ep=ep, pp=draw(st.integers(1, stages)))


def read_file(path: Path) -> Tensors:
    """A safetensors file of bfloat16 (or float32, as pairs of halves): the format itself, without our reader."""
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    header.pop("__metadata__", None)
    kinds = {"BF16": numpy.uint16, "F32": numpy.uint32}
    return {
        name: numpy.frombuffer(data[slice(*entry["data_offsets"])], kinds[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }


def cut_out(whole: Any, boxes: list[Any], shape: tuple[int, ...]) -> Any:
    """The boxes of a global tensor one after another, along the one dim in which together they have ``shape``."""
    parts = [whole[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))] for start, size in boxes]
    if len(parts) == 1:
        return parts[0]
    sums = [sum(part.shape[dim] for part in parts) for dim in range(len(shape))]
    (dim,) = (dim for dim in range(len(shape)) if sums[dim] == shape[dim])
    return numpy.concatenate(parts, dim)


def check_ranks(folder: Path, whole: Tensors, mesh: Mesh) -> None:
    """Every rank's file holds the boxes of ``whole`` that the index says, each element as often as it says."""
    index = json.loads((folder / INDEX).read_text())
    assert index["mesh"] == {"tp": mesh.tp, "fsdp": mesh.fsdp, "ep": mesh.ep, "pp": mesh.pp}
    assert set(index["tensors"]) == set(whole)
    seen = {name: numpy.zeros(tensor.shape, int) for name, tensor in whole.items()}
    for rank, entry in enumerate(index["ranks"]):
        held = read_file(folder / f"rank-{rank:05}-of-{mesh.ranks:05}.safetensors")
        assert set(held) == set(entry["tensors"])
        for name, boxes in entry["tensors"].items():
            expected = cut_out(whole[name], boxes, held[name].shape)
            assert numpy.array_equal(held[name], expected), (rank, name)
            for start, size in boxes:
                seen[name][tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))] += 1
    for name, entry in index["tensors"].items():
        assert tuple(entry["shape"]) == whole[name].shape
        often = set(seen[name].flat)
        assert often == {entry["replicas"]} or (entry["replicas"] is None and min(often) > 0 and len(often) > 1), name


def run(source: Path, destination: Path, to: str, **choices: Any) -> Path:
    carry_out(prepare(source, destination, to, Choices(**choices)), workers=1, max_memory=6 << 16)
    return destination


def read_whole(folder: Path) -> Tensors:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in read_file(path).items()}


def prints_of(folders: list[Path]) -> Iterator[str | None]:
    """Each folder's fingerprint, computed from its bytes, and that of its manifest; its files verify."""
    for folder in folders:
        settled = settle(open_checkpoint(folder))
        yield fingerprint_of(compute_records(settled, workers=1))
        if settled.checkpoint.manifest is not None:
            yield settled.checkpoint.manifest.fingerprint
            assert not verify(settled, workers=1).problems


@settings(max_examples=8)
@given(data=st.data(), geometry=geometries(), tied=st.booleans(), schema=st.sampled_from(SCHEMAS))
@pytest.mark.parametrize("first", [*LAYOUTS, "dcp"])
@pytest.mark.parametrize("second", [*LAYOUTS, "dcp"])
def test_shard_reshard_and_merge_restore_every_file(
    first: str, second: str, data: st.DataObject, geometry: Geometry, tied: bool, schema: str
) -> None:
    with scratch() as root:
        write_tiny(root / "source", geometry, tied=tied, shard_bytes=300)
        steps = [root / "source"]
        for number, kind in enumerate((first, second)):
            to, layout = ("titan", "hf") if kind == "dcp" else ("ranks", kind)
            mesh = data.draw(meshes(geometry, tied=tied), label="mesh")
            options = {"mesh": mesh, "rank_layout": layout, "titan_schema": schema}
            steps.append(run(steps[-1], root / str(number), to, **options))
        steps.append(run(steps[-1], root / "back", "hf"))
        assert content_of(steps[-1]) == content_of(root / "source")
        assert len(set(prints_of(steps))) == 1


@pytest.mark.parametrize("fsdp", [1, 2, 3])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_dcp_holds_key_and_value_heads_once_that_ranks_share_in_a_fused_tensor(kv_heads: int, fsdp: int) -> None:
    geometry = Geometry(5, 3, 1, 4, kv_heads, 2, intermediate_size=3)
    with scratch() as root:
        write_tiny(root / "source", geometry, tied=False)
        run(root / "source", root / "dcp", "titan", mesh=Mesh(tp=4, fsdp=fsdp), titan_schema="T5-fused")
        fused = open_checkpoint(root / "dcp").tensors["layers.0.attention.qkv_linear.wqkv.weight"]
        assert sum(chunk.box.volume for chunk in fused.chunks) == (4 + 2 * kv_heads) * 2 * 3
        run(root / "dcp", root / "back", "hf")
        assert content_of(root / "back") == content_of(root / "source")


@settings(max_examples=25)
@given(data=st.data(), geometry=geometries(), tied=st.booleans(), schema=st.sampled_from(SCHEMAS))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_file_holds_exactly_the_boxes_that_the_index_says(
    layout: str, data: st.DataObject, geometry: Geometry, tied: bool, schema: str
) -> None:
    mesh = data.draw(meshes(geometry, tied=tied), label="mesh")
    with scratch() as root:
        write_tiny(root / "source", geometry, tied=tied, shard_bytes=300)
        ranks = run(root / "source", root / "ranks", "ranks", mesh=mesh, rank_layout=layout, titan_schema=schema)
        if layout == "titan":
            whole = run(root / "source", root / "whole", "ranks", rank_layout=layout, titan_schema=schema)
        else:
            whole = run(root / "source", root / "whole", layout)
        check_ranks(ranks, read_whole(whole), mesh)


def test_meshes_of_the_laws_leave_nothing_out() -> None:
    """What a random mesh must reach now and then: else the laws above would prove less than they seem to."""
    seen: set[str] = set()

    @settings(max_examples=200, database=None, derandomize=True)
    @given(data=st.data(), geometry=geometries())
    def look(data: st.DataObject, geometry: Geometry) -> None:
        mesh = data.draw(meshes(geometry))
        experts = geometry.num_experts or 0
        seen.update(
            word
            for word, happens in (
                ("one rank", mesh == ONE_RANK),
                ("repeated heads", mesh.tp > geometry.num_key_value_heads),
                ("empty shards", mesh.fsdp > geometry.hidden_size),
                ("tp with fsdp", mesh.tp > 1 and mesh.fsdp > 1),
                ("experts with all", mesh.ep > 1 and mesh.tp > 1 and mesh.fsdp > 1),
                ("experts on dim 1", mesh.ep > 1 and mesh.efsdp * mesh.ep > experts),
                ("stages", mesh.pp > 1),
            )
            if happens
        )

    look()
    assert len(seen) == 7, seen
