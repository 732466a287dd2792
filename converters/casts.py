"""Casts between floating dtypes, and what is done to values on the way (FP8 dequantisation), a block of rows at a time.

Arithmetic on bits with numpy, which has no bfloat16: a bf16 is the upper half of a float32. Rounding is to nearest,
ties to even, as torch and the hardware do. Computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from .errors import PolicyError, SourceError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Float32 = npt.NDArray[np.float32]

FLOATS = ("BF16", "F16", "F32")
"""Dtypes that can be cast to one another."""


def widen(block: memoryview, dtype: str) -> Float32:
    """The elements of ``block`` as float32, exactly. FP8 gives the code's own value, without any scale."""
    import numpy as np

    if dtype == "F32":
        return np.frombuffer(block, np.float32)
    if dtype == "BF16":
        wide = np.frombuffer(block, np.uint16).astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    if dtype == "F16":
        return np.frombuffer(block, np.float16).astype(np.float32)
    if dtype == "F8_E4M3":
        return _e4m3_values()[np.frombuffer(block, np.uint8)]
    raise PolicyError(f"tensors of dtype {dtype} cannot be cast; only {', '.join(FLOATS)} and F8_E4M3 can")


def narrow(values: Float32, dtype: str, name: str) -> memoryview:
    """``values`` rounded to ``dtype``, as bytes.

    Raises:
        PolicyError: a finite value is beyond the range of float16.
    """
    import numpy as np

    out: npt.NDArray[Any]
    if dtype == "F32":
        out = values
    elif dtype == "F16":
        with np.errstate(over="ignore"):
            out = values.astype(np.float16)
        lost = np.isinf(out) & np.isfinite(values)
        if lost.any():
            worst = float(np.abs(values[lost]).max())
            raise PolicyError(
                f"{name}: {worst:g} does not fit into float16 (largest 65504); cast to bfloat16 or float32 instead"
            )
    elif dtype == "BF16":
        bits = values.view(np.uint32)
        rounded = bits >> 16
        rounded &= 1
        rounded += 0x7FFF
        rounded += bits
        rounded >>= 16
        with np.errstate(invalid="ignore"):
            has_nan = bool(np.isnan(values.max(initial=0)))
        if has_nan:
            is_nan = np.isnan(values)
            rounded[is_nan] = bits[is_nan] >> 16 | 0x40
        out = rounded.astype(np.uint16)
    else:
        raise PolicyError(f"cannot cast to {dtype}; only to {', '.join(FLOATS)}")
    return np.ascontiguousarray(out).data.cast("B")


class ScaledRows:
    """Rows of a block-quantised matrix, decoded: element (r, c) times ``scale[r // rows, c // columns]``.

    Source: the ``weight_scale_inv`` convention of Qwen3's FP8 repositories (transformers 5.24,
    ``integrations/finegrained_fp8.py``). Edge blocks may be smaller than the others.
    """

    def __init__(
        self, raw: bytes, dtype: str, shape: tuple[int, int], block: tuple[int, int], columns: int, name: str
    ) -> None:
        import numpy as np

        grid = widen(memoryview(raw), dtype).reshape(shape)
        if not np.isfinite(grid).all():
            raise SourceError(f"{name}: its weight_scale_inv holds values that are not finite")
        self._block_rows = block[0]
        self._by_column = np.repeat(grid, block[1], axis=1)[:, :columns]
        self._columns = columns

    def apply(self, values: Float32, row: int) -> Float32:
        """``values``, whole rows from ``row`` on, times their scales."""
        import numpy as np

        matrix = values.reshape(-1, self._columns)
        picked = self._by_column[(row + np.arange(matrix.shape[0])) // self._block_rows]
        return np.multiply(matrix, picked, dtype=np.float32).reshape(-1)


class RowStep(Protocol):
    """Something that is done to values in float32, between widening and rounding."""

    def apply(self, values: Float32, row: int) -> Float32:
        """``values``, whole rows of a parameter from ``row`` on, as they are afterwards."""


Decode = Callable[[memoryview, int], memoryview]
"""``(source bytes of whole rows, first row) -> target bytes``."""


def decoder(source: str, target: str, name: str, steps: Sequence[RowStep] = ()) -> Decode | None:
    """What turns ``source`` bytes into ``target`` bytes, by way of ``steps``; ``None`` when they are the same."""
    if not steps and source == target:
        return None

    def decode(block: memoryview, row: int) -> memoryview:
        values = widen(block, source)
        for step in steps:
            values = step.apply(values, row)
        return narrow(values, target, name)

    return decode


@cache
def _e4m3_values() -> Float32:
    """The 256 values of float8_e4m3fn: 1 sign, 4 exponent (bias 7), 3 mantissa bits; NaN is 0x7F and 0xFF."""
    import numpy as np

    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = (1 + mantissa / 8) * np.exp2(exponent - 7.0)
    values = np.where(exponent == 0, mantissa / 8 * np.exp2(-6.0), normal)
    values[(codes & 0x7F) == 0x7F] = np.nan
    signed: Float32 = np.where(codes & 0x80, -values, values).astype(np.float32)
    return signed
