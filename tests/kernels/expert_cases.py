"""Routings, inputs and float64 answers for the expert kernels' tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from qwen3conv.training.kernels.capacity import ExpertShape
from qwen3conv.training.kernels.reference import experts_backward, experts_forward
from qwen3conv.training.kernels.schedule import Schedule, schedule_blocks
from tests.kernels.conftest import NkiRunner, from_host

FORWARD = "qwen3conv.training.kernels.nki_forward"
BACKWARD = "qwen3conv.training.kernels.nki_backward"

TOKENS = 4096
QWEN3 = {
    "30B-A3B": ExpertShape(TOKENS * 8, 2048, 768, 128),
    "235B-A22B": ExpertShape(TOKENS * 8, 4096, 1536, 128),
    # A quarter of its 160 experts: all together they are past a run-time address.
    "Coder-480B-A35B": ExpertShape(TOKENS * 8, 6144, 2560, 40),
    "study": ExpertShape(TOKENS * 4, 2048, 768, 64),
}
"""Layers of Qwen3's MoE models, and of a small model for studies."""
SIZES = ["30B-A3B", *(pytest.param(name, marks=pytest.mark.slow) for name in ("235B-A22B", "Coder-480B-A35B"))]
"""Those with widths of their own, for tests that compute."""

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
"""Of the largest magnitude of an output. bf16: the hidden activations are rounded too, once, beside the result."""


@dataclass(frozen=True)
class Case:
    """Rows sorted by expert, weights, affinities, and an upstream gradient; all float64, rounded to ``dtype``."""

    counts: list[int]
    dtype: torch.dtype
    x: torch.Tensor
    gate: torch.Tensor
    down: torch.Tensor
    up: torch.Tensor
    affinity: torch.Tensor
    dy: torch.Tensor

    @property
    def rows(self) -> int:
        return sum(self.counts)

    def padded(self, rows: torch.Tensor, dtype: torch.dtype | None = None) -> np.ndarray:
        """With the row of zeros that padding slots read, as the kernels' runner takes it."""
        return from_host(torch.cat((rows, rows.new_zeros(1, rows.shape[1]))).to(dtype or self.dtype))

    def weights(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """gate, up, down."""
        gate, up, down = (from_host(w.to(self.dtype)) for w in (self.gate, self.up, self.down))
        return gate, up, down

    def schedule(self, block: int) -> Schedule:
        return schedule_blocks(torch.tensor(self.counts), self.rows, block)


def make_case(counts: list[int], hidden: int, inner: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Case:
    """Values whose products stay of order one, exactly representable in ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    rows, experts = sum(counts), len(counts)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype).double()

    return Case(
        counts,
        dtype,
        x=normal(rows, hidden),
        gate=normal(experts, inner, hidden, scale=hidden**-0.5),
        down=normal(experts, hidden, inner, scale=inner**-0.5),
        up=normal(experts, inner, hidden, scale=hidden**-0.5),
        affinity=torch.rand((rows, 1), generator=generator).double(),
        dy=normal(rows, hidden),
    )


def routings(block: int) -> dict[str, list[int]]:
    """The classes of tokens per expert, around one block and beyond."""
    return {
        "0, 1, B-1, B, B+1": [0, 1, block - 1, block, block + 1],
        "all on the first": [2 * block + 3, 0, 0],
        "all on the last": [0, 0, block],
        "one row": [0, 1, 0],
    }


def wanted_forward(case: Case, *, scaled: bool) -> torch.Tensor:
    """(R, H) in float64."""
    y = experts_forward(case.x, torch.tensor(case.counts), case.gate, case.down, case.up)
    return y * case.affinity if scaled else y


def run_forward(
    runner: NkiRunner, case: Case, block: int, *, lnc: int = 1, resident: bool = True, scaled: bool = False
) -> torch.Tensor:
    """(R, H) in float64 by the kernel, slots combined as the operator does."""
    schedule = case.schedule(block)
    load = schedule.load_expert if resident else schedule.block_expert
    arguments: list[Any] = [case.padded(case.x), *case.weights()]
    arguments += [table.numpy() for table in (schedule.slot_row, schedule.used, load)]
    kernels = runner.load(FORWARD)
    if scaled:
        arguments.append(case.padded(case.affinity, torch.float32))
    kernel = kernels.forward_scaled if scaled else kernels.forward
    y = runner.run(kernel, *arguments, lnc=lnc, resident=resident)
    assert y.shape == (lnc, *schedule.slot_row.shape[:2], case.x.shape[1])
    return combined(y, schedule)


def wanted_backward(case: Case, *, scaled: bool) -> dict[str, torch.Tensor]:
    """All gradients in float64, by the operator's argument."""
    counts = torch.tensor(case.counts)
    scaled_dy = case.dy * case.affinity if scaled else case.dy
    dx, d_gate, d_down, d_up, _ = experts_backward(scaled_dy, case.x, counts, case.gate, case.down, case.up)
    found = {"x": dx, "gate": d_gate, "down": d_down, "up": d_up}
    if scaled:
        found["affinity"] = (case.dy * wanted_forward(case, scaled=False)).sum(1, keepdim=True)
    return found


def run_backward(
    runner: NkiRunner, case: Case, block: int, *, lnc: int = 1, chunk: int = 128, scaled: bool = False
) -> dict[str, torch.Tensor]:
    """What ``wanted_backward`` gives, by the kernel."""
    schedule = case.schedule(block)
    tables = (schedule.slot_row, schedule.used, schedule.load_expert, schedule.store_expert, schedule.keep)
    arguments: list[Any] = [case.padded(case.x), case.padded(case.dy), *case.weights(), *(t.numpy() for t in tables)]
    kernels = runner.load(BACKWARD)
    if scaled:
        arguments.append(case.padded(case.affinity, torch.float32))
    kernel = kernels.backward_scaled if scaled else kernels.backward
    dx, d_gate, d_up, d_down, *da = runner.run(kernel, *arguments, lnc=lnc, chunk=chunk)
    weights = (torch.from_numpy(array.astype(np.float64)) for array in (d_gate, d_down, d_up))
    found = {"x": combined(dx, schedule), **dict(zip(("gate", "down", "up"), weights, strict=True))}
    if scaled:
        found["affinity"] = combined(da[0], schedule)
    return found


def combined(y: np.ndarray, schedule: Schedule) -> torch.Tensor:
    """Rows from slots, with the cores' partial sums added; every slot of a block in use must have been written."""
    blocks = torch.from_numpy(y.astype(np.float64)).sum(0)
    assert not blocks[: int(schedule.used)].isnan().any()
    return blocks.flatten(0, 1)[schedule.row_slot]


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference over the largest wanted magnitude."""
    assert found.shape == wanted.shape
    assert not found.isnan().any()
    return float((found.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
