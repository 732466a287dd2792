"""The rungs of a ladder as one picture: loss, gradient norm, and how long a step takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qwen3conv.converters.errors import ConversionError

from .ladder import Climbed


def draw_ladder(climbed: Sequence[Climbed], path: Path) -> None:
    """Write a PNG with a curve and a bar per rung that ran.

    Raises:
        ConversionError: matplotlib is not there.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConversionError("pictures need matplotlib: pip install 'qwen3conv[train]'") from None
    figure = Figure(figsize=(8, 9), layout="constrained")
    losses, norms, times = figure.subplots(3, 1)
    ran = [one for one in climbed if one.steps]
    for one in ran:
        assert one.steps is not None
        numbers = [int(step) for step in one.steps]
        style = "--" if one.status == "parts" else "-"
        for axes, key in ((losses, "loss"), (norms, "grad_norm")):
            axes.plot(numbers, [found[key] for found in one.steps.values()], style, marker=".", label=one.rung.name)
    losses.set_ylabel("loss, nats per token")
    norms.set_ylabel("gradient norm")
    norms.set_xlabel("step")
    losses.legend()
    times.barh([one.rung.name for one in ran], [one.step_seconds or 0.0 for one in ran])
    times.invert_yaxis()
    times.set_xlabel("seconds per step, median without the first of each process")
    figure.savefig(path, dpi=120)
