"""Logits of two checkpoints on the same tokens, each computed by the library that its format belongs to.

A Hugging Face folder runs in transformers, a torchtitan DCP folder in torchtitan's own Qwen3. One model is in memory at
a time. Ties between experts are decided alike on both sides, see ``parity_runs``.

Legend: B rows, T positions, V vocabulary, N = B * T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qwen3conv.converters.errors import MappingError, PolicyError, SourceError, enumerate_problems

from .parity_models import Checkpoint, Side, recognize
from .parity_runs import Run, run

if TYPE_CHECKING:
    import torch

TOLERANCE: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 2.5e-1, "float16": 5e-2}
"""Default ``atol`` by dtype, for ``Difference.relative``.

Measured between the two libraries on random models of 3 and 16 layers whose weights are wide (std 0.12): in float32
2e-6 to 6e-6 dense and 1e-6 to 1.3e-4 MoE; dense in bfloat16 up to 1.2e-1, in float16 up to 2e-2. Weights rounded to
bfloat16 show as 1e-2 or more. In 16 bits only gross damage shows, and a deep MoE goes its own ways: use float32 to
decide whether two checkpoints are the same model."""


class Difference(NamedTuple):
    """How far apart the two sides are at one place of the model."""

    place: str
    """``"embeddings"``, ``"layer 3"``, ``"final norm"`` or ``"logits"``."""
    max_abs: float
    """Largest absolute difference."""
    relative: float
    """Largest, over tokens, of the token's ``max_abs`` divided by the largest magnitude in its vector (at least 1)."""


@dataclass(frozen=True, slots=True)
class ParityReport:
    """What ``compare`` found. ``max_abs``, ``mean_abs``, ``kl`` and ``top1`` are about logits."""

    max_abs: float
    mean_abs: float
    kl: float
    """Mean over positions of KL(first || second), in nats."""
    top1: float
    """Share of positions, 0 to 1, whose most likely token is the same."""
    first_divergence: str | None
    """The first place whose ``relative`` difference exceeds ``tolerance``; ``None`` when none does."""
    per_layer: tuple[Difference, ...]
    """All places in the order in which they are computed, logits last."""
    routing_ties: int
    """Choices of experts, of N per MoE layer, that were ties within ``tolerance`` and follow the first side."""
    tolerance: float
    dtype: str
    device: str
    tokens: tuple[int, int]
    """Rows and positions that were compared."""
    sides: tuple[Side, Side]
    config_differences: tuple[str, ...]
    """Values that change the maths and are not the same in the two configs, such as ``rope_theta: 1e6 and 5e6``."""

    @property
    def agrees(self) -> bool:
        """Whether the two sides stay within the tolerance everywhere."""
        return self.first_divergence is None

    def to_json(self) -> dict[str, Any]:
        """The report as JSON types; ``per_layer`` becomes a list of objects."""
        plain = asdict(self)
        plain["per_layer"] = [difference._asdict() for difference in self.per_layer]
        return {"agrees": self.agrees, **plain}


def compare(
    a: Path,
    b: Path,
    *,
    config_a: Path | None = None,
    config_b: Path | None = None,
    dtype: str = "float32",
    tokens: int = 64,
    batch: int = 2,
    seed: int = 0,
    prompt: str | None = None,
    atol: float | None = None,
    device: str = "cpu",
) -> ParityReport:
    """Run ``a`` and ``b`` on the same tokens and say where, and by how much, they differ.

    ``tokens`` random ids in each of ``batch`` rows, drawn with ``seed``; or the tokens of ``prompt`` in one row, by the
    tokenizer.json of whichever folder has one. Positions count from 0, attention is causal, RoPE is computed in fp32.
    ``config_a``/``config_b``: a config.json, or a folder with one, in place of the folder's own. ``atol`` is what
    ``Difference.relative`` may be, by default ``TOLERANCE[dtype]``.

    Only ``device="cpu"`` has been run; other devices that torch offers take the same path, unproven.

    Raises:
        SourceError: a folder cannot be loaded whole and safely.
        MappingError: names or shapes are not the model's, or the two models have different sizes.
        PolicyError: an argument cannot be met.
        VerifyError: a side computes infinities or NaN.
        MissingPackageError: the ``[train]`` extra, or the device, is missing.
    """
    from qwen3conv.converters.config import compare_maths

    _check_dtype(dtype)
    tolerance = TOLERANCE[dtype] if atol is None else atol
    if not tolerance >= 0:
        raise PolicyError(f"atol must be 0 or more, not {atol}")
    first, second = recognize(a, config_a), recognize(b, config_b)
    _check_same_sizes(first, second)
    ids = _encode(prompt, first, second) if prompt is not None else _draw(first, tokens, batch, seed)
    for checkpoint in (first, second):
        _check_tokens(checkpoint, ids)
    run_a = run(first, ids, dtype, device)
    follow = run_a.routings if _route_alike(first, second) else ()
    run_b = run(second, ids, dtype, device, follow, tolerance)
    differences = [_difference(place, state, run_b.states[place]) for place, state in run_a.states.items()]
    differences.append(_difference("logits", run_a.logits, run_b.logits))
    apart = (difference.place for difference in differences if not difference.relative <= tolerance)
    return ParityReport(
        max_abs=differences[-1].max_abs,
        mean_abs=float((run_a.logits - run_b.logits).abs().mean()),
        kl=_kl(run_a.logits, run_b.logits),
        top1=float((run_a.logits.argmax(-1) == run_b.logits.argmax(-1)).float().mean()),
        first_divergence=next(apart, None),
        per_layer=tuple(differences),
        routing_ties=run_b.ties,
        tolerance=tolerance,
        dtype=dtype,
        device=device,
        tokens=(ids.shape[0], ids.shape[1]),
        sides=(run_a.side, run_b.side),
        config_differences=tuple(str(difference) for difference in compare_maths(first.config, second.config)),
    )


