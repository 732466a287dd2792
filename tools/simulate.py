"""What every rank of a training run would hold: exact for what is stored, estimated for what passes within a step.

Parameters, gradients and optimizer state come from the box tables, so uneven FSDP rows count as torch cuts them; the
estimate is in ``simulate_memory``, what ranks send in ``simulate_traffic``. Context-parallel ranks share parameters
as FSDP ranks do (torchtitan 0.3.0, ``distributed/parallel_dims.py``: fsdp = dp_shard * cp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from qwen3conv.converters.errors import PolicyError, enumerate_problems
from qwen3conv.converters.geometry import Geometry
from qwen3conv.converters.layouts import TITAN_SCHEMAS
from qwen3conv.converters.placement import Mesh, check_mesh, elements_by_rank

from .simulate_memory import LOSS_CHUNKS, passing

CORE_BYTES = 24 << 30
"""Memory of a logical NeuronCore of a trn2.48xlarge: 96 GiB of a chip's memory to each of four."""

OPTIMIZER_STATES = {"adamw": 2, "sgd": 0}
"""Numbers per parameter that an optimizer keeps, in the parameter's dtype (torch 2.13, ``optim/adamw.py``)."""

Checkpointing = Literal["none", "selective", "full"]
Device = Literal["neuron", "cuda", "cpu"]


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
    device: Device = "neuron"

    @property
    def sharded(self) -> Mesh:
        """The mesh that cuts parameters."""
        return replace(self.mesh, fsdp=self.mesh.fsdp * self.cp)

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.sharded.ranks

    @property
    def tokens(self) -> int:
        """Tokens of a rank at a time, whole over its tensor-parallel group."""
        return self.batch * self.seq_len // self.cp

    def layers(self, stage: int) -> int:
        """Layers of a pipeline stage, which are cut in equal runs."""
        each = -(-self.geometry.num_hidden_layers // self.mesh.pp)
        return max(0, min(each, self.geometry.num_hidden_layers - stage * each))

    def layer_elements(self) -> tuple[int, int]:
        """Parameters of a layer on one tensor- and expert-parallel rank, not cut by FSDP: experts, and the rest."""
        g, mesh = self.geometry, self.mesh
        attention = g.hidden_size * g.head_dim * 2 * (g.num_attention_heads + g.num_key_value_heads) // mesh.tp
        rest = attention + self.norm_elements()
        if not g.is_moe:
            return 0, rest + 3 * g.hidden_size * (g.intermediate_size or 0) // mesh.tp
        experts = 3 * (g.num_experts or 0) * g.hidden_size * (g.moe_intermediate_size or 0)
        return experts // (mesh.ep if mesh.ep > 1 else mesh.tp), rest + g.hidden_size * (g.num_experts or 0)

    def norm_elements(self) -> int:
        """Numbers of a layer's norms, which every tensor-parallel rank has."""
        return 2 * self.geometry.hidden_size + 2 * self.geometry.head_dim


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes on one rank at the peak of a step."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    working: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(asdict(self).values())


def check_job(job: Job) -> None:
    """Refuse what torchtitan cannot run.

    Raises:
        PolicyError: every degree and length that fits nothing, with what it would have to divide.
    """
    problems: list[str] = []
    if job.cp < 1:
        problems.append(f"cp is {job.cp}; expected at least 1")
    elif job.mesh.tp >= 1:
        divisor = job.mesh.tp * (2 * job.cp if job.cp > 1 else 1)
        if job.seq_len % divisor:
            whose = "tp * 2 * cp" if job.cp > 1 else "tp"
            problems.append(f"{whose} = {divisor} does not divide the sequence of {job.seq_len} tokens")
        if job.seq_len // job.cp % LOSS_CHUNKS:
            problems.append(f"a rank's sequence of {job.seq_len // job.cp} tokens is no multiple of {LOSS_CHUNKS}")
    try:
        check_mesh(job.sharded, job.geometry)
    except PolicyError as error:
        if not problems:
            raise
        problems = [*str(error).replace("  - ", "").splitlines()[1:], *problems]
    if problems:
        raise PolicyError(enumerate_problems(f"{describe(job)} does not fit this model:", problems))


def describe(job: Job) -> str:
    """``fsdp16 x tp4``, with context parallelism too."""
    return describe_mesh(job.mesh, job.cp)


def describe_mesh(mesh: Mesh, cp: int) -> str:
    """The same of degrees alone."""
    if cp == 1:
        return str(mesh)
    return f"cp{cp}" if mesh == Mesh() else f"{mesh} x cp{cp}"


def held_by_rank(job: Job, ranks: Sequence[int] | None = None) -> list[Held]:
    """What each of ``ranks`` (default: all) holds. Rank 0 of a stage is its fullest.

    Raises:
        PolicyError: the degrees do not fit the model.
    """
    check_mesh(job.sharded, job.geometry)
    counts = elements_by_rank(TITAN_SCHEMAS["T7"], job.geometry, job.sharded, tied=job.tied, ranks=ranks)
    stages = [passing(job, is_last=i == job.mesh.pp - 1, layers=job.layers(i)) for i in range(job.mesh.pp)]
    states, width = OPTIMIZER_STATES[job.optimizer], job.parameter_bytes
    found = []
    for rank, count in counts.items():
        stage = stages[job.sharded.place(rank).pp]
        own = count * width
        found.append(Held(own, own, own * states, stage.gathered, stage.activations, stage.working))
    return found
