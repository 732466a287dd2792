"""What every ``nisa`` call goes through: its signature, the counts, lifetimes, and which operands it may take."""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, ParamSpec

import numpy as np

from .access import load, store
from .core import Core, current_core
from .dtypes import Array
from .errors import CallError, EmulationError
from .storage import check_alive, psum, sbuf
from .tensors import Register, Tensor

P = ParamSpec("P")


class engine(enum.Enum):
    """Who executes an instruction."""

    unknown = 0
    tensor = 1
    vector = 2
    scalar = 3
    gpsimd = 4
    sync = 5


class Instruction(NamedTuple):
    """Handle of an emitted instruction; order is always the order of the program here."""

    name: str

    def depends_on(self, other: Instruction) -> None:
        """Add an edge, which sequential execution has anyway."""


def instruction(op: Callable[P, None]) -> Callable[P, Instruction]:
    """Make ``op`` an instruction: all but ``dst`` by keyword; errors name the op."""
    signature = inspect.signature(op)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    plain = inspect.Signature(bare)

    @functools.wraps(op)
    def emit(*args: P.args, **kwargs: P.kwargs) -> Instruction:
        where = f"nisa.{op.__name__}"
        core = current_core()
        if len(args) > 1:
            raise CallError(f"{where}: pass all but dst by keyword, positions differ between versions of NKI")
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise CallError(f"{where}: {error}; the signature is {op.__name__}{plain}") from None
        bound.apply_defaults()
        core.count(op.__name__)
        for tensor in operands(bound.arguments.values()):
            if tensor.storage.lifetime is not None:
                core.capacity.touch(tensor.storage.lifetime, core.instructions)
        core.emit((op.__name__, *(_key(name, value) for name, value in bound.arguments.items() if name != "name")))
        try:
            for tensor in operands(bound.arguments.values()):
                check_alive(tensor.storage)
            op(*bound.args, **bound.kwargs)
        except EmulationError as error:
            raise type(error)(f"{where}: {error}") from error
        return Instruction(op.__name__)

    return emit


def operands(values: Any) -> Iterator[Tensor]:
    """Every tensor among an instruction's arguments, those that move others included."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from operands(value)
        elif isinstance(value, Tensor):
            yield value
            yield from operands((value.scalar_offset, value.vector_offset))


def _key(name: str, value: object) -> tuple[object, ...]:
    if isinstance(value, Tensor):
        return (name, value.key())
    if isinstance(value, tuple | list):
        return (name, *(_key("", part) for part in value))
    return (name, repr(value))


def tile(value: object, what: str) -> Tensor:
    """``value`` as an operand of a compute op: in SBUF or PSUM, with rows that are not gathered."""
    if not isinstance(value, Tensor):
        raise CallError(f"{what} must be a tensor, not {type(value).__name__}")
    if value.buffer not in (sbuf, psum):
        raise EmulationError(
            f"{what} {value!r} is in {value.buffer}; compute ops reach SBUF and PSUM only, copy it first"
        )
    return value


def same_rows(**tiles: Tensor) -> None:
    """Raise EmulationError unless all have the same partitions and the same elements per partition."""
    sizes = {name: (t.shape[0], t.size // t.shape[0]) for name, t in tiles.items()}
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{name} {tiles[name].shape}" for name in sizes)
        raise EmulationError(f"partitions and elements per partition must be the same, nothing broadcasts: {found}")


def not_both_psum(**tiles: Tensor) -> None:
    """Raise EmulationError where two inputs come from PSUM."""
    if all(t.buffer == psum for t in tiles.values()):
        raise EmulationError(f"{' and '.join(tiles)} may not both be in PSUM; copy one to SBUF")


def on_engine(chosen: engine, allowed: tuple[engine, ...], *tiles: Tensor) -> None:
    """Raise where the op does not run on ``chosen``, or GpSimd would touch PSUM."""
    if chosen not in (engine.unknown, *allowed):
        raise CallError(f"engine is {chosen!r}; this op runs on {', '.join(e.name for e in allowed)}")
    if chosen is engine.gpsimd and any(t.buffer == psum for t in tiles):
        raise EmulationError("GpSimd cannot reach PSUM")


def rows_of(core: Core, view: Tensor) -> Array:
    """The stored values as (partitions, elements)."""
    return load(core, view).reshape(view.shape[0], -1)


def wide_rows(core: Core, view: Tensor) -> Array:
    """The values in float32 as (partitions, elements)."""
    return rows_of(core, view).astype(np.float32)


def store_rows(core: Core, view: Tensor, values: Array) -> None:
    """Round and store (partitions, elements)."""
    store(core, view, values.reshape(view.shape))


def per_row(core: Core, value: object, partitions: int, what: str, dtypes: tuple[object, ...] | None) -> Any:
    """A Python number, or a (P, 1) tile as a column; ``dtypes`` are those a tile may have."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return np.float32(value)
    if isinstance(value, Register):
        raise CallError(f"{what} is a register; only numbers and (P, 1) tiles are emulated")
    column = tile(value, what)
    if column.shape != (partitions, 1) or (dtypes is not None and column.dtype not in dtypes):
        wanted = "any type" if dtypes is None else " or ".join(map(repr, dtypes))
        raise EmulationError(
            f"{what} must be a number or a ({partitions}, 1) tile of {wanted}, not {column!r} of {column.dtype}"
        )
    return rows_of(core, column) if dtypes is None or not column.dtype.is_float else wide_rows(core, column)
