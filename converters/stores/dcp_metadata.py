"""``.metadata`` of a DCP folder: read without torch and without executing anything, written without torch.

The classes are those of torch 2.13 (``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py``). What torch
uses of them when it loads: sizes, dtype, chunk boxes and storage places. ``layout``, ``requires_grad``,
``memory_format`` and ``pin_memory`` are deprecated there and never read; ``MetadataIndex.index`` is a search hint that
does not take part in equality; ``planner_data`` (flat key -> path in the nested state dict) serves loads without a
target state dict; ``storage_meta`` only names the writer's folder and a random id, so nothing is written there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from ..boxes import Box, Shape, TensorSpec
from ..dtypes import TORCH_NAME
from ..errors import SourceError
from .contents import PathTuple
from .pickle_writing import Call, Name, New, Pairs, dump
from .pickles import Callee, Record, Table, Unfit, load

VERSION = "1.0.0"
"""``CURRENT_DCP_VERSION`` of torch 2.13; folders of earlier releases carry none."""

MAX_BYTES = 1 << 29
"""Largest ``.metadata`` that is read: more than 2 million chunks at the 200 bytes that one takes."""

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_MAX_INT = 1 << 63
_CHUNK = itemgetter("offsets", "sizes")
_TENSOR = itemgetter("properties", "size", "chunks")
_INFO = itemgetter("relative_path", "offset", "length")


def _fqn_only(state: Mapping[str, object]) -> tuple[object]:
    return (state["fqn"],)


# Every dtype of torch 2.13, so that a tensor of one that is not read is refused by its own name.
_DTYPES = {
    *TORCH_NAME.values(),
    *("complex32", "complex64", "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2"),
    *("qint8", "quint8", "qint32", "quint4x2", "quint2x4", "bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
}


class TorchDtype(NamedTuple):
    """A dtype as a pickle names it: ``torch.<name>``."""

    name: str


DTYPE_NAMES: Table = {("torch", name): TorchDtype(name) for name in sorted(_DTYPES)}
"""The pickle names of all torch dtypes."""


def count(value: object) -> int:
    """``value``, if it is an ``int`` in ``[0, 2**63)``; else raises ``Unfit``."""
    if type(value) is not int or not 0 <= value < _MAX_INT:
        raise Unfit(f"a {type(value).__name__} or an impossible number stands where a size belongs")
    return value


def extent(value: object) -> Shape:
    """``value`` as a tuple, if it is a tuple or list of sizes; else raises ``Unfit``."""
    if type(value) is not tuple and type(value) is not list:
        raise Unfit(f"a {type(value).__name__} stands where a shape belongs")
    for item in value:
        if type(item) is not int or not 0 <= item < _MAX_INT:
            count(item)
    return tuple(value)


def _text(value: object) -> str:
    if type(value) is not str:
        raise Unfit(f"a {type(value).__name__} stands where a name belongs")
    return value


def _fields(record: Record, state: object, take: Callable[[Any], tuple[Any, ...]], size: int) -> tuple[Any, ...]:
    """The named fields of ``state``, a dict of ``size`` of them, which is emptied: the pickle's memo keeps it alive."""
    try:
        if type(state) is dict and len(state) == size:
            values = take(state)
            state.clear()
            return values
    except KeyError:
        pass
    raise Unfit(f"{type(record).__name__} does not have the fields that torch 2.13 gives it")


class ChunkStorageMetadata(Record):
    """Offsets and sizes of one chunk, in elements per dim."""

    __slots__ = ("offsets", "sizes")
    offsets: Shape
    sizes: Shape

    def build(self, state: object) -> None:
        """Fill from ``{"offsets": torch.Size, "sizes": torch.Size}``."""
        offsets, sizes = _fields(self, state, _CHUNK, 2)
        self.offsets, self.sizes = extent(offsets), extent(sizes)


