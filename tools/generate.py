"""Checkpoints shaped like the released models: random ones to convert and time, hollow ones to plan with.

Every size of the hub can be made, or cut to fewer layers and experts. The tensors have true names, shapes and dtypes,
``config.json`` is in the hub's (v4) style, and whether a tied head is stored follows the hub's repositories. Values are
finite, incompressible, distinct per tensor and of trained weights' magnitude, so a model of them runs; they depend on
the seed and the tensor's name alone. A hollow checkpoint (``sparse``) has headers and sizes but takes no disk space.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from qwen3conv.converters.boxes import StoredTensor, TensorSpec
from qwen3conv.converters.config import Qwen3Config
from qwen3conv.converters.config_derive import derive_config
from qwen3conv.converters.config_styles import render_config
from qwen3conv.converters.dtypes import WRITABLE
from qwen3conv.converters.errors import PolicyError, enumerate_problems
from qwen3conv.converters.parameters import EMBEDDING, HEAD, logical_parameters
from qwen3conv.converters.stores.contents import Arrangement
from qwen3conv.converters.stores.safetensors_writing import arrange_safetensors, split_by_size
from qwen3conv.converters.stores.staging import Stage, check_destination, check_space
from qwen3conv.converters.variants import GEOMETRIES, RELEASES, Release

SHARD_BYTES = 4_000_000_000
"""The hub's releases are split at about 4 GB: this puts the head of 1.7B alone into its second file, as it is there."""

STUDY = "moe-study"
"""30B-A3B's widths, 4 layers, 64 experts, top-4: a MoE of 3.8 GB in bf16."""

_STORES_TIED_HEAD = ("Qwen3-0.6B", "Qwen3-1.7B")
"""Tied releases whose repositories store ``lm_head.weight`` all the same; 4B and the tied Base ones do not."""

_UNUSED_INTERMEDIATE = {"30B-A3B": 6144, "235B-A22B": 12288, "Coder-480B-A35B": 8192}
"""The dense size that MoE configs carry without using it."""

_BOS, _EOS = 151643, 151645

_GENERATION = {
    "bos_token_id": _BOS,
    "do_sample": True,
    "eos_token_id": [_EOS, _BOS],
    "pad_token_id": _BOS,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}

_BLOCK = 1 << 20
"""Bytes drawn and written at a time."""


class Pattern(NamedTuple):
    """How random bits become elements of a dtype.

    ``& mask`` keeps sign, mantissa and the exponent's low bits, ``+ base`` puts the exponent where trained weights
    have theirs.
    """

    word: str
    """numpy's name of the unsigned integer of that width."""
    mask: int
    base: int
    norm_mask: int
    """The same for norms, which lie in [0.5, 1)."""
    norm_base: int


_PATTERNS = {
    "BF16": Pattern("uint16", 0x83FF, 114 << 7, 0x007F, 126 << 7),  # 2**-13 to 2**-5
    "F32": Pattern("uint32", 0x83FFFFFF, 114 << 23, 0x007FFFFF, 126 << 23),  # 2**-13 to 2**-5
    "F16": Pattern("uint16", 0x8FFF, 6 << 10, 0x03FF, 14 << 10),  # 2**-9 to 2**-5
}


class Generated(NamedTuple):
    """What was made."""

    folder: Path
    config: Qwen3Config
    tensors: int
    files: int
    nbytes: int
    """Sum of the weight files' sizes."""


def sizes() -> list[str]:
    """What ``generate`` takes as size, apart from the releases' own names."""
    return [*GEOMETRIES, STUDY]


