"""From a source and the user's choices to a frozen plan. Reads headers, and of the bytes what policies must know."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from .arrangement import arrange, arrange_by_rank, arrange_chunked, decide_head, output_specs, ranked
from .blocks import TRANSPOSED_BLOCKS
from .boxes import Shape
from .checkpoint import Checkpoint, assets_of_run
from .config_choice import open_with_config, output_config, settle_with_config, trap_policies
from .errors import DestinationError, PolicyError, SourceError
from .execution import BUFFERS_PER_WORKER
from .formats import FORMATS, Format, writable_format
from .geometry import Geometry
from .layouts import Layout, bind
from .lora import adapter_files, merge_adapter
from .manifest import ASSETS
from .parameters import EMBEDDING, HEAD
from .placement import ONE_RANK, Mesh, check_mesh, check_vllm, rank_name
from .planning import Table, Unit, plan_moves, tabulate
from .policies import (
    DEFAULTS,
    EXPERT_BIAS_SUFFIX,
    Choices,
    Policy,
    Settled,
    cast_policies,
    kv_heads_policy,
    vocab_policy,
)
from .remote import remote_of
from .stores.contents import Arrangement
from .stores.nxd_writing import as_mesh, written_mesh
from .stores.sidecars import list_sidecars
from .stores.staging import check_name, partial_path
from .stores.verl import SUBFOLDER
from .training_state import digest_values
from .upgrade import NOTHING, carry_training_state

_INTERPRETER_BYTES = 45 << 20
"""Resident memory of the process before it plans (Linux, Python 3.11; numpy, for casts, included)."""

_PLAN_BYTES_PER_TENSOR = 2200
"""Resident memory that plan and table take per logical parameter (measured on headers of 235B-A22B)."""

_PLAN_BYTES_PER_DELTA = 600
"""The same per low-rank addition (measured there with an adapter for every expert)."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a conversion reads from. The source's tables are not kept: at 37,000 tensors they would weigh too much."""

    path: Path
    format: str
    schema: str | None
    files: Mapping[str, int]
    """Data files and their sizes in bytes; those of an adapter by absolute path."""
    label: Mapping[str, Any]
    """What the manifest says of the source."""
    promised: Mapping[str, str] = field(default_factory=dict)
    """Digests of rank files' parameters by the manifest beside them: nothing else tells files of two runs apart."""

    def identity(self, name: str) -> tuple[object, ...]:
        """What changes when the data file ``name`` does: size and times, of one elsewhere size and hash.

        Raises:
            SourceError: it is gone, or is not as long as it was when its headers were read.
        """
        remote = remote_of(self.path)
        if remote is not None and name in remote.files:
            return tuple(remote.files[name])
        try:
            status = (self.path / name).stat()
        except OSError as error:
            raise SourceError(f"{self.path / name} cannot be read: {error.strerror}") from error
        if status.st_size != self.files[name]:
            raise SourceError(f"{self.path / name} has changed since its headers were read; wait until it is complete")
        # the time of change too: what sets back a file's time of modification cannot set back that one
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def times(self) -> dict[str, object]:
        """When each data file was modified, or which hash it has elsewhere. Raises as ``identity`` does."""
        return {name: self.identity(name)[1] for name in self.files}

    @property
    def place(self) -> str:
        """Where it is: of a folder that stands for a place elsewhere, which state of that."""
        remote = remote_of(self.path)
        return str(self.path.resolve()) if remote is None else remote.label


@dataclass(frozen=True, slots=True)
class Conversion:
    """Everything that is decided about one conversion, from headers alone. Nothing has been written."""

    source: Origin
    destination: Path
    format: Format
    layout: Layout
    arrangement: Arrangement
    units: tuple[Unit, ...]
    written: Mapping[str, tuple[str, Shape]]
    """Dtype and shape of every logical parameter of the output."""
    policies: tuple[Policy, ...]
    config: bytes | None
    """The output's config.json."""
    sidecars: Path | None
    """Folder that sidecar files are copied from."""
    sidecar_names: tuple[str, ...]
    values: Mapping[str, str] = field(default_factory=dict)
    """Digests of the training state that is not tensors, by its first key."""

    @property
    def disk_bytes(self) -> int:
        """Bytes of the output's data files."""
        return sum(file.size for file in self.arrangement.files)

    @property
    def read_bytes(self) -> int:
        """Bytes that are read from the source's tensors."""
        return sum(move.read_bytes for unit in self.units for move in unit)

    @property
    def blocks_per_buffer(self) -> int:
        """More than one where a parameter is stored column by column."""
        copies = (copy for unit in self.units for move in unit for copy in (move.source, *move.targets))
        return TRANSPOSED_BLOCKS if any(extent.transposed for copy in copies for extent in copy) else 1

    def peak_bytes(self, workers: int, block_bytes: int) -> int:
        """Estimate of the peak resident memory of carrying it out."""
        tensors = len(self.written)
        deltas = [move.delta for unit in self.units for move in unit if move.delta is not None]
        factors = max((delta.resident_bytes for delta in deltas), default=0)
        plan = tensors * _PLAN_BYTES_PER_TENSOR + len(deltas) * _PLAN_BYTES_PER_DELTA
        buffers = block_bytes * self.blocks_per_buffer * BUFFERS_PER_WORKER
        return _INTERPRETER_BYTES + plan + workers * (buffers + factors)

    def plan_id(self) -> str:
        """A hash of what is read and what is written: equal for a repeated command, so that it can be resumed."""
        files = [(name, *self.source.identity(name)) for name in sorted(self.source.files)]
        policies = [p.to_dict() for p in self.policies]
        digest = xxhash.xxh3_128(json.dumps([self.source.place, files, policies]).encode())
        for unit in self.units:
            for move in unit:
                digest.update(f"{move.name} {move.source_dtype} {move.target_dtype} {move.targets}\n".encode())
        return digest.hexdigest()


