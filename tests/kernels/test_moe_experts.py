from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from qwen3conv.training.kernels.block_plan import num_blocks, plan_blocks
from qwen3conv.training.kernels.moe_experts import KernelError, compute_dtype, moe_experts

COUNTS = ([0, 1, 3, 4], [5, 0, 0, 0], [4, 4, 4, 4], [0, 0, 0, 1], [3, 5, 1, 0])


def inputs(counts: list[int], dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    shapes = ((sum(counts), 6), (4, 5, 6), (4, 6, 5), (4, 5, 6))
    x, gate, down, up = (torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes)
    return x, torch.tensor(counts), gate, down, up


def by_autograd(x, counts, gate, down, up):
    parts = x.split(counts.tolist())
    return torch.cat([F.silu(p @ gate[e].T) * (p @ up[e].T) @ down[e].T for e, p in enumerate(parts)])


@pytest.mark.parametrize("counts", COUNTS)
def test_output_and_gradients_are_those_of_autograd(counts: list[int]) -> None:
    arguments = inputs(counts)
    y, wanted = moe_experts(*arguments), by_autograd(*arguments)
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
    leaves = [a for a in arguments if a.requires_grad]
    dy = torch.randn_like(y)
    for ours, theirs in zip(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(wanted, leaves, dy), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_gradients_pass_gradcheck_in_float64() -> None:
    x, counts, *weights = inputs([0, 1, 3, 2])
    assert torch.autograd.gradcheck(lambda x, *w: moe_experts(x, counts, *w), (x, *weights))


def test_activation_checkpointing_changes_no_gradient() -> None:
    x, counts, *weights = inputs([0, 1, 3, 2])
    dy = torch.randn_like(x)
    plain = torch.autograd.grad(moe_experts(x, counts, *weights), (x, *weights), dy)
    again = checkpoint(moe_experts, x, counts, *weights, use_reentrant=False)
    for ours, theirs in zip(torch.autograd.grad(again, (x, *weights), dy), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_the_operator_passes_opcheck() -> None:
    torch.library.opcheck(moe_experts, inputs([0, 1, 3, 2], torch.float32))


def test_compile_sees_one_graph() -> None:
    arguments = inputs([0, 1, 3, 2], torch.float32)
    compiled = torch.compile(lambda *a: moe_experts(*a) * 2, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), moe_experts(*arguments) * 2, rtol=0, atol=0)


def test_counts_that_do_not_sum_to_the_rows_are_refused() -> None:
    x, counts, *weights = inputs([0, 1, 3, 2])
    with pytest.raises(KernelError, match="counts sum to 7, x has 6 rows"):
        moe_experts(x, counts + torch.tensor([1, 0, 0, 0]), *weights)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("block", [1, 2, 4, 8])
def test_a_plan_gives_every_row_one_slot_of_its_expert(counts: list[int], block: int) -> None:
    rows = sum(counts)
    plan = plan_blocks(torch.tensor(counts), rows, block)
    owner = torch.tensor([e for e, count in enumerate(counts) for _ in range(count)])
    slots = plan.slot_row.view(-1, block)
    assert slots.shape[0] == num_blocks(rows, len(counts), block)
    assert sorted(slots[slots < rows].tolist()) == list(range(rows))
    assert (slots <= rows).all()
    for expert, rows_of_block in zip(plan.block_expert.tolist(), slots, strict=True):
        assert (owner[rows_of_block[rows_of_block < rows].long()] == expert).all()


def scaled_inputs(counts: list[int], dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    arguments = inputs(counts, dtype)
    return (*arguments, torch.rand(sum(counts), 1, dtype=dtype).requires_grad_())


def test_rows_are_multiplied_by_their_affinity() -> None:
    *arguments, affinity = scaled_inputs([0, 1, 3, 2])
    y, wanted = moe_experts(*arguments, affinity), by_autograd(*arguments) * affinity
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda a: moe_experts(*arguments, a), (affinity,))
    leaves = [*(a for a in arguments if a.requires_grad), affinity]
    dy = torch.randn_like(y)
    for ours, theirs in zip(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(wanted, leaves, dy), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_the_operator_with_affinity_passes_opcheck() -> None:
    torch.library.opcheck(moe_experts, scaled_inputs([0, 1, 3, 2], torch.float32))


def test_autocast_changes_nothing_inside_the_operator() -> None:
    arguments = scaled_inputs([0, 1, 3, 2], torch.float32)
    leaves = [a for a in arguments if a.requires_grad]
    y = moe_experts(*arguments)
    gradients = torch.autograd.grad(y, leaves, torch.ones_like(y))
    with torch.autocast("cpu", torch.bfloat16):
        y_auto = moe_experts(*arguments)
        gradients_auto = torch.autograd.grad(y_auto, leaves, torch.ones_like(y))
    for found, wanted in zip((y_auto, *gradients_auto), (y, *gradients), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_the_dtype_to_cast_to_is_autocasts_where_that_is_on() -> None:
    x = torch.zeros(1)
    assert compute_dtype(x) == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert compute_dtype(x) == torch.bfloat16


@pytest.mark.parametrize("counts", COUNTS)
def test_a_plan_can_give_every_expert_a_block(counts: list[int]) -> None:
    for block in (1, 2, 4, 8):
        plan = plan_blocks(torch.tensor(counts), sum(counts), block, least=1)
        assert set(plan.block_expert.tolist()) == set(range(len(counts)))
        assert sorted(plan.slot_row[plan.slot_row < sum(counts)].tolist()) == list(range(sum(counts)))
        assert len(plan.block_expert) == num_blocks(sum(counts), len(counts), block, least=1)


def test_the_blocks_of_a_plan_are_the_worst_case_and_no_more() -> None:
    for rows in range(8):
        for block in (1, 2, 3):
            every = [(a, b, rows - a - b) for a in range(rows + 1) for b in range(rows + 1 - a)]
            for least in (0, 1):
                worst = max(sum(max(least, -(-c // block)) for c in counts) for counts in every)
                assert num_blocks(rows, 3, block, least=least) == worst
