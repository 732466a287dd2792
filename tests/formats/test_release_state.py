"""What torchtitan 0.2 and 0.3 save in two forms beside model and optimizer: as torch stores it, and as it reads it."""

from __future__ import annotations

import io
import pickle
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qwen3conv.converters.release_state import newer_loader, older_loader, older_scheduler, same_value

DOCUMENTS = st.lists(st.lists(st.integers(0, 200_000), min_size=2, max_size=9), max_size=5)
PLACES: list[dict[str, Any]] = [{"sample_idx": 3}, {"data": {"examples_iterable": {"shard": 1}}}]
REST = {"_num_yielded": 2, "_shared_seed": None, "fetcher_state": {"fetcher_ended": False}, "_iterator_finished": False}


def archive(value: object) -> bytes:
    """As torch's planner stores a value that is not a tensor."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def loader(state: dict[str, Any]) -> bytes:
    return archive(pickle.dumps({**REST, "dataset_state": state}))


def read(stored: bytes | None) -> dict[str, Any]:
    assert stored is not None
    whole = pickle.loads(torch.load(io.BytesIO(stored), weights_only=True))
    state: dict[str, Any] = whole.pop("dataset_state")
    assert whole == REST
    return state


@given(st.lists(st.integers(0, 200_000), max_size=20), st.integers(0, 10**6))
def test_the_tokens_left_over_go_up_and_come_back(tokens: list[int], samples: int) -> None:
    up = newer_loader(loader({"token_buffer": tokens, "sample_idx": samples}))
    state = read(up)
    count = max(len(tokens) - 1, 0)
    assert state == {
        "sample_idx": samples,
        "inputs_buffer": tokens[:-1],
        "labels_buffer": tokens[1:],
        "positions_buffer": list(range(count)),
        "epoch": 0,
    }
    assert up is not None
    if len(tokens) != 1:  # a lone token has nothing to predict
        assert read(older_loader(up)) == {"token_buffer": tokens, "sample_idx": samples}


@given(
    DOCUMENTS, st.integers(0, 8), st.sampled_from([{"sample_idx": 3}, {"data": {"examples_iterable": {"shard": 1}}}])
)
def test_the_documents_left_over_go_down_as_the_stream_they_came_from(
    documents: list[list[int]], read_already: int, place: dict[str, Any]
) -> None:
    inputs = list(chain.from_iterable(document[:-1] for document in documents))
    labels = list(chain.from_iterable(document[1:] for document in documents))
    positions = list(chain.from_iterable(range(len(document) - 1) for document in documents))
    cut = min(read_already, len(inputs))
    buffers = {"inputs_buffer": inputs[cut:], "labels_buffer": labels[cut:], "positions_buffer": positions[cut:]}
    state = read(older_loader(loader({**buffers, **place, "epoch": 0})))
    left: list[int] = []
    for document in documents:  # of the one that is begun, what is not yet an input, and all of the others
        taken = min(cut, len(document) - 1)
        cut -= taken
        left += document[taken:] if taken < len(document) - 1 else []
    assert state == {"token_buffer": left, **place}


@pytest.mark.parametrize(
    "value",
    [
        b"opaque",
        pickle.dumps({"dataset_state": {"token_buffer": "text"}}),
        pickle.dumps({"a": {"token_buffer": [1]}, "b": {"token_buffer": [2]}}),
        pickle.dumps({"dataset_state": {"inputs_buffer": [1], "labels_buffer": [], "positions_buffer": [0]}}),
        pickle.dumps(print),
        7,
    ],
)
def test_what_is_no_text_loader_is_left_as_it_is(value: object) -> None:
    assert newer_loader(archive(value)) is None
    assert older_loader(archive(value)) is None


def test_the_schedule_is_made_of_the_step_and_one_rate() -> None:
    made = older_scheduler(archive(7), [archive(2e-3), archive(2e-3)], [archive(5e-4)])
    found = {name: torch.load(io.BytesIO(data), weights_only=True) for name, data in made.items()}
    assert found == {
        "lr_scheduler.base_lrs": [2e-3],
        "lr_scheduler._step_count": 8,
        "lr_scheduler._last_lr": [5e-4],
        "lr_scheduler._is_initial": False,
        "lr_scheduler._get_lr_called_within_step": False,
    }
    assert all(same_value(data, archive(found[name])) for name, data in made.items())
    assert not same_value(archive([1.0]), archive([2.0]))


@pytest.mark.parametrize(
    ("epoch", "initial", "now"),
    [(7, [1e-3, 2e-3], [1e-3]), (7, [1e-3], []), ("seven", [1e-3], [1e-3]), (7, [[1e-3]], [1e-3])],
)
def test_of_other_rates_no_schedule_is_made(epoch: object, initial: list[object], now: list[object]) -> None:
    assert older_scheduler(archive(epoch), map(archive, initial), map(archive, now)) == {}
