"""Gradients through experts on tensor-parallel ranks, of one sequence at a time too, which stock torchtitan loses."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import environment
from tests.models import even_texts, saved_model
from tests.training.test_native import run, steps_of, write_texts

STOCK = """
import sys
from qwen3conv.training.devices import prepare_torchtitan
prepare_torchtitan("cpu")
from qwen3conv.training.native_model import MoE, SettledMoE
SettledMoE.forward = MoE.forward
from qwen3conv.training.__main__ import main
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory, "moe-trainable")


@pytest.fixture(scope="module")
def data(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("data") / "text.jsonl", even_texts(moe, 64, 8))


def words(moe: Path, data: Path, output: Path, *flags: object) -> list[object]:
    base: list[object] = ["train", "--from", moe, "--data", data, "--output", output, "--recipe", "tiny_sft"]
    base += ["--device", "cpu", "--steps", 2, "--batch-size", 2, "--local-batch-size", 1, "--no-export"]
    return [*base, *flags]


@pytest.fixture(scope="module")
def alone(moe: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    chat_free = words(moe, data, folder)
    run(*chat_free)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [("--tp", 2), ("--tp", 2, "--fsdp", 2)], ids=["tp2", "tp2-fsdp2"])
@pytest.mark.parametrize("backend", ["native", "nki-moe", "transformers"])
def test_one_sequence_at_a_time_trains_as_on_one_rank(
    backend: str, degrees: tuple[object, ...], alone: Path, moe: Path, data: Path, tmp_path: Path
) -> None:
    run(*words(moe, data, tmp_path / "run", "--backend", backend, *degrees))
    for step, found in steps_of(alone).items():
        assert steps_of(tmp_path / "run")[step] == pytest.approx(found, rel=1e-4), step


@pytest.mark.slow
def test_stock_experts_lose_the_gradient_of_one_sequence(alone: Path, moe: Path, data: Path, tmp_path: Path) -> None:
    """When this fails, ``SettledMoE`` can go."""
    run(*words(moe, data, tmp_path / "run", "--tp", 2))
    (tmp_path / "run" / "run.json").unlink()
    for step in (tmp_path / "run" / "checkpoint").iterdir():
        step.rename(tmp_path / step.name)
    (tmp_path / "stock.py").write_text(STOCK)
    shown = run(*words(moe, data, tmp_path / "run", "--tp", 2, "--print")).stdout
    command = shlex.split(shown.replace("-m qwen3conv.training ", f"{tmp_path / 'stock.py'} "))
    assert command[0] == sys.executable
    subprocess.run(command, env=environment(OMP_NUM_THREADS="1"), check=True, capture_output=True, timeout=120)
    stock, right = steps_of(tmp_path / "run"), steps_of(alone)
    assert stock["1"][0] == pytest.approx(right["1"][0], rel=1e-4)  # forward is right
    assert abs(stock["1"][1] / right["1"][1] - 1) > 1e-2
    assert json.loads((tmp_path / "run" / "run.json").read_text())["degrees"]["tp"] == 2
