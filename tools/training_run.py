"""What ``train`` does around torchtitan: the start made from any checkpoint, exports on the way and at the end."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO

from qwen3conv.converters.config import Qwen3Config, read_config
from qwen3conv.converters.conversion import carry_out, prepare
from qwen3conv.converters.detection import open_checkpoint
from qwen3conv.converters.errors import ConversionError, DestinationError, PolicyError, SourceError, TransferError
from qwen3conv.converters.manifest import ASSETS, Manifest, read_manifest
from qwen3conv.converters.policies import DEFAULTS
from qwen3conv.converters.stores.staging import partial_path
from qwen3conv.training.data.rows import digest_rows
from qwen3conv.training.launch import ERRORS, Run, has_chat_template, read_record
from qwen3conv.training.run_record import add_to_record

from .hub import Source
from .hub_remote import download_path, headers_of, streamed
from .simulate import CORE_BYTES, Job, held_by_rank
from .simulate_suggestions import suggest

Announce = Callable[[str], None]

_POLL_SECONDS = 0.5


def look(source: str, announce: Announce = lambda message: None) -> tuple[Source, Qwen3Config]:
    """The checkpoint's place and its config, without which nothing can be trained. Of a hub id no weights are fetched.

    Raises:
        SourceError: it has none, or is no checkpoint.
    """
    with headers_of(source, announce=announce) as found:
        checkpoint = open_checkpoint(found.path)
        if checkpoint.config is None:
            raise SourceError(f"{source} has no config.json, without which it is not known what to compute")
        return replace(found, path=checkpoint.path), checkpoint.config


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
    *,
    needs_template: bool = True,
    keeps: bool = False,
    announce: Announce = lambda message: None,
) -> None:
    """Make ``RUN/source`` of the checkpoint in ``found``, unless an earlier try of the same run did.

    Of a hub id files come one by one, and go; ``keeps`` leaves them in the hub's cache.

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
    if run.folder.exists() and set(run.folder.iterdir()) - left:
        raise DestinationError(f"{run.folder} exists and is no run; name another --output")
    run.folder.mkdir(parents=True, exist_ok=True)
    resumes = any(place.is_dir() for place in left)
    try:
        with streamed(source, run.source, resume=resumes, keeps=keeps, announce=announce) as place:
            if _identity(place) != trains:
                raise SourceError(f"{source} has changed since it was looked at; try again")
            origin = {**place.origin, "path": source, "trains": trains}
            has_begun = partial_path(run.source).is_dir()
            carry_out(prepare(place.path, run.source, run.source_format, origin=origin), resume=has_begun)
        if not (run.assets / "tokenizer.json").is_file():
            raise SourceError(f"{source} has no tokenizer.json, which training on text needs")
        if run.is_sft and needs_template and not has_chat_template(run.assets):
            raise SourceError(f"{source} has no chat template (chat_template.jinja), which --recipe {run.recipe} needs")
    except BaseException as error:
        shutil.rmtree(run.source, ignore_errors=True)
        if not isinstance(error, TransferError | KeyboardInterrupt):
            shutil.rmtree(partial_path(run.source), ignore_errors=True)
        if not os.listdir(run.folder):
            run.folder.rmdir()
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
    """
    found = {"data": run.data, "digest": digest_rows(run.data)}
    before = read_record(run.record).get("data") if run.record.is_file() and run.checkpoints() else None
    begins_anew = any("dataloader" in flag for flag in run.extra)
    if isinstance(before, dict) and before.get("digest") != found["digest"] and not begins_anew:
        raise SourceError(
            f"{run.data} is not what {run.folder} was trained on so far ({before.get('data')}); give that, another "
            "--output, or --checkpoint.exclude_from_loading dataloader to go on with the new rows from their beginning"
        )
    add_to_record(run.record, data=found)


def carry_out_run(run: Run, dtype: str | None, *, exports: bool, announce: Announce = lambda message: None) -> None:
    """Train, and export with parameters of ``dtype`` (a dtype code): every ``export_every`` steps, and the last one.

    Raises:
        ConversionError: training ended with an error; checkpoints that are there can be gone on from.
    """
    begun = time.monotonic()
    launch(run, lambda: _export_on_the_way(run, dtype, announce))
    facts: dict[str, object] = {}
    if (source := read_manifest(run.source)) is not None:
        facts["source"] = {"fingerprint": source.fingerprint, **source.source}
    _export_on_the_way(run, dtype, announce)
    if run.lora is not None:
        _export_adapter(run, _last_step(run)[1], run.adapter)
    if exports:
        step, folder = _last_step(run)
        written = _export(run, step, folder, run.export, run.adapter, dtype)
        facts["export"] = {"path": str(run.export), "step": step, "fingerprint": written.fingerprint}
    add_to_record(run.record, seconds=round(time.monotonic() - begun, 1), **facts)


def launch(run: Run, meanwhile: Callable[[], None] = lambda: None, *, log: int | IO[bytes] = 2) -> None:
    """Run ``torchrun`` to its end, calling ``meanwhile`` now and then; its output goes to ``log``, stderr by default.

    Raises:
        ConversionError: it ended with an error; the message has the reason that a rank left.
    """
    with tempfile.TemporaryDirectory(prefix="qwen3conv-") as room:
        errors = Path(room) / "errors"
        # torchtitan's log is no result, so it goes to stderr
        command = run.command(log_dir=Path(room))
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, ERRORS: str(errors)})
        try:
            while process.poll() is None:
                time.sleep(_POLL_SECONDS)
                meanwhile()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        if process.returncode:
            said = errors.read_text(encoding="utf-8").strip() if errors.is_file() else "what it said is above"
            raise ConversionError(
                f"training ended with code {process.returncode}: {said}\n"
                f"What it saved is in {run.folder / 'checkpoint'}: the same command goes on from there"
            )


def _last_step(run: Run) -> tuple[int, Path]:
    checkpoints = run.checkpoints()
    if not checkpoints:
        raise SourceError(f"{run.folder / 'checkpoint'} holds no whole checkpoint to export")
    return checkpoints[-1]


def _export_on_the_way(run: Run, dtype: str | None, announce: Announce) -> None:
    """``RUN/exports/step-N`` of whole checkpoints that are due and have none yet."""
    if run.export_every is None:
        return
    for step, folder in run.checkpoints():
        place = run.folder / "exports" / f"step-{step}"
        if step % run.export_every or place.exists():
            continue
        place.parent.mkdir(exist_ok=True)
        adapter = run.folder / "exports" / f"adapter-{step}"
        if run.lora is not None:
            _export_adapter(run, folder, adapter)
        _export(run, step, folder, place, adapter, dtype)
        announce(f"exported step {step} to {place}")


def _export_adapter(run: Run, step: Path, place: Path) -> None:
    from qwen3conv.training.lora import export_adapter

    assert run.lora is not None
    export_adapter(step, place, rank=run.lora.rank, alpha=run.lora.alpha, targets=run.lora.targets)


def _export(run: Run, step: int, folder: Path, place: Path, adapter: Path, dtype: str | None) -> Manifest:
    """The checkpoint of a step, or the source with the ``adapter`` of that step, as a Hugging Face folder."""
    record = read_record(run.record)
    about: dict[str, object] = {"backend": run.backend, "recipe": run.recipe}
    about |= {key: record.get(key) for key in ("versions", "device", "degrees", "tokens_per_step", "lora")}
    source = read_manifest(run.source)
    origin: dict[str, object] = {
        "path": str(folder),
        "step": step,
        "run": str(run.record),
        "trained_from": source.fingerprint if source is not None else None,
        "training": about,
    }
    if source is not None and "hub" in source.source:
        origin["base_model"] = source.source["hub"]
    choices = replace(DEFAULTS, like=run.assets, dtype=dtype)
    if run.lora is not None:
        choices = replace(DEFAULTS, dtype=dtype, adapter=adapter)
        folder, origin["adapter"] = run.source, str(adapter)
    return carry_out(prepare(folder, place, "hf", choices, origin=origin), overwrite=True)
