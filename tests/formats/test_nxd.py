"""neuronx-distributed's training shards and NxD Inference's weights as whole formats: written, read, merged, refused.

The shards are built here with torch as the sources of ``test_nxd_training`` cut them, without the product's rules.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from qwen3conv.converters import Choices, open_checkpoint, prepare, settle
from qwen3conv.converters.errors import ConversionError, MappingError, PolicyError, SourceError
from qwen3conv.converters.placement import Mesh
from qwen3conv.tools.cli.main import cli
from tests.conversions import convert, differing, fingerprint
from tests.models import DENSE, MOE, make_dense, make_moe, read_tensors

State = dict[str, torch.Tensor]

SIZES = {
    "dense": replace(DENSE, vocab=384, intermediate=96),
    "moe": replace(MOE, vocab=384, experts=6),
}
LAYERS = DENSE.layers
HEADS, KV, DIM = DENSE.heads, DENSE.kv_heads, DENSE.head_dim


@pytest.fixture(scope="module", params=["dense", "tied", "moe"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nxd") / "model"
    if request.param == "moe":
        return make_moe(folder, sizes=SIZES["moe"])
    return make_dense(folder, sizes=SIZES["dense"], tied=request.param == "tied")


def cut(tensors: State, tp: int, rank: int, *, order: str = "natural", ep: int = 1, expert_rank: int = 0) -> State:
    """What one rank holds under the hub's names, experts of a layer as (E, H, 2M) and (E, M, H)."""
    times = max(tp // KV, 1)
    queries = torch.arange(HEADS)
    if order == "tiled":  # neuronx-distributed's converter: (kv, times) groups of query heads, key-value heads fastest
        queries = queries.view(KV, times, -1).transpose(0, 1).flatten()
    found: State = {}
    for name, tensor in tensors.items():
        if ".experts." in name:
            continue
        if name.endswith(("q_proj.weight", "o_proj.weight")):
            dim = int("o_proj" in name)
            heads = tensor.movedim(dim, 0).reshape(HEADS, DIM, -1)[queries].flatten(0, 1).movedim(0, dim)
            found[name] = heads.chunk(tp, dim)[rank]
        elif name.endswith(("k_proj.weight", "v_proj.weight")):
            heads = tensor.view(KV, DIM, -1)
            heads = heads.repeat(times, 1, 1) if order == "tiled" else heads.repeat_interleave(times, 0)
            found[name] = heads.flatten(0, 1).chunk(tp)[rank]
        elif "norm" in name or name.endswith("mlp.gate.weight"):
            found[name] = tensor
        else:
            found[name] = tensor.chunk(tp, int("down_proj" in name))[rank]
    if expert_rank:
        found = {}
    for layer in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        router = found.pop(f"{layer}.gate.weight", None)
        if router is not None:
            found[f"{layer}.router.linear_router.weight"] = router
        pairs, downs = [], []
        for expert in torch.arange(SIZES["moe"].experts).chunk(ep)[expert_rank].tolist():
            gate, up, down = (
                tensors[f"{layer}.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")
            )
            pairs.append(torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]]).T)
            downs.append(down.chunk(tp, 1)[rank].T)
        found[f"{layer}.expert_mlps.mlp_op.gate_up_proj.weight"] = torch.stack(pairs)
        found[f"{layer}.expert_mlps.mlp_op.down_proj.weight"] = torch.stack(downs)
    return {name: tensor.contiguous().clone() for name, tensor in found.items()}


def training(state: State, *, repeats: bool) -> State:
    """Training's names: gate and up as one, and q, k and v under other names where heads are repeated."""
    found = dict(state)
    for name in [name for name in state if name.endswith("mlp.gate_proj.weight")]:
        pair = [found.pop(name), found.pop(name.replace("gate_proj", "up_proj"))]
        found[name.replace("gate_proj", "gate_up_proj")] = torch.cat(pair)
    for name in [name for name in state if name.endswith(tuple(f"{p}_proj.weight" for p in "qkv")) and repeats]:
        prefix, _, rest = name.rpartition(".self_attn.")
        found[f"{prefix}.self_attn.qkv_proj.weight_{rest[0]}"] = found.pop(name)
    return found


