"""Hostile and broken DCP folders: nothing runs, and only a SourceError comes out."""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
import subprocess
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen3conv.converters.boxes import TensorSpec
from qwen3conv.converters.dtypes import itemsize
from qwen3conv.converters.errors import SourceError
from qwen3conv.converters.stores.contents import Contents
from qwen3conv.converters.stores.dcp import read_dcp
from qwen3conv.converters.stores.dcp_metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
    TorchDtype,
)
from qwen3conv.converters.stores.dcp_values import read_blob, read_simple_blob
from qwen3conv.converters.stores.dcp_writing import arrange_dcp
from qwen3conv.converters.stores.pickle_writing import Call, Name, New, dump
from qwen3conv.converters.stores.torch_zip_writing import frame

pytestmark = pytest.mark.torch_free

SPECS = (
    TensorSpec("w", "F32", (3, 4)),
    TensorSpec("layers.0.moe.experts", "BF16", (2, 3, 4)),
    TensorSpec("scalar", "I64", ()),
    TensorSpec("empty", "F8_E4M3", (0, 5)),
)
META = "torch.distributed.checkpoint.metadata"


def zip_of(pickled: bytes) -> bytes:
    """A ``torch.save`` archive with ``pickled`` as its ``data.pkl``."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(zipfile.ZipInfo("archive/data.pkl"), pickled)
        file.writestr(zipfile.ZipInfo("archive/byteorder"), "little")
    return buffer.getvalue()


def write(folder: Path, blobs: dict[str, bytes] | None = None) -> Path:
    """A sound folder; all elements are zero."""
    folder.mkdir(exist_ok=True)
    arrangement = arrange_dcp(SPECS, file_bytes=1500, blobs=blobs)
    for output in arrangement.files:
        with (folder / output.name).open("wb") as file:
            file.truncate(output.size)
            for at, content in output.seals():
                file.seek(at)
                file.write(content)
    for name, content in arrangement.trailers():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("sound"), {"state.step": zip_of(pickle.dumps(7, 2))})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "c", {"state.step": zip_of(pickle.dumps(7, 2))})


def refusal(folder: Path) -> str:
    with pytest.raises(SourceError) as caught:
        read_dcp(folder)
    assert str(folder) in str(caught.value)
    return str(caught.value)


class Attack:
    """Runs ``call`` on ``args`` when it is unpickled the ordinary way."""

    def __init__(self, call: Callable[..., object], *args: object) -> None:
        self.what = call, args

    def __reduce__(self) -> Any:
        return self.what


def attacks(marker: Path) -> Iterator[tuple[str, object]]:
    """(name that must be shown, object): each writes ``marker`` or hands out a way to, when really unpickled."""
    shell, python = f"touch {marker}", f"open({str(marker)!r}, 'w').close()"
    yield f"{os.system.__module__}.system", Attack(os.system, shell)
    yield "builtins.eval", Attack(eval, python)
    yield "builtins.exec", Attack(exec, python)
    yield f"{open.__module__}.open", Attack(open, str(marker), "w")
    yield "subprocess.check_call", Attack(subprocess.check_call, ["touch", str(marker)])
    yield "builtins.__import__", Attack(__import__, "os")
    yield "builtins.getattr", Attack(getattr, Attack(__import__, "os"), "system")


@pytest.mark.parametrize("protocol", range(6))
def test_an_attack_as_metadata_is_refused_and_does_not_run(folder: Path, tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "ran"
    for name, attack in attacks(marker):
        raw = pickle.dumps(attack, protocol)
        (folder / ".metadata").write_bytes(raw)
        text = refusal(folder)
        assert "nothing was executed" in text
        if protocol >= 4 and name != "builtins.getattr":
            assert f"asks for '{name}'" in text
            assert str(folder / ".metadata") in text
    assert not marker.exists()
    pickle.loads(pickle.dumps(Attack(os.system, f"touch {marker}"), protocol))
    assert marker.exists(), "the attack is a real one"


def nest(payload: object) -> Iterator[bytes]:
    """``.metadata`` that is sound but for ``payload`` in one place."""
    place = New(Name("torch.distributed.checkpoint.filesystem", "_StorageInfo"), {"relative_path": payload})
    tensor = New(Name(META, "TensorStorageMetadata"), {"properties": payload, "size": (), "chunks": []})
    index = New(Name(META, "MetadataIndex"), {"fqn": payload})
    size = Call(Name("torch", "Size"), (payload,))
    whole: dict[str, object] = {"state_dict_metadata": {}, "storage_data": {}, "planner_data": {}}
    for change in (
        {"state_dict_metadata": {"a": New(Name(META, "BytesStorageMetadata"), {"x": payload})}},
        {"state_dict_metadata": {"a": tensor}},
        {"state_dict_metadata": {"a": size}},
        {"storage_data": {"a": place}},
        {"storage_data": {"a": index}},
        {"planner_data": {"a": (payload,)}},
        {"storage_meta": New(Name(META, "StorageMeta"), {"checkpoint_id": payload})},
        {"storage_meta": Call(Name("pathlib", "PosixPath"), (payload,))},
        {"version": payload},
        {"unknown": [payload]},
    ):
        yield dump(New(Name(META, "Metadata"), {**whole, **change}))


def test_an_attack_anywhere_inside_sound_metadata_is_refused(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for raw in nest(Call(Name("os", "system"), (f"touch {marker}",))):
        (folder / ".metadata").write_bytes(raw)
        assert "'os.system'" in refusal(folder)
    assert not marker.exists()


@pytest.mark.parametrize(
    "name",
    [
        *(Name("torch", "_utils.x"), Name("torch", "Size.__class__"), Name("torch.serialization", "os.system")),
        *(Name(META, "os.system"), Name(META, "Metadata.__init__"), Name("builtins", "getattr.__self__.eval")),
        *(Name("", ""), Name("torch", "load"), Name("torch", ""), Name("torch.hub", "load"), Name("pathlib", "os")),
        *(Name("functools", "partial"), Name("operator", "attrgetter"), Name("copyreg", "_reconstructor")),
        *(Name("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"), Name("numpy", "ndarray")),
    ],
)
def test_names_outside_the_table_are_blocked_however_they_are_spelled(folder: Path, name: Name) -> None:
    (folder / ".metadata").write_bytes(dump([name]))
    assert f"asks for '{name.module}.{name.name}'" in refusal(folder)
    text = b"\x80\x02c" + f"{name.module}\n{name.name}\n".encode() + b"."
    (folder / ".metadata").write_bytes(text)
    assert f"asks for '{name.module}.{name.name}'" in refusal(folder)


SIZE = Name("torch", "Size")
FORMAT = Name(META, "_MEM_FORMAT_ENCODING")


@pytest.mark.parametrize(
    "value",
    [
        Call(Name("builtins", "getattr"), (SIZE, "__class__")),
        Call(Name("builtins", "getattr"), (FORMAT, SIZE)),
        Call(Name("builtins", "getattr"), (FORMAT,)),
        Call(Name("torch", "float32"), ("x",)),
        Call(Name(META, "Metadata"), ("x",)),
        New(SIZE),
        New(Name("torch", "float32")),
        New(FORMAT, {"_value_": 3}),
        Call(SIZE, ((2**63,),)),
        Call(SIZE, ((-1,),)),
        Call(SIZE, ((True,),)),
        Call(SIZE, (("x",),)),
        Call(SIZE, ("ab",)),
        Call(SIZE, (7,)),
        Call(Name("torch.serialization", "_get_layout"), ()),
        Call(Name("torch.serialization", "_get_layout"), (5,)),
        Call(Name("collections", "OrderedDict"), ([("a", 1)],)),
        New(Name(META, "ChunkStorageMetadata"), {"offsets": (0,)}),
        New(Name(META, "ChunkStorageMetadata"), {"offsets": (0,), "sizes": "ab"}),
        New(Name(META, "ChunkStorageMetadata"), {"offsets": (0,), "sizes": (1,), "more": 1}),
        New(Name(META, "ChunkStorageMetadata"), ["offsets", "sizes"]),
        New(Name(META, "TensorProperties"), (1, 2, 3, 4, 5)),
        New(Name(META, "TensorProperties"), (Name("torch", "float32"), "torch.strided")),
        New(Name(META, "TensorProperties"), {"dtype": Name("torch", "float32")}),
        New(Name(META, "TensorStorageMetadata"), {"properties": 1, "size": (), "chunks": []}),
        New(Name(META, "MetadataIndex"), {"fqn": 5, "index": 0}),
        New(Name(META, "MetadataIndex"), (None, {"fqn": "a"})),
        New(Name("torch.distributed.checkpoint.filesystem", "_StorageInfo"), {"relative_path": 1}),
        New(Name("torch.distributed.checkpoint.filesystem", "_StorageInfo"), "abc"),
        New(Name(META, "Metadata"), [1]),
        {(1, 2): 3},
    ],
)
def test_wrong_types_and_values_are_refused(folder: Path, value: object) -> None:
    """Inside metadata that is sound without them, where nothing else could be the reason."""
    (folder / ".metadata").write_bytes(metadata_of(unknown=[1]))
    read_dcp(folder)
    (folder / ".metadata").write_bytes(metadata_of(unknown=[value]))
    refusal(folder)


@pytest.mark.parametrize(
    "value", [New(Name(META, "Metadata"), {}), New(Name(META, "Metadata")), {}, "text", None, [], 2**70]
)
def test_what_is_not_metadata_is_refused(folder: Path, value: object) -> None:
    (folder / ".metadata").write_bytes(dump(value))
    refusal(folder)


def metadata_of(**fields: object) -> bytes:
    return dump(New(Name(META, "Metadata"), {"state_dict_metadata": {}, "storage_data": {}, **fields}))


@pytest.mark.parametrize(
    "fields",
    [
        {"state_dict_metadata": []},
        {"state_dict_metadata": {1: New(Name(META, "BytesStorageMetadata"))}},
        {"state_dict_metadata": {"a": None}},
        {"state_dict_metadata": {"a": New(Name(META, "TensorStorageMetadata"))}},
        {"state_dict_metadata": {"a": New(Name(META, "Metadata"), {})}},
        {"storage_data": None},
        {"storage_data": {"a": "b"}},
        {"storage_data": {New(Name(META, "MetadataIndex")): New(Name(META, "MetadataIndex"))}},
        {"version": 1},
        {"version": "9"},
    ],
)
def test_metadata_that_is_put_together_wrongly_is_refused(folder: Path, fields: dict[str, object]) -> None:
    (folder / ".metadata").write_bytes(metadata_of(**fields))
    assert str(folder / ".metadata") in refusal(folder)


@pytest.mark.parametrize("chunk", [None, New(Name(META, "ChunkStorageMetadata")), "x", (1, 2)])
def test_a_chunk_without_contents_is_refused(folder: Path, chunk: object) -> None:
    properties = (Name("torch", "float32"), "torch.strided", False, None, False)
    state = {"properties": New(Name(META, "TensorProperties"), properties), "size": (2,), "chunks": [chunk]}
    raw = metadata_of(state_dict_metadata={"a": New(Name(META, "TensorStorageMetadata"), state)})
    (folder / ".metadata").write_bytes(raw)
    assert "a tensor has a chunk without offsets and sizes" in refusal(folder)


def test_tensors_that_share_one_list_of_chunks_do_not_multiply_the_work() -> None:
    """A pickle's memo may hand the same list to any number of tensors: it counts for the first one only."""
    properties, chunk = TensorProperties(), ChunkStorageMetadata()
    properties.build((TorchDtype("float32"), "torch.strided", False, None, False))
    chunk.build({"offsets": (0,), "sizes": (2,)})
    first, second, chunks = TensorStorageMetadata(), TensorStorageMetadata(), [chunk] * 1000
    for tensor in (first, second):
        tensor.build({"properties": properties, "size": (2,), "chunks": chunks})
    assert (len(first.chunks), len(second.chunks)) == (1000, 0)


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"\x80\x04})" + b"\x85" * 60_000 + b"Ns.", id="tuple too deep to hash"),
        pytest.param(b"\x80\x04]" + b"\x94]" * 60_000 + b"a" * 60_000 + b".", id="list too deep to print"),
        pytest.param(b"\x80\x02]r\xff\xff\xff\x7f.", id="memo index of 16 GiB"),
        pytest.param(b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.", id="bytearray of a TiB"),
        pytest.param(b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", id="bytes of 8 EiB"),
        pytest.param(b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.", id="text of 8 EiB"),
        pytest.param(b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.", id="frame of 8 EiB"),
        pytest.param(b"\x80\x02\x8b\xff\xff\xff\x7f.", id="int of 2 GiB"),
        pytest.param(b"\x80\x02L" + b"9" * 60_000 + b"L\n.", id="decimal int"),
        pytest.param(b"\x80\x04]" + b"2" * 60_000 + b".", id="DUP"),
        pytest.param(b"(" * 60_000 + b".", id="only marks"),
        pytest.param(b"\x80\x04].]", id="trailing bytes"),
        pytest.param(b"\x80\x04]]." , id="two objects"),
        pytest.param(b"\x80\x06].", id="protocol 6"),
        pytest.param(b"\x80\x04\x8c\x02\xed\xa0.", id="not utf-8"),
        pytest.param(b"\x80\x04\x8c\x03\xed\xa0\x80.", id="lone surrogate"),
        pytest.param(b"\x80\x04N}b.", id="attributes of None"),
        pytest.param(b"\x80\x04NNR.", id="call of None"),
        pytest.param(b"\x80\x04N)\x81.", id="object of None"),
        pytest.param(b"\x80\x04N(NNu.", id="items of None"),
        pytest.param(b"\x80\x04}(Nu.", id="half a pair"),
        pytest.param(b"\x80\x04N(Ne.", id="append to None"),
        pytest.param(b"\x80\x04NN\x93.", id="name that is not text"),
        pytest.param(b"\x80\x04\x82\x01.", id="extension code"),
        pytest.param(b"\x80\x04N)}\x92.", id="NEWOBJ_EX"),
        pytest.param(b"\x80\x04N\x97.", id="out-of-band buffer"),
        pytest.param(b"\x80\x04(Q.", id="persistent id of nothing"),
        pytest.param(b"\x80\x04)Q.", id="persistent id"),
        pytest.param(b"(cos\nsystem\nS'x'\no.", id="OBJ"),
        pytest.param(b"(S'x'\nios\nsystem\n.", id="INST"),
        pytest.param(b"", id="empty"),
        pytest.param(b"\0" * 5000, id="zeros"),
        pytest.param(b"PK\x03\x04" * 100, id="a zip file"),
    ],
)  # fmt: skip
def test_pickle_bombs_and_malformed_pickles_are_refused_cheaply(folder: Path, raw: bytes) -> None:
    (folder / ".metadata").write_bytes(raw)
    tracemalloc.start()
    try:
        refusal(folder)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 * len(raw) + 1_000_000


@pytest.mark.parametrize(
    "fragment",
    [
        pytest.param(b"}N" + b"\x85" * 60_000 + b"Ns", id="tuple as dict key"),
        pytest.param(b"](N\x85e", id="control"),
        pytest.param(b"]r\xff\xff\xff\x7f", id="memo index"),
        pytest.param(b"]q\x01", id="memo index out of turn"),
        pytest.param(b"]2", id="DUP"),
        pytest.param(b"\x8f", id="EMPTY_SET"),
    ],
)
def test_a_bomb_that_leaves_no_trace_is_refused_too(folder: Path, fragment: bytes) -> None:
    """The fragment is popped again: what follows is sound metadata."""
    raw = metadata_of()
    (folder / ".metadata").write_bytes(raw[:2] + fragment + b"0" + raw[2:])
    if fragment == b"](N\x85e":
        read_dcp(folder)
    else:
        refusal(folder)


def test_anything_after_metadata_is_refused(folder: Path) -> None:
    (folder / ".metadata").write_bytes(metadata_of() + b"\0")
    assert "more in it than one pickled object" in refusal(folder)


def test_a_metadata_file_beyond_all_measure_is_not_read(folder: Path) -> None:
    with (folder / ".metadata").open("r+b") as file:
        file.truncate(1 << 40)
    assert f"{1 << 40} bytes" in refusal(folder)


def test_metadata_cut_anywhere_is_refused(folder: Path) -> None:
    raw = (folder / ".metadata").read_bytes()
    for end in (*range(0, len(raw), 5), *range(len(raw) - 20, len(raw))):
        (folder / ".metadata").write_bytes(raw[:end])
        assert ".metadata" in refusal(folder)


def test_a_data_file_cut_anywhere_is_refused(folder: Path) -> None:
    path = folder / "__0_1.distcp"
    raw = path.read_bytes()
    for end in (*range(0, len(raw) - 64, 97), len(raw) - 65):
        path.write_bytes(raw[:end])
        assert f"'__0_1.distcp': {end} bytes" in refusal(folder)


def judged(folder: Path) -> Contents | None:
    """What is read, or None for a SourceError; anything else fails the test. Payloads must lie inside their files."""
    try:
        contents = read_dcp(folder)
    except SourceError:
        return None
    for stored in contents.tensors.values():
        for chunk in stored.chunks:
            end = chunk.offset + math.prod(chunk.box.size) * itemsize(stored.spec.dtype)
            assert 0 <= chunk.offset <= end <= contents.files[chunk.file]
            assert all(low <= total for low, total in zip(chunk.box.stop, stored.spec.shape, strict=True))
    return contents


@given(data=st.data())
def test_flipped_bytes_give_a_source_error_or_a_consistent_folder(sound: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(sound.iterdir())))
    raw = path.read_bytes()
    flips = data.draw(st.lists(st.tuples(st.integers(0, len(raw) - 1), st.integers(1, 255)), min_size=1, max_size=4))
    changed = bytearray(raw)
    for at, mask in flips:
        changed[at] ^= mask
    path.write_bytes(changed)
    try:
        judged(sound)
        for read in (read_blob, read_simple_blob):
            with contextlib.suppress(SourceError):
                read(sound, "state.step")
    finally:
        path.write_bytes(raw)


@given(raw=st.binary(max_size=60), proto=st.booleans())
def test_random_bytes_as_metadata_are_refused(sound: Path, raw: bytes, proto: bool) -> None:
    path = sound / ".metadata"
    kept = path.read_bytes()
    path.write_bytes((b"\x80\x04" if proto else b"") + raw)
    try:
        assert judged(sound) is None
    finally:
        path.write_bytes(kept)


OPCODES = b"\x94jhKM\x85\x86)}(ub\x81RJ\x8a\x8c\x87\x89\x88N]aest\x93cXGqrQCB\x8d\x95\x8001."


@given(raw=st.lists(st.sampled_from(sorted(OPCODES)) | st.integers(0, 3), max_size=60).map(bytes))
def test_random_programs_of_known_opcodes_are_refused(sound: Path, raw: bytes) -> None:
    test_random_bytes_as_metadata_are_refused.hypothesis.inner_test(sound, raw, True)  # type: ignore[attr-defined]


def test_the_sound_folder_is_read(sound: Path) -> None:
    contents = judged(sound)
    assert contents is not None
    assert [stored.spec for stored in contents.tensors.values()] == list(SPECS)
    assert read_simple_blob(sound, "state.step") == 7


# --- archives --------------------------------------------------------------------------------------------------------


def test_attacks_in_a_tensors_pickle_are_refused_by_tensor_and_file(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for name, attack in attacks(marker):
        archive = zip_of(pickle.dumps(attack, 2, fix_imports=False))
        contents = read_dcp(folder, locate=False)
        (chunk,) = contents.tensors["w"].chunks
        path = folder / chunk.file
        raw = path.read_bytes()
        prefix, suffix = frame("F32", (3, 4))
        length = len(prefix) + 48 + len(suffix)
        at = raw.index(prefix)
        # A zip comment is not what torch writes, so the archive is put at the very end of the chunk's place.
        padded = archive[:-22].ljust(length - 22, b"\0") + archive[-22:]
        path.write_bytes(raw[:at] + padded + raw[at + length :])
        text = refusal(folder)
        assert f"{chunk.file}: 'w': " in text
        if name != "builtins.getattr":
            assert f"asks for '{name}'" in text
        path.write_bytes(raw)
    assert not marker.exists()


def test_attacks_in_a_blob_do_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for number, (_, attack) in enumerate(attacks(marker)):
        for protocol in range(6):
            archive = zip_of(pickle.dumps({"step": [1, (attack,)]}, protocol))
            folder = write(tmp_path / f"{number}{protocol}", {"state": archive})
            assert read_dcp(folder).others == {"state": f"bytes, {len(archive)} B"}
            assert read_blob(folder, "state") == archive
            with pytest.raises(SourceError, match="'state': "):
                read_simple_blob(folder, "state")
    assert not marker.exists()


# Lists of two references to the list before: 40 times, in 250 bytes.
LAUGHS = b"(](K\x01K\x01e\x94" + b"".join(b"](h%ch%ce\x94" % (n, n) for n in range(40)) + b"t."


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"\x80\x04" + LAUGHS, id="2**40 values"),
        pytest.param(b"\x80\x04]\x94h\x00a.", id="a list inside itself"),
        pytest.param(b"\x80\x04N" + b"\x85" * 60_000 + b".", id="60,000 deep"),
        pytest.param(b"\x80\x04ctorch\nfloat32\n.", id="a dtype"),
        pytest.param(b"\x80\x04c_codecs\nencode\nX\x01\x00\x00\x00xX\x03\x00\x00\x00hex\x86R.", id="another codec"),
        pytest.param(b"\x80\x04c_codecs\nencode\n\x8c\x02\xc4\x80\x8c\x06latin1\x86R.", id="not latin1"),
        pytest.param(b"\x80\x04c__builtin__\nbytes\nJ\xff\xff\xff\x7f\x85R.", id="2 GiB of zero bytes"),
    ],
)  # fmt: skip
def test_blobs_that_explode_are_refused(tmp_path: Path, raw: bytes) -> None:
    folder = write(tmp_path / "c", {"state": zip_of(raw)})
    with pytest.raises(SourceError, match="'state'"):
        read_simple_blob(folder, "state")


def test_a_blob_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    for number, raw in enumerate((b"", b"x", pickle.dumps(7, 2), bytes(100), zip_of(b"")[:-1])):
        folder = write(tmp_path / f"{number}", {"state": raw})
        assert read_blob(folder, "state") == raw
        with pytest.raises(SourceError, match="'state'"):
            read_simple_blob(folder, "state")
