"""What one MoE layer costs in a blockwise expert kernel on trn2, by arithmetic: no number here was measured.

The counts are those of ``nki_forward`` and ``nki_backward``: tests hold them against what the emulator counts. Rows are
taken as routed uniformly; affinities stay outside. Legend: T tokens, k experts per token, R = T * k rows, E experts, H
hidden size, I intermediate size, B rows per block, LNC physical cores per logical one, each with half of I on LNC 2.

The bound is the time that the busiest of three parts cannot do without, if the other two hide behind it entirely:
the Tensor engine, HBM, and the queues that issue DMAs. A kernel that reaches it is perfect; none does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .capacity import BANK_COLUMNS, BLOCKS, PARTITIONS, ExpertShape, Fit, fit
from .errors import KernelError
from .padding import expected_blocks

TENSOR_FLOPS: Mapping[int, float] = {2: 79e12, 4: 20e12}
"""Dense FLOP/s of a NeuronCore-v3's Tensor engine by bytes per element. Source: AWS Neuron documentation,
about-neuron/arch/neuron-hardware/neuron-core-v3 (bf16 79 TFLOPS); fp32 is a quarter, 181 of trainium2's eight cores."""

HBM_BYTES = 2.9e12 / 8
"""Bytes/s of one core: a chip's bandwidth in equal parts. Source: AWS Neuron documentation,
about-neuron/arch/neuron-hardware/trainium2 (2.9 TB/s, eight cores). A core's 16 DMA engines of 27.2 GB/s move more."""

DMA_ISSUE_SECONDS = 600e-9
"""Seconds that a queue spends on issuing one DMA. Source: AWS Neuron documentation, NKI architecture guide of trn2
(descriptors made by hardware)."""

DMA_QUEUES = 2
"""Engines that issue DMAs with descriptors made by hardware: Sync and Scalar. Source: NKI 0.6.0, ``nisa.dma_copy``."""

Pass = Literal["forward", "backward"]
PASSES: tuple[Pass, ...] = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes of one MoE layer and of the tokens that one device gives it at a time."""

    hidden: int
    expert_hidden: int
    experts: int
    top_k: int
    tokens: int
    width: int = 2
    """Bytes per element of rows and weights: 2 for bf16, 4 for fp32."""

    @property
    def rows(self) -> int:
        """Pairs of a token and one of its experts."""
        return self.tokens * self.top_k

    def shape(self, block: int, lnc: int) -> ExpertShape:
        """As the kernels see it."""
        return ExpertShape(self.rows, self.hidden, self.expert_hidden, self.experts, block, lnc, self.width)


SHAPES: Mapping[str, Layer] = {
    "30B-A3B": Layer(2048, 768, 128, 8, 4096),
    "235B-A22B": Layer(4096, 1536, 128, 8, 4096),
    "Coder-480B": Layer(6144, 2560, 40, 8, 4096),
    "study": Layer(2048, 768, 64, 4, 4096),
}
"""Layers of the released MoE sizes and of ``layouts.STUDY``. Of Coder-480B's 160 experts a quarter, with the rows that
four expert-parallel ranks of as many tokens send it: all on one device are past what a run-time address reaches."""


class Work(NamedTuple):
    """What one physical core does."""

    macs: float = 0
    """Multiply-adds of the products, padding rows included."""
    transposed: float = 0
    """Elements that the Tensor engine transposes: it could do 128 multiply-adds in the time of each."""
    weights_read: float = 0
    rows_read: float = 0
    """Bytes of gathered rows, their gradients, partial sums, and the tables that say what a block and a slot are."""
    rows_written: float = 0
    gradients_written: float = 0
    """Bytes of weight gradients."""
    dmas: float = 0
    """``dma_copy`` instructions, those included that find nothing to do."""

    def plus(self, other: Work, times: float = 1) -> Work:
        """This, and the other so often."""
        return Work(*(mine + times * theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def hbm_bytes(self) -> float:
        """Read and written."""
        return self.weights_read + self.rows_read + self.rows_written + self.gradients_written


def forward_work(shape: ExpertShape, used: float, resident: bool) -> Work:
    """Of ``used`` blocks, with every expert's weights read once if ``resident``, else for every block."""
    k, m, b, f, row_bytes = _tiles(shape, shape.width)
    weights = 3 * shape.hidden * shape.width * shape.itemsize
    written = shape.block * shape.hidden * (shape.itemsize if shape.lnc == 1 else 4)
    block = Work(
        macs=3 * shape.block * shape.hidden * shape.width,
        transposed=(k * b + 3 * k * m) * PARTITIONS**2,
        rows_read=row_bytes + 4 * shape.block + 4,
        rows_written=written,
        dmas=1 + 2 * b + f * b + (3 if resident else 2 * m + f),
    )
    loads = shape.experts if resident else used
    return Work(weights_read=loads * weights, rows_read=4, dmas=1).plus(block, used)


