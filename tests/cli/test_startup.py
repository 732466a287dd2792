"""What a command loads: click alone for help, no torch for anything but parity."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import environment, write_model

pytestmark = pytest.mark.torch_free

LOADED = """
import json, sys
from qwen3conv.tools.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as leaving:
    assert leaving.code in (0, 3), leaving.code
print(json.dumps(sorted(sys.modules)))
"""

TORCH = {"torch", "torchtitan", "transformers", "accelerate", "datasets"}
HEAVY = {*TORCH, "huggingface_hub", "numpy", "rich", "safetensors", "xxhash", "httpx"}


def loaded(*arguments: str, cwd: Path) -> set[str]:
    """Modules that a process holds after running a command."""
    command = [sys.executable, "-P", "-c", LOADED, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment(), timeout=120)
    assert ran.returncode == 0, ran.stderr
    return set(json.loads(ran.stdout.splitlines()[-1]))


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["hf-to-dcp", "--help"], ["completion", "zsh"]])
def test_help_loads_click_and_the_command_line_alone(arguments: list[str], tmp_path: Path) -> None:
    modules = loaded(*arguments, cwd=tmp_path)
    assert HEAVY.isdisjoint(modules)
    ours = {name for name in modules if name.startswith("qwen3conv.") and not name.startswith("qwen3conv.tools")}
    assert ours == {"qwen3conv.converters", "qwen3conv.converters.errors"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["hf-to-dcp", "model", "dcp"],
        ["hf-to-dcp", "model", "cast", "--dtype", "float32"],
        ["convert", "model", "fused", "--to", "hf-fused"],
        ["plan", "model", "dcp", "--to", "titan"],
        ["inspect", "model"],
        ["fingerprint", "model"],
        ["diff", "model", "model"],
        ["formats"],
    ],
)
def test_no_command_loads_torch_or_the_hub_for_a_local_folder(arguments: list[str], tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    modules = loaded(*arguments, cwd=tmp_path)
    assert (TORCH | {"huggingface_hub", "httpx"}).isdisjoint(modules)


@pytest.mark.parametrize("arguments", [["verify", "dcp"], ["dcp-to-hf", "dcp", "hf"], ["inspect", "dcp"]])
def test_no_command_loads_torch_for_a_dcp(arguments: list[str], tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    loaded("hf-to-dcp", "model", "dcp", cwd=tmp_path)
    assert (TORCH | {"huggingface_hub", "httpx"}).isdisjoint(loaded(*arguments, cwd=tmp_path))


def test_a_plain_copy_loads_no_numpy_either(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    assert "numpy" not in loaded("hf-to-dcp", "model", "dcp", cwd=tmp_path)
