"""Who can compute the experts here: the device, the vendor's simulator, the NumPy emulation. Never the reference."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

import torch

from qwen3conv.training.devices import choose_device
from qwen3conv.training.kernels.moe_experts import KernelError, moe_experts
from qwen3conv.training.neuron_probe import ADVICE, nki, torch_neuronx

from .kernel_check import Compute, Inputs, Results, Subject

if TYPE_CHECKING:
    from qwen3conv.training.neuron_probe import Nki, TorchNeuronx


def device_subject() -> Subject:
    """The operator on a Neuron device.

    Raises:
        KernelError: there is none, with what is missing. The reference is no substitute: it would agree with itself.
    """
    stack, package = torch_neuronx(), nki()
    if stack != "native" or package != "real" or choose_device() != "neuron":
        raise KernelError(_missing(stack, package))
    return Subject(f"neuron, torch-neuronx {_version('torch-neuronx')}", f"nki {_version('nki')}", operator("neuron"))


def operator(device: str) -> Compute:
    """``qwen3conv::moe_experts`` and its backward on ``device``, through autograd."""

    def compute(inputs: Inputs) -> Results:
        x, counts, gate, down, up, dy = (tensor.to(device) for tensor in inputs)
        leaves = [tensor.requires_grad_() for tensor in (x, gate, down, up)]
        y = moe_experts(x, counts, gate, down, up)
        return Results(*(found.cpu() for found in (y.detach(), *torch.autograd.grad(y, leaves, dy))))

    return compute


def _missing(stack: TorchNeuronx, package: Nki) -> str:
    lines = [
        "no NKI kernel can run here; only the PyTorch reference could, and it agrees with itself on any machine",
        f"torch-neuronx: {ADVICE.get(stack, 'native, and it reports no Neuron device; neuron-ls shows what the driver sees')}",
    ]
    if package == "absent":
        lines.append("nki: not installed; it comes with native torch-neuronx, from AWS's index")
    elif package == "placeholder":
        lines.append("nki: this is the public index's placeholder; the real one comes from AWS's index")
    else:
        lines.append(f"nki: {_version('nki')} is here")
    lines.append(
        "--emulate runs the kernels in NumPy, which shows that their arithmetic is right and nothing about hardware"
    )
    return "\n  ".join(lines)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of a source tree"
