"""Stored names: templates with ``{layer}`` and ``{expert}``, the numbers in a name, and wrapper segments."""

from __future__ import annotations

from collections.abc import Iterable

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_fpw_module"})
"""Segments that torch's module wrappers put into FQNs (torch 2.13: compile, FSDP1, activation checkpointing)."""


def split_indices(name: str) -> tuple[str, tuple[int, ...]]:
    """The skeleton of a dotted name and its numbers: ``layers.3.mlp.up`` -> (``layers.#.mlp.up``, (3,)).

    Only numbers in canonical form count (``03`` stays text), so that a skeleton and its numbers name one tensor.
    """
    segments = name.split(".")
    indices: list[int] = []
    for position, segment in enumerate(segments):
        if _is_index(segment):
            indices.append(int(segment))
            segments[position] = "#"
    return ".".join(segments), tuple(indices)


def skeleton_of(template: str) -> str:
    """The skeleton that every name made from ``template`` has."""
    return ".".join("#" if segment.startswith("{") else segment for segment in template.split("."))


def natural_key(name: str) -> tuple[tuple[bool, int, str], ...]:
    """Sort key under which layer 2 comes before layer 10."""
    return tuple((False, int(s), "") if _is_index(s) else (True, 0, s) for s in name.split("."))


def unwrapped(name: str) -> str:
    """``name`` without the segments that module wrappers add anywhere in it."""
    if "._" not in name and not name.startswith("_"):
        return name
    return ".".join(segment for segment in name.split(".") if segment not in WRAPPERS)


def common_prefix(names: Iterable[str], prefixes: Iterable[str]) -> str:
    """The first of ``prefixes`` that every one of ``names`` starts with; ``""`` when none does."""
    listed = list(names)
    return next((prefix for prefix in prefixes if listed and all(name.startswith(prefix) for name in listed)), "")


def _is_index(segment: str) -> bool:
    return segment.isascii() and segment.isdigit() and len(segment) < 8 and (segment == "0" or segment[0] != "0")
