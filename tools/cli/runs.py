"""``runs``: two records of training side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from .command import DIFFERENT, Command
from .options import json_option
from .output import print_json, print_table, say

_NO_SETTINGS = ("steps", "legs", "seconds", "export")
_SHOWN = 5
"""Steps in the table around the first that differs."""


@click.command(cls=Command, example="qwen3conv runs run run-2")
@click.argument("a", type=click.Path(path_type=Path), metavar="A")
@click.argument("b", type=click.Path(path_type=Path), metavar="B")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=1e-4,
    show_default=True,
    metavar="X",
    help="Relative difference of losses that counts as none.",
)
@click.option("--picture", type=click.Path(path_type=Path), metavar="FILE", help="Also draw both as a PNG.")
@json_option
@click.pass_context
def runs(ctx: click.Context, a: Path, b: Path, tolerance: float, picture: Path | None, json: bool) -> None:
    """Compare two runs of train: what differs in their settings, and the first step at which losses part.

    A and B are folders of runs, or records (run.json). Exit 0 if the losses of all common steps agree, else 3.
    """
    from qwen3conv.converters.errors import SourceError
    from qwen3conv.training.launch import read_record

    records: dict[str, dict[str, Any]] = {}
    for place in (a, b):
        is_record = place.is_file() or place.suffix == ".json"
        records[str(place)] = dict(read_record(place if is_record else place / "run.json"))
    if len(records) == 1:
        raise click.UsageError("A and B are the same record")
    one, other = records.values()
    first, second = _settings(one), _settings(other)
    settings = {key: (first.get(key), second.get(key)) for key in {**first, **second}}
    changed = {key: pair for key, pair in settings.items() if pair[0] != pair[1]}
    common = [step for step in one["steps"] if step in other["steps"]]
    if not common:
        raise SourceError(f"{a} and {b} have no step in common")
    parted = next((step for step in common if _apart(one["steps"][step], other["steps"][step], tolerance)), None)
    if picture is not None:
        from qwen3conv.tools.loss_picture import draw_losses

        draw_losses(records, picture)
    if json:
        differences = {key: list(pair) for key, pair in changed.items()}
        document = {"equal": parted is None, "first_difference": parted and int(parted), "common_steps": len(common)}
        print_json({**document, "settings": differences, "exports": [_exported(one), _exported(other)]})
    else:
        _show(str(a), str(b), one, other, changed, common, parted)
    ctx.exit(DIFFERENT if parted is not None else 0)


def _settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """What the record says of the whole run, the settings of its last leg, and which ones a leg changed."""
    legs = record.get("legs") or [{}]
    settings = {key: value for key, value in record.items() if key not in _NO_SETTINGS}
    settings |= legs[-1].get("settings", {})
    for leg in legs:
        for key, (before, now) in leg.get("changed", {}).items():
            settings[f"{key}, at step {leg['first']}"] = f"{before} -> {now}"
    return settings


def _exported(record: Mapping[str, Any]) -> str | None:
    """The fingerprint of the trained model."""
    export = record.get("export")
    return export.get("fingerprint") if isinstance(export, Mapping) else None


def _apart(one: Mapping[str, float], other: Mapping[str, float], tolerance: float) -> bool:
    return not abs(one["loss"] - other["loss"]) <= tolerance * max(abs(one["loss"]), abs(other["loss"]))


def _show(
    a: str,
    b: str,
    one: Mapping[str, Any],
    other: Mapping[str, Any],
    changed: Mapping[str, tuple[object, object]],
    common: list[str],
    parted: str | None,
) -> None:
    say(f"{a} and {b}: " + (f"losses part at step {parted}" if parted else f"the same over {len(common)} steps"))
    if changed:
        print_table([(key, str(pair[0]), str(pair[1])) for key, pair in changed.items()], headers=("SETTING", a, b))
    exports = [_exported(one), _exported(other)]
    if any(exports):
        different = "different models" if all(exports) else "of one run alone"
        say(f"exports: {'the same model' if exports[0] == exports[1] else different}")
        print_table([(name, found or "no export") for name, found in zip((a, b), exports, strict=True)])
    at = common.index(parted) if parted else len(common) - 1
    shown = common[max(0, at - _SHOWN + 1) : at + 2]
    rows = []
    for step in shown:
        pair = one["steps"][step], other["steps"][step]
        rows.append(
            (step, *(f"{found['loss']:.6f}" for found in pair), *(f"{found['grad_norm']:.4f}" for found in pair))
        )
    print_table(rows, headers=("STEP", f"LOSS {a}", f"LOSS {b}", "NORM", "NORM"), right=(0, 1, 2, 3, 4))
