"""``make bench``: qwen3conv beside ``cp`` and beside other people's converters, in one run.

Every round runs every case once, whole process, inputs in the page cache, in an order that changes from round to round.
Flushed against flushed: qwen3conv returns when its output is on the disk, so ``cp`` is followed by ``sync`` of what it
wrote. Bytes written against bytes written: each conversion is compared with ``cp`` of the very folder that it writes,
in the same round. Nothing is judged by seconds here: machines differ, and this one may be busy.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from qwen3conv.converters.conversion import Conversion, prepare
from qwen3conv.converters.errors import ConversionError, DestinationError
from qwen3conv.converters.manifest import ASSETS
from qwen3conv.converters.stores.staging import Stage, partial_path

from .bench_cases import (
    CAST,
    COPY,
    GROUPS,
    SHAPES,
    SHARD,
    Case,
    Folders,
    Shape,
    own_cases,
    qwen3conv,
    shard_cases,
    titan_cases,
    transformers_case,
)
from .bench_process import CommandFailed, available_memory, measure, size_of, warm
from .bench_report import (
    HELP_SECONDS,
    PEAK,
    PLAN_PEAK,
    PLAN_SECONDS,
    Figures,
    Report,
    ShapeReport,
    SingleReport,
    goals_json,
    show_goals,
)
from .cli.output import format_bytes, note, say, warn
from .generate import arrange, describe, generate

LARGEST = "235B-A22B"
START, PLAN = "start", "plan"
INSTALLED = "installed"


class Names(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.4
    """A comma-separated list of names."""

    name = "names"

    def __init__(self, known: Sequence[str]) -> None:
        self._known = known

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """The names, each of them known."""
        names = tuple(value.split(",")) if isinstance(value, str) else tuple(value)
        for name in names:
            if name not in self._known:
                self.fail(f"{name!r} is not one of {', '.join(self._known)}", param, ctx)
        return names


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--shapes", type=Names([*SHAPES]), default="0.6B,1.7B,moe-study", show_default=True, help="Models to convert."
)
@click.option(
    "--only",
    type=Names([START, PLAN, *GROUPS, SHARD]),
    default=",".join([START, PLAN, *GROUPS, SHARD]),
    show_default=True,
    help="What to measure.",
)
@click.option("--rounds", type=click.IntRange(1), default=6, show_default=True)
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where to write: tens of GB, removed at the end. Default: the system's folder for temporary files.",
)
@click.option(
    "--torchtitan",
    metavar=f"CHECKOUT|{INSTALLED}",
    help="Also run the conversion scripts of this checkout, or the library calls that they make.",
)
@click.option("--transformers", is_flag=True, help="Also load and save with transformers.")
@click.option("--torch", is_flag=True, help="Also reshard with torch's dcp.load and dcp.save.")
@click.option("--peer-rounds", type=click.IntRange(1), default=2, show_default=True, help="Rounds that peers run in.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write every measurement there."
)
def main(
    shapes: tuple[str, ...],
    only: tuple[str, ...],
    rounds: int,
    folder: Path | None,
    torchtitan: str | None,
    transformers: bool,
    torch: bool,
    peer_rounds: int,
    json_file: Path | None,
) -> None:
    """Time qwen3conv beside cp and the peers, and print ratios, CPU and peak memory."""
    checkout = None if torchtitan in (None, INSTALLED) else Path(torchtitan or "").resolve()
    if checkout is not None and not (checkout / "scripts" / "checkpoint_conversion").is_dir():
        raise click.BadParameter(f"{checkout} has no scripts/checkpoint_conversion", param_hint="--torchtitan")
    groups = tuple(group for group in (*GROUPS, SHARD) if group in only)
    wanted = [SHAPES[name] for name in shapes] if groups else []
    reports: list[Report] = []
    try:
        with _scratch(folder) as root:
            system = f"{platform.system()} {platform.release()}"
            say(f"{platform.machine()}, {os.cpu_count()} CPUs, {system}, in {root.parent}")
            for shape in wanted:
                _check_space(root, shape, groups)
            if START in only:
                reports.append(_shown(_start(root, rounds)))
            if PLAN in only:
                reports.append(_shown(_plans(root, min(rounds, 3))))
            for shape in wanted:
                folders = Folders(root / shape.name)
                cases = [*own_cases(folders, groups)]
                if SHARD in groups:
                    cases += shard_cases(folders, shape, torch=torch)
                if torchtitan is not None:
                    cases += titan_cases(folders, shape, checkout)
                if transformers:
                    cases.append(transformers_case(folders))
                reports.append(_shown(_compare(shape, folders, cases, groups, rounds, peer_rounds)))
                shutil.rmtree(folders.root)
    except ConversionError as error:
        raise click.ClickException(str(error)) from error
    show_goals(reports)
    if json_file is not None:
        content = {"reports": [report.to_json() for report in reports], "goals": goals_json(reports)}
        json_file.write_text(json.dumps(content, indent=1) + "\n")


def _compare(
    shape: Shape, folders: Folders, cases: Sequence[Case], groups: Sequence[str], rounds: int, peer_rounds: int
) -> ShapeReport:
    """Make the shape's checkpoints, then run every case in every round."""
    folders.root.mkdir()
    note(f"{shape.name}: making the checkpoints")
    made = generate(folders.hf, shape.size, layers=shape.layers, vocab=shape.vocab)
    if COPY in groups or any(case.reads == folders.dcp for case in cases):
        measure(qwen3conv("hf-to-dcp", folders.hf, folders.dcp), folders.log)
    if CAST in groups:
        measure(qwen3conv("hf-to-dcp", folders.hf, folders.dcp_wide, "--dtype", "float32"), folders.log)
    if SHARD in groups:
        measure(qwen3conv("shard", folders.hf, folders.ranks, *shape.mesh), folders.log)
    figures = {case.name: Figures() for case in cases}
    for number in range(rounds):
        for case in _order(cases, number):
            found = figures[case.name]
            if found.failed or (case.is_peer and number >= peer_rounds):
                continue
            if lacking := _lacking_memory(case, made.nbytes):
                found.failed = f"left out: {lacking}"
                warn(f"{shape.name}: {case.name}: {found.failed}")
                continue
            note(f"{shape.name}: round {number + 1} of {rounds}: {case.name}")
            warm([case.reads])
            try:
                found.rounds[number] = measure(case.command, folders.log, first_on_path=case.path)
                found.written = size_of(folders.out)
            except CommandFailed as error:
                found.failed = f"failed, {error}"
                warn(f"{shape.name}: {case.name}: {found.failed}")
            finally:
                for left in (folders.out, partial_path(folders.out)):
                    shutil.rmtree(left, ignore_errors=True)
    _check_written(cases, figures)
    return ShapeReport(shape, made.tensors, made.nbytes, cases, figures)


