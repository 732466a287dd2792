"""The experts' operator against float64: output and every gradient, for the shapes that break kernels.

Legend: R rows sorted by expert, E experts, B rows per block of the kernel. Who computes is a ``Subject``, see
``kernel_subjects``; the yardstick is torch's own ``_grouped_mm``, used as torchtitan does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from qwen3conv.training.kernels.reference import experts_backward, experts_forward

NAMES = ("output", "dX", "dW gate", "dW down", "dW up")
"""What is compared, in the order of ``Results``."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

ALLOWED = 2.0
"""How many times the error of ``_grouped_mm`` ours may be."""

FLOOR = {"float32": 1e-5, "bfloat16": 0.0}
"""What is always allowed: in fp32 ``_grouped_mm`` errs by a few roundings, and by more in another order of sums."""

BLOCK = 128
"""B: the kernels' choice for as few rows as the cases have (``capacity.choose_block``)."""

Tensor = torch.Tensor


class Inputs(NamedTuple):
    """Arguments of the operator, and the gradient of its output."""

    x: Tensor
    counts: Tensor
    gate: Tensor
    down: Tensor
    up: Tensor
    dy: Tensor


class Results(NamedTuple):
    """What the operator gives, in ``NAMES``'s order."""

    y: Tensor
    dx: Tensor
    d_gate: Tensor
    d_down: Tensor
    d_up: Tensor


Compute = Callable[[Inputs], Results]


@dataclass(frozen=True, slots=True)
class Subject:
    """Who computes: ``where`` and ``nki`` say it to people, ``hardware`` to programs."""

    where: str
    nki: str
    compute: Compute
    hardware: bool = False


class Case(NamedTuple):
    """Rows per expert, and what is special about them."""

    name: str
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """How far one result is from float64: the largest difference over the largest magnitude."""

    case: str
    dtype: str
    result: str
    error: float
    grouped_mm: float
    """The same of ``torch._grouped_mm``."""

    @property
    def allowed(self) -> float:
        """The largest ``error`` that passes."""
        return max(ALLOWED * self.grouped_mm, FLOOR[self.dtype])

    @property
    def passes(self) -> bool:
        """Whether it is near enough; NaN is not."""
        return self.error <= self.allowed


def cases(experts: int, block: int = BLOCK) -> tuple[Case, ...]:
    """The edges of a block plan, on ``experts`` experts; routed ones with top-k 1, 4 and 8 where there are as many."""
    edges = {"0": 0, "1": 1, "B - 1": block - 1, "B": block, "B + 1": block + 1}
    others = (0,) * min(1, experts - 1)
    found = [Case(f"{name}, beside one of none", (count, *others)) for name, count in list(edges.items())[1:]]
    found.append(Case("all on the last", (*others, 2 * block + 1)))
    mixed = tuple(list(edges.values())[e % len(edges)] for e in range(experts))
    if sum(mixed):
        found.append(Case(", ".join(edges), mixed))
    found += [Case(f"routed, top-{k}", routed(block, k, experts)) for k in (1, 4, 8) if k <= experts]
    return tuple(found)


def routed(tokens: int, top_k: int, experts: int) -> tuple[int, ...]:
    """Rows per expert when ``tokens`` tokens take ``top_k`` distinct experts each, at random but always the same."""
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0))
    return tuple(torch.bincount(scores.topk(top_k).indices.flatten(), minlength=experts).tolist())


def make_inputs(counts: Sequence[int], hidden: int, expert_hidden: int, dtype: torch.dtype) -> Inputs:
    """Random arguments whose products are about 1 in size, as in a trained model."""
    random = torch.Generator().manual_seed(sum((place + 1) * count for place, count in enumerate(counts)))

    def normal(*shape: int, scale: float) -> Tensor:
        return (torch.randn(shape, generator=random) * scale).to(dtype)

    rows, experts = sum(counts), len(counts)
    return Inputs(
        normal(rows, hidden, scale=1.0),
        torch.tensor(counts),
        normal(experts, expert_hidden, hidden, scale=hidden**-0.5),
        normal(experts, hidden, expert_hidden, scale=expert_hidden**-0.5),
        normal(experts, expert_hidden, hidden, scale=hidden**-0.5),
        normal(rows, hidden, scale=1.0),
    )


def check(
    subject: Subject, to_check: Sequence[Case], dtypes: Sequence[str], hidden: int, expert_hidden: int
) -> Iterator[Finding]:
    """Every result of every case in every dtype; case by case."""
    for case in to_check:
        for dtype in dtypes:
            inputs = make_inputs(case.counts, hidden, expert_hidden, DTYPES[dtype])
            wanted = in_float64(inputs)
            ours, theirs = subject.compute(inputs), by_grouped_mm(inputs)
            for name, want, our, their in zip(NAMES, wanted, ours, theirs, strict=True):
                yield Finding(case.name, dtype, name, relative_error(our, want), relative_error(their, want))


def in_float64(inputs: Inputs) -> Results:
    """The reference of ``training.kernels``, in float64 on the CPU."""
    x, gate, down, up, dy = (tensor.double() for tensor in inputs if tensor.is_floating_point())
    y = experts_forward(x, inputs.counts, gate, down, up)
    dx, d_gate, d_down, d_up, _ = experts_backward(dy, x, inputs.counts, gate, down, up)
    return Results(y, dx, d_gate, d_down, d_up)


def by_grouped_mm(inputs: Inputs) -> Results:
    """torch's grouped products, rounded to the dtype after each, with autograd's gradients; on the CPU.

    Source: torchtitan 0.3.0, ``models/common/moe.py``, ``GroupedExperts``.
    """
    x, gate, down, up = (t.clone().requires_grad_() for t in (inputs.x, inputs.gate, inputs.down, inputs.up))
    offsets = torch.cumsum(inputs.counts, 0, dtype=torch.int32)

    def product(rows: Tensor, weights: Tensor) -> Tensor:
        return torch._grouped_mm(rows, weights.transpose(-2, -1), offs=offsets)

    y = product(F.silu(product(x, gate)) * product(x, up), down)
    return Results(y.detach(), *torch.autograd.grad(y, (x, gate, down, up), inputs.dy))


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over largest magnitude; NaN where ``found`` has one; a wrong shape is infinitely far."""
    if found.shape != wanted.shape:
        return math.inf
    if not wanted.numel():
        return 0.0
    difference, size = (found.double() - wanted).abs().max().item(), wanted.abs().max().item()
    if size:
        return difference / size
    return 0.0 if difference == 0 else math.inf
