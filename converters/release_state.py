"""What torchtitan 0.2 and 0.3.0 save in two forms beside model and optimizer: the place in the text, the schedule.

The text: both keep the number of samples read and the tokens left over of them. In 0.2 those are one stream, of which a
sequence takes one token more than it is long. In 0.3.0 they are inputs, labels and positions, shifted within each
document, so that no sequence predicts across two. A loader that finds the other's form stops at its first batch.

The schedule: 0.2 saves all of ``LambdaLR.state_dict()`` and asks for it; 0.3.0 saves and reads ``last_epoch`` alone.

Source: torchtitan 0.2.2 and 0.3.0, ``hf_datasets/text_datasets.py``, ``components/dataloader.py`` (the pickle in it),
``components/lr_scheduler.py``.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any

from .errors import SourceError
from .stores.dcp_values import simple_value, unpickled
from .stores.torch_zip_writing import value_archive

LOADER = "dataloader."
SCHEDULER = "lr_scheduler."
WHOLE_SCHEDULER = (f"{SCHEDULER}base_lrs", f"{SCHEDULER}_step_count")
"""Of the keys that only 0.2 has."""

_TOKENS, _EPOCH = "token_buffer", "epoch"
_BUFFERS = ("inputs_buffer", "labels_buffer", "positions_buffer")

State = dict[Any, Any]


def newer_loader(archive: bytes) -> bytes | None:
    """A rank's loader state of 0.2 in the form of 0.3; ``None`` for anything else. Positions of what is left over of a
    document that was begun count from there: where it began is not stored.
    """

    def change(state: State) -> None:
        tokens = state.pop(_TOKENS)
        count = max(len(tokens) - 1, 0)
        state |= dict(zip(_BUFFERS, (tokens[:count], tokens[1:], list(range(count))), strict=True))
        state[_EPOCH] = 0

    return _changed(archive, lambda state: _are_numbers(state.get(_TOKENS)), change)


def older_loader(archive: bytes) -> bytes | None:
    """A rank's loader state of 0.3 in the form of 0.2; ``None`` for anything else."""

    def change(state: State) -> None:
        inputs, labels, positions = (state.pop(key) for key in _BUFFERS)
        state.pop(_EPOCH, None)
        state[_TOKENS] = tokens = []
        for at, (token, position) in enumerate(zip(inputs, positions, strict=True)):
            if at and position == 0:  # the last token of a document is no input, only a label
                tokens.append(labels[at - 1])
            tokens.append(token)
        tokens += labels[-1:]

    def fits(state: State) -> bool:
        buffers = [state.get(key) for key in _BUFFERS]
        return all(map(_are_numbers, buffers)) and len({len(buffer) for buffer in buffers if buffer is not None}) == 1

    return _changed(archive, fits, change)


def older_scheduler(last_epoch: bytes, initial_rates: Iterable[bytes], rates: Iterable[bytes]) -> dict[str, bytes]:
    """What 0.2 asks for beside ``last_epoch``, by name, of archives of 0.3: each parameter's ``initial_lr`` and ``lr``.

    Nothing when parameters have different rates, which one schedule of 0.2 has not.
    """
    try:
        epoch = simple_value(last_epoch, SCHEDULER)
        initial, now = ({simple_value(data, SCHEDULER) for data in set(found)} for found in (initial_rates, rates))
    except (SourceError, TypeError):
        return {}
    if type(epoch) is not int or len(initial) != 1 or len(now) != 1:
        return {}
    state = {"base_lrs": [*initial], "_step_count": epoch + 1, "_last_lr": [*now]}
    state |= {"_is_initial": False, "_get_lr_called_within_step": False}
    return {f"{SCHEDULER}{key}": value_archive(value) for key, value in state.items()}


def same_value(archive: bytes, other: bytes) -> bool:
    """Whether two archives hold the same plain value."""
    try:
        return archive == other or simple_value(archive, SCHEDULER) == simple_value(other, SCHEDULER)
    except SourceError:
        return False


def _changed(archive: bytes, fits: Callable[[State], bool], change: Callable[[State], None]) -> bytes | None:
    """The archive with ``change`` done to the one dict in its pickle that ``fits``."""
    try:
        content = simple_value(archive, LOADER)
        whole = unpickled(content, LOADER) if isinstance(content, bytes) else None
    except SourceError:  # of a loader that this is not about: nobody else needs to understand it
        return None
    found: list[State] = []
    left: list[object] = [whole]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            found += [value] if fits(value) else []
            left += value.values()
    if len(found) != 1:
        return None
    change(found[0])
    return value_archive(pickle.dumps(whole, protocol=4))


def _are_numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)
