"""Released Qwen3 models and torchtitan's flavors: what their tensors' shapes cannot tell apart.

Releases differ in RoPE theta and context at equal shapes (4B and 4B-Instruct-2507), and a torchtitan flavor is one set
of numbers per size. Weights that load without complaint can so compute something else; ``flavor_traps`` says when.

Sources: releases, the config.json of each repository on the hub; flavors, torchtitan 0.3.0,
``models/qwen3/__init__.py``, ``qwen3_configs``, compared with the installed package by a test.
"""

from __future__ import annotations

from typing import NamedTuple

from .config import Qwen3Config
from .geometry import Geometry


def _dense(hidden: int, layers: int, heads: int, intermediate: int, vocab: int = 151936) -> Geometry:
    return Geometry(vocab, hidden, layers, heads, 8, 128, intermediate_size=intermediate)


def _moe(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, experts: int, vocab: int = 151936
) -> Geometry:
    return Geometry(
        vocab, hidden, layers, heads, kv_heads, 128, moe_intermediate_size=intermediate, num_experts=experts
    )


GEOMETRIES: dict[str, Geometry] = {
    "0.6B": _dense(1024, 28, 16, 3072),
    "1.7B": _dense(2048, 28, 16, 6144),
    "4B": _dense(2560, 36, 32, 9728),
    "8B": _dense(4096, 36, 32, 12288),
    "14B": _dense(5120, 40, 40, 17408),
    "32B": _dense(5120, 64, 64, 25600),
    "30B-A3B": _moe(2048, 48, 32, 4, 768, 128),
    "235B-A22B": _moe(4096, 94, 64, 4, 1536, 128),
    "Coder-480B-A35B": _moe(6144, 62, 96, 8, 2560, 160),
}
"""Every released size."""


class Release(NamedTuple):
    """Repositories of one size that agree in every value that shapes do not tell."""

    names: tuple[str, ...]
    """Hub names without ``Qwen/``."""
    geometry: Geometry
    tie_word_embeddings: bool
    rope_theta: float
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    num_experts_per_tok: int | None = None
    norm_topk_prob: bool | None = None

    def settings(self) -> dict[str, object]:
        """The values by their config.json keys, those that the size has."""
        values = self._asdict()
        return {key: values[key] for key in self._fields[2:] if values[key] is not None}


def _releases() -> tuple[Release, ...]:
    # Base models were released with 32768 positions, the April 2025 chat models with 40960, later ones with 262144.
    first = ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B")
    bases = ("0.6B", "1.7B", "4B", "8B", "14B", "30B-A3B")
    rows: list[tuple[str, tuple[str, ...], float, int]] = [
        *((size, (f"Qwen3-{size}",), 1e6, 40960) for size in first),
        *((size, (f"Qwen3-{size}-Base",), 1e6, 32768) for size in bases),
        ("4B", ("Qwen3-4B-Instruct-2507", "Qwen3-4B-Thinking-2507"), 5e6, 262144),
        ("30B-A3B", ("Qwen3-30B-A3B-Instruct-2507", "Qwen3-30B-A3B-Thinking-2507"), 1e7, 262144),
        ("30B-A3B", ("Qwen3-Coder-30B-A3B-Instruct",), 1e7, 262144),
        ("235B-A22B", ("Qwen3-235B-A22B-Instruct-2507", "Qwen3-235B-A22B-Thinking-2507"), 5e6, 262144),
        ("Coder-480B-A35B", ("Qwen3-Coder-480B-A35B-Instruct",), 1e7, 262144),
    ]
    found = []
    for size, names, theta, context in rows:
        geometry = GEOMETRIES[size]
        routing = (8, True) if geometry.is_moe else (None, None)
        found.append(Release(names, geometry, size in ("0.6B", "1.7B", "4B"), theta, context, 1e-6, *routing))
    return tuple(found)


RELEASES: tuple[Release, ...] = _releases()


def released_like(geometry: Geometry) -> list[Release]:
    """The releases of exactly these shapes, in the order of ``RELEASES``; empty for any other size."""
    return [release for release in RELEASES if release.geometry == geometry]


