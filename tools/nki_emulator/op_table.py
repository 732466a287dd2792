"""The functions that ops take as arguments, ``op=nl.multiply``: what they compute, and where they are legal.

Activations are exact float32 functions; hardware's are piecewise polynomials, about 1e-3 off after bf16 rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import CallError

_ONE = np.float32(1)


@dataclass(frozen=True, slots=True)
class Op:
    """A function's name; which table it stands in decides where it may be used."""

    name: str

    def __repr__(self) -> str:
        return f"nl.{self.name}"


def _sigmoid(x: Any) -> Any:
    with np.errstate(over="ignore"):
        return _ONE / (_ONE + np.exp(-x))


def _silu_dx(x: Any) -> Any:
    s = _sigmoid(x)
    return s * (_ONE + x * (_ONE - s))


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "copy": lambda x: x,
    "square": np.square,
    "sigmoid": _sigmoid,
    "relu": lambda x: np.maximum(x, np.float32(0)),
    "silu": lambda x: x * _sigmoid(x),
    "silu_dx": _silu_dx,
    "tanh": np.tanh,
    "exp": np.exp,
    "sign": np.sign,
    "abs": np.abs,
}

ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "less": np.less,
    "less_equal": np.less_equal,
}
"""Two operands in float32; comparisons give 1.0 and 0.0. There is no divide and no mod on the device."""

BITWISE: dict[str, Callable[[Any, Any], Any]] = {
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "left_shift": np.left_shift,
    "right_shift": np.right_shift,
}
"""Two operands as integers."""

REDUCTIONS: dict[str, Callable[..., Any]] = {
    "add": np.add.reduce,
    "multiply": np.multiply.reduce,
    "maximum": np.maximum.reduce,
    "minimum": np.minimum.reduce,
}

OPS = {name: Op(name) for name in (*ACTIVATIONS, *ARITHMETIC, *BITWISE)}


def function(op: object, table: dict[str, Callable[..., Any]], what: str) -> Callable[..., Any]:
    """What ``op`` computes; raises CallError where the instruction does not take it."""
    if not isinstance(op, Op) or op.name not in table:
        raise CallError(f"{what} is {op!r}; the emulated ones are {', '.join(f'nl.{name}' for name in table)}")
    return table[op.name]