def prepare(
    source: Path, destination: Path, to: str, choices: Choices = DEFAULTS, *, origin: Mapping[str, Any] | None = None
) -> Conversion:
    """Plan the conversion of ``source`` to format ``to``. ``origin`` names the source in the manifest (hub id, commit).

    Raises:
        ConversionError: of the kind that says what to do; nothing has been written.
    """
    target = writable_format(to)
    if target.store.startswith("nxd"):
        choices = replace(choices, mesh=as_mesh(written_mesh(choices.mesh)))
    checkpoint, decided = open_with_config(source, choices)
    _check_places(checkpoint.path, destination)
    settled = settle_with_config(checkpoint, choices, target)
    checkpoint = settled.checkpoint
    files = checkpoint.contents.files
    if choices.adapter is not None:
        _check_places(choices.adapter, destination)
        settled = merge_adapter(settled, choices, _names_of(checkpoint, origin))
        files = {**files, **adapter_files(choices.adapter)}
    decided += [*settled.policies, *cast_policies(settled.table, choices)]
    if (vocab := vocab_policy(settled, choices)) is not None:
        decided.append(vocab)
    geometry = replace(checkpoint.geometry, vocab_size=choices.vocab_rows or checkpoint.geometry.vocab_size)
    repeats = choices.mesh.tp > geometry.num_key_value_heads
    layout = target.layout(choices.titan_schema, choices.rank_layout, repeats=repeats)
    _check_cut(target, geometry, choices, tied=settled.tied)
    bound = list(bind(layout, geometry, tied=settled.tied))
    carried = NOTHING
    if choices.optimizer is not None:
        carried = carry_training_state(settled, layout, choices, decided)
        if carried.columns and not any(".expert_bias" in name for name in checkpoint.tensors):
            bound = [binding for binding in bound if not binding.rule.optional]  # a run without load balancing
    keeps_bias = any(binding.rule.optional for binding in bound)
    table = dict(settled.table)
    biases = [name for name in table if name.endswith(EXPERT_BIAS_SUFFIX)]
    if biases and not keeps_bias:
        _drop_bias(table, biases, settled, choices, decided)
    elif checkpoint.geometry.is_moe and keeps_bias and not biases:
        decided.append(
            Policy(
                "expert-bias-zero",
                f"{geometry.num_hidden_layers} zero routing biases are written, which torchtitan asks for",
            )
        )

    writes_head = decide_head(settled, target, layout, choices, decided)
    bindings = [binding for binding in bound if writes_head or binding.rule.parts != (HEAD,)]
    specs = list(output_specs(bindings, table, choices))
    if target.is_per_rank or choices.mesh != ONE_RANK:
        ranks = choices.mesh.ranks
        summary = f"cut for {choices.mesh}: {ranks} ranks" if ranks > 1 else "one rank holds all of it"
        decided.append(Policy("mesh", summary, asdict(choices.mesh)))
        if target.store == "nxd" and repeats and choices.kv_heads is not None:
            decided.append(kv_heads_policy(choices.kv_heads))
        held = ranked(bindings, target, layout, geometry, choices, tied=settled.tied)
        if target.is_per_rank:
            layers = geometry.num_hidden_layers
            arrangement = arrange_by_rank(specs, bindings, held, target, layout, choices.mesh, layers)
            bindings = [b._replace(name=rank_name(rank, b.name)) for rank, mine in enumerate(held) for b in mine]
        else:
            arrangement = arrange_chunked(specs, bindings, held, layout, tied=settled.tied)
    else:
        arrangement = arrange(specs, settled, target, layout, choices, decided, carried)
    state = {spec.name for spec in carried.specs}
    model = {name: tensor for name, tensor in arrangement.tensors.items() if name not in state}
    outputs = tabulate(bindings, model, label=layout.label)
    written = {e.name: (e.dtype, e.shape) for e in outputs.values() if e.name in table}
    config = output_config(settled, target, choices, geometry, written, decided)
    beside = carried.table(arrangement.tensors)
    outputs, table = outputs | beside, table | carried.source
    written |= {e.name: (e.dtype, e.shape) for e in beside.values()}
    units = plan_moves(
        table,
        outputs,
        [file.name for file in arrangement.files],
        vocab_padding=choices.vocab_rows is not None,
        by_source=remote_of(checkpoint.path) is not None,
    )
    lost = [name for name in table if name not in outputs]
    assert not lost, lost

    sidecars = _sidecar_folder(checkpoint, choices)
    found = list_sidecars(sidecars) if sidecars is not None else None
    if found is not None and found.left:
        some = ", ".join(found.left[:6])
        decided.append(
            Policy("files-left", f"{len(found.left)} other files are not carried: {some}", {"files": list(found.left)})
        )
    decided += trap_policies(checkpoint, target, choices)
    label = _label(checkpoint, origin)
    return Conversion(
        Origin(
            checkpoint.path, checkpoint.format, checkpoint.layout.schema, files, label, _promised(checkpoint, choices)
        ),
        destination,
        target,
        layout,
        arrangement,
        units,
        written,
        tuple(decided),
        config,
        sidecars,
        tuple(found.carried) if found is not None else (),
        digest_values(carried.blobs),
    )


