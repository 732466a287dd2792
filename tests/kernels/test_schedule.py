"""What the kernels' tables say about a routing."""

from __future__ import annotations

import pytest
import torch

from qwen3conv.training.kernels.schedule import PARTITIONS, schedule_blocks
from tests.kernels.expert_cases import routings

BLOCK = 4
ROUTINGS = {**routings(BLOCK), "even": [5, 5, 5], "no rows": [0, 0], "one expert": [9]}


@pytest.fixture(params=ROUTINGS)
def counts(request: pytest.FixtureRequest) -> list[int]:
    return ROUTINGS[request.param]


def test_every_rows_slot_holds_it_in_a_block_in_use_of_its_expert(counts: list[int]) -> None:
    schedule = schedule_blocks(torch.tensor(counts), sum(counts), BLOCK)
    slots, block = schedule.slot_row.flatten(), schedule.row_slot // BLOCK
    assert slots[schedule.row_slot].tolist() == list(range(sum(counts)))
    assert (block < schedule.used.item()).all()
    owner = [expert for expert, count in enumerate(counts) for _ in range(count)]
    assert schedule.block_expert.flatten()[block].tolist() == owner


def test_every_expert_loads_once_starts_once_and_stores_once_in_that_order(counts: list[int]) -> None:
    schedule = schedule_blocks(torch.tensor(counts), sum(counts), BLOCK)
    used = int(schedule.used)
    assert used == sum(max(1, -(-count // BLOCK)) for count in counts)
    assert schedule.block_expert[:used].flatten().tolist() == sorted(schedule.block_expert[:used].flatten().tolist())
    experts = len(counts)
    for expert in range(experts):
        blocks = [n for n in range(used) if schedule.block_expert[n] == expert]
        assert [n for n in range(used) if schedule.load_expert[n] == expert] == blocks[:1]
        assert [n for n in range(used) if schedule.store_expert[n] == expert] == blocks[-1:]
        assert [float(schedule.keep[n, 0, 0]) for n in blocks] == [0.0] + [1.0] * (len(blocks) - 1)
    others = set(schedule.load_expert[:used].flatten().tolist()) - set(range(experts))
    assert others <= {experts}


def test_the_tables_have_the_shapes_and_types_of_the_kernels(counts: list[int]) -> None:
    rows, experts = sum(counts), len(counts)
    schedule = schedule_blocks(torch.tensor(counts), rows, BLOCK)
    blocks = experts - 1 + max(1, -(-rows // BLOCK))
    shapes = {name: tuple(table.shape) for name, table in schedule._asdict().items()}
    assert shapes == {
        "slot_row": (blocks, BLOCK, 1),
        "used": (1, 1),
        "block_expert": (blocks, 1),
        "load_expert": (blocks, 1),
        "store_expert": (blocks, 1),
        "keep": (blocks, PARTITIONS, 1),
        "row_slot": (rows,),
    }
    int32 = {name for name, table in schedule._asdict().items() if table.dtype == torch.int32}
    assert int32 == {"slot_row", "used", "block_expert", "load_expert", "store_expert"}
    assert all(table.is_contiguous() for table in schedule)
