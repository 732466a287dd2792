"""The expert kernels with one line broken: the emulator refuses it, or the comparison with float64 finds it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from qwen3conv.tools.nki_emulator import AccessError, CapacityError, EmulationError, emulated_nki
from tests.kernels.conftest import NkiRunner
from tests.kernels.expert_cases import (
    BACKWARD,
    FORWARD,
    TOLERANCE,
    make_case,
    run_backward,
    run_forward,
    wanted_backward,
    wanted_forward,
)

PACKAGE = "qwen3conv.training.kernels"
TILES = f"{PACKAGE}.nki_tiles"


class Fault(NamedTuple):
    module: str
    sound: str
    broken: str
    refusal: tuple[type[Exception], str] | None
    """None where no rule is broken and only the numbers tell."""


WRONG_NUMBERS = None

FORWARD_FAULTS = {
    "weights not transposed": Fault(
        FORWARD, "stationary=up_t[:, k, :]", "stationary=up_w[:, at, k * part : (k + 1) * part]", WRONG_NUMBERS
    ),
    "one tile transposed into all places": Fault(
        TILES,
        "data=data[:, (start + j) * part : (start + j + 1) * part]",
        "data=data[:, start * part : (start + 1) * part]",
        WRONG_NUMBERS,
    ),
    "missing accumulate": Fault(
        FORWARD,
        "nisa.nc_matmul(dst=u, stationary=up_t[:, k, :], moving=x_t[:, k, :], accumulate=(k > 0))",
        "nisa.nc_matmul(dst=u, stationary=up_t[:, k, :], moving=x_t[:, k, :], accumulate=False)",
        (EmulationError, "overwrites a product that nothing has read"),
    ),
    "accumulate onto g and u": Fault(FORWARD, "accumulate=(m > 0)", "accumulate=True", WRONG_NUMBERS),
    "accumulate onto nothing": Fault(
        FORWARD,
        "nisa.nc_matmul(dst=g, stationary=gate_t[:, k, :], moving=x_t[:, k, :], accumulate=(k > 0))",
        "nisa.nc_matmul(dst=g, stationary=gate_t[:, k, :], moving=x_t[:, k, :], accumulate=True)",
        (EmulationError, "no matmul wrote with accumulate=False"),
    ),
    "unwritten tile": Fault(
        FORWARD,
        "for b in range(b_tiles):\n            slots",
        "for b in range(1):\n            slots",
        (AccessError, "nothing has written"),
    ),
    "over-capacity tile": Fault(
        FORWARD,
        "x_t = nl.ndarray((part, k_tiles, block)",
        "x_t = nl.ndarray((part, k_tiles, block * 200)",
        (CapacityError, "bytes per partition of sbuf"),
    ),
    "a ninth bank": Fault(
        FORWARD,
        "acc = tiles(4, (part, bank)",
        "acc = tiles(4, (part, 4 * bank)",
        (CapacityError, "psum needs 9 banks"),
    ),
    "loop starts a block late": Fault(
        FORWARD, "nl.fori_loop(0, ", "nl.fori_loop(1, ", (AccessError, "nothing has written")
    ),
    "loop ends a block late": Fault(
        FORWARD, "nl.fori_loop(0, loop_end(used)", "nl.fori_loop(0, blocks + 1", (AccessError, "reaches elements")
    ),
    "slots of the next tile": Fault(
        TILES, "offset=b * part", "offset=(b + 1) * part", (AccessError, "reaches elements")
    ),
    "weights of the first block's expert": Fault(
        TILES, "pattern=[[1, 1], [1, 1]], scalar_offset=n, indirect_dim=0", "pattern=[[1, 1], [1, 1]]", WRONG_NUMBERS
    ),
    "gate and up exchanged": Fault(
        FORWARD,
        "load_rows_of(up_w, up, first, expert, nisa",
        "load_rows_of(up_w, gate, first, expert, nisa",
        WRONG_NUMBERS,
    ),
    "no silu": Fault(FORWARD, "op=nl.silu", "op=nl.copy", WRONG_NUMBERS),
    "both cores write one slab": Fault(
        FORWARD, "y_first = nl.program_id(0) * blocks", "y_first = 0 * blocks", (AccessError, "both cores write")
    ),
    "both cores compute one half of I": Fault(FORWARD, "first = nl.program_id(0) * width", "first = 0", WRONG_NUMBERS),
    "an expert out of bounds": Fault(
        FORWARD,
        "load_rows_of(gate_w, gate, first, expert, nisa.oob_mode.skip)",
        "load_rows_of(gate_w, gate, first, expert, nisa.oob_mode.error)",
        (AccessError, "reaches elements"),
    ),
    "affinity not applied": Fault(FORWARD, "operand0=factors[b]", "operand0=1.0", WRONG_NUMBERS),
}

BACKWARD_FAULTS = {
    "weights not transposed": Fault(
        BACKWARD,
        "stationary=x_t[:, k, :], moving=gate_t[:, k, :]",
        "stationary=x_t[:, k, :], moving=gate_w[:, 0, k * part : (k + 1) * part]",
        WRONG_NUMBERS,
    ),
    "dg and du exchanged": Fault(
        BACKWARD, "transpose_tiles(dg_t, dg[:, b, :], turn)", "transpose_tiles(dg_t, du[:, b, :], turn)", WRONG_NUMBERS
    ),
    "missing accumulate over rows": Fault(
        BACKWARD,
        "accumulate=(b > 0)",
        "accumulate=False",
        (EmulationError, "overwrites a product that nothing has read"),
    ),
    "dx of gate alone": Fault(
        BACKWARD,
        "stationary=du_t[:, m, :], moving=moving, accumulate=True",
        "stationary=du_t[:, m, :], moving=moving, accumulate=(m > 0)",
        (EmulationError, "overwrites a product that nothing has read"),
    ),
    "gradients run on over a change of expert": Fault(BACKWARD, "operand0=kept", "operand0=1.0", WRONG_NUMBERS),
    "gradients of the last block alone": Fault(BACKWARD, "operand0=kept", "operand0=0.0", WRONG_NUMBERS),
    "gradients start unwritten": Fault(
        BACKWARD, "    nisa.memset(dst=up_sum, value=0.0)\n", "", (AccessError, "nothing has written")
    ),
    "stored where the expert starts": Fault(
        BACKWARD, "load_scalar(store_expert, n)", "load_scalar(load_expert, n)", WRONG_NUMBERS
    ),
    "a pass forgets those before": Fault(BACKWARD, "first, number > 0)", "first, False)", WRONG_NUMBERS),
    "a pass twice, another never": Fault(BACKWARD, "+ number * chunk", "+ 0 * chunk", WRONG_NUMBERS),
    "both cores store one half of I": Fault(
        BACKWARD, "first = nl.program_id(0) * width + number", "first = number", (AccessError, "both cores write")
    ),
    "both cores write one slab": Fault(
        BACKWARD, "core_slots = nl.program_id(0) * blocks", "core_slots = 0 * blocks", (AccessError, "both cores write")
    ),
    "slope of silu is silu": Fault(BACKWARD, "op=nl.silu_dx", "op=nl.silu", WRONG_NUMBERS),
    "over-capacity tile": Fault(
        BACKWARD,
        "x_rows = nl.ndarray((part, b_tiles, hidden)",
        "x_rows = nl.ndarray((part, 200 * b_tiles, hidden)",
        (CapacityError, "bytes per partition of sbuf"),
    ),
    "loop starts a block late": Fault(BACKWARD, "nl.fori_loop(0, ", "nl.fori_loop(1, ", (AccessError, "nothing has")),
    "affinity not in dh": Fault(
        BACKWARD,
        "nisa.tensor_scalar(dst=wide, data=q, op0=nl.multiply, operand0=factor)",
        "nisa.tensor_copy(dst=wide, src=q)",
        WRONG_NUMBERS,
    ),
    "gradient of the affinity of gate alone": Fault(
        BACKWARD, "nisa.tensor_tensor(dst=wide, data1=wide, data2=q, op=nl.multiply)", "pass", WRONG_NUMBERS
    ),
}


class EditedRunner(NkiRunner):
    """Loads the kernels' modules from edited copies of their sources."""

    def load(self, module: str) -> ModuleType:
        return sys.modules[f"{module}_broken"]


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Fault], EditedRunner]:
    def apply(fault: Fault) -> EditedRunner:
        for name in (TILES, FORWARD, BACKWARD):
            spec = importlib.util.find_spec(name)
            assert spec is not None
            assert spec.origin is not None
            source = Path(spec.origin).read_text().replace("from .nki_tiles", "from .nki_tiles_broken")
            if name == fault.module:
                assert source.count(fault.sound) >= 1, fault.sound
                source = source.replace(fault.sound, fault.broken)
            path = tmp_path / f"{name.rpartition('.')[2]}_broken.py"
            path.write_text(source)
            spec = importlib.util.spec_from_file_location(f"{name}_broken", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, f"{name}_broken", module)
            spec.loader.exec_module(module)
        return EditedRunner("emulator", None)

    return apply


