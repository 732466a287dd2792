"""One core while it runs a kernel: which it is, what it counts, and in which loop body it stands."""

from __future__ import annotations

from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from .capacity import Capacity
from .errors import CallError, EmulationError

if TYPE_CHECKING:
    from .storage import Storage


@dataclass(slots=True, eq=False)
class Scope:
    """A kernel, or one iteration of a run-time loop's body: what is allocated inside is gone when it ends."""

    serial: int
    alive: bool = True
    allocated: int = 0


class CoreReport(NamedTuple):
    """What one core did in one launch."""

    emitted: Counter[str]
    """Instructions in the compiled program by name; a run-time loop's body counts once."""
    executed: Counter[str]
    """Instructions that ran by name; a body counts once per iteration."""
    trips: tuple[int, ...]
    """Iterations of each run-time loop, in order."""
    sbuf_bytes: int
    """Most bytes per partition that lived at once."""
    psum_banks: int
    """Most banks that lived at once."""
    hbm_read_bytes: int
    hbm_written_bytes: int
    matmul_macs: int
    """Multiply-adds of ``nc_matmul``."""


@dataclass(slots=True, eq=False)
class Core:
    """State of one core; ``shared`` lists the shared HBM tensors that all cores of the launch allocate together."""

    program_id: int
    num_programs: int
    shared: list[Storage]
    scopes: list[Scope] = field(default_factory=lambda: [Scope(0)])
    capacity: Capacity = field(default_factory=Capacity)
    emitted: Counter[str] = field(default_factory=Counter)
    executed: Counter[str] = field(default_factory=Counter)
    trips: list[int] = field(default_factory=list)
    instructions: int = 0
    iteration: int = 0
    """Which iteration of a run-time loop is running; 0 outside and in the first."""
    body: list[object] | None = None
    """Inside a run-time loop: what its body emitted so far, to be compared between iterations."""
    in_order: bool = False
    """Inside ``nl.no_reorder``."""
    shared_seen: int = 0
    serials: int = 0
    hbm_read_bytes: int = 0
    hbm_written_bytes: int = 0
    matmul_macs: int = 0

    @property
    def scope(self) -> Scope:
        """The innermost scope."""
        return self.scopes[-1]

    def next_serial(self) -> int:
        """A number for a new scope."""
        self.serials += 1
        return self.serials

    def count(self, name: str) -> None:
        """One instruction runs."""
        self.instructions += 1
        self.executed[name] += 1
        if self.iteration == 0:
            self.emitted[name] += 1

    def emit(self, what: object) -> None:
        """Hold what a loop's body emits against its first iteration, through ``loops``."""
        if self.body is not None:
            self.body.append(what)

    def report(self) -> CoreReport:
        """The counts, after the capacity was checked."""
        self.capacity.check()
        return CoreReport(
            self.emitted,
            self.executed,
            tuple(self.trips),
            self.capacity.peak("sbuf").amount,
            self.capacity.peak("psum").amount,
            self.hbm_read_bytes,
            self.hbm_written_bytes,
            self.matmul_macs,
        )


CORE: ContextVar[Core | None] = ContextVar("CORE", default=None)


def current_core() -> Core:
    """The core that runs; raises CallError outside a kernel."""
    core = CORE.get()
    if core is None:
        raise CallError("this call works inside a running kernel only: launch it as kernel(...) or kernel[2](...)")
    return core


def compile_time_int(value: object, what: str) -> int:
    """``value`` where the compiler needs a number of 32 bits; raises CallError for a run-time value."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise CallError(f"{what} must be a compile-time int, not {type(value).__name__}")
    if not -(2**31) <= value < 2**31:
        raise EmulationError(f"{what} is {value}; compile-time integers have 32 bits")
    return value
