"""``ladder``: bring a model up one axis at a time, and stop at the one that changes what is computed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .command import DIFFERENT, Command
from .options import DESTINATION, json_option
from .output import note, print_json, print_table, say, warn
from .values import Place

if TYPE_CHECKING:
    from qwen3conv.tools.ladder import Climbed


@click.command(
    cls=Command,
    example="qwen3conv ladder --from Qwen/Qwen3-0.6B --data text.jsonl --output ladder --rungs eager,tp --print",
)
@click.option("--from", "source", type=Place(), required=True, metavar="SRC", help="A checkpoint of any format.")
@click.option("--data", required=True, metavar="ROWS", help="Rows as for train; texts, chats or completions.")
@click.option("--output", type=DESTINATION, required=True, metavar="FOLDER", help="Again, to go on where it stopped.")
@click.option(
    "--recipe", type=click.Choice(["sft", "tiny_sft"]), default="sft", show_default=True, help="As for train."
)
@click.option("--steps", type=click.IntRange(min=4), default=6, show_default=True, metavar="N", help="Of each rung.")
@click.option("--seq-len", type=click.IntRange(min=1), metavar="N", help="Tokens per sequence. Default: the recipe's.")
@click.option("--batch-size", type=click.IntRange(min=1), metavar="N", help="Sequences per step. Default: --fsdp.")
@click.option(
    "--tp",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    metavar="N",
    help="Tensor-parallel ranks.",
)
@click.option("--fsdp", type=click.IntRange(1), default=2, show_default=True, metavar="N", help="The same of FSDP.")
@click.option("--device", type=click.Choice(["neuron", "cuda", "cpu"]), help="Default: the best that is there.")
@click.option(
    "--compile-backend", metavar="NAME", help="Of torch.compile. Default: neuron, inductor, or aot_eager on CPU."
)
@click.option("--rungs", metavar="NAMES", help="Only these, by name, with commas.")
@click.option(
    "--rung",
    "own",
    multiple=True,
    metavar="NAME:SPEC",
    help="One more: x:tp=2,fsdp=2,backend=transformers. @FILE: one a line.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=1e-3,
    show_default=True,
    metavar="X",
    help="Relative, of losses and gradient norms. 1e-3 suits float32; bfloat16 wants 2e-2.",
)
@click.option("--print", "prints", is_flag=True, help="Print the rungs' commands, and do nothing.")
@json_option
@click.pass_context
def ladder(
    ctx: click.Context,
    source: str,
    data: str,
    output: Path,
    recipe: str,
    steps: int,
    seq_len: int | None,
    batch_size: int | None,
    tp: int,
    fsdp: int,
    device: str | None,
    compile_backend: str | None,
    rungs: str | None,
    own: tuple[str, ...],
    tolerance: float,
    prints: bool,
    json: bool,
) -> None:
    """Run a few steps on one process, then FSDP, TP, both, compiled, with our operator; stop where losses part.

    Weights, data, batch and sequence length are the same on every rung. FOLDER gets ladder.json, ladder.png and every
    rung's run. Exit 0 if all agree, 3 if one computes something else, 1 if one fails.
    """
    from qwen3conv.converters.errors import ConversionError, PolicyError
    from qwen3conv.tools.cli.ladder_table import HEADERS, live_table, row
    from qwen3conv.tools.ladder import (
        LADDER,
        check_names,
        check_resumed,
        check_rungs,
        climb,
        read_rungs,
        run_of,
        usual_rungs,
        write_ladder,
    )
    from qwen3conv.tools.ladder_picture import draw_ladder
    from qwen3conv.tools.training_run import check_data, look, make_source, require_training
    from qwen3conv.training.launch import Run, typed
    from qwen3conv.training.run_lock import lock_run

    require_training()
    from qwen3conv.training.devices import choose_device, why_no_neuron

    found_source, config = look(source, announce=note)
    chosen = choose_device(device)
    if reason := why_no_neuron(device, chosen):
        warn(reason)
    compiler = compile_backend or {"neuron": "neuron", "cpu": "aot_eager"}.get(chosen, "inductor")
    all_rungs = usual_rungs(tp, fsdp, is_moe=config.geometry.is_moe, compile_backend=compiler)
    all_rungs += read_rungs(own)
    check_names(all_rungs)
    if rungs is not None:
        names = [name.strip() for name in rungs.split(",")]
        odd = set(names) - {rung.name for rung in all_rungs}
        if odd:
            raise PolicyError(f"--rungs {', '.join(sorted(odd))}: there are {', '.join(r.name for r in all_rungs)}")
        all_rungs = [rung for rung in all_rungs if rung.name in names]
    base = Run(output, data, recipe=recipe, steps=steps, seq_len=seq_len, batch_size=batch_size or fsdp, device=chosen)
    check_rungs(base, all_rungs, config)
    if prints:
        for rung in all_rungs:
            say(f"{rung.name}: {typed(run_of(base, rung, output / 'rungs' / rung.name).command())}")
        return
    settings = {
        "from": source,
        "data": data,
        "recipe": recipe,
        "steps": steps,
        "batch_size": base.batch_size,
        "seq_len": seq_len,
        "device": chosen,
        "tolerance": tolerance,
    }
    check_resumed(output, settings, all_rungs)
    with lock_run(output, "qwen3conv ladder"):
        make_source(base, found_source, source, needs_template=False, announce=note)
        check_data(base)
    if not (output / LADDER).is_file():
        write_ladder(output / LADDER, settings, [])
    climbed: list[Climbed] = []
    with live_table([rung.name for rung in all_rungs]) as show:
        for found in climb(base, all_rungs, tolerance=tolerance, announce=lambda rung: show(climbed, rung)):
            climbed.append(found)
            write_ladder(output / LADDER, settings, climbed)
            show(climbed, None)
    with contextlib.suppress(ConversionError):
        draw_ladder(climbed, output / "ladder.png")
    if json:
        print_json({**settings, "rungs": [one.to_dict() for one in climbed]})
    else:
        print_table([row(one) for one in climbed], HEADERS, right=(1, 3, 4, 5))
        for one in climbed:
            if one.message:
                say(f"{one.rung.name}: {one.message}")
    failed = next((one for one in climbed if one.status == "failed"), None)
    if failed is not None:
        ctx.exit(1)
    ctx.exit(DIFFERENT if any(one.status == "parts" for one in climbed) else 0)
