"""Meshes for a job: which fit, which send least for what they train, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from qwen3conv.converters.errors import PolicyError
from qwen3conv.converters.placement import Mesh

from .simulate import Held, Job, check_job, held_by_rank
from .simulate_traffic import heaviest_stage, sent_per_step


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A mesh, what its fullest rank holds, what a rank sends per step, and why it stands where it stands."""

    mesh: Mesh
    cp: int
    held: int
    sent: int
    sent_per_token: int
    """For each token that a rank trains on: of all ranks' bytes, over all tokens of a step."""
    idle: float
    """Part of a step in which a pipeline's rank waits: (pp - 1) / (pp - 1 + microbatches)."""
    fits: bool
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "mesh": asdict(self.mesh)}


def suggest(job: Job, ranks: int, memory: int) -> list[Suggestion]:
    """Meshes of ``ranks`` ranks: those that fit first, and of these the ones that send least per token.

    Pipeline and context parallelism, which ``train`` has not, are tried where nothing fits without them; the time
    that a pipeline waits counts as more sent.
    """
    plain = [_judge(tried, memory) for tried in _jobs(job, ranks) if tried.mesh.pp == tried.cp == 1]
    if not any(one.fits for one in plain):
        plain += [_judge(tried, memory) for tried in _jobs(job, ranks) if tried.mesh.pp > 1 or tried.cp > 1]
    return sorted(plain, key=_order)


def _judge(job: Job, memory: int) -> Suggestion:
    last = (job.mesh.pp - 1) * (job.ranks // job.mesh.pp)
    fullest = max(held_by_rank(job, sorted({0, last})), key=lambda one: one.total)
    sent = sent_per_step(job, heaviest_stage(job))
    total, idle = sum(sent.values()), (job.mesh.pp - 1) / (job.mesh.pp - 1 + job.batch)
    tokens = job.mesh.fsdp * job.batch * job.seq_len
    reason = _reason(job, fullest, sent, memory, idle)
    fits = fullest.total <= memory
    return Suggestion(job.mesh, job.cp, fullest.total, total, total * job.ranks // tokens, idle, fits, reason)


def nearest(job: Job) -> list[Job]:
    """Jobs of as many ranks that do fit the model's shapes, for degrees that do not: the closest first."""
    mesh = job.mesh

    def distance(one: Job) -> tuple[int, ...]:
        other = one.mesh
        return abs(one.cp - job.cp), abs(other.pp - mesh.pp), abs(other.tp - mesh.tp), abs(other.ep - mesh.ep)

    return sorted(_jobs(job, job.ranks), key=distance)[:3]


def _order(one: Suggestion) -> tuple[bool, float]:
    return (False, one.sent_per_token / (1 - one.idle)) if one.fits else (True, one.held)


def _reason(job: Job, held: Held, sent: dict[str, int], memory: int, idle: float) -> str:
    """What decides about a mesh, in a line."""
    g, mesh = job.geometry, job.mesh
    said = []
    if held.total > memory:
        parts = asdict(held)
        largest = max(parts, key=lambda name: parts[name])
        said.append(f"{held.total / memory:.1f} times the memory, most of it {largest}")
    else:
        said.append(f"{held.total / memory:.0%} of the memory")
    if sent:
        most = max(sent, key=lambda name: sent[name])
        said.append(f"{sent[most] / sum(sent.values()):.0%} of what it sends is {most}")
    else:
        said.append("sends nothing")
    if mesh.tp > 1:
        each = g.num_key_value_heads // mesh.tp
        heads = f"{each} of {g.num_key_value_heads} KV heads" if each else "a KV head that others have too"
        said.append(f"tp {mesh.tp} leaves a rank {heads} and trains on 1/{mesh.tp} of the sequences")
    if mesh.ep > 1:
        said.append(f"ep {mesh.ep} leaves it {(g.num_experts or 0) // mesh.ep} of {g.num_experts} experts, whole")
    if mesh.pp > 1:
        said.append(f"pp {mesh.pp} lets it wait {idle:.0%} of the time; train has no pipeline")
    if job.cp > 1:
        said.append(
            f"cp {job.cp} leaves it {job.seq_len // job.cp:,} tokens of a sequence; train has no context parallelism"
        )
    return "; ".join(said)


def _jobs(job: Job, ranks: int) -> Iterator[Job]:
    """Every mesh of ``ranks`` ranks that torchtitan takes: tp divides the KV heads, ep the experts, pp the layers."""
    g = job.geometry
    for pp in (n for n in _divisors(ranks, 16) if g.num_hidden_layers % n == 0 and (n == 1 or job.batch % n == 0)):
        for cp in _divisors(ranks // pp, 8):
            for tp in _divisors(ranks // pp // cp, g.num_key_value_heads):
                if g.num_key_value_heads % tp:
                    continue
                experts = g.num_experts or 0
                for ep in (n for n in _divisors(ranks // pp, max(1, experts)) if n == 1 or experts % n == 0):
                    mesh = Mesh(tp=tp, fsdp=ranks // pp // cp // tp, ep=ep, pp=pp)
                    tried = replace(job, mesh=mesh, cp=cp)
                    try:
                        check_job(tried)
                    except PolicyError:
                        continue
                    yield tried


def _divisors(number: int, largest: int) -> list[int]:
    return [n for n in range(1, min(number, largest) + 1) if number % n == 0]
