"""NKI kernels of the experts' forward pass: rows of blocks in, rows of slots out.

These kernels were never compiled for or run on hardware; they run on the emulator of ``tools/nki_emulator`` only.

Legend: R routed rows sorted by expert, H hidden size, I intermediate size, E experts, N blocks of B slots, C cores of
the launch (LNC). Weights come in the orientation of Hugging Face: gate and up (E, I, H), down (E, H, I).

**Loop.** One ``nl.fori_loop`` over blocks, so the program does not grow with N, T or E. N is the worst case of all
routings; the loop ends, by a register, after the blocks that this one uses. The body is unrolled over the tiles of one
block; per core, with k = H / 128, m = I / C / 128, b = B / 128, f = ceil(H / 512), it has::

    nc_transpose  k b + 3 k m           x, and all three weights: each has its summed dimension on the wrong axis
    tensor_copy   ceil(k/4) (b + 2 m) + f m + f b           up to four transposes leave PSUM at once; y
    nc_matmul     2 k m + f m b         moving B, then up to 512 columns
    activation    m
    tensor_tensor m
    dma_copy      1 + 2 b + f b + (3 where weights are resident, else 2 m + f), and b more with affinity

and one dma_copy and a register_load come before it. Qwen3-30B-A3B, B 256, on one core: 320 transposes, 240 products,
100 other ops, 17 DMAs, for any T and E. All instructions at B 128: 331 for 30B-A3B and 1229 for 235B-A22B on two cores,
5942 for Coder-480B-A35B on one. Unrolled over the 383 blocks of 4096 tokens, 30B-A3B would have 125,000.

**Transposes.** For each weight tile the Tensor engine passes 128 columns for its transpose beside B for its product: a
third of its time at B 256, half of it at B 128. The other choices were a transposed copy of all weights in HBM for each
step (1.2 GB read and 1.2 GB written per layer of 30B-A3B), or DMA transposes, whose speed on trn2 nobody here knows.

**Weights.** ``resident`` keeps one expert's weights in SBUF from block to block, and loads them only where the expert
changes: elsewhere the plan holds E, an address out of bounds, and ``oob_mode.skip`` leaves the tiles as they are, which
is how nkilib's own blockwise kernels skip weights (nki-library of Neuron 2.29, ``moe_cte``). Where they do not fit
(``capacity``), they are streamed tile by tile, for every block again.

**Two cores.** Each computes half of I, and writes its own slab of partial sums, in float32; their sum is taken outside.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

from .nki_tiles import (
    gather_rows,
    load_columns_of,
    load_rows_of,
    load_scalar,
    load_slots,
    loop_end,
    tiles,
    transpose_tiles,
)


@nki.jit
def forward(x, gate, up, down, slot_row, used, block_expert, resident=True):
    """y[c, n] = silu(x gate.T) * (x up.T) down.T for the rows x[slot_row[n]] and the expert of block n.

    x (R + 1, H), its last row zero (or of tokens, where slot_row names those); slot_row (N, B, 1) int32; used (1, 1)
    int32, how many blocks are computed; block_expert (N, 1) int32, where with ``resident`` an E stands for "the same as
    the block before". y (C, N, B, H): of x's dtype on one core, float32 partial sums on two; blocks that are not used
    stay unwritten. Never compiled for or run on hardware.
    """
    return _forward(x, gate, up, down, slot_row, used, block_expert, None, False, resident)


@nki.jit
def forward_scaled(x, gate, up, down, slot_row, used, block_expert, affinity, resident=True):
    """``forward``, each row times its ``affinity`` (R + 1, 1) float32, whose last row is zero.

    Never compiled for or run on hardware.
    """
    return _forward(x, gate, up, down, slot_row, used, block_expert, affinity, True, resident)


def _forward(x, gate, up, down, slot_row, used, block_expert, affinity, scaled, resident):
    part, bank = nl.tile_size.pmax, nl.tile_size.psum_bank_fmax
    group = bank // part
    cores, hidden, width = nl.num_programs(), x.shape[1], gate.shape[1] // nl.num_programs()
    blocks, block = slot_row.shape[0], slot_row.shape[1]
    first = nl.program_id(0) * width
    k_tiles, m_tiles, b_tiles, f_tiles = hidden // part, width // part, block // part, (hidden + bank - 1) // bank
    y_dtype = nl.float32 if cores > 1 else x.dtype
    y = nl.ndarray((cores, blocks, block, hidden), dtype=y_dtype, buffer=nl.shared_hbm)
    y_first = nl.program_id(0) * blocks * block * hidden
    # Tiles of gate and up by I, of down by H: all of the expert's, or two of each in turn.
    m_kept = m_tiles if resident else min(2, m_tiles)
    k_kept = k_tiles if resident else min(2 * group, k_tiles)
    gate_w = nl.ndarray((part, m_kept, hidden), dtype=x.dtype, buffer=nl.sbuf)
    up_w = nl.ndarray((part, m_kept, hidden), dtype=x.dtype, buffer=nl.sbuf)
    down_w = nl.ndarray((part, k_kept, width), dtype=x.dtype, buffer=nl.sbuf)

    def body(n):
        acc = tiles(4, (part, bank), nl.float32, nl.psum)
        turn = tiles(2, (part, bank), x.dtype, nl.psum)
        expert = load_scalar(block_expert, n)
        if resident:
            load_rows_of(gate_w, gate, first, expert, nisa.oob_mode.skip)
            load_rows_of(up_w, up, first, expert, nisa.oob_mode.skip)
            load_columns_of(down_w, down, 0, first, expert, nisa.oob_mode.skip)

        x_t = nl.ndarray((part, k_tiles, block), dtype=x.dtype, buffer=nl.sbuf)
        rows = tiles(2, (part, hidden), x.dtype, nl.sbuf)
        factors = tiles(b_tiles, (part, 1), nl.float32, nl.sbuf)
        for b in range(b_tiles):
            slots = load_slots(slot_row, n, b)
            gather_rows(rows[b % 2], x, slots)
            transpose_tiles(x_t[:, :, b * part : (b + 1) * part], rows[b % 2], turn)
            if scaled:
                gather_rows(factors[b], affinity, slots)

        # h = silu(g) * u, with I on partitions: as the product with down wants it.
        h_t = nl.ndarray((part, m_tiles, block), dtype=x.dtype, buffer=nl.sbuf)
        silu = tiles(2, (part, block), nl.float32, nl.sbuf)
        gate_t = nl.ndarray((part, k_tiles, part), dtype=x.dtype, buffer=nl.sbuf)
        up_t = nl.ndarray((part, k_tiles, part), dtype=x.dtype, buffer=nl.sbuf)
        for m in range(m_tiles):
            at = m % m_kept
            if not resident:
                load_rows_of(gate_w[:, at : at + 1, :], gate, first + m * part, expert, nisa.oob_mode.error)
                load_rows_of(up_w[:, at : at + 1, :], up, first + m * part, expert, nisa.oob_mode.error)
            g = acc[2 * (m % 2)][:, 0:block]
            u = acc[2 * (m % 2) + 1][:, 0:block]
            transpose_tiles(gate_t, gate_w[:, at, :], turn)
            for k in range(k_tiles):
                nisa.nc_matmul(dst=g, stationary=gate_t[:, k, :], moving=x_t[:, k, :], accumulate=(k > 0))
            transpose_tiles(up_t, up_w[:, at, :], turn)
            for k in range(k_tiles):
                nisa.nc_matmul(dst=u, stationary=up_t[:, k, :], moving=x_t[:, k, :], accumulate=(k > 0))
            nisa.activation(dst=silu[m % 2], op=nl.silu, data=g)
            nisa.tensor_tensor(dst=h_t[:, m, :], data1=silu[m % 2], data2=u, op=nl.multiply)

        # y = h down.T, for 512 columns of H at a time.
        down_t = tiles(2, (part, group, part), x.dtype, nl.sbuf)
        out = tiles(2, (part, bank), y_dtype, nl.sbuf)
        for f in range(f_tiles):
            columns = min(bank, hidden - f * bank)
            count = columns // part
            at = f * group % k_kept
            if not resident:
                load_columns_of(down_w[:, at : at + count, :], down, f * bank, first, expert, nisa.oob_mode.error)
            for m in range(m_tiles):
                to = down_t[m % 2]
                bank_t = turn[m % 2].reshape((part, group, part))
                for j in range(count):
                    nisa.nc_transpose(dst=bank_t[:, j, :], data=down_w[:, at + j, m * part : (m + 1) * part])
                nisa.tensor_copy(dst=to[:, 0:count, :], src=bank_t[:, 0:count, :])
                moving = to.reshape((part, bank))[:, 0:columns]
                for b in range(b_tiles):
                    left = h_t[:, m, b * part : (b + 1) * part]
                    nisa.nc_matmul(dst=acc[b][:, 0:columns], stationary=left, moving=moving, accumulate=(m > 0))
            for b in range(b_tiles):
                result = out[b % 2][:, 0:columns]
                if scaled:
                    nisa.tensor_scalar(dst=result, data=acc[b][:, 0:columns], op0=nl.multiply, operand0=factors[b])
                else:
                    nisa.tensor_copy(dst=result, src=acc[b][:, 0:columns])
                pattern = [[hidden, part], [1, columns]]
                start = y_first + b * part * hidden + f * bank
                target = y.ap(pattern=pattern, offset=start, scalar_offset=n, indirect_dim=1)
                nisa.dma_copy(dst=target, src=result)

    nl.fori_loop(0, loop_end(used), body)
    return y
