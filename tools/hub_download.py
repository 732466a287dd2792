"""One file of the hub, whole and with the hash that the hub promises; what came of it before is not fetched again.

huggingface_hub 1.33 drops a partial file when a download ends with an error or the process is killed
(``file_download.py``, ``_download_to_tmp_and_move``). Files of many gigabytes are worth more: its ``http_get`` goes on
from where a file ends. Only what comes by Xet, which is faster and knows no such thing, begins anew.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from qwen3conv import __version__
from qwen3conv.converters.errors import TransferError
from qwen3conv.converters.remote import RemoteFile

from .hub_client import LIBRARY, HubFile, explained
from .hub_id import HubId
from .hub_meter import meter_class

_BLOCK = 1 << 20


def fetch_file(
    asked: HubId,
    commit: str,
    name: str,
    file: RemoteFile | HubFile,
    folder: Path | None,
    *,
    came: Callable[[int], None] = lambda count: None,
) -> Path:
    """The file in ``folder``, or without one in the hub's cache, its hash checked. ``came`` is told bytes as they come.

    Raises:
        TransferError: it does not come, or is another one; what came is kept for the next try.
        DestinationError: the disk is full.
    """
    path = folder / (asked.below + name) if folder is not None else None
    if path is None or not path.is_file():
        with explained(asked, str(asked)):
            path = _download(asked, commit, name, file.size, folder, came)
    if (found := file_id(path, file)) != file.id:
        os.unlink(os.path.realpath(path))
        path.unlink(missing_ok=True)
        raise TransferError(
            f"{name} of {asked} came with the wrong hash: {found}, and the hub says {file.id}. It is not used; try "
            "again, and if it stays so, the repository is damaged"
        )
    return path


def file_id(path: Path, like: RemoteFile | HubFile) -> str:
    """The hash of a file, of the kind that ``like`` has: sha256 of its content, or git's of a small file."""
    is_sha256 = len(like.id) == 64
    digest = hashlib.sha256() if is_sha256 else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _download(
    asked: HubId, commit: str, name: str, size: int, folder: Path | None, came: Callable[[int], None]
) -> Path:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    meter = cast(Any, meter_class(came))
    url = hf_hub_url(asked.repository, asked.below + name, revision=commit)
    headers = build_hf_headers(library_name=LIBRARY, library_version=__version__)
    has_xet = find_spec("hf_xet") is not None and not constants.HF_HUB_DISABLE_XET
    metadata = get_hf_file_metadata(url, headers=headers, retry_on_errors=True) if has_xet else None
    if folder is None or (metadata is not None and metadata.xet_file_data is not None):
        found = hf_hub_download(
            asked.repository,
            asked.below + name,
            revision=commit,
            local_dir=folder,
            library_name=LIBRARY,
            library_version=__version__,
            tqdm_class=meter,
        )
        return Path(found)
    path = folder / (asked.below + name)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.part")
    if partial.is_file() and partial.stat().st_size > size:
        partial.unlink()
    with open(partial, "ab") as file:
        begun = os.fstat(file.fileno()).st_size
        came(begun)
        headers["Accept-Encoding"] = "identity"
        http_get(url, file, resume_size=begun, headers=headers, expected_size=size, tqdm_class=meter)
    os.replace(partial, path)
    return path
