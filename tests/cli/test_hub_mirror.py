"""Commands through a real mirror, olah 0.5.4, in front of the hub on this machine: every byte comes through it.

``make test-slow`` installs olah into ``.olah-0.5.4``, an environment of its own, because it pins what it needs.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import HubClient
from tests.pages import ROOT

OLAH = ROOT / ".olah-0.5.4" / "bin" / "olah-cli"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not OLAH.exists(), reason="make test-slow installs olah 0.5.4"),
]


@pytest.fixture
def mirror(client: HubClient) -> Iterator[str]:
    """The URL of a mirror of the client's hub."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here, hub = f"127.0.0.1:{port}", client.hub.url.removeprefix("http://")
    words = ["--host", "127.0.0.1", "--port", str(port), "--repos-path", "mirrored", "--log-path", "mirror-logs"]
    words += ["--hf-scheme", "http", "--hf-netloc", hub, "--hf-lfs-netloc", hub]
    words += ["--mirror-scheme", "http", "--mirror-netloc", here, "--mirror-lfs-netloc", here]
    with (client.folder / "mirror.log").open("wb") as log:
        process = subprocess.Popen([OLAH, *words], cwd=client.folder, stdout=log, stderr=log)
        try:
            until = time.monotonic() + 60
            while time.monotonic() < until:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                time.sleep(0.2)
            yield f"http://{here}"
        finally:
            process.terminate()
            process.wait()


def test_a_mirror_stands_for_the_hub(
    client: HubClient, mirror: str, model: Callable[[str], Path], tmp_path: Path
) -> None:
    source = model("dense-sharded")
    client.hub.add("me/tiny", source)
    fingerprint = client.run("fingerprint", source).stdout
    told = json.loads(client.run("inspect", "me/tiny", "--json", HF_ENDPOINT=mirror).stdout)
    assert told["complete"]
    client.run("hf-to-dcp", "me/tiny", "dcp", HF_ENDPOINT=mirror)
    assert client.run("fingerprint", "dcp").stdout == fingerprint
    assert client.run("fingerprint", "me/tiny", HF_ENDPOINT=mirror).stdout == fingerprint
    client.run("pull", "me/tiny", "here", HF_ENDPOINT=mirror)
    assert "the same" in client.run("diff", "here", source).stdout
    before = len(client.hub.requests)
    assert client.run("fingerprint", "me/tiny", HF_ENDPOINT=mirror).stdout == fingerprint
    asked = client.hub.requests[before:]
    assert not any(request.sent > 1 << 16 for request in asked)  # the mirror has the weights
