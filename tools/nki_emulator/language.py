"""Allocation, slices and program ids of ``nki.language``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import storage
from .capacity import BANK_BYTES, PSUM_BANKS, SBUF_BYTES
from .core import compile_time_int, current_core
from .errors import CallError
from .isa_tensor import MAX_M, MAX_N
from .isa_vector import memset
from .tensors import Ds, Tensor, whole


@dataclass(frozen=True, slots=True)
class TileSize:
    """Limits of trn2, ``nl.tile_size``."""

    pmax: int = storage.MAX_PARTITIONS
    psum_bank_fmax: int = BANK_BYTES // 4
    psum_bank_fmax_bytes: int = BANK_BYTES
    psum_num_banks: int = PSUM_BANKS
    gemm_stationary_fmax: int = MAX_M
    gemm_moving_fmax: int = MAX_N
    sbuf_fmax_bytes: int = SBUF_BYTES


class NKIObject:
    """Base of classes that kernels take as arguments."""


def ndarray(shape: Any, dtype: Any, buffer: Any = storage.sbuf, name: str = "", address: None = None) -> Tensor:
    """Uninitialised memory; manual addresses are not emulated."""
    if address is not None:
        raise CallError("manual allocation with address= is not emulated")
    return whole(storage.allocate(current_core(), shape, dtype, buffer, name))


def zeros(shape: Any, dtype: Any, buffer: Any = storage.sbuf, name: str = "") -> Tensor:
    """A tile on the chip, filled by a ``memset``."""
    tensor = ndarray(shape, dtype, buffer, name)
    memset(dst=tensor, value=0.0 if tensor.dtype.is_float else 0)
    return tensor


def ds(start: int, size: int) -> Ds:
    """The slice of ``size`` elements from ``start``."""
    return Ds(compile_time_int(start, "start"), compile_time_int(size, "size"))


def program_id(axis: int = 0) -> int:
    """Which core of the launch runs: 0 or 1, known at compile time."""
    _first_axis(axis)
    return current_core().program_id


def num_programs(axes: int = 0) -> int:
    """How many cores the launch has."""
    _first_axis(axes)
    return current_core().num_programs


def program_ndim() -> int:
    """The rank of the launch grid; 0 where it has one core."""
    return int(current_core().num_programs > 1)


def _first_axis(axis: int) -> None:
    if axis != 0:
        raise CallError(f"the launch grid has axis 0 only, not {axis!r}")
