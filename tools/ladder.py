"""One fixed training run, climbed one axis at a time: the first rung that computes something else names its axis.

Weights, data order, batch and sequence length are the same on every rung, so losses and gradient norms must be. Each
rung is a real ``torchrun`` of a few steps, stopped half way and gone on from its checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from qwen3conv.converters.config import Qwen3Config
from qwen3conv.converters.config_json import read_json_object
from qwen3conv.converters.conversion import carry_out, prepare
from qwen3conv.converters.errors import ConversionError, PolicyError, enumerate_problems
from qwen3conv.converters.placement import ONE_RANK, Mesh
from qwen3conv.training.launch import Run, read_record
from qwen3conv.training.run_checks import check_run
from qwen3conv.training.run_lock import lock_run

from .torchrun import launch

LADDER = "ladder.json"
_RUNG = "rung.json"

COMPILING_STEPS = 2
"""First steps of a process, which compile and fill caches: they count for no step time."""


@dataclass(frozen=True, slots=True)
class Rung:
    """What a rung adds to the run: ``axis`` says it in words."""

    name: str
    axis: str
    mesh: Mesh = ONE_RANK
    backend: str = "native"
    compile: str | None = None
    """Backend of ``torch.compile``."""

    def flags(self) -> tuple[str, ...]:
        """torchtitan's, beside the degrees."""
        return () if self.compile is None else ("--compile.enable", "--compile.backend", self.compile)


@dataclass(frozen=True, slots=True)
class Climbed:
    """What came of a rung."""

    rung: Rung
    status: str
    """``reference``, ``agrees``, ``parts``, ``failed`` or ``not tried``."""
    message: str = ""
    step: int | None = None
    """First step that leaves the tolerance."""
    loss_difference: float | None = None
    """Largest relative difference of a step's loss to the first rung's."""
    norm_difference: float | None = None
    """The same of the gradient norm."""
    step_seconds: float | None = None
    """Median, without the steps that compile."""
    steps: Mapping[str, Mapping[str, float]] | None = None

    def to_dict(self) -> dict[str, Any]:
        """For ``ladder.json``."""
        return asdict(self)


def usual_rungs(tp: int, fsdp: int, *, is_moe: bool, compile_backend: str) -> list[Rung]:
    """Eager on one rank, FSDP, TP, both, compiled, and for MoE our expert operator.

    The compiled rung has no TP: torch 2.13 does not compile torchtitan 0.3's tensor parallelism. ``--rung`` adds one.
    """
    both = Mesh(tp=tp, fsdp=fsdp)
    rungs = [
        Rung("eager", "one process, eager"),
        Rung("fsdp", "FSDP", Mesh(fsdp=fsdp)),
        Rung("tp", "tensor parallelism", Mesh(tp=tp)),
        Rung("tp-fsdp", "TP x FSDP together", both),
        Rung("compile", f"torch.compile ({compile_backend})", Mesh(fsdp=fsdp), compile=compile_backend),
    ]
    return [*rungs, Rung("nki", "experts by qwen3conv::moe_experts", both, "nki-moe")] if is_moe else rungs


def parse_rung(text: str) -> Rung:
    """``NAME:tp=2,fsdp=2,ep=2,backend=transformers,compile=inductor``: a rung of one's own.

    Raises:
        PolicyError: it is not written so.
    """
    name, _, rest = text.partition(":")
    given = dict(part.partition("=")[::2] for part in rest.split(",") if part)
    degrees = {key: given.pop(key) for key in ("tp", "fsdp", "ep") if key in given}
    backend, compiler = given.pop("backend", "native"), given.pop("compile", None)
    if not name or given or not all(value.isdigit() and int(value) for value in degrees.values()):
        raise PolicyError(f"--rung {text}: expected NAME:tp=2,fsdp=2,ep=2,backend=native,compile=inductor")
    mesh = Mesh(**{key: int(value) for key, value in degrees.items()})
    return Rung(name, rest or "one process, eager", mesh, backend, compiler)


