"""Proof: digests of what is stored, compared with a manifest or, tensor by tensor, with another checkpoint."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from .blocks import BLOCK_BYTES, Buffer, gather, rows_per_block
from .casts import FLOATS, widen
from .checkpoint import NOT_MODEL
from .dtypes import TORCH_NAME, itemsize
from .errors import SourceError, VerifyError, enumerate_problems
from .execution import Advance, load_scales, run
from .files import Files
from .manifest import STATE_MARK, Manifest, TensorRecord, fingerprint_of
from .names import natural_key, unwrapped
from .parameters import EMBEDDING, HEAD
from .planning import Entry, Move, Table, plan_reads
from .policies import DEFAULTS, Choices, Settled, output_dtype
from .remote import remote_of
from .training_state import digest_values, read_training_state

if TYPE_CHECKING:
    from .casts import Float32


def compute_records(
    settled: Settled,
    *,
    workers: int = 2,
    block_bytes: int = BLOCK_BYTES,
    advance: Advance = lambda count: None,
    choices: Choices = DEFAULTS,
) -> dict[str, TensorRecord]:
    """Dtype, shape and digest of every logical parameter, read anew. FP8 is digested as it is converted: as BF16."""
    dtypes = {name: output_dtype(entry.dtype, choices, name=name) for name, entry in settled.table.items()}
    return _records(settled.table, dtypes, settled.checkpoint.path, workers, block_bytes, advance)


def _records(
    table: Table, dtypes: Mapping[str, str], folder: Path, workers: int, block_bytes: int, advance: Advance
) -> dict[str, TensorRecord]:
    units = plan_reads(table, dtype_of=dtypes)
    digests = run(units, source=folder, target=None, workers=workers, block_bytes=block_bytes, advance=advance)
    return {name: TensorRecord(dtypes[name], entry.shape, digests[name].written) for name, entry in table.items()}


ONLY_IN_A, ONLY_IN_B = "only in A", "only in B"
"""Kinds of ``Difference``: what one side lacks."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of ``verify``: what was re-read and what was found to differ."""

    tensors: int
    files: int
    fingerprint: str
    problems: tuple[str, ...]


def verify(
    settled: Settled,
    manifest: Manifest | None = None,
    *,
    workers: int = 2,
    block_bytes: int = BLOCK_BYTES,
    advance: Advance = lambda count: None,
) -> Verdict:
    """Read every byte again and compare with ``manifest`` (default: the folder's own), sidecar files included.

    Raises:
        SourceError: there is no manifest, or it holds no digests.
    """
    folder = settled.checkpoint.path
    own = manifest is None
    manifest = manifest or settled.checkpoint.manifest
    if manifest is None:
        raise SourceError(f"{folder} has no qwen3conv.json to verify against; use fingerprint, or diff with the source")
    if manifest.fingerprint is None:
        raise SourceError(
            f"the manifest of {folder} holds no digests (it was made with --no-digests); use diff with the source"
        )
    found = compute_records(settled, workers=workers, block_bytes=block_bytes, advance=advance)
    promised = manifest.tensors
    problems: list[str] = []
    if own and _has_state(manifest):
        state = read_training_state(settled.checkpoint, tied=settled.tied)
        table = state.table()
        dtypes = {name: entry.dtype for name, entry in table.items()}
        found |= _records(table, dtypes, folder, workers, block_bytes, advance)
        problems += _compare_values(manifest.values, digest_values(state.values()))
    elif not own:  # of another copy of the model, which need not have its training state
        promised = {name: record for name, record in promised.items() if STATE_MARK not in name}
    problems += _compare_records(promised, found)
    if own:
        problems += _compare_files(folder, manifest.files)
    fingerprint = fingerprint_of(found)
    assert fingerprint is not None
    return Verdict(len(found), len(manifest.files) if own else 0, fingerprint, tuple(problems))


def bytes_to_verify(settled: Settled, manifest: Manifest | None = None) -> int:
    """Bytes of tensors that ``verify`` reads."""
    size = sum(entry.nbytes for entry in settled.table.values())
    own = settled.checkpoint.manifest
    if manifest is None and own is not None and _has_state(own):
        tensors = settled.checkpoint.contents.tensors
        size += sum(tensor.spec.nbytes for name, tensor in tensors.items() if unwrapped(name).startswith(NOT_MODEL))
    return size


def _has_state(manifest: Manifest) -> bool:
    return bool(manifest.values) or any(STATE_MARK in name for name in manifest.tensors)


