"""``upgrade``: a torchtitan checkpoint in the key names of another release, so that the run goes on there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from .command import Command
from .conversion import run_conversion
from .options import DESTINATION, Options, conversion_options, source_argument

_CHANGING = ("dtype", "lm_head", "drop_expert_bias", "config_style", "vocab_rows", "flavor")
"""Options that change the model: a run that goes on has its own."""


@click.command(cls=Command, example="qwen3conv upgrade qwen3-dcp qwen3-dcp-0.2 --titan-schema 0.2")
@source_argument("source", "SRC")
@click.argument("destination", type=DESTINATION, metavar="DST")
@click.option(
    "--optimizer",
    type=click.Choice(["fused", "separate", "keep"]),
    help="How the optimizer has q, k and v: as one (torchtitan's fuse_qkv=True), apart, or as in the source. Default: "
    "as released models of the schema do, in 0.3 as one.",
)
@click.option("--model-only", is_flag=True, help="Leave optimizer, scheduler, dataloader and step behind.")
@conversion_options(without=_CHANGING)
def upgrade(source: str, destination: Path, model_only: bool, options: Options) -> None:
    """torchtitan checkpoint to another of its key schemas.

    Optimizer state, scheduler, dataloader and step are carried, so that torchtitan resumes the run: name DST
    step-N as SRC was. Without --titan-schema the output is for torchtitan 0.3.
    """
    if model_only and options.optimizer is not None:
        raise click.UsageError("--optimizer says how the optimizer is stored, and --model-only leaves it behind")
    optimizer = None if model_only else options.optimizer or "default"
    run_conversion(source, destination, "titan", replace(options, optimizer=optimizer))
