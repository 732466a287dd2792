"""Checkpoints that four real ranks write: ``python -m tests.multi_rank JOBS.json`` does all jobs in one launch.

Placements are made by torch itself (``distribute_tensor``, ``fully_shard``) and files by the real writers, on gloo. A
job names a safetensors file of whole tensors, how a mesh cuts them, and the writer. Imports happen once, in the
parent; the ranks are forked, so a launch costs one start-up. Run it in a process of its own: it never returns to the
process that imported torch. Jobs are listed in ``real_checkpoints``.

Sources: torch 2.13, ``torch/distributed/fsdp/_fully_shard``, ``torch/distributed/tensor``; torchtitan 0.3.0,
``distributed/fsdp.py`` and ``models/common/*sharding*`` for which tensor gets which placement; accelerate 1.15,
``utils/fsdp_utils.py``; verl, ``utils/checkpoint/fsdp_checkpoint_manager.py``.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

WORLD = 4
State = dict[str, Any]

COLUMNS = (
    *("wq.weight", "wk.weight", "wv.weight", "w1.weight", "w3.weight", "tok_embeddings.weight", "lm_head.weight"),
    *("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight", "embed_tokens.weight"),
)
ROWS = ("wo.weight", "w2.weight", "o_proj.weight", "down_proj.weight", "w1_EFD", "w3_EFD")
"""Cut along dim 1; for (E, F, D) experts that is F, the same axis that a column-parallel w1 cuts."""
LAST = ("w2_EDF",)


def tensor_parallel_dim(name: str) -> int | None:
    """The dim that tensor parallelism cuts ``name`` along, torchtitan's and transformers' choice; None: replicated."""
    for dim, endings in enumerate((COLUMNS, ROWS, LAST)):
        if name.endswith(endings):
            return dim
    return None


def as_module(tensors: State) -> nn.Module:
    """A tree of modules whose ``state_dict`` has the names of ``tensors``; floating tensors become parameters."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        module = root
        for segment in path:
            if segment not in dict(module.named_children()):
                module.add_module(segment, nn.Module())
            module = module.get_submodule(segment)
        if leaf.startswith("expert_bias"):
            module.register_buffer(leaf, tensor)
        else:
            module.register_parameter(leaf, nn.Parameter(tensor))
    return root


def blocks(root: nn.Module) -> Iterable[nn.Module]:
    """The transformer blocks, whatever prefix the names have."""
    return [module for name, module in root.named_modules() if name.split(".")[-2:-1] == ["layers"]]


def replace_parameters(root: nn.Module, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Put ``change(name, parameter)`` in the place of every parameter."""
    for name, parameter in list(root.named_parameters()):
        path, _, leaf = name.rpartition(".")
        root.get_submodule(path).register_parameter(leaf, nn.Parameter(change(name, parameter.data)))


def fsdp(tensors: State) -> State:
    """FSDP2 over all ranks: rows of dim 0; with fewer rows than ranks some ranks hold none."""
    root, mesh = as_module(tensors), init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    for block in blocks(root):
        fully_shard(block, mesh=mesh)
    fully_shard(root, mesh=mesh)
    return root.state_dict()


def hybrid(tensors: State) -> State:
    """HSDP: two replicas of a model that two ranks share."""
    root, mesh = as_module(tensors), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "fsdp"))
    for block in blocks(root):
        fully_shard(block, mesh=mesh)
    fully_shard(root, mesh=mesh)
    return root.state_dict()


def tensor_parallel(tensors: State) -> State:
    """TP 2 with two data-parallel replicas: ``(Replicate, Shard(dim))``, and ``(Replicate, Replicate)`` for norms."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "tp"))
    placed: State = {}
    for name, tensor in tensors.items():
        dim = tensor_parallel_dim(name)
        placed[name] = distribute_tensor(tensor, mesh, [Replicate(), Replicate() if dim is None else Shard(dim)])
    return placed


def tensor_parallel_4(tensors: State) -> State:
    """TP over all four ranks, though rows need not divide: torch cuts like ``torch.chunk``."""
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    placed: State = {}
    for name, tensor in tensors.items():
        dim = tensor_parallel_dim(name)
        placed[name] = distribute_tensor(tensor, mesh, [Replicate() if dim is None else Shard(dim)])
    return placed


def fsdp_tensor_parallel(tensors: State) -> State:
    """FSDP 2 x TP 2. Column-parallel rows come out as ``(_StridedShard(0, split_factor=2), Shard(0))``."""
    root, mesh = as_module(tensors), init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))

    def place(name: str, tensor: torch.Tensor) -> torch.Tensor:
        dim = tensor_parallel_dim(name)
        return distribute_tensor(tensor, mesh["tp"], [Replicate() if dim is None else Shard(dim)])

    replace_parameters(root, place)
    for block in blocks(root):
        fully_shard(block, mesh=mesh["fsdp"])
    fully_shard(root, mesh=mesh["fsdp"])
    return root.state_dict()


def expert_parallel(tensors: State, *, experts_dim: int = 0) -> State:
    """EP 2 x FSDP 2 for stacked experts, FSDP over all ranks for the rest, as torchtitan lays its two meshes.

    ``experts_dim`` 1 cuts F instead of E a second time, as torchtitan does when there are more ranks than experts.
    """
    root = as_module(tensors)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    sparse = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    experts = [module for name, module in root.named_modules() if name.endswith("experts")]
    leaves = [module for module in experts if any(True for _ in module.parameters(recurse=False))]
    for module in leaves:
        replace_parameters(module, lambda _, tensor: distribute_tensor(tensor, sparse["ep"], [Shard(0)]))
        fully_shard(module, mesh=sparse["efsdp"], shard_placement_fn=lambda _: Shard(experts_dim))
    for block in blocks(root):
        fully_shard(block, mesh=mesh)
    fully_shard(root, mesh=mesh)
    return root.state_dict()


