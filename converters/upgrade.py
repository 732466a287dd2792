"""How a torchtitan run's training state goes into another key schema or backend, beside the model.

Only names change, and where three parameters become one (a fused ``wqkv``) or one becomes three, moments are joined and
cut like the parameters; ``step`` and settings go with each, and must be the same where they become one.

Source: torchtitan 0.3.0, ``components/optimizer``; 0.2.2, ``components/lr_scheduler.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .boxes import StoredTensor, TensorSpec
from .checkpoint import Checkpoint
from .errors import PolicyError, enumerate_problems
from .layouts import ACCELERATE, FUSED, TITAN_OPTIMIZERS, TITAN_SCHEMAS, Binding, Layout
from .parameters import HEAD
from .placement import ONE_RANK
from .planning import Table
from .policies import Choices, Policy, Settled
from .reading import read_whole
from .release_state import LOADER, SCHEDULER, WHOLE_SCHEDULER, newer_loader, older_loader, older_scheduler, same_value
from .state_tables import STATE, Column, owners, plain_table, state_table, uncut
from .stores.contents import PathTuple
from .stores.dcp_values import read_blobs
from .training_state import Item, TrainingState, optimizer_bindings, read_training_state

_BY_RELEASE_0_2 = ("T1", "T2")


class Renamed(NamedTuple):
    """Where an entry of the output comes from: its stored name, and the FQN in it that became another."""

    stored: str
    old: str = ""
    new: str = ""


@dataclass(frozen=True, slots=True)
class Carried:
    """What an output holds beside the model."""

    specs: tuple[TensorSpec, ...] = ()
    blobs: Mapping[str, bytes] = field(default_factory=dict)
    paths: Mapping[str, PathTuple] = field(default_factory=dict)
    source: Table = field(default_factory=dict)
    bindings: tuple[Binding, ...] = ()
    columns: tuple[Column, ...] = ()

    def table(self, tensors: Mapping[str, StoredTensor]) -> Table:
        """The same as ``source`` for the output, whose ``tensors`` are these and the model's."""
        names = {spec.name for spec in self.specs}
        columns: dict[Column, dict[str, StoredTensor]] = {}
        for column in self.columns:
            found = {b.name: column.fqn(b.name) for b in self.bindings}
            columns[column] = {fqn: tensors[name] for fqn, name in found.items() if name in names}
            names -= set(found.values())
        rest = [tensors[spec.name] for spec in self.specs if spec.name in names]
        return state_table(self.bindings, columns, "the output") | plain_table(rest, "the output")


NOTHING = Carried()


def carry_training_state(settled: Settled, target: Layout, choices: Choices, decided: list[Policy]) -> Carried:
    """What the output has beside the model of layout ``target``, and the policies of it. Reads what must be equal.

    Raises:
        ConversionError: as ``read_training_state``; or parameters that the output joins have other values each; or
            ``--optimizer`` asks for a form that the schema never had.
    """
    if choices.mesh != ONE_RANK:
        raise PolicyError(f"training state is not cut for {choices.mesh}; torchtitan cuts it while it loads")
    state = read_training_state(settled.checkpoint, tied=settled.tied)
    contents = settled.checkpoint.contents
    blobs = {name: Renamed(name) for name in state.blobs}
    tensors = {tensor.name: Renamed(tensor.name) for tensor in state.tensors}
    specs: list[TensorSpec] = []
    layout = _target_layout(state, target, choices, decided)
    bindings: tuple[Binding, ...] = ()
    if layout is not None:
        has_head = any(binding.rule.parts == (HEAD,) for binding in state.bindings.values())
        bindings = tuple(optimizer_bindings(layout, settled.checkpoint, has_head=has_head).values())
        specs = _rename(state, bindings, tensors, blobs)
    else:
        decided.append(Policy("no-optimizer", "there is no optimizer state to carry", warning=True))
    content = read_blobs(settled.checkpoint.path, {r.stored: contents.blobs[r.stored] for r in blobs.values()})
    made = _carry_scheduler(target, state, content, decided)
    moved = _carry_loader(target, content, decided)
    content |= moved | {name: data for name, data in made.items() if data is not None}
    for name, data in made.items():
        if data is None:
            del blobs[name]
        else:
            blobs[name] = Renamed(name)
    if specs or state.tensors or blobs:
        decided.append(_summary(state, len(specs), len(blobs), moved))
    paths = {name: path for name, r in {**tensors, **blobs}.items() if (path := _path(name, r, contents.paths))}
    return Carried(
        (*specs, *(tensor.spec for tensor in state.tensors)),
        {name: content[renamed.stored] for name, renamed in blobs.items()},
        paths,
        state.table(),
        bindings,
        tuple(state.columns),
    )