def inference(tensors: State, tp: int, rank: int) -> State:
    """What a rank of NxD Inference holds: its names, and embeddings cut along the hidden size."""
    found: State = {}
    for name, tensor in cut(tensors, tp, rank, order="interleaved").items():
        if name == "model.embed_tokens.weight":
            tensor = tensors[name].chunk(tp, 1)[rank].clone()
        own = name.removeprefix("model.")
        for part in "qkv":
            own = own.replace(f"self_attn.{part}_proj", f"self_attn.qkv_proj.{part}_proj")
        own = own.replace("self_attn.o_proj", "self_attn.o_proj.o_proj")
        found[own.replace("q_norm", "q_layernorm").replace("k_norm", "k_layernorm")] = tensor
    return found


def truth(whole: Path) -> State:
    """The model's tensors, a tied head under both names."""
    tensors = read_tensors(whole)
    return {"lm_head.weight": tensors["model.embed_tokens.weight"], **tensors}


def stage(state: State, pp: int, index: int) -> State:
    def of(name: str) -> int:
        if ".layers." in name:  # three layers in two stages are one and two
            return int(name.split(".")[2]) if pp == LAYERS else min(int(name.split(".")[2]), pp - 1)
        return 0 if "embed_tokens" in name else pp - 1

    return {name: tensor for name, tensor in state.items() if of(name) == index}


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tp", "pp", "order"),
    [(1, 1, None), (2, 1, None), (2, 3, None), (1, 2, None), (6, 1, "tiled"), (6, 1, "interleaved")],
)
@pytest.mark.parametrize("kind", ["nxd", "nxd-v1"])
def test_training_shards_are_what_nxd_cuts(
    whole: Path, tmp_path: Path, tp: int, pp: int, order: Any, kind: str
) -> None:
    convert(whole, tmp_path / "tag", kind, mesh=Mesh(tp=tp, pp=pp), kv_heads=order)
    expected = truth(whole)
    for rank in range(tp):
        for index in range(pp):
            place = f"tp_rank_{rank:02d}_pp_rank_{index:02d}"
            file = f"model/dp_rank_00_{place}.pt" if kind == "nxd" else f"{place}/checkpoint.pt"
            ours = torch.load(tmp_path / "tag" / file, weights_only=True)
            ours = ours["model"] if kind == "nxd-v1" else ours
            state = training(cut(expected, tp, rank, order=order or "natural"), repeats=tp > KV)
            assert differing(ours, stage(state, pp, index)) == []
    assert (tmp_path / "tag" / "done").is_file() == (kind == "nxd")
    assert open_checkpoint(tmp_path / "tag").format == kind
    assert fingerprint(tmp_path / "tag") == fingerprint(whole)


@pytest.mark.parametrize(
    ("tp", "order", "queries"), [(2, "natural", None), (6, "tiled", "follow"), (6, "interleaved", None)]
)
def test_shards_of_training_merge_to_the_whole_model(
    whole: Path, tmp_path: Path, tp: int, order: str, queries: Any
) -> None:
    (tmp_path / "tag" / "model").mkdir(parents=True)
    for rank in range(tp):
        state = training(cut(truth(whole), tp, rank, order=order), repeats=tp > KV)
        torch.save(state, tmp_path / "tag" / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt")
    convert(tmp_path / "tag", tmp_path / "merged", "hf", like=whole, query_heads=queries)
    assert differing(read_tensors(tmp_path / "merged"), read_tensors(whole)) == []


@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (3, 2)])
def test_expert_parallel_shards_are_what_nxd_cuts(tmp_path: Path, ep: int, tp: int) -> None:
    whole = make_moe(tmp_path / "model", sizes=SIZES["moe"])
    convert(whole, tmp_path / "tag", "nxd", mesh=Mesh(tp=tp, ep=ep))
    for expert_rank in range(ep):
        for rank in range(tp):
            name = f"dp_rank_00_ep_rank_{expert_rank:02d}_tp_rank_{rank:02d}_pp_rank_00.pt"
            ours = torch.load(tmp_path / "tag" / "model" / name, weights_only=True)
            assert differing(ours, cut(truth(whole), tp, rank, ep=ep, expert_rank=expert_rank)) == []
    assert fingerprint(tmp_path / "tag") == fingerprint(whole)