def check(verdict: Verdict, folder: Path) -> None:
    """Raise ``VerifyError`` when a verdict names problems."""
    if verdict.problems:
        raise VerifyError(
            enumerate_problems(f"{folder} is not what its manifest promises; do not use it:", verdict.problems)
        )


def _compare_records(promised: Mapping[str, TensorRecord], found: Mapping[str, TensorRecord]) -> Iterator[str]:
    for name in sorted({*promised, *found}, key=natural_key):
        a, b = promised.get(name), found.get(name)
        if a is None:
            yield f"{name} is not in the manifest"
        elif b is None:
            yield f"{name} is missing"
        elif (a.dtype, a.shape) != (b.dtype, b.shape):
            yield f"{name}: expected {a.dtype} {list(a.shape)}, found {b.dtype} {list(b.shape)}"
        elif a.digest != b.digest:
            yield f"{name}: its bytes changed (digest {b.digest}, expected {a.digest})"


def _compare_values(promised: Mapping[str, str], found: Mapping[str, str]) -> Iterator[str]:
    for group in sorted({*promised, *found}):
        if promised.get(group) != found.get(group):
            what = "is missing" if group not in found else "changed" if group in promised else "is not in the manifest"
            yield f"{group} (its entries that are not tensors) {what}"


def _compare_files(folder: Path, promised: Mapping[str, str]) -> Iterator[str]:
    for name, digest in promised.items():
        if name.startswith("/") or ".." in name.split("/"):
            yield f"the manifest names the file {name!r}, which lies outside the folder"
            continue
        try:
            if not (folder / name).is_file():
                yield f"file {name!r} is missing"
            elif _file_digest(folder / name) != digest:
                yield f"file {name!r} changed"
        except OSError as error:  # unreadable, or a name longer than a file's can be
            yield f"file {name!r:.80} cannot be read: {error.strerror}"


