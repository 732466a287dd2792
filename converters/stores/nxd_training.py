"""Training checkpoints of neuronx-distributed (NxD) and optimum-neuron: one pickle per tensor and pipeline rank.

=============  ==================================================================================================
v1, plain      ``tp_rank_{TT}_pp_rank_{PP}/checkpoint.pt``
v1, xser       file ``tp_rank_{TT}_pp_rank_{PP}``, and ``tp_rank_{TT}_pp_rank_{PP}.tensors/tensor_{n}.pt``
v2, plain      ``{tag}/model/dp_rank_00_tp_rank_{TT}_pp_rank_{PP}.pt``
v2, xser       the same file, and ``....pt.tensors/tensor_{n}.pt``
optimum        v2 with the tag ``shards``, and ``shards/mp_metadata_pp_rank_{p}.json``
=============  ==================================================================================================

In xser files the tensors of the pickle are references by number, each stored as a file of its own. A tag that training
wrote has a file ``checkpoint``, and ``done`` once it is whole; NxD's converter writes neither. Of the data-parallel
ranks the first is read. With expert parallelism names have ``ep_rank_{EE}_`` in the middle, and what is no expert is in
the files of ep rank 0 alone. Layers keep their global numbers in every pipeline stage. The converter leaves matrices
column by column (clones of transposed tensors); what training saves is row by row.

Sources: neuronx-distributed, ``trainer/checkpoint.py``, ``scripts/checkpoint_converter.py``; optimum-neuron,
``models/training/checkpointing.py``, ``transformations_utils.py``. Read from source; neither was run. What a rank's
tensors are made of: ``nxd_bindings``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..boxes import Box, Chunk, StoredTensor, TensorSpec
from ..errors import SourceError, enumerate_problems
from ..placement import rank_name
from .contents import Contents
from .nxd_metadata import Fused, read_metadata
from .pickles import Callee, Record, Unfit
from .torch_archives import describe_value, flatten, load_pickle, open_torch_file, read_saved
from .torch_zip import Archive, TensorRef

_V1 = re.compile(r"tp_rank_([0-9]{2,4})_pp_rank_([0-9]{2,4})(?:_dp_rank_([0-9]{2,5}))?")
_V2 = re.compile(r"dp_rank_([0-9]{2,5})_(?:ep_rank_([0-9]{2,4})_)?tp_rank_([0-9]{2,4})_pp_rank_([0-9]{2,4})\.pt")

_PREFIXES = ("", "module.", "model.", "model.module.", "state_dict.")
"""What may stand in front of the hub's names: wrappers, and the key of the model in a training state."""

_MOST_RANKS = 1 << 16

_REPEATED = ("k_proj.weight", "v_proj.weight", "qkv_proj.weight_k", "qkv_proj.weight_v", "qkv_proj.weight_qkv")
"""What may hold a key-value head more than once."""

_TRAINING = ("checkpoint", "optim", "scheduler.pt", "user_content.pt")
"""What lies in a tag that training wrote, beside ``model`` and ``done``."""


class NxdMesh(NamedTuple):
    """Degrees of NxD's parallelism. Expert-parallel ranks are other files than tensor-parallel ones."""

    tp: int = 1
    ep: int = 1
    pp: int = 1

    @property
    def ranks(self) -> int:
        """Files."""
        return self.tp * self.ep * self.pp

    def rank(self, pp: int, ep: int, tp: int) -> int:
        """The number of a file among all."""
        return (pp * self.ep + ep) * self.tp + tp

    def __str__(self) -> str:
        axes = (("pp", self.pp), ("ep", self.ep), ("tp", self.tp))
        return " x ".join(f"{name}{size}" for name, size in axes if size > 1) or "1 rank"


@dataclass(frozen=True, slots=True)
class NxdShards:
    """What the ranks' files hold. Tensors are named ``rank/FQN``, with the rank of ``NxdMesh``."""

    folder: Path
    """What the files in ``contents`` are relative to."""
    contents: Contents
    mesh: NxdMesh
    stages: Mapping[str, tuple[int, ...]]
    """FQN -> the pipeline ranks that hold it, in saved order."""
    stated: Fused | None
    """From optimum's metadata, where there are any."""
    is_v1: bool = False


def locate_nxd(folder: Path) -> Path | None:
    """The folder with the ranks' files: ``folder`` itself, or what of it is ``shards/model`` or ``model``."""
    for inner in (folder / "shards" / "model", folder / "model", folder):
        try:
            names = os.listdir(inner)
        except OSError:
            continue
        if any(_V2.fullmatch(name) or _V1.fullmatch(name) for name in names):
            return inner
    return None


