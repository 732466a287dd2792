"""Casts are torch's, bit for bit, over every value there is; ml_dtypes agrees."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from qwen3conv.converters.casts import decoder, narrow, widen
from qwen3conv.converters.errors import PolicyError
from tests.conversions import convert, differing, load_dcp, policies, raw_bytes
from tests.laws.tiny import scratch
from tests.models import read_tensors, saved_model
from tests.real_checkpoints import read_model, titan_state_dict

TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
ML_DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
PAIRS = [(source, target) for source in TORCH for target in TORCH if source != target]
LARGEST_F16 = 65504.0
F16_OVERFLOW = 65520.0
"""The smallest value that rounds to infinity in float16: half a step above its largest."""


def cast(tensor: torch.Tensor, target: str) -> torch.Tensor:
    """Our cast of a tensor's bytes, as a tensor."""
    source = next(code for code, dtype in TORCH.items() if dtype == tensor.dtype)
    decode = decoder(source, target, "x")
    assert decode is not None
    return torch.frombuffer(bytearray(decode(memoryview(raw_bytes(tensor)), 0)), dtype=TORCH[target])


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal bits, except that any NaN is as good as another."""
    assert found.dtype == wanted.dtype
    assert torch.equal(found.isnan(), wanted.isnan())
    kept = ~wanted.isnan()
    assert raw_bytes(found[kept]) == raw_bytes(wanted[kept])


def fits(values: torch.Tensor) -> torch.Tensor:
    """Those whose float16 is finite unless they are not finite themselves."""
    wide = values.double()
    return values[wide.isnan() | wide.isinf() | (wide.abs() < F16_OVERFLOW)]


# Bit patterns where rounding is decided: subnormals, signed zeros, the ends of each range, ties and their neighbours.
EDGES = (
    *(0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF),
    *(0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x3F817FFF, 0x7F7F7FFF, 0x7F7F8000, 0x00008000, 0x00018000),
    *(0x477FE000, 0x477FEFFF, 0x33000000, 0x33000001, 0x33800000, 0x38800000, 0x387FE000, 0x3F801000, 0x3F803000),
)


def about_half_way(cut: int) -> st.SearchStrategy[int]:
    """Bits whose last ``cut``, which rounding takes away, are about one half of the last that stays."""
    half = 1 << cut - 1
    upper, lower = st.integers(0, 2 ** (32 - cut) - 1), st.sampled_from([0, half - 1, half, half + 1])
    return st.builds(lambda high, low: high << cut | low, upper, lower)


patterns = st.one_of(
    st.integers(0, 2**32 - 1),
    st.sampled_from([edge | sign for edge in EDGES for sign in (0, 1 << 31)]),
    about_half_way(16),
    about_half_way(13),
)
"""float32 bits: any, the edges, and values about half way between two bfloat16 or two float16."""


@settings(max_examples=300)
@given(bits=st.lists(patterns, min_size=1, max_size=64), target=st.sampled_from(["BF16", "F16"]))
@example(bits=[edge | sign for edge in EDGES for sign in (0, 1 << 31)], target="BF16")
def test_float32_rounds_as_torch_and_ml_dtypes_round(bits: list[int], target: str) -> None:
    values = torch.from_numpy(np.array(bits, np.uint32).view(np.float32))
    if target == "F16":
        values = fits(values)
        assume(len(values))
    found = cast(values, target)
    assert_same(found, values.to(TORCH[target]))
    with np.errstate(invalid="ignore", over="ignore"):
        second = values.numpy().astype(ML_DTYPES[target])
    assert_same(found, torch.from_numpy(second.view(np.uint16)).view(TORCH[target]))


@pytest.mark.parametrize(("source", "target"), [pair for pair in PAIRS if pair[0] != "F32"])
def test_every_16_bit_value_is_cast_as_torch_and_ml_dtypes_cast_it(source: str, target: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = torch.from_numpy(bits.copy()).view(TORCH[source])
    if target == "F16":
        values = fits(values)
    assert len(values) > 30_000
    found = cast(values, target)
    assert_same(found, values.to(TORCH[target]))
    raw = np.frombuffer(raw_bytes(values), ML_DTYPES[source])
    with np.errstate(invalid="ignore"):
        second = np.frombuffer(raw.astype(np.float32).astype(ML_DTYPES[target]).tobytes(), np.uint8).copy()
    assert_same(found, torch.from_numpy(second).view(TORCH[target]))


def test_every_fp8_code_has_torchs_and_ml_dtypes_value() -> None:
    codes = np.arange(256, dtype=np.uint8)
    found = torch.from_numpy(widen(memoryview(codes.tobytes()), "F8_E4M3").copy())
    assert_same(found, torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float())
    assert_same(found, torch.from_numpy(codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)))


@given(bits=st.lists(patterns, min_size=1, max_size=64))
def test_widening_and_narrowing_again_changes_nothing(bits: list[int]) -> None:
    for code in ("BF16", "F16"):
        values = torch.from_numpy((np.array(bits, np.uint64) % (1 << 16)).astype(np.uint16)).view(TORCH[code])
        assert_same(cast(cast(values, "F32"), code), values)


@given(
    value=st.one_of(st.floats(F16_OVERFLOW, 3e38), st.floats(-3e38, -F16_OVERFLOW)),
    others=st.lists(st.floats(-LARGEST_F16, LARGEST_F16, width=32), max_size=8),
)
def test_a_finite_value_beyond_float16_is_refused_and_named(value: float, others: list[float]) -> None:
    values = np.array([*others, value, *others], np.float32)
    with pytest.raises(PolicyError) as refused:
        narrow(values, "F16", "model.norm.weight")
    assert str(refused.value).startswith(f"model.norm.weight: {abs(np.float32(value)):g} ")
    assert "65504" in str(refused.value)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_last_value_that_fits_float16_is_taken(sign: int) -> None:
    last = np.nextafter(np.float32(F16_OVERFLOW), np.float32(0))
    out = narrow(np.array([sign * last], np.float32), "F16", "x")
    assert np.frombuffer(out, np.float16)[0] == sign * LARGEST_F16
    infinities = np.array([np.inf, -np.inf], np.float32)
    assert bytes(narrow(infinities, "F16", "x")) == infinities.astype(np.float16).tobytes()


# --- through a conversion ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return lambda name: saved_model(tmp_path_factory, name)


@pytest.mark.parametrize("target", TORCH)
@pytest.mark.parametrize("name", ["dense", "dense-fp32", "moe-fp32"])
@pytest.mark.parametrize("to", ["hf", "titan"])
def test_a_conversion_casts_every_tensor_as_torch_does(
    name: str, target: str, to: str, variant: Callable[[str], Path], room: Path
) -> None:
    manifest = convert(variant(name), room / "out", to, dtype=target)
    truth, config = read_model(variant(name))
    truth = {key: tensor.to(TORCH[target]) for key, tensor in truth.items()}
    changes = any(tensor.dtype != TORCH[target] for tensor in read_tensors(variant(name)).values())
    assert ("cast" in policies(manifest)) == changes
    if changes:
        assert policies(manifest)["cast"]["exact"] == (target == "F32")
    if to == "hf":
        assert differing(read_tensors(room / "out"), truth) == []
    else:
        assert differing(load_dcp(room / "out"), titan_state_dict("T7", truth, config)) == []


@settings(max_examples=12)
@given(bits=st.lists(patterns, min_size=48, max_size=48), target=st.sampled_from(["BF16", "F16"]))
def test_any_value_survives_a_conversion_as_torch_would_have_it(
    variant: Callable[[str], Path], bits: list[int], target: str
) -> None:
    row = torch.from_numpy(np.array(bits, np.uint32).view(np.float32))
    if target == "F16":
        row = torch.where(row.abs() < F16_OVERFLOW, row, torch.tensor(float("inf")))
    with scratch() as room:
        source = room / "source"
        source.mkdir()
        tensors = load_file(variant("dense-fp32") / "model.safetensors")
        tensors["model.layers.1.self_attn.o_proj.weight"][5, :48] = row
        tensors["model.norm.weight"] = row
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        (source / "config.json").write_bytes((variant("dense-fp32") / "config.json").read_bytes())
        convert(source, room / "out", "hf", dtype=target)
        found = read_tensors(room / "out")
        for name, tensor in tensors.items():
            assert_same(found[name].flatten(), tensor.to(TORCH[target]).flatten())
        convert(source, room / "copy", "titan")  # and without a cast even NaNs keep their bits
        assert raw_bytes(load_dcp(room / "copy")["norm.weight"]) == raw_bytes(row)


def test_an_overflow_stops_the_conversion_and_names_tensor_and_value(
    variant: Callable[[str], Path], room: Path
) -> None:
    name, source = "model.layers.2.mlp.down_proj.weight", room / "source"
    source.mkdir()
    tensors = load_file(variant("dense-fp32") / "model.safetensors")
    tensors[name][47, 99] = -1e6
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_bytes((variant("dense-fp32") / "config.json").read_bytes())
    with pytest.raises(PolicyError, match=re.escape(f"{name}: 1e+06 does not fit into float16")):
        convert(source, room / "out", "hf", dtype="F16")
    assert [path.name for path in room.iterdir()] == ["source"]
    convert(source, room / "out", "hf", dtype="BF16")
    assert read_tensors(room / "out")[name][47, 99] == torch.tensor(-1e6).bfloat16()


def test_the_configs_dtype_follows_the_tensors(variant: Callable[[str], Path], room: Path) -> None:
    for name, key in (("dense", "dtype"), ("dense-v4", "torch_dtype"), ("dense-both-styles", "torch_dtype")):
        for code, spelled in (("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")):
            convert(variant(name), room / f"{name}-{code}", "hf", dtype=code)
            assert json.loads((room / f"{name}-{code}" / "config.json").read_text())[key] == spelled
