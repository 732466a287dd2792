"""Fakes of every kind of Neuron package: each is told apart, and what is wrong is said with the next step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import environment

NATIVE = (
    "import torch, types\ntorch.neuron = types.SimpleNamespace(is_available=lambda: False, device_count=lambda: 0)\n"
)
KINDS = {
    "absent": {},
    "placeholder": {"torch_neuronx": ("1.0", "raise ImportError('install from the vendor')")},
    "legacy": {"torch_neuronx": ("2.8.0", ""), "torch_xla": ("2.8.0", "")},
    "broken": {"torch_neuronx": ("2.14.0", "import nki_that_is_not_there")},
    "native": {"torch_neuronx": ("2.14.0", NATIVE)},
}
PROBE = "from qwen3conv.training.neuron_probe import *; print(torch_neuronx(), nki())"


def fake(folder: Path, packages: dict[str, tuple[str, str]]) -> Path:
    """Packages with metadata, as pip would leave them."""
    for name, (version, code) in packages.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(code)
        metadata = folder / f"{name}-{version}.dist-info"
        metadata.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (metadata / "METADATA").write_text(text)
    folder.mkdir(exist_ok=True)
    return folder


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    variables = environment(PYTHONPATH=path)
    return subprocess.run([sys.executable, *arguments], env=variables, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_torch_neuronx_is_told_apart(kind: str, tmp_path: Path) -> None:
    ran = python(fake(tmp_path / "site", KINDS[kind]), "-c", PROBE)
    assert ran.stdout.split() == [kind, "absent"], ran.stderr


@pytest.mark.parametrize(("code", "kind"), [("", "real"), ("raise ImportError('a placeholder')", "placeholder")])
def test_nki_is_real_if_it_has_a_language(code: str, kind: str, tmp_path: Path) -> None:
    folder = fake(tmp_path / "site", {"nki": ("0.7", "")})
    (folder / "nki" / "language.py").write_text(code)
    assert python(folder, "-c", PROBE).stdout.split() == ["absent", kind]


@pytest.mark.parametrize("code", ["import os; os.abort()", "raise SystemExit(7)", "import time; time.sleep(60)"])
def test_a_package_that_ends_or_hangs_its_process_does_not_end_the_doctor(code: str, tmp_path: Path) -> None:
    folder = fake(tmp_path / "site", {"torch_neuronx": ("2.14.0", code)})
    ran = python(folder, "-m", "qwen3conv", "doctor", "--device", "neuron", "--timeout", "8", "--json")
    assert ran.returncode == 1
    first = json.loads(ran.stdout)["checks"][0]
    assert (first["name"], first["status"]) == ("device", "failed")
    assert "import torch" in first["advice"]


@pytest.mark.parametrize("kind", ["placeholder", "legacy", "broken"])
def test_doctor_and_train_say_what_is_wrong_with_it(kind: str, tmp_path: Path) -> None:
    from qwen3conv.training.neuron_probe import ADVICE

    folder = fake(tmp_path / "site", KINDS[kind])
    ran = python(folder, "-m", "qwen3conv", "doctor", "--device", "neuron", "--json")
    assert ran.returncode == 1, ran.stderr
    document = json.loads(ran.stdout)
    assert document["usable"] is False
    checks = {check["name"]: check for check in document["checks"]}
    assert next(check["name"] for check in document["checks"] if check["status"] == "failed") == "device"
    assert checks["device"]["advice"] == ADVICE[kind]
    assert checks["torch-neuronx"]["found"] == kind
    assert "collective" not in checks  # nothing is tried on a device that is not there
