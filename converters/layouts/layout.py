"""A layout is a table of rules; everything else about it follows from the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from sys import intern
from typing import NamedTuple

from ..boxes import Box, Shape
from ..config import Geometry
from ..errors import MappingError, enumerate_problems
from ..names import skeleton_of, split_indices
from ..ops import Axis, Op, Part, Piece, Rows
from ..parameters import BY_NAME, EMBEDDING, EXPERT_BIAS, HEAD, PARAMETERS


@dataclass(frozen=True, slots=True)
class Rule:
    """One stored tensor (a template) and the logical parameters that make it up.

    A brace that the stored name lacks and the parts have is run over by the op.
    """

    stored: str
    parts: tuple[str, ...]
    op: Op = field(default_factory=Rows)
    optional: bool = False
    """The tensor may be absent, and the model is whole without it."""

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The stored dims in terms of axis names."""
        return self.op.axes([BY_NAME[part].axes for part in self.parts])

    def applies(self, geometry: Geometry) -> bool:
        """Whether a model of this geometry has the rule's parts."""
        return BY_NAME[self.parts[0]].when(geometry)


@dataclass(frozen=True, slots=True)
class Layout:
    """Names and fusion of one format."""

    name: str
    rules: tuple[Rule, ...]
    derived: tuple[str, ...] = ()
    """Templates of tensors that follow from the config and are dropped on reading."""
    schema: str | None = None
    stores_tied_head: bool = False
    """Whether a tied head is stored beside the embeddings as a rule (else the source's own habit decides)."""
    nested_in: str = ""
    """Key of the dict that holds the state dict, when a DCP saves that dict: its names begin with ``KEY.``."""

    @property
    def label(self) -> str:
        """Name for messages: ``titan (schema T7)``."""
        return f"{self.name} (schema {self.schema})" if self.schema else self.name

    def by_skeleton(self) -> dict[str, Rule]:
        """The rule of each stored name, by the name's skeleton."""
        return {skeleton_of(rule.stored): rule for rule in self.rules}

    def unknown(self, skeletons: Iterable[str]) -> list[str]:
        """Those of ``skeletons`` that no rule of this layout names."""
        known = {*self.by_skeleton(), *map(skeleton_of, self.derived)}
        return [skeleton for skeleton in skeletons if skeleton not in known]

    def is_derived(self, name: str) -> bool:
        """Whether the stored tensor ``name`` follows from the config."""
        ends = tuple(template.rpartition(".")[2] for template in self.derived)
        return name.endswith(ends) and split_indices(name)[0] in map(skeleton_of, self.derived)

    def head_name(self) -> str:
        """The stored FQN of the output head."""
        return next(rule.stored for rule in self.rules if rule.parts == (HEAD,))

    def embedding_name(self) -> str:
        """The stored FQN of the embeddings."""
        return next(rule.stored for rule in self.rules if rule.parts == (EMBEDDING,))


Cut = Callable[[str, Shape, Mapping[str, int]], Box | None]
"""The box of a logical parameter that a rank holds, by its template, shape and indices; ``None`` for nothing."""


class Binding(NamedTuple):
    """One stored tensor of a concrete model: what it is called, its shape, and what it is made of."""

    name: str
    shape: Shape
    pieces: tuple[Piece, ...]
    rule: Rule


def bind(layout: Layout, geometry: Geometry, *, tied: bool, cut: Cut | None = None) -> Iterator[Binding]:
    """Every tensor that ``layout`` stores for a model of ``geometry``, optional ones too, in model order.

    With ``tied`` the head is bound to the embeddings: a second copy of the same logical parameter. With ``cut`` shapes
    and pieces are those of one rank, and tensors of which it holds nothing are left out.

    Raises:
        MappingError: the layout has no place for a parameter of such a model (T1 knows no MoE).
    """
    rules = [rule for rule in layout.rules if rule.applies(geometry)]
    homeless = {p.name for p in PARAMETERS if p.when(geometry)} - {part for rule in rules for part in rule.parts}
    homeless.discard(EXPERT_BIAS)
    if homeless:
        names = ", ".join(sorted(homeless))
        later = "; --titan-schema T2 or later has" if layout.schema == "T1" else ""
        raise MappingError(f"layout {layout.label} has no place for {names}{later}")
    sized = [_Sized.of(rule, geometry, tied) for rule in rules]
    for it, indices in _instances(sized, geometry):
        binding = it.bound(geometry, indices, cut)
        if binding is not None:
            yield binding


def _instances(sized: Sequence[_Sized], geometry: Geometry) -> Iterator[tuple[_Sized, dict[str, int]]]:
    """Every stored tensor as a rule and the numbers in its name: embeddings, layers, the rest."""
    inside = [it for it in sized if "{layer}" in it.rule.stored]
    single = [it for it in inside if "{expert}" not in it.rule.stored]
    repeated = [it for it in inside if "{expert}" in it.rule.stored]
    outside = [it for it in sized if "{layer}" not in it.rule.stored]
    yield from ((it, {}) for it in outside if it.rule.parts == (EMBEDDING,))
    for layer in range(geometry.num_hidden_layers):
        yield from ((it, {"layer": layer}) for it in single)
        for expert in range(geometry.num_experts or 0 if repeated else 0):
            yield from ((it, {"layer": layer, "expert": expert}) for it in repeated)
    yield from ((it, {}) for it in outside if it.rule.parts != (EMBEDDING,))