def _promised(checkpoint: Checkpoint, choices: Choices) -> dict[str, str]:
    """What the manifest of a folder of ranks' files says of the parameters that are read as a whole."""
    if not FORMATS[checkpoint.format].is_per_rank or checkpoint.manifest is None:
        return {}
    digests = {name: record.digest for name, record in checkpoint.manifest.tensors.items()}
    cut = (EMBEDDING, HEAD) if choices.vocab_rows is not None else ()
    return {name: digest for name, digest in digests.items() if digest is not None and name not in cut}


def _check_cut(target: Format, geometry: Geometry, choices: Choices, *, tied: bool) -> None:
    if target.store == "safetensors" and choices.mesh != ONE_RANK:
        raise PolicyError(f"format {target.name} holds whole tensors; write ranks or titan to cut for {choices.mesh}")
    check_mesh(choices.mesh, geometry)
    if tied and choices.mesh.pp > 1 and target.store == "ranks":
        raise PolicyError(
            f"--pp {choices.mesh.pp}: the head is tied to the embeddings in the first stage, and the last stage needs "
            "it too; cut without --pp"
        )
    if target.store == "vllm":
        check_vllm(choices.mesh, geometry)
    if target.store == "nxd-inference" and choices.mesh != Mesh(tp=choices.mesh.tp):
        raise PolicyError(f"NxD Inference's presharded weights are cut by --tp alone, not by {choices.mesh}")


def _drop_bias(table: Table, biases: Sequence[str], settled: Settled, choices: Choices, decided: list[Policy]) -> None:
    found = next(p for p in settled.policies if p.name == "expert-bias")
    if not choices.drop_expert_bias:
        raise PolicyError(
            f"{found.summary}; a Hugging Face model has no place for it, and without it tokens go to other experts. "
            "Pass --drop-expert-bias to leave it out all the same"
        )
    for name in biases:
        del table[name]
    decided.remove(found)  # the one below says all of it
    decided.append(Policy("drop-expert-bias", f"left out: {found.summary}", found.values, warning=True))


def _sidecar_folder(checkpoint: Checkpoint, choices: Choices) -> Path | None:
    if choices.like is not None and choices.like.is_dir():
        inner = choices.like / ASSETS
        return inner if inner.is_dir() else choices.like
    if checkpoint.format.startswith(("hf", "torch-")):
        return checkpoint.path
    inner = checkpoint.path / (SUBFOLDER if checkpoint.format == "verl" else ASSETS)
    if inner.is_dir():
        return inner
    return checkpoint.path if (checkpoint.path / "config.json").is_file() else assets_of_run(checkpoint.path)


def _label(checkpoint: Checkpoint, origin: Mapping[str, Any] | None) -> dict[str, Any]:
    label: dict[str, Any] = dict(origin) if origin is not None else {"path": str(checkpoint.path)}
    label["format"] = checkpoint.format
    if checkpoint.layout.schema is not None:
        label["schema"] = checkpoint.layout.schema
    if checkpoint.format.startswith("hf"):
        label |= {"files": len(checkpoint.contents.files), "stores_head": checkpoint.stores_head}
    elif checkpoint.manifest is not None:
        label |= {
            key: checkpoint.manifest.source[key]
            for key in ("files", "stores_head")
            if key in checkpoint.manifest.source
        }
    return label


def _names_of(checkpoint: Checkpoint, origin: Mapping[str, Any] | None) -> list[str]:
    """What the model goes by: its folder's name, its hub id, and what a conversion made it from."""
    labels = [origin or {}, checkpoint.manifest.source if checkpoint.manifest is not None else {}]
    return [checkpoint.path.name, *(str(label[key]) for label in labels for key in ("hub", "path") if key in label)]


def _check_places(source: Path, destination: Path) -> None:
    check_name(destination)
    inside = Path(os.path.realpath(source))
    for place in (destination, partial_path(destination)):
        outside = Path(os.path.realpath(place))
        if inside == outside or inside in outside.parents or outside in inside.parents:
            raise DestinationError(f"{place} and the source {source} lie inside each other; choose a place beside it")
