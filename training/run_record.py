"""The record of a run, one JSON file: versions, device, degrees, tokens per step, and what each step gave."""

from __future__ import annotations

import importlib.metadata
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PACKAGES = ("qwen3conv", "torch", "torchtitan", "transformers")


@dataclass(slots=True)
class RunRecord:
    """What is known of a run so far. Every step rewrites the file whole, so a killed run leaves a readable one.

    ``legs`` lists what was trained under one command each: first and last step, versions, settings, and under
    ``changed`` the settings that the leg before it had otherwise.
    """

    path: Path
    content: dict[str, Any]
    leg: dict[str, Any]
    """The one that begins with this process; in ``content`` as soon as its first step is known."""

    @classmethod
    def start(cls, path: Path, facts: Mapping[str, Any], settings: Mapping[str, Any]) -> RunRecord:
        """Begin a record, or go on with the one at ``path``: facts and steps that come again replace what is there.

        ``settings`` are those that decide what is computed.
        """
        before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        versions = {name: _version(name) for name in _PACKAGES}
        kept = {key: value for key, value in before.items() if key not in ("legs", "steps")}
        begun = {"legs": before.get("legs", []), "steps": before.get("steps", {})}
        leg = {"versions": versions, **facts, "settings": json.loads(json.dumps(settings))}
        record = cls(path, {**kept, "versions": versions, **facts, **begun}, leg)
        path.parent.mkdir(parents=True, exist_ok=True)
        record._write()
        return record

    def begin(self, first: int) -> dict[str, tuple[object, object]]:
        """Begin this process's leg with the step ``first``; what is set otherwise than in the leg that it goes on from.

        Of legs that went further before they were resumed, the rest is dropped.
        """
        legs = [leg for leg in self.content["legs"] if leg["first"] < first]
        if legs:
            legs[-1]["last"] = min(legs[-1]["last"], first - 1)
        before, now = (legs[-1]["settings"] if legs else {}), self.leg["settings"]
        changed = {key: (before[key], value) for key, value in now.items() if key in before and before[key] != value}
        self.leg = {
            "first": first,
            "last": first - 1,
            "changed": {key: [*pair] for key, pair in changed.items()},
        } | self.leg
        self.content["legs"] = [*legs, self.leg]
        self._write()
        return changed

    def step(self, step: int, *, tokens_per_second: float, **found: float) -> None:
        """Note what a step gave, and the rate until now. Later ones, of a try that went further before it was resumed,
        are dropped.
        """
        if "first" not in self.leg:
            self.begin(step)
        self.leg |= {"last": step, "tokens_per_second": round(tokens_per_second, 1)}
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