def test_matrices_that_the_converter_leaves_column_by_column_are_read(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "tag").mkdir()
    for rank in range(2):
        state = training(cut(truth(whole), 2, rank), repeats=False)
        columns = {n: t.t().contiguous().t() if n.endswith("o_proj.weight") else t for n, t in state.items()}
        assert not all(tensor.is_contiguous() for tensor in columns.values())
        (tmp_path / "tag" / f"tp_rank_{rank:02d}_pp_rank_00").mkdir()
        torch.save(columns, tmp_path / "tag" / f"tp_rank_{rank:02d}_pp_rank_00" / "checkpoint.pt")
    shutil.copy(whole / "config.json", tmp_path / "tag")
    assert fingerprint(tmp_path / "tag") == fingerprint(whole)


# --- inference --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 6])
def test_presharded_weights_are_what_nxd_inference_cuts(whole: Path, tmp_path: Path, tp: int) -> None:
    convert(whole, tmp_path / "compiled", "nxd-inference", mesh=Mesh(tp=tp))
    for rank in range(tp):
        ours = load_file(tmp_path / "compiled" / "weights" / f"tp{rank}_sharded_checkpoint.safetensors")
        numbers = {name: ours.pop(name).tolist() for name in list(ours) if name.endswith("rank_util.rank")}
        assert numbers == {
            "rank_util.rank": [rank],
            **{f"layers.{layer}.self_attn.rank_util.rank": [rank] for layer in range(LAYERS)},
        }
        assert differing(ours, inference(truth(whole), tp, rank)) == []
    assert fingerprint(tmp_path / "compiled") == fingerprint(whole)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tp", [2, 6])
def test_presharded_weights_merge_to_the_whole_model(whole: Path, tmp_path: Path, tp: int, fused: bool) -> None:
    compiled = tmp_path / "compiled"
    (compiled / "weights").mkdir(parents=True)
    (compiled / "neuron_config.json").write_text('{"neuron_config": {"tp_degree": 2}}')  # no kernels
    for rank in range(tp):
        state = inference(truth(whole), tp, rank)
        state["rank_util.rank"] = torch.tensor([rank], dtype=torch.int32)
        for layer in range(LAYERS if fused else 0):
            prefix = f"layers.{layer}.self_attn.qkv_proj"
            parts = [state.pop(f"{prefix}.{part}_proj.weight") for part in "qkv"]
            state[f"{prefix}.Wqkv.weight"] = torch.cat(parts)
        save_file(state, compiled / "weights" / f"tp{rank}_sharded_checkpoint.safetensors")
    convert(compiled, tmp_path / "merged", "hf", like=whole)
    assert differing(read_tensors(tmp_path / "merged"), read_tensors(whole)) == []


def test_embeddings_cut_by_rows_are_told_by_their_shape(whole: Path, tmp_path: Path) -> None:
    for rank in range(2):
        state = inference(truth(whole), 2, rank)
        state["embed_tokens.weight"] = read_tensors(whole)["model.embed_tokens.weight"].chunk(2)[rank].clone()
        save_file(state, tmp_path / f"tp{rank}_sharded_checkpoint.safetensors")
    shutil.copy(whole / "config.json", tmp_path)
    (tmp_path / "neuron_config.json").write_text("{}")
    assert fingerprint(tmp_path) == fingerprint(whole)


