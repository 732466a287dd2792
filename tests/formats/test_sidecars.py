"""The files that travel with the weights: chosen by name, copied byte for byte."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash

from qwen3conv.converters.errors import DestinationError, SourceError
from qwen3conv.converters.stores.sidecars import copy_sidecars, list_sidecars

CARRIED = (
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
    "README.md",
    "added_tokens.json",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.jinja",
    "chat_template.json",
    "configuration.json",
    "generation_config.json",
    "license.pdf",
    "merges.txt",
    "modeling_custom.py",
    "preprocessor_config.json",
    "qwen.tiktoken",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)
LEFT = (
    ".gitattributes",
    ".hidden.md",
    "README/",
    "adapter_config.json",
    "additional_chat_templates/.x.jinja",
    "additional_chat_templates/notes.md",
    "assets/",
    "hf_quant_config.json",
    "license.bin",
    "model.gguf",
    "optimizer.pt",
    "picture.png",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "tokenizer.index.json",
    "trainer_state.json",
)
HANDLED = (
    ".metadata",
    "__0_0.distcp",
    "config.json",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "qwen3conv.json",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one of everything; each file says its own name."""
    folder = tmp_path / "source"
    for name in (*CARRIED, *LEFT, *HANDLED):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir()
        else:
            path.write_bytes(f"{name}\r\n\0\xff".encode("latin-1"))
    return folder


@pytest.mark.torch_free
def test_every_file_is_carried_or_left_or_handled_elsewhere(folder: Path) -> None:
    sidecars = list_sidecars(folder)
    assert sidecars.carried == {name: len(name) + 4 for name in CARRIED}
    assert sidecars.left == LEFT


@pytest.mark.torch_free
def test_copies_are_byte_identical_and_their_digests_say_so(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_bytes(os.urandom(3_000_001))
    destination = tmp_path / "staged"
    destination.mkdir()
    digests = copy_sidecars(folder, destination, list_sidecars(folder).carried)
    assert list(digests) == list(CARRIED)
    for name, digest in digests.items():
        content = (folder / name).read_bytes()
        assert (destination / name).read_bytes() == content
        assert digest == xxhash.xxh3_128_hexdigest(content)
    found = {path.relative_to(destination).as_posix() for path in destination.rglob("*") if path.is_file()}
    assert found == set(CARRIED)


@pytest.mark.torch_free
def test_a_second_try_replaces_what_an_interrupted_one_left(folder: Path, tmp_path: Path) -> None:
    destination, outside = tmp_path / "staged", tmp_path / "outside"
    destination.mkdir()
    outside.write_text("keep me")
    (destination / "README.md").write_text("half a")
    (destination / "LICENSE").symlink_to(outside)
    copy_sidecars(folder, destination, ["README.md", "LICENSE"])
    for name in ("README.md", "LICENSE"):
        assert (destination / name).read_bytes() == (folder / name).read_bytes()
    assert outside.read_text() == "keep me"


@pytest.mark.torch_free
def test_links_of_a_hub_cache_become_files(folder: Path, tmp_path: Path) -> None:
    snapshot, destination = tmp_path / "snapshots/abc", tmp_path / "staged"
    snapshot.mkdir(parents=True)
    destination.mkdir()
    (snapshot / "tokenizer.json").symlink_to(folder / "tokenizer.json")
    (snapshot / "merges.txt").symlink_to("../../source/merges.txt")
    (snapshot / "gone.txt").symlink_to("../../source/gone.txt")
    (snapshot / "loop.md").symlink_to("loop.md")
    sidecars = list_sidecars(snapshot)
    assert sidecars.carried == {"merges.txt": 14, "tokenizer.json": 18}
    assert sidecars.left == ("gone.txt", "loop.md")
    copy_sidecars(snapshot, destination, sidecars.carried)
    for name in sidecars.carried:
        assert not (destination / name).is_symlink()
        assert (destination / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.torch_free
def test_a_pipe_is_neither_carried_nor_opened(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(folder / "pipe.txt")
    assert "pipe.txt" in list_sidecars(folder).left
    with pytest.raises(SourceError, match=r"pipe\.txt is gone, or is not a file"):
        copy_sidecars(folder, tmp_path, ["pipe.txt"])


@pytest.mark.torch_free
@pytest.mark.parametrize(
    "name", ["../x.md", "/x.md", "", ".", "..", "sub/x.md", "additional_chat_templates/../../x", "a\\b", "a\0b", "a\nb"]
)
def test_a_name_that_leaves_the_folder_is_refused_before_anything_is_copied(
    folder: Path, tmp_path: Path, name: str
) -> None:
    destination = tmp_path / "staged"
    destination.mkdir()
    with pytest.raises(SourceError) as caught:
        copy_sidecars(folder, destination, ["README.md", name])
    assert repr(name) in str(caught.value)
    assert list(destination.iterdir()) == []


@pytest.mark.torch_free
def test_what_cannot_be_read_or_written_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"README\.txt is gone"):
        copy_sidecars(folder, tmp_path, ["README.txt"])
    with pytest.raises(DestinationError, match=r"absent/below/README\.md cannot be written"):
        copy_sidecars(folder, tmp_path / "absent/below", ["README.md"])
    with pytest.raises(DestinationError, match=r"README\.md is the very file to be copied"):
        copy_sidecars(folder, folder, ["README.md"])
    assert (folder / "README.md").read_bytes().startswith(b"README.md")
    with pytest.raises(SourceError, match="cannot be listed"):
        list_sidecars(tmp_path / "absent")


@pytest.mark.torch_free
def test_a_full_disk_is_the_destinations_fault(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(DestinationError, match=r"README\.md cannot be written: No space left on device"):
        copy_sidecars(folder, tmp_path, ["README.md"])


def test_a_real_tokenizer_works_the_same_from_its_copy(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from tests.models import make_tokenizer

    source, destination = tmp_path / "made", tmp_path / "staged"
    make_tokenizer(tmp_path / "plain")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "plain")
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "{{ messages[0].content }}!"}
    tokenizer.save_pretrained(source)
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / "plain" / name).rename(source / name)
    destination.mkdir()
    sidecars = list_sidecars(source)
    assert sidecars.left == ()
    copy_sidecars(source, destination, sidecars.carried)

    files = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    assert Path("additional_chat_templates/tool_use.jinja") in files
    assert {path.relative_to(destination) for path in destination.rglob("*") if path.is_file()} == files
    copy = AutoTokenizer.from_pretrained(destination)
    chat = [{"role": "user", "content": "sun and moon \u00e9"}]
    for template in ("default", "tool_use"):
        text = tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False)
        assert copy.apply_chat_template(chat, chat_template=template, tokenize=False) == text
        assert copy(text)["input_ids"] == tokenizer(text)["input_ids"]