def _file_digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Difference:
    """One logical parameter that is not the same in two checkpoints.

    ``max_abs`` and ``max_rel`` are largest absolute and relative errors of b against a, in float32, over elements where
    both are finite; ``unequal`` counts elements whose values differ. They are ``None`` where values cannot be compared.
    """

    name: str
    kind: str
    """``only in A``, ``only in B``, ``shape``, ``values``, ``dtype`` (same values, other dtype) or
    ``bits`` (same values, other bits: a signed zero, a NaN's payload)."""
    a: str
    b: str
    max_abs: float | None = None
    max_rel: float | None = None
    unequal: int | None = None
    elements: int | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of ``diff``. ``differences`` are in model order, the first one first."""

    compared: int
    differences: tuple[Difference, ...] = field(default=())

    @property
    def equal(self) -> bool:
        """Whether the two are the same model, bit for bit and dtype for dtype."""
        return not self.differences


def diff(a: Settled, b: Settled, *, advance: Advance = lambda count: None) -> Comparison:
    """Compare two checkpoints of any formats, parameter by parameter. A tied head is no parameter of its own."""
    left, right = a.table, b.table
    if a.tied != b.tied:  # one side says tied, the other stores two: compare the head with the embeddings
        left, right = _with_head(left), _with_head(right)
    differences = []
    with Files(a.checkpoint.path, os.O_RDONLY) as files_a, Files(b.checkpoint.path, os.O_RDONLY) as files_b:
        names = sorted({*left, *right}, key=_model_order)
        elsewhere = next((t for side, t in ((a, left), (b, right)) if remote_of(side.checkpoint.path) is not None), {})
        names.sort(key=lambda name: natural_key(elsewhere[name].copies[0][0].file) if name in elsewhere else ())
        uses = _Uses(left, names, files_a), _Uses(right, names, files_b)
        for name in names:
            mine, theirs = left.get(name), right.get(name)
            if mine is None or theirs is None:
                one = mine or theirs
                assert one is not None
                text = f"{TORCH_NAME[one.dtype]} {list(one.shape)}"
                differences.append(
                    Difference(name, ONLY_IN_B, "absent", text)
                    if mine is None
                    else Difference(name, ONLY_IN_A, text, "absent")
                )
            elif mine.shape != theirs.shape:
                differences.append(Difference(name, "shape", str(list(mine.shape)), str(list(theirs.shape))))
            else:
                found = _compare(_Side(mine, files_a), _Side(theirs, files_b), advance)
                if found is not None:
                    differences.append(found)
            for side in uses:
                side.done(name)
    differences.sort(key=lambda difference: _model_order(difference.name))
    return Comparison(len({*left} & {*right}), tuple(differences))


class _Uses:
    """Files of one checkpoint, which can go when the last parameter in them was compared."""

    def __init__(self, table: Mapping[str, Entry], names: Iterable[str], files: Files) -> None:
        self._files, self._of = files, {name: _files_of(table[name]) for name in names if name in table}
        self._left = Counter(file for found in self._of.values() for file in found)

    def done(self, name: str) -> None:
        for file in self._of.get(name, ()):
            self._left[file] -= 1
            if not self._left[file]:
                self._files.finished(file)


def _files_of(entry: Entry) -> set[str]:
    found = {extent.file for extent in entry.copies[0]}
    return found if entry.scale is None else found | {entry.scale.file}


class _Side:
    """One parameter of one checkpoint, read in row blocks."""

    def __init__(self, entry: Entry, files: Files) -> None:
        self.entry, self._files = entry, files
        move = Move(
            entry.name,
            entry.rows,
            entry.columns,
            entry.copies[0],
            entry.dtype,
            (),
            entry.dtype,
            entry.rows,
            entry.scale,
        )
        self._scales = load_scales(move, files)
        self._block, self._strided = Buffer(BLOCK_BYTES), Buffer(BLOCK_BYTES)

    @property
    def is_plain(self) -> bool:
        return self._scales is None

    def read(self, row: int, rows: int) -> memoryview:
        width = itemsize(self.entry.dtype)
        block = self._block.view(rows * self.entry.columns * width)
        gather(self.entry.copies[0], row, rows, self.entry.columns, width, block, self._files, self._strided)
        return block

    def values(self, block: memoryview, row: int) -> Float32:
        found = widen(block, self.entry.dtype)
        return found if self._scales is None else self._scales.apply(found, row)


def _compare(a: _Side, b: _Side, advance: Advance) -> Difference | None:
    entry = a.entry
    same_dtype = a.entry.dtype == b.entry.dtype and a.is_plain and b.is_plain
    width = entry.columns * max(itemsize(a.entry.dtype), itemsize(b.entry.dtype))
    step = rows_per_block((a.entry.copies[0], b.entry.copies[0]), width, BLOCK_BYTES)
    max_abs, max_rel, unequal, bits_differ = 0.0, 0.0, 0, False
    for row in range(0, entry.rows, step):
        rows = min(step, entry.rows - row)
        left, right = a.read(row, rows), b.read(row, rows)
        advance(len(left) + len(right))
        if same_dtype and xxhash.xxh3_128_digest(left) == xxhash.xxh3_128_digest(right):
            continue
        bits_differ = True
        if not {a.entry.dtype, b.entry.dtype} <= {*FLOATS, "F8_E4M3"}:
            return Difference(entry.name, "values", TORCH_NAME[a.entry.dtype], TORCH_NAME[b.entry.dtype])
        block = _errors(a.values(left, row), b.values(right, row))
        max_abs, max_rel, unequal = max(max_abs, block[0]), max(max_rel, block[1]), unequal + block[2]
    if not bits_differ:
        return None
    kind = "values" if unequal else "dtype" if a.entry.dtype != b.entry.dtype else "bits"
    names = TORCH_NAME[a.entry.dtype], TORCH_NAME[b.entry.dtype]
    return Difference(entry.name, kind, *names, max_abs, max_rel, unequal, entry.rows * entry.columns)


def _errors(a: Float32, b: Float32) -> tuple[float, float, int]:
    """Largest absolute error, largest relative error, elements that differ (two NaNs are the same value)."""
    import numpy as np

    differs = (a != b) & ~(np.isnan(a) & np.isnan(b))
    finite = np.isfinite(a) & np.isfinite(b)
    gap = np.abs(b[finite].astype(np.float64) - a[finite])
    scale = np.abs(a[finite].astype(np.float64))
    relative = np.divide(gap, scale, out=np.zeros_like(gap), where=scale > 0)
    return float(gap.max(initial=0.0)), float(relative.max(initial=0.0)), int(differs.sum())


def _with_head(table: Mapping[str, Entry]) -> dict[str, Entry]:
    return {**table, HEAD: table.get(HEAD, table[EMBEDDING])}


def _model_order(name: str) -> tuple[int, tuple[tuple[bool, int, str], ...]]:
    """Embeddings, then layers, then the final norm and the head."""
    rank = 0 if name == EMBEDDING else 1 if name.startswith("model.layers.") else 2
    return rank, natural_key(name)
