"""What a torchtitan checkpoint holds beside the model: optimizer, scheduler, dataloader, step.

The optimizer's entries are named after parameters, ``optimizer.state.{FQN}.exp_avg`` and
``optimizer.param_groups.{FQN}.lr``, so the layouts' tables hold for them too: of the native model in any key schema,
and of the transformers backend's. Values that are not tensors are never unpickled.

Source: torchtitan 0.3.0, ``components/optimizer/utils.py``; 0.2.2, ``components/optimizer.py`` (the same names, made
by ``torch.distributed.checkpoint.state_dict``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import xxhash

from .boxes import StoredTensor
from .checkpoint import NOT_MODEL, Checkpoint
from .errors import MappingError, SourceError, enumerate_problems
from .layouts import ACCELERATE, FUSED, TITAN_OPTIMIZERS, Binding, Layout, bind
from .names import natural_key, split_indices, unwrapped
from .parameters import HEAD
from .planning import Table
from .state_tables import OPTIMIZER, STATE, Column, plain_table, state_table
from .stores.contents import Blob
from .stores.dcp_values import read_blobs

_ADAM = tuple(Column(STATE, key) for key in ("exp_avg", "exp_avg_sq", "step"))
_SECTIONS = (STATE, "param_groups")
_OPTIMIZERS = {"titan": (*TITAN_OPTIMIZERS.values(),), "accelerate": (ACCELERATE,)}
"""Layouts that the optimizer of a model's layout may have."""
_BETAS = Column("param_groups", "betas")


class Item(NamedTuple):
    """An entry: the name it is stored under, and the tensor; ``None`` for one that is not a tensor."""

    stored: str
    tensor: StoredTensor | None


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Everything beside the model in one checkpoint, recognised and whole."""

    checkpoint: Checkpoint
    layout: Layout | None
    """Names of the optimizer's entries; ``None`` when there are none."""
    bindings: Mapping[str, Binding]
    """The parameters that the optimizer knows, by FQN."""
    columns: Mapping[Column, Mapping[str, Item]]
    """Entries by kind and parameter."""
    tensors: tuple[StoredTensor, ...]
    """Tensors that belong to no parameter."""
    blobs: tuple[str, ...]
    """Entries that are neither tensors nor of a parameter: scheduler, dataloader, step."""

    @property
    def is_fused(self) -> bool:
        """Whether the optimizer has q, k and v as one."""
        return self.layout is not None and (self.layout.schema or "").endswith(FUSED)

    def values(self) -> dict[str, bytes]:
        """Every entry that is not a tensor, as stored: not unpickled."""
        blobs = self.checkpoint.contents.blobs
        return read_blobs(self.checkpoint.path, blobs)

    def table(self) -> Table:
        """Where every tensor beside the model lies.

        Raises:
            SourceError: the chunks of one overlap or leave holes.
        """
        where = str(self.checkpoint.path)
        columns = {
            column: {fqn: item.tensor for fqn, item in items.items() if item.tensor is not None}
            for column, items in self.columns.items()
        }
        return state_table(self.bindings.values(), columns, where) | plain_table(self.tensors, where)


def read_training_state(checkpoint: Checkpoint, *, tied: bool) -> TrainingState:
    """Recognise every entry beside the model. Only headers are read.

    Raises:
        SourceError: the checkpoint is not torchtitan's.
        MappingError: entries of the optimizer are of no parameter, missing, of names that contradict each other, or of
            a shape that cannot be mapped; all are listed.
    """
    path = checkpoint.path
    layouts = _OPTIMIZERS.get(checkpoint.format, ())
    if not layouts or (checkpoint.format != "titan" and not any(n.startswith(OPTIMIZER) for n in checkpoint.others)):
        raise SourceError(
            f"{path} is {checkpoint.format}, not torchtitan's native Qwen3, whose key schemas this is about, nor a "
            "training state of its transformers backend; convert changes its format (weights alone)"
        )
    contents = checkpoint.contents
    entries: dict[str, StoredTensor | Blob] = {
        name: tensor for name, tensor in contents.tensors.items() if unwrapped(name).startswith(NOT_MODEL)
    }
    entries |= contents.blobs
    own = dict.fromkeys(name for name in entries if name.startswith(OPTIMIZER))  # in order: it becomes the output's
    parsed, unknown = _parse(own, checkpoint.prefix, layouts)
    layout = _recognise(checkpoint, layouts, {fqn for _, fqn in parsed.values()}, unknown)
    columns: dict[Column, dict[str, Item]] = {}
    for name, (column, fqn) in parsed.items():
        entry = entries[name]
        items = columns.setdefault(column, {})
        if fqn in items:
            raise SourceError(f"{path} holds {column} of {fqn} twice: as {items[fqn].stored} and as {name}; keep one")
        items[fqn] = Item(name, entry if isinstance(entry, StoredTensor) else None)
    has_head = not tied or (layout is not None and any(layout.head_name() in items for items in columns.values()))
    bindings = optimizer_bindings(layout, checkpoint, has_head=has_head) if layout is not None else {}
    _check(checkpoint, bindings, columns)
    rest = {name: entry for name, entry in entries.items() if name not in own}
    _refuse_disguised(path, layouts, rest)
    tensors = tuple(entry for entry in rest.values() if isinstance(entry, StoredTensor))
    blobs = tuple(name for name, entry in rest.items() if isinstance(entry, Blob))
    return TrainingState(checkpoint, layout, bindings, columns, tensors, blobs)


def digest_values(blobs: Mapping[str, bytes]) -> dict[str, str]:
    """xxh3_128 over names and bytes of entries that are not tensors, by their first key."""
    found: dict[str, xxhash.xxh3_128] = {}
    for name in sorted(blobs):
        digest = found.setdefault(name.partition(".")[0], xxhash.xxh3_128())
        digest.update(f"{name} {len(blobs[name])}\n".encode())
        digest.update(blobs[name])
    return {group: digest.hexdigest() for group, digest in found.items()}


