"""What a user types to name a repository on the hub: ``org/name[@revision][:subfolder]``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from qwen3conv.converters.errors import SourceError

_REVISION = re.compile(r"\w[\w.\-/+]*", re.ASCII)
_SUBFOLDER = re.compile(r"[\w\-][\w.\-]*(/[\w\-][\w.\-]*)*", re.ASCII)
"""Also keeps glob characters out of the patterns that huggingface_hub is given, and leaves no way up."""


@dataclass(frozen=True, slots=True)
class HubId:
    """What ``org/name[@revision][:subfolder]`` says."""

    repository: str
    revision: str | None = None
    subfolder: str | None = None

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"{self.repository}{at}:{self.subfolder}" if self.subfolder else f"{self.repository}{at}"

    @property
    def below(self) -> str:
        """What the paths of its files begin with."""
        return f"{self.subfolder}/" if self.subfolder else ""


def parse_hub_id(text: str) -> HubId:
    """The hub id that a text is that is no path here.

    Raises:
        SourceError: it is none.
    """
    name, colon, subfolder = text.partition(":")
    repository, at, revision = name.partition("@")
    if text.startswith(("/", ".", "~")) or repository.endswith("/") or repository.count("/") > 1:
        raise SourceError(f"{text} does not exist; name a folder, or a hub id such as Qwen/Qwen3-0.6B")
    neither = f"{text!r} is neither a folder here nor a hub id (org/name[@revision][:subfolder])"
    if "/" not in repository:
        raise SourceError(f"{neither}; check the spelling")
    from .hub_client import library

    with library(text):
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise SourceError(f"{neither}: {error}") from None
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise SourceError(f"{neither}: {revision!r} is not a branch, tag or commit")
    if colon and not _SUBFOLDER.fullmatch(subfolder):
        raise SourceError(f"{neither}: {subfolder!r} is not a folder of a repository")
    return HubId(repository, revision or None, subfolder or None)
