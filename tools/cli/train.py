"""``train``: continue the training of a checkpoint with torchtitan, and export what came of it."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .command import Command
from .options import DESTINATION, json_option
from .output import note, print_json, say, warn
from .values import Place

if TYPE_CHECKING:
    from qwen3conv.converters.config import Qwen3Config
    from qwen3conv.tools.hub import Source
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
    "--resume", type=Place(), metavar="ORG/RUN[@STEP]", help="In place of --from: a state that push --state sent."
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    required=True,
    help="Rows, .jsonl or .parquet: text; for sft messages, or prompt and completion.",
)
@click.option("--output", type=DESTINATION, required=True, metavar="RUN", help="Folder of the run; again, to go on.")
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
@click.option("--tp", type=click.IntRange(1), default=1, metavar="N", help="Tensor-parallel ranks.")
@click.option("--fsdp", type=click.IntRange(1), default=1, metavar="N", help="FSDP2 ranks.")
@click.option("--ep", type=click.IntRange(1), default=1, metavar="N", help="Expert-parallel ranks, of fsdp * tp.")
@click.option("--device", type=click.Choice(["neuron", "cuda", "cpu"]), help="Default: the best that is there.")
@click.option("--balance-experts", is_flag=True, help="Train MoE's routing bias, which an export cannot hold.")
@click.option(
    "--on-bad-row", type=click.Choice(["stop", "skip"]), help="Of sft, rows too long included. Default: stop."
)
@click.option("--no-packing", is_flag=True, help="Of sft: one row per sequence, padded.")
@click.option(
    "--lora-rank", type=click.IntRange(min=1), metavar="N", help="Train adapters of this rank, not the model."
)
@click.option("--lora-alpha", type=click.FloatRange(min=0, min_open=True), metavar="X", help="Default: twice the rank.")
@click.option("--lora-targets", metavar="NAMES", help="q_proj,v_proj,... Default: all of attention and dense MLP.")
@click.option("--dtype", type=click.Choice(_DTYPES), default="source", help="Of the export.")
@click.option("--no-export", is_flag=True, help="Leave torchtitan's checkpoint as it is.")
@click.option("--print", "prints", is_flag=True, help="Print the command that would train, and do nothing.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[TORCHTITAN_FLAGS]...")
@json_option
def train(
    source: str | None,
    resume: str | None,
    data: Path,
    output: Path,
    recipe: str,
    backend: str,
    steps: int | None,
    seq_len: int | None,
    batch_size: int | None,
    local_batch_size: int | None,
    learning_rate: float | None,
    save_every: int | None,
    tp: int,
    fsdp: int,
    ep: int,
    device: str | None,
    balance_experts: bool,
    on_bad_row: str | None,
    no_packing: bool,
    lora_rank: int | None,
    lora_alpha: float | None,
    lora_targets: str | None,
    dtype: str,
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
    from qwen3conv.converters.placement import Mesh
    from qwen3conv.training.launch import Run, check_run, read_record, typed

    if lora_rank is None and (lora_alpha is not None or lora_targets is not None):
        raise click.UsageError("--lora-alpha and --lora-targets are for adapters; give --lora-rank")
    if (source is None) == (resume is None):
        raise click.UsageError("give either --from, a checkpoint to start from, or --resume, a run to go on with")
    if source is not None:
        place, config = _look(source)
    else:
        config = _look_at_state(resume or "", Run(output, data))
    run = Run(
        output,
        data,
        recipe,
        backend,
        steps,
        seq_len,
        batch_size,
        local_batch_size,
        learning_rate,
        save_every,
        Mesh(tp=tp, fsdp=fsdp, ep=ep),
        device,
        balance_experts,
        on_bad_row,
        not no_packing,
        _lora(config, lora_rank, lora_alpha, lora_targets),
        flags,
    )
    check_run(run, config)
    if prints:
        say(typed(run.command()))
        return
    _require_training()
    if source is not None:
        _make_source(run, place, source)
    else:
        _check_resumed(run, resume or "")
    if run.changes_data_ranks():
        warn("another number of FSDP ranks than before: their places in the text do not fit, so it begins anew")
    note(f"training: {typed(run.command())}")
    ended = subprocess.run(run.command(), stdout=2, check=False)  # torchtitan's log is no result
    if ended.returncode:
        raise click.ClickException(
            f"training ended with code {ended.returncode}; what it said is above, and what it saved is in "
            f"{run.folder / 'checkpoint'}: the same command goes on from there"
        )
    if run.lora is not None:
        _export_adapter(run, run.lora)
    if not no_export:
        _export(run, config, dtype)
    record = read_record(run.record)
    _draw(run, record)
    if json:
        print_json({"run": str(run.folder), "export": None if no_export else str(run.export), "record": record})
        return
    found = list(record["steps"].items())  # type: ignore[attr-defined]
    if found:
        first, last = found[0], found[-1]
        say(f"{run.folder}: step {first[0]} loss {first[1]['loss']:.4f}, step {last[0]} loss {last[1]['loss']:.4f}")
    if run.lora is not None:
        say(f"The adapter: {run.adapter}")
    if not no_export:
        say(f"The trained model: {run.export}")


def _look(source: str) -> tuple[Source, Qwen3Config]:
    """The checkpoint's place and its config, without which nothing can be trained."""
    from qwen3conv.converters.detection import open_checkpoint
    from qwen3conv.converters.errors import SourceError
    from qwen3conv.tools.hub import resolve_source

    found = resolve_source(source, announce=note)
    checkpoint = open_checkpoint(found.path)
    if checkpoint.config is None:
        raise SourceError(f"{source} has no config.json, without which it is not known what to compute")
    return replace(found, path=checkpoint.path), checkpoint.config