class TensorProperties(Record):
    """Dtype and layout names of a tensor."""

    __slots__ = ("dtype", "layout")
    dtype: str
    layout: str

    def build(self, state: object) -> None:
        """Fill from ``(dtype, layout, requires_grad, memory format, pin_memory)``."""
        if type(state) is not tuple or len(state) != 5 or type(state[0]) is not TorchDtype:
            raise Unfit("TensorProperties does not have the fields that torch 2.13 gives it")
        self.dtype, self.layout = state[0].name, _text(state[1])


class TensorStorageMetadata(Record):
    """Properties, global size and chunks of one tensor."""

    __slots__ = ("chunks", "properties", "size")
    properties: TensorProperties
    size: Shape
    chunks: tuple[ChunkStorageMetadata, ...]

    def build(self, state: object) -> None:
        """Fill from ``{"properties": ..., "size": torch.Size, "chunks": [...]}``."""
        properties, size, chunks = _fields(self, state, _TENSOR, 3)
        if type(properties) is not TensorProperties or not hasattr(properties, "dtype") or type(chunks) is not list:
            raise Unfit("TensorStorageMetadata holds something that is not properties and chunks")
        if not all(type(chunk) is ChunkStorageMetadata and hasattr(chunk, "sizes") for chunk in chunks):
            raise Unfit("a tensor has a chunk without offsets and sizes")
        self.properties, self.size, self.chunks = properties, extent(size), tuple(chunks)
        # Tensors that share one long list would multiply the work of whoever walks their chunks.
        chunks.clear()


class BytesStorageMetadata(Record):
    """Marks an entry that is not a tensor."""

    __slots__ = ()


class MetadataIndex(Record):
    """Key of a storage place: FQN, and a chunk's offsets for tensors."""

    __slots__ = ("fqn", "offset")
    fqn: str
    offset: Shape | None

    def build(self, state: object) -> None:
        """Fill from ``{"fqn": ..., "index": hint, "offset": torch.Size, absent or None for bytes}``."""
        offset = None
        if type(state) is dict:
            state.pop("index", None)
            offset = state.pop("offset", None)
        (fqn,) = _fields(self, state, _fqn_only, 1)
        self.fqn, self.offset = _text(fqn), None if offset is None else extent(offset)


class StorageInfo(Record):
    """File, offset and length, in bytes, of one entry; names of the transforms applied to it."""

    __slots__ = ("length", "offset", "relative_path", "transforms")
    relative_path: str
    offset: int
    length: int
    transforms: tuple[str, ...]

    def build(self, state: object) -> None:
        """Fill from ``{"relative_path", "offset", "length"}`` and maybe ``"transform_descriptors"``."""
        transforms = state.pop("transform_descriptors", None) if type(state) is dict else None
        path, offset, length = _fields(self, state, _INFO, 3)
        self.relative_path, self.offset, self.length = _text(path), count(offset), count(length)
        self.transforms = _transforms(transforms) if transforms else ()


def _transforms(names: object) -> tuple[str, ...]:
    if type(names) is not tuple and type(names) is not list:
        raise Unfit(f"a {type(names).__name__} stands where the names of transforms belong")
    return tuple([_text(name) for name in names])


class StorageMeta(Record):
    """The writer's folder, ids and modules; none of it matters for the contents."""

    __slots__ = ()

    def build(self, state: object) -> None:
        """Drop everything."""


class _Root(Record):
    __slots__ = ("fields",)
    fields: dict[object, object]

    def build(self, state: object) -> None:
        if type(state) is not dict:
            raise Unfit("Metadata does not have the fields that torch 2.13 gives it")
        self.fields = state


class Metadata(NamedTuple):
    """What ``.metadata`` says, in plain types."""

    entries: Mapping[str, TensorStorageMetadata | BytesStorageMetadata]
    """FQN -> shape, dtype and chunks, or the mark of a non-tensor, in saved order."""
    places: Mapping[tuple[str, Shape | None], StorageInfo]
    """(FQN, chunk offsets; None for a non-tensor) -> file, offset, length."""
    paths: Mapping[str, PathTuple]
    """FQN -> path in the nested state dict, as far as the planner recorded it."""


