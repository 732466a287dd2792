"""Who can compute the experts here: a Neuron device, the vendor's simulator, the NumPy emulation. Never the reference.

The device and the simulator were never tried with AWS Neuron's own packages.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from qwen3conv.training.devices import choose_device, require_packages
from qwen3conv.training.kernels.dispatch import Target, device_lnc, every_device_is
from qwen3conv.training.kernels.moe_experts import KernelError, moe_experts
from qwen3conv.training.neuron_probe import ADVICE, Nki, TorchNeuronx, nki, torch_neuronx

from .kernel_check import Inputs, Results, Subject

EMULATED = "This ran in NumPy: it shows that the kernels' arithmetic is right and nothing about hardware."


@contextmanager
def real_subject() -> Iterator[Subject]:
    """The operator on a Neuron device, else its kernels on the vendor's simulator of trn2.

    Raises:
        KernelError: there is neither, with what is missing. The reference is no substitute: it would agree with itself.
    """
    stack, package = torch_neuronx(), nki()
    if package != "real":
        raise KernelError(_missing(stack, package))
    version, lnc = f"nki {_version('nki')}", device_lnc()
    if stack == "native" and choose_device() == "neuron":
        where = f"neuron, torch-neuronx {_version('torch-neuronx')}, LNC {lnc}"
        yield Subject(where, version, lambda inputs: run(inputs, "neuron"), hardware=True)
        return
    # Without a target the simulator takes trn3, whose limits are wider.
    os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"] = "trn2"
    with every_device_is(Target(lnc, simulated=True)):
        yield Subject(f"nki.simulate, target trn2, LNC {lnc}; no Neuron device is here", version, run)


@contextmanager
def emulated_subject(lnc: int) -> Iterator[Subject]:
    """The kernels on this project's emulation of NKI."""
    require_packages("--emulate", "ml_dtypes")
    from qwen3conv.tools.nki_emulator import emulated_nki

    with emulated_nki(lnc=lnc), every_device_is(Target(lnc)):
        yield Subject(f"NumPy emulation of trn2, LNC {lnc}", "emulated, the subset of 0.6 and 0.7", run)


def run(inputs: Inputs, device: str = "cpu") -> Results:
    """``qwen3conv::moe_experts`` and, through autograd, its backward; the results on the CPU."""
    x, counts, gate, down, up, dy = (tensor.to(device) for tensor in inputs)
    leaves = [tensor.detach().requires_grad_() for tensor in (x, gate, down, up)]
    x, gate, down, up = leaves
    y = moe_experts(x, counts.to(torch.int32), gate, down, up)
    return Results(*(found.cpu() for found in (y.detach(), *torch.autograd.grad(y, leaves, dy))))


def _missing(stack: TorchNeuronx, package: Nki) -> str:
    native = "torch-neuronx is native TorchNeuron; neuron-ls shows whether the driver sees a device"
    what = "is not installed" if package == "absent" else "is the public index's placeholder"
    return "\n  ".join(
        (
            "no NKI kernel can run here; the PyTorch reference could, but it agrees with itself on any machine",
            ADVICE.get(stack, native),
            f"nki {what}; the real one comes with native TorchNeuron, from AWS's index",
            "--emulate runs the kernels in NumPy: that shows that their arithmetic is right and nothing about hardware",
        )
    )


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of a source tree"
