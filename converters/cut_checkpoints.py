"""Checkpoints of which each rank has files of its own: our rank folders, vLLM's, and neuronx-distributed's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from .checkpoint import Checkpoint, find_config
from .config import Geometry, Qwen3Config, compare_geometry, read_config
from .errors import SourceError
from .files import Files
from .formats import RANK_LAYOUTS
from .layouts import TITAN_SCHEMAS, VLLM, Binding, Layout, nxd_inference_layout, nxd_layout, solve_geometry
from .manifest import read_manifest
from .placement import ONE_RANK, Mesh, check_mesh
from .planning import Misfit
from .stores.contents import Contents
from .stores.nxd_bindings import Queries, agreed_queries, nxd_bindings, nxd_heads
from .stores.nxd_inference import cuts_hidden, read_presharded, refuse_square_kernels
from .stores.nxd_training import read_nxd
from .stores.nxd_writing import as_mesh
from .stores.ranks import read_ranks, read_vllm

NEURON_STORES = ("nxd", "nxd-inference")
CUT_STORES = ("ranks", "vllm", *NEURON_STORES)


def open_cut(folder: Path, store: str, like: Path | None, queries: Queries | None) -> Checkpoint:
    """The checkpoint in ``folder``, whose store is one of ``CUT_STORES``; arguments as those of ``open_checkpoint``.

    Raises:
        SourceError: it is not whole, or nothing tells its sizes.
        ConversionError: its mesh or its heads do not fit the config.
    """
    if store in NEURON_STORES:
        return _open_nxd(folder, store, like, queries)
    if store == "ranks":
        return _open_ranks(folder, like)
    return _open_vllm(folder, like)


_NEURON = {"nxd": (read_nxd, nxd_layout), "nxd-inference": (read_presharded, nxd_inference_layout)}


def _open_ranks(folder: Path, like: Path | None) -> Checkpoint:
    """A per-rank folder of ours: its index says the layout and the mesh."""
    ranks = read_ranks(folder)
    layout = RANK_LAYOUTS.get(ranks.layout) or TITAN_SCHEMAS.get(ranks.schema or "")
    if layout is None:
        raise SourceError(f"{folder} has layout {ranks.layout!r}, which this version does not know")
    geometry = solve_geometry(layout, ranks.shapes)
    config_path = find_config(folder, like)
    config = read_config(config_path) if config_path is not None else None
    lines = compare_geometry(config.geometry, geometry) if config is not None else []
    if lines:
        raise Misfit(f"{config_path} and the index of {folder} do not agree:", lines)
    return _cut_checkpoint(folder, "ranks", layout, ranks.contents, ranks.mesh, geometry, config, config_path)


def _open_vllm(folder: Path, like: Path | None) -> Checkpoint:
    """vLLM's ``sharded_state``: as many tensor-parallel ranks as there are; the config says the sizes."""
    contents, ranks = read_vllm(folder)
    config_path = find_config(folder, like)
    if config_path is None:
        raise SourceError(
            f"{folder} holds vLLM's ranks without a config.json, which alone tells their sizes; give --like"
        )
    config = read_config(config_path)
    return _cut_checkpoint(folder, "vllm", VLLM, contents, Mesh(tp=ranks), config.geometry, config, config_path)


def _open_nxd(folder: Path, kind: str, like: Path | None, queries: Queries | None) -> Checkpoint:
    """Shards of NxD, optimum-neuron or NxD Inference: the config says the sizes, the keys how heads lie."""
    read_shards, find_layout = _NEURON[kind]
    shards = read_shards(folder)
    config_path = find_config(folder, like) or find_config(folder.parent)
    if config_path is None:
        raise SourceError(
            f"{folder} holds NxD's shards, but no config.json, which alone tells their sizes; give --like"
        )
    config, layout, manifest = read_config(config_path), find_layout(shards.stages), read_manifest(folder)
    if manifest is not None and any(p.get("order") == "tiled" for p in manifest.policies):
        queries = agreed_queries(queries, "follow", f"the manifest of {folder}")
    with Files(folder, os.O_RDONLY) as files:

        def read(file: str, offset: int, count: int) -> bytes:
            raw = bytearray(count)
            files.read_into(file, offset, memoryview(raw))
            return bytes(raw)

        heads = nxd_heads(shards, config.geometry, read, queries=queries)
    if kind == "nxd-inference":
        refuse_square_kernels(shards, manifest is not None)
        heads = heads._replace(cuts_hidden=cuts_hidden(shards, config.geometry))
    elif shards.is_v1:
        kind = "nxd-v1"
    mesh = as_mesh(shards.mesh)

    def stages(fqn: str) -> Sequence[int]:
        return shards.stages.get(fqn, (0,))

    def bindings(tied: bool) -> Iterator[Binding]:
        for binding in nxd_bindings(layout, config.geometry, heads, shards.mesh, stages, tied=tied):
            yield binding if mesh != ONE_RANK else binding._replace(name=binding.name.partition("/")[2])

    found = _cut_checkpoint(folder, kind, layout, shards.contents, mesh, config.geometry, config, config_path)
    return replace(found, bindings=bindings, others=shards.contents.others)


def _cut_checkpoint(
    folder: Path,
    kind: str,
    layout: Layout,
    contents: Contents,
    mesh: Mesh,
    geometry: Geometry,
    config: Qwen3Config | None,
    config_path: Path | None,
) -> Checkpoint:
    check_mesh(mesh, geometry)
    tensors = contents.tensors
    if mesh == ONE_RANK:
        tensors = {name.partition("/")[2]: tensor for name, tensor in tensors.items()}
    manifest = read_manifest(folder)
    return Checkpoint(
        folder, kind, layout, contents, tensors, {}, (), {}, config, geometry, manifest, "", config_path, mesh
    )
