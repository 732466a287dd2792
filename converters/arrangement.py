"""How an output is laid out in files: which tensors, of which dtype, in which file, the tied head among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from .boxes import TensorSpec
from .checkpoint import Checkpoint
from .config_json import LARGEST_FILE
from .errors import PolicyError, enumerate_problems
from .file_split import decide_split, stored_names
from .formats import Format
from .geometry import Geometry
from .layouts import Binding, Layout
from .parameters import HEAD
from .placement import Mesh, bindings_by_rank
from .planning import Table
from .policies import Choices, Policy, Settled, output_dtype
from .rank_index import chunk_owners, index_json
from .stores.contents import Arrangement
from .stores.dcp_writing import arrange_chunks, arrange_dcp
from .stores.nxd_bindings import made_heads, nxd_bindings, nxd_stages
from .stores.nxd_writing import arrange_nxd, arrange_presharded, written_mesh
from .stores.ranks import arrange_ranks, arrange_vllm
from .stores.safetensors_writing import arrange_safetensors
from .upgrade import NOTHING, Carried

DCP_FILE_BYTES = 2 * 10**9
"""Bytes per .distcp file: large enough to keep them few, small enough that workers have files of their own."""


def decide_head(settled: Settled, target: Format, layout: Layout, choices: Choices, decided: list[Policy]) -> bool:
    """Whether the output stores a head, and why.

    Raises:
        PolicyError: ``--lm-head drop`` for a head that is not tied.
    """
    if not settled.tied:
        if choices.lm_head == "drop":
            raise PolicyError("--lm-head drop: the head is not tied to the embeddings, so leaving it out would lose it")
        return True
    if target.store == "dcp":
        decided.append(Policy("tied-head", "the tied head is stored under both names, sharing one copy of the bytes"))
        return True
    if layout.stores_tied_head:
        decided.append(Policy("tied-head", f"the tied head is stored under both names, as {layout.label} does"))
        return True
    wanted = choices.lm_head
    writes = wanted == "write" or (wanted == "keep" and _source_stored_head(settled.checkpoint, choices))
    how = "written beside the embeddings" if writes else "left out"
    why = "as --lm-head says" if wanted != "keep" else "as in the source"
    decided.append(Policy("tied-head", f"the tied head is {how}, {why}", {"written": writes}))
    return writes


def _source_stored_head(checkpoint: Checkpoint, choices: Choices) -> bool:
    """Whether the Hugging Face folder that the weights come from stored its tied head."""
    if checkpoint.contents.files and checkpoint.format in ("hf", "hf-fused", "hf-fp8"):
        return checkpoint.stores_head
    if choices.like is not None and choices.like.is_dir() and (names := stored_names(choices.like)) is not None:
        return HEAD in names
    if checkpoint.manifest is not None and "stores_head" in checkpoint.manifest.source:
        return bool(checkpoint.manifest.source["stores_head"])
    return False


def output_specs(bindings: Sequence[Binding], table: Table, choices: Choices) -> Iterator[TensorSpec]:
    """The stored tensors of the output, in model order.

    Raises:
        PolicyError: parts of one stored tensor have different dtypes.
    """
    mixed = []
    for binding in bindings:
        names = dict.fromkeys(piece.name for piece in binding.pieces)
        dtypes = Counter(output_dtype(table[n].dtype, choices, name=n) for n in names if n in table)
        if not dtypes and binding.rule.optional:
            dtypes = Counter({"F32": 1})
        if len(dtypes) != 1:
            most = dtypes.most_common(1)[0][0]
            mixed += [f"{n} is {table[n].dtype}, others are {most}" for n in names if table[n].dtype != most]
            continue
        yield TensorSpec(binding.name, next(iter(dtypes)), binding.shape)
    if mixed:
        heading = "parts that the output stores as one tensor have different dtypes; choose one for all with --dtype:"
        raise PolicyError(enumerate_problems(heading, mixed))


def arrange(
    specs: Sequence[TensorSpec],
    settled: Settled,
    target: Format,
    layout: Layout,
    choices: Choices,
    decided: list[Policy],
    carried: Carried = NOTHING,
) -> Arrangement:
    """Where every byte of the output goes: the source's own file split where it can be kept, else files by size."""
    if target.store == "dcp":
        aliases = {layout.head_name(): layout.embedding_name()} if settled.tied else {}
        paths = {**_planner_paths(layout, [spec.name for spec in specs]), **carried.paths}
        specs = [*(spec for spec in specs if spec.name not in aliases), *carried.specs]
        file_bytes = choices.shard_bytes or DCP_FILE_BYTES
        return arrange_dcp(specs, file_bytes=file_bytes, aliases=aliases, blobs=carried.blobs, paths=paths)
    return arrange_safetensors(decide_split(specs, settled, layout, choices, decided))


