"""Whole models in pickled files: accelerate's full state dict, and ``pytorch_model.bin`` in one or several files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from qwen3conv.converters.errors import SourceError
from qwen3conv.converters.stores.fsdp_full import INDEX, read_full
from tests.conversions import differing
from tests.models import read_tensors, saved_model
from tests.stored import assemble


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return read_tensors(saved_model(tmp_path_factory, "dense"))


def write_parts(tensors: dict[str, torch.Tensor], folder: Path) -> dict[str, str]:
    """Three files by turns and an index, as transformers 4 wrote them."""
    files = [f"pytorch_model-0000{i}-of-00003.bin" for i in (1, 2, 3)]
    where = {name: files[i % 3] for i, name in enumerate(tensors)}
    for file in files:
        torch.save({name: tensor for name, tensor in tensors.items() if where[name] == file}, folder / file)
    write_index(where, folder)
    return where


def write_index(where: dict[str, str], folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def refusal(folder: Path) -> str:
    with pytest.raises(SourceError) as caught:
        read_full(folder)
    return str(caught.value)


@pytest.mark.parametrize("name", ["pytorch_model_fsdp.bin", "pytorch_model.bin"])
def test_every_bit_of_one_file_is_found(truth: dict[str, torch.Tensor], room: Path, name: str) -> None:
    torch.save(truth, room / name)
    assert differing(assemble(room, read_full(room)), truth) == []


def test_a_real_full_state_dict_is_read(tmp_path_factory: pytest.TempPathFactory, room: Path) -> None:
    """transformers' own state dict, with module versions and a tied head that shares its storage."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(saved_model(tmp_path_factory, "dense-tied"), dtype=torch.bfloat16)
    state = model.state_dict()
    torch.save(state, room / "pytorch_model_fsdp.bin")
    contents = read_full(room)
    assert differing(assemble(room, contents), state) == []
    head, embedding = (contents.tensors[n].chunks for n in ("lm_head.weight", "model.embed_tokens.weight"))
    assert head == embedding


def test_every_bit_of_several_files_is_found(truth: dict[str, torch.Tensor], room: Path) -> None:
    write_parts(truth, room)
    contents = read_full(room)
    assert differing(assemble(room, contents), truth) == []
    assert len(contents.files) == 3


def test_a_missing_file_is_named_and_so_are_tensors(truth: dict[str, torch.Tensor], room: Path) -> None:
    where = write_parts(truth, room)
    first, second, third = sorted(set(where.values()))
    (room / second).unlink()
    state = torch.load(room / third)
    lost = sorted(state)[0]
    state["stranger"] = state.pop(lost)
    torch.save(state, room / third)
    text = refusal(room)
    assert f"{second}: is missing" in text
    assert f"{third}: lacks {lost!r}" in text
    assert f"{third}: holds 'stranger', which the index does not list" in text
    assert first not in text


def test_a_tensor_in_another_file_than_the_index_says_is_named(truth: dict[str, torch.Tensor], room: Path) -> None:
    where = write_parts(truth, room)
    name, file = next(iter(where.items()))
    write_index({**where, name: "pytorch_model-00002-of-00003.bin"}, room)
    assert f"{file}: holds {name!r} too, which the index places in pytorch_model-00002-of-00003.bin" in refusal(room)


@pytest.mark.parametrize("file", ["../pytorch_model.bin", "/etc/passwd", "x.bin", "pytorch_model/x.bin", 7])
def test_a_file_name_that_leaves_the_folder_is_refused(room: Path, file: object) -> None:
    (room / INDEX).write_text(json.dumps({"weight_map": {"w": file}}))
    assert "not to a file named pytorch_model*.bin beside it" in refusal(room)


def test_two_checkpoints_at_once_are_refused(room: Path) -> None:
    torch.save({}, room / "pytorch_model_fsdp.bin")
    torch.save({}, room / "pytorch_model.bin")
    assert "holds pytorch_model_fsdp.bin and pytorch_model.bin: keep one" in refusal(room)
    shutil.rmtree(room)
    room.mkdir()
    assert "has none of" in refusal(room)
