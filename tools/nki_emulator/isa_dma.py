"""Copies between HBM and SBUF: plain, cast, gathered and scattered by row, transposed, added."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from .access import Place, load, place, store
from .core import Core, current_core
from .dtypes import Array, rounded
from .errors import CallError, EmulationError
from .instructions import engine as Engine
from .instructions import instruction
from .op_table import REDUCTIONS, function
from .storage import psum, sbuf
from .tensors import Tensor

engine = Engine


class oob_mode(enum.Enum):
    """What becomes of a row whose index is out of bounds."""

    error = 0
    skip = 1


class dge_mode(enum.Enum):
    """Who makes the descriptors of a DMA."""

    unknown = 0
    none = 1
    swdge = 2
    hwdge = 3


@instruction
def dma_copy(
    dst: Any,
    src: Any,
    priority: Any = None,
    oob_mode: Any = oob_mode.error,
    dge_mode: Any = dge_mode.unknown,
    engine: Any = engine.unknown,
    name: Any = None,
) -> None:
    """``dst = src``, element by element in row-major order, cast through float32."""
    core, (dst, src) = current_core(), _ends(dst, src)
    _check_modes(priority, oob_mode, dge_mode, engine, dst, src)
    if dst.size != src.size:
        raise EmulationError(f"dst {dst!r} and src {src!r} have different element counts")
    if dst.vector_offset is not None and src.vector_offset is not None:
        raise EmulationError("one side may be indirect, not both")
    skip = oob_mode.name == "skip"
    if skip and not (dst.is_dynamic or src.is_dynamic):
        raise EmulationError("oob_mode.skip without an indirect operand")
    source, target = place(core, src, skip), place(core, dst, skip)
    values = load(core, src, source)
    kept = source.kept if source.kept is not None else target.kept
    if kept is None:
        store(core, dst, values.reshape(dst.shape), target)
    elif kept.size:
        _copy_rows(core, dst, src, values, source, target)


def _copy_rows(core: Core, dst: Tensor, src: Tensor, values: Array, source: Place, target: Place) -> None:
    """A gather or scatter that leaves rows out of bounds as they are."""
    if source.kept is not None:
        if dst.shape[0] != src.shape[0]:
            raise EmulationError(f"a gather needs as many rows in dst {dst!r} as in src {src!r}")
        every = np.arange(dst.storage.flat.size)
        rows = target.get(every)[source.kept]
        values = values.reshape(rows.shape)
        store(core, dst, values, Place(dst, 0, rows, None))
        return
    assert target.kept is not None
    assert target.index is not None
    kept_rows = values.reshape(dst.shape)[target.kept]
    store(core, dst, _undefined_where_doubled(kept_rows, target.index, dst), target)


def _undefined_where_doubled(values: Array, index: Array, dst: Tensor) -> Array:
    """Rows scattered to one place land in no defined order: NaN where they differ (floats), else the last."""
    values = rounded(values, dst.dtype)
    if not dst.dtype.is_float or not len(values):
        return values
    rows, values = values.reshape(len(values), -1), values.copy()
    starts = index.reshape(len(values), -1)[:, 0]
    for start in (start for start, count in zip(*np.unique(starts, return_counts=True), strict=True) if count > 1):
        same = starts == start
        if (rows[same] != rows[same][0]).any():
            values[same] = np.nan
    return values


@instruction
def dma_compute(
    dst: Any,
    srcs: Any,
    reduce_op: Any,
    scales: Any = None,
    unique_indices: Any = True,
    oob_mode: Any = oob_mode.error,
    name: Any = None,
) -> None:
    """``dst = sum(srcs)`` in float32, also added to scattered rows; those must be unique."""
    core = current_core()
    if not isinstance(srcs, tuple | list) or not 1 <= len(srcs) <= 16:
        raise CallError("srcs must be a tuple of 1 to 16 tensors")
    for source in srcs:
        _ends(dst, source)
        if source.size != dst.size:
            raise EmulationError(f"dst {dst!r} and source {source!r} have different element counts")
    function(reduce_op, {"add": REDUCTIONS["add"]}, "reduce_op")
    if scales is not None and any(scale != 1.0 for scale in scales):
        raise EmulationError("scales other than 1.0 are not supported by the device")
    ends = (dst, *srcs)
    if any(end.scalar_offset is not None for end in ends):
        raise EmulationError("dma_compute takes no scalar_offset")
    vectors = [end.vector_offset for end in ends if end.vector_offset is not None]
    if vectors and len(srcs) != 2:
        raise EmulationError("the indirect form takes exactly two sources")
    for vector in vectors:
        rows = load(core, vector).reshape(-1)
        if unique_indices is not True or len(np.unique(rows)) != len(rows):
            raise EmulationError("row indices must be unique within a dma_compute")
    if not isinstance(oob_mode, globals()["oob_mode"]) or oob_mode.name == "skip":
        raise CallError("dma_compute is emulated with oob_mode.error only")
    total = sum(load(core, source).reshape(dst.shape).astype(np.float32) for source in srcs)
    store(core, dst, np.asarray(total))


@instruction
def dma_transpose(
    dst: Any,
    src: Any,
    axes: Any = None,
    priority: Any = None,
    dge_mode: Any = dge_mode.unknown,
    oob_mode: Any = oob_mode.error,
    name: Any = None,
) -> None:
    """``dst = src.T`` while copying to SBUF; the two-dimensional form without indices."""
    core, (dst, src) = current_core(), _ends(dst, src)
    if axes not in (None, (1, 0)) or dst.ndim != 2 or src.ndim != 2 or src.vector_offset is not None:
        raise CallError("dma_transpose is emulated for two dimensions, axes=(1, 0), without vector_offset")
    if dst.buffer != sbuf or dst.dtype != src.dtype or dst.shape != src.shape[::-1]:
        raise EmulationError(f"dst {dst!r} must be in SBUF, of src's dtype {src.dtype} and shape {src.shape[::-1]}")
    store(core, dst, load(core, src).T)


def _ends(dst: object, src: object) -> tuple[Tensor, Tensor]:
    for what, value in (("dst", dst), ("src", src)):
        if not isinstance(value, Tensor):
            raise CallError(f"{what} must be a tensor, not {type(value).__name__}")
        if value.buffer == psum:
            raise EmulationError(f"{what} {value!r} is in PSUM, which DMA does not reach; copy it to SBUF first")
    assert isinstance(dst, Tensor)
    assert isinstance(src, Tensor)
    return dst, src


def _check_modes(priority: Any, oob: Any, dge: Any, chosen: Any, dst: Tensor, src: Tensor) -> None:
    if priority is not None:
        raise CallError("priority exists on trn3 only")
    if not isinstance(oob, oob_mode) or not isinstance(dge, dge_mode) or not isinstance(chosen, Engine):
        raise CallError("oob_mode, dge_mode and engine take members of nisa's enums of those names")
    hardware = dge is dge_mode.hwdge
    if chosen is not Engine.unknown and not (hardware and chosen in (Engine.sync, Engine.scalar)):
        raise EmulationError("engine is for dge_mode.hwdge only, and there sync or scalar")
    if hardware and (dst.vector_offset is not None or src.vector_offset is not None or dst.dtype != src.dtype):
        raise EmulationError("dge_mode.hwdge neither gathers, scatters nor casts")
