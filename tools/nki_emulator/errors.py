"""What a kernel can do wrong, cut by what its author mends."""

from __future__ import annotations

from qwen3conv.converters.errors import ConversionError


class EmulationError(ConversionError):
    """The kernel breaks a rule of NKI that the message names."""


class CallError(EmulationError, TypeError):
    """A call that no frontend of NKI takes: wrong name, wrong keyword, wrong type, a run-time value used in Python."""


class AccessError(EmulationError):
    """An element is read before anything wrote it, lies outside its tensor, or is written by two cores."""


class CapacityError(EmulationError):
    """What lives at one moment does not fit SBUF or PSUM."""
