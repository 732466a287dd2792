"""``merge-lora``: a base of any format and a LoRA adapter, added up in the pass that converts."""

from __future__ import annotations

from pathlib import Path

import click

from .command import Command
from .conversion import run_conversion
from .options import DESTINATION, Options, conversion_options, source_argument, to_option


@click.command("merge-lora", cls=Command, example="qwen3conv merge-lora Qwen/Qwen3-0.6B qwen3-adapter qwen3-merged")
@source_argument("base", "BASE")
@source_argument("adapter", "ADAPTER")
@click.argument("destination", type=DESTINATION, metavar="DST")
@to_option(default="hf")
@conversion_options(without=("flavor",))
def merge_lora(base: str, adapter: str, destination: Path, to: str, options: Options) -> None:
    """Add a PEFT LoRA adapter to its base, a Hugging Face folder by default.

    In float32, rounded once to the base's dtype or that of --dtype. BASE has any format that is read; it stays as it
    is.
    """
    run_conversion(base, destination, to, options, adapter=adapter)
