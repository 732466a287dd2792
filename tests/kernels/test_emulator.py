"""The emulator catches faults in a toy kernel, and computes what NumPy and torch compute."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest
import torch

from qwen3conv.tools.nki_emulator import AccessError, CallError, CapacityError, EmulationError, emulated_nki
from qwen3conv.training import neuron_probe
from tests.kernels.conftest import NkiRunner, from_device, runners

TOYS = "tests.kernels.toy_kernels"
TOKENS, K, F, EXPERTS, BLOCKS = 40, 256, 128, 3, 3


def toy_inputs(dtype=np.float32) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(0)
    x = random.standard_normal((TOKENS + 1, K)).astype(dtype)
    w = random.standard_normal((EXPERTS, K, F)).astype(dtype)
    slots = random.integers(0, TOKENS + 1, (BLOCKS, 128, 1)).astype(np.int32)
    return x, w, slots, np.array([0, 2, 2], np.int32).reshape(BLOCKS, 1, 1)


def toy_wanted(x, w, slots, experts) -> np.ndarray:
    return np.stack([x[s[:, 0]].astype(float) @ w[e[0, 0]].astype(float) for s, e in zip(slots, experts, strict=True)])


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (ml_dtypes.bfloat16, 2**-8)])
def test_a_right_kernel_computes_what_numpy_does(nki_runner: NkiRunner, lnc: int, dtype, tolerance: float) -> None:
    inputs = toy_inputs(dtype)
    y = nki_runner.run(nki_runner.load(TOYS).block_rows, *inputs, lnc=lnc)
    wanted = toy_wanted(*inputs)
    assert y.dtype == dtype
    assert np.abs(y.astype(float) - wanted).max() <= tolerance * np.abs(wanted).max()


@pytest.fixture
def toys() -> Iterator[ModuleType]:
    with emulated_nki():
        yield importlib.import_module(TOYS)


@pytest.mark.parametrize(
    ("fault", "lnc", "error", "message"),
    [
        ("missing accumulate", 1, EmulationError, "overwrites a product that nothing has read"),
        ("accumulate on nothing", 1, EmulationError, "no matmul wrote with accumulate=False"),
        ("unwritten tile", 1, AccessError, r"nothing has written 16384 of its 16384 elements"),
        ("over-capacity tile", 1, CapacityError, "240000 bytes per partition of sbuf, which has 212464"),
        ("off-by-one block", 1, AccessError, "index 3 is outside its 3 elements"),
        ("both cores write", 2, AccessError, "both cores write the same elements"),
    ],
)
def test_a_broken_kernel_is_refused_at_its_line(toys, fault: str, lnc: int, error: type, message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        toys.block_rows[lnc](*toy_inputs(), fault=fault)
    assert str(raised.value).startswith("toy_kernels.py:")


@pytest.mark.parametrize("fault", ["wrong transpose", "wrong block written"])
def test_a_broken_kernel_that_breaks_no_rule_computes_something_else(toys, fault: str) -> None:
    inputs = toy_inputs()
    y, wanted = toys.block_rows(*inputs, fault=fault), toy_wanted(*inputs)
    assert not np.allclose(y, wanted, rtol=0.1, atol=0.1)
    assert np.isnan(y[1:]).all() == (fault == "wrong block written")


def test_every_fault_of_the_toy_kernel_is_tested(toys) -> None:
    known = {"", "wrong transpose", "wrong block written", "missing accumulate", "accumulate on nothing"}
    known |= {"unwritten tile", "over-capacity tile", "off-by-one block", "both cores write"}
    names = {c for c in toys.block_rows.function.__code__.co_consts if isinstance(c, str) and "\n" not in c}
    assert names - {"pattern"} <= known


# -- loops at run time -------------------------------------------------------------------------------------------------


def loop_input() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((4, 128, 8)).astype(np.float32)


def test_a_loop_runs_as_often_as_a_tensor_says(nki_runner: NkiRunner) -> None:
    x = loop_input()
    y = nki_runner.run(nki_runner.load(TOYS).looped_blocks, x, np.array([[3]], np.int32))
    np.testing.assert_array_equal(y[:3], 2 * x[:3])
    if nki_runner.emulation is not None:
        assert np.isnan(y[3]).all()
        (core,) = nki_runner.emulation.last.cores
        assert core.trips == (3,)
        assert (core.executed["dma_copy"], core.emitted["dma_copy"]) == (6, 2)


@pytest.mark.parametrize(
    ("fault", "last", "error", "message"),
    [
        ("", 5, AccessError, "reaches elements 4096 to 5119 of 4096"),
        ("python counter", 4, EmulationError, "body is compiled once, yet iteration 1 emits"),
        ("index in python", 4, CallError, "compile-time int, not Register"),
        ("inner tile outside", 4, AccessError, "allocated inside a run-time loop"),
    ],
)
def test_a_loop_that_no_device_could_run_is_refused(toys, fault: str, last: int, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        toys.looped_blocks(loop_input(), np.array([[last]], np.int32), fault=fault)


def test_a_loop_that_starts_one_late_leaves_a_block_unwritten(toys) -> None:
    y = toys.looped_blocks(loop_input(), np.array([[4]], np.int32), fault="off-by-one block")
    assert np.isnan(y[0]).all()
    assert not np.isnan(y[1:]).any()


# -- launching ---------------------------------------------------------------------------------------------------------


def test_counts_and_traffic_are_those_of_the_kernel() -> None:
    with emulated_nki() as emulation:
        importlib.import_module(TOYS).block_rows[2](*toy_inputs())
        first, second = emulation.last.cores
    assert first == second
    assert first.executed == first.emitted
    per_block = {"dma_copy": 6, "nc_transpose": 2, "tensor_copy": 3, "nc_matmul": 2}
    assert first.executed == {name: count * BLOCKS for name, count in per_block.items()}
    assert first.matmul_macs == BLOCKS * 128 * K * F // 2
    assert first.hbm_written_bytes == BLOCKS * 128 * F // 2 * 4
    assert first.hbm_read_bytes == BLOCKS * (4 + 128 * 4 + 128 * K * 4 + K * F // 2 * 4)


def test_torch_tensors_come_and_go_as_torch_tensors(toys) -> None:
    x, w, slots, experts = toy_inputs(ml_dtypes.bfloat16)
    tensors = [torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) for a in (x, w)]
    y = toys.block_rows(*tensors, torch.from_numpy(slots), torch.from_numpy(experts))
    assert y.dtype == torch.bfloat16
    np.testing.assert_array_equal(from_device(y), toys.block_rows(x, w, slots, experts))


def test_after_the_emulator_is_left_no_import_finds_it() -> None:
    before = {name: sys.modules.get(name) for name in ("nki", "nki.isa", "nki.language", TOYS)}
    with emulated_nki():
        kernel = importlib.import_module(TOYS).block_rows
        assert neuron_probe.nki() != "real"
    assert {name: sys.modules.get(name) for name in before} == before
    assert not hasattr(sys.modules["tests.kernels"], "toy_kernels")
    with pytest.raises(CallError, match="outside `with emulated_nki"):
        kernel(*toy_inputs())


def test_a_launch_for_another_logical_core_is_refused() -> None:
    with emulated_nki(lnc=2):
        kernel = importlib.import_module(TOYS).block_rows
        with pytest.raises(EmulationError, match="launched for LNC 1, the device runs LNC 2"):
            kernel(*toy_inputs())
        with pytest.raises(CallError, match="takes 1 or 2"):
            kernel[3]


def test_a_placeholder_of_the_public_index_is_not_taken_for_nki(tmp_path, monkeypatch) -> None:
    (tmp_path / "nki.py").write_text("raise ImportError('this is the wrong package')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert runners() == ["emulator"]
