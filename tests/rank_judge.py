"""Real ranks judging what was cut for them: ``python -m tests.rank_judge JOBS.json``, see ``rank_verdicts``.

``placed`` jobs: four gloo ranks let torch cut whole tensors (``distribute_tensor``, ``fully_shard``, see
``multi_rank.PLACEMENTS``), load their own rank file with safetensors and nothing else, and compare; then ``dcp.load``
fills the same shards from a DCP, and the files that it opens are written down. ``titan`` jobs: torchtitan's Trainer
builds and parallelises its native Qwen3 and loads a DCP, and its local shards meet the rank files. ``transformers``
jobs: ``from_pretrained(tp_plan="auto")`` shards the model, and its local parameters meet the rank files. One launch
for all.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from tests.conversions import differing, ones_of_bits
from tests.real_checkpoints import launch

State = dict[str, Any]


class Verdict(NamedTuple):
    """What one rank found."""

    problems: list[str]
    """Where its file and its shards differ."""
    loaded: list[str]
    """Where what ``dcp.load`` filled in differs from its shards."""
    opened: list[str]
    """Files of the DCP that it opened."""
    held: int
    """Tensors that were compared."""
    empty: int
    """Tensors of which it holds nothing."""


def rank_verdicts(base: Path, jobs: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Verdict]]:
    """Let ranks judge jobs of ``kind`` and ``ranks`` (our folder); of each, the ranks' verdicts in order.

    ``placed``: ``whole`` (a safetensors file), ``placement`` and maybe ``dcp``. ``titan``: ``dcp``, ``source`` (a
    Hugging Face folder), ``world``, ``tensor``, ``expert``. ``transformers``: ``source``, ``world``.
    """
    spec = [{**job, "verdict": str(base / f"{name}.rank")} for name, job in jobs.items()]
    launch(
        "tests.rank_judge",
        base / "jobs.json",
        [{k: str(v) if isinstance(v, Path) else v for k, v in j.items()} for j in spec],
    )
    return {
        name: [Verdict(**json.loads(path.read_text())) for path in sorted(base.glob(f"{name}.rank[0-9]"))]
        for name in jobs
    }


def own_file(folder: Path, rank: int) -> State:
    """What ``rank`` loads: its file, by the safetensors library; where replicas of a mesh run, they share files."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("rank-*.safetensors"))
    return load_file(files[rank % len(files)])


def local_shards(state: Mapping[str, Any]) -> State:
    """The local tensors of DTensors; whatever else there is, as it is."""
    return {name: value.to_local() if hasattr(value, "to_local") else value.detach() for name, value in state.items()}


def compare(
    rank: int, job: Mapping[str, Any], shards: State, loaded: Sequence[str] = (), opened: Sequence[str] = ()
) -> None:
    """Write the verdict of one rank down."""
    held = {name: tensor for name, tensor in shards.items() if tensor.numel()}
    problems = differing(own_file(Path(job["ranks"]), rank), held)
    verdict = Verdict(problems, list(loaded), sorted(opened), len(held), len(shards) - len(held))
    Path(f"{job['verdict']}{rank}").write_text(json.dumps(verdict._asdict()))


def fused_per_half(tensors: State) -> State:
    """FSDP 2 x TP 2 of transformers 5's names: gate and up rows of ``gate_up_proj`` are cut each, then joined."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from tests.multi_rank import as_module, replace_parameters, tensor_parallel_dim

    root, mesh = as_module(tensors), init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))

    def place(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name.endswith("experts.gate_up_proj"):
            halves = [distribute_tensor(half.contiguous(), mesh["tp"], [Shard(1)]) for half in tensor.chunk(2, 1)]
            return torch.cat([half.to_local() for half in halves], 1)
        dim = 2 if name.endswith("experts.down_proj") else tensor_parallel_dim(name)
        return distribute_tensor(tensor, mesh["tp"], [Replicate() if dim is None else Shard(dim)])

    replace_parameters(root, place)
    fully_shard(root, mesh=mesh["fsdp"])
    return root.state_dict()


def load_and_watch(state: State, folder: Path) -> list[str]:
    """``dcp.load`` into ``state``; the names of the files that this rank opened for it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import FileSystem

    opened, create_stream = [], FileSystem.create_stream

    def watched(self: Any, path: Any, mode: str) -> Any:
        opened.append(Path(path).name)
        return create_stream(self, path, mode)

    with patch.object(FileSystem, "create_stream", watched):
        dcp.load(state, checkpoint_id=folder)
    return [name for name in opened if name != ".metadata"]


