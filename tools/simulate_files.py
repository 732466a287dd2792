"""Files of a checkpoint in each format, and their bytes: arranged as a conversion would, without a source."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from qwen3conv.converters.arrangement import DCP_FILE_BYTES
from qwen3conv.converters.boxes import TensorSpec
from qwen3conv.converters.errors import PolicyError
from qwen3conv.converters.file_split import HF_SHARD_BYTES
from qwen3conv.converters.formats import FORMATS, Format
from qwen3conv.converters.layouts import TITAN_SCHEMAS, Layout, bind
from qwen3conv.converters.parameters import HEAD
from qwen3conv.converters.placement import Mesh, Place, check_vllm, elements_by_rank
from qwen3conv.converters.stores.dcp_writing import arrange_dcp
from qwen3conv.converters.stores.safetensors_writing import arrange_safetensors, split_by_size

from .simulate import OPTIMIZER_STATES, Job


class Files(NamedTuple):
    """Data files of one format: how many, their bytes, and those of the largest.

    Headers count only in ``hf``, ``hf-fused`` and ``titan``; elsewhere they are thousandths.
    """

    files: int
    bytes: int
    largest: int


def checkpoint_files(job: Job, ranks: Mapping[int, int]) -> dict[str, Files]:
    """By format, in bfloat16; and what torchtitan saves in a step, with the optimizer, in the parameters' dtype.

    ``ranks`` are the elements on each rank. Formats of tensor-parallel serving are those of the mesh's tp alone; what
    they cannot hold is left out.
    """
    found = {name: _whole(job, FORMATS[name]) for name in ("hf", "hf-fused", "titan")}
    found["ranks"] = _cut(ranks)
    if job.mesh.ep > 1:
        served: Mapping[Any, int] = elements_by_rank(
            TITAN_SCHEMAS["T7"], job.geometry, Mesh(tp=job.mesh.tp), tied=job.tied
        )
    else:
        served = _sums(job, ranks, lambda place: place.tp)
        found["nxd"] = _cut(_sums(job, ranks, lambda place: (place.pp, place.tp)))
    found["nxd-inference"] = _cut(served)
    with suppress(PolicyError):
        check_vllm(Mesh(tp=job.mesh.tp), job.geometry)
        found["vllm"] = _cut(served)
    return {**found, "titan, whole training state": _state(job)}


def _sums(job: Job, ranks: Mapping[int, int], key: Callable[[Place], Hashable]) -> dict[Hashable, int]:
    """What FSDP cuts, put together."""
    found: dict[Hashable, int] = {}
    for rank, count in ranks.items():
        at = key(job.sharded.place(rank))
        found[at] = found.get(at, 0) + count
    return found


def _cut(elements: Mapping[Any, int]) -> Files:
    return _files([2 * count for count in elements.values() if count])


def _specs(job: Job, layout: Layout) -> Iterator[TensorSpec]:
    for binding in bind(layout, job.geometry, tied=job.tied):
        if not (job.tied and binding.rule.parts == (HEAD,)):
            yield TensorSpec(binding.name, "F32" if binding.rule.optional else "BF16", binding.shape)


def _whole(job: Job, target: Format) -> Files:
    specs = list(_specs(job, target.layout("T7")))
    if target.store == "dcp":
        arrangement = arrange_dcp(specs, file_bytes=DCP_FILE_BYTES)
    else:
        arrangement = arrange_safetensors(split_by_size(specs, HF_SHARD_BYTES))
    return _files([file.size for file in arrangement.files])


def _state(job: Job) -> Files:
    """Each rank writes a file; what several ranks hold is written once (torch 2.13, ``dcp.save``)."""
    (elements,) = elements_by_rank(TITAN_SCHEMAS["T7"], job.geometry, Mesh(), tied=job.tied).values()
    total = elements * job.parameter_bytes * (1 + OPTIMIZER_STATES[job.optimizer])
    return Files(job.ranks, total, -(-total // job.ranks))


def _files(sizes: list[int]) -> Files:
    return Files(len(sizes), sum(sizes), max(sizes))
