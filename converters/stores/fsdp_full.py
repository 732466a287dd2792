"""Whole tensors in pickled files: ``pytorch_model_fsdp.bin``, and ``pytorch_model.bin`` in one or several files.

The first is what accelerate and the Trainer save with ``FULL_STATE_DICT`` (accelerate 1.15, ``utils/fsdp_utils.py``),
the others what transformers saved before safetensors: ``pytorch_model-00001-of-00002.bin`` and an index JSON that maps
each tensor to its file. Names are the hub's, or those that transformers 5 has in memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from sys import intern

from ..boxes import Box, Chunk, Shape, StoredTensor, TensorSpec
from ..config_json import read_json_object
from ..errors import SourceError, enumerate_problems
from .contents import Contents
from .torch_archives import read_torch_file

INDEX = "pytorch_model.bin.index.json"
SINGLES = ("pytorch_model_fsdp.bin", "pytorch_model.bin")

_PART = re.compile(r"pytorch_model[A-Za-z0-9_.-]*\.bin")


def read_full(folder: Path) -> Contents:
    """What the pickled files in ``folder`` hold, from their zip headers and pickles; no tensor is read.

    With an index, the index is the authority: each of its tensors is in the file that it names, and no other tensor may
    be there.

    Raises:
        SourceError: files are missing, damaged, legacy or hostile, there are two checkpoints, tensors are not where the
            index has them, or a file holds one rank's part of a tensor; all problems at once.
    """
    problems: list[str] = []
    weight_map: Mapping[str, str] | None = None
    found = [name for name in (*SINGLES, INDEX) if os.path.lexists(folder / name)]
    if len(found) != 1:
        if found:
            raise SourceError(f"{folder} holds {' and '.join(found)}: keep one of them")
        raise SourceError(f"{folder} has none of {', '.join(SINGLES)} and {INDEX}")
    if found == [INDEX]:
        weight_map = _read_index(folder / INDEX)
        files = sorted(set(weight_map.values()))
    else:
        files = found
    tensors: dict[str, StoredTensor] = {}
    sizes: dict[str, int] = {}
    others: dict[str, str] = {}
    boxes: dict[Shape, Box] = {}
    for file in files:
        if not os.path.lexists(folder / file):
            problems.append(f"{file}: is missing")
            continue
        try:
            content = read_torch_file(folder / file)
        except SourceError as error:
            problems.append(str(error))
            continue
        sizes[file] = content.size
        others |= content.others
        for name, saved in content.tensors.items():
            listed = file if weight_map is None else weight_map.get(name)
            if listed is None:
                problems.append(f"{file}: holds {name!r}, which the index does not list")
            elif listed != file:
                problems.append(f"{file}: holds {name!r} too, which the index places in {listed}")
            elif saved.spread is not None and len(saved.spread.grid.ranks) > 1:
                problems.append(f"{file}: {name!r} is one rank's part of {saved.spread}, not a whole tensor")
            else:
                box = boxes.setdefault(saved.shape, Box.whole(saved.shape))
                spec = TensorSpec(intern(name), saved.dtype, box.size)
                tensors[spec.name] = StoredTensor(spec, (Chunk(box, file, saved.offset),))
    if weight_map is not None:
        problems += [
            f"{file}: lacks {name!r}, which the index places there"
            for name, file in weight_map.items()
            if name not in tensors and file in sizes
        ]
    if problems:
        heading = f"{folder} is not a whole checkpoint; download or copy again what is named here:"
        raise SourceError(enumerate_problems(heading, problems))
    return Contents(tensors, sizes, others)


def _read_index(path: Path) -> dict[str, str]:
    """Tensor -> file. File names are hostile: only the names that transformers gives are taken."""
    document, _ = read_json_object(path)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{path}: has no weight_map of tensors to files")
    problems = [
        f"{name!r} is mapped to {file!r}, not to a file named pytorch_model*.bin beside it"
        for name, file in weight_map.items()
        if not isinstance(file, str) or not _PART.fullmatch(file)
    ]
    if problems:
        raise SourceError(enumerate_problems(f"{path} names files that are not read:", problems))
    return weight_map
