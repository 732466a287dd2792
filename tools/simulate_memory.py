"""What a rank keeps for a while within a step: activations, whole layers of FSDP, what the loss and a backward need.

An estimate: the tensors that autograd keeps of a layer, counted for Qwen3's operations as torchtitan 0.3.0 has them
(``models/qwen3``, ``models/common``, ``distributed/activation_checkpoint.py``) and torch 2.13 decomposes them on a
CPU. The method is that of Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models* (2022),
section 4. ``tests/cli/test_simulate_measured.py`` holds it against the measured peak of small runs. A device whose norm
is one kernel keeps 2 H + q + kv fewer elements per token of a layer without checkpointing.

Letters, in elements per token: H hidden, Q query heads, K key (or value) heads, I intermediate, E experts, k of them
chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .simulate import Job

LOSS_CHUNKS = 8
"""torchtitan 0.3.0 computes logits and loss in so many parts of a sequence (``ChunkedLossWrapper``)."""

REDUCED_BYTES = 4
"""Gradients are reduced in float32 (torchtitan 0.3.0, ``TrainingConfig.mixed_precision_reduce``)."""


@dataclass(frozen=True, slots=True)
class Passing:
    """Bytes on one rank that come and go within a step."""

    gathered: int
    """FSDP: whole layers, or the whole head, and their gradients before they are cut."""
    activations: int
    """What the forward keeps for the backward."""
    working: int
    """What the largest stage needs beside: one layer's backward, or the loss of a part of the sequence."""


def passing(job: Job, *, is_last: bool, layers: int) -> Passing:
    """Bytes at the peak of a step, of a stage that has ``layers`` and, if it ``is_last``, the head."""
    tokens, width, whole = job.tokens, job.compute_bytes, job.mesh.tp
    hidden = tokens * job.geometry.hidden_size * width
    kept = tokens * (kept_per_token(job) * layers + job.geometry.hidden_size // whole) * width
    in_flight = min(job.mesh.pp, job.batch)  # one forward, one backward: microbatches of one sequence
    if job.checkpointing == "none":
        kept += layers * _mask(job)
    if job.mesh.pp > 1:
        kept = kept * in_flight // job.batch
    stages = [_backward(job, tokens if job.mesh.pp == 1 else tokens // job.batch)]
    if is_last:
        kept += hidden + 2 * hidden // whole
        stages.append(_loss(job))
    gathered, working = max(stages, key=sum)
    return Passing(gathered, kept, working)


def kept_per_token(job: Job) -> int:
    """Elements that autograd keeps of one layer until its backward, per token that the tensor-parallel ranks share.

    Of a dense layer on one rank: none 6H + 4Q + 4K + 4I, selective 2H + 2Q + 2K + I, full H.
    Sequence parallelism divides what lies between the cuts; matrix products keep their gathered inputs whole.
    Selective checkpointing keeps attention, every second matrix product and what collectives gave, as its policy says;
    grouped matrix products of experts are not among them. On a CPU, attention is not, and experts are plain products.
    """
    g, tp = job.geometry, job.mesh.tp
    hidden, q, k = g.hidden_size, g.num_attention_heads * g.head_dim, g.num_key_value_heads * g.head_dim
    if job.checkpointing == "full":
        return hidden // tp
    if job.checkpointing == "none":
        return _whole_layer(job)
    found = hidden // tp + (q + 2 * k) // tp
    found += hidden // tp if tp > 1 else 0  # what reduce-scatter gave of attention
    if job.device != "cpu":
        found += q // tp
    if not g.is_moe:
        return found + (g.intermediate_size or 0) // tp + hidden + (hidden // tp if tp > 1 else 0)
    rows = job.top_k * hidden // (tp if job.mesh.ep > 1 else 1)
    if job.mesh.ep > 1:
        found += 2 * rows  # what both exchanges gave
    if tp > 1 and job.mesh.ep == 1:
        found += hidden // tp
    if job.device == "cpu":
        found += job.top_k * (g.moe_intermediate_size or 0) // tp + rows // 2
    return found


def _whole_layer(job: Job) -> int:
    """The same without checkpointing."""
    g, tp, ep = job.geometry, job.mesh.tp, job.mesh.ep
    hidden, q, k = g.hidden_size, g.num_attention_heads * g.head_dim, g.num_key_value_heads * g.head_dim
    found = 5 * hidden // tp + hidden + 4 * (q + k) // tp + 2 * g.head_dim
    if not g.is_moe:
        return found - hidden // tp + hidden + 4 * (g.intermediate_size or 0) // tp
    rows = job.top_k * hidden // (tp if ep > 1 else 1)
    inner = job.top_k * 4 * (g.moe_intermediate_size or 0) // tp
    if ep == 1:
        found += hidden - hidden // tp
    return found + (5 * rows // 2 if ep > 1 else 2 * rows) + inner + 2 * (g.num_experts or 0)


def _mask(job: Job) -> int:
    """Bytes of the mask that keeps attention inside of documents, where no kernel takes their lengths instead."""
    return 0 if job.device == "cuda" else job.tokens * job.seq_len * job.compute_bytes


def _backward(job: Job, tokens: int) -> tuple[int, int]:
    """Gathered and working bytes in the middle of a layer's backward."""
    g, tp, width = job.geometry, job.mesh.tp, job.compute_bytes
    again = _whole_layer(job) - kept_per_token(job)
    has_ep = job.mesh.ep > 1
    rows = job.top_k * g.hidden_size // (tp if has_ep else 1)
    gradients = g.hidden_size + (2 * rows if g.is_moe else (g.intermediate_size or 0) // tp)
    gradients += (2 if has_ep else 4) * (g.hidden_size - g.hidden_size // tp)  # whole, before they are reduced
    layer = sum(job.layer_elements())
    mask = _mask(job) + 2 * job.tokens * job.seq_len if job.checkpointing != "none" and job.device != "cuda" else 0
    return _unsharded(job, layer, beside=layer), tokens * (again + gradients) * width + mask


def _loss(job: Job) -> tuple[int, int]:
    """The same in the loss, which goes with the head's backward, of one part of the sequence."""
    g, tp, width = job.geometry, job.mesh.tp, job.compute_bytes
    tokens = job.tokens if job.mesh.pp == 1 else job.tokens // job.batch
    logits = tokens // LOSS_CHUNKS * g.vocab_size // tp
    hidden = tokens * g.hidden_size
    working = logits * (2 * width + 8) + hidden * (width + 4)
    return _unsharded(job, g.vocab_size * g.hidden_size // tp, beside=sum(job.layer_elements())), working


def _unsharded(job: Job, elements: int, *, beside: int) -> int:
    """FSDP: parameters and gradients of a whole group, its gradients to be reduced, and the next group's parameters."""
    if job.sharded.fsdp == 1:
        return 0
    return elements * (2 * job.compute_bytes + REDUCED_BYTES) + beside * job.compute_bytes
