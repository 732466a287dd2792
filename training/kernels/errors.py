"""Why experts cannot be computed."""

from __future__ import annotations

from qwen3conv.converters.errors import ConversionError


class KernelError(ConversionError):
    """The experts cannot be computed on this device or in these shapes: follow the message."""
