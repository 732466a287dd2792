"""Loss and gradient norm of a run, or of several, as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwen3conv.converters.errors import ConversionError


def draw_losses(records: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Write a PNG with a curve per record (name -> the content of its ``run.json``): loss above, gradient norm below.

    Raises:
        ConversionError: matplotlib is not there, or no record has a step.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConversionError("pictures need matplotlib: pip install 'qwen3conv[train]'") from None
    if not any(record["steps"] for record in records.values()):
        raise ConversionError(f"{', '.join(records)}: no step to draw")
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for name, record in records.items():
        steps = [int(step) for step in record["steps"]]
        for axes, key in ((above, "loss"), (below, "grad_norm")):
            axes.plot(steps, [found[key] for found in record["steps"].values()], marker=".", label=name)
        validated = {
            int(s): found["validation_loss"] for s, found in record["steps"].items() if "validation_loss" in found
        }
        if validated:
            above.plot([*validated], [*validated.values()], marker="o", linestyle="--", label=f"{name}, validation")
    above.set_ylabel("loss, nats per token")
    below.set_ylabel("gradient norm")
    below.set_xlabel("step")
    above.legend()
    figure.savefig(path, dpi=120)
