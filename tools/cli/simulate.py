"""``simulate``: what each rank of a training run would hold and send, on a laptop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .command import Command
from .options import json_option
from .output import format_bytes, format_count, note, print_json, print_table, say
from .values import Place, Size

if TYPE_CHECKING:
    from qwen3conv.converters.geometry import Geometry
    from qwen3conv.tools.simulate import Job
    from qwen3conv.tools.simulate_files import Files
    from qwen3conv.tools.simulate_groups import Group
    from qwen3conv.tools.simulate_suggestions import Suggestion

_SHOWN = 8


@click.command(cls=Command, example="qwen3conv simulate --model 8B --tp 4 --fsdp 16")
@click.option("--model", metavar="NAME", help="A released size or model, such as 8B or Qwen3-30B-A3B.")
@click.option("--from", "source", type=Place(), metavar="SRC", help="Or a checkpoint; its config is read.")
@click.option("--tp", type=click.IntRange(1), default=1, metavar="N", help="Tensor-parallel ranks.")
@click.option("--fsdp", type=click.IntRange(1), metavar="N", help="FSDP2 ranks. Default: 1, or what --scale leaves.")
@click.option("--ep", type=click.IntRange(1), default=1, metavar="N", help="Expert-parallel ranks, of fsdp * tp * cp.")
@click.option("--pp", type=click.IntRange(1), default=1, metavar="N", help="Pipeline stages.")
@click.option("--cp", type=click.IntRange(1), default=1, metavar="N", help="Context-parallel ranks.")
@click.option("--scale", type=click.IntRange(1), metavar="N", help="Ranks in all; FSDP takes what the others leave.")
@click.option("--seq-len", type=click.IntRange(1), default=4096, show_default=True, metavar="N", help="Tokens.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Sequences at a time.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", help="Of stored parameters.")
@click.option("--optimizer", type=click.Choice(["adamw", "sgd"]), default="adamw", help="AdamW: two numbers each.")
@click.option(
    "--ac",
    type=click.Choice(["none", "selective", "full"]),
    default="selective",
    help="Activation checkpointing: what is kept of a dense layer, in elements per token, is 6H + 4Q + 4K + 4I, "
    "2H + 2Q + 2K + I, or H (H hidden, Q query heads, K key heads, I intermediate).",
)
@click.option(
    "--device", type=click.Choice(["neuron", "cuda", "cpu"]), default="neuron", help="Where kernels keep other things."
)
@click.option("--memory", type=Size(), metavar="SIZE", help="Of a device. Default: 24GiB, a logical NeuronCore.")
@click.option("--suggest", is_flag=True, help="List degrees, those that fit and send least per token first, and why.")
@click.option("--ranks", type=click.IntRange(1), default=64, show_default=True, metavar="N", help="For --suggest.")
@click.option("--picture", type=click.Path(path_type=Path), metavar="FILE", help="Draw the mesh as a PNG.")
@json_option
def simulate(
    model: str | None,
    source: str | None,
    tp: int,
    fsdp: int | None,
    ep: int,
    pp: int,
    cp: int,
    scale: int | None,
    seq_len: int,
    batch: int,
    dtype: str,
    optimizer: str,
    ac: Any,
    device: Any,
    memory: int | None,
    suggest: bool,
    ranks: int,
    picture: Path | None,
    json: bool,
) -> None:
    """What each rank would hold (exact for weights, gradients, optimizer) and send, and whether it fits.

    Activations and what comes and goes are an estimate, within 8% of the measured peak of small models on one rank,
    and on meshes of four between 1% too little and 20% too much, by every kind of checkpointing. What is sent equals a
    count of what torch sends, but for MoE under TP without EP (15%) and for --cp (not counted). Nothing is computed
    and nothing but a config is read. Exit 1 if the degrees do not fit the model's shapes.
    """
    from qwen3conv.converters.errors import PolicyError
    from qwen3conv.converters.placement import Mesh
    from qwen3conv.tools.simulate import CORE_BYTES, Job, check_job, describe, held_by_rank
    from qwen3conv.tools.simulate_groups import group
    from qwen3conv.tools.simulate_suggestions import nearest
    from qwen3conv.tools.simulate_suggestions import suggest as find

    if (model is None) == (source is None):
        raise click.UsageError("give either --model or --from")
    if suggest and (tp, fsdp or 1, ep, pp, cp, scale) != (1, 1, 1, 1, 1, None):
        raise click.UsageError(
            "--suggest looks for the degrees itself: leave --tp, --fsdp, --ep, --pp, --cp and --scale out"
        )
    geometry, tied, top_k = _model(model, source)
    if scale is not None:
        if fsdp is not None:
            raise click.UsageError("give either --fsdp or --scale")
        if scale % (tp * pp * cp):
            raise PolicyError(f"tp * pp * cp = {tp * pp * cp} does not divide --scale {scale}")
        fsdp = scale // (tp * pp * cp)
    mesh = Mesh(tp=tp, fsdp=fsdp or 1, ep=ep, pp=pp)
    width = 4 if dtype == "float32" else 2
    computed = 4 if device == "cpu" else 2
    job = Job(geometry, tied, top_k, mesh, cp, seq_len, batch, width, computed, optimizer, ac, device)
    room = memory or CORE_BYTES
    if suggest:
        _show_suggestions(find(job, ranks, room), room, json=json)
        return
    try:
        check_job(job)
    except PolicyError as error:
        near = ", ".join(map(describe, nearest(job)))
        raise PolicyError(f"{error}\nOf {format_count(job.ranks, 'rank')}, these fit: {near or 'none'}") from None
    held = held_by_rank(job)
    if picture is not None:
        from qwen3conv.tools.simulate_picture import draw_mesh

        draw_mesh(held, describe(job), room, picture)
        note(f"drawn: {picture}")
    from qwen3conv.tools.simulate_files import checkpoint_files

    groups = group(job, held)
    files = checkpoint_files(job, {rank: one.weights // width for rank, one in enumerate(held)})
    if json:
        print_json(_document(job, groups, files, room))
        return
    _show(job, groups, files, room)


def _model(model: str | None, source: str | None) -> tuple[Geometry, bool, int]:
    """Sizes, whether the head is tied, and experts per token."""
    if source is None:
        from qwen3conv.tools.released import released

        return released(model or "")
    from qwen3conv.tools.training_run import look

    config = look(source, announce=note)[1]
    return config.geometry, config.tie_word_embeddings, config.num_experts_per_tok or 1


def _show_suggestions(found: Sequence[Suggestion], memory: int, *, json: bool) -> None:
    from qwen3conv.tools.simulate import describe_mesh

    if json:
        print_json({"suggestions": [one.to_dict() for one in found], "memory": memory})
        return
    if not found:
        say("No mesh of so many ranks fits the model's shapes.")
    rows = [
        (
            describe_mesh(s.mesh, s.cp),
            format_bytes(s.held),
            format_bytes(s.sent),
            format_bytes(s.sent_per_token),
            "fits" if s.fits else "too large",
        )
        for s in found[: 2 * _SHOWN]
    ]
    columns = ("MESH", "FULLEST RANK", "SENDS PER STEP", "PER TOKEN", f"IN {format_bytes(memory)}")
    print_table(rows, columns, right=(1, 2, 3), indent=0)
    if len(found) > len(rows):
        say(f"and {len(found) - len(rows)} more; --json lists all")
    for one in found[:3]:
        say(f"{describe_mesh(one.mesh, one.cp)}: {one.reason}")


def _document(job: Job, groups: Sequence[Group], files: dict[str, Files], memory: int) -> dict[str, Any]:
    from dataclasses import asdict

    fullest, busiest = _largest(groups)
    return {
        "ranks": job.ranks,
        "mesh": {**asdict(job.mesh), "cp": job.cp},
        "memory": memory,
        "fits": fullest.held.total <= memory,
        "held": [one.to_dict() for one in groups],
        "sent_per_step": busiest.sent,
        "checkpoint_files": {name: one._asdict() for name, one in files.items()},
    }


def _largest(groups: Sequence[Group]) -> tuple[Group, Group]:
    """The ranks that hold most, and those that send most."""
    return max(groups, key=lambda one: one.held.total), max(groups, key=lambda one: sum(one.sent.values()))


def _show(job: Job, groups: Sequence[Group], files: dict[str, Files], memory: int) -> None:
    from dataclasses import fields

    from qwen3conv.tools.simulate import describe

    fullest, busiest = _largest(groups)
    say(f"{format_count(job.ranks, 'rank')}, {describe(job)}")
    names = [field.name for field in fields(fullest.held)]
    shown = sorted(groups, key=lambda one: -one.held.total)[:_SHOWN]
    rows = [
        (one.said(24), *(format_bytes(getattr(one.held, name)) for name in names), format_bytes(one.held.total))
        for one in shown
    ]
    print_table(rows, ("RANKS", *(name.upper() for name in names), "TOTAL"), right=range(1, len(names) + 2))
    if len(groups) > _SHOWN:
        say(f"  and {len(groups) - _SHOWN} more kinds of rank, which hold less")
    verdict = "fits" if fullest.held.total <= memory else "does not fit"
    say(f"The fullest rank {verdict} in {format_bytes(memory)}: {fullest.held.total / memory:.0%} of it.")
    if busiest.sent:
        say(
            "A rank sends per step:"
            if len(groups) == 1
            else f"Per step, those that send most send ({busiest.said(24)}):"
        )
        print_table([(name, format_bytes(count)) for name, count in busiest.sent.items()], right=(1,))
    say("A checkpoint:")
    print_table(
        [
            (name, format_count(one.files, "file"), format_bytes(one.bytes), f"largest {format_bytes(one.largest)}")
            for name, one in files.items()
        ],
        right=(1, 2, 3),
    )