def test_square_projections_ask_for_the_flags_they_were_compiled_with(tmp_path: Path) -> None:
    whole = make_dense(tmp_path / "model", sizes=replace(SIZES["dense"], hidden=96))  # o_proj is 96 x 96
    (tmp_path / "compiled").mkdir()
    save_file(inference(truth(whole), 1, 0), tmp_path / "compiled" / "tp0_sharded_checkpoint.safetensors")
    shutil.copy(whole / "config.json", tmp_path / "compiled")
    with pytest.raises(SourceError, match=r"does not tell whether it is stored transposed(.|\n)*neuron_config\.json"):
        open_checkpoint(tmp_path / "compiled")
    flags = tmp_path / "compiled" / "neuron_config.json"
    flags.write_text('{"neuron_config": {"qkv_kernel_enabled": true}}')
    with pytest.raises(SourceError, match="qkv_kernel_enabled: projections are stored transposed"):
        open_checkpoint(tmp_path / "compiled")
    flags.write_text('{"neuron_config": {"qkv_kernel_enabled": false, "mlp_kernel_enabled": true}}')
    assert fingerprint(tmp_path / "compiled") == fingerprint(whole)


def test_from_one_kind_of_ranks_to_another_without_a_whole_copy(whole: Path, tmp_path: Path) -> None:
    steps: list[tuple[str, dict[str, Any]]] = [
        ("nxd", {"mesh": Mesh(tp=6), "kv_heads": "tiled"}),
        ("ranks", {"mesh": Mesh(tp=2, fsdp=2)}),
        ("nxd-inference", {"mesh": Mesh(tp=2)}),
        ("titan", {"mesh": Mesh(fsdp=4)}),
        ("nxd-v1", {"mesh": Mesh(tp=1, pp=2)}),
        ("hf", {}),
    ]
    last = whole
    for number, (kind, choices) in enumerate(steps):
        convert(last, tmp_path / str(number), kind, **choices)
        last = tmp_path / str(number)
    assert differing(read_tensors(last), read_tensors(whole)) == []


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "choices", "error", "words"),
    [
        ("nxd", {"mesh": Mesh(tp=6)}, PolicyError, "--kv-heads tiled"),
        ("nxd", {"mesh": Mesh(fsdp=2)}, PolicyError, "leave --fsdp 2 out"),
        ("nxd", {"mesh": Mesh(tp=2), "vocab_rows": 385}, MappingError, "vocab_size 385 does not divide among 2"),
        ("nxd", {"mesh": Mesh(tp=4)}, PolicyError, "does not divide the 6 attention heads"),
        ("nxd-inference", {"mesh": Mesh(tp=2, pp=2)}, PolicyError, "cut by --tp alone"),
    ],
)
def test_a_mesh_that_nxd_has_not_is_refused(
    whole: Path, tmp_path: Path, kind: str, choices: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        prepare(whole, tmp_path / "out", kind, Choices(**choices))


def test_expert_parallelism_of_the_first_generation_is_refused(tmp_path: Path) -> None:
    whole = make_moe(tmp_path / "model", sizes=SIZES["moe"])
    with pytest.raises(PolicyError, match="no expert parallelism"):
        prepare(whole, tmp_path / "out", "nxd-v1", Choices(mesh=Mesh(tp=2, ep=2)))


def edit(path: Path, change: Callable[[State], object]) -> None:
    state = torch.load(path) if path.suffix == ".pt" else load_file(path)
    change(state)
    torch.save(state, path) if path.suffix == ".pt" else save_file(state, path)


NORM = {"nxd": "model.layers.1.self_attn.q_norm.weight", "nxd-inference": "layers.1.self_attn.q_layernorm.weight"}


@pytest.mark.parametrize("kind", NORM)
def test_ranks_that_do_not_belong_together_are_named(whole: Path, tmp_path: Path, kind: str) -> None:
    convert(whole, tmp_path / "tag", kind, mesh=Mesh(tp=2))
    second = next((tmp_path / "tag").rglob("tp1_*" if kind == "nxd-inference" else "*tp_rank_01*"))
    sound = second.read_bytes()
    edit(second, lambda state: state[NORM[kind]].add_(1))
    with pytest.raises(SourceError, match=r"different values(.|\n)*layers\.1\.self_attn\.q_norm"):
        settle(open_checkpoint(tmp_path / "tag"))
    edit(second, lambda state: state.pop(NORM[kind]))
    with pytest.raises(ConversionError, match=r"layers\.1\.self_attn\.q_(norm|layernorm)"):
        settle(open_checkpoint(tmp_path / "tag"))
    second.write_bytes(sound[: len(sound) // 2])
    with pytest.raises(SourceError, match=second.name):
        settle(open_checkpoint(tmp_path / "tag"))
    second.unlink()
    with pytest.raises((SourceError, MappingError)):
        settle(open_checkpoint(tmp_path / "tag"))
    second.write_bytes(sound)
    next((tmp_path / "tag").rglob("tp0_*" if kind == "nxd-inference" else "*tp_rank_00*")).unlink()
    with pytest.raises(SourceError, match="lacks the files of 1 of 2 ranks"):
        open_checkpoint(tmp_path / "tag")


def test_shards_without_a_config_ask_for_one(whole: Path, tmp_path: Path) -> None:
    for kind in NORM:
        convert(whole, tmp_path / kind, kind, mesh=Mesh(tp=2))
        shutil.rmtree(tmp_path / kind / "hf_assets")
        with pytest.raises(SourceError, match="give --like"):
            open_checkpoint(tmp_path / kind)


def test_a_tag_inside_the_named_folder_is_pointed_at(whole: Path, tmp_path: Path) -> None:
    convert(whole, tmp_path / "run" / "step_100", "nxd", mesh=Mesh(tp=2))
    with pytest.raises(SourceError, match="step_100 does"):
        open_checkpoint(tmp_path / "run")


def test_the_commands_cut_and_join_and_say_what_is_missing(whole: Path, tmp_path: Path) -> None:
    def run(*words: object, code: int = 0) -> str:
        result = CliRunner().invoke(cli, [*map(str, words)], prog_name="qwen3conv")
        assert result.exit_code == code, result.output
        return result.output

    assert "--kv-heads" in run("shard", whole, tmp_path / "tag", "--tp", 6, "--format", "nxd", code=1)
    assert not (tmp_path / "tag").exists()
    run("shard", whole, tmp_path / "tag", "--tp", 6, "--format", "nxd", "--kv-heads", "tiled")
    assert "verified" in run("verify", tmp_path / "tag")
    for command in ("merge", "reshard --tp 2", "convert --to titan", "plan --to hf", "verify", "fingerprint"):
        name, *options = command.split()
        places = (tmp_path / "tag", *([tmp_path / "wrong"] if name not in ("verify", "fingerprint") else []))
        refused = run(name, *places, *options, "--query-heads", "natural", code=1)
        assert "contradicts the manifest" in refused
        assert not (tmp_path / "wrong").exists()
    assert "holds none" in run("merge", whole, tmp_path / "wrong", "--query-heads", "natural", code=1)
    assert "holds none" in run("diff", whole, whole, "--query-heads", "natural", code=1)
    (tmp_path / "tag" / "qwen3conv.json").unlink()
    assert "--query-heads" in run("merge", tmp_path / "tag", tmp_path / "hf", code=1)
    run("merge", tmp_path / "tag", tmp_path / "hf", "--query-heads", "follow")
    assert "the same" in run("diff", tmp_path / "hf", whole)
    assert "the same" in run("diff", tmp_path / "tag", whole, "--query-heads", "follow")
    assert "q_proj" in run("diff", tmp_path / "tag", whole, "--query-heads", "natural", code=3)
    assert '"complete": true' in run("inspect", tmp_path / "tag", "--query-heads", "follow", "--json")
    run("merge", tmp_path / "tag", tmp_path / "wrong", "--query-heads", "natural")
    assert "q_proj" in run("diff", tmp_path / "wrong", whole, code=3)
    assert "--kv-heads is for nxd" in run("shard", whole, tmp_path / "x", "--tp", 2, "--kv-heads", "tiled", code=2)
