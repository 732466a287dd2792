"""Laws over generated tiny models: every format holds the same model, and every way back restores the same files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3conv.converters.conversion import carry_out, prepare
from qwen3conv.converters.detection import open_checkpoint
from qwen3conv.converters.formats import FORMATS
from qwen3conv.converters.geometry import Geometry
from qwen3conv.converters.layouts import TITAN_SCHEMAS, bind
from qwen3conv.converters.manifest import fingerprint_of
from qwen3conv.converters.parameters import logical_parameters
from qwen3conv.converters.policies import Choices, settle
from qwen3conv.converters.verification import compute_records, diff, verify
from tests.laws.tiny import content_of, geometries, scratch, write_tiny

pytestmark = pytest.mark.torch_free

WRITABLE = [name for name, f in FORMATS.items() if f.writable and not f.is_per_rank]
"""Formats of whole tensors; what ranks hold has laws of its own."""
SCHEMAS = [schema for schema in TITAN_SCHEMAS if schema != "T1"]


@pytest.mark.parametrize("first", WRITABLE)
@pytest.mark.parametrize("second", WRITABLE)
@settings(max_examples=6)
@given(geometry=geometries(), tied=st.booleans(), schema=st.sampled_from(SCHEMAS), shard=st.integers(40, 4000))
def test_any_two_formats_lead_back_to_the_same_files(
    first: str, second: str, geometry: Geometry, tied: bool, schema: str, shard: int
) -> None:
    with scratch() as root:
        write_tiny(root / "source", geometry, tied=tied, shard_bytes=shard)
        choices = Choices(titan_schema=schema)
        steps = [root / "source"]
        prints = []
        for index, to in enumerate((first, second, "hf")):
            conversion = prepare(steps[-1], root / f"{index}", to, choices)
            prints.append(carry_out(conversion, workers=1, max_memory=6 << 16).fingerprint)
            steps.append(root / f"{index}")
        settled = [settle(open_checkpoint(step)) for step in steps]
        prints += [fingerprint_of(compute_records(s, workers=1)) for s in settled]
        assert len(set(prints)) == 1
        assert all(diff(settled[0], other).equal for other in settled[1:])
        assert all(not verify(s, workers=1).problems for s in settled[1:])
        assert _tensor_bytes(steps[-1]) == _tensor_bytes(root / "source")


@settings(max_examples=15)
@given(geometry=geometries(), tied=st.booleans())
@pytest.mark.parametrize("to", [name for name in WRITABLE if name != "hf-fused"])
def test_there_and_back_restores_every_file_byte_for_byte(to: str, geometry: Geometry, tied: bool) -> None:
    with scratch() as root:
        write_tiny(root / "source", geometry, tied=tied, shard_bytes=300)
        carry_out(prepare(root / "source", root / "there", to), workers=1)
        carry_out(prepare(root / "there", root / "back", "hf"), workers=1)
        assert content_of(root / "back") == content_of(root / "source")


@given(geometry=geometries(), tied=st.booleans())
@pytest.mark.parametrize(
    "layout", [f.layout("T7") for n, f in FORMATS.items() if f.writable] + list(TITAN_SCHEMAS.values())
)
def test_a_layout_holds_every_element_exactly_once(layout, geometry: Geometry, tied: bool) -> None:  # type: ignore[no-untyped-def]
    if layout.schema == "T1" and geometry.is_moe:
        return
    seen: dict[str, int] = {}
    names: set[str] = set()
    for binding in bind(layout, geometry, tied=tied):
        for piece in binding.pieces:
            volume = piece.box.volume
            assert piece.stored.volume == volume
            seen[piece.name] = seen.get(piece.name, 0) + volume
        cells = sum(piece.stored.volume for piece in binding.pieces)
        assert cells == math.prod(binding.shape)
        assert binding.name not in names
        names.add(binding.name)
    expected = {n: math.prod(s) for n, s in logical_parameters(geometry, tied=tied, expert_bias=True)}
    if tied:
        expected["model.embed_tokens.weight"] *= 2  # the head is the embeddings once more
    has_bias = any(name.endswith("expert_bias") for name in seen)
    assert seen == {n: v for n, v in expected.items() if has_bias or not n.endswith("expert_bias")}


def _tensor_bytes(folder: Path) -> dict[str, bytes]:
    checkpoint = open_checkpoint(folder)
    found = {}
    for name, tensor in checkpoint.tensors.items():
        (chunk,) = tensor.chunks
        with open(folder / chunk.file, "rb") as file:
            file.seek(chunk.offset)
            found[name] = file.read(tensor.spec.nbytes)
    return found
