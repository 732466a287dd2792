"""NxD Inference's presharded weights: ``[weights/]tp{rank}_sharded_checkpoint.safetensors``, one file per rank.

They say nothing of the mesh and hold no metadata; a config.json tells the sizes. Buffers with the rank's number are
left out. Embeddings are cut along the hidden size, or by rows with ``vocab_parallel``: their shape tells. Padded heads
or experts, and matrices that kernels want transposed, do not fit these sizes and are refused; of a square one the shape
does not tell, and ``neuron_config.json`` must.

Source: neuronx-distributed-inference, ``models/application_base.py`` (``save_sharded_checkpoint``). Read from source.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ..boxes import Box, Chunk, StoredTensor, TensorSpec
from ..config_json import read_json_object
from ..errors import SourceError, enumerate_problems
from ..geometry import Geometry
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


def cuts_hidden(shards: NxdShards, geometry: Geometry) -> bool:
    """Whether embeddings are cut along the hidden size; by rows otherwise."""
    stored = shards.contents.tensors.get(rank_name(0, "embed_tokens.weight"))
    return (
        stored is None
        or shards.mesh.tp == 1
        or stored.spec.shape
        != (
            geometry.vocab_size // shards.mesh.tp,
            geometry.hidden_size,
        )
    )


def refuse_square_kernels(shards: NxdShards, has_manifest: bool) -> None:
    """Raise ``SourceError`` when a projection may be stored transposed and nothing tells.

    Kernels of NxD Inference take o_proj and Wqkv as (in, out). Where a rank's part is square, only the flags in
    ``neuron_config.json`` say so; what has a manifest was written here, as (out, in).
    """
    ends = (".o_proj.weight", ".Wqkv.weight")
    specs = (tensor.spec for name, tensor in shards.contents.tensors.items() if name.endswith(ends))
    square = next((spec for spec in specs if len(set(spec.shape)) == 1), None)
    if square is None or has_manifest:
        return
    paths = (place / "neuron_config.json" for place in (shards.folder, shards.folder.parent))
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise SourceError(
            f"{shards.folder}: {square.name} is square, so its shape does not tell whether it is stored transposed, as "
            "kernels want it; put the neuron_config.json that it was compiled with beside it"
        )
    flags = _flags(read_json_object(path)[0])
    on = sorted(key for key, value in flags.items() if key.endswith("kernel_enabled") and value is True)
    if any("qkv" in key or "o_proj" in key or "out_proj" in key for key in on):
        raise SourceError(
            f"{path} has {', '.join(on)}: projections are stored transposed, which is not read; compile without"
        )


def _flags(document: Mapping[str, object]) -> dict[str, object]:
    """The settings, those under ``neuron_config`` too."""
    inner = document.get("neuron_config")
    return {**document, **(inner if isinstance(inner, dict) else {})}
