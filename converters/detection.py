"""What is this folder? Its layout by its tensors' names; shapes and dates decide nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .boxes import StoredTensor
from .checkpoint import NOT_MODEL, Checkpoint, find_config
from .config import Geometry, Qwen3Config, compare_geometry, read_config
from .cut_checkpoints import CUT_STORES, NEURON_STORES, open_cut
from .errors import MappingError, PolicyError, SourceError, enumerate_problems
from .layouts import (
    ACCELERATE,
    ACCELERATE_PER_EXPERT,
    HF,
    HF_FUSED,
    TITAN_SCHEMAS,
    TITAN_TRANSFORMERS,
    Layout,
    bind,
    solve_geometry,
)
from .location import locate_checkpoint
from .manifest import read_manifest
from .names import split_indices, unwrapped
from .planning import Misfit, ScaleGrid, tabulate
from .quantization import SCALE_SUFFIX, refuse_quantized_tensors
from .refusals import refuse_foreign_tensors
from .stores.dcp import read_dcp
from .stores.fsdp_full import read_full
from .stores.nxd_bindings import Queries
from .stores.safetensors import read_safetensors
from .stores.torch_shards import read_torch_shards
from .stores.verl import read_verl

_PREFIXES = (
    "",
    "model.",
    "module.",
    "model.module.",
    "module.model.",
    "model.model.",
    "state_dict.",
    "app.model.",
    "app.",
)

_READERS = {
    "safetensors": read_safetensors,
    "torch-shards": read_torch_shards,
    "torch-full": read_full,
    "verl": read_verl,
    "dcp": read_dcp,
}

_CANDIDATES: dict[str, tuple[Layout, ...]] = {
    "safetensors": (HF, HF_FUSED),
    "torch-shards": (HF, HF_FUSED),
    "torch-full": (HF, HF_FUSED),
    "verl": (HF, HF_FUSED),
    "dcp": (*TITAN_SCHEMAS.values(), ACCELERATE, ACCELERATE_PER_EXPERT, TITAN_TRANSFORMERS, HF, HF_FUSED),
}


def open_checkpoint(path: Path, *, like: Path | None = None, queries: Queries | None = None) -> Checkpoint:
    """Recognise the checkpoint in ``path`` from its headers. ``like`` names a folder or file to take config.json from.

    ``queries`` says how NxD's query heads lie where its files do not tell.

    Raises:
        SourceError: it cannot be read, or is of a kind that is refused.
        MappingError: its names fit no layout, or its shapes contradict its config.
        PolicyError: ``queries`` is given for what has no question of it, or contradicts what is known.
    """
    folder, store = locate_checkpoint(path)
    if queries is not None and store not in NEURON_STORES:
        raise PolicyError(f"--query-heads is for NxD's shards; {folder} holds none: leave it out")
    if store in CUT_STORES:
        return open_cut(folder, store, like, queries)
    config_path = find_config(folder, like)
    config = read_config(config_path) if config_path is not None else None
    contents = _READERS[store](folder)
    manifest = read_manifest(folder)
    names = {name: unwrapped(name) for name in contents.tensors}
    model = {stored: name for stored, name in names.items() if not name.startswith(NOT_MODEL)}
    if not model:
        raise SourceError(f"{folder} holds no model tensors" + (", only optimizer or training state" if names else ""))
    refuse_quantized_tensors(model.values(), str(folder))
    refuse_foreign_tensors(model.values(), str(folder))
    layout, prefix, strangers = _recognise(folder, _CANDIDATES[store], model.values())
    tensors: dict[str, StoredTensor] = {}
    derived: list[str] = []
    scale_tensors: dict[str, StoredTensor] = {}
    for stored, name in model.items():
        own = name.removeprefix(prefix)
        if layout.is_derived(own):
            derived.append(stored)
        elif own.endswith(SCALE_SUFFIX):
            scale_tensors[own.removesuffix(SCALE_SUFFIX)] = contents.tensors[stored]
        elif own in tensors:
            raise SourceError(
                f"{folder} holds {own} twice: as {stored} and under another wrapper's name; keep one of them"
            )
        else:
            tensors[own] = contents.tensors[stored]
    geometry = _settle_geometry(folder, layout, tensors, config, config_path)
    if strangers:  # which this raises, with everything else that is wrong
        tied = layout.head_name() not in tensors
        tabulate(bind(layout, geometry, tied=tied), tensors, label=layout.label, where=str(folder))
    scales = _scale_grids(folder, tensors, scale_tensors, config)
    kind = "hf-fp8" if scales else layout.name if store in ("safetensors", "dcp") else store
    if store == "dcp" and layout.name in ("hf", "hf-fused"):
        kind = f"dcp-{layout.name}"
    others = {**contents.others, **{n: _describe(contents.tensors[n]) for n in names if n not in model}}
    return Checkpoint(
        folder,
        kind,
        layout,
        contents,
        tensors,
        scales,
        tuple(derived),
        others,
        config,
        geometry,
        manifest,
        prefix,
        config_path,
    )


def _recognise(folder: Path, candidates: Sequence[Layout], names: Iterable[str]) -> tuple[Layout, str, bool]:
    """The first layout, under the first prefix, that has a rule for every one of ``names``; failing that, for most.

    The last value says whether names are left for which it has none.
    """
    skeletons: dict[str, str] = {}
    for name in names:
        skeletons.setdefault(split_indices(name)[0], name)
    best: tuple[int, Layout, str, list[str]] | None = None
    for prefix in _PREFIXES:
        inside = [s.removeprefix(prefix) for s in skeletons if s.startswith(prefix)]
        outside = [s for s in skeletons if not s.startswith(prefix)]
        for layout in candidates:
            unknown = [s for s in layout.unknown(inside) if not s.endswith(SCALE_SUFFIX)]
            strangers = [*outside, *(prefix + s for s in unknown)]
            if not strangers:
                return layout, prefix, False
            if best is None or len(strangers) < best[0]:
                best = len(strangers), layout, prefix, strangers
    assert best is not None
    count, layout, best_prefix, strangers = best
    if 2 * count <= len(skeletons):
        return layout, best_prefix, True
    examples = [skeletons[s] for s in strangers]
    if count == len(skeletons):
        raise MappingError(
            enumerate_problems(
                f"the tensors in {folder} have names that no Qwen3 layout has; this is another model or format:",
                examples,
                5,
            )
        )
    raise MappingError(
        enumerate_problems(
            f"{folder} comes closest to layout {layout.label}, which has no place for these (one of each kind):",
            examples,
        )
    )


def _settle_geometry(
    folder: Path,
    layout: Layout,
    tensors: Mapping[str, StoredTensor],
    config: Qwen3Config | None,
    config_path: Path | None,
) -> Geometry:
    """The sizes that config and tensors agree on; without a config, those of the tensors.

    Where they do not agree, both sides are told: the sizes that differ, then every tensor that does.
    """
    integers = [
        f"{name} is {tensor.spec.dtype}, expected a floating-point dtype"
        for name, tensor in tensors.items()
        if not tensor.spec.dtype.startswith(("F", "BF"))
    ]
    if integers:
        raise SourceError(enumerate_problems(f"{folder} holds tensors that are no parameters of a Qwen3:", integers))
    shapes = {name: tensor.spec.shape for name, tensor in tensors.items()}
    lines: list[str] = []
    try:
        found = solve_geometry(layout, shapes)
    except MappingError:
        if config is None:
            raise
    else:
        if config is None:
            return found
        lines = compare_geometry(config.geometry, found)
        if not lines:
            return found
    try:
        bindings = bind(layout, config.geometry, tied=config.tie_word_embeddings)
        tabulate(bindings, tensors, label=layout.label, where=str(folder))
    except Misfit as misfit:
        if not lines:
            raise
        heading = f"{config_path} and the tensors in {folder} do not agree:"
        raise Misfit(heading, [*(f"config.json: {line}" for line in lines), *misfit.problems]) from None
    return config.geometry


def _scale_grids(
    folder: Path, tensors: Mapping[str, StoredTensor], scales: Mapping[str, StoredTensor], config: Qwen3Config | None
) -> dict[str, ScaleGrid]:
    """The scale grid of every FP8 tensor, by the tensor's FQN."""
    quantised = {name for name, tensor in tensors.items() if tensor.spec.dtype.startswith("F8_")}
    if not quantised and not scales:
        return {}
    problems = [
        f"{name} is {tensors[name].spec.dtype}, but has no {name}{SCALE_SUFFIX}"
        for name in sorted(quantised - set(scales))
    ]
    problems += [f"{name}{SCALE_SUFFIX} has no FP8 tensor {name} to scale" for name in sorted(set(scales) - quantised)]
    fp8 = config.quantization if config is not None else None
    if fp8 is None:
        raise SourceError(
            f"{folder} holds FP8 tensors, but no config.json with quantization_config.weight_block_size, "
            "so the blocks of their scales are not known"
        )
    grids = {}
    rows, columns = fp8.block_size
    for name in sorted(quantised & set(scales)):
        shape, scale = tensors[name].spec.shape, scales[name]
        expected = (-(-shape[0] // rows), -(-shape[1] // columns)) if len(shape) == 2 else None
        if scale.spec.shape != expected:
            problems.append(
                f"{name}{SCALE_SUFFIX}: expected shape {list(expected or ())} for blocks of {rows}x{columns}, "
                f"found {list(scale.spec.shape)}"
            )
        elif tensors[name].spec.dtype != "F8_E4M3":
            problems.append(f"{name} is {tensors[name].spec.dtype}; only F8_E4M3 is read")
        else:
            chunk = scale.chunks[0]
            grids[name] = ScaleGrid(chunk.file, chunk.offset, scale.spec.dtype, expected, rows, columns)
    if problems:
        raise SourceError(enumerate_problems(f"the FP8 weights in {folder} and their scales do not fit:", problems))
    return grids


def _describe(tensor: StoredTensor) -> str:
    return f"{tensor.spec.dtype} {list(tensor.spec.shape)}"
