"""The NKI backward kernels against the float64 reference, every gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qwen3conv.training.kernels.capacity import choose_block, fit
from tests.kernels.conftest import NkiRunner
from tests.kernels.expert_cases import (
    QWEN3,
    SIZES,
    TOLERANCE,
    error,
    make_case,
    routings,
    run_backward,
    wanted_backward,
)


def assert_gradients(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    assert found.keys() == wanted.keys()
    errors = {name: error(found[name], wanted[name]) for name in wanted}
    assert max(errors.values()) <= TOLERANCE[dtype], errors


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize(("lnc", "chunk"), [(1, 256), (1, 128), (2, 128)])
@pytest.mark.parametrize("routing", routings(128))
def test_every_routing_gives_the_references_gradients(
    nki_runner: NkiRunner, routing: str, lnc: int, chunk: int, scaled: bool
) -> None:
    case = make_case(routings(128)[routing], 256, 256)
    found = run_backward(nki_runner, case, 128, lnc=lnc, chunk=chunk, scaled=scaled)
    assert_gradients(found, wanted_backward(case, scaled=scaled), torch.float32)


@pytest.mark.parametrize(
    ("hidden", "inner", "lnc", "chunk"),
    [(128, 128, 1, 128), (640, 384, 1, 384), (1152, 768, 2, 384), (512, 1280, 2, 128)],
)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_multiple_of_128_is_a_size(
    nki_runner: NkiRunner, hidden: int, inner: int, lnc: int, chunk, dtype
) -> None:
    case = make_case([70, 0, 30], hidden, inner, dtype)
    found = run_backward(nki_runner, case, 128, lnc=lnc, chunk=chunk)
    assert_gradients(found, wanted_backward(case, scaled=False), dtype)


@pytest.mark.parametrize("block", [128, 256, 512])
@pytest.mark.parametrize(("lnc", "chunk"), [(1, 128), (2, 128)])
def test_every_block_size_gives_the_references_gradients(nki_runner: NkiRunner, block: int, lnc: int, chunk) -> None:
    case = make_case([block + 1, 0, 5], 256, 256, torch.bfloat16)
    found = run_backward(nki_runner, case, block, lnc=lnc, chunk=chunk, scaled=True)
    assert_gradients(found, wanted_backward(case, scaled=True), torch.bfloat16)


def test_an_expert_without_rows_gets_gradients_of_zero(nki_runner: NkiRunner) -> None:
    case = make_case([0, 3, 0], 128, 128)
    found = run_backward(nki_runner, case, 128)
    for name in ("gate", "down", "up"):
        assert (found[name][[0, 2]] == 0).all()
        assert (found[name][1] != 0).any()


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("name", SIZES)
def test_qwen3s_own_sizes_in_the_tiling_chosen_for_them(nki_runner: NkiRunner, name: str, lnc: int) -> None:
    shape = choose_block(replace(QWEN3[name], lnc=lnc))
    case = make_case([60, 0, 12], shape.hidden, shape.inner, torch.bfloat16)
    found = run_backward(nki_runner, case, shape.block, lnc=lnc, chunk=fit(shape).chunk)
    assert_gradients(found, wanted_backward(case, scaled=False), torch.bfloat16)
