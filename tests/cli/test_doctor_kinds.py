"""``doctor`` with faked installations of every kind, a faked torch among them: what each line says, in which order."""

from __future__ import annotations

import importlib.metadata
import json
import time
import tomllib
from pathlib import Path

import pytest

from qwen3conv.tools import doctor
from qwen3conv.tools.doctor import SUPPORT, Check
from qwen3conv.training.neuron_probe import ADVICE
from tests.training.test_neuron_probe import KINDS, fake, python

ROOT = Path(__file__).parents[2]

Packages = dict[str, tuple[str, str]]

TORCH = """
import types
cuda = types.SimpleNamespace(is_available=lambda: False, device_count=lambda: 0)
def get_device_module(name): return globals()[name]
"""
DEVICES = (
    "import torch, types\ntorch.neuron = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 64)\n"
)
SPAWN = """
import multiprocessing
def spawn(run, args, nprocs):
    ranks = [multiprocessing.get_context("fork").Process(target=run, args=(rank, *args)) for rank in range(nprocs)]
    [one.start() for one in ranks]
    [one.join() for one in ranks]
    assert not any(one.exitcode for one in ranks), "a rank failed"
"""
HANGING = """
import os, pathlib, time
def init_process_group(*args, **options): pass
def all_reduce(tensor):
    (pathlib.Path(os.environ["PIDS"]) / str(os.getpid())).touch()
    time.sleep(600)
"""
MEMORY = "def full(shape, value, device): return [value]\n"


def installed(
    folder: Path, *, torch: str = "2.13.0", titan: str = "0.3.0", hf: str = "5.24.0", more: Packages | None = None
) -> Path:
    """A site folder with a faked torch and metadata of the rest; ``more`` are further packages."""
    packages = {"torch": (torch, TORCH + MEMORY), "torchtitan": (titan, ""), "transformers": (hf, ""), **(more or {})}
    fake(folder, packages)
    (folder / "torch" / "multiprocessing.py").write_text(SPAWN)
    (folder / "torch" / "distributed.py").write_text(HANGING)
    return folder


def examined(site: Path, *words: str, code: int = 1) -> list[Check]:
    ran = python(site, "-m", "qwen3conv", "doctor", "--timeout", "20", "--json", *words)
    assert ran.returncode == code, ran.stderr
    assert "Traceback" not in ran.stderr
    document = json.loads(ran.stdout)
    assert document["usable"] is (code == 0)
    return [Check(**check) for check in document["checks"]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_wanted_neuron_device_is_refused_with_what_is_installed_instead(kind: str, tmp_path: Path) -> None:
    checks = examined(installed(tmp_path / "site", more=KINDS[kind]), "--device", "neuron")
    first = checks[0]
    assert (first.name, first.status) == ("device", "failed")
    by_name = {check.name: check for check in checks}
    assert by_name["torch-neuronx"].found == kind
    assert by_name["torch-neuronx"].status == ("ok" if kind == "native" else "failed")
    assert first.advice.startswith(("native TorchNeuron is here" if kind == "native" else ADVICE[kind])[:40]) or (
        "reports no device" in first.advice
    )
    assert list(by_name) == ["device", "python", "torch", "torchtitan", "transformers", "torch-neuronx", "nki"]
    assert all(check.advice for check in checks if check.status != "ok")


@pytest.mark.parametrize("nki", ["real", "placeholder", "absent"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", ["neuron", "cpu"])
def test_lines_of_the_neuron_packages(kind: str, nki: str, device: str) -> None:
    lines = {check.name: check for check in doctor._packages(device, {"torch_neuronx": kind, "nki": nki})}
    fine = kind == "native" or (device == "cpu" and kind == "absent")
    assert lines["torch-neuronx"].status == ("ok" if fine else "failed" if device == "neuron" else "warning")
    assert lines["torch-neuronx"].advice == ("" if fine else ADVICE[kind])
    fine = nki == "real" or (device == "cpu" and nki == "absent")
    assert lines["nki"].status == ("ok" if fine else "warning")
    assert ("AWS" in lines["nki"].advice) is not fine


@pytest.mark.parametrize(
    ("name", "version", "status", "said"),
    [
        ("torch", "2.9.1", "failed", "pip install 'torch>=2.13,<3'"),
        ("torch", "2.13.0+cpu", "ok", ""),
        ("torch", "2.14.1", "warning", "the tests run with 2.13"),
        ("torch", "3.0.0", "failed", "newer than what works here"),
        ("torchtitan", "0.2.2", "failed", "pip install 'torchtitan>=0.3,<0.4'"),
        ("torchtitan", "0.4.0", "failed", "newer than what works here"),
        ("transformers", "4.57.6", "warning", "pip install 'transformers>=5.20,<6'"),
        ("transformers", "5.30.0", "warning", "the tests run with 5.24"),
        ("transformers", "nightly", "warning", "older than what works here"),
    ],
)
def test_versions_are_held_against_the_support_matrix(
    name: str, version: str, status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    check = doctor._package(name, SUPPORT[name])
    assert (check.status, check.found) == (status, version)
    assert said in check.advice


def test_the_support_matrix_is_that_of_the_package() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["train"]
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    for name, support in SUPPORT.items():
        (range_,) = (one for one in extra if one.startswith(f"{name}>"))
        assert support.wanted(name).strip("'") == range_.replace(".0,", ",")
        assert any(line.startswith(f"{name}=={support.tested}") for line in pinned), name


def test_an_old_torchtitan_is_named_before_what_it_breaks(tmp_path: Path) -> None:
    site = installed(tmp_path / "site", titan="0.2.2", hf="4.57.6")
    (site / "torch" / "distributed.py").unlink()
    checks = examined(site, "--device", "cpu")
    failed = [check.name for check in checks if check.status == "failed"]
    assert failed[0] == "torchtitan"
    assert failed[1:] == ["collective", "step"]
    assert all(check.advice for check in checks if check.status != "ok")


def test_without_torch_nothing_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor._missing
    monkeypatch.setattr(doctor, "_missing", lambda name: name == "torch" or real(name))
    checks = list(doctor.examine(None, None, tmp_path))
    assert [checks[0].name, checks[0].found] == ["device", "torch is not installed"]
    assert "collective" not in [check.name for check in checks]


def test_a_native_device_is_used_and_a_collective_that_hangs_is_cut_with_all_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    monkeypatch.setenv("PIDS", str(pids))
    site = installed(tmp_path / "site", more={"torch_neuronx": ("2.14.0", DEVICES)})
    begun = time.monotonic()
    checks = {check.name: check for check in examined(site, "--device", "neuron", "--timeout", "3")}
    assert time.monotonic() - begun < 30
    assert checks["device"].status == "ok"
    assert checks["device"].found == "neuron, 64 logical devices, process group neuron"
    assert checks["torch-neuronx"].found == "native"
    assert (checks["collective"].status, checks["collective"].found) == ("failed", "no answer in 3 s")
    assert list(checks).index("collective") < list(checks).index("step")
    hung = [int(path.name) for path in pids.iterdir()]
    assert len(hung) == 2
    deadline = time.monotonic() + 5
    while any(map(is_alive, hung)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, hung))


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
