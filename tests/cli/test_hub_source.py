"""A hub id in place of a folder: fetched by the real huggingface_hub, from a hub on this machine."""

from __future__ import annotations

import errno
import http.client
import json
import os
import shutil
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from qwen3conv.converters.errors import DestinationError, SourceError
from qwen3conv.tools import hub as hub_module
from qwen3conv.tools.hub import resolve_like, resolve_source
from tests.cli.conftest import HubClient as Client
from tests.cli.conftest import write_model


@pytest.fixture
def repository(model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A repository as they are: several weight files, sidecars, and what must not be fetched."""
    folder = tmp_path / "served"
    shutil.copytree(model("dense-sharded"), folder)
    for name in ("pytorch_model.bin", "model.pt", "model-q4.gguf", "modeling_qwen3.py", "original/x.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"not to be fetched")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    return folder


def test_a_hub_id_is_fetched_converted_and_named_in_the_manifest(client: Client, repository: Path) -> None:
    commit = client.hub.add("Qwen/Tiny", repository)
    made = json.loads(client.run("hf-to-dcp", "Qwen/Tiny", "dcp", "--keep-download", "--json").stdout)
    origin = {"hub": "Qwen/Tiny", "revision": "main", "commit": commit}
    assert origin.items() <= made["source"].items()
    assert json.loads((client.folder / "dcp" / "qwen3conv.json").read_text())["source"] == made["source"]
    local = client.run("fingerprint", repository).stdout.strip()
    assert made["fingerprint"] == local
    assert (client.folder / "dcp" / "hf_assets" / "additional_chat_templates" / "tools.jinja").is_file()

    fetched = client.hub.downloads()
    refused = (".bin", ".pt", ".gguf", ".py", "x.safetensors")
    assert not [name for name in fetched if name.endswith(refused)]
    assert {"config.json", "LICENSE", "README.md", "tools.jinja", "model.safetensors.index.json"} <= set(fetched)

    client.hub.requests.clear()
    assert client.run("fingerprint", "Qwen/Tiny").stdout.strip() == local
    assert client.run("fingerprint", f"Qwen/Tiny@{commit}", HF_HUB_OFFLINE="1").stdout.strip() == local
    assert client.hub.downloads() == []


def test_a_revision_is_fetched_by_branch_and_by_commit(client: Client, repository: Path) -> None:
    main = client.hub.add("Qwen/Tiny", repository)
    other = client.hub.add("Qwen/Tiny", write_model(client.folder / "other"), revision="refs/pr/3")
    assert main != other
    theirs = client.run("fingerprint", client.folder / "other").stdout
    assert client.run("fingerprint", "Qwen/Tiny@refs/pr/3").stdout == theirs
    assert client.run("fingerprint", f"Qwen/Tiny@{main}").stdout != theirs
    made = json.loads(client.run("hf-to-dcp", f"Qwen/Tiny@{other}", "dcp", "--json").stdout)
    assert {"revision": other, "commit": other}.items() <= made["source"].items()


def test_of_a_subfolder_only_that_folder_is_fetched_and_the_manifest_names_it(client: Client, repository: Path) -> None:
    inner = write_model(repository / "stages" / "step-500")
    (inner / "other").mkdir()
    shutil.copy(next(inner.glob("*.safetensors")), inner / "other" / "x.safetensors")
    commit = client.hub.add("Qwen/Tiny", repository)
    made = json.loads(client.run("hf-to-dcp", "Qwen/Tiny@main:stages/step-500", "dcp", "--json").stdout)
    origin = {"hub": "Qwen/Tiny", "revision": "main", "commit": commit, "subfolder": "stages/step-500"}
    assert origin.items() <= made["source"].items()
    fetched = {request.path.partition("/stages/")[2] for request in client.hub.requests if "/resolve/" in request.path}
    assert fetched == {f"step-500/{path.name}" for path in inner.iterdir() if path.is_file()}
    shutil.rmtree(inner / "other")
    local = client.run("fingerprint", inner).stdout
    assert client.run("fingerprint", "Qwen/Tiny:stages/step-500").stdout == local
    assert client.run("fingerprint", "Qwen/Tiny").stdout != local


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Tiny:nowhere", "has no files of a model in a folder nowhere"),
        ("Qwen/Tiny:original", "has no config.json in original"),
        ("Qwen/Tiny:../x", "'../x' is not a folder of a repository"),
        ("Qwen/Tiny:a/../x", "'a/../x' is not a folder of a repository"),
        ("Qwen/Tiny:*", "'*' is not a folder of a repository"),
        ("Qwen/Tiny:", "'' is not a folder of a repository"),
        ("Qwen/Tiny:original@main", "'original@main' is not a folder of a repository"),
    ],
)
def test_a_subfolder_that_is_none_is_refused(client: Client, repository: Path, text: str, expected: str) -> None:
    client.hub.add("Qwen/Tiny", repository)
    ran = client.run("hf-to-dcp", text, "dcp", code=1)
    assert expected in ran.stderr
    assert not (client.folder / "dcp").exists()


def test_like_fetches_everything_but_weights(client: Client, repository: Path) -> None:
    commit = client.hub.add("Qwen/Tiny", repository)
    client.run("hf-to-dcp", repository, "dcp")
    shutil.rmtree(client.folder / "dcp" / "hf_assets")
    made = json.loads(client.run("dcp-to-hf", "dcp", "hf", "--like", "Qwen/Tiny", "--json").stdout)
    assert made["source"]["like"] == {"hub": "Qwen/Tiny", "revision": "main", "commit": commit}
    assert not [name for name in client.hub.downloads() if name.endswith(".safetensors")]
    for name in ("config.json", "model.safetensors.index.json", "model-00002-of-00005.safetensors", "tokenizer.json"):
        assert (client.folder / "hf" / name).read_bytes() == (repository / name).read_bytes()


def test_a_folder_of_that_name_wins_over_the_hub(client: Client, repository: Path) -> None:
    client.hub.add("Qwen/Tiny", repository)
    local = write_model(client.folder / "Qwen" / "Tiny")
    assert client.run("fingerprint", "Qwen/Tiny").stdout == client.run("fingerprint", local).stdout
    assert client.hub.requests == []


def test_gated_and_private_repositories_say_how_to_get_in(client: Client, repository: Path) -> None:
    client.hub.add("Qwen/Gated", repository, gated=["good"])
    client.hub.add("Qwen/Private", repository, private=["good"])
    said = client.run("inspect", "Qwen/Gated", code=1).stderr
    assert f"accept its terms at {client.hub.url}/Qwen/Gated" in said
    assert "hf auth login" in said
    assert "hf auth login" in client.run("inspect", "Qwen/Private", code=1).stderr
    assert "gated" in client.run("inspect", "Qwen/Gated", code=1, HF_TOKEN="bad").stderr
    assert "complete    yes" in client.run("inspect", "Qwen/Private", HF_TOKEN="good").stdout


def test_what_is_not_there_is_told_apart(client: Client, repository: Path) -> None:
    client.hub.add("Qwen/Tiny", repository)
    assert "the hub has no model Qwen/Tinny" in client.run("inspect", "Qwen/Tinny", code=1).stderr
    assert "no branch, tag or commit v9" in client.run("inspect", "Qwen/Tiny@v9", code=1).stderr


def test_a_repository_without_safetensors_is_refused(client: Client) -> None:
    for name, files in {"Old": ("config.json", "pytorch_model.bin"), "Lone": ("model.safetensors",)}.items():
        folder = client.folder / name
        folder.mkdir()
        for file in files:
            (folder / file).write_text("{}")
        client.hub.add(f"Qwen/{name}", folder)
    assert "no safetensors" in client.run("inspect", "Qwen/Old", code=1).stderr
    assert "no config.json" in client.run("inspect", "Qwen/Lone", code=1).stderr
    assert client.hub.downloads() == []


def test_offline_and_unreachable_hubs_point_to_a_local_folder(client: Client, repository: Path) -> None:
    client.hub.add("Qwen/Tiny", repository)
    said = client.run("inspect", "Qwen/Tiny", code=1, HF_HUB_OFFLINE="1").stderr
    assert "HF_HUB_OFFLINE is set" in said
    assert "a local folder works too" in said
    said = client.run("inspect", "Qwen/Tiny", code=1, HF_ENDPOINT="http://127.0.0.1:9").stderr
    assert "cannot be reached" in said
    assert str(client.cache) in said


class _Proxy(BaseHTTPRequestHandler):
    """Hands requests for any host on to one server."""

    to: str
    asked: ClassVar[list[str]]

    def do_GET(self) -> None:
        """Fetch the same path there; redirects are the client's."""
        self.asked.append(self.path)
        rest = "/" + self.path.split("/", 3)[3]
        connection = http.client.HTTPConnection(self.to, timeout=20)
        connection.request(self.command, rest, headers={**self.headers, "Connection": "close"})
        answer = connection.getresponse()
        body = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        connection.close()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def test_a_proxy_and_a_cache_elsewhere_are_used_as_the_hubs_own_tools_do(client: Client, repository: Path) -> None:
    client.hub.add("Qwen/Tiny", repository)

    class Proxy(_Proxy):
        to = client.hub.url.removeprefix("http://")
        asked: ClassVar[list[str]] = []

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        proxy = f"http://127.0.0.1:{server.server_port}"
        cache = client.folder / "cache-elsewhere"
        words = ("fingerprint", "Qwen/Tiny", "--keep-download")
        told = client.run(*words, HF_ENDPOINT="http://hub.invalid", HTTP_PROXY=proxy, HF_HUB_CACHE=str(cache)).stdout
        server.shutdown()
    assert told == client.run("fingerprint", repository).stdout
    assert any(path.startswith("http://hub.invalid/api/models/Qwen/Tiny") for path in Proxy.asked)
    assert len(list(cache.rglob("snapshots/*/*.safetensors"))) == 5
    assert not list(client.cache.rglob("*.safetensors"))
    assert client.run("fingerprint", "Qwen/Tiny", HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(cache)).stdout == told


def test_what_like_fetched_does_not_pass_for_a_model_offline(client: Client, repository: Path) -> None:
    client.hub.add("Qwen/Tiny", repository)
    client.run("plan", repository, "out", "--to", "hf", "--like", "Qwen/Tiny")
    said = client.run("inspect", "Qwen/Tiny", code=1, HF_HUB_OFFLINE="1").stderr
    assert "does not hold all of Qwen/Tiny" in said


def test_a_download_that_broke_off_is_completed(client: Client, repository: Path) -> None:
    client.hub.add("Qwen/Tiny", repository)
    client.hub.cuts["model-00003-of-00005.safetensors"] = [1000]
    assert client.run("fingerprint", "Qwen/Tiny").stdout == client.run("fingerprint", repository).stdout


@pytest.mark.torch_free
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("qwen3-dcp", "neither a folder here nor a hub id"),
        ("./Qwen/Tiny", "does not exist; name a folder"),
        ("/nowhere/at/all", "does not exist; name a folder"),
        ("~/nowhere-at-all", "does not exist; name a folder"),
        ("a/b/c", "does not exist; name a folder"),
        ("models/", "does not exist; name a folder"),
    ],
)
def test_a_text_that_is_neither_path_nor_id_is_refused_unasked(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for resolve in (resolve_source, resolve_like):
        asked: list[str] = []
        with pytest.raises(SourceError, match=said):
            resolve(text, announce=asked.append)
        assert asked == []


@pytest.mark.parametrize("text", ["Qwen/x--y", "Qwen/..", "Qwen/.hidden", "Qwen/a b", "Qwen/x@", "Qwen/x@../../etc"])
def test_ids_and_revisions_that_no_hub_has_are_refused_unasked(text: str) -> None:
    asked: list[str] = []
    with pytest.raises(SourceError, match="nor a hub id"):
        resolve_source(text, announce=asked.append)
    assert asked == []


@pytest.mark.torch_free
def test_a_path_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "here").mkdir()
    found = resolve_source("~/here")
    assert (found.path, found.origin) == (tmp_path / "here", {"path": str(tmp_path / "here")})
    (tmp_path / "link").symlink_to("nothing")
    assert resolve_source(str(tmp_path / "link")).path == tmp_path / "link"


@pytest.mark.torch_free
def test_an_unfinished_conversion_is_not_taken_for_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "dcp.partial").mkdir()
    with pytest.raises(SourceError, match=r"runs/dcp\.partial does.*--resume"):
        resolve_source("runs/dcp")


def test_a_full_disk_names_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def full(*arguments: object, **named: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(DestinationError, match="no space left in the hub's cache"):
        resolve_source("Qwen/Tiny")


@pytest.mark.torch_free
def test_without_huggingface_hub_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub.errors", None)
    with pytest.raises(hub_module.MissingHubError, match="pip install huggingface_hub"):
        resolve_source("Qwen/Tiny")
