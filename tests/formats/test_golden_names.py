"""The names and shapes of every layout, as text: ``tests/golden/*.txt``.

The lists are of the small models of ``tests.models``, and hold what the real libraries store, as far as they write a
layout; older torchtitan schemas are spelled in ``real_checkpoints``. A list that changes says that the outside world
did: name the change in the commit, and renew it with ``python -m tests.formats.test_golden_names``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from qwen3conv.converters.names import natural_key
from tests.conversions import convert
from tests.models import VARIANTS, saved_model
from tests.real_checkpoints import ranked_session, read_model, titan_session, titan_state_dict

FOLDER = Path(__file__).parents[1] / "golden"

Variant = Callable[[str], Path]


class Listed(NamedTuple):
    """What a list is of."""

    variant: str
    to: str
    schema: str = "T7"


LISTS: dict[str, Listed] = {
    "hf-dense": Listed("dense", "hf"),
    "hf-tied": Listed("dense-tied", "hf"),
    "hf-moe": Listed("moe", "hf"),
    "hf-fused-moe": Listed("moe", "hf-fused"),
    "accelerate-tied": Listed("dense-tied", "accelerate"),
    "accelerate-moe": Listed("moe", "accelerate"),
    "accelerate-per-expert-moe": Listed("moe", "accelerate-per-expert"),
    "titan-transformers-moe": Listed("moe", "titan-transformers"),
    "titan-T1-dense": Listed("dense", "titan", "T1"),
    "titan-T2-moe": Listed("moe", "titan", "T2"),
    "titan-T3-dense": Listed("dense", "titan", "T3"),
    "titan-T3-moe": Listed("moe", "titan", "T3"),
    "titan-T3-fused-moe": Listed("moe", "titan", "T3-fused"),
    "titan-T4-moe": Listed("moe", "titan", "T4"),
    "titan-T4-fused-moe": Listed("moe", "titan", "T4-fused"),
    "titan-T5-moe": Listed("moe", "titan", "T5"),
    "titan-T5-fused-dense": Listed("dense", "titan", "T5-fused"),
    "titan-T5-fused-moe": Listed("moe", "titan", "T5-fused"),
    "titan-T6-moe": Listed("moe", "titan", "T6"),
    "titan-T7-dense": Listed("dense", "titan"),
    "titan-T7-tied": Listed("dense-tied", "titan"),
    "titan-T7-moe": Listed("moe", "titan"),
}
"""Lists by name: what is converted, and to what."""
REAL = {
    "hf-dense": "model dense",
    "hf-tied": "model dense-tied",
    "hf-moe": "model moe",
    "hf-fused-moe": "model moe-fused",
    "accelerate-moe": "ranked accelerate-moe",
    "titan-T7-dense": "titan dense",
    "titan-T7-tied": "titan tied",
    "titan-T7-moe": "titan moe",
}
"""Lists that a real library wrote too: transformers, accelerate, torchtitan."""
SPELLED = [name for name in LISTS if name.startswith("titan-T") and "transformers" not in name]


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Variant:
    return lambda name: saved_model(tmp_path_factory, name)


def lines_of(shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """``name [2, 3]``, one per tensor, layer 2 before layer 10."""
    return [f"{name} {list(shapes[name])}" for name in sorted(shapes, key=natural_key)]


def stored(folder: Path) -> list[str]:
    """The lines of a folder, as the safetensors library or torch reads its headers."""
    shapes: dict[str, Sequence[int]] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    if not shapes:
        entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        shapes = {name: entry.size for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    return lines_of(shapes)


def golden(name: str) -> list[str]:
    return (FOLDER / f"{name}.txt").read_text(encoding="ascii").splitlines()


@pytest.mark.parametrize("name", LISTS)
def test_what_is_written_has_the_names_and_shapes_of_the_list(name: str, variant: Variant, room: Path) -> None:
    listed = LISTS[name]
    convert(variant(listed.variant), room / "out", listed.to, titan_schema=listed.schema)
    assert stored(room / "out") == golden(name)


@pytest.mark.parametrize("name", REAL)
def test_a_real_library_writes_the_names_and_shapes_of_the_list(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    writer, _, what = REAL[name].partition(" ")
    if writer == "model":
        folder = saved_model(tmp_path_factory, what)
    elif writer == "ranked":
        folder = ranked_session(tmp_path_factory)[what].folder / "pytorch_model_fsdp_0"
    else:
        folder = titan_session(tmp_path_factory)[what].folder
    assert stored(folder) == golden(name)


@pytest.mark.parametrize("name", SPELLED)
def test_a_schema_from_first_principles_has_the_names_and_shapes_of_the_list(name: str, variant: Variant) -> None:
    listed = LISTS[name]
    schema, _, fused = listed.schema.partition("-")
    state = titan_state_dict(schema, *read_model(variant(listed.variant)), fused_qkv=bool(fused))
    assert lines_of({key: tensor.shape for key, tensor in state.items()}) == golden(name)


def test_every_list_is_of_something() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*")) == sorted(LISTS)


def renew() -> None:
    """Write every list from what is converted today; the tests then say whether the libraries agree."""
    for name, listed in LISTS.items():
        with tempfile.TemporaryDirectory() as base:
            VARIANTS[listed.variant](Path(base) / "model")
            convert(Path(base) / "model", Path(base) / "out", listed.to, titan_schema=listed.schema)
            text = "\n".join(stored(Path(base) / "out")) + "\n"
        (FOLDER / f"{name}.txt").write_text(text, encoding="ascii")


if __name__ == "__main__":
    renew()
