"""huggingface_hub as it is used here: one clear message for each of its failures, patience with a busy hub.

Login, endpoint, proxies and cache are its own. A token is never read here: the library finds it and sends it.
"""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from qwen3conv import __version__
from qwen3conv.converters.errors import ConversionError, DestinationError, SourceError, TransferError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from .hub_id import HubId

LIBRARY = "qwen3conv"
"""What requests say of the program that makes them."""

_WAITS = (1.0, 2.0, 4.0)
"""Seconds before each further try, where the hub does not say how long to wait."""

_LONGEST_WAIT = 300.0
BUSY = (408, 429, 500, 502, 503, 504)
"""Statuses after which a request is made again, unless it might have had its effect."""

TURNED_AWAY = (429, 503)
"""Those that say that nothing was done."""

Announce = Callable[[str], None]
Result = TypeVar("Result")


class MissingHubError(ConversionError):
    """huggingface_hub is not there: install it."""


class UnreachableError(TransferError):
    """There is no way to the hub."""


class HubFile(NamedTuple):
    """A file of a repository at one commit."""

    size: int
    id: str
    """The sha256 of a large file's content, git's id of a small one."""
    is_large: bool


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository at one commit."""

    repository: str
    """Its present name."""
    commit: str
    files: Mapping[str, HubFile]


@contextmanager
def library(text: str) -> Iterator[None]:
    """Turn the absence of huggingface_hub, imported in the block, into a message."""
    try:
        yield
    except ImportError as error:
        raise MissingHubError(
            f"{text} is no folder here, and fetching it from the hub needs huggingface_hub, which is not installed: "
            "pip install huggingface_hub, or name a local folder"
        ) from error


def is_offline() -> bool:
    """Whether the user has forbidden any request (``HF_HUB_OFFLINE``)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def client() -> HfApi:
    """The library's client. Its login is the user's own."""
    from huggingface_hub import HfApi

    return HfApi(library_name=LIBRARY, library_version=__version__)


def quiet_off_terminals() -> None:
    """No progress bars of the library's own where nobody sees them move."""
    if sys.stderr is None or not sys.stderr.isatty():
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

        disable_progress_bars()


def list_files(asked: HubId, text: str, *, announce: Announce) -> Listing:
    """The commit that ``asked`` names and its files with sizes and hashes, in one request.

    Raises:
        SourceError: there is none, or it may not be read, or the hub cannot be reached.
    """
    with library(text):
        from huggingface_hub.hf_api import RepoFile

        api = client()
    with explained(asked, text):
        info = patiently(lambda: api.model_info(asked.repository, revision=asked.revision, files_metadata=True))
    if info.id != asked.repository:
        announce(f"{asked.repository} is called {info.id} now; use that name")
    siblings: Iterable[Any] = info.siblings or ()
    if any(sibling.size is None for sibling in siblings):  # a mirror that passes names on, and no more
        with explained(asked, text):
            entries = patiently(lambda: list(api.list_repo_tree(info.id, recursive=True, revision=info.sha)))
        siblings = [entry for entry in entries if isinstance(entry, RepoFile)]
    files = {}
    for sibling in siblings:
        large = sibling.lfs
        found = large.sha256 if large is not None else sibling.blob_id
        files[sibling.rfilename] = HubFile(int(sibling.size or 0), str(found), large is not None)
    return Listing(info.id, str(info.sha), files)


def patiently(call: Callable[[], Result], busy: Collection[int] = BUSY) -> Result:
    """What ``call`` returns; while the hub is busy, by status, it is tried a few times more.

    So it is when the connection breaks, unless only ``TURNED_AWAY`` is safe to repeat.
    """
    import httpx
    from huggingface_hub import errors

    for wait in _WAITS:
        try:
            return call()
        except errors.HfHubHTTPError as error:
            if error.response.status_code not in busy:
                raise
            asked = error.response.headers.get("Retry-After", "")
            time.sleep(min(float(asked), _LONGEST_WAIT) if asked.isdigit() else wait)
        except (httpx.TimeoutException, httpx.RemoteProtocolError, httpx.ReadError):
            if busy is TURNED_AWAY:
                raise
            time.sleep(wait)
    return call()


@contextmanager
def explained(asked: HubId, text: str) -> Iterator[None]:
    """Turn what huggingface_hub raises in the block into a message that says what to do."""
    import httpx
    from huggingface_hub import constants, errors

    repository, revision = asked.repository, asked.revision
    try:
        yield
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
        cause = error.__cause__
        if isinstance(cause, errors.HfHubHTTPError):
            raise _http_failure(str(asked), cause) from error
        raise _unreachable(asked, text) from error
    except httpx.ConnectError as error:
        raise _unreachable(asked, text) from error
    except (errors.HfHubHTTPError, httpx.HTTPError) as error:
        raise _http_failure(str(asked), error) from error
    except ConversionError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            place = Path(error.filename).parent if error.filename else f"the hub's cache {constants.HF_HUB_CACHE}"
            raise DestinationError(
                f"no space left in {place} while fetching {asked}: free some, or set "
                "HF_HOME to another disk; what was fetched is kept"
            ) from error
        raise TransferError(f"fetching {asked} failed: {error}") from error
    except (RuntimeError, ValueError) as error:  # transfer back ends raise these
        raise TransferError(f"fetching {asked} failed: {error}") from error


def _unreachable(asked: HubId, text: str) -> UnreachableError:
    from huggingface_hub import constants

    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
    return UnreachableError(
        f"{text} is no folder here, {why}, and the cache {constants.HF_HUB_CACHE} does not hold all of {asked}; "
        "a local folder works too"
    )


def _http_failure(at: str, error: Exception) -> SourceError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return SourceError(f"the hub does not let you read {at} (status {status}); log in with `hf auth login`")
    if status == 429:
        return TransferError(
            f"the hub answers {at} with too many requests (status 429); wait some minutes, then try again "
            "(what was fetched is kept)"
        )
    detail = f"status {status}" if status is not None else f"{type(error).__name__}: {error}"
    return TransferError(
        f"fetching {at} from the hub failed ({detail}); try again (what was fetched is kept), or name a local folder"
    )
