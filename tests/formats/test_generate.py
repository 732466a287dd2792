"""Generated checkpoints are what the real libraries take for the released models."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from qwen3conv.converters.errors import DestinationError, PolicyError
from qwen3conv.tools.generate import generate

RELEASED = {
    # size: tensors stored, unique tensors, unique parameters, dense intermediate or experts and top-k
    "0.6B": (311, 310, 596_049_920, 3072),
    "1.7B": (311, 310, 1_720_574_976, 6144),
    "4B": (398, 398, 4_022_468_096, 9728),
    "8B": (399, 399, 8_190_735_360, 12288),
    "14B": (443, 443, 14_768_307_200, 17408),
    "32B": (707, 707, 32_762_123_264, 25600),
    "30B-A3B": (18_867, 18_867, 30_532_122_624, (128, 8)),
    "235B-A22B": (36_945, 36_945, 235_093_634_560, (128, 8)),
    "Coder-480B-A35B": (30_321, 30_321, 480_154_875_392, (160, 8)),
}
"""Tensor and parameter counts of the hub's repositories (their model cards and index files)."""


def stored_shapes(folder: Path) -> dict[str, list[int]]:
    """Every stored name and shape, as the safetensors library reads the headers."""
    shapes: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return shapes


@pytest.mark.parametrize("size", RELEASED)
def test_a_hollow_checkpoint_has_the_tensors_of_the_release(size: str, tmp_path: Path) -> None:
    stored, unique, parameters, inner = RELEASED[size]
    made = generate(tmp_path / "model", size, sparse=True)
    shapes = stored_shapes(made.folder)
    assert (len(shapes), made.tensors) == (stored, stored)
    twice = ("lm_head.weight",) if stored > unique else ()
    assert sum(math.prod(shape) for name, shape in shapes.items() if name not in twice) == parameters
    on_disk = sum(path.stat().st_blocks * 512 for path in made.folder.iterdir())
    assert on_disk < 16_000_000 < made.nbytes

    config: Any = AutoConfig.from_pretrained(made.folder)
    assert (
        (config.num_experts, config.num_experts_per_tok) == inner if "-A" in size else config.intermediate_size == inner
    )
    assert config.tie_word_embeddings is (size in ("0.6B", "1.7B", "4B"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize(
    ("size", "theta", "context"),
    [
        ("0.6B", 1e6, 40960),
        ("235B", 1e6, 40960),
        ("480B", 1e7, 262144),
        ("Qwen3-4B-Instruct-2507", 5e6, 262144),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", 1e7, 262144),
        ("8B-Base", 1e6, 32768),
    ],
)
def test_the_config_is_in_the_style_of_the_hub_and_of_that_release(
    size: str, theta: float, context: int, tmp_path: Path
) -> None:
    made = generate(tmp_path / "model", size, sparse=True, layers=1)
    config: Any = AutoConfig.from_pretrained(made.folder)
    assert (config.rope_parameters["rope_theta"], config.max_position_embeddings) == (theta, context)
    assert config.rms_norm_eps == 1e-6
    assert made.config.raw.keys() >= {"torch_dtype", "rope_theta", "rope_scaling"}
    assert not made.config.raw.keys() & {"dtype", "rope_parameters", "num_local_experts"}


def test_tied_heads_are_stored_where_the_hub_stores_them(tmp_path: Path) -> None:
    stored = {
        size: "lm_head.weight" in stored_shapes(generate(tmp_path / size, size, sparse=True, layers=1).folder)
        for size in ("0.6B", "0.6B-Base", "1.7B", "4B", "4B-Instruct-2507", "8B")
    }
    assert stored == {
        "0.6B": True,
        "0.6B-Base": False,
        "1.7B": True,
        "4B": False,
        "4B-Instruct-2507": False,
        "8B": True,
    }


def test_1_7b_is_split_as_on_the_hub(tmp_path: Path) -> None:
    made = generate(tmp_path / "model", "1.7B", sparse=True)
    with safe_open(made.folder / "model-00002-of-00002.safetensors", "pt") as file:
        assert list(file.keys()) == ["lm_head.weight"]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_random_weights_make_a_model_that_runs(dtype: str, tmp_path: Path) -> None:
    made = generate(tmp_path / "dense", "0.6B", layers=2, vocab=600, dtype=dtype)
    tensors = load_file(made.folder / "model.safetensors")
    assert torch.equal(tensors.pop("lm_head.weight"), tensors["model.embed_tokens.weight"])
    for name, tensor in tensors.items():
        assert torch.isfinite(tensor).all()
        assert 0.5 <= tensor.abs().min() <= tensor.abs().max() < 1 if "norm" in name else 0 < tensor.abs().max() < 2**-5
    assert len({tensor.flatten()[:64].float().numpy().tobytes() for tensor in tensors.values()}) == len(tensors)
    model, info = AutoModelForCausalLM.from_pretrained(made.folder, output_loading_info=True)
    assert not any(info.values())
    logits = model(torch.arange(8)[None]).logits
    assert torch.isfinite(logits).all()
    assert logits.float().std() > 1e-4


def test_the_study_model_is_a_moe_that_runs_and_its_cuts_hold(tmp_path: Path) -> None:
    whole = generate(tmp_path / "whole", "moe-study", sparse=True)
    config: Any = AutoConfig.from_pretrained(whole.folder)
    assert (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok) == (4, 64, 4)
    assert (config.hidden_size, config.moe_intermediate_size) == (2048, 768)
    made = generate(tmp_path / "cut", "moe-study", layers=1, experts=3, vocab=500, shard_bytes=20_000_000)
    assert made.files > 1
    model, info = AutoModelForCausalLM.from_pretrained(made.folder, output_loading_info=True)
    assert not any(info.values())
    assert (model.config.num_experts, model.config.num_experts_per_tok) == (3, 3)
    assert torch.isfinite(model(torch.arange(8)[None]).logits).all()


def test_values_depend_on_seed_and_name_alone(tmp_path: Path) -> None:
    def values(name: str, **options: Any) -> dict[str, torch.Tensor]:
        folder = generate(tmp_path / name, "30B-A3B", experts=2, vocab=500, **options).folder
        return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}

    one = values("one", layers=1)
    split = values("split", layers=1, shard_bytes=10_000_000)
    deep = values("deep", layers=2)
    other = values("other", layers=1, seed=1)
    assert one.keys() == split.keys() == other.keys() < deep.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, split[name])
        assert torch.equal(tensor, deep[name])
        assert not torch.equal(tensor, other[name])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_checkpoint_takes_little_memory(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from qwen3conv.tools.generate import generate
nbytes = generate(Path(sys.argv[1]), "0.6B", layers=1).nbytes
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(nbytes, peak.split()[1])
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "model")], capture_output=True, text=True, check=True
    )
    shutil.rmtree(tmp_path / "model")
    nbytes, peak = map(int, done.stdout.split())
    assert nbytes > 600_000_000
    assert peak < 80_000  # KiB


@pytest.mark.parametrize(
    ("size", "options", "told"),
    [
        ("7B", {}, "choose one of 0.6B"),
        ("A3B-30B", {}, "choose one of 0.6B"),
        ("8B", {"experts": 4}, "no experts"),
        ("8B", {"layers": 0}, "num_hidden_layers is 0"),
        ("30B-A3B", {"experts": 0}, "num_experts is 0"),
        ("8B", {"dtype": "F8_E4M3"}, "BF16, F16, F32"),
    ],
)
def test_what_makes_no_model_is_refused(size: str, options: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=told):
        generate(tmp_path / "model", size, sparse=True, **options)
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_kept(tmp_path: Path) -> None:
    made = generate(tmp_path / "model", "0.6B", sparse=True, layers=1)
    before = (made.folder / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(DestinationError):
        generate(tmp_path / "model", "0.6B", sparse=True, layers=2)
    assert (made.folder / "model.safetensors").stat().st_mtime_ns == before
    assert generate(tmp_path / "model", "0.6B", sparse=True, layers=2, overwrite=True).tensors == 25
