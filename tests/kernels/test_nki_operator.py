"""The operator by its kernels, on the emulator or the vendor's simulator: only ``dispatch`` is told another target."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from qwen3conv.training.kernels import dispatch, nki_experts
from qwen3conv.training.kernels.capacity import ExpertShape, choose_block
from qwen3conv.training.kernels.errors import KernelError
from qwen3conv.training.kernels.moe_experts import moe_experts
from tests.kernels.conftest import NkiRunner, OnKernels
from tests.kernels.expert_cases import TOLERANCE, Case, error, make_case, wanted_backward, wanted_forward

NAMES = ("x", "gate", "down", "up", "affinity")


def leaves(case: Case, *, scaled: bool) -> dict[str, torch.Tensor]:
    tensors = {name: getattr(case, name).to(case.dtype) for name in NAMES[:4]}
    if scaled:
        tensors["affinity"] = case.affinity.float()
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def by_operator(case: Case, *, scaled: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output, and the gradient of every floating argument."""
    given = leaves(case, scaled=scaled)
    x, *others = given.values()
    y = moe_experts(x, torch.tensor(case.counts), *others)
    gradients = torch.autograd.grad(y, list(given.values()), case.dy.to(y.dtype))
    return y.detach(), dict(zip(given, gradients, strict=True))


def routed(tokens: int, experts: int, top_k: int) -> list[int]:
    scores = torch.rand((tokens, experts), generator=torch.Generator().manual_seed(top_k))
    return torch.bincount(scores.topk(top_k, 1).indices.flatten(), minlength=experts).tolist()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("top_k", "lnc", "scaled"), [(1, 1, False), (4, 2, True), (8, 2, False)])
def test_output_and_all_gradients_are_the_references(on_kernels: OnKernels, top_k, lnc, scaled, dtype) -> None:
    launches = on_kernels(lnc)
    case = make_case(routed(60, 8, top_k), 128, 256, dtype)
    y, gradients = by_operator(case, scaled=scaled)
    assert launches == (["forward_scaled", "backward_scaled"] if scaled else ["forward", "backward"])
    assert error(y, wanted_forward(case, scaled=scaled)) <= TOLERANCE[dtype]
    wanted = wanted_backward(case, scaled=scaled)
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype == (torch.float32 if name == "affinity" else dtype)
        assert error(gradient, wanted[name]) <= TOLERANCE[dtype], name


@pytest.mark.parametrize("lnc", [1, 2])
def test_bf16_is_no_further_from_float64_than_torchs_grouped_products(on_kernels: OnKernels, lnc: int) -> None:
    on_kernels(lnc)
    case = make_case([40, 0, 90, 130], 256, 256, torch.bfloat16)
    y, gradients = by_operator(case, scaled=False)
    x, gate, down, up = leaves(case, scaled=False).values()
    ends = torch.tensor(case.counts).cumsum(0).to(torch.int32)
    h = F.silu(torch._grouped_mm(x, gate.transpose(1, 2), offs=ends)) * torch._grouped_mm(
        x, up.transpose(1, 2), offs=ends
    )
    by_torch = torch._grouped_mm(h, down.transpose(1, 2), offs=ends)
    gradients_by_torch = torch.autograd.grad(by_torch, (x, gate, down, up), case.dy.bfloat16())
    wanted = {"y": wanted_forward(case, scaled=False), **wanted_backward(case, scaled=False)}
    ours = {"y": y, **gradients}
    theirs = {"y": by_torch.detach(), **dict(zip(NAMES, gradients_by_torch, strict=False))}
    for name in wanted:
        assert error(ours[name], wanted[name]) <= error(theirs[name], wanted[name]), name


def test_no_rows_at_all_give_no_rows_and_gradients_of_zero(on_kernels: OnKernels) -> None:
    on_kernels(1)
    y, gradients = by_operator(make_case([0, 0, 0], 128, 128), scaled=False)
    assert y.shape == (0, 128)
    assert [bool(gradients[name].any()) for name in NAMES[1:4]] == [False] * 3


def test_the_operator_passes_opcheck_on_the_kernels(on_kernels: OnKernels) -> None:
    on_kernels(2)
    given = leaves(make_case([0, 3, 1], 128, 256), scaled=True)
    x, *others = given.values()
    torch.library.opcheck(moe_experts, (x, torch.tensor([0, 3, 1]), *others))