def _order(cases: Sequence[Case], number: int) -> list[Case]:
    """The cases of a round, begun one later than in the last round, and every other time backwards from there."""
    first = number % len(cases)
    order = [*cases[first:], *cases[:first]]
    return [order[0], *order[:0:-1]] if number % 2 else order


def _lacking_memory(case: Case, nbytes: int) -> str | None:
    """Why a peer is not run: it would take the memory of everything else. ``None`` when there is enough."""
    needed, available = case.memory * nbytes, available_memory()
    if available is None or needed <= available:
        return None
    return f"needs some {format_bytes(needed)} of memory, {format_bytes(available)} are available"


def _check_written(cases: Sequence[Case], figures: dict[str, Figures]) -> None:
    """A ratio of unequal outputs would mean nothing, so it is not reported. A manifest may be on one side only."""
    for case in cases:
        ours, theirs = figures[case.name], figures.get(case.beside or "")
        if theirs is None or case.is_peer or not (ours.rounds and theirs.rounds):
            continue
        if abs(ours.written - theirs.written) > 0.005 * theirs.written + 100_000:
            sizes = f"{ours.written:,} bytes against {theirs.written:,}"
            raise DestinationError(f"{case.name} does not write what {case.beside} writes: {sizes}")


def _start(root: Path, rounds: int) -> SingleReport:
    """How long the command takes to say anything at all."""
    commands = {"qwen3conv --help": qwen3conv("--help"), "qwen3conv --version": qwen3conv("--version")}
    return _singles("Start-up", commands, root, rounds, HELP_SECONDS, PEAK)


def _plans(root: Path, rounds: int) -> SingleReport:
    """Plans of the largest model, from files that are all header and hole."""
    hf, dcp, out = root / "largest-hf", root / "largest-dcp", root / "largest-out"
    note(f"{LARGEST}: making hollow checkpoints")
    generate(hf, LARGEST, sparse=True)
    hollow_copy(prepare(hf, dcp, "titan"))
    commands = {
        f"plan {LARGEST}, hf to titan": qwen3conv("plan", hf, out, "--to", "titan", "--json"),
        f"plan {LARGEST}, titan to hf": qwen3conv("plan", dcp, out, "--to", "hf", "--json"),
    }
    report = _singles("Plans, from headers alone", commands, root, rounds, PLAN_SECONDS, PLAN_PEAK)
    shutil.rmtree(hf)
    shutil.rmtree(dcp)
    return report


def _singles(
    title: str, commands: dict[str, tuple[str, ...]], root: Path, rounds: int, seconds: float, peak: float
) -> SingleReport:
    figures = {name: Figures() for name in commands}
    for number in range(rounds):
        for name, command in commands.items():
            try:
                figures[name].rounds[number] = measure(command, root / "log")
            except CommandFailed as error:
                figures[name].failed = f"failed, {error}"
    return SingleReport(title, seconds, peak, figures)


def hollow_copy(conversion: Conversion) -> None:
    """Write a conversion's output with every header and no element: it takes no space, and it can be planned from."""
    with Stage(conversion.destination, conversion.plan_id(), resume=False) as stage:
        stage.create(conversion.arrangement.files)
        extras = [] if conversion.config is None else [(f"{ASSETS}/config.json", conversion.config)]
        stage.finish(conversion.arrangement.files, extras, conversion.arrangement.trailers())


def _check_space(root: Path, shape: Shape, groups: Sequence[str]) -> None:
    """Refuse, before anything is made, what the disk cannot take: inputs, and the largest output beside them.

    Raises:
        DestinationError: with both numbers.
    """
    config, stores_head = describe(shape.size, layers=shape.layers, vocab=shape.vocab)
    hf = sum(file.size for file in arrange(config, stores_head=stores_head).files)
    inputs = hf * ((4 if CAST in groups else 2) + (SHARD in groups))
    needed = inputs + 2 * hf
    free = shutil.disk_usage(root).free
    if needed > free:
        raise DestinationError(
            f"{shape.name} takes {format_bytes(needed)}, and {root.parent} has {format_bytes(free)} free; "
            "choose another --folder, or smaller --shapes"
        )


@contextmanager
def _scratch(folder: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="qwen3conv-bench-", dir=folder) as name:
        yield Path(name)


def _shown(report: Report) -> Report:
    report.show()
    return report


if __name__ == "__main__":
    main()
