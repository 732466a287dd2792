"""Load what ``qwen3conv shard --tp`` wrote for a rank into a tensor-parallel transformers model: safetensors is enough.

    qwen3conv shard Qwen/Qwen3-0.6B qwen3-tp2 --tp 2
    torchrun --nproc_per_node 2 examples/load_rank.py qwen3-tp2 --whole Qwen/Qwen3-0.6B

Each rank reads its own file and no other. Dense and MoE models, on the CPU with gloo; ``--whole`` compares the logits
with those of the whole model. The loader is ``load_rank``; qwen3conv is not imported.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

TOLERANCE = 1e-3
"""Largest difference of logits in float32; the two models add up in another order."""

PLAN = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    **{f"model.layers.*.self_attn.{part}_proj": ColwiseParallel() for part in "qkv"},
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    **{f"model.layers.*.mlp.{part}_proj": ColwiseParallel() for part in ("gate", "up")},
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}
"""How ``kind`` in the index is said to torch: column is ColwiseParallel, row is RowwiseParallel."""


def load_rank(folder: Path, index: dict[str, Any], mesh: DeviceMesh) -> PreTrainedModel:
    """The model of ``folder``, tensor-parallel over ``mesh`` and in float32, filled from this rank's file."""
    from transformers import AutoConfig, AutoModelForCausalLM

    local = load_file(folder / index["ranks"][mesh.get_local_rank()]["file"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "hf_assets"), dtype=torch.float32)
    parallelize_module(model, mesh, PLAN)
    if "lm_head.weight" not in local:  # tied
        model.lm_head.weight = model.model.embed_tokens.weight
    for layer in model.model.layers:
        if experts := getattr(layer.mlp, "experts", None):  # a rank has its rows of every expert, its output is a part
            experts.register_forward_hook(lambda module, inputs, output: sum_over_ranks(output))
            for name, whole in list(experts.named_parameters()):
                rows = whole.shape[1] // (mesh.size() if name == "gate_up_proj" else 1)
                columns = whole.shape[2] // (mesh.size() if name == "down_proj" else 1)
                setattr(experts, name, nn.Parameter(torch.empty(whole.shape[0], rows, columns, device="meta")))
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # computed, not stored
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            getattr(parameter, "to_local", lambda p=parameter: p)().copy_(local.pop(name))
    assert not local, f"the model has no place for {', '.join(local)}"
    return model.eval()


def sum_over_ranks(output: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' parts."""
    dist.all_reduce(output)
    return output


def main() -> int:
    """Load, compute logits, and compare them if there is something to compare with; returns the exit code."""
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description="Load a rank's file into a tensor-parallel model.")
    parser.add_argument("folder", type=Path, help="what `qwen3conv shard --tp N` wrote")
    parser.add_argument("--whole", metavar="MODEL", help="the model it was made of, a folder or a hub id")
    options = parser.parse_args()
    index = json.loads((options.folder / "qwen3conv-ranks.json").read_text())
    dist.init_process_group("gloo")
    tp, degrees = index["mesh"]["tp"], [size for size in index["mesh"].values() if size > 1]
    if index["layout"] != "hf-fused" or degrees not in ([], [tp]) or tp != dist.get_world_size():
        parser.error(f"give a folder of layout hf-fused, cut by --tp {dist.get_world_size()} alone")
    mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
    model = load_rank(options.folder, index, mesh)
    tokens = torch.arange(48).reshape(2, 24) * 7 % model.config.vocab_size
    with torch.no_grad():
        logits = model(tokens).logits
    code = 0
    if dist.get_rank() == 0:
        held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
        print(f"rank 0 of {tp} holds {held:,} parameters")
        if options.whole is not None:
            whole = AutoModelForCausalLM.from_pretrained(options.whole, dtype=torch.float32).eval()
            with torch.no_grad():
                worst = (whole(tokens).logits - logits).abs().max().item()
            print(f"logits differ from those of {options.whole} by at most {worst:.1e}")
            code = int(worst > TOLERANCE)
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
