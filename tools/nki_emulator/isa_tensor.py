"""The Tensor engine: matrix products and transposes, into PSUM."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from .access import load, store, store_matmul
from .capacity import BANK_BYTES
from .core import Core, current_core
from .dtypes import bfloat16, float16, float32
from .errors import CallError, EmulationError
from .instructions import engine, instruction, on_engine, rows_of, tile
from .storage import psum, sbuf
from .tensors import Tensor

MAX_K, MAX_M, MAX_N = 128, 128, 512
"""Partitions, stationary columns and moving columns of one product on trn2."""
VECTOR_TRANSPOSE = 32


class matmul_perf_mode(enum.Enum):
    """Faster modes, of which none is emulated."""

    none = 0


@instruction
def nc_matmul(
    dst: Any,
    stationary: Any,
    moving: Any,
    is_stationary_onezero: Any = False,
    is_moving_onezero: Any = False,
    is_transpose: Any = False,
    accumulate: Any = None,
    tile_position: Any = (),
    tile_size: Any = (),
    perf_mode: Any = matmul_perf_mode.none,
    name: Any = None,
) -> None:
    """``dst (M, N) = stationary (K, M).T @ moving (K, N)``, or added to dst; float32 in PSUM.

    ``accumulate`` must be said: what None infers differs with the order of the program.
    """
    core = current_core()
    dst, left, right = tile(dst, "dst"), _operand(stationary, "stationary"), _operand(moving, "moving")
    others = (is_stationary_onezero, is_moving_onezero, is_transpose, tile_position, tile_size, perf_mode)
    if others != (False, False, False, (), (), matmul_perf_mode.none):
        raise CallError("the onezero, transpose, tiling and perf_mode arguments stay at their defaults")
    if not isinstance(accumulate, bool):
        raise CallError(f"accumulate must be True or False, known at compile time, not {accumulate!r}")
    (k, m), (k2, n) = left.shape, right.shape
    if k != k2:
        raise EmulationError(f"both operands hold the summed dimension on partitions: {left!r} against {right!r}")
    if k > MAX_K or m > MAX_M or n > MAX_N:
        raise EmulationError(f"K {k}, M {m}, N {n} must be at most {MAX_K}, {MAX_M}, {MAX_N}")
    if (left.dtype == float32) != (right.dtype == float32):
        raise EmulationError(f"float32 multiplies float32 only: {left.dtype} against {right.dtype}")
    if dst.buffer != psum or dst.dtype != float32 or dst.shape != (m, n):
        raise EmulationError(f"dst must be a float32 PSUM tile of shape {(m, n)}, not {dst!r} of {dst.dtype}")
    _check_bank(dst)
    _check_scope(core, dst)
    product = load(core, left).astype(np.float32).T @ load(core, right).astype(np.float32)
    core.matmul_macs += k * m * n
    store_matmul(core, dst, product, accumulate)


@instruction
def nc_transpose(dst: Any, data: Any, engine: Any = engine.unknown, name: Any = None) -> None:
    """``dst (F, P) = data (P, F).T``, bit for bit: SBUF to PSUM up to 128 x 128, on the Vector engine up to 32 x 32."""
    core, dst, data = current_core(), tile(dst, "dst"), tile(data, "data")
    kinds = type(engine)
    on_engine(engine, (kinds.tensor, kinds.vector), dst, data)
    rows, columns = data.shape[0], data.size // data.shape[0]
    if dst.dtype != data.dtype:
        raise EmulationError(f"dst is {dst.dtype} and data {data.dtype}; a transpose keeps the type, in PSUM too")
    if (dst.shape[0], dst.size // dst.shape[0]) != (columns, rows):
        raise EmulationError(f"dst {dst!r} does not hold {columns} partitions of {rows}, the transpose of {data!r}")
    on_tensor = engine is kinds.tensor or (engine is kinds.unknown and dst.buffer == psum)
    limit = MAX_K if on_tensor else VECTOR_TRANSPOSE
    if on_tensor and (data.buffer != sbuf or dst.buffer != psum):
        raise EmulationError("the Tensor engine transposes from SBUF to PSUM")
    if on_tensor:
        _check_scope(core, dst)
    if rows > limit or columns > limit:
        raise EmulationError(f"{rows} x {columns} is more than the {limit} x {limit} of this engine")
    store(core, dst, rows_of(core, data).T.reshape(dst.shape))


def _operand(value: object, what: str) -> Tensor:
    operand = tile(value, what)
    if operand.buffer != sbuf:
        raise EmulationError(f"{what} {operand!r} must be in SBUF")
    if operand.ndim != 2:
        raise EmulationError(f"{what} {operand!r} must have one free dimension")
    if operand.dtype not in (bfloat16, float16, float32):
        raise EmulationError(f"{what} is {operand.dtype}; the Tensor engine multiplies floats")
    return operand


def _check_scope(core: Core, dst: Tensor) -> None:
    """Source: users of neuronx-cc 2.27 report that it refuses such a kernel (NCC_IBIR092); SBUF may be outside."""
    if core.body is not None and dst.storage.scope is not core.scope:
        raise EmulationError(
            f"dst {dst!r} was allocated outside the run-time loop: what the Tensor engine writes in a loop's body is "
            "PSUM of that body"
        )


def _check_bank(dst: Tensor) -> None:
    first = dst.offset % dst.storage.row * dst.dtype.size
    last = first + (dst.shape[1] - 1) * dst.strides[1] * dst.dtype.size
    if first // BANK_BYTES != last // BANK_BYTES:
        raise EmulationError(f"dst {dst!r} crosses a PSUM bank: a product lies inside {BANK_BYTES} bytes per partition")
