"""config.json written again: in the spelling of transformers 4, of 5 or both, with the few values a conversion changes.

=================  ==================================  ========================================
meaning            v4                                  v5
=================  ==================================  ========================================
dtype              ``torch_dtype``                     ``dtype``
RoPE               ``rope_theta``, ``rope_scaling``    ``rope_parameters`` (theta and type inside)
expert count       ``num_experts``                     ``num_local_experts``
=================  ==================================  ========================================

transformers 5.24 reads all three styles alike; 4.57.6 reads v5 with theta 10000, no scaling and 128 experts. A config
is edited, never made anew: keys that nothing here knows stay, in their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from .config import Qwen3Config, Style
from .config_json import render_json
from .dtypes import TORCH_NAME

TargetStyle = Literal["source", "v4", "v5", "both"]

_SPELLINGS: dict[Style, tuple[str, ...]] = {
    "v4": ("torch_dtype", "rope_theta", "rope_scaling", "num_experts"),
    "v5": ("dtype", "rope_parameters", "num_local_experts"),
}
_SPELLINGS["both"] = _SPELLINGS["v4"] + _SPELLINGS["v5"]

_BESIDE: dict[str, tuple[str, ...]] = {
    "torch_dtype": ("dtype",),
    "dtype": ("torch_dtype",),
    "rope_theta": ("rope_parameters",),
    "rope_scaling": ("rope_parameters",),
    "rope_parameters": ("rope_theta", "rope_scaling"),
    "num_experts": ("num_local_experts",),
    "num_local_experts": ("num_experts",),
}
"""Where a new key goes in a file whose keys are not sorted: to the place of the first of these that it has."""


def render_config(
    config: Qwen3Config,
    *,
    style: TargetStyle = "source",
    dtype: str | None = None,
    tie: bool | None = None,
    vocab_size: int | None = None,
    drop_quantization: bool = False,
) -> bytes:
    """The bytes of a config.json: ``config``'s own, with the changes asked for. ``None`` means unchanged.

    ``dtype`` is a code such as ``BF16``; ``drop_quantization`` is for weights that were dequantised. When nothing
    changes, the file's own bytes come back.
    """
    raw = dict(config.raw)
    if tie is not None and tie != config.tie_word_embeddings:
        raw["tie_word_embeddings"] = tie
    if vocab_size is not None and vocab_size != config.geometry.vocab_size:
        raw["vocab_size"] = vocab_size
    if drop_quantization:
        raw.pop("quantization_config", None)
    if dtype is not None and dtype != config.dtype:
        spelled = [key for key in ("torch_dtype", "dtype") if raw.get(key) is not None]
        wanted = config.style if style == "source" else style
        for key in spelled or [key for key in _SPELLINGS[wanted] if key in ("torch_dtype", "dtype")]:
            raw[key] = TORCH_NAME[dtype]
    if style != "source":
        raw = _respell(raw, style, moe=config.geometry.is_moe)
    raw = _arrange(config.raw, raw)
    if config.source and list(raw.items()) == list(config.raw.items()):
        return config.source
    return render_json(raw, like=config.source)


def _respell(raw: Mapping[str, object], style: Style, *, moe: bool) -> dict[str, object]:
    """``raw`` with exactly the keys of ``style`` for what the styles spell differently."""
    spelled: dict[str, object] = {}
    dtype = next((raw[key] for key in ("torch_dtype", "dtype") if raw.get(key) is not None), None)
    if dtype is not None:
        spelled["torch_dtype"] = spelled["dtype"] = dtype
    if moe:
        count = next(raw[key] for key in ("num_experts", "num_local_experts") if raw.get(key) is not None)
        spelled["num_experts"] = spelled["num_local_experts"] = count
    spelled |= _spelled_rope(raw)
    rest = {key: value for key, value in raw.items() if key not in _BESIDE}
    return rest | {key: spelled[key] for key in _SPELLINGS[style] if key in spelled}


def _spelled_rope(raw: Mapping[str, object]) -> dict[str, object]:
    """RoPE in both spellings. What ``raw`` has itself stays as it is; the reader saw that the two agree."""
    old, new = raw.get("rope_scaling"), raw.get("rope_parameters")
    old, new = old if isinstance(old, dict) else {}, new if isinstance(new, dict) else {}
    inside = {key: value for key, value in {**old, **new}.items() if value is not None}
    legacy = inside.pop("type", None)  # what rope_type was called before transformers 4.45
    inside = {"rope_type": legacy or "default", **inside}
    theta = inside.pop("rope_theta", None)
    if raw.get("rope_theta") is not None:
        theta = raw["rope_theta"]
    scaling = None if inside["rope_type"] == "default" else dict(sorted(inside.items()))
    return {
        "rope_theta": theta,
        "rope_scaling": raw.get("rope_scaling", scaling),
        "rope_parameters": new if "rope_theta" in new else dict(sorted({**inside, "rope_theta": theta}.items())),
    }


def _arrange(before: Mapping[str, object], after: Mapping[str, object]) -> dict[str, object]:
    """``after`` in the order of ``before``: new keys sorted in where the file was sorted, else beside their like."""
    order = list(before)
    if order == sorted(order):
        return {key: after[key] for key in sorted(after)}
    added = {key: next((k for k in _BESIDE.get(key, ()) if k in before), None) for key in after if key not in before}
    arranged: dict[str, object] = {}
    for key in order:
        if key in after:
            arranged[key] = after[key]
        arranged.update({new: after[new] for new, like in added.items() if like == key})
    arranged.update({new: after[new] for new, like in added.items() if like is None})
    return arranged
