"""Files to the hub in one commit, and the proof that they arrived.

One commit with large files sent before it (``HfApi.create_commit``), because nobody should find a half-uploaded model:
``upload_folder`` makes several where Xet is there, and ``upload_large_folder``, which is deprecated, writes into the
source. It can be repeated after an interrupt all the same: the hub is asked first, and what it has is not sent again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3conv.converters.errors import (
    ConversionError,
    DestinationError,
    PolicyError,
    VerifyError,
    enumerate_problems,
)

from .hub_client import TURNED_AWAY, Announce, Listing, client, library, list_files, patiently, quiet_off_terminals
from .hub_id import HubId

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

Files = Mapping[str, Path | bytes]
"""What to send: path in the repository -> file, or content."""

KEPT = (".gitattributes",)
"""The hub's own files, which are not taken out where everything else is replaced."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A commit that holds what was to be sent, compared hash by hash."""

    repository: str
    commit: str
    url: str
    pull_request: str | None
    files: int
    bytes: int


def make_repository(asked: HubId, *, public: bool, revision: str | None = None) -> Listing:
    """The repository to send to, made if it is not there, and what it holds at ``revision``.

    Raises:
        PolicyError: it is there and public, and ``public`` was not asked for.
        DestinationError: it cannot be made or written.
    """
    with library(str(asked)):
        api = client()
    with sending(asked):
        patiently(lambda: api.create_repo(asked.repository, private=not public, exist_ok=True))
        info = patiently(lambda: api.model_info(asked.repository))
        if not info.private and not public:
            raise PolicyError(f"{asked.repository} on the hub is public; pass --public if the world may see this")
        if revision is not None:
            patiently(lambda: api.create_branch(asked.repository, branch=revision, exist_ok=True))
    return list_files(HubId(asked.repository, revision), str(asked), announce=lambda message: None)


def send(
    asked: HubId,
    files: Files,
    message: str,
    *,
    revision: str | None = None,
    pull_request: bool = False,
    deletes: Collection[str] = (),
    announce: Announce = lambda text: None,
) -> Sent:
    """Commit ``files``, and look at what the hub has then.

    Raises:
        DestinationError: the hub does not take them.
        VerifyError: what it has is not what was sent.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    quiet_off_terminals()
    adds = [CommitOperationAdd(name, content) for name, content in files.items()]
    operations: list[CommitOperationAdd | CommitOperationDelete] = [*adds]
    operations += [CommitOperationDelete(name) for name in deletes]
    size = sum(add.upload_info.size for add in adds)
    announce(f"sending {len(adds)} files ({size:,} bytes) to {asked.repository}")
    with sending(asked):
        made = patiently(
            lambda: client().create_commit(
                asked.repository, operations, commit_message=message, revision=revision, create_pr=pull_request
            ),
            TURNED_AWAY,
        )
    _compare(asked, made.oid, adds, deletes)
    return Sent(asked.repository, made.oid, str(made.commit_url), made.pr_url, len(adds), size)


def _compare(asked: HubId, commit: str, adds: list[CommitOperationAdd], deletes: Collection[str]) -> None:
    there = list_files(HubId(asked.repository, commit), str(asked), announce=lambda message: None).files
    problems = []
    for add in adds:
        found = there.get(add.path_in_repo)
        expected = add.upload_info.sha256.hex() if found is not None and found.is_large else _git_id(add)
        if found is None:
            problems.append(f"{add.path_in_repo}: is not there")
        elif found.id != expected:
            problems.append(f"{add.path_in_repo}: has hash {found.id}, sent was {expected}")
    problems += [f"{name}: is still there" for name in deletes if name in there]
    if problems:
        heading = f"{asked.repository} at commit {commit} is not what was sent; do not use it, and send it again:"
        raise VerifyError(enumerate_problems(heading, problems))


def _git_id(add: CommitOperationAdd) -> str:
    with add.as_file() as file:
        content = file.read() if add.upload_info.size < 1 << 28 else b""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def sending(asked: HubId) -> Iterator[None]:
    """Turn what huggingface_hub raises while it writes into a message that says what to do."""
    import httpx
    from huggingface_hub import errors

    again = "run the same command again: what has arrived is not sent twice"
    try:
        yield
    except ConversionError:
        raise
    except errors.OfflineModeIsEnabled as error:
        raise DestinationError("HF_HUB_OFFLINE is set; nothing can be sent to the hub") from error
    except (errors.HfHubHTTPError, errors.LocalTokenNotFoundError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (None, 401, 403, 404):
            raise DestinationError(
                f"the hub does not let you write to {asked.repository}"
                + (f" (status {status})" if status else "")
                + "; log in with `hf auth login` and a token that may write there, and check the spelling"
            ) from error
        if status == 412:
            raise DestinationError(f"{asked.repository} was changed by somebody else meanwhile; {again}") from error
        raise DestinationError(f"sending to {asked.repository} failed (status {status}); {again}") from error
    except (httpx.HTTPError, OSError, RuntimeError) as error:  # RuntimeError: uploads that failed in a thread
        cause = error.__cause__ or error
        raise DestinationError(f"sending to {asked.repository} failed ({type(cause).__name__}); {again}") from error


def check_target(text: str) -> HubId:
    """The repository that is named to send to.

    Raises:
        DestinationError: it is not ``org/name``.
    """
    from qwen3conv.converters.errors import SourceError

    from .hub_id import parse_hub_id

    try:
        asked = parse_hub_id(text)
    except SourceError:
        raise DestinationError(f"{text!r} is no repository to send to; name one as org/name") from None
    if asked.revision or asked.subfolder:
        raise DestinationError(f"{text!r}: name the repository alone; a branch is given with --revision")
    return asked
