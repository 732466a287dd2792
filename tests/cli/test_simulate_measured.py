"""``simulate`` against torchtitan on gloo: what a step sends and what it keeps, by each kind of checkpointing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from qwen3conv.converters.geometry import Geometry
from qwen3conv.converters.placement import Mesh
from qwen3conv.tools.simulate import Checkpointing, Device, Job
from qwen3conv.tools.simulate_memory import passing
from qwen3conv.tools.simulate_traffic import sent_per_step
from tests.cli.conftest import environment

DENSE = Geometry(512, 64, 4, 8, 4, 16, intermediate_size=192)
WIDE = Geometry(2048, 96, 3, 6, 2, 16, intermediate_size=256)
MOE = Geometry(512, 64, 2, 8, 4, 16, moe_intermediate_size=48, num_experts=8)

ONE_RANK_TOLERANCE = 0.08
"""Relative, of the peak. Found: up to 5.4% too little."""

MESH_TOLERANCE = 0.22
"""The same on four ranks. Found: from 1% too little to 20% too much, most with checkpointing."""

ROUTING_TOLERANCE = 0.05
"""Relative, of rows that go to experts: tokens are not spread evenly. Found: 3%."""


def measure(jobs: list[dict[str, Any]], folder: Path) -> list[list[dict[str, Any]]]:
    """For each job what each rank found."""
    keys = DENSE.__dataclass_fields__
    plain = [
        {**job, "geometry": {key: getattr(job["geometry"], key) for key in keys}, "mesh": job["mesh"]} for job in jobs
    ]
    (folder / "jobs.json").write_text(json.dumps(plain))
    command = [sys.executable, "-m", "tests.measured_step", str(folder / "jobs.json"), str(folder / "found")]
    ran = subprocess.run(
        command, env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("found.*"))]
    return [[rank[i] for rank in ranks] for i in range(len(jobs))]


def job(geometry: Geometry, ac: str, seq_len: int = 256, batch: int = 2, **mesh: int) -> dict[str, Any]:
    return {"geometry": geometry, "mesh": mesh, "seq_len": seq_len, "batch": batch, "top_k": 2, "ac": ac}


def simulated(one: dict[str, Any]) -> Job:
    """The same for ``simulate``. Selective checkpointing that keeps attention is that of other devices than CPUs."""
    checkpointing: Checkpointing = "selective" if one["ac"] == "saving" else one["ac"]
    device: Device = "neuron" if one["ac"] == "saving" else "cpu"
    mesh = Mesh(**one["mesh"])
    lengths = {"seq_len": one["seq_len"], "batch": one["batch"]}
    return Job(
        one["geometry"], bool(one.get("tied")), 2, mesh, **lengths, compute_bytes=4, checkpointing=checkpointing,
        device=device,
    )  # fmt: skip


def estimated(one: dict[str, Any]) -> int:
    made = simulated(one)
    return sum(asdict(passing(made, is_last=True, layers=made.layers(0))).values())


ALONE = [
    *(job(DENSE, ac) for ac in ("none", "saving", "full")),
    job(WIDE, "selective"),
    *(job(MOE, ac) for ac in ("none", "selective", "full")),
]


@pytest.mark.slow
def test_the_peak_of_a_step_on_one_rank_is_near_the_estimate_by_every_kind_of_checkpointing(tmp_path: Path) -> None:
    errors = {}
    for one, (found,) in zip(ALONE, measure(ALONE, tmp_path), strict=True):
        errors[f"{one['geometry'].is_moe} {one['ac']}"] = estimated(one) / found["peak"] - 1
        assert abs(errors[f"{one['geometry'].is_moe} {one['ac']}"]) < ONE_RANK_TOLERANCE, (one, errors)


EXACT = [
    job(DENSE, "selective", 64, tp=2, fsdp=2),
    job(DENSE, "none", 64, 4, pp=2, fsdp=2),
    job(MOE, "full", 64, fsdp=2, tp=2, ep=4),
]
MORE = [
    job(DENSE, "none", 64, 4, pp=2, tp=2),
    job(MOE, "selective", 64, fsdp=4, ep=2),
    *(job(DENSE, ac, 64, **mesh) for ac in ("none", "full") for mesh in ({"fsdp": 4}, {"tp": 4})),
    {**job(DENSE, "selective", 64, fsdp=4), "tied": True},
    {**job(DENSE, "none", 64, fsdp=2, tp=2), "tied": True},
    job(DENSE, "selective", 64, 4, pp=4),
    job(MOE, "none", 64, fsdp=4),
    job(MOE, "full", 64, fsdp=4, ep=4),
    job(MOE, "none", 64, fsdp=2, tp=2, ep=2),
]


def by_kind(sent: dict[str, int]) -> dict[str, int]:
    """Bytes by collective, whichever axis has the ranks: two axes may have the same."""
    found: dict[str, int] = {}
    for name, count in sent.items():
        kind = name.split(" ", 1)[1]
        found[kind] = found.get(kind, 0) + count
    return found


def check_sent(jobs: list[dict[str, Any]], folder: Path) -> None:
    for one, ranks in zip(jobs, measure(jobs, folder), strict=True):
        made = simulated(one)
        for rank, found in enumerate(ranks):
            promised = by_kind(sent_per_step(made, made.sharded.place(rank).pp))
            counted = by_kind(found["sent"])
            for kinds in (promised, counted):
                kinds.pop("all-to-all", None)
            assert counted == promised, (one, rank)
        rows = sum(by_kind(found["sent"]).get("all-to-all", 0) for found in ranks) / len(ranks)
        expected = by_kind(sent_per_step(made)).get("all-to-all", 0)
        assert rows == pytest.approx(expected, rel=ROUTING_TOLERANCE), one


@pytest.mark.slow
def test_a_step_sends_what_is_promised(tmp_path: Path) -> None:
    check_sent(EXACT, tmp_path)


@pytest.mark.slow
def test_a_step_sends_what_is_promised_on_more_meshes(tmp_path: Path) -> None:
    check_sent(MORE, tmp_path)


@pytest.mark.slow
def test_a_step_of_experts_cut_by_tensor_parallelism_sends_about_what_is_promised(tmp_path: Path) -> None:
    """torch finds another way for the gradient of what enters them, which depends on the sizes: within 15%."""
    jobs = [job(MOE, "none", 64, tp=4), job(MOE, "none", 64, fsdp=2, tp=2)]
    for one, ranks in zip(jobs, measure(jobs, tmp_path), strict=True):
        promised = sum(sent_per_step(simulated(one)).values())
        assert sum(ranks[0]["sent"].values()) == pytest.approx(promised, rel=0.15), one


@pytest.mark.slow
def test_the_peak_of_a_step_on_four_ranks_is_near_the_estimate(tmp_path: Path) -> None:
    meshes = [{"fsdp": 4}, {"tp": 4}, {"tp": 2, "fsdp": 2}]
    jobs = [job(g, ac, 512, **mesh) for g in (DENSE, MOE) for mesh in meshes for ac in ("none", "selective", "full")]
    jobs += [
        job(MOE, ac, 512, **mesh)
        for mesh in ({"fsdp": 4, "ep": 4}, {"fsdp": 2, "tp": 2, "ep": 4})
        for ac in ("none", "selective", "full")
    ]
    errors = {
        f"{one['geometry'].is_moe} {one['mesh']} {one['ac']}": estimated(one) / ranks[0]["peak"] - 1
        for one, ranks in zip(jobs, measure(jobs, tmp_path), strict=True)
    }
    assert max(map(abs, errors.values())) < MESH_TOLERANCE, errors
