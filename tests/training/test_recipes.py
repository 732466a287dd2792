"""Recipes of sizes: each has a layout that fits the size, in every backend, and is for sources of that size alone."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from qwen3conv.converters.parameters import logical_parameters
from qwen3conv.converters.placement import check_mesh
from qwen3conv.tools.cli.main import cli
from qwen3conv.tools.generate import generate
from qwen3conv.training.devices import prepare_torchtitan
from qwen3conv.training.layouts import GEOMETRY, LAYOUT, STUDY, recipe_name
from tests.cli.conftest import write_model

CORE_BYTES = 24 << 30
BYTES_PER_PARAMETER = 16
"""Parameter, gradient and AdamW's two moments, in float32."""


@pytest.fixture(scope="module", params=["native", "transformers", "nki_moe"])
def backend(request: pytest.FixtureRequest) -> Any:
    prepare_torchtitan("cpu")
    return importlib.import_module(f"qwen3conv.training.recipes.{request.param}")


@pytest.mark.parametrize("size", LAYOUT)
def test_every_size_has_a_recipe_with_its_layout(size: str, backend: Any) -> None:
    for sft in (False, True):
        config = getattr(backend, recipe_name(size, sft=sft))()
        degrees = config.parallelism
        found = (degrees.tensor_parallel_degree, degrees.data_parallel_shard_degree, degrees.expert_parallel_degree)
        assert found == (LAYOUT[size].tp, LAYOUT[size].fsdp, 1)
        assert (config.model_size, config.training.seq_len) == (size, 4096)
        assert ("Chat" in type(config.dataloader).__qualname__) is sft
        assert recipe_name(size, sft=sft) in dir(backend)
    assert not hasattr(backend, "qwen3_9b")


@pytest.mark.parametrize(("steps", "total", "warm_up"), [(1000, None, 50), (10, None, 1), (100, 400, 20)])
def test_the_rate_warms_up_over_a_twentieth_of_the_schedule(
    steps: int, total: int | None, warm_up: int, backend: Any, tmp_path: Path
) -> None:
    from qwen3conv.converters.config import read_config
    from qwen3conv.training.trainer import QwenTrainer

    source = read_config(write_model(tmp_path / "model") / "config.json")
    for recipe in (backend.pretrain, backend.sft):
        config = recipe()
        config.training.steps, config.lr_scheduler.total_steps = steps, total
        config.hf_assets_path = str(tmp_path / "model")
        QwenTrainer._fit(config, source)
        assert config.lr_scheduler.warmup_steps == warm_up
        (group,) = config.optimizer.param_groups
        assert (group.optimizer_kwargs["lr"], group.optimizer_kwargs["weight_decay"]) == (1e-5, 0.1)
        config = recipe()
        config.lr_scheduler.warmup_steps = 7  # as --lr_scheduler.warmup_steps says
        QwenTrainer._fit(config, source)
        assert config.lr_scheduler.warmup_steps == 7


@pytest.mark.parametrize("size", LAYOUT)
def test_a_layout_divides_the_size_and_leaves_a_third_of_a_core(size: str) -> None:
    geometry, mesh = GEOMETRY[size], LAYOUT[size]
    check_mesh(mesh, geometry)
    assert geometry.num_key_value_heads % mesh.tp == 0
    count = sum(rows * (rest[0] if rest else 1) for _, (rows, *rest) in logical_parameters(geometry, tied=False))
    assert count * BYTES_PER_PARAMETER / mesh.ranks < CORE_BYTES * 2 / 3
    assert mesh.ranks == (256 if size == "235B-A22B" else 64)


def run(*words: object, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, [*map(str, words)], prog_name="qwen3conv")
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate(tmp_path_factory.mktemp("study") / "model", STUDY, sparse=True).folder


def test_the_command_takes_layout_and_recipe_from_the_size(study: Path, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "x"}\n')
    base = ["train", "--from", study, "--data", tmp_path / "text.jsonl", "--output", tmp_path / "run", "--print"]
    shown = run(*base, "--model", "MoE-study").stdout
    assert "--nproc_per_node 64 " in shown
    assert "--config qwen3_moe_study " in shown
    shown = run(*base, "--model", STUDY, "--recipe", "sft", "--tp", 2, "--fsdp", 4, "--backend", "nki-moe").stdout
    assert "--nproc_per_node 8 " in shown
    assert "recipes.nki_moe --config qwen3_moe_study_sft " in shown
    wrong = run(*base, "--model", "30B-A3B", code=1).stderr
    assert "it has num_hidden_layers 4 and not 48, num_experts 64 and not 128" in wrong
    assert "did you mean 8B or 4B?" in run(*base, "--model", "9B", code=2).stderr
    assert "--model is for --recipe pretrain and sft" in run(*base, "--model", STUDY, "--recipe", "tiny", code=1).stderr
