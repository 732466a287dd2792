"""How many blocks of rows the experts' blockwise kernels run, at worst and as routing goes; arithmetic alone.

Legend: T tokens, k experts per token, E experts, B rows per block. A kernel computes whole blocks, each of one expert,
so an expert whose rows fill no whole number of blocks is padded.
"""

from __future__ import annotations

import math
from typing import NamedTuple


def num_blocks(rows: int, num_experts: int, block: int) -> int:
    """Blocks that hold ``rows`` rows however they fall on the experts: the exact worst case of sum(ceil(count / B))."""
    if rows <= num_experts:
        return rows  # at worst one row each
    return num_experts + (rows - num_experts) // block


class Routing(NamedTuple):
    """What to expect when each token takes k distinct experts of E, all equally likely."""

    blocks: float
    """Blocks that hold at least one row."""
    experts: float
    """Experts that have at least one row."""


def expected_routing(tokens: int, top_k: int, num_experts: int, block: int) -> Routing:
    """Means under uniform routing, exact: an expert's count is binomial, T trials of chance k / E each."""
    if top_k == num_experts:
        return Routing(num_experts * math.ceil(tokens / block), num_experts)
    chance = top_k / num_experts
    blocks = nonempty = 0.0
    for count, probability in enumerate(_binomial(tokens, chance)):
        blocks += probability * -(-count // block)
        nonempty += probability * (count > 0)
    return Routing(num_experts * blocks, num_experts * nonempty)


def _binomial(trials: int, chance: float) -> list[float]:
    """Probabilities of 0 to ``trials`` successes."""
    hit, miss, whole = math.log(chance), math.log1p(-chance), math.lgamma(trials + 1)
    return [
        math.exp(whole - math.lgamma(n + 1) - math.lgamma(trials - n + 1) + n * hit + (trials - n) * miss)
        for n in range(trials + 1)
    ]
