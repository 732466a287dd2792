"""Per-rank folders that are not whole or do not fit together: one error names files and tensors, nothing is written."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from click.testing import CliRunner

from qwen3conv.converters.conversion import carry_out, prepare
from qwen3conv.converters.errors import ConversionError, MappingError, PolicyError, SourceError
from qwen3conv.converters.geometry import Geometry
from qwen3conv.converters.inspection import inspect
from qwen3conv.converters.placement import Mesh
from qwen3conv.converters.policies import Choices
from qwen3conv.tools.cli.main import cli
from tests.faults.kill_at import snapshot
from tests.laws.tiny import write_tiny

pytestmark = pytest.mark.torch_free

DENSE = Geometry(11, 6, 2, 4, 2, 2, intermediate_size=6)
MOE = Geometry(11, 6, 2, 4, 2, 2, moe_intermediate_size=4, num_experts=4)
INDEX = "qwen3conv-ranks.json"

Change = Callable[[dict[str, Any]], object]
Refuse = Callable[..., list[str]]


def shard(root: Path, name: str = "ranks", mesh: Mesh | None = None, **options: Any) -> Path:
    """A per-rank folder, by default of TP 2 x FSDP 2; the model it is made of is gone afterwards."""
    geometry, layout = options.pop("geometry", DENSE), options.pop("layout", "hf-fused")
    write_tiny(root / "source", geometry, tied=False, **options)
    choices = Choices(mesh=mesh or Mesh(tp=2, fsdp=2), rank_layout=layout)
    carry_out(prepare(root / "source", root / name, "ranks", choices), workers=1)
    shutil.rmtree(root / "source")
    return root / name


def rank_file(folder: Path, rank: int) -> Path:
    (found,) = folder.glob(f"rank-{rank:05}-of-*.safetensors")
    return found


def edit_index(folder: Path, change: Change, *, forged: bool = False) -> None:
    """Change the index; with ``forged`` by someone who also gives it the digest that follows."""
    index = json.loads((folder / INDEX).read_text())
    digest = index.pop("index_digest")
    change(index)
    if forged:
        digest = xxhash.xxh3_128_hexdigest(json.dumps(index).encode())
    (folder / INDEX).write_text(json.dumps({**index, "index_digest": digest}))


def header_of(path: Path) -> tuple[dict[str, Any], int]:
    """A safetensors header, and where the data begins."""
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    return json.loads(raw[8 : 8 + length]), 8 + length


def flip(path: Path, name: str, byte: int = 0) -> None:
    """Change a bit of byte ``byte`` of a tensor in a safetensors file."""
    header, start = header_of(path)
    raw = bytearray(path.read_bytes())
    raw[start + header[name]["data_offsets"][0] + byte] ^= 1
    path.write_bytes(raw)


@pytest.fixture
def refuse(place: Path) -> Refuse:
    """The lines of the one refusal that engine, merge and reshard give alike; nothing is written, nothing changed."""

    def run(folder: Path, kind: type[ConversionError] = SourceError, *, headers: bool = True) -> list[str]:
        before = snapshot(place)
        with pytest.raises(kind) as caught:
            carry_out(prepare(folder, place / "out", "hf"))
        text = str(caught.value)
        for command in (["merge"], ["reshard", "--tp", "2"]):
            ran = CliRunner().invoke(cli, [command[0], str(folder), str(place / "out"), *command[1:]])
            assert (ran.exit_code, ran.stdout) == (1, "")
            assert [line for line in ran.stderr.splitlines() if line.startswith("Error: ")]
            assert text in ran.stderr
        report = inspect(folder)
        assert report.complete is not headers
        assert not headers or report.problems == (text,)
        assert snapshot(place) == before
        return text.splitlines()

    return run


def listed(*lines: str) -> list[str]:
    return [f"  - {line}" for line in lines]


# -- files -------------------------------------------------------------------------------------------------------------


def test_missing_rank_files_are_all_named(place: Path, refuse: Refuse) -> None:
    folder = shard(place)
    for rank in (1, 3):
        rank_file(folder, rank).unlink()
    lines = refuse(folder)
    assert lines == [
        f"{folder} lacks the files of 2 ranks:",
        *listed(*(f"rank-0000{n}-of-00004.safetensors" for n in (1, 3))),
    ]


def test_a_missing_index_is_named(place: Path) -> None:
    folder = shard(place)
    (folder / INDEX).unlink()
    with pytest.raises(SourceError, match=f"{INDEX}: no such file"):
        prepare(folder, place / "out", "hf")


def test_a_truncated_rank_file_is_named(place: Path, refuse: Refuse) -> None:
    folder = shard(place)
    path = rank_file(folder, 2)
    path.write_bytes(path.read_bytes()[:-3])
    (line,) = refuse(folder)[1:]
    assert line.startswith(f"  - {path.name}: is truncated: 3 bytes")


def test_a_rank_file_that_is_no_safetensors_is_named(place: Path, refuse: Refuse) -> None:
    folder = shard(place)
    rank_file(folder, 1).write_bytes(b"\x80\x02}q\x00.")
    assert rank_file(folder, 1).name in "".join(refuse(folder))


def test_files_of_another_mesh_beside_are_named(place: Path, refuse: Refuse) -> None:
    folder, other = shard(place), shard(place, "other", Mesh(tp=2))
    for path in other.glob("rank-*"):
        shutil.move(path, folder)
    names = (f"rank-0000{n}-of-00002.safetensors" for n in (0, 1))
    lines = refuse(folder)
    assert lines[1:] == listed(*(f"{name}: is of another mesh than fsdp2 x tp2" for name in names))


def test_a_file_of_another_mesh_under_a_ranks_name_is_refused_with_its_tensors(place: Path, refuse: Refuse) -> None:
    folder, other = shard(place), shard(place, "other", Mesh(fsdp=4))
    shutil.copy(rank_file(other, 1), rank_file(folder, 1))
    lines = refuse(folder)
    assert f"  - {rank_file(folder, 1).name}: {NORM} is [2], the index says [3]" in lines
    assert all(line.startswith(f"  - {rank_file(folder, 1).name}: ") for line in lines[1:])


@pytest.mark.parametrize("mesh", [Mesh(tp=4), Mesh(fsdp=4), Mesh(fsdp=2), Mesh(pp=2, tp=2)], ids=str)
def test_the_index_of_another_mesh_is_refused(mesh: Mesh, place: Path, refuse: Refuse) -> None:
    folder, other = shard(place), shard(place, "other", mesh)
    shutil.copy(other / INDEX, folder)
    assert "rank-0000" in "\n".join(refuse(folder))


def test_ranks_of_different_dtypes_are_refused_with_the_file(place: Path, refuse: Refuse) -> None:
    folder, other = shard(place), shard(place, "other", dtype="F32")
    shutil.copy(rank_file(other, 3), rank_file(folder, 3))
    lines = refuse(folder)
    assert all(line.startswith(f"  - {rank_file(folder, 3).name}: ") for line in lines[1:-1])
    assert "is F32, the index says BF16" in lines[1]


# -- values ------------------------------------------------------------------------------------------------------------


def test_replicas_that_differ_are_named_with_files_and_row(place: Path, refuse: Refuse) -> None:
    folder = shard(place)
    flip(rank_file(folder, 3), "model.layers.1.input_layernorm.weight", byte=2)
    (line,) = refuse(folder)[1:]
    files = "rank-00002-of-00004.safetensors and rank-00003-of-00004.safetensors"
    assert line == f"  - model.layers.1.input_layernorm.weight from row 4 on, in {files}"


def test_repeated_key_value_heads_that_differ_are_named(place: Path, refuse: Refuse) -> None:
    folder = shard(place, mesh=Mesh(tp=4))
    flip(rank_file(folder, 2), "model.layers.0.self_attn.k_proj.weight", byte=12)
    (line,) = refuse(folder)[1:]
    files = "rank-00002-of-00004.safetensors and rank-00003-of-00004.safetensors"
    assert line == f"  - model.layers.0.self_attn.k_proj.weight from row 3 on, in {files}"


@pytest.mark.parametrize("mesh", [Mesh(fsdp=4), Mesh(tp=2, fsdp=2), Mesh(pp=2)], ids=str)
def test_ranks_of_two_runs_are_refused_by_the_digests(mesh: Mesh, place: Path) -> None:
    """Nothing is stored twice under FSDP: only the manifest of one of the runs can tell."""
    folder = shard(place, mesh=mesh)
    flip(rank_file(folder, 1), "model.layers.1.mlp.down_proj.weight")
    before = snapshot(place)
    with pytest.raises(SourceError) as caught:
        carry_out(prepare(folder, place / "out", "hf"))
    heading, *lines = str(caught.value).splitlines()
    assert "is not what its manifest promises" in heading
    assert "of another run" in heading
    assert lines == listed("model.layers.1.mlp.down_proj.weight")
    assert snapshot(place) == before


@pytest.mark.parametrize("target", ["vllm", "nxd-inference"])
def test_other_ranks_files_are_held_against_their_manifest_too(target: str, place: Path) -> None:
    write_tiny(place / "source", replace(DENSE, vocab_size=128), tied=False)
    carry_out(prepare(place / "source", place / "cut", target, Choices(mesh=Mesh(tp=2))))
    files = {"vllm": "model-rank-1-part-0.safetensors", "nxd-inference": "tp1_sharded_checkpoint.safetensors"}
    (damaged,) = (place / "cut").rglob(files[target])
    flip(damaged, next(name for name in header_of(damaged)[0] if name.endswith("layers.1.mlp.down_proj.weight")))
    with pytest.raises(SourceError, match="is not what its manifest promises") as caught:
        carry_out(prepare(place / "cut", place / "out", "hf"))
    assert str(caught.value).splitlines()[1:] == listed("model.layers.1.mlp.down_proj.weight")
    assert not (place / "out").exists()


# -- the index ---------------------------------------------------------------------------------------------------------


NORM = "model.norm.weight"
FORGED: list[tuple[str, Change, str]] = [
    ("another version", lambda i: i.update(ranks_version=2), "version 2"),
    ("no version", lambda i: i.pop("ranks_version"), "KeyError: 'ranks_version'"),
    ("no mesh", lambda i: i.pop("mesh"), "KeyError: 'mesh'"),
    ("half a mesh", lambda i: i["mesh"].pop("ep"), "KeyError: 'ep'"),
    ("no ranks", lambda i: i.update(ranks=[]), "lists 0 ranks"),
    ("a rank less", lambda i: i["ranks"].pop(), "lists 3 ranks, but its mesh fsdp2 x tp2 has 4"),
    ("degree 0", lambda i: i["mesh"].update(tp=0), "mesh"),
    ("a degree that is no number", lambda i: i["mesh"].update(tp=True), "mesh"),
    ("a huge degree", lambda i: i["mesh"].update(fsdp=1 << 40), "mesh"),
    ("millions of ranks", lambda i: i["mesh"].update(fsdp=1 << 16, tp=1 << 16), "lists 4 ranks"),
    ("the axes swapped", lambda i: i["mesh"].update(tp=4, fsdp=1), "wrong shape: 0/model.layers.0"),
    ("other axes", lambda i: i["mesh"].update(tp=1, fsdp=4), "wrong shape: 0/model.layers.0"),
    ("ep on dense", lambda i: i["mesh"].update(ep=2), "the model is dense"),
    ("a layout", lambda i: i.update(layout="megatron"), "megatron"),
    ("a layout that is a list", lambda i: i.update(layout=[]), "layout '[]'"),
    ("a schema", lambda i: i.update(layout="titan", schema="T99"), "layout 'titan'"),
    ("no shape", lambda i: i["tensors"][NORM].pop("shape"), "KeyError: 'shape'"),
    ("a shape", lambda i: i["tensors"][NORM].update(shape=[7]), NORM),
    ("a negative shape", lambda i: i["tensors"][NORM].update(shape=[-6]), "shape [-6]"),
    ("a huge shape", lambda i: i["tensors"][NORM].update(shape=[1 << 70]), NORM),
    ("a dtype", lambda i: i["tensors"][NORM].update(dtype="F32"), "is BF16, the index says F32"),
    (
        "a tensor less",
        lambda i: i["ranks"][2]["tensors"].pop(NORM),
        "holds model.norm.weight, which the index does not",
    ),
    ("a tensor more", lambda i: i["ranks"][2]["tensors"].update(surprise=[[[0], [1]]]), "lacks surprise"),
    (
        "a smaller box",
        lambda i: i["ranks"][0]["tensors"].update({NORM: [[[3], [2]]]}),
        f"{NORM} is [3], the index says [2]",
    ),
    ("a box of text", lambda i: i["ranks"][0]["tensors"].update({NORM: "all"}), "TypeError"),
    ("boxes of text", lambda i: i["ranks"][0]["tensors"].update({NORM: ["all"]}), "ValueError"),
    ("a rank of text", lambda i: i["ranks"].__setitem__(0, "rank"), "TypeError"),
    ("tensors in a list", lambda i: i.update(tensors=[]), "TypeError"),
]


@pytest.mark.parametrize(("change", "word"), [pytest.param(c, w, id=name) for name, c, w in FORGED])
def test_a_forged_index_is_refused(change: Change, word: str, place: Path, refuse: Refuse) -> None:
    folder = shard(place)
    edit_index(folder, change, forged=True)
    assert word in "\n".join(refuse(folder, ConversionError))


@pytest.mark.parametrize(
    "change",
    [
        lambda i: i["ranks"].reverse(),
        lambda i: i["mesh"].update(tp=4, fsdp=1),
        lambda i: i["ranks"][0]["tensors"].update({NORM: [[[3], [3]]]}),
        lambda i: i["tensors"][NORM].update(kind="row"),
        lambda i: i["ranks"][0].update(file="/etc/passwd"),
        lambda i: i.update(note="mine"),
    ],
)
def test_an_index_that_was_edited_is_refused(change: Change, place: Path, refuse: Refuse) -> None:
    folder = shard(place)
    edit_index(folder, change)
    assert refuse(folder) == [
        f"{folder / INDEX} was edited: its index_digest does not follow from it; shard the model again"
    ]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00", '{"ranks_version": 1}', "[" * 100_000])
def test_an_index_that_is_none_is_refused(text: str, place: Path, refuse: Refuse) -> None:
    folder = shard(place)
    (folder / INDEX).write_text(text)
    assert INDEX in "\n".join(refuse(folder))


HOSTILE = ["../secret", "/etc/passwd", "a\x1b[2Jb", "x" * 100_000, "\u202eevil", "0/model.norm.weight", ""]


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_in_the_index_and_in_a_file_are_refused_and_shown_harmless(
    name: str, place: Path, refuse: Refuse
) -> None:
    folder = shard(place)

    def change(index: dict[str, Any]) -> None:
        index["tensors"][name] = index["tensors"]["model.norm.weight"]
        index["ranks"][1]["tensors"][name] = index["ranks"][1]["tensors"].pop("model.norm.weight")

    path = rank_file(folder, 1)
    header, start = header_of(path)
    header[name] = header.pop("model.norm.weight")
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + path.read_bytes()[start:])
    edit_index(folder, change, forged=True)
    before = snapshot(place)
    ran = CliRunner().invoke(cli, ["merge", str(folder), str(place / "out")])
    assert ran.exit_code == 1
    assert ran.stderr.startswith("Error: ")
    assert len(ran.stderr) < 20_000
    assert ran.stderr.replace("\n", "").isprintable()
    assert "Traceback" not in ran.stderr
    assert snapshot(place) == before


def test_the_index_cannot_name_files_elsewhere(place: Path) -> None:
    """Files are found by their rank, whatever the index calls them."""
    folder = shard(place)
    edit_index(folder, lambda index: index["ranks"][0].update(file="/etc/passwd"), forged=True)
    conversion = prepare(folder, place / "out", "hf")
    assert sorted(conversion.source.files) == [rank_file(folder, rank).name for rank in range(4)]


# -- meshes that are asked for -----------------------------------------------------------------------------------------


def test_a_tied_head_is_not_cut_into_pipeline_stages(place: Path) -> None:
    write_tiny(place / "source", DENSE, tied=True)
    for layout in ("hf", "hf-fused", "titan"):
        with pytest.raises(PolicyError, match="the last stage needs it too"):
            prepare(place / "source", place / "out", "ranks", Choices(mesh=Mesh(pp=2), rank_layout=layout))


@pytest.mark.parametrize(
    ("geometry", "arguments", "reasons"),
    [
        (DENSE, ["--tp", "3"], ["tp 3 does not divide the 4 attention heads", "tp 3 neither divides the 2 key-value"]),
        (DENSE, ["--ep", "2", "--fsdp", "2"], ["ep 2: the model is dense"]),
        (DENSE, ["--pp", "3"], ["pp 3 is more than the 2 layers"]),
        (
            MOE,
            ["--tp", "3", "--ep", "5", "--pp", "9"],
            ["tp 3 does", "tp 3 neither", "ep 5 does not divide the 4 experts", "fsdp * tp = 3", "pp 9"],
        ),
    ],
)
@pytest.mark.parametrize("command", ["shard", "reshard"])
def test_a_mesh_that_divides_nothing_is_refused_with_every_reason(
    command: str, geometry: Geometry, arguments: list[str], reasons: list[str], place: Path
) -> None:
    write_tiny(place / "source", geometry, tied=False)
    before = snapshot(place)
    for form in ("ranks", "dcp"):
        words = [command, str(place / "source"), str(place / "out"), "--format", form, *arguments]
        ran = CliRunner().invoke(cli, words)
        assert ran.exit_code == 1
        assert "does not fit this model" in ran.stderr
        assert len(ran.stderr.splitlines()) == 1 + len(reasons)
        assert [reason for reason in reasons if reason not in ran.stderr] == []
    assert snapshot(place) == before


def test_no_degree_at_all_is_wrong_usage(place: Path) -> None:
    write_tiny(place / "source", DENSE, tied=False)
    for command in ("shard", "reshard"):
        ran = CliRunner().invoke(cli, [command, str(place / "source"), str(place / "out")])
        assert ran.exit_code == 2
        assert "merge" in ran.stderr


def test_a_mesh_is_no_use_to_a_format_of_whole_tensors(place: Path) -> None:
    write_tiny(place / "source", DENSE, tied=False)
    with pytest.raises(PolicyError, match="whole tensors"):
        prepare(place / "source", place / "out", "hf", Choices(mesh=Mesh(tp=2)))


def test_an_index_that_would_be_too_long_to_be_read_is_refused_with_the_way_out(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwen3conv.converters.arrangement.LARGEST_FILE", 20_000)
    write_tiny(place / "source", MOE, tied=False)
    choices = Choices(mesh=Mesh(tp=2, fsdp=2), rank_layout="hf")
    with pytest.raises(PolicyError, match=r"tensors in 4 rank files are too many .* --layout hf-fused"):
        prepare(place / "source", place / "out", "ranks", choices)
    shutil.rmtree(place / "source")
    folder = shard(place, geometry=MOE)  # fused, it is shorter
    assert (folder / INDEX).stat().st_size < 20_000


def test_a_layout_without_a_place_for_experts_is_refused_with_the_way_out(place: Path) -> None:
    write_tiny(place / "source", MOE, tied=False)
    choices = Choices(mesh=Mesh(tp=2), rank_layout="titan", titan_schema="T1")
    with pytest.raises(MappingError, match="T2 or later"):
        prepare(place / "source", place / "out", "ranks", choices)
    assert [path.name for path in place.iterdir()] == ["source"]
