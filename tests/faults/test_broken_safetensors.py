"""Broken and hostile safetensors files: a SourceError that says what is wrong, and nothing else, ever."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3conv.converters.errors import SourceError
from qwen3conv.converters.stores.safetensors import INDEX, read_safetensors
from qwen3conv.converters.stores.safetensors_header import read_header
from qwen3conv.converters.stores.torch_shards import read_torch_shards

pytestmark = pytest.mark.torch_free


def with_header(header: object, data: bytes = bytes(40)) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def a_tensor(dtype: object = "F32", shape: object = (2, 5), offsets: object = (0, 40)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


TENSORS = {
    "b": a_tensor("F32", [7], [0, 28]),
    "e": a_tensor("F32", [0, 2], [28, 28]),
    "a": a_tensor("BF16", [2, 3], [28, 40]),
}
SOUND = with_header({"__metadata__": {"format": "pt"}, **TENSORS}, bytes(range(40)))
HEADER_END = len(SOUND) - 40


def refusal(content: bytes, folder: Path) -> str:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(SourceError) as caught:
        read_header(path)
    with pytest.raises(SourceError):
        read_safetensors(folder)
    text = str(caught.value)
    assert str(path) in text
    assert "download" in text
    return text


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    for size in range(len(SOUND)):
        text = refusal(SOUND[:size], tmp_path)
        if size >= HEADER_END:
            assert f"is truncated: {len(SOUND) - size} bytes are missing at its end" in text
            cut = "'b'" if size < HEADER_END + 28 else "'a'"
            assert f"{cut} is the first tensor cut" in text
        elif size >= 8:
            assert f"at least {HEADER_END - size} bytes are missing" in text
        else:
            assert f"has {size} bytes" in text


@pytest.mark.parametrize("extra", [1, 4096])
def test_a_file_with_bytes_after_the_last_tensor_is_refused(tmp_path: Path, extra: int) -> None:
    assert f"is {extra} bytes too long" in refusal(SOUND + bytes(extra), tmp_path)


@settings(max_examples=300)
@given(flips=st.lists(st.tuples(st.integers(0, HEADER_END - 1), st.integers(1, 255)), min_size=1, max_size=3))
def test_flipped_header_bytes_are_refused_or_leave_a_header_that_the_library_reads_alike(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]]
) -> None:
    safetensors = pytest.importorskip("safetensors")
    content = bytearray(SOUND)
    for position, mask in flips:
        content[position] ^= mask
    path = tmp_path_factory.mktemp("flipped") / "model.safetensors"
    path.write_bytes(content)
    try:
        header = read_header(path)
    except SourceError:
        return
    found = {name: (entry.dtype, list(entry.shape)) for name, entry in header.tensors.items()}
    with safetensors.safe_open(path, "np") as judge:
        slices = {name: judge.get_slice(name) for name in judge.keys()}  # noqa: SIM118
        assert found == {name: (piece.get_dtype(), piece.get_shape()) for name, piece in slices.items()}


ENTRY = b'"x":{"dtype":"F32","shape":[2,5],"data_offsets":[0,40]}'

BROKEN: dict[str, tuple[bytes, str]] = {
    "not UTF-8": (with_header(b'{"\xff":1}'), "not the JSON object expected"),
    "not JSON": (with_header(b"{" + ENTRY), "not the JSON object expected"),
    "a list": (with_header([]), "found a list at the top"),
    "a tensor twice": (with_header(b"{" + ENTRY + b"," + ENTRY + b"}"), "key 'x' is there twice"),
    "a key twice": (with_header(b'{"x":{"dtype":"F32","dtype":"F32"}}'), "key 'dtype' is there twice"),
    "a lone surrogate": (with_header(b"{" + ENTRY.replace(b"x", b"\\ud800") + b"}"), "the key '\\ud800' is not text"),
    "bottomless": (with_header(b'{"x":' * 100_000), "nested too deeply"),
    "an endless number": (with_header(b'{"x":' + b"9" * 10_000 + b"}"), "not the JSON object expected"),
    "not a number": (with_header(b'{"x":NaN}'), "NaN is not JSON"),
    "a tensor that is text": (with_header({"x": "F32"}), "'x': expected dtype, shape and data_offsets, found a str"),
    "no offsets": (with_header({"x": {"dtype": "F32", "shape": [2]}}), "'x': data_offsets should be"),
    "an unknown dtype": (with_header({"x": a_tensor("F4")}), "'x': dtype 'F4' is not one that is read"),
    "a dtype that is a list": (with_header({"x": a_tensor([])}), "'x': dtype [] is not one"),
    "a negative size": (with_header({"x": a_tensor(shape=[-2, -5])}), "'x': shape should be a list"),
    "a size that is true": (with_header({"x": a_tensor(shape=[True, 10])}), "'x': shape should be a list"),
    "a fractional size": (with_header({"x": a_tensor(shape=[2.0, 5])}), "'x': shape should be a list"),
    "too many dims": (with_header({"x": a_tensor(shape=[1] * 65)}), "'x': shape should be a list"),
    "a size beyond 63 bits": (with_header({"x": a_tensor(shape=[2**63, 0], offsets=[0, 0])}), "'x': shape should"),
    "three offsets": (with_header({"x": a_tensor(offsets=[0, 1, 40])}), "'x': data_offsets should be"),
    "offsets backwards": (with_header({"x": a_tensor(offsets=[40, 0])}), "'x': data_offsets should be"),
    "a range of another size": (
        with_header({"x": a_tensor(shape=[2, 4])}),
        "'x': F32 [2, 4] takes 32 bytes, data_offsets [0, 40] hold 40",
    ),
    "an overlap": (
        with_header({"x": a_tensor(), "y": a_tensor("U8", [1], [39, 40])}),
        "'y': its data, bytes 39 to 40, overlaps that of 'x'",
    ),
    "an empty tensor inside another": (
        with_header({"x": a_tensor(), "y": a_tensor("U8", [0], [20, 20])}),
        "'y': its data, bytes 20 to 20, overlaps that of 'x'",
    ),
    "a hole": (with_header({"x": a_tensor("U8", [30], [10, 40])}), "'x': the 10 bytes before it belong to no tensor"),
    "metadata that is no text": (with_header({"__metadata__": {"a": 1}, "x": a_tensor()}), "does not for 'a'"),
    "metadata with a lone surrogate": (with_header({"__metadata__": {"a": "\ud800"}, "x": a_tensor()}), "not for 'a'"),
    "metadata that is a list": (with_header({"__metadata__": [], "x": a_tensor()}), "found a list"),
    "a header over the limit": ((10**8 + 1).to_bytes(8, "little") + b"{}", "over the limit of 100000000"),
    "nothing": (b"", "has 0 bytes"),
    "an LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "a Git LFS pointer"),
    "a web page": (b"\n<!DOCTYPE html><html>Sign in</html>", "a web page"),
    "a torch file": (b"PK\x03\x04" + bytes(60), "a zip archive"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_header_is_refused_for_what_is_wrong_with_it(tmp_path: Path, case: str) -> None:
    content, message = BROKEN[case]
    assert message in refusal(content, tmp_path)


def test_all_broken_tensors_of_all_files_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(with_header({"x": a_tensor("F4"), "y": a_tensor(shape=[3])}))
    (tmp_path / "b.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    names = {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(SourceError) as caught:
        read_safetensors(tmp_path)
    _, *lines = str(caught.value).splitlines()
    starts = [
        "  - a.safetensors: 'x': dtype",
        "  - a.safetensors: 'y': F32 [3] takes",
        "  - b.safetensors: is a Git LFS",
    ]
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not the JSON object expected"),
        (b"[]", "found a list at the top"),
        (b"{}", "weight_map should map tensors to files, found None"),
        (b'{"weight_map":{}}', "found {}"),
        (b'{"weight_map":[["a","model.safetensors"]]}', "weight_map should map"),
        (b'{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}', "key 'a' is there twice"),
        (b'{"weight_map":{"a":' + b"[" * 100_000, "nested too deeply"),
        (b'{"weight_map":{"\\ud800":"model.safetensors"}}', "not the JSON object expected"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (b"<html>", "a web page"),
    ],
)
def test_a_broken_index_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(SOUND)
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(SourceError) as caught:
        read_safetensors(tmp_path)
    assert message in str(caught.value)
    assert str(tmp_path / INDEX) in str(caught.value)


INDEX_BYTES = json.dumps({"metadata": {"total_size": 40}, "weight_map": dict.fromkeys(TENSORS, "model.safetensors")})


@settings(max_examples=300)
@given(flips=st.lists(st.tuples(st.integers(0, len(INDEX_BYTES) - 1), st.integers(1, 255)), min_size=1, max_size=3))
def test_flipped_index_bytes_raise_nothing_but_a_source_error(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("index")
    content = bytearray(INDEX_BYTES.encode())
    for position, mask in flips:
        content[position] ^= mask
    (folder / INDEX).write_bytes(content)
    (folder / "model.safetensors").write_bytes(SOUND)
    try:
        contents = read_safetensors(folder)
    except SourceError:
        return
    assert {name: tensor.spec.shape for name, tensor in contents.tensors.items()} == {
        name: tuple(tensor["shape"]) for name, tensor in TENSORS.items()
    }


SHARD_INFO = json.dumps({"a": {"saved_offsets": [0, 0]}, "b": {"saved_offsets": [0]}, "e": {"saved_offsets": [0, 0]}})
SHARD = with_header({"__metadata__": {"DCP_SHARDING_INFO": SHARD_INFO}, **TENSORS})


@settings(max_examples=300)
@given(flips=st.lists(st.tuples(st.integers(0, len(SHARD) - 41), st.integers(1, 255)), min_size=1, max_size=3))
def test_flipped_bytes_of_a_torch_shard_raise_nothing_but_a_source_error(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("shard")
    content = bytearray(SHARD)
    for position, mask in flips:
        content[position] ^= mask
    (folder / "shard-00001-model-00001-of-00001.safetensors").write_bytes(content)
    try:
        contents = read_torch_shards(folder)
    except SourceError:
        return
    assert sum(tensor.spec.nbytes for tensor in contents.tensors.values()) == 40


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop"])
def test_what_is_no_file_is_not_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.safetensors"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)  # opening it would wait for ever
    else:
        path.symlink_to(path.name)
    with pytest.raises(SourceError, match=r"model.safetensors"):
        read_safetensors(tmp_path)
