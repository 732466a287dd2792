"""Whatever is not a bijection: each a named policy that the plan prints and the manifest keeps.

A policy is decided here from the checkpoint and the user's choices. What would change, drop or invent a number without
a choice is refused, and the message names the option.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .checkpoint import Checkpoint
from .dtypes import TORCH_NAME
from .errors import PolicyError, SourceError, enumerate_problems
from .files import Files
from .parameters import EMBEDDING, EXPERT_BIAS, HEAD, describe
from .placement import ONE_RANK, Mesh
from .planning import Table
from .reading import first_difference, last_nonzero_row, read_whole
from .remote import has_headers_only
from .stores.nxd_bindings import Queries

EXPERT_BIAS_SUFFIX = ".expert_bias"
assert EXPERT_BIAS.endswith(EXPERT_BIAS_SUFFIX)

Head = Literal["keep", "drop", "write"]
ConfigStyle = Literal["source", "v4", "v5", "both"]
KvHeads = Literal["tiled", "interleaved"]
OptimizerForm = Literal["default", "fused", "separate", "keep"]


@dataclass(frozen=True, slots=True)
class Choices:
    """What the user decided. The defaults change no number."""

    dtype: str | None = None
    """Dtype code to cast every parameter to; ``None`` keeps each tensor's own (FP8 becomes BF16)."""
    lm_head: Head = "keep"
    """Whether a Hugging Face output of a tied model stores the head: as the source did, never, or always."""
    untie: bool = False
    """Take a head that differs from the embeddings, and say so in the config."""
    drop_expert_bias: bool = False
    config_style: ConfigStyle = "source"
    vocab_rows: int | None = None
    """Rows of embeddings and head in the output; new rows are zero, and only zero rows may go."""
    titan_schema: str = "T7"
    shard_bytes: int | None = None
    """Bytes per output file; ``None`` keeps the source's own split where it can, else 5 GB (HF) or 2 GB (DCP)."""
    like: Path | None = None
    """Folder (or config.json) that gives the config, and for a Hugging Face output the sidecar files and the split."""
    config_from: Literal["like", "source"] | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    """Config values that shapes cannot tell, for a checkpoint that has no config.json."""
    mesh: Mesh = ONE_RANK
    """Degrees of parallelism that the output is cut for."""
    rank_layout: str = "hf-fused"
    """Names and fusion inside a per-rank folder."""
    kv_heads: KvHeads | None = None
    """How NxD repeats key-value heads where there are more tensor-parallel ranks than them."""
    query_heads: Queries | None = None
    """How query heads lie in NxD shards with repeated key-value heads, where the files do not tell."""
    flavor: str | None = None
    """torchtitan flavor that the output is meant for; its values must agree with the config's."""
    optimizer: OptimizerForm | None = None
    """Carry the training state too, and how its q, k and v are stored: as one, apart, as in the source, or as models of
    the output's schema are by default. ``None`` leaves everything but the model behind."""
    adapter: Path | None = None
    """Folder of a LoRA adapter, as PEFT saves it, that is added to the weights."""


DEFAULTS = Choices()


