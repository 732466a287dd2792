"""Generated tiny models as Hugging Face folders, written without torch: for laws over many of them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import strategies as st

from qwen3conv.converters.boxes import TensorSpec
from qwen3conv.converters.config_derive import derive_config
from qwen3conv.converters.config_styles import render_config
from qwen3conv.converters.geometry import Geometry
from qwen3conv.converters.parameters import logical_parameters
from qwen3conv.converters.stores.safetensors_writing import arrange_safetensors, split_by_size


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is gone afterwards; in memory where possible, because flushing hundreds of outputs is slow."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Dense and MoE, heads uneven on purpose: Q * D differs from H, one to three query heads per group."""
    kv_heads = draw(st.integers(1, 3))
    moe = draw(st.booleans())
    return Geometry(
        vocab_size=draw(st.integers(3, 17)),
        hidden_size=draw(st.integers(1, 9)),
        num_hidden_layers=draw(st.integers(1, 3)),
        num_attention_heads=kv_heads * draw(st.integers(1, 3)),
        num_key_value_heads=kv_heads,
        head_dim=draw(st.integers(1, 4)),
        intermediate_size=None if moe else draw(st.integers(1, 7)),
        moe_intermediate_size=draw(st.integers(1, 7)) if moe else None,
        num_experts=draw(st.integers(1, 4)) if moe else None,
    )


def write_tiny(
    folder: Path, geometry: Geometry, *, tied: bool, dtype: str = "BF16", shard_bytes: int = 1 << 20
) -> None:
    """Write a Hugging Face folder in which no two elements of the model are equal (as far as 16 bits reach)."""
    folder.mkdir(parents=True)
    width = {"BF16": 2, "F32": 4}[dtype]
    specs = [TensorSpec(name, dtype, shape) for name, shape in logical_parameters(geometry, tied=tied)]
    arrangement = arrange_safetensors(split_by_size(specs, shard_bytes))
    for file in arrangement.files:
        with open(folder / file.name, "wb") as out:
            out.truncate(file.size)
            for offset, content in file.seals():
                out.seek(offset)
                out.write(content)
    counter = 0
    for name in (spec.name for spec in specs):
        stored = arrangement.tensors[name]
        count = stored.spec.nbytes // width
        # exponent bits stay below the top, so that every pattern is a finite number in bf16 and in fp32
        values = ((counter + i) % 0x7F00 << 8 * (width - 2) for i in range(count))
        with open(folder / stored.chunks[0].file, "r+b") as out:
            out.seek(stored.chunks[0].offset)
            out.write(b"".join(value.to_bytes(width, "little") for value in values))
        counter += count
    for name, content in arrangement.trailers():
        (folder / name).write_bytes(content)
    known: dict[str, object] = {
        "dtype": dtype,
        "tie_word_embeddings": tied,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128,
    }
    if geometry.is_moe:
        known |= {"num_experts_per_tok": 1, "norm_topk_prob": True}
    (folder / "config.json").write_bytes(render_config(derive_config(geometry, known)))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    (folder / "LICENSE").write_text("Apache-2.0\n")


def content_of(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but the manifest."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "qwen3conv.json"
    }
