"""Which packages of the Neuron stack are really here. Names alone do not tell: three distributions share them.

Source: AWS Neuron SDK 2.33 (native TorchNeuron 2.13 and later registers the device ``neuron``), torch-neuronx up to 2.9
(XLA), and the packages of the public index, which are placeholders of version 1.0 (torch-neuronx) that fail when they
are imported. Held against fakes of each kind in ``tests/training/test_neuron_probe.py``; never run against the real
packages.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from typing import Literal

TorchNeuronx = Literal["native", "legacy", "placeholder", "broken", "absent"]
Nki = Literal["real", "placeholder", "absent"]

ADVICE: dict[str, str] = {
    "legacy": "this torch-neuronx is the XLA one (2.9 or older); native TorchNeuron is 2.13 or newer, from AWS's index",
    "placeholder": "this torch-neuronx is the public index's placeholder; install it from AWS's index "
    "(https://pip.repos.neuron.amazonaws.com)",
    "broken": "torch-neuronx is installed and does not load; import torch_neuronx shows why (native needs nki)",
    "absent": "torch-neuronx is not installed; it comes from AWS's index, https://pip.repos.neuron.amazonaws.com",
}
"""What to do about each kind but the native one."""


def torch_neuronx() -> TorchNeuronx:
    """Which torch-neuronx is installed. Imports it, and torch; never raises."""
    if not _is_there("torch_neuronx"):
        return "absent"
    version = _version("torch-neuronx")
    if version == (1, 0):
        return "placeholder"
    try:
        import torch

        importlib.import_module("torch_neuronx")
    except Exception:  # whatever a package that cannot load raises
        return "broken"
    if hasattr(torch, "neuron") and (version is None or version >= (2, 10)):
        return "native"
    return "legacy" if _is_there("torch_xla") else "broken"


def nki() -> Nki:
    """Whether ``nki`` is the real one, which has a language and a simulator. Imports it; never raises."""
    if not _is_there("nki"):
        return "absent"
    try:
        importlib.import_module("nki.language")
    except Exception:
        return "placeholder"
    return "real"


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _version(distribution: str) -> tuple[int, int] | None:
    """Major and minor; ``None`` for what is imported from a source tree."""
    try:
        parts = importlib.metadata.version(distribution).split(".")
        return int(parts[0]), int(parts[1])
    except (importlib.metadata.PackageNotFoundError, ValueError, IndexError):
        return None
