"""What a safetensors folder holds: one file, or several with an index JSON that says which file holds which tensor.

Source: transformers 5.24, ``PreTrainedModel.save_pretrained``.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from sys import intern

from ..boxes import Box, Chunk, Shape, StoredTensor, TensorSpec
from ..errors import SourceError, enumerate_problems, few, short
from .contents import Contents
from .safetensors_header import MAX_HEADER, foreign_kind, parse_object, scan_header

SINGLE = "model.safetensors"
INDEX = SINGLE + ".index.json"
WARNING = "warning"
"""Key of ``Contents.metadata`` under which what is odd but not wrong is said."""
_ADAPTER = "adapter_model"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5,})-of-(?P<count>[0-9]{5,})\.safetensors")


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
        hostile = {file: problem for file in named if (problem := name_problem(file))}
        problems.extend(f"{INDEX}: the file name {file!r} {problem}" for file, problem in sorted(hostile.items()))
        unreadable.update(hostile)
        files = sorted(named - unreadable)
        _check_beside_index(present, files, problems)
    else:
        files = [_choose_file(folder, present)]
    unused = [name for name in present if name not in files]
    if unused and not problems:
        warnings.append(f"not read, because they are not part of the checkpoint: {few(unused)}")

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


def _list_files(folder: Path) -> list[str]:
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors") and name[0] != ".")
    except NotADirectoryError:
        raise SourceError(f"{folder} is a file; give the folder that holds the checkpoint") from None
    except OSError as error:
        raise SourceError(f"{folder} cannot be listed: {error.strerror}") from None
    odd = [name for name in names if not name.isprintable()]
    if odd:
        raise SourceError(f"{folder} has files with unprintable names; rename or remove them: {few(map(repr, odd))}")
    return names


def _read_index(path: Path, problems: list[str]) -> tuple[dict[str, str], object]:
    """The index's weight map, values of any text, and its ``total_size``, ``None`` if it has none."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_HEADER:
            raise SourceError(f"{path}: expected a JSON file of at most {MAX_HEADER} bytes; download it again")
        raw = path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}; download it again") from None
    foreign = foreign_kind(raw[:512])
    if foreign is not None:
        raise SourceError(f"{path} is {foreign}, not an index; download it again")
    try:
        document = parse_object(raw)
    except ValueError as error:
        raise SourceError(f"{path} is not the JSON object expected: {error}; download it again") from None
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{path}: weight_map should map tensors to files, found {short(weight_map)}")
    bad = {name: file for name, file in weight_map.items() if not isinstance(file, str)}
    problems.extend(f"{INDEX}: {name!r} is mapped to {short(file)}, not to a file name" for name, file in bad.items())
    metadata = document.get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return {name: file for name, file in weight_map.items() if name not in bad}, total_size


def name_problem(file: str) -> str | None:
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
        problems.append(f"{few(stray)}: in the folder, but the index does not mention them; left from another save?")


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
        yield f"{file}: does not exist; the index places {len(names)} tensors there ({few(map(repr, names), 2)})"


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
            f"{folder} holds {SINGLE} and {few(parts)}, and no {INDEX} to say which are meant: move one kind away"
        )
    if parts:
        raise SourceError(f"{folder} has no {INDEX}, only {_describe_parts(parts)}; download or copy what is missing")
    if others:
        raise SourceError(f"{folder} has no {SINGLE} and no {INDEX}; which of {few(others)} is meant? Keep only that")
    if any(map(_is_torch_shard, present)):
        raise SourceError(f"{folder} holds the shards of torch's distributed writer ({present[-1]}), not a whole model")
    if present:
        raise SourceError(f"{folder} holds an adapter ({few(present)}) and no model; give the model's folder")
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
        suffix = f" (missing: {few(map(str, missing))})" if missing else ""
        texts.append(f"{len(numbers)} of the {count} parts of {stem}{suffix}")
    return " and ".join(texts)