def backward_work(shape: ExpertShape, used: float, chunk: int) -> Work:
    """Of ``used`` blocks in each pass over ``chunk`` columns of I. It computes gate and up again: 8 products, not 6."""
    k, m, b, f, row_bytes = _tiles(shape, chunk)
    passes = shape.width // chunk
    matrices = 3 * shape.experts * shape.hidden * chunk * shape.itemsize
    sums = shape.block * shape.hidden * (shape.itemsize if shape.lnc * passes == 1 else 4)
    block = Work(
        macs=8 * shape.block * shape.hidden * chunk,
        transposed=2 * (m * k + k * b + m * b) * PARTITIONS**2,
        rows_read=2 * row_bytes + 4 * (shape.block + PARTITIONS + 2),
        rows_written=sums,
        dmas=9 + 3 * b + f * b,
    )
    again = Work(rows_read=sums, dmas=f * b)  # what earlier passes summed
    one = Work(weights_read=matrices, rows_read=4, gradients_written=matrices, dmas=1).plus(block, used)
    return Work().plus(one, passes).plus(again, used * (passes - 1))


def _tiles(shape: ExpertShape, columns: int) -> tuple[int, int, int, int, int]:
    """Tiles of 128 of H, of the columns of I, and of B; strips of 512 of H; bytes of a block's rows."""
    strips = -(-shape.hidden // BANK_COLUMNS)
    row_bytes = shape.block * shape.hidden * shape.itemsize
    return shape.hidden // PARTITIONS, columns // PARTITIONS, shape.block // PARTITIONS, strips, row_bytes


@dataclass(frozen=True, slots=True)
class Estimate:
    """One pass of a layer with one block size, on one logical core."""

    kind: Pass
    shape: ExpertShape
    used: float
    """Blocks that uniform routing uses on average, all of which are computed."""
    fit: Fit
    core: Work
    """Of each physical core."""

    @property
    def useful_flops(self) -> int:
        """Of the logical core: what the mathematics asks for, without padding, transposes or computing again."""
        return (6 if self.kind == "forward" else 12) * self.shape.rows * self.shape.hidden * self.shape.inner

    @property
    def flops(self) -> float:
        """Of the logical core: all products, with padding rows and what the backward computes again."""
        return 2 * self.core.macs * self.shape.lnc

    @property
    def seconds(self) -> dict[str, float]:
        """What each part needs, at its peak."""
        return {
            "tensor engine": 2 * (self.core.macs + PARTITIONS * self.core.transposed) / self._peak,
            "hbm": self.core.hbm_bytes / HBM_BYTES,
            "dma issue": self.core.dmas * DMA_ISSUE_SECONDS / DMA_QUEUES,
        }

    @property
    def bound(self) -> str:
        """The part that decides."""
        return max(self.seconds, key=lambda part: self.seconds[part])

    @property
    def bound_seconds(self) -> float:
        """These kernels take no less."""
        return self.seconds[self.bound]

    @property
    def intensity(self) -> float:
        """FLOPs per byte of HBM traffic. Above ``ridge`` the products take longer than the traffic."""
        return 2 * self.core.macs / self.core.hbm_bytes

    @property
    def peak_share(self) -> float:
        """Useful FLOP/s at the bound, of the Tensor engines' peak: what these kernels can reach at most."""
        return self.useful_flops / (self.bound_seconds * self.shape.lnc * self._peak)

    @property
    def _peak(self) -> float:
        return TENSOR_FLOPS[self.shape.itemsize]


def ridge(width: int) -> float:
    """FLOPs per byte at which a core's Tensor engine and its HBM take equally long."""
    return TENSOR_FLOPS[width] / HBM_BYTES


def estimate(layer: Layer, kind: Pass, block: int, lnc: int) -> Estimate:
    """Costs of one pass; raises KernelError where the kernels do not take the shape."""
    shape = layer.shape(block, lnc)
    fitted = fit(shape)
    used = expected_blocks(layer.tokens, layer.top_k, layer.experts, block)
    core = forward_work(shape, used, fitted.resident) if kind == "forward" else backward_work(shape, used, fitted.chunk)
    return Estimate(kind, shape, used, fitted, core)


class Padding(NamedTuple):
    """Computed rows over routed rows."""

    worst: float
    """Of the static plan, when all its blocks are used."""
    expected: float
    """Of uniform routing, on average."""


def padding(layer: Layer, block: int) -> Padding:
    """What whole blocks cost, and a block for every expert."""
    used = expected_blocks(layer.tokens, layer.top_k, layer.experts, block)
    return Padding(layer.shape(block, 1).blocks * block / layer.rows, used * block / layer.rows)


class Choice(NamedTuple):
    """The block size with the least bound on a logical core, and why."""

    block: int
    reason: str


def estimates(layer: Layer, lnc: int) -> dict[int, list[Estimate]]:
    """Forward and backward by block size, of those that fit; raises KernelError where none does."""
    found, refused = {}, None
    for block in BLOCKS:
        try:
            found[block] = [estimate(layer, kind, block, lnc) for kind in PASSES]
        except KernelError as error:
            refused = refused or error
    if not found and refused is not None:
        raise refused
    return found


def choose(layer: Layer, lnc: int) -> Choice:
    """The block size with the least bound for forward and backward together, the smaller one of equals."""
    passes = estimates(layer, lnc)
    total = {block: sum(one.bound_seconds for one in both) for block, both in passes.items()}
    best = min(total, key=lambda block: (total[block], block))
    bounds = ", ".join(f"{one.kind} bound by {one.bound}" for one in passes[best])
    others = [
        f"{total[block] * 1e3:.1f} ms with {block}" if block in total else f"{block} does not fit"
        for block in BLOCKS
        if block != best
    ]
    rows = layer.rows / layer.experts
    return Choice(
        best, f"at {rows:,.0f} rows per expert {total[best] * 1e3:.1f} ms ({bounds}), against {' and '.join(others)}"
    )
