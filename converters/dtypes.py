"""Element types, named as safetensors headers name them (``BF16``, ``F8_E4M3``), with their width in bytes.

Codes: safetensors 0.8, ``Dtype``. Torch names: ``torch.<name>``, torch 2.13.
"""

from __future__ import annotations

from .errors import SourceError

ITEMSIZE: dict[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
"""Bytes per element of each dtype that is read; others are refused by the store that meets them."""

TORCH_NAME: dict[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
}

FROM_TORCH_NAME: dict[str, str] = {name: code for code, name in TORCH_NAME.items()}

WRITABLE: tuple[str, ...] = ("BF16", "F16", "F32")
"""What ``--dtype`` may ask for."""


def itemsize(dtype: str) -> int:
    """Bytes of one element of ``dtype``; a dtype outside ``ITEMSIZE`` raises ``SourceError``."""
    try:
        return ITEMSIZE[dtype]
    except KeyError:
        known = ", ".join(ITEMSIZE)
        raise SourceError(f"dtype {dtype!r} is not one that is read here (known: {known})") from None