# --- reading ---------------------------------------------------------------------------------------------------------


def _parse(
    names: Iterable[str], prefix: str, layouts: Sequence[Layout]
) -> tuple[dict[str, tuple[Column, str]], list[str]]:
    """Each name as a kind of entry and the FQN of a parameter; and those that name no parameter of any schema."""
    known = {skeleton for layout in layouts for skeleton in layout.by_skeleton()}
    lengths: dict[str, int | None] = {}
    parsed: dict[str, tuple[Column, str]] = {}
    unknown: list[str] = []
    for name in names:
        section, _, rest = unwrapped(name).removeprefix(OPTIMIZER).partition(".")
        rest = rest.removeprefix(prefix)
        segments = rest.split(".")
        skeleton, _ = split_indices(rest)
        if skeleton not in lengths:
            parts = skeleton.split(".")
            cuts = (at for at in range(len(parts) - 1, 0, -1) if ".".join(parts[:at]) in known)
            lengths[skeleton] = next(cuts, None)
        cut = lengths[skeleton]
        if section not in _SECTIONS or cut is None:
            unknown.append(name)
        else:
            parsed[name] = Column(section, ".".join(segments[cut:])), ".".join(segments[:cut])
    return parsed, unknown


def _recognise(
    checkpoint: Checkpoint, layouts: Sequence[Layout], fqns: Iterable[str], unknown: Sequence[str]
) -> Layout | None:
    """The one layout whose parameters ``fqns`` are, that of the model's own schema before others."""
    examples: dict[str, str] = {}
    for fqn in fqns:
        examples.setdefault(split_indices(fqn)[0], fqn)
    own = (checkpoint.layout.schema or "").removesuffix(FUSED)
    layouts = sorted(layouts, key=lambda layout: (layout.schema or "").removesuffix(FUSED) != own)
    strangers = [layout.unknown(examples) for layout in layouts]
    found = next((layout for layout, odd in zip(layouts, strangers, strict=True) if not odd), None)
    problems = [f"{name}: names no parameter of a Qwen3" for name in unknown]
    if found is None:
        closest = min(strangers, key=len)
        nearest = layouts[strangers.index(closest)].schema
        problems += [f"{examples[odd]}: is a name of another schema than {nearest}, the closest" for odd in closest]
    if problems:
        raise MappingError(
            enumerate_problems(
                f"the optimizer state in {checkpoint.path} cannot be mapped; leave it behind with --model-only, or:",
                problems,
            )
        )
    return found if examples else None


def _refuse_disguised(path: Path, layouts: Sequence[Layout], rest: Iterable[str]) -> None:
    """Refuse what would keep an old parameter's name: it is of parameters, and not named as torchtitan names that."""
    known = [f".{skeleton}." for layout in layouts for skeleton in layout.by_skeleton()]
    found = [name for name in rest if any(one in f".{split_indices(unwrapped(name))[0]}." for one in known)]
    if found:
        heading = f"{path} has entries of parameters that are not named as torchtitan's optimizer names its own:"
        raise MappingError(enumerate_problems(heading, found))


def optimizer_bindings(layout: Layout, checkpoint: Checkpoint, *, has_head: bool) -> dict[str, Binding]:
    """The parameters that an optimizer of ``layout`` knows, by FQN. It has nothing of a tied head, as a rule."""
    bound = bind(layout, checkpoint.geometry, tied=False)
    return {b.name: b for b in bound if has_head or b.rule.parts != (HEAD,)}


def _check(
    checkpoint: Checkpoint, bindings: Mapping[str, Binding], columns: Mapping[Column, Mapping[str, Item]]
) -> None:
    """Every parameter has everything that others of its kind have, and nothing of a foreign shape."""
    if not columns:
        return
    problems: list[str] = []
    strangers = {fqn for items in columns.values() for fqn in items if fqn not in bindings}
    problems += [f"{fqn}: the model has no such parameter" for fqn in sorted(strangers, key=natural_key)]
    problems += _lacking(bindings, columns)
    for items in columns.values():
        for fqn, item in items.items():
            if item.tensor is None or fqn not in bindings:
                continue
            shape = item.tensor.spec.shape
            if shape != bindings[fqn].shape and prod(shape) != 1:
                expected = list(bindings[fqn].shape)
                problems.append(f"{item.stored}: expected shape {expected} or one number, found {list(shape)}")
    if problems:
        heading = f"the optimizer state in {checkpoint.path} is not that of the whole model; copy it again, or leave it"
        raise MappingError(enumerate_problems(f"{heading} behind with --model-only:", problems))


def _lacking(bindings: Iterable[str], columns: Mapping[Column, Mapping[str, Item]]) -> Iterator[str]:
    """Parameters that have less than others, or of Adam's three only some. Other optimizers have other entries."""
    kinds: dict[frozenset[Column], list[str]] = {}
    for fqn in bindings:
        kinds.setdefault(frozenset(column for column, items in columns.items() if fqn in items), []).append(fqn)
    for kind, fqns in kinds.items():
        wanted = min((other for other in kinds if kind < other), key=len, default=kind)
        if kind & {*_ADAM, _BETAS}:
            wanted |= {*_ADAM}
        lacking = ", ".join(sorted(map(str, wanted - kind)))
        if lacking:
            yield from (f"{fqn}: has no {lacking if kind else 'entry at all'}" for fqn in fqns)
    if all(column.section == STATE for column in columns):
        yield f"{OPTIMIZER}param_groups: has no entries, and torchtitan asks for the settings of each parameter"
