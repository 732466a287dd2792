"""verl's FSDP checkpoint: one pickle of DTensors per rank.

A folder (``global_step_N/actor``) holds ``model_world_size_{N}_rank_{r}.pt`` for every rank, ``fsdp_config.json``
(``{"FSDP_version", "world_size"}``; not in older releases), ``huggingface/`` with config.json and the tokenizer, and
beside them ``optim_...`` and ``extra_state_...`` (scheduler and random state) per rank. Names are the hub's, or those
that transformers 5 has in memory. Meshes are ("fsdp",) or ("ddp", "fsdp"); with one rank and FSDP1, plain tensors.
Any mesh over all ranks is read. Source: verl, ``utils/checkpoint/fsdp_checkpoint_manager.py``,
``workers/fsdp_workers.py`` (``create_device_mesh``), ``model_merger/fsdp_model_merger.py``.

Ranks that hold the same part (``ddp``) are copies: the tensor is ``replicated``, its chunks are the parts of the first
copy, then those of the others, and ``planning.tabulate`` makes them copies of the parameter, to be compared.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from sys import intern

from ..boxes import Box, Chunk, Shape, StoredTensor, TensorSpec
from ..config_json import read_json_object
from ..errors import SourceError, enumerate_problems
from .contents import Contents
from .dtensors import Spread
from .pickles import Callee, Record, Table
from .torch_archives import SavedTensor, TorchFile, load_pickle, open_torch_file, read_torch_file

SUBFOLDER = "huggingface"
"""Holds config.json and the tokenizer."""

CONFIG = "fsdp_config.json"

_MODEL = re.compile(r"model_world_size_([0-9]{1,7})_rank_([0-9]{1,7})\.pt")


def read_verl(folder: Path) -> Contents:
    """What all ranks' files in ``folder`` hold together, from their zip headers and pickles; no tensor is read.

    Raises:
        SourceError: rank files are missing, damaged, hostile, of another world size or of different runs, hold
            different tensors, or parts of other sizes than their placements give; all problems at once.
    """
    files = _find_ranks(folder)
    problems: list[str] = []
    sizes: dict[str, int] = {}
    others: dict[str, str] = {}
    whole = _Whole(len(files))
    for rank, file in enumerate(files):
        try:
            content = read_torch_file(folder / file)
        except SourceError as error:
            problems.append(str(error))
            continue
        sizes[file] = content.size
        others |= content.others
        whole.add(rank, file, content)
    problems += whole.problems
    if len(sizes) == len(files):
        problems += _check_steps(folder, len(files), others)
    if problems:
        heading = f"{folder} is not a whole checkpoint of one run of verl; copy again what is named here:"
        raise SourceError(enumerate_problems(heading, problems))
    return Contents(whole.tensors(), sizes, others)


def _find_ranks(folder: Path) -> list[str]:
    """The rank files in order of rank."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise SourceError(f"{folder} cannot be listed: {error.strerror}") from None
    matches = [match for match in map(_MODEL.fullmatch, names) if match]
    if not matches:
        raise SourceError(f"{folder} holds no file named model_world_size_<N>_rank_<r>.pt")
    worlds = sorted({int(match[1]) for match in matches})
    if len(worlds) > 1:
        raise SourceError(
            f"{folder} mixes checkpoints of {' and '.join(map(str, worlds))} ranks: move the files "
            f"model_world_size_{worlds[0]}_* or the others elsewhere"
        )
    (world,) = worlds
    path = folder / CONFIG
    if os.path.lexists(path):
        stated = read_json_object(path)[0].get("world_size")
        if stated is not None and stated != world:
            raise SourceError(f"{path} has world_size {stated!r}, but the files are those of {world} ranks")
    by_rank = {int(match[2]): match[0] for match in matches}
    strays = [by_rank[rank] for rank in by_rank if rank >= world]
    missing = world - len(by_rank) + len(strays)
    if strays or missing:
        absent = (f"model_world_size_{world}_rank_{rank}.pt" for rank in range(world) if rank not in by_rank)
        lines = [*(f"{name}: no such rank among {world}" for name in strays)]
        lines += [f"missing: {name}" for name, _ in zip(absent, range(min(missing, 20)), strict=False)]
        lines += [f"missing: {missing - 20} more files"] if missing > 20 else []
        raise SourceError(enumerate_problems(f"{folder} lacks the files of {missing} of {world} ranks:", lines, 25))
    return [by_rank[rank] for rank in range(world)]


