"""The demo does what it shows, leaves nothing behind, and says when something fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import environment, write_model
from tests.hub_server import client_environment, serve_hub
from tests.laws.tiny import scratch
from tests.models import make_dense

ROOT = Path(__file__).resolve().parents[1]
STEPS = ["hf-to-dcp", "inspect", "fingerprint", "fingerprint", "dcp-to-hf", "diff", "verify", "parity"]


def run(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The demo as ``make demo`` starts it, its temporary folders in ``cwd``."""
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py"), *arguments],
        cwd=cwd,
        env=environment(TMPDIR=str(cwd), **variables),
        capture_output=True,
        text=True,
        timeout=600,
    )


def left_in(folder: Path) -> list[str]:
    """What lies in a folder, but for the cache that torch's compiler makes when it is imported."""
    return [name for name in os.listdir(folder) if not name.startswith("torchinductor_")]


def commands_in(output: str) -> list[str]:
    return re.findall(r"^\$ python -m qwen3conv (.*)$", output, re.MULTILINE)


def table_in(output: str) -> list[tuple[str, str]]:
    """Step and seconds of every row of the table at the end."""
    rows = output.split("MODEL ", 1)[1].splitlines()[1:]
    found = []
    for row in rows:
        match = re.fullmatch(r"(?:[\w.-]+)? +(make them|[a-z-]+) +[a-z ]+ (\d+\.\d) *", row)
        if match:
            found.append((match[1], match[2]))
    return found


def test_every_step_is_shown_and_succeeds_with_both_models_and_nothing_stays() -> None:
    with scratch() as folder:
        ran = run(cwd=folder)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert left_in(folder) == []
    assert ran.stderr == ""
    assert commands_in(ran.stdout) == [
        line.format(name=name)
        for name in ("qwen3", "qwen3-moe")
        for line in (
            "hf-to-dcp {name} {name}-dcp",
            "inspect {name}-dcp",
            "fingerprint {name}",
            "fingerprint {name}-dcp",
            "dcp-to-hf {name}-dcp {name}-back",
            "diff {name} {name}-back",
            "verify {name}-back",
            "parity {name} {name}-dcp",
        )
    ] + [
        "train --from qwen3 --data text.jsonl --output qwen3-run --recipe tiny",
        "inspect qwen3-run/export",
    ]
    assert len(re.findall(r"^  the same: \d+ parameters, bit for bit$", ran.stdout, re.MULTILINE)) == 2
    prints = re.findall(r"^  ([0-9a-f]{32})$", ran.stdout, re.MULTILINE)
    assert prints[0] == prints[1] != prints[2] == prints[3]
    assert [step for step, _ in table_in(ran.stdout)] == ["make them", *STEPS, *STEPS, "train", "inspect"]
    assert ran.stdout.splitlines()[-1].startswith("All 19 steps succeeded in ")
    assert len(ran.stdout.splitlines()) <= 76, "more than a page"
    assert max(map(len, ran.stdout.splitlines())) <= 100


@pytest.mark.slow
def test_a_model_of_the_hub_is_named_to_the_commands_and_what_is_kept_stays() -> None:
    with scratch() as folder:
        source = make_dense(folder / "source", tied=True)
        with serve_hub() as hub:
            hub.add("org/Small", source)
            variables = client_environment(hub, folder / "cache")
            ran = run("--model", "org/Small", "--keep", "kept", cwd=folder, **variables)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert commands_in(ran.stdout)[0] == "hf-to-dcp org/Small small-dcp"
        assert [step for step, _ in table_in(ran.stdout)] == STEPS
        assert sorted(os.listdir(folder / "kept")) == ["small-back", "small-dcp"]
        weights = (folder / "kept" / "small-back" / "model.safetensors").read_bytes()
        assert weights == (source / "model.safetensors").read_bytes()


def test_a_step_that_fails_ends_the_demo_with_one_clear_line_and_nothing_stays() -> None:
    with scratch() as folder:
        model = write_model(folder / "model")
        weights = (model / "model.safetensors").read_bytes()
        (model / "model.safetensors").write_bytes(weights[:-1])
        ran = run("--model", "model", cwd=folder)
        assert ran.returncode == 1
        assert left_in(folder) == ["model"]
    *_, error, last = ran.stderr.splitlines()
    assert "model.safetensors: is truncated: 1 bytes" in error
    assert last == f"demo failed: hf-to-dcp of {model} ended with exit 1"
    assert "Traceback" not in ran.stderr
    assert "succeeded" not in ran.stdout


def test_a_folder_to_keep_that_is_not_empty_is_wrong_usage() -> None:
    with scratch() as folder:
        (folder / "mine").mkdir()
        (folder / "mine" / "file").touch()
        ran = run("--keep", "mine", cwd=folder)
        assert ran.returncode == 2
        assert ran.stderr.endswith("mine exists and is not an empty folder: remove it, or name another\n")
        assert left_in(folder) == ["mine"]
