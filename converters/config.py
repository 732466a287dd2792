"""What config.json says of a Qwen3: ``Qwen3Config``, and how it is read.

Two spellings are in the wild, and a file may carry both. v4: ``torch_dtype``, ``rope_theta``, ``rope_scaling``,
``num_experts``. v5: ``dtype``, ``rope_parameters``, ``num_local_experts``. transformers 4.57 reads a v5 file with theta
10000 and 128 experts, without a word. Sources: transformers 4.57.6 and 5.24, ``configuration_utils.py``,
``modeling_rope_utils.py``. A value that changes the maths is never defaulted: class defaults (theta 10000,
``norm_topk_prob`` false) are not those of the released models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from .config_json import read_json_object
from .config_refusals import refuse_other_models, unsupported_features
from .config_rope import Style, read_rope
from .config_values import Values, read_dtype
from .errors import SourceError
from .geometry import LARGEST, Geometry, compare_geometry
from .quantization import Fp8Blocks, parse_quantization

__all__ = [
    "Difference",
    "Fp8Blocks",
    "Geometry",
    "Qwen3Config",
    "Style",
    "compare_geometry",
    "compare_maths",
    "parse_config",
    "read_config",
]

_LARGEST_CONTEXT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Qwen3Config:
    """A config.json, read and checked. Values are normalised; ``raw`` and ``source`` keep what the file said."""

    geometry: Geometry
    tie_word_embeddings: bool
    rope_theta: float
    rope_scaling: Mapping[str, object] | None
    """None for the plain RoPE; else with ``rope_type``, without theta, and with the original context filled in."""
    rms_norm_eps: float
    max_position_embeddings: int
    num_experts_per_tok: int | None
    """MoE only, like ``norm_topk_prob``."""
    norm_topk_prob: bool | None
    dtype: str | None
    """Code such as ``BF16``; None when the file names no dtype."""
    quantization: Fp8Blocks | None
    style: Style
    """How the file spells RoPE."""
    raw: Mapping[str, object] = field(repr=False)
    """The parsed JSON object: every key, in the file's order. Not to be changed."""
    source: bytes = field(default=b"", repr=False, compare=False)
    """The file's bytes; empty when the config does not come from a file."""

    @property
    def model_type(self) -> str:
        """``qwen3`` or ``qwen3_moe``."""
        return "qwen3_moe" if self.geometry.is_moe else "qwen3"

    def maths(self) -> dict[str, object]:
        """The values that change what the model computes and that no tensor's shape gives away, and head_dim."""
        return {
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "num_experts_per_tok": self.num_experts_per_tok,
            "norm_topk_prob": self.norm_topk_prob,
            "tie_word_embeddings": self.tie_word_embeddings,
            "head_dim": self.geometry.head_dim,
        }


class Difference(NamedTuple):
    """A config key and its two values."""

    key: str
    a: object
    b: object

    def __str__(self) -> str:
        return f"{self.key}: {self.a} and {self.b}"


def compare_maths(a: Qwen3Config, b: Qwen3Config) -> list[Difference]:
    """Where two configs compute different things, key by key; shapes are ``compare_geometry``'s."""
    left, right = a.maths(), b.maths()
    return [Difference(key, left[key], right[key]) for key in left if left[key] != right[key]]


def read_config(path: Path) -> Qwen3Config:
    """The config in ``path``: a config.json, or the folder that holds one.

    Raises:
        SourceError: the file is missing or hostile, the model is not a Qwen3 that is read, or values are missing,
            impossible or contradict each other; the message lists all such values.
    """
    path = path / "config.json" if path.is_dir() else path
    raw, source = read_json_object(path)
    config = parse_config(raw, str(path), source=source)
    if (path.parent / "hf_quant_config.json").exists():
        raise SourceError(
            f"{path.parent}: hf_quant_config.json marks a checkpoint quantised by ModelOpt, which is not read; "
            "convert the repository it was quantised from"
        )
    return config


def parse_config(raw: Mapping[str, object], where: str, *, source: bytes = b"") -> Qwen3Config:
    """The config that a parsed JSON object spells; ``where`` names it in errors. Raises as ``read_config`` does."""
    refuse_other_models(raw, where)
    quantization = parse_quantization(raw, where)
    values = Values(raw)
    moe = raw["model_type"] == "qwen3_moe"
    sizes = {key: values.integer(key, LARGEST[key]) for key in _SIZES}
    if moe:
        sizes["moe_intermediate_size"] = values.integer("moe_intermediate_size", LARGEST["moe_intermediate_size"])
        sizes["num_experts"] = values.integer("num_experts", LARGEST["num_experts"], also="num_local_experts")
    else:
        sizes["intermediate_size"] = values.integer("intermediate_size", LARGEST["intermediate_size"])
        for key in ("num_experts", "num_local_experts"):
            if raw.get(key) not in (None, 0):
                values.problems.append(f"{key} is {raw[key]!a:.40}, but model_type 'qwen3' is dense")
    context = values.integer("max_position_embeddings", _LARGEST_CONTEXT)
    top_k = values.integer("num_experts_per_tok", LARGEST["num_experts"]) if moe else None
    norm_topk = values.boolean("norm_topk_prob") if moe else None
    tie = values.boolean("tie_word_embeddings")
    eps = values.number("rms_norm_eps", below=1.0)
    dtype = read_dtype(values)
    theta, scaling, style = read_rope(values, context)
    values.problems.extend(unsupported_features(raw))
    geometry = Geometry(**sizes)
    if not values.missing and not values.problems:
        values.problems.extend(geometry.problems())
        if top_k is not None and top_k > sizes["num_experts"]:
            values.problems.append(f"num_experts_per_tok is {top_k}, of {sizes['num_experts']} experts")
    values.check(where)
    return Qwen3Config(
        geometry=geometry,
        tie_word_embeddings=tie,
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=eps,
        max_position_embeddings=context,
        num_experts_per_tok=top_k,
        norm_topk_prob=norm_topk,
        dtype=dtype,
        quantization=quantization,
        style=style,
        raw=raw,
        source=source,
    )


_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
