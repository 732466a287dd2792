"""The element types of NKI that the emulator stores, and how a value is rounded into each.

Arithmetic is float32 inside every op; a result is rounded once, when it is stored: to nearest even for floats, to
nearest even and saturating for integers (NKI 0.6 documentation, data types).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from .errors import CallError, EmulationError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Dtype:
    """An element type as kernels name it, ``nl.bfloat16``; there is no 64-bit type."""

    name: str
    numpy: np.dtype[Any]

    @property
    def size(self) -> int:
        """Bytes of one element."""
        return self.numpy.itemsize

    @property
    def is_float(self) -> bool:
        """Whether it holds fractions; numpy counts bfloat16 among neither floats nor integers."""
        return self.numpy.kind not in "iu"

    def __repr__(self) -> str:
        return f"nl.{self.name}"


float32 = Dtype("float32", np.dtype(np.float32))
bfloat16 = Dtype("bfloat16", np.dtype(ml_dtypes.bfloat16))
float16 = Dtype("float16", np.dtype(np.float16))
int8, int16, int32 = (Dtype(name, np.dtype(name)) for name in ("int8", "int16", "int32"))
uint8, uint16, uint32 = (Dtype(name, np.dtype(name)) for name in ("uint8", "uint16", "uint32"))

DTYPES = (float32, bfloat16, float16, int8, int16, int32, uint8, uint16, uint32)
_BY_NUMPY = {dtype.numpy: dtype for dtype in DTYPES}

FRESH_INT = 4
"""What fresh integer storage holds in the vendor's simulator; floats hold NaN."""


def of_array(array: Array) -> Dtype:
    """The type of a kernel's argument; raises CallError for one that the device does not have."""
    if array.dtype not in _BY_NUMPY:
        raise CallError(f"an argument is {array.dtype}; the device has {', '.join(d.name for d in DTYPES)}")
    return _BY_NUMPY[array.dtype]


def fresh(elements: int, dtype: Dtype) -> Array:
    """Flat storage that nothing has written: NaN, or 4 in integers."""
    return np.full(elements, np.nan if dtype.is_float else FRESH_INT, dtype.numpy)


def rounded(values: Array, dtype: Dtype) -> Array:
    """``values`` as ``dtype`` stores them."""
    if values.dtype == dtype.numpy:
        return values
    if dtype.is_float:
        with np.errstate(over="ignore"):  # too large for fp16 is infinity there, and no error
            return values.astype(np.float32).astype(dtype.numpy)
    wide = values.astype(np.float64)
    if np.isnan(wide).any():
        raise EmulationError(f"NaN is stored as {dtype.name}, which hardware leaves undefined")
    limits = np.iinfo(dtype.numpy)
    return np.clip(np.rint(wide), limits.min, limits.max).astype(dtype.numpy)
