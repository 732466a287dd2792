"""The modules of a LoRA adapter as PEFT stores them, resolved to the parameters of a base.

Names and shapes in adapter_model.safetensors (PEFT 0.21.2, ``tuners/lora/layer.py`` and
``utils/transformers_weight_conversion.py``; r rank, E experts, H, M, V as in ``parameters``):

=======================================  ==========================  =========================================
module (after ``base_model.model.``)     lora_A.weight               lora_B.weight
=======================================  ==========================  =========================================
a linear layer (experts of               [r, in]                     [out, r]
transformers 4 are some)
``model.embed_tokens``                   lora_embedding_A [r, V]     lora_embedding_B [H, r]
``...mlp.experts[.base_layer]``, when    [r * E, H]: expert by       [2 * M, r * E]: rank by rank, in each its
gate_up_proj of transformers 5 is meant  expert, in each its ranks   experts; rows are gate's, then up's
``...mlp.experts``, when down_proj is    [r * E, M]                  [H, r * E]
=======================================  ==========================  =========================================

PEFT wraps the two fused parameters one around the other, so a name says which of them is meant only where both are
there. Their shapes always do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .boxes import Shape
from .casts import FLOATS
from .geometry import Geometry
from .lora_config import CONFIG, AdapterConfig
from .low_rank import Factor, LowRank
from .names import common_prefix, natural_key, split_indices
from .parameters import EMBEDDING, HEAD, describe
from .planning import Table
from .stores.safetensors_header import Header

_PREFIX = "base_model.model."
_EXPERTS = ".mlp.experts"
_ENDS: Mapping[str, str] = {
    ".lora_A.weight": "lora_A",
    ".lora_B.weight": "lora_B",
    ".lora_embedding_A": "lora_embedding_A",
    ".lora_embedding_B": "lora_embedding_B",
}
_OTHER_ENDS: Mapping[str, str] = {
    ".lora_magnitude_vector": "the magnitudes of DoRA",
    ".lora_B.bias": "a trained bias",
    ".trainable_tokens_delta": "trained token embeddings",
}
_COPIES: Mapping[str, str] = {
    name.removesuffix(".weight") + end: name for name in (EMBEDDING, HEAD) for end in (".weight", ".base_layer.weight")
}
"""Where PEFT saves the base's own values beside an adapter that targets them, or a vocabulary that was resized."""


class Half(NamedTuple):
    """One stored tensor of a module."""

    name: str
    factor: Factor


