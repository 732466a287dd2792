"""``simulate``: what it says a rank holds is what torch holds; what passes and is sent: ``test_simulate_measured``."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from qwen3conv.converters.layouts import TITAN_SCHEMAS
from qwen3conv.converters.placement import Mesh, elements_by_rank, rank_bindings
from qwen3conv.converters.variants import GEOMETRIES
from qwen3conv.tools.cli.main import cli
from qwen3conv.tools.simulate import Job, held_by_rank
from qwen3conv.tools.simulate_files import checkpoint_files
from qwen3conv.tools.simulate_suggestions import suggest

MESHES = [Mesh(), Mesh(tp=2), Mesh(fsdp=3), Mesh(tp=2, fsdp=3), Mesh(tp=2, fsdp=4, pp=2)]
EXPERT_MESHES = [*MESHES, Mesh(fsdp=4, ep=4), Mesh(tp=2, fsdp=4, ep=8), Mesh(fsdp=200), Mesh(tp=4, fsdp=64, ep=2)]


def run(*words: object, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, [*map(str, words)], prog_name="qwen3conv")
    assert result.exit_code == code, result.output
    return result


@pytest.mark.torch_free
@pytest.mark.parametrize(
    ("size", "mesh"),
    [*(("0.6B", mesh) for mesh in MESHES), *(("moe", mesh) for mesh in EXPERT_MESHES)],
    ids=str,
)
def test_elements_are_those_of_the_boxes_that_each_rank_stores(size: str, mesh: Mesh) -> None:
    """``tests/laws/test_placement.py`` holds those boxes against torch on 64 ranks of a fake process group."""
    geometry = GEOMETRIES["0.6B"] if size == "0.6B" else replace(GEOMETRIES["30B-A3B"], num_hidden_layers=3)
    layout = TITAN_SCHEMAS["T7"]
    counts = elements_by_rank(layout, geometry, mesh, tied=False)
    for rank in sorted({0, 1 % mesh.ranks, mesh.ranks // 2, mesh.ranks - 1}):
        stored = [b for b in rank_bindings(layout, geometry, mesh, rank, tied=False) if not b.rule.optional]
        total = 0
        for binding in stored:
            count = 1
            for length in binding.shape:
                count *= length
            total += count
        assert counts[rank] == total, rank


@pytest.mark.torch_free
def test_a_thousand_ranks_take_seconds_and_those_that_are_alike_are_told_once() -> None:
    begun = time.monotonic()
    document = json.loads(run("simulate", "--model", "235B-A22B", "--tp", 4, "--scale", 1024, "--json").stdout)
    assert time.monotonic() - begun < 10
    assert (document["ranks"], document["mesh"]["fsdp"]) == (1024, 256)
    held = document["held"]
    assert sum(one["count"] for one in held) == 1024
    assert len(held) < 10
    whole = held_by_rank(Job(GEOMETRIES["235B-A22B"], False, 8, Mesh()))[0].weights
    weights = sum(one["count"] * one["weights"] for one in held)
    assert whole <= weights < whole * 1.001  # norms and routers are on every tensor-parallel rank
    assert held[0]["optimizer"] == 2 * held[0]["weights"]


@pytest.mark.torch_free
def test_a_group_names_its_ranks_and_what_each_sends() -> None:
    document = json.loads(
        run("simulate", "--model", "8B", "--tp", 2, "--fsdp", 2, "--pp", 3, "--batch", 3, "--json").stdout
    )
    held = {one["ranks"]: one for one in document["held"]}
    assert list(held) == ["0-3", "4-7", "8-11"]
    sends = [held[ranks]["sent_per_step"]["pp send"] for ranks in held]
    assert sends[0] == sends[2] == sends[1] // 2  # the stage in the middle sends both ways
    one = json.loads(run("simulate", "--model", "8B", "--tp", 4, "--fsdp", 16, "--json").stdout)["held"]
    assert [(group["ranks"], group["count"]) for group in one] == [("0-63", 64)]


@pytest.mark.torch_free
@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (("--tp", 0), "0 is not in the range x>=1", 2),
        (("--fsdp", -4), "-4 is not in the range x>=1", 2),
        (("--pp", 40), "pp 40 is more than the 36 layers", 1),
        (("--tp", 4, "--seq-len", 4098), "tp = 4 does not divide the sequence of 4098 tokens", 1),
        (("--cp", 3), "tp * 2 * cp = 6 does not divide the sequence of 4096 tokens", 1),
        (("--ep", 2), "the model is dense and has no experts to distribute", 1),
        (("--tp", 4, "--scale", 6), "tp * pp * cp = 4 does not divide --scale 6", 1),
        (("--fsdp", 4, "--scale", 8), "either --fsdp or --scale", 2),
    ],
    ids=str,
)
def test_degrees_that_cannot_be_get_one_message(words: tuple[object, ...], said: str, code: int) -> None:
    stderr = run("simulate", "--model", "8B", *words, code=code).stderr
    assert stderr.count(said) == 1
    assert "Traceback" not in stderr


@pytest.mark.torch_free
def test_the_table_says_whether_it_fits_and_degrees_that_do_not_divide_get_others(tmp_path: Path) -> None:
    said = run("simulate", "--model", "Qwen3-8B", "--tp", 4, "--fsdp", 16).stdout
    assert "64 ranks, fsdp16 x tp4" in said
    assert "fits in 25.8 GB" in said
    assert "does not fit" in run("simulate", "--model", "32B").stdout
    wrong = run("simulate", "--model", "8B", "--tp", 3, "--fsdp", 4, code=1).stderr
    assert "tp 3 does not divide the 32 attention heads" in wrong
    assert "these fit: fsdp6 x tp2, fsdp3 x tp4, fsdp12" in wrong
    assert "is no released model" in run("simulate", "--model", "9B", code=1).stderr
    assert "either --model or --from" in run("simulate", code=2).stderr
    document = json.loads(run("simulate", "--model", "8B", "--fsdp", 8, "--memory", "40GB", "--json").stdout)
    assert document["memory"] == 40 * 10**9
    assert document["fits"] == (document["held"][0]["total"] <= 40 * 10**9)


@pytest.mark.torch_free
def test_suggestions_fit_first_send_least_per_token_first_and_say_why() -> None:
    found = suggest(Job(GEOMETRIES["30B-A3B"], False, 8, Mesh()), 64, 24 << 30)
    fits = [one.fits for one in found]
    assert fits == sorted(fits, reverse=True)
    sent = [one.sent_per_token for one in found if one.fits]
    assert len(sent) > 1
    assert sent == sorted(sent)
    assert {one.mesh.ranks for one in found} == {64}
    assert all(("% of the memory" if one.fits else "times the memory") in one.reason for one in found)
    shown = run("simulate", "--model", "30B-A3B", "--suggest").stdout
    assert f"{found[0].mesh}: {found[0].reason}" in " ".join(shown.split())
    experts = next(one for one in found if one.mesh.ep == 64)
    assert "ep 64 leaves it 2 of 128 experts, whole" in experts.reason


@pytest.mark.torch_free
def test_where_nothing_fits_pipelines_and_context_parallelism_are_proposed() -> None:
    job = Job(GEOMETRIES["32B"], False, 1, Mesh(), seq_len=65536, batch=2, checkpointing="full")
    found = suggest(job, 64, 24 << 30)
    first = found[0]
    assert first.fits
    assert first.mesh.pp > 1 or first.cp > 1
    assert first.mesh.ranks * first.cp == 64
    assert "train has no" in first.reason
    assert held_by_rank(replace(job, mesh=first.mesh, cp=first.cp), [0])[0].total <= 24 << 30
    document = json.loads(run("simulate", "--model", "8B", "--suggest", "--json").stdout)
    assert document["suggestions"][0]["mesh"] == {"tp": 1, "fsdp": 64, "ep": 1, "pp": 1}
    plain = suggest(replace(job, seq_len=4096, batch=1), 64, 24 << 30)
    assert all(one.mesh.pp == one.cp == 1 for one in plain)


@pytest.mark.torch_free
def test_a_tied_head_is_held_once_unless_stages_part_it_from_the_embeddings() -> None:
    geometry, layout = GEOMETRIES["0.6B"], TITAN_SCHEMAS["T7"]
    ends = geometry.vocab_size * geometry.hidden_size
    (tied,), (untied,) = (elements_by_rank(layout, geometry, Mesh(), tied=kind).values() for kind in (True, False))
    assert tied == 596_049_920  # Qwen/Qwen3-0.6B's own number
    assert untied == tied + ends
    assert sum(elements_by_rank(layout, geometry, Mesh(pp=2), tied=True).values()) == untied


@pytest.mark.torch_free
@pytest.mark.parametrize("kind", ["dense", "moe", "tied"])
def test_files_are_those_that_conversions_write(kind: str, tmp_path: Path) -> None:
    from qwen3conv.converters.conversion import carry_out, prepare
    from qwen3conv.converters.policies import Choices
    from tests.cli.conftest import TINY, TINY_MOE, write_model

    geometry, tied = TINY_MOE if kind == "moe" else TINY, kind == "tied"
    source = write_model(tmp_path / "source", geometry, tied=tied)
    mesh = Mesh(tp=1, fsdp=3)
    job = Job(geometry, tied, 2, mesh)
    counts = {rank: one.weights // 4 for rank, one in enumerate(held_by_rank(job))}
    promised = checkpoint_files(job, counts)
    for name in ("hf", "hf-fused", "titan", "ranks", "vllm", "nxd", "nxd-inference"):
        choices = Choices(mesh=mesh if name == "ranks" else Mesh())
        carry_out(prepare(source, tmp_path / name, name, choices))
        endings = (".safetensors", ".distcp", ".pt")
        found = [path for path in (tmp_path / name).rglob("*") if path.name.endswith(endings)]
        if name == "nxd":
            found = [path for path in found if path.parent.name == "model"]
        assert len(found) == promised[name].files, name
        sizes = [path.stat().st_size for path in found]
        assert 0 <= sum(sizes) - promised[name].bytes < 16_000 * len(found), name
        assert 0 <= max(sizes) - promised[name].largest < 16_000, name
        if name in ("hf", "hf-fused"):
            assert sum(sizes) == promised[name].bytes, name


def test_the_mesh_is_drawn(tmp_path: Path) -> None:
    run("simulate", "--model", "8B", "--tp", 4, "--fsdp", 16, "--picture", tmp_path / "mesh.png")
    assert (tmp_path / "mesh.png").stat().st_size > 10_000
