"""The command line as tests run it: in this process for most, in processes of its own for streams and exit codes."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from qwen3conv.converters.conversion import carry_out, prepare
from qwen3conv.converters.geometry import Geometry
from qwen3conv.converters.parameters import logical_parameters
from qwen3conv.converters.policies import Choices
from qwen3conv.tools.cli.main import cli
from tests.hub_server import Hub, client_environment, serve_hub
from tests.models import saved_model

Run = Callable[..., Result]

TINY = Geometry(64, 16, 2, 2, 1, 8, intermediate_size=24)
TINY_MOE = Geometry(64, 16, 2, 2, 1, 8, moe_intermediate_size=12, num_experts=3)


def write_model(folder: Path, geometry: Geometry = TINY, *, tied: bool = False, config: bool = True) -> Path:
    """A small Hugging Face folder, written without torch: bf16 numbers between 1 and 2, of another seed per tensor."""
    folder.mkdir(parents=True)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, shape in logical_parameters(geometry, tied=tied):
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        numbers = random.Random(name)
        data = b"".join(struct.pack("<H", 0x3F80 + numbers.randrange(128)) for _ in range(count))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
    if config:
        (folder / "config.json").write_text(json.dumps(config_of(geometry, tied)))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


def write_sharded(folder: Path) -> Path:
    """The same with an untied head in five weight files and an index."""
    choices = Choices(shard_bytes=3000)
    with tempfile.TemporaryDirectory() as room:
        carry_out(prepare(write_model(Path(room) / "whole"), folder, "hf", choices))
    (folder / "qwen3conv.json").unlink()
    assert len(list(folder.glob("model-*-of-00005.safetensors"))) == 5
    return folder


def config_of(geometry: Geometry, tied: bool) -> dict[str, object]:
    """A v4 config.json of this geometry."""
    kind = "qwen3_moe" if geometry.is_moe else "qwen3"
    routing = {"num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    sizes = {key: getattr(geometry, key) for key in geometry.__dataclass_fields__}
    return {
        "architectures": ["Qwen3MoeForCausalLM" if geometry.is_moe else "Qwen3ForCausalLM"],
        "model_type": kind,
        "attention_bias": False,
        "hidden_act": "silu",
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        **{key: value for key, value in sizes.items() if value is not None},
        **(routing if geometry.is_moe else {}),
    }


def flip_byte(path: Path, offset: int) -> None:
    """Change the lowest bit of one byte; a negative offset counts from the end."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def environment(**more: str) -> dict[str, str]:
    """Variables for a process of its own: the hub out of reach, no terminal's habits."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "COLUMNS", "FORCE_COLOR"))}
    return {**kept, "HF_HUB_OFFLINE": "1", **more}


def process(*arguments: str | Path, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """``python -m qwen3conv`` with these arguments, to its end."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "qwen3conv", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=env or environment(),
        timeout=120,
    )


@dataclass(frozen=True, slots=True)
class HubClient:
    """Runs commands against a hub, in a folder and with a cache of their own."""

    hub: Hub
    folder: Path

    @property
    def cache(self) -> Path:
        """``HF_HOME``."""
        return self.folder / "hf-home"

    def environment(self, **more: str) -> dict[str, str]:
        """Variables of a process that uses the hub."""
        return environment(**{**client_environment(self.hub, self.cache), **more})

    def run(self, *arguments: str | Path, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; an exit code other than ``code`` fails the test."""
        ran = process(*arguments, cwd=self.folder, env=self.environment(**env))
        assert ran.returncode == code, f"exit {ran.returncode}\n{ran.stdout}{ran.stderr}"
        assert "--debug" in arguments or "Traceback" not in ran.stderr
        return ran


@pytest.fixture
def client(tmp_path: Path) -> Iterator[HubClient]:
    """A client of an empty hub."""
    with serve_hub() as hub:
        yield HubClient(hub, tmp_path)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process, in ``tmp_path``; an exit code other than ``code`` fails the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("COLUMNS", raising=False)

    def invoke(*arguments: str | Path, code: int = 0) -> Result:
        result = CliRunner().invoke(cli, [*map(str, arguments)], prog_name="qwen3conv")
        assert result.exit_code == code, f"exit {result.exit_code}\n{result.output}"
        return result

    return invoke


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A dense model in a folder of its own, to be changed at will."""
    return write_model(tmp_path / "tiny")


@pytest.fixture
def tiny_moe(tmp_path: Path) -> Path:
    """A MoE model in a folder of its own, to be changed at will."""
    return write_model(tmp_path / "tiny-moe", TINY_MOE)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder that transformers saved, by the name of its variant; not to be written to."""
    return lambda variant: saved_model(tmp_path_factory, variant)