@dataclass(frozen=True, slots=True)
class Policy:
    """One decision: its name, one sentence for people, and its values for programs."""

    name: str
    summary: str
    values: Mapping[str, Any] = field(default_factory=dict)
    warning: bool = False
    """Whether people should see it even when they did not ask for the plan."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"name": self.name, "summary": self.summary, **self.values}


@dataclass(frozen=True, slots=True)
class Settled:
    """A checkpoint with its open questions answered."""

    checkpoint: Checkpoint
    tied: bool
    table: Table
    policies: tuple[Policy, ...]


def settle(checkpoint: Checkpoint, choices: Choices = DEFAULTS) -> Settled:
    """Answer what only bytes can answer: is the head tied, is there an expert bias. Reads the two and nothing else.

    Raises:
        MappingError, SourceError: the checkpoint is not whole.
        PolicyError: two heads differ though the config says that they are tied.
    """
    policies: list[Policy] = []
    tied, table = _settle_tie(checkpoint, choices, policies)
    _check_replicas(checkpoint, table, policies)
    _settle_expert_bias(checkpoint, table, policies)
    if checkpoint.derived:
        names = sorted(checkpoint.derived)
        summary = f"{len(names)} tensors that follow from the config are left out, such as {names[0]}"
        policies.append(Policy("drop-derived", summary, {"tensors": names}))
    if checkpoint.others and choices.optimizer is None:
        summary = f"{len(checkpoint.others)} entries beside the model (optimizer, scheduler, step...) are left behind"
        policies.append(Policy("model-only", summary, {"entries": len(checkpoint.others)}))
    return Settled(checkpoint, tied, table, tuple(policies))


def output_dtype(dtype: str, choices: Choices, *, name: str) -> str:
    """The dtype a parameter stored as ``dtype`` is written with.

    Raises:
        PolicyError: the cast is not one that is done here.
    """
    if name.endswith(EXPERT_BIAS_SUFFIX):
        return dtype  # a routing buffer, fp32 in every torchtitan
    if choices.dtype is not None:
        if dtype not in ("BF16", "F16", "F32", "F8_E4M3"):
            raise PolicyError(f"{name} is {dtype} and cannot be cast to {choices.dtype}; leave --dtype out")
        return choices.dtype
    return "BF16" if dtype.startswith("F8_") else dtype


def cast_policies(table: Table, choices: Choices) -> list[Policy]:
    """What is cast or dequantised on the way out of ``table``."""
    pairs: dict[tuple[str, str], int] = {}
    for entry in table.values():
        target = output_dtype(entry.dtype, choices, name=entry.name)
        if target != entry.dtype:
            pairs[entry.dtype, target] = pairs.get((entry.dtype, target), 0) + 1
    policies = []
    for (source, target), count in sorted(pairs.items()):
        names = f"{TORCH_NAME[source]} -> {TORCH_NAME[target]}"
        values = {"from": TORCH_NAME[source], "to": TORCH_NAME[target], "tensors": count}
        if source.startswith("F8_"):
            summary = f"{count} FP8 tensors times their block scales, in float32, rounded once to {TORCH_NAME[target]}"
            policies.append(Policy("dequantise", summary, values))
        else:
            exact = target == "F32"
            how = "exact" if exact else "rounded to nearest even"
            policies.append(Policy("cast", f"{count} tensors {names}, {how}", {**values, "exact": exact}))
    return policies


KV_HEADS = "kv-heads"


def kv_heads_policy(order: KvHeads) -> Policy:
    """How an output of NxD's repeats key-value heads; ``open_checkpoint`` reads it back from the manifest."""
    how = "all in turn, and query heads follow them" if order == "tiled" else "each several times in a row"
    return Policy(KV_HEADS, f"key-value heads are repeated {how}", {"order": order})


def vocab_policy(settled: Settled, choices: Choices) -> Policy | None:
    """Check and describe a change of the number of vocabulary rows.

    Raises:
        PolicyError: rows that are not zero would be dropped.
    """
    have = settled.checkpoint.geometry.vocab_size
    want = choices.vocab_rows
    if want is None or want == have:
        return None
    if want < 1:
        raise PolicyError(f"--vocab-rows {want}: expected at least 1")
    values = {"from": have, "to": want}
    if want > have:
        return Policy("vocab-rows", f"{want - have} zero rows are added to the {have} vocabulary rows", values)
    for name in (EMBEDDING, HEAD):
        entry = settled.table.get(name)
        if entry is None:
            continue
        row = last_nonzero_row(entry, settled.checkpoint.path)
        if row >= want:
            raise PolicyError(
                f"--vocab-rows {want} would drop row {row} of {name}, which is not zero; "
                f"the smallest number that loses nothing is {row + 1}"
            )
    return Policy(
        "vocab-rows", f"the last {have - want} of {have} vocabulary rows are all zero and are left out", values
    )