def read_rungs(texts: Sequence[str]) -> list[Rung]:
    """Rungs of one's own; ``@FILE`` stands for those of a recipe, a file with one on each line (and ``#`` comments).

    Raises:
        PolicyError: one is not written so, or has the name of another.
    """
    found: list[Rung] = []
    for text in texts:
        if not text.startswith("@"):
            found.append(parse_rung(text))
            continue
        try:
            lines = Path(text[1:]).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise PolicyError(f"--rung {text}: the file cannot be read ({error})") from None
        found += [parse_rung(line.strip()) for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return found


def check_names(rungs: Sequence[Rung]) -> None:
    """Refuse two rungs of one name, which would share a folder, and names that are no folder's.

    Raises:
        PolicyError: with the name.
    """
    names = [rung.name for rung in rungs]
    for name in names:
        if names.count(name) > 1:
            raise PolicyError(f"two rungs are called {name}; each has a folder of its name: choose another")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise PolicyError(f"a rung called {name!r} would have no folder; use letters, digits, dots and dashes")


def check_resumed(folder: Path, settings: Mapping[str, Any], rungs: Sequence[Rung]) -> None:
    """Refuse to go on in the folder of another ladder: rungs of two are not compared.

    Raises:
        PolicyError: with what differs.
    """
    problems = []
    before = read_json_object(folder / LADDER)[0] if (folder / LADDER).is_file() else {}
    for key, value in settings.items():
        if key != "tolerance" and key in before and before[key] != value:
            problems.append(f"{key} was {before[key]}, and is {value}")
    for rung in rungs:
        place = folder / "rungs" / rung.name / _RUNG
        if place.is_file() and read_json_object(place)[0] != asdict(rung):
            problems.append(f"rung {rung.name} was another one")
    if problems:
        raise PolicyError(enumerate_problems(f"{folder} is another ladder; name another --output:", problems))


def run_of(base: Run, rung: Rung, folder: Path) -> Run:
    """``base`` on a rung, in a folder of its own. Tokens per step stay: ranks share the batch."""
    assert base.batch_size is not None
    each = base.batch_size // rung.mesh.fsdp
    extra = (*base.extra, "--lr_scheduler.total_steps", str(base.steps), *rung.flags())
    return replace(base, folder=folder, backend=rung.backend, mesh=rung.mesh, local_batch_size=each, extra=extra)


def check_rungs(base: Run, rungs: Sequence[Rung], config: Qwen3Config) -> None:
    """Refuse rungs that cannot run, before the first does.

    Raises:
        PolicyError: with the rung's name.
    """
    assert base.batch_size is not None
    for rung in rungs:
        if base.batch_size % rung.mesh.fsdp:
            raise PolicyError(
                f"rung {rung.name}: a batch of {base.batch_size} does not divide among {rung.mesh.fsdp} FSDP ranks; "
                "give a --batch-size that does, so that tokens per step stay the same"
            )
        try:
            check_run(run_of(base, rung, base.folder), config)
        except PolicyError as error:
            raise PolicyError(f"rung {rung.name}: {error}") from None


def climb(
    base: Run,
    rungs: Sequence[Rung],
    *,
    tolerance: float,
    announce: Callable[[Rung], None] = lambda rung: None,
) -> Iterator[Climbed]:
    """Run the rungs in order, each from ``base.source``; after the first that fails or parts, the rest is not tried.

    A rung that an earlier try has run to its end is not run again.
    """
    reference: Mapping[str, Mapping[str, float]] | None = None
    stopped = False
    for rung in rungs:
        if stopped:
            yield Climbed(rung, "not tried")
            continue
        announce(rung)
        folder = base.folder / "rungs" / rung.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _RUNG).write_text(json.dumps(asdict(rung)) + "\n", encoding="utf-8")
        try:
            steps = _steps_of(run_of(base, rung, folder), base.source)
        except ConversionError as error:
            stopped = True
            yield Climbed(rung, "failed", f"{error}\nIts log is {folder / 'log'}")
            continue
        found = compare(rung, steps, reference, tolerance)
        reference = steps if reference is None else reference
        stopped = found.status == "parts"
        yield found


def compare(
    rung: Rung,
    steps: Mapping[str, Mapping[str, float]],
    reference: Mapping[str, Mapping[str, float]] | None,
    tolerance: float,
) -> Climbed:
    """``steps`` beside those of the first rung; a NaN agrees with nothing."""
    seconds = [found["seconds"] for found in list(steps.values())[COMPILING_STEPS:] if "seconds" in found]
    median = statistics.median(seconds) if seconds else None
    if reference is None:
        return Climbed(rung, "reference", step_seconds=median, steps=steps)
    worst = dict.fromkeys(("loss", "grad_norm"), 0.0)
    parted: int | None = None
    for number, expected in reference.items():
        for key in worst:
            apart = abs(steps[number][key] - expected[key]) / max(abs(expected[key]), 1e-12)
            worst[key] = apart if not apart <= worst[key] else worst[key]
            if parted is None and not apart <= tolerance:
                parted = int(number)
    status = "agrees" if parted is None else "parts"
    message = "" if parted is None else f"{rung.axis}: computes something else from step {parted} on"
    return Climbed(rung, status, message, parted, worst["loss"], worst["grad_norm"], median, steps)


def write_ladder(path: Path, settings: Mapping[str, Any], climbed: Sequence[Climbed]) -> None:
    """``ladder.json``: the settings and every rung."""
    content = {**settings, "rungs": [one.to_dict() for one in climbed]}
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _steps_of(run: Run, source: Path) -> Mapping[str, Mapping[str, float]]:
    """Steps of a rung: the first half, saved, and the rest from there."""
    assert run.steps is not None
    run.folder.mkdir(parents=True, exist_ok=True)
    if not run.source.exists():
        place = _source_for(run, source)
        run.source.symlink_to(os.path.relpath(place, run.folder), target_is_directory=True)
    for steps in (run.steps // 2, run.steps):
        done = _recorded(run)
        if len(done) >= steps and any(step >= steps for step, _ in run.checkpoints()):
            continue
        with lock_run(run.folder, "qwen3conv ladder") as lock, (run.folder / "log").open("ab") as log:
            launch(replace(run, steps=steps, save_every=run.steps // 2), lock, log=log)
    done = _recorded(run)
    if len(done) != run.steps:
        raise ConversionError(f"{len(done)} of {run.steps} steps are recorded in {run.record}")
    return done


def _source_for(run: Run, source: Path) -> Path:
    """The weights in ``source``, torchtitan's own, in the format that the rung's backend loads, beside it."""
    if run.source_format == "titan":
        return source
    place = source.with_name(f"source-{run.source_format}")
    if not place.is_dir():
        carry_out(prepare(source, place, run.source_format))
    return place


def _recorded(run: Run) -> Mapping[str, Mapping[str, float]]:
    if not run.record.is_file():
        return {}
    steps: Any = read_record(run.record)["steps"]
    found: Mapping[str, Mapping[str, float]] = steps
    return found
