"""Which config.json speaks for a conversion, and what the output's says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from .boxes import Shape
from .checkpoint import Checkpoint, assets_of_run, find_config
from .config import compare_geometry, compare_maths, read_config
from .config_derive import derive_config
from .config_styles import render_config
from .detection import open_checkpoint
from .dtypes import TORCH_NAME
from .errors import PolicyError, SourceError, enumerate_problems
from .formats import Format
from .geometry import Geometry
from .policies import EXPERT_BIAS_SUFFIX, Choices, Policy, Settled, output_dtype, settle
from .variants import FLAVORS, flavor_traps


def open_with_config(source: Path, choices: Choices) -> tuple[Checkpoint, list[Policy]]:
    """Open ``source`` with the config of ``--like`` or its own; where both exist and compute different things, ask.

    Raises:
        PolicyError: the two differ and ``--config-from`` was not given, or ``--set`` was given beside a config.
    """
    checkpoint = open_checkpoint(source, like=choices.like, queries=choices.query_heads)
    if checkpoint.config is not None and choices.settings:
        raise PolicyError(f"--set is for a checkpoint without config.json; this one has {checkpoint.config_path}")
    if choices.like is None:
        assets = assets_of_run(checkpoint.path)
        if assets is None or checkpoint.config_path != assets / "config.json":
            return checkpoint, []
        return checkpoint, [Policy("config-run", f"config.json and tokenizer are those of the run's start, {assets}")]
    assert checkpoint.config is not None
    own_path = find_config(checkpoint.path)
    if own_path is None:
        return checkpoint, [Policy("config-like", f"config.json is taken from {choices.like}")]
    own = read_config(own_path)
    differences = compare_maths(own, checkpoint.config)
    if not differences:
        return checkpoint, []
    if choices.config_from is None:
        lines = "; ".join(f"{d.key}: {d.a} in the source, {d.b} in {choices.like}" for d in differences)
        raise PolicyError(
            f"two configs speak for {checkpoint.path} and differ in what the model computes: "
            f"{lines}; choose with --config-from source or --config-from like"
        )
    keys = [difference.key for difference in differences]
    summary = f"of two configs that differ in {', '.join(keys)}, that of the {choices.config_from} is used"
    decided = [Policy("config-from", summary, {"keys": keys}, warning=True)]
    if choices.config_from == "like":
        return checkpoint, decided
    return replace(checkpoint, config=own, config_path=own_path), decided


def settle_with_config(checkpoint: Checkpoint, choices: Choices, target: Format) -> Settled:
    """Settle; where no config is known and the target needs one, build it from shapes and ``--set``.

    Whether the head is tied then follows from its bytes, unless ``--set tie_word_embeddings`` says otherwise.

    Raises:
        PolicyError: values are missing that shapes cannot tell; all are listed.
    """
    settled = settle(checkpoint, choices)
    if checkpoint.config is not None or not (target.needs_config or choices.settings):
        return settled
    dtypes = {output_dtype(entry.dtype, choices, name=entry.name) for entry in settled.table.values()}
    known = {
        "dtype": TORCH_NAME[dtypes.pop() if len(dtypes) == 1 else "BF16"],
        "tie_word_embeddings": settled.tied,
        **choices.settings,
    }
    config = derive_config(checkpoint.geometry, known)
    keys = sorted(choices.settings)
    policy = Policy("config-derived", f"config.json is built from shapes and from {', '.join(keys)}", {"set": keys})
    settled = settle(replace(checkpoint, config=config), choices)
    return replace(settled, policies=(*settled.policies, policy))


def output_config(
    settled: Settled,
    target: Format,
    choices: Choices,
    geometry: Geometry,
    written: Mapping[str, tuple[str, Shape]],
    decided: list[Policy],
) -> bytes | None:
    """The output's config.json: the source's own bytes where nothing changed."""
    config = settled.checkpoint.config
    if config is None:
        if target.needs_config:
            raise SourceError(
                f"{settled.checkpoint.path} has no config.json; take one from the model's repository with --like"
            )
        summary = "the output gets no config.json, because there is none; --like or --set gives one"
        decided.append(Policy("no-config", summary, warning=True))
        return None
    dtypes = {dtype for name, (dtype, _) in written.items() if not name.endswith(EXPERT_BIAS_SUFFIX)}
    dtype = next(iter(dtypes)) if len(dtypes) == 1 else None
    if dtype == config.dtype:
        dtype = None
    if dtype is not None and choices.dtype is None and config.quantization is None:
        was = TORCH_NAME.get(config.dtype or "", "nothing")
        decided.append(
            Policy(
                "config-dtype", f"the config's dtype becomes {TORCH_NAME[dtype]}, which the tensors have (it was {was})"
            )
        )
    if choices.config_style != "source":
        decided.append(
            Policy(
                "config-style",
                f"config.json is written in the {choices.config_style} spelling",
                {"style": choices.config_style},
            )
        )
    return render_config(
        config,
        style=choices.config_style,
        dtype=dtype,
        tie=settled.tied if settled.tied != config.tie_word_embeddings else None,
        vocab_size=geometry.vocab_size if geometry.vocab_size != config.geometry.vocab_size else None,
        drop_quantization=config.quantization is not None,
    )


def trap_policies(checkpoint: Checkpoint, target: Format, choices: Choices) -> list[Policy]:
    """Values of this checkpoint that torchtitan's flavor of the same shapes gets wrong.

    Raises:
        PolicyError: ``--flavor`` names a flavor that is unknown, has other shapes, or would compute something else.
    """
    if choices.flavor is not None:
        _check_flavor(checkpoint, choices.flavor)
    if target.name != "titan" or checkpoint.config is None:
        return []
    return [Policy("flavor-trap", str(trap), warning=True) for trap in flavor_traps(checkpoint.config)]


def _check_flavor(checkpoint: Checkpoint, name: str) -> None:
    flavor = next((flavor for flavor in FLAVORS if flavor.name == name), None)
    if flavor is None:
        known = ", ".join(flavor.name for flavor in FLAVORS)
        raise PolicyError(f"torchtitan has no Qwen3 flavor {name!r}; --flavor takes one of: {known}")
    lines = compare_geometry(checkpoint.geometry, flavor.geometry)
    if checkpoint.config is not None and not lines:
        lines = [str(trap) for trap in flavor_traps(checkpoint.config) if trap.flavor == name]
    if lines:
        heading = (
            f"torchtitan's flavor {name} would compute something else; "
            "train with a model config derived from config.json, and leave --flavor out:"
        )
        raise PolicyError(enumerate_problems(heading, lines))
