"""A checkpoint that a user names: a folder here, or a repository on the Hugging Face hub, which is downloaded.

huggingface_hub does the work, with its cache and its own settings (``HF_HOME``, ``HF_TOKEN``, ``HF_HUB_OFFLINE`` ...).
Safetensors and the text files beside them are fetched; pickles, GGUF and code never are.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from qwen3conv.converters.errors import ConversionError, DestinationError, SourceError

SIDECARS = (
    "*.json",
    "*.jinja",
    "*.md",
    "*.model",
    "*.tiktoken",
    "*.txt",
    "[Ll][Ii][Cc][Ee][Nn][CcSs][Ee]*",
    "NOTICE*",
    "COPYING*",
)
"""Config, index, tokenizer, chat templates, licence: file name patterns as ``snapshot_download`` takes them."""

WEIGHTS = ("*.safetensors",)

_BELOW = tuple(f"*/{pattern}" for pattern in (*WEIGHTS, *SIDECARS) if pattern != "*.jinja")
"""Not fetched: other models' weights live in subfolders. The one folder that travels, of chat templates, is jinja."""

_REVISION = re.compile(r"\w[\w.\-/+]*", re.ASCII)
_SUBFOLDER = re.compile(r"[\w\-][\w.\-]*(/[\w\-][\w.\-]*)*", re.ASCII)
"""Also keeps glob characters out of the patterns that huggingface_hub is given, and leaves no way up."""
_COMMIT = re.compile(r"[0-9a-f]{40}")

Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a named checkpoint is, and what a manifest says of where it came from."""

    path: Path
    origin: Mapping[str, str]
    """``path``; or ``hub`` (the repository), ``revision`` (as asked for), ``commit`` (the sha) and ``subfolder``."""


@dataclass(frozen=True, slots=True)
class HubId:
    """What ``org/name[@revision][:subfolder]`` says."""

    repository: str
    revision: str | None
    subfolder: str | None

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"{self.repository}{at}:{self.subfolder}" if self.subfolder else f"{self.repository}{at}"


def resolve_source(text: str, *, announce: Announce = lambda message: None) -> Source:
    """The folder that ``text`` names; a hub id is downloaded to the hub's cache.

    A hub id is ``org/name[@revision][:subfolder]``; of a subfolder, nothing outside it is fetched.

    A path that exists wins over a hub id. ``announce`` is told before anything is fetched.

    Raises:
        SourceError: it is neither, the repository or revision is not there or may not be read, or the hub cannot be
            reached.
        DestinationError: the disk that holds the cache is full.
    """
    return _resolve(text, (*WEIGHTS, *SIDECARS), announce)


def resolve_like(text: str, *, announce: Announce = lambda message: None) -> Source:
    """The same without weights: of a hub id, only config, index and sidecars are fetched. ``text`` may name a file."""
    return _resolve(text, SIDECARS, announce)


def resolve_adapter(text: str, *, announce: Announce = lambda message: None) -> Source:
    """The same for a LoRA adapter, whose repository has an adapter_config.json in place of a model's config."""
    return _resolve(text, (*WEIGHTS, *SIDECARS), announce, config="adapter_config.json", of="a LoRA adapter")


def _resolve(
    text: str, patterns: tuple[str, ...], announce: Announce, config: str = "config.json", of: str = "a whole model"
) -> Source:
    path = Path(os.path.expanduser(text))
    if os.path.lexists(path):
        return Source(path, {"path": str(path)})
    _refuse_unfinished(path)
    asked = _parse(text)
    announce(f"{text}: not a folder here, asking the hub")
    snapshot = _download(text, asked, patterns)
    folder = snapshot / asked.subfolder if asked.subfolder else snapshot
    where = f"{asked.repository} on the hub"
    if not folder.is_dir():
        raise SourceError(f"{where} has no files of a model in a folder {asked.subfolder}; check its spelling")
    place = f"in {asked.subfolder}" if asked.subfolder else "at its top"
    if WEIGHTS[0] in patterns and not any(folder.glob(WEIGHTS[0])):
        raise SourceError(
            f"{where} has no safetensors {place}; .bin, .pt and .gguf files are not fetched: "
            "name a repository with safetensors, or org/name:subfolder if they lie in another folder"
        )
    if not (folder / config).is_file():
        inside = f" in {asked.subfolder}" if asked.subfolder else ""
        raise SourceError(f"{where} has no {config}{inside}: name the repository of {of}")
    origin = {"hub": asked.repository, "revision": asked.revision or "main"}
    if _COMMIT.fullmatch(snapshot.name):
        origin["commit"] = snapshot.name
    if asked.subfolder:
        origin["subfolder"] = asked.subfolder
    return Source(folder, origin)