class Modules:
    """An adapter's modules as additions to parameters of a base; what does not fit it is in ``problems``."""

    def __init__(self, path: str, header: Header, config: AdapterConfig, table: Table, geometry: Geometry) -> None:
        self._config, self._table, self._geometry = config, table, geometry
        self.problems: list[str] = []
        self.deltas: dict[str, LowRank] = {}
        """What is added to each parameter, by its logical name."""
        self.copies: dict[str, Factor] = {}
        """Parameters of the base that the adapter holds too."""
        modules = self._collect(path, header)
        self.count = len(modules)
        for module in sorted(modules, key=natural_key):
            self._resolve(module, modules[module])
        if not self.problems:
            self._compare_with_targets()
        if not self.problems and not self.deltas:
            self.problems.append("it changes nothing: no lora_A and lora_B is in it")

    def _collect(self, path: str, header: Header) -> dict[str, dict[str, Half]]:
        """What is stored of each module, by ``lora_A`` and the like."""
        prefix = common_prefix(header.tensors, (_PREFIX,))
        modules: dict[str, dict[str, Half]] = {}
        for stored, entry in header.tensors.items():
            if entry.dtype not in FLOATS:
                self.problems.append(f"{stored} is {entry.dtype}, expected {', '.join(FLOATS)}")
                continue
            if len(entry.shape) != 2 or 0 in entry.shape:
                self.problems.append(f"{stored} has shape {list(entry.shape)}, expected a matrix{_why(stored)}")
                continue
            factor = Factor.whole(path, header.data_start + entry.begin, entry.dtype, *entry.shape)
            name = stored.removeprefix(prefix)
            end = next((end for end in _ENDS if name.endswith(end)), None)
            if end is not None:
                modules.setdefault(name.removesuffix(end), {})[_ENDS[end]] = Half(stored, factor)
            elif (copied := _COPIES.get(name)) is None or copied in self.copies:
                self.problems.append(f"{stored} is nothing that a LoRA adapter holds{_why(stored)}")
            elif self._fit([Half(stored, factor)], [self._table[copied].shape]):
                self.copies[copied] = factor
        return modules

    def _resolve(self, module: str, halves: Mapping[str, Half]) -> None:
        a, b = halves.get("lora_A"), halves.get("lora_B")
        is_embedding = f"{module}.weight" == EMBEDDING and "lora_embedding_A" in halves
        if is_embedding:
            a, b = halves["lora_embedding_A"], halves.get("lora_embedding_B")
        if a is None or b is None or len(halves) > 2:
            held = " and ".join(sorted(halves))
            self.problems.append(f"{module} has {held}, expected lora_A and lora_B")
        elif (stack := module.removesuffix(".base_layer")).endswith(_EXPERTS):
            self._add_experts(stack, a, b)
        elif (parameter := f"{module}.weight") not in self._table or len(self._table[parameter].shape) != 2:
            self.problems.append(f"{module} is not in the base, which has {_size(self._geometry)}")
        else:
            rows, columns = self._table[parameter].shape
            rank, scale = self._config.scale_of(parameter if self._config.targets_parameter(parameter) else module)
            if is_embedding:  # PEFT's product is the transpose of what is added
                fit, left, right = ((rank, rows), (columns, rank)), a.factor.transposed, b.factor.transposed
            else:
                fit, left, right = ((rank, columns), (rows, rank)), b.factor, a.factor
            if self._fit((a, b), fit, rank):
                self._add(parameter, LowRank(left, right, scale))

    def _add_experts(self, module: str, a: Half, b: Half) -> None:
        """A fused parameter: expert e has rows ``e * r : e * r + r`` of A and, from e on, every E-th column of B."""
        geometry, experts = self._geometry, self._geometry.num_experts
        first = f"{module}.0.gate_proj.weight"
        if experts is None or first not in self._table:
            self.problems.append(f"{module} is not in the base, which has {_size(geometry)}")
            return
        inner, hidden = self._table[first].shape
        kinds = {
            "gate_up_proj": (hidden, 2 * inner, (("gate_proj", 0), ("up_proj", inner))),
            "down_proj": (inner, hidden, (("down_proj", 0),)),
        }
        fused = next((k for k, (i, o, _) in kinds.items() if (a.factor.columns, b.factor.rows) == (i, o)), None)
        if fused is None:
            expected = " or ".join(f"[_, {i}] and [{o}, _] ({kind})" for kind, (i, o, _) in kinds.items())
            found = f"{_shape(a.factor)} and {_shape(b.factor)}"
            self.problems.append(f"{module}: expected lora_A and lora_B of {expected}, found {found}")
            return
        columns, rows, projections = kinds[fused]
        rank, scale = self._config.scale_of(f"{module}.{fused}")
        if not self._fit((a, b), ((rank * experts, columns), (rows, rank * experts)), rank):
            return
        for expert in range(experts):
            right = a.factor.part(expert * rank, rank, 0, columns)
            for projection, row in projections:
                left = b.factor.part(row, rows // len(projections), expert, rank, every=experts)
                self._add(f"{module}.{expert}.{projection}.weight", LowRank(left, right, scale))

    def _add(self, parameter: str, delta: LowRank) -> None:
        if (dtype := self._table[parameter].dtype) not in FLOATS:
            self.problems.append(f"{parameter} is {dtype} in the base, expected {', '.join(FLOATS)}")
        if parameter in self.deltas:
            self.problems.append(f"{parameter} is changed twice, by its own module and by that of all experts")
        self.deltas[parameter] = delta

    def _fit(self, halves: Sequence[Half], shapes: Sequence[Shape], rank: int | None = None) -> bool:
        """Whether tensors have the shapes they should; those that do not are told."""
        why = f" (rank {rank} by {CONFIG})" if rank is not None else ""
        wrong = [
            f"{name}: expected {list(shape)}{why}, found {_shape(factor)}"
            for (name, factor), shape in zip(halves, shapes, strict=True)
            if (factor.rows, factor.columns) != shape
        ]
        self.problems += wrong
        return not wrong

    def _compare_with_targets(self) -> None:
        """Tell what the config targets and the adapter lacks in some layers, and what it holds untargeted."""
        if self._config.target_modules is None:  # a regular expression, or nothing
            return
        kinds = {split_indices(name)[0] for name in self.deltas}
        for name in self._table:
            if name in self.deltas:
                if not self._is_targeted(name):
                    self.problems.append(f"{name} is changed, but {CONFIG} does not target it")
            elif self._config.covers_all_layers and self._is_targeted(name) and split_indices(name)[0] in kinds:
                self.problems.append(f"nothing is there for {name}, which {CONFIG} targets ({describe(name)})")

    def _is_targeted(self, parameter: str) -> bool:
        module = parameter.removesuffix(".weight")
        if self._config.targets_module(module) or self._config.targets_parameter(parameter):
            return True
        if parameter == HEAD:
            return self._config.ties_weights
        stack, experts, rest = parameter.rpartition(f"{_EXPERTS}.")
        fused = "down_proj" if "down_proj" in rest else "gate_up_proj"
        return bool(experts) and self._config.targets_parameter(f"{stack}{_EXPERTS}.{fused}")

    def untouched_kinds(self) -> list[str]:
        """Kinds of matrices that the config targets and of which the adapter has none at all, such as ``mlp.gate``."""
        if self._config.target_modules is None:
            return []
        touched = {split_indices(name)[0] for name in self.deltas}
        kinds: dict[str, str] = {}
        for name, entry in self._table.items():
            kind = split_indices(name)[0]
            if kind not in touched and kind not in kinds and len(entry.shape) == 2 and self._is_targeted(name):
                kinds[kind] = describe(name).rpartition(", ")[2]
        return list(dict.fromkeys(kinds.values()))


def _why(name: str) -> str:
    """What a tensor that is not merged is, where its name tells."""
    return next((f" ({what})" for end, what in _OTHER_ENDS.items() if name.endswith(end)), "")


def _size(geometry: Geometry) -> str:
    experts = f" of {geometry.num_experts} experts" if geometry.num_experts else ", all dense"
    return f"{geometry.num_hidden_layers} layers{experts}"


def _shape(factor: Factor) -> str:
    return str([factor.rows, factor.columns])
