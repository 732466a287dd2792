"""DTensors as torch pickles them: the local tensor of a rank, and how a device mesh cuts the whole one.

``DTensor`` = ``(_local_tensor, DTensorSpec(mesh, placements, tensor_meta, shard_order))``. A placement per mesh axis:
``Shard(dim)``, ``_StridedShard(dim, split_factor)``, ``Replicate()``. Cuts of one dim apply in ``shard_order``; without
it a ``_StridedShard`` comes after those axes whose sizes multiply to its split factor, the others from left to right.
Each cut takes ceil(rows / ranks) rows, the last ranks fewer or none.

Classes and fields: torch 2.13, ``distributed/tensor/_dtensor_spec.py`` (for the order:
``_maybe_convert_StridedShard_to_shard_order``), ``placement_types.py``, ``distributed/device_mesh.py``,
``_mesh_layout.py``; the mesh as torch 2.2 to 2.8 stored it (``mesh``, a tensor of ranks) is understood too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from ..boxes import Box, Shape
from ..placement import chunk
from .dcp_metadata import TorchDtype, count
from .pickles import Callee, Record, Table, Unfit
from .torch_zip import TensorRef, dims

MAX_RANKS = 1 << 16
"""Bound of a mesh's ranks."""

Axis = tuple[Shape, Shape]
"""One mesh axis: sizes and strides of the parts that it was flattened from; usually one part."""


class Placement(NamedTuple):
    """What one mesh axis does to a tensor: cut ``dim``, or hold it whole on every rank (``None``)."""

    dim: int | None
    factor: int = 1
    """Split factor of a ``_StridedShard``; 1 for ``Shard``."""

    def __str__(self) -> str:
        if self.dim is None:
            return "Replicate()"
        return f"Shard({self.dim})" if self.factor == 1 else f"_StridedShard({self.dim}, split_factor={self.factor})"


class Grid(NamedTuple):
    """A device mesh: axis names, axis sizes, and the global ranks in row-major order."""

    names: tuple[str, ...]
    shape: Shape
    ranks: tuple[int, ...]

    def position(self, rank: int) -> Shape:
        """Coordinates of ``rank``, one per axis; raises ``ValueError`` for a rank that is not in the mesh."""
        index = self.ranks.index(rank)
        place = []
        for size in reversed(self.shape):
            index, at = divmod(index, size)
            place.append(at)
        return tuple(reversed(place))

    def rank(self, position: Shape) -> int | None:
        """The rank at these coordinates; ``None`` for coordinates outside the mesh."""
        if len(position) != len(self.shape) or any(at >= size for at, size in zip(position, self.shape, strict=True)):
            return None
        index = 0
        for at, size in zip(position, self.shape, strict=True):
            index = index * size + at
        return self.ranks[index]

    def __str__(self) -> str:
        named = self.names or ("axis",) * len(self.shape)
        return " x ".join(f"{name} {size}" for name, size in zip(named, self.shape, strict=True)) or "1 rank"


class Spread(NamedTuple):
    """How a whole tensor of ``shape`` lies on a mesh."""

    shape: Shape
    placements: tuple[Placement, ...]
    """One per mesh axis."""
    order: tuple[tuple[int, ...], ...]
    """Per tensor dim, the mesh axes that cut it, in the order in which they do."""
    grid: Grid

    def box(self, position: Shape) -> Box:
        """The part of the whole tensor that the rank at ``position`` of the mesh holds."""
        start, size = [0] * len(self.shape), list(self.shape)
        for dim, axes in enumerate(self.order):
            for axis in axes:
                part = chunk(size[dim], self.grid.shape[axis], position[axis])
                start[dim] += part.start
                size[dim] = len(part)
        return Box(tuple(start), tuple(size))

    def replica(self, position: Shape) -> Shape:
        """Coordinates on the axes that replicate: all zeros for the first copy."""
        return tuple(at for at, placement in zip(position, self.placements, strict=True) if placement.dim is None)

    def __str__(self) -> str:
        return f"{list(self.shape)} by ({', '.join(map(str, self.placements))}) over {self.grid}"


