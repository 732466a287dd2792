"""A LoRA adapter added to a base: checked to its last value, then one low-rank addition per parameter it changes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from filecmp import cmp
from pathlib import Path

import xxhash

from .blocks import BLOCK_BYTES, Buffer, gather
from .casts import widen
from .dtypes import itemsize
from .errors import MappingError, PolicyError, SourceError, enumerate_problems
from .files import Files
from .lora_config import CONFIG, AdapterConfig, read_adapter_config
from .lora_modules import Modules
from .low_rank import Factor, LowRank
from .manifest import ASSETS
from .parameters import EMBEDDING, HEAD
from .planning import Entry
from .policies import Choices, Policy, Settled
from .stores.safetensors_header import Header, read_header
from .stores.sidecars import list_sidecars

WEIGHTS = "adapter_model.safetensors"

_LEGAL = ("readme", "license", "licence", "notice", "copying")
"""How names of files begin that say nothing of how a model is used."""


def merge_adapter(settled: Settled, choices: Choices, called: Iterable[str] = ()) -> Settled:
    """``settled`` with the adapter of ``choices`` added to its table; ``called`` are names that the base goes by.

    Raises:
        SourceError: the adapter is broken, holds values that are not finite, or is of a kind that is not merged.
        MappingError: it is for another base; every module that does not fit is listed.
        PolicyError: it parts a tied head from the embeddings, and ``--untie`` was not given.
    """
    assert choices.adapter is not None
    folder, base = choices.adapter, settled.checkpoint
    config, path = _locate(folder)
    if choices.optimizer is not None:
        raise PolicyError("the training state belongs to the weights as they are without the adapter; leave it behind")
    if any(entry.scale is not None for entry in settled.table.values()):
        raise SourceError(
            f"{base.path} is quantised (block-wise FP8): an adapter is not added to it; "
            "dequantise it first with `qwen3conv convert`, then merge"
        )
    header = read_header(path)
    table = dict(settled.table)
    if settled.tied:  # two names of one matrix, until it is known what the adapter does to them
        table[HEAD] = replace(table[EMBEDDING], name=HEAD, copies=table[EMBEDDING].copies[:1])
    modules = Modules(str(path.absolute()), header, config, table, base.geometry)
    problems = modules.problems
    if not problems:
        digest = _scan(path, header)
        problems = [
            f"it holds values of its own for {name}, the base's differ from row {row} on (trained, or resized)"
            for name, copy in modules.copies.items()
            if (row := _first_row_that_differs(table[name], base.path, copy)) is not None
        ]
    if problems:
        raise MappingError(enumerate_problems(f"{path} does not fit the base {base.path}:", problems))
    deltas = modules.deltas
    policies: list[Policy] = []
    if choices.vocab_rows is not None and not {EMBEDDING, HEAD}.isdisjoint(deltas):
        raise PolicyError("--vocab-rows and an adapter for embeddings or head: merge first, then change the rows")
    tied = settled.tied and _stays_tied(deltas, choices, str(base.path), policies)
    if tied:
        del table[HEAD]
    policies.insert(0, _describe(config, folder, modules, digest))
    for name, delta in deltas.items():
        table[name] = replace(table[name], delta=delta)
    if config.base is not None and _last_segment(config.base) not in {_last_segment(name) for name in called}:
        summary = f"the adapter calls its base {config.base}; it is added to {base.path}"
        policies.append(Policy("lora-base", summary, {"base": config.base}, warning=True))
    policies += _files_left(folder, base.path)
    return replace(settled, tied=tied, table=table, policies=(*settled.policies, *policies))


def adapter_files(folder: Path) -> dict[str, int]:
    """The files that an adapter is read from, by absolute path, and their sizes in bytes."""
    try:
        return {str(path): path.stat().st_size for name in (WEIGHTS, CONFIG) for path in (folder.absolute() / name,)}
    except OSError as error:
        raise SourceError(f"{error.filename} cannot be read: {error.strerror}") from error


def _locate(folder: Path) -> tuple[AdapterConfig, Path]:
    if not folder.is_dir():
        raise SourceError(f"{folder} is {'a file' if folder.exists() else 'not there'}; name the adapter's folder")
    names = sorted(os.listdir(folder))
    if CONFIG not in names:
        below = next((name for name in names if (folder / name / CONFIG).is_file()), None)
        hint = f"; {folder / below} has one" if below else f": found {', '.join(names[:6]) or 'nothing'}"
        raise SourceError(f"{folder} is no LoRA adapter, it has no {CONFIG}{hint}")
    config = read_adapter_config(folder)
    if WEIGHTS not in names:
        pickled = next((name for name in names if name.startswith("adapter_model.")), None)
        found = f"{pickled}, which is not read: load it with PEFT and save it as safetensors" if pickled else "none"
        raise SourceError(f"{folder} has no {WEIGHTS}: found {found}")
    return config, folder / WEIGHTS


def _describe(config: AdapterConfig, folder: Path, modules: Modules, digest: str) -> Policy:
    """The policy of the merge: what is added, and by how much."""
    ranks = sorted({delta.rank for delta in modules.deltas.values()})
    scales = sorted({delta.scale for delta in modules.deltas.values()})
    untouched = modules.untouched_kinds()
    lacks = f"; it targets {', '.join(untouched)} too, but holds nothing for that" if untouched else ""
    return Policy(
        "merge-lora",
        f"{folder} is added to {len(modules.deltas)} of the base's matrices ({modules.count} modules, "
        f"rank {_span(ranks)}, scale {_span(scales)}): W + scale * B @ A in float32, rounded once{lacks}",
        {
            "adapter": str(folder),
            "digest": digest,
            "modules": modules.count,
            "parameters": len(modules.deltas),
            "ranks": ranks,
            "scales": scales,
            "rslora": config.use_rslora,
            "targets_without_tensors": untouched,
        },
        warning=bool(untouched),
    )


def _files_left(folder: Path, base: Path) -> list[Policy]:
    """Tokenizer and template files beside an adapter that are not those of the base: they are not carried."""
    names = [name for name in list_sidecars(folder).carried if not name.lower().startswith(_LEGAL)]
    other = [
        name
        for name in names
        if not any(
            path.is_file() and cmp(folder / name, path, shallow=False) for path in (base / name, base / ASSETS / name)
        )
    ]
    if not other:
        return []
    summary = (
        f"beside the adapter lie {', '.join(other[:6])}, not as they are beside the base: the output has the base's; "
        "copy them into it if the adapter was trained with them"
    )
    return [Policy("lora-files", summary, {"files": other}, warning=True)]


def _stays_tied(deltas: dict[str, LowRank], choices: Choices, base: str, policies: list[Policy]) -> bool:
    """Whether a tied head is still the embeddings afterwards; a head that is changed as they are needs no entry.

    Raises:
        PolicyError: it is not, and ``--untie`` was not given.
    """
    head, embedding = deltas.get(HEAD), deltas.get(EMBEDDING)
    if head is None and embedding is None:
        return True
    if head is not None and embedding is not None and _same_product(head, embedding):
        del deltas[HEAD]
        return True
    what = "both, each in its own way" if head and embedding else "the head alone" if head else "the embeddings alone"
    if not choices.untie:
        raise PolicyError(
            f"the head of {base} is tied to its embeddings, and the adapter changes {what}: merged, the two differ. "
            "Pass --untie to store both and say so in the config"
        )
    policies.append(
        Policy(
            "untie",
            f"the adapter changes {what} of a tied model: both are stored, tie_word_embeddings becomes false",
            warning=True,
        )
    )
    return False


def _same_product(a: LowRank, b: LowRank) -> bool:
    """Whether two additions have the same factors, value for value."""
    if (a.scale, a.rank, a.left.rows) != (b.scale, b.rank, b.left.rows):
        return False
    with Files(Path("/"), os.O_RDONLY) as files:
        for mine, theirs in ((a.right, b.right), (a.left, b.left)):
            step = max(1, BLOCK_BYTES // (4 * mine.columns))
            for row in range(0, mine.rows, step):
                rows = min(step, mine.rows - row)
                if (mine.read(files.read_into, row, rows) != theirs.read(files.read_into, row, rows)).any():
                    return False
    return True


def _first_row_that_differs(entry: Entry, folder: Path, copy: Factor) -> int | None:
    """The first row in which a stored parameter and a copy of it differ as numbers; ``None`` for none."""
    width = entry.columns * itemsize(entry.dtype)
    step = max(1, BLOCK_BYTES // (4 * entry.columns))
    buffer, strided = Buffer(step * width), Buffer(BLOCK_BYTES)
    with Files(folder, os.O_RDONLY) as files:
        for row in range(0, entry.rows, step):
            rows = min(step, entry.rows - row)
            block = buffer.view(rows * width)
            gather(entry.copies[0], row, rows, entry.columns, itemsize(entry.dtype), block, files, strided)
            unequal = widen(block, entry.dtype).reshape(rows, -1) != copy.read(files.read_into, row, rows)
            if unequal.any():
                return row + int(unequal.any(axis=1).argmax())
    return None


def _scan(path: Path, header: Header) -> str:
    """The xxh3_128 of an adapter's names, dtypes, shapes and bytes.

    Raises:
        SourceError: values that are not finite; every tensor that has some is named.
    """
    import numpy as np

    digest, buffer = xxhash.xxh3_128(), Buffer(BLOCK_BYTES)
    broken: list[str] = []
    with Files(path.parent, os.O_RDONLY) as files:
        for name, entry in header.tensors.items():
            digest.update(f"{name} {entry.dtype} {list(entry.shape)}\n".encode())
            lost = 0
            for begin in range(entry.begin, entry.end, BLOCK_BYTES):
                block = buffer.view(min(BLOCK_BYTES, entry.end - begin))
                files.read_into(path.name, header.data_start + begin, block)
                digest.update(block)
                lost += int(np.count_nonzero(~np.isfinite(widen(block, entry.dtype))))
            if lost:
                broken.append(f"{name}: {lost} of {(entry.end - entry.begin) // itemsize(entry.dtype)} values")
    if broken:
        raise SourceError(
            enumerate_problems(f"{path} holds values that are not finite (a training that diverged?):", broken)
        )
    return digest.hexdigest()


def _span(values: Iterable[float]) -> str:
    low, *_, high = (listed := sorted(values))[0], listed[-1]
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _last_segment(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].casefold()
