"""One checkpoint run on given tokens: its hidden states, its logits and, in a mixture of experts, its choices.

A mixture of experts is discontinuous: where two experts' scores are equal up to rounding, each library may choose
another one, and everything after it differs. Such ties are decided as an earlier run decided them, and counted; a
choice that differs by more than a tolerance stays as it is, and shows.

Legend: B rows, T positions, V vocabulary, H hidden size, N = B * T tokens, E experts, K experts per token.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from qwen3conv.converters.errors import VerifyError

from .parity_models import Checkpoint, Opened, Router, Routing, Side, open_model

if TYPE_CHECKING:
    import torch


class Run(NamedTuple):
    """What one checkpoint computes for given tokens. Tensors are on the CPU, floating point in fp32."""

    side: Side
    states: dict[str, torch.Tensor]
    """Hidden states (B, T, H) by place, in order."""
    logits: torch.Tensor
    """(B, T, V)."""
    routings: tuple[Routing, ...]
    """Where the tokens of each MoE layer went; empty if dense, or if a trained bias steers them."""
    ties: int
    """Choices that were taken from another run."""


def run(
    checkpoint: Checkpoint,
    ids: torch.Tensor,
    dtype: str,
    device: str,
    follow: Sequence[Routing] = (),
    tolerance: float = 0.0,
) -> Run:
    """Open ``checkpoint``, run it on ``ids`` (B, T), and let go of it.

    ``follow`` is another run's ``routings``: choices that tie with theirs, within ``tolerance`` of the score, are made
    alike. Raises what ``open_model`` raises, and ``VerifyError`` when infinities or NaN come out.
    """
    import torch

    from qwen3conv.training.devices import choose_device

    choose_device(device.partition(":")[0])
    opened = open_model(checkpoint, getattr(torch, dtype), device, ids.shape[1])
    on_device = ids.to(device)
    positions = torch.arange(ids.shape[1], device=device).expand_as(on_device)
    states: dict[str, torch.Tensor] = {}
    with torch.inference_mode(), warnings.catch_warnings():
        # torchtitan asks for fp32 autocast around the router; a CPU declines, and the router has its weights' dtype.
        warnings.filterwarnings("ignore", message=".*autocast.*")
        with _kept_states(opened, states), _routed(checkpoint, opened.routers, follow, tolerance) as (routings, ties):
            logits = _host(opened.forward(on_device, positions))
    ordered = {place: states[place] for place in opened.places}
    side = opened.side
    del opened
    gc.collect()
    for place, state in {**ordered, "logits": logits}.items():
        if not bool(state.isfinite().all()):
            raise VerifyError(f"{checkpoint.folder}: {place} holds infinities or NaN, so there is nothing to compare")
    return Run(side, ordered, logits, tuple(routings), sum(ties))


@contextmanager
def _kept_states(opened: Opened, states: dict[str, torch.Tensor]) -> Iterator[None]:
    """While open, ``states`` gets what each place puts out, as fp32 on the CPU."""

    def keep(place: str) -> Callable[[Any, Any, Any], None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            states[place] = _host(output[0] if isinstance(output, tuple) else output)

        return hook

    handles = [module.register_forward_hook(keep(place)) for place, module in opened.places.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _routed(
    checkpoint: Checkpoint, routers: Sequence[Router], follow: Sequence[Routing], tolerance: float
) -> Iterator[tuple[list[Routing], list[int]]]:
    """While open, the two lists get each layer's routing, and how many of its tokens go as in ``follow`` for a tie."""
    routings: list[Routing] = []
    ties: list[int] = []
    normalize = bool(checkpoint.config.norm_topk_prob)

    def attach(router: Router, other: Routing | None) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> Any:
            routing = router.read(output)
            if other is not None:
                there = Routing(*(tensor.to(routing.experts.device) for tensor in other))
                routing, count = _settle_ties(routing, there, normalize, tolerance)
                ties.append(count)
                output = router.write(output, routing) if count else output
            routings.append(Routing(*(tensor.cpu() for tensor in routing)))
            return output

        return router.module.register_forward_hook(hook)

    others = follow if len(follow) == len(routers) else [None] * len(routers)
    handles = [attach(router, other) for router, other in zip(routers, others, strict=True)]
    try:
        yield routings, ties
    finally:
        for handle in handles:
            handle.remove()


def _settle_ties(here: Routing, there: Routing, normalize: bool, tolerance: float) -> tuple[Routing, int]:
    """``here`` with the experts of ``there`` for the tokens whose two choices are a tie; and how many those are.

    A tie: on both sides, the experts that only the other side chose score as high as the lowest chosen one, within
    ``tolerance`` of that score. Weights follow from the scores here.
    """
    import torch

    differs = (here.experts.sort(-1).values != there.experts.sort(-1).values).any(-1)
    tie = differs & _scores_as_high(here, there.experts, tolerance) & _scores_as_high(there, here.experts, tolerance)
    weights = here.scores.gather(-1, there.experts)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    row = tie.unsqueeze(-1)
    experts = torch.where(row, there.experts, here.experts)
    weights = torch.where(row, weights.to(here.weights.dtype), here.weights)
    return Routing(here.scores, experts, weights), int(tie.sum())


def _scores_as_high(routing: Routing, experts: torch.Tensor, tolerance: float) -> torch.Tensor:
    lowest = routing.scores.gather(-1, routing.experts).amin(-1)
    return routing.scores.gather(-1, experts).amin(-1) >= lowest * (1 - tolerance)


def _host(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    # A copy even where nothing changes: a later layer may write into its input.
    return tensor.detach().to("cpu", torch.float32, copy=True)