def read_nxd(folder: Path) -> NxdShards:
    """What all ranks' files hold, from their zip headers and pickles; no weight is read.

    ``folder`` is a tag, its ``model`` folder, a v1 folder, or what optimum saved (with ``shards`` inside).

    Raises:
        SourceError: ranks are missing, damaged, hostile or hold different tensors, the save did not end, or the
            metadata contradict the files; all problems of a kind at once.
    """
    inner = locate_nxd(folder)
    if inner is None:
        raise SourceError(
            f"{folder} holds no files named [dp_rank_00_]tp_rank_<t>_pp_rank_<p>[.pt], neither itself nor in model/ or "
            "shards/model/"
        )
    _check_done(inner)
    files, mesh = _find_ranks(inner)
    problems: list[str] = []
    tensors: dict[str, StoredTensor] = {}
    sizes: dict[str, int] = {}
    others: dict[str, str] = {}
    held: list[dict[str, TensorSpec]] = []
    prefix = f"{inner.relative_to(folder).as_posix()}/" if inner != folder else ""
    for rank, file in enumerate(files):
        try:
            stored = _read_rank(folder, prefix + file, sizes, others)
        except SourceError as error:
            problems.append(str(error))
            stored = {}
        held.append({})
        for fqn, (spec, chunk) in stored.items():
            held[rank][fqn] = spec
            own = TensorSpec(rank_name(rank, fqn), spec.dtype, spec.shape)
            tensors[own.name] = StoredTensor(own, (chunk,), replicated=fqn.endswith(_REPEATED))
    if not problems:
        problems += _compare_ranks(files, held, mesh)
    if problems:
        heading = f"{folder} is not a whole NxD checkpoint; copy again, or save again, what is named here:"
        raise SourceError(enumerate_problems(heading, problems))
    stages: dict[str, tuple[int, ...]] = {}
    for stage in range(mesh.pp):
        for fqn in held[mesh.rank(stage, 0, 0)]:
            stages[fqn] = (*stages.get(fqn, ()), stage)
    stated = read_metadata(inner.parent, mesh.tp, mesh.pp)
    is_v1 = _V1.fullmatch(files[0].partition("/")[0]) is not None
    return NxdShards(folder, Contents(tensors, sizes, others), mesh, stages, stated, is_v1)


def _check_done(inner: Path) -> None:
    """Training marks a tag (v2) that is whole. NxD's converter writes no marks at all, nor did v1."""
    if inner.name != "model":
        return
    tag = inner.parent
    traces = [name for name in _TRAINING if os.path.lexists(tag / name)]
    if traces and not os.path.lexists(tag / "done"):
        raise SourceError(
            f"{tag} holds {traces[0]}, but no file 'done', which NxD writes last: the save did not end; use an earlier "
            "tag"
        )


def _find_ranks(inner: Path) -> tuple[list[str], NxdMesh]:
    """The files in order of rank, relative to ``inner``."""
    found: dict[tuple[int, int, int], str] = {}
    for name in sorted(os.listdir(inner)):
        if match := _V2.fullmatch(name):
            dp, ep, tp, pp = match.groups()
        elif match := _V1.fullmatch(name):
            tp, pp, dp = match.groups()
            ep = None
        else:
            continue
        if int(dp or 0):
            continue
        file = f"{name}/checkpoint.pt" if (inner / name).is_dir() else name
        place = int(pp), int(ep or 0), int(tp)
        if found.setdefault(place, file) != file:
            raise SourceError(f"{inner} holds {file} and {found[place]}: move one set of files elsewhere")
    if not found:
        raise SourceError(f"{inner} holds no files of data-parallel rank 0")
    pps, eps, tps = (max(axis) + 1 for axis in zip(*found, strict=True))
    mesh = NxdMesh(tps, eps, pps)
    if mesh.ranks > _MOST_RANKS:
        raise SourceError(f"{inner} has files up to {mesh}, which is more than {_MOST_RANKS} ranks")
    places = [(pp, ep, tp) for pp in range(pps) for ep in range(eps) for tp in range(tps)]
    missing = [
        f"tensor rank {tp} of pipeline rank {pp}" + (f", expert rank {ep}" if eps > 1 else "")
        for pp, ep, tp in places
        if (pp, ep, tp) not in found
    ]
    if missing:
        heading = f"{inner} lacks the files of {len(missing)} of {mesh.ranks} ranks:"
        raise SourceError(enumerate_problems(heading, missing))
    return [found[place] for place in places], mesh


