"""Every command does what its help says, on real folders."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qwen3conv.converters.blocks import BLOCK_BYTES, TRANSPOSED_BLOCKS
from qwen3conv.converters.execution import BUFFERS_PER_WORKER
from qwen3conv.tools.cli.command import Command
from qwen3conv.tools.cli.main import cli
from tests.adapters import factors, write_adapter
from tests.cli.conftest import TINY_MOE, Run, environment, flip_byte, process, write_model
from tests.hub_server import client_environment, serve_hub
from tests.models import DENSE, MOE

COMMANDS = {name: command for name, command in cli.commands.items() if isinstance(command, Command)}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but the manifest, by its path inside."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "qwen3conv.json")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def answer(run: Run, *arguments: str | Path, code: int = 0) -> Any:
    """What a command prints with ``--json``."""
    return json.loads(run(*arguments, "--json", code=code).stdout)


# -- help and examples -------------------------------------------------------------------------------------------------


@pytest.mark.torch_free
def test_every_command_has_help_that_ends_with_its_example(run: Run) -> None:
    assert set(COMMANDS) == set(cli.commands)
    for name, command in COMMANDS.items():
        text = run(name, "--help").stdout
        assert text.endswith(f"\nExample:\n  {command.example}\n"), text
        assert shlex.split(command.example)[0] == "qwen3conv" or "qwen3conv completion" in command.example
        assert max(map(len, text.splitlines())) <= 100


@pytest.mark.torch_free
def test_every_option_has_a_help_text() -> None:
    options = [(name, p) for name, command in COMMANDS.items() for p in command.params if p.param_type_name == "option"]
    assert not [f"{name} {option.name}" for name, option in options if not getattr(option, "help", None)]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory, model: Callable[[str], Path]) -> Path:
    """A folder in which every example can be typed: the names that they use, and a ``qwen3conv`` to call."""
    folder = tmp_path_factory.mktemp("workshop")
    shutil.copytree(model("dense-tied"), folder / "Qwen" / "Qwen3-0.6B")
    query = factors("model.layers.1.self_attn.q_proj", DENSE.heads * DENSE.head_dim, DENSE.hidden, 4)
    write_adapter(folder / "qwen3-adapter", query, target_modules=["layers.1.self_attn.q_proj"])
    for name in ("run", "run-2"):
        (folder / name).mkdir()
        (folder / name / "run.json").write_text('{"steps": {"1": {"loss": 6.0, "grad_norm": 2.0}}}')
    (folder / "text.jsonl").write_text('{"text": "the sun"}\n')
    (folder / "bin").mkdir()
    (folder / "bin" / "qwen3conv").write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m qwen3conv "$@"\n')
    (folder / "bin" / "qwen3conv").chmod(0o755)
    ranks = ["shard", "Qwen/Qwen3-0.6B", "qwen3-ranks", "--tp", "2"]
    for words in (["hf-to-dcp", "Qwen/Qwen3-0.6B", "qwen3-dcp"], ["dcp-to-hf", "qwen3-dcp", "qwen3-hf"], ranks):
        assert process(*words, cwd=folder).returncode == 0
    return folder


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in ("parity", "doctor") else name for name in COMMANDS],
)
def test_the_example_runs_as_it_stands(name: str, workshop: Path, tmp_path: Path) -> None:
    folder = tmp_path / "workshop"
    shutil.copytree(workshop, folder)
    command = COMMANDS[name]
    writes = any(parameter.name == "destination" for parameter in command.params)
    arguments = [parameter.name for parameter in command.params if parameter.param_type_name == "argument"]
    destination = folder / shlex.split(command.example)[2 + arguments.index("destination")] if writes else None
    if destination is not None and destination.exists():
        shutil.rmtree(destination)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    with contextlib.ExitStack() as stack:
        variables = environment(PATH=path)
        if name in ("pull", "push"):
            hub = stack.enter_context(serve_hub())
            hub.add("Qwen/Qwen3-0.6B", folder / "Qwen" / "Qwen3-0.6B")
            variables |= {**client_environment(hub, folder / "hf-home"), "HF_TOKEN": "hf_good"}
        ran = subprocess.run(["bash", "-c", command.example], cwd=folder, env=variables, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    if destination is not None:
        assert destination.is_dir() == (name != "plan")
    if name != "completion":  # evaluated by the shell, it says nothing
        assert ran.stdout


# -- conversions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["dense", "dense-tied", "dense-tied-head-stored", "dense-sharded", "moe"])
def test_to_dcp_and_back_gives_every_file_back(
    variant: str, run: Run, model: Callable[[str], Path], tmp_path: Path
) -> None:
    run("hf-to-dcp", model(variant), "dcp")
    run("dcp-to-hf", "dcp", "hf")
    assert contents(tmp_path / "hf") == contents(model(variant))


@pytest.mark.parametrize("to", ["hf-fused", "accelerate", "accelerate-per-expert", "titan", "titan-transformers"])
def test_convert_reaches_every_format_and_the_fingerprint_stays(
    to: str, run: Run, model: Callable[[str], Path], tmp_path: Path
) -> None:
    source = model("moe")
    made = answer(run, "convert", source, "out", "--to", to)
    report = answer(run, "inspect", "out")
    assert (report["format"], report["complete"]) == (to, True)
    assert made["fingerprint"] == run("fingerprint", "out").stdout.strip() == run("fingerprint", source).stdout.strip()
    answer(run, "convert", "out", "back", "--to", "hf")
    assert run("diff", source, "back").stdout == f"the same: {made['tensors']} parameters, bit for bit\n"


@pytest.mark.torch_free
def test_conversions_inspections_and_proofs_need_no_torch(run: Run, tiny_moe: Path, tmp_path: Path) -> None:
    run("hf-to-dcp", tiny_moe, "dcp")
    run("verify", "dcp")
    run("dcp-to-hf", "dcp", "hf", "--config-style", "both")
    assert run("diff", tiny_moe, "hf").stdout.startswith("the same")
    assert run("fingerprint", "dcp").stdout == run("fingerprint", "hf").stdout
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == (tiny_moe / "tokenizer.json").read_text()


@pytest.mark.torch_free
def test_a_conversion_prints_its_manifest_as_json(run: Run, tiny: Path, tmp_path: Path) -> None:
    result = run("hf-to-dcp", tiny, "dcp", "--json")
    made = json.loads(result.stdout)
    manifest = json.loads((tmp_path / "dcp" / "qwen3conv.json").read_text())
    for key in ("fingerprint", "format", "schema", "policies", "source"):
        assert made[key] == manifest[key]
    assert made["source"] == {"path": str(tiny), "format": "hf", "files": 1, "stores_head": True}
    assert made["output"] == "dcp"
    assert made["tensors"] == len(manifest["tensors"]) == 25
    assert made["bytes"] == sum(path.stat().st_size for path in (tmp_path / "dcp").glob("*.distcp"))
    assert made["seconds"] > 0


@pytest.mark.torch_free
def test_the_plan_is_what_the_conversion_then_writes(run: Run, tiny: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    plan = answer(run, "plan", tiny, "out", "--to", "hf", "--shard-size", "4KB")
    assert sorted(tmp_path.iterdir()) == before
    made = answer(run, "convert", tiny, "out", "--to", "hf", "--shard-size", "4KB")
    written = {path.name: path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")}
    assert {entry["file"]: entry["bytes"] for entry in plan["writes"]} == written
    assert len(written) > 1
    assert plan["disk_bytes"] == made["bytes"] == sum(written.values())
    body = (tiny / "model.safetensors").stat().st_size
    (read,) = plan["reads"]
    assert read["file"] == "model.safetensors"
    assert body - 4096 < read["bytes"] == plan["read_bytes"] < body
    assert plan["tensors"] == made["tensors"]
    assert plan["policies"] == made["policies"]
    assert plan["peak_bytes"] > plan["disk_bytes"] > 0


@pytest.mark.torch_free
def test_dry_run_prints_the_plan_and_writes_nothing(run: Run, tiny: Path, tmp_path: Path) -> None:
    plan = run("plan", tiny, "out", "--to", "titan")
    assert run("hf-to-dcp", tiny, "out", "--dry-run").stdout == plan.stdout
    assert run("convert", tiny, "out", "--to", "titan", "--dry-run").stdout == plan.stdout
    assert not (tmp_path / "out").exists()
    assert "__0_0.distcp" in plan.stdout


@pytest.mark.torch_free
def test_the_plan_says_when_the_disk_is_too_small(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 5))  # type: ignore[attr-defined]
    result = run("plan", tiny, "out", "--to", "titan", "--json")
    assert json.loads(result.stdout)["free_bytes"] == 5
    assert "more than is free" in result.stderr


# -- options reach the engine ------------------------------------------------------------------------------------------


@pytest.mark.torch_free
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtype_casts_and_the_plan_says_so(dtype: str, run: Run, tiny: Path) -> None:
    assert "cast" in run("hf-to-dcp", tiny, "dcp", "--dtype", dtype).stdout
    assert answer(run, "inspect", "dcp")["dtypes"] == {dtype: 25}


@pytest.mark.torch_free
def test_lm_head_decides_whether_a_tied_head_is_stored(run: Run, tmp_path: Path) -> None:
    source = write_model(tmp_path / "tied", tied=True)
    for choice, stored in (("keep", False), ("drop", False), ("write", True)):
        run("convert", source, choice, "--to", "hf", "--lm-head", choice)
        names = {tensor["name"] for tensor in answer(run, "inspect", choice, "--tensors")["tensor_list"]}
        assert ("lm_head.weight" in names) == stored


@pytest.mark.torch_free
def test_vocab_rows_config_style_and_schema_are_taken(run: Run, tiny_moe: Path, tmp_path: Path) -> None:
    run("hf-to-dcp", tiny_moe, "dcp", "--vocab-rows", "72", "--titan-schema", "0.2", "--config-style", "v5")
    report = answer(run, "inspect", "dcp")
    assert report["schema"] == "T2"
    assert report["config"]["vocab_size"] == 72
    config = json.loads((tmp_path / "dcp" / "hf_assets" / "config.json").read_text())
    assert "rope_parameters" in config
    assert "rope_theta" not in config


@pytest.mark.torch_free
def test_set_and_like_give_a_config_to_weights_without_one(run: Run, tmp_path: Path) -> None:
    bare = write_model(tmp_path / "bare", config=False)
    run("hf-to-dcp", bare, "dcp")
    refused = run("dcp-to-hf", "dcp", "hf", code=1)
    assert "--set rope_theta=" in refused.stderr
    assert not (tmp_path / "hf").exists()
    settings = ["rope_theta=5e6", "rms_norm_eps=1e-6", "max_position_embeddings=512", "tie_word_embeddings=false"]
    run("dcp-to-hf", "dcp", "hf", *(word for setting in settings for word in ("--set", setting)))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["rope_theta"], config["max_position_embeddings"]) == (5e6, 512)

    liked = write_model(tmp_path / "liked")
    made = answer(run, "dcp-to-hf", "dcp", "hf2", "--like", "liked")
    assert (tmp_path / "hf2" / "config.json").read_bytes() == (liked / "config.json").read_bytes()
    assert made["source"]["like"] == {"path": "liked"}


@pytest.mark.torch_free
def test_config_from_decides_between_two_configs(run: Run, tiny: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 5000000.0}))
    refused = run("convert", tiny, "out", "--to", "hf", "--like", "other", code=1)
    assert "rope_theta" in refused.stderr
    for choice, theta in (("like", 5e6), ("source", 1e6)):
        result = run("convert", tiny, choice, "--to", "hf", "--like", "other", "--config-from", choice)
        assert json.loads((tmp_path / choice / "config.json").read_text())["rope_theta"] == theta
        assert "Warning: of two configs" in result.stderr


def test_untie_takes_a_head_that_the_config_calls_tied(run: Run, model: Callable[[str], Path], tmp_path: Path) -> None:
    source = model("dense-tied-head-differs")
    for command in (["hf-to-dcp", source, "dcp"], ["fingerprint", source], ["diff", source, source]):
        assert "--untie" in run(*command, code=1).stderr
    assert "Warning: " in run("hf-to-dcp", source, "dcp", "--untie").stderr
    config = json.loads((tmp_path / "dcp" / "hf_assets" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert run("fingerprint", source, "--untie").stdout == run("fingerprint", "dcp").stdout


@pytest.mark.torch_free
def test_overwrite_replaces_and_no_digests_writes_none(run: Run, tiny: Path, tiny_moe: Path) -> None:
    run("hf-to-dcp", tiny, "dcp")
    assert "--overwrite" in run("hf-to-dcp", tiny_moe, "dcp", code=1).stderr
    assert answer(run, "hf-to-dcp", tiny_moe, "dcp", "--overwrite", "--no-digests")["fingerprint"] is None
    assert answer(run, "inspect", "dcp")["config"]["model_type"] == "qwen3_moe"
    assert "--no-digests" in run("verify", "dcp", code=1).stderr


@pytest.mark.torch_free
@pytest.mark.parametrize("options", [["--workers", "1"], ["--workers", "3", "--max-memory", "2MiB"]])
def test_workers_and_memory_change_no_byte(options: list[str], run: Run, tiny_moe: Path, tmp_path: Path) -> None:
    run("convert", tiny_moe, "plain", "--to", "titan")
    run("convert", tiny_moe, "other", "--to", "titan", *options)
    assert contents(tmp_path / "plain") == contents(tmp_path / "other")


@pytest.mark.torch_free
def test_a_smaller_max_memory_lowers_the_peak_that_the_plan_names(run: Run, tiny: Path) -> None:
    peak = answer(run, "plan", tiny, "x", "--to", "titan")["peak_bytes"]
    assert answer(run, "plan", tiny, "x", "--to", "titan", "--max-memory", "1MiB")["peak_bytes"] < peak


@pytest.mark.torch_free
def test_the_plan_counts_the_larger_blocks_of_what_is_stored_column_by_column(run: Run, tiny_moe: Path) -> None:
    rows = answer(run, "plan", tiny_moe, "x", "--to", "hf-fused", "--workers", "1")["peak_bytes"]
    columns = answer(run, "plan", tiny_moe, "x", "--to", "nxd", "--workers", "1")["peak_bytes"]
    assert columns - rows == BUFFERS_PER_WORKER * BLOCK_BYTES * (TRANSPOSED_BLOCKS - 1)
    least = answer(run, "plan", tiny_moe, "x", "--to", "nxd", "--workers", "1", "--max-memory", "2MiB")["peak_bytes"]
    assert columns - least >= BUFFERS_PER_WORKER * BLOCK_BYTES * TRANSPOSED_BLOCKS - (2 << 20)


# -- inspect, fingerprint, verify, diff, formats -----------------------------------------------------------------------


def test_inspect_tells_what_a_folder_is(run: Run, model: Callable[[str], Path]) -> None:
    text = " ".join(run("inspect", model("moe-fused")).stdout.split())
    assert "hf-fused" in text
    assert f"{MOE.experts} experts of {MOE.moe_intermediate}" in text
    assert "rope_theta 1000000" in text
    assert "transformers 4 initialises every expert at random" in text
    report = answer(run, "inspect", model("moe-fused"))
    assert {"format", "schema", "complete", "problems", "config", "tensors", "bytes"} <= report.keys()
    assert report["complete"] is True
    assert report["bytes"] == 2 * report["parameters"]


@pytest.mark.torch_free
def test_inspect_names_what_is_missing(run: Run, tiny: Path) -> None:
    path = tiny / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    result = run("inspect", tiny)
    assert "truncated" in result.stdout
    report = answer(run, "inspect", tiny)
    assert report["complete"] is False
    assert "100 bytes" in report["problems"][0]


@pytest.mark.torch_free
def test_inspect_lists_tensors_one_per_line(run: Run, tiny_moe: Path) -> None:
    lines = run("inspect", tiny_moe, "--tensors").stdout.splitlines()
    row = "model.layers.1.mlp.experts.2.down_proj.weight bfloat16 16x12 model.safetensors"
    assert row in [" ".join(line.split()) for line in lines]
    assert len([line for line in lines if "model.safetensors" in line]) == 39


@pytest.mark.torch_free
def test_verify_finds_a_changed_byte_in_weights_and_beside_them(run: Run, tiny: Path, tmp_path: Path) -> None:
    run("convert", tiny, "out", "--to", "hf")
    good = answer(run, "verify", "out")
    assert (good["verified"], good["problems"], good["tensors"]) == (True, [], 25)
    assert good["fingerprint"] == run("fingerprint", tiny).stdout.strip()
    flip_byte(tmp_path / "out" / "model.safetensors", -2)
    flip_byte(tmp_path / "out" / "tokenizer.json", 1)
    result = run("verify", "out", "--json", code=1)
    found = json.loads(result.stdout)
    assert found["verified"] is False
    assert len(found["problems"]) == 2
    assert "do not use it" in result.stderr
    assert "tokenizer.json" in result.stderr
    assert "manifest says" in run("fingerprint", "out").stderr


@pytest.mark.torch_free
def test_verify_takes_the_manifest_of_another_format(run: Run, tiny: Path, tmp_path: Path) -> None:
    run("hf-to-dcp", tiny, "dcp")
    assert "qwen3conv.json" in run("verify", tiny, code=1).stderr
    for manifest in ("dcp", "dcp/qwen3conv.json"):
        run("verify", tiny, "--manifest", manifest)
    flip_byte(tiny / "model.safetensors", -2)
    assert "lm_head.weight" in run("verify", tiny, "--manifest", "dcp", code=1).stderr
    assert "not a whole manifest" in run("verify", tiny, "--manifest", tiny / "config.json", code=1).stderr
    run("verify", tiny, "--manifest", tiny, code=2)


@pytest.mark.torch_free
def test_diff_names_layer_expert_and_projection_first(run: Run, tiny_moe: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(tiny_moe, changed)
    path = changed / "model.safetensors"
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    body = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    wanted = ["model.norm.weight", "model.layers.1.mlp.experts.2.up_proj.weight"]
    for name in wanted:
        flip_byte(path, body + header[name]["data_offsets"][0])
    found = answer(run, "diff", tiny_moe, changed, code=3)
    assert found["equal"] is False
    assert [entry["name"] for entry in found["differences"]] == wanted[::-1]
    first = found["differences"][0]
    assert first["where"] == "layer 1, expert 2, up_proj"
    assert (first["kind"], first["unequal"], first["elements"]) == ("values", 1, 12 * 16)
    assert first["max_abs"] == 1 / 128
    lines = run("diff", tiny_moe, changed, code=3).stdout.splitlines()
    assert lines[0] == "different: 2 of 39 parameters"
    assert lines[1].startswith("first: layer 1, expert 2, up_proj, 1 of 192 elements differ, by at most 0.00781")
    assert [line.split()[0] for line in lines[2:]] == ["LAYER", "layer", "-"]


@pytest.mark.torch_free
def test_diff_compares_across_formats_and_tells_missing_shape_and_dtype(run: Run, tiny: Path, tmp_path: Path) -> None:
    run("hf-to-dcp", tiny, "wide", "--dtype", "float32", "--vocab-rows", "65")
    kinds = {entry["kind"] for entry in answer(run, "diff", tiny, "wide", code=3)["differences"]}
    assert kinds == {"shape", "dtype"}
    tied = write_model(tmp_path / "tied", tied=True)
    text = run("diff", tiny, tied, code=3).stdout
    assert text.startswith("different: 1 of 25 parameters\nfirst: lm_head")


@pytest.mark.torch_free
def test_a_long_diff_is_cut_and_says_so(run: Run, tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", replace(TINY_MOE, num_hidden_layers=3))
    other = tmp_path / "other"
    shutil.copytree(source, other)
    raw = (source / "model.safetensors").read_bytes()
    body = 8 + int.from_bytes(raw[:8], "little")
    (other / "model.safetensors").write_bytes(raw[:body] + bytes(byte ^ 1 for byte in raw[body:]))
    assert len(answer(run, "diff", source, other, code=3)["differences"]) == 57
    lines = run("diff", source, other, code=3).stdout.splitlines()
    assert lines[-1] == "and 17 more; --json lists all"
    assert len([line for line in lines if "  values  " in line]) == 40
    assert max(map(len, lines)) <= 100


@pytest.mark.torch_free
def test_parameters_of_which_only_the_dtype_differs_take_one_line(run: Run, tiny_moe: Path, tmp_path: Path) -> None:
    run("convert", tiny_moe, "wide", "--to", "hf", "--dtype", "float32")
    assert len(answer(run, "diff", tiny_moe, "wide", code=3)["differences"]) == 39
    said = "all 39 differ in dtype only, same values: bfloat16 in A, float32 in B"
    assert run("diff", tiny_moe, "wide", code=3).stdout.splitlines() == ["different: 39 of 39 parameters", said]
    flip_byte(tmp_path / "wide" / "model.safetensors", -1)
    lines = run("diff", tiny_moe, "wide", code=3).stdout.splitlines()
    assert lines[:2] == ["different: 39 of 39 parameters", said.replace("all 39", "38 of them")]
    assert lines[2].startswith("first of the others: ")
    assert lines[2].split(", ", 1)[1].startswith("1 of ")
    assert len(lines) == 5


@pytest.mark.torch_free
def test_shard_reshard_and_merge_lead_back_and_inspect_names_the_mesh(run: Run, tiny_moe: Path, tmp_path: Path) -> None:
    made = answer(run, "shard", tiny_moe, "ranks", "--tp", "2", "--fsdp", "2")
    assert made["format"] == "ranks"
    assert sorted(path.name for path in (tmp_path / "ranks").iterdir()) == [
        "hf_assets",
        "qwen3conv-ranks.json",
        "qwen3conv.json",
        *(f"rank-0000{rank}-of-00004.safetensors" for rank in range(4)),
    ]
    text = run("inspect", "ranks").stdout
    assert "mesh         fsdp2 x tp2, 4 ranks, tensors of layout hf-fused" in text
    assert text.splitlines()[-1].startswith("Next: qwen3conv merge ranks DST")
    report = answer(run, "inspect", "ranks")
    assert report["mesh"] == {"tp": 2, "fsdp": 2, "ep": 1, "pp": 1}
    assert report["layout"] == "hf-fused"
    assert answer(run, "inspect", tiny_moe)["mesh"] is None
    again = answer(run, "reshard", "ranks", "dcp", "--fsdp", "3", "--ep", "3", "--format", "dcp")
    assert again["format"] == "titan"
    assert sorted(path.name for path in (tmp_path / "dcp").glob("*.distcp")) == [f"__{n}_0.distcp" for n in range(3)]
    back = answer(run, "merge", "dcp", "back")
    assert made["fingerprint"] == again["fingerprint"] == back["fingerprint"]
    run("diff", tiny_moe, "back")
    assert "Decisions:\n  mesh  cut for tp2: 2 ranks" in run("shard", tiny_moe, "more", "--tp", "2", "--dry-run").stdout


@pytest.mark.torch_free
def test_options_that_say_nothing_about_what_is_cut_are_wrong_usage(run: Run, tiny_moe: Path) -> None:
    for option in (
        ["--shard-size", "5GB"],
        ["--format", "dcp", "--layout", "hf"],
        ["--titan-schema", "T7"],
        ["--tp", "0"],
    ):
        assert option[-2] in run("shard", tiny_moe, "out", "--tp", "2", *option, code=2).stderr
    run("shard", tiny_moe, "out", "--tp", "2", "--layout", "titan", "--titan-schema", "T5-fused")


@pytest.mark.torch_free
def test_a_plan_counts_stored_tensors_as_inspect_does(run: Run, tmp_path: Path) -> None:
    tied = write_model(tmp_path / "tied", tied=True)
    planned = answer(run, "plan", tied, "dcp", "--to", "titan")["stored_tensors"]
    run("hf-to-dcp", tied, "dcp")
    assert planned == answer(run, "inspect", "dcp")["tensors"] == 25


@pytest.mark.torch_free
def test_a_dcp_without_a_config_is_warned_about(run: Run, tmp_path: Path) -> None:
    ran = run("hf-to-dcp", write_model(tmp_path / "bare", config=False), "dcp")
    assert ran.stderr.startswith("Warning: the output gets no config.json, because there is none; --like or --set")
    assert "no-config" in ran.stdout


@pytest.mark.torch_free
def test_a_schema_from_before_experts_names_the_one_to_use(run: Run, tiny_moe: Path) -> None:
    assert "--titan-schema T2 or later" in run("hf-to-dcp", tiny_moe, "dcp", "--titan-schema", "T1", code=1).stderr


@pytest.mark.torch_free
def test_formats_lists_what_is_read_and_written(run: Run) -> None:
    rows = {row["name"]: row for row in answer(run, "formats")["formats"]}
    assert rows["titan"]["write"]
    assert not rows["hf-fp8"]["write"]
    assert all(row["read"] for row in rows.values())
    text = run("formats").stdout
    assert all(name in text for name in rows)


@pytest.mark.torch_free
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_that_calls_back(shell: str, run: Run) -> None:
    assert "_QWEN3CONV_COMPLETE" in run("completion", shell).stdout


@pytest.mark.torch_free
def test_the_shell_completes_commands_and_formats(tmp_path: Path) -> None:
    def complete(words: str, index: int) -> str:
        asked = {"_QWEN3CONV_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(index)}
        return process(cwd=tmp_path, env=environment(**asked)).stdout

    assert complete("qwen3conv hf", 1).split() == ["plain,hf-to-dcp"]
    assert complete("qwen3conv convert a b --to titan", 5).split() == ["plain,titan", "plain,titan-transformers"]
    assert complete("qwen3conv inspect x", 2).split() == ["dir,x"]


# -- parity ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_parity_says_where_two_models_part(run: Run, tiny: Path, model: Callable[[str], Path], tmp_path: Path) -> None:
    source = model("dense")
    run("hf-to-dcp", source, "dcp")
    same = answer(run, "parity", source, "dcp", "--tokens", "8")
    assert {"max_abs", "kl", "top1", "first_divergence"} <= same.keys()
    assert (same["first_divergence"], same["top1"]) == (None, 1.0)
    other = tmp_path / "other"
    shutil.copytree(source, other)
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 100.0
    (other / "config.json").write_text(json.dumps(config))
    result = run("parity", source, other, "--tokens", "8", code=3)
    assert "apart from layer 0 on" in result.stdout
    assert "rope_theta" in result.stdout
