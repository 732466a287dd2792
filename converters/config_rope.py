"""RoPE as config.json spells it: v4 ``rope_theta`` and ``rope_scaling``, v5 ``rope_parameters``, or both.

Sources: transformers 4.57.6 and 5.24, ``modeling_rope_utils.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from .config_values import Values

Style = Literal["v4", "v5", "both"]
"""Which spelling of RoPE a config.json has."""

SCALED_ROPE = ("linear", "dynamic", "yarn", "llama3", "longrope")
"""Kinds of RoPE scaling that are carried; a converter computes none of them."""


def read_rope(values: Values, context: int) -> tuple[float, Mapping[str, object] | None, Style]:
    """RoPE's theta, its normalised scaling and the spelling found."""
    raw = values.raw
    old, new = raw.get("rope_scaling"), raw.get("rope_parameters")
    for key, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, dict):
            values.problems.append(f"{key} is {value!a:.40}, expected an object")
            return 1.0, None, "v4"
    inside_old = old if isinstance(old, dict) else {}
    inside_new = new if isinstance(new, dict) else {}
    nested = [key for key, value in inside_new.items() if isinstance(value, dict)]
    if nested:
        values.problems.append(f"rope_parameters holds one set per layer type ({nested[0]!a:.40}): that is not read")
        return 1.0, None, "v5"
    thetas = {
        name: values.checked(name, value)
        for name, value in (
            ("rope_theta", raw.get("rope_theta")),
            ("rope_scaling.rope_theta", inside_old.get("rope_theta")),
            ("rope_parameters.rope_theta", inside_new.get("rope_theta")),
        )
        if value is not None
    }
    if not thetas:
        values.missing.append("rope_theta (or rope_parameters.rope_theta)")
    elif len(set(thetas.values())) > 1:
        values.problems.append(" but ".join(f"{name} is {value:g}" for name, value in thetas.items()))
    theta = next(iter(thetas.values()), 1.0)
    v4 = "rope_theta" in thetas or "rope_scaling" in raw
    scalings = {}
    if v4:
        scalings["rope_scaling"] = _scaling(values, "rope_scaling", inside_old, context)
    if inside_new:
        scalings["rope_parameters"] = _scaling(values, "rope_parameters", inside_new, context)
    if len(scalings) == 2 and scalings["rope_scaling"] != scalings["rope_parameters"]:
        values.problems.append(f"rope_scaling is {old!a:.200} but rope_parameters is {new!a:.200}")
    style: Style = "v4" if not inside_new else "both" if "rope_theta" in thetas else "v5"
    return theta, next(iter(scalings.values()), None), style


def _scaling(values: Values, key: str, inside: Mapping[str, object], context: int) -> Mapping[str, object] | None:
    """RoPE scaling in its normal form: None for the plain kind."""
    kinds = [inside[name] for name in ("rope_type", "type") if inside.get(name) is not None]
    kind = kinds[0] if kinds else "default"
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        values.problems.append(f"{key}.rope_type is {kinds[0]!a:.40} but {key}.type is {kinds[1]!a:.40}")
    ignored = {"rope_type", "type", "rope_theta"}
    rest = {name: value for name, value in inside.items() if name not in ignored and value is not None}
    if rest.pop("partial_rotary_factor", 1) != 1:
        values.problems.append(f"{key}.partial_rotary_factor is {inside['partial_rotary_factor']!a:.40}: not read")
    if kind == "default":
        return None
    if kind not in SCALED_ROPE:
        values.problems.append(f"{key}.rope_type is {kind!a:.40}, not one of default, {', '.join(SCALED_ROPE)}")
        return None
    if "factor" in rest:
        values.checked(f"{key}.factor", rest["factor"])
    elif kind != "longrope":
        values.missing.append(f"{key}.factor")
    if kind in ("yarn", "llama3", "longrope"):
        # As transformers 5.24 does: modeling_rope_utils.py, standardize_rope_params.
        rest.setdefault("original_max_position_embeddings", context)
    return {"rope_type": kind, **rest}
