"""What one MoE layer costs in a blockwise expert kernel on trn2, by arithmetic: no number here was measured.

Legend: T tokens, k experts per token, R = T * k rows, E experts, D hidden size, F expert hidden size, B rows per block,
N blocks, LNC physical cores per logical one. On LNC 2 each core computes half of F, for all rows. All counts are of one
physical core, the busier one's, unless they say otherwise.

The bound is the time that the busiest of three parts cannot do without, if the other two hide behind it entirely:
the Tensor engine, HBM, and the queues that issue DMAs. A kernel that reaches it is perfect; none does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .padding import expected_routing, num_blocks

TILE = 128
"""Partitions of SBUF and PSUM: rows of one matmul's stationary operand."""

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

BLOCKS = (128, 256, 512)
"""Block sizes to choose from."""

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


@dataclass(frozen=True, slots=True)
class Design:
    """What a kernel does that decides its costs."""

    reload: Literal["expert", "block"] = "expert"
    """Weights are read once per expert that has rows, or again for every block."""
    skips_empty: bool = False
    """Blocks that hold no row are left out when it runs; otherwise all N of the static plan are computed."""
    transposes_weights: bool = True
    """Weights come as torchtitan stores them, (F, D) and (D, F), and the kernel turns the tiles that it needs turned;
    otherwise it is given turned copies of those, too."""


