"""Where the experts are computed, and how an NKI kernel is called from torch: the one place to change either.

On a ``neuron`` device the operator runs NKI kernels, elsewhere the PyTorch reference. A kernel is called with the
device's tensors, ``kernel[lnc](...)``, as AWS Neuron 2.33's guide to native TorchNeuron shows; that call was never made
on hardware. It stands inside an opaque torch operator with a fake of its own. Should ``torch.compile`` with
``backend="neuron"`` not lower that, the documented alternative is ``torch_neuronx.nki_op`` around
``torch_neuronx.wrap_nki(kernel)[(lnc,)](...)``: then ``Target.launch`` is what changes.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .errors import KernelError


@dataclass(frozen=True, slots=True)
class Target:
    """What runs NKI kernels."""

    lnc: int
    """Physical cores per logical one."""
    simulated: bool = False
    """By ``nki.simulate``, on tensors of the CPU; otherwise on the device of the tensors."""

    def launch(self, module: str, kernel: str, *tensors: torch.Tensor, **constants: int) -> Any:
        """What ``kernel`` of ``module`` (in this package) returns; compiled once per shapes, dtypes and constants.

        Raises KernelError where there is no NKI, which only the first use of a kernel finds out.
        """
        try:
            loaded = importlib.import_module(f"{__package__}.{module}")
        except ImportError as error:
            raise KernelError(
                f"the NKI expert kernels need nki of AWS Neuron ({error}); install it from AWS's index "
                "(https://pip.repos.neuron.amazonaws.com), or train with torchtitan's own experts"
            ) from error
        launched = getattr(loaded, kernel)
        if self.lnc != 1:
            launched = launched[self.lnc]
        if self.simulated:
            launched = importlib.import_module("nki").simulate(launched)
        return launched(*tensors, **constants)


_everywhere: Target | None = None


def target_of(tensor: torch.Tensor) -> Target | None:
    """The kernels' target for ``tensor``; None where the reference computes."""
    if _everywhere is not None:
        return _everywhere
    if tensor.device.type != "neuron":
        return None
    return Target(device_lnc())


def device_lnc() -> int:
    """Physical cores per logical one of the Neuron runtime: NEURON_LOGICAL_NC_CONFIG, 2 unless set on trn2."""
    found = os.environ.get("NEURON_LOGICAL_NC_CONFIG", "2")
    if found not in ("1", "2"):
        raise KernelError(f"NEURON_LOGICAL_NC_CONFIG is {found!r} and must be 1 or 2")
    return int(found)


@contextmanager
def every_device_is(target: Target) -> Iterator[None]:
    """While inside, the operator runs its kernels on ``target`` wherever its tensors are: how they are tried on a CPU.

    Of the process, not of the thread: autograd may run the backward pass in another.
    """
    global _everywhere
    before, _everywhere = _everywhere, target
    try:
        yield
    finally:
        _everywhere = before
