"""Which files an output has: the source's own split wherever it fits, and a word about it wherever it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qwen3conv.converters import Choices, prepare
from qwen3conv.converters.preparation import Conversion
from tests.conversions import convert as run
from tests.models import make_fp8, make_moe


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same MoE model in five files, per expert and fused."""
    root = tmp_path_factory.mktemp("split")
    whole = make_moe(root / "hf", max_shard_size="60KB")
    return {"hf": whole, "hf-fused": convert(whole, root / "hf-fused", "hf-fused")}


def convert(source: Path, target: Path, to: str) -> Path:
    run(source, target, to)
    return target


def weight_map(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return found


def split_of(conversion: Conversion) -> str:
    (policy,) = (policy for policy in conversion.policies if policy.name == "split")
    return policy.summary


def test_a_fused_model_keeps_the_files_of_its_experts(models: dict[str, Path]) -> None:
    per_expert, fused = weight_map(models["hf"]), weight_map(models["hf-fused"])
    assert set(per_expert.values()) == set(fused.values())
    assert len(set(fused.values())) > 3
    for name, file in fused.items():
        first = name.replace("experts.gate_up_proj", "experts.0.gate_proj.weight")
        first = first.replace("experts.down_proj", "experts.0.down_proj.weight")
        assert per_expert[first] == file


def test_taken_apart_again_every_expert_stays_in_the_file_of_its_stack(models: dict[str, Path], tmp_path: Path) -> None:
    fused, apart = weight_map(models["hf-fused"]), weight_map(convert(models["hf-fused"], tmp_path / "hf", "hf"))
    assert set(apart.values()) == set(fused.values())
    for name, file in apart.items():
        if ".experts." in name:
            stem, _, rest = name.partition(".experts.")
            assert file == fused[f"{stem}.experts.{'down_proj' if 'down' in rest else 'gate_up_proj'}"]


@pytest.mark.parametrize("way", ["titan", "ranks"])
def test_the_split_survives_a_way_through_other_formats(models: dict[str, Path], tmp_path: Path, way: str) -> None:
    convert(models["hf"], tmp_path / "between", way)
    for target in ("hf", "hf-fused"):
        back = convert(tmp_path / "between", tmp_path / target, target)
        assert weight_map(back) == weight_map(models[target])


def test_a_dequantised_model_keeps_its_files(tmp_path: Path) -> None:
    make_fp8(tmp_path / "fp8", max_shard_size="300KB")
    source = {n: f for n, f in weight_map(tmp_path / "fp8").items() if not n.endswith("_scale_inv")}
    assert len(set(source.values())) > 1
    assert weight_map(convert(tmp_path / "fp8", tmp_path / "hf", "hf")) == source


def test_the_plan_says_what_becomes_of_the_files(models: dict[str, Path], tmp_path: Path) -> None:
    count = len(set(weight_map(models["hf"]).values()))
    assert split_of(prepare(models["hf"], tmp_path / "x", "hf-fused")) == (
        f"the file split of the source is kept: {count} files"
    )
    small = split_of(prepare(models["hf"], tmp_path / "x", "hf-fused", Choices(shard_bytes=20_000)))
    assert "of at most 20,000 bytes: as --shard-size says" in small
    assert "are larger, for a single tensor is" in small


def test_a_split_that_cannot_be_kept_is_said_to_be_lost(models: dict[str, Path], tmp_path: Path) -> None:
    """One expert's file holds nothing else: fused, it would be empty."""
    names = list(weight_map(models["hf"]))
    last = next(name for name in names if ".experts.1.up_proj" in name)
    alone = {name: f"model-0000{1 + (name == last)}-of-00002.safetensors" for name in names}
    like = tmp_path / "like"
    convert(models["hf"], like, "hf")
    (like / "model.safetensors.index.json").write_text(json.dumps({"weight_map": alone}))
    convert(models["hf"], tmp_path / "titan", "titan")
    found = split_of(prepare(tmp_path / "titan", tmp_path / "x", "hf-fused", Choices(like=like)))
    assert found == "one file of at most 5,000,000,000 bytes: the source's 2 files cannot be kept in this layout"
