"""Every rule that the emulator holds a kernel to, broken once each, and the numbers each op stores.

A row is one statement of a kernel. It sees, in HBM: ``x`` (256, 512) float32, ``rows`` (256, 1) int32, and ``y``,
returned; in SBUF: ``s``, ``s2`` (128, 512) float32, ``b``, ``b2`` (128, 128) bfloat16, ``i`` (128, 1) int32, ``c``
(128, 1) float32, ``e`` (1, 1) int32; in PSUM: ``p``, ``p2`` (128, 512) float32, ``pb`` (128, 128) bfloat16; ``new`` is
``nl.ndarray``.
"""

from __future__ import annotations

import importlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from qwen3conv.tools.nki_emulator import AccessError, CallError, CapacityError, Emulation, EmulationError, emulated_nki

X = np.arange(256 * 512, dtype=np.float32).reshape(256, 512) / 512
ROWS = np.arange(256, dtype=np.int32)[::-1].reshape(256, 1).copy()


def run(statement: str, lnc: int = 1) -> tuple[np.ndarray, Emulation]:
    """The (128, 512) float32 tile ``s`` after ``statement``, and what was counted."""
    with emulated_nki() as emulation:
        nki, nl, nisa = map(importlib.import_module, ("nki", "nki.language", "nki.isa"))

        def kernel(x: Any, rows: Any) -> Any:
            def filled(shape: tuple[int, ...], dtype: Any, buffer: Any, value: float) -> Any:
                tile = nl.ndarray(shape, dtype, buffer)
                nisa.memset(dst=tile, value=value)
                return tile

            wide, square, column = (128, 512), (128, 128), (128, 1)
            s, s2, p, p2 = (filled(wide, nl.float32, buffer, 1.0) for buffer in (nl.sbuf, nl.sbuf, nl.psum, nl.psum))
            b, b2, pb = (filled(square, nl.bfloat16, buffer, 1.0) for buffer in (nl.sbuf, nl.sbuf, nl.psum))
            c, i, e = (
                filled(column, nl.float32, nl.sbuf, 3.0),
                filled(column, nl.int32, nl.sbuf, 5),
                nl.zeros((1, 1), nl.int32),
            )
            y = nl.ndarray((lnc, *wide), nl.float32, nl.shared_hbm)
            exec(
                statement,
                {"nl": nl, "nisa": nisa, "new": nl.ndarray, "x": x, "rows": rows, "s": s, "s2": s2, "p": p, "p2": p2}
                | {"b": b, "b2": b2, "pb": pb, "c": c, "i": i, "e": e, "y": y, "core": nl.program_id(0)},
            )
            nisa.dma_copy(dst=y[nl.program_id(0), :, :], src=s)
            return y

        result = nki.simulate(kernel)[lnc](X.copy(), ROWS.copy())
    return result[0], emulation


