"""Bytes from the middle of files on the hub, and the headers of safetensors files, by range requests."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from qwen3conv import __version__
from qwen3conv.converters.errors import TransferError
from qwen3conv.converters.stores.safetensors_header import MAX_HEADER

from .hub_client import LIBRARY, explained
from .hub_id import HubId

FIRST_BYTES = 48 << 10
"""Asked for at once of a file whose header's length is not known: most headers of files of 4 GB fit."""

_BLOCK = 64 << 10
_BLOCKS = 256
_TRIES = 3


def read_range(asked: HubId, commit: str, name: str, offset: int, count: int) -> bytes:
    """``count`` bytes at ``offset`` of a file, fewer where it ends.

    Raises:
        TransferError: the hub does not give them.
    """
    import httpx
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        hf_raise_for_status,
        http_stream_backoff,
    )

    url = hf_hub_url(asked.repository, asked.below + name, revision=commit)
    headers = build_hf_headers(library_name=LIBRARY, library_version=__version__)
    headers |= {"Range": f"bytes={offset}-{offset + count - 1}", "Accept-Encoding": "identity"}
    with explained(asked, str(asked)):
        for left in reversed(range(_TRIES)):
            broken: Exception | None = None
            with http_stream_backoff("GET", url, headers=headers, max_retries=3, follow_redirects=True) as answer:
                if answer.status_code == 416:
                    return b""
                hf_raise_for_status(answer)
                if answer.status_code != 206 and offset:
                    raise TransferError(f"{asked}: the hub does not serve parts of {name}; pull it whole instead")
                data = bytearray()
                try:
                    for block in answer.iter_bytes():
                        data += block
                        if len(data) >= count:  # a server that knows no ranges would send all of it
                            break
                except (httpx.RemoteProtocolError, httpx.ReadError, httpx.TimeoutException) as error:
                    broken = error  # not through the block, which would itself ask again, and cannot
            if broken is None:
                return bytes(data[:count])
            if not left:
                raise broken
    raise AssertionError


def read_header(read: Callable[[int, int], bytes], size: int) -> bytes:
    """The start of a safetensors file of ``size`` bytes: its header and not one byte more.

    Of something that is no such file, the first bytes, which say so to whoever reads headers.
    """
    data = read(0, min(FIRST_BYTES, size))
    end = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or end > min(MAX_HEADER, size):
        return data
    if end > len(data):
        data += read(len(data), end - len(data))
    return data[:end]


class Blocks:
    """Reads few bytes at a time of files elsewhere, a block per request; the last blocks are kept."""

    def __init__(self, asked: HubId, commit: str) -> None:
        self._asked, self._commit = asked, commit
        self._kept: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, name: str, offset: int, count: int) -> bytes:
        """``count`` bytes at ``offset``, fewer where the file ends."""
        if count > _BLOCK:
            return read_range(self._asked, self._commit, name, offset, count)
        data = b""
        while len(data) < count:
            index, begin = divmod(offset + len(data), _BLOCK)
            block = self._block(name, index)
            part = block[begin : begin + count - len(data)]
            if not part:
                break
            data += part
        return data

    def _block(self, name: str, index: int) -> bytes:
        with self._lock:
            found = self._kept.get((name, index))
        if found is None:
            found = read_range(self._asked, self._commit, name, index * _BLOCK, _BLOCK)
            with self._lock:
                self._kept[name, index] = found
                if len(self._kept) > _BLOCKS:
                    self._kept.popitem(last=False)
        return found
