"""Reading and writing the elements of a view, with the checks that need run-time values.

Reading what nothing has written is an error here, where the vendor's simulator goes on with NaN or 4 and hardware
with whatever the memory held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .core import Core
from .dtypes import Array, rounded
from .errors import AccessError, EmulationError
from .storage import BY_MATMUL, NEVER_WRITTEN, OTHER_OP, Storage, check_alive
from .tensors import Register, Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a view's elements lie: flat indices, or a start with strides; ``kept`` says which rows are in bounds."""

    view: Tensor
    start: int
    index: Array | None
    kept: Array | None

    def get(self, flat: Array) -> Array:
        """The elements of ``flat``, in the view's shape (rows kept only): a copy, or a read-only window."""
        return flat[self.index] if self.index is not None else self._window(flat, writeable=False)

    def put(self, flat: Array, values: Any) -> None:
        """Write ``values`` there."""
        if self.index is not None:
            flat[self.index] = values
        else:
            self._window(flat, writeable=True)[...] = values

    def _window(self, flat: Array, writeable: bool) -> Array:
        strides = tuple(stride * flat.itemsize for stride in self.view.strides)
        window: Array = np.lib.stride_tricks.as_strided(
            flat[self.start :], self.view.shape, strides, writeable=writeable
        )
        return window


def place(core: Core, view: Tensor, skip: bool = False) -> Place:
    """Resolve a view's run-time offsets; raises AccessError out of bounds, or leaves such rows out where ``skip``."""
    storage = view.storage
    check_alive(storage)
    if view.vector_offset is not None:
        return _rows(core, view, view.vector_offset, skip)
    start = view.offset
    if view.scalar_offset is not None:
        start += scalar(core, view.scalar_offset) * view.indirect_stride
    last = start + sum((count - 1) * stride for count, stride in zip(view.shape, view.strides, strict=True))
    if start < 0 or last >= storage.flat.size:
        if skip and view.scalar_offset is not None:
            return Place(view, 0, np.zeros(0, np.intp), np.zeros(0, np.bool_))
        raise AccessError(f"{view!r} reaches elements {start} to {last} of {storage.flat.size}")
    return Place(view, start, None, None)


def scalar(core: Core, value: Tensor | Register) -> int:
    """The run-time integer that a register or a (1, 1) tile holds."""
    return value.read() if isinstance(value, Register) else int(load(core, value).reshape(-1)[0])


def _rows(core: Core, view: Tensor, vector: Tensor, skip: bool) -> Place:
    storage = view.storage
    numbers = load(core, vector).reshape(-1).astype(np.int64)
    inner = np.zeros(view.shape[1:], np.int64)
    for dim, (count, stride) in enumerate(zip(view.shape[1:], view.strides[1:], strict=True)):
        inner += (np.arange(count) * stride).reshape([-1 if d == dim else 1 for d in range(inner.ndim)])
    starts = view.offset + numbers * view.indirect_stride
    kept = (numbers >= 0) & (numbers < storage.shape[0])
    kept &= starts + (inner.max() if inner.size else 0) < storage.flat.size
    if not kept.all() and not skip:
        at = int(np.argmin(kept))
        raise AccessError(
            f"{view!r}: row {at} asks for index {numbers[at]} of a tensor with {storage.shape[0]} "
            f"({int((~kept).sum())} of {kept.size} rows are out of bounds); oob_mode.skip leaves such rows out"
        )
    return Place(view, 0, starts[kept].reshape([-1] + [1] * inner.ndim) + inner, kept)


def load(core: Core, view: Tensor, at: Place | None = None) -> Array:
    """The elements as stored; raises AccessError where one was never written, or the other core wrote it."""
    at = place(core, view) if at is None else at
    storage = view.storage
    if storage.written is not None:
        written = at.get(storage.written)
        if not written.all():
            raise AccessError(
                f"{view!r} is read, and nothing has written {written.size - int(written.sum())} of its "
                f"{written.size} elements"
            )
    if storage.writers is not None and storage.readers is not None:
        writers = at.get(storage.writers)
        if ((writers != 0) & (writers != 1 + core.program_id)).any():
            raise AccessError(f"{view!r}: core {core.program_id} reads elements that core {_other(core)} writes")
        at.put(storage.readers, at.get(storage.readers) | (1 << core.program_id))
    if storage.unread is not None:
        at.put(storage.unread, False)
    if not storage.buffer.on_chip:
        core.hbm_read_bytes += at.get(storage.flat).size * storage.dtype.size
    return at.get(storage.flat)


def store(core: Core, view: Tensor, values: Array, at: Place | None = None) -> None:
    """Round ``values`` to the view's dtype and write them; what was read as a window is copied first."""
    at = place(core, view) if at is None else at
    _claim(core, view, at)
    storage = view.storage
    if storage.matmul is not None and storage.unread is not None:
        at.put(storage.matmul, OTHER_OP)
        at.put(storage.unread, False)
    new = rounded(values, storage.dtype)
    at.put(storage.flat, new.copy() if np.may_share_memory(new, storage.flat) else new)
    if not storage.buffer.on_chip:
        core.hbm_written_bytes += new.size * storage.dtype.size


def store_matmul(core: Core, view: Tensor, values: Array, accumulate: bool) -> None:
    """Write or add a product in PSUM; raises EmulationError where the accumulation group is broken."""
    at = place(core, view)
    storage = view.storage
    assert storage.matmul is not None
    assert storage.unread is not None
    if accumulate:
        state = at.get(storage.matmul)
        if (state == NEVER_WRITTEN).any():
            raise EmulationError(f"{view!r}: accumulate=True on PSUM that no matmul wrote with accumulate=False")
        if (state == OTHER_OP).any():
            raise EmulationError(f"{view!r}: accumulate=True on what memset, a copy or another op wrote is undefined")
        values = at.get(storage.flat) + values
    elif at.get(storage.unread).any():
        raise EmulationError(
            f"{view!r}: accumulate=False overwrites a product that nothing has read; "
            "the second and later products of a sum need accumulate=True"
        )
    _claim(core, view, at)
    at.put(storage.flat, values.astype(np.float32))
    at.put(storage.matmul, BY_MATMUL)
    at.put(storage.unread, True)


def _claim(core: Core, view: Tensor, at: Place) -> None:
    storage: Storage = view.storage
    static = slice(1 if view.vector_offset is not None else 0, None)
    if any(step == 0 and count > 1 for step, count in zip(view.strides[static], view.shape[static], strict=True)):
        raise EmulationError(f"{view!r} is written through a step of 0: several values would go to one element")
    if storage.written is not None:
        at.put(storage.written, True)
    if storage.writers is not None and storage.readers is not None:
        mine = 1 + core.program_id
        writers = at.get(storage.writers)
        if ((writers != 0) & (writers != mine)).any():
            raise AccessError(f"{view!r}: both cores write the same elements of {storage.name}")
        if (at.get(storage.readers) & (1 << _other(core))).any():
            raise AccessError(f"{view!r}: core {core.program_id} writes elements that core {_other(core)} reads")
        at.put(storage.writers, mine)


def _other(core: Core) -> int:
    return 1 - core.program_id