def ranked(
    whole: Sequence[Binding], target: Format, layout: Layout, geometry: Geometry, choices: Choices, *, tied: bool
) -> list[list[Binding]]:
    """What each rank holds of the tensors in ``whole``."""
    names = {binding.name for binding in whole}
    held: list[list[Binding]] = [[] for _ in range(choices.mesh.ranks)]
    if not target.store.startswith("nxd"):
        for at, binding in bindings_by_rank(layout, geometry, choices.mesh, tied=tied):
            if binding.name in names:
                held[at].append(binding)
        return held
    mesh = written_mesh(choices.mesh)
    is_inference = target.store == "nxd-inference"
    heads = made_heads(geometry, mesh.tp, "interleaved" if is_inference else choices.kv_heads)
    heads = heads._replace(cuts_hidden=is_inference)
    for binding in nxd_bindings(layout, geometry, heads, mesh, nxd_stages(geometry, mesh.pp), tied=tied):
        rank, _, fqn = binding.name.partition("/")
        if fqn in names:
            held[int(rank)].append(binding._replace(name=fqn))
    return held


def arrange_by_rank(
    specs: Sequence[TensorSpec],
    whole: Sequence[Binding],
    held: Sequence[Sequence[Binding]],
    target: Format,
    layout: Layout,
    mesh: Mesh,
    layers: int,
) -> Arrangement:
    """One file per rank with its local tensors; for our own format, the index too.

    Raises:
        PolicyError: the index would be longer than is read.
    """
    dtypes = {spec.name: spec.dtype for spec in specs}
    files = [[TensorSpec(b.name, dtypes[b.name], b.shape) for b in bindings] for bindings in held]
    if target.store == "vllm":
        return arrange_vllm(files)
    if target.store == "nxd":
        return arrange_nxd(files, written_mesh(mesh), 1 if target.name == "nxd-v1" else 2)
    if target.store == "nxd-inference":
        return arrange_presharded(files, layers)
    # at most two boxes of as many numbers as a tensor has dims, twice, of some 8 characters each
    length = sum(len(b.name) + 12 + 2 * (8 + 16 * len(b.shape)) for bindings in held for b in bindings)
    length += sum(len(spec.name) + 120 for spec in specs) + 200 * mesh.ranks
    if length > LARGEST_FILE:
        count = sum(map(len, held))
        fewer = ", or --layout hf-fused, which stores experts together" if layout.name == "hf" else ""
        raise PolicyError(
            f"{count:,} tensors in {mesh.ranks} rank files are too many for their index; cut for fewer ranks{fewer}"
        )
    return arrange_ranks(files, mesh, partial(index_json, layout, mesh, whole, held, dtypes))


def arrange_chunked(
    specs: Sequence[TensorSpec],
    whole: Sequence[Binding],
    held: Sequence[Sequence[Binding]],
    layout: Layout,
    *,
    tied: bool,
) -> Arrangement:
    """A DCP whose ``__{rank}_0.distcp`` holds what that rank loads; what several ranks hold lies with the first."""
    by_name = {spec.name: spec for spec in specs}
    aliases = {layout.head_name(): layout.embedding_name()} if tied else {}
    parts = [
        (by_name[name], [(box, f"__{rank}_0.distcp") for box, rank in owners])
        for name, owners in chunk_owners(whole, held)
        if name not in aliases
    ]
    return arrange_chunks(parts, aliases=aliases, paths=_planner_paths(layout, by_name))


def _planner_paths(layout: Layout, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """How DCP's planner flattened each name: where the state dict lies inside another."""
    if not layout.nested_in:
        return {}
    return {name: (layout.nested_in, name.removeprefix(f"{layout.nested_in}.")) for name in names}
