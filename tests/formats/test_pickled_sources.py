"""verl's rank files and pickled whole state dicts, written by torch, converted end to end."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from qwen3conv.converters import carry_out, compute_records, fingerprint_of, inspect, open_checkpoint, prepare, settle
from tests.models import dense_model, moe_model, read_tensors
from tests.real_checkpoints import ranked_session


def converted(source: Path, destination: Path) -> dict[str, torch.Tensor]:
    carry_out(prepare(source, destination, "hf"))
    return read_tensors(destination)


@pytest.mark.parametrize("name", ["verl", "verl-hybrid", "verl-fsdp-tp", "verl-moe"])
def test_verl_ranks_become_the_whole_model(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, name: str) -> None:
    checkpoint = ranked_session(tmp_path_factory)[name]
    report = inspect(checkpoint.folder)
    assert (report.format, report.complete, report.problems) == ("verl", True, ())
    found, truth = converted(checkpoint.folder, tmp_path / "hf"), checkpoint.tensors()
    assert found.keys() == truth.keys()
    assert all(torch.equal(found[key], truth[key]) for key in truth)


@pytest.mark.parametrize("file", ["pytorch_model_fsdp.bin", "pytorch_model.bin"])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_pickled_state_dict_is_the_same_model(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, file: str, kind: str
) -> None:
    source = (moe_model if kind == "moe" else dense_model)(tmp_path_factory)
    pickled = tmp_path / "pickled"
    shutil.copytree(source, pickled, ignore=shutil.ignore_patterns("*.safetensors*"))
    torch.save(read_tensors(source), pickled / file)
    assert open_checkpoint(pickled).format == "torch-full"
    prints = [fingerprint_of(compute_records(settle(open_checkpoint(folder)))) for folder in (source, pickled)]
    assert prints[0] == prints[1]
    found, truth = converted(pickled, tmp_path / "hf"), read_tensors(source)
    assert all(torch.equal(found[key], truth[key]) for key in truth)
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_safetensors_win_over_their_pickled_twin(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    source = tmp_path / "both"
    shutil.copytree(dense_model(tmp_path_factory), source)
    torch.save({"other": torch.ones(1)}, source / "pytorch_model.bin")
    assert open_checkpoint(source).format == "hf"