def _read_rank(
    folder: Path, file: str, sizes: dict[str, int], others: dict[str, str]
) -> dict[str, tuple[TensorSpec, Chunk]]:
    """The model's tensors in one rank's file or, for xser, beside it."""
    path = folder / file
    tensors: dict[str, tuple[TensorSpec, Chunk]] = {}
    with open_torch_file(path) as archive:
        sizes[file] = archive.length
        try:
            leaves = dict(flatten(load_pickle(archive, _REFERENCES)))
        except Unfit as reason:
            raise SourceError(f"{path}: {reason}") from None
        prefix = _prefix(leaves)
        for name, leaf in leaves.items():
            fqn = name.removeprefix(prefix)
            is_model = name.startswith(prefix) and not fqn.endswith("rotary_emb.inv_freq")
            if not is_model or type(leaf) not in (TensorRef, _Reference):
                others[name] = "a tensor" if type(leaf) in (TensorRef, _Reference) else describe_value(leaf)
            elif isinstance(leaf, TensorRef):
                tensors[fqn] = _entry(fqn, archive, leaf, file)
            elif isinstance(leaf, _Reference):
                beside = f"{file}.tensors/tensor_{leaf.number()}.pt"
                tensors[fqn] = _read_xser(folder, beside, fqn, sizes)
    return tensors


def _read_xser(folder: Path, file: str, fqn: str, sizes: dict[str, int]) -> tuple[TensorSpec, Chunk]:
    with open_torch_file(folder / file) as archive:
        sizes[file] = archive.length
        tensor = load_pickle(archive)
        if type(tensor) is not TensorRef:
            raise SourceError(f"{folder / file}: holds {describe_value(tensor)}, not the tensor {fqn}")
        return _entry(fqn, archive, tensor, file)


def _entry(fqn: str, archive: Archive, tensor: TensorRef, file: str) -> tuple[TensorSpec, Chunk]:
    saved = read_saved(archive, tensor, by_columns=True)
    chunk = Chunk(Box.whole(saved.shape), file, saved.offset, tensor.is_column_major)
    return TensorSpec(fqn, saved.dtype, saved.shape), chunk


def _prefix(names: Iterable[str]) -> str:
    """What stands in front of the hub's names."""
    listed = list(names)
    marks = ("model.layers.", "model.embed_tokens.", "model.norm.")
    return next((p for p in _PREFIXES if any(name.startswith(tuple(p + m for m in marks)) for name in listed)), "")


def _compare_ranks(files: list[str], held: list[dict[str, TensorSpec]], mesh: NxdMesh) -> Iterable[str]:
    """Ranks of one stage hold the same tensors in the same shapes; whatever differs is of another run."""
    for rank, specs in enumerate(held):
        first = mesh.rank(rank // (mesh.tp * mesh.ep), 0, 0)
        has_all = rank - first < mesh.tp
        for fqn in {**held[first], **specs}:
            mine, other = specs.get(fqn), held[first].get(fqn)
            if (mine is None and (has_all or is_expert(fqn))) or other is None:
                yield f"{files[rank if mine is None else first]}: lacks {fqn}, which another rank of its stage has"
            elif mine is not None and (mine.dtype, mine.shape) != (other.dtype, other.shape):
                yield (
                    f"{files[rank]}: {fqn} is {mine.dtype} {list(mine.shape)}, in {files[first]} it is {other.dtype} "
                    f"{list(other.shape)}; they are of different runs"
                )


def is_expert(fqn: str) -> bool:
    """Whether a tensor holds experts, which expert parallelism shares out."""
    return ".expert_mlps." in fqn


class _Reference(Record):
    """An xser ``TensorReference``: the number of a file."""

    __slots__ = ("tid",)
    tid: int

    def build(self, state: object) -> None:
        """Fill from ``{"tid": number}``; NxD's own kind has shape and dtype as well."""
        tid = state.get("tid") if isinstance(state, dict) else None
        if type(tid) is not int or not 0 <= tid < 1 << 31:
            raise Unfit("a TensorReference has no number")
        self.tid = tid

    def number(self) -> int:
        """The number; raises ``SourceError`` where the pickle gave none."""
        if not hasattr(self, "tid"):
            raise SourceError("a TensorReference has no number")
        return self.tid


_REFERENCES = {
    ("torch_xla.utils.serialization", "TensorReference"): Callee(new=_Reference),
    ("neuronx_distributed.trainer.checkpoint", "_InternalTensorReference"): Callee(new=_Reference),
}
