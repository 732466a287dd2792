"""What a store says it holds (``Contents``), and what a store is about to hold (``Arrangement``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..boxes import StoredTensor

PathTuple = tuple[str | int, ...]
"""Keys from the top of a nested state dict down to one entry."""


class Blob(NamedTuple):
    """An entry that is not a tensor: where its archive lies, in bytes. What is in it has not been looked at."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Contents:
    """A checkpoint folder as its headers describe it. Nothing but headers has been read."""

    tensors: Mapping[str, StoredTensor]
    """Every tensor by stored FQN, chunks with byte positions inside ``files``."""
    files: Mapping[str, int]
    """Data files, relative to the folder, and their sizes in bytes."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Entries that are not tensors (byte blobs such as ``train_state.step``): FQN -> one-line description."""
    blobs: Mapping[str, Blob] = field(default_factory=dict)
    """The same: FQN -> where they lie."""
    paths: Mapping[str, PathTuple] = field(default_factory=dict)
    """FQN -> place in the nested state dict, of entries that are not at top level under their own name."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Store-level strings, such as a safetensors header's ``__metadata__``."""


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A data file to be written: its size, and the bytes in it that are not tensor elements."""

    name: str
    size: int
    seals: Callable[[], Iterable[tuple[int, bytes]]]
    """Yields ``(offset, bytes)`` of headers and frames. Written after all tensor bytes, so that a file whose
    writing was cut short has no header and no reader takes it for whole."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Where every byte of an output goes, known before the first one is written."""

    tensors: Mapping[str, StoredTensor]
    files: tuple[OutputFile, ...]
    trailers: Callable[[], Iterable[tuple[str, bytes]]]
    """Yields ``(file name, content)`` of what makes the folder complete (index JSON, ``.metadata``); written last."""
    aliases: int = 0
    """Tensors beside ``tensors`` that share the bytes of one of them."""
