"""The performance model against counts that are made another way: drawn routings, torch's counter, the emulator."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from qwen3conv.tools.nki_emulator import emulated_nki
from qwen3conv.training.kernels.capacity import BLOCKS
from qwen3conv.training.kernels.errors import KernelError
from qwen3conv.training.kernels.padding import expected_blocks, num_blocks
from qwen3conv.training.kernels.performance import (
    HBM_BYTES,
    PASSES,
    SHAPES,
    TENSOR_FLOPS,
    Layer,
    Work,
    backward_work,
    choose,
    estimate,
    forward_work,
    padding,
    ridge,
)
from qwen3conv.training.kernels.reference import experts_backward, experts_forward
from tests.kernels.conftest import NkiRunner
from tests.kernels.expert_cases import make_case, run_backward, run_forward

QWEN3_30B = SHAPES["30B-A3B"]


def drawn_counts(tokens: int, top_k: int, experts: int, draws: int) -> np.ndarray:
    """(draws, experts): rows per expert when every token takes ``top_k`` distinct experts at random."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(draws):
        chosen = np.argsort(random.random((tokens, experts)), axis=1)[:, :top_k]
        found.append(np.bincount(chosen.ravel(), minlength=experts))
    return np.stack(found)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "block"),
    [(64, 2, 8, 16), (300, 4, 64, 16), (40, 8, 64, 4), (512, 1, 4, 128), (50, 4, 4, 16), (10, 1, 64, 128)],
)
def test_expected_blocks_are_those_of_drawn_routings(tokens: int, top_k: int, experts: int, block: int) -> None:
    blocks = np.maximum(1, -(-drawn_counts(tokens, top_k, experts, 400) // block)).sum(1)
    expected = expected_blocks(tokens, top_k, experts, block)
    assert abs(blocks.mean() - expected) <= 4 * blocks.std() / np.sqrt(len(blocks)) + 1e-4
    assert blocks.max() <= num_blocks(tokens * top_k, experts, block, least=1)


@pytest.mark.parametrize(("rows", "experts", "block"), [(7, 3, 2), (9, 4, 4), (3, 4, 2), (12, 3, 3), (0, 2, 4)])
@pytest.mark.parametrize("least", [0, 1])
def test_the_static_number_of_blocks_is_the_most_that_any_split_needs(
    rows: int, experts: int, block: int, least: int
) -> None:
    splits = (counts for counts in itertools.product(range(rows + 1), repeat=experts) if sum(counts) == rows)
    most = max(sum(max(least, -(-count // block)) for count in counts) for counts in splits)
    assert most == num_blocks(rows, experts, block, least=least)


def counted_flops(layer: Layer, backward: bool) -> int:
    rows, e, d, f = layer.rows, layer.experts, layer.hidden, layer.expert_hidden
    x, counts = torch.ones(rows, d), torch.full((e,), rows // e)
    gate, down, up = torch.ones(e, f, d), torch.ones(e, d, f), torch.ones(e, f, d)
    with FlopCounterMode(display=False) as counter:
        if backward:
            experts_backward(x, x, counts, gate, down, up)
        else:
            experts_forward(x, counts, gate, down, up)
    return counter.get_total_flops()


@pytest.mark.parametrize("lnc", [1, 2])
def test_flops_without_padding_are_those_that_torch_counts_in_the_reference(lnc: int) -> None:
    layer = Layer(hidden=256, expert_hidden=256, experts=1, top_k=1, tokens=256)
    forward, backward = (estimate(layer, kind, 128, lnc) for kind in PASSES)
    for found in (forward, backward):
        assert found.used * 128 == layer.rows
        assert found.flops == counted_flops(layer, found.kind == "backward")
    assert forward.useful_flops == forward.flops
    assert backward.useful_flops == backward.flops * 6 / 8  # gate and up are computed again, 2 products of 8


COUNTS = [0, 129, 1, 300]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("kind", "hidden", "inner", "block", "lnc", "way"),
    [
        ("forward", 640, 256, 128, 1, True),
        ("forward", 640, 512, 256, 2, False),
        ("backward", 640, 256, 128, 1, 256),
        ("backward", 256, 512, 256, 2, 128),
    ],
)
def test_products_traffic_and_dmas_are_those_that_the_emulator_counts(
    kind: str, hidden: int, inner: int, block: int, lnc: int, way: int, dtype: torch.dtype
) -> None:
    layer = Layer(hidden, inner, len(COUNTS), 1, sum(COUNTS), dtype.itemsize)
    shape, used = layer.shape(block, lnc), sum(max(1, -(-count // block)) for count in COUNTS)
    with emulated_nki() as emulation:
        runner, case = NkiRunner("emulator", emulation), make_case(COUNTS, hidden, inner, dtype)
        if kind == "forward":
            work = forward_work(shape, used, bool(way))
            run_forward(runner, case, block, lnc=lnc, resident=bool(way))
        else:
            work = backward_work(shape, used, way)
            run_backward(runner, case, block, lnc=lnc, chunk=way)
        (core, *_) = emulation.last.cores
    assert core.matmul_macs == work.macs
    assert core.executed["nc_transpose"] * 128 * 128 == work.transposed
    assert core.executed["dma_copy"] == work.dmas
    assert core.hbm_read_bytes == work.weights_read + work.rows_read
    assert core.hbm_written_bytes == work.rows_written + work.gradients_written


@pytest.mark.parametrize("block", BLOCKS)
def test_padding_is_the_rows_that_blocks_hold_beyond_those_routed(block: int) -> None:
    found, forward = padding(QWEN3_30B, block), estimate(QWEN3_30B, "forward", block, 2)
    assert 1 < found.expected < found.worst
    assert forward.flops == pytest.approx(found.expected * forward.useful_flops)
    # the worst cases, counted by hand from 32768 rows on 128 experts
    assert found.worst == {128: 383, 256: 255, 512: 191}[block] * block / 32768


def test_intensity_and_the_bound_agree_on_what_decides() -> None:
    for kind, block, lnc in itertools.product(PASSES, BLOCKS, (1, 2)):
        found = estimate(QWEN3_30B, kind, block, lnc)
        assert found.bound_seconds == max(found.seconds.values())
        products = 2 * found.core.macs / TENSOR_FLOPS[2]
        assert (found.intensity > ridge(2)) == (products > found.core.hbm_bytes / HBM_BYTES)
        assert 0 < found.peak_share < 1


def test_the_choice_has_the_least_bound_of_the_blocks_that_fit() -> None:
    for layer in SHAPES.values():
        totals = {}
        for block in BLOCKS:
            try:
                totals[block] = sum(estimate(layer, kind, block, 2).bound_seconds for kind in PASSES)
            except KernelError:
                continue
        choice = choose(layer, 2)
        assert totals[choice.block] == min(totals.values())
        assert f"{totals[choice.block] * 1e3:.1f} ms" in choice.reason


def test_a_layer_that_no_block_size_fits_is_refused_as_the_kernels_do() -> None:
    with pytest.raises(KernelError, match="must be a multiple of 128"):
        choose(Layer(100, 256, 4, 2, 64), 1)


def test_works_add_up() -> None:
    assert Work(1, 2).plus(Work(3, 4, dmas=5), 2) == Work(7, 10, dmas=10)
