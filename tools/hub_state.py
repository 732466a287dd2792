"""Training state on the hub: one step of a run per commit, found again by its tag, never written over.

The repository at ``step-500`` is a DCP folder as every command here reads it: torchtitan's files, ``hf_assets`` with
config and tokenizer, and ``qwen3conv-state.json``, which lists the files with their hashes and says what was trained.
Tag ``latest`` is that of the highest step. Dropping a tag frees no storage by itself: the hub keeps history.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwen3conv import __version__
from qwen3conv.converters.config_json import read_json_object
from qwen3conv.converters.errors import DestinationError, SourceError, VerifyError, enumerate_problems
from qwen3conv.converters.manifest import ASSETS, MANIFEST, read_manifest
from qwen3conv.converters.stores.dcp import read_dcp
from qwen3conv.training.launch import Run, read_record

from .hub_card import public_record, public_source, state_card
from .hub_client import Announce, Listing, client, patiently
from .hub_download import file_id
from .hub_id import HubId
from .hub_pull import pull
from .hub_sending import KEPT, Files, make_repository, send, sending

STATE = "qwen3conv-state.json"
SOURCE = "qwen3conv-source.json"
"""The manifest of what the run began from; under its own name it would speak for the step."""

LATEST = "latest"
RESUMED = "resumed.json"
"""In the folder of a run that goes on from the hub: from where."""

_STEP = re.compile(r"step-([0-9]{1,15})")


def push_state(
    folder: Path,
    asked: HubId,
    *,
    step: int | None,
    keep: int | None,
    public: bool,
    message: str | None,
    announce: Announce,
) -> dict[str, Any]:
    """Send one step of the run in ``folder``, tag it, move ``latest``; with ``keep``, drop the tags of older steps.

    Raises:
        SourceError: there is no such step, or it is not whole.
        DestinationError: the hub has another checkpoint under that step, or does not take this one.
    """
    step, place, run = _find_step(folder, step)
    files, state = _state_files(place, run, step)
    tag = f"step-{step}"
    make_repository(asked, public=public)
    tags = _tags(asked)
    said = message or f"Step {step}"
    if tag in tags:
        _refuse_another(asked, tag, state)
        announce(f"{asked.repository} has {tag} already, and it is this one")
        told: dict[str, Any] = {"commit": tags[tag], "url": None, "files": len(files), "bytes": 0}
    else:
        record = read_record(run.record) if run.record.is_file() else None
        files = {**files, "README.md": state_card(asked.repository, step, record, state["source"]).encode()}
        there = _listing(asked, None).files
        gone = [name for name in there if name not in files and name not in KEPT]
        sent = send(asked, files, said, deletes=gone, announce=announce)
        told = {"commit": sent.commit, "url": sent.url, "files": sent.files, "bytes": sent.bytes}
    dropped = _move_tags(asked, tag, told["commit"], keep)
    return {"repository": asked.repository, "tag": tag, "step": step, **told, "dropped": dropped}


def pull_state(asked: HubId, folder: Path, *, announce: Announce) -> int:
    """Make ``folder`` a run that goes on from a state on the hub; its step. What an earlier try fetched is kept.

    Raises:
        SourceError: no state lies there.
        DestinationError: the folder is another run.
    """
    if folder.exists() and any(folder.iterdir()):
        return _resumed(asked, folder)
    found: list[int] = []

    def arrange(fetched: Path, listing: Listing) -> None:
        _check_state(fetched)
        step = int(_read_state(fetched)["step"])
        told = {"hub": asked.repository, "revision": asked.revision, "commit": listing.commit, "step": step}
        _arrange_as_run(fetched, step, told)
        found.append(step)

    pull(asked, folder, announce=announce, arrange=arrange)
    return found[0]


def _arrange_as_run(folder: Path, step: int, told: Mapping[str, object]) -> None:
    """Make a state as it lies on the hub a run that goes on from it."""
    place = folder / "checkpoint" / f"step-{step}"
    moves = {name: place / name for name in _read_state(folder)["files"]}
    moves |= {ASSETS: folder / "source" / ASSETS, SOURCE: folder / "source" / MANIFEST}
    for name, target in moves.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(folder / name, target)
    for name in (STATE, "README.md"):
        (folder / name).unlink(missing_ok=True)
    (folder / RESUMED).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def _resumed(asked: HubId, folder: Path) -> int:
    """The step of a run that was begun from the same place before."""
    try:
        told = json.loads((folder / RESUMED).read_text(encoding="utf-8"))
        same = (told["hub"], told["revision"]) == (asked.repository, asked.revision)
        step = int(told["step"])
    except (OSError, ValueError, KeyError, TypeError):
        same, step = False, 0
    if not same:
        raise DestinationError(f"{folder} exists and is no run that began from {asked}; name another --output")
    return step


def _find_step(folder: Path, step: int | None) -> tuple[int, Path, Run]:
    run = Run(folder, "")
    if not folder.is_dir():
        raise SourceError(f"{folder} is no folder; name a run of train")
    steps = dict(run.checkpoints())
    if not steps:
        raise SourceError(f"{folder} is no run of train with a whole checkpoint: {folder / 'checkpoint'} holds none")
    wanted = max(steps) if step is None else step
    if wanted not in steps:
        known = ", ".join(map(str, steps))
        raise SourceError(f"{folder / 'checkpoint'} holds no whole checkpoint of step {wanted}; it has {known}")
    return wanted, steps[wanted], run


def _state_files(place: Path, run: Run, step: int) -> tuple[Files, dict[str, Any]]:
    """Everything that the step needs to go on elsewhere, and the manifest of it, in the files too."""
    record = read_record(run.record) if run.record.is_file() else None
    if record is not None and record.get("lora") is not None:
        raise SourceError(
            f"{run.folder} trains adapters, whose checkpoint lacks the model under them; push its export instead"
        )
    contents = read_dcp(place)  # which refuses what is not whole
    manifest = read_manifest(run.source)
    if manifest is None or not (run.assets / "config.json").is_file():
        raise SourceError(f"{run.source} holds no config.json and manifest of what is trained; was it moved away?")
    files: dict[str, Path | bytes] = {name: place / name for name in (".metadata", *contents.files)}
    listed = {
        name: {"bytes": os.path.getsize(path), "sha256": _sha256(path)}
        for name, path in files.items()
        if isinstance(path, Path)
    }
    for path in sorted(run.assets.rglob("*")):
        if path.is_file():
            files[f"{ASSETS}/{path.relative_to(run.assets).as_posix()}"] = path
    source = public_source(manifest.source)
    files[SOURCE] = replace(manifest, source=source).to_json()
    state: dict[str, Any] = {
        "state_version": 1,
        "tool": f"qwen3conv {__version__}",
        "step": step,
        "source": source,
        "source_fingerprint": manifest.fingerprint,
        "format": manifest.format,
        "files": listed,
    }
    if record is not None:
        state |= {key: record[key] for key in ("degrees", "versions") if key in record}
        files["run.json"] = (json.dumps(public_record(record), indent=1) + "\n").encode()
    files[STATE] = (json.dumps(state, indent=1) + "\n").encode()
    return files, state


def _sha256(path: Path) -> str:
    from qwen3conv.converters.remote import RemoteFile

    return file_id(path, RemoteFile(0, "0" * 64))


def _check_state(folder: Path) -> None:
    """Refuse what came if it is no state, or not the files that its manifest lists."""
    state = _read_state(folder)
    problems = []
    for name, listed in state["files"].items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name}: is not there")
        elif path.stat().st_size != listed["bytes"] or _sha256(path) != listed["sha256"]:
            problems.append(f"{name}: is not the file that was sent")
    if problems:
        raise VerifyError(enumerate_problems(f"the state is not what {STATE} in it says; do not use it:", problems))
    for needed in (SOURCE, f"{ASSETS}/config.json"):
        if not (folder / needed).is_file():
            raise SourceError(f"the state lacks {needed}; was it sent by push --state?")


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / STATE
    if not path.is_file():
        raise SourceError(f"no training state lies there (no {STATE}): it is what push --state sends")
    state: dict[str, Any] = dict(read_json_object(path)[0])
    files = state.get("files")
    is_state = type(state.get("step")) is int and isinstance(files, Mapping) and ".metadata" in files
    plain = re.compile(r"\.metadata|[\w\-][\w.\-]*\.distcp", re.ASCII)
    if not is_state or not all(
        plain.fullmatch(name) and isinstance(listed, Mapping) and {"bytes", "sha256"} <= set(listed)
        for name, listed in files.items()  # type: ignore[union-attr]
    ):
        raise SourceError(f"{path} is not the manifest of a training state that this version reads")
    return state


def _refuse_another(asked: HubId, tag: str, state: Mapping[str, Any]) -> None:
    there = _listing(asked, tag).files
    for name, listed in state["files"].items():
        found = there.get(name)
        if found is None or found.size != listed["bytes"] or (found.is_large and found.id != listed["sha256"]):
            raise DestinationError(
                f"{asked.repository} has another checkpoint as {tag} ({name} differs), and no step is written over; "
                "send this run to another repository"
            )


def _listing(asked: HubId, revision: str | None) -> Listing:
    from .hub_client import list_files

    return list_files(HubId(asked.repository, revision), str(asked), announce=lambda message: None)


def _tags(asked: HubId) -> dict[str, str]:
    with sending(asked):
        refs = patiently(lambda: client().list_repo_refs(asked.repository))
    return {tag.name: tag.target_commit for tag in refs.tags}


def _move_tags(asked: HubId, tag: str, commit: str, keep: int | None) -> list[str]:
    """Tag the commit, point ``latest`` to the highest step, drop the oldest; the tags that were dropped."""
    api, repository = client(), asked.repository
    tags = _tags(asked)
    if tag not in tags:
        with sending(asked):
            patiently(lambda: api.create_tag(repository, tag=tag, revision=commit))
        tags[tag] = commit
    steps = sorted((int(found[1]), name) for name in tags if (found := _STEP.fullmatch(name)))
    target = tags[steps[-1][1]]
    dropped = [name for _, name in steps[:-keep]] if keep is not None else []
    with sending(asked):
        if tags.get(LATEST) != target:
            if LATEST in tags:
                patiently(lambda: api.delete_tag(repository, tag=LATEST))
            patiently(lambda: api.create_tag(repository, tag=LATEST, revision=target))
        for name in dropped:
            api.delete_tag(repository, tag=name)
    return dropped
