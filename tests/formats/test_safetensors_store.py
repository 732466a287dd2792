"""Safetensors folders, with the safetensors library, huggingface_hub and transformers as judges."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from huggingface_hub import split_state_dict_into_shards_factory
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from qwen3conv.converters.boxes import TensorSpec
from qwen3conv.converters.dtypes import ITEMSIZE
from qwen3conv.converters.errors import DestinationError, MappingError, SourceError
from qwen3conv.converters.stores import safetensors as store
from qwen3conv.converters.stores import safetensors_writing as writing
from qwen3conv.converters.stores.contents import Arrangement, Contents
from qwen3conv.converters.stores.safetensors_header import read_header
from tests.stored import distinct, raw_bytes, spec_of

PT = {"format": "pt"}


def fill(arrangement: Arrangement, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Carry out ``arrangement`` as a run does: data, then seals, then trailers."""
    for output in arrangement.files:
        with (folder / output.name).open("wb") as stream:
            stream.truncate(output.size)
            for stored in arrangement.tensors.values():
                for chunk in stored.chunks:
                    if chunk.file == output.name:
                        stream.seek(chunk.offset)
                        stream.write(raw_bytes(tensors[stored.name]))
            for offset, content in output.seals():
                stream.seek(offset)
                stream.write(content)
        assert (folder / output.name).stat().st_size == output.size
    for name, content in arrangement.trailers():
        (folder / name).write_bytes(content)


def check_bytes(folder: Path, contents: Contents, tensors: Mapping[str, Tensor]) -> None:
    assert set(contents.tensors) == set(tensors)
    for name, stored in contents.tensors.items():
        assert stored.spec == spec_of(name, tensors[name])
        (chunk,) = stored.chunks
        assert chunk.box.start == (0,) * len(stored.spec.shape)
        assert chunk.box.size == stored.spec.shape
        with (folder / chunk.file).open("rb") as stream:
            stream.seek(chunk.offset)
            assert stream.read(stored.spec.nbytes) == raw_bytes(tensors[name])
    assert contents.files == {name: (folder / name).stat().st_size for name in contents.files}


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
tensor_names = texts.filter(lambda name: name != "__metadata__")
tensor_kinds = st.tuples(st.sampled_from(list(ITEMSIZE)), st.lists(st.integers(0, 3), max_size=3).map(tuple))


# --- writing ---------------------------------------------------------------------------------------------------------


@given(
    specs=st.dictionaries(tensor_names, tensor_kinds, max_size=8),
    metadata=st.none() | st.dictionaries(texts, texts, max_size=1) | st.just(PT),
)
def test_a_written_file_is_the_librarys_own_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory,
    specs: dict[str, tuple[str, tuple[int, ...]]],
    metadata: dict[str, str] | None,
) -> None:
    assume(specs or metadata != {})  # of nothing at all, safetensors 0.8 makes a header that is no JSON
    folder = tmp_path_factory.mktemp("written")
    tensors = distinct(specs)
    files = [("model.safetensors", [spec_of(name, tensor) for name, tensor in reversed(tensors.items())])]
    fill(writing.arrange_safetensors(files, metadata=metadata), tensors, folder)
    assert (folder / "model.safetensors").read_bytes() == save(tensors, metadata=metadata)
    assert os.listdir(folder) == ["model.safetensors"]
    check_bytes(folder, store.read_safetensors(folder), tensors)


def test_every_dtype_takes_the_place_that_the_library_gives_it(tmp_path: Path) -> None:
    tensors = distinct({f"{i:02d}": (dtype, (1, 3)) for i, dtype in enumerate(ITEMSIZE)})
    save_file(tensors, tmp_path / "judge.safetensors", metadata=PT)
    arrangement = writing.arrange_safetensors([("a.safetensors", [spec_of(*item) for item in tensors.items()])])
    fill(arrangement, tensors, tmp_path)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "judge.safetensors").read_bytes()


