"""``nki.jit``, ``kernel[n]`` and ``nki.simulate``: from arrays to a run on one or two cores, and back."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from .core import CORE, Core, CoreReport
from .dtypes import Array, of_array
from .errors import CallError, EmulationError
from .storage import HERE, Storage, argument, shared_hbm
from .subset import check_source
from .tensors import Tensor, whole

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Run:
    """One launch: the kernel's name and what each core did."""

    kernel: str
    cores: tuple[CoreReport, ...]


@dataclass(slots=True)
class Emulation:
    """What ``emulated_nki`` yields: the launches so far, in order."""

    lnc: int | None
    runs: list[Run] = field(default_factory=list)

    @property
    def last(self) -> Run:
        """The latest launch."""
        return self.runs[-1]


EMULATION: ContextVar[Emulation | None] = ContextVar("EMULATION", default=None)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function that a launch traces: ``kernel(...)`` on one core, ``kernel[2](...)`` on the two of an LNC 2 pair."""

    function: Callable[..., Any]
    lnc: int = 1

    def __getitem__(self, lnc: object) -> Kernel:
        if type(lnc) is not int or lnc not in (1, 2):
            raise CallError(f"kernel[n] takes 1 or 2, the logical core's size, not {lnc!r}")
        return Kernel(self.function, lnc)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on arrays, NumPy or torch; what the kernel writes into its arguments is seen by the caller."""
        return _launch(self.function, self.lnc, args, kwargs)


def jit(fn: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    """Make ``fn`` a kernel; raises CallError where its source leaves the subset that NKI 0.6 and 0.7 both take."""
    if kwargs:
        raise CallError(f"nki.jit takes no {', '.join(kwargs)}; mode and platform_target are gone since NKI 0.3")
    if fn is None:
        return jit
    check_source(fn)
    return Kernel(fn)


def simulate(kernel: Any) -> Kernel:
    """The kernel as one that is simulated, which all are here; wraps a plain function."""
    return kernel if isinstance(kernel, Kernel) else Kernel(kernel)


def _launch(function: Callable[..., Any], lnc: int, args: Any, kwargs: Any) -> Any:
    emulation = EMULATION.get()
    if emulation is None:
        raise CallError("a kernel of the emulator is launched outside `with emulated_nki():`")
    if CORE.get() is not None:
        raise CallError("a kernel is launched inside a kernel; call a plain function")
    if emulation.lnc not in (None, lnc):
        raise EmulationError(f"the kernel is launched for LNC {lnc}, the device runs LNC {emulation.lnc}")
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise CallError(f"{function.__name__}: {error}") from None
    bound.apply_defaults()
    given = list(bound.arguments.values())
    storages = {name: _argument(value, name, lnc) for name, value in bound.arguments.items() if _is_array(value)}
    shared: list[Storage] = []
    results, reports = [], []
    for program in range(lnc):
        core = Core(program, lnc, shared)
        tensors = {name: whole(storage) for name, storage in storages.items()}
        token = CORE.set(core)
        try:
            results.append(function(**{**bound.arguments, **tensors}))
            reports.append(core.report())
        except EmulationError as error:
            raise type(error)(f"{_kernel_line(error, function)}: {error}") from error
        finally:
            CORE.reset(token)
            core.scope.alive = False
        if core.shared_seen != len(shared):
            raise EmulationError(f"core {program} allocates {core.shared_seen} shared tensors, core 0 {len(shared)}")
    if len({report.trips for report in reports}) > 1:
        raise EmulationError(f"the cores' run-time loops differ in trips: {[report.trips for report in reports]}")
    emulation.runs.append(Run(function.__name__, tuple(reports)))
    return _returned(results, as_torch=any(_is_torch(value) for value in given))


def _kernel_line(error: EmulationError, function: Callable[..., Any]) -> str:
    """``file.py:line`` of the kernel's statement that raised, or the kernel's name where it had ended."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(HERE)]
    return f"{Path(lines[-1].filename).name}:{lines[-1].lineno}" if lines else function.__name__


def _returned(results: list[Any], as_torch: bool) -> Any:
    single = not isinstance(results[0], tuple | list)
    each = [[result] if single else list(result) for result in results]
    for outputs in each:
        for output in outputs:
            if not isinstance(output, Tensor) or output.buffer != shared_hbm or not output.is_whole:
                raise EmulationError(f"a kernel returns whole tensors allocated in nl.shared_hbm, not {output!r}")
        if [output.storage for output in outputs] != [output.storage for output in each[0]]:
            raise EmulationError("the cores return different tensors")
    arrays = [output.storage.flat.reshape(output.shape) for output in each[0]]
    values = [_to_torch(array) if as_torch else array for array in arrays]
    return values[0] if single else tuple(values)


def _argument(value: Any, name: str, lnc: int) -> Storage:
    array = _from_torch(value) if _is_torch(value) else value
    if not array.ndim or not array.size or not array.flags.c_contiguous:
        raise CallError(f"argument {name} of shape {tuple(array.shape)} must be contiguous and hold elements")
    return argument(array, of_array(array), name, lnc)


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray) or _is_torch(value)


def _is_torch(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "untyped_storage")


def _from_torch(tensor: torch.Tensor) -> Array:
    """The same memory as NumPy, which has no bfloat16 of its own."""
    import torch

    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _to_torch(array: Array) -> torch.Tensor:
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
