"""``shard``, ``merge`` and ``reshard``: what the ranks of a mesh load, made, cut anew and joined in one pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from .command import Command
from .conversion import run_conversion
from .options import DESTINATION, Options, conversion_options, source_argument, to_option

_TARGETS = {
    "ranks": "ranks",
    "dcp": "titan",
    "vllm": "vllm",
    "nxd": "nxd",
    "nxd-v1": "nxd-v1",
    "nxd-inference": "nxd-inference",
}

Function = Callable[..., Any]


def _format_option(function: Function) -> Function:
    return click.option(
        "--format",
        "target",
        type=click.Choice(list(_TARGETS)),
        default="ranks",
        help="Rank files and an index (ranks, the default), a torchtitan DCP with a file per rank, vLLM's ranks, "
        "neuronx-distributed's training shards (v2 or v1), or NxD Inference's.",
    )(function)


@click.command(cls=Command, example="qwen3conv shard Qwen/Qwen3-0.6B qwen3-ranks --tp 2 --fsdp 2")
@source_argument("source", "SRC")
@click.argument("destination", type=DESTINATION, metavar="DST")
@_format_option
@conversion_options(mesh=True, without=("flavor",))
def shard(source: str, destination: Path, target: str, options: Options) -> None:
    """Cut a checkpoint of any format for a mesh of ranks."""
    _require_mesh(options)
    run_conversion(source, destination, _TARGETS[target], options)


@click.command(cls=Command, example="qwen3conv reshard qwen3-ranks qwen3-fsdp4 --fsdp 4")
@source_argument("source", "SRC")
@click.argument("destination", type=DESTINATION, metavar="DST")
@_format_option
@conversion_options(mesh=True, without=("flavor",))
def reshard(source: str, destination: Path, target: str, options: Options) -> None:
    """Cut for another mesh, without a merged copy in between."""
    _require_mesh(options)
    run_conversion(source, destination, _TARGETS[target], options)


@click.command(cls=Command, example="qwen3conv merge qwen3-ranks qwen3-hf")
@source_argument("source", "SRC")
@click.argument("destination", type=DESTINATION, metavar="DST")
@to_option(default="hf")
@conversion_options(without=("flavor",))
def merge(source: str, destination: Path, to: str, options: Options) -> None:
    """Join what ranks hold into one checkpoint, a Hugging Face folder by default."""
    run_conversion(source, destination, to, options)


def _require_mesh(options: Options) -> None:
    if (options.tp, options.fsdp, options.ep, options.pp) == (1, 1, 1, 1):
        raise click.UsageError("give at least one of --tp, --fsdp, --ep and --pp; to join ranks, use merge")
