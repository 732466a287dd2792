"""Safetensors folders: read their headers strictly, lay out new ones byte for byte as the reference library would.

A file is an 8-byte little-endian length, a JSON header of that length, then the data. The header maps each tensor to
``dtype``, ``shape`` and ``data_offsets`` (bytes, counted from the start of the data). A checkpoint is one file, or
several with an index JSON that says which file holds which tensor. Format and limits: safetensors 0.8, ``SafeTensors``
and ``Metadata``; index: transformers 5.24, ``PreTrainedModel.save_pretrained``.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from sys import intern
from typing import NamedTuple, TypeGuard

from ..boxes import Box, Chunk, Shape, StoredTensor, TensorSpec
from ..dtypes import ITEMSIZE
from ..errors import DestinationError, MappingError, SourceError, enumerate_problems
from .contents import Arrangement, Contents, OutputFile

SINGLE = "model.safetensors"
INDEX = SINGLE + ".index.json"
WARNING = "warning"
"""Key of ``Contents.metadata`` under which what is odd but not wrong is said."""

_MAX_HEADER = 100_000_000  # bytes; the reference library refuses longer headers
_MAX_DIMS = 64  # torch's limit
_ADAPTER = "adapter_model"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5,})-of-(?P<count>[0-9]{5,})\.safetensors")
_PT: Mapping[str, str] = {"format": "pt"}
_CODES = {code: code for code in ITEMSIZE}  # one string object per dtype, however many tensors have it
_DTYPE_ORDER = (
    *("U64", "I64", "F64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"),
)
"""The order of dtypes inside a file, found by letting safetensors 0.8 write one tensor of each."""


class Entry(NamedTuple):
    """A tensor in one file; ``begin`` and ``end`` in bytes from the start of the file's data."""

    dtype: str
    shape: Shape
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """The checked header of one file. ``tensors`` is in file order and covers the data without hole or overlap."""

    tensors: Mapping[str, Entry]
    metadata: Mapping[str, str]
    data_start: int
    size: int
    """Bytes of the whole file."""


def read_header(path: Path) -> Header:
    """The header of ``path``, checked against the file's size.

    Stricter than the library: a repeated key and a dtype outside ``dtypes.ITEMSIZE`` are refused too. Raises
    ``SourceError`` with every problem of the file.
    """
    problems: list[str] = []
    header = scan_header(path, path.name, problems)
    if header is None:
        raise SourceError(enumerate_problems(f"{path} cannot be used; download or copy it again:", problems))
    return header


