"""Can this machine train? Checks in the order in which one fault causes the next, so the first failure is the cause.

What can hang or crash runs in processes of its own.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from qwen3conv.converters.placement import Mesh
from qwen3conv.training.neuron_probe import ADVICE

from .released import released
from .simulate import Job, held_by_rank

Status = Literal["ok", "warning", "failed"]


class Support(NamedTuple):
    """Releases of a package: from ``lowest`` to below ``end`` should work, what begins with ``tested`` was tested."""

    lowest: tuple[int, int]
    end: tuple[int, int]
    tested: str
    is_needed: bool = True
    """Whether nothing trains without it; transformers is for its own backend, ``parity`` and tokenizers."""

    def wanted(self, name: str) -> str:
        """As pip takes it."""
        low, end = (".".join(map(str, one)) for one in (self.lowest, self.end))
        return f"'{name}>={low},<{end.removesuffix('.0')}'"


SUPPORT = {
    "torch": Support((2, 13), (3, 0), "2.13."),
    "torchtitan": Support((0, 3), (0, 4), "0.3."),
    "transformers": Support((5, 20), (6, 0), "5.24.", is_needed=False),
}
"""The support matrix: the ranges of ``[train]`` in pyproject.toml, and what constraints.txt has."""

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
    whole = f"python -m qwen3conv.tools.doctor_probes collective {chosen} NEW_FOLDER shows the whole error"
    yield _run("collective", ["collective", chosen], timeout, f"two processes cannot talk; {whole}")
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
    yield _python(device)
    for name, support in SUPPORT.items():
        yield _package(name, support)
    is_neuron = device == "neuron"
    kind = str(loaded.get("torch_neuronx", "not looked at"))
    bad: Status = "failed" if is_neuron else "warning"
    status = "ok" if kind == "native" or (kind in ("absent", "not looked at") and not is_neuron) else bad
    yield Check("torch-neuronx", status, kind, "" if status == "ok" else ADVICE.get(kind, ADVICE["absent"]))
    package = str(loaded.get("nki", "not looked at"))
    advice = {
        "placeholder": "this nki is the public index's placeholder; install it from AWS's index",
        "absent": "native torch-neuronx and the NKI operator need nki, from AWS's index" if is_neuron else "",
    }.get(package, "")
    yield Check("nki", "warning" if advice else "ok", package, advice)


def _python(device: str | None) -> Check:
    version = platform.python_version()
    if sys.version_info < (3, 12) and device == "neuron":
        return Check("python", "warning", version, "TorchNeuron needs Python 3.12 or newer: make an environment of it")
    if sys.version_info >= (3, 14):
        return Check(
            "python", "warning", version, "the tests run with 3.11 to 3.13; if something fails, use one of them"
        )
    return Check("python", "ok", version)


def _package(name: str, support: Support) -> Check:
    bad: Status = "failed" if support.is_needed else "warning"
    if _missing(name):
        return Check(name, bad, "not installed", "pip install 'qwen3conv[train]'")
    found = importlib.metadata.version(name)
    numbers = re.match(r"([0-9]+)\.([0-9]+)", found)
    release = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if not support.lowest <= release < support.end:
        age = "older" if release < support.lowest else "newer"
        return Check(name, bad, found, f"{age} than what works here: pip install {support.wanted(name)}")
    if not found.startswith(support.tested):
        tested = support.tested.rstrip(".")
        return Check(
            name, "warning", found, f"the tests run with {tested}; if something fails: pip install {name}~={tested}.0"
        )
    return Check(name, "ok", found)


def _run(name: str, arguments: list[str], timeout: float, advice: str) -> Check:
    found, problem = _probe(arguments, timeout)
    return Check(name, "ok", str(found.get("found"))) if found is not None else Check(name, "failed", problem, advice)


def _run_step(device: str, timeout: float) -> Iterator[Check]:
    found, problem = _probe(["step", device], timeout)
    if found is None:
        whole = f"python -m qwen3conv.tools.doctor_probes step {device} NEW_FOLDER"
        yield Check("step", "failed", problem, f"{whole} shows the whole error")
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
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return None, f"no answer in {timeout:g} s"
        finally:
            with suppress(ProcessLookupError):  # its session: what it started, too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
    lines = out.strip().splitlines()
    if process.returncode == 0 and lines:
        content: dict[str, object] = json.loads(lines[-1])
        return content, ""
    said = [line for line in err.strip().splitlines() if line.strip()]
    return None, said[-1] if said else f"ended with code {process.returncode}"


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