def test_several_metadata_keys_keep_their_order_and_are_read_back(tmp_path: Path) -> None:
    tensors = distinct({"a": ("F32", (2,))})
    metadata = {"format": "pt", "b": '1"', "a": "\u00e9"}
    files = [("model.safetensors", [spec_of("a", tensors["a"])])]
    fill(writing.arrange_safetensors(files, metadata=metadata), tensors, tmp_path)
    assert list(store.read_safetensors(tmp_path).metadata.items()) == list(metadata.items())
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], tensors["a"])


@pytest.mark.parametrize("tied", [True, False])
def test_a_split_folder_is_what_transformers_saves_byte_for_byte(tmp_path: Path, tied: bool) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=tied,
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    ours.mkdir()
    model.save_pretrained(theirs, max_shard_size=4000)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}

    files = writing.split_by_size([spec_of(*item) for item in tensors.items()], 4000)
    fill(writing.arrange_safetensors(files), tensors, ours)
    expected = {path.name: path.read_bytes() for path in theirs.iterdir() if "safetensors" in path.name}
    assert len(expected) > 3
    assert {path.name: path.read_bytes() for path in ours.iterdir()} == expected
    contents = store.read_safetensors(theirs)
    assert contents.metadata == PT
    check_bytes(theirs, contents, tensors)


def test_an_index_can_be_asked_for_or_left_out() -> None:
    one = [("model.safetensors", [TensorSpec("a", "F32", (2,))])]
    two = [*one, ("model-2.safetensors", [TensorSpec("b", "F32", (3,))])]
    assert list(writing.arrange_safetensors(one).trailers()) == []
    assert list(writing.arrange_safetensors(two, index=False).trailers()) == []
    ((name, content),) = writing.arrange_safetensors(one, index=True, total_parameters=7).trailers()
    assert name == "model.safetensors.index.json"
    assert json.loads(content) == {
        "metadata": {"total_parameters": 7, "total_size": 8},
        "weight_map": {"a": "model.safetensors"},
    }


def test_what_cannot_be_written_is_refused_all_at_once() -> None:
    files = [
        ("a.safetensors", [TensorSpec("twice", "F32", (2,)), TensorSpec("__metadata__", "F32", (2,))]),
        ("../a.safetensors", [TensorSpec("twice", "F32", (2,)), TensorSpec("\ud800", "F32", (2,))]),
        ("b.safetensors", [TensorSpec("odd", "C64", (2,))]),
    ]
    with pytest.raises(MappingError) as caught:
        writing.arrange_safetensors(files)
    text = str(caught.value)
    for part in ("'twice': occurs twice, in a.safetensors and", "'__metadata__'", "'../a.safetensors'", "ud800", "C64"):
        assert part in text


def test_a_header_that_readers_would_refuse_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MAX_HEADER", 100)
    with pytest.raises(DestinationError, match="smaller shard size"):
        writing.arrange_safetensors([("a.safetensors", [TensorSpec("x" * 100, "F32", (2,))])])


# --- splitting -------------------------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(0, 12), min_size=1, max_size=20), limit=st.integers(0, 20))
def test_files_are_split_as_huggingface_hub_splits_them(sizes: list[int], limit: int) -> None:
    specs = [TensorSpec(f"t{i}", "F32", (size,)) for i, size in enumerate(sizes)]
    judge = split_state_dict_into_shards_factory(
        {spec.name: spec for spec in specs},
        get_storage_size=lambda spec: spec.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )
    ours = writing.split_by_size(specs, limit)
    assert [(file, [spec.name for spec in held]) for file, held in ours] == list(judge.filename_to_tensors.items())


def test_no_tensor_at_all_still_makes_one_file() -> None:
    assert writing.split_by_size([], 10) == [("model.safetensors", [])]


def names_in(split: Sequence[tuple[str, list[TensorSpec]]] | None) -> dict[str, list[str]] | None:
    return None if split is None else {file: [spec.name for spec in specs] for file, specs in split}


