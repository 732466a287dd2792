"""Tensors as kernels see them: views of storage by slices and by access patterns, static or moved at run time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NoReturn

from .core import compile_time_int
from .dtypes import Dtype, int32, uint32
from .errors import AccessError, CallError, EmulationError
from .storage import Buffer, Storage, check_alive, sbuf


class RunTimeValue:
    """A value that the compiler does not know: using it in Python is an error."""

    __slots__ = ()

    def _unknown(self, *_: object) -> NoReturn:
        raise CallError(f"{self!r} is known at run time only: Python cannot compute, compare or loop with it")

    __int__ = __index__ = __float__ = __bool__ = __len__ = __iter__ = _unknown
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __mod__ = __neg__ = _unknown
    __lt__ = __le__ = __gt__ = __ge__ = __array__ = _unknown


@dataclass(slots=True, eq=False)
class Register(RunTimeValue):
    """A 32-bit integer register, or the index of ``nl.fori_loop``: good as ``scalar_offset`` and as a loop's bound."""

    value: int | None = None
    read_only: bool = False

    def __repr__(self) -> str:
        return "a loop index" if self.read_only else "a register"

    def read(self) -> int:
        """What it holds; raises AccessError before anything was moved in."""
        if self.value is None:
            raise AccessError("a register is read before anything was moved or loaded into it")
        return self.value


@dataclass(frozen=True, slots=True)
class Ds:
    """``nl.ds(start, size)``: the slice ``start : start + size``."""

    start: int
    size: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Tensor(RunTimeValue):
    """A strided view; strides and offset count elements of the storage."""

    storage: Storage
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    scalar_offset: Tensor | Register | None = None
    vector_offset: Tensor | None = None
    """(P, 1) indices of dimension 0 of the storage, one for each index of the view's dimension 0."""
    indirect_stride: int = 0

    def __repr__(self) -> str:
        return f"{self.storage.name}{list(self.shape)}"

    @property
    def dtype(self) -> Dtype:
        """The element type."""
        return self.storage.dtype

    @property
    def buffer(self) -> Buffer:
        """The memory."""
        return self.storage.buffer

    @property
    def name(self) -> str:
        """The name of the allocation."""
        return self.storage.name

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def is_dynamic(self) -> bool:
        """Whether a run-time value moves it."""
        return self.scalar_offset is not None or self.vector_offset is not None

    def key(self) -> tuple[object, ...]:
        """What the compiler knows of it: equal in every iteration of a loop's body."""
        moved = self.scalar_offset.key() if isinstance(self.scalar_offset, Tensor) else repr(self.scalar_offset)
        rows = self.vector_offset.key() if self.vector_offset is not None else None
        return (self.storage.label, self.shape, self.strides, self.offset, moved, rows)

    def __getitem__(self, index: Any) -> Tensor:
        """Basic slices: ints, slices, ``...`` and ``nl.ds``; out of bounds is an error, not cut off as in NumPy."""
        check_alive(self.storage)
        if self.is_dynamic:
            raise CallError(f"{self!r} is moved at run time; slice before .ap, not after it")
        shape, strides, offset = [], [], self.offset
        for dim, entry in enumerate(_full_index(index, self.ndim)):
            size, stride = self.shape[dim], self.strides[dim]
            start, count, step = _entry(entry, size, f"{self!r}, dimension {dim}")
            offset += start * stride
            if count is None and not (dim == 0 and self.buffer.on_chip):
                continue
            shape.append(1 if count is None else count)
            strides.append(stride * step)
        least = 2 if self.buffer.on_chip else 1
        while len(shape) < least:
            shape.append(1)
            strides.append(1)
        return replace(self, shape=tuple(shape), strides=tuple(strides), offset=offset)

    def reshape(self, shape: Sequence[int]) -> Tensor:
        """The same elements in another shape; the partition dimension stays, and the view must be contiguous."""
        if self.is_dynamic or self.strides != contiguous_strides(self.shape):
            raise EmulationError(f"{self!r} is not contiguous; reshape the whole tensor")
        if prod(shape) != self.size or (self.buffer.on_chip and shape[0] != self.shape[0]):
            raise EmulationError(f"{self!r} cannot become {tuple(shape)}: elements, and on chip partitions, must agree")
        return replace(self, shape=tuple(shape), strides=contiguous_strides(shape))

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int | None = None,
        scalar_offset: Tensor | Register | None = None,
        vector_offset: Tensor | None = None,
        indirect_dim: int = 0,
        dtype: None = None,
    ) -> Tensor:
        """The view of [step, count] pairs: element [i0, i1, ...] is ``flat[offset + i0 * step0 + i1 * step1 + ...]``.

        ``scalar_offset`` moves it by s rows of dimension ``indirect_dim``, ``vector_offset`` each index p of dimension
        0 by v[p] rows of dimension 0, which then replace step0.
        """
        if dtype is not None:
            raise CallError(f"{self!r}: .ap(dtype=...) is not emulated")
        if not self.is_whole:
            raise EmulationError(
                f"{self!r} is a slice or a pattern; .ap addresses whole storage, call it on the tensor"
            )
        pairs = [_pair(pair, f"{self!r}, pattern") for pair in pattern]
        if self.buffer.on_chip:
            self._check_on_chip(pairs, offset or 0)
        if scalar_offset is not None and vector_offset is not None:
            raise CallError(f"{self!r}: scalar_offset and vector_offset exclude each other")
        dim = compile_time_int(indirect_dim, "indirect_dim")
        if not 0 <= dim < self.ndim or (dim == 0 and scalar_offset is not None and self.buffer.on_chip):
            raise EmulationError(f"{self!r}: indirect_dim {dim} is not a dimension that can move")
        if scalar_offset is not None:
            _check_scalar(scalar_offset, repr(self))
        if vector_offset is not None:
            self._check_vector(vector_offset, dim, pairs)
        return replace(
            self,
            shape=tuple(count for _, count in pairs),
            strides=tuple(step for step, _ in pairs),
            offset=compile_time_int(offset or 0, "offset"),
            scalar_offset=scalar_offset,
            vector_offset=vector_offset,
            indirect_stride=prod(self.storage.shape[dim + 1 :]),
        )

    @property
    def is_whole(self) -> bool:
        """Whether it is the allocation itself."""
        shape = self.storage.shape
        plain = (self.shape, self.strides, self.offset) == (shape, contiguous_strides(shape), 0)
        return plain and not self.is_dynamic

    def _check_on_chip(self, pairs: Sequence[tuple[int, int]], offset: int) -> None:
        row = self.storage.row
        if len(pairs) < 2 or pairs[0][0] != row:
            raise EmulationError(
                f"{self!r}: on chip the first pair of a pattern is the partition's, with a step of {row} elements, "
                f"and at least one more follows; found {[list(pair) for pair in pairs]}"
            )
        if offset % row + sum(step * (count - 1) for step, count in pairs[1:]) >= row:
            raise AccessError(f"{self!r}: the pattern leaves its partition of {row} elements")

    def _check_vector(self, vector: Any, dim: int, pairs: Sequence[tuple[int, int]]) -> None:
        rows = pairs[0][1]
        if not isinstance(vector, Tensor) or vector.buffer != sbuf or vector.dtype not in (int32, uint32):
            raise CallError(f"{self!r}: vector_offset must be an int32 or uint32 tile in SBUF, not {vector!r}")
        if vector.shape != (rows, 1):
            raise EmulationError(
                f"{self!r}: vector_offset has shape {vector.shape}, the pattern's rows ask ({rows}, 1)"
            )
        if self.buffer.on_chip or dim != 0:
            raise EmulationError(f"{self!r}: vector_offset moves rows of dimension 0 of a tensor in HBM only")


