"""What is this folder? Its store by its files, its layout by its tensors' names; shapes and dates decide nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path

from .boxes import StoredTensor
from .config import Geometry, Qwen3Config, compare_geometry, read_config
from .errors import MappingError, SourceError, enumerate_problems, few
from .files import Files
from .formats import RANK_LAYOUTS
from .layouts import (
    ACCELERATE,
    ACCELERATE_PER_EXPERT,
    HF,
    HF_FUSED,
    TITAN_SCHEMAS,
    TITAN_TRANSFORMERS,
    VLLM,
    Binding,
    Layout,
    bind,
    nxd_inference_layout,
    nxd_layout,
    solve_geometry,
)
from .manifest import ASSETS, Manifest, read_manifest
from .names import natural_key, split_indices, unwrapped
from .placement import ONE_RANK, Mesh, check_mesh, mesh_bindings, rank_name
from .planning import Misfit, ScaleGrid, Table, tabulate
from .quantization import SCALE_SUFFIX, refuse_quantized_tensors
from .refusals import refuse_files, refuse_foreign_tensors, refuse_pickles
from .stores.contents import Contents
from .stores.dcp import read_dcp
from .stores.fsdp_full import read_full
from .stores.nxd_bindings import Queries, nxd_bindings, nxd_heads
from .stores.nxd_inference import locate_presharded, read_presharded
from .stores.nxd_training import locate_nxd, read_nxd
from .stores.nxd_writing import as_mesh
from .stores.ranks import RANKS_INDEX, read_ranks, read_vllm
from .stores.safetensors import INDEX, SINGLE, read_safetensors
from .stores.staging import JOURNAL
from .stores.torch_shards import read_torch_shards
from .stores.verl import SUBFOLDER, read_verl

NOT_MODEL = (
    "optimizer.",
    "optim.",
    "lr_scheduler.",
    "scheduler.",
    "dataloader.",
    "train_state.",
    "rng_state",
    "extra_state",
)
"""Prefixes of what a training checkpoint holds beside the model (torchtitan 0.3.0 and 0.2, accelerate 1.15)."""

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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A recognised checkpoint. Only headers have been read; whether it is whole is what ``table`` finds out."""

    path: Path
    format: str
    layout: Layout
    contents: Contents
    tensors: Mapping[str, StoredTensor]
    """Model tensors by the layout's own FQN (no prefix, no wrapper segments), without scales and derived ones."""
    scales: Mapping[str, ScaleGrid]
    derived: tuple[str, ...]
    """Stored tensors that follow from the config and are left out."""
    others: Mapping[str, str]
    """What else the checkpoint holds: optimizer, scheduler, dataloader, step. FQN -> one-line description."""
    config: Qwen3Config | None
    geometry: Geometry
    manifest: Manifest | None = None
    prefix: str = ""
    config_path: Path | None = field(default=None, compare=False)
    mesh: Mesh = ONE_RANK
    """What the tensors are cut for; then ``tensors`` are named ``rank/FQN``."""
    bindings: Callable[[bool], Iterable[Binding]] | None = field(default=None, compare=False, repr=False)
    """What the tensors are made of, given whether the head is tied, where layout and mesh alone do not say."""

    @property
    def stores_head(self) -> bool:
        """Whether an output head is stored, tied or not."""
        head = self.layout.head_name()
        if self.mesh == ONE_RANK:
            return head in self.tensors
        return any(rank_name(rank, head) in self.tensors for rank in range(self.mesh.ranks))

    @property
    def model_bytes(self) -> int:
        """Bytes of all model tensors as stored."""
        return sum(tensor.spec.nbytes for tensor in self.tensors.values())

    def table(self, *, tied: bool) -> Table:
        """Where every logical parameter lies.

        Raises:
            MappingError: tensors are missing, unknown or mis-shaped; all are listed.
            SourceError: chunks overlap or leave holes.
        """
        if self.bindings is not None:
            bindings = self.bindings(tied)
        elif self.mesh == ONE_RANK:
            bindings = bind(self.layout, self.geometry, tied=tied)
        else:
            bindings = mesh_bindings(self.layout, self.geometry, self.mesh, tied=tied)
        return tabulate(bindings, self.tensors, scales=self.scales, label=self.layout.label, where=str(self.path))


def locate_checkpoint(path: Path) -> tuple[Path, str]:
    """The folder that holds the weights, and its store: ``safetensors``, ``torch-shards`` or ``dcp``.

    Raises:
        SourceError: nothing readable is there; the message says what was found and the next step.
    """
    try:
        if not path.exists():
            raise SourceError(f"{path} does not exist")
        if not path.is_dir():
            raise SourceError(f"{path} is a file; name the folder that it is in")
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in entries)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error
    if JOURNAL in names or os.path.lexists(path.absolute().parent / JOURNAL):
        raise SourceError(f"{path} is an unfinished conversion; run the command that began it again with --resume")
    stores = _stores_in(names) or _neuron_in(path)
    refuse_files(path, names, has_store=bool(stores))
    if len(stores) > 1:
        raise SourceError(f"{path} is ambiguous, it holds {' and '.join(stores.values())}; move one of them elsewhere")
    if stores:
        return path, next(iter(stores))
    for inner in ("pytorch_model_fsdp_0", "sharded"):
        if inner in names and _stores_in(os.listdir(path / inner)):
            return locate_checkpoint(path / inner)
    steps = sorted(
        (int(name.removeprefix("step-")) for name in names if name.startswith("step-") and name[5:].isdigit()),
        reverse=True,
    )
    if steps:
        raise SourceError(f"{path} holds training steps; name one of them, the latest is {path / f'step-{steps[0]}'}")
    _point_below(path, names)
    refuse_pickles(path, names)
    seen = few(names, 8) or "nothing"
    raise SourceError(
        f"no checkpoint is recognised in {path}: found {seen}; expected {SINGLE} or {INDEX} (Hugging Face), "
        ".metadata and *.distcp (DCP), or shard-*-model-*.safetensors (torch)"
    )