def read_metadata(path: Path) -> Metadata:
    """Parse a ``.metadata`` file; raises ``SourceError`` for whatever is not exactly what torch writes there."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise SourceError(f"{path}: {size} bytes, where even a million chunks take less than {MAX_BYTES}")
        data = path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror})") from None
    root = load(data, _table(), str(path))
    if type(root) is not _Root or not hasattr(root, "fields"):
        raise SourceError(f"{path}: holds a {type(root).__name__.lstrip('_')}, not the Metadata of a DCP checkpoint")
    try:
        return _plain(root.fields)
    except Unfit as reason:
        raise SourceError(f"{path}: {reason}") from None


def _plain(fields: dict[object, object]) -> Metadata:
    version = fields.get("version")
    if version is not None and (type(version) is not str or not version.startswith("1.")):
        shown = version if type(version) is str else type(version).__name__
        raise Unfit(f"its version is {shown!r}; {VERSION!r} and folders without a version are read")
    entries, storage, paths = (fields.get(key) for key in ("state_dict_metadata", "storage_data", "planner_data"))
    if type(entries) is not dict or type(storage) is not dict:
        raise Unfit("state_dict_metadata or storage_data is not a dict; saved by another storage writer?")
    for fqn, entry in entries.items():
        if type(fqn) is not str or type(entry) not in (TensorStorageMetadata, BytesStorageMetadata):
            raise Unfit("state_dict_metadata maps something else than names to tensors and bytes")
        if type(entry) is TensorStorageMetadata and not hasattr(entry, "chunks"):
            raise Unfit(f"tensor {fqn!r} has no size and chunks")
    places: dict[tuple[str, Shape | None], StorageInfo] = {}
    for index, info in storage.items():
        if type(index) is not MetadataIndex or type(info) is not StorageInfo:
            raise Unfit("storage_data maps something else than indices to places; saved by another storage writer?")
        if not hasattr(index, "fqn") or not hasattr(info, "length"):
            raise Unfit("storage_data has an entry without contents")
        if places.setdefault((index.fqn, index.offset), info) is not info:
            raise Unfit(f"storage_data has two places for {index.fqn!r} at offsets {index.offset}")
    return Metadata(entries, places, _paths(paths))


def _paths(value: object) -> dict[str, PathTuple]:
    if type(value) is not dict:
        return {}
    return {
        fqn: path
        for fqn, path in value.items()
        if type(fqn) is str and type(path) is tuple and all(type(key) in (str, int) for key in path)
    }


def _table() -> Table:
    """Everything that torch 2.11 to 2.13 and Python 3.10 to 3.14 put into ``.metadata``; equal shapes are shared."""
    shapes: dict[Shape, Shape] = {}

    def size(args: tuple[object, ...]) -> Shape:
        shape = extent(args[0]) if args else ()
        return shapes.setdefault(shape, shape)

    table: dict[tuple[str, str], object] = dict(DTYPE_NAMES)
    table["torch", "Size"] = Callee(call=size)
    table["torch.serialization", "_get_layout"] = Callee(call=_only_text)
    encoding = Callee(call=_inert)
    table[_METADATA, "_MEM_FORMAT_ENCODING"] = encoding
    # Python 3.11 up to 3.11.3 pickled an enum member as getattr(its class, its name) (CPython pull request 26658).
    table["builtins", "getattr"] = Callee(call=lambda args: _enum_member(args, encoding))
    for module in ("pathlib", "pathlib._local"):
        for name in ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"):
            table[module, name] = Callee(call=_inert)
    table["collections", "OrderedDict"] = Callee(call=_empty_dict)
    makers: dict[str, Callable[[], Record]] = {
        "Metadata": _Root,
        "TensorStorageMetadata": TensorStorageMetadata,
        "BytesStorageMetadata": BytesStorageMetadata,
        "ChunkStorageMetadata": ChunkStorageMetadata,
        "TensorProperties": TensorProperties,
        "MetadataIndex": MetadataIndex,
        "StorageMeta": StorageMeta,
    }
    table.update({(_METADATA, name): Callee(new=maker) for name, maker in makers.items()})
    table[_FILESYSTEM, "_StorageInfo"] = Callee(new=StorageInfo)
    return table


def _only_text(args: tuple[object, ...]) -> str:
    return _text(args[0])


def _inert(args: tuple[object, ...]) -> None:
    """Stand-in for a path or a memory format, which nothing reads."""


def _empty_dict(args: tuple[object, ...]) -> dict[object, object]:
    if args:
        raise Unfit("an OrderedDict made from arguments, as torch never writes it")
    return {}


def _enum_member(args: tuple[object, ...], encoding: Callee) -> None:
    if len(args) != 2 or args[0] is not encoding or type(args[1]) is not str:
        raise Unfit("it calls builtins.getattr on something that is not a memory format; nothing was executed")


class Placed(NamedTuple):
    """One chunk and where its archive lies."""

    box: Box
    file: str
    offset: int
    """Bytes from the file's start to the archive."""
    length: int
    """Bytes of the archive."""


