"""``train``: continue the training of a checkpoint with torchtitan, and export what came of it."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .command import Command
from .options import DESTINATION, json_option, keep_download_option, like_option
from .output import note, print_json, say, warn
from .values import ModelSize, Place

if TYPE_CHECKING:
    from qwen3conv.converters.config import Qwen3Config
    from qwen3conv.tools.run_exports import Exports
    from qwen3conv.training.launch import Lora, Run

_RECIPES = ("pretrain", "sft", "tiny", "tiny_sft")
_DTYPES = ("source", "float32", "bfloat16")


@click.command(
    cls=Command,
    example="qwen3conv train --from Qwen/Qwen3-0.6B --data text.jsonl --output run --fsdp 2 --print",
    context_settings={"ignore_unknown_options": True},
)
@click.option("--from", "source", type=Place(), metavar="SRC", help="A checkpoint of any format.")
@click.option(
    "--keep-optimizer",
    is_flag=True,
    help="Go on at the step of SRC, RUN/checkpoint/step-N of any backend, with its optimizer.",
)
@like_option("Config and tokenizer, where SRC has none.")
@click.option(
    "--resume", type=Place(), metavar="ORG/RUN[@STEP]", help="In place of --from: a state that push --state sent."
)
@click.option(
    "--data",
    required=True,
    metavar="ROWS",
    help="Texts, or for sft messages or prompts: .jsonl, .parquet, a folder, or org/name[:split] of the hub.",
)
@click.option("--validation", metavar="ROWS", help="Rows to compute a loss of, and not to train on.")
@click.option(
    "--validation-fraction",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    metavar="X",
    help="Or hold this part of --data out for it.",
)
@click.option("--validate-every", type=click.IntRange(min=1), metavar="N", help="Steps between these losses.")
@click.option("--output", type=DESTINATION, required=True, metavar="RUN", help="Folder of the run; again, to go on.")
@click.option(
    "--model", type=ModelSize(), metavar="SIZE", help="0.6B to 235B-A22B, moe-study: with the layout of that size."
)
@click.option("--recipe", type=click.Choice(_RECIPES), default="pretrain", help="On text, or on answers (sft).")
@click.option(
    "--backend",
    type=click.Choice(["native", "transformers", "nki-moe"]),
    default="native",
    show_default=True,
    help="torchtitan's Qwen3, transformers' one, or torchtitan's MoE with our operator for experts.",
)
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Steps in all, those before included.")
@click.option("--seq-len", type=click.IntRange(min=1), metavar="N", help="Tokens per sequence.")
@click.option("--batch-size", type=click.IntRange(min=1), metavar="N", help="Sequences per step, of all ranks.")
@click.option("--local-batch-size", type=click.IntRange(min=1), metavar="N", help="At a time on one rank.")
@click.option("--learning-rate", type=click.FloatRange(min=0, min_open=True), metavar="X", help="AdamW's peak rate.")
@click.option("--save-every", type=click.IntRange(min=1), metavar="N", help="Steps between checkpoints.")
@click.option("--tp", type=click.IntRange(1), metavar="N", help="Tensor-parallel ranks. Default: 1, or the size's.")
@click.option("--fsdp", type=click.IntRange(1), metavar="N", help="FSDP2 ranks. Default: 1, or the size's.")
@click.option("--ep", type=click.IntRange(1), default=1, metavar="N", help="Expert-parallel ranks, of fsdp * tp.")
@click.option("--device", type=click.Choice(["neuron", "cuda", "cpu"]), help="Default: the best that is there.")
@click.option("--balance-experts", is_flag=True, help="Train MoE's routing bias, which an export cannot hold.")
@click.option(
    "--on-bad-row", type=click.Choice(["stop", "skip"]), help="Of sft, rows too long are bad too. Default: stop."
)
@click.option("--no-packing", is_flag=True, help="Of sft: one row per sequence, padded.")
@keep_download_option
@click.option(
    "--lora-rank", type=click.IntRange(min=1), metavar="N", help="Train adapters of this rank, not the model."
)
@click.option("--lora-alpha", type=click.FloatRange(min=0, min_open=True), metavar="X", help="Default: twice the rank.")
@click.option("--lora-targets", metavar="NAMES", help="q_proj,v_proj,... Default: all of attention and dense MLP.")
@click.option("--dtype", type=click.Choice(_DTYPES), default="source", help="Of the export.")
@click.option("--export-every", type=click.IntRange(min=1), metavar="N", help="Steps between exports on the way.")
@click.option(
    "--export",
    type=click.Choice(["adapter", "merged", "none"]),
    help="Of adapters alone, or of the whole model. Default: merged, adapters beside it.",
)
@click.option("--no-export", is_flag=True, help="The same as --export none: leave torchtitan's checkpoint as it is.")
@click.option("--print", "prints", is_flag=True, help="Print the command that would train, and do nothing.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[TORCHTITAN_FLAGS]...")
@json_option
def train(
    source: str | None,
    keep_optimizer: bool,
    like: str | None,
    resume: str | None,
    data: str,
    validation: str | None,
    validation_fraction: float | None,
    validate_every: int | None,
    output: Path,
    model: str | None,
    recipe: str,
    backend: str,
    steps: int | None,
    seq_len: int | None,
    batch_size: int | None,
    local_batch_size: int | None,
    learning_rate: float | None,
    save_every: int | None,
    tp: int | None,
    fsdp: int | None,
    ep: int,
    device: str | None,
    balance_experts: bool,
    on_bad_row: str | None,
    no_packing: bool,
    keep_download: bool,
    lora_rank: int | None,
    lora_alpha: float | None,
    lora_targets: str | None,
    dtype: str,
    export_every: int | None,
    export: str | None,
    no_export: bool,
    prints: bool,
    flags: tuple[str, ...],
    json: bool,
) -> None:
    """Train a checkpoint of any format with torchtitan, on text or on chats, and export it.

    SRC becomes RUN/source, which torchtitan loads; its checkpoints go to RUN/checkpoint, the trained model to
    RUN/export, and what happened to RUN/run.json. The same command again goes on where the run stopped, on another mesh
    too; with --resume a run goes on that was sent to the hub, optimizer and data position included. Further flags are
    torchtitan's own.
    """
    from qwen3conv.converters.dtypes import FROM_TORCH_NAME
    from qwen3conv.converters.placement import Mesh
    from qwen3conv.tools.hub import resolve_like
    from qwen3conv.tools.training_run import (
        begin_at_step,
        carry_out_run,
        check_data,
        check_memory,
        check_resumed,
        check_step,
        look,
        make_source,
        release_dtype,
        require_training,
        resume_from_hub,
    )
    from qwen3conv.training.launch import Run, read_record, typed
    from qwen3conv.training.layouts import LAYOUT
    from qwen3conv.training.run_checks import check_run
    from qwen3conv.training.run_lock import lock_run

    _refuse_misspelt(flags)
    if lora_rank is None and (lora_alpha is not None or lora_targets is not None):
        raise click.UsageError("--lora-alpha and --lora-targets are for adapters; give --lora-rank")
    if export == "adapter" and lora_rank is None:
        raise click.UsageError("--export adapter is for adapters; give --lora-rank")
    if no_export and export not in (None, "none"):
        raise click.UsageError(f"--no-export is --export none; leave it out, or --export {export}")
    exports: Exports = "none" if no_export else export or "merged"  # type: ignore[assignment]
    if (source is None) == (resume is None):
        raise click.UsageError("give either --from, a checkpoint to start from, or --resume, a run to go on with")
    if keep_optimizer and source is None:
        raise click.UsageError("--keep-optimizer is for --from; --resume always keeps it")
    if like is not None and source is None:
        raise click.UsageError("--like is for --from; a run on the hub has config and tokenizer of its own")
    assets = None if like is None else resolve_like(like, announce=note).path
    if source is not None:
        place, config = look(source, assets, announce=note)
    else:
        config = resume_from_hub(resume or "", output, announce=note)
    layout = Mesh() if model is None else LAYOUT[model]
    run = Run(
        output,
        data,
        recipe=recipe,
        model=model,
        backend=backend,
        steps=steps,
        seq_len=seq_len,
        batch_size=batch_size,
        local_batch_size=local_batch_size,
        learning_rate=learning_rate,
        save_every=save_every,
        mesh=Mesh(tp=tp or layout.tp, fsdp=fsdp or layout.fsdp, ep=ep),
        device=device,
        balance_experts=balance_experts,
        on_bad_row=on_bad_row,
        packing=not no_packing,
        lora=_lora(config, lora_rank, lora_alpha, lora_targets),
        validation=validation,
        validation_fraction=validation_fraction,
        validate_every=validate_every,
        export_every=export_every,
        extra=flags,
    )
    check_run(run, config)
    if prints:
        say(typed(run.command()))
        return
    require_training()
    from qwen3conv.training.devices import choose_device, why_no_neuron  # it loads torch

    chosen = choose_device(device)
    if reason := why_no_neuron(device, chosen):
        warn(reason)
    check_memory(run, config, chosen)
    if keep_optimizer:
        check_step(run, place)
    released = release_dtype(place.path if source is not None else run.source, config)
    code = released if dtype == "source" else FROM_TORCH_NAME[dtype]
    with lock_run(output, "qwen3conv train") as lock:
        if source is not None:
            make_source(run, place, source, assets, keeps=keep_download, announce=note)
            if keep_optimizer:
                begin_at_step(run, place)
        else:
            check_resumed(run, resume or "")
        check_data(run)
        if run.changes_data_ranks():
            warn("another number of FSDP ranks than before: their places in the text do not fit, so it begins anew")
        carry_out_run(run, lock, code, exports=exports, announce=note)
    record = read_record(run.record)
    _draw(run, record)
    if json:
        print_json(
            {"run": str(run.folder), "export": str(run.export) if exports == "merged" else None, "record": record}
        )
        return
    found = list(record["steps"].items())  # type: ignore[attr-defined]
    if found:
        first, last = found[0], found[-1]
        say(f"{run.folder}: step {first[0]} loss {first[1]['loss']:.4f}, step {last[0]} loss {last[1]['loss']:.4f}")
    if run.lora is not None and exports != "none":
        say(f"The adapter: {run.adapter}")
    if exports == "merged":
        say(f"The trained model: {run.export}")


def _refuse_misspelt(flags: tuple[str, ...]) -> None:
    """Refuse what is nearly an option of ours; torchtitan's flags have dots or underscores."""
    known = [name for parameter in train.params for name in parameter.opts if name.startswith("--")]
    for flag in flags:
        name = flag.partition("=")[0]
        if name.startswith("--") and not {".", "_"} & {*name}:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            if near:
                raise click.NoSuchOption(name, possibilities=near)


def _lora(config: Qwen3Config, rank: int | None, alpha: float | None, targets: str | None) -> Lora | None:
    from qwen3conv.training.launch import Lora
    from qwen3conv.training.lora import check_targets, split_targets

    if rank is None:
        return None
    return Lora(rank, alpha or 2.0 * rank, check_targets(split_targets(targets or ""), is_moe=config.geometry.is_moe))


def _draw(run: Run, record: dict[str, object]) -> None:
    """``RUN/loss.png``, where matplotlib is."""
    from qwen3conv.converters.errors import ConversionError
    from qwen3conv.tools.loss_picture import draw_losses

    try:
        draw_losses({run.folder.name: record}, run.folder / "loss.png")
    except ConversionError as error:
        note(f"no picture: {error}")