class Flavor(NamedTuple):
    """A row of torchtitan 0.3.0's ``qwen3_configs``."""

    name: str
    geometry: Geometry
    tied: bool
    rope_theta: float = 1e6
    max_seq_len: int = 40960
    rms_norm_eps: float = 1e-6
    top_k: int | None = None
    route_norm: bool | None = None


FLAVORS: tuple[Flavor, ...] = (
    Flavor("debugmodel", _dense(256, 8, 16, 3072, vocab=2048), tied=True, max_seq_len=4096),
    Flavor("debugmodel_non_fused_qkv", _dense(256, 8, 16, 3072, vocab=2048), tied=True, max_seq_len=4096),
    *(Flavor(size, GEOMETRIES[size], tied=True) for size in ("0.6B", "1.7B", "4B")),
    *(Flavor(size, GEOMETRIES[size], tied=False) for size in ("8B", "14B", "32B")),
    Flavor(
        "debugmodel_moe",
        _moe(256, 8, 16, 8, 768, 64, vocab=2048),
        tied=False,
        max_seq_len=4096,
        top_k=8,
        route_norm=True,
    ),
    Flavor("30B-A3B", GEOMETRIES["30B-A3B"], tied=False, top_k=8, route_norm=True),
    Flavor("235B-A22B", GEOMETRIES["235B-A22B"], tied=False, rope_theta=5e6, top_k=8, route_norm=True),
)


class Trap(NamedTuple):
    """A value in which a config and the torchtitan flavor of the same shapes differ."""

    flavor: str
    key: str
    """The config.json key."""
    config_value: object
    flavor_value: object
    remedy: str
    """What to set in torchtitan's model config, whose layers are ``model.layers``."""

    def __str__(self) -> str:
        theirs = f"torchtitan's flavor {self.flavor} has {_plain(self.flavor_value)}"
        return f"{self.key} is {_plain(self.config_value)}, {theirs}: {self.remedy}"


def _plain(value: object) -> str:
    """``5000000`` for 5e6."""
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def flavor_like(geometry: Geometry) -> Flavor | None:
    """torchtitan's flavor of exactly these shapes, if it has one."""
    return next((flavor for flavor in FLAVORS if flavor.geometry == geometry), None)


def flavor_traps(config: Qwen3Config) -> list[Trap]:
    """Where training ``config``'s weights with torchtitan's flavor of the same shapes computes something else.

    Empty both when they agree and when torchtitan has no such flavor (``flavor_like``). Attribute names are those of
    torchtitan 0.3.0's configs: ``CosSinRoPE.Config``, ``TokenChoiceTopKRouter.Config``, ``Decoder.Config``.
    """
    flavor = flavor_like(config.geometry)
    if flavor is None:
        return []
    theta, context, eps = config.rope_theta, config.max_position_embeddings, config.rms_norm_eps
    top_k, norm = config.num_experts_per_tok, config.norm_topk_prob
    tie = config.tie_word_embeddings
    rows: list[tuple[str, object, object, str]] = [
        ("rope_theta", theta, flavor.rope_theta, f"set layer.attention.rope.theta = {_plain(theta)} in every layer"),
        (
            "rope_scaling",
            config.rope_scaling,
            None,
            "torchtitan's Qwen3 applies no YaRN attention factor: train this model with its transformers backend",
        ),
        (
            "max_position_embeddings",
            context,
            flavor.max_seq_len,
            f"set layer.attention.rope.max_seq_len = {context} in every layer (it bounds training.seq_len)",
        ),
        (
            "rms_norm_eps",
            eps,
            flavor.rms_norm_eps,
            f"set eps = {eps} in model.norm and in attention_norm, ffn_norm and attention.qk_norm of every layer",
        ),
        (
            "num_experts_per_tok",
            top_k,
            flavor.top_k,
            f"set top_k = {top_k} in layer.moe.router and layer.moe.routed_experts.token_dispatcher of every layer",
        ),
        ("norm_topk_prob", norm, flavor.route_norm, f"set layer.moe.router.route_norm = {norm} in every layer"),
        ("tie_word_embeddings", tie, flavor.tied, f"set model.enable_weight_tying = {tie}"),
    ]
    return [Trap(flavor.name, key, mine, theirs, remedy) for key, mine, theirs, remedy in rows if mine != theirs]
