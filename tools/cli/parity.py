"""``parity``: do two checkpoints compute the same, and if not, from which layer on?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .command import DIFFERENT, Command
from .options import json_option, source_argument
from .output import note, print_json, print_table, say

if TYPE_CHECKING:
    from qwen3conv.tools.parity import ParityReport


@click.command(cls=Command, example="qwen3conv parity Qwen/Qwen3-0.6B qwen3-dcp --tokens 16")
@source_argument("a", "A")
@source_argument("b", "B")
@click.option("--config-a", type=click.Path(exists=True, path_type=Path), metavar="FILE", help="config.json for A.")
@click.option("--config-b", type=click.Path(exists=True, path_type=Path), metavar="FILE", help="config.json for B.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="What both compute in.",
)
@click.option("--tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens per row.")
@click.option("--batch", type=click.IntRange(min=1), default=2, show_default=True, help="Rows.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random tokens.")
@click.option("--prompt", metavar="TEXT", help="Tokens of this text instead of random ones.")
@click.option("--atol", type=click.FloatRange(min=0), metavar="X", help="Tolerance. Default: by dtype.")
@click.option("--device", default="cpu", show_default=True, help="Where both compute.")
@json_option
def parity(
    a: str,
    b: str,
    config_a: Path | None,
    config_b: Path | None,
    dtype: str,
    tokens: int,
    batch: int,
    seed: int,
    prompt: str | None,
    atol: float | None,
    device: str,
    json: bool,
) -> None:
    """Logits of two checkpoints on the same tokens.

    Each is computed by its own library: transformers for a Hugging Face folder, torchtitan for its DCP. Needs the
    [train] extra. Exit 0 within the tolerance, 3 beyond it.
    """
    from qwen3conv.tools.hub import resolve_source
    from qwen3conv.tools.parity import compare

    report = compare(
        resolve_source(a, announce=note).path,
        resolve_source(b, announce=note).path,
        config_a=config_a,
        config_b=config_b,
        dtype=dtype,
        tokens=tokens,
        batch=batch,
        seed=seed,
        prompt=prompt,
        atol=atol,
        device=device,
    )
    if json:
        print_json(report.to_json())
    else:
        _show_parity(report)
    if not report.agrees:
        raise click.exceptions.Exit(DIFFERENT)


def _show_parity(report: ParityReport) -> None:
    verdict = "within the tolerance" if report.agrees else f"apart from {report.first_divergence} on"
    say(f"{report.sides[0].path} and {report.sides[1].path}: {verdict}")
    rows = [
        ("logits", f"max abs {report.max_abs:.3g}, mean abs {report.mean_abs:.3g}, KL {report.kl:.3g} nats"),
        ("top token", f"the same at {report.top1:.2%} of {report.tokens[0]} x {report.tokens[1]} positions"),
        ("tolerance", f"{report.tolerance:g} relative, in {report.dtype} on {report.device}"),
    ]
    for letter, side in zip("AB", report.sides, strict=True):
        experts = f", experts by {side.experts}" if side.experts else ""
        rows.append((letter, f"{side.implementation} with {side.config}{experts}"))
        rows += [("", text) for text in side.notes]
    rows += [("configs differ", text) for text in report.config_differences]
    print_table(rows)
    print_table(
        [(d.place, f"{d.max_abs:.3g}", f"{d.relative:.3g}") for d in report.per_layer],
        ("PLACE", "MAX ABS", "RELATIVE"),
        right=(1, 2),
    )