def _look_at_state(text: str, run: Run) -> Qwen3Config:
    """The same of a state on the hub, which becomes the run's folder."""
    from qwen3conv.converters.config import read_config
    from qwen3conv.tools.hub_id import parse_hub_id
    from qwen3conv.tools.hub_state import pull_state

    step = pull_state(parse_hub_id(text), run, announce=note)
    note(f"{run.folder}: goes on from step {step} of {text}")
    return read_config(run.source / "hf_assets" / "config.json")


def _check_resumed(run: Run, text: str) -> None:
    from qwen3conv.converters.errors import DestinationError
    from qwen3conv.converters.manifest import read_manifest

    manifest = read_manifest(run.source)
    if manifest is None or manifest.format != run.source_format or run.lora is not None:
        raise DestinationError(f"{text} is the state of another backend; repeat the --backend that it was trained with")


def _lora(config: Qwen3Config, rank: int | None, alpha: float | None, targets: str | None) -> Lora | None:
    from qwen3conv.training.launch import Lora
    from qwen3conv.training.lora import check_targets, split_targets

    if rank is None:
        return None
    return Lora(rank, alpha or 2.0 * rank, check_targets(split_targets(targets or ""), is_moe=config.geometry.is_moe))


def _require_training() -> None:
    import importlib.util

    from qwen3conv.converters.errors import ConversionError

    absent = [name for name in ("torchtitan", "datasets") if importlib.util.find_spec(name) is None]
    if absent:
        raise ConversionError(f"training needs {' and '.join(absent)}: pip install 'qwen3conv[train]'")


def _make_source(run: Run, found: Source, source: str) -> None:
    """``RUN/source``, unless an earlier try of the same run made it."""
    from qwen3conv.converters.conversion import carry_out, prepare
    from qwen3conv.converters.errors import DestinationError, SourceError
    from qwen3conv.converters.manifest import read_manifest
    from qwen3conv.training.launch import has_chat_template

    place = found.path
    if run.source.is_dir():
        manifest = read_manifest(run.source)
        if manifest is None or manifest.source.get("trains") != str(place.resolve()):
            raise DestinationError(f"{run.folder} is a run of another checkpoint than {source}; name another --output")
        if manifest.format != run.source_format or not run.has_the_same_adapters():
            raise DestinationError(
                f"{run.folder} is a run of another backend, or with other adapters or none; repeat them, or name "
                "another --output"
            )
        return
    if run.folder.exists() and any(run.folder.iterdir()):
        raise DestinationError(f"{run.folder} exists and is no run; name another --output")
    run.folder.mkdir(parents=True, exist_ok=True)
    origin = {**found.origin, "path": source, "trains": str(place.resolve())}
    try:
        carry_out(prepare(place, run.source, run.source_format, origin=origin))
        if not (run.assets / "tokenizer.json").is_file():
            raise SourceError(f"{source} has no tokenizer.json, which training on text needs")
        if run.is_sft and not has_chat_template(run.assets):
            raise SourceError(f"{source} has no chat template (chat_template.jinja), which --recipe {run.recipe} needs")
    except BaseException:
        shutil.rmtree(run.source, ignore_errors=True)
        if not os.listdir(run.folder):
            run.folder.rmdir()
        raise


def _draw(run: Run, record: dict[str, object]) -> None:
    """``RUN/loss.png``, where matplotlib is."""
    from qwen3conv.converters.errors import ConversionError
    from qwen3conv.tools.loss_picture import draw_losses

    try:
        draw_losses({run.folder.name: record}, run.folder / "loss.png")
    except ConversionError as error:
        note(f"no picture: {error}")


def _last_step(run: Run) -> tuple[int, Path]:
    from qwen3conv.converters.errors import SourceError

    checkpoints = run.checkpoints()
    if not checkpoints:
        raise SourceError(f"{run.folder / 'checkpoint'} holds no whole checkpoint to export")
    return checkpoints[-1]


def _export_adapter(run: Run, lora: Lora) -> None:
    from qwen3conv.training.lora import export_adapter

    export_adapter(_last_step(run)[1], run.adapter, rank=lora.rank, alpha=lora.alpha, targets=lora.targets)


def _export(run: Run, config: Qwen3Config, dtype: str) -> None:
    """The last checkpoint, or the source with the last adapter, as ``RUN/export``, in the source's dtype."""
    from qwen3conv.converters.conversion import carry_out, prepare
    from qwen3conv.converters.dtypes import FROM_TORCH_NAME
    from qwen3conv.converters.manifest import read_manifest
    from qwen3conv.converters.policies import DEFAULTS

    step, folder = _last_step(run)
    code = config.dtype if dtype == "source" else FROM_TORCH_NAME[dtype]
    origin: dict[str, object] = {"path": str(folder), "step": step, "run": str(run.record)}
    began = read_manifest(run.source)
    if began is not None and "hub" in began.source:
        origin["base_model"] = began.source["hub"]
    choices = replace(DEFAULTS, like=run.assets, dtype=code)
    if run.lora is not None:
        choices = replace(DEFAULTS, dtype=code, adapter=run.adapter)
        folder, origin["adapter"] = run.source, str(run.adapter)
    carry_out(prepare(folder, run.export, "hf", choices, origin=origin), overwrite=True)