class _Whole:
    """The whole tensors, put together rank by rank."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.problems: list[str] = []
        self._reference = -1
        """The rank that the others are compared with: the first that could be read."""
        self._first: dict[str, SavedTensor] = {}
        self._chunks: dict[str, list[tuple[Shape, Chunk]]] = {}
        """Name -> (replica, chunk) of every rank."""
        self._spreads: dict[Spread, Spread | None] = {}
        self._places: dict[tuple[int, int], tuple[Shape, Box]] = {}

    def add(self, rank: int, file: str, content: TorchFile) -> None:
        """Take in what ``rank`` holds."""
        for writer in content.writers - {rank}:
            by = f"rank {writer}" if writer is not None else "a rank outside its own mesh"
            self.problems.append(f"{file}: was written by {by}, not by rank {rank}")
        if self._reference < 0:
            self._reference = rank
        known = {id(s): self._canonical(s) for s in {id(t.spread): t.spread for t in content.tensors.values()}.values()}
        for name, saved in content.tensors.items():
            spread = known[id(saved.spread)]
            if spread is None and (saved.spread is not None or self.world > 1):
                what = f"a DTensor of {saved.spread}" if saved.spread else "a plain tensor"
                self.problems.append(
                    f"{file}: {name!r} is {what}, but there are ranks 0 to {self.world - 1}; which part of the tensor "
                    "it is, is not known"
                )
                continue
            replica, box = self._place(spread, rank) if spread else ((), Box.whole(saved.shape))
            if saved.shape != box.size:
                self.problems.append(
                    f"{file}: {name!r} has shape {list(saved.shape)}, but rank {rank}'s part of {spread} has "
                    f"{list(box.size)}"
                )
                continue
            if rank == self._reference:
                self._first[intern(name)] = saved._replace(spread=spread)
                self._chunks[intern(name)] = []
            first = self._first.get(name)
            if first is None:
                self.problems.append(
                    f"{file}: holds {name!r}, which rank {self._reference} does not; they are of different runs"
                )
            elif first.dtype != saved.dtype or first.spread is not spread:
                self.problems.append(
                    f"{file}: {name!r} is {saved.dtype} {spread or list(saved.shape)}, on rank {self._reference} it "
                    f"is {first.dtype} {first.spread or list(first.shape)}; they are of different runs"
                )
            else:
                self._chunks[name].append((replica, Chunk(box, file, saved.offset)))
        lacking = [name for name in self._first if name not in content.tensors]
        self.problems += [f"{file}: lacks {name!r}, which rank {self._reference} has" for name in lacking]

    def tensors(self) -> dict[str, StoredTensor]:
        """Every tensor; to be called when all ranks were added and there was no problem."""
        made: dict[str, StoredTensor] = {}
        for name, first in self._first.items():
            parts = self._chunks.pop(name)
            parts.sort(key=lambda part: part[0])  # stable: by replica, then by rank
            chunks = [chunk for _, chunk in parts if chunk.box.volume] or [parts[0][1]]
            shape = first.spread.shape if first.spread else first.shape
            replicated = parts[0][0] != parts[-1][0]
            made[name] = StoredTensor(TensorSpec(name, first.dtype, shape), tuple(chunks), replicated)
        return made

    def _canonical(self, spread: Spread | None) -> Spread | None:
        """One object for all equal spreads; ``None`` for those that do not lie on all ranks."""
        if spread is None:
            return None
        if spread not in self._spreads:
            covers = sorted(spread.grid.ranks) == list(range(self.world))
            self._spreads[spread] = spread if covers else None
        return self._spreads[spread]

    def _place(self, spread: Spread, rank: int) -> tuple[Shape, Box]:
        """Which copy, and which part of it, ``rank`` holds."""
        key = id(spread), rank
        if key not in self._places:
            position = spread.grid.position(rank)
            self._places[key] = spread.replica(position), spread.box(position)
        return self._places[key]


# --- are all ranks of one step? --------------------------------------------------------------------------------------


def _check_steps(folder: Path, world: int, others: dict[str, str]) -> Iterator[str]:
    """Ranks whose ``extra_state`` says another scheduler step than rank 0's; absent or unreadable ones say nothing."""
    steps: dict[int, object] = {}
    for rank in range(world):
        path = folder / f"extra_state_world_size_{world}_rank_{rank}.pt"
        if not os.path.lexists(path):
            continue
        try:
            steps[rank] = _scheduler_step(path)
        except SourceError as error:
            others[path.name] = f"not read: {str(error).removeprefix(f'{path}: ')[:100]}"
    told = {rank: step for rank, step in steps.items() if step is not None}
    for rank, step in told.items():
        expected = next(iter(told.values()))
        if step != expected:
            yield (
                f"extra_state_world_size_{world}_rank_{rank}.pt: the scheduler is at step {step}, on rank "
                f"{next(iter(told))} at {expected}; its ranks are of different steps"
            )


def _scheduler_step(path: Path) -> object:
    """``lr_scheduler.last_epoch``, or ``None``."""
    with open_torch_file(path) as archive:
        value = load_pickle(archive, _RANDOM_STATE)
    scheduler = value.get("lr_scheduler") if isinstance(value, dict) else None
    step = scheduler.get("last_epoch") if isinstance(scheduler, dict) else None
    return step if type(step) is int else None


class _Inert(Record):
    """Random state that nothing here needs: it is read past."""

    __slots__ = ()

    def build(self, state: object) -> None:
        """Drop the state."""


_ARRAY = Callee(call=lambda args: _Inert(), new=_Inert)

_RANDOM_STATE: Table = {
    ("numpy.core.multiarray", "_reconstruct"): _ARRAY,
    ("numpy._core.multiarray", "_reconstruct"): _ARRAY,
    ("numpy", "ndarray"): _ARRAY,
    ("numpy", "dtype"): _ARRAY,
    ("_codecs", "encode"): _ARRAY,
}
"""numpy's generator state, as pickle spells it; every call gives an object without contents."""
