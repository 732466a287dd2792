"""Memory behind tensors: fresh storage, what was written, by which core, and the state of PSUM accumulation."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from .capacity import BANK_BYTES, Lifetime
from .core import Core, Scope
from .dtypes import DTYPES, Array, Dtype, fresh
from .errors import AccessError, CallError, EmulationError

MAX_PARTITIONS = 128

NEVER_WRITTEN, BY_MATMUL, OTHER_OP = range(3)
"""States of a PSUM element."""

HERE = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A memory as kernels name it, ``nl.sbuf``."""

    name: str

    @property
    def on_chip(self) -> bool:
        """SBUF and PSUM: dimension 0 is the partition."""
        return self.name in {"sbuf", "psum"}

    def __repr__(self) -> str:
        return f"nl.{self.name}"


sbuf, psum, hbm, private_hbm, shared_hbm = map(Buffer, ("sbuf", "psum", "hbm", "private_hbm", "shared_hbm"))
BUFFERS = (sbuf, psum, hbm, private_hbm, shared_hbm)


@dataclass(slots=True, eq=False)
class Storage:
    """One allocation, flat and row-major."""

    name: str
    buffer: Buffer
    shape: tuple[int, ...]
    dtype: Dtype
    flat: Array
    scope: Scope
    label: tuple[object, ...]
    """The same for the same allocation in another iteration of a loop's body."""
    written: Array | None = None
    """Per element; None where all was written before the kernel, as in its arguments."""
    lifetime: Lifetime | None = None
    matmul: Array | None = None
    """PSUM: state per element."""
    unread: Array | None = None
    """PSUM: a matmul's result that nothing has read."""
    writers: Array | None = None
    """Shared HBM on two cores: 1 + the core that wrote each element, 0 for none."""
    readers: Array | None = None
    """Shared HBM on two cores: bit per core that read the element."""

    @property
    def row(self) -> int:
        """Elements of one index of dimension 0: on chip, those of one partition."""
        return prod(self.shape[1:])


def called_from() -> str:
    """``file.py:line`` of the kernel's statement that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((HERE, "<")):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def argument(array: Array, dtype: Dtype, name: str, num_programs: int) -> Storage:
    """A kernel's argument over the caller's memory: shared HBM, written, seen by all cores."""
    storage = Storage(name, shared_hbm, array.shape, dtype, array.reshape(-1), Scope(0), ("argument", name))
    _watch_cores(storage, num_programs)
    return storage


def allocate(core: Core, shape: Any, dtype: Any, buffer: Any, name: str) -> Storage:
    """Fresh storage by the rules of ``nl.ndarray``; raises CallError, EmulationError and CapacityError."""
    shape = _checked_shape(shape)
    if not isinstance(dtype, Dtype) or dtype not in DTYPES:
        raise CallError(f"dtype must be one of nl's, such as nl.bfloat16, not {dtype!r}")
    if not isinstance(buffer, Buffer) or buffer not in BUFFERS:
        raise CallError(f"buffer must be one of nl's, such as nl.sbuf, not {buffer!r}")
    name = name or f"{buffer.name} tensor {'x'.join(map(str, shape))} of {called_from()}"
    core.emit(("ndarray", shape, dtype.name, buffer.name))
    core.scope.allocated += 1
    if buffer == shared_hbm:
        return _shared(core, shape, dtype, name)
    label = (core.scope.allocated,) if core.body is not None else (core.scope.serial, core.scope.allocated)
    lifetime = None
    if buffer.on_chip:
        size = prod(shape[1:]) * dtype.size
        _check_tile(name, shape, size, buffer)
        lifetime = core.capacity.allocate(name, buffer.name, size, counted=core.iteration == 0)
    flat = fresh(prod(shape), dtype)
    storage = Storage(name, buffer, shape, dtype, flat, core.scope, label, np.zeros(flat.size, np.bool_), lifetime)
    if buffer == psum:
        storage.matmul, storage.unread = np.zeros(flat.size, np.int32), np.zeros(flat.size, np.bool_)
    return storage


def _checked_shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, tuple | list) or not shape:
        raise CallError(f"shape must be a tuple of ints, not {shape!r}")
    for size in shape:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise CallError(f"shape {tuple(shape)!r} must hold compile-time ints of at least 1")
    return tuple(shape)


def _check_tile(name: str, shape: tuple[int, ...], size: int, buffer: Buffer) -> None:
    if len(shape) < 2:
        raise EmulationError(f"{name} has shape {shape}; tensors on the chip have at least two dimensions")
    if shape[0] > MAX_PARTITIONS:
        raise EmulationError(f"{name} has {shape[0]} partitions (dimension 0); there are {MAX_PARTITIONS}")
    if buffer == psum and size > BANK_BYTES and size % BANK_BYTES:
        raise EmulationError(
            f"{name} takes {size} bytes per partition: a PSUM tile fits one bank of {BANK_BYTES} or spans whole banks"
        )


def _shared(core: Core, shape: tuple[int, ...], dtype: Dtype, name: str) -> Storage:
    """Shared HBM: the k-th allocation of every core is one tensor."""
    if core.body is not None:
        raise EmulationError(f"{name} is shared HBM; allocate it outside run-time loops")
    at, core.shared_seen = core.shared_seen, core.shared_seen + 1
    if at < len(core.shared):
        storage = core.shared[at]
        if (storage.shape, storage.dtype) != (shape, dtype):
            raise EmulationError(
                f"{name}: core {core.program_id} allocates {shape} {dtype} where core 0 allocated "
                f"{storage.shape} {storage.dtype}; all cores allocate the same shared tensors in the same order"
            )
        return storage
    if core.program_id:
        raise EmulationError(f"{name}: core {core.program_id} allocates a shared tensor that core 0 did not")
    flat = fresh(prod(shape), dtype)
    written = np.zeros(flat.size, np.bool_)
    storage = Storage(name, shared_hbm, shape, dtype, flat, Scope(0), ("shared", at), written)
    _watch_cores(storage, core.num_programs)
    core.shared.append(storage)
    return storage


def _watch_cores(storage: Storage, num_programs: int) -> None:
    if num_programs > 1:
        storage.writers, storage.readers = (np.zeros(storage.flat.size, np.uint8) for _ in range(2))


def check_alive(storage: Storage) -> None:
    """Raise AccessError where the loop body, or the kernel, that allocated the storage has ended."""
    if not storage.scope.alive:
        raise AccessError(f"{storage.name} was allocated inside a run-time loop or another kernel, which has ended")
