"""vLLM's ``sharded_state``, built here from first principles as its parallel linears cut: read, written, refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer

from qwen3conv.converters import Choices, carry_out, open_checkpoint, prepare, settle
from qwen3conv.converters.errors import ConversionError, PolicyError, SourceError
from qwen3conv.converters.placement import Mesh
from tests.models import DENSE, MOE, make_dense, make_moe, make_tokenizer, read_tensors

Tensors = dict[str, torch.Tensor]

TP = (1, 2, 6)
"""6 is more than the 2 key-value heads: neighbours hold the same one."""


def expected_rank(tensors: Tensors, tp: int, rank: int) -> Tensors:
    """What vLLM's rank keeps: QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear and FusedMoE by hand."""
    heads, kv, dim = DENSE.heads, DENSE.kv_heads, DENSE.head_dim
    found: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            found[name] = tensor.chunk(tp)[rank]
        elif name.endswith("q_proj.weight"):
            parts = [tensor.view(heads, dim, -1).chunk(tp)[rank]]
            for other in "kv":
                rows = tensors[name.replace("q_proj", f"{other}_proj")].view(kv, dim, -1)
                head = rank * kv // tp
                parts.append(rows[head : head + 1] if tp > kv else rows.chunk(tp)[rank])
            found[name.replace("q_proj", "qkv_proj")] = torch.cat([part.flatten(0, 1) for part in parts])
        elif name.endswith("o_proj.weight") or (name.endswith("down_proj.weight") and ".experts." not in name):
            found[name] = tensor.chunk(tp, dim=1)[rank]
        elif name.endswith("gate_proj.weight") and ".experts." not in name:
            up = tensors[name.replace("gate_proj", "up_proj")]
            found[name.replace("gate_proj", "gate_up_proj")] = torch.cat([tensor.chunk(tp)[rank], up.chunk(tp)[rank]])
        elif name.endswith("experts.0.gate_proj.weight"):
            layer = name.removesuffix("0.gate_proj.weight")
            w13, w2 = [], []
            for expert in range(MOE.experts):
                gate, up, down = (tensors[f"{layer}{expert}.{p}_proj.weight"] for p in ("gate", "up", "down"))
                w13.append(torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]]))
                w2.append(down.chunk(tp, dim=1)[rank])
            found[f"{layer}w13_weight"], found[f"{layer}w2_weight"] = torch.stack(w13), torch.stack(w2)
        elif "norm" in name or name.endswith("mlp.gate.weight"):
            found[name] = tensor
    return {name: tensor.contiguous() for name, tensor in found.items()}


SIZES = {"dense": replace(DENSE, vocab=384, intermediate=96), "moe": replace(MOE, vocab=384)}


@pytest.fixture(scope="module", params=SIZES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make = make_moe if request.param == "moe" else make_dense
    return make(tmp_path_factory.mktemp("vllm") / "model", sizes=SIZES[request.param])


@pytest.mark.parametrize("tp", TP)
def test_ranks_are_what_vllm_cuts(whole: Path, tmp_path: Path, tp: int) -> None:
    carry_out(prepare(whole, tmp_path / "ranks", "vllm", Choices(mesh=Mesh(tp=tp))))
    tensors = read_tensors(whole)
    for rank in range(tp):
        ours = load_file(tmp_path / "ranks" / f"model-rank-{rank}-part-0.safetensors")
        theirs = expected_rank(tensors, tp, rank)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("tp", TP)
def test_ranks_in_several_parts_merge_to_the_whole_model(whole: Path, tmp_path: Path, tp: int) -> None:
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    for rank in range(tp):
        items = sorted(expected_rank(read_tensors(whole), tp, rank).items())
        for part, half in enumerate((items[::2], items[1::2])):
            save_file(dict(half), ranks / f"model-rank-{rank}-part-{part}.safetensors")
    shutil.copy(whole / "config.json", ranks)
    carry_out(prepare(ranks, tmp_path / "merged", "hf"))
    merged, truth = read_tensors(tmp_path / "merged"), read_tensors(whole)
    assert merged.keys() == truth.keys()
    assert all(torch.equal(merged[name], truth[name]) for name in truth)


def test_what_cannot_be_is_refused_by_name(whole: Path, tmp_path: Path) -> None:
    carry_out(prepare(whole, tmp_path / "ranks", "vllm", Choices(mesh=Mesh(tp=6))))
    with pytest.raises(PolicyError, match="tensor parallelism alone"):
        prepare(whole, tmp_path / "x", "vllm", Choices(mesh=Mesh(tp=2, fsdp=2)))
    with pytest.raises(PolicyError, match="--vocab-rows 448"):
        prepare(whole, tmp_path / "x", "vllm", Choices(mesh=Mesh(tp=2), vocab_rows=390))
    lost = tmp_path / "lost"
    shutil.copytree(tmp_path / "ranks", lost)
    (lost / "model-rank-3-part-0.safetensors").unlink()
    with pytest.raises(SourceError, match="model-rank-3-part-0"):
        open_checkpoint(lost)
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "ranks", other)
    path = other / "model-rank-1-part-0.safetensors"
    changed = load_file(path)
    changed["model.layers.1.self_attn.q_norm.weight"] += 1
    save_file(changed, path)
    with pytest.raises(SourceError, match=r"different values(.|\n)*layers\.1\.self_attn\.q_norm(.|\n)*model-rank-1"):
        settle(open_checkpoint(other))
    (tmp_path / "ranks" / "config.json").unlink()
    with pytest.raises(ConversionError, match=r"config\.json"):
        open_checkpoint(tmp_path / "ranks")


def test_config_and_tokenizer_lie_where_vllm_looks_and_travel_back(tmp_path: Path) -> None:
    """Beside the ranks, as vLLM's ``examples/offline_inference/save_sharded_state.py`` leaves them."""
    sizes = replace(MOE, vocab=384)
    whole = make_moe(tmp_path / "model", sizes=sizes, max_shard_size="60KB")
    make_tokenizer(whole)
    carry_out(prepare(whole, tmp_path / "ranks", "vllm", Choices(mesh=Mesh(tp=2))))
    assert AutoConfig.from_pretrained(tmp_path / "ranks").num_experts == sizes.experts
    AutoTokenizer.from_pretrained(tmp_path / "ranks")
    assert not (tmp_path / "ranks" / "hf_assets").exists()
    carry_out(prepare(tmp_path / "ranks", tmp_path / "merged", "hf"))
    kept = {path.name for path in whole.iterdir()}
    assert {path.name for path in (tmp_path / "merged").iterdir()} == kept | {"qwen3conv.json"}
    for name in kept:
        assert (tmp_path / "merged" / name).read_bytes() == (whole / name).read_bytes(), name
