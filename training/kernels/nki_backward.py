"""NKI kernels of the experts' backward pass: gradients of the slots' rows, of all weights and of the affinities.

These kernels were never compiled for or run on hardware; they run on the emulator of ``tools/nki_emulator`` only.
Legend, layouts and the loop: ``nki_forward``. Kept from the forward pass: nothing, g and u are computed again.

Per block, with a the affinity (1 in ``backward``)::

    g = x gate.T    u = x up.T    q = dy down    h = silu(g) u
    da = rowsum(h q)       dh = a q       du = dh silu(g)       dg = dh u silu'(g)
    dx = dg gate + du up   d_gate += dg.T x   d_up += du.T x    d_down += dy.T (a h)

All of these have tokens on partitions, so that a is one number per partition and da a sum along the free axis; the
weights' own orientation serves dx and q, and only gate and up are transposed, for g and u.

**Weight gradients** of one expert stay in SBUF, in float32, while its blocks pass: ``keep`` 0 starts them anew, and the
expert's last block stores them, once and rounded once; in the others ``store_expert`` is E, which
``oob_mode.skip`` leaves alone. An expert without rows has one block of padding in the plan, and stores zeros. What is
not finite there stays so for the experts after it (0 times inf is NaN): such a step is lost either way.

**Passes.** Weights and gradients of a whole expert do not fit SBUF (216 KiB per partition for 30B-A3B on one core), so
I is cut into passes of ``chunk`` columns, one loop over all blocks after the other. Each gathers and transposes x and
dy again; those after the first add to dx (and da) in HBM, in float32.

**Instructions** in the program, per pass and core, with k = H / 128, m = chunk / 128, b = B / 128, f = ceil(H / 512)::

    nc_transpose  2 m k + 2 k b + 2 m b
    nc_matmul     4 k b + 4 m f b
    tensor_copy   2 (m + b) ceil(k/4) + 2 b ceil(m/4) + f b     no f b in later passes
    activation    2 b,   tensor_tensor   4 b   + f b in later passes
    scalar_tensor_tensor   2 m f + k
    dma_copy      9 + 3 b + f b          + f b in later passes

They do not grow with N, T or E. With affinity, per tile of 128 rows: a gather and a store, two more tensor_scalar, one
tensor_tensor and one tensor_reduce; in later passes a load and a tensor_tensor too. Before each pass: three memsets, a
dma_copy and a register_load. Qwen3-30B-A3B on two cores, B 256, one pass: 172 transposes, 224 products, 104 other ops,
24 DMAs. All instructions at B 128, in all passes: 352 for 30B-A3B (1 pass) and 2512 for 235B-A22B (6) on two cores,
12308 for Coder-480B-A35B (20) on one.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

from .nki_tiles import (
    columns_of,
    gather_rows,
    load_columns_of,
    load_rows_of,
    load_scalar,
    load_slots,
    loop_end,
    rows_of,
    tiles,
    transpose_tiles,
)


@nki.jit
def backward(x, dy, gate, up, down, slot_row, used, load_expert, store_expert, keep, chunk):
    """dx (C, N, B, H), d_gate and d_up (E, I, H), d_down (E, H, I) from dy (R + 1, H), whose last row is zero.

    Tables as in ``schedule.Schedule``. dx has x's dtype, and is float32 where cores or passes add up to it; the
    gradients of the weights have the weights' dtype. ``chunk`` divides I / C and is a multiple of 128 up to 512.
    Never compiled for or run on hardware.
    """
    tables = (slot_row, used, load_expert, store_expert, keep)
    dx, d_gate, d_up, d_down, _ = _backward((x, dy, gate, up, down), tables, x, False, chunk)
    return dx, d_gate, d_up, d_down


@nki.jit
def backward_scaled(x, dy, gate, up, down, slot_row, used, load_expert, store_expert, keep, affinity, chunk):
    """``backward`` of ``forward_scaled``: also da (C, N, B, 1) float32, for ``affinity`` (R + 1, 1) float32.

    Never compiled for or run on hardware.
    """
    tables = (slot_row, used, load_expert, store_expert, keep)
    return _backward((x, dy, gate, up, down), tables, affinity, True, chunk)


def _backward(tensors, tables, affinity, scaled, chunk):
    x, _, gate, up, down = tensors
    blocks, block = tables[0].shape[0], tables[0].shape[1]
    cores, hidden = nl.num_programs(), x.shape[1]
    width = gate.shape[1] // cores
    passes = width // chunk
    dx_dtype = nl.float32 if cores * passes > 1 else x.dtype
    dx = nl.ndarray((cores, blocks, block, hidden), dtype=dx_dtype, buffer=nl.shared_hbm)
    d_gate = nl.ndarray(gate.shape, dtype=gate.dtype, buffer=nl.shared_hbm)
    d_up = nl.ndarray(up.shape, dtype=up.dtype, buffer=nl.shared_hbm)
    d_down = nl.ndarray(down.shape, dtype=down.dtype, buffer=nl.shared_hbm)
    da = dx
    if scaled:
        da = nl.ndarray((cores, blocks, block, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    gradients = (dx, d_gate, d_up, d_down, da)
    for number in range(passes):
        first = nl.program_id(0) * width + number * chunk
        _pass(tensors, tables, affinity, gradients, scaled, chunk, first, number > 0)
    return gradients


def _pass(tensors, tables, affinity, gradients, scaled, chunk, first, adds):
    """Columns ``first`` to ``first + chunk`` of I, for all blocks; with ``adds`` onto what dx and da hold."""
    x, dy, gate, up, down = tensors
    slot_row, used, load_expert, store_expert, keep = tables
    dx, d_gate, d_up, d_down, da = gradients
    part, bank = nl.tile_size.pmax, nl.tile_size.psum_bank_fmax
    hidden, blocks, block = x.shape[1], slot_row.shape[0], slot_row.shape[1]
    k_tiles, m_tiles, b_tiles, f_tiles = hidden // part, chunk // part, block // part, (hidden + bank - 1) // bank
    core_slots = nl.program_id(0) * blocks * block
    gate_w = nl.ndarray((part, m_tiles, hidden), dtype=x.dtype, buffer=nl.sbuf)
    up_w = nl.ndarray((part, m_tiles, hidden), dtype=x.dtype, buffer=nl.sbuf)
    down_w = nl.ndarray((part, k_tiles, chunk), dtype=x.dtype, buffer=nl.sbuf)
    gate_sum = nl.ndarray((part, m_tiles, hidden), dtype=nl.float32, buffer=nl.sbuf)
    up_sum = nl.ndarray((part, m_tiles, hidden), dtype=nl.float32, buffer=nl.sbuf)
    down_sum = nl.ndarray((part, k_tiles, chunk), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=gate_sum, value=0.0)
    nisa.memset(dst=up_sum, value=0.0)
    nisa.memset(dst=down_sum, value=0.0)

    def body(n):
        acc = tiles(5, (part, bank), nl.float32, nl.psum)
        turn = tiles(2, (part, bank), x.dtype, nl.psum)
        g, u, q = acc[0][:, 0:chunk], acc[1][:, 0:chunk], acc[2][:, 0:chunk]
        load, store = load_scalar(load_expert, n), load_scalar(store_expert, n)
        kept = nl.ndarray((part, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=kept, src=keep.ap(pattern=[[1, part], [1, 1]], scalar_offset=n, indirect_dim=0))
        load_rows_of(gate_w, gate, first, load, nisa.oob_mode.skip)
        load_rows_of(up_w, up, first, load, nisa.oob_mode.skip)
        load_columns_of(down_w, down, 0, first, load, nisa.oob_mode.skip)
        gate_t = nl.ndarray((part, k_tiles, chunk), dtype=x.dtype, buffer=nl.sbuf)
        up_t = nl.ndarray((part, k_tiles, chunk), dtype=x.dtype, buffer=nl.sbuf)
        for m in range(m_tiles):
            transpose_tiles(gate_t[:, :, m * part : (m + 1) * part], gate_w[:, m, :], turn)
            transpose_tiles(up_t[:, :, m * part : (m + 1) * part], up_w[:, m, :], turn)

        x_rows = nl.ndarray((part, b_tiles, hidden), dtype=x.dtype, buffer=nl.sbuf)
        dy_rows = nl.ndarray((part, b_tiles, hidden), dtype=x.dtype, buffer=nl.sbuf)
        x_t = nl.ndarray((part, k_tiles, part), dtype=x.dtype, buffer=nl.sbuf)
        dy_t = nl.ndarray((part, k_tiles, part), dtype=x.dtype, buffer=nl.sbuf)
        silu = nl.ndarray((part, chunk), dtype=nl.float32, buffer=nl.sbuf)
        slope = nl.ndarray((part, chunk), dtype=nl.float32, buffer=nl.sbuf)
        wide = nl.ndarray((part, chunk), dtype=nl.float32, buffer=nl.sbuf)
        factor = nl.ndarray((part, 1), dtype=nl.float32, buffer=nl.sbuf)
        h = nl.ndarray((part, b_tiles, chunk), dtype=x.dtype, buffer=nl.sbuf)
        dg = nl.ndarray((part, b_tiles, chunk), dtype=x.dtype, buffer=nl.sbuf)
        du = nl.ndarray((part, b_tiles, chunk), dtype=x.dtype, buffer=nl.sbuf)
        dg_t = nl.ndarray((part, m_tiles, part), dtype=x.dtype, buffer=nl.sbuf)
        du_t = nl.ndarray((part, m_tiles, part), dtype=x.dtype, buffer=nl.sbuf)
        out = tiles(2, (part, bank), dx.dtype, nl.sbuf)
        before = tiles(2, (part, bank), dx.dtype, nl.sbuf)
        for b in range(b_tiles):
            slots = load_slots(slot_row, n, b)
            gather_rows(x_rows[:, b, :], x, slots)
            gather_rows(dy_rows[:, b, :], dy, slots)
            transpose_tiles(x_t, x_rows[:, b, :], turn)
            transpose_tiles(dy_t, dy_rows[:, b, :], turn)
            for k in range(k_tiles):
                nisa.nc_matmul(dst=g, stationary=x_t[:, k, :], moving=gate_t[:, k, :], accumulate=(k > 0))
            for k in range(k_tiles):
                nisa.nc_matmul(dst=u, stationary=x_t[:, k, :], moving=up_t[:, k, :], accumulate=(k > 0))
            for k in range(k_tiles):
                nisa.nc_matmul(dst=q, stationary=dy_t[:, k, :], moving=down_w[:, k, :], accumulate=(k > 0))
            nisa.activation(dst=silu, op=nl.silu, data=g)
            nisa.activation(dst=slope, op=nl.silu_dx, data=g)
            if scaled:
                gather_rows(factor, affinity, slots)
                nisa.tensor_tensor(dst=wide, data1=silu, data2=u, op=nl.multiply)
                nisa.tensor_scalar(dst=h[:, b, :], data=wide, op0=nl.multiply, operand0=factor)
                nisa.tensor_tensor(dst=wide, data1=wide, data2=q, op=nl.multiply)
                _store_row_sums(da, wide, core_slots + b * part, n, adds)
                nisa.tensor_scalar(dst=wide, data=q, op0=nl.multiply, operand0=factor)
                nisa.tensor_tensor(dst=du[:, b, :], data1=wide, data2=silu, op=nl.multiply)
                nisa.tensor_tensor(dst=slope, data1=slope, data2=u, op=nl.multiply)
                nisa.tensor_tensor(dst=dg[:, b, :], data1=slope, data2=wide, op=nl.multiply)
            else:
                nisa.tensor_tensor(dst=h[:, b, :], data1=silu, data2=u, op=nl.multiply)
                nisa.tensor_tensor(dst=du[:, b, :], data1=silu, data2=q, op=nl.multiply)
                nisa.tensor_tensor(dst=slope, data1=slope, data2=u, op=nl.multiply)
                nisa.tensor_tensor(dst=dg[:, b, :], data1=slope, data2=q, op=nl.multiply)
            transpose_tiles(dg_t, dg[:, b, :], turn)
            transpose_tiles(du_t, du[:, b, :], turn)
            for f in range(f_tiles):
                start = f * bank
                columns = min(bank, hidden - start)
                total, result = acc[3 + f % 2][:, 0:columns], out[f % 2][:, 0:columns]
                for m in range(m_tiles):
                    moving = gate_w[:, m, start : start + columns]
                    nisa.nc_matmul(dst=total, stationary=dg_t[:, m, :], moving=moving, accumulate=(m > 0))
                for m in range(m_tiles):
                    moving = up_w[:, m, start : start + columns]
                    nisa.nc_matmul(dst=total, stationary=du_t[:, m, :], moving=moving, accumulate=True)
                pattern = [[hidden, part], [1, columns]]
                at = (core_slots + b * part) * hidden + start
                target = dx.ap(pattern=pattern, offset=at, scalar_offset=n, indirect_dim=1)
                if adds:
                    nisa.dma_copy(dst=before[f % 2][:, 0:columns], src=target)
                    nisa.tensor_tensor(dst=result, data1=before[f % 2][:, 0:columns], data2=total, op=nl.add)
                else:
                    nisa.tensor_copy(dst=result, src=total)
                nisa.dma_copy(dst=target, src=result)

        for f in range(f_tiles):
            start = f * bank
            end = min(hidden, start + bank)
            for m in range(m_tiles):
                _add_product(gate_sum[:, m, start:end], dg, m * part, x_rows, start, end, kept, acc[3])
                _add_product(up_sum[:, m, start:end], du, m * part, x_rows, start, end, kept, acc[4])
        for k in range(k_tiles):
            _add_product(down_sum[:, k, :], dy_rows, k * part, h, 0, chunk, kept, acc[3 + k % 2])
        stored = nisa.oob_mode.skip
        nisa.dma_copy(dst=rows_of(d_gate, m_tiles, first, store), src=gate_sum, oob_mode=stored)
        nisa.dma_copy(dst=rows_of(d_up, m_tiles, first, store), src=up_sum, oob_mode=stored)
        nisa.dma_copy(dst=columns_of(d_down, k_tiles, chunk, 0, first, store), src=down_sum, oob_mode=stored)

    nl.fori_loop(0, loop_end(used), body)


def _add_product(total, left, column, right, start, end, kept, psum):
    """``total`` = ``kept`` * total + sum over b of left[:, b, column : column + 128].T @ right[:, b, start:end]."""
    part = nl.tile_size.pmax
    product = psum[:, 0 : end - start]
    for b in range(left.shape[1]):
        stationary = left[:, b, column : column + part]
        nisa.nc_matmul(dst=product, stationary=stationary, moving=right[:, b, start:end], accumulate=(b > 0))
    nisa.scalar_tensor_tensor(dst=total, data=total, op0=nl.multiply, operand0=kept, op1=nl.add, operand1=product)


def _store_row_sums(da, values, start, n, adds):
    """Row sums of ``values`` (128, W) to da's slots from ``start`` in block n; with ``adds`` onto what is there."""
    part = nl.tile_size.pmax
    sums = nl.ndarray((part, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=sums, op=nl.add, data=values, axis=1)
    target = da.ap(pattern=[[1, part], [1, 1]], offset=start, scalar_offset=n, indirect_dim=1)
    if adds:
        before = nl.ndarray((part, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=before, src=target)
        nisa.tensor_tensor(dst=sums, data1=sums, data2=before, op=nl.add)
    nisa.dma_copy(dst=target, src=sums)