def judge_placed(rank: int, rendezvous: str, jobs: Sequence[Mapping[str, Any]]) -> None:
    """One of four ranks, for all jobs of its kind."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file

    from tests.multi_rank import PLACEMENTS, WORLD

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{rendezvous}", rank=rank, world_size=WORLD)
    for job in jobs:
        place = {**PLACEMENTS, "fused-per-half": fused_per_half}[job["placement"]]
        state = place(load_file(job["whole"]))
        shards = {name: tensor.clone() for name, tensor in local_shards(state).items()}
        loaded, opened = [], []
        if "dcp" in job:
            for tensor in local_shards(state).values():
                tensor.copy_(ones_of_bits(tensor.shape, tensor.dtype))
            opened = load_and_watch(state, Path(job["dcp"]))
            loaded = differing(local_shards(state), shards)
        compare(rank, job, shards, loaded, opened)
    dist.destroy_process_group()


def judge_titan(rank: int, job: Mapping[str, Any], rendezvous: str) -> None:
    """One rank of torchtitan's Trainer: its own parallelised Qwen3, filled from our DCP."""
    from tests.titan_process import build_trainer, end_trainer

    options = {
        "fuse_qkv": False,
        "load_balance": True,
        "steps": 1,
        "base": f"{job['verdict']}-run",
        "ranks": job["world"],
    }
    trainer = build_trainer(rank, {**job, **options}, rendezvous, initial_load_path=job["dcp"])
    (model,) = trainer.model_parts
    for tensor in local_shards(model.state_dict()).values():
        tensor.copy_(ones_of_bits(tensor.shape, tensor.dtype))
    assert trainer.checkpointer.load(step=trainer.config.checkpoint.load_step)  # as Trainer.train begins
    compare(rank, job, local_shards(model.state_dict()))
    end_trainer(trainer)


def judge_transformers(rank: int, job: Mapping[str, Any], rendezvous: str) -> None:
    """One rank of a transformers model under its own tensor-parallel plan."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    host, port = rendezvous.split(":")
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["world"]), MASTER_ADDR=host, MASTER_PORT=port
    )
    model = AutoModelForCausalLM.from_pretrained(job["source"], tp_plan="auto", dtype=torch.bfloat16)
    shards = local_shards(dict(model.named_parameters()))
    mine = own_file(Path(job["ranks"]), rank)
    # its plan replicates embeddings and may gather the head; what it does cut must be cut alike
    whole = [name for name in shards if name.endswith(("embed_tokens.weight", "lm_head.weight"))]
    assert all(name.endswith(("embed_tokens.weight", "lm_head.weight")) for name in set(mine) - set(shards))
    problems = differing(
        {n: mine[n] for n in shards if n not in whole}, {n: t for n, t in shards.items() if n not in whole}
    )
    Path(f"{job['verdict']}{rank}").write_text(
        json.dumps(Verdict(problems, [], [], len(shards) - len(whole), 0)._asdict())
    )
    dist.destroy_process_group()


def main(spec: Path) -> None:
    """Import once, then do the jobs; ranks are forked, so that no state leaks."""
    from tests.titan_process import free_ports, prepare_cpu

    prepare_cpu()
    import torch.multiprocessing
    import torchtitan.models.qwen3
    import torchtitan.trainer  # noqa: F401  (before the forks, once)
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

    jobs, ports = json.loads(spec.read_text()), free_ports()
    start = torch.multiprocessing.start_processes
    placed = [job for job in jobs if job["kind"] == "placed"]
    start(judge_placed, (next(ports), placed), nprocs=4, start_method="fork")
    for job in jobs:
        if job["kind"] != "placed":
            judge = judge_titan if job["kind"] == "titan" else judge_transformers
            start(judge, (job, next(ports)), nprocs=job["world"], start_method="fork")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
