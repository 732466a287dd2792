"""From headers to a plan: where each logical parameter's bytes lie, and what moves where.

Every Qwen3 parameter is a matrix or a vector, so a box of one is a range of rows and columns (a vector is one column).
A ``Table`` is a checkpoint in these terms; two tables of the same model make a plan. Only headers have been read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from .boxes import Chunk, Shape, StoredTensor
from .dtypes import itemsize
from .errors import MappingError, SourceError, enumerate_problems
from .layouts import Binding, Rule
from .low_rank import LowRank
from .names import natural_key
from .ops import Piece
from .parameters import EMBEDDING, HEAD, describe

UNIT_BYTES = 256 << 20
"""Bytes after which a unit is closed: what is flushed, journalled and re-done after a kill as one."""


class Extent(NamedTuple):
    """A rectangle of one logical parameter and where it lies: row ``row + i`` begins at ``offset + i * pitch``.

    Rows and columns count elements of the parameter; ``offset`` and ``pitch`` are bytes. A transposed one is stored
    column by column: there it is column ``column + i`` that begins at ``offset + i * pitch``.
    """

    row: int
    rows: int
    column: int
    columns: int
    file: str
    offset: int
    pitch: int
    transposed: bool = False


Copy = tuple[Extent, ...]
"""Extents that together hold a parameter exactly once."""


class ScaleGrid(NamedTuple):
    """Factors of a block-quantised matrix: element (r, c) is its code times ``scale[r // rows, c // columns]``."""

    file: str
    offset: int
    dtype: str
    shape: Shape
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One logical parameter as one checkpoint holds it. A tied head that is stored too is a second copy."""

    name: str
    dtype: str
    shape: Shape
    copies: tuple[Copy, ...]
    scale: ScaleGrid | None = None
    delta: LowRank | None = None
    """What is to be added to the stored values."""

    @property
    def rows(self) -> int:
        """Rows as a matrix; a vector's length."""
        return self.shape[0]

    @property
    def columns(self) -> int:
        """Columns as a matrix; 1 for a vector."""
        return self.shape[1] if len(self.shape) > 1 else 1

    @property
    def nbytes(self) -> int:
        """Bytes of one copy."""
        return self.rows * self.columns * itemsize(self.dtype)


Table = dict[str, Entry]
"""A whole checkpoint, by logical name."""


@dataclass(frozen=True, slots=True)
class Move:
    """One logical parameter on its way: read ``source``, cast to ``target_dtype``, write to each copy in ``targets``.

    ``rows`` counts the rows that are read. A target with more rows holds zeros there (vocabulary padding);
    ``target_rows`` counts them all.
    """

    name: str
    rows: int
    columns: int
    source: Copy
    source_dtype: str
    targets: tuple[Copy, ...]
    target_dtype: str
    target_rows: int
    scale: ScaleGrid | None = None
    delta: LowRank | None = None

    @property
    def read_bytes(self) -> int:
        """Bytes read from the source, without scales and factors."""
        return self.rows * self.columns * itemsize(self.source_dtype)


Unit = tuple[Move, ...]
"""Moves that are flushed and journalled as one."""


class Misfit(MappingError):
    """Tensors that do not make up the model, one line each in ``problems``."""

    def __init__(self, heading: str, problems: Sequence[str]) -> None:
        super().__init__(enumerate_problems(heading, problems))
        self.problems = tuple(problems)


def tabulate(
    bindings: Iterable[Binding],
    tensors: Mapping[str, StoredTensor],
    *,
    scales: Mapping[str, ScaleGrid] | None = None,
    label: str,
    where: str = "the output",
) -> Table:
    """The table of a checkpoint: ``bindings`` say what ought to be stored, ``tensors`` where it is (by layout FQN).

    Raises:
        Misfit: tensors are missing, unknown or mis-shaped; all are listed.
        SourceError: the chunks of a tensor overlap or leave a hole.
    """
    held: dict[str, _Holding] = {}
    missing: list[str] = []
    misshapen: list[str] = []
    broken: list[str] = []
    bound: set[str] = set()
    for binding in bindings:
        stored = tensors.get(binding.name)
        if stored is None:
            is_second_copy = binding.pieces[0].name in held and len(binding.pieces) == 1
            is_second_copy = is_second_copy or (binding.rule.parts == (HEAD,) and binding.pieces[0].name == EMBEDDING)
            if not binding.rule.optional and not is_second_copy:
                missing.append(_in_words(binding))
            continue
        bound.add(binding.name)
        if stored.spec.shape != binding.shape:
            misshapen.append(f"{_in_words(binding)}: expected {list(binding.shape)}, found {list(stored.spec.shape)}")
            continue
        dtype = stored.spec.dtype
        for name, (shape, extents) in _locate(binding.pieces, stored).items():
            known = held.get(name)
            if known is None:
                held[name] = known = _Holding(dtype, shape, (scales or {}).get(binding.name))
            elif known.dtype != dtype:
                broken.append(f"{binding.name} is {dtype}, but another part or copy of {name} is {known.dtype}")
            known.add(binding.rule, shape, extents)
            known.replicated |= stored.replicated
    unknown = [name for name in tensors if name not in bound]
    problems = [
        *(f"missing: {name}" for name in missing),
        *(f"wrong shape: {text}" for text in misshapen),
        *(f"unknown: {_with_words(name)}" for name in sorted(unknown, key=natural_key)),
    ]
    if problems:
        raise Misfit(f"{where} does not hold one whole model in layout {label}; make or copy it again:", problems)
    table: Table = {}
    for name in list(held):
        holding = held.pop(name)
        copies = holding.copies()
        broken += [f"{name}: {problem}" for copy in copies if (problem := _cover_problem(copy, holding.shape))]
        table[name] = Entry(name, holding.dtype, holding.shape, copies, holding.scale)
    if broken:
        raise SourceError(enumerate_problems(f"the pieces stored in {where} do not make up whole tensors:", broken))
    return table


class _Holding:
    """Extents of one parameter as they are found: per rule, since a tied head is a whole second copy under its own."""

    __slots__ = ("dtype", "extents", "replicated", "scale", "shape")

    def __init__(self, dtype: str, shape: Shape, scale: ScaleGrid | None) -> None:
        self.dtype, self.shape, self.scale = dtype, shape, scale
        self.extents: list[tuple[Rule, Copy]] = []
        self.replicated = False

    def add(self, rule: Rule, shape: Shape, extents: Copy) -> None:
        if shape != self.shape:
            self.shape = tuple(map(max, self.shape, shape))
        self.extents.append((rule, extents))

    def copies(self) -> tuple[Copy, ...]:
        """Every copy. Ranks that hold the same rectangle each add one; a rectangle held once is part of all."""
        if len(self.extents) == 1 and not self.replicated:
            return (self.extents[0][1],)
        copies: list[Copy] = []
        for rule in dict.fromkeys(rule for rule, _ in self.extents):
            replicas: dict[tuple[int, int, int, int], list[Extent]] = {}
            for extent in (e for of, extents in self.extents if of is rule for e in extents):
                replicas.setdefault(extent[:4], []).append(extent)
            most = max(map(len, replicas.values()))
            copies += [tuple(sorted(same[min(i, len(same) - 1)] for same in replicas.values())) for i in range(most)]
        return tuple(copies)


def plan_moves(
    source: Table, target: Table, files: Sequence[str], *, vocab_padding: bool = False, by_source: bool = False
) -> tuple[Unit, ...]:
    """What to move, in the order of the target's ``files`` and the offsets in them, cut into units.

    ``by_source``: in the order of the source's files first, so that each is needed for one stretch of units.
    Parameters of the target that the source lacks must be zero by policy: they are holes in a new file.
    """
    rank = {file: index for index, file in enumerate(files)}

    def place(entry: Entry) -> tuple[int, int]:
        first = entry.copies[0][0]
        return rank[first.file], first.offset

    moves = []
    for entry in sorted((e for e in target.values() if e.name in source), key=place):
        have = source[entry.name]
        if have.shape != entry.shape and not (vocab_padding and have.shape[1:] == entry.shape[1:]):
            raise MappingError(f"{entry.name}: source shape {list(have.shape)}, target shape {list(entry.shape)}")
        targets = tuple(dict.fromkeys(entry.copies))  # a tied head may be a second name of the same bytes
        rows = min(have.rows, entry.rows)
        moves.append(
            Move(
                entry.name,
                rows,
                entry.columns,
                have.copies[0],
                have.dtype,
                targets,
                entry.dtype,
                entry.rows,
                have.scale,
                have.delta,
            )
        )
    if by_source:
        moves.sort(key=lambda move: min(natural_key(extent.file) for extent in move.source))  # the order above stays
    return tuple(_units(moves, by_source=by_source))


def source_files(unit: Iterable[Move]) -> set[str]:
    """The files that are read for these moves, those of block scales and of what is added included."""
    found: set[str] = set()
    for move in unit:
        found.update(extent.file for extent in move.source)
        if move.scale is not None:
            found.add(move.scale.file)
        if move.delta is not None:
            found.update((move.delta.left.file, move.delta.right.file))
    return found


def plan_reads(source: Table, *, dtype_of: Mapping[str, str] | None = None) -> tuple[Unit, ...]:
    """A plan that reads every parameter once, in file order, and writes nothing: for digests."""
    moves = []
    for entry in sorted(source.values(), key=lambda e: (e.copies[0][0].file, e.copies[0][0].offset)):
        dtype = (dtype_of or {}).get(entry.name, entry.dtype)
        moves.append(
            Move(
                entry.name,
                entry.rows,
                entry.columns,
                entry.copies[0],
                entry.dtype,
                (),
                dtype,
                entry.rows,
                entry.scale,
                entry.delta,
            )
        )
    return tuple(_units(moves))


def _units(moves: Iterable[Move], *, by_source: bool = False) -> Iterator[Unit]:
    unit: list[Move] = []
    size = 0
    file: tuple[str, ...] = ()
    for move in moves:
        where: tuple[str, ...] = ((move.targets[0] if move.targets else move.source)[0].file,)
        if by_source:
            where += tuple(sorted(source_files([move])))
        if unit and (size >= UNIT_BYTES or where != file):
            yield tuple(unit)
            unit, size = [], 0
        unit.append(move)
        size += move.read_bytes
        file = where
    if unit:
        yield tuple(unit)


def _locate(pieces: Sequence[Piece], stored: StoredTensor) -> dict[str, tuple[Shape, Copy]]:
    """Where each logical parameter of ``pieces`` lies among the chunks: its shape, and its extents in order."""
    width = itemsize(stored.spec.dtype)
    found: dict[str, tuple[Shape, list[Extent]]] = {}
    for piece in pieces:
        reach, extents = found.get(piece.name) or (piece.box.size, [])
        stop = piece.box.stop if any(piece.box.start) else piece.box.size
        found[piece.name] = (reach if reach == stop else tuple(map(max, reach, stop))), extents
        low, high = piece.stored.start[0], piece.stored.start[0] + piece.stored.size[0]
        for chunk in stored.chunks:
            first = chunk.box.start[0]
            if first >= high or first + chunk.box.size[0] <= low:
                continue  # the cheap test: most chunks of an expert stack hold other experts
            extent = _extent(piece, chunk, width)
            if extent is not None:
                extents.append(extent)
    return {name: (reach, tuple(sorted(extents))) for name, (reach, extents) in found.items()}


def _extent(piece: Piece, chunk: Chunk, width: int) -> Extent | None:
    common = chunk.box if piece.stored == chunk.box else piece.stored.intersect(chunk.box)
    if common is None:
        return None
    places = list(zip(common.start, chunk.box.start, chunk.box.size, strict=True))
    index = 0
    for start, low, size in reversed(places) if chunk.column_major else places:
        index = index * size + start - low
    offset = chunk.offset + index * width
    if len(piece.box.size) == 1:
        row = piece.box.start[0] + common.start[-1] - piece.stored.start[-1]
        return Extent(row, common.size[-1], 0, 1, chunk.file, offset, width)
    row_dim, column_dim = (-1, -2) if piece.transposed else (-2, -1)
    row = piece.box.start[0] + common.start[row_dim] - piece.stored.start[row_dim]
    column = piece.box.start[1] + common.start[column_dim] - piece.stored.start[column_dim]
    rows, columns = common.size[row_dim], common.size[column_dim]
    pitch = chunk.box.size[0 if chunk.column_major else -1] * width
    return Extent(row, rows, column, columns, chunk.file, offset, pitch, piece.transposed != chunk.column_major)


def _cover_problem(extents: Copy, shape: Shape) -> str | None:
    """What keeps ``extents`` (sorted) from holding each element of ``shape`` exactly once, in words; else ``None``."""
    rows, columns = shape[0], shape[1] if len(shape) > 1 else 1
    active: list[Extent] = []
    for extent in extents:
        active = [other for other in active if other.row + other.rows > extent.row]
        for other in active:
            if other.column < extent.column + extent.columns and extent.column < other.column + other.columns:
                return f"chunks overlap: rows {_span(other)} in {other.file} and rows {_span(extent)} in {extent.file}"
        active.append(extent)
    held = sum(extent.rows * extent.columns for extent in extents)
    if held == rows * columns:
        return None
    lost = rows * columns - held
    return (
        f"chunks leave a hole: {lost} of {rows * columns} elements are nowhere ({_first_hole(extents, rows, columns)})"
    )


def _first_hole(extents: Copy, rows: int, columns: int) -> str:
    edges = sorted({0, rows, *(e.row for e in extents), *(e.row + e.rows for e in extents)})
    for low, high in pairwise(edges):
        reach = 0
        for extent in sorted((e for e in extents if e.row <= low < e.row + e.rows), key=lambda e: e.column):
            if extent.column > reach:
                break
            reach = extent.column + extent.columns
        if reach < columns:
            return f"first at rows {low}:{high}" + (f", from column {reach}" if reach else "")
    return "none"


def _span(extent: Extent) -> str:
    rows = f"{extent.row}:{extent.row + extent.rows}"
    return f"{rows}, columns {extent.column}:{extent.column + extent.columns}" if extent.columns > 1 else rows


def _in_words(binding: Binding) -> str:
    """The stored name, and which parameters are in it."""
    words = [describe(name).split(", ") for name in dict.fromkeys(piece.name for piece in binding.pieces)]
    if binding.rule.parts == (HEAD,):
        return f"{binding.name} (the output head, which only a model with tied embeddings may lack)"
    if len(words) == 1:
        return f"{binding.name} ({', '.join(words[0])})"
    place = ["all experts" if word.startswith("expert ") else word for word in words[0][:-1]]
    return f"{binding.name} ({', '.join([*place, *dict.fromkeys(word[-1] for word in words)])})"


def _with_words(name: str) -> str:
    return f"{name} ({describe(name)})" if ".layers." in f".{name}" else name
