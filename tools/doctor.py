"""Can this machine train? Checks in the order in which one fault causes the next, so the first failure is the cause.

What can hang or crash runs in processes of its own.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qwen3conv.converters.placement import Mesh
from qwen3conv.training.neuron_probe import ADVICE

from .released import released
from .simulate import Job, held_by_rank

Status = Literal["ok", "warning", "failed"]

TESTED = {"torch": "2.13", "torchtitan": "0.3", "transformers": "5."}
"""Releases that the tests run with; what begins otherwise is warned of."""

NEEDED = ("torch", "torchtitan")

_SECONDS = 180
"""After which a process counts as hung. On Neuron the first step compiles, so it may want more: ``--timeout``."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line: what was looked at, what was found, and the next step if it is not fine."""

    name: str
    status: Status
    found: str
    advice: str = ""


def examine(device: str | None, model: str | None, folder: Path, timeout: float = _SECONDS) -> Iterator[Check]:
    """All checks, for ``device`` or the best that is there; disk and memory for training ``model`` in ``folder``."""
    check, found = _device(device, timeout)
    yield check
    yield from _packages(device, found)
    if check.status == "failed" or _missing("torchtitan"):
        return
    chosen = str(found["device"])
    yield _run("collective", ["collective", chosen], timeout, "two processes cannot talk: see the last line of it")
    yield from _run_step(chosen, timeout)
    yield from _resources(model, folder)


def _device(wanted: str | None, timeout: float) -> tuple[Check, dict[str, object]]:
    """The device, and which Neuron packages are here; imported in a process of their own, for some crash or hang."""
    if _missing("torch"):
        return Check("device", "failed", "torch is not installed", "pip install 'qwen3conv[train]'"), {}
    found, problem = _probe(["device", wanted or ""], timeout)
    if found is None:
        advice = "a package that torch loads ends or hangs the process: python -c 'import torch' shows which"
        return Check("device", "failed", problem, advice), {}
    if "error" in found:
        kind = str(found["torch_neuronx"])
        advice = ADVICE.get(kind, str(found["error"])) if wanted == "neuron" else str(found["error"])
        return Check("device", "failed", f"{wanted} cannot be used", advice), found
    chosen = str(found["device"])
    backend = {"cuda": "nccl", "cpu": "gloo"}.get(chosen, chosen)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    what = f"{cores} cores" if chosen == "cpu" else f"{found['count']} logical devices"
    return Check("device", "ok", f"{chosen}, {what}, process group {backend}"), found


def _packages(device: str | None, loaded: dict[str, object]) -> Iterator[Check]:
    version = platform.python_version()
    fine = sys.version_info >= (3, 12) or device != "neuron"
    yield Check(
        "python", "ok" if fine else "warning", version, "" if fine else "TorchNeuron needs Python 3.12 or newer"
    )
    for name, tested in TESTED.items():
        if _missing(name):
            status: Status = "failed" if name in NEEDED else "warning"
            yield Check(name, status, "not installed", "pip install 'qwen3conv[train]'")
            continue
        found = importlib.metadata.version(name)
        is_tested = found.startswith(tested)
        advice = "" if is_tested else f"the tests run with {tested.rstrip('.')}.x; others may work"
        if name == "torchtitan" and not is_tested:
            yield Check(name, "failed", found, "torchtitan 0.3.x is needed: pip install 'torchtitan>=0.3,<0.4'")
        else:
            yield Check(name, "ok" if is_tested else "warning", found, advice)
    kind = str(loaded.get("torch_neuronx", "not looked at"))
    wanted = device == "neuron"
    bad: Status = "failed" if wanted else "warning"
    status = "ok" if kind == "native" or (kind in ("absent", "not looked at") and not wanted) else bad
    yield Check("torch-neuronx", status, kind, "" if status == "ok" else ADVICE.get(kind, ""))
    package = str(loaded.get("nki", "not looked at"))
    advice = "nki comes from AWS's index; the public index has a placeholder" if package == "placeholder" else ""
    yield Check("nki", "ok" if package != "placeholder" else "warning", package, advice)


def _run(name: str, arguments: list[str], timeout: float, advice: str) -> Check:
    found, problem = _probe(arguments, timeout)
    return Check(name, "ok", str(found.get("found"))) if found is not None else Check(name, "failed", problem, advice)


def _run_step(device: str, timeout: float) -> Iterator[Check]:
    found, problem = _probe(["step", device], timeout)
    if found is None:
        yield Check("step", "failed", problem, "run again with --debug, or train a tiny model to see the whole error")
        return
    for name in ("step", "checkpoint"):
        text = str(found[name])
        fine = not text.startswith("failed")
        yield Check(
            name, "ok" if fine else "failed", text, "" if fine else "training would be wrong here; do not begin"
        )


def _probe(arguments: list[str], timeout: float) -> tuple[dict[str, object] | None, str]:
    """What a probe prints, or the last line of what it said instead."""
    with tempfile.TemporaryDirectory(prefix="qwen3conv-") as room:
        command = [sys.executable, "-m", "qwen3conv.tools.doctor_probes", *arguments, room]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            return None, f"no answer in {timeout:g} s"
    lines = ran.stdout.strip().splitlines()
    if ran.returncode == 0 and lines:
        content: dict[str, object] = json.loads(lines[-1])
        return content, ""
    said = [line for line in ran.stderr.strip().splitlines() if line.strip()]
    return None, said[-1] if said else f"ended with code {ran.returncode}"


def _resources(model: str | None, folder: Path) -> Iterator[Check]:
    free = shutil.disk_usage(folder).free
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if model is None:
        yield Check("disk", "ok", f"{_gigabytes(free)} free")
        yield Check("memory", "ok", _gigabytes(memory))
        return
    geometry, tied, top_k = released(model)
    held = held_by_rank(Job(geometry, tied, top_k, Mesh()), [0])[0]
    state = held.weights + held.optimizer
    status: Status = "ok" if free > 2 * state else "failed"
    advice = "a checkpoint with its optimizer and the next one beside it want that much; use another disk"
    text = f"{_gigabytes(free)} free, {_gigabytes(2 * state)} wanted for two checkpoints of {model}"
    yield Check("disk", status, text, "" if status == "ok" else advice)
    status = "ok" if memory > held.total else "warning"
    advice = "one process here cannot hold it: qwen3conv simulate --suggest lists degrees that fit"
    text = f"{_gigabytes(memory)}, {_gigabytes(held.total)} wanted to train {model} in one process"
    yield Check("memory", status, text, "" if status == "ok" else advice)


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.0f} GB"


def _missing(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return True
    return False
