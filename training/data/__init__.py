"""Rows of a data source into fixed-length sequences of tokens, labels and positions."""

from __future__ import annotations

from .loader import ChatDataLoader

__all__ = ["ChatDataLoader"]
