"""Laws of merging: what is added is ``scale * B @ A`` within float32 rounding, for any model, module and format."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3conv.converters import low_rank
from qwen3conv.converters.casts import narrow, widen
from qwen3conv.converters.conversion import carry_out, prepare
from qwen3conv.converters.geometry import Geometry
from qwen3conv.converters.low_rank import Addition, Factor, LowRank
from qwen3conv.converters.parameters import logical_parameters
from qwen3conv.converters.policies import Choices
from tests.adapters import factors, write_adapter
from tests.laws.tiny import content_of, geometries, scratch, write_tiny

pytestmark = pytest.mark.torch_free

Float32 = npt.NDArray[np.float32]
Tensors = dict[str, Float32]

TARGETS = ("hf", "hf-fused", "titan", "accelerate")


def stored_values(folder: Path, name: str) -> Float32:
    """A tensor of a one-file Hugging Face folder, widened, in its shape."""
    raw = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    entry = json.loads(raw[8 : 8 + size])[name]
    begin, end = (8 + size + offset for offset in entry["data_offsets"])
    return widen(memoryview(raw[begin:end]), entry["dtype"]).reshape(entry["shape"])


@st.composite
def adapters(
    draw: st.DrawFn, geometry: Geometry
) -> tuple[Tensors, dict[str, Any], Mapping[str, tuple[Float32, Float32]]]:
    """Tensors, config, and left and right of what they add to each logical parameter, expanded with plain numpy."""
    rank = draw(st.integers(1, 5))
    fused = geometry.is_moe and draw(st.booleans())
    shapes = {name: shape for name, shape in logical_parameters(geometry, tied=False) if len(shape) == 2}
    plain = [name for name in shapes if not (fused and ".experts." in name)]
    chosen = draw(st.lists(st.sampled_from(plain), min_size=1, unique=True)) if plain else []
    tensors: Tensors = {}
    added: dict[str, tuple[Float32, Float32]] = {}
    for name in chosen:
        module, (rows, columns) = name.removesuffix(".weight"), shapes[name]
        if module.endswith("embed_tokens") and draw(st.booleans()):
            made = factors(module, columns, rows, rank, ends=(".lora_embedding_A", ".lora_embedding_B"))
            a, b = made.values()
            added[name] = a.T, b.T
        else:
            made = factors(module, rows, columns, rank)
            a, b = made.values()
            added[name] = b, a
        tensors |= made
    if fused:
        layer = draw(st.integers(0, geometry.num_hidden_layers - 1))
        tensors |= _fused(geometry, layer, rank, draw(st.sampled_from(["both", "gate_up", "down"])), added)
    config = {
        "r": rank,
        "lora_alpha": draw(st.sampled_from([1, 6, 0.3, -2.5])),
        "use_rslora": draw(st.booleans()),
        "target_modules": r".*",
    }
    return tensors, config, added


def _fused(geometry: Geometry, layer: int, rank: int, which: str, added: dict[str, tuple[Float32, Float32]]) -> Tensors:
    experts, inner, hidden = geometry.num_experts or 0, geometry.moe_intermediate_size or 0, geometry.hidden_size
    stack = f"model.layers.{layer}.mlp.experts"
    tensors: Tensors = {}
    if which != "down":
        made = factors(stack + ".base_layer" * (which == "both"), 2 * inner, hidden, rank * experts)
        a, b = made.values()
        a, b = a.reshape(experts, rank, hidden), b.reshape(2 * inner, rank, experts)
        for e in range(experts):
            added[f"{stack}.{e}.gate_proj.weight"] = b[:inner, :, e], a[e]
            added[f"{stack}.{e}.up_proj.weight"] = b[inner:, :, e], a[e]
        tensors |= made
    if which != "gate_up":
        made = factors(stack, hidden, inner, rank * experts)
        a, b = made.values()
        a, b = a.reshape(experts, rank, inner), b.reshape(hidden, rank, experts)
        for e in range(experts):
            added[f"{stack}.{e}.down_proj.weight"] = b[:, :, e], a[e]
        tensors |= made
    return tensors


@settings(max_examples=25)
@given(data=st.data(), geometry=geometries(), dtype=st.sampled_from(["F32", "BF16"]), to=st.sampled_from(TARGETS))
def test_merged_minus_base_is_scale_times_b_times_a(
    data: st.DataObject, geometry: Geometry, dtype: str, to: str
) -> None:
    tensors, config, added = data.draw(adapters(geometry))
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"])
    with scratch() as root:
        base = _write_base(root / "base", geometry, dtype)
        adapter = write_adapter(root / "adapter", tensors, **config)
        before = content_of(base)
        _merge(base, root / "wide", adapter=adapter, dtype="F32")
        merged = _merge(base, root / "out", adapter=adapter)
        assert merged == _merge(base, root / "there", to, adapter=adapter, max_memory=6 << 16)
        assert merged == _merge(root / "wide", root / "rounded", dtype=dtype)
        assert content_of(base) == before
        for name, _ in logical_parameters(geometry, tied=False):
            was, have, wide = (stored_values(root / folder, name) for folder in ("base", "out", "wide"))
            if name not in added:
                assert wide.tobytes() == was.tobytes() == have.tobytes()
                continue
            left, right = (factor.astype(np.float64) for factor in added[name])
            size = np.abs(was) + abs(scale) * (np.abs(left) @ np.abs(right))
            assert (np.abs(wide - (was + scale * (left @ right))) <= (config["r"] + 3) * 2.0**-24 * size).all()
            once = widen(narrow(wide.reshape(-1), dtype, name), dtype).reshape(wide.shape)
            assert once.tobytes() == have.tobytes()


def _merge(source: Path, target: Path, to: str = "hf", *, max_memory: int | None = None, **choices: Any) -> str | None:
    """Convert into one file; the fingerprint of what came out."""
    conversion = prepare(source, target, to, Choices(shard_bytes=1 << 30, **choices))
    return carry_out(conversion, workers=1, max_memory=max_memory).fingerprint


def _write_base(folder: Path, geometry: Geometry, dtype: str) -> Path:
    """A tiny model in one file, its values of the size of weights."""
    write_tiny(folder, geometry, tied=False, dtype=dtype)
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    size = int.from_bytes(raw[:8], "little")
    values = np.random.default_rng(0).normal(scale=0.1, size=(len(raw) - 8 - size) // (2 if dtype == "BF16" else 4))
    raw[8 + size :] = narrow(values.astype(np.float32), dtype, "x")
    path.write_bytes(raw)
    return folder


@given(
    data=st.data(),
    rows=st.integers(1, 60),
    columns=st.integers(1, 40),
    rank=st.integers(1, 9),
    cut=st.integers(1, 60),
)
def test_rows_are_the_same_bits_however_many_are_asked_for_at_once(
    data: st.DataObject, rows: int, columns: int, rank: int, cut: int
) -> None:
    generator = np.random.default_rng(rows * 1000 + columns)
    shapes = {"b": (rows, 3 * rank), "a": (columns, rank)}
    stored = {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    raw = {name: tensor.tobytes() for name, tensor in stored.items()}

    def read(file: str, offset: int, view: memoryview) -> None:
        assert offset + len(view) <= len(raw[file])
        view[:] = raw[file][offset : offset + len(view)]

    left = Factor.whole("b", 0, "F32", rows, 3 * rank).part(0, rows, 2, rank, every=3)
    right = Factor.whole("a", 0, "F32", columns, rank).transposed
    delta = LowRank(left, right, data.draw(st.sampled_from([0.5, 1.7, -3.0])))
    values = generator.normal(size=(rows, columns)).astype(np.float32)
    whole = Addition(delta, read, "x").apply(values.reshape(-1), 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(low_rank, "_READ_BYTES", data.draw(st.integers(1, 400)))
        patch.setattr(low_rank, "_TILE", data.draw(st.integers(1, 400)))
        addition = Addition(delta, read, "x")
        pieces = [addition.apply(values[low : low + cut].reshape(-1), low) for low in range(0, rows, cut)]
    assert b"".join(piece.tobytes() for piece in pieces) == whole.tobytes()
    wanted = values + delta.scale * (stored["b"][:, 2::3].astype(np.float64) @ stored["a"].T)
    assert np.allclose(whole.reshape(rows, columns), wanted, rtol=0, atol=2e-5)
