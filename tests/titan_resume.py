"""torchtitan 0.3.0 resuming upgraded runs on the CPU: ``python -m tests.titan_resume JOBS.json``, see ``Resume``.

For each model one uninterrupted run of four steps that saves its state after two. For each job that state is renamed to
an older schema (``older_titan``), upgraded by the product, and resumed to the end. All in one launch and in forks, as
in ``titan_process``.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.older_titan import load_nested, older
from tests.real_checkpoints import launch, save_dcp
from tests.titan_process import build_trainer, end_trainer, free_ports, prepare_cpu

STEPS, SAVED = 4, 2


class Resume(NamedTuple):
    """One run that is resumed from an upgraded checkpoint."""

    model: str
    """Name of a model in ``models.VARIANTS``."""
    schema: str
    """Of the old checkpoint."""
    fused: bool = True
    """Whether the old optimizer has q, k and v as one."""
    fuse_qkv: bool = True
    """Whether the model that trains does."""
    change: str = ""
    """``forget``: zero moments, so that a wrong one would show. ``as it is``: no upgrade."""

    def __str__(self) -> str:
        words = (self.model, self.schema, "fused" if self.fused else "", "" if self.fuse_qkv else "apart", self.change)
        return "-".join(word.replace(" ", "-") for word in words if word)

    @property
    def run(self) -> str:
        """Name of the uninterrupted run of the same model."""
        return f"{self.model}{'' if self.fuse_qkv else '-apart'}"


def resume_all(base: Path, sources: Mapping[str, Path], jobs: Sequence[Resume]) -> None:
    """Run and resume; ``base/NAME`` then holds what the functions below read. ``sources``: HF folders by model."""
    base.mkdir()
    spec = [{**job._asdict(), "name": str(job), "run": job.run, "source": str(sources[job.model])} for job in jobs]
    launch("tests.titan_resume", base / "jobs.json", spec)


def go_on(base: Path, starts: Mapping[str, Sequence[Path]]) -> None:
    """Runs of torchtitan 0.3.0 by name: of an HF folder each, and from a checkpoint of step ``SAVED`` if one is given.

    The text is ``even_texts``, of which older releases make the same batches.
    """
    base.mkdir()
    spec = [
        {"name": name, "run": "", "source": str(source), "start": [*map(str, start)], "fuse_qkv": True, "even": True}
        for name, (source, *start) in starts.items()
    ]
    launch("tests.titan_resume", base / "jobs.json", spec)


def step_folder(base: Path, name: str, step: int) -> Path:
    """A run's checkpoint."""
    return base / name / "run" / "checkpoint" / f"step-{step}"


def losses(base: Path, name: str) -> dict[str, list[float]]:
    """Step -> loss and gradient norm of a run."""
    found: dict[str, list[float]] = json.loads((base / name / "losses.json").read_text())
    return found


def refusal(base: Path, name: str) -> str:
    """Why a run did not start."""
    return (base / name / "refusal.txt").read_text()


def _train(rank: int, job: Mapping[str, Any], rendezvous: str) -> None:
    found: dict[int, tuple[float, float]] = {}
    base = Path(job["base"])
    trainer = build_trainer(rank, job, rendezvous, initial_load_in_hf=True, last_save_model_only=False, interval=SAVED)
    log = trainer.metrics_processor.log

    def remember(step: int, loss: float, largest: float, norm: float, **more: Any) -> None:
        found[step] = (loss, norm)
        log(step, loss, largest, norm, **more)

    trainer.metrics_processor.log = remember
    try:
        trainer.train()
    except BaseException as error:  # torch's CheckpointException is no Exception
        if not job.get("change"):
            raise
        (base / "refusal.txt").write_text(str(error))
    (base / "losses.json").write_text(json.dumps(found))
    end_trainer(trainer)


def _upgrade(rank: int, job: Mapping[str, Any], start: Path) -> None:
    import torch

    from qwen3conv.converters.conversion import carry_out, prepare
    from qwen3conv.converters.policies import Choices

    config = json.loads((Path(job["source"]) / "config.json").read_text())
    state = older(load_nested(start), job["schema"], config, fused=job["fused"])
    if job["change"] == "forget":
        for name, value in state["optimizer"].items():
            if name.endswith(".exp_avg"):
                state["optimizer"][name] = torch.zeros_like(value)
    old = save_dcp(state, Path(job["base"]) / "old")
    step = Path(job["base"]) / "run" / "checkpoint" / f"step-{SAVED}"
    step.parent.mkdir(parents=True)
    if job["change"] == "as it is":
        shutil.copytree(old, step)
        return
    carry_out(prepare(old, step, "titan", Choices(optimizer="default" if job["fuse_qkv"] else "separate")))


def main(spec: Path) -> None:
    """Import torchtitan once, then do everything in forks."""
    prepare_cpu()
    import torch.multiprocessing
    import torchtitan.models.qwen3
    import torchtitan.trainer  # noqa: F401  (before the forks, once)

    fork = torch.multiprocessing.start_processes
    ports = free_ports()
    jobs = json.loads(spec.read_text())
    common = {"ranks": 1, "tensor": 1, "expert": 1, "steps": STEPS}
    for job in {job["run"]: job for job in jobs if job["run"]}.values():
        base = spec.parent / job["run"]
        base.mkdir()
        run = {**job, **common, "load_balance": True, "base": str(base), "change": ""}
        fork(_train, (run, next(ports)), nprocs=1, start_method="fork")
    for job in jobs:
        base = spec.parent / job["name"]
        base.mkdir()
        job |= {**common, "load_balance": bool(job["run"]), "base": str(base)}
        if job["run"]:
            fork(_upgrade, (job, step_folder(spec.parent, job["run"], SAVED)), nprocs=1, start_method="fork")
        elif job["start"]:
            shutil.copytree(job["start"][0], step_folder(spec.parent, job["name"], SAVED))
        fork(_train, (job, next(ports)), nprocs=1, start_method="fork")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
