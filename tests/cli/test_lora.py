"""``merge-lora`` as people type it: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qwen3conv.converters.manifest import read_manifest
from tests.adapters import factors, write_adapter
from tests.cli.conftest import TINY, TINY_MOE, Run, environment, process, write_model
from tests.hub_server import client_environment, serve_hub

pytestmark = pytest.mark.torch_free

MODULES = {"self_attn.q_proj": (16, 16), "mlp.down_proj": (16, 24)}


def make_adapter(folder: Path, *, layers: int = TINY.num_hidden_layers, **config: Any) -> Path:
    """An adapter of rank 4 for query and down projections of the dense model."""
    tensors: dict[str, Any] = {}
    for layer in range(layers):
        for module, (rows, columns) in MODULES.items():
            tensors |= factors(f"model.layers.{layer}.{module}", rows, columns, 4)
    return write_adapter(folder, tensors, target_modules=["q_proj", "down_proj"], **config)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "adapter", base_model_name_or_path="Qwen/Qwen3-0.6B")


def contents(*folders: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}


def test_it_says_what_it_added_and_the_output_verifies(tiny: Path, adapter: Path, tmp_path: Path, run: Run) -> None:
    before = contents(tiny, adapter)
    text = run("merge-lora", tiny, adapter, "merged").stdout
    assert text.startswith("merged: done, hf")
    words = " ".join(text.split())
    assert "is added to 4 of the base's matrices (4 modules, rank 4, scale 1.5)" in words
    assert "the adapter calls its base Qwen/Qwen3-0.6B; it is added to" in words
    assert contents(tiny, adapter) == before
    run("verify", "merged")
    report = json.loads(run("inspect", "merged", "--json").stdout)
    assert (report["format"], report["complete"]) == ("hf", True)
    assert run("fingerprint", "merged").stdout != run("fingerprint", tiny).stdout
    difference = json.loads(run("diff", tiny, "merged", "--json", code=3).stdout)
    assert len(difference["differences"]) == 4
    manifest = read_manifest(tmp_path / "merged")
    assert manifest is not None
    assert manifest.source["adapter"] == {"path": str(adapter)}


def test_json_and_every_other_format_carry_the_same_fingerprint(tiny: Path, adapter: Path, run: Run) -> None:
    made = json.loads(run("merge-lora", tiny, adapter, "merged", "--json").stdout)
    policy = next(policy for policy in made["policies"] if policy["name"] == "merge-lora")
    assert (policy["modules"], policy["ranks"], policy["scales"], policy["rslora"]) == (4, [4], [1.5], False)
    assert made["format"] == "hf"
    dcp = json.loads(run("merge-lora", tiny, adapter, "dcp", "--to", "titan", "--json").stdout)
    run("hf-to-dcp", tiny, "base-dcp")
    again = json.loads(run("merge-lora", "base-dcp", adapter, "again", "--json").stdout)
    assert made["fingerprint"] == dcp["fingerprint"] == again["fingerprint"]


def test_dtype_and_dry_run(tiny: Path, adapter: Path, tmp_path: Path, run: Run) -> None:
    plan = json.loads(run("merge-lora", tiny, adapter, "merged", "--dtype", "float32", "--dry-run", "--json").stdout)
    assert not (tmp_path / "merged").exists()
    assert [policy["name"] for policy in plan["policies"]][:1] == ["merge-lora"]
    weights = adapter / "adapter_model.safetensors"
    read = {entry["file"]: entry["bytes"] for entry in plan["reads"]}
    assert read.keys() == {"model.safetensors", str(weights)}
    assert read[str(weights)] == 4 * 4 * 2 * ((16 + 16) + (16 + 24))
    run("merge-lora", tiny, adapter, "merged", "--dtype", "float32")
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["torch_dtype"] == "float32"


def test_a_tied_model_asks_for_untie(tmp_path: Path, run: Run) -> None:
    base = write_model(tmp_path / "tied", tied=True)
    write_adapter(tmp_path / "adapter", factors("lm_head", 64, 16, 4), target_modules=["lm_head"])
    assert "--untie" in run("merge-lora", base, "adapter", "merged", code=1).stderr
    text = run("merge-lora", base, "adapter", "merged", "--untie").stderr
    assert "Warning: the adapter changes the head alone of a tied model" in text
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("options", [[], ["--json"], ["--dry-run"]])
def test_a_refusal_is_one_message_and_nothing_on_stdout(
    options: list[str], tiny: Path, tiny_moe: Path, adapter: Path, tmp_path: Path
) -> None:
    before = contents(tmp_path)
    make_adapter(tmp_path / "longer", layers=3)
    make_adapter(tmp_path / "dora", use_dora=True)
    for arguments, said in (
        ((tiny_moe, adapter), "model.layers.0.mlp.down_proj is not in the base, which has 2 layers of 3 experts"),
        ((tiny, "longer"), "model.layers.2.self_attn.q_proj is not in the base, which has 2 layers, all dense"),
        ((tiny, "dora"), "DoRA"),
        ((tiny, tiny), "no LoRA adapter"),
        ((adapter, tiny), "merge-lora BASE ADAPTER DST"),
        ((tiny, "nothing"), "neither a folder here nor a hub id"),
    ):
        ran = process("merge-lora", *arguments, "merged", *options, cwd=tmp_path)
        assert (ran.returncode, ran.stdout) == (1, "")
        assert said in ran.stderr
        assert "Traceback" not in ran.stderr
    after = contents(tmp_path)
    assert {path: after[path] for path in before} == before
    assert not (tmp_path / "merged").exists()


def test_experts_of_transformers_5_are_merged_without_torch(tiny_moe: Path, tmp_path: Path, run: Run) -> None:
    experts, inner = TINY_MOE.num_experts or 0, TINY_MOE.moe_intermediate_size or 0
    stack = "model.layers.1.mlp.experts"
    tensors = factors(f"{stack}.base_layer", 2 * inner, 16, 2 * experts) | factors(stack, 16, inner, 2 * experts)
    config = {
        "r": 2,
        "target_modules": [],
        "target_parameters": ["gate_up_proj", "down_proj"],
        "layers_to_transform": [1],
    }
    write_adapter(tmp_path / "adapter", tensors, **config)
    made = json.loads(run("merge-lora", tiny_moe, "adapter", "merged", "--json").stdout)
    policy = next(policy for policy in made["policies"] if policy["name"] == "merge-lora")
    assert (policy["modules"], policy["parameters"]) == (2, 3 * experts)
    assert len(json.loads(run("diff", tiny_moe, "merged", "--json", code=3).stdout)["differences"]) == 3 * experts


def test_an_adapter_is_fetched_from_the_hub_and_named_in_the_manifest(
    tiny: Path, adapter: Path, tmp_path: Path
) -> None:
    pytest.importorskip("huggingface_hub")
    with serve_hub() as hub:
        commit = hub.add("someone/adapter", adapter)
        hub.add("someone/model", tiny)
        env = environment(**client_environment(hub, tmp_path / "hf-home"))
        ran = process("merge-lora", "someone/model", "someone/adapter", "merged", "--json", cwd=tmp_path, env=env)
        assert ran.returncode == 0, ran.stderr
        source = json.loads(ran.stdout)["source"]
        assert source["hub"] == "someone/model"
        assert source["adapter"] == {"hub": "someone/adapter", "revision": "main", "commit": commit}
        assert "lora-base" in ran.stdout
        assert set(hub.downloads()) >= {"adapter_config.json", "adapter_model.safetensors"}
        ran = process("merge-lora", "someone/model", "someone/model", "other", cwd=tmp_path, env=env)
        assert (ran.returncode, ran.stdout) == (1, "")
        assert "no adapter_config.json: name the repository of a LoRA adapter" in ran.stderr
