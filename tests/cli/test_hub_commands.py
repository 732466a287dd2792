"""Every command that takes a checkpoint takes one of the hub: a model, a DCP, rank files, an adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qwen3conv.converters.conversion import carry_out, prepare
from qwen3conv.converters.placement import Mesh
from qwen3conv.converters.policies import Choices
from tests.adapters import factors, write_adapter
from tests.cli.conftest import TINY_MOE, HubClient, write_model


@pytest.fixture
def served(client: HubClient) -> Path:
    """One MoE in three formats, served as me/hf, me/dcp and me/ranks, and an adapter for it as me/adapter."""
    folder = write_model(client.folder / "model", TINY_MOE)
    carry_out(prepare(folder, client.folder / "dcp", "titan"))
    carry_out(prepare(folder, client.folder / "ranks", "ranks", Choices(mesh=Mesh(tp=2))))
    query = factors("model.layers.1.self_attn.q_proj", 16, 16, 4)
    write_adapter(client.folder / "adapter", query, target_modules=["layers.1.self_attn.q_proj"])
    for name, place in (("hf", "model"), ("dcp", "dcp"), ("ranks", "ranks"), ("adapter", "adapter")):
        client.hub.add(f"me/{name}", client.folder / place)
    return folder


def test_converting_commands_take_hub_ids(client: HubClient, served: Path) -> None:
    for words in (
        ("dcp-to-hf", "me/dcp", "from-dcp"),
        ("merge", "me/ranks", "from-ranks"),
        ("reshard", "me/ranks", "again", "--fsdp", "2"),
        ("shard", "me/hf", "cut", "--tp", "2"),
        ("upgrade", "me/dcp", "older", "--titan-schema", "0.2"),
        ("merge-lora", "me/hf", "me/adapter", "merged"),
    ):
        client.run(*words)
        assert (client.folder / words[-1 if words[0] == "merge-lora" else 2] / "qwen3conv.json").is_file()
    local = client.run("fingerprint", served).stdout
    made = [json.loads((client.folder / name / "qwen3conv.json").read_text()) for name in ("from-dcp", "from-ranks")]
    assert [manifest["fingerprint"] for manifest in made] == [local.strip()] * 2
    assert [manifest["source"]["hub"] for manifest in made] == ["me/dcp", "me/ranks"]
    assert not [path for path in client.folder.iterdir() if path.name.endswith((".download", ".partial"))]


def test_proving_commands_take_hub_ids(client: HubClient, served: Path) -> None:
    client.run("diff", "me/hf", "me/dcp", "--keep-download")
    client.run("verify", "me/ranks")
    client.run("verify", "me/dcp")
    assert client.run("fingerprint", "me/dcp", HF_HUB_OFFLINE="1").stdout == client.run("fingerprint", served).stdout


@pytest.mark.parametrize("name", ["dcp", "ranks"])
def test_headers_are_all_that_is_read_of_a_dcp_and_of_rank_files(client: HubClient, served: Path, name: str) -> None:
    (told, local) = (json.loads(client.run("inspect", place, "--json").stdout) for place in (f"me/{name}", name))
    differing = {key for key in local if told[key] != local[key]}
    assert differing == {"path"}
    planned = json.loads(client.run("plan", f"me/{name}", "out", "--to", "hf", "--json").stdout)
    assert planned["reads"] == json.loads(client.run("plan", name, "out", "--to", "hf", "--json").stdout)["reads"]
    large = [r for r in client.hub.requests if r.path.startswith("/lfs/") and r.range is None]
    assert large == []
