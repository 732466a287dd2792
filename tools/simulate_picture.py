"""A mesh as a picture: one bar per rank, what it holds in colours, against the memory of a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from qwen3conv.converters.errors import ConversionError

from .simulate import Held

_RANKS_SHOWN = 256


def draw_mesh(held: Sequence[Held], mesh: str, memory: int, path: Path) -> None:
    """Write a PNG. Of more than 256 ranks the first are drawn.

    Raises:
        ConversionError: matplotlib is not there.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConversionError("pictures need matplotlib: pip install 'qwen3conv[train]'") from None
    shown = held[:_RANKS_SHOWN]
    figure = Figure(figsize=(max(8.0, len(shown) * 0.14), 5), layout="constrained")
    axes = figure.subplots()
    bottom = [0.0] * len(shown)
    for kind in fields(Held):
        heights = [getattr(one, kind.name) / 2**30 for one in shown]
        axes.bar(range(len(shown)), heights, bottom=bottom, width=0.9, label=kind.name)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.axhline(memory / 2**30, color="black", linestyle="--", label="memory")
    axes.set_xlabel(f"rank of {mesh}" + (f" (the first {len(shown)})" if len(held) > len(shown) else ""))
    axes.set_ylabel("GiB")
    axes.legend()
    figure.savefig(path, dpi=120)
