"""The record of a run, one JSON file: versions, device, degrees, tokens per step, and what each step gave."""

from __future__ import annotations

import importlib.metadata
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PACKAGES = ("qwen3conv", "torch", "torchtitan", "transformers")


@dataclass(slots=True)
class RunRecord:
    """What is known of a run so far. Every step rewrites the file whole, so a killed run leaves a readable one."""

    path: Path
    content: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def start(cls, path: Path, facts: Mapping[str, Any]) -> RunRecord:
        """Begin a record, or go on with the one at ``path``: facts and steps that come again replace what is there."""
        before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        versions = {name: _version(name) for name in _PACKAGES}
        kept = {key: value for key, value in before.items() if key != "steps"}
        record = cls(path, {**kept, "versions": versions, **facts, "steps": before.get("steps", {})})
        path.parent.mkdir(parents=True, exist_ok=True)
        record._write()
        return record

    def step(self, step: int, **found: float) -> None:
        """Note what a step gave. Later ones, of a try that went further before it was resumed, are dropped."""
        steps = {number: values for number, values in self.content["steps"].items() if int(number) < step}
        steps[str(step)] = {**found, "time": round(time.time(), 3)}
        self.content["steps"] = steps
        self._write()

    def add(self, **facts: Any) -> None:
        """Add to what is known of the whole run."""
        steps = self.content.pop("steps")
        self.content |= {**facts, "steps": steps}
        self._write()

    def add_to_step(self, step: int, **found: float) -> None:
        """Add to what a step gave."""
        self.content["steps"].setdefault(str(step), {}).update(found)
        self._write()

    def _write(self) -> None:
        _write(self.path, self.content)


def add_to_record(path: Path, **facts: Any) -> None:
    """Add ``facts`` to a record, before its steps; one that is not there is begun."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    steps = content.pop("steps", {})
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, {**content, **facts, "steps": steps})


def _write(path: Path, content: Mapping[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
