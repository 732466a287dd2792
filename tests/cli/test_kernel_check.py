"""``kernel-check``: what it compares, and how it ends when it cannot."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from qwen3conv.tools import kernel_subjects
from qwen3conv.tools.cli.main import cli
from qwen3conv.tools.kernel_check import NAMES, Inputs, Results, Subject, by_grouped_mm, cases, check, in_float64
from qwen3conv.tools.nki_emulator import emulated_nki
from qwen3conv.training import neuron_probe

TINY = ["--hidden", "128", "--expert-hidden", "256", "--experts", "2"]
REFERENCE = Subject("here", "none", lambda inputs: Results(*(t.to(inputs.x.dtype) for t in in_float64(inputs))))


@pytest.mark.skipif(neuron_probe.nki() == "real", reason="NKI is here")
def test_without_nki_it_fails_and_says_what_is_missing() -> None:
    ran = CliRunner().invoke(cli, ["kernel-check"])
    assert ran.exit_code == 1
    assert ran.stdout == ""
    for text in ("no NKI kernel can run here", "torch-neuronx", "nki is", "--emulate"):
        assert text in ran.stderr


def test_emulated_kernels_pass_and_say_that_this_was_no_hardware() -> None:
    arguments = ["kernel-check", "--emulate", *TINY, "--dtype", "bfloat16"]
    ran = CliRunner().invoke(cli, arguments)
    assert ran.exit_code == 0, ran.output
    assert "nothing about hardware" in ran.stdout
    for name in NAMES:
        assert name in ran.stdout
    assert "all within what is allowed" in ran.stdout


def test_the_simulator_serves_where_nki_is_and_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_subjects, "nki", lambda: "real")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    with emulated_nki() as emulation:  # it has an ``nki.simulate`` as well
        ran = CliRunner().invoke(cli, ["kernel-check", "--json", *TINY[:-1], "1", "--dtype", "float32"])
        assert {run.kernel for run in emulation.runs} == {"forward", "backward"}
    assert ran.exit_code == 0, ran.output
    document = json.loads(ran.stdout)
    assert "nki.simulate" in document["where"]
    assert {*document} == {
        *("passes", "where", "nki", "hardware", "hidden", "expert_hidden", "experts", "findings"),
    }
    assert document["hardware"] is False
    assert document["passes"]


@pytest.mark.parametrize("wrong", range(len(NAMES)))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_result_that_is_wrong_or_nan_does_not_pass(wrong: int, dtype: str) -> None:
    for spoil in (1.05, float("nan")):

        def compute(inputs: Inputs, spoil: float = spoil) -> Results:
            results = list(REFERENCE.compute(inputs))
            results[wrong] = results[wrong] * spoil
            return Results(*results)

        found = list(check(replace(REFERENCE, compute=compute), cases(1)[:1], [dtype], 64, 64))
        assert [one.result for one in found if not one.passes] == [NAMES[wrong]]


def test_the_yardstick_passes_itself_and_so_does_the_rounded_reference() -> None:
    for compute in (by_grouped_mm, REFERENCE.compute):
        subject = replace(REFERENCE, compute=compute)
        assert all(one.passes for one in check(subject, cases(8), ["float32", "bfloat16"], 64, 64))


def test_something_different_ends_with_3(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(inputs: Inputs) -> Results:
        return Results(*(torch.zeros_like(result) for result in in_float64(inputs)))

    monkeypatch.setattr(kernel_subjects, "run", run)
    ran = CliRunner().invoke(cli, ["kernel-check", "--emulate", *TINY])
    assert ran.exit_code == 3
    assert "WRONG" in ran.stdout


def test_shapes_that_the_kernels_do_not_take_are_refused() -> None:
    ran = CliRunner().invoke(cli, ["kernel-check", "--emulate", "--hidden", "100"])
    assert ran.exit_code == 1
    assert "H is 100 and must be a multiple of 128" in ran.stderr


@pytest.mark.parametrize("shape", ["30B-A3B", "235B-A22B", "Coder-480B", "study"])
def test_the_model_of_every_shape_has_a_choice(shape: str) -> None:
    ran = CliRunner().invoke(cli, ["kernel-check", "--model", "--shape", shape, "--json", "--lnc", "2"])
    assert ran.exit_code == 0, ran.output
    document = json.loads(ran.stdout)
    totals: dict[int, float] = {}
    for row in document["estimates"]:
        totals[row["block"]] = totals.get(row["block"], 0) + row["bound_seconds"]
    assert document["choices"]["2"]["block"] == min(totals, key=lambda block: totals[block])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model"], "--hidden, --expert-hidden, --experts, --top-k, --tokens"),
        (["--model", "--emulate"], "leave --emulate away"),
        (["--emulate", "--tokens", "4"], "--top-k and --tokens are for --model"),
        (["--lnc", "1"], "NEURON_LOGICAL_NC_CONFIG"),
    ],
)
def test_options_that_do_not_go_together_are_wrong_usage(arguments: list[str], message: str) -> None:
    ran = CliRunner().invoke(cli, ["kernel-check", *arguments])
    assert ran.exit_code == 2
    assert message in ran.stderr
