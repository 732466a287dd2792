"""What every rank of a training run would hold and send: exact for what is stored, estimated for the rest.

Parameters, gradients and optimizer state come from the box tables, so uneven FSDP rows count as torch cuts them.
Activations are an estimate: the tensors that autograd keeps of a layer, counted for Qwen3's operations as torchtitan
0.3.0 has them (``models/qwen3``, ``models/common``); the method is that of Korthikanti et al., *Reducing Activation
Recomputation in Large Transformer Models* (2022), section 4. ``tests/cli/test_simulate.py`` holds it against what
autograd keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from qwen3conv.converters.errors import PolicyError
from qwen3conv.converters.geometry import Geometry
from qwen3conv.converters.layouts import TITAN_SCHEMAS
from qwen3conv.converters.placement import Mesh, check_mesh, elements_by_rank

CORE_BYTES = 24 << 30
"""Memory of a logical NeuronCore of a trn2.48xlarge: 96 GiB of a chip's memory to each of four."""

LOSS_CHUNKS = 8
"""torchtitan 0.3.0 computes logits and loss in so many parts of a sequence (``ChunkedLossWrapper``)."""

OPTIMIZER_STATES = {"adamw": 2, "sgd": 0}
"""Numbers per parameter that an optimizer keeps, in the parameter's dtype (torch 2.13, ``optim/adamw.py``)."""

Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained: lengths in tokens, batch in sequences at a time on one data-parallel rank, widths in bytes."""

    geometry: Geometry
    tied: bool
    top_k: int
    mesh: Mesh
    cp: int = 1
    seq_len: int = 4096
    batch: int = 1
    parameter_bytes: int = 4
    compute_bytes: int = 2
    optimizer: str = "adamw"
    checkpointing: Checkpointing = "selective"

    @property
    def ranks(self) -> int:
        """All ranks; context parallelism multiplies them."""
        return self.mesh.ranks * self.cp


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes on one rank at the peak of a step."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    """Whole layers that FSDP puts together for the computation: the current one and the next."""
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(asdict(self).values())


def held_by_rank(job: Job, ranks: Sequence[int] | None = None) -> list[Held]:
    """What each of ``ranks`` (default: all) of one context-parallel group holds. Rank 0 of a stage is its fullest.

    Raises:
        PolicyError: the degrees do not fit the model.
    """
    check_mesh(job.mesh, job.geometry)
    counts = elements_by_rank(TITAN_SCHEMAS["T7"], job.geometry, job.mesh, tied=job.tied, ranks=ranks)
    states = OPTIMIZER_STATES[job.optimizer]
    gathered = 2 * sum(_layer_elements(job)) * job.compute_bytes if job.mesh.fsdp > 1 else 0
    layers = -(-job.geometry.num_hidden_layers // job.mesh.pp)
    activations = layers * layer_activations(job) + job.compute_bytes * _tokens(job) * job.geometry.hidden_size
    logits = _tokens(job) // LOSS_CHUNKS * job.geometry.vocab_size // job.mesh.tp * (job.compute_bytes + 8)
    width = job.parameter_bytes
    return [
        Held(count * width, count * width, count * width * states, gathered, activations, logits)
        for count in counts.values()
    ]


def _tokens(job: Job) -> int:
    """Tokens of a rank at a time, whole over its tensor-parallel group."""
    return job.batch * job.seq_len // job.cp


def _layer_elements(job: Job) -> tuple[int, int]:
    """Parameters of a layer on one tensor- and expert-parallel rank, not sharded by FSDP: experts, and the rest."""
    g, mesh = job.geometry, job.mesh
    attention = g.hidden_size * g.head_dim * 2 * (g.num_attention_heads + g.num_key_value_heads) // mesh.tp
    if not g.is_moe:
        return 0, attention + 3 * g.hidden_size * (g.intermediate_size or 0) // mesh.tp
    experts = 3 * (g.num_experts or 0) * g.hidden_size * (g.moe_intermediate_size or 0)
    return experts // (mesh.ep if mesh.ep > 1 else mesh.tp), attention + g.hidden_size * (g.num_experts or 0)


def layer_activations(job: Job) -> int:
    """Bytes that autograd keeps of one layer on one rank until its backward.

    Per token, in elements: both norms' inputs and outputs (4 H); q and k before and after their norms and after RoPE (3
    each), v, the attention's output and its statistics; gate, up, silu and product (4 I), for MoE of each chosen expert
    with the gathered input and output rows (2 H), and the router's scores twice. Tensor parallelism divides all of
    it (sequence parallel between the cuts). Selective checkpointing keeps what matrix products and attention put out;
    full, the layer's input.
    """
    g, tokens, tp = job.geometry, _tokens(job), job.mesh.tp
    hidden, q, kv = g.hidden_size, g.num_attention_heads * g.head_dim, g.num_key_value_heads * g.head_dim
    width = (g.moe_intermediate_size or 0) if g.is_moe else (g.intermediate_size or 0)
    copies = job.top_k if g.is_moe else 1
    if job.checkpointing == "full":
        elements = hidden
    elif job.checkpointing == "selective":
        elements = hidden + q + 2 * kv + q + hidden + copies * (2 * width + (hidden if g.is_moe else 0))
    else:
        elements = 4 * hidden + 3 * (q + kv) + kv + q + copies * 4 * width
        if g.is_moe:
            elements += copies * 2 * hidden + 2 * (g.num_experts or 0)
    return tokens * elements * job.compute_bytes // tp


def sent_per_step(job: Job) -> dict[str, int]:
    """Bytes that one rank sends in a step, by collective, in ring algorithms: (n - 1) / n of the whole.

    FSDP2 gathers parameters for forward and backward and scatters gradients in float32. Tensor parallelism, with
    sequence parallelism, gathers and scatters hidden states twice per layer each way. Expert parallelism sends each
    token's rows out and back, each way.
    """
    g, mesh = job.geometry, job.mesh
    layers = -(-g.num_hidden_layers // mesh.pp)
    ends = g.vocab_size * g.hidden_size * (1 if job.tied else 2) // mesh.tp
    experts, rest = _layer_elements(job)
    sharers = mesh.efsdp if mesh.ep > 1 else mesh.fsdp  # of an expert
    elements = (layers * rest + ends) * (mesh.fsdp - 1) // mesh.fsdp + layers * experts * (sharers - 1) // sharers
    hidden = _tokens(job) * g.hidden_size * job.compute_bytes
    found = {
        "fsdp all-gather": 2 * elements * job.compute_bytes,
        "fsdp reduce-scatter": 4 * elements,
        "tp all-gather": 4 * layers * hidden * (mesh.tp - 1) // mesh.tp,
        "tp reduce-scatter": 4 * layers * hidden * (mesh.tp - 1) // mesh.tp,
        "ep all-to-all": 4 * layers * job.top_k * hidden // mesh.tp * (mesh.ep - 1) // mesh.ep if mesh.ep > 1 else 0,
        "pp send": 2 * hidden if mesh.pp > 1 else 0,
        "cp all-gather": 4 * layers * 2 * _tokens(job) * g.num_key_value_heads * g.head_dim * job.compute_bytes
        * (job.cp - 1) // mesh.tp,
    }  # fmt: skip
    return {name: count for name, count in found.items() if count}


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A mesh, what its fullest rank holds, and what a rank sends per step."""

    mesh: Mesh
    held: int
    sent: int
    fits: bool

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "mesh": asdict(self.mesh)}