def _target_layout(state: TrainingState, target: Layout, choices: Choices, decided: list[Policy]) -> Layout | None:
    """The optimizer's layout in the output: as models of that schema are by default, or as ``--optimizer`` says."""
    if state.layout is None:
        return None
    if target == ACCELERATE:
        summary = "the optimizer's state is that of the same parameters under the transformers backend's names"
        decided.append(Policy("optimizer-backend", summary))
        return ACCELERATE
    schema = target.schema or ""
    age = schema.removesuffix(FUSED)
    apart, together = TITAN_OPTIMIZERS[age], TITAN_OPTIMIZERS.get(f"{age}{FUSED}")
    form = choices.optimizer
    is_free = together is not None and f"{age}{FUSED}" not in TITAN_SCHEMAS  # of what the model's own keys say
    if form == "default":
        fused = is_free or schema.endswith(FUSED)
    else:
        fused = state.is_fused if form == "keep" else form == "fused"
    if together is None and fused:
        raise PolicyError(f"--optimizer {form}: models of schema {age} had q, k and v apart; use --optimizer separate")
    if f"{age}{FUSED}" in TITAN_SCHEMAS and fused != schema.endswith(FUSED):
        other = age if not fused else f"{age}{FUSED}"
        raise PolicyError(
            f"--optimizer {form}: in schema {age} the optimizer was fused exactly when the model was; "
            f"use --titan-schema {other}"
        )
    how, was = ("as one", "apart") if fused else ("apart", "as one")
    change = f", in the source {was}" if fused != state.is_fused else ", as in the source"
    guessed = form == "default" and is_free
    hint = "; a model with fuse_qkv=False needs --optimizer separate" if guessed else ""
    values = {"fused": fused, "source_fused": state.is_fused}
    warning = guessed and fused != state.is_fused
    decided.append(Policy("optimizer-qkv", f"the optimizer has q, k and v {how}{change}{hint}", values, warning))
    return together if fused else apart


def _rename(
    state: TrainingState, bindings: Iterable[Binding], tensors: dict[str, Renamed], blobs: dict[str, Renamed]
) -> list[TensorSpec]:
    """The optimizer's tensors in the output. ``tensors`` and ``blobs`` get a source for each entry, one of several.

    Raises:
        PolicyError: entries that become one are not the same.
    """
    source_of = {owner: binding for binding in state.bindings.values() for owner in owners(binding)}
    specs: list[TensorSpec] = []
    problems: list[str] = []
    for binding in bindings:
        sources = list(dict.fromkeys(source_of[owner].name for owner in owners(binding)))
        for column, items in state.columns.items():
            found = [items[name] for name in sources if name in items]
            if not found:
                continue
            name = column.fqn(binding.name)
            if (len(found) < len(sources)) or len({item.tensor is None for item in found}) > 1:
                problems.append(f"{column} is not there for each of {', '.join(sources)}")
                continue
            tensor, renamed = found[0].tensor, Renamed(found[0].stored, sources[0], binding.name)
            if tensor is None:
                blobs[name] = renamed
                problems += _unequal_blobs(state.checkpoint, column, found)
                continue
            tensors[name] = renamed
            shaped = tensor.spec.shape == state.bindings[sources[0]].shape
            specs.append(TensorSpec(name, tensor.spec.dtype, binding.shape if shaped else tensor.spec.shape))
            problems += _unequal_tensors(state, column, found, shaped=shaped)
    if problems:
        raise PolicyError(
            enumerate_problems(
                f"q, k and v of {state.checkpoint.path} cannot become one, because their optimizer state differs; keep "
                "them apart with --optimizer separate (in T3 to T5 that is a schema of its own, without -fused):",
                problems,
            )
        )
    return specs


def _unequal_blobs(checkpoint: Checkpoint, column: Column, items: Sequence[Item]) -> list[str]:
    if len(items) == 1:
        return []
    content = read_blobs(checkpoint.path, {i.stored: checkpoint.contents.blobs[i.stored] for i in items})
    return [] if len({*content.values()}) == 1 else [f"{column}: {', '.join(content)}"]