class DistributedRef(NamedTuple):
    """A pickled DTensor: what this rank holds, and the spec of the whole."""

    local: TensorRef
    spec: Spec


class Mesh(Record):
    """A pickled ``DeviceMesh``. The ranks are a small tensor, so they are read after the pickle (``grid``)."""

    __slots__ = ("axes", "coordinate", "names", "ranks")
    coordinate: Shape | None
    """Where the rank that wrote it stood, if it was in the mesh."""
    names: tuple[str, ...]
    ranks: TensorRef
    axes: tuple[Axis, ...]

    def build(self, state: object) -> None:
        """Fill from ``_mesh_dim_names``, and ``_layout`` with ``_rank_map`` (torch 2.9 on) or ``mesh`` (before)."""
        fields = _named_fields(state, "DeviceMesh")
        names = fields.get("_mesh_dim_names", fields.get("mesh_dim_names"))
        layout, ranks = fields.get("_layout"), fields.get("_rank_map")
        if layout is None:
            ranks = fields.get("mesh", fields.get("_mesh"))
        if type(ranks) is not TensorRef or ranks.dtype not in ("I32", "I64") or math.prod(ranks.shape) > MAX_RANKS:
            raise Unfit("a DeviceMesh does not have the tensor of ranks that torch gives it")
        if names is None:
            names = ()
        if not isinstance(names, tuple | list) or not all(type(name) is str for name in names):
            raise Unfit("a DeviceMesh has axis names that are not text")
        axes: tuple[Axis, ...]
        if layout is None:
            axes = tuple(((size,), (math.prod(ranks.shape[i + 1 :]),)) for i, size in enumerate(ranks.shape))
        elif isinstance(layout, _MeshLayout) and hasattr(layout, "axes"):
            axes = layout.axes
        else:
            raise Unfit("a DeviceMesh does not have the layout that torch 2.9 and later give it")
        if names and len(names) != len(axes):
            raise Unfit(f"a DeviceMesh of {len(axes)} axes has {len(names)} names")
        place = fields.get("_coordinate_on_dim")
        self.coordinate = None if place is None else dims(place)
        self.names, self.ranks, self.axes = tuple(names), ranks, axes
        if math.prod(self.shape) > MAX_RANKS:
            raise Unfit(f"a DeviceMesh has more than {MAX_RANKS} ranks")

    @property
    def shape(self) -> Shape:
        """Sizes of the axes."""
        return tuple(math.prod(sizes) for sizes, _ in self.axes)

    def grid(self, ranks: Sequence[int]) -> Grid:
        """The mesh, given the contents of its tensor of ranks; raises ``Unfit`` if the two do not fit."""
        parts = [(size, stride) for axis in self.axes for size, stride in zip(*axis, strict=True)]
        offsets = [
            sum(index * stride for index, (_, stride) in zip(place, parts, strict=True))
            for place in product(*(range(size) for size, _ in parts))
        ]
        if any(offset >= len(ranks) for offset in offsets) or len(offsets) != len(set(offsets)):
            raise Unfit("a DeviceMesh has a layout that does not fit its tensor of ranks")
        return Grid(self.names, self.shape, tuple(ranks[offset] for offset in offsets))


class _FlatLayout(Record):
    """One mesh axis of torch 2.13's layout."""

    __slots__ = ("axis",)
    axis: Axis

    def build(self, state: object) -> None:
        fields = _named_fields(state, "_FlatLayout")
        self.axis = _axis(fields.get("shape"), fields.get("stride"))


class _MeshLayout(Record):
    __slots__ = ("axes",)
    axes: tuple[Axis, ...]

    def build(self, state: object) -> None:
        fields = _named_fields(state, "_MeshLayout")
        axes = fields.get("axes")
        if type(axes) is tuple and len(axes) <= 64 and all(type(axis) is _FlatLayout for axis in axes):
            if not all(hasattr(axis, "axis") for axis in axes):
                raise Unfit("a DeviceMesh has an axis without sizes")
            self.axes = tuple(axis.axis for axis in axes)
        else:
            sizes, strides = fields.get("shape"), fields.get("stride")
            if type(sizes) is int:
                sizes, strides = (sizes,), (strides,)
            if type(sizes) is not tuple or type(strides) is not tuple or len(sizes) != len(strides) or len(sizes) > 64:
                raise Unfit("a DeviceMesh does not have the layout that torch gives it")
            self.axes = tuple(_axis(size, stride) for size, stride in zip(sizes, strides, strict=True))


