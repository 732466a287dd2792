"""The modules ``nki``, ``nki.language`` and ``nki.isa`` as a kernel imports them: the names below and no others."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NoReturn

from . import dtypes, instructions, isa_dma, isa_tensor, isa_vector, language, launch, op_table, runtime, storage
from .errors import CallError
from .launch import EMULATION, Emulation


def _pick(module: ModuleType, *names: str) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names}


_LANGUAGE = {
    **{dtype.name: dtype for dtype in dtypes.DTYPES},
    **op_table.OPS,
    **_pick(storage, "sbuf", "psum", "hbm", "private_hbm", "shared_hbm"),
    **_pick(language, "NKIObject", "ds", "ndarray", "num_programs", "program_id", "program_ndim", "zeros"),
    **_pick(runtime, "fori_loop", "no_reorder", "while_loop"),
    **dict.fromkeys(("affine_range", "sequential_range", "static_range"), range),
    "tile_size": language.TileSize(),
}

_ISA = {
    **_pick(instructions, "engine"),
    **_pick(isa_dma, "dge_mode", "dma_compute", "dma_copy", "dma_transpose", "oob_mode"),
    **_pick(isa_tensor, "matmul_perf_mode", "nc_matmul", "nc_transpose"),
    **_pick(isa_vector, "activation", "iota", "memset", "reciprocal", "reduce_cmd", "scalar_tensor_tensor"),
    **_pick(isa_vector, "tensor_copy", "tensor_reduce", "tensor_scalar", "tensor_tensor"),
    **_pick(runtime, "register_alloc", "register_load", "register_move", "register_store"),
}


def _module(name: str, names: Mapping[str, Any]) -> ModuleType:
    module = ModuleType(name, f"{name}, emulated: see qwen3conv.tools.nki_emulator.")

    def absent(attribute: str) -> NoReturn:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise AttributeError(f"{name}.{attribute} is not NKI, or not in the subset that is emulated")

    vars(module).update(names)
    vars(module)["__getattr__"] = absent
    return module


LANGUAGE, ISA = _module("nki.language", _LANGUAGE), _module("nki.isa", _ISA)
NKI = _module("nki", {**_pick(launch, "jit", "simulate"), "language": LANGUAGE, "isa": ISA, "__path__": []})
_MODULES = {"nki": NKI, "nki.language": LANGUAGE, "nki.isa": ISA}


@contextmanager
def emulated_nki(lnc: int | None = None) -> Iterator[Emulation]:
    """Put the emulator in place of ``nki``, whether or not that is installed, and yield the record of launches.

    ``lnc``: the logical core's size that launches must have, 1 or 2; None lets each launch choose. On leaving, modules
    that imported the emulator are forgotten, so that no later import finds kernels bound to it.
    """
    if EMULATION.get() is not None:
        raise CallError("emulated_nki is entered twice")
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_nki(name)}
    before = set(sys.modules)
    sys.modules.update(_MODULES)
    emulation = Emulation(lnc)
    token = EMULATION.set(emulation)
    try:
        yield emulation
    finally:
        EMULATION.reset(token)
        for name in [name for name in list(sys.modules) if _is_nki(name)]:
            del sys.modules[name]
        _forget(set(sys.modules) - before)
        sys.modules.update(hidden)


def _is_nki(name: str) -> bool:
    return name == "nki" or name.startswith("nki.")


def _forget(names: set[str]) -> None:
    for name in names:
        if any(value in _MODULES.values() for value in vars(sys.modules[name]).values() if type(value) is ModuleType):
            parent, _, child = name.rpartition(".")
            module = sys.modules.pop(name)
            if getattr(sys.modules.get(parent), child, None) is module:
                delattr(sys.modules[parent], child)