def _settle_tie(checkpoint: Checkpoint, choices: Choices, policies: list[Policy]) -> tuple[bool, Table]:
    """Whether the head is the embeddings, and the table for that."""
    config = checkpoint.config
    says_tied = None if config is None else config.tie_word_embeddings
    table = checkpoint.table(tied=says_tied is not False)
    if not checkpoint.stores_head or says_tied is False:
        return says_tied is not False, table
    if has_headers_only(checkpoint.path) and len(table[EMBEDDING].copies) > 1:
        summary = "head and embeddings are taken as equal, as tied ones are; a conversion compares them"
        policies.append(Policy("tie-not-compared", summary))
        return True, table
    with Files(checkpoint.path, os.O_RDONLY) as files:
        row = first_difference(table[EMBEDDING], files)
    if row is None:
        if says_tied is None:
            policies.append(
                Policy("tie-found", "the head equals the embeddings bit for bit, so they are taken as tied")
            )
        return True, table
    if says_tied is None:
        return False, checkpoint.table(tied=False)
    if not choices.untie:
        raise PolicyError(
            f"{checkpoint.config_path} says tie_word_embeddings, but {checkpoint.layout.head_name()} and "
            f"{checkpoint.layout.embedding_name()} differ from row {row} on; "
            "pass --untie to keep both and say so in the config"
        )
    policies.append(
        Policy(
            "untie",
            f"the head differs from the embeddings from row {row} on: both are kept, tie_word_embeddings becomes false",
            {"row": row},
            warning=True,
        )
    )
    return False, checkpoint.table(tied=False)


def _check_replicas(checkpoint: Checkpoint, table: Table, policies: list[Policy]) -> None:
    """Refuse ranks that hold different values of what they ought to hold alike."""
    if checkpoint.mesh == ONE_RANK and not any(tensor.replicated for tensor in checkpoint.tensors.values()):
        return
    if has_headers_only(checkpoint.path):
        policies.append(Policy("replicas-not-compared", "what ranks hold alike is compared when it is converted"))
        return
    problems = []
    with Files(checkpoint.path, os.O_RDONLY) as files:
        for entry in table.values():
            row = first_difference(entry, files) if len(entry.copies) > 1 else None
            if row is not None:
                extents = (extent for copy in entry.copies for extent in copy)
                places = sorted({e.file for e in extents if e.row <= row < e.row + e.rows})
                problems.append(f"{entry.name} from row {row} on, in {' and '.join(places[:4])}")
    if problems:
        raise SourceError(
            enumerate_problems(f"ranks in {checkpoint.path} hold different values of the same tensor:", problems)
        )


def _settle_expert_bias(checkpoint: Checkpoint, table: Table, policies: list[Policy]) -> None:
    """Take zero expert biases out of ``table``: a model with them is the model without."""
    largest: dict[str, float] = {}
    names = [name for name in table if name.endswith(EXPERT_BIAS_SUFFIX)]
    for name in names:
        entry = table[name]
        if entry.dtype not in ("F32", "BF16", "F16"):  # a buffer in F32; an export casts it with everything else
            raise SourceError(f"{checkpoint.path}: {name} is {entry.dtype}, expected F32, BF16 or F16")
        values = _floats(read_whole(entry, checkpoint.path), entry.dtype)
        if any(values):  # a zero of either sign is none
            largest[name] = max(abs(value) for value in values)
        else:
            del table[name]
    if largest:
        worst = max(largest, key=lambda name: largest[name])
        summary = (
            f"{len(largest)} of {checkpoint.geometry.num_hidden_layers} layers have a routing bias that is not zero, "
            f"the largest {largest[worst]:.4g} in {describe(worst)}"
        )
        policies.append(
            Policy("expert-bias", summary, {"layers": len(largest), "max_abs": largest[worst]}, warning=True)
        )


def _floats(raw: bytearray, dtype: str) -> tuple[float, ...]:
    if dtype == "F16":
        return struct.unpack(f"<{len(raw) // 2}e", raw)
    if dtype == "BF16":  # the upper half of a float32
        wide = bytearray(2 * len(raw))
        wide[2::4], wide[3::4] = raw[0::2], raw[1::2]
        raw = wide
    return struct.unpack(f"<{len(raw) // 4}f", raw)
