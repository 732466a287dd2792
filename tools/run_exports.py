"""What comes out of a run: Hugging Face folders, adapters, on the way and at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from qwen3conv.converters.conversion import carry_out, prepare
from qwen3conv.converters.errors import SourceError
from qwen3conv.converters.manifest import Manifest, read_manifest
from qwen3conv.converters.policies import DEFAULTS
from qwen3conv.training.launch import Run, read_record

Announce = Callable[[str], None]
Exports = Literal["adapter", "merged", "none"]
"""Of a run with adapters: these alone, or merged into the source too. Of another one: ``merged`` is the model."""


def last_step(run: Run) -> tuple[int, Path]:
    """The last whole checkpoint.

    Raises:
        SourceError: there is none.
    """
    checkpoints = run.checkpoints()
    if not checkpoints:
        raise SourceError(f"{run.folder / 'checkpoint'} holds no whole checkpoint to export")
    return checkpoints[-1]


def export_on_the_way(run: Run, dtype: str | None, exports: Exports, announce: Announce) -> None:
    """``RUN/exports/step-N`` and ``adapter-N`` of whole checkpoints that are due and have none yet."""
    if run.export_every is None or exports == "none":
        return
    for step, folder in run.checkpoints():
        place, adapter = (run.folder / "exports" / f"{name}-{step}" for name in ("step", "adapter"))
        due = place if exports == "merged" else adapter
        if step % run.export_every or due.exists():
            continue
        place.parent.mkdir(exist_ok=True)
        if run.lora is not None:
            export_adapter_of(run, folder, adapter)
        if exports == "merged":
            export_step(run, step, folder, place, adapter, dtype)
        announce(f"exported step {step} to {due}")


def export_adapter_of(run: Run, step: Path, place: Path) -> None:
    """The adapter in the checkpoint ``step``, as PEFT loads it, to ``place``."""
    from qwen3conv.training.lora import export_adapter

    assert run.lora is not None
    export_adapter(step, place, rank=run.lora.rank, alpha=run.lora.alpha, targets=run.lora.targets)


def export_step(run: Run, step: int, folder: Path, place: Path, adapter: Path, dtype: str | None) -> Manifest:
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