class Work(NamedTuple):
    """What one core does."""

    macs: float = 0
    """Multiply-adds of the products, padding rows included."""
    transpose_macs: float = 0
    """Multiply-adds that the Tensor engine could have done while it transposed: 128 for each element."""
    weights_read: float = 0
    rows_read: float = 0
    """Bytes gathered: rows, their gradients, and which row and expert a slot and a block have."""
    rows_written: float = 0
    gradients_written: float = 0
    """Bytes of weight gradients."""
    dmas: float = 0
    """``dma_copy`` instructions."""

    def times(self, factor: float) -> Work:
        """This, ``factor`` times over."""
        return Work(*(factor * value for value in self))

    def plus(self, other: Work) -> Work:
        """Both."""
        return Work(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def hbm_bytes(self) -> float:
        """Read and written."""
        return self.weights_read + self.rows_read + self.rows_written + self.gradients_written


def block_work(layer: Layer, kind: Pass, block: int, lnc: int) -> Work:
    """One block of B rows, weights aside. The backward computes gate and up again: 8 products of B x D x F to 3."""
    part, tiles = layer.expert_hidden / lnc, block / TILE
    row_bytes, index_bytes = block * layer.hidden * layer.width, 4 * block + 4
    products = (3 if kind == "forward" else 8) * block * layer.hidden * part
    if kind == "forward":
        # x is turned; the products leave gate, up and hidden in the orientation that the next one takes.
        return Work(
            products, TILE * block * layer.hidden, 0, row_bytes + index_bytes, row_bytes, 0, 1 + 3 * tiles
        )
    # x and dy are turned, and the gradients of gate and up and the hidden rows, which are wanted both ways.
    turned = 2 * block * layer.hidden + 3 * block * part
    return Work(products, TILE * turned, 0, 2 * row_bytes + index_bytes, row_bytes, 0, 1 + 4 * tiles)


def load_work(layer: Layer, kind: Pass, lnc: int, design: Design) -> Work:
    """One expert's weights, read once."""
    part = layer.expert_hidden / lnc
    matrix, tiles_d, tiles_f = layer.hidden * part, layer.hidden / TILE, part / TILE
    turned = 3 if kind == "forward" else 2  # matrices wanted turned: all, or gate and up to compute them again
    straight = 0 if kind == "forward" else 3
    if design.transposes_weights:
        return Work(0, TILE * turned * matrix, 3 * matrix * layer.width, dmas=2 * tiles_f + tiles_d)
    dmas = 2 * tiles_d + (tiles_f if kind == "forward" else 2 * tiles_f + tiles_d)
    return Work(0, 0, (turned + straight) * matrix * layer.width, dmas=dmas)


def gradient_work(layer: Layer, lnc: int) -> Work:
    """One expert's weight gradients, summed on the chip and written once in fp32."""
    part = layer.expert_hidden / lnc
    written = 3 * layer.hidden * part * 4
    return Work(gradients_written=written, dmas=2 * part / TILE + layer.hidden / TILE)


@dataclass(frozen=True, slots=True)
class Estimate:
    """One pass of a layer with one block size, on one logical core of ``lnc`` physical ones."""

    kind: Pass
    block: int
    lnc: int
    blocks: float
    """Blocks computed."""
    useful_flops: float
    """Of the whole logical core: what the mathematics asks for, without padding, transposes or computing again."""
    flops: float
    """Of the whole logical core: all products, with padding rows and what the backward computes again."""
    core: Work
    """Of each of its physical cores."""
    width: int

    @property
    def seconds(self) -> dict[str, float]:
        """What each part needs, at its peak."""
        return {
            "tensor engine": 2 * (self.core.macs + self.core.transpose_macs) / TENSOR_FLOPS[self.width],
            "hbm": self.core.hbm_bytes / HBM_BYTES,
            "dma issue": self.core.dmas * DMA_ISSUE_SECONDS / DMA_QUEUES,
        }

    @property
    def bound(self) -> str:
        """The part that decides."""
        return max(self.seconds, key=lambda part: self.seconds[part])

    @property
    def bound_seconds(self) -> float:
        """No kernel of this design takes less."""
        return self.seconds[self.bound]

    @property
    def intensity(self) -> float:
        """FLOPs per byte of HBM traffic. From ``ridge`` upwards the Tensor engine can be the bound."""
        return 2 * self.core.macs / self.core.hbm_bytes

    @property
    def peak_share(self) -> float:
        """Useful FLOP/s at the bound, of the Tensor engines' peak: no kernel of this design can do better."""
        return self.useful_flops / (self.bound_seconds * self.lnc * TENSOR_FLOPS[self.width])


def ridge(width: int) -> float:
    """FLOPs per byte at which a core's Tensor engine and its HBM take equally long."""
    return TENSOR_FLOPS[width] / HBM_BYTES


def estimate(layer: Layer, kind: Pass, block: int, lnc: int, design: Design) -> Estimate:
    """Costs of one pass: of all N blocks; where empty ones are skipped, of those that uniform routing needs."""
    usual = expected_routing(layer.tokens, layer.top_k, layer.experts, block)
    blocks = usual.blocks if design.skips_empty else num_blocks(layer.rows, layer.experts, block)
    loads = blocks if design.reload == "block" else usual.experts
    core = block_work(layer, kind, block, lnc).times(blocks).plus(load_work(layer, kind, lnc, design).times(loads))
    if kind == "backward":
        core = core.plus(gradient_work(layer, lnc).times(layer.experts))
    once = 2 * layer.rows * layer.hidden * layer.expert_hidden
    useful = once * (3 if kind == "forward" else 6)
    return Estimate(kind, block, lnc, blocks, useful, 2 * core.macs * lnc, core, layer.width)


class Padding(NamedTuple):
    """Computed rows over routed rows."""

    worst: float
    """With all N blocks, which a static plan always has."""
    expected: float
    """With the blocks that uniform routing needs on average."""


def padding(layer: Layer, block: int) -> Padding:
    """What whole blocks cost."""
    usual = expected_routing(layer.tokens, layer.top_k, layer.experts, block)
    worst = num_blocks(layer.rows, layer.experts, block)
    return Padding(worst * block / layer.rows, usual.blocks * block / layer.rows)


class Choice(NamedTuple):
    """The block size to train with on a logical core of ``lnc`` physical ones, and why."""

    block: int
    reason: str


def choose(layer: Layer, lnc: int, design: Design) -> Choice:
    """The block size with the least bound for forward and backward together, the smaller one of equals."""
    passes = {block: [estimate(layer, kind, block, lnc, design) for kind in PASSES] for block in BLOCKS}
    total = {block: sum(one.bound_seconds for one in both) for block, both in passes.items()}
    best = min(BLOCKS, key=lambda block: (total[block], block))
    bounds = ", ".join(f"{one.kind} by the {one.bound}" for one in passes[best])
    others = ", ".join(f"{total[block] * 1e3:.1f} ms with {block}" for block in BLOCKS if block != best)
    rows = layer.rows / layer.experts
    return Choice(
        best,
        f"{rows:,.0f} rows per expert on average; {total[best] * 1e3:.1f} ms at least, {bounds}; {others}",
    )