def generate(
    folder: Path,
    size: str,
    *,
    seed: int = 0,
    sparse: bool = False,
    layers: int | None = None,
    experts: int | None = None,
    vocab: int | None = None,
    dtype: str = "BF16",
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> Generated:
    """Make a Hugging Face folder like that of a released model; memory stays at a few MiB.

    ``size`` is one of ``sizes()``, a distinctive part of one (``480B``), or a release (``Qwen3-4B-Instruct-2507``).
    ``layers``, ``experts`` and ``vocab`` (rows) cut the model; ``dtype`` is a code of ``WRITABLE``.

    Raises:
        PolicyError: no such size or dtype, or a cut that makes no model.
        DestinationError: the folder exists, or the disk is too small.
    """
    config, stores_head = describe(size, layers=layers, experts=experts, vocab=vocab, dtype=dtype)
    arrangement = arrange(config, stores_head=stores_head, shard_bytes=shard_bytes)
    nbytes = sum(file.size for file in arrangement.files)
    check_destination(folder, overwrite=overwrite, resume=False)
    if not sparse:
        check_space(folder.parent, nbytes)
    extras = [
        ("config.json", render_config(config, style="v4")),
        ("generation_config.json", (json.dumps(_GENERATION, indent=2) + "\n").encode()),
    ]
    with Stage(folder, f"generate {size} {seed}", resume=False, overwrite=overwrite) as stage:
        stage.create(arrangement.files)
        if not sparse:
            _fill(stage.path, arrangement, seed, tied=config.tie_word_embeddings)
        stage.finish(arrangement.files, extras, arrangement.trailers())
    return Generated(folder, config, len(arrangement.tensors), len(arrangement.files), nbytes)


def describe(
    size: str,
    *,
    layers: int | None = None,
    experts: int | None = None,
    vocab: int | None = None,
    dtype: str = "BF16",
) -> tuple[Qwen3Config, bool]:
    """The config of a size, cut as asked, and whether ``lm_head.weight`` is stored. Raises as ``generate`` does."""
    if dtype not in WRITABLE:
        raise PolicyError(f"dtype {dtype!r} is not one that is generated; choose one of {', '.join(WRITABLE)}")
    release, top_k = _find(size), None
    if size == STUDY:
        layers, experts, top_k = layers or 4, experts or 64, 4
    if experts is not None and not release.geometry.is_moe:
        raise PolicyError(f"size {size!r} is dense: it has no experts to cut")
    geometry = replace(
        release.geometry,
        num_hidden_layers=release.geometry.num_hidden_layers if layers is None else layers,
        num_experts=release.geometry.num_experts if experts is None else experts,
        vocab_size=release.geometry.vocab_size if vocab is None else vocab,
    )
    if problems := geometry.problems():
        raise PolicyError(enumerate_problems(f"size {size!r} cannot be cut so:", problems))
    known = {
        "dtype": dtype,
        "rope_theta": release.rope_theta,
        "rms_norm_eps": release.rms_norm_eps,
        "max_position_embeddings": release.max_position_embeddings,
        "tie_word_embeddings": release.tie_word_embeddings,
        "bos_token_id": _BOS,
        "eos_token_id": _EOS,
    }
    if geometry.num_experts is not None and release.num_experts_per_tok is not None:
        known["num_experts_per_tok"] = min(top_k or release.num_experts_per_tok, geometry.num_experts)
        known["norm_topk_prob"] = release.norm_topk_prob
        known["intermediate_size"] = _UNUSED_INTERMEDIATE[_size_of(release)]
    stored = not release.tie_word_embeddings or any(name in _STORES_TIED_HEAD for name in release.names)
    return derive_config(geometry, known), stored


def arrange(config: Qwen3Config, *, stores_head: bool, shard_bytes: int = SHARD_BYTES) -> Arrangement:
    """Where every byte of such a model's weight files goes; nothing is written."""
    assert config.dtype is not None
    parameters = logical_parameters(config.geometry, tied=not stores_head)
    specs = (TensorSpec(name, config.dtype, shape) for name, shape in parameters)
    return arrange_safetensors(split_by_size(specs, shard_bytes))


def _find(size: str) -> Release:
    """The release that ``size`` means: the earliest one of a size, or the one named."""
    wanted = "30B-A3B" if size == STUDY else size
    keys = [wanted] if wanted in GEOMETRIES else [key for key in GEOMETRIES if wanted in key.split("-")]
    if len(keys) == 1:
        return next(release for release in RELEASES if release.geometry == GEOMETRIES[keys[0]])
    for release in RELEASES:
        if wanted.removeprefix("Qwen/") in release.names or f"Qwen3-{wanted}" in release.names:
            return release
    raise PolicyError(f"size {size!r} is not known; choose one of {', '.join(sizes())}, or a release's name")


def _size_of(release: Release) -> str:
    return next(key for key, geometry in GEOMETRIES.items() if geometry == release.geometry)


def _fill(folder: Path, arrangement: Arrangement, seed: int, *, tied: bool) -> None:
    """Write the elements of every tensor, file by file in file order."""
    by_file: dict[str, list[StoredTensor]] = {file.name: [] for file in arrangement.files}
    for tensor in arrangement.tensors.values():
        by_file[tensor.chunks[0].file].append(tensor)
    for name, stored in by_file.items():
        with open(folder / name, "r+b", buffering=0) as file:
            for tensor in stored:
                position = tensor.chunks[0].offset
                source = EMBEDDING if tied and tensor.name == HEAD else tensor.name
                for block in _elements(replace(tensor.spec, name=source), seed):
                    done = 0
                    while done < len(block):
                        done += os.pwrite(file.fileno(), block[done:], position + done)
                    position += len(block)


def _elements(spec: TensorSpec, seed: int) -> Iterator[memoryview]:
    """The bytes of a tensor, in blocks that are overwritten by the next."""
    import numpy as np

    pattern = _PATTERNS[spec.dtype]
    mask, base = (pattern.norm_mask, pattern.norm_base) if len(spec.shape) == 1 else (pattern.mask, pattern.base)
    bits = np.random.SFC64([seed, zlib.crc32(spec.name.encode())])
    for begin in range(0, spec.nbytes, _BLOCK):
        count = min(_BLOCK, spec.nbytes - begin)
        words = bits.random_raw(-(-count // 8)).view(pattern.word)
        words &= words.dtype.type(mask)
        words += words.dtype.type(base)
        yield words.data.cast("B")[:count]
