"""The NKI forward kernels against the float64 reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qwen3conv.training.kernels.capacity import choose_block, fit
from tests.kernels.conftest import NkiRunner
from tests.kernels.expert_cases import QWEN3, SIZES, TOLERANCE, error, make_case, routings, run_forward, wanted_forward

BOTH = [(1, True), (2, False)]
"""LNC, and whether an expert's weights stay in SBUF."""


@pytest.mark.parametrize(("lnc", "resident"), [(1, True), (1, False), (2, True), (2, False)])
@pytest.mark.parametrize("routing", routings(128))
def test_every_routing_gives_the_references_rows(nki_runner: NkiRunner, routing: str, lnc: int, resident: bool) -> None:
    case = make_case(routings(128)[routing], 256, 256)
    y = run_forward(nki_runner, case, 128, lnc=lnc, resident=resident)
    assert error(y, wanted_forward(case, scaled=False)) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize(("hidden", "inner", "lnc"), [(128, 128, 1), (640, 384, 1), (1152, 768, 2), (512, 1280, 2)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_multiple_of_128_is_a_size(nki_runner: NkiRunner, hidden: int, inner: int, lnc: int, dtype) -> None:
    case = make_case([70, 0, 30], hidden, inner, dtype)
    y = run_forward(nki_runner, case, 128, lnc=lnc, resident=inner < 1000)
    assert error(y, wanted_forward(case, scaled=False)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("block", [128, 256, 512])
@pytest.mark.parametrize(("lnc", "resident"), BOTH)
def test_every_block_size_gives_the_references_rows(nki_runner: NkiRunner, block: int, lnc: int, resident) -> None:
    case = make_case([block + 1, 0, 5], 256, 256, torch.bfloat16)
    y = run_forward(nki_runner, case, block, lnc=lnc, resident=resident)
    assert error(y, wanted_forward(case, scaled=False)) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("lnc", [1, 2])
def test_rows_are_scaled_by_their_affinity(nki_runner: NkiRunner, lnc: int) -> None:
    case = make_case([3, 129, 0], 256, 256)
    y = run_forward(nki_runner, case, 256, lnc=lnc, scaled=True)
    assert error(y, wanted_forward(case, scaled=True)) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("name", SIZES)
def test_qwen3s_own_sizes_in_the_tiling_chosen_for_them(nki_runner: NkiRunner, name: str, lnc: int) -> None:
    shape = choose_block(replace(QWEN3[name], lnc=lnc))
    case = make_case([60, 0, 12], shape.hidden, shape.inner, torch.bfloat16)
    y = run_forward(nki_runner, case, shape.block, lnc=lnc, resident=fit(shape).resident)
    assert error(y, wanted_forward(case, scaled=False)) <= TOLERANCE[torch.bfloat16]
