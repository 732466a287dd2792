"""A recognised checkpoint: where its tensors are, what they are called, and which config speaks for it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .boxes import StoredTensor
from .config import Geometry, Qwen3Config
from .dtypes import itemsize
from .errors import SourceError
from .layouts import Binding, Layout, bind
from .manifest import ASSETS, MANIFEST, Manifest
from .placement import ONE_RANK, Mesh, mesh_bindings, rank_name
from .planning import ScaleGrid, Table, tabulate
from .stores.contents import Contents
from .stores.verl import SUBFOLDER

NOT_MODEL = (
    "optimizer.",
    "optim.",
    "lr_scheduler.",
    "scheduler.",
    "dataloader.",
    "train_state.",
    "rng_state",
    "extra_state",
)
"""Prefixes of what a training checkpoint holds beside the model (torchtitan 0.3.0 and 0.2, accelerate 1.15)."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A recognised checkpoint. Only headers have been read; whether it is whole is what ``table`` finds out."""

    path: Path
    format: str
    layout: Layout
    contents: Contents
    tensors: Mapping[str, StoredTensor]
    """Model tensors by the layout's own FQN (no prefix, no wrapper segments), without scales and derived ones."""
    scales: Mapping[str, ScaleGrid]
    derived: tuple[str, ...]
    """Stored tensors that follow from the config and are left out."""
    others: Mapping[str, str]
    """What else the checkpoint holds: optimizer, scheduler, dataloader, step. FQN -> one-line description."""
    config: Qwen3Config | None
    geometry: Geometry
    manifest: Manifest | None = None
    prefix: str = ""
    config_path: Path | None = field(default=None, compare=False)
    mesh: Mesh = ONE_RANK
    """What the tensors are cut for; then ``tensors`` are named ``rank/FQN``."""
    bindings: Callable[[bool], Iterable[Binding]] | None = field(default=None, compare=False, repr=False)
    """What the tensors are made of, given whether the head is tied, where layout and mesh alone do not say."""

    @property
    def stores_head(self) -> bool:
        """Whether an output head is stored, tied or not."""
        head = self.layout.head_name()
        if self.mesh == ONE_RANK:
            return head in self.tensors
        return any(rank_name(rank, head) in self.tensors for rank in range(self.mesh.ranks))

    @property
    def model_bytes(self) -> int:
        """Bytes of all model tensors as stored; what two names share, as a tied head in a DCP, counts once."""
        chunks = ((tensor.spec.dtype, chunk) for tensor in self.tensors.values() for chunk in tensor.chunks)
        places = {(c.file, c.offset): math.prod(c.box.size) * itemsize(dtype) for dtype, c in chunks}
        return sum(places.values())

    def table(self, *, tied: bool) -> Table:
        """Where every logical parameter lies.

        Raises:
            MappingError: tensors are missing, unknown or mis-shaped; all are listed.
            SourceError: chunks overlap or leave holes.
        """
        if self.bindings is not None:
            bindings = self.bindings(tied)
        elif self.mesh == ONE_RANK:
            bindings = bind(self.layout, self.geometry, tied=tied)
        else:
            bindings = mesh_bindings(self.layout, self.geometry, self.mesh, tied=tied)
        return tabulate(bindings, self.tensors, scales=self.scales, label=self.layout.label, where=str(self.path))


def find_config(folder: Path, like: Path | None = None) -> Path | None:
    """The config.json that speaks for the checkpoint in ``folder``: ``like``'s, its own, a DCP's copy, or its run's.

    Raises:
        SourceError: ``like`` has none, or a folder cannot be looked into.
    """
    try:
        return _find_config(folder, like)
    except OSError as error:
        raise SourceError(f"{error.filename} cannot be read: {error.strerror}") from error


def _find_config(folder: Path, like: Path | None) -> Path | None:
    if like is not None:
        path = like / "config.json" if like.is_dir() else like
        if not path.is_file() and like.is_dir():
            path = like / ASSETS / "config.json"
        if not path.is_file():
            raise SourceError(f"{like} has no config.json")
        return path
    for path in (folder / "config.json", folder / ASSETS / "config.json", folder / SUBFOLDER / "config.json"):
        if path.is_file():
            return path
    assets = assets_of_run(folder)
    return assets / "config.json" if assets is not None else None


def assets_of_run(step: Path) -> Path | None:
    """Config and tokenizer of what a run of ``train`` began with, for ``RUN/checkpoint/step-N``; ``None`` elsewhere."""
    if not re.fullmatch(r"step-[0-9]+", step.name):
        return None
    source = step.absolute().parent.parent / "source"
    if not (source / MANIFEST).is_file():
        return None
    return next((place for place in (source / ASSETS, source) if (place / "config.json").is_file()), None)
