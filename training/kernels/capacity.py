"""Whether shapes fit the NKI kernels, before a launch: rules of shape and reach, bytes of SBUF, banks of PSUM.

The bytes are those of the tiles that ``nki_forward`` and ``nki_backward`` allocate, all of which live through their
loop over blocks; tests hold them against what the emulator measures. The kernels were never compiled for or run on
hardware: what the compiler adds, such as alignment and spills, is not in them.

Limits: trn2, AWS Neuron 2.32 documentation (NKI 0.6.0, ``nl.tile_size``); what is kept free of SBUF is what nkilib's
planners of Neuron 2.29 keep free; a run-time address of 32 bits reaches 4 GiB (NKI 0.7, ``nisa.scalar_load``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from qwen3conv.converters.errors import enumerate_problems

from .errors import KernelError
from .padding import num_blocks

PARTITIONS, BANK_COLUMNS = 128, 512
SBUF_BYTES = 224 * 1024 - 16384 - 8 - 520
"""Usable bytes per partition."""
PSUM_BANKS = 8
REACH_BYTES = 2**32
"""How far a run-time offset addresses into one tensor; a compile-time one, 31 bits of elements, reaches no less."""
BLOCKS = (128, 256, 512)
_GROUP = BANK_COLUMNS // PARTITIONS
_FP32 = 4

Choice = TypeVar("Choice", bool, int)


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """One layer's experts on one device, and how they are launched."""

    rows: int
    """R: tokens times experts per token, for the experts that this device holds."""
    hidden: int
    inner: int
    experts: int
    block: int = 128
    lnc: int = 2
    itemsize: int = 2
    """Bytes of an element of x and the weights: 2 for bf16, 4 for fp32."""
    scaled: bool = False
    """Whether rows are multiplied by an affinity inside."""

    @property
    def blocks(self) -> int:
        """N, of ``schedule.schedule_blocks``."""
        return num_blocks(self.rows, self.experts, self.block, least=1)

    @property
    def width(self) -> int:
        """Columns of I per core."""
        return self.inner // self.lnc

    def __str__(self) -> str:
        kind = {2: "bf16", 4: "fp32"}.get(self.itemsize, f"{self.itemsize} bytes")
        return (
            f"H {self.hidden}, I {self.inner}, {self.experts} experts, {self.rows} rows, "
            f"B {self.block}, LNC {self.lnc}, {kind}"
        )


class Budget(NamedTuple):
    """What one kernel takes of the memory on the chip."""

    tiles: dict[str, int]
    """Bytes per partition by tile."""
    psum_banks: int

    @property
    def sbuf_bytes(self) -> int:
        """Bytes per partition of all tiles."""
        return sum(self.tiles.values())


class Fit(NamedTuple):
    """How the kernels run a shape."""

    resident: bool
    """Forward: one expert's weights stay in SBUF; otherwise they are streamed for every block."""
    forward: Budget
    chunk: int
    """Backward: columns of I per pass."""
    backward: Budget


def forward_budget(shape: ExpertShape, *, resident: bool) -> Budget:
    """The tiles of ``nki_forward``."""
    size, hidden = shape.itemsize, shape.hidden
    k, m, b = hidden // PARTITIONS, shape.width // PARTITIONS, shape.block // PARTITIONS
    m_kept, k_kept = (m, k) if resident else (min(2, m), min(2 * _GROUP, k))
    out = size if shape.lnc == 1 else _FP32
    tiles = {
        "gate and up": 2 * m_kept * hidden * size,
        "down": k_kept * shape.width * size,
        "x transposed": k * shape.block * size,
        "rows of x": min(2, b) * hidden * size,
        "h transposed": m * shape.block * size,
        "silu": min(2, m) * shape.block * _FP32,
        "gate and up transposed": 2 * hidden * size,
        "down transposed": min(2, m) * BANK_COLUMNS * size,
        "rows of y": min(2, b) * BANK_COLUMNS * out,
        "expert, slots, affinity": _FP32 * (1 + b + (b if shape.scaled else 0)),
    }
    return Budget(tiles, psum_banks=4 + 2)


