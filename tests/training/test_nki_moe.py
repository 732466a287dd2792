"""``train --backend nki-moe``: the experts' operator in place of torchtitan's experts changes no step of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import even_texts, saved_model
from tests.training.test_native import steps_of, write_texts
from tests.training.test_transformers_backend import assert_same_course, train

TOLERANCE = 1e-5
"""Relative, of every step's loss and gradient norm, in float32. Found: 2e-7 over 20 steps."""


@pytest.mark.slow
def test_twenty_steps_through_the_operator_are_those_of_the_native_backend(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    moe = saved_model(tmp_path_factory, "moe-trainable")
    data = write_texts(tmp_path / "text.jsonl", even_texts(moe, 64, 48))
    for backend in ("native", "nki-moe"):
        train(moe, data, tmp_path / backend, "--backend", backend, "--export", "none")
    losses = [values[0] for values in steps_of(tmp_path / "native").values()]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.1  # it learns
    assert_same_course(tmp_path / "nki-moe", tmp_path / "native", TOLERANCE)
