"""What a rank sends in a step of training, by collective, as torchtitan 0.3.0 has it on torch 2.13.

A step is one forward and backward of ``batch`` sequences per data-parallel rank. Bytes are those of ring algorithms:
(n - 1) / n of the whole for a gather or a scatter, twice that for an all-reduce.
``tests/cli/test_simulate_measured.py`` counts what small models really send on four gloo ranks, but for context
parallelism, which was not run.
"""

from __future__ import annotations

from .simulate import Job
from .simulate_memory import REDUCED_BYTES


def sent_per_step(job: Job, stage: int = 0) -> dict[str, int]:
    """Bytes that a rank of pipeline stage ``stage`` sends, by collective; those that send nothing are left out."""
    found = {**_fsdp(job, stage), **_tensor(job, stage), **_experts(job, stage), **_pipeline(job, stage)}
    found["cp all-gather"] = _context(job, stage) * (2 if job.checkpointing == "none" else 3) // 2
    found["cp reduce-scatter"] = _context(job, stage) // 2
    return {name: count for name, count in found.items() if count}


def heaviest_stage(job: Job) -> int:
    """The pipeline stage whose ranks send most."""
    return max(range(job.mesh.pp), key=lambda stage: sum(sent_per_step(job, stage).values()))


def _fsdp(job: Job, stage: int) -> dict[str, int]:
    """Parameters are gathered for forward and backward, gradients scattered in float32 (``distributed/fsdp.py``).

    With a pipeline, layers stay gathered. The head is gathered with its norm, and twice more by the loss in parts,
    for each microbatch, which scatters its gradient by itself (``components/loss.py``). A tied head is gathered with
    the embeddings.
    """
    g, tp = job.geometry, job.mesh.tp
    layers, is_last = job.layers(stage), stage == job.mesh.pp - 1
    times, microbatches = (2, 1) if job.mesh.pp == 1 else (1, job.batch)
    experts, rest = job.layer_elements()
    ends = g.vocab_size * g.hidden_size // tp
    gathered, reduced = times * layers * rest, layers * rest
    if stage == 0 and not (job.tied and job.mesh.pp == 1):
        gathered, reduced = gathered + times * ends, reduced + ends
    if is_last:
        copies = 2 if job.tied and job.mesh.pp == 1 and tp > 1 else 1  # FSDP cuts the two before they are tied again
        gathered += (1 + 2 * microbatches) * (copies * ends + g.hidden_size)
        reduced += microbatches * ends + g.hidden_size * (microbatches if job.mesh.pp > 1 else 1)
        reduced += ends if job.tied and job.mesh.pp == 1 else 0
    dense, sharers = job.sharded.fsdp, job.sharded.efsdp if job.mesh.ep > 1 else job.sharded.fsdp
    return {
        "fsdp all-gather": _part(gathered * job.compute_bytes, dense)
        + _part(times * layers * experts * job.compute_bytes, sharers),
        "fsdp reduce-scatter": _part(reduced * REDUCED_BYTES, dense) + _part(layers * experts * REDUCED_BYTES, sharers),
    }


def _tensor(job: Job, stage: int) -> dict[str, int]:
    """Sequence parallelism: hidden states are gathered before and scattered after attention and MLP, each way.

    So they are after the embeddings and before the head. With expert parallelism, experts take the sequence as it is
    cut. Gradients of norms and router, and the loss (largest logit, sum and the label's, in float32), are summed.
    What checkpointing computes again, it gathers again; what was scattered is kept by the selective kind.
    """
    g, tp = job.geometry, job.mesh.tp
    layers, is_first, is_last = job.layers(stage), stage == 0, stage == job.mesh.pp - 1
    hidden = job.tokens * g.hidden_size * job.compute_bytes
    microbatches = 1 if job.mesh.pp == 1 else job.batch
    pairs, ends = 1 if job.mesh.ep > 1 else 2, is_first + is_last
    gathers, scatters = 2 * pairs * layers + ends, 2 * pairs * layers + ends
    if job.checkpointing != "none":
        gathers += pairs * layers
    if job.checkpointing == "full":
        scatters += pairs * layers
    norms = (
        layers * (job.norm_elements() + g.hidden_size * (g.num_experts or 0)) + is_last * microbatches * g.hidden_size
    )
    summed = norms * job.compute_bytes + is_last * 3 * job.tokens * 4
    return {
        "tp all-gather": gathers * _part(hidden, tp),
        "tp reduce-scatter": scatters * _part(hidden, tp),
        "tp all-reduce": 2 * _part(summed, tp),
    }


def _experts(job: Job, stage: int) -> dict[str, int]:
    """Each token's rows go to its experts and back, each way, if routing is even. Full checkpointing does it again."""
    times = 6 if job.checkpointing == "full" else 4
    rows = job.tokens * job.top_k * job.geometry.hidden_size * job.compute_bytes // job.mesh.tp
    return {"ep all-to-all": times * job.layers(stage) * _part(rows, job.mesh.ep)}


def _pipeline(job: Job, stage: int) -> dict[str, int]:
    """Hidden states to the next stage, their gradients to the one before."""
    hidden = job.tokens * job.geometry.hidden_size * job.compute_bytes // job.mesh.tp
    return {"pp send": hidden * ((stage < job.mesh.pp - 1) + (stage > 0))}


def _context(job: Job, stage: int) -> int:
    """Keys and values of a rank's tokens to all others, and their gradients back."""
    each = 2 * job.tokens * job.geometry.num_key_value_heads * job.geometry.head_dim * job.compute_bytes
    return 2 * job.layers(stage) * each * (job.cp - 1) // job.mesh.tp


def _part(count: int, ranks: int) -> int:
    """What a ring sends of ``count`` bytes."""
    return count * (ranks - 1) // ranks
