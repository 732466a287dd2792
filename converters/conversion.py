"""Carrying a conversion out: staged, journalled, flushed, proved by its manifest."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import xxhash

from .blocks import BLOCK_BYTES
from .errors import PolicyError, SourceError, enumerate_problems
from .execution import BUFFERS_PER_WORKER, Advance, Digest, run
from .file_split import indexed_files
from .formats import Format
from .manifest import ASSETS, MANIFEST, Manifest, TensorRecord
from .parameters import HEAD
from .planning import Copy, Move, Unit
from .preparation import Conversion, prepare
from .remote import remote_of
from .stores.safetensors import INDEX
from .stores.sidecars import copy_sidecars
from .stores.staging import Stage, check_destination, check_space

__all__ = ["Conversion", "block_size", "carry_out", "prepare"]

_BYTES_BESIDE_PER_TENSOR = 512
"""Bytes on disk that manifest and index or ``.metadata`` take per logical parameter, generously."""


def carry_out(
    conversion: Conversion,
    *,
    workers: int = 2,
    max_memory: int | None = None,
    digests: bool = True,
    overwrite: bool = False,
    resume: bool = False,
    advance: Advance = lambda count: None,
    tool: str = "qwen3conv",
) -> Manifest:
    """Write the output: whole, under its own name, or not at all. Returns its manifest.

    Raises:
        DestinationError: the place cannot or must not be written, or the disk is full.
        SourceError: the source cannot be read to its end.
    """
    destination = conversion.destination
    check_destination(destination, overwrite=overwrite, resume=resume)
    block_bytes = block_size(conversion, workers, max_memory)
    if not resume:
        check_space(destination.parent, _missing_bytes(conversion, {}, workers))
    with Stage(destination, conversion.plan_id(), resume=resume, overwrite=overwrite) as stage:
        check_space(destination.parent, _missing_bytes(conversion, stage.completed, workers))
        times = conversion.source.times()
        stage.create(conversion.arrangement.files)
        found = _recheck(conversion, stage, workers, block_bytes, advance)
        source = conversion.source.path
        found |= run(
            conversion.units,
            source=source,
            target=stage.path,
            workers=workers,
            block_bytes=block_bytes,
            digests=digests,
            skip=stage.completed,
            done=stage.record if digests else lambda index, result: None,
            advance=advance,
        )
        changed = [name for name, time in conversion.source.times().items() if time != times[name]]
        if changed:
            raise SourceError(
                enumerate_problems(
                    f"{source} changed while it was being read; convert it when it is complete:", changed
                )
            )
        if digests:
            _check_promises(conversion, found)
        files = _write_sidecars(conversion, stage.path)
        manifest = _manifest(conversion, found if digests else {}, files, tool)
        extras = [(MANIFEST, manifest.to_json())]
        if conversion.config is not None:
            extras.insert(0, (_assets(conversion.format) + "config.json", conversion.config))
        stage.finish(conversion.arrangement.files, extras, conversion.arrangement.trailers())
    return manifest


def block_size(conversion: Conversion, workers: int, max_memory: int | None) -> int:
    """Bytes per block so that all workers' buffers stay below ``max_memory`` bytes.

    Raises:
        PolicyError: that is too little to work with.
    """
    if max_memory is None:
        return BLOCK_BYTES
    blocks = workers * BUFFERS_PER_WORKER * conversion.blocks_per_buffer
    size = max_memory // blocks
    if size < 1 << 16:
        raise PolicyError(
            f"--max-memory {max_memory:,} bytes is too little for {workers} workers; "
            f"give at least {blocks << 16:,}, or fewer --workers"
        )
    return min(size & ~4095, BLOCK_BYTES)


def _check_promises(conversion: Conversion, found: Mapping[str, Digest]) -> None:
    """Refuse rank files that do not hold what the manifest beside them says."""
    promised = conversion.source.promised
    broken = [name for name, digest in found.items() if name in promised and digest.read != promised[name]]
    if broken:
        raise SourceError(
            enumerate_problems(
                f"{conversion.source.path} is not what its manifest promises; a file is damaged or of another run:",
                broken,
            )
        )


def _assets(target: Format) -> str:
    """Where config and tokenizer go: beside the weights where those who serve them look there."""
    return "" if target.store in ("safetensors", "vllm") else f"{ASSETS}/"


def _write_sidecars(conversion: Conversion, folder: Path) -> dict[str, str]:
    if conversion.sidecars is None:
        return {}
    prefix = _assets(conversion.format)
    place = folder / prefix
    place.mkdir(exist_ok=True)
    files = copy_sidecars(conversion.sidecars, place, conversion.sidecar_names)
    # torchtitan's own export follows the index in its assets, and fails on one of fused experts or of FP8 scales
    index = indexed_files(conversion.sidecars) if conversion.format.store != "safetensors" else None
    if index is not None and index.keys() <= {*conversion.written, HEAD}:
        files |= copy_sidecars(conversion.sidecars, place, [INDEX])
    return {prefix + name: digest for name, digest in files.items()}


def _manifest(conversion: Conversion, digests: Mapping[str, Digest], files: Mapping[str, str], tool: str) -> Manifest:
    tensors = {
        name: TensorRecord(dtype, shape, digests[name].written if name in digests else None)
        for name, (dtype, shape) in conversion.written.items()
    }
    if conversion.config is not None:
        files = {**files, _assets(conversion.format) + "config.json": xxhash.xxh3_128_hexdigest(conversion.config)}
    return Manifest(
        tool,
        conversion.source.label,
        conversion.format.name,
        conversion.layout.schema,
        tuple(p.to_dict() for p in conversion.policies),
        tensors,
        files,
        conversion.values,
    )


def _missing_bytes(conversion: Conversion, completed: Mapping[int, object], workers: int) -> int:
    """About how many bytes the output has still to take, with everything that lies beside its data files.

    Of a source elsewhere, those of the files that are here at a time are counted too.
    """
    todo = [unit for index, unit in enumerate(conversion.units) if index not in completed]
    missing = sum(move.read_bytes for unit in todo for move in unit)
    data = missing * conversion.disk_bytes // max(conversion.read_bytes, 1)
    sidecars = 0
    if conversion.sidecars is not None:
        for name in conversion.sidecar_names:
            with contextlib.suppress(OSError):  # the copy will say what is wrong with it
                sidecars += (conversion.sidecars / name).stat().st_size
    remote = remote_of(conversion.source.path)
    fetched = remote.disk_bytes(workers) if remote is not None and todo else 0
    return data + fetched + sidecars + len(conversion.written) * _BYTES_BESIDE_PER_TENSOR


def _recheck(
    conversion: Conversion, stage: Stage, workers: int, block_bytes: int, advance: Advance
) -> dict[str, Digest]:
    """Read again what an earlier try says it wrote; files with units that are not what it says are begun anew."""
    stage.completed = {i: digests for i, digests in stage.completed.items() if 0 <= i < len(conversion.units)}
    reads: list[Unit] = []
    for index in stage.completed:
        copies = [(move, copy) for move in conversion.units[index] for copy in move.targets]
        reads.append(tuple(_reading(f"{index} {i} {move.name}", move, copy) for i, (move, copy) in enumerate(copies)))
    again = run(reads, source=stage.path, target=None, workers=workers, block_bytes=block_bytes, advance=advance)
    spoiled: set[str] = set()
    for key, digest in again.items():
        unit, _, name = key.split(" ", 2)
        if stage.completed[int(unit)].get(name, ("", ""))[0] != digest.written:
            spoiled |= _files_of(conversion.units[int(unit)])
    # whole files, because what is zero by policy is never written: it is a hole in a new file
    stage.blank(spoiled)
    stage.completed = {
        i: digests for i, digests in stage.completed.items() if not spoiled & _files_of(conversion.units[i])
    }
    return {name: Digest(*pair) for digests in stage.completed.values() for name, pair in digests.items()}


def _files_of(unit: Unit) -> set[str]:
    return {extent.file for move in unit for copy in move.targets for extent in copy}


def _reading(name: str, move: Move, copy: Copy) -> Move:
    """A move that reads one written copy of ``move``'s parameter and writes nothing."""
    return Move(name, move.target_rows, move.columns, copy, move.target_dtype, (), move.target_dtype, move.target_rows)
