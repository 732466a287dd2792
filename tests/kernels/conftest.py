"""Which NKI runs the kernels of these tests: the emulator always, the real simulator and a device where they are.

Only the emulator was ever run here. The simulator (``nki.simulate``, target trn2) and the device were not: those two
branches are written from AWS Neuron's documentation (2.32 and 2.33). Loaded without torch too, hence the lazy imports.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from qwen3conv.training import neuron_probe

if TYPE_CHECKING:
    import torch

    from qwen3conv.tools.nki_emulator import Emulation


def runners() -> list[str]:
    """Where kernels can run on this machine."""
    found = ["emulator"]
    if neuron_probe.nki() == "real":
        from qwen3conv.training.devices import choose_device

        found.append("simulator")
        if choose_device() == "neuron":
            found.append("device")
    return found


@dataclass(frozen=True)
class NkiRunner:
    """Loads modules that hold kernels, and launches those on NumPy arrays."""

    where: str
    emulation: Emulation | None

    def load(self, module: str) -> ModuleType:
        """The module, imported with the ``nki`` of this runner."""
        return importlib.import_module(module)

    def run(self, kernel: Any, *args: Any, lnc: int = 1, **kwargs: Any) -> Any:
        """What the kernel returns for NumPy ``args``, as NumPy; skips the test where the device is of another LNC."""
        launched = kernel if lnc == 1 else kernel[lnc]
        if self.where == "emulator":
            return launched(*args, **kwargs)
        if self.where == "simulator":
            return importlib.import_module("nki").simulate(launched)(*args, **kwargs)
        from qwen3conv.training.kernels import dispatch

        if lnc != dispatch.device_lnc():
            pytest.skip(f"the device runs LNC {dispatch.device_lnc()}, this test is of LNC {lnc}")
        outputs = launched(*(to_device(arg) if isinstance(arg, np.ndarray) else arg for arg in args), **kwargs)
        return tuple(map(from_device, outputs)) if isinstance(outputs, tuple | list) else from_device(outputs)


@pytest.fixture(params=runners())
def nki_runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[NkiRunner]:
    """Every kernel test runs once for each of ``runners()``."""
    if request.param == "emulator":
        from qwen3conv.tools.nki_emulator import emulated_nki

        with emulated_nki() as emulation:
            yield NkiRunner("emulator", emulation)
        return
    # Without a target the simulator takes trn3, whose limits are wider.
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    yield NkiRunner(request.param, None)


OnKernels = Callable[[int], list[str]]


@pytest.fixture
def on_kernels(nki_runner: NkiRunner, monkeypatch: pytest.MonkeyPatch) -> Iterator[OnKernels]:
    """Call it with an LNC: from there on ``qwen3conv::moe_experts`` runs kernels on tensors of the CPU.

    Gives the list of kernels launched since.
    """
    from qwen3conv.training.kernels import dispatch

    if nki_runner.where == "device":
        pytest.skip("tensors of the CPU: see the simulator's run")
    launches: list[str] = []
    launch = dispatch.Target.launch

    def noted(self: dispatch.Target, module: str, kernel: str, *tensors: torch.Tensor, **constants: int) -> Any:
        launches.append(kernel)
        return launch(self, module, kernel, *tensors, **constants)

    monkeypatch.setattr(dispatch.Target, "launch", noted)
    with ExitStack() as stack:

        def choose(lnc: int) -> list[str]:
            stack.enter_context(dispatch.every_device_is(dispatch.Target(lnc, simulated=True)))
            return launches

        yield choose


def to_device(array: np.ndarray) -> torch.Tensor:
    import ml_dtypes
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to("neuron")
    return torch.from_numpy(array).to("neuron")


def from_device(tensor: torch.Tensor) -> np.ndarray:
    return from_host(tensor.cpu())


def from_host(tensor: torch.Tensor) -> np.ndarray:
    import ml_dtypes
    import torch

    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
