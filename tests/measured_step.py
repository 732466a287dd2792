"""What one training step sends and keeps, counted: ``python -m tests.measured_step JOBS.json FOUND``.

Gloo ranks, as many as the mesh of every job has, are forked from a process that has imported torchtitan once. Each
builds torchtitan's own Qwen3 as ``train`` does, parallelised by torchtitan, with its loss in parts; a step is run to
warm up and the next ones are counted. Collectives are seen by a dispatch mode (as by torch's ``CommDebugMode``, which
counts calls and not bytes), sends of a pipeline where torch's schedules make them, allocations by torch's profiler.
Rank r writes ``FOUND.r``. Run it in a process of its own.
"""

from __future__ import annotations

import json
import math
import sys
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.pipelining import schedules
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from qwen3conv.training.devices import prepare_torchtitan

prepare_torchtitan("cpu")

from torchtitan.config import CompileConfig  # noqa: E402
from torchtitan.config.configs import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.distributed.pipeline_parallel import pipeline_llm  # noqa: E402
from torchtitan.models.common.attention import create_varlen_metadata_for_document  # noqa: E402

from qwen3conv.converters.config import parse_config  # noqa: E402
from qwen3conv.converters.geometry import Geometry  # noqa: E402
from qwen3conv.training.titan import (  # noqa: E402
    ChunkedLossWrapper,
    CrossEntropyLoss,
    FullAC,
    ScaledDotProductAttention,
    SelectiveAC,
)
from qwen3conv.training.trainer import native_spec  # noqa: E402
from tests.cli.conftest import config_of  # noqa: E402


class SavingAttention(SelectiveAC):
    """Selective checkpointing that keeps the CPU's attention, as torchtitan's list keeps that of other devices."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """The fields of ``SelectiveAC.Config``."""

    def get_save_ops(self) -> set[Any]:
        """torchtitan's and one more."""
        found: set[Any] = super().get_save_ops()
        return found | {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}


CHECKPOINTING = {"none": None, "selective": SelectiveAC.Config, "saving": SavingAttention.Config, "full": FullAC.Config}


