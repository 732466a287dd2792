"""A place for outputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.laws.tiny import scratch


@pytest.fixture
def room() -> Iterator[Path]:
    """An empty folder in memory where there is one: conversions flush what they write, and disks are slow at that."""
    with scratch() as folder:
        yield folder
