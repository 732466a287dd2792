"""Lay out a new safetensors folder, byte for byte as the reference library would write it.

A checkpoint is one file, or several with an index JSON that says which file holds which tensor. Files: safetensors 0.8,
``safetensors.torch.save_file``; index: transformers 5.24, ``PreTrainedModel.save_pretrained``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

from ..boxes import Box, Chunk, Shape, StoredTensor, TensorSpec
from ..dtypes import ITEMSIZE
from ..errors import DestinationError, MappingError, enumerate_problems
from .contents import Arrangement, OutputFile
from .safetensors import INDEX, SINGLE, name_problem
from .safetensors_header import MAX_HEADER, is_text

_PT: Mapping[str, str] = {"format": "pt"}
_DTYPE_ORDER = (
    *("U64", "I64", "F64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"),
)
"""The order of dtypes inside a file, found by letting safetensors 0.8 write one tensor of each."""


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
        if position - 8 > MAX_HEADER:
            raise DestinationError(
                f"{file}: a header of {len(specs)} tensors takes {position - 8} bytes, and readers stop at "
                f"{MAX_HEADER}; choose a smaller shard size"
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
    if any(name_problem(file) or "/" in file for file in files):
        return None
    return list(files.items()) if len(files) > 1 else [(SINGLE, next(iter(files.values())))]


def _check_writable(files: Sequence[tuple[str, Sequence[TensorSpec]]]) -> None:
    problems: list[str] = []
    holder: dict[str, str] = {}
    outputs: set[str] = set()
    for file, specs in files:
        if name_problem(file) or "/" in file or file in outputs:
            problems.append(f"{file!r}: is named twice, or is not the plain name of a .safetensors file")
        outputs.add(file)
        for spec in specs:
            if spec.name in holder:
                problems.append(f"{spec.name!r}: occurs twice, in {holder[spec.name]} and in {file}")
            elif spec.name == "__metadata__" or not is_text(spec.name):
                problems.append(f"{spec.name!r}: a header cannot hold a tensor of this name")
            elif spec.dtype not in ITEMSIZE:
                problems.append(f"{spec.name!r}: dtype {spec.dtype!r} is not one that is written here")
            holder[spec.name] = file
    if problems:
        raise MappingError(enumerate_problems("these cannot be written as safetensors:", problems))


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