def _refuse_unfinished(path: Path) -> None:
    """A conversion to ``path`` that was killed is not a spelling mistake, and not a hub id."""
    from qwen3conv.converters.stores.staging import partial_path

    if path.name and partial_path(path).is_dir():
        raise SourceError(
            f"{path} does not exist, but {partial_path(path)} does: a conversion that did not finish; "
            "run the command that began it again with --resume"
        )


def _parse(text: str) -> HubId:
    """The hub id that a text is that is no path here."""
    name, colon, subfolder = text.partition(":")
    repository, at, revision = name.partition("@")
    if text.startswith(("/", ".", "~")) or repository.endswith("/") or repository.count("/") > 1:
        raise SourceError(f"{text} does not exist; name a folder, or a hub id such as Qwen/Qwen3-0.6B")
    neither = f"{text!r} is neither a folder here nor a hub id (org/name[@revision][:subfolder])"
    if "/" not in repository:
        raise SourceError(f"{neither}; check the spelling")
    with _library(text):
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


def _download(text: str, asked: HubId, patterns: tuple[str, ...]) -> Path:
    with _library(text):
        import httpx
        from huggingface_hub import constants, errors, snapshot_download
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]
    from qwen3conv import __version__

    if sys.stderr is None or not sys.stderr.isatty():
        disable_progress_bars()

    repository, revision, at = asked.repository, asked.revision, str(asked)
    below = f"{asked.subfolder}/" if asked.subfolder else ""
    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=[below + pattern for pattern in patterns],
            ignore_patterns=[below + pattern for pattern in _BELOW],
            library_name="qwen3conv",
            library_version=__version__,
        )
    except errors.GatedRepoError as error:
        raise SourceError(
            f"{repository} is gated: accept its terms at {constants.ENDPOINT}/{repository}, then log in with "
            "`hf auth login` (or set HF_TOKEN)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise SourceError(
            f"{text} is no folder here, and the hub has no model {repository}; check the spelling, or if it is private "
            "log in with `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise SourceError(f"{repository} on the hub has no branch, tag or commit {revision or 'main'}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise SourceError(
            f"{text} is no folder here, {why}, and the cache {constants.HF_HUB_CACHE} does not hold all of {at}; "
            "a local folder works too"
        ) from error
    except (errors.HfHubHTTPError, httpx.HTTPError) as error:
        raise SourceError(_http_failure(at, error)) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DestinationError(
                f"no space left in the hub's cache {constants.HF_HUB_CACHE} while fetching {at}: free some, or set "
                "HF_HOME to another disk; what was fetched is kept"
            ) from error
        raise SourceError(f"fetching {at} failed: {error}") from error
    except (RuntimeError, ValueError) as error:  # transfer back ends raise these
        raise SourceError(f"fetching {at} failed: {error}") from error
    return Path(folder)


def _http_failure(at: str, error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return f"the hub does not let you read {at} (status {status}); log in with `hf auth login`"
    detail = f"status {status}" if status is not None else f"{type(error).__name__}: {error}"
    return f"fetching {at} from the hub failed ({detail}); try again (what was fetched is kept), or name a local folder"


@contextmanager
def _library(text: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise MissingHubError(
            f"{text} is no folder here, and fetching it from the hub needs huggingface_hub, which is not installed: "
            "pip install huggingface_hub, or name a local folder"
        ) from error


class MissingHubError(ConversionError):
    """huggingface_hub is not there: install it."""
