"""A NumPy emulation of the NKI subset that the expert kernels use: a test instrument, never part of the product.

It needs ml_dtypes (the ``dev`` extra). Install it in a test, then import the kernel, unmodified::

    with emulated_nki(lnc=2) as emulation:  # in sys.modules, as nki, nki.language and nki.isa
        from some.module import kernel  # has `import nki`, `import nki.isa as nisa`, `import nki.language as nl`

        y = kernel[2](x, w)  # NumPy in, NumPy out (ml_dtypes.bfloat16); torch in, torch out
        emulation.last.cores[0].executed["nc_matmul"]  # see CoreReport: counts, traffic, peaks of SBUF and PSUM

Supported, with the keywords of NKI 0.6.0 (where 0.7.0 added one, the common ones), target trn2:

- ``nki``: jit, simulate, kernel(...), kernel[1], kernel[2]
- ``nl``: ndarray, zeros, ds, program_id, num_programs, program_ndim, tile_size, affine_range, sequential_range,
  static_range (all plain ``range``), fori_loop, while_loop, no_reorder, NKIObject; buffers sbuf, psum, hbm,
  private_hbm, shared_hbm; dtypes float32, bfloat16, float16, int8/16/32, uint8/16/32; op tokens, see ``op_table``
- tensors: basic slices, ``ap(pattern, offset, scalar_offset, vector_offset, indirect_dim)``, ``reshape``, and the
  attributes shape, strides, offset, dtype, buffer, name, ndim, size
- ``nisa``: dma_copy (gather, scatter, run-time offset, oob_mode), dma_compute (add, scatter-add), dma_transpose (2-D),
  nc_matmul, nc_transpose, activation, tensor_copy, memset, tensor_tensor, tensor_scalar, scalar_tensor_tensor,
  tensor_reduce, reciprocal, iota, register_alloc, register_move, register_load, register_store, and the enums engine,
  dge_mode, oob_mode, reduce_cmd, matmul_perf_mode

Anything else is an AttributeError or CallError. Checked beyond the vendor's simulator: what was never written is not
read, SBUF and PSUM capacity (rules in ``capacity``), PSUM accumulation, both cores touching one element of shared HBM,
a loop body that is not the same in each iteration, and the subset of Python (``subset``).

Not emulated: speed, the compiler, ordering between the cores (they run one after the other and may share nothing),
the hardware's approximate activations. That a kernel passes here does not show that it compiles or runs on Trainium.
"""

from __future__ import annotations

from .core import CoreReport
from .errors import AccessError, CallError, CapacityError, EmulationError
from .launch import Emulation, Run
from .surface import emulated_nki

__all__ = [
    "AccessError",
    "CallError",
    "CapacityError",
    "CoreReport",
    "Emulation",
    "EmulationError",
    "Run",
    "emulated_nki",
]
