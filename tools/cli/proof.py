"""``fingerprint``, ``verify`` and ``diff``: is it the same model, and if not, where does it differ?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import click

from .command import DIFFERENT, Command
from .options import json_option, keep_download_option, reading_options, source_argument, untie_option, workers_option
from .output import format_count, note, print_json, print_table, say, warn
from .progress import progress

if TYPE_CHECKING:
    from qwen3conv.converters.policies import Settled
    from qwen3conv.converters.stores.nxd_bindings import Queries
    from qwen3conv.converters.verification import Comparison, Difference

_DIFFERENCES_SHOWN = 40


@click.command(cls=Command, example="qwen3conv fingerprint qwen3-dcp")
@source_argument("path", "PATH")
@untie_option
@reading_options
@keep_download_option
@workers_option
@json_option
def fingerprint(
    path: str, untie: bool, like: str | None, query_heads: Queries | None, keep_download: bool, workers: int, json: bool
) -> None:
    """One hash of a model, the same in every format.

    Every byte is read. Names, dtypes, shapes and values decide, not files, fusion or shards; a tied head does not
    count.
    """
    from qwen3conv.converters.manifest import fingerprint_of
    from qwen3conv.converters.verification import compute_records

    with _opened(path, untie, like, query_heads, keep_download) as settled:
        with _reading(_table_bytes(settled), settled) as advance:
            found = fingerprint_of(compute_records(settled, workers=workers, advance=advance))
        manifest, where = settled.checkpoint.manifest, _where_is(settled, path)
    if manifest is not None and manifest.fingerprint not in (None, found):
        warn(f"its manifest says {manifest.fingerprint}; qwen3conv verify {quote(path)} tells what changed")
    if json:
        print_json({"fingerprint": found, "path": str(where), "tensors": len(settled.table)})
    else:
        say(str(found))


@click.command(cls=Command, example="qwen3conv verify qwen3-dcp")
@source_argument("path", "PATH")
@click.option(
    "--manifest",
    "manifest_file",
    type=click.Path(exists=True, path_type=Path),
    metavar="FILE",
    help="Compare with the qwen3conv.json of another copy of the model, not with the folder's own.",
)
@untie_option
@reading_options
@keep_download_option
@workers_option
@json_option
def verify(
    path: str,
    manifest_file: Path | None,
    untie: bool,
    like: str | None,
    query_heads: Queries | None,
    keep_download: bool,
    workers: int,
    json: bool,
) -> None:
    """Read everything again and compare with the manifest.

    The source is not needed. Exit 1 when a byte changed: do not use the checkpoint then.
    """
    from qwen3conv.converters.manifest import MANIFEST, read_manifest
    from qwen3conv.converters.verification import bytes_to_verify, check
    from qwen3conv.converters.verification import verify as run

    manifest = None
    if manifest_file is not None and (manifest := read_manifest(manifest_file)) is None:
        raise click.BadParameter(f"there is no {MANIFEST} in {manifest_file}", param_hint="--manifest")
    with (
        _opened(path, untie, like, query_heads, keep_download) as settled,
        _reading(bytes_to_verify(settled, manifest), settled) as advance,
    ):
        verdict = run(settled, manifest, workers=workers, advance=advance)
        where = _where_is(settled, path)
    if json:
        print_json(
            {
                "verified": not verdict.problems,
                "fingerprint": verdict.fingerprint,
                "tensors": verdict.tensors,
                "files": verdict.files,
                "problems": list(verdict.problems),
            }
        )
    check(verdict, where)
    if not json:
        beside = f" and {format_count(verdict.files, 'file')} beside them" if verdict.files else ""
        say(f"{where}: verified, {format_count(verdict.tensors, 'tensor')}{beside}")
        print_table([("fingerprint", verdict.fingerprint)])


@click.command(cls=Command, example="qwen3conv diff Qwen/Qwen3-0.6B qwen3-hf")
@source_argument("a", "A")
@source_argument("b", "B")
@untie_option
@reading_options
@keep_download_option
@json_option
def diff(
    a: str, b: str, untie: bool, like: str | None, query_heads: Queries | None, keep_download: bool, json: bool
) -> None:
    """Which layer, expert and projection differ, and by how much.

    The two may be of different formats. Exit 0 when they are the same bit for bit, 3 when they differ.
    """
    from qwen3conv.converters.verification import diff as run
    from qwen3conv.tools.hub_remote import read_once

    with (
        read_once(a, keeps=keep_download, announce=note) as first,
        read_once(b, keeps=keep_download, announce=note) as second,
    ):
        folders = first.path, second.path
        left, right = (
            _settled(folder, place, untie, like, queries)
            for folder, place, queries in zip(folders, (a, b), _query_heads_of(folders, query_heads), strict=True)
        )
        with _reading(_table_bytes(left) + _table_bytes(right), left, right) as advance:
            found = run(left, right, advance=advance)
    if json:
        print_json(
            {
                "equal": found.equal,
                "compared": found.compared,
                "differences": [_difference_dict(difference) for difference in found.differences],
            }
        )
    elif found.equal:
        say(f"the same: {format_count(found.compared, 'parameter')}, bit for bit")
    else:
        _show_differences(found)
    if not found.equal:
        raise click.exceptions.Exit(DIFFERENT)


@contextmanager
def _opened(place: str, untie: bool, like: str | None, queries: Queries | None, keeps: bool) -> Iterator[Settled]:
    from qwen3conv.tools.hub_remote import read_once

    with read_once(place, keeps=keeps, announce=note) as found:
        yield _settled(found.path, place, untie, like, queries)


def _settled(folder: Path, place: str, untie: bool, like: str | None, queries: Queries | None) -> Settled:
    from qwen3conv.converters.detection import open_checkpoint
    from qwen3conv.converters.policies import Choices, settle
    from qwen3conv.tools.hub import resolve_like

    config = None if like is None else resolve_like(like, announce=note).path
    settled = settle(open_checkpoint(folder, like=config, queries=queries), Choices(untie=untie))
    for policy in settled.policies:
        if policy.warning:
            warn(f"{place}: {policy.summary}")
    return settled


def _where_is(settled: Settled, place: str) -> Path:
    """The folder; for a hub id, whose folder goes, the id."""
    from qwen3conv.converters.remote import remote_of

    return Path(place) if remote_of(settled.checkpoint.path) is not None else settled.checkpoint.path


@contextmanager
def _reading(total: int, *sides: Settled) -> Iterator[Callable[[int], None]]:
    """A progress bar over what is read, and what comes from the hub for it."""
    from qwen3conv.converters.remote import remote_of
    from qwen3conv.tools.hub_files import HubFiles

    remotes = [remote_of(side.checkpoint.path) for side in sides]
    fetching = [(one, side) for one, side in zip(remotes, sides, strict=True) if isinstance(one, HubFiles)]
    total += sum(one.bytes_to_fetch(_files_read(side)) for one, side in fetching)
    with progress("reading" if len(sides) == 1 else "comparing", total) as advance:
        for one, _ in fetching:
            one.advance = advance
        yield advance


def _files_read(settled: Settled) -> set[str]:
    return {extent.file for entry in settled.table.values() for extent in entry.copies[0]}


def _query_heads_of(folders: tuple[Path, Path], queries: Queries | None) -> tuple[Queries | None, Queries | None]:
    """``queries`` for the sides that are NxD's shards; for both where neither is, so that it is refused."""
    if queries is None:
        return None, None
    from qwen3conv.converters.cut_checkpoints import NEURON_STORES
    from qwen3conv.converters.location import locate_checkpoint

    a, b = (locate_checkpoint(folder)[1] in NEURON_STORES for folder in folders)
    return queries if a or not b else None, queries if b or not a else None