def suggest(job: Job, ranks: int, memory: int) -> list[Suggestion]:
    """Meshes of ``ranks`` ranks for the job: those that fit first, and of these the ones that send the least."""
    found = []
    for mesh in _meshes(job, ranks):
        tried = replace(job, mesh=mesh)
        (fullest,) = held_by_rank(tried, [0])
        held = fullest.total
        found.append(Suggestion(mesh, held, sum(sent_per_step(tried).values()), held <= memory))
    return sorted(found, key=lambda one: (not one.fits, one.sent if one.fits else one.held))


def nearest(job: Job) -> list[Mesh]:
    """Meshes of as many ranks that do fit the model's shapes, for degrees that do not: the closest tp first."""
    tp = job.mesh.tp
    found = (replace(mesh, pp=job.mesh.pp) for mesh in _meshes(job, job.mesh.ranks // job.mesh.pp))
    return sorted(found, key=lambda mesh: (abs(mesh.tp - tp), abs(mesh.ep - job.mesh.ep)))[:3]


def _meshes(job: Job, ranks: int) -> Iterator[Mesh]:
    """Every mesh of ``ranks`` ranks that torchtitan's plans take: tp divides the KV heads, ep the experts."""
    g = job.geometry
    for tp in range(1, g.num_key_value_heads + 1):
        if g.num_key_value_heads % tp or ranks % tp:
            continue
        for ep in (1, *(n for n in (2, 4, 8, 16, 32, 64, 128) if g.is_moe and (g.num_experts or 0) % n == 0)):
            mesh = Mesh(tp=tp, fsdp=ranks // tp, ep=ep)
            try:
                check_mesh(mesh, g)
            except PolicyError:
                continue
            yield mesh
