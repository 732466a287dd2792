"""The examples run, on real ranks, and say so when what they load is not the model."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qwen3conv.converters.placement import Mesh
from tests.cli.conftest import environment
from tests.conversions import convert
from tests.laws.tiny import scratch
from tests.models import saved_model

ROOT = Path(__file__).resolve().parents[1]


def load_rank(*arguments: str | Path, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """The example under torchrun, where qwen3conv cannot be imported."""
    launch = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return subprocess.run(
        [*launch, str(ROOT / "examples" / "load_rank.py"), *map(str, arguments)],
        env=environment(OMP_NUM_THREADS="1", PYTHONPATH=""),
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("variant", [pytest.param("dense", marks=pytest.mark.slow), "dense-tied", "moe"])
def test_a_tensor_parallel_model_loaded_from_rank_files_gives_the_same_logits(
    variant: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = saved_model(tmp_path_factory, variant)
    with scratch() as folder:
        convert(source, folder / "ranks", "ranks", mesh=Mesh(tp=2))
        ran = load_rank(folder / "ranks", "--whole", source)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    first, second = ran.stdout.splitlines()
    assert first.startswith("rank 0 of 2 holds ")
    assert second.startswith(f"logits differ from those of {source} by at most ")
    assert 0 < float(second.split()[-1]) < 1e-5


@pytest.mark.slow
def test_ranks_in_each_others_place_do_not_pass(tmp_path_factory: pytest.TempPathFactory) -> None:
    source = saved_model(tmp_path_factory, "dense")
    with scratch() as folder:
        convert(source, folder / "ranks", "ranks", mesh=Mesh(tp=2))
        first, second = sorted((folder / "ranks").glob("rank-*"))
        shutil.move(first, folder / "first")
        shutil.move(second, first)
        shutil.move(folder / "first", second)
        ran = load_rank(folder / "ranks", "--whole", source)
    assert ran.returncode == 1
    assert float(ran.stdout.split()[-1]) > 1e-2


@pytest.mark.slow
def test_a_folder_that_is_cut_otherwise_is_wrong_usage(tmp_path_factory: pytest.TempPathFactory) -> None:
    source = saved_model(tmp_path_factory, "dense")
    with scratch() as folder:
        convert(source, folder / "ranks", "ranks", mesh=Mesh(tp=2, fsdp=2))
        ran = load_rank(folder / "ranks", ranks=1)
    assert ran.returncode != 0
    assert "give a folder of layout hf-fused, cut by --tp 1 alone" in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "transformers", "nki_moe"])
def test_a_fine_tuned_model_answers_as_it_was_taught(backend: str) -> None:
    with scratch() as folder:
        ran = subprocess.run(
            [sys.executable, str(ROOT / "examples" / f"train_{backend}.py"), str(folder / "work")],
            env=environment(OMP_NUM_THREADS="1"),
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "sun -> moon" in ran.stdout