def size(value: Any) -> int:
    """Bytes of all tensors in ``value``."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(size, value)) if isinstance(value, (list, tuple)) else 0


class Counting(TorchDispatchMode):
    """Adds up what each kind of collective of each mesh axis sends from this rank, in ring algorithms."""

    def __init__(self, axes: dict[tuple[int, ...], str]) -> None:
        super().__init__()
        self.axes = axes
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        space, name = func.namespace, func._overloadpacket.__name__
        if space in ("c10d", "_c10d_functional"):
            self._count(name, args, out)
        return out

    def _count(self, name: str, args: Any, out: Any) -> None:
        group = next((g for g in (_group(one) for one in args) if g is not None), None)
        if group is None or (ranks := dist.get_process_group_ranks(group)) == [dist.get_rank()]:
            return
        n = len(ranks)
        axis = self.axes.get(tuple(ranks), str(ranks))
        if name in ("_allgather_base_", "all_gather_into_tensor"):
            whole = size(args[0]) if name == "_allgather_base_" else size(out)
            self.sent[f"{axis} all-gather"] += whole // n * (n - 1)
        elif name in ("_reduce_scatter_base_", "reduce_scatter_tensor"):
            whole = size(args[1]) if name == "_reduce_scatter_base_" else size(args[0])
            self.sent[f"{axis} reduce-scatter"] += whole // n * (n - 1)
        elif name in ("allreduce_", "all_reduce", "all_reduce_"):
            self.sent[f"{axis} all-reduce"] += 2 * size(args[0]) * (n - 1) // n
        elif name in ("alltoall_base_", "all_to_all_single"):
            given = args[0] if name == "all_to_all_single" else args[1]
            splits = args[2] if name == "all_to_all_single" else args[4]
            mine = ranks.index(dist.get_rank())
            row = size(given) // max(1, given.shape[0])
            kept = (splits[mine] if splits else given.shape[0] // n) * row
            self.sent[f"{axis} all-to-all"] += size(given) - kept
        elif name not in ("wait_tensor", "barrier", "broadcast_", "send", "recv_"):
            self.sent[f"{axis} {name}"] += size(args)


def _group(value: Any) -> dist.ProcessGroup | None:
    if isinstance(value, str):
        try:
            return dist.distributed_c10d._resolve_process_group(cast(Any, value))
        except (RuntimeError, ValueError, KeyError):
            return None
    if isinstance(value, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(value)
        except (RuntimeError, TypeError):
            return None
    return value if isinstance(value, dist.ProcessGroup) else None


@contextmanager
def counted_sends(sent: Counter[str]) -> Iterator[None]:
    """Count what a pipeline's stage sends: one function of torch's schedules makes all its sends."""
    module: Any = schedules
    real = module._batch_p2p

    def batch(operations: list[dist.P2POp], desc: str | None = None) -> Any:
        sent["pp send"] += sum(size(one.tensor) for one in operations if one.op is dist.isend)
        return real(operations, desc)

    module._batch_p2p = batch
    try:
        yield
    finally:
        module._batch_p2p = real


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """One step of one model on one mesh. Every rank calls this; memory in bytes beside what was there before."""
    mesh = {"tp": 1, "fsdp": 1, "ep": 1, "pp": 1, "cp": 1, **job["mesh"]}
    dims = ParallelDims(
        dp_replicate=1, dp_shard=mesh["fsdp"], cp=mesh["cp"], tp=mesh["tp"], pp=mesh["pp"], ep=mesh["ep"],
        world_size=math.prod(mesh[name] for name in ("fsdp", "cp", "tp", "pp")), spmd_backend="partial_dtensor",
    )  # fmt: skip
    geometry, length, batch = Geometry(**job["geometry"]), job["seq_len"], job["batch"]
    parallelism = ParallelismConfig(
        spmd_backend="partial_dtensor", tensor_parallel_degree=mesh["tp"], data_parallel_shard_degree=mesh["fsdp"],
        expert_parallel_degree=mesh["ep"], pipeline_parallel_degree=mesh["pp"], context_parallel_degree=mesh["cp"],
        pipeline_parallel_microbatch_size=1,
    )  # fmt: skip
    training = TrainingConfig(
        local_batch_size=batch, seq_len=length, mixed_precision_param="float32", disable_cuda_graphs=True
    )
    dist_utils.set_spmd_backend("partial_dtensor")
    dims.build_mesh()
    source = parse_config(
        {**config_of(geometry, job.get("tied", False)), "num_experts_per_tok": job["top_k"]}, "a test"
    )
    spec = native_spec(source, max_seq_len=length, device="cpu")
    if mesh["pp"] > 1:  # its schedule cuts every tensor among microbatches, lengths of documents too
        for layer in spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    spec.model.update_from_config(
        config=types.SimpleNamespace(training=training, parallelism=parallelism, debug=types.SimpleNamespace(
            moe_force_load_balance=False), compile=CompileConfig(), model_spec=spec)
    )  # fmt: skip
    with torch.device("meta"):
        model = spec.model.build()
    loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=geometry.vocab_size)).build()
    kind = CHECKPOINTING[job["ac"]]
    options: dict[str, Any] = {
        "parallel_dims": dims, "training": training, "parallelism": parallelism, "compile_config": CompileConfig(),
        "ac_config": None if kind is None else kind(), "dump_folder": "",
    }  # fmt: skip
    schedule = None
    if mesh["pp"] > 1:
        schedule, (model,), first, last = pipeline_llm(
            model, device=torch.device("cpu"), model_config=spec.model, parallelize_fn=spec.parallelize_fn,
            loss_fn=loss, **options,
        )  # fmt: skip
    else:
        model, first, last = spec.parallelize_fn(model, **options), True, True
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    if last:
        loss.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    tokens = (torch.arange(batch * length).view(batch, length) * 7 + _replica(dims)) % geometry.vocab_size
    positions = torch.arange(length).expand(batch, length)

    masks = {} if schedule else {"attention_masks": create_varlen_metadata_for_document(positions)}

    def step() -> None:
        if schedule is not None:
            schedule.step(
                *([tokens] if first else []), positions=positions, target=tokens if last else None,
                losses=[] if last else None, return_outputs=False,
                loss_kwargs={"global_valid_tokens": torch.tensor(float(batch * length))},
            )  # fmt: skip
            return
        out = model(tokens, positions=positions, **masks)
        loss(out, tokens, torch.tensor(float(batch * length)))[0].backward()

    step()  # gradients are there, as in the second of accumulated batches
    counting = Counting(_axes(dims))
    with counting, counted_sends(counting.sent):
        step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        step()
    return {"sent": dict(counting.sent), "peak": _peak(watched)}


def _replica(dims: ParallelDims) -> int:
    """Which sequences a rank trains on."""
    mesh = dims.get_optional_mesh("batch")
    return 0 if mesh is None else mesh.get_local_rank()


def _axes(dims: ParallelDims) -> dict[tuple[int, ...], str]:
    """Which axis a group of ranks is; where two have the same ranks, by torchtitan's order."""
    found: dict[tuple[int, ...], str] = {}
    for name in ("tp", "ep", "efsdp", "fsdp", "cp", "pp"):
        mesh = dims.get_optional_mesh(name)
        if mesh is not None and mesh.size() > 1:
            found.setdefault(tuple(dist.get_process_group_ranks(mesh.get_group())), name)
    return found


def _peak(watched: profile) -> int:
    """The most bytes that were allocated at a time and not before."""
    results: Any = watched.profiler
    events = sorted(
        (one.start_ns(), one.nbytes()) for one in results.kineto_results.events() if one.name() == "[memory]"
    )
    total = most = 0
    for _, count in events:
        total += count
        most = max(most, total)
    return most


def rank_main(rank: int, ranks: int, rendezvous: str, jobs: list[dict[str, Any]], found: str) -> None:
    """One rank: join the group, run the jobs in order, write what it found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    results = []
    for job in jobs:
        results.append(run_job(job))
        dist.barrier()
    Path(f"{found}.{rank}").write_text(json.dumps(results))
    dist.destroy_process_group()


def main(spec: Path, found: Path) -> None:
    """Fork the ranks and wait for them; any failure ends the launch with its traceback."""
    jobs = json.loads(spec.read_text())
    ranks = math.prod(jobs[0]["mesh"].get(name, 1) for name in ("fsdp", "cp", "tp", "pp"))
    arguments = (ranks, str(spec.with_suffix(".rendezvous")), jobs, str(found))
    torch.multiprocessing.start_processes(rank_main, args=arguments, nprocs=ranks, start_method="fork")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
