"""NxD Inference's presharded weights: ``[weights/]tp{rank}_sharded_checkpoint.safetensors``, one file per rank.

They say nothing of the mesh and hold no metadata; a config.json tells the sizes. Buffers with the rank's number are
left out. Padded heads or experts, and matrices that kernels want transposed, do not fit these sizes and are refused.

Source: neuronx-distributed-inference, ``models/application_base.py`` (``save_sharded_checkpoint``). Read from source.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..boxes import Box, Chunk, StoredTensor, TensorSpec
from ..errors import SourceError, enumerate_problems
from ..layouts import NXD_INFERENCE
from ..placement import rank_name
from .contents import Contents
from .nxd_training import NxdMesh, NxdShards
from .safetensors_header import scan_header

_FILE = re.compile(r"tp(0|[1-9][0-9]{0,4})_sharded_checkpoint\.safetensors", re.ASCII)


def locate_presharded(folder: Path) -> Path | None:
    """The folder with the ranks' files: ``folder`` itself, or its ``weights``."""
    for inner in (folder, folder / "weights"):
        try:
            names = os.listdir(inner)
        except OSError:
            continue
        if any(map(_FILE.fullmatch, names)):
            return inner
    return None


def read_presharded(folder: Path) -> NxdShards:
    """What all ranks' headers say.

    Raises:
        SourceError: a rank's file is missing, or ranks hold different tensors; all are named.
    """
    inner = locate_presharded(folder)
    if inner is None:
        raise SourceError(f"{folder} holds no tp0_sharded_checkpoint.safetensors, neither itself nor in weights/")
    prefix = "" if inner == folder else f"{inner.name}/"
    numbers = {int(match[1]) for match in map(_FILE.fullmatch, os.listdir(inner)) if match}
    names = [f"tp{rank}_sharded_checkpoint.safetensors" for rank in range(max(numbers) + 1)]
    missing = [name for rank, name in enumerate(names) if rank not in numbers]
    if missing:
        raise SourceError(
            enumerate_problems(f"{inner} lacks the files of {len(missing)} of {len(names)} ranks:", missing)
        )
    problems: list[str] = []
    tensors: dict[str, StoredTensor] = {}
    sizes: dict[str, int] = {}
    first: dict[str, TensorSpec] = {}
    for rank, name in enumerate(names):
        header = scan_header(inner / name, name, problems)
        if header is None:
            continue
        sizes[prefix + name] = header.size
        held: dict[str, TensorSpec] = {}
        for fqn, entry in header.tensors.items():
            if NXD_INFERENCE.is_derived(fqn):
                continue
            held[fqn] = TensorSpec(fqn, entry.dtype, entry.shape)
            spec = TensorSpec(rank_name(rank, fqn), entry.dtype, entry.shape)
            chunk = Chunk(Box.whole(entry.shape), prefix + name, header.data_start + entry.begin)
            tensors[spec.name] = StoredTensor(spec, (chunk,))
        first = first or held
        problems += [
            f"{name}: {fqn} is not as in {names[0]}" for fqn in first | held if held.get(fqn) != first.get(fqn)
        ]
    if problems:
        raise SourceError(enumerate_problems(f"the ranks in {inner} are not of one whole checkpoint:", problems))
    return NxdShards(folder, Contents(tensors, sizes), NxdMesh(tp=len(names)), dict.fromkeys(first, (0,)), None)