def _axis(sizes: object, strides: object) -> Axis:
    """One axis, given as numbers or as tuples of numbers."""
    many = dims(sizes if type(sizes) is tuple else (sizes,))
    each = dims(strides if type(strides) is tuple else (strides,))
    if len(many) != len(each):
        raise Unfit("a DeviceMesh does not have the layout that torch gives it")
    return many, each


class _Placement(Record):
    __slots__ = ("factor", "tensor_dim")
    tensor_dim: int
    factor: int

    def build(self, state: object) -> None:
        fields = _named_fields(state, "Shard")
        self.tensor_dim, self.factor = count(fields.get("dim")), count(fields.get("split_factor", 1))

    def value(self) -> Placement:
        """The placement in plain numbers."""
        if not hasattr(self, "factor") or self.factor < 1:
            raise Unfit("a placement does not have the fields that torch gives it")
        return Placement(self.tensor_dim, self.factor)


class _Replicate(Record):
    __slots__ = ()

    def build(self, state: object) -> None:
        """It has no fields."""

    def value(self) -> Placement:
        """The placement in plain numbers."""
        return Placement(None)


class _Meta(NamedTuple):
    """``TensorMeta``: shape and dtype of the whole tensor."""

    shape: Shape
    dtype: TorchDtype


class _OrderEntry(NamedTuple):
    """``ShardOrderEntry``: the mesh axes that cut a tensor dim, in order."""

    dim: int
    axes: tuple[int, ...]


class Spec(Record):
    """A pickled ``DTensorSpec``."""

    __slots__ = ("dtype", "mesh", "order", "placements", "shape")
    mesh: Mesh
    shape: Shape
    dtype: str
    placements: tuple[Placement, ...]
    order: tuple[tuple[int, ...], ...]

    def build(self, state: object) -> None:
        """Fill from ``mesh``, ``placements``, ``tensor_meta`` and, since torch 2.10, ``shard_order``."""
        fields = _named_fields(state, "DTensorSpec")
        mesh, placements, meta = fields.get("mesh"), fields.get("placements"), fields.get("tensor_meta")
        if type(mesh) is not Mesh or not hasattr(mesh, "axes") or type(meta) is not _Meta:
            raise Unfit("a DTensorSpec has no mesh, or no shape of the whole tensor")
        if not isinstance(placements, tuple | list) or len(placements) != len(mesh.axes):
            raise Unfit(f"a DTensorSpec does not have one placement for each of the {len(mesh.axes)} mesh axes")
        values = []
        for placement in placements:
            if not isinstance(placement, _Placement | _Replicate):
                raise Unfit(f"a DTensorSpec has a {type(placement).__name__} where a placement belongs")
            values.append(placement.value())
        if any(value.dim is not None and value.dim >= len(meta.shape) for value in values):
            raise Unfit(f"a placement cuts a dim that a tensor of shape {list(meta.shape)} does not have")
        self.mesh, self.shape, self.dtype, self.placements = mesh, meta.shape, meta.dtype.name, tuple(values)
        explicit = fields.get("shard_order")
        if explicit is not None and not fields.get("use_strided_shard_as_shard_order"):
            self.order = self._stated_order(explicit)
        else:
            self.order = self._implied_order()

    def _stated_order(self, entries: object) -> tuple[tuple[int, ...], ...]:
        order: list[tuple[int, ...]] = [()] * len(self.shape)
        if type(entries) is tuple and all(type(entry) is _OrderEntry for entry in entries):
            for entry in entries:
                if entry.dim < len(order):
                    order[entry.dim] = entry.axes
        cuts = sorted((dim, axis) for dim, axes in enumerate(order) for axis in axes)
        if cuts != sorted((p.dim, axis) for axis, p in enumerate(self.placements) if p.dim is not None):
            raise Unfit("a DTensorSpec has a shard_order that contradicts its placements")
        return tuple(order)

    def _implied_order(self) -> tuple[tuple[int, ...], ...]:
        order: list[list[int]] = [[] for _ in self.shape]
        for axis, placement in reversed(list(enumerate(self.placements))):
            if placement.dim is None:
                continue
            axes = order[placement.dim]
            earlier = 1
            for at in range(len(axes) + 1):
                if earlier == placement.factor:
                    axes.insert(at, axis)
                    break
                earlier *= self.mesh.shape[axes[at]] if at < len(axes) else 1
            else:
                raise Unfit(f"{placement} fits no order in which the axes of its mesh could cut the tensor")
        return tuple(map(tuple, order))