def read_safetensors(folder: Path) -> Contents:
    """What the safetensors folder holds, from its headers and index; symlinked files are followed.

    With an index, the index is the authority: each of its tensors must be in the file that it names, and no other
    tensor may be there. Without one, ``model.safetensors`` is read; failing that, a lone ``*.safetensors`` file
    under any other name, when it is not an adapter and its name does not say that it is one part of several. What is
    ignored beside them, and an index ``total_size`` that is not the sum of the tensors, is said under ``WARNING``.
    Raises ``SourceError`` with all problems at once.
    """
    present = _list_files(folder)
    problems: list[str] = []
    warnings: list[str] = []
    weight_map: dict[str, str] | None = None
    total_size: object = None
    unreadable: set[str] = set()
    if os.path.lexists(folder / INDEX):
        weight_map, total_size = _read_index(folder / INDEX, problems)
        named = set(weight_map.values())
        hostile = {file: problem for file in named if (problem := _name_problem(file))}
        problems.extend(f"{INDEX}: the file name {file!r} {problem}" for file, problem in sorted(hostile.items()))
        unreadable.update(hostile)
        files = sorted(named - unreadable)
        _check_beside_index(present, files, problems)
    else:
        files = [_choose_file(folder, present)]
    unused = [name for name in present if name not in files]
    if unused and not problems:
        warnings.append(f"not read, because they are not part of the checkpoint: {_few(unused)}")

    tensors: dict[str, StoredTensor] = {}
    sizes: dict[str, int] = {}
    metadata: dict[str, str] = {}
    boxes: dict[Shape, Box] = {}
    absent: set[str] = set()
    for file in files:
        if not os.path.lexists(folder / file):
            absent.add(file)
            continue
        header = scan_header(folder / file, file, problems)
        if header is None:
            unreadable.add(file)
            continue
        sizes[file] = header.size
        for key, value in header.metadata.items():
            metadata.setdefault(key, value)
        for name, entry in header.tensors.items():
            listed = file if weight_map is None else weight_map.get(name)
            if listed == file:
                box = boxes.setdefault(entry.shape, Box.whole(entry.shape))
                chunk = Chunk(box, file, header.data_start + entry.begin)
                name = intern(name)  # a layout's names are the same texts
                tensors[name] = StoredTensor(TensorSpec(name, entry.dtype, box.size), (chunk,))
            elif listed is None:
                problems.append(f"{file}: holds {name!r}, which the index does not list")
            else:
                problems.append(f"{file}: holds {name!r} too, which the index places in {listed}")
    if weight_map is not None:
        problems.extend(_check_listed(weight_map, tensors, absent, unreadable))
        total = sum(tensor.spec.nbytes for tensor in tensors.values())
        if total_size is not None and total_size != total:
            warnings.append(f"{INDEX} gives a total_size of {total_size!r}; the tensors it lists take {total} bytes")
    if problems:
        heading = f"{folder} is not a whole safetensors checkpoint; download or copy again what is named here:"
        raise SourceError(enumerate_problems(heading, problems))
    metadata.pop(WARNING, None)  # a file does not speak in our name
    if warnings:
        metadata[WARNING] = "; ".join(warnings)
    return Contents(tensors, sizes, metadata=metadata)


def arrange_safetensors(
    files: Sequence[tuple[str, Sequence[TensorSpec]]],
    *,
    metadata: Mapping[str, str] | None = _PT,
    index: bool | None = None,
    total_parameters: int | None = None,
) -> Arrangement:
    """Where every byte of ``files`` (name and tensors of each) goes.

    Each file is what ``safetensors.torch.save_file(tensors, path, metadata=metadata)`` of 0.8 writes, byte for byte,
    except that several metadata keys keep the given order (the library's is random). ``index=None`` writes an index
    for more than one file; it is what transformers 5.24 writes. ``total_parameters`` (elements) defaults to those
    written. Raises ``MappingError`` for names that clash or cannot be written, ``DestinationError`` for a file with
    more tensors than a header may list.
    """
    _check_writable(files)
    tensors: dict[str, StoredTensor] = {}
    outputs: list[OutputFile] = []
    boxes: dict[Shape, Box] = {}
    for file, specs in files:
        ordered = sorted(specs, key=_file_order)
        position = len(_encode_header(ordered, metadata))
        if position - 8 > _MAX_HEADER:
            raise DestinationError(
                f"{file}: a header of {len(specs)} tensors takes {position - 8} bytes, and readers stop at "
                f"{_MAX_HEADER}; choose a smaller shard size"
            )
        for spec in ordered:
            box = boxes.setdefault(spec.shape, Box.whole(spec.shape))
            tensors[spec.name] = StoredTensor(spec, (Chunk(box, file, position),))
            position += spec.nbytes
        outputs.append(OutputFile(file, position, partial(_seal, ordered, metadata)))
    with_index = len(files) > 1 if index is None else index
    trailers = partial(_write_index, tensors, total_parameters) if with_index else _no_trailers
    return Arrangement(tensors, tuple(outputs), trailers)


