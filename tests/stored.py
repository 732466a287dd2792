"""Whole tensors out of what a store says: bytes gathered chunk by chunk, with torch, independent of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qwen3conv.converters.boxes import StoredTensor
from qwen3conv.converters.dtypes import TORCH_NAME
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