def test_compile_makes_one_graph_around_the_kernels(on_kernels: OnKernels) -> None:
    launches = on_kernels(1)
    case = make_case([2, 3], 128, 128)
    given = leaves(case, scaled=False)
    x, *others = given.values()
    compiled = torch.compile(lambda *a: moe_experts(*a) * 2, backend="aot_eager", fullgraph=True)
    y = compiled(x, torch.tensor(case.counts), *others)
    gradients = torch.autograd.grad(y, list(given.values()), case.dy.to(y.dtype))
    wanted_y, wanted = by_operator(case, scaled=False)
    torch.testing.assert_close(y, 2 * wanted_y, rtol=0, atol=0)
    for name, gradient in zip(given, gradients, strict=True):
        torch.testing.assert_close(gradient, 2 * wanted[name], rtol=1e-6, atol=1e-6)
    assert launches == ["forward", "backward"] * 2


class _FakeTarget(dispatch.Target):
    """Kernels that only have shapes."""

    def launch(self, module: str, kernel: str, *tensors: torch.Tensor, **constants: int) -> Any:
        x, slot_row = tensors[0], next(t for t in tensors if t.dtype == torch.int32)
        dx = x.new_empty(self.lnc, *slot_row.shape[:2], x.shape[1])
        return dx if module == "nki_forward" else (dx, *tensors[2:5])


def test_nothing_of_the_data_reaches_python() -> None:
    with FakeTensorMode():  # raises where a value of a tensor is asked for
        x, dy = torch.empty(40, 128), torch.empty(40, 128)
        gate, down, up = torch.empty(4, 256, 128), torch.empty(4, 128, 256), torch.empty(4, 256, 128)
        counts = torch.zeros(4, dtype=torch.int64)
        target = _FakeTarget(2)
        assert nki_experts.forward(target, x, counts, gate, down, up, None).shape == x.shape
        dx, d_gate, d_down, d_up, none = nki_experts.backward(target, dy, x, counts, gate, down, up, None)
        assert [t.shape for t in (dx, d_gate, d_down, d_up)] == [t.shape for t in (x, gate, down, up)]
        assert none is None


def test_a_shape_that_does_not_fit_is_refused_before_a_launch(on_kernels: OnKernels) -> None:
    launches = on_kernels(2)
    with pytest.raises(KernelError, match="I is 128 and must be a multiple of 256"):
        by_operator(make_case([3], 128, 128), scaled=False)
    assert not launches


def test_mixed_dtypes_are_refused_before_a_launch(on_kernels: OnKernels) -> None:
    on_kernels(1)
    x, *others = leaves(make_case([3], 128, 128), scaled=False).values()
    with pytest.raises(KernelError, match=r"x torch.bfloat16, gate torch.float32"):
        moe_experts(x.bfloat16(), torch.tensor([3]), *others)


def test_a_device_is_called_as_the_simulator_is(on_kernels: OnKernels, nki_runner: NkiRunner) -> None:
    if nki_runner.where != "emulator":
        pytest.skip("the emulator alone takes both calls")
    on_kernels(2)
    case = make_case([0, 3, 1], 128, 256)
    simulated = by_operator(case, scaled=True)
    with dispatch.every_device_is(dispatch.Target(2)):
        called = by_operator(case, scaled=True)
    torch.testing.assert_close(called, simulated, rtol=0, atol=0)


def test_without_nki_the_kernels_say_where_it_comes_from() -> None:
    with (
        dispatch.every_device_is(dispatch.Target(1)),
        pytest.raises(KernelError, match=r"need nki of AWS Neuron .*pip\.repos\.neuron\.amazonaws\.com"),
    ):
        by_operator(make_case([3], 128, 128), scaled=False)


@pytest.mark.parametrize(("variable", "lnc"), [("1", 1), ("2", 2), (None, 2)])
def test_a_neuron_device_gets_the_kernels_for_its_logical_core(monkeypatch, variable, lnc: int) -> None:
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)
    if variable is not None:
        monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", variable)

    class OnNeuron:
        device = torch.device("privateuseone")

    monkeypatch.setattr(OnNeuron, "device", type("Device", (), {"type": "neuron"}))
    assert dispatch.target_of(OnNeuron()) == dispatch.Target(lnc)  # type: ignore[arg-type]
    assert dispatch.target_of(torch.empty(1)) is None


def test_a_logical_core_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "eight")
    with pytest.raises(KernelError, match="NEURON_LOGICAL_NC_CONFIG is 'eight' and must be 1 or 2"):
        dispatch.device_lnc()


def test_the_block_follows_from_shapes() -> None:
    shape = ExpertShape(rows=4096 * 8, hidden=2048, inner=768, experts=128)
    assert choose_block(shape).block == 128