def split_by_size(specs: Iterable[TensorSpec], shard_bytes: int) -> list[tuple[str, list[TensorSpec]]]:
    """Files of at most ``shard_bytes`` of tensor data, filled in the given order; a larger tensor is alone in its own.

    A file that is open when a too large tensor comes along goes on being filled after it. Same rule and names as
    huggingface_hub 1.33, ``split_state_dict_into_shards_factory``.
    """
    shards: list[list[TensorSpec]] = []
    current: list[TensorSpec] = []
    used = 0
    for spec in specs:
        if spec.nbytes > shard_bytes:
            shards.append([spec])
            continue
        if used + spec.nbytes > shard_bytes:
            shards.append(current)
            current, used = [], 0
        current.append(spec)
        used += spec.nbytes
    if current or not shards:
        shards.append(current)
    if len(shards) == 1:
        return [(SINGLE, shards[0])]
    return [(f"model-{i:05d}-of-{len(shards):05d}.safetensors", shard) for i, shard in enumerate(shards, 1)]


def split_like(
    specs: Iterable[TensorSpec], weight_map: Mapping[str, str], *, may_lack: Collection[str] = ()
) -> list[tuple[str, list[TensorSpec]]] | None:
    """``specs`` in the files that ``weight_map`` (tensor -> file) gives them, files by name; ``None`` if that fails.

    It fails when a tensor is new, when one outside ``may_lack`` is gone, when a file would be left without any (its
    siblings' ``-of-n`` would be wrong), or when a file lies in a subfolder. A lone file becomes ``model.safetensors``.
    """
    files: dict[str, list[TensorSpec]] = {file: [] for file in sorted(set(weight_map.values()))}
    missing = set(weight_map)
    for spec in specs:
        file = weight_map.get(spec.name)
        if file is None:
            return None
        files[file].append(spec)
        missing.discard(spec.name)
    if not missing <= set(may_lack) or not files or not all(files.values()):
        return None
    if any(_name_problem(file) or "/" in file for file in files):
        return None
    return list(files.items()) if len(files) > 1 else [(SINGLE, next(iter(files.values())))]


