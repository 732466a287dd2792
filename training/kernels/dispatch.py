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
from dataclasses import dataclass
from typing import Any

import torch

from .errors import KernelError


@dataclass(frozen=True, slots=True)
class Target:
    """A device that runs NKI kernels."""

    lnc: int
    """Physical cores per logical one."""

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
        return getattr(loaded, kernel)[self.lnc](*tensors, **constants)


def target_of(tensor: torch.Tensor) -> Target | None:
    """The kernels' target for ``tensor``; None where the reference computes."""
    if tensor.device.type != "neuron":
        return None
    return Target(int(os.environ.get("NEURON_LOGICAL_NC_CONFIG", "2")))