def whole(storage: Storage) -> Tensor:
    """The view of all of it."""
    return Tensor(storage, storage.shape, contiguous_strides(storage.shape))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _check_scalar(scalar: object, where: str) -> None:
    if isinstance(scalar, Register):
        return
    if not isinstance(scalar, Tensor) or scalar.buffer != sbuf or scalar.shape != (1, 1) or scalar.dtype.is_float:
        raise CallError(f"{where}: scalar_offset must be a (1, 1) integer tile in SBUF or a register, not {scalar!r}")


def _pair(pair: Sequence[int], where: str) -> tuple[int, int]:
    if len(pair) != 2:
        raise CallError(f"{where} must hold [step, count] pairs, not {pair!r}")
    step, count = (compile_time_int(value, where) for value in pair)
    if step < 0 or count < 1:
        raise EmulationError(f"{where}: step {step} and count {count} must be at least 0 and 1")
    return step, count


def _full_index(index: Any, ndim: int) -> list[Any]:
    entries = list(index) if isinstance(index, tuple) else [index]
    dots = [at for at, entry in enumerate(entries) if entry is Ellipsis]
    if len(dots) > 1 or len(entries) - len(dots) > ndim:
        raise CallError(f"index {index!r} has too many entries for {ndim} dimensions")
    at = dots[0] if dots else len(entries)
    missing = ndim - (len(entries) - len(dots))
    return entries[:at] + [slice(None)] * missing + entries[at + len(dots) :]


def _entry(entry: Any, size: int, where: str) -> tuple[int, int | None, int]:
    """Start, count (None for an int) and step."""
    if isinstance(entry, Ds):
        entry = slice(entry.start, entry.start + entry.size)
    if isinstance(entry, slice):
        step = 1 if entry.step is None else compile_time_int(entry.step, where)
        start = 0 if entry.start is None else compile_time_int(entry.start, where)
        stop = size if entry.stop is None else compile_time_int(entry.stop, where)
        start, stop = (bound + size if bound < 0 else bound for bound in (start, stop))
        if step < 1 or not 0 <= start < stop <= size:
            raise AccessError(f"{where}: slice {start}:{stop}:{step} is empty or outside its {size} elements")
        return start, -(-(stop - start) // step), step
    position = compile_time_int(entry, where)
    if not -size <= position < size:
        raise AccessError(f"{where}: index {position} is outside its {size} elements")
    return position % size, None, 1