def expert_parallel_dim_1(tensors: State) -> State:
    """``expert_parallel`` with the second cut along dim 1."""
    return expert_parallel(tensors, experts_dim=1)


def expert_parallel_4(tensors: State) -> State:
    """EP over four ranks with experts that do not divide: the last rank may hold none. The rest is replicated."""
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ep",))
    return {
        name: distribute_tensor(tensor, mesh, [Shard(0) if ".experts." in name or "_experts." in name else Replicate()])
        for name, tensor in tensors.items()
    }


def pipeline(tensors: State) -> State:
    """Two pipeline stages of two replicas: plain whole tensors, each layer on the ranks of its stage only."""
    layers = {int(name.split("layers.")[1].split(".")[0]) for name in tensors if "layers." in name}
    stage = dist.get_rank() // 2
    first = {name: tensor for name, tensor in tensors.items() if _stage(name, len(layers)) == 0}
    second = {name: tensor for name, tensor in tensors.items() if _stage(name, len(layers)) == 1}
    return second if stage else first


def _stage(name: str, layers: int) -> int:
    if "layers." in name:
        return int(int(name.split("layers.")[1].split(".")[0]) >= (layers + 1) // 2)
    return int(not name.endswith(("tok_embeddings.weight", "embed_tokens.weight")))


PLACEMENTS: dict[str, Callable[[State], State]] = {
    "fsdp": fsdp,
    "hybrid": hybrid,
    "tp": tensor_parallel,
    "tp4": tensor_parallel_4,
    "fsdp-tp": fsdp_tensor_parallel,
    "ep": expert_parallel,
    "ep-dim-1": expert_parallel_dim_1,
    "ep4": expert_parallel_4,
    "pp": pipeline,
}


def write_dcp(state: State, folder: Path) -> None:
    """``dcp.save`` as torchtitan calls it."""
    dcp.save(state, checkpoint_id=str(folder))


def write_hf_shards(state: State, folder: Path) -> None:
    """torch's ``HuggingFaceStorageWriter(save_distributed=True)``: ``shard-0000r-model-0000i-of-0000n.safetensors``.

    Tensors go to two files by turns, as an index of a source model would spread them.
    """
    spread = {name: 1 + position % 2 for position, name in enumerate(sorted(state))}
    writer = dcp.HuggingFaceStorageWriter(path=str(folder), fqn_to_index_mapping=spread, save_distributed=True)
    dcp.save(state, storage_writer=writer)


def write_verl(state: State, folder: Path) -> None:
    """What verl leaves: one pickle of DTensors per rank (plus the small files around them)."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = dist.get_rank()
    torch.save(state, folder / f"model_world_size_{WORLD}_rank_{rank}.pt")
    optimizer = torch.optim.AdamW([torch.zeros(1)])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0], last_epoch=-1)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    random_state = {"cpu": torch.get_rng_state(), "numpy": numpy.random.get_state(), "random": random.getstate()}
    extra = {"lr_scheduler": scheduler.state_dict(), "rng": random_state}
    torch.save(extra, folder / f"extra_state_world_size_{WORLD}_rank_{rank}.pt")
    if rank == 0:
        (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": WORLD}))


WRITERS: dict[str, Callable[[State, Path], None]] = {
    "dcp": write_dcp,
    "hf-shards": write_hf_shards,
    "verl": write_verl,
}


def write_accelerate(source: Path, folder: Path) -> None:
    """A transformers model and its optimizer under FSDP2, saved by accelerate.

    Makes ``pytorch_model_fsdp_0`` and ``optimizer_0`` in ``folder``. transformers 5 holds experts fused
    (``experts.gate_up_proj``), and accelerate saves what is in memory.
    """
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    plugin.set_state_dict_type()
    process = PartialState(cpu=True)
    save_fsdp_model(plugin, process, model, str(folder))
    save_fsdp_optimizer(plugin, process, optimizer, model, str(folder))


def run_job(job: dict[str, str]) -> None:
    """Write one checkpoint; every rank calls this."""
    source, folder = Path(job["source"]), Path(job["folder"])
    if job["writer"] == "accelerate":
        write_accelerate(source, folder)
    else:
        state = PLACEMENTS[job["placement"]](load_file(source))
        WRITERS[job["writer"]](state, folder)
        if "placements" in job and dist.get_rank() == 0:
            seen = {name: str(value.placements) for name, value in state.items() if isinstance(value, DTensor)}
            Path(job["placements"]).write_text(json.dumps(seen, indent=1))
    dist.barrier()


def rank_main(rank: int, rendezvous: str, jobs: list[dict[str, str]]) -> None:
    """One rank: join the group, run the jobs in order."""
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    for job in jobs:
        run_job(job)
    dist.destroy_process_group()


def main(spec: Path) -> None:
    """Fork the ranks and wait for them; any failure ends the launch with its traceback."""
    jobs = json.loads(spec.read_text())
    if any(job["writer"] == "accelerate" for job in jobs):
        for module in ("accelerate.utils.fsdp_utils", "transformers.models.qwen3_moe.modeling_qwen3_moe"):
            importlib.import_module(module)  # before the fork, once
    torch.multiprocessing.start_processes(
        rank_main, args=(str(spec.with_suffix(".rendezvous")), jobs), nprocs=WORLD, start_method="fork"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
