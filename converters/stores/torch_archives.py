"""A ``torch.save`` file of many tensors (``.pt``, ``.bin``): which tensors, and where their elements lie in the file.

The file is a zip archive of stored records: ``data.pkl`` describes the objects, ``data/<key>`` holds each storage. The
pickle runs through an allow-list (``pickles.load``); nothing outside it is made or called. Nested dicts are flattened
with dots. A DTensor is this rank's local tensor and its ``Spread`` (``dtensors``).

Source: torch 2.13, ``torch/serialization.py`` (``_save``), ``torch/_utils.py`` (``_rebuild_*``).
"""

from __future__ import annotations

import math
import os
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from sys import intern
from typing import NamedTuple

from ..boxes import Shape
from ..dtypes import TORCH_NAME
from ..errors import SourceError
from .dtensors import DTENSOR, DTENSOR_TABLE, DistributedRef, Grid, Mesh, Spread, rebuild
from .pickles import Callee, Record, Table, Unfit, load
from .torch_zip import TENSOR_TABLE, Archive, TensorRef, dims, place, storage_ref

LARGEST_PICKLE = 1 << 27
"""Bytes of a ``data.pkl``; a DTensor takes some 600, and the largest model has 36,945 tensors."""

_LARGEST_DIRECTORY = 1 << 26
_LONGEST_NAME = 512
_DEEPEST = 16
_MOST_RANKS = 1 << 22


class SavedTensor(NamedTuple):
    """A tensor in a file: what it is, and where its elements lie, contiguous and row-major."""

    dtype: str
    shape: Shape
    """Of what the file holds; of a DTensor, the local part."""
    offset: int
    """Bytes from the file's start to the first element."""
    spread: Spread | None = None
    """Of a DTensor: the whole tensor and how it lies on the mesh."""


@dataclass(frozen=True, slots=True)
class TorchFile:
    """What one ``torch.save`` file holds."""

    size: int
    """Bytes of the file."""
    tensors: dict[str, SavedTensor]
    """Flattened name -> tensor, in saved order."""
    others: dict[str, str]
    """Flattened name -> one-line description, of what is no tensor."""
    writers: frozenset[int | None]
    """The ranks that wrote it, as its device meshes say: none, or one; ``None`` for an impossible one."""


class Plain(dict[object, object], Record):
    """An ``OrderedDict``; its attributes (a state dict's ``_metadata``: module versions) are dropped."""

    def build(self, state: object) -> None:
        """Drop them."""


def read_torch_file(path: Path) -> TorchFile:
    """The tensors of one file. Of the data only zip headers, ``data.pkl`` and the ranks of device meshes are read.

    Raises:
        SourceError: not a whole zip archive of ``torch.save``, a legacy file, a name outside the allow-list, a tensor
            that is not dense and contiguous, or anything else that torch does not write.
    """
    with open_torch_file(path) as archive:
        tensors: dict[str, SavedTensor] = {}
        others: dict[str, str] = {}
        writers: set[int | None] = set()
        resolve = _resolver(archive, writers)
        try:
            for name, leaf in flatten(load_pickle(archive)):
                if name in tensors or name in others:
                    raise Unfit(f"it holds {name!r} twice: as one key and as keys of nested dicts")
                found = resolve(leaf)
                if found is None:
                    others[name] = describe_value(leaf)
                else:
                    tensors[intern(name)] = found
        except Unfit as reason:
            raise SourceError(f"{path}: {reason}") from None
        return TorchFile(archive.length, tensors, others, frozenset(writers))