def scan_header(path: Path, label: str, problems: list[str]) -> Header | None:
    """As ``read_header``, but what is wrong is added to ``problems``, each beginning with ``label``: then ``None``."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            problems.append(f"{label}: is not a file")
            return None
        with path.open("rb") as stream:
            head = stream.read(512)
            length = int.from_bytes(head[:8], "little")
            if len(head) < 8 or length > min(_MAX_HEADER, status.st_size - 8):
                problems.append(f"{label}: {_start_problem(head, status.st_size)}")
                return None
            stream.seek(8)
            raw = stream.read(length)
    except FileNotFoundError:
        problems.append(f"{label}: does not exist" + (" (a link to nowhere)" if path.is_symlink() else ""))
        return None
    except (OSError, ValueError) as error:
        problems.append(f"{label}: cannot be read: {error}")
        return None
    try:
        document = parse_object(raw)
    except ValueError as error:
        problems.append(f"{label}: the header ({length} bytes) is not the JSON object expected: {error}")
        return None
    found: list[str] = []
    metadata = _read_metadata(document.pop("__metadata__", None), found)
    entries = [(name, entry) for name, value in document.items() if (entry := _read_entry(name, value, found))]
    if not found:
        entries.sort(key=lambda item: (item[1].begin, item[1].end))
        found.extend(_check_coverage(entries, status.st_size - 8 - length))
    if found:
        problems.extend(f"{label}: {problem}" for problem in found)
        return None
    return Header(dict(entries), metadata, 8 + length, status.st_size)


def parse_object(raw: bytes | str) -> dict[str, object]:
    """The JSON object in ``raw``; ``ValueError`` for anything else, for a repeated key, for text that is not UTF-8."""
    try:
        text = raw if isinstance(raw, str) else raw.decode()
        document = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError(f"found a {type(document).__name__} at the top")
    return document


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key!r} occurs twice")
            seen.add(key)
    for key in result:
        if not _is_text(key):
            raise ValueError(f"the key {key!r} is not text")
    return result


def _refuse_constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")


def _foreign_kind(head: bytes) -> str | None:
    """What a file that begins with ``head`` is instead of what its name says."""
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer (`git lfs pull` fetches the file)"
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html", b"<?xml")):
        return "a web page (a login or error page was saved instead of the file)"
    if head.startswith(b"PK\x03\x04"):
        return "a zip archive (as torch.save writes; save it as safetensors first)"
    return None


def _start_problem(head: bytes, size: int) -> str:
    """Why a file of ``size`` bytes that begins with ``head`` has no whole header."""
    foreign = _foreign_kind(head)
    if foreign is not None:
        return f"is {foreign}, not the tensors themselves ({size} bytes)"
    if len(head) < 8:
        return f"has {size} bytes; even the header's length takes 8"
    length = int.from_bytes(head[:8], "little")
    if length > _MAX_HEADER:
        return f"gives its header a length of {length} bytes, over the limit of {_MAX_HEADER}: not a safetensors file?"
    missing = 8 + length - size
    return f"ends inside its header: at least {missing} bytes are missing ({size} bytes, header to byte {8 + length})"


def _read_metadata(value: object, problems: list[str]) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        problems.append(f"__metadata__ should map strings to strings, found a {type(value).__name__}")
        return {}
    texts = {key: text for key, text in value.items() if isinstance(text, str) and _is_text(text)}
    if len(texts) < len(value):
        bad = (repr(key) for key in value if key not in texts)
        problems.append(f"__metadata__ should map strings to strings, and does not for {_few(bad)}")
    return texts


def _read_entry(name: str, value: object, problems: list[str]) -> Entry | None:
    if not isinstance(value, dict):
        problems.append(f"{name!r}: expected dtype, shape and data_offsets, found a {type(value).__name__}")
        return None
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        problems.append(f"{name!r}: dtype {_short(dtype)} is not one that is read here ({', '.join(ITEMSIZE)})")
        return None
    if not are_sizes(shape) or len(shape) > _MAX_DIMS:
        problems.append(f"{name!r}: shape should be a list of up to {_MAX_DIMS} sizes, found {_short(shape)}")
        return None
    if not are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        problems.append(f"{name!r}: data_offsets should be [begin, end], found {_short(offsets)}")
        return None
    begin, end = offsets
    expected = math.prod(shape) * ITEMSIZE[dtype]
    if end - begin != expected:
        problems.append(
            f"{name!r}: {dtype} {_short(shape)} takes {expected} bytes, data_offsets {offsets} hold {end - begin}"
        )
        return None
    return Entry(_CODES[dtype], tuple(shape), begin, end)


def are_sizes(value: object) -> TypeGuard[list[int]]:
    """Whether ``value`` is a list of sizes or offsets: integers (``True`` is none) of 0 up to 2**63."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_coverage(entries: Sequence[tuple[str, Entry]], data_bytes: int) -> Iterator[str]:
    position, before = 0, "the header"
    cut: str | None = None
    for name, entry in entries:
        if entry.begin < position:
            yield f"{name!r}: its data, bytes {entry.begin} to {entry.end}, overlaps that of {before}"
        elif entry.begin > position:
            yield f"{name!r}: the {entry.begin - position} bytes before it belong to no tensor"
        if entry.end >= position:
            position, before = entry.end, repr(name)
        if cut is None and entry.end > data_bytes:
            cut = name
    if cut is not None:
        yield f"is truncated: {position - data_bytes} bytes are missing at its end, {cut!r} is the first tensor cut"
    elif position < data_bytes:
        yield f"is {data_bytes - position} bytes too long: they follow the last tensor, {before}"


def _list_files(folder: Path) -> list[str]:
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors") and name[0] != ".")
    except NotADirectoryError:
        raise SourceError(f"{folder} is a file; give the folder that holds the checkpoint") from None
    except OSError as error:
        raise SourceError(f"{folder} cannot be listed: {error.strerror}") from None
    odd = [name for name in names if not name.isprintable()]
    if odd:
        raise SourceError(f"{folder} has files with unprintable names; rename or remove them: {_few(map(repr, odd))}")
    return names


