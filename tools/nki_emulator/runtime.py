"""Registers and run-time loops.

A loop's body is compiled once. Here it runs in Python once per iteration, and has to emit the same instructions each
time: what Python counts or collects in a body would not happen on the device, and is found out by that comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .access import load, store
from .core import Core, Scope, compile_time_int, current_core
from .errors import CallError, EmulationError
from .instructions import instruction
from .storage import sbuf
from .tensors import Register, Tensor


def register_alloc(x: int | None = None) -> Register:
    """A register, holding a compile-time int or nothing yet."""
    current_core()
    return Register(None if x is None else compile_time_int(x, "x"))


@instruction
def register_move(dst: Any, src: Any) -> None:
    """``dst = src``, a register or a compile-time int."""
    _writable(dst).value = src.read() if isinstance(src, Register) else compile_time_int(src, "src")


@instruction
def register_load(dst: Any, src: Any) -> None:
    """``dst`` = the one element of an integer tensor."""
    _writable(dst).value = int(load(current_core(), _single(src)).reshape(-1)[0])


@instruction
def register_store(dst: Any, src: Any) -> None:
    """The one element of an integer tensor = ``src``."""
    if not isinstance(src, Register):
        raise CallError(f"src must be a register, not {src!r}")
    single = _single(dst)
    store(current_core(), single, np.full(single.shape, src.read(), np.int64))


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[Register], object], step: int = 1) -> None:
    """``body_fun(i)`` at run time for i from ``lower`` below ``upper``, ints or registers; it returns None."""
    first, last = (
        bound.read() if isinstance(bound, Register) else compile_time_int(bound, "a loop bound")
        for bound in (lower, upper)
    )
    if compile_time_int(step, "step") < 1:
        raise EmulationError(f"step must be at least 1, not {step}")
    with _loop() as iteration:
        for value in range(first, last, step):
            with iteration():
                if body_fun(Register(value, read_only=True)) is not None:
                    raise CallError("the body of fori_loop returns None; carry state in tensors from outside")


def while_loop(init: Register, body_fun: Callable[[Register], Register]) -> None:
    """``r = body_fun(r)`` at run time until r is 0, tested before each iteration."""
    if not isinstance(init, Register):
        raise CallError(f"init must be a register, not {init!r}")
    current = Register(init.read())
    with _loop() as iteration:
        while current.read():
            with iteration():
                returned = body_fun(current)
                if not isinstance(returned, Register):
                    raise CallError(f"the body of while_loop returns the next register, not {returned!r}")
                current = Register(returned.read())


@contextmanager
def no_reorder() -> Iterator[None]:
    """Keep program order, which the emulator always does; run-time loops are not allowed inside."""
    core = current_core()
    before, core.in_order = core.in_order, True
    try:
        yield
    finally:
        core.in_order = before


@contextmanager
def _loop() -> Iterator[Callable[[], Any]]:
    core = current_core()
    if core.in_order:
        raise EmulationError("no run-time loop inside nl.no_reorder")
    if core.body is not None:
        raise EmulationError("a run-time loop inside another: the compiler failed on those, keep to one level")
    core.count("loop")
    core.capacity.open_loop(core.instructions)
    bodies: list[list[object]] = []
    trips = 0

    @contextmanager
    def iteration() -> Iterator[None]:
        nonlocal trips
        core.iteration, core.body = trips, []
        trips += 1
        scope = Scope(core.next_serial())
        core.scopes.append(scope)
        yield
        core.scopes.pop()
        scope.alive = False
        bodies.append(core.body)
        _compare(bodies, core)
        del bodies[1:]

    yield iteration
    core.iteration, core.body = 0, None
    core.trips.append(trips)
    core.capacity.close_loop(core.instructions)


def _compare(bodies: list[list[object]], core: Core) -> None:
    first, this = bodies[0], bodies[-1]
    for number, (a, b) in enumerate(zip(first, this, strict=False)):
        if a != b:
            raise EmulationError(
                f"a run-time loop's body is compiled once, yet iteration {core.iteration} emits {b} "
                f"where the first emits {a} (its statement {number}); use the index, not Python variables"
            )
    if len(first) != len(this):
        raise EmulationError(
            f"a run-time loop's body is compiled once, yet iteration {core.iteration} emits {len(this)} statements "
            f"and the first {len(first)}"
        )


def _writable(register: object) -> Register:
    if not isinstance(register, Register) or register.read_only:
        raise CallError(f"dst must be a register that is not a loop's index, not {register!r}")
    return register


def _single(value: object) -> Tensor:
    if not isinstance(value, Tensor) or value.size != 1 or value.dtype.is_float:
        raise CallError(f"a register is loaded from and stored to one integer, not {value!r}")
    if value.buffer.on_chip and value.buffer != sbuf:
        raise EmulationError(f"{value!r} must be in SBUF or HBM")
    return value