@contextmanager
def open_torch_file(path: Path) -> Iterator[Archive]:
    """The archive that the file ``path`` is, open while the context lasts.

    Raises:
        SourceError: it is no regular file, cannot be read, or is not a ``torch.save`` zip archive.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise SourceError(f"{path}: is not a regular file")

        def read(offset: int, size: int) -> bytes:
            return os.pread(descriptor, size, offset)

        head = read(0, 264)
        if head[:4] != b"PK\x03\x04":
            raise SourceError(f"{path}: {_not_a_zip(head)}")
        yield Archive(read, 0, info.st_size, str(path), largest_directory=_LARGEST_DIRECTORY)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror})") from None
    finally:
        os.close(descriptor)


def load_pickle(archive: Archive, table: Table | None = None) -> object:
    """The object that ``data.pkl`` describes: dicts, plain values, ``TensorRef``, ``DistributedRef``.

    ``table``: names that are allowed beside those of tensors.
    """
    pickle = archive.content("data.pkl", LARGEST_PICKLE)
    return load(pickle, TABLE if table is None else {**TABLE, **table}, archive.where, storage_ref)


def flatten(value: object) -> Iterator[tuple[str, object]]:
    """Every leaf of nested dicts, keys joined by dots. A dict that was met before is a leaf: hostile ones form loops.

    Raises ``Unfit`` for keys that are not names, or too many levels.
    """
    if not isinstance(value, dict):
        raise Unfit(f"it holds a {type(value).__name__}, not a dict of tensors")
    met = {id(value)}
    levels: list[tuple[str, Iterator[tuple[object, object]]]] = [("", iter(value.items()))]
    while levels:
        prefix, items = levels[-1]
        for key, item in items:
            if type(key) not in (str, int):
                raise Unfit(f"it has a key of type {type(key).__name__} in its dict {prefix.rstrip('.')!r}")
            name = f"{prefix}{key}"
            if len(name) > _LONGEST_NAME or not name.isprintable():
                raise Unfit(f"it has an impossible name: {name[:40]!r}")
            if isinstance(item, dict) and item and id(item) not in met:
                if len(levels) == _DEEPEST:
                    raise Unfit(f"its dicts are nested more than {_DEEPEST} deep")
                met.add(id(item))
                levels.append((f"{name}.", iter(item.items())))
                break
            yield name, item
        else:
            levels.pop()


def describe_value(value: object) -> str:
    """One line about a value that is no tensor."""
    if value is None or type(value) in (bool, int, float):
        return repr(value)[:60]
    if type(value) is str:
        return repr(value[:60])
    size = f" of {len(value)}" if isinstance(value, list | tuple | dict | bytes) else ""
    return f"{type(value).__name__.lstrip('_').lower().replace('plain', 'dict')}{size}"


def read_saved(archive: Archive, tensor: TensorRef, *, by_columns: bool = False) -> SavedTensor:
    """Where the elements of ``tensor`` lie in the file; ``by_columns`` allows them to lie column by column."""
    offset, _ = place(archive, tensor, by_columns=by_columns)
    return SavedTensor(tensor.dtype, tensor.shape, archive.start + offset)


def _resolver(archive: Archive, writers: set[int | None]) -> Callable[[object], SavedTensor | None]:
    """Tells of a leaf which tensor it is; ``None`` for another value. Meshes and spreads that recur are shared.

    Adds to ``writers`` what the meshes say.
    """
    grids: dict[int, Grid] = {}
    spreads: dict[tuple[object, ...], Spread] = {}
    shapes: dict[Shape, Shape] = {}

    def grid_of(mesh: Mesh) -> Grid:
        known = grids.get(id(mesh))
        if known is None:
            if len(grids) * math.prod(mesh.shape) > _MOST_RANKS:
                raise Unfit(f"its device meshes have more than {_MOST_RANKS} ranks together")
            offset, nbytes = place(archive, mesh.ranks)
            code = "i" if mesh.ranks.dtype == "I32" else "q"
            ranks = struct.unpack(f"<{nbytes // struct.calcsize(code)}{code}", archive.bytes_at(offset, nbytes))
            known = grids[id(mesh)] = mesh.grid(ranks)
            if mesh.coordinate is not None:
                writers.add(known.rank(mesh.coordinate))
        return known

    def resolve(leaf: object) -> SavedTensor | None:
        if type(leaf) is TensorRef:
            saved = read_saved(archive, leaf)
            return saved._replace(shape=shapes.setdefault(saved.shape, saved.shape))
        if type(leaf) is not DistributedRef:
            return None
        spec = leaf.spec
        if spec.dtype != TORCH_NAME[leaf.local.dtype]:
            raise Unfit(f"a DTensor of {spec.dtype} has a local tensor of {TORCH_NAME[leaf.local.dtype]}")
        key = spec.shape, spec.placements, spec.order, id(spec.mesh)
        spread = spreads.get(key)
        if spread is None:
            spread = spreads[key] = Spread(spec.shape, spec.placements, spec.order, grid_of(spec.mesh))
        saved = read_saved(archive, leaf.local)
        return saved._replace(shape=shapes.setdefault(saved.shape, saved.shape), spread=spread)

    return resolve


# --- the allow-list ---------------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """A class that ``_rebuild_from_type_v2`` may be given, beside ``DTensor``."""

    name: str


def _rebuild_wrapper(args: tuple[object, ...]) -> object:
    """``_rebuild_wrapper_subclass(cls, dtype, size, ...)``: all of it is in the DTensor's state as well."""
    if not args or args[0] is not DTENSOR:
        raise Unfit("it makes a tensor subclass that is not a DTensor")
    return None


