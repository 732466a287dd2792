"""Ranks that hold and send the same, told once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .simulate import Held, Job
from .simulate_traffic import sent_per_step


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks, in runs of neighbours with first and last, and what each of them holds and sends per step."""

    runs: tuple[tuple[int, int], ...]
    held: Held
    sent: dict[str, int]

    @property
    def count(self) -> int:
        """How many ranks."""
        return sum(last - first + 1 for first, last in self.runs)

    def said(self, width: int | None = None) -> str:
        """``0-63`` or ``0-3,8-11``; cut to a count where that is longer than ``width``."""
        text = ",".join(f"{first}-{last}" if last > first else str(first) for first, last in self.runs)
        return text if width is None or len(text) <= width else f"{self.count} from {self.runs[0][0]}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        sizes = {**asdict(self.held), "total": self.held.total}
        return {"ranks": self.said(), "count": self.count, **sizes, "sent_per_step": self.sent}


def group(job: Job, held: Sequence[Held]) -> list[Group]:
    """All ranks of ``job`` by what they hold, those of rank 0 first; ``held`` is that of each."""
    found: dict[tuple[int, Held], list[list[int]]] = {}
    for rank, one in enumerate(held):
        runs = found.setdefault((job.sharded.place(rank).pp, one), [])
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    sent = [sent_per_step(job, stage) for stage in range(job.mesh.pp)]
    return [Group(tuple((a, b) for a, b in runs), one, sent[stage]) for (stage, one), runs in found.items()]