def compute(
    folder: Path,
    token_ids: Sequence[Sequence[int]],
    *,
    config: Path | None = None,
    dtype: str = "float32",
    device: str = "cpu",
) -> Run:
    """Logits and hidden states of one checkpoint for ``token_ids``, B rows of T ids. Errors as for ``compare``."""
    import torch

    _check_dtype(dtype)
    if len({len(row) for row in token_ids}) != 1:
        raise PolicyError("token_ids must be one or more rows of equal length")
    checkpoint, ids = recognize(folder, config), torch.tensor(token_ids, dtype=torch.long)
    _check_tokens(checkpoint, ids)
    return run(checkpoint, ids, dtype, device)


# -- what is asked -----------------------------------------------------------------------------------------------------


def _check_dtype(dtype: str) -> None:
    if dtype not in TOLERANCE:
        raise PolicyError(f"dtype must be one of {', '.join(TOLERANCE)}, not {dtype!r}")


def _check_same_sizes(first: Checkpoint, second: Checkpoint) -> None:
    """Refuse to compare models whose hidden states or logits have different shapes."""
    a, b = first.config.geometry, second.config.geometry
    problems = [
        f"{field}: {getattr(a, field)} and {getattr(b, field)}"
        for field in ("vocab_size", "hidden_size", "num_hidden_layers")
        if getattr(a, field) != getattr(b, field)
    ]
    if problems:
        raise MappingError(enumerate_problems(f"{first.folder} and {second.folder} are of different sizes:", problems))


def _route_alike(first: Checkpoint, second: Checkpoint) -> bool:
    """Whether both route to as many of as many experts, so that one side's choices mean something on the other."""
    a, b = first.config, second.config
    return (a.geometry.num_experts, a.num_experts_per_tok) == (b.geometry.num_experts, b.num_experts_per_tok)


def _check_tokens(checkpoint: Checkpoint, ids: torch.Tensor) -> None:
    vocab, longest = checkpoint.config.geometry.vocab_size, checkpoint.config.max_position_embeddings
    if ids.numel() == 0:
        raise PolicyError("there are no tokens to compute")
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise PolicyError(f"{checkpoint.folder}: token ids must lie in 0..{vocab - 1}; got {ids.min()}..{ids.max()}")
    if ids.shape[1] > longest:
        raise PolicyError(f"{checkpoint.folder}: {ids.shape[1]} positions exceed max_position_embeddings {longest}")


def _draw(checkpoint: Checkpoint, tokens: int, batch: int, seed: int) -> torch.Tensor:
    import torch

    if tokens < 1 or batch < 1:
        raise PolicyError(f"at least one token in one row is needed, not {tokens} tokens in {batch} rows")
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, checkpoint.config.geometry.vocab_size, (batch, tokens), generator=generator)


def _encode(prompt: str, *checkpoints: Checkpoint) -> torch.Tensor:
    import torch

    from qwen3conv.training.devices import require_packages

    require_packages("a prompt", "tokenizers")
    from tokenizers import Tokenizer

    folders = [place for c in checkpoints for place in (c.folder, c.folder / "hf_assets", c.config_path.parent)]
    path = next((place / "tokenizer.json" for place in folders if (place / "tokenizer.json").is_file()), None)
    if path is None:
        looked = ", ".join(str(place) for place in dict.fromkeys(folders))
        raise SourceError(f"a prompt needs a tokenizer.json; there is none in {looked}")
    try:
        ids = Tokenizer.from_file(str(path)).encode(prompt).ids
    except Exception as error:  # the tokenizers library raises bare Exception
        raise SourceError(f"{path}: {error}") from error
    return torch.tensor([ids], dtype=torch.long)


# -- comparing ---------------------------------------------------------------------------------------------------------


def _difference(place: str, a: torch.Tensor, b: torch.Tensor) -> Difference:
    gap = (a - b).abs().amax(-1)
    return Difference(place, float(gap.max()), float((gap / a.abs().amax(-1).clamp(min=1.0)).max()))


def _kl(a: torch.Tensor, b: torch.Tensor) -> float:
    """Mean of KL(softmax(a) || softmax(b)) over positions, in nats; fp64, one row at a time."""
    rows = (
        float((x.softmax(-1) * (x.log_softmax(-1) - y.log_softmax(-1))).sum(-1).mean())
        for x, y in ((x.double(), y.double()) for x, y in zip(a, b, strict=True))
    )
    return max(0.0, math.fsum(rows) / a.shape[0])
