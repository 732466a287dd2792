"""``inspect`` and ``formats``: what a folder is, and what there is to convert between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from .command import Command
from .options import json_option, reading_options, source_argument
from .output import format_bytes, format_count, note, print_json, print_lines, print_table, say

if TYPE_CHECKING:
    from qwen3conv.converters.inspection import Report
    from qwen3conv.converters.stores.nxd_bindings import Queries

_OTHERS_SHOWN = 3


@click.command(cls=Command, example="qwen3conv inspect qwen3-dcp --tensors")
@source_argument("path", "PATH")
@click.option("--tensors", is_flag=True, help="List every tensor.")
@reading_options
@json_option
def inspect(path: str, tensors: bool, like: str | None, query_heads: Queries | None, json: bool) -> None:
    """What a folder is, whether it is whole, what will bite.

    Only headers are read, of a hub id too. The exit code is 0 for an incomplete checkpoint too; --json says `complete`.
    """
    from qwen3conv.converters.inspection import inspect as examine
    from qwen3conv.tools.hub import resolve_like
    from qwen3conv.tools.hub_remote import headers_of

    config = None if like is None else resolve_like(like, announce=note).path
    with headers_of(path, announce=note) as found:
        report = examine(found.path, like=config, queries=query_heads)
        if "hub" in found.origin:
            report = replace(report, path=Path(path))
    if json:
        print_json(report.to_dict(tensors=tensors))
        return
    _show(report, path)
    if tensors and report.stored:
        say("Tensors:")
        print_lines(_tensor_lines(report))


@click.command(cls=Command, example="qwen3conv formats")
@json_option
def formats(json: bool) -> None:
    """The formats, and whether each is read and written."""
    from qwen3conv.converters.formats import FORMATS

    if json:
        print_json(
            {
                "formats": [
                    {"name": f.name, "read": True, "write": f.writable, "store": f.store, "summary": f.summary}
                    for f in FORMATS.values()
                ]
            }
        )
        return
    rows = [(f.name, "yes", "yes" if f.writable else "no", f.summary) for f in FORMATS.values()]
    print_table(rows, ("FORMAT", "READ", "WRITE", "WHAT IT IS"), indent=0)
    for f in FORMATS.values():
        if f.instead:
            say(f"{f.name} is not written: {f.instead}.")


def _show(report: Report, place: str) -> None:
    say(str(report.path))
    print_table(list(_rows(report)))
    for heading, lines in (("Problems:", report.problems), ("What will bite:", report.traps)):
        if lines:
            say(heading)
            print_table([("-", line) for line in lines])
    if report.complete:
        say(f"Next: {_next_step(report, place)}")


def _rows(report: Report) -> Iterator[tuple[str, str]]:
    if report.format is not None:
        yield "format", f"{report.format}: {_kind(report)}"
    if report.mesh is not None:
        yield "mesh", _mesh(report.mesh, report.layout or "")
    yield "complete", "yes" if report.complete else "no"
    config = report.config
    if config is not None:
        yield "model", _model(config)
        yield "maths", _maths(config)
    if report.releases:
        yield "shapes of", ", ".join(report.releases)
    if report.parameters:
        yield "parameters", f"{report.parameters:,}"
    if report.tensors:
        dtypes = ", ".join(
            dtype if len(report.dtypes) == 1 else f"{dtype} ({count:,})" for dtype, count in report.dtypes.items()
        )
        chunks = f" in {report.chunks:,} chunks" if report.chunks != report.tensors else ""
        yield "stored", f"{format_count(report.tensors, 'tensor')}{chunks}, {dtypes}"
        yield "size", f"{format_bytes(report.bytes)} in {format_count(report.files, 'file')}"
    if report.others:
        names = list(report.others)
        more = f" and {len(names) - _OTHERS_SHOWN:,} more" if len(names) > _OTHERS_SHOWN else ""
        yield "beside it", ", ".join(names[:_OTHERS_SHOWN]) + more
    if report.fingerprint is not None:
        yield "fingerprint", f"{report.fingerprint} (of its manifest, not computed anew)"


def _kind(report: Report) -> str:
    from qwen3conv.converters.formats import FORMATS

    name = report.format or ""
    summary = FORMATS[name].summary if name in FORMATS else "DCP with Hugging Face names"
    return f"{summary}; this is schema {report.schema}" if report.schema else summary


def _mesh(degrees: Mapping[str, int], layout: str) -> str:
    from qwen3conv.converters.placement import Mesh

    mesh = Mesh(**degrees)
    return f"{mesh}, {format_count(mesh.ranks, 'rank')}, tensors of layout {layout}"


def _model(config: Mapping[str, Any]) -> str:
    size = (
        f"{config['num_experts']} experts of {config['moe_intermediate_size']}"
        if config["model_type"] == "qwen3_moe"
        else f"intermediate {config['intermediate_size']}"
    )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    words = [
        config["model_type"],
        format_count(config["num_hidden_layers"], "layer"),
        f"hidden {config['hidden_size']}",
        f"{heads} heads and {kv_heads} KV heads of {config['head_dim']}",
        size,
        f"vocabulary {config['vocab_size']}",
    ]
    return ", ".join(words)


def _maths(config: Mapping[str, Any]) -> str:
    """What only a config tells; all of it matters, so each value is shown."""
    if "rope_theta" not in config:
        return "not known: there is no config.json"
    words = [
        f"rope_theta {config['rope_theta']:.10g}",
        f"context {config['max_position_embeddings']}",
        f"eps {config['rms_norm_eps']:g}",
        "tied embeddings" if config["tie_word_embeddings"] else "own head",
    ]
    if config.get("rope_scaling"):
        words.append(f"rope_scaling {config['rope_scaling']}")
    if config.get("num_experts_per_tok") is not None:
        normed = "normalised" if config["norm_topk_prob"] else "not normalised"
        words.append(f"{config['num_experts_per_tok']} experts per token, {normed}")
    return ", ".join([*words, f"config.json of style {config['style']}"])


def _next_step(report: Report, place: str) -> str:
    if report.mesh is not None:
        return f"qwen3conv merge {quote(place)} DST --dry-run"
    is_dcp = report.format is not None and not report.format.startswith(("hf", "torch-shards"))
    command = "dcp-to-hf" if is_dcp else "hf-to-dcp"
    like = "" if "rope_theta" in (report.config or {}) or command == "hf-to-dcp" else " --like 'FOLDER|HUB_ID'"
    return f"qwen3conv {command} {quote(place)} DST{like} --dry-run"


def _tensor_lines(report: Report) -> Iterator[str]:
    """Aligned columns without wrapping, so that grep and awk can read them."""
    rows = [
        (name, dtype, "x".join(map(str, shape)) or "scalar", f"{chunks} chunks" if chunks != 1 else "", file)
        for name, dtype, shape, chunks, file in report.stored
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False) if width]
        yield "  " + "  ".join([*cells, row[4]])
