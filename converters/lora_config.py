"""adapter_config.json of a PEFT adapter: what it says of ranks and scales, and what in it is refused by name.

Sources: PEFT 0.21.2, ``tuners/lora/config.py`` (keys and defaults), ``tuners/lora/model.py`` (which rank and alpha a
module gets), ``utils/other.py`` (``get_pattern_key``), ``tuners/lora/layer.py`` (initialisations that change the base).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .config_json import read_json_object
from .errors import SourceError, enumerate_problems

CONFIG = "adapter_config.json"

_LARGEST_RANK = 1 << 16
_LONGEST_PATTERN = 300

_ADDITIVE_INITS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of init_lora_weights that leave the base as it is. The others (pissa, olora, corda, loftq, lora_ga) take a
part out of it, so that their adapter belongs to a base that no repository holds."""

_CHANGES_THE_SUM: Mapping[str, str] = {
    "use_dora": "DoRA: its magnitudes scale whole columns, which is more than an addition",
    "modules_to_save": "whole modules that were trained beside it (modules_to_save)",
    "trainable_token_indices": "token embeddings that were trained beside it (trainable_token_indices)",
    "lora_bias": "biases of its own (lora_bias), for which Qwen3 has no place",
    "layer_replication": "layers that are there several times (layer_replication)",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens), which works on some tokens only",
    "use_qalora": "QALoRA (use_qalora), which is made for a quantised base",
    "loftq_config": "LoftQ (loftq_config), which is made for a quantised base",
    "use_bdlora": "block-diagonal LoRA (use_bdlora)",
    "arrow_config": "an Arrow router (arrow_config)",
    "kasa_config": "KaSA (kasa_config), which truncates the base",
    "monteclora_config": "MonteCLoRA (monteclora_config)",
    "velora_config": "VeLoRA (velora_config)",
    "megatron_config": "Megatron's parallel layers (megatron_config)",
}
"""Keys that, when they hold anything, make the adapter more than ``W + scale * B @ A``."""

_HARMLESS = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config"),
        *("exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform"),
        *("lora_dropout", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision"),
        *("target_modules", "target_parameters", "alpha_pattern", "rank_pattern", "use_rslora", "lora_alpha", "r"),
        *("bias", "init_lora_weights", "peft_type", "task_type", "runtime_config"),
    }
)
"""Keys that are read below, or say how the adapter was made and nothing of what it is. PEFT itself ignores
fan_in_fan_out for linear layers and the parameters of experts, and Qwen3 has no others."""


class Scale(NamedTuple):
    """The rank that a config gives a module, and the factor of its product."""

    rank: int
    factor: float


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The part of an adapter_config.json that a merge needs."""

    path: Path
    raw: Mapping[str, object]
    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: tuple[tuple[re.Pattern[str], int], ...]
    """In the file's order: the first pattern that fits decides."""
    alpha_pattern: tuple[tuple[re.Pattern[str], float], ...]
    target_modules: frozenset[str] | None
    """Names or ends of names; ``None`` when the config has none, or a regular expression."""
    target_parameters: frozenset[str]
    base: str | None
    """What the config calls the base: a hub id or a path on the machine that trained it."""

    @property
    def covers_all_layers(self) -> bool:
        """Whether what it targets is to be found in every layer."""
        return self.raw.get("layers_to_transform") in (None, []) and not self.raw.get("exclude_modules")

    @property
    def ties_weights(self) -> bool:
        """Whether head and embeddings were trained as one."""
        return self.raw.get("ensure_weight_tying") is True

    def scale_of(self, key: str) -> Scale:
        """Rank and factor for a module or parameter as PEFT names it, such as ``model.layers.0.self_attn.q_proj``."""
        rank = next((value for pattern, value in self.rank_pattern if pattern.match(key)), self.rank)
        alpha = next((value for pattern, value in self.alpha_pattern if pattern.match(key)), self.alpha)
        return Scale(rank, alpha / math.sqrt(rank) if self.use_rslora else alpha / rank)

    def targets_module(self, key: str) -> bool:
        """Whether target_modules names the module ``key``; true for all when it cannot be told."""
        return self.target_modules is None or _ends_with_one(key, self.target_modules)

    def targets_parameter(self, key: str) -> bool:
        """Whether target_parameters names the parameter ``key``."""
        return _ends_with_one(key, self.target_parameters)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """The adapter_config.json in ``folder``.

    Raises:
        SourceError: it is missing or hostile, or describes something that is not merged here; all reasons are listed.
    """
    path = folder / CONFIG
    raw, _ = read_json_object(path)
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise SourceError(
            f"{path}: peft_type is {kind!a:.40}; only LORA is merged here: merge this one with PEFT's merge_and_unload"
        )
    reasons = list(_refusals(raw))
    if reasons:
        raise SourceError(
            enumerate_problems(f"{path}: this adapter is not merged here; PEFT's merge_and_unload may:", reasons)
        )
    problems: list[str] = []
    rank = _rank(raw.get("r"), "r", problems)
    alpha = _alpha(raw.get("lora_alpha"), "lora_alpha", problems)
    ranks = tuple((p, _rank(value, k, problems)) for k, p, value in _patterns(raw, "rank_pattern", problems))
    alphas = tuple((p, _alpha(value, k, problems)) for k, p, value in _patterns(raw, "alpha_pattern", problems))
    if not isinstance(raw.get("use_rslora", False), bool | None):
        problems.append(f"use_rslora is {raw['use_rslora']!a:.40}, expected true or false")
    modules = raw.get("target_modules")
    names = None if modules is None or isinstance(modules, str) else _names(modules, "target_modules", problems)
    parameters = _names(raw.get("target_parameters") or [], "target_parameters", problems)
    base = raw.get("base_model_name_or_path")
    if not isinstance(base, str | None):
        problems.append(f"base_model_name_or_path is {base!a:.40}, expected a text")
    if problems:
        raise SourceError(enumerate_problems(f"{path} cannot be used:", problems))
    assert isinstance(base, str | None)
    if modules is None and parameters:
        names = frozenset()  # as PEFT has it: no modules, only parameters
    use_rslora = bool(raw.get("use_rslora"))
    return AdapterConfig(path, raw, rank, alpha, use_rslora, ranks, alphas, names, parameters, base or None)


