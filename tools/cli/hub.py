"""``push`` and ``pull``: models and training states to the hub and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from .command import Command
from .options import DESTINATION, json_option, source_argument
from .output import format_bytes, format_count, note, print_json, print_table, say


@click.command(cls=Command, example="qwen3conv push qwen3-hf me/qwen3-tuned --public")
@source_argument("source", "SRC")
@click.argument("repository", metavar="ORG/NAME")
@click.option("--public", is_flag=True, help="Let everybody see it. A repository that is made is private without.")
@click.option("--revision", metavar="BRANCH", help="Branch to commit to, made if it is not there. Default: main.")
@click.option("--pr", is_flag=True, help="Open a pull request instead of committing.")
@click.option("--message", metavar="TEXT", help="The commit's message.")
@click.option("--state", is_flag=True, help="SRC is a run of train: send its last checkpoint whole, as tag step-N.")
@click.option("--step", type=click.IntRange(min=1), metavar="N", help="Of --state: another step than the last.")
@click.option("--keep", type=click.IntRange(min=1), metavar="N", help="Of --state: drop the tags of all but N steps.")
@json_option
def push(
    source: str,
    repository: str,
    public: bool,
    revision: str | None,
    pr: bool,
    message: str | None,
    state: bool,
    step: int | None,
    keep: int | None,
    json: bool,
) -> None:
    """Send a model to the hub, or with --state a training run.

    A Hugging Face folder is sent as it is, any other format is converted on the way. It becomes one commit, with a
    model card if the folder has none; then the hub's hashes are compared. Repeated after an interrupt, it sends what
    has not arrived. The login is that of `hf auth login`, or HF_TOKEN.
    """
    from qwen3conv.tools.hub_sending import check_target

    if not state and (step is not None or keep is not None):
        raise click.UsageError("--step and --keep are for --state")
    if state and (revision is not None or pr):
        raise click.UsageError("--state commits to main and tags the step; --revision and --pr are for models")
    if pr and revision is not None:
        raise click.UsageError("a pull request has a branch of its own; give --pr or --revision")
    target = check_target(repository)
    if state:
        from qwen3conv.tools.hub_state import push_state

        told = push_state(Path(source), target, step=step, keep=keep, public=public, message=message, announce=note)
    else:
        from qwen3conv.tools.hub import resolve_source
        from qwen3conv.tools.hub_push import hugging_face_folder, push_model

        found = resolve_source(source, announce=note)
        record = _record(found.path)
        with hugging_face_folder(found.path, found.origin, announce=note) as settled:
            sent, fingerprint = push_model(
                target,
                settled,
                public=public,
                revision=revision,
                pull_request=pr,
                message=message,
                record=record,
                announce=note,
            )
        told = {"repository": sent.repository, "commit": sent.commit, "url": sent.url, "fingerprint": fingerprint}
        told |= {"files": sent.files, "bytes": sent.bytes, "pull_request": sent.pull_request}
    if json:
        print_json(told)
        return
    at = f" as {told['tag']}" if "tag" in told else ""
    say(f"{told['repository']}{at}: sent, and the hub's hashes are those of {format_count(told['files'], 'file')}")
    rows = [(key, str(told[key])) for key in ("commit", "fingerprint", "pull_request") if told.get(key)]
    print_table([*rows, ("bytes", format_bytes(told["bytes"]))])
    if told.get("dropped"):
        say(f"Tags dropped: {', '.join(told['dropped'])}; their files are in the repository's history")


@click.command(cls=Command, example="qwen3conv pull Qwen/Qwen3-0.6B qwen3-hf")
@click.argument("repository", metavar="ORG/NAME[@REVISION]")
@click.argument("destination", type=DESTINATION, metavar="DST")
@json_option
def pull(repository: str, destination: Path, json: bool) -> None:
    """A model or a training state of the hub as a folder.

    Every file is checked against the hub's hash. Repeated after an interrupt, it fetches what is missing.
    """
    from qwen3conv.tools.hub_id import parse_hub_id
    from qwen3conv.tools.hub_pull import pull as fetch

    asked = parse_hub_id(repository)
    listing = fetch(asked, destination, announce=note)
    files = [path for path in destination.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    if json:
        told = {"repository": listing.repository, "commit": listing.commit, "path": str(destination)}
        print_json({**told, "files": len(files), "bytes": size})
        return
    say(f"{destination}: {asked} at {listing.commit}")
    print_table([("files", format_count(len(files), "file")), ("bytes", format_bytes(size))])


def _record(folder: Path) -> Mapping[str, Any] | None:
    """The record of the run that made the model, where it lies beside it."""
    from qwen3conv.converters.errors import SourceError
    from qwen3conv.training.launch import read_record

    try:
        return read_record(folder.parent / "run.json")
    except SourceError:
        return None
