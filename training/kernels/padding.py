"""How many blocks of rows the experts' blockwise kernels run, at worst and as routing goes; arithmetic alone.

Legend: T tokens, k experts per token, E experts, B rows per block. A kernel computes whole blocks, each of one expert,
so an expert whose rows fill no whole number of blocks is padded.
"""

from __future__ import annotations

import math


def num_blocks(rows: int, num_experts: int, block: int, *, least: int = 0) -> int:
    """Blocks that hold ``rows`` rows however they fall on the experts: the exact worst case of sum(ceil(count / B)).

    With ``least`` 1 every expert has a block, of padding where it has no rows: sum(max(1, ceil(count / B))).
    """
    if least:
        return num_experts - 1 + max(1, -(-rows // block))
    if rows <= num_experts:
        return rows  # at worst one row each
    return num_experts + (rows - num_experts) // block


def expected_blocks(tokens: int, top_k: int, num_experts: int, block: int) -> float:
    """The mean of sum(max(1, ceil(count / B))) when each token takes k distinct experts of E, all equally likely.

    Exact: an expert's count is binomial, T trials of chance k / E each.
    """
    if top_k == num_experts:
        return num_experts * math.ceil(tokens / block)
    probabilities = _binomial(tokens, top_k / num_experts)
    return num_experts * math.fsum(p * max(1, -(-count // block)) for count, p in enumerate(probabilities))


def _binomial(trials: int, chance: float) -> list[float]:
    """Probabilities of 0 to ``trials`` successes."""
    hit, miss, whole = math.log(chance), math.log1p(-chance), math.lgamma(trials + 1)
    return [
        math.exp(whole - math.lgamma(n + 1) - math.lgamma(trials - n + 1) + n * hit + (trials - n) * miss)
        for n in range(trials + 1)
    ]
