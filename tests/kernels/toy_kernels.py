"""A small blockwise product as NKI, and the faults that the emulator has to catch in it, one line each.

Loaded through the ``nki_runner`` fixture, which decides whose ``nki`` this is.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def block_rows(x, w, slot_token, block_expert, fault=""):
    """y[n] = x[slot_token[n]] @ w[block_expert[n]] for x (T + 1, K), w (E, K, F), slots (N, 128, 1), experts (N, 1, 1).

    On two cores each computes half of the columns.
    """
    part, cores = nl.tile_size.pmax, nl.num_programs()
    k_tiles, columns, blocks = x.shape[1] // part, w.shape[2], slot_token.shape[0]
    width = columns // cores
    first = 0 if fault == "both cores write" else nl.program_id(0) * width
    y = nl.ndarray((blocks, part, columns), dtype=x.dtype, buffer=nl.shared_hbm)
    for n in range(blocks):
        eid = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=eid, src=block_expert[n, :, :])
        idx = nl.ndarray((part, 1), dtype=nl.int32, buffer=nl.sbuf)
        block = n + 1 if fault == "off-by-one block" else n
        nisa.dma_copy(dst=idx, src=slot_token[block, :, :])
        rows = nl.ndarray((part, x.shape[1]), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=rows, src=x.ap(pattern=[[x.shape[1], part], [1, x.shape[1]]], vector_offset=idx))
        if fault == "over-capacity tile":
            wide = nl.ndarray((part, 30000, 2), dtype=nl.float32, buffer=nl.sbuf)
            nisa.memset(dst=wide, value=0.0)
        rows_t = nl.ndarray((part, k_tiles, part), dtype=x.dtype, buffer=nl.sbuf)
        weights = nl.ndarray((part, k_tiles, width), dtype=x.dtype, buffer=nl.sbuf)
        for k in range(k_tiles):
            t = nl.ndarray((part, part), dtype=x.dtype, buffer=nl.psum)
            nisa.nc_transpose(dst=t, data=rows[:, k * part : (k + 1) * part])
            if fault != "unwritten tile" or k == 0:
                nisa.tensor_copy(dst=rows_t[:, k, :], src=t)
            pattern = [[columns, part], [1, width]]
            source = w.ap(pattern=pattern, offset=k * part * columns + first, scalar_offset=eid, indirect_dim=0)
            nisa.dma_copy(dst=weights[:, k, :], src=source)
        total = nl.ndarray((part, width), dtype=nl.float32, buffer=nl.psum)
        for k in range(k_tiles):
            accumulate = (k > 0 and fault != "missing accumulate") or fault == "accumulate on nothing"
            left = rows[:, k * part : (k + 1) * part] if fault == "wrong transpose" else rows_t[:, k, :]
            nisa.nc_matmul(dst=total, stationary=left, moving=weights[:, k, :], accumulate=accumulate)
        out = nl.ndarray((part, width), dtype=x.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=out, src=total)
        to = 0 if fault == "wrong block written" else n
        nisa.dma_copy(dst=y[to, :, first : first + width], src=out)
    return y


@nki.jit
def looped_blocks(x, last, fault=""):
    """y[n] = 2 * x[n] for x (N, 128, F), by a loop at run time up to the one element of ``last`` (1, 1)."""
    y = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    part, columns = x.shape[1:]
    pattern = [[columns, part], [1, columns]]
    end = nisa.register_alloc(0)
    nisa.register_load(dst=end, src=last)
    seen = []
    kept = nl.ndarray((part, columns), dtype=x.dtype, buffer=nl.sbuf)

    def body(i):
        tile = nl.ndarray((part, columns), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=x.ap(pattern=pattern, scalar_offset=i, indirect_dim=0))
        nisa.tensor_scalar(dst=kept, data=tile, op0=nl.multiply, operand0=2.0)
        seen.append(tile)
        if fault == "python counter":
            nisa.dma_copy(dst=y[len(seen) - 1, :, :], src=kept)
        else:
            nisa.dma_copy(dst=y.ap(pattern=pattern, scalar_offset=i, indirect_dim=0), src=kept)
        if fault == "index in python":
            nisa.dma_copy(dst=y[i, :, :], src=kept)

    nl.fori_loop(1 if fault == "off-by-one block" else 0, end, body)
    if fault == "inner tile outside":
        nisa.dma_copy(dst=y[0, :, :], src=seen[-1])
    return y
