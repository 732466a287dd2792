"""torch.save archives of one tensor, with torch as judge both ways."""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from qwen3conv.converters.dtypes import FROM_TORCH_NAME, ITEMSIZE, TORCH_NAME
from qwen3conv.converters.errors import SourceError
from qwen3conv.converters.stores.torch_zip import ALIGNMENT, Payload, locate
from qwen3conv.converters.stores.torch_zip_writing import frame

SHAPES = ((), (0,), (5,), (3, 4), (0, 3), (300, 2), (2, 3, 4), (2, 1, 3, 4, 2))
FOUR_GIB = 1 << 32


def a_tensor(dtype: str, shape: tuple[int, ...]) -> Tensor:
    count = torch.Size(shape).numel() * ITEMSIZE[dtype]
    raw = torch.arange(count).remainder(2 if dtype == "BOOL" else 251).to(torch.uint8)
    return raw.view(getattr(torch, TORCH_NAME[dtype])).reshape(shape)


def raw_bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def framed(tensor: Tensor) -> bytes:
    prefix, suffix = frame(FROM_TORCH_NAME[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape))
    return prefix + raw_bytes(tensor) + suffix


def read_file(descriptor: int, at: int, size: int) -> bytes:
    return os.pread(descriptor, size, at)


def located(archive: bytes, before: int = 0) -> Payload:
    """``locate`` on ``archive`` somewhere inside a larger file."""
    file = b"\xaa" * before + archive + b"\xbb" * 100
    return locate(lambda at, size: file[at : at + size], before, len(archive), "f.distcp: 'w'")


def refusal(archive: bytes) -> str:
    with pytest.raises(SourceError, match=r"^f.distcp: 'w': ") as caught:
        located(archive)
    return str(caught.value)


def rezipped(
    archive: bytes,
    keep: Callable[[str], bool] = lambda _: True,
    method: int = zipfile.ZIP_STORED,
    changes: Mapping[str, bytes] | None = None,
) -> bytes:
    """``archive`` written again by another zip library, without some records or with another content."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(buffer, "w", method) as new:
        for name in filter(keep, old.namelist()):
            new.writestr(name, (changes or {}).get(name.rpartition("/")[2], old.read(name)))
    return buffer.getvalue()


@pytest.mark.parametrize("dtype", TORCH_NAME)
def test_prefix_is_byte_for_byte_what_torch_writes(dtype: str) -> None:
    for shape in SHAPES:
        archive, (prefix, _) = saved(a_tensor(dtype, shape)), frame(dtype, shape)
        assert archive[: len(prefix)] == prefix, shape
        assert len(prefix) % ALIGNMENT == 0


@given(shape=st.lists(st.integers(0, 3) | st.sampled_from((255, 256, 65535, 65536)), max_size=6).map(tuple))
def test_prefix_is_what_torch_writes_for_any_shape(shape: tuple[int, ...]) -> None:
    assume(math.prod(max(size, 1) for size in shape) < 1_000_000)
    prefix, _ = frame("I8", shape)
    assert saved(torch.empty(shape, dtype=torch.int8))[: len(prefix)] == prefix


@pytest.mark.parametrize("dtype", TORCH_NAME)
def test_torch_loads_what_is_framed(dtype: str, tmp_path: Path) -> None:
    for number, shape in enumerate(SHAPES):
        tensor = a_tensor(dtype, shape)
        (tmp_path / f"{number}.pt").write_bytes(framed(tensor))
        for mmap in (False, True):
            back = torch.load(tmp_path / f"{number}.pt", weights_only=True, mmap=mmap)
            assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
            assert raw_bytes(back) == raw_bytes(tensor)


def test_torch_calculates_the_same_payload_offset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``config.load.calculate_storage_offsets`` skips the directory; torch's debug mode compares both ways."""
    from torch.utils.serialization import config

    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")
    tensor = a_tensor("F32", (7, 3))
    (tmp_path / "w.pt").write_bytes(framed(tensor))
    with config.patch("load.calculate_storage_offsets", True):  # type: ignore[attr-defined]
        assert torch.equal(torch.load(tmp_path / "w.pt", weights_only=True, mmap=True), tensor)


