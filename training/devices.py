"""The device that torchtitan computes on, settled from outside before torchtitan is imported.

torchtitan 0.3.0 picks its device at import time (``torchtitan/tools/utils.py``, ``get_device_info``) and takes a
machine without an accelerator for a CUDA machine; its other modules copy the choice by value. ``prepare_torchtitan``
makes the choice first. None of torchtitan's files are edited.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
import types
from typing import Any

import torch

from qwen3conv.converters.errors import ConversionError

from .neuron_probe import ADVICE, torch_neuronx

_TRAIN_EXTRA = "pip install 'qwen3conv[train]'"
_NO_DEVICE = "native TorchNeuron is here and reports no device: see neuron-ls"
_TRITON_KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"
"""The one module through which ``import torchtitan.models`` needs triton; used by one expert-parallel backend only."""


class MissingPackageError(ConversionError):
    """A package or a device that the task needs is not there: install what the message names."""


def require_packages(purpose: str, *packages: str) -> None:
    """Return when every one of ``packages`` can be imported; else raise ``MissingPackageError`` naming the extra."""
    absent = [name for name in packages if name not in sys.modules and importlib.util.find_spec(name) is None]
    if absent:
        raise MissingPackageError(f"{purpose} needs {' and '.join(absent)}, not installed here: {_TRAIN_EXTRA}")


def choose_device(wanted: str | None = None) -> str:
    """``wanted`` if it can be used here; without one the best of ``"neuron"``, ``"cuda"`` and ``"cpu"``.

    Raises ``MissingPackageError`` when ``wanted`` is not usable. ``"neuron"`` counts only with native TorchNeuron: the
    legacy XLA package of the same name has no ``torch.neuron``. Whoever has that one means Trainium: without ``wanted``
    it is refused, rather than taken for a CPU.
    """
    usable = [name for name in ("neuron", "cuda") if _is_usable(name)]
    if wanted is None:
        if not usable and torch_neuronx() == "legacy":
            raise MissingPackageError(f"{ADVICE['legacy']}; or give --device cpu")
        return (*usable, "cpu")[0]
    if wanted == "cpu" or wanted in usable or (wanted not in ("neuron", "cuda") and _is_usable(wanted)):
        return wanted
    advice = "choose one of these, or install the PyTorch build for that device"
    if wanted == "neuron":
        advice = ADVICE.get(torch_neuronx(), _NO_DEVICE)
    raise MissingPackageError(
        f"device {wanted!r} cannot be used here (usable: {', '.join((*usable, 'cpu'))}); {advice}"
    )


def why_no_neuron(wanted: str | None, chosen: str) -> str:
    """What to warn of where nobody asked for the CPU and it was chosen beside a torch-neuronx; else nothing."""
    if wanted is not None or chosen != "cpu" or (kind := torch_neuronx()) == "absent":
        return ""
    return f"running on the CPU, which --device cpu asks for without this warning: {ADVICE.get(kind, _NO_DEVICE)}"


def prepare_torchtitan(device: str | None = None) -> str:
    """Make torchtitan 0.3.x importable and point it at ``choose_device(device)``; returns the device type.

    Call it before importing any other part of torchtitan. It may be called again: modules that already copied an
    earlier choice are corrected. On the CPU torchtitan gets a device module that answers its questions about memory and
    indices; a torch without ``torch.distributed.set_timeout`` (2.13 and older) gets the function of that meaning; where
    triton cannot be had (macOS) the only kernel module that needs it is replaced by one that says so when used.

    Raises ``MissingPackageError`` when torchtitan is absent or of another minor version than 0.3.
    """
    require_packages("torchtitan's native model", "torchtitan")
    try:
        version = importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    if not version.startswith("0.3."):
        raise MissingPackageError(f"torchtitan 0.3.x is needed, {version} is installed: {_TRAIN_EXTRA}")
    chosen = choose_device(device)
    _add_set_timeout()
    _replace_triton_kernels()

    from torchtitan.tools import utils

    if utils.device_type == chosen:
        return chosen
    stale = (utils.device_type, utils.device_module)
    fresh = (chosen, _cpu_device_module() if chosen == "cpu" else torch.get_device_module(chosen))
    for name, module in list(sys.modules.items()):
        if name == "torchtitan" or name.startswith("torchtitan."):
            for attribute, old, new in zip(("device_type", "device_module"), stale, fresh, strict=True):
                if vars(module).get(attribute) is old:
                    setattr(module, attribute, new)
    return chosen


def _is_usable(device: str) -> bool:
    """Whether torch has a backend module ``torch.<device>`` that reports at least one device."""
    module = getattr(torch, device, None)
    try:
        return module is not None and bool(module.is_available()) and int(module.device_count()) > 0
    except (AttributeError, RuntimeError):
        return False


def _add_set_timeout() -> None:
    """torchtitan 0.3.0 calls ``set_timeout`` after the first step; torch 2.13 has it under a private name only."""
    import torch.distributed as dist

    if dist.is_available() and not hasattr(dist, "set_timeout"):
        from torch.distributed.distributed_c10d import _set_pg_timeout

        dist.set_timeout = _set_pg_timeout  # type: ignore[attr-defined]


def _replace_triton_kernels() -> None:
    if _TRITON_KERNELS in sys.modules or importlib.util.find_spec("triton") is not None:
        return

    def refuse(*_: object, **__: object) -> None:
        raise MissingPackageError("moe_comm_backend='minimal_async_ep' needs triton, which is not installed here")

    def attribute(name: str) -> object:
        if name.startswith("__"):  # what the import system and inspect ask every module for
            raise AttributeError(name)
        return refuse

    kernels: Any = types.ModuleType(_TRITON_KERNELS)
    kernels.__getattr__ = attribute
    sys.modules[_TRITON_KERNELS] = kernels


def _cpu_device_module() -> types.ModuleType:
    """``torch.cpu`` and what else torchtitan asks of a device module (``components/metrics.py``, ``trainer.py``).

    Every local rank uses ``cpu:0``. Memory is the process's peak resident set, in bytes.
    """
    module: Any = types.ModuleType("qwen3conv.training.cpu_device")
    module.__getattr__ = lambda name: getattr(torch.cpu, name)
    module.current_device = lambda: 0
    module.device_count = lambda: 1
    module.set_device = lambda device: None
    module.get_device_name = lambda device=None: "cpu"
    module.get_device_properties = lambda device=None: types.SimpleNamespace(
        name="cpu", total_memory=_physical_memory()
    )
    module.empty_cache = lambda: None
    module.reset_peak_memory_stats = lambda device=None: None
    module.memory_stats = lambda device=None: {
        "active_bytes.all.peak": _peak_resident_bytes(),
        "reserved_bytes.all.peak": _peak_resident_bytes(),
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }
    assert isinstance(module, types.ModuleType)
    return module


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _peak_resident_bytes() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS reports bytes, Linux KiB