class _Sized(NamedTuple):
    """A rule with its sizes filled in; only the numbers in its names are open."""

    rule: Rule
    shape: Shape
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, rule: Rule, geometry: Geometry, tied: bool) -> _Sized:
        sizes = geometry.axes
        templates = (EMBEDDING,) if tied and rule.parts == (HEAD,) else rule.parts
        shape = tuple(sum(sizes[axis] for axis in dim) for dim in rule.axes)
        return cls(rule, shape, tuple(Part(t, tuple(sizes[axis] for axis in BY_NAME[t].axes)) for t in templates))

    def bound(self, geometry: Geometry, indices: Mapping[str, int], cut: Cut | None) -> Binding | None:
        runs = [dict(indices)]
        if self.rule.op.runs_over == "expert":
            runs = [{**indices, "expert": expert} for expert in range(geometry.num_experts or 0)]
        # interned: source, target and stored names of the largest model are 37,000 equal texts each
        stored = intern(self.rule.stored.format(**indices))
        if cut is None:
            parts = [[Part(intern(name.format(**run)), shape) for name, shape in self.parts] for run in runs]
            return Binding(stored, self.shape, tuple(self.rule.op.pieces(parts, geometry)), self.rule)
        starts: dict[str, Shape] = {}
        local: list[list[Part]] = []
        for run in runs:
            group = []
            for template, shape in self.parts:
                box = cut(template, shape, run)
                if box is not None:
                    name = intern(template.format(**run))
                    starts[name] = box.start
                    group.append(Part(name, box.size))
            if group:
                local.append(group)
        if not local:
            return None
        pieces = tuple(
            piece._replace(box=piece.box.shifted(starts[piece.name])) for piece in self.rule.op.pieces(local, geometry)
        )
        reach = tuple(max(stops) for stops in zip(*(piece.stored.stop for piece in pieces), strict=True))
        return Binding(stored, reach, pieces, self.rule)


def solve_geometry(layout: Layout, shapes: Mapping[str, Shape]) -> Geometry:
    """The geometry that the stored ``shapes`` (by FQN in the layout's own names) imply.

    Every rule gives equations between its axis names and a stored shape; they are solved from the first tensor each
    rule matches. Tensors that disagree with the solution are found later, when all are bound.

    Raises:
        MappingError: a size cannot be told, or two tensors contradict each other about one.
    """
    rules = layout.by_skeleton()
    layers, experts = -1, -1
    first: dict[str, tuple[str, Shape]] = {}
    for name, shape in shapes.items():
        skeleton, indices = split_indices(name)
        rule = rules.get(skeleton)
        if rule is None:
            continue
        if "{layer}" in rule.stored:
            layers = max(layers, indices[0])
        if "{expert}" in rule.stored:
            experts = max(experts, indices[1])
        first.setdefault(rule.stored, (name, shape))
    known: dict[str, int] = {"E": experts + 1} if experts >= 0 else {}
    problems = []
    equations: list[tuple[Axis, int, str]] = []
    for rule in layout.rules:
        if rule.stored not in first:
            continue
        name, shape = first[rule.stored]
        if len(shape) != len(rule.axes):
            problems.append(f"{name}: expected {len(rule.axes)} dims, found shape {list(shape)}")
        else:
            equations.extend((axis, size, name) for axis, size in zip(rule.axes, shape, strict=True))
    progress = True
    while progress:
        progress = False
        for axis, size, _ in equations:
            unknown = Counter(symbol for symbol in axis if symbol not in known)
            if len(unknown) == 1:
                ((symbol, count),) = unknown.items()
                rest = size - sum(known.get(a, 0) for a in axis)
                if rest > 0 and rest % count == 0:
                    known[symbol] = rest // count
                    progress = True
    for axis, size, name in equations:
        if all(symbol in known for symbol in axis):
            expected = sum(known[symbol] for symbol in axis)
            if expected != size:
                problems.append(f"{name}: {' + '.join(axis)} is {size} here, {expected} by the other tensors")
    if problems:
        raise MappingError(
            enumerate_problems(f"the shapes of this {layout.label} checkpoint contradict each other:", problems)
        )
    missing = [axis for axis in ("V", "H", "Q", "K", "D") if axis not in known]
    if layers < 0 or missing:
        raise MappingError(
            f"the sizes of this {layout.label} checkpoint cannot be told from its tensors: "
            f"{'no layer is there' if layers < 0 else 'nothing tells ' + ', '.join(missing)}"
        )
    return Geometry.from_axes(known, layers + 1)
