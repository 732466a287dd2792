"""Typed values out of a JSON object, and everything that is wrong with it told at once."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .dtypes import FROM_TORCH_NAME
from .errors import SourceError, enumerate_problems


class Values:
    """Reads typed values out of a JSON object and collects what is wrong, to be told all at once.

    A bad value reads as 1, 1.0 or False, and never leaves the reader: ``check`` raises first.
    """

    def __init__(self, raw: Mapping[str, object]) -> None:
        self.raw = raw
        self.missing: list[str] = []
        self.problems: list[str] = []

    def integer(self, key: str, largest: int, also: str | None = None) -> int:
        """A whole number from 1 to ``largest``, spelled ``key`` or ``also`` or both alike."""
        found = {name: self.raw[name] for name in (key, also) if name is not None and self.raw.get(name) is not None}
        if not found:
            self.missing.append(f"{key} (or {also})" if also else key)
            return 1
        for name, value in found.items():
            if type(value) is not int or not 1 <= value <= largest:
                self.problems.append(f"{name} is {value!a:.40}, expected a whole number from 1 to {largest}")
                return 1
        self._agree(found)
        first = next(iter(found.values()))
        assert isinstance(first, int)
        return first

    def number(self, key: str, below: float = math.inf) -> float:
        """A number above 0 and below ``below``."""
        value = self.raw.get(key)
        if value is None:
            self.missing.append(key)
            return 1.0
        return self.checked(key, value, below)

    def checked(self, name: str, value: object, below: float = math.inf) -> float:
        """``value`` as a float if it is a number above 0 and below ``below``."""
        # Compared before it is converted: float() of an integer of hundreds of digits overflows.
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < min(below, 1e300):
            return float(value)
        limit = "" if below == math.inf else f" and below {below:g}"
        self.problems.append(f"{name} is {value!a:.40}, expected a number above 0{limit}")
        return 1.0

    def boolean(self, key: str) -> bool:
        """``true`` or ``false``."""
        value = self.raw.get(key)
        if value is None:
            self.missing.append(key)
        elif not isinstance(value, bool):
            self.problems.append(f"{key} is {value!a:.40}, expected true or false")
        return value is True

    def check(self, where: str) -> None:
        """Raise one ``SourceError`` with everything that was missing or wrong, if anything was."""
        lines = list(self.problems)
        if self.missing:
            lines.insert(
                0,
                f"missing: {', '.join(self.missing)}; nothing is assumed for them, because class defaults are not "
                "what the released models use: take them from the model's original config.json",
            )
        if lines:
            raise SourceError(enumerate_problems(f"{where}: not a Qwen3 config that can be used:", lines))

    def _agree(self, found: Mapping[str, object]) -> None:
        if len({str(value) for value in found.values()}) > 1:
            self.problems.append(" but ".join(f"{name} is {value!a:.60}" for name, value in found.items()))


def read_dtype(values: Values) -> str | None:
    """The dtype code that ``torch_dtype`` or ``dtype`` names."""
    codes: dict[str, str] = {}
    for key in ("torch_dtype", "dtype"):
        value = values.raw.get(key)
        if value is None:
            continue
        code = FROM_TORCH_NAME.get(value.removeprefix("torch.")) if isinstance(value, str) else None
        if code is None:
            values.problems.append(f"{key} is {value!a:.40}, expected the name of a torch dtype such as 'bfloat16'")
        else:
            codes[key] = code
    if len(set(codes.values())) > 1:
        values.problems.append(f"torch_dtype is {values.raw['torch_dtype']!a} but dtype is {values.raw['dtype']!a}")
    return next(iter(codes.values()), None)
