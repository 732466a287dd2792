"""For all tests: hypothesis profiles, and collection where torch is not installed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Deadlines measure a shared machine, not the code. Derandomized: a change is judged by the same examples every time.
settings.register_profile("quick", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("thorough", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

TORCH = importlib.util.find_spec("torch") is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without torch, leave out test files that hold no ``torch_free`` test: importing them needs torch."""
    if TORCH or collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    return True if "torch_free" not in collection_path.read_text(encoding="utf-8") else None