def compile_pattern(pattern: str) -> re.Pattern[str] | None:
    """A key of rank_pattern or alpha_pattern, matched as PEFT matches it; ``None`` for one that is not read.

    A regular expression from a stranger can take for ever. Names, dots, classes and groups of alternatives are read,
    and at most four of what makes a match try again: quantifiers, groups, and alternatives outside of groups.
    """
    if len(pattern) > _LONGEST_PATTERN:
        return None
    tokens = _TOKEN.findall(pattern)
    if "".join(tokens) != pattern:
        return None
    retries, inside, after = 0, False, ""
    for token in tokens:
        if token in ("(", "(?:"):
            if inside:
                return None
            inside, retries = True, retries + 1
        elif token == ")":
            inside = False
        elif token == "|":
            retries += not inside
        elif token[0] in "*+?{":
            if inside or after == ")":
                return None
            retries += 1
        after = token
    if retries > 4:
        return None
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except re.error:
        return None


_TOKEN = re.compile(r"\\[.\-_dw]|\[[\w\-]+\]|\(\?:|[()|^$.]|[\w\-]|[*+?]\??|\{\d{1,2}(?:,\d{0,2})?\}", re.ASCII)


def _ends_with_one(key: str, names: frozenset[str]) -> bool:
    """Whether one of ``names`` is ``key`` or its last segments."""
    at = len(key)
    while at != -1:
        at = key.rfind(".", 0, at)
        if key[at + 1 :] in names:
            return True
    return False


def _refusals(raw: Mapping[str, object]) -> Iterator[str]:
    """What makes the adapter more than a sum of products, one line each."""
    for key, reason in _CHANGES_THE_SUM.items():
        if raw.get(key) not in (None, False, [], {}):
            yield f"it has {reason}"
    if raw.get("bias") not in (None, "none"):
        yield f"bias is {raw['bias']!a:.40}: trained biases, for which Qwen3 has no place"
    init = raw.get("init_lora_weights", True)
    if not any(type(init) is type(known) and init == known for known in _ADDITIVE_INITS):
        yield (
            f"init_lora_weights is {init!a:.40}, which takes a part out of the base: save the adapter again with "
            "PEFT's path_initial_model_for_weight_conversion, then it belongs to the base as it is published"
        )
    task = raw.get("task_type")
    if task not in (None, "CAUSAL_LM"):
        yield f"task_type is {task!a:.40}: its model is not the language model"
    for key, value in raw.items():
        if key not in _HARMLESS and key not in _CHANGES_THE_SUM and value not in (None, False, 0, "", [], {}):
            yield f"{key!a:.60} is {value!a:.40}, and what that means is not known here"


def _rank(value: object, key: str, problems: list[str]) -> int:
    if type(value) is int and 1 <= value <= _LARGEST_RANK:
        return value
    problems.append(f"{_said(key, value)}, expected a rank of at least 1")
    return 1


def _alpha(value: object, key: str, problems: list[str]) -> float:
    if type(value) in (int, float) and abs(value) <= 1e30:  # type: ignore[arg-type]
        return float(value)  # type: ignore[arg-type]
    problems.append(f"{_said(key, value)}, expected a number")
    return 1.0


def _said(key: str, value: object) -> str:
    return f"{key!a:.80} is missing" if value is None else f"{key!a:.80} is {value!a:.40}"


def _patterns(
    raw: Mapping[str, object], key: str, problems: list[str]
) -> Iterator[tuple[str, re.Pattern[str], object]]:
    found = raw.get(key) or {}
    if not isinstance(found, dict):
        problems.append(f"{key} is {found!a:.40}, expected an object")
        return
    for pattern, value in found.items():
        compiled = compile_pattern(pattern)
        if compiled is None:
            problems.append(
                f"{key} has {pattern!a:.80}: of regular expressions only plain ones are read (names, dots, classes, "
                "and at most four groups or quantifiers); write the names of the modules instead"
            )
        else:
            yield pattern, compiled, value


def _names(value: object, key: str, problems: list[str]) -> frozenset[str]:
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return frozenset(value)
    problems.append(f"{key} is {value!a:.40}, expected a list of names")
    return frozenset()