def _point_below(path: Path, names: Sequence[str], levels: int = 2) -> None:
    """Raise ``SourceError`` when a subfolder holds what is read, or is known and not read."""
    folders = [path / name for name in sorted(names, key=natural_key)[:100] if (path / name).is_dir()]
    for folder in folders:
        try:
            inside = sorted(os.listdir(folder))
        except OSError:
            continue
        stores = _stores_in(inside) or _neuron_in(folder)
        refuse_files(folder, inside, has_store=bool(stores))
        if stores:
            raise SourceError(f"{path} holds no checkpoint itself, {folder} does ({' and '.join(stores.values())})")
        if levels > 1:
            _point_below(folder, inside, levels - 1)


def open_checkpoint(path: Path, *, like: Path | None = None, queries: Queries | None = None) -> Checkpoint:
    """Recognise the checkpoint in ``path`` from its headers. ``like`` names a folder or file to take config.json from.

    ``queries`` says how NxD's query heads lie where its files do not tell.

    Raises:
        SourceError: it cannot be read, or is of a kind that is refused.
        MappingError: its names fit no layout, or its shapes contradict its config.
    """
    folder, store = locate_checkpoint(path)
    if store in _NEURON:
        return _open_nxd(folder, store, like, queries)
    if store in _CUT:
        return _CUT[store](folder, like)
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
    if queries is None and manifest is not None and any(p.get("order") == "tiled" for p in manifest.policies):
        queries = "follow"
    with Files(folder, os.O_RDONLY) as files:

        def read(file: str, offset: int, count: int) -> bytes:
            raw = bytearray(count)
            files.read_into(file, offset, memoryview(raw))
            return bytes(raw)

        heads = nxd_heads(shards, config.geometry, read, queries=queries)
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


def find_config(folder: Path, like: Path | None = None) -> Path | None:
    """The config.json that speaks for the checkpoint in ``folder``: ``like``'s, its own, or a DCP's copy.

    Raises:
        SourceError: ``like`` has none, or a folder cannot be looked into.
    """
    try:
        return _find_config(folder, like)
    except OSError as error:
        raise SourceError(f"{error.filename} cannot be read: {error.strerror}") from error


def _find_config(folder: Path, like: Path | None) -> Path | None:
    if like is not None:
        path = like / "config.json" if like.is_dir() else like
        if not path.is_file() and like.is_dir():
            path = like / ASSETS / "config.json"
        if not path.is_file():
            raise SourceError(f"{like} has no config.json")
        return path
    for path in (folder / "config.json", folder / ASSETS / "config.json", folder / SUBFOLDER / "config.json"):
        if path.is_file():
            return path
    return None


_NEURON = {"nxd": (read_nxd, nxd_layout), "nxd-inference": (read_presharded, nxd_inference_layout)}

_CUT = {"ranks": _open_ranks, "vllm": _open_vllm}

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


def _neuron_in(folder: Path) -> dict[str, str]:
    """The same of NxD's, whose files may lie one or two folders down."""
    if (inner := locate_nxd(folder)) is not None:
        return {"nxd": f"neuronx-distributed shards ({inner})"}
    if (inner := locate_presharded(folder)) is not None:
        return {"nxd-inference": f"NxD Inference's presharded weights ({inner})"}
    return {}


def _stores_in(names: Sequence[str]) -> dict[str, str]:
    """The stores whose files are among ``names``, each with an example for messages."""
    if RANKS_INDEX in names or any(fnmatch(name, "rank-?????-of-?????.safetensors") for name in names):
        return {"ranks": f"a per-rank checkpoint ({RANKS_INDEX})"}
    if any(fnmatch(name, "model-rank-*-part-*.safetensors") for name in names):
        return {"vllm": "vLLM's sharded_state (model-rank-*-part-*.safetensors)"}
    if any(fnmatch(name, "model_world_size_*_rank_*.pt") for name in names):
        return {"verl": "verl's FSDP shards (model_world_size_*_rank_*.pt)"}
    found = {}
    shards = [name for name in names if fnmatch(name, "shard-*-model-*.safetensors")]
    plain = [
        name
        for name in names
        if name.endswith(".safetensors")
        and name not in shards
        and not fnmatch(name, "model-rank-*-part-*")
        and not fnmatch(name, "tp*_sharded_checkpoint*")
        and not name.startswith("adapter_model")
    ]
    if shards:
        found["torch-shards"] = f"torch's sharded safetensors ({shards[0]})"
    if plain or INDEX in names:
        found["safetensors"] = f"Hugging Face safetensors ({plain[0] if plain else INDEX})"
    dcp = [name for name in names if name.endswith((".metadata", ".metadata.tmp", ".distcp"))]
    if dcp:
        found["dcp"] = f"a DCP checkpoint ({dcp[0]})"
    full = next((name for name in FULL_FILES if name in names), None)
    if full is not None and not found:  # beside safetensors it is their older twin
        found["torch-full"] = f"pickled PyTorch weights ({full})"
    return found


FULL_FILES = ("pytorch_model_fsdp.bin", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Whole tensors in pickled files: Accelerate's full state dict, and what transformers saved before safetensors."""


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
