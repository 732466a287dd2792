"""Tensors to be stored, and whole ones out of what a store says, chunk by chunk; with torch, not with the engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3conv.converters.boxes import StoredTensor, TensorSpec
from qwen3conv.converters.dtypes import FROM_TORCH_NAME, ITEMSIZE, TORCH_NAME
from qwen3conv.converters.stores.contents import Contents

if TYPE_CHECKING:
    import torch


def assemble(folder: Path, contents: Contents) -> dict[str, torch.Tensor]:
    """Every tensor of ``contents``. Elements of which there are copies must be equal; none may be missing."""
    return {name: gather(folder, stored) for name, stored in contents.tensors.items()}


def gather(folder: Path, stored: StoredTensor) -> torch.Tensor:
    """One tensor; fails where chunks disagree or leave a hole."""
    import torch

    dtype = getattr(torch, TORCH_NAME[stored.spec.dtype])
    whole = torch.zeros(stored.spec.shape, dtype=dtype)
    seen = torch.zeros(stored.spec.shape, dtype=torch.int32)
    for chunk in stored.chunks:
        with (folder / chunk.file).open("rb") as file:
            file.seek(chunk.offset)
            raw = bytearray(file.read(chunk.box.volume * dtype.itemsize))
        part = (
            torch.frombuffer(raw, dtype=dtype).reshape(chunk.box.size) if raw else torch.zeros(chunk.box.size).to(dtype)
        )
        place = tuple(slice(low, high) for low, high in zip(chunk.box.start, chunk.box.stop, strict=True))
        known = seen[place] > 0
        assert torch.equal(whole[place][known], part[known]), f"copies of {stored.name} differ in {chunk.file}"
        whole[place] = part
        seen[place] += 1
    assert bool((seen > 0).all()), f"{stored.name} has a hole"
    return whole


def distinct(specs: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, torch.Tensor]:
    """Tensors whose bytes differ from each other's, so that a swap cannot pass."""
    import torch

    tensors = {}
    for seed, (name, (dtype, shape)) in enumerate(specs.items()):
        generator = torch.Generator().manual_seed(seed)
        count = int(torch.Size(shape).numel()) * ITEMSIZE[dtype]
        raw = torch.randint(0, 2 if dtype == "BOOL" else 256, (count,), dtype=torch.uint8, generator=generator)
        tensors[name] = raw.view(getattr(torch, TORCH_NAME[dtype])).reshape(shape)
    return tensors


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """A tensor's elements, row-major."""
    import torch

    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """What a header says of ``tensor``."""
    return TensorSpec(name, FROM_TORCH_NAME[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape))
