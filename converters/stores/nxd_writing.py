"""Lay out shards of neuronx-distributed (NxD): training checkpoints of either generation, and NxD Inference's weights.

=============  ==================================================================================================
training, v2   ``model/dp_rank_00_[ep_rank_{EE}_]tp_rank_{TT}_pp_rank_{PP}.pt``, then ``checkpoint`` and ``done``
training, v1   ``tp_rank_{TT}_pp_rank_{PP}/checkpoint.pt``
inference      ``weights/tp{T}_sharded_checkpoint.safetensors``, each with the rank's number in small buffers
=============  ==================================================================================================

Sources: neuronx-distributed, ``trainer/checkpoint.py``; neuronx-distributed-inference, ``models/application_base.py``.
Read from source; NxD was not run on what is written here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from ..boxes import Box, Chunk, StoredTensor, TensorSpec
from ..errors import PolicyError
from ..placement import Mesh, rank_name
from .contents import Arrangement, OutputFile
from .nxd_training import NxdMesh
from .safetensors_writing import arrange_safetensors
from .torch_zip_writing import state_archive

Specs = Sequence[TensorSpec]

_V1_KEY = "model"
"""Where the first generation's ``load`` looks for the state dict in a file; the second takes the file's own."""


def written_mesh(mesh: Mesh) -> NxdMesh:
    """NxD's degrees for those of the command line.

    Raises:
        PolicyError: FSDP is among them.
    """
    if mesh.fsdp not in (1, mesh.ep):
        raise PolicyError(f"NxD's data-parallel ranks all hold the same weights; leave --fsdp {mesh.fsdp} out")
    return NxdMesh(mesh.tp, mesh.ep, mesh.pp)


def as_mesh(mesh: NxdMesh) -> Mesh:
    """The mesh whose ranks are counted as NxD's files are: expert ranks stand where FSDP's would."""
    return Mesh(tp=mesh.tp, fsdp=mesh.ep, ep=mesh.ep, pp=mesh.pp)


def arrange_nxd(held: Sequence[Specs], mesh: NxdMesh, generation: int) -> Arrangement:
    """Where every byte of a training checkpoint goes. ``held[rank]`` are local tensors by FQN.

    Raises:
        PolicyError: expert parallelism in the first generation, whose names have no place for it.
    """
    if generation == 1 and mesh.ep > 1:
        raise PolicyError(f"NxD's first generation has no expert parallelism; leave --ep {mesh.ep} out, or write nxd")
    tensors: dict[str, StoredTensor] = {}
    files: list[OutputFile] = []
    for rank, specs in enumerate(held):
        stage, inside = divmod(rank, mesh.ep * mesh.tp)
        expert, tp = divmod(inside, mesh.tp)
        expert_part = f"ep_rank_{expert:02d}_" if mesh.ep > 1 else ""
        name = f"tp_rank_{tp:02d}_pp_rank_{stage:02d}"
        name = f"{name}/checkpoint.pt" if generation == 1 else f"model/dp_rank_00_{expert_part}{name}.pt"
        key = _V1_KEY if generation == 1 else None
        offsets, size = state_archive(specs, key).places()
        for spec in specs:
            own = TensorSpec(rank_name(rank, spec.name), spec.dtype, spec.shape)
            tensors[own.name] = StoredTensor(own, (Chunk(Box.whole(spec.shape), name, offsets[spec.name]),))
        files.append(OutputFile(name, size, partial(_seals, specs, key)))
    return Arrangement(tensors, tuple(files), _no_marks if generation == 1 else _marks)


def _seals(specs: Specs, key: str | None) -> Iterator[tuple[int, bytes]]:
    return state_archive(specs, key).seals()


def _marks() -> Iterator[tuple[str, bytes]]:
    yield "checkpoint", b"1"
    yield "done", b"1"


def _no_marks() -> Iterator[tuple[str, bytes]]:
    return iter(())


def arrange_presharded(held: Sequence[Specs], layers: int) -> Arrangement:
    """Where every byte of NxD Inference's presharded weights goes: one safetensors file per tensor-parallel rank."""
    tensors: dict[str, StoredTensor] = {}
    files: list[OutputFile] = []
    buffers = ["rank_util.rank", *(f"layers.{layer}.self_attn.rank_util.rank" for layer in range(layers))]
    for rank, specs in enumerate(held):
        extra = [TensorSpec(name, "I32", (1,)) for name in buffers]
        one = arrange_safetensors([(f"tp{rank}_sharded_checkpoint.safetensors", [*specs, *extra])], index=False)
        places = [one.tensors[name].chunks[0].offset for name in buffers]
        (file,) = one.files
        name = f"weights/{file.name}"
        files.append(replace(file, name=name, seals=partial(_numbered, file, places, rank)))
        for spec in specs:
            chunk = one.tensors[spec.name].chunks[0]._replace(file=name)
            own = TensorSpec(rank_name(rank, spec.name), spec.dtype, spec.shape)
            tensors[own.name] = StoredTensor(own, (chunk,))
    return Arrangement(tensors, tuple(files), _no_marks)


def _numbered(file: OutputFile, places: Sequence[int], rank: int) -> Iterator[tuple[int, bytes]]:
    """The file's header, and the rank's number in each of its buffers."""
    yield from file.seals()
    for at in places:
        yield at, rank.to_bytes(4, "little")
