"""``doctor``: can this machine train, and if not, what is the first thing that is wrong?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from .command import Command
from .options import json_option
from .output import print_json, print_table, say


@click.command(cls=Command, example="qwen3conv doctor --device cpu --model 0.6B")
@click.option("--device", type=click.Choice(["neuron", "cuda", "cpu"]), help="Default: the best that is there.")
@click.option("--model", metavar="SIZE", help="Also whether disk and memory are enough to train it, such as 8B.")
@click.option("--folder", type=click.Path(exists=True, path_type=Path), default=".", help="Where runs would lie.")
@click.option("--timeout", type=click.FloatRange(min=1), default=180.0, metavar="S", help="Seconds per check.")
@json_option
@click.pass_context
def doctor(ctx: click.Context, device: str | None, model: str | None, folder: Path, timeout: float, json: bool) -> None:
    """Device, packages, two processes talking, one training step, a checkpoint: each ok, warning or failed.

    The first that failed is the cause of those after it. Exit 1 if the device cannot be used for training.
    """
    from qwen3conv.tools.doctor import examine
    from qwen3conv.tools.released import released

    if model is not None:
        released(model)  # before the slow checks
    checks = list(examine(device, model, folder, timeout))
    if json:
        print_json({"usable": all(c.status != "failed" for c in checks), "checks": [asdict(c) for c in checks]})
    else:
        print_table([(c.name, c.status, c.found) for c in checks], indent=0)
        for check in checks:
            if check.advice:
                say(f"{check.name}: {check.advice}")
    ctx.exit(1 if any(check.status == "failed" for check in checks) else 0)