REFUSED: dict[str, list[tuple[str, type[Exception], str]]] = {
    "allocation": [
        ("new((128,), nl.float32, nl.sbuf)", EmulationError, "at least two dimensions"),
        ("new((129, 4), nl.float32, nl.sbuf)", EmulationError, "129 partitions"),
        ("new((128, 4), 'float32', nl.sbuf)", CallError, "dtype must be one of nl's"),
        ("new((128, 4), nl.float32, 'sbuf')", CallError, "buffer must be one of nl's"),
        ("new((128, e), nl.float32, nl.sbuf)", CallError, "compile-time ints"),
        ("new((128, 2**20), nl.float32, nl.sbuf)", CapacityError, "alone takes 4194304"),
        ("new((128, 513), nl.float32, nl.psum)", EmulationError, "spans whole banks"),
        ("new((128, 9, 512), nl.float32, nl.psum)", CapacityError, "9 banks"),
        ("new((128, 4), nl.float32, nl.sbuf, address=(0, 0))", CallError, "address="),
        ("nl.int64", AttributeError, "nl|not NKI"),
        ("nl.dynamic_range(3)", AttributeError, "not NKI"),
        ("nisa.tensor_copy_dynamic_src()", AttributeError, "not NKI"),
    ],
    "calls": [
        ("nisa.tensor_copy(s, s2)", CallError, "all but dst by keyword"),
        (
            "nisa.tensor_copy(dst=s, data=s2)",
            CallError,
            "missing a required argument: 'src'; the signature is tensor_copy\\(dst, src, engine",
        ),
        ("nisa.tensor_tensor(dst=s, data1=s, data2=s2)", CallError, "missing a required argument: 'op'"),
        ("nisa.dma_copy(dst=s, src=x[0:128, :], dst_rmw_op=nl.add)", CallError, "unexpected keyword"),
        ("nisa.tensor_copy(dst=s, src=1.0)", CallError, "src must be a tensor"),
        ("nisa.tensor_copy(dst=s, src=s2, engine=nisa.engine.tensor)", CallError, "this op runs on"),
        ("s + s2", CallError, "known at run time only"),
        ("int(e)", CallError, "known at run time only"),
        ("range(nisa.register_alloc(2))", CallError, "known at run time only"),
        ("bool(s)", CallError, "known at run time only"),
    ],
    "views": [
        ("s[:, 0:513]", AccessError, "outside its 512"),
        ("s[128, :]", AccessError, "outside its 128"),
        ("s[:, 4:4]", AccessError, "is empty"),
        ("s[:, None]", CallError, "compile-time int, not NoneType"),
        ("s[:, e]", CallError, "compile-time int, not Tensor"),
        ("s[0:1, 0:1, 0:1]", CallError, "too many entries"),
        ("s[:, 0:256].ap([[512, 128], [1, 8]])", EmulationError, "call it on the tensor"),
        ("s.ap([[512, 128], [1, 8]]).ap([[512, 128], [1, 8]])", EmulationError, "call it on the tensor"),
        ("s.ap([[1, 128], [1, 8]])", EmulationError, "step of 512"),
        ("s.ap([[512, 128], [1, 8]], offset=508)", AccessError, "leaves its partition"),
        ("x.ap([[512, 128], [1, 512]], scalar_offset=e, vector_offset=i)", CallError, "exclude each other"),
        ("x.ap([[512, 128], [1, 512]], vector_offset=c)", CallError, "int32 or uint32 tile in SBUF"),
        ("x.ap([[512, 64], [1, 512]], vector_offset=i)", EmulationError, r"\(64, 1\)"),
        ("x.ap([[512, 128], [1, 512]], vector_offset=i, indirect_dim=1)", EmulationError, "dimension 0"),
        ("s.ap([[512, 128], [1, 512]], vector_offset=i)", EmulationError, "HBM only"),
        ("x.ap([[512, 128], [1, 512]], scalar_offset=i)", CallError, r"\(1, 1\) integer tile"),
        ("x.ap([[512, 128], [1, 512]], scalar_offset=3)", CallError, r"\(1, 1\) integer tile"),
        ("s.reshape((64, 1024))", EmulationError, "cannot become"),
        ("s[:, 0:8].reshape((128, 2, 4))", EmulationError, "not contiguous"),
    ],
    "dma": [
        ("nisa.dma_copy(dst=p, src=x[0:128, :])", EmulationError, "PSUM, which DMA does not reach"),
        ("nisa.dma_copy(dst=s, src=p)", EmulationError, "PSUM, which DMA does not reach"),
        ("nisa.dma_copy(dst=s, src=x)", EmulationError, "different element counts"),
        ("nisa.dma_copy(dst=s, src=x.ap([[512, 128], [1, 512]], offset=65537))", AccessError, "reaches elements"),
        ("nisa.dma_copy(dst=s, src=s2, oob_mode=nisa.oob_mode.skip)", EmulationError, "without an indirect"),
        ("nisa.dma_copy(dst=s, src=s2, oob_mode='skip')", CallError, "members of nisa's enums"),
        ("nisa.dma_copy(dst=s, src=s2, engine=nisa.engine.scalar)", EmulationError, "hwdge only"),
        ("nisa.dma_copy(dst=b, src=s[:, 0:128], dge_mode=nisa.dge_mode.hwdge)", EmulationError, "nor casts"),
        ("nisa.dma_copy(dst=s, src=s2, priority=1)", CallError, "trn3"),
        ("nisa.dma_copy(dst=s, src=new((128, 512), nl.float32, nl.sbuf))", AccessError, "nothing has written 65536"),
        (
            "nisa.memset(dst=i, value=256); "
            "nisa.dma_copy(dst=s, src=x.ap([[512, 128], [1, 512]], vector_offset=i, indirect_dim=0))",
            AccessError,
            "row 0 asks for index 256 of a tensor with 256",
        ),
        (
            "nisa.memset(dst=i, value=-1); "
            "nisa.dma_copy(dst=s, src=x.ap([[512, 128], [1, 512]], vector_offset=i, indirect_dim=0))",
            AccessError,
            "row 0 asks for index -1",
        ),
        (
            "nisa.memset(dst=e, value=256); "
            "nisa.dma_copy(dst=s[0:1, :], src=x.ap([[512, 1], [1, 512]], scalar_offset=e, indirect_dim=0))",
            AccessError,
            "reaches elements 131072",
        ),
        ("nisa.dma_compute(dst=s, srcs=(s, s2), reduce_op=nl.multiply)", CallError, "reduce_op"),
        ("nisa.dma_compute(dst=s, srcs=(s, b), reduce_op=nl.add)", EmulationError, "different element counts"),
        ("nisa.dma_compute(dst=s, srcs=(s, s2), reduce_op=nl.add, scales=(2.0, 1.0))", EmulationError, "scales"),
        (
            "rows = x.ap([[512, 128], [1, 512]], vector_offset=i, indirect_dim=0); "
            "nisa.dma_compute(dst=rows, srcs=(rows, s), reduce_op=nl.add)",
            EmulationError,
            "must be unique",
        ),
        (
            "rows = x.ap([[512, 128], [1, 512]], vector_offset=i, indirect_dim=0); "
            "nisa.dma_compute(dst=rows, srcs=(rows, s, s), reduce_op=nl.add)",
            EmulationError,
            "exactly two sources",
        ),
        ("nisa.dma_transpose(dst=s, src=x[0:128, :])", EmulationError, "shape"),
        ("nisa.dma_transpose(dst=s, src=x, axes=(2, 1, 0))", CallError, "two dimensions"),
    ],
    "tensor engine": [
        (
            "nisa.nc_matmul(dst=p, stationary=x[0:128, 0:128], moving=s, accumulate=False)",
            EmulationError,
            "SBUF and PSUM",
        ),
        ("nisa.nc_matmul(dst=s, stationary=s[:, 0:128], moving=s, accumulate=False)", EmulationError, "float32 PSUM"),
        ("nisa.nc_matmul(dst=p, stationary=p2[:, 0:128], moving=s, accumulate=False)", EmulationError, "in SBUF"),
        (
            "nisa.nc_matmul(dst=p, stationary=s[0:64, 0:128], moving=s, accumulate=False)",
            EmulationError,
            "on partitions",
        ),
        ("nisa.nc_matmul(dst=p, stationary=s[:, 0:129], moving=s, accumulate=False)", EmulationError, "M 129"),
        (
            "w = nl.zeros((128, 513), nl.bfloat16); "
            "q = new((128, 2, 512), nl.float32, nl.psum)[:, 0, :]; "
            "nisa.nc_matmul(dst=q, stationary=b, moving=w, accumulate=False)",
            EmulationError,
            "N 513",
        ),
        (
            "nisa.nc_matmul(dst=p, stationary=b, moving=s, accumulate=False)",
            EmulationError,
            "float32 multiplies float32",
        ),
        ("nisa.nc_matmul(dst=pb, stationary=b, moving=b2, accumulate=False)", EmulationError, "float32 PSUM"),
        ("nisa.nc_matmul(dst=p, stationary=b, moving=b2, accumulate=False)", EmulationError, r"shape \(128, 128\)"),
        (
            "nisa.nc_matmul(dst=p[:, 0:128], stationary=i, moving=b, accumulate=False)",
            EmulationError,
            "multiplies floats",
        ),
        ("nisa.nc_matmul(dst=p[:, 0:128], stationary=b, moving=b2)", CallError, "accumulate must be"),
        ("nisa.nc_matmul(dst=p[:, 0:128], stationary=b, moving=b2, accumulate=True)", EmulationError, "memset, a copy"),
        (
            "q = new((128, 128), nl.float32, nl.psum); nisa.nc_matmul(dst=q, stationary=b, moving=b2, accumulate=True)",
            EmulationError,
            "no matmul wrote",
        ),
        (
            "q = new((128, 128), nl.float32, nl.psum)\n"
            "nisa.nc_matmul(dst=q, stationary=b, moving=b2, accumulate=False)\n"
            "def body(i):\n  nisa.nc_matmul(dst=q, stationary=b, moving=b2, accumulate=True)\n"
            "nl.fori_loop(0, 2, body)",
            EmulationError,
            "allocated outside the run-time loop",
        ),
        (
            "q = new((128, 2, 512), nl.float32, nl.psum).reshape((128, 1024)); "
            "nisa.nc_matmul(dst=q[:, 448:576], stationary=b, moving=b2, accumulate=False)",
            EmulationError,
            "crosses a PSUM bank",
        ),
        (
            "t = s.reshape((128, 4, 128)); "
            "nisa.nc_matmul(dst=p, stationary=t[:, 0:2, 0:64], moving=s, accumulate=False)",
            EmulationError,
            "one free dimension",
        ),
        (
            "nisa.nc_matmul(dst=p[:, 0:128], stationary=b, moving=b2, accumulate=False, is_transpose=True)",
            CallError,
            "stay at their defaults",
        ),
        ("nisa.nc_transpose(dst=pb, data=s[:, 0:128])", EmulationError, "keeps the type"),
        ("nisa.nc_transpose(dst=p[:, 0:64], data=s[:, 0:128])", EmulationError, "does not hold 128 partitions"),
        ("nisa.nc_transpose(dst=pb, data=pb)", EmulationError, "from SBUF to PSUM"),
        ("nisa.nc_transpose(dst=b2, data=b)", EmulationError, "more than the 32 x 32"),
    ],
    "scalar, vector and gpsimd engines": [
        ("nisa.activation(dst=s, op=nl.silu, data=x[0:128, :])", EmulationError, "SBUF and PSUM only"),
        ("nisa.activation(dst=s, op=nl.silu, data=s[0:64, :])", EmulationError, "nothing broadcasts"),
        ("nisa.activation(dst=s, op=nl.silu, data=s[:, 0:1])", EmulationError, "nothing broadcasts"),
        ("nisa.activation(dst=s, op=nl.add, data=s)", CallError, "op is nl.add"),
        ("nisa.activation(dst=s, op='silu', data=s)", CallError, "op is 'silu'"),
        ("nisa.activation(dst=s, op=nl.silu, data=s, scale=i)", EmulationError, "tile of nl.float32"),
        ("nisa.activation(dst=s, op=nl.silu, data=s, scale=s2)", EmulationError, r"\(128, 1\) tile"),
        ("nisa.activation(dst=s, op=nl.silu, data=s, reduce_res=c)", EmulationError, "reset_reduce"),
        ("nisa.tensor_tensor(dst=s, data1=p, data2=p2, op=nl.add)", EmulationError, "may not both be in PSUM"),
        ("nisa.tensor_tensor(dst=s, data1=s, data2=c, op=nl.add)", EmulationError, "nothing broadcasts"),
        ("nisa.tensor_tensor(dst=s, data1=s, data2=s2, op=nl.silu)", CallError, "op is nl.silu"),
        ("nisa.tensor_tensor(dst=s, data1=s, data2=s2, op=nl.bitwise_and)", EmulationError, "integer tiles"),
        ("nisa.tensor_tensor(dst=s, data1=s, data2=p, op=nl.add, engine=nisa.engine.gpsimd)", EmulationError, "GpSimd"),
        ("nl.divide", AttributeError, "not NKI"),
        ("nisa.tensor_scalar(dst=s, data=s, op0=nl.multiply, operand0=i)", EmulationError, "tile of nl.float32"),
        ("nisa.tensor_scalar(dst=s, data=s, op0=nl.multiply, operand0=c[0:64, :])", EmulationError, r"\(128, 1\) tile"),
        ("nisa.tensor_scalar(dst=s, data=s, op0=nl.multiply, operand0=2.0, op1=nl.add)", CallError, "come together"),
        (
            "nisa.tensor_scalar(dst=i, data=i, op0=nl.multiply, operand0=2.0, op1=nl.bitwise_and, operand1=1)",
            EmulationError,
            "both be arithmetic",
        ),
        (
            "nisa.tensor_scalar(dst=s, data=s, op0=nl.subtract, operand0=2.0, engine=nisa.engine.scalar)",
            EmulationError,
            "Scalar engine of trn2",
        ),
        (
            "nisa.scalar_tensor_tensor(dst=s, data=p, op0=nl.multiply, operand0=c, op1=nl.add, operand1=p2)",
            EmulationError,
            "may not both be in PSUM",
        ),
        ("nisa.tensor_reduce(dst=c, op=nl.add, data=s, axis=0)", EmulationError, "never 0"),
        ("nisa.tensor_reduce(dst=c, op=nl.add, data=s.reshape((128, 4, 128)), axis=1)", EmulationError, "trailing"),
        ("nisa.tensor_reduce(dst=s, op=nl.add, data=s, axis=1)", EmulationError, "one result for each"),
        ("nisa.memset(dst=s, value=0)", CallError, "filled with a Python float"),
        ("nisa.memset(dst=i, value=0.0)", CallError, "filled with a Python int"),
        ("nisa.iota(dst=p, pattern=[[1, 512]])", EmulationError, "GpSimd cannot reach PSUM"),
        ("nisa.iota(dst=s, pattern=[[1, 4]])", EmulationError, "counts make 4"),
        ("nisa.tensor_copy(dst=s.ap([[512, 128], [0, 512]]), src=s2)", EmulationError, "step of 0"),
        ("nisa.tensor_copy(dst=s, src=new((128, 512), nl.float32, nl.psum))", AccessError, "nothing has written"),
    ],
    "loops and registers": [
        ("nl.fori_loop(0, 2, lambda i: nl.fori_loop(0, 2, lambda j: None))", EmulationError, "inside another"),
        ("with nl.no_reorder(): nl.fori_loop(0, 2, lambda i: None)", EmulationError, "no_reorder"),
        ("nl.fori_loop(0, 2, lambda i: i)", CallError, "returns None"),
        ("nl.fori_loop(0, e, lambda i: None)", CallError, "a loop bound must be a compile-time int"),
        ("nl.fori_loop(0, 2, lambda i: range(i))", CallError, "known at run time only"),
        ("nl.fori_loop(0, 2, lambda i: i * 4)", CallError, "known at run time only"),
        ("nl.fori_loop(0, 2, lambda i: nisa.register_move(dst=i, src=3) and None)", CallError, "not a loop's index"),
        (
            "nl.fori_loop(0, 2, lambda i: new((4, 4), nl.float32, nl.shared_hbm) and None)",
            EmulationError,
            "outside run-time",
        ),
        (
            "nl.fori_loop(0, 1, lambda i: nisa.nc_transpose(dst=pb, data=b) and None)",
            EmulationError,
            "allocated outside the run-time loop",
        ),
        ("nl.while_loop(3, lambda r: r)", CallError, "init must be a register"),
        ("nl.while_loop(nisa.register_alloc(3), lambda r: None)", CallError, "returns the next register"),
        ("r = nisa.register_alloc(); nl.fori_loop(0, r, lambda i: None)", AccessError, "before anything was moved"),
        ("r = nisa.register_alloc(); nisa.register_load(dst=r, src=i)", CallError, "one integer"),
    ],
}


