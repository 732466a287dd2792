"""The Scalar, Vector and GpSimd engines: activations, elementwise ops, reductions, fills."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from .access import load, store
from .core import compile_time_int, current_core
from .dtypes import float32, int32, uint32
from .errors import CallError, EmulationError
from .instructions import (
    engine,
    instruction,
    not_both_psum,
    on_engine,
    per_row,
    rows_of,
    same_rows,
    store_rows,
    tile,
    wide_rows,
)
from .op_table import ACTIVATIONS, ARITHMETIC, BITWISE, REDUCTIONS, Op, function
from .storage import psum, sbuf
from .tensors import Tensor

_ELEMENTWISE = (engine.vector, engine.gpsimd, engine.scalar)


class reduce_cmd(enum.Enum):
    """What an activation does with its row sum: nothing, or start at 0 and store it."""

    idle = 0
    reset_reduce = 1


@instruction
def activation(
    dst: Any,
    op: Any,
    data: Any,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Any = None,
    reduce_res: Any = None,
    reduce_cmd: Any = reduce_cmd.idle,
    name: Any = None,
) -> None:
    """``dst = op(data * scale + bias)``; with ``reset_reduce`` also ``reduce_res`` = its row sums, unrounded."""
    core, dst, data = current_core(), tile(dst, "dst"), tile(data, "data")
    same_rows(dst=dst, data=data)
    partitions = data.shape[0]
    values = wide_rows(core, data) * per_row(core, scale, partitions, "scale", (float32,))
    if bias is not None:
        values = values + np.float32(per_row(core, bias, partitions, "bias", None))
    with np.errstate(over="ignore"):
        values = function(op, ACTIVATIONS, "op")(values.astype(np.float32))
    if reduce_cmd.name == "reset_reduce":
        function(reduce_op, {"add": np.add}, "reduce_op")
        total = tile(reduce_res, "reduce_res")
        if total.shape != (partitions, 1):
            raise EmulationError(f"reduce_res must have shape ({partitions}, 1), not {total.shape}")
        store(core, total, values.sum(axis=1, keepdims=True, dtype=np.float32))
    elif reduce_op is not None or reduce_res is not None:
        raise EmulationError("reduce_op and reduce_res need reduce_cmd=nisa.reduce_cmd.reset_reduce")
    store_rows(core, dst, values)


@instruction
def tensor_copy(dst: Any, src: Any, engine: Any = engine.unknown, name: Any = None) -> None:
    """``dst = src`` between SBUF and PSUM, cast; bit for bit where the type stays."""
    core, dst, src = current_core(), tile(dst, "dst"), tile(src, "src")
    on_engine(engine, _ELEMENTWISE, dst, src)
    same_rows(dst=dst, src=src)
    store_rows(core, dst, rows_of(core, src))


@instruction
def memset(dst: Any, value: Any, engine: Any = engine.unknown, name: Any = None) -> None:
    """Fill with a number of the tile's kind: a Python int for integers, a float for floats."""
    core, dst = current_core(), tile(dst, "dst")
    on_engine(engine, _ELEMENTWISE[:2], dst)
    kind = float if dst.dtype.is_float else int
    if type(value) is not kind:
        raise CallError(f"a {dst.dtype} tile is filled with a Python {kind.__name__}, not {value!r}")
    store(core, dst, np.full(dst.shape, value, np.float64))


@instruction
def tensor_tensor(dst: Any, data1: Any, data2: Any, op: Any, engine: Any = engine.unknown, name: Any = None) -> None:
    """``dst = data1 op data2``; 32-bit integers in SBUF are exact, all else is float32."""
    core, dst, data1, data2 = current_core(), tile(dst, "dst"), tile(data1, "data1"), tile(data2, "data2")
    on_engine(engine, _ELEMENTWISE[:2], dst, data1, data2)
    same_rows(dst=dst, data1=data1, data2=data2)
    not_both_psum(data1=data1, data2=data2)
    if _is_bitwise(op):
        _check_ints(dst, data1, data2)
        store_rows(core, dst, function(op, BITWISE, "op")(rows_of(core, data1), rows_of(core, data2)))
        return
    compute = function(op, ARITHMETIC, "op")
    tiles = (dst, data1, data2)
    exact = all(t.dtype in (int32, uint32) and t.buffer == sbuf for t in tiles) and engine.name != "vector"
    read = (lambda t: rows_of(core, t).astype(np.int64)) if exact else (lambda t: wide_rows(core, t))
    result = compute(read(data1), read(data2))
    store_rows(core, dst, result if exact else result.astype(np.float32))