def _unequal_tensors(state: TrainingState, column: Column, items: Sequence[Item], *, shaped: bool) -> list[str]:
    if len(items) == 1:
        return []
    tensors = [item.tensor for item in items if item.tensor is not None]
    if len({tensor.spec.dtype for tensor in tensors}) > 1:
        return [f"{column}: {', '.join(f'{tensor.name} is {tensor.spec.dtype}' for tensor in tensors)}"]
    if shaped:
        return []
    where = state.checkpoint.path
    values = {bytes(read_whole(uncut(tensor.name, tensor, str(where)), where)) for tensor in tensors}
    return [] if len(values) == 1 else [f"{column}: {', '.join(tensor.name for tensor in tensors)}"]


def _path(name: str, renamed: Renamed, paths: Mapping[str, PathTuple]) -> PathTuple | None:
    """Place of ``name`` in the nested state dict: that of its source, with the FQN in it renamed."""
    old = paths.get(renamed.stored) or tuple(name.split(".", 1) if name.startswith(SCHEDULER) else [renamed.stored])
    keys = tuple(key.replace(renamed.old, renamed.new) if renamed.old and isinstance(key, str) else key for key in old)
    if ".".join(map(str, keys)) != name:  # as where names went through a wrapper
        top, _, rest = name.partition(".")
        keys = (top, rest) if len(old) > 1 and rest else (name,)
    return keys if len(keys) > 1 else None


def _carry_scheduler(
    target: Layout, state: TrainingState, content: Mapping[str, bytes], decided: list[Policy]
) -> dict[str, bytes | None]:
    """Entries that 0.2 has and 0.3 has not, made for the one, left out (``None``) for the other if they can be made."""
    held = {name for name in content if name.startswith(SCHEDULER)}
    last = f"{SCHEDULER}last_epoch"
    made: dict[str, bytes] = {}
    if last in held:
        groups = (state.columns.get(Column("param_groups", key), {}).values() for key in ("initial_lr", "lr"))
        rates = ([content[item.stored] for item in items if item.stored in content] for items in groups)
        made = older_scheduler(content[last], *rates)
    if target.schema == "T7" and held == {last, *made} and all(same_value(made[name], content[name]) for name in made):
        if made:
            summary = (
                "torchtitan 0.3 saves of the scheduler the step alone; what 0.2 saves beside it follows and is left out"
            )
            decided.append(Policy("scheduler", summary, {"left_out": sorted(made)}))
        return dict.fromkeys(made)
    if not held or target.schema not in _BY_RELEASE_0_2 or held.intersection(WHOLE_SCHEDULER):
        return {}
    if made:
        summary = "the scheduler's whole state, which torchtitan 0.2 asks for, is made of its step and the rates"
        decided.append(Policy("scheduler", summary, {"made": sorted(made)}))
    else:
        decided.append(
            Policy(
                "scheduler",
                "torchtitan 0.2 asks for the scheduler's whole state, of which this run saved last_epoch alone: resume "
                "there with --checkpoint.exclude_from_loading lr_scheduler, and set its schedule by hand",
                warning=True,
            )
        )
    return dict(made)


def _carry_loader(target: Layout, content: Mapping[str, bytes], decided: list[Policy]) -> dict[str, bytes]:
    """The ranks' places in the text in the form of the release that the target's schema is of, where they had another.

    When between T2 and T7 the form changed, no release says.
    """
    change = {"T1": older_loader, "T2": older_loader, "T7": newer_loader}.get(target.schema or "")
    if change is None:
        return {}
    places = {name: data for name, data in content.items() if name.startswith(LOADER)}
    moved = {name: found for name, data in places.items() if (found := change(data)) is not None}
    if moved:
        release, keeps = ("0.3", "inputs, labels and positions") if change is newer_loader else ("0.2", "one stream")
        summary = (
            f"the ranks' places in the text ({len(moved)}) go on in torchtitan {release}'s form: samples read as they "
            f"are, tokens left over as {keeps}"
        )
        decided.append(Policy("dataloader", summary, {"ranks": len(moved), "release": release}))
    return moved


def _summary(state: TrainingState, tensors: int, values: int, changed: Iterable[str]) -> Policy:
    tensors += len(state.tensors)
    kinds = sorted({str(column) for column in state.columns if column.section == STATE})
    optimizer = f"optimizer state ({', '.join(kinds)})" if kinds else "no optimizer state"
    groups = sorted({name.partition(".")[0] for name in state.blobs} - {name.partition(".")[0] for name in changed})
    beside = f"; {', '.join(groups)} byte for byte" if groups else ""
    counts = {"tensors": tensors, "values": values, "kinds": kinds, "groups": groups}
    return Policy("training-state", f"{optimizer} in {tensors} tensors and {values} values{beside}", counts)