def forward_errors(runner: NkiRunner, lnc: int = 2) -> dict[str, torch.Tensor]:
    case = make_case([257, 0, 3], 256, 256)
    y = run_forward(runner, case, 256, lnc=lnc, scaled=True)
    return {"y": y - wanted_forward(case, scaled=True)}


def backward_errors(runner: NkiRunner, lnc: int = 2) -> dict[str, torch.Tensor]:
    case = make_case([257, 0, 3], 256, 512)
    found, wanted = run_backward(runner, case, 256, lnc=lnc, chunk=128, scaled=True), wanted_backward(case, scaled=True)
    return {name: found[name] - wanted[name] for name in wanted}


SIDES = {"forward": (forward_errors, FORWARD_FAULTS), "backward": (backward_errors, BACKWARD_FAULTS)}
ALL = [(side, fault) for side, (_, faults) in SIDES.items() for fault in faults]


@pytest.mark.parametrize(("side", "name"), ALL, ids=[f"{side}: {name}" for side, name in ALL])
def test_a_broken_kernel_is_caught(broken: Callable[[Fault], EditedRunner], side: str, name: str) -> None:
    compute, faults = SIDES[side]
    fault = faults[name]
    with emulated_nki():
        runner = broken(fault)
        if fault.refusal is not None:
            error, message = fault.refusal
            with pytest.raises(error, match=message):
                compute(runner)
            return
        errors = compute(runner)
    # Never written is NaN, and not close either.
    assert not all(bool((difference.abs() <= 1e-3).all()) for difference in errors.values())


@pytest.mark.parametrize("side", SIDES)
def test_the_same_copies_without_a_fault_pass(broken: Callable[[Fault], EditedRunner], side: str) -> None:
    compute, _ = SIDES[side]
    with emulated_nki():
        errors = compute(broken(Fault(FORWARD, "nki.jit", "nki.jit", None)))
    for difference in errors.values():
        assert float(difference.abs().max()) <= 100 * TOLERANCE[torch.float32]
