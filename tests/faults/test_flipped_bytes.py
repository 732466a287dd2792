"""Checkpoints damaged at random: every command refuses them or takes them for what they now are, and nothing else."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwen3conv.converters.detection import open_checkpoint
from qwen3conv.converters.errors import ConversionError
from qwen3conv.converters.inspection import inspect
from qwen3conv.converters.policies import Choices, settle
from qwen3conv.converters.stores.staging import partial_path
from qwen3conv.converters.verification import compute_records, diff, verify
from tests.faults.conftest import MOE, convert, write_source
from tests.laws.tiny import scratch, write_tiny

pytestmark = pytest.mark.torch_free

OTHER = {"hf": "titan", "titan": "hf"}


@pytest.fixture(scope="module")
def sound() -> Iterator[dict[str, Path]]:
    """A Hugging Face folder that has been converted before, and a DCP, both with manifest, index and sidecars."""
    with scratch() as place:
        write_source(place / "dcp", "hf")
        convert(place / "dcp", place / "again", "hf", choices=Choices())
        write_tiny(place / "tied", MOE, tied=True, shard_bytes=10_000)
        yield {"titan": place / "dcp", "hf": place / "again", "tied": place / "tied"}


def survives(folder: Path, to: str) -> None:
    """Use ``folder`` in every way there is. Anything but a ``ConversionError`` is a failed test."""
    target = folder.with_name("out")
    choices = Choices(drop_expert_bias=True)
    try:
        convert(folder, target, to, choices=choices)
        refused = False
    except ConversionError:
        refused = True
    assert target.exists() != refused
    assert not partial_path(target).exists()
    assert refused or not verify(settle(open_checkpoint(target)), workers=1).problems
    for use in (
        lambda: inspect(folder).to_dict(tensors=True),
        lambda: compute_records(settle(open_checkpoint(folder)), workers=1),
        lambda: verify(settle(open_checkpoint(folder)), workers=1),
        lambda: diff(settle(open_checkpoint(folder)), settle(open_checkpoint(folder))),
    ):
        with suppress(ConversionError):
            use()


def damaged(sound: Path, place: Path) -> Path:
    shutil.copytree(sound, place / "in")
    return place / "in"


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["hf", "titan", "tied"]),
    which=st.integers(0, 50),
    spots=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), min_size=1, max_size=4),
)
def test_flipped_bytes_in_any_file(
    sound: dict[str, Path], kind: str, which: int, spots: list[tuple[float, int]]
) -> None:
    with scratch() as place:
        folder = damaged(sound[kind], place)
        paths = files_of(folder)
        path = paths[which % len(paths)]
        content = bytearray(path.read_bytes())
        for where, mask in spots:
            content[int(where * (len(content) - 1))] ^= mask
        path.write_bytes(content)
        survives(folder, OTHER.get(kind, "titan"))


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["hf", "titan"]),
    which=st.integers(0, 50),
    begin=st.floats(0, 1),
    size=st.integers(0, 400),
    new=st.binary(max_size=40),
)
def test_parts_of_any_file_lost_or_replaced(
    sound: dict[str, Path], kind: str, which: int, begin: float, size: int, new: bytes
) -> None:
    with scratch() as place:
        folder = damaged(sound[kind], place)
        paths = files_of(folder)
        path = paths[which % len(paths)]
        content = path.read_bytes()
        at = int(begin * len(content))
        path.write_bytes(content[:at] + new + content[at + size :])
        survives(folder, OTHER[kind])


NASTY: list[Any] = [
    *(None, True, False, 0, -1, 1, 7, 2**31, 2**63, 2**70, 10**400, 0.5, -0.0, 1e308),
    *("", "x", "\ud800", "../../etc/passwd", "/etc/passwd", "model.safetensors", "\0", "9" * 5000, "bfloat16", "I64"),
    *([], [[]], [1, 2], {}, {"": {}}, {"a": [1]}, [None], ["F32", [3], "0" * 32], [[[[[[[[]]]]]]]]),
]
"""Values that a JSON file can hold anywhere."""


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places_in(item, (*path, key)))]


@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["hf", "titan"]),
    name=st.sampled_from(["config.json", "qwen3conv.json", "model.safetensors.index.json"]),
    which=st.integers(0, 5000),
    value=st.sampled_from(NASTY),
    rename=st.booleans(),
)
def test_any_value_of_any_json_file_replaced(
    sound: dict[str, Path], kind: str, name: str, which: int, value: Any, rename: bool
) -> None:
    with scratch() as place:
        folder = damaged(sound[kind], place)
        path = next(iter(folder.rglob(name)))
        document = json.loads(path.read_text())
        spots = places_in(document)
        *above, key = spots[which % len(spots)] or (None,)
        inner = copy.deepcopy(document)
        target = inner
        for step in above:
            target = target[step]
        if key is None:
            inner = value
        elif rename and isinstance(target, dict):
            target[str(value)[:300]] = target.pop(key)
        else:
            target[key] = value
        text = json.dumps(inner)
        path.write_text(text.replace("1e+308", "1e999") if which % 2 else text)
        survives(folder, OTHER[kind])


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(which=st.integers(0, 50), spot=st.floats(0, 1), mask=st.integers(1, 255), kind=st.sampled_from(["hf", "titan"]))
def test_flipped_bytes_in_a_folder_given_with_like(
    sound: dict[str, Path], which: int, spot: float, mask: int, kind: str
) -> None:
    with scratch() as place:
        folder = damaged(sound[kind], place)
        paths = files_of(folder)
        path = paths[which % len(paths)]
        content = bytearray(path.read_bytes())
        content[int(spot * (len(content) - 1))] ^= mask
        path.write_bytes(content)
        with suppress(ConversionError):
            convert(sound["titan"], place / "out", "hf", choices=Choices(like=folder, config_from="source"))
