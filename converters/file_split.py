"""Which safetensors files an output has: those of its source where they can be kept, else by size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from .boxes import TensorSpec
from .checkpoint import Checkpoint
from .config_json import read_json_object
from .geometry import Geometry
from .layouts import HF, HF_FUSED, Layout, bind
from .manifest import ASSETS
from .parameters import HEAD
from .policies import Choices, Policy, Settled
from .quantization import SCALE_SUFFIX
from .stores.safetensors import INDEX, SINGLE
from .stores.safetensors_header import read_header
from .stores.safetensors_writing import split_by_size, split_like

HF_SHARD_BYTES = 5 * 10**9
"""Bytes per safetensors file when no split is known: the hub's custom before transformers 5."""

Files = list[tuple[str, list[TensorSpec]]]


def decide_split(
    specs: Sequence[TensorSpec], settled: Settled, layout: Layout, choices: Choices, decided: list[Policy]
) -> Files:
    """Files by name with the tensors of each, and in ``decided`` why it is those."""
    if choices.shard_bytes is not None:
        return _by_size(specs, choices.shard_bytes, "as --shard-size says", decided)
    known = _known_split(settled.checkpoint, choices)
    if known is None and _was_one_file(settled.checkpoint):
        known = {spec.name: SINGLE for spec in specs}
    if known is None:
        return _by_size(specs, HF_SHARD_BYTES, "no split of the source is known", decided)
    may_lack = (HEAD,) if settled.tied else ()
    split = split_like(specs, known, may_lack=may_lack)
    if split is None:
        here = _under_names_of(layout, known, settled.checkpoint.geometry)
        split = split_like(specs, here, may_lack=may_lack) if here is not None else None
    if split is None:
        was = len(set(known.values()))
        return _by_size(specs, HF_SHARD_BYTES, f"the source's {_count(was)} cannot be kept in this layout", decided)
    summary = f"the file split of the source is kept: {_count(len(split))}"
    decided.append(Policy("split", summary, {"files": len(split)}))
    return split


def stored_names(folder: Path) -> Mapping[str, str] | None:
    """Tensor -> file of the weights or the index in ``folder``; ``None`` when there is neither."""
    for place in (folder, folder / ASSETS):
        if (mapping := indexed_files(place)) is not None:
            return mapping
        if (place / SINGLE).is_file():
            return dict.fromkeys(read_header(place / SINGLE).tensors, SINGLE)
    return None


def indexed_files(folder: Path) -> Mapping[str, str] | None:
    """Tensor -> file by the index in ``folder``, if there is one."""
    mapping = read_json_object(folder / INDEX)[0].get("weight_map") if (folder / INDEX).is_file() else None
    return {str(name): str(file) for name, file in mapping.items()} if isinstance(mapping, dict) else None


def _by_size(specs: Sequence[TensorSpec], shard_bytes: int, why: str, decided: list[Policy]) -> Files:
    files = split_by_size(specs, shard_bytes)
    summary = f"{_count(len(files))} of at most {shard_bytes:,} bytes: {why}"
    larger = [spec for spec in specs if spec.nbytes > shard_bytes]
    if larger:
        most = max(larger, key=lambda spec: spec.nbytes)
        summary += f"; {_count(len(larger))} are larger, for a single tensor is (up to {most.nbytes:,} bytes)"
    decided.append(Policy("split", summary, {"files": len(files)}))
    return files


def _known_split(checkpoint: Checkpoint, choices: Choices) -> Mapping[str, str] | None:
    if checkpoint.format in ("hf", "hf-fused", "hf-fp8"):
        return {name: tensor.chunks[0].file for name, tensor in checkpoint.tensors.items()}
    for folder in (choices.like, checkpoint.path):
        if folder is not None and folder.is_dir() and (names := stored_names(folder)) is not None:
            return {name: file for name, file in names.items() if not name.endswith(SCALE_SUFFIX)}
    return None


def _was_one_file(checkpoint: Checkpoint) -> bool:
    return checkpoint.manifest is not None and checkpoint.manifest.source.get("files") == 1


def _under_names_of(layout: Layout, known: Mapping[str, str], geometry: Geometry) -> Mapping[str, str] | None:
    """``known`` for the names of ``layout``: a tensor goes where the first of its parts lies.

    ``None`` where ``known`` has names of no hub layout, or a file would be left without any tensor.
    """
    for source in (HF, HF_FUSED):
        bindings = list(bind(source, geometry, tied=False))
        if known.keys() <= {binding.name for binding in bindings}:
            file_of = {p.name: known[b.name] for b in bindings if b.name in known for p in b.pieces}
            first_parts = ((b.name, b.pieces[0].name) for b in bind(layout, geometry, tied=False))
            found = {name: file_of[part] for name, part in first_parts if part in file_of}
            return found if set(found.values()) == set(known.values()) else None
    return None


def _count(files: int) -> str:
    return f"{files} files" if files != 1 else "one file"