@pytest.mark.parametrize("dtype", TORCH_NAME)
def test_payload_is_found_in_torchs_archives_and_in_ours(dtype: str) -> None:
    for shape in SHAPES:
        tensor = a_tensor(dtype, shape)
        raw = raw_bytes(tensor)
        for archive in (saved(tensor), framed(tensor)):
            for before in (0, 1, 64):
                payload = located(archive, before)
                assert payload == Payload(payload.offset, len(raw), dtype, shape)
                assert archive[payload.offset - before :][: len(raw)] == raw


def test_crcs_are_those_torch_writes_without_crc32_of_the_payload() -> None:
    tensor = a_tensor("F32", (7, 3))
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        judge = zipfile.ZipFile(io.BytesIO(saved(tensor))).getinfo("archive/data/0").CRC
    finally:
        torch.serialization.set_crc32_options(before)
    archive = zipfile.ZipFile(io.BytesIO(framed(tensor)))
    assert archive.getinfo("archive/data/0").CRC == judge == 0
    for name in archive.namelist():
        if name != "archive/data/0":
            assert archive.read(name)  # zipfile raises where a CRC is wrong


@pytest.mark.parametrize("nbytes", [FOUR_GIB - 2, FOUR_GIB - 1, FOUR_GIB, FOUR_GIB + FOUR_GIB // 4 + 3])
def test_archives_around_and_beyond_4_gib_are_torchs(nbytes: int, tmp_path: Path) -> None:
    """torch's ``skip_data`` writes the frame alone, so nothing here is large but the offsets; files are sparse."""
    prefix, suffix = frame("U8", (nbytes,))
    with torch.serialization.skip_data():
        torch.save(torch.empty(nbytes, dtype=torch.uint8), tmp_path / "archive.pt")
    with (tmp_path / "archive.pt").open("rb") as judge:
        assert judge.read(len(prefix)) == prefix
    ours = tmp_path / "ours.pt"
    with ours.open("wb") as file:
        file.write(prefix)
        file.seek(nbytes - 1, os.SEEK_CUR)
        file.write(b"\x07" + suffix)
    back = torch.load(ours, weights_only=True, mmap=True)
    assert (back.shape, back[-1].item(), back[-2].item()) == ((nbytes,), 7, 0)
    for path in (ours, tmp_path / "archive.pt"):
        with path.open("rb") as file:
            found = locate(partial(read_file, file.fileno()), 0, path.stat().st_size, "w")
        assert found == Payload(len(prefix), nbytes, "U8", (nbytes,))


def test_two_reads_find_the_payload_of_a_large_archive_and_one_that_of_a_small_one() -> None:
    for rows, expected in ((10_000, 2), (10, 1)):
        for archive in (saved(a_tensor("F32", (rows, 2))), framed(a_tensor("F32", (rows, 2)))):
            calls: list[tuple[int, int]] = []

            def read(at: int, size: int, archive: bytes = archive, calls: list[tuple[int, int]] = calls) -> bytes:
                calls.append((at, size))
                return archive[at : at + size]

            locate(read, 0, len(archive), "w")
            assert len(calls) == expected, calls


def test_a_view_into_a_larger_storage_is_found() -> None:
    base = a_tensor("BF16", (9, 4))
    view = base[2:5]
    archive = saved(view)
    payload = located(archive, 64)
    assert (payload.shape, payload.nbytes) == ((3, 4), 24)
    assert archive[payload.offset - 64 :][:24] == raw_bytes(view)


def test_unit_dims_and_empty_tensors_may_have_any_strides() -> None:
    tensor = torch.arange(6.0)
    for view in (tensor.as_strided((1, 6), (99, 1)), tensor.as_strided((0, 6), (1, 17))):
        assert located(saved(view)).shape == tuple(view.shape)


def test_an_archive_without_the_newer_records_is_read() -> None:
    """torch 1.6 to 2.0 wrote no byteorder and no storage alignment; other zip writers add no zip64 end record."""
    archive = rezipped(saved(a_tensor("F32", (3, 4))), lambda name: name.endswith(("data.pkl", "data/0", "version")))
    payload = located(archive)
    assert archive[payload.offset :][:48] == raw_bytes(a_tensor("F32", (3, 4)))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (a_tensor("F32", (3, 4)).t(), "strides (1, 4), not row by row; save it again after calling contiguous()"),
        (a_tensor("F32", (1,)).expand(5), "strides (0,)"),
        ([a_tensor("F32", (3,))], "not one dense tensor"),
        ({"w": a_tensor("F32", (3,))}, "not one dense tensor"),
        (torch.ones(3, dtype=torch.complex64), "torch.ComplexFloatStorage"),
        (torch.ones(3, dtype=torch.complex64).conj().imag, "conjugate or negative view"),
        (torch.ones(3, 3).to_sparse(), "torch._utils._rebuild_sparse_tensor"),
        (torch.nn.Parameter(torch.ones(3)), "torch._utils._rebuild_parameter"),
        (torch.ones(3, device="meta"), "_rebuild_meta_tensor_no_storage"),
        (torch.ones(3).to(torch.float8_e4m3fnuz), "torch.float8_e4m3fnuz"),
        ("text", "not one dense tensor"),
    ],
)
def test_what_is_not_one_dense_tensor_is_refused_by_what_it_is(value: object, words: str) -> None:
    assert words in refusal(saved(value))


