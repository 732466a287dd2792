"""``hf-to-dcp``, ``dcp-to-hf``, ``convert`` and ``plan``: one conversion, with its source or target fixed or free."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from .command import Command
from .options import DESTINATION, Options, conversion_options, source_argument, to_option
from .output import format_bytes, format_count, format_seconds, note, print_json, print_table, say, warn
from .progress import progress

if TYPE_CHECKING:
    from qwen3conv.converters.conversion import Conversion
    from qwen3conv.converters.manifest import Manifest
    from qwen3conv.converters.policies import Policy
    from qwen3conv.tools.hub import Source

_FILES_SHOWN = 12


@click.command(cls=Command, example="qwen3conv hf-to-dcp Qwen/Qwen3-0.6B qwen3-dcp")
@source_argument("source", "SRC")
@click.argument("destination", type=DESTINATION, metavar="DST")
@conversion_options(without=("lm_head",))
def hf_to_dcp(source: str, destination: Path, options: Options) -> None:
    """Hugging Face folder or hub id to torchtitan DCP."""
    run_conversion(source, destination, "titan", options, refuses="dcp")


@click.command(cls=Command, example="qwen3conv dcp-to-hf qwen3-dcp qwen3-hf")
@source_argument("source", "SRC")
@click.argument("destination", type=DESTINATION, metavar="DST")
@conversion_options(without=("titan_schema", "flavor"))
def dcp_to_hf(source: str, destination: Path, options: Options) -> None:
    """DCP of torchtitan, Accelerate or Trainer to a Hugging Face folder."""
    run_conversion(source, destination, "hf", options, refuses="hf")


@click.command(cls=Command, example="qwen3conv convert qwen3-dcp qwen3-fused --to hf-fused")
@source_argument("source", "SRC")
@click.argument("destination", type=DESTINATION, metavar="DST")
@to_option()
@conversion_options()
def convert(source: str, destination: Path, to: str, options: Options) -> None:
    """Any format to any format; `qwen3conv formats` lists them."""
    run_conversion(source, destination, to, options)


@click.command(cls=Command, example="qwen3conv plan Qwen/Qwen3-0.6B qwen3-dcp --to titan --json")
@source_argument("source", "SRC")
@click.argument("destination", type=DESTINATION, metavar="DST")
@to_option()
@conversion_options(without=("dry_run", "keep_download"))
def plan(source: str, destination: Path, to: str, options: Options) -> None:
    """What a conversion would read, write, cast and drop.

    The same as --dry-run of the converting commands: headers are read, nothing is written.
    """
    run_conversion(source, destination, to, options, plans_only=True)


def run_conversion(
    source: str,
    destination: Path,
    to: str,
    options: Options,
    *,
    refuses: str | None = None,
    plans_only: bool = False,
    adapter: str | None = None,
) -> None:
    """Convert ``source`` to format ``to``, or print the plan.

    ``refuses`` is the kind of source the command makes; ``adapter`` a LoRA adapter to add to the weights.
    """
    from qwen3conv.converters.stores.staging import check_destination
    from qwen3conv.tools.hub_remote import headers_of, streamed

    options.check(to)
    plans_only = plans_only or options.dry_run
    if not plans_only:  # before a download of gigabytes, not after
        check_destination(destination, overwrite=options.overwrite, resume=options.resume)
    place = (
        headers_of(source, announce=note)
        if plans_only
        else streamed(source, destination, resume=options.resume, keeps=options.keep_download, announce=note)
    )
    with place as found:
        if refuses is not None:
            _check_direction(found.path, source, destination, refuses)
        _convert(found, destination, to, options, plans_only=plans_only, adapter=adapter)


def _convert(
    found: Source, destination: Path, to: str, options: Options, *, plans_only: bool, adapter: str | None
) -> None:
    from qwen3conv import __version__
    from qwen3conv.converters.conversion import carry_out, prepare
    from qwen3conv.converters.remote import remote_of
    from qwen3conv.converters.stores.staging import whole
    from qwen3conv.tools.hub import resolve_adapter, resolve_like
    from qwen3conv.tools.hub_files import HubFiles

    origin: dict[str, object] = {**found.origin}
    like = None
    if options.like is not None:
        liked = resolve_like(options.like, announce=note)
        like, origin["like"] = liked.path, dict(liked.origin)
    choices = options.choices(like)
    if adapter is not None:
        joined = resolve_adapter(adapter, announce=note)
        choices, origin["adapter"] = replace(choices, adapter=joined.path), dict(joined.origin)
    conversion = prepare(found.path, destination, to, choices, origin=origin)
    for policy in conversion.policies:
        if policy.warning:
            warn(policy.summary)
    if plans_only:
        _show_plan(conversion, options)
        return
    begun = time.monotonic()
    remote = remote_of(found.path)
    fetches = remote if isinstance(remote, HubFiles) else None
    coming = fetches.bytes_to_fetch(_read_bytes_by_file(conversion)) if fetches is not None else 0
    with progress("converting", conversion.read_bytes + coming) as advance:
        if fetches is not None:
            fetches.advance = advance
        manifest = carry_out(
            conversion,
            workers=options.workers,
            max_memory=options.max_memory,
            digests=not options.no_digests,
            overwrite=options.overwrite,
            resume=options.resume,
            advance=advance,
            tool=f"qwen3conv {__version__}",
        )
    with whole(destination):
        _show_result(conversion, manifest, time.monotonic() - begun, options)


def _check_direction(folder: Path, source: str, destination: Path, refuses: str) -> None:
    """Refuse a source of the very kind that the command makes."""
    from qwen3conv.converters.errors import SourceError
    from qwen3conv.converters.location import locate_checkpoint

    _, store = locate_checkpoint(folder)
    is_dcp = store == "dcp"
    if is_dcp == (refuses == "dcp"):
        kind, wanted, to = ("DCP", "Hugging Face", "titan") if is_dcp else ("safetensors", "DCP", "hf")
        raise SourceError(
            f"{source} is a {kind} checkpoint, not a {wanted} one; "
            f"what reads every format is: qwen3conv convert {quote(source)} {quote(str(destination))} --to {to}"
        )


def _show_plan(conversion: Conversion, options: Options) -> None:
    from qwen3conv.converters.conversion import block_size

    reads = _read_bytes_by_file(conversion)
    writes = {file.name: file.size for file in conversion.arrangement.files}
    peak = conversion.peak_bytes(options.workers, block_size(conversion, options.workers, options.max_memory))
    free = _free_bytes(conversion.destination)
    if conversion.disk_bytes > free:
        missing = format_bytes(conversion.disk_bytes - free)
        warn(f"the output takes {format_bytes(conversion.disk_bytes)}, {missing} more than is free there")
    if options.json:
        print_json(
            {
                "source": conversion.source.label,
                "destination": str(conversion.destination),
                "format": conversion.format.name,
                "schema": conversion.layout.schema,
                "tensors": len(conversion.written),
                "stored_tensors": _stored_tensors(conversion),
                "reads": _file_list(reads),
                "writes": _file_list(writes),
                "beside": _beside(conversion),
                "policies": [policy.to_dict() for policy in conversion.policies],
                "read_bytes": sum(reads.values()),
                "disk_bytes": conversion.disk_bytes,
                "free_bytes": free,
                "peak_bytes": peak,
            }
        )
        return
    source = conversion.source
    say(f"{source.path} ({_label(source.format, source.schema)})")
    say(f"-> {conversion.destination} ({_label(conversion.format.name, conversion.layout.schema)})")
    print_table(
        [
            ("tensors", f"{len(conversion.written):,}, stored as {_stored_tensors(conversion):,}"),
            ("reads", f"{format_bytes(sum(reads.values()))} from {format_count(len(reads), 'file')}"),
            ("writes", f"{format_bytes(conversion.disk_bytes)} to {format_count(len(writes), 'file')}"),
            ("beside", ", ".join(_beside(conversion))),
            ("disk", f"{format_bytes(conversion.disk_bytes)} needed, {format_bytes(free)} free"),
            ("memory", f"{format_bytes(peak)} at the peak, with {format_count(options.workers, 'worker')}"),
        ]
    )
    _show_policies(conversion.policies)
    for heading, sizes in (("Files read:", reads), ("Files written:", writes)):
        say(heading)
        shown = [(name, f"{size:,}") for name, size in list(sizes.items())[:_FILES_SHOWN]]
        more = len(sizes) - len(shown)
        print_table([*shown, *([(f"and {more:,} more", "")] if more else [])], right=(1,))


def _show_result(conversion: Conversion, manifest: Manifest, seconds: float, options: Options) -> None:
    if options.json:
        print_json(
            {
                "output": str(conversion.destination),
                "format": manifest.format,
                "schema": manifest.schema,
                "fingerprint": manifest.fingerprint,
                "tensors": len(manifest.tensors),
                "bytes": conversion.disk_bytes,
                "seconds": round(seconds, 3),
                "source": manifest.source,
                "policies": [dict(policy) for policy in manifest.policies],
            }
        )
        return
    rate = format_bytes(conversion.read_bytes / max(seconds, 1e-9))
    say(f"{conversion.destination}: done, {_label(manifest.format, manifest.schema)}")
    print_table(
        [
            ("tensors", f"{len(manifest.tensors):,}"),
            ("bytes", f"{format_bytes(conversion.disk_bytes)} in {format_seconds(seconds)} ({rate}/s)"),
            ("fingerprint", manifest.fingerprint or "none (--no-digests)"),
        ]
    )
    _show_policies(conversion.policies)
    if manifest.fingerprint is not None:
        say(f"Check it at any time: qwen3conv verify {quote(str(conversion.destination))}")


def _show_policies(policies: Iterable[Policy]) -> None:
    rows = [(policy.name, policy.summary) for policy in policies]
    say("Decisions:" if rows else "Decisions: none; every byte is copied as it is.")
    if rows:
        print_table(rows)


def _read_bytes_by_file(conversion: Conversion) -> dict[str, int]:
    """Bytes that are read from each file of the source, block scales and an adapter's factors included."""
    from qwen3conv.converters.dtypes import itemsize

    found = dict.fromkeys(sorted(conversion.source.files), 0)
    for move in (move for unit in conversion.units for move in unit):
        width = itemsize(move.source_dtype)
        for extent in move.source:
            rows = min(extent.rows, move.rows - extent.row)  # rows past the last kept one are not read
            found[extent.file] = found.get(extent.file, 0) + max(rows, 0) * extent.columns * width
        if move.scale is not None:
            grid = move.scale
            found[grid.file] = found.get(grid.file, 0) + grid.shape[0] * grid.shape[1] * itemsize(grid.dtype)
        if move.delta is not None:
            for factor in (move.delta.left, move.delta.right):
                found[factor.file] += factor.rows * factor.columns * itemsize(factor.dtype)
    return {name: count for name, count in found.items() if count}


def _stored_tensors(conversion: Conversion) -> int:
    """Tensors of the output as ``inspect`` counts them: a tied head that shares the embeddings' bytes is one."""
    return len(conversion.arrangement.tensors) + conversion.arrangement.aliases


def _free_bytes(destination: Path) -> int:
    """Free bytes where the output goes: of the nearest folder above it that exists."""
    place = destination.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free


def _beside(conversion: Conversion) -> list[str]:
    """What is written besides the data files."""
    config = ["config.json"] if conversion.config is not None else []
    return [*config, *conversion.sidecar_names, "qwen3conv.json"]


def _file_list(sizes: dict[str, int]) -> list[dict[str, Any]]:
    return [{"file": name, "bytes": size} for name, size in sizes.items()]


def _label(name: str, schema: str | None) -> str:
    return f"{name}, schema {schema}" if schema else name
