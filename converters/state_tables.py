"""Where the tensors lie that a checkpoint holds beside the model: the optimizer's, by parameter, and others.

In tables such a tensor is called ``exp_avg:PARAMETER``, without a number of its expert: the experts of a layer are one
matrix, their rows one after the other, because no schema takes them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import NamedTuple

from .boxes import Box, StoredTensor
from .dtypes import itemsize
from .errors import SourceError
from .layouts import Binding
from .manifest import STATE_MARK
from .names import split_indices
from .planning import Entry, Extent, Table, tabulate

OPTIMIZER = "optimizer."
STATE = "state"
"""Section of what the optimizer computed; the other, ``param_groups``, has its settings."""


class Column(NamedTuple):
    """One kind of entry that the optimizer has per parameter: ``state``, ``exp_avg`` or ``param_groups``, ``lr``."""

    section: str
    key: str

    def fqn(self, parameter: str) -> str:
        """What the entry of ``parameter`` is called in the checkpoint."""
        return f"{OPTIMIZER}{self.section}.{parameter}.{self.key}"

    def __str__(self) -> str:
        return self.key if self.section == STATE else f"{self.section}.{self.key}"


def owners(binding: Binding) -> tuple[str, ...]:
    """The parameters in a stored tensor; all experts of a layer count as one."""
    indices = split_indices(binding.name)[1]
    layer = indices[0] if indices else 0
    return tuple(part.replace(".{expert}", "").format(layer=layer) for part in binding.rule.parts)


def state_table(bindings: Iterable[Binding], columns: Mapping[Column, Mapping[str, StoredTensor]], where: str) -> Table:
    """Where the optimizer's tensors lie, by ``KIND:parameter``."""
    table: Table = {}
    bindings = list(bindings)
    for column, tensors in columns.items():
        shaped = {b.name: tensors[b.name] for b in bindings if b.name in tensors and _is_shaped(tensors[b.name], b)}
        found = tabulate(
            (b for b in bindings if b.name in shaped), shaped, label=f"of {column}", where=f"{where} ({column})"
        )
        for entry in _by_layer(found):
            name = f"{column}{STATE_MARK}{entry.name}"
            table[name] = replace(entry, name=name)
        for binding in bindings:
            if binding.name in tensors and binding.name not in shaped:
                for owner in owners(binding):
                    entry = uncut(f"{column}{STATE_MARK}{owner}", tensors[binding.name], where)
                    table[entry.name] = entry
    return table


def _is_shaped(tensor: StoredTensor, binding: Binding) -> bool:
    return tensor.spec.shape == binding.shape


def plain_table(tensors: Iterable[StoredTensor], where: str) -> Table:
    """Where tensors lie that belong to no parameter, by ``beside:FQN``; those without elements lie nowhere."""
    entries = (
        uncut(f"beside{STATE_MARK}{tensor.name}", tensor, where) for tensor in tensors if prod(tensor.spec.shape)
    )
    return {entry.name: entry for entry in entries}


def uncut(name: str, tensor: StoredTensor, where: str) -> Entry:
    """A tensor that nothing cuts, as a vector of its elements."""
    spec = tensor.spec
    if len(tensor.chunks) != 1 or tensor.chunks[0].box != Box.whole(spec.shape):
        raise SourceError(f"{where}: {spec.name} is stored in {len(tensor.chunks)} pieces, which only parameters are")
    (chunk,) = tensor.chunks
    count, width = prod(spec.shape), itemsize(spec.dtype)
    return Entry(name, spec.dtype, (count,), ((Extent(0, count, 0, 1, chunk.file, chunk.offset, width),),))


def _by_layer(table: Table) -> Iterator[Entry]:
    """Entries of one parameter each, those of a layer's experts joined to one matrix."""
    experts: dict[str, list[tuple[int, Entry]]] = {}
    for name, entry in table.items():
        head, is_expert, tail = name.partition(".experts.")
        if not is_expert:
            yield entry
            continue
        index, _, rest = tail.partition(".")
        experts.setdefault(f"{head}.experts.{rest}", []).append((int(index), entry))
    for name, numbered in experts.items():
        extents: list[Extent] = []
        first = numbered[0][1]
        for number, entry in sorted(numbered, key=lambda pair: pair[0]):
            for extent in entry.copies[0]:
                _append(extents, extent._replace(row=extent.row + number * entry.rows))
        shape = (first.rows * len(numbered), first.columns)
        yield Entry(name, first.dtype, shape, (tuple(extents),))


def _append(extents: list[Extent], extent: Extent) -> None:
    """Add an extent, as part of the last one where it goes on in the file as in the matrix."""
    if extents:
        last = extents[-1]
        goes_on = last.row + last.rows == extent.row and last.offset + last.rows * last.pitch == extent.offset
        if goes_on and (last.column, last.columns, last.file, last.pitch) == (
            extent.column,
            extent.columns,
            extent.file,
            extent.pitch,
        ):
            extents[-1] = last._replace(rows=last.rows + extent.rows)
            return
    extents.append(extent)