def _table_bytes(settled: Settled) -> int:
    return sum(entry.nbytes for entry in settled.table.values())


def _difference_dict(difference: Difference) -> dict[str, object]:
    from qwen3conv.converters.parameters import describe

    return {
        "name": difference.name,
        "where": describe(difference.name),
        "kind": difference.kind,
        "a": difference.a,
        "b": difference.b,
        "max_abs": difference.max_abs,
        "max_rel": difference.max_rel,
        "unequal": difference.unequal,
        "elements": difference.elements,
    }


def _show_differences(found: Comparison) -> None:
    say(f"different: {len(found.differences):,} of {format_count(_parameters(found), 'parameter')}")
    cast = Counter((d.a, d.b) for d in found.differences if d.kind == "dtype")
    others = [difference for difference in found.differences if difference.kind != "dtype"]
    for (a, b), count in cast.items():
        those = f"all {count:,}" if not others and len(cast) == 1 else f"{count:,} of them"
        say(f"{those} differ in dtype only, same values: {a} in A, {b} in B")
    if not others:
        return
    first = others[0]
    say(f"first{' of the others' if cast else ''}: {_where(first)}, {_what(first)} ({first.name})")
    shown = others[:_DIFFERENCES_SHOWN]
    rows: list[Sequence[str]] = []
    for layer, members in groupby(shown, key=lambda difference: _place(difference.name)[0]):
        for index, difference in enumerate(members):
            where = _place(difference.name)[1]
            rows.append((layer if index == 0 else "", where, difference.kind, *_numbers(difference)))
    print_table(rows, ("LAYER", "PARAMETER", "KIND", "MAX ABS", "MAX REL", "UNEQUAL"), right=(3, 4, 5))
    if len(others) > len(shown):
        say(f"and {len(others) - len(shown):,} more; --json lists all")


def _parameters(found: Comparison) -> int:
    """Parameters that either side has."""
    return found.compared + sum(difference.kind.startswith("only in") for difference in found.differences)


def _where(difference: Difference) -> str:
    from qwen3conv.converters.parameters import describe

    return describe(difference.name)


def _place(name: str) -> tuple[str, str]:
    """Layer and the rest of a parameter's description: ``("layer 3", "expert 17, up_proj")``."""
    from qwen3conv.converters.parameters import describe

    layer, comma, rest = describe(name).partition(", ")
    return (layer, rest) if comma and layer.startswith("layer ") else ("-", describe(name))


def _what(difference: Difference) -> str:
    if difference.kind.startswith("only in"):
        return f"{difference.kind}: {difference.b if difference.a == 'absent' else difference.a}"
    if difference.kind == "shape":
        return f"shape {difference.a} in A, {difference.b} in B"
    if difference.kind == "bits":
        return "the same values with other bits (a signed zero, or a NaN)"
    if difference.unequal is None:
        return "other bytes"
    dtypes = f", {difference.a} in A and {difference.b} in B" if difference.a != difference.b else ""
    return (
        f"{difference.unequal:,} of {difference.elements:,} elements differ, "
        f"by at most {difference.max_abs:.3g}{dtypes}"
    )


def _numbers(difference: Difference) -> Iterator[str]:
    if difference.kind == "shape" or difference.kind.startswith("only in"):
        yield from (difference.a, difference.b, "")
        return
    yield "" if difference.max_abs is None else f"{difference.max_abs:.3g}"
    yield "" if difference.max_rel is None else f"{difference.max_rel:.3g}"
    yield "" if difference.unequal is None else f"{difference.unequal:,} of {difference.elements:,}"
