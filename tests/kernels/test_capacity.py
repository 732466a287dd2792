"""The computed bytes are those the emulator measures, and what does not fit is refused before a launch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qwen3conv.tools.nki_emulator import CoreReport, capacity, emulated_nki
from qwen3conv.training.kernels.capacity import (
    BLOCKS,
    PSUM_BANKS,
    SBUF_BYTES,
    ExpertShape,
    backward_budget,
    choose_block,
    fit,
    forward_budget,
)
from qwen3conv.training.kernels.errors import KernelError
from tests.kernels.conftest import NkiRunner
from tests.kernels.expert_cases import QWEN3, SIZES, TOKENS, Case, make_case, run_backward, run_forward


def test_the_limits_are_those_of_the_emulator() -> None:
    assert (SBUF_BYTES, PSUM_BANKS) == (capacity.SBUF_BYTES, capacity.PSUM_BANKS)


def case_of(shape: ExpertShape) -> Case:
    dtype = {2: torch.bfloat16, 4: torch.float32}[shape.itemsize]
    counts = [shape.rows] + [0] * (shape.experts - 1)
    return make_case(counts, shape.hidden, shape.inner, dtype)


def measured_forward(shape: ExpertShape, *, resident: bool) -> CoreReport:
    with emulated_nki() as emulation:
        runner = NkiRunner("emulator", emulation)
        run_forward(runner, case_of(shape), shape.block, lnc=shape.lnc, resident=resident, scaled=shape.scaled)
        return emulation.last.cores[-1]


def measured_backward(shape: ExpertShape, *, chunk: int) -> CoreReport:
    with emulated_nki() as emulation:
        runner = NkiRunner("emulator", emulation)
        run_backward(runner, case_of(shape), shape.block, lnc=shape.lnc, chunk=chunk, scaled=shape.scaled)
        return emulation.last.cores[-1]


SMALL = [
    ExpertShape(5, 128, 128, 1, lnc=1),
    ExpertShape(5, 384, 256, 1, block=256, lnc=1, scaled=True),
    ExpertShape(5, 640, 768, 1, block=512, lnc=2, itemsize=4),
    ExpertShape(5, 1152, 1024, 1, block=128, lnc=2, scaled=True),
]


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_the_forward_kernel_takes_the_computed_bytes(shape: ExpertShape, resident: bool) -> None:
    report, budget = measured_forward(shape, resident=resident), forward_budget(shape, resident=resident)
    assert report.sbuf_bytes == budget.sbuf_bytes
    assert report.psum_banks <= budget.psum_banks <= PSUM_BANKS


@pytest.mark.parametrize("chunk", [128, 384])
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_the_backward_kernel_takes_the_computed_bytes(shape: ExpertShape, chunk: int) -> None:
    chunk = chunk if shape.width % chunk == 0 else shape.width
    report, budget = measured_backward(shape, chunk=chunk), backward_budget(shape, chunk=chunk)
    assert report.sbuf_bytes == budget.sbuf_bytes
    assert report.psum_banks <= budget.psum_banks <= PSUM_BANKS


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("name", SIZES)
def test_qwen3s_sizes_take_the_computed_bytes(name: str, lnc: int) -> None:
    shape = replace(choose_block(replace(QWEN3[name], lnc=lnc)), rows=70, experts=1)
    chosen = fit(shape)
    forward, backward = measured_forward(shape, resident=chosen.resident), measured_backward(shape, chunk=chosen.chunk)
    assert (forward.sbuf_bytes, forward.psum_banks) == (chosen.forward.sbuf_bytes, chosen.forward.psum_banks)
    assert (backward.sbuf_bytes, backward.psum_banks) == (chosen.backward.sbuf_bytes, chosen.backward.psum_banks)


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("name", QWEN3)
def test_qwen3s_sizes_fit(name: str, lnc: int) -> None:
    chosen = fit(choose_block(replace(QWEN3[name], lnc=lnc)))
    assert max(chosen.forward.sbuf_bytes, chosen.backward.sbuf_bytes) <= SBUF_BYTES


@pytest.mark.parametrize(
    ("name", "lnc", "resident", "chunk"),
    [
        ("30B-A3B", 1, True, 384),
        ("30B-A3B", 2, True, 384),
        ("235B-A22B", 1, False, 128),
        ("235B-A22B", 2, True, 128),
        ("Coder-480B-A35B", 1, False, 128),
    ],
)
def test_weights_stay_and_passes_are_as_wide_as_sbuf_lets_them(name: str, lnc: int, resident: bool, chunk: int) -> None:
    chosen = fit(replace(QWEN3[name], lnc=lnc, block=128))
    assert (chosen.resident, chosen.chunk) == (resident, chunk)


def test_a_chosen_block_fits_where_larger_ones_do_not() -> None:
    shape = QWEN3["Coder-480B-A35B"]
    assert choose_block(shape).block == 128
    many_rows = replace(QWEN3["30B-A3B"], rows=32 * TOKENS * 8, experts=16)
    assert choose_block(replace(many_rows, rows=200_000)).block == 512


BASE = QWEN3["30B-A3B"]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (replace(BASE, block=64), "B is 64 and must be one of 128, 256, 512"),
        (replace(BASE, lnc=4), "LNC is 4 and must be 1 or 2"),
        (replace(BASE, itemsize=8), "elements have 8 bytes"),
        (replace(BASE, hidden=2000), "H is 2000 and must be a multiple of 128"),
        (replace(BASE, inner=192), "I is 192 and must be a multiple of 256: each of the 2 cores"),
        (replace(BASE, inner=192, lnc=1), "I is 192 and must be a multiple of 128; shard I over fewer devices"),
        (replace(QWEN3["Coder-480B-A35B"], experts=160), "5033164800 bytes, and a run-time"),
        (
            replace(BASE, rows=TOKENS * 8 * 16),
            "rows of all slots take .* bytes, and a run-time offset reaches 4294967296",
        ),
        (replace(BASE, hidden=12288, rows=800), "the backward kernel needs .*; H is too large for it; train with"),
        (replace(BASE, hidden=6144, experts=16, itemsize=4), "the backward kernel needs .*; use bfloat16"),
        (replace(BASE, inner=128 * 99, experts=8, lnc=1), "the forward kernel needs .*; launch for LNC 2"),
        (replace(BASE, hidden=6144, inner=2560, experts=40, block=256), "has 212464 .*; use blocks of 128"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_shape_that_does_not_fit_is_refused_by_name(shape: ExpertShape, message: str) -> None:
    with pytest.raises(KernelError, match=message) as raised:
        fit(shape)
    assert str(shape) in str(raised.value)


def test_all_broken_rules_are_named_at_once() -> None:
    with pytest.raises(KernelError, match=r"(?s)B is 100.*H is 100.*I is 100"):
        fit(ExpertShape(10, 100, 100, 4, block=100))


def test_choosing_a_block_refuses_where_none_fits() -> None:
    with pytest.raises(KernelError, match="H is too large for it"):
        choose_block(replace(BASE, hidden=12288, rows=800))


@pytest.mark.parametrize("block", BLOCKS)
def test_fp32_takes_more_than_bf16(block: int) -> None:
    small = ExpertShape(100, 512, 512, 4, block=block)
    assert fit(replace(small, itemsize=4)).backward.sbuf_bytes > fit(small).backward.sbuf_bytes
