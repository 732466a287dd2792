"""How far a run is: one line per step, with what is left."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta

_WINDOW = 20
"""Steps that the rate is taken of; the first, which compiles and fills caches, leaves the window soon."""


@dataclass(slots=True)
class Progress:
    """Times of the latest steps. ``tokens_per_step`` counts those of all ranks."""

    steps: int
    tokens_per_step: int
    _ended: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_WINDOW + 1))
    _begun: float = field(default_factory=time.monotonic)

    def took(self, step: int) -> float:
        """Note that ``step`` has ended; returns the seconds since the one before."""
        now = time.monotonic()
        before = self._ended[-1][1] if self._ended else self._begun
        self._ended.append((step, now))
        return now - before

    def seconds_per_step(self) -> float:
        """Mean of the latest steps; of the first one alone while there is no other."""
        (first, since), (last, until) = self._ended[0], self._ended[-1]
        return (until - since) / (last - first) if last > first else until - self._begun

    def tokens_per_second(self) -> float:
        """Of all ranks together, over the latest steps."""
        return self.tokens_per_step / max(self.seconds_per_step(), 1e-9)

    def line(self, step: int, loss: float, memory_bytes: int) -> str:
        """``step 3 of 10: loss 5.6783, 1,234 tokens/s, 0.7 GB, 0:00:07 to go``."""
        each = max(self.seconds_per_step(), 1e-9)
        left = timedelta(seconds=round(each * (self.steps - step)))
        rate = self.tokens_per_second()
        memory = f"{memory_bytes / 1e9:.1f} GB"
        return f"step {step} of {self.steps}: loss {loss:.4f}, {rate:,.0f} tokens/s, {memory}, {left} to go"