@instruction
def tensor_scalar(
    dst: Any,
    data: Any,
    op0: Any,
    operand0: Any,
    reverse0: Any = False,
    op1: Any = None,
    operand1: Any = None,
    reverse1: Any = False,
    engine: Any = engine.unknown,
    name: Any = None,
) -> None:
    """``dst = (data op0 operand0) op1 operand1`` with numbers or (P, 1) columns; reverse swaps the sides of an op."""
    core, dst, data = current_core(), tile(dst, "dst"), tile(data, "data")
    on_engine(engine, _ELEMENTWISE, dst, data)
    same_rows(dst=dst, data=data)
    if (op1 is None) != (operand1 is None):
        raise CallError("op1 and operand1 come together")
    bitwise = _is_bitwise(op0)
    if op1 is not None and _is_bitwise(op1) != bitwise:
        raise EmulationError("op0 and op1 must both be arithmetic or both work on bits")
    names = [op.name for op in (op0, op1) if isinstance(op, Op)]
    if engine.name == "scalar" and names not in (["multiply"], ["multiply", "add"], ["add"]):
        raise EmulationError("the Scalar engine of trn2 does multiply, add, or multiply then add")
    steps = [("0", op0, operand0, reverse0), ("1", op1, operand1, reverse1)]
    values = rows_of(core, data) if bitwise else wide_rows(core, data)
    for number, op, operand, reverse in steps[: 1 if op1 is None else 2]:
        if bitwise:
            _check_ints(dst, data)
            right = operand if isinstance(operand, int) else rows_of(core, tile(operand, f"operand{number}"))
        else:
            right = per_row(core, operand, data.shape[0], f"operand{number}", (float32,))
        compute = function(op, BITWISE if bitwise else ARITHMETIC, f"op{number}")
        values = compute(right, values) if reverse else compute(values, right)
        values = values if bitwise else values.astype(np.float32)
    store_rows(core, dst, values)


@instruction
def scalar_tensor_tensor(
    dst: Any,
    data: Any,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: Any,
    reverse0: Any = False,
    reverse1: Any = False,
    name: Any = None,
) -> None:
    """``dst = (data op0 operand0) op1 operand1``: operand0 a number or (P, 1) column, operand1 a whole tile."""
    core, dst, data, other = current_core(), tile(dst, "dst"), tile(data, "data"), tile(operand1, "operand1")
    same_rows(dst=dst, data=data, operand1=other)
    not_both_psum(data=data, operand1=other)
    first, second = function(op0, ARITHMETIC, "op0"), function(op1, ARITHMETIC, "op1")
    left, column = wide_rows(core, data), per_row(core, operand0, data.shape[0], "operand0", (float32,))
    left = np.asarray(first(column, left) if reverse0 else first(left, column), np.float32)
    right = wide_rows(core, other)
    store_rows(core, dst, np.asarray(second(right, left) if reverse1 else second(left, right), np.float32))


@instruction
def tensor_reduce(
    dst: Any, op: Any, data: Any, axis: Any, negate: Any = False, keepdims: Any = False, name: Any = None
) -> None:
    """Reduce trailing free dimensions of ``data``; partitions are never reduced."""
    core, dst, data = current_core(), tile(dst, "dst"), tile(data, "data")
    axes = tuple(sorted(compile_time_int(a, "axis") for a in (axis if isinstance(axis, tuple | list) else (axis,))))
    if not axes or axes[0] < 1 or axes != tuple(range(axes[0], data.ndim)):
        raise EmulationError(f"axis {axis!r} must be trailing free dimensions of {data!r}, never 0")
    kept = data.shape[: axes[0]]
    rows = dst.shape[0], dst.size // dst.shape[0]
    if rows != (kept[0], int(np.prod(kept[1:], dtype=int))):
        raise EmulationError(f"dst {dst!r} does not hold one result for each of {kept}")
    values = load(core, data).astype(np.float32)
    result = function(op, REDUCTIONS, "op")(values, axis=axes, dtype=np.float32)
    store(core, dst, (-result if negate else result).reshape(dst.shape))


@instruction
def reciprocal(dst: Any, data: Any, name: Any = None) -> None:
    """``dst = 1 / data``."""
    core, dst, data = current_core(), tile(dst, "dst"), tile(data, "data")
    same_rows(dst=dst, data=data)
    with np.errstate(divide="ignore"):
        store_rows(core, dst, np.float32(1) / wide_rows(core, data))


@instruction
def iota(dst: Any, pattern: Any, offset: Any = 0, channel_multiplier: Any = 0, name: Any = None) -> None:
    """``dst[p, i...] = offset + p * channel_multiplier + sum(i_d * step_d)`` for [step, count] pairs; SBUF only."""
    core, dst = current_core(), tile(dst, "dst")
    if dst.buffer == psum:
        raise EmulationError(f"dst {dst!r}: GpSimd cannot reach PSUM")
    values = np.full((dst.shape[0], 1), compile_time_int(offset, "offset"), np.int64)
    values += np.arange(dst.shape[0])[:, None] * compile_time_int(channel_multiplier, "channel_multiplier")
    for step, count in pattern:
        values = (values[:, :, None] + np.arange(count) * step).reshape(dst.shape[0], -1)
    if values.size != dst.size:
        raise EmulationError(f"the pattern's counts make {values.shape[1]} elements per partition, dst is {dst!r}")
    store_rows(core, dst, values)


def _is_bitwise(op: object) -> bool:
    return isinstance(op, Op) and op.name in BITWISE


def _check_ints(*tiles: Tensor) -> None:
    if any(t.dtype.is_float for t in tiles):
        raise EmulationError("ops on bits need integer tiles")
