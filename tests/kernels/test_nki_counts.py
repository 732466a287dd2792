"""How many instructions the compiler gets, and that neither blocks nor experts add any: what the docstrings say."""

from __future__ import annotations

import ast
import importlib.util
from collections import Counter
from pathlib import Path

import pytest
import torch

from qwen3conv.tools.nki_emulator import CoreReport, emulated_nki
from tests.kernels.conftest import NkiRunner
from tests.kernels.expert_cases import BACKWARD, FORWARD, make_case, run_backward, run_forward


def forward_report(counts: list[int], hidden: int, inner: int, block: int, **options) -> CoreReport:
    with emulated_nki() as emulation:
        run_forward(
            NkiRunner("emulator", emulation), make_case(counts, hidden, inner, torch.bfloat16), block, **options
        )
        return emulation.last.cores[-1]


def backward_report(counts: list[int], hidden: int, inner: int, block: int, **options) -> CoreReport:
    with emulated_nki() as emulation:
        case = make_case(counts, hidden, inner, torch.bfloat16)
        run_backward(NkiRunner("emulator", emulation), case, block, **options)
        return emulation.last.cores[-1]


def quarter(count: int) -> int:
    return -(-count // 4)


def forward_program(hidden: int, width: int, block: int, *, resident: bool, scaled: bool) -> Counter[str]:
    k, m, b, f = hidden // 128, width // 128, block // 128, -(-hidden // 512)
    return Counter(
        nc_transpose=k * b + 3 * m * k,
        tensor_copy=quarter(k) * (b + 2 * m) + f * m + (0 if scaled else f * b),
        tensor_scalar=f * b if scaled else 0,
        nc_matmul=2 * k * m + f * m * b,
        activation=m,
        tensor_tensor=m,
        dma_copy=2 + 2 * b + f * b + (3 if resident else 2 * m + f) + (b if scaled else 0),
        register_load=1,
        loop=1,
    )


def backward_program(hidden: int, chunk: int, block: int, passes: int, *, scaled: bool) -> Counter[str]:
    k, m, b, f = hidden // 128, chunk // 128, block // 128, -(-hidden // 512)
    one = Counter(
        nc_transpose=2 * m * k + 2 * k * b + 2 * m * b,
        nc_matmul=4 * k * b + 4 * m * f * b,
        tensor_copy=2 * (m + b) * quarter(k) + 2 * b * quarter(m),
        activation=2 * b,
        tensor_tensor=(5 if scaled else 4) * b,
        tensor_scalar=2 * b if scaled else 0,
        tensor_reduce=b if scaled else 0,
        scalar_tensor_tensor=2 * m * f + k,
        dma_copy=10 + 3 * b + f * b + (2 * b if scaled else 0),
        memset=3,
        register_load=1,
        loop=1,
    )
    total: Counter[str] = Counter()
    for number in range(passes):
        onto = Counter(tensor_tensor=f * b, dma_copy=f * b) if number else Counter(tensor_copy=f * b)
        if number and scaled:
            onto += Counter(tensor_tensor=b, dma_copy=b)
        total += one + onto
    return total


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("hidden", "inner", "block", "lnc", "resident"),
    [(2048, 768, 256, 1, True), (640, 512, 128, 2, False), (128, 128, 512, 1, False)],
)
def test_the_forward_program_is_as_long_as_is_said(hidden, inner, block, lnc, resident, scaled) -> None:
    report = forward_report([3], hidden, inner, block, lnc=lnc, resident=resident, scaled=scaled)
    assert report.emitted == forward_program(hidden, inner // lnc, block, resident=resident, scaled=scaled)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("hidden", "inner", "block", "lnc", "chunk"),
    [(2048, 768, 256, 2, 384), (640, 768, 128, 1, 256), (128, 512, 512, 2, 256)],
)
def test_the_backward_program_is_as_long_as_is_said(hidden, inner, block, lnc, chunk, scaled) -> None:
    report = backward_report([3], hidden, inner, block, lnc=lnc, chunk=chunk, scaled=scaled)
    assert report.emitted == backward_program(hidden, chunk, block, inner // lnc // chunk, scaled=scaled)


def docstring(module: str) -> str:
    """Read, not imported: the module needs ``nki``."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return " ".join((ast.get_docstring(ast.parse(Path(spec.origin).read_text())) or "").split())


def test_the_programs_of_30b_a3b_are_those_of_the_docstrings() -> None:
    def said(program: Counter[str]) -> str:
        apart = ("nc_transpose", "nc_matmul", "dma_copy", "loop", "register_load", "memset")
        others = sum(count for name, count in program.items() if name not in apart)
        transposes, products, copies = (program[name] for name in apart[:3])
        return f"{transposes} transposes, {products} products, {others} other ops, {copies} DMAs"

    assert said(forward_program(2048, 768, 256, resident=True, scaled=False)) in docstring(FORWARD)
    assert said(backward_program(2048, 384, 256, 1, scaled=False)) in docstring(BACKWARD)


def test_the_programs_of_all_sizes_are_as_long_as_the_docstrings_say() -> None:
    sizes = [(2048, 384, True, 384), (4096, 768, True, 128), (6144, 2560, False, 128)]
    forward, backward = [], []
    for hidden, width, resident, chunk in sizes:
        forward.append(forward_program(hidden, width, 128, resident=resident, scaled=False).total())
        backward.append(backward_program(hidden, chunk, 128, width // chunk, scaled=False).total())
    text = "{} for 30B-A3B{} and {} for 235B-A22B{} on two cores, {} for Coder-480B-A35B{} on one"
    a, b, c = forward
    assert text.format(a, "", b, "", c, "") in docstring(FORWARD)
    a, b, c = backward
    assert text.format(a, " (1 pass)", b, " (6)", c, " (20)") in docstring(BACKWARD)


def test_blocks_and_experts_add_no_instruction_and_no_byte_on_the_chip() -> None:
    few, many = [100], [0, 129, 1, 300, 0, 7, 128, 2]
    for report in (forward_report, backward_report):
        one, other = report(few, 128, 256, 128), report(many, 128, 256, 128)
        assert one.emitted == other.emitted
        assert (one.sbuf_bytes, one.psum_banks) == (other.sbuf_bytes, other.psum_banks)
        used = sum(max(1, -(-count // 128)) for count in many)
        assert set(other.trips) == {used}
        assert set(one.trips) == {1}


def test_weights_are_read_once_for_each_expert_that_has_a_block() -> None:
    hidden, inner, block = 128, 256, 128
    counts = [500, 0, 3]
    weight = 3 * hidden * inner * 2
    blocks = 4 + 1 + 1
    kept = forward_report(counts, hidden, inner, block, resident=True)
    streamed = forward_report(counts, hidden, inner, block, resident=False)
    assert streamed.hbm_read_bytes - kept.hbm_read_bytes == (blocks - len(counts)) * weight
    backward = backward_report(counts, hidden, inner, block, chunk=256)
    stored = weight * len(counts)
    assert backward.hbm_written_bytes == blocks * block * hidden * 2 + stored