def metadata_bytes(
    tensors: Callable[[], Iterable[tuple[TensorSpec, Sequence[Placed]]]],
    blobs: Mapping[str, Placed],
    paths: Mapping[str, PathTuple],
) -> bytes:
    """``.metadata`` for ``tensors`` and non-tensor ``blobs`` (their boxes are ignored), equal to torch's in content.

    ``tensors`` is called twice. An FQN without an entry in ``paths`` sits at top level of the state dict, as in
    ``dcp.save({fqn: tensor})``.
    """

    def entries() -> Iterable[tuple[object, object]]:
        for fqn in blobs:
            yield fqn, New(Name(_METADATA, "BytesStorageMetadata"))
        for spec, chunks in tensors():
            state = {
                "properties": _properties(spec.dtype),
                "size": _size(spec.shape),
                "chunks": [_chunk(placed.box) for placed in chunks],
            }
            yield spec.name, New(Name(_METADATA, "TensorStorageMetadata"), state)

    def places() -> Iterable[tuple[object, object]]:
        for fqn, placed in blobs.items():
            yield _index({"fqn": fqn, "index": None}), _info(placed)
        for spec, chunks in tensors():
            for hint, placed in enumerate(chunks):
                yield _index({"fqn": spec.name, "index": hint, "offset": _size(placed.box.start)}), _info(placed)

    names = [*blobs, *(spec.name for spec, _ in tensors())]
    storage_meta: dict[str, object] = {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}
    root = {
        "state_dict_metadata": Pairs(entries()),
        "planner_data": Pairs((name, paths.get(name, (name,))) for name in names),
        "storage_data": Pairs(places()),
        "storage_meta": New(Name(_METADATA, "StorageMeta"), storage_meta),
        "version": VERSION,
    }
    return dump(New(Name(_METADATA, "Metadata"), root))


def _size(shape: Shape) -> Call:
    return Call(Name("torch", "Size"), (shape,))


def _chunk(box: Box) -> New:
    return New(Name(_METADATA, "ChunkStorageMetadata"), {"offsets": _size(box.start), "sizes": _size(box.size)})


def _index(state: dict[str, object]) -> New:
    return New(Name(_METADATA, "MetadataIndex"), state)


def _info(placed: Placed) -> New:
    state = {"relative_path": placed.file, "offset": placed.offset, "length": placed.length}
    return New(Name(_FILESYSTEM, "_StorageInfo"), state)


def _properties(dtype: str) -> New:
    layout = Call(Name("torch.serialization", "_get_layout"), ("torch.strided",))
    memory_format = Call(Name(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    state = (Name("torch", TORCH_NAME[dtype]), layout, False, memory_format, False)
    return New(Name(_METADATA, "TensorProperties"), state)