@pytest.mark.parametrize(
    ("statement", "error", "message"),
    [pytest.param(*row, id=f"{subject}-{n}") for subject, rows in REFUSED.items() for n, row in enumerate(rows)],
)
def test_a_broken_rule_is_refused(statement: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(statement)


# -- what is stored ----------------------------------------------------------------------------------------------------


def stored(statement: str) -> np.ndarray:
    return run(statement)[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_store_rounds_as_torch_does(dtype: str) -> None:
    found = stored(
        f"nisa.dma_copy(dst=s2, src=x[0:128, :]); nisa.activation(dst=s2, op=nl.exp, data=s2, scale=0.1)\n"
        f"t = new((128, 512), nl.{dtype}, nl.sbuf); nisa.tensor_copy(dst=t, src=s2); nisa.tensor_copy(dst=s, src=t)"
    )
    exact = np.exp(X[:128] * np.float32(0.1))
    wanted = torch.from_numpy(exact).to(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("value", "dtype", "wanted"),
    [
        (2.5, "int32", 2),
        (3.5, "int32", 4),
        (-2.5, "int32", -2),
        (3e9, "int32", 2**31),
        (-1.0, "uint8", 0),
        (300.0, "int8", 127),
    ],
)
def test_floats_become_integers_to_nearest_even_and_saturate(value: float, dtype: str, wanted: int) -> None:
    statement = (
        f"nisa.memset(dst=s2, value={value}); t = new((128, 512), nl.{dtype}, nl.sbuf); "
        "nisa.tensor_copy(dst=t, src=s2); nisa.tensor_copy(dst=s, src=t)"
    )
    assert (stored(statement) == wanted).all()


def test_integers_are_exact_in_tensor_tensor_and_pass_float32_in_tensor_scalar() -> None:
    start = f"nisa.memset(dst=i, value={2**24}); j = nl.zeros((128, 1), nl.int32); nisa.memset(dst=j, value=1)\n"
    low = (
        "\nnisa.tensor_scalar(dst=i, data=i, op0=nl.bitwise_and, operand0=255); nisa.tensor_copy(dst=s[:, 0:1], src=i)"
    )
    exact = stored(start + "nisa.tensor_tensor(dst=i, data1=i, data2=j, op=nl.add)" + low)
    wide = stored(start + "nisa.tensor_scalar(dst=i, data=i, op0=nl.add, operand0=1)" + low)
    assert (exact[0, 0], wide[0, 0]) == (1, 0)


GATHER = "g = x.ap([[512, 128], [1, 512]], vector_offset=i, indirect_dim=0)\n"


def test_rows_are_gathered_by_index() -> None:
    found = stored("nisa.dma_copy(dst=i, src=rows[64:192, :])\n" + GATHER + "nisa.dma_copy(dst=s, src=g)")
    np.testing.assert_array_equal(found, X[ROWS[64:192, 0]])


def test_a_gather_skips_rows_out_of_bounds() -> None:
    iota = "nisa.iota(dst=i, pattern=[[1, 1]], offset=200, channel_multiplier=1)\n"
    found = stored(iota + GATHER + "nisa.dma_copy(dst=s, src=g, oob_mode=nisa.oob_mode.skip)")
    np.testing.assert_array_equal(found[:56], X[200:])
    assert (found[56:] == 1).all()


def test_rows_are_scattered_and_those_that_meet_are_undefined() -> None:
    statement = (
        "nisa.iota(dst=i, pattern=[[1, 1]], offset=0, channel_multiplier=1); nisa.memset(dst=i[0:2, :], value=1)\n"
        + GATHER
        + "nisa.iota(dst=s, pattern=[[0, 512]], channel_multiplier=1); nisa.dma_copy(dst=g, src=s)\n"
        "nisa.dma_copy(dst=s, src=x[0:128, :])"
    )
    found = stored(statement)
    np.testing.assert_array_equal(found[0], X[0])
    assert np.isnan(found[1]).all()
    assert (found[2:] == np.arange(2, 128)[:, None]).all()


def test_dma_compute_adds_to_scattered_rows() -> None:
    statement = "nisa.dma_copy(dst=i, src=rows[128:256, :])\n" + GATHER
    statement += "nisa.dma_compute(dst=g, srcs=(g, s), reduce_op=nl.add); nisa.dma_copy(dst=s, src=x[0:128, :])"
    np.testing.assert_array_equal(stored(statement), X[:128] + 1)


def test_a_run_time_scalar_moves_by_rows_of_its_dimension() -> None:
    pattern = "nisa.dma_copy(dst=s, src=x.ap([[512, 128], [1, 512]], offset=512, scalar_offset=e, indirect_dim=0))"
    np.testing.assert_array_equal(stored("nisa.memset(dst=e, value=7)\n" + pattern), X[8:136])


def test_a_pattern_strides_as_numpy_does() -> None:
    found = stored("nisa.dma_copy(dst=s[:, 0:64], src=x.ap([[1024, 128], [16, 4], [2, 16]], offset=5))")
    wanted = np.lib.stride_tricks.as_strided(X.reshape(-1)[5:], (128, 4, 16), (4096, 64, 8)).reshape(128, 64)
    np.testing.assert_array_equal(found[:, :64], wanted)


def test_products_sum_in_float32_from_bfloat16() -> None:
    load = "nisa.dma_copy(dst=b, src=x[0:128, 0:128]); nisa.dma_copy(dst=b2, src=x[128:256, 256:384])\n"
    product = "nisa.nc_matmul(dst=p[:, 0:128], stationary=b, moving=b2, accumulate={})\n"
    found = stored(load + product.format(False) + product.format(True) + "nisa.tensor_copy(dst=s, src=p)")
    left, right = (part.astype(ml_dtypes.bfloat16).astype(float) for part in (X[:128, :128], X[128:, 256:384]))
    np.testing.assert_allclose(found[:, :128], 2 * left.T @ right, rtol=1e-6)


@pytest.mark.parametrize("how", ["nc_transpose", "dma_transpose"])
def test_transposes_keep_every_bit(how: str) -> None:
    by_engine = "q = new((128, 128), nl.float32, nl.psum); nisa.nc_transpose(dst=q, data=s2[:, 128:256]); "
    statement = {
        "nc_transpose": "nisa.dma_copy(dst=s2, src=x[0:128, :]); "
        + by_engine
        + "nisa.tensor_copy(dst=s[:, 0:128], src=q)",
        "dma_transpose": "nisa.dma_transpose(dst=s[:, 0:128], src=x[0:128, 128:256], axes=(1, 0))",
    }
    np.testing.assert_array_equal(stored(statement[how])[:, :128], X[:128, 128:256].T)


@pytest.mark.parametrize("name", ["silu", "sigmoid", "silu_dx"])
def test_activations_are_those_of_torch(name: str) -> None:
    found = stored(f"nisa.dma_copy(dst=s2, src=x[0:128, :]); nisa.activation(dst=s, op=nl.{name}, data=s2, bias=-64.0)")
    z = (torch.from_numpy(X[:128].copy()) - 64).double().requires_grad_()
    silu = torch.nn.functional.silu(z)
    wanted = {
        "silu": silu,
        "sigmoid": torch.sigmoid(z),
        "silu_dx": torch.autograd.grad(silu.sum(), z, retain_graph=True)[0],
    }
    np.testing.assert_allclose(found, wanted[name].detach().numpy(), rtol=1e-5, atol=1e-7)


def test_row_sums_by_activation_and_by_reduction_agree() -> None:
    both = (
        "nisa.dma_copy(dst=s2, src=x[0:128, :]); nisa.tensor_reduce(dst=s[:, 0:1], op=nl.add, data=s2, axis=1)\n"
        "nisa.activation(dst=s2, op=nl.copy, data=s2, reduce_op=nl.add, reduce_res=s[:, 1:2], "
        "reduce_cmd=nisa.reduce_cmd.reset_reduce)"
    )
    found = stored(both)
    np.testing.assert_array_equal(found[:, 0], found[:, 1])
    np.testing.assert_allclose(found[:, 0], X[:128].sum(1), rtol=1e-6)


def test_columns_scale_rows_and_reverse_swaps_sides() -> None:
    statement = (
        "nisa.tensor_scalar(dst=s2, data=s2, op0=nl.multiply, operand0=c, "
        "op1=nl.subtract, operand1=10.0, reverse1=True)\n"
        "nisa.scalar_tensor_tensor(dst=s, data=s2, op0=nl.add, operand0=c, op1=nl.subtract, operand1=p, reverse1=True)"
    )
    assert (stored(statement) == 1 - (10 - 1 * 3 + 3)).all()


def test_while_loop_counts_a_register_down() -> None:
    statement = (
        "nisa.memset(dst=e, value=3)\n"
        "def body(r):\n"
        "  nisa.tensor_tensor(dst=s, data1=s, data2=s2, op=nl.add)\n"
        "  nisa.tensor_scalar(dst=e, data=e, op0=nl.subtract, operand0=1)\n"
        "  n = nisa.register_alloc(); nisa.register_load(dst=n, src=e); return n\n"
        "nl.while_loop(nisa.register_alloc(3), body)"
    )
    result, emulation = run(statement)
    assert (result == 4).all()
    assert emulation.last.cores[0].trips == (3,)


# -- capacity and cores ------------------------------------------------------------------------------------------------

BASE = run("")[1].last.cores[0]
TILE = 40_000
"""float32 elements per partition: two such tiles do not fit together."""


def use(name: str) -> str:
    return f"{name} = new((1, {TILE}), nl.float32, nl.sbuf); nisa.memset(dst={name}, value=0.0)\n"


def read(name: str) -> str:
    return f"nisa.tensor_copy(dst=s[0:1, 0:1], src={name}[:, 0:1])\n"


def test_tiles_that_live_one_after_the_other_share_their_place() -> None:
    core = run(use("t") + read("t") + use("u") + read("u"))[1].last.cores[0]
    assert TILE * 4 < core.sbuf_bytes <= TILE * 4 + BASE.sbuf_bytes


def test_tiles_that_live_together_must_fit_together() -> None:
    with pytest.raises(CapacityError, match=r"sbuf needs 32\d{4} bytes per partition and has 212464"):
        run(use("t") + use("u") + read("t") + read("u"))


def test_a_body_keeps_its_tiles_through_the_loop_and_counts_them_once() -> None:
    body = "def body(i):\n  " + use("t").strip() + "\n  " + read("t")
    assert run(body + "nl.fori_loop(0, 3, body)")[1].last.cores[0].sbuf_bytes >= TILE * 4
    with pytest.raises(CapacityError, match="sbuf needs"):
        run(body.replace(read("t"), read("t").strip() + "; " + use("u")) + "nl.fori_loop(0, 3, body)")
    with pytest.raises(CapacityError, match="sbuf needs"):  # carried by the loop, though used in its last statement
        run(use("u") + body + "  " + read("u") + "nl.fori_loop(0, 3, body)")


def test_each_psum_tile_takes_whole_banks() -> None:
    tiles = "".join(f"q{n} = new((128, 4), nl.float32, nl.psum); nisa.memset(dst=q{n}, value=0.0)\n" for n in range(9))
    reads = "".join(f"nisa.tensor_copy(dst=s[:, 0:4], src=q{n})\n" for n in range(9))
    with pytest.raises(CapacityError, match="psum needs 9 banks"):
        run(tiles + reads)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("nisa.dma_copy(dst=x[core : core + 2, :], src=s[0:2, :])", "both cores write the same elements"),
        (
            "nisa.dma_copy(dst=s, src=x[0:128, :]) if core else nisa.dma_copy(dst=x[0:1, :], src=s[0:1, :])",
            "core 1 reads elements that core 0 writes",
        ),
        ("nisa.dma_copy(dst=s, src=x[0:128, :]); nisa.dma_copy(dst=x[core : core + 1, :], src=s[0:1, :])", "reads"),
        ("z = new((core + 1, 4), nl.float32, nl.shared_hbm)", "all cores allocate the same shared tensors"),
        ("z = new((1, 4), nl.float32, nl.shared_hbm) if core else 0", "that core 0 did not"),
        ("z = 0 if core else new((1, 4), nl.float32, nl.shared_hbm)", "allocates 1 shared tensors, core 0 2"),
        ("nl.fori_loop(0, 1 + core, lambda i: None)", "differ in trips"),
    ],
)
def test_cores_that_meet_are_refused(statement: str, message: str) -> None:
    with pytest.raises(EmulationError, match=message):
        run(statement, lnc=2)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("try:\n        pass\n    finally:\n        pass", "line 4: try"),
        ("f = lambda: 0", "line 4: lambda"),
        ("x is None", "line 4: `is`"),
        ("with nl.device(): pass", "line 4: with"),
        ("inner(x)", "inner, line 2: keyword-only parameters"),
    ],
)
def test_python_outside_the_subset_is_refused(tmp_path, monkeypatch, source: str, message: str) -> None:
    text = f"import nki\ndef inner(*, x): pass\ndef kernel(x):\n    {source}\nnki.jit(kernel)\n"
    (tmp_path / "refused_kernel.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with emulated_nki(), pytest.raises(CallError, match=message):
        importlib.import_module("refused_kernel")


def test_functions_of_the_kernels_package_are_held_to_the_subset_too(tmp_path, monkeypatch) -> None:
    package = tmp_path / "kernels_in_parts"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "steps.py").write_text(
        "import math\ndef step(x):\n    math.sqrt(2)\n    f = lambda: x\n    return f()\n"
    )
    text = "import nki\nfrom .steps import step\n@nki.jit\ndef kernel(x):\n    return step(x)\n"
    (package / "kernel.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with emulated_nki(), pytest.raises(CallError, match="step, line 4: lambda"):
        importlib.import_module("kernels_in_parts.kernel")


def test_what_is_not_returned_from_shared_memory_is_refused() -> None:
    with emulated_nki():
        nki, nl = importlib.import_module("nki"), importlib.import_module("nki.language")
        for buffer, cut in (("hbm", 4), ("shared_hbm", 3)):
            kernel = lambda x, b=buffer, c=cut: nl.ndarray((4, 4), nl.float32, getattr(nl, b))[0:c, :]  # noqa: E731
            with pytest.raises(EmulationError, match=r"whole tensors allocated in nl\.shared_hbm"):
                nki.simulate(kernel)(X)


def test_arguments_that_the_device_cannot_hold_are_refused() -> None:
    with emulated_nki():
        kernel = importlib.import_module("nki").simulate(lambda x: x)
        for array, message in (
            (X.astype(np.float64), "float64"),
            (X.T, "contiguous"),
            (np.zeros((0, 4)), "hold elements"),
        ):
            with pytest.raises(CallError, match=message):
                kernel(array)


def test_what_a_kernel_writes_into_an_argument_is_seen_by_the_caller() -> None:
    with emulated_nki():
        nki, nisa = importlib.import_module("nki"), importlib.import_module("nki.isa")
        x = X.copy()
        nki.simulate(lambda x: nisa.dma_copy(dst=x[0:1, :], src=x[9:10, :]) and x)(x)
    np.testing.assert_array_equal(x[0], X[9])