def _read_index(path: Path, problems: list[str]) -> tuple[dict[str, str], object]:
    """The index's weight map, values of any text, and its ``total_size``, ``None`` if it has none."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_HEADER:
            raise SourceError(f"{path}: expected a JSON file of at most {_MAX_HEADER} bytes; download it again")
        raw = path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}; download it again") from None
    foreign = _foreign_kind(raw[:512])
    if foreign is not None:
        raise SourceError(f"{path} is {foreign}, not an index; download it again")
    try:
        document = parse_object(raw)
    except ValueError as error:
        raise SourceError(f"{path} is not the JSON object expected: {error}; download it again") from None
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{path}: weight_map should map tensors to files, found {_short(weight_map)}")
    bad = {name: file for name, file in weight_map.items() if not isinstance(file, str)}
    problems.extend(f"{INDEX}: {name!r} is mapped to {_short(file)}, not to a file name" for name, file in bad.items())
    metadata = document.get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return {name: file for name, file in weight_map.items() if name not in bad}, total_size


def _name_problem(file: str) -> str | None:
    """Why ``file`` is not the relative path of a safetensors file below a folder; ``None`` if it is one."""
    if not file.isprintable() or not file or "\\" in file:
        return "is empty or has characters that no file name needs"
    if any(part in ("", ".", "..") for part in file.split("/")):
        return "leaves the folder or is not in its plainest form"
    return None if file.endswith(".safetensors") else "is not a .safetensors file"


def _check_beside_index(present: Sequence[str], files: Collection[str], problems: list[str]) -> None:
    if SINGLE in present and SINGLE not in files:
        problems.append(f"{SINGLE}: lies beside an index that does not mention it: move one of the two away")
    stray = [name for name in present if name not in files and _is_part(name)]
    if stray:
        problems.append(f"{_few(stray)}: in the folder, but the index does not mention them; left from another save?")


def _check_listed(
    weight_map: Mapping[str, str], tensors: Mapping[str, StoredTensor], absent: Collection[str], skip: Collection[str]
) -> Iterator[str]:
    lost: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if file in absent:
            lost.setdefault(file, []).append(name)
        elif name not in tensors and file not in skip:
            yield f"{file}: does not hold {name!r}, which the index places there"
    for file, names in sorted(lost.items()):
        yield f"{file}: does not exist; the index places {len(names)} tensors there ({_few(map(repr, names), 2)})"


def _choose_file(folder: Path, present: Sequence[str]) -> str:
    """The one file that is the checkpoint, in a folder without an index."""
    parts = [name for name in present if _is_part(name)]
    others = [name for name in present if not name.startswith(_ADAPTER) and not _is_torch_shard(name)]
    if SINGLE in present and not parts:
        return SINGLE
    if len(others) == 1 and (not parts or _whole_part(parts[0])):
        return others[0]
    if SINGLE in present:
        raise SourceError(
            f"{folder} holds {SINGLE} and {_few(parts)}, and no {INDEX} to say which are meant: move one kind away"
        )
    if parts:
        raise SourceError(f"{folder} has no {INDEX}, only {_describe_parts(parts)}; download or copy what is missing")
    if others:
        raise SourceError(f"{folder} has no {SINGLE} and no {INDEX}; which of {_few(others)} is meant? Keep only that")
    if any(map(_is_torch_shard, present)):
        raise SourceError(f"{folder} holds the shards of torch's distributed writer ({present[-1]}), not a whole model")
    if present:
        raise SourceError(f"{folder} holds an adapter ({_few(present)}) and no model; give the model's folder")
    raise SourceError(f"{folder} holds no .safetensors file; pickled weights (.bin, .pt) must be saved as such first")


def _is_torch_shard(name: str) -> bool:
    return name.startswith("shard-") and _PART.fullmatch(name) is not None


def _is_part(name: str) -> bool:
    return _PART.fullmatch(name) is not None and not name.startswith(("shard-", _ADAPTER))


def _whole_part(name: str) -> bool:
    match = _PART.fullmatch(name)
    return match is not None and int(match["number"]) == int(match["count"]) == 1


def _describe_parts(parts: Sequence[str]) -> str:
    """How many parts of how many there are, per series: ``5 of the 118 parts of model (missing: ...)``."""
    series: dict[tuple[str, int], set[int]] = {}
    for match in filter(None, map(_PART.fullmatch, parts)):
        series.setdefault((match["stem"], int(match["count"])), set()).add(int(match["number"]))
    texts = []
    for (stem, count), numbers in series.items():
        missing = [number for number in range(1, min(count, 10**5) + 1) if number not in numbers]
        suffix = f" (missing: {_few(map(str, missing))})" if missing else ""
        texts.append(f"{len(numbers)} of the {count} parts of {stem}{suffix}")
    return " and ".join(texts)


def _few(items: Iterable[str], limit: int = 5) -> str:
    names = list(items)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_writable(files: Sequence[tuple[str, Sequence[TensorSpec]]]) -> None:
    problems: list[str] = []
    holder: dict[str, str] = {}
    outputs: set[str] = set()
    for file, specs in files:
        if _name_problem(file) or "/" in file or file in outputs:
            problems.append(f"{file!r}: is named twice, or is not the plain name of a .safetensors file")
        outputs.add(file)
        for spec in specs:
            if spec.name in holder:
                problems.append(f"{spec.name!r}: occurs twice, in {holder[spec.name]} and in {file}")
            elif spec.name == "__metadata__" or not _is_text(spec.name):
                problems.append(f"{spec.name!r}: a header cannot hold a tensor of this name")
            elif spec.dtype not in ITEMSIZE:
                problems.append(f"{spec.name!r}: dtype {spec.dtype!r} is not one that is written here")
            holder[spec.name] = file
    if problems:
        raise MappingError(enumerate_problems("these cannot be written as safetensors:", problems))


def _is_text(name: str) -> bool:
    """Whether ``name`` can be written as UTF-8: JSON escapes can make strings that cannot, of lone surrogates."""
    return name.isascii() or not any("\ud800" <= char <= "\udfff" for char in name)


def _file_order(spec: TensorSpec) -> tuple[int, str]:
    return _DTYPE_ORDER.index(spec.dtype), spec.name


def _encode_header(ordered: Sequence[TensorSpec], metadata: Mapping[str, str] | None) -> bytes:
    """Length and JSON of a file that holds ``ordered`` back to back, padded with spaces to 8 bytes."""
    items: list[str] = []
    if metadata is not None:
        items.append('"__metadata__":' + json.dumps(dict(metadata), ensure_ascii=False, separators=(",", ":")))
    begin = 0
    for spec in ordered:
        end = begin + spec.nbytes
        shape = ",".join(map(str, spec.shape))
        name = json.dumps(spec.name, ensure_ascii=False)
        items.append(f'{name}:{{"dtype":"{spec.dtype}","shape":[{shape}],"data_offsets":[{begin},{end}]}}')
        begin = end
    raw = ("{" + ",".join(items) + "}").encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def _seal(ordered: Sequence[TensorSpec], metadata: Mapping[str, str] | None) -> Iterator[tuple[int, bytes]]:
    yield 0, _encode_header(ordered, metadata)


def _no_trailers() -> Iterator[tuple[str, bytes]]:
    return iter(())


def _write_index(tensors: Mapping[str, StoredTensor], total_parameters: int | None) -> Iterator[tuple[str, bytes]]:
    if total_parameters is None:
        total_parameters = sum(math.prod(tensor.spec.shape) for tensor in tensors.values())
    sizes = {
        "total_parameters": total_parameters,
        "total_size": sum(tensor.spec.nbytes for tensor in tensors.values()),
    }
    weight_map = {name: tensor.chunks[0].file for name, tensor in tensors.items()}
    document = {"metadata": sizes, "weight_map": weight_map}
    yield INDEX, (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