def test_a_given_split_is_kept_only_while_the_tensors_agree() -> None:
    specs = [TensorSpec(name, "F32", (2,)) for name in ("c", "a", "b")]
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    source = {"a": one, "b": two, "c": one}
    assert names_in(writing.split_like(specs, source)) == {one: ["c", "a"], two: ["b"]}
    assert writing.split_like([*specs, TensorSpec("new", "F32", ())], source) is None
    with_head = {**source, "lm_head.weight": two}
    assert writing.split_like(specs, with_head) is None
    assert names_in(writing.split_like(specs, with_head, may_lack={"lm_head.weight"})) == {one: ["c", "a"], two: ["b"]}
    head_alone = {"a": one, "b": one, "c": one, "lm_head.weight": two}
    assert writing.split_like(specs, head_alone, may_lack={"lm_head.weight"}) is None
    assert writing.split_like(specs, {**source, "b": "sub/" + two}) is None
    assert writing.split_like([], {}) is None
    lone = dict.fromkeys(source, "consolidated.safetensors")
    assert names_in(writing.split_like(specs, lone)) == {"model.safetensors": ["c", "a", "b"]}


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound checkpoint in two parts: a and b in the first, c in the second."""
    tensors = distinct({"a": ("BF16", (2, 3)), "b": ("F32", (4,)), "c": ("I64", (1, 2))})
    save_file({name: tensors[name] for name in "ab"}, tmp_path / "model-00001-of-00002.safetensors", metadata=PT)
    save_file({"c": tensors["c"]}, tmp_path / "model-00002-of-00002.safetensors", metadata=PT)
    write_index(tmp_path, {"a": 1, "b": 1, "c": 2}, total_size=44)
    return tmp_path


def write_index(folder: Path, weight_map: Mapping[str, object], **metadata: object) -> None:
    files = {
        name: f"model-{value:05d}-of-00002.safetensors" if isinstance(value, int) else value
        for name, value in weight_map.items()
    }
    (folder / store.INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": files}))


def refusal(folder: Path) -> str:
    with pytest.raises(SourceError) as caught:
        store.read_safetensors(folder)
    return str(caught.value)


def test_a_sound_folder_is_read_without_a_word(folder: Path) -> None:
    contents = store.read_safetensors(folder)
    assert list(contents.tensors) == ["b", "a", "c"]  # file order
    assert contents.metadata == PT


def test_the_header_gives_ranges_relative_to_the_data(folder: Path) -> None:
    header = read_header(folder / "model-00001-of-00002.safetensors")
    assert header.tensors == {"b": ("F32", (4,), 0, 16), "a": ("BF16", (2, 3), 16, 28)}
    assert header.size == header.data_start + 28


def test_an_index_that_names_a_missing_file_is_refused(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").unlink()
    text = refusal(folder)
    assert "model-00001-of-00002.safetensors: does not exist; the index places 2 tensors there ('a', 'b')" in text
    assert "download" in text


def test_every_disagreement_of_index_and_files_is_named_at_once(folder: Path) -> None:
    write_index(folder, {"a": 2, "c": 2, "gone": 1})
    text = refusal(folder)
    assert "model-00001-of-00002.safetensors: holds 'a' too, which the index places in model-00002" in text
    assert "model-00001-of-00002.safetensors: holds 'b', which the index does not list" in text
    assert "model-00002-of-00002.safetensors: does not hold 'a', which the index places there" in text
    assert "model-00001-of-00002.safetensors: does not hold 'gone'" in text
    assert len(text.splitlines()) == 5


def test_a_part_that_the_index_does_not_mention_is_refused(folder: Path) -> None:
    (folder / "model-00003-of-00003.safetensors").write_bytes(save({"d": torch.zeros(1)}))
    assert "model-00003-of-00003.safetensors: in the folder, but the index does not mention" in refusal(folder)


def test_a_single_file_beside_a_split_is_ambiguous(folder: Path) -> None:
    save_file({"d": torch.zeros(1)}, folder / "model.safetensors")
    assert "model.safetensors: lies beside an index that does not mention it" in refusal(folder)
    (folder / store.INDEX).unlink()
    assert "holds model.safetensors and model-00001-of-00002.safetensors" in refusal(folder)


def test_a_single_file_with_an_index_of_only_that_file_is_fine(tmp_path: Path) -> None:
    save_file({"d": torch.zeros(1)}, tmp_path / "model.safetensors")
    write_index(tmp_path, {"d": "model.safetensors"}, total_size=4)
    assert list(store.read_safetensors(tmp_path).tensors) == ["d"]


def test_parts_without_an_index_are_counted(folder: Path) -> None:
    (folder / store.INDEX).unlink()
    assert "only 2 of the 2 parts of model;" in refusal(folder)
    (folder / "model-00001-of-00002.safetensors").unlink()
    assert "has no model.safetensors.index.json, only 1 of the 2 parts of model (missing: 1)" in refusal(folder)


@pytest.mark.parametrize("name", ["consolidated.safetensors", "model-00001-of-00001.safetensors"])
def test_a_lone_file_of_another_name_is_the_model(tmp_path: Path, name: str) -> None:
    tensors = distinct({"a": ("BF16", (2, 3))})
    save_file(tensors, tmp_path / name)
    save_file({"lora": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    contents = store.read_safetensors(tmp_path)
    check_bytes(tmp_path, contents, tensors)
    assert "adapter_model.safetensors" in contents.metadata[store.WARNING]


def test_an_adapter_beside_the_model_is_no_part_of_it(tmp_path: Path) -> None:
    tensors = distinct({"a": ("BF16", (2, 3))})
    save_file(tensors, tmp_path / "model.safetensors")
    for name in ("adapter_model-00001-of-00002.safetensors", "adapter_model-00002-of-00002.safetensors"):
        save_file({name: torch.zeros(1)}, tmp_path / name)
    contents = store.read_safetensors(tmp_path)
    check_bytes(tmp_path, contents, tensors)
    assert contents.metadata[store.WARNING].startswith("not read, because they are not part of the checkpoint: adapter")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "holds no .safetensors file"),
        (("adapter_model.safetensors",), "holds an adapter"),
        (("a.safetensors", "b.safetensors"), "which of a.safetensors, b.safetensors is meant"),
        (("shard-00001-model-00001-of-00001.safetensors",), "shards of torch's distributed writer"),
        (("x-00001-of-00003.safetensors", "y-00002-of-00002.safetensors"), "1 of the 3 parts of x (missing: 2, 3) and"),
    ],
)
def test_a_folder_without_a_clear_model_is_refused(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    for name in names:
        save_file({"a": torch.zeros(1)}, tmp_path / name)
    assert message in refusal(tmp_path)


def test_a_path_that_is_no_folder_is_refused(folder: Path) -> None:
    assert "is a file; give the folder" in refusal(folder / store.INDEX)
    assert "cannot be listed" in refusal(folder / "absent")


HOSTILE = ["/etc/x.safetensors", "../x.safetensors", "a/../../x.safetensors", "a\\x.safetensors", "", "x\0.safetensors"]


@pytest.mark.parametrize("name", [*HOSTILE, "./x.safetensors", "config.json", "x.safetensors\n", "a//x.safetensors", 3])
def test_an_index_cannot_send_the_reader_elsewhere(folder: Path, name: object) -> None:
    (folder / "x.safetensors").write_bytes(save({"evil": torch.zeros(1)}))
    document = json.loads((folder / store.INDEX).read_text())
    document["weight_map"]["evil"] = name
    (folder / store.INDEX).write_text(json.dumps(document))
    text = refusal(folder)
    assert "model.safetensors.index.json: " in text
    assert repr(name) in text
    assert len(text.splitlines()) == 2  # and nothing else is wrong


def test_a_subfolder_named_by_the_index_is_read(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    tensors = distinct({"a": ("BF16", (2, 3))})
    save_file(tensors, tmp_path / "weights/x.safetensors")
    write_index(tmp_path, {"a": "weights/x.safetensors"})
    check_bytes(tmp_path, store.read_safetensors(tmp_path), tensors)


def test_a_hub_cache_of_links_is_read_and_a_link_to_nowhere_is_named(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots/abc"
    snapshot.mkdir(parents=True)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.glob("model*"))):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert set(store.read_safetensors(snapshot).tensors) == {"a", "b", "c"}
    (blobs / "1").unlink()
    assert "model-00002-of-00002.safetensors: does not exist (a link to nowhere)" in refusal(snapshot)


@pytest.mark.parametrize("total_size", [40, 44.5, "44"])
def test_an_odd_total_size_is_a_warning(folder: Path, total_size: object) -> None:
    write_index(folder, {"a": 1, "b": 1, "c": 2}, total_size=total_size)
    contents = store.read_safetensors(folder)
    assert f"total_size of {total_size!r}; the tensors it lists take 44 bytes" in contents.metadata[store.WARNING]


def test_an_index_without_a_total_size_is_fine(folder: Path) -> None:
    write_index(folder, {"a": 1, "b": 1, "c": 2})
    assert store.read_safetensors(folder).metadata == PT


def test_a_file_cannot_speak_in_the_readers_name(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={store.WARNING: "all is well"})
    assert store.read_safetensors(tmp_path).metadata == {}


HEADERS_OF_235B = """
import sys, time
from pathlib import Path
before = time.perf_counter()
from qwen3conv.converters.stores.safetensors import read_safetensors
contents = read_safetensors(Path(sys.argv[1]))
seconds = time.perf_counter() - before
status = Path("/proc/self/status").read_text()  # ru_maxrss would count the process that started this one
peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
print(len(contents.tensors), peak // 1024, f"{seconds:.2f}")
assert not {"torch", "numpy", "safetensors"} & set(sys.modules)
"""


def test_the_headers_of_a_235b_folder_take_little_memory(tmp_path: Path) -> None:
    projections = {"gate_proj": (1536, 4096), "up_proj": (1536, 4096), "down_proj": (4096, 1536)}
    attention = {"q_proj": (8192, 4096), "k_proj": (512, 4096), "v_proj": (512, 4096), "o_proj": (4096, 8192)}
    specs = [TensorSpec(name, "BF16", (151936, 4096)) for name in ("model.embed_tokens.weight", "lm_head.weight")]
    specs.append(TensorSpec("model.norm.weight", "BF16", (4096,)))
    for layer in range(94):
        root = f"model.layers.{layer}"
        for expert in range(128):
            for name, shape in projections.items():
                specs.append(TensorSpec(f"{root}.mlp.experts.{expert}.{name}.weight", "BF16", shape))
        for name, shape in attention.items():
            specs.append(TensorSpec(f"{root}.self_attn.{name}.weight", "BF16", shape))
        specs.append(TensorSpec(f"{root}.mlp.gate.weight", "BF16", (128, 4096)))
        for name in ("input_layernorm", "post_attention_layernorm"):
            specs.append(TensorSpec(f"{root}.{name}.weight", "BF16", (4096,)))
        for name in ("q_norm", "k_norm"):
            specs.append(TensorSpec(f"{root}.self_attn.{name}.weight", "BF16", (128,)))
    assert len(specs) == 36945
    arrangement = writing.arrange_safetensors(writing.split_by_size(specs, 4_000_000_000))
    assert 110 <= len(arrangement.files) <= 125
    fill(Arrangement({}, arrangement.files, arrangement.trailers), {}, tmp_path)  # sparse: true headers, no data
    run = [sys.executable, "-c", HEADERS_OF_235B, str(tmp_path)]
    count, megabytes, seconds = subprocess.run(run, check=True, capture_output=True, text=True).stdout.split()
    assert int(count) == 36945
    assert int(megabytes) < 60, f"{megabytes} MB in {seconds} s"


def test_messages_name_one_line_per_problem(folder: Path) -> None:
    write_index(folder, {"gone": 1})
    assert re.fullmatch(r".* is not a whole safetensors checkpoint; .*:(\n  - \S+: .*)+", refusal(folder))
