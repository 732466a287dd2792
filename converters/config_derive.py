"""A config.json for weights that came without one: sizes from the tensors' shapes, the rest named by the user.

Nothing is guessed. Where the shapes are those of a released model, its values are offered as options to type; theta and
context differ between releases of one size, so even then somebody has to choose.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping

from .config import Qwen3Config, parse_config
from .config_json import parse_json_object
from .config_refusals import ARCHITECTURES
from .dtypes import FROM_TORCH_NAME, TORCH_NAME
from .errors import PolicyError, SourceError, enumerate_problems
from .geometry import Geometry
from .variants import released_like

_NUMBERS = ("rope_theta", "rms_norm_eps")
_INTEGERS = ("max_position_embeddings", "num_experts_per_tok", "intermediate_size")
_BOOLEANS = ("norm_topk_prob", "tie_word_embeddings")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

SETTABLE = ("dtype", *_NUMBERS, *_INTEGERS, *_BOOLEANS, "rope_scaling", *_TOKENS)
"""Keys that ``--set`` takes. ``intermediate_size`` is MoE's, whose configs carry it unused; a dense model's is told."""

_NEEDED = (
    "rope_theta",
    "rms_norm_eps",
    "max_position_embeddings",
    "tie_word_embeddings",
    "dtype",
    "num_experts_per_tok",
    "norm_topk_prob",
)
_MOE_ONLY = ("num_experts_per_tok", "norm_topk_prob", "intermediate_size")

_HINTS = {"dtype": "bfloat16|float16|float32", **dict.fromkeys(_BOOLEANS, "true|false")}


def parse_setting(text: str) -> tuple[str, object]:
    """``KEY=VALUE`` from the command line, the value of the key's own type: ``rope_theta=1e6`` -> (.., 1000000.0).

    Raises:
        PolicyError: no ``=``, a key that cannot be set, or a value of another type.
    """
    key, equals, value = text.partition("=")
    key, value = key.strip(), value.strip()
    if not equals:
        raise PolicyError(f"setting {text!a:.80}: expected KEY=VALUE, such as rope_theta=1000000")
    _check_key(key)
    try:
        return key, _parse(key, value)
    except (KeyError, ValueError, SourceError):
        raise PolicyError(f"setting {key}: {value!a:.80} is not {_expected(key)}") from None


def derive_config(geometry: Geometry, known: Mapping[str, object]) -> Qwen3Config:
    """A complete v4-style config of a model of these sizes, ``known`` holding what shapes do not tell.

    ``known`` has the keys of ``SETTABLE``; ``dtype`` is a code (``BF16``) or a torch name. v4 keys, because every
    version of transformers reads them right.

    Raises:
        PolicyError: a key is missing (all are listed, with the values of the releases of this size), cannot be set,
            or has an impossible value.
    """
    for key, value in known.items():
        _check_key(key)
        if key in _MOE_ONLY and not geometry.is_moe:
            raise PolicyError(f"setting {key}: this model is dense, it has no place for it")
        if key in _TOKENS and not _are_tokens(value):
            raise PolicyError(f"setting {key}: {value!a:.80} is neither a token id nor a list of them")
    missing = [key for key in _NEEDED if known.get(key) is None and (geometry.is_moe or key not in _MOE_ONLY)]
    if missing:
        raise PolicyError(_missing(missing, geometry, known))
    try:
        return parse_config(_assemble(geometry, known), "the config made from the tensors' shapes and the settings")
    except SourceError as error:  # the shapes are sound, so a setting is not
        raise PolicyError(str(error)) from None


def _assemble(geometry: Geometry, known: Mapping[str, object]) -> dict[str, object]:
    kind = "qwen3_moe" if geometry.is_moe else "qwen3"
    dtype = known["dtype"]
    raw: dict[str, object] = {
        "architectures": [ARCHITECTURES[kind]],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": geometry.head_dim,
        "hidden_act": "silu",
        "hidden_size": geometry.hidden_size,
        "max_position_embeddings": known["max_position_embeddings"],
        "model_type": kind,
        "num_attention_heads": geometry.num_attention_heads,
        "num_hidden_layers": geometry.num_hidden_layers,
        "num_key_value_heads": geometry.num_key_value_heads,
        "rms_norm_eps": known["rms_norm_eps"],
        "rope_scaling": known.get("rope_scaling"),
        "rope_theta": known["rope_theta"],
        "sliding_window": None,
        "tie_word_embeddings": known["tie_word_embeddings"],
        "torch_dtype": TORCH_NAME.get(dtype, dtype) if isinstance(dtype, str) else dtype,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": geometry.vocab_size,
    }
    raw |= {key: known[key] for key in _TOKENS if key in known}
    if geometry.is_moe:
        raw |= {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": geometry.moe_intermediate_size,
            "norm_topk_prob": known["norm_topk_prob"],
            "num_experts": geometry.num_experts,
            "num_experts_per_tok": known["num_experts_per_tok"],
        }
        raw |= {key: known[key] for key in ("intermediate_size",) if key in known}
    else:
        raw["intermediate_size"] = geometry.intermediate_size
    return dict(sorted(raw.items()))


def _missing(missing: list[str], geometry: Geometry, known: Mapping[str, object]) -> str:
    text = enumerate_problems(
        "there is no config.json, and tensors do not tell these values; name one with --like, or give each:",
        [f"--set {key}={_HINTS.get(key, 'NUMBER')}" for key in missing],
    )
    releases = released_like(geometry)
    if not releases:
        return text
    agreeing = [r for r in releases if all(known.get(key, value) == value for key, value in r.settings().items())]
    lines = []
    for release in agreeing or releases:
        values = {**release.settings(), "dtype": "bfloat16"}
        options = " ".join(f"--set {key}={_spelled(values[key])}" for key in missing)
        lines.append(f"{', '.join(release.names)}: {options}")
    heading = "released models of these shapes have (choose the one it comes from):"
    return text + "\n" + enumerate_problems(heading, lines)


def _spelled(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _check_key(key: str) -> None:
    if key in SETTABLE:
        return
    near = difflib.get_close_matches(key, SETTABLE, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise PolicyError(f"setting {key!a:.60} is not one that can be made ({', '.join(SETTABLE)}){hint}")


def _parse(key: str, text: str) -> object:
    if key == "dtype":
        return text if text in TORCH_NAME else FROM_TORCH_NAME[text.removeprefix("torch.")]
    if key in _NUMBERS:
        number = float(text)
        if not math.isfinite(number):
            raise ValueError
        return number
    if key in _INTEGERS:
        return int(text)
    if key in _BOOLEANS:
        return {"true": True, "false": False}[text.lower()]
    (value,) = parse_json_object(b'{"value": ' + text.encode() + b"}", key).values()
    return value


def _are_tokens(value: object) -> bool:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return all(type(token) is int and token >= 0 for token in ids)


def _expected(key: str) -> str:
    if key in _NUMBERS:
        return "a number"
    if key in _INTEGERS:
        return "a whole number"
    if key in _BOOLEANS:
        return "true or false"
    if key == "dtype":
        return "a dtype such as bfloat16"
    return "a JSON value"
