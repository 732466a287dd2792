"""The scripts for a trn2.48xlarge, run with programs that only write down how they were called."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from examples import demo
from qwen3conv.tools.cli.main import cli
from qwen3conv.tools.generate import generate
from tests.pages import ROOT

SPY = """#!/usr/bin/env python3
import json, os, sys
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
"""


def calls(script: str, folder: Path, **variables: str) -> list[list[str]]:
    """How ``script`` calls qwen3conv, torchrun and srun; ``scontrol`` names two nodes."""
    programs = folder / "bin"
    programs.mkdir()
    for name in ("qwen3conv", "torchrun", "srun"):
        (programs / name).write_text(SPY)
    (programs / "scontrol").write_text("#!/bin/sh\necho node-7\necho node-8\n")
    for path in programs.iterdir():
        path.chmod(0o755)
    (folder / "text.jsonl").write_text('{"text": "one"}\n')
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(folder / "calls"),
        "DATA": "text.jsonl",
        "RUN": "run",
        **variables,
    }
    ran = subprocess.run(["bash", ROOT / "examples" / script], cwd=folder, env=environment, capture_output=True)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def options(words: list[str]) -> dict[str, str]:
    """Flags of the training's command line with their values."""
    rest = words[words.index("qwen3conv.training") + 1 :]
    return dict(zip(rest[::2], rest[1::2], strict=True))


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What ``train --print`` calls for an 8B of which only headers are there, and a small model's tokenizer."""
    monkeypatch.chdir(tmp_path)
    generate(tmp_path / "Qwen3-8B", "Qwen3-8B", sparse=True)
    demo.make_tokenizer(325).save_pretrained(tmp_path / "Qwen3-8B")
    (tmp_path / "text.jsonl").write_text('{"text": "one"}\n')
    words = "train --from Qwen3-8B --model 8B --data text.jsonl --output run --steps 1000 --seq-len 4096"
    result = CliRunner().invoke(cli, [*words.split(), "--device", "neuron", "--print"], prog_name="qwen3conv")
    assert result.exit_code == 0, result.output
    return options(shlex.split(result.stdout))


def check_qwen3conv(found: list[list[str]]) -> None:
    names = []
    for program, *words in found:
        if program == "qwen3conv" or words[0] == "qwen3conv":
            name, *rest = words if program == "qwen3conv" else words[1:]
            cli.commands[name].make_context(name, rest)
            names.append(name)
    assert names == ["doctor", "hf-to-dcp", "dcp-to-hf", "verify"]


def test_one_node_is_trained_as_train_would(tmp_path: Path, printed: dict[str, str]) -> None:
    found = calls("trn2_torchrun.sh", tmp_path)
    check_qwen3conv(found)
    (training,) = (words for words in found if words[0] == "torchrun")
    assert training[1:4] == ["--standalone", "--nproc_per_node", "64"]
    assert options(training) == printed


def test_several_nodes_share_what_fsdp_cuts(tmp_path: Path, printed: dict[str, str]) -> None:
    found = calls("trn2.slurm", tmp_path, SLURM_NNODES="2", SLURM_JOB_NODELIST="node-[7-8]", SLURM_JOB_ID="11")
    check_qwen3conv(found)
    (training,) = (words for words in found if words[1] == "torchrun")
    start = dict(zip(training[2:12:2], training[3:12:2], strict=True))
    assert start == {
        "--nnodes": "2",
        "--nproc_per_node": "64",
        "--rdzv_backend": "c10d",
        "--rdzv_endpoint": "node-7:29500",
        "--rdzv_id": "11",
    }
    assert options(training) == {**printed, "--parallelism.data_parallel_shard_degree": "32"}


@pytest.mark.parametrize("script", ["trn2_torchrun.sh", "trn2.slurm"])
def test_a_script_says_that_it_was_not_run_there(script: str) -> None:
    assert "This script was not run on Trainium." in (ROOT / "examples" / script).read_text()
