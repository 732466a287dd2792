"""Steps that the forward and the backward kernels share, inlined by the compiler where they are called.

They were never compiled for or run on hardware. ``n`` is the index of the loop over blocks, ``expert`` a (1, 1) tile
that holds an expert's number.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl


def tiles(count, shape, dtype, buffer):
    """``count`` tiles of one shape, to be used in turn."""
    made = []
    for _ in range(count):
        made.append(nl.ndarray(shape, dtype=dtype, buffer=buffer))
    return made


def loop_end(used):
    """A register that bounds the loop: how many blocks are in use, from ``used`` (1, 1) int32."""
    value = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=value, src=used)
    end = nisa.register_alloc()
    nisa.register_load(dst=end, src=value)
    return end


def load_scalar(table, n):
    """Entry n of ``table`` (N, 1) int32, as a (1, 1) tile."""
    value = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=value, src=table.ap(pattern=[[1, 1], [1, 1]], scalar_offset=n, indirect_dim=0))
    return value


def load_slots(slot_row, n, b):
    """The rows of slots 128 b to 128 b + 128 of block n, from ``slot_row`` (N, B, 1) int32, as a (128, 1) tile."""
    part = nl.tile_size.pmax
    rows = nl.ndarray((part, 1), dtype=nl.int32, buffer=nl.sbuf)
    source = slot_row.ap(pattern=[[1, part], [1, 1]], offset=b * part, scalar_offset=n, indirect_dim=0)
    nisa.dma_copy(dst=rows, src=source)
    return rows


def gather_rows(dst, table, rows):
    """``dst`` (128, W) = those ``rows`` (128, 1) of ``table`` (R + 1, W)."""
    width = table.shape[1]
    source = table.ap(pattern=[[width, dst.shape[0]], [1, width]], vector_offset=rows, indirect_dim=0)
    nisa.dma_copy(dst=dst, src=source)


def rows_of(weight, count, start, expert):
    """The view (128, count, H) of ``weight`` (E, I, H): ``count`` tiles of I from row ``start`` of the expert."""
    part, hidden = nl.tile_size.pmax, weight.shape[2]
    pattern = [[hidden, part], [part * hidden, count], [1, hidden]]
    return weight.ap(pattern=pattern, offset=start * hidden, scalar_offset=expert, indirect_dim=0)


def columns_of(weight, count, width, start, first, expert):
    """The view (128, count, width) of ``weight`` (E, H, I): tiles of H from row ``start``, columns from ``first``."""
    part, inner = nl.tile_size.pmax, weight.shape[2]
    pattern = [[inner, part], [part * inner, count], [1, width]]
    return weight.ap(pattern=pattern, offset=start * inner + first, scalar_offset=expert, indirect_dim=0)


def load_rows_of(dst, weight, start, expert, out_of_bounds):
    """``dst`` (128, count, H) = ``rows_of`` a weight."""
    nisa.dma_copy(dst=dst, src=rows_of(weight, dst.shape[1], start, expert), oob_mode=out_of_bounds)


def load_columns_of(dst, weight, start, first, expert, out_of_bounds):
    """``dst`` (128, count, width) = ``columns_of`` a weight."""
    source = columns_of(weight, dst.shape[1], dst.shape[2], start, first, expert)
    nisa.dma_copy(dst=dst, src=source, oob_mode=out_of_bounds)


def transpose_tiles(dst, data, turn):
    """``dst`` (128, k, 128): tile k is the transpose of columns 128 k to 128 k + 128 of ``data`` (128, 128 k).

    ``turn``: two PSUM tiles (128, 512) of data's dtype; four transposes leave one at a time.
    """
    part = nl.tile_size.pmax
    group = nl.tile_size.psum_bank_fmax // part
    count = data.shape[1] // part
    for start in range(0, count, group):
        now = min(group, count - start)
        bank = turn[start // group % 2].reshape((part, group, part))
        for j in range(now):
            nisa.nc_transpose(dst=bank[:, j, :], data=data[:, (start + j) * part : (start + j + 1) * part])
        nisa.tensor_copy(dst=dst[:, start : start + now, :], src=bank[:, 0:now, :])
