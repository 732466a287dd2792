"""What is cut for a rank is what the real libraries make that rank hold: torch's DTensor and FSDP2, torchtitan 0.3.0's
own parallelised Qwen3, transformers' tensor-parallel plan. Bit for bit, on real gloo ranks, see ``rank_judge``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from qwen3conv.converters.geometry import Geometry
from qwen3conv.converters.placement import Mesh
from tests.conversions import convert
from tests.laws.tiny import write_tiny
from tests.models import once, saved_model
from tests.rank_judge import Verdict, rank_verdicts
from tests.real_checkpoints import read_model, save_truth, titan_state_dict

DENSE = Geometry(11, 6, 3, 4, 2, 2, intermediate_size=7)
MOE = Geometry(11, 6, 3, 4, 2, 2, moe_intermediate_size=6, num_experts=4)
FEW = Geometry(11, 6, 3, 4, 2, 2, moe_intermediate_size=4, num_experts=2)
"""Fewer experts than expert-data-parallel ranks: then torchtitan cuts them along dim 1."""


class Placed(NamedTuple):
    """A model, how it is stored, the mesh it is cut for, and how torch cuts it."""

    geometry: Geometry
    layout: str
    mesh: Mesh
    placement: str


PLACED = {
    "hf fsdp": Placed(DENSE, "hf", Mesh(fsdp=4), "fsdp"),
    "hf tp": Placed(DENSE, "hf", Mesh(tp=2), "tp"),
    "hf fsdp-tp": Placed(DENSE, "hf", Mesh(tp=2, fsdp=2), "fsdp-tp"),
    "hf repeated-heads": Placed(DENSE, "hf", Mesh(tp=4), "tp4"),
    "hf moe fsdp-tp": Placed(MOE, "hf", Mesh(tp=2, fsdp=2), "fsdp-tp"),
    "fused fsdp": Placed(MOE, "hf-fused", Mesh(fsdp=4), "fsdp"),
    "fused fsdp-tp": Placed(MOE, "hf-fused", Mesh(tp=2, fsdp=2), "fused-per-half"),
    "titan fsdp": Placed(DENSE, "titan", Mesh(fsdp=4), "fsdp"),
    "titan tp": Placed(DENSE, "titan", Mesh(tp=2), "tp"),
    "titan fsdp-tp": Placed(DENSE, "titan", Mesh(tp=2, fsdp=2), "fsdp-tp"),
    "titan moe fsdp": Placed(MOE, "titan", Mesh(fsdp=4), "fsdp"),
    "titan moe fsdp-tp": Placed(MOE, "titan", Mesh(tp=2, fsdp=2), "fsdp-tp"),
    "titan moe ep": Placed(MOE, "titan", Mesh(fsdp=4, ep=2), "ep"),
    "titan moe ep-dim-1": Placed(FEW, "titan", Mesh(fsdp=4, ep=2), "ep-dim-1"),
}
TITAN = {
    "dense tp": ("dense", Mesh(tp=2)),
    "dense fsdp": ("dense", Mesh(fsdp=4)),
    "dense fsdp-tp": ("dense", Mesh(tp=2, fsdp=2)),
    "moe fsdp-tp": ("moe-trainable", Mesh(tp=2, fsdp=2)),
    "moe ep": ("moe-trainable", Mesh(fsdp=4, ep=2)),
    "moe ep-tp": ("moe-trainable", Mesh(tp=2, fsdp=2, ep=2)),
}
TRANSFORMERS = {"dense": "dense", "moe": "moe-trainable"}


def whole_tensors(case: Placed, source: Path) -> dict[str, torch.Tensor]:
    """The model as the layout stores it, made with torch alone."""
    tensors, config = read_model(source)
    if case.layout == "titan":
        return titan_state_dict("T7", tensors, config)
    if case.layout == "hf-fused":
        for layer in range(case.geometry.num_hidden_layers):
            place = f"model.layers.{layer}.mlp.experts"
            gate, up, down = (
                torch.stack([tensors.pop(f"{place}.{e}.{part}_proj.weight") for e in range(config["num_experts"])])
                for part in ("gate", "up", "down")
            )
            tensors |= {f"{place}.gate_up_proj": torch.cat([gate, up], 1), f"{place}.down_proj": down}
    if case.mesh.tp > case.geometry.num_key_value_heads:  # each rank keeps one head, so heads are repeated first
        times, size = case.mesh.tp // case.geometry.num_key_value_heads, case.geometry.head_dim
        for name in [name for name in tensors if name.endswith(("k_proj.weight", "v_proj.weight"))]:
            heads = tensors[name].reshape(-1, size, tensors[name].shape[1])
            tensors[name] = heads.repeat_interleave(times, 0).reshape(-1, heads.shape[2])
    return tensors


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that is judged here, in one launch; what is made is ``NAME/ranks`` and ``NAME/dcp``."""

    def build(base: Path) -> None:
        jobs: dict[str, dict[str, Any]] = {}
        for name, case in PLACED.items():
            folder = base / name
            write_tiny(folder / "source", case.geometry, tied=False)
            whole = save_truth(whole_tensors(case, folder / "source"), folder / "whole.safetensors")
            convert(folder / "source", folder / "ranks", "ranks", mesh=case.mesh, rank_layout=case.layout)
            jobs[name] = {"kind": "placed", "ranks": folder / "ranks", "whole": whole, "placement": case.placement}
            if case.layout == "titan":
                convert(folder / "source", folder / "dcp", "titan", mesh=case.mesh)
                jobs[name]["dcp"] = folder / "dcp"
        for name, (variant, mesh) in TITAN.items():
            folder, source = base / f"trainer {name}", saved_model(tmp_path_factory, variant)
            convert(source, folder / "ranks", "ranks", mesh=mesh, rank_layout="titan", dtype="F32")
            convert(source, folder / "dcp", "titan", mesh=mesh, dtype="F32")
            degrees = {"world": mesh.ranks, "tensor": mesh.tp, "expert": mesh.ep}
            jobs[f"trainer {name}"] = {
                "kind": "titan",
                "ranks": folder / "ranks",
                "dcp": folder / "dcp",
                "source": source,
                **degrees,
            }
        for name, variant in TRANSFORMERS.items():
            folder, source = base / f"transformers {name}", saved_model(tmp_path_factory, variant)
            convert(source, folder / "ranks", "ranks", mesh=Mesh(tp=2))
            jobs[f"transformers {name}"] = {
                "kind": "transformers",
                "ranks": folder / "ranks",
                "source": source,
                "world": 2,
            }
        verdicts = rank_verdicts(base / "verdicts", jobs)
        (base / "verdicts.json").write_text(json.dumps(verdicts))

    return once(tmp_path_factory, "sharding-judged", build)