def backward_budget(shape: ExpertShape, *, chunk: int) -> Budget:
    """The tiles of ``nki_backward`` in its fullest pass."""
    size, hidden = shape.itemsize, shape.hidden
    k, b, passes = hidden // PARTITIONS, shape.block // PARTITIONS, shape.width // chunk
    strips = min(2, -(-hidden // BANK_COLUMNS))
    out = size if shape.lnc * passes == 1 else _FP32
    tiles = {
        "gate, up and down": 3 * k * chunk * size,
        "weight gradients": 3 * k * chunk * _FP32,
        "gate and up transposed": 2 * k * chunk * size,
        "rows of x and dy": 2 * b * hidden * size,
        "x and dy transposed": 2 * hidden * size,
        "activations": (3 if shape.scaled else 2) * chunk * _FP32,
        "h, dg and du": 3 * b * chunk * size,
        "dg and du transposed": 2 * chunk * size,
        "rows of dx": strips * BANK_COLUMNS * out * (2 if passes > 1 else 1),
        "experts, keep, slots": _FP32 * (3 + b),
    }
    if shape.scaled:
        tiles["affinity and its gradient"] = _FP32 * (1 + b * (2 if passes > 1 else 1))
    return Budget(tiles, psum_banks=5 + 2)


def chunks(shape: ExpertShape) -> Iterator[int]:
    """The widths that the backward kernel's passes may have, widest first."""
    for width in range(BANK_COLUMNS, 0, -PARTITIONS):
        if shape.width % width == 0:
            yield width


def fit(shape: ExpertShape) -> Fit:
    """How the kernels run ``shape``; raises KernelError naming every limit that it breaks, and what to do."""
    problems = list(_rules(shape))
    if not problems:
        forward = _first_fitting({kept: forward_budget(shape, resident=kept) for kept in (True, False)})
        backward = _first_fitting({chunk: backward_budget(shape, chunk=chunk) for chunk in chunks(shape)})
        if not isinstance(forward, Budget) and not isinstance(backward, Budget):
            return Fit(*forward, *backward)
        for kernel, found in (("forward", forward), ("backward", backward)):
            if isinstance(found, Budget):
                problems.append(f"the {kernel} kernel {_overflow(found)}; {_smaller(shape, kernel)}")
    raise KernelError(enumerate_problems(f"the NKI expert kernels cannot run {shape}:", problems))


def choose_block(shape: ExpertShape) -> ExpertShape:
    """``shape`` with the block size, of those that fit, for which the Tensor engine passes the fewest columns.

    Per weight tile of 128 x 128 and block in use: 3 B in the forward and 8 B in the backward pass, and 128 for each of
    five transposes. Blocks in use: an expert's last is half full on average. Raises KernelError as ``fit`` does where
    no block size fits.
    """
    fitting = [candidate for candidate in (replace(shape, block=block) for block in BLOCKS) if _fits(candidate)]
    if not fitting:
        fit(replace(shape, block=BLOCKS[0]))
    return min(fitting, key=_columns)


def _columns(shape: ExpertShape) -> float:
    used = max(shape.experts, shape.rows / shape.block + shape.experts / 2)
    return used * (11 * shape.block + 5 * PARTITIONS)


def _fits(shape: ExpertShape) -> bool:
    try:
        fit(shape)
    except KernelError:
        return False
    return True


def _first_fitting(budgets: dict[Choice, Budget]) -> tuple[Choice, Budget] | Budget:
    """The first choice that fits, with its budget; the last budget alone where none does."""
    for choice, budget in budgets.items():
        if budget.sbuf_bytes <= SBUF_BYTES:
            return choice, budget
    return budget


def _overflow(budget: Budget) -> str:
    largest = sorted(budget.tiles.items(), key=lambda tile: -tile[1])[:3]
    named = ", ".join(f"{name} {amount}" for name, amount in largest)
    return f"needs {budget.sbuf_bytes} bytes of SBUF per partition and has {SBUF_BYTES} (largest: {named})"


def _smaller(shape: ExpertShape, kernel: str) -> str:
    """What to do about a kernel that does not fit in its smallest tiling."""
    if shape.block > BLOCKS[0]:
        return f"use blocks of {BLOCKS[0]}"
    if shape.itemsize > 2:
        return "use bfloat16"
    if shape.lnc == 1 and kernel == "forward":
        return "launch for LNC 2"
    return "H is too large for it; train with torchtitan's own experts"


def _rules(shape: ExpertShape) -> Iterator[str]:
    if shape.block not in BLOCKS:
        yield f"B is {shape.block} and must be one of {', '.join(map(str, BLOCKS))}"
    if shape.lnc not in (1, 2):
        yield f"LNC is {shape.lnc} and must be 1 or 2 (NEURON_LOGICAL_NC_CONFIG)"
        return
    if shape.itemsize not in (2, 4):
        yield f"elements have {shape.itemsize} bytes; the kernels take bfloat16, float16 and float32"
    if shape.hidden < PARTITIONS or shape.hidden % PARTITIONS:
        yield f"H is {shape.hidden} and must be a multiple of {PARTITIONS}"
    step = PARTITIONS * shape.lnc
    if shape.inner < step or shape.inner % step:
        hint = "" if shape.lnc == 1 else f": each of the {shape.lnc} cores takes a part of I in tiles of {PARTITIONS}"
        yield f"I is {shape.inner} and must be a multiple of {step}{hint}; shard I over fewer devices"
    if shape.block not in BLOCKS:
        return
    weight = shape.experts * shape.hidden * shape.inner * shape.itemsize
    if weight > REACH_BYTES:
        yield (
            f"the gate weights of {shape.experts} experts take {weight} bytes, and a run-time offset reaches "
            f"{REACH_BYTES}; put the experts on more devices (expert parallelism)"
        )
    elements = shape.lnc * shape.blocks * shape.block * shape.hidden
    if elements * _FP32 > REACH_BYTES:
        yield (
            f"the rows of all slots take {elements * _FP32} bytes, and a run-time offset reaches {REACH_BYTES}; "
            "give a step fewer tokens per device"
        )
