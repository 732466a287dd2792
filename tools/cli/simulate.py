"""``simulate``: what each rank of a training run would hold and send, on a laptop."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .command import Command
from .options import json_option
from .output import format_bytes, format_count, note, print_json, print_table, say
from .values import Place, Size

if TYPE_CHECKING:
    from qwen3conv.converters.geometry import Geometry
    from qwen3conv.tools.simulate import Held, Job

_SHOWN = 8


@click.command(cls=Command, example="qwen3conv simulate --model 8B --tp 4 --fsdp 16")
@click.option("--model", metavar="NAME", help="A released size or model, such as 8B or Qwen3-30B-A3B.")
@click.option("--from", "source", type=Place(), metavar="SRC", help="Or a checkpoint; its config is read.")
@click.option("--tp", type=click.IntRange(1), default=1, metavar="N", help="Tensor-parallel ranks.")
@click.option("--fsdp", type=click.IntRange(1), default=1, metavar="N", help="FSDP2 ranks.")
@click.option("--ep", type=click.IntRange(1), default=1, metavar="N", help="Expert-parallel ranks, of fsdp * tp.")
@click.option("--pp", type=click.IntRange(1), default=1, metavar="N", help="Pipeline stages.")
@click.option("--cp", type=click.IntRange(1), default=1, metavar="N", help="Context-parallel ranks.")
@click.option("--seq-len", type=click.IntRange(1), default=4096, show_default=True, metavar="N", help="Tokens.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Sequences at a time.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", help="Of stored parameters.")
@click.option("--optimizer", type=click.Choice(["adamw", "sgd"]), default="adamw", help="AdamW: two numbers each.")
@click.option("--ac", type=click.Choice(["none", "selective", "full"]), default="selective", help="Checkpointing.")
@click.option("--memory", type=Size(), metavar="SIZE", help="Of a device. Default: 24GiB, a logical NeuronCore.")
@click.option("--suggest", is_flag=True, help="List degrees that fit, those that send least first.")
@click.option("--ranks", type=click.IntRange(1), default=64, show_default=True, metavar="N", help="For --suggest.")
@click.option("--picture", type=click.Path(path_type=Path), metavar="FILE", help="Draw the mesh as a PNG.")
@json_option
def simulate(
    model: str | None,
    source: str | None,
    tp: int,
    fsdp: int,
    ep: int,
    pp: int,
    cp: int,
    seq_len: int,
    batch: int,
    dtype: str,
    optimizer: str,
    ac: Any,
    memory: int | None,
    suggest: bool,
    ranks: int,
    picture: Path | None,
    json: bool,
) -> None:
    """What each rank would hold (exact for weights, gradients, optimizer) and send, and whether it fits.

    Activations are an estimate for float32 or bfloat16 training by torchtitan. Nothing is computed and nothing but a
    config is read. Exit 1 if the degrees do not fit the model's shapes.
    """
    from qwen3conv.converters.errors import PolicyError
    from qwen3conv.converters.placement import Mesh
    from qwen3conv.tools.simulate import CORE_BYTES, Job, held_by_rank, nearest, sent_per_step
    from qwen3conv.tools.simulate import suggest as find

    if (model is None) == (source is None):
        raise click.UsageError("give either --model or --from")
    geometry, tied, top_k = _model(model, source)
    mesh = Mesh(tp=tp, fsdp=fsdp, ep=ep, pp=pp)
    width = 4 if dtype == "float32" else 2
    job = Job(geometry, tied, top_k, mesh, cp, seq_len, batch, width, 2, optimizer, ac)
    room = memory or CORE_BYTES
    if suggest:
        found = find(job, ranks, room)
        if json:
            print_json({"suggestions": [one.to_dict() for one in found], "memory": room})
            return
        rows = [
            (str(s.mesh), format_bytes(s.held), format_bytes(s.sent), "fits" if s.fits else "too large") for s in found
        ]
        print_table(
            rows, ("MESH", "FULLEST RANK", "SENDS PER STEP", f"IN {format_bytes(room)}"), right=(1, 2), indent=0
        )
        return
    try:
        held = held_by_rank(job)
    except PolicyError as error:
        near = ", ".join(map(str, nearest(job)))
        raise PolicyError(f"{error}\nOf {format_count(mesh.ranks, 'rank')}, these fit: {near or 'none'}") from None
    if picture is not None:
        from qwen3conv.tools.simulate_picture import draw_mesh

        draw_mesh(held, mesh, room, picture)
        note(f"drawn: {picture}")
    sent = sent_per_step(job)
    if json:
        print_json(_document(job, held, sent, room))
        return
    _show(job, held, sent, room)


def _model(model: str | None, source: str | None) -> tuple[Geometry, bool, int]:
    """Sizes, whether the head is tied, and experts per token."""
    if source is None:
        from qwen3conv.tools.released import released

        return released(model or "")
    from qwen3conv.tools.training_run import look

    config = look(source, announce=note)[1]
    return config.geometry, config.tie_word_embeddings, config.num_experts_per_tok or 1


def _document(job: Job, held: list[Held], sent: dict[str, int], memory: int) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "ranks": job.ranks,
        "mesh": asdict(job.mesh),
        "memory": memory,
        "fits": max(one.total for one in held) <= memory,
        "held": [{**asdict(one), "total": one.total} for one in held],
        "sent_per_step": sent,
        "checkpoint_files": _files(job, held),
    }


def _files(job: Job, held: list[Held]) -> dict[str, dict[str, int]]:
    """Files and bytes of a checkpoint in bfloat16 by format; of a training checkpoint as torchtitan saves it."""
    from dataclasses import replace

    from qwen3conv.converters.placement import ONE_RANK
    from qwen3conv.tools.simulate import held_by_rank

    (whole,) = held_by_rank(replace(job, mesh=ONE_RANK), [0])
    total = whole.weights // job.parameter_bytes * 2
    ranks = sum(one.weights for one in held) // job.parameter_bytes * 2
    state = whole.weights + whole.optimizer
    return {
        "hf": {"files": max(1, -(-total // (5 * 10**9))), "bytes": total},
        "ranks": {"files": len(held), "bytes": ranks},
        "dcp, with optimizer": {"files": len(held), "bytes": state},
    }


def _show(job: Job, held: list[Held], sent: dict[str, int], memory: int) -> None:
    from dataclasses import fields

    kinds = Counter(held)
    fullest = max(held, key=lambda one: one.total)
    say(f"{format_count(job.ranks, 'rank')}, {job.mesh}" + (f" x cp{job.cp}" if job.cp > 1 else ""))
    names = [field.name for field in fields(fullest)]
    rows = []
    for one, count in sorted(kinds.items(), key=lambda pair: -pair[0].total)[:_SHOWN]:
        rows.append((f"{count:,}", *(format_bytes(getattr(one, name)) for name in names), format_bytes(one.total)))
    print_table(rows, ("RANKS", *(name.upper() for name in names), "TOTAL"), right=range(len(names) + 2))
    if len(kinds) > _SHOWN:
        say(f"  and {len(kinds) - _SHOWN} more kinds of rank, which hold less")
    verdict = "fits" if fullest.total <= memory else "does not fit"
    say(f"The fullest rank {verdict} in {format_bytes(memory)}: {fullest.total / memory:.0%} of it.")
    if sent:
        say("A rank sends per step:")
        print_table([(name, format_bytes(count)) for name, count in sent.items()], right=(1,))
    say("A checkpoint:")
    files = _files(job, held)
    print_table(
        [(name, format_count(found["files"], "file"), format_bytes(found["bytes"])) for name, found in files.items()],
        right=(2,),
    )