def _named_fields(state: object, what: str) -> dict[object, object]:
    """A copy of a state dict, which is emptied: the pickle's memo would keep thousands of them alive."""
    if type(state) is not dict:
        raise Unfit(f"a {what} does not have the fields that torch gives it")
    fields = dict(state)
    state.clear()
    return fields


def _meta(args: tuple[object, ...]) -> _Meta:
    if len(args) != 3 or type(args[2]) is not TorchDtype:
        raise Unfit("a TensorMeta is not made from shape, stride and dtype")
    return _Meta(dims(args[0]), args[2])


def _order_entry(args: tuple[object, ...]) -> _OrderEntry:
    if len(args) != 2:
        raise Unfit("a ShardOrderEntry is not made from a dim and mesh axes")
    return _OrderEntry(count(args[0]), dims(args[1]))


def _refusing(reason: str) -> Callee:
    def refuse(*_: object) -> Record:
        raise Unfit(reason)

    return Callee(call=refuse, new=refuse)


DTENSOR = Callee()
"""What the class ``DTensor`` itself stands for; see ``rebuild``."""


def rebuild(state: object) -> DistributedRef:
    """The DTensor whose ``__slots__`` hold ``state``: ``{"_local_tensor", "_spec"}``, or (None, that)."""
    if type(state) is tuple and len(state) == 2:
        state = state[1]
    fields: Mapping[object, object] = state if type(state) is dict else {}
    local, spec = fields.get("_local_tensor"), fields.get("_spec")
    if type(local) is not TensorRef or type(spec) is not Spec or not hasattr(spec, "order"):
        raise Unfit("a DTensor does not have the local tensor and the spec that torch gives it")
    return DistributedRef(local, spec)


def _table() -> dict[tuple[str, str], object]:
    makers: dict[str, Callable[[], Record]] = {"DTensorSpec": Spec, "Replicate": _Replicate}
    makers |= {"Shard": _Placement, "_StridedShard": _Placement}
    entries: dict[str, object] = {name: Callee(new=maker) for name, maker in makers.items()}
    entries |= {"DTensor": DTENSOR, "TensorMeta": Callee(call=_meta), "ShardOrderEntry": Callee(call=_order_entry)}
    entries["Partial"] = _refusing("a DTensor is Partial: its ranks hold terms of a sum that was never taken")
    modules = ("torch.distributed.tensor", "torch.distributed._tensor")
    parts = ("", ".api", "._api", "._dtensor_spec", ".placement_types")
    table: dict[tuple[str, str], object] = {
        (module + part, name): value for module in modules for part in parts for name, value in entries.items()
    }
    table["torch.distributed.device_mesh", "DeviceMesh"] = Callee(new=Mesh)
    table["torch.distributed._mesh_layout", "_MeshLayout"] = Callee(new=_MeshLayout)
    table["torch.distributed._mesh_layout", "_FlatLayout"] = Callee(new=_FlatLayout)
    table["torch.distributed._shard.sharded_tensor.api", "ShardedTensor"] = _refusing(
        "it holds a ShardedTensor, which cannot be read without the process group that wrote it; save again with a "
        "device mesh (DTensor) or as DCP"
    )
    return table


DTENSOR_TABLE: Table = _table()
"""The names in a pickled DTensor beside those of plain tensors."""
