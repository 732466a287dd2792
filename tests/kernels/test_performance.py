"""The performance model against counts that are made another way: drawn routings, torch's FLOP counter."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from qwen3conv.training.kernels.padding import expected_routing, num_blocks
from qwen3conv.training.kernels.performance import (
    BLOCKS,
    HBM_BYTES,
    PASSES,
    TENSOR_FLOPS,
    Design,
    Layer,
    choose,
    estimate,
    padding,
    ridge,
)
from qwen3conv.training.kernels.reference import experts_backward, experts_forward

QWEN3_30B = Layer(hidden=2048, expert_hidden=768, experts=128, top_k=8, tokens=4096)


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
    counts = drawn_counts(tokens, top_k, experts, 400)
    usual = expected_routing(tokens, top_k, experts, block)
    for expected, drawn in ((usual.blocks, -(-counts // block)), (usual.experts, counts > 0)):
        each = drawn.sum(1)
        assert abs(each.mean() - expected) <= 4 * each.std() / np.sqrt(len(each)) + 1e-4
        assert each.max() <= num_blocks(tokens * top_k, experts, block)


@pytest.mark.parametrize(("rows", "experts", "block"), [(7, 3, 2), (9, 4, 4), (3, 4, 2), (12, 3, 3), (0, 2, 4)])
def test_the_static_number_of_blocks_is_the_most_that_any_split_needs(rows: int, experts: int, block: int) -> None:
    splits = (counts for counts in itertools.product(range(rows + 1), repeat=experts) if sum(counts) == rows)
    assert max(sum(-(-count // block) for count in counts) for counts in splits) == num_blocks(rows, experts, block)


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
    for kind in PASSES:
        found = estimate(layer, kind, 128, lnc, Design())
        assert found.blocks * 128 == layer.rows
        assert found.flops == counted_flops(layer, kind == "backward")
    forward, backward = (estimate(layer, kind, 128, lnc, Design()) for kind in PASSES)
    assert forward.useful_flops == forward.flops
    assert backward.useful_flops == backward.flops * 6 / 8  # gate and up are computed again, 2 products of 8


@pytest.mark.parametrize("block", BLOCKS)
def test_padding_is_the_rows_that_blocks_hold_beyond_those_routed(block: int) -> None:
    found, forward = padding(QWEN3_30B, block), estimate(QWEN3_30B, "forward", block, 2, Design())
    assert 1 < found.expected < found.worst
    assert forward.flops == pytest.approx(found.worst * forward.useful_flops)
    # the worst cases, counted by hand from 32768 rows on 128 experts
    assert found.worst == {128: 383, 256: 255, 512: 191}[block] * block / 32768


def test_intensity_and_the_bound_agree_on_what_decides() -> None:
    for kind, block, lnc, reload in itertools.product(PASSES, BLOCKS, (1, 2), ("expert", "block")):
        found = estimate(QWEN3_30B, kind, block, lnc, Design(reload=reload, transposes_weights=False))
        times = found.seconds
        assert found.bound_seconds == max(times.values())
        without_transposes = 2 * found.core.macs / TENSOR_FLOPS[2]
        assert (found.intensity > ridge(2)) == (without_transposes > found.core.hbm_bytes / HBM_BYTES)
        assert 0 < found.peak_share < 1


def test_the_choice_depends_on_whether_weights_are_read_again() -> None:
    kept = choose(QWEN3_30B, 1, Design(reload="expert", transposes_weights=False))
    again = choose(QWEN3_30B, 1, Design(reload="block", transposes_weights=False))
    assert (kept.block, again.block) == (128, 256)
    assert "256 rows per expert" in kept.reason
