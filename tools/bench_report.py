"""What the benchmark found: figures of each case, which goals are reached, as tables and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .bench_cases import Case, Shape
from .bench_process import Usage
from .cli.output import format_bytes, print_table, say

PEAK = 150e6
"""Bytes, for any conversion at any size."""

PLAN_SECONDS, PLAN_PEAK = 10.0, 500e6
HELP_SECONDS = 0.3
PEER_WALL, PEER_USER = 10.0, 20.0
"""Times that a peer is to take of what ours takes."""

WALL = "wall s"


@dataclass(slots=True)
class Figures:
    """One case: what it took in each round that it ran in."""

    rounds: dict[int, Usage] = field(default_factory=dict)
    written: int = 0
    """Bytes of its output, all files."""
    failed: str | None = None

    def spread(self, what: str) -> tuple[float, float, float]:
        """Least, median and most of a field of ``Usage``."""
        return spread([float(getattr(usage, what)) for usage in self.rounds.values()])

    def ratios(self, other: Figures, what: str = "wall") -> list[float]:
        """This case over another one, in each round that both ran in."""
        return [
            getattr(usage, what) / max(getattr(other.rounds[number], what), 1e-3)
            for number, usage in self.rounds.items()
            if number in other.rounds
        ]


class Goal(NamedTuple):
    """Something to reach, and what was found."""

    subject: str
    wanted: str
    found: str
    reached: bool


@dataclass(slots=True)
class ShapeReport:
    """All cases of one shape."""

    shape: Shape
    tensors: int
    nbytes: int
    cases: Sequence[Case]
    figures: Mapping[str, Figures]

    def goals(self) -> Iterator[Goal]:
        """Ratios to ``cp`` and to peers (medians, same round), and peak memory."""
        for case in self.cases:
            found = self.figures[case.name]
            subject = f"{self.shape.name}: {case.name}"
            if not found.rounds:
                continue
            beside = self.figures.get(case.beside or "")
            is_judged = self.shape.judged or case.on_every_shape
            if is_judged and case.at_most is not None and beside is not None:
                yield _at_most(f"{subject}, wall / {case.beside}", case.at_most, found.ratios(beside))
            if case.at_most is not None:
                peak = found.spread("peak")[2]
                yield Goal(
                    f"{subject}, peak", f"at most {format_bytes(PEAK)}", format_bytes(peak), reached=peak <= PEAK
                )
            ours = self.figures.get(case.outrun_by or "")
            if self.shape.judged and ours is not None:
                for what, name, times in (("wall", "wall", PEER_WALL), ("user", "user CPU", PEER_USER)):
                    if ratios := found.ratios(ours, what):
                        median = spread(ratios)[1]
                        text = f"{subject}, {name} / {case.outrun_by}"
                        yield Goal(text, f"at least {times:g}x", f"{median:.1f}x", reached=median >= times)

    def show(self) -> None:
        """The table of one shape."""
        say(f"\n{self.shape.name}: {self.tensors:,} tensors, {format_bytes(self.nbytes)} (least, median, most)")
        rows = []
        for case in self.cases:
            found = self.figures[case.name]
            if not found.rounds:
                continue
            beside = self.figures.get(case.beside or "")
            ratios = found.ratios(beside) if beside is not None else []
            rows.append(
                [
                    case.name,
                    f"{len(found.rounds)}",
                    _three(found.spread("wall")),
                    f"{found.spread('user')[1]:.2f}",
                    f"{found.spread('system')[1]:.2f}",
                    format_bytes(found.spread("peak")[2]),
                    format_bytes(found.written),
                    _three(spread(ratios)) if ratios else "",
                ]
            )
        headers = ("", "n", WALL, "user s", "sys s", "peak", "written", "wall / cp")
        print_table(rows, headers, right=(1, 2, 3, 4, 5, 6, 7))
        _show_failures(self.figures)
        for line in self._comparisons():
            say(f"  {line}")
        others = [usage.others for found in self.figures.values() for usage in found.rounds.values()]
        if others:
            say(f"  meanwhile the rest of the machine kept {statistics.median(others):.1f} CPUs busy")

    def to_json(self) -> dict[str, Any]:
        """Every single measurement."""
        return {
            "shape": self.shape.name,
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "cases": [
                {
                    "case": case.name,
                    "beside": case.beside,
                    "written": self.figures[case.name].written,
                    "failed": self.figures[case.name].failed,
                    "rounds": {n: usage._asdict() for n, usage in self.figures[case.name].rounds.items()},
                }
                for case in self.cases
            ],
        }

    def _comparisons(self) -> Iterator[str]:
        for case in self.cases:
            for ours, how in case.faster.items():
                if ours not in self.figures:
                    continue
                wall = self.figures[case.name].ratios(self.figures[ours])
                user = self.figures[case.name].ratios(self.figures[ours], "user")
                if wall:
                    yield (
                        f"{case.name} / {ours} ({how}): wall {spread(wall)[1]:.1f}x, user CPU {spread(user)[1]:.1f}x, "
                        f"peak {self.figures[case.name].spread('peak')[2] / self.figures[ours].spread('peak')[2]:.0f}x"
                    )


@dataclass(slots=True)
class SingleReport:
    """Commands without an output: start-up, plans of models that fit on no disk here."""

    title: str
    seconds: float
    peak: float
    figures: Mapping[str, Figures]

    def goals(self) -> Iterator[Goal]:
        """Wall time (median) and peak memory."""
        for name, found in self.figures.items():
            if not found.rounds:
                continue
            wall, peak = found.spread("wall")[1], found.spread("peak")[2]
            yield Goal(f"{name}, wall", f"under {self.seconds:g} s", f"{wall:.2f} s", wall < self.seconds)
            yield Goal(f"{name}, peak", f"under {format_bytes(self.peak)}", format_bytes(peak), peak < self.peak)

    def show(self) -> None:
        """The table."""
        say(f"\n{self.title}")
        rows = [
            (
                name,
                f"{len(found.rounds)}",
                _three(found.spread("wall")),
                f"{found.spread('user')[1]:.2f}",
                f"{found.spread('system')[1]:.2f}",
                format_bytes(found.spread("peak")[2]),
            )
            for name, found in self.figures.items()
            if found.rounds
        ]
        print_table(rows, ("", "n", WALL, "user s", "sys s", "peak"), right=(1, 2, 3, 4, 5))
        _show_failures(self.figures)

    def to_json(self) -> dict[str, Any]:
        """Every single measurement."""
        return {
            "title": self.title,
            "cases": [
                {"case": name, "failed": f.failed, "rounds": {n: usage._asdict() for n, usage in f.rounds.items()}}
                for name, f in self.figures.items()
            ],
        }


Report = ShapeReport | SingleReport


def show_goals(reports: Sequence[Report]) -> None:
    """Which goals are reached; nothing where none applies."""
    goals = [goal for report in reports for goal in report.goals()]
    if not goals:
        return
    say(f"\nGoals: {sum(goal.reached for goal in goals)} of {len(goals)} reached")
    rows = [(goal.subject, goal.wanted, goal.found, "" if goal.reached else "NOT REACHED") for goal in goals]
    print_table(rows, ("", "goal", "found", ""), right=(1, 2, 3))


def goals_json(reports: Sequence[Report]) -> list[dict[str, object]]:
    """The same for machines."""
    return [goal._asdict() for report in reports for goal in report.goals()]


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Least, median, most."""
    return min(values), statistics.median(values), max(values)


def _at_most(subject: str, limit: float, ratios: Sequence[float]) -> Goal:
    median = spread(ratios)[1]
    return Goal(subject, f"at most {limit:g}", f"{median:.2f}", median <= limit)


def _show_failures(figures: Mapping[str, Figures]) -> None:
    for name, found in figures.items():
        if found.failed:
            say(f"  {name}: {found.failed}")


def _three(values: tuple[float, float, float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)
