"""What the benchmark runs on one shape of model: the commands, what each reads, and what it is compared with."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from .bench_peers import CUT


class Shape(NamedTuple):
    """A generated model: a size of ``generate``, cut or not."""

    name: str
    size: str
    flavor: str
    """torchtitan's flavor of these widths."""
    layers: int | None = None
    vocab: int | None = None
    is_cut: bool = False
    """Whether torchtitan has no flavor of exactly these sizes."""
    mesh: tuple[str, ...] = ("--tp", "4", "--fsdp", "4")
    """What ``shard`` cuts it for."""
    other_mesh: tuple[str, ...] = ("--tp", "8")
    """What ``reshard`` cuts that for."""
    judged: bool = False
    """Whether the ratios to ``cp`` count: the model is so large that starting the process does not."""


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("0.6B", "0.6B", "0.6B"),
        Shape("1.7B", "1.7B", "1.7B", judged=True),
        Shape("4B", "4B", "4B", judged=True),
        Shape("8B", "8B", "8B", judged=True),
        Shape(
            "moe-study",
            "moe-study",
            "30B-A3B",
            is_cut=True,
            mesh=("--tp", "2", "--fsdp", "2", "--ep", "4"),
            other_mesh=("--fsdp", "8"),
            judged=True,
        ),
        Shape("smallest", "0.6B", "0.6B", layers=1, vocab=512, is_cut=True),
    )
}


class Folders(NamedTuple):
    """Where a shape's checkpoints lie. ``out`` is written by every case and removed after it."""

    root: Path

    @property
    def hf(self) -> Path:
        """bfloat16, as the hub has it."""
        return self.root / "hf"

    @property
    def dcp(self) -> Path:
        """The same as torchtitan's DCP."""
        return self.root / "dcp"

    @property
    def dcp_wide(self) -> Path:
        """The same DCP in float32."""
        return self.root / "dcp-fp32"

    @property
    def ranks(self) -> Path:
        """The bfloat16 checkpoint, cut for the shape's mesh."""
        return self.root / "ranks"

    @property
    def out(self) -> Path:
        """What the case at hand writes."""
        return self.root / "out"

    @property
    def log(self) -> Path:
        """What the case at hand prints."""
        return self.root / "log"


@dataclass(frozen=True, slots=True)
class Case:
    """A command that reads a checkpoint and writes ``Folders.out``."""

    name: str
    command: tuple[str, ...]
    reads: Path
    beside: str | None = None
    """The ``cp`` case that writes the same bytes."""
    at_most: float | None = None
    """Ratio of wall time to that ``cp`` that is to be reached, on shapes that are ``judged``."""
    on_every_shape: bool = False
    """Whether it is to be reached on small shapes too."""
    faster: dict[str, str] = field(default_factory=dict)
    """For a peer: the cases of ours that do its job -> how the two outputs compare."""
    outrun_by: str | None = None
    """For a peer: the case of ours that a user runs instead, and that is to be many times faster."""
    memory: float = 0.0
    """For a peer: memory that it is known to take, in sizes of the bfloat16 checkpoint."""
    path: Path | None = None
    """Where its Python looks first for modules."""

    @property
    def is_peer(self) -> bool:
        """Whether somebody else's program is run."""
        return self.memory > 0


COPY, CAST, SHARD = "copy", "cast", "shard"
GROUPS = (COPY, CAST)


def qwen3conv(*arguments: str | Path) -> tuple[str, ...]:
    """The command line of this Python's qwen3conv."""
    return (sys.executable, "-m", "qwen3conv", *map(str, arguments))


def own_cases(folders: Folders, groups: tuple[str, ...] = GROUPS) -> Iterator[Case]:
    """``cp`` of everything that is written, and the conversions."""
    hf, dcp, wide, out = folders.hf, folders.dcp, folders.dcp_wide, folders.out
    yield Case("cp hf, not flushed", ("cp", "-r", str(hf), str(out)), hf)
    yield Case("cp hf", _flushed_copy(hf, out), hf)
    if COPY in groups:
        yield Case("cp dcp", _flushed_copy(dcp, out), dcp)
        yield Case("hf-to-dcp", qwen3conv("hf-to-dcp", hf, out), hf, "cp dcp", 1.5)
        yield Case("hf-to-dcp, no digests", qwen3conv("hf-to-dcp", hf, out, "--no-digests"), hf, "cp dcp", 1.2)
        yield Case("dcp-to-hf", qwen3conv("dcp-to-hf", dcp, out), dcp, "cp hf", 1.5)
        yield Case("dcp-to-hf, no digests", qwen3conv("dcp-to-hf", dcp, out, "--no-digests"), dcp, "cp hf", 1.2)
    if CAST in groups:
        widen, narrow = ("--dtype", "float32"), ("--dtype", "bfloat16")
        yield Case("cp dcp fp32", _flushed_copy(wide, out), wide)
        yield Case("hf-to-dcp, bf16 to fp32", qwen3conv("hf-to-dcp", hf, out, *widen), hf, "cp dcp fp32", 3.0)
        yield Case("dcp-to-hf, fp32 to bf16", qwen3conv("dcp-to-hf", wide, out, *narrow), wide, "cp hf", 3.0)


