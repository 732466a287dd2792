"""What ``train`` does around torchtitan: the start made from any checkpoint, exports on the way and at the end."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from qwen3conv.converters.checkpoint import assets_of_run, find_config
from qwen3conv.converters.config import Qwen3Config, read_config
from qwen3conv.converters.conversion import carry_out, prepare
from qwen3conv.converters.detection import open_checkpoint
from qwen3conv.converters.errors import ConversionError, DestinationError, PolicyError, SourceError, TransferError
from qwen3conv.converters.manifest import ASSETS, read_manifest
from qwen3conv.converters.policies import DEFAULTS
from qwen3conv.converters.stores.staging import partial_path
from qwen3conv.training.data.rows import digest_rows
from qwen3conv.training.launch import Run, has_chat_template, read_record, typed
from qwen3conv.training.run_lock import LOCK, RunLock
from qwen3conv.training.run_record import add_to_record

from .hub import Source
from .hub_remote import download_path, headers_of, streamed
from .run_exports import Announce, Exports, export_adapter_of, export_on_the_way, export_step, last_step
from .simulate import CORE_BYTES, Job, held_by_rank
from .simulate_suggestions import suggest
from .torchrun import launch


def look(
    source: str, like: Path | None = None, announce: Announce = lambda message: None
) -> tuple[Source, Qwen3Config]:
    """The checkpoint's place and its config, or that in ``like``, without which nothing can be trained.

    Of a hub id no weights are fetched.

    Raises:
        SourceError: it has none, or is no checkpoint.
        PolicyError: it has one, and ``like`` another.
    """
    with headers_of(source, announce=announce) as found:
        checkpoint = open_checkpoint(found.path, like=like)
        if like is not None and (own := find_config(checkpoint.path)) is not None:
            raise PolicyError(f"{source} has a config.json of its own, {own}: leave --like out")
        if checkpoint.config is None:
            raise SourceError(
                f"{source} has no config.json, without which it is not known what to compute: give --like, the model's "
                "folder or hub id"
            )
        return replace(found, path=checkpoint.path), checkpoint.config


def release_dtype(source: Path, config: Qwen3Config) -> str | None:
    """The dtype code of the model that ``source`` is, or is a step of the training of.

    A step holds float32, and so does the start of a run that goes on from one: its manifest keeps what came before.
    """
    folder = source.absolute().parent.parent / "source" if assets_of_run(source) is not None else source
    manifest = read_manifest(folder) if folder.is_dir() else None
    kept = manifest.source.get("release_dtype") if manifest is not None else None
    return kept if isinstance(kept, str) else config.dtype


def resume_from_hub(text: str, folder: Path, announce: Announce = lambda message: None) -> Qwen3Config:
    """Make ``folder`` a run that goes on from a state on the hub, unless an earlier try did; the model's config.

    Raises:
        SourceError: no state lies there, or the hub does not give it.
        DestinationError: ``folder`` is in use for something else.
    """
    from .hub_id import parse_hub_id
    from .hub_state import pull_state

    step = pull_state(parse_hub_id(text), folder, announce=announce)
    announce(f"{folder}: goes on from step {step} of {text}")
    return read_config(folder / "source" / ASSETS / "config.json")


def check_resumed(run: Run, text: str) -> None:
    """Refuse to go on with another backend than that of the state, or with adapters."""
    manifest = read_manifest(run.source)
    if manifest is None or manifest.format != run.source_format or run.lora is not None:
        raise DestinationError(f"{text} is the state of another backend; repeat the --backend that it was trained with")


def require_training() -> None:
    """Return when what training needs is installed."""
    absent = [name for name in ("torchtitan", "datasets") if importlib.util.find_spec(name) is None]
    if absent:
        raise ConversionError(f"training needs {' and '.join(absent)}: pip install 'qwen3conv[train]'")


def make_source(
    run: Run,
    found: Source,
    source: str,
    like: Path | None = None,
    *,
    needs_template: bool = True,
    keeps: bool = False,
    announce: Announce = lambda message: None,
) -> None:
    """Make ``RUN/source`` of the checkpoint in ``found``, unless an earlier try of the same run did.

    ``like`` has config and tokenizer of a checkpoint that has none. Of a hub id files come one by one, and go;
    ``keeps`` leaves them in the hub's cache.

    Raises:
        DestinationError: the folder is in use for something else.
        SourceError: the checkpoint lacks what training needs.
    """
    trains = _identity(found)
    if run.source.is_dir():
        manifest = read_manifest(run.source)
        if manifest is None or trains not in (manifest.source.get("trains"), _named(manifest.source)):
            raise DestinationError(f"{run.folder} is a run of another checkpoint than {source}; name another --output")
        if manifest.format != run.source_format or not run.has_the_same_adapters():
            raise DestinationError(
                f"{run.folder} is a run of another backend, or with other adapters or none; repeat them, or name "
                "another --output"
            )
        return
    left = {download_path(run.source), partial_path(run.source)}  # of an earlier try
    if run.folder.exists() and set(run.folder.iterdir()) - left - {run.folder / LOCK}:
        raise DestinationError(f"{run.folder} exists and is no run; name another --output")
    run.folder.mkdir(parents=True, exist_ok=True)
    resumes = any(place.is_dir() for place in left)
    try:
        with streamed(source, run.source, resume=resumes, keeps=keeps, announce=announce) as place:
            if "hub" in place.origin and _identity(place) != trains:
                raise SourceError(f"{source} has changed since it was looked at; try again")
            origin: dict[str, str | None] = {**place.origin, "path": source, "trains": trains}
            if (assets := assets_of_run(place.path)) is not None:
                origin["release_dtype"] = release_dtype(place.path, read_config(assets / "config.json"))
            has_begun = partial_path(run.source).is_dir()
            choices = replace(DEFAULTS, like=like)
            conversion = prepare(place.path, run.source, run.source_format, choices, origin=origin)
            carry_out(conversion, resume=has_begun)
        if not (run.assets / "tokenizer.json").is_file():
            raise SourceError(f"{source} has no tokenizer.json, which training on text needs")
        if run.is_sft and needs_template and not has_chat_template(run.assets):
            raise SourceError(
                f"{source} has no chat template (chat_template.jinja), which --recipe {run.recipe} needs: take an "
                "Instruct model, or put its chat_template.jinja into the folder"
            )
    except BaseException as error:
        shutil.rmtree(run.source, ignore_errors=True)
        if not isinstance(error, TransferError | KeyboardInterrupt):
            shutil.rmtree(partial_path(run.source), ignore_errors=True)
        raise


def _identity(found: Source) -> str:
    """What a source is called to tell it from others: its folder, or repository and commit."""
    return _named(found.origin) or str(found.path.resolve())


def _named(origin: Mapping[str, object]) -> str | None:
    """Repository and commit of what came from the hub."""
    if "hub" not in origin or "commit" not in origin:
        return None
    inside = f":{origin['subfolder']}" if "subfolder" in origin else ""
    return f"{origin['hub']}@{origin['commit']}{inside}"


def check_step(run: Run, found: Source) -> None:
    """Refuse to keep the optimizer of what has none, before anything is written.

    Raises:
        SourceError: it is no step of a run, or holds no optimizer state.
        PolicyError: the run has adapters, which are no parameters of that optimizer.
    """
    step = found.path
    if not re.fullmatch(r"step-[0-9]+", step.name) or not _record_beside(run, step).is_file():
        raise SourceError(f"{step}: --keep-optimizer is for a step of a run of train, RUN/checkpoint/step-N")
    if run.lora is not None:
        raise PolicyError("--keep-optimizer is for training the model: adapters have an optimizer of their own")
    if not any(name.startswith("optimizer.") for name in open_checkpoint(step).others):
        raise SourceError(f"{step} holds no optimizer state to keep")


def begin_at_step(run: Run, found: Source) -> None:
    """Begin the run at the step in ``found``, of either backend: its optimizer, schedule, step and place in the data.

    AdamW's moments belong to one number of a parameter each, so they go wherever that number does. What an earlier try
    of the same run made or trained is left as it is.
    """
    if run.checkpoints():
        return
    step, place = found.path, run.folder / "checkpoint" / found.path.name
    place.parent.mkdir(exist_ok=True)
    carry_out(prepare(step, place, run.source_format, replace(DEFAULTS, optimizer="default")))
    before = read_record(_record_beside(run, step))
    add_to_record(run.record, **{key: before[key] for key in ("data", "degrees") if key in before})


def _record_beside(run: Run, step: Path) -> Path:
    return step.absolute().parent.parent / run.record.name


def check_memory(run: Run, config: Qwen3Config, device: str) -> None:
    """Refuse a run whose parameters, gradients and optimizer state alone are more than a rank's memory.

    Activations are not counted: they are an estimate.

    Raises:
        PolicyError: with the numbers, and with degrees that would do.
    """
    job = Job(
        config.geometry,
        config.tie_word_embeddings,
        config.num_experts_per_tok or 1,
        run.mesh,
        compute_bytes=4 if device == "cpu" else 2,
    )
    held = held_by_rank(job, [0])[0]
    needed = held.weights if run.lora is not None else held.weights + held.gradients + held.optimizer
    memory = _memory_of_rank(device, run.mesh.ranks)
    if needed <= memory:
        return
    fits = next(
        (
            one.mesh
            for ranks in (8, 16, 32, 64)
            for one in suggest(job, ranks, memory)
            if one.fits and one.mesh.pp == one.cp == 1
        ),
        None,
    )
    where = f"; {fits}, {fits.ranks} devices, would do" if fits is not None and device != "cpu" else ""
    what = "parameters" if run.lora is not None else "parameters, gradients and optimizer state"
    raise PolicyError(
        f"each of {run.mesh.ranks} ranks would hold {needed / 1e9:,.1f} GB of {what}, and has {memory / 1e9:,.1f} GB"
        f"{where}; qwen3conv simulate --from SRC --suggest lists more"
    )


def _memory_of_rank(device: str, ranks: int) -> int:
    """Bytes: of its accelerator, or its share of the machine's."""
    if device == "neuron":
        return CORE_BYTES
    if device == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def check_data(run: Run) -> None:
    """Note what the run reads, and refuse to go on with other rows: its place in them would be none.

    Raises:
        SourceError: the rows cannot be read, or are others than before.
        PolicyError: another part of them was held out before.
    """
    found: dict[str, object] = {"data": run.data, "digest": digest_rows(run.data)}
    if run.validation_fraction is not None:
        found["validation_fraction"] = run.validation_fraction
    before = read_record(run.record).get("data") if run.record.is_file() and run.checkpoints() else None
    begins_anew = any("dataloader" in flag for flag in run.extra)
    fraction = "validation_fraction"
    if isinstance(before, dict) and before.get(fraction) != found.get(fraction) and not begins_anew:
        raise PolicyError(
            f"{run.folder} was trained with --validation-fraction {before.get(fraction) or 0:g} so far: with another "
            "one it would train on rows that were held out; repeat it, or name another --output"
        )
    if isinstance(before, dict) and before.get("digest") != found["digest"] and not begins_anew:
        raise SourceError(
            f"{run.data} is not what {run.folder} was trained on so far ({before.get('data')}); give that, another "
            "--output, or --checkpoint.exclude_from_loading dataloader to go on with the new rows from their beginning"
        )
    add_to_record(run.record, data=found)


