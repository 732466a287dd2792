"""What a folder is, whether it is whole, and what will bite: everything ``inspect`` tells, as one value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .checkpoint import Checkpoint
from .detection import open_checkpoint
from .dtypes import TORCH_NAME
from .errors import ConversionError
from .formats import FORMATS
from .location import locate_checkpoint
from .names import natural_key
from .policies import Choices, settle
from .stores.nxd_bindings import Queries
from .stores.staging import JOURNAL
from .variants import flavor_traps, released_like


@dataclass(frozen=True, slots=True)
class Report:
    """What ``inspect`` found. ``complete`` is true only for a whole checkpoint; ``problems`` say why it is not."""

    path: Path
    format: str | None = None
    schema: str | None = None
    mesh: Mapping[str, int] | None = None
    """Degrees of parallelism that a per-rank folder is cut for."""
    layout: str | None = None
    """Names and fusion of its tensors."""
    complete: bool = False
    problems: tuple[str, ...] = ()
    traps: tuple[str, ...] = ()
    """What is no fault and will bite all the same."""
    config: Mapping[str, Any] | None = None
    releases: tuple[str, ...] = ()
    """Released models of exactly these shapes."""
    parameters: int = 0
    tensors: int = 0
    chunks: int = 0
    files: int = 0
    bytes: int = 0
    """Bytes of the model's tensors as stored."""
    dtypes: Mapping[str, int] = field(default_factory=dict)
    """Torch dtype name -> number of stored tensors."""
    others: Mapping[str, str] = field(default_factory=dict)
    stored: tuple[tuple[str, str, tuple[int, ...], int, str], ...] = ()
    """Every model tensor: FQN, dtype, shape, chunks, first file."""
    fingerprint: str | None = None
    """As the manifest has it; not computed anew."""

    def to_dict(self, *, tensors: bool) -> dict[str, Any]:
        """For JSON. ``tensors`` adds one entry per stored tensor."""
        found: dict[str, Any] = {
            "path": str(self.path),
            "format": self.format,
            "schema": self.schema,
            "mesh": self.mesh,
            "layout": self.layout,
            "complete": self.complete,
            "problems": list(self.problems),
            "traps": list(self.traps),
            "config": self.config,
            "releases": list(self.releases),
            "parameters": self.parameters,
            "tensors": self.tensors,
            "chunks": self.chunks,
            "files": self.files,
            "bytes": self.bytes,
            "dtypes": dict(self.dtypes),
            "others": dict(self.others),
            "manifest_fingerprint": self.fingerprint,
        }
        if tensors:
            found["tensor_list"] = [
                {"name": name, "dtype": dtype, "shape": list(shape), "chunks": chunks, "file": file}
                for name, dtype, shape, chunks, file in self.stored
            ]
        return found


def inspect(path: Path, *, like: Path | None = None, queries: Queries | None = None) -> Report:
    """Everything that headers tell about ``path``; a broken folder gives a report with problems.

    ``like`` and ``queries`` are those of ``open_checkpoint``.

    Raises:
        SourceError: nothing recognisable is there at all.
    """
    if (path / JOURNAL).is_file():
        text = "this conversion has not finished; run the command that began it again with --resume"
        return Report(path, problems=(text,))
    locate_checkpoint(path)
    try:
        checkpoint = open_checkpoint(path, like=like, queries=queries)
    except ConversionError as error:
        return Report(path, problems=(str(error),))
    problems: list[str] = []
    traps: list[str] = []
    parameters = 0
    try:
        settled = settle(checkpoint, Choices())
        traps += [policy.summary for policy in settled.policies if policy.name in ("expert-bias", "drop-derived")]
        parameters = sum(entry.rows * entry.columns for entry in settled.table.values())
    except ConversionError as error:
        problems.append(str(error))
    traps += _traps(checkpoint)
    is_cut = FORMATS[checkpoint.format].is_per_rank
    dtypes = Counter(TORCH_NAME[tensor.spec.dtype] for tensor in checkpoint.tensors.values())
    stored = tuple(
        (name, TORCH_NAME[t.spec.dtype], t.spec.shape, len(t.chunks), t.chunks[0].file if t.chunks else "")
        for name, t in sorted(checkpoint.tensors.items(), key=lambda item: natural_key(item[0]))
    )
    return Report(
        path=checkpoint.path,
        format=checkpoint.format,
        schema=checkpoint.layout.schema,
        mesh=asdict(checkpoint.mesh) if is_cut else None,
        layout=checkpoint.layout.name if is_cut else None,
        complete=not problems,
        problems=tuple(problems),
        traps=tuple(traps),
        config=_config(checkpoint),
        releases=tuple(name for release in released_like(checkpoint.geometry) for name in release.names),
        parameters=parameters,
        tensors=len(checkpoint.tensors),
        chunks=sum(len(tensor.chunks) for tensor in checkpoint.tensors.values()),
        files=len(checkpoint.contents.files),
        bytes=checkpoint.model_bytes,
        dtypes=dict(dtypes),
        others=checkpoint.others,
        stored=stored,
        fingerprint=checkpoint.manifest.fingerprint if checkpoint.manifest is not None else None,
    )


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Sizes from the tensors, and from the config what only it knows."""
    geometry = checkpoint.geometry
    found: dict[str, Any] = {
        key: getattr(geometry, key) for key in geometry.__dataclass_fields__ if getattr(geometry, key) is not None
    }
    found["model_type"] = "qwen3_moe" if geometry.is_moe else "qwen3"
    config = checkpoint.config
    if config is not None:
        found |= {key: value for key, value in config.maths().items() if value is not None}
        found["dtype"] = TORCH_NAME.get(config.dtype) if config.dtype else None
        found["style"] = config.style
    return found


def _traps(checkpoint: Checkpoint) -> list[str]:
    traps = []
    config = checkpoint.config
    if config is None:
        traps.append(
            "no config.json: rope_theta, context, eps, top-k and tying are not known; --like or --set gives them"
        )
    else:
        if config.style == "v5":
            traps.append(
                "config.json is in the transformers 5 spelling only: transformers 4 reads it as rope_theta 10000"
                + (" and 128 experts" if config.geometry.is_moe else "")
                + "; --config-style both writes both"
            )
        if config.tie_word_embeddings and not checkpoint.stores_head:
            traps.append("tied embeddings, and no lm_head is stored: torchtitan asks for one, which hf-to-dcp writes")
        traps += [str(trap) for trap in flavor_traps(config)]
    if checkpoint.format == "hf-fused":
        traps.append(
            "experts are fused: transformers 4 initialises every expert at random from this folder; convert --to hf"
        )
    if checkpoint.scales:
        traps.append(f"{len(checkpoint.scales)} tensors are block-quantised FP8; a conversion dequantises them")
    warning = checkpoint.contents.metadata.get("warning")
    if warning:
        traps.append(warning)
    if checkpoint.others:
        traps.append(
            f"{len(checkpoint.others)} entries beside the model (optimizer, scheduler, step) are not converted"
            + ("; upgrade carries them to another key schema" if checkpoint.layout.name == "titan" else "")
        )
    return traps
