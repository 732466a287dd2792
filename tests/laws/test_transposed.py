"""A parameter that is stored column by column passes as its rows, whatever strides it lies in."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen3conv.converters.blocks import Buffer, gather, scatter
from qwen3conv.converters.boxes import Box, Chunk, StoredTensor, TensorSpec
from qwen3conv.converters.files import Files, Output
from qwen3conv.converters.layouts import Binding, Rule
from qwen3conv.converters.ops import ExpertColumns, Part, Piece
from qwen3conv.converters.planning import tabulate
from tests.laws.tiny import scratch

pytestmark = pytest.mark.torch_free

GATE, UP = (f"model.layers.0.mlp.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up"))


@given(
    rows=st.integers(1, 7),
    columns=st.integers(1, 7),
    experts=st.integers(1, 3),
    step=st.integers(1, 7),
    buffer=st.integers(1, 64),
)
def test_transposed_experts_are_read_and_written_by_rows(
    rows: int, columns: int, experts: int, step: int, buffer: int
) -> None:
    rule = Rule("stored", (GATE, UP), ExpertColumns())
    parts = [[Part(name.format(expert=e), (rows, columns)) for name in (GATE, UP)] for e in range(experts)]
    shape = (experts, columns, 2 * rows)
    truth = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)
    pieces = tuple(rule.op.pieces(parts, None))  # type: ignore[arg-type]
    stored = StoredTensor(TensorSpec("stored", "BF16", shape), (Chunk(Box.whole(shape), "file", 6),))
    table = tabulate([Binding("stored", shape, pieces, rule)], {"stored": stored}, label="test")
    with scratch() as root:
        (root / "file").write_bytes(b"header" + truth.tobytes())
        (root / "copy").write_bytes(bytes(6 + truth.nbytes))
        with Files(root, os.O_RDWR) as files:
            for expert in range(experts):
                for half, template in enumerate((GATE, UP)):
                    (copy,) = table[template.format(expert=expert)].copies
                    expected = truth[expert, :, half * rows : (half + 1) * rows].T
                    target = [extent._replace(file="copy") for extent in copy]
                    for row in range(0, rows, step):
                        count = min(step, rows - row)
                        block = memoryview(bytearray(count * columns * 2))
                        gather(copy, row, count, columns, 2, block, files, Buffer(buffer))
                        assert block.tobytes() == expected[row : row + count].tobytes()
                        scatter(target, row, count, columns, 2, block, Output(files), Buffer(buffer))
        assert (root / "copy").read_bytes()[6:] == truth.tobytes()


def test_a_column_major_matrix_is_read_by_rows() -> None:
    truth = np.arange(30, dtype=np.uint16).reshape(5, 6)
    name = "model.layers.0.self_attn.o_proj.weight"
    rule = Rule("stored", (name,))
    whole = Box.whole((5, 6))
    stored = StoredTensor(TensorSpec("stored", "BF16", (5, 6)), (Chunk(whole, "file", 0, column_major=True),))
    pieces = (Piece(name, whole, whole),)
    table = tabulate([Binding("stored", (5, 6), pieces, rule)], {"stored": stored}, label="test")
    with scratch() as root:
        (root / "file").write_bytes(truth.T.tobytes())
        with Files(root, os.O_RDONLY) as files:
            block = memoryview(bytearray(60))
            gather(table[name].copies[0], 0, 5, 6, 2, block, files, Buffer(64))
    assert block.tobytes() == truth.tobytes()
