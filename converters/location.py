"""Where the weights in a folder are, and in which store, by the names of files alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from .errors import SourceError, few
from .names import natural_key
from .refusals import refuse_files, refuse_pickles
from .stores.nxd_inference import locate_presharded
from .stores.nxd_training import locate_nxd
from .stores.ranks import RANKS_INDEX
from .stores.safetensors import INDEX, SINGLE
from .stores.staging import JOURNAL

FULL_FILES = ("pytorch_model_fsdp.bin", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Whole tensors in pickled files: Accelerate's full state dict, and what transformers saved before safetensors."""


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
    # the latest step first: of a training run it is what one looks for
    folders = [path / name for name in sorted(names, key=natural_key, reverse=True)[:100] if (path / name).is_dir()]
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


def _neuron_in(folder: Path) -> dict[str, str]:
    """The same of NxD's, whose files may lie one or two folders down."""
    if (inner := locate_nxd(folder)) is not None:
        return {"nxd": f"neuronx-distributed shards ({inner})"}
    if (inner := locate_presharded(folder)) is not None:
        return {"nxd-inference": f"NxD Inference's presharded weights ({inner})"}
    return {}