_WRAPPER = Callee(call=_rebuild_wrapper)


def _rebuild_typed(args: tuple[object, ...]) -> object:
    """``_rebuild_from_type_v2(function, class, arguments, state)``: a DTensor, or a tensor with Python attributes."""
    function, kind, inner, state = args if len(args) == 4 else (None,) * 4
    if not isinstance(function, Callee) or function.call is None or not isinstance(inner, tuple):
        raise Unfit("a tensor is not made from the values that torch writes")
    if kind is DTENSOR and function is _WRAPPER:
        _rebuild_wrapper(inner)
        return rebuild(state)
    made = function.call(inner)
    if type(kind) is not _Kind or type(made) is not TensorRef:
        raise Unfit("it makes a tensor of a class that is not known")
    return made


def _parameter(args: tuple[object, ...]) -> object:
    """``_rebuild_parameter(tensor, requires_grad, hooks)``; with a fourth, attributes that nothing here needs."""
    if not 3 <= len(args) <= 4 or type(args[0]) not in (TensorRef, DistributedRef):
        raise Unfit("a parameter is not made from the values that torch writes")
    return args[0]


def _strided(args: tuple[object, ...]) -> None:
    if args != ("torch.strided",):
        raise Unfit("a tensor is sparse or of another layout that is not read")


def _empty(args: tuple[object, ...]) -> Plain:
    if args:
        raise Unfit("an OrderedDict made from arguments, as torch never writes it")
    return Plain()


TABLE: Table = {
    **TENSOR_TABLE,
    **DTENSOR_TABLE,
    ("collections", "OrderedDict"): Callee(call=_empty),
    ("torch", "Size"): Callee(call=lambda args: dims(args[0]) if args else ()),
    ("torch", "device"): Callee(call=lambda args: None),
    ("torch.serialization", "_get_layout"): Callee(call=_strided),
    ("torch._utils", "_rebuild_parameter"): Callee(call=_parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): Callee(call=_parameter),
    ("torch._utils", "_rebuild_wrapper_subclass"): _WRAPPER,
    ("torch._tensor", "_rebuild_from_type_v2"): Callee(call=_rebuild_typed),
    ("torch", "Tensor"): _Kind("Tensor"),
    ("torch.nn.parameter", "Parameter"): _Kind("Parameter"),
    ("torch.nn.parameter", "Buffer"): _Kind("Buffer"),
}
"""Every name that a pickled state dict may use."""


def _not_a_zip(head: bytes) -> str:
    """Why bytes are not the beginning of a zip archive."""
    if head[:1] == b"\x80":
        return (
            "legacy torch.save (a pickle, not a zip archive), which is not read; load it with torch.load(..., "
            "weights_only=True) and save it again with torch >= 1.6"
        )
    if head[257:262] == b"ustar":
        return "legacy torch.save (a tar file of torch < 0.1.10), which is not read; load and save it with torch >= 1.6"
    if not head.strip(b"\0"):
        return "is empty or begins with zeros: it was not written completely; copy it again"
    return "is not a torch.save archive (a zip file); it is damaged or something else"
