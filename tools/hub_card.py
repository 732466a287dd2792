"""The model card of what is sent: where it is from, its fingerprint, how it was made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwen3conv.converters.manifest import Manifest

_LOCAL = ("path", "run", "trains")
"""Keys of a manifest's source that hold paths of the machine it was made on."""

_FRONT = re.compile(r"\A---\r?\n(.*?)\r?\n---\r?\n", re.DOTALL)


def public_source(source: Mapping[str, Any]) -> dict[str, Any]:
    """What a manifest says of its source, with the last part of paths alone: where they lie is nobody's business."""
    found = dict(source)
    for key in _LOCAL:
        if isinstance(found.get(key), str):
            found[key] = Path(found[key]).name
    for key in ("like", "adapter"):
        value = found.get(key)
        if isinstance(value, Mapping):
            found[key] = public_source(value)
        elif isinstance(value, str):
            found[key] = Path(value).name
    return found


def public_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a run, with the last part of absolute paths alone."""

    def public(value: object) -> object:
        if isinstance(value, str) and value.startswith("/"):
            return Path(value).name
        return {key: public(below) for key, below in value.items()} if isinstance(value, Mapping) else value

    return {key: public(value) for key, value in record.items()}


def new_card(
    repository: str, manifest: Manifest | None, fingerprint: str | None, record: Mapping[str, Any] | None
) -> str:
    """A card for a folder that has none."""
    base = base_model(manifest)
    front = ["library_name: transformers", "pipeline_tag: text-generation"]
    front += [f"base_model: {base}"] if base else []
    title = repository.rpartition("/")[2]
    return "\n".join(["---", *front, "---", "", f"# {title}", "", *_facts(repository, manifest, fingerprint, record)])


def joined_card(
    text: str, repository: str, manifest: Manifest, fingerprint: str | None, record: Mapping[str, Any] | None
) -> str:
    """The card of the model that this one was made from, with what is known of this one behind it."""
    base, front = base_model(manifest), _FRONT.match(text)
    if base and front is not None and not re.search(r"^base_model:", front[1], re.MULTILINE):
        text = f"---\n{front[1]}\nbase_model: {base}\n---\n{text[front.end() :]}"
    facts = _facts(repository, manifest, fingerprint, record)
    return "\n".join([text.rstrip(), "", "## How this copy was made", "", *facts])


def base_model(manifest: Manifest | None) -> str | None:
    """The hub id of the model that this one was made from, as far as its manifest knows."""
    source: Any = manifest.source if manifest is not None else {}
    found = source.get("base_model", source.get("hub"))
    return found if isinstance(found, str) and re.fullmatch(r"[\w.\-]+/[\w.\-]+", found, re.ASCII) else None


def state_card(repository: str, step: int, record: Mapping[str, Any] | None, source: Mapping[str, Any]) -> str:
    """A card for the state of a training run."""
    rows = [("step", str(step)), *_source_rows(source), *_record_rows(record)]
    lines = ["---", "tags:", "- training-state", "---", "", f"# {repository.rpartition('/')[2]}, step {step}", ""]
    lines += ["Weights, optimizer, scheduler and data position of a torchtitan run, as a DCP checkpoint.", ""]
    lines += [*_table(rows), "", "Go on from it:", "", "```"]
    lines += [f"qwen3conv train --resume {repository}@step-{step} --data FILE --output RUN", "```", ""]
    return "\n".join(lines)


def _facts(
    repository: str, manifest: Manifest | None, fingerprint: str | None, record: Mapping[str, Any] | None
) -> list[str]:
    rows = _source_rows(manifest.source if manifest is not None else {})
    rows += [("fingerprint", fingerprint)] if fingerprint else []
    if manifest is not None:
        rows.append(("made by", f"{manifest.tool}, format {manifest.format}"))
        rows += [("decision", str(policy.get("summary", policy.get("name", "")))) for policy in manifest.policies]
    rows += _record_rows(record)
    lines = [*_table(rows), ""] if rows else []
    if manifest is not None:
        lines += ["Check it:", "", "```", f"qwen3conv pull {repository} model", "qwen3conv verify model", "```", ""]
    return lines


def _source_rows(source: Mapping[str, Any]) -> list[tuple[str, str]]:
    known = public_source(source)
    if "hub" in known:
        at = f" at {known['commit']}" if "commit" in known else ""
        return [("source", f"{known['hub']}{at}")]
    return [("source", str(known["path"]))] if "path" in known else []


def _record_rows(record: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if record is None:
        return []
    rows = []
    steps = list(record["steps"].items())
    if steps:
        (first, began), (last, ended) = steps[0], steps[-1]
        rows.append(("trained", f"step {first} loss {began['loss']:.4f}, step {last} loss {ended['loss']:.4f}"))
    for key in ("device", "degrees", "tokens_per_step"):
        if key in record:
            value = record[key]
            if isinstance(value, Mapping):
                value = ", ".join(f"{name} {number}" for name, number in value.items())
            rows.append((key.replace("_", " "), str(value)))
    versions = record.get("versions")
    if isinstance(versions, Mapping):
        rows.append(("versions", ", ".join(f"{name} {found}" for name, found in versions.items() if found)))
    return rows


def _table(rows: list[tuple[str, str]]) -> list[str]:
    cells = [(name, " ".join(value.replace("|", "\\|").split())) for name, value in rows]
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells)]