def shard_cases(folders: Folders, shape: Shape, *, torch: bool = False) -> Iterator[Case]:
    """``cp`` of rank files, and cutting, cutting anew and joining; with ``torch`` also what ``dcp.load`` takes."""
    hf, ranks, out = folders.hf, folders.ranks, folders.out
    yield Case("cp ranks", _flushed_copy(ranks, out), ranks)
    yield Case("shard", qwen3conv("shard", hf, out, *shape.mesh), hf, "cp ranks", 2.0, on_every_shape=True)
    yield Case(
        "reshard", qwen3conv("reshard", ranks, out, *shape.other_mesh), ranks, "cp ranks", 2.0, on_every_shape=True
    )
    yield Case("merge", qwen3conv("merge", ranks, out), ranks, "cp hf", 2.0, on_every_shape=True)
    if torch:
        how = "it needs no mesh, and writes one file"
        command = _peer("dcp-reshard", folders.dcp, out)
        yield Case("dcp.load, dcp.save", command, folders.dcp, faster={"reshard": how}, memory=1.5)


def titan_cases(folders: Folders, shape: Shape, checkout: Path | None) -> Iterator[Case]:
    """torchtitan's conversion scripts in ``checkout``; without one, the same library calls.

    Its DCP is float32 whatever the source is. Memory: up to 3.4 and 5.1 times the checkpoint with torchtitan 0.3.0.
    """
    hf, dcp, out = folders.hf, folders.dcp, folders.out
    if checkout is None:
        there, back = "titan adapter, dcp.save", "dcp.load, titan adapter"
        there_command = _peer("titan-from-hf", shape.flavor, hf, out)
        back_command = _peer("titan-to-hf", shape.flavor, dcp, out, hf)
    else:
        there, back = "titan convert_from_hf.py", "titan convert_to_hf.py"
        there_command = _script(checkout, "convert_from_hf.py", shape, hf, (hf, out))
        assets = ("--export_dtype", "bfloat16", "--hf_assets_path", hf)
        back_command = _script(checkout, "convert_to_hf.py", shape, hf, (dcp, out, *assets))
    half, same = "it writes fp32, twice the bytes", "the same bytes"
    yield Case(
        there,
        there_command,
        hf,
        faster={"hf-to-dcp": half, "hf-to-dcp, bf16 to fp32": same},
        outrun_by="hf-to-dcp",
        memory=3.6,
        path=checkout,
    )
    yield Case(back, back_command, dcp, faster={"dcp-to-hf": same}, outrun_by="dcp-to-hf", memory=5.3, path=checkout)


def transformers_case(folders: Folders) -> Case:
    """``from_pretrained`` and ``save_pretrained``: the least that a conversion through transformers would do."""
    return Case(
        "transformers load + save", _peer("transformers", folders.hf, folders.out), folders.hf, "cp hf", memory=3.0
    )


def _flushed_copy(source: Path, target: Path) -> tuple[str, ...]:
    """``cp``, then fsync of every file and folder that it wrote: what qwen3conv and torch's writer do of themselves."""
    return ("sh", "-c", 'cp -r "$0" "$1" && find "$1" -exec sync {} +', str(source), str(target))


def _peer(what: str, *arguments: str | Path) -> tuple[str, ...]:
    return (sys.executable, "-m", "qwen3conv.tools.bench_peers", what, *map(str, arguments))


def _script(
    checkout: Path, name: str, shape: Shape, sizes_of: Path, arguments: tuple[str | Path, ...]
) -> tuple[str, ...]:
    script = checkout / "scripts" / "checkpoint_conversion" / name
    flavor = CUT if shape.is_cut else shape.flavor
    given = (*map(str, arguments), "--model_name", "qwen3", "--model_flavor", flavor)
    if shape.is_cut:
        return _peer("titan-script", script, shape.flavor, sizes_of, *given)
    return (sys.executable, str(script), *given)