def verdicts(judged: Path, name: str) -> list[Verdict]:
    return [Verdict(*fields) for fields in json.loads((judged / "verdicts.json").read_text())[name]]


@pytest.mark.parametrize("name", PLACED)
def test_a_rank_file_is_what_torch_makes_the_rank_hold(name: str, judged: Path) -> None:
    found = verdicts(judged, name)
    assert len(found) == 4
    assert [verdict.problems for verdict in found] == [[]] * 4
    assert all(verdict.held > 3 for verdict in found)
    if name.endswith(" fsdp"):
        assert found[3].empty > 3  # 6 rows and 2 rows on 4 ranks


@pytest.mark.parametrize("name", [name for name, case in PLACED.items() if case.layout == "titan"])
def test_dcp_load_fills_every_shard_and_a_rank_opens_its_own_file_and_those_of_what_it_shares(
    name: str, judged: Path
) -> None:
    index = json.loads((judged / name / "ranks" / "qwen3conv-ranks.json").read_text())
    holders: dict[str, list[int]] = {}
    for rank, entry in enumerate(index["ranks"]):
        for tensor, boxes in entry["tensors"].items():
            for box in boxes:
                holders.setdefault(f"{tensor} {box}", []).append(rank)
    count = len(index["ranks"])
    for rank, verdict in enumerate(verdicts(judged, name)):
        assert verdict.loaded == []
        first = {ranks[0] for ranks in holders.values() if rank % count in ranks}
        assert set(verdict.opened) == {f"__{holder}_0.distcp" for holder in first}
        shared = [ranks for ranks in holders.values() if rank % count in ranks and ranks[0] != rank % count]
        assert len(first) == 1 or shared


@pytest.mark.parametrize("name", TITAN)
def test_torchtitans_own_parallelised_model_holds_what_the_rank_files_hold(name: str, judged: Path) -> None:
    found = verdicts(judged, f"trainer {name}")
    assert len(found) == TITAN[name][1].ranks
    assert [verdict.problems for verdict in found] == [[]] * len(found)
    assert all(verdict.held > 20 for verdict in found)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_own_tensor_parallel_model_holds_what_the_rank_files_hold(name: str, judged: Path) -> None:
    found = verdicts(judged, f"transformers {name}")
    assert [verdict.problems for verdict in found] == [[], []]
    assert all(verdict.held > 20 for verdict in found)