def has_steps_left(run: Run) -> bool:
    """Whether the run, as it was saved last, has steps before it; those of a recipe are not known here.

    Raises:
        PolicyError: it went further than it is asked to go.
    """
    reached = run.checkpoints()[-1][0] if run.checkpoints() else 0
    if run.steps is not None and reached > run.steps:
        raise PolicyError(
            f"{run.folder} is already at step {reached}, beyond --steps {run.steps}, which counts those before too: "
            "give more of them, or another --output"
        )
    return run.steps is None or reached < run.steps


def carry_out_run(
    run: Run, lock: RunLock, dtype: str | None, *, exports: Exports, announce: Announce = lambda message: None
) -> None:
    """Train, and export with parameters of ``dtype`` (a dtype code): every ``export_every`` steps, and the last one.

    ``exports`` says what of a run with adapters: these alone, or merged into the source too.

    Raises:
        ConversionError: training ended with an error; checkpoints that are there can be gone on from.
    """
    begun = time.monotonic()
    if has_steps_left(run):
        announce(f"training: {typed(run.command())}")
        launch(run, lock, lambda: export_on_the_way(run, dtype, exports, announce))
    else:
        announce(f"{run.folder} is already at step {run.steps}: no step is left to train")
    facts: dict[str, object] = {}
    if (source := read_manifest(run.source)) is not None:
        facts["source"] = {"fingerprint": source.fingerprint, **source.source}
    export_on_the_way(run, dtype, exports, announce)
    if run.lora is not None and exports != "none":
        export_adapter_of(run, last_step(run)[1], run.adapter)
    if exports == "merged":
        step, folder = last_step(run)
        written = export_step(run, step, folder, run.export, run.adapter, dtype)
        facts["export"] = {"path": str(run.export), "step": step, "fingerprint": written.fingerprint}
    add_to_record(run.record, seconds=round(time.monotonic() - begun, 1), **facts)
