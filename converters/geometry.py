"""The sizes that tensor shapes alone determine.

Axes, as ``Geometry.axes`` and the layout tables name them: V vocabulary rows, H hidden, Q query rows (heads *
head_dim), K key and value rows (kv heads * head_dim), D head_dim, I intermediate (dense), M intermediate of one expert,
E experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from .errors import MappingError, enumerate_problems

LARGEST: dict[str, int] = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "num_hidden_layers": 2**14,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "intermediate_size": 2**22,
    "moe_intermediate_size": 2**22,
    "num_experts": 2**14,
}
"""Bound of each size, far above any model: a forged number must not make a plan of billions of tensors."""

MOST_TENSORS = 2**22
"""Bound of the tensors of one model; the largest release has 36,945."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of a Qwen3, dense or MoE, by the names that config.json gives them."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int | None = None
    """Rows of a dense gate or up projection. None for MoE, whose config carries one that nothing uses."""
    moe_intermediate_size: int | None = None
    num_experts: int | None = None

    def __post_init__(self) -> None:
        """Dense and MoE sizes exclude each other; the callers that read hostile numbers sort that out first."""
        assert (self.intermediate_size is None) == (self.moe_intermediate_size is not None)
        assert (self.num_experts is None) == (self.moe_intermediate_size is None)

    @classmethod
    def from_axes(cls, axes: Mapping[str, int], num_hidden_layers: int) -> Geometry:
        """The geometry whose ``axes`` are these.

        Raises:
            MappingError: an axis is missing, Q or K is no multiple of D, heads do not share out evenly, or a size is
                beyond any model; all such problems at once.
        """
        moe = "E" in axes or "M" in axes
        needed = ("V", "H", "Q", "K", "D", *(("M", "E") if moe else ("I",)))
        problems = [f"no tensor tells axis {axis}" for axis in needed if axis not in axes]
        if moe and "I" in axes:
            problems.append("some layers are dense (axis I) and some are MoE (axes M, E): no mixed model is read")
        problems += [f"axis {axis} is {axes[axis]}" for axis in needed if axes.get(axis, 1) < 1]
        if not problems:
            problems = [
                f"axis {axis} has {axes[axis]} rows, no multiple of head_dim {axes['D']} (q_norm's size)"
                for axis in ("Q", "K")
                if axes[axis] % axes["D"]
            ]
        if not problems:
            geometry = cls(
                vocab_size=axes["V"],
                hidden_size=axes["H"],
                num_hidden_layers=num_hidden_layers,
                num_attention_heads=axes["Q"] // axes["D"],
                num_key_value_heads=axes["K"] // axes["D"],
                head_dim=axes["D"],
                intermediate_size=None if moe else axes["I"],
                moe_intermediate_size=axes["M"] if moe else None,
                num_experts=axes["E"] if moe else None,
            )
            problems = geometry.problems()
            if not problems:
                return geometry
        raise MappingError(enumerate_problems("the tensors' shapes are not those of a Qwen3 model:", problems))

    @property
    def is_moe(self) -> bool:
        """Whether every layer routes to experts; otherwise every layer is dense."""
        return self.num_experts is not None

    @property
    def axes(self) -> dict[str, int]:
        """Size of each named axis that this model has (I, or M and E)."""
        known = {
            "V": self.vocab_size,
            "H": self.hidden_size,
            "Q": self.num_attention_heads * self.head_dim,
            "K": self.num_key_value_heads * self.head_dim,
            "D": self.head_dim,
            "I": self.intermediate_size,
            "M": self.moe_intermediate_size,
            "E": self.num_experts,
        }
        return {axis: size for axis, size in known.items() if size is not None}

    def parameter_count(self, tied: bool) -> int:
        """Elements of all parameters, the head counted once more only if it is not ``tied`` to the embeddings."""
        shapes = self._layer_shapes()
        per_layer = sum(count * math.prod(shape) for count, shape in shapes)
        table = self.vocab_size * self.hidden_size
        return table * (1 if tied else 2) + self.num_hidden_layers * per_layer + self.hidden_size

    def tensor_count(self, tied: bool) -> int:
        """Parameters as the hub stores them: one tensor per expert and projection, no head when ``tied``."""
        per_layer = sum(count for count, _ in self._layer_shapes())
        return self.num_hidden_layers * per_layer + (2 if tied else 3)

    def problems(self) -> list[str]:
        """What makes these sizes impossible, one readable line each; empty when nothing does."""
        found = []
        for key, largest in LARGEST.items():
            size = getattr(self, key)
            if size is not None and not 1 <= size <= largest:
                found.append(f"{key} is {size}; from 1 to {largest} is possible")
        if not found and self.num_attention_heads % self.num_key_value_heads:
            found.append(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if not found and self.tensor_count(tied=False) > MOST_TENSORS:
            found.append(
                f"num_hidden_layers {self.num_hidden_layers} and num_experts {self.num_experts} make "
                f"{self.tensor_count(tied=False)} tensors; at most {MOST_TENSORS} are possible"
            )
        return found

    def _layer_shapes(self) -> list[tuple[int, tuple[int, ...]]]:
        """How many tensors of each shape one layer has."""
        hidden, axes = self.hidden_size, self.axes
        shapes: list[tuple[int, tuple[int, ...]]] = [
            (2, (hidden,)),  # input_layernorm, post_attention_layernorm
            (2, (axes["Q"], hidden)),  # q_proj, o_proj
            (2, (axes["K"], hidden)),  # k_proj, v_proj
            (2, (self.head_dim,)),  # q_norm, k_norm
        ]
        if self.is_moe:
            return [*shapes, (1, (axes["E"], hidden)), (3 * axes["E"], (axes["M"], hidden))]
        return [*shapes, (3, (axes["I"], hidden))]


def compare_geometry(expected: Geometry, found: Geometry) -> list[str]:
    """One line per size that differs, by its name in config.json; empty when the shapes of all tensors agree."""
    lines = []
    for name in (field.name for field in fields(Geometry)):
        a, b = getattr(expected, name), getattr(found, name)
        if a != b:
            lines.append(f"{name}: expected {_shown(a, expected)}, found {_shown(b, found)}")
    return lines


def _shown(size: int | None, geometry: Geometry) -> str:
    return str(size) if size is not None else f"none (the model is {'MoE' if geometry.is_moe else 'dense'})"
