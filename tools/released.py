"""A released Qwen3 by a name that a person types."""

from __future__ import annotations

from qwen3conv.converters.errors import PolicyError
from qwen3conv.converters.geometry import Geometry
from qwen3conv.converters.variants import GEOMETRIES, RELEASES


def released(name: str) -> tuple[Geometry, bool, int]:
    """Sizes, whether the head is tied, and experts per token of ``8B``, ``Qwen3-8B`` or ``Qwen/Qwen3-8B``.

    Raises:
        PolicyError: there is no such model.
    """
    text = name.removeprefix("Qwen/").removeprefix("Qwen3-").lower()
    for release in RELEASES:
        if any(one.removeprefix("Qwen3-").lower() == text for one in release.names):
            return release.geometry, release.tie_word_embeddings, release.num_experts_per_tok or 1
    for size, geometry in GEOMETRIES.items():
        if size.lower() == text:
            release = next(one for one in RELEASES if one.geometry == geometry)
            return geometry, release.tie_word_embeddings, release.num_experts_per_tok or 1
    raise PolicyError(f"{name} is no released model; there are {', '.join(GEOMETRIES)}")