def test_other_containers_are_refused_by_name() -> None:
    tensor = a_tensor("F32", (30, 4))
    legacy = io.BytesIO()
    torch.save(tensor, legacy, _use_new_zipfile_serialization=False)
    assert "legacy torch.save" in refusal(legacy.getvalue())
    from safetensors.torch import save

    assert "SerializationFormat.SAFETENSORS" in refusal(save({"w": tensor}))
    assert "only zeros" in refusal(bytes(2000))
    assert "no torch.save archive" in refusal(b"\x01" * 2000)
    assert "no torch.save archive" in refusal(b"")


def test_compressed_and_big_endian_archives_are_refused() -> None:
    archive = saved(a_tensor("F32", (30, 4)))
    assert "compressed or encrypted" in refusal(rezipped(archive, method=zipfile.ZIP_DEFLATED))
    assert "little-endian" in refusal(rezipped(archive, changes={"byteorder": b"big"}))


def test_a_storage_of_another_size_than_stated_is_refused() -> None:
    archive = rezipped(saved(a_tensor("F32", (3, 4))), changes={"0": bytes(44)})
    assert "44 bytes where data.pkl states 48" in refusal(archive)


def test_a_tensor_that_reaches_past_its_storage_is_refused() -> None:
    """data.pkl with a storage offset that the record does not hold, in an otherwise sound archive."""
    archive = saved(torch.arange(12.0)[2:])
    pickled = zipfile.ZipFile(io.BytesIO(archive)).read("archive/data.pkl")
    assert pickled.count(b"QK\x02K\x0a\x85") == 1
    moved = pickled.replace(b"QK\x02K\x0a\x85", b"QK\x03K\x0a\x85")
    assert "40 bytes of tensor at 12 do not fit into 48 bytes" in refusal(
        rezipped(archive, changes={"data.pkl": moved})
    )


def test_a_flipped_bit_in_the_shape_is_noticed_by_the_crc() -> None:
    for archive in (saved(a_tensor("F32", (3, 4))), framed(a_tensor("F32", (3, 4)))):
        assert archive.count(b"K\x03K\x04\x86") == 1
        assert "CRC" in refusal(archive.replace(b"K\x03K\x04\x86", b"K\x01K\x04\x86"))


def test_a_payload_that_runs_past_its_archive_is_refused() -> None:
    """The local header of the payload, which decides where it begins, is not covered by any size or CRC."""
    archive = bytearray(framed(a_tensor("F32", (3, 4))))
    at = archive.index(b"archive/data/0")
    archive[at - 2 : at] = (60_000).to_bytes(2, "little")
    assert "'data/0' runs past its end" in refusal(bytes(archive))


def test_a_missing_payload_is_refused() -> None:
    archive = rezipped(saved(a_tensor("F32", (3, 4))), lambda name: not name.endswith("data/0"))
    assert "'data/0' is missing" in refusal(archive)


@pytest.mark.parametrize("make", [saved, framed])
def test_every_cut_of_an_archive_is_refused(make: Callable[[Tensor], bytes]) -> None:
    archive = make(a_tensor("F32", (3, 4)))
    for end in range(len(archive)):
        refusal(archive[:end])


@given(at=st.integers(0, 10**6), mask=st.integers(1, 255), ours=st.booleans())
def test_a_flipped_byte_is_refused_or_changes_nothing(at: int, mask: int, ours: bool) -> None:
    tensor = a_tensor("F32", (3, 4))
    archive = bytearray((framed if ours else saved)(tensor))
    expected = located(bytes(archive))
    archive[at % len(archive)] ^= mask
    try:
        found = located(bytes(archive))
    except SourceError:
        return
    assert found == expected
