"""What optimum-neuron says beside its shards: ``mp_metadata_pp_rank_{p}.json``, one per pipeline stage.

``parameters`` gives each tensor's cut (``tensor_model_parallel``, ``partition_dim``, ``partition_stride``), and
``model_weight_transformation_specs`` per module how to undo its fusions. Only what a Qwen3 has is accepted.

Source: optimum-neuron, ``models/training/transformations_utils.py`` (``create_parameter_metadata``, the specs).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from ..config_json import read_json_object
from ..errors import SourceError, enumerate_problems


class Fused(NamedTuple):
    """What optimum's metadata state about attention."""

    multiplier: int
    """Times that each key-value head is stored."""
    queries_follow: bool
    """Whether query heads are reordered after the copies of the key-value heads."""


def read_metadata(shards: Path, tp: int, pp: int) -> Fused | None:
    """What ``mp_metadata_pp_rank_{p}.json`` say about attention; ``None`` without such files.

    Raises:
        SourceError: they are of the older pickled kind, name a transformation that is not known, or contradict the
            files.
    """
    found: set[Fused] = set()
    problems: list[str] = []
    paths = [shards / f"mp_metadata_pp_rank_{stage}.json" for stage in range(pp)]
    older = next((path for path in (p.with_suffix(".pt") for p in paths) if os.path.lexists(path)), None)
    if older is not None:
        raise SourceError(
            f"{older}: metadata of an older optimum-neuron, a pickle of its own classes, which is not read; "
            "consolidate with `optimum-cli neuron consolidate` of that release"
        )
    absent = [path for path in paths if not os.path.lexists(path)]
    if len(absent) == len(paths):
        return None
    if absent:
        raise SourceError(f"{absent[0]} is missing, though those of other pipeline ranks are there")
    for path in paths:
        document, _ = read_json_object(path)
        try:
            found |= set(_attention(document, tp, problems))
            _check_dims(document, problems)
        except (KeyError, TypeError, ValueError) as error:
            raise SourceError(
                f"{path} is not metadata that optimum-neuron writes ({type(error).__name__}: {error})"
            ) from None
    if len(found) > 1:
        problems.append("layers differ in how often they store key-value heads")
    if problems:
        heading = f"the metadata in {shards} and its shards do not go together:"
        raise SourceError(enumerate_problems(heading, dict.fromkeys(problems)))
    return next(iter(found), Fused(1, False))


def _attention(document: Mapping[str, object], tp: int, problems: list[str]) -> Iterable[Fused]:
    modules = document["model_weight_transformation_specs"]
    if not isinstance(modules, list):
        raise TypeError("model_weight_transformation_specs is not a list")
    for module in modules:
        for kind, spec in module["specs"]:
            if spec["tp_size"] != tp:
                problems.append(f"{kind} is for tp {spec['tp_size']}, but there are {tp} tensor ranks")
            if spec.get("peft_type") is not None:
                problems.append(f"{kind} is for {spec['peft_type']} adapters, which are not read")
            if kind == "FusedLinearsSpec":
                names = spec["fused_linear_name"], list(spec["linear_names"]), spec["fuse_axis"], spec["bias"]
                if names not in (
                    ("gate_up_proj", ["gate_proj", "up_proj"], 0, False),
                    ("gate_up_proj", ["gate_proj", "up_proj"], "column", False),
                ):
                    problems.append(f"{kind} fuses {names[1]} into {names[0]} along {names[2]}, as no Qwen3 does")
            elif kind == "GQAQKVColumnParallelLinearSpec":
                if spec["gqa_qkv_projection_name"] != "qkv_proj" or spec["bias"]:
                    problems.append(f"{kind} makes {spec['gqa_qkv_projection_name']}, or has biases, as no Qwen3 does")
                if type(spec["kv_size_multiplier"]) is not int or spec["kv_size_multiplier"] < 1:
                    raise ValueError(f"kv_size_multiplier {spec['kv_size_multiplier']!r}")
                yield Fused(spec["kv_size_multiplier"], True)
            else:
                problems.append(f"the transformation {kind!r} is not known")


def _check_dims(document: Mapping[str, object], problems: list[str]) -> None:
    """Cut dims are the ones that ``nxd_bindings`` assumes."""
    parameters = document["parameters"]
    if not isinstance(parameters, dict):
        raise TypeError("parameters is not an object")
    for name, entry in parameters.items():
        if not entry["tensor_model_parallel"]:
            continue
        if entry["partition_dim"] != int(name.endswith(("o_proj.weight", "down_proj.weight"))):
            problems.append(f"{name} is cut along dim {entry['partition_dim']}, as no Qwen3 is")
        if entry.get("partition_stride", 1) != 1:
            problems.append(f"{name} is cut with stride {entry['partition_stride']}, which is not read")
