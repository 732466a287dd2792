"""A hub on this machine: serves folders as ``org/name`` to huggingface_hub and transformers, and takes commits.

It answers what huggingface_hub 1.33 asks for (``hf_api.py``, ``file_download.py``, ``utils/_http.py``) the way
huggingface.co does: weight files are large-file objects behind a redirect with ``X-Linked-Etag``, small files come
straight; errors carry ``X-Error-Code``. No Xet headers are sent, and large files come by the LFS batch protocol, so
neither direction needs ``hf_xet``. Use ``hub.url`` as ``endpoint=`` or ``HF_ENDPOINT``; nothing leaves 127.0.0.1.
Faults come on demand: ``cuts``, ``faults``, ``spoiled``, ``renamed``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".safetensors", ".bin", ".pt", ".distcp")
"""Names that a hub keeps as large files, whatever their size."""

Query = Mapping[str, list[str]]


class Request(NamedTuple):
    """What a client asked for and got."""

    method: str
    path: str
    """Without the query, still percent-encoded."""
    range: str | None
    """The ``Range`` header."""
    token: str | None
    status: int
    sent: int = 0
    """Bytes of the answer's body."""


class Fault(NamedTuple):
    """An answer in place of the right one."""

    status: int
    headers: Mapping[str, str] = {}


class Blob(NamedTuple):
    """A file of a commit. One on disk must stay as it is."""

    content: Path | bytes
    size: int
    git: str
    """git's id of the content, which a hub gives as ETag of a small file."""
    sha256: str
    """The id, and ETag, of a large one."""

    @classmethod
    def of(cls, content: Path | bytes) -> Blob:
        """The blob with this content."""
        body = content if isinstance(content, bytes) else content.read_bytes()
        git = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
        return cls(content, len(body), git, hashlib.sha256(body).hexdigest())

    @classmethod
    def of_holes(cls, path: Path) -> Blob:
        """A file too large to hash, most of which are holes: its ids are those of its name."""
        name = path.name.encode()
        return cls(path, path.stat().st_size, hashlib.sha1(name).hexdigest(), hashlib.sha256(name).hexdigest())

    def read(self, first: int = 0, last: int | None = None) -> bytes:
        """Bytes ``first`` to ``last``, both included."""
        count = (self.size if last is None else last + 1) - first
        if isinstance(self.content, bytes):
            return self.content[first : first + count]
        with self.content.open("rb") as file:
            file.seek(first)
            return file.read(count)


Files = dict[str, Blob]


@dataclass(slots=True)
class Repository:
    """Commits by sha, each with its files, and branch or tag names for them."""

    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    tokens: Collection[str] | None = None
    """Tokens that were granted access; ``None``: everyone. Without access a gated repository still tells its files."""
    private: bool = False
    """Without access there is no such repository."""


class Hub:
    """The repositories and the log of requests. Start it with ``serve_hub()``."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.cuts: dict[str, list[int]] = {}
        """By file name: after how many bytes the next downloads of it break off, one entry each."""
        self.faults: dict[str, list[Fault]] = {}
        """By the end of a path: what the next requests for it get, one entry each."""
        self.spoiled: set[str] = set()
        """Names of files that are sent with one bit flipped."""
        self.stalls: dict[str, threading.Event] = {}
        """By file name: what downloads of it as a whole wait for."""
        self.watcher: Callable[[str], None] = lambda name: None
        """Called with the name of each file that is about to be sent whole."""
        self.swaps: tuple[bytes, bytes] | None = None
        """What takes each other's place in answers to range requests."""
        self.mangles = False
        """Whether commits keep something else than the small files that come with them."""
        self.renamed: dict[str, str] = {}
        """Old name of a repository -> the name that requests are sent on to."""
        self.tells_names_only = False
        """Leave sizes and hashes out of a repository's description, as the mirror olah 0.5.4 does."""
        self.objects: dict[str, bytes] = {}
        """Large files that were uploaded, by sha256, whether a commit names them or not."""
        self.url = ""

    def add(
        self,
        repo_id: str,
        folder: Path,
        revision: str = "main",
        *,
        gated: Collection[str] | None = None,
        private: Collection[str] | None = None,
    ) -> str:
        """Serve the files of ``folder`` as ``repo_id`` at ``revision``; returns the commit's sha.

        ``gated`` or ``private``: the tokens that may read it. Earlier commits stay reachable by their sha.
        """
        repository = self.repositories.setdefault(repo_id, Repository())
        if gated is not None or private is not None:
            repository.tokens = gated if private is None else private
            repository.private = private is not None
        paths = (path for path in folder.rglob("*") if path.is_file())
        return self.commit(repo_id, revision, {path.relative_to(folder).as_posix(): Blob.of(path) for path in paths})

    def commit(self, repo_id: str, revision: str, files: Files) -> str:
        """Make ``files`` the content of ``revision``; returns the commit's sha, the same for the same content."""
        listing = "".join(f"{path} {files[path].git}\n" for path in sorted(files))
        sha = hashlib.sha1(f"{repo_id}\n{listing}".encode()).hexdigest()
        self.repositories[repo_id].commits[sha] = files
        self.repositories[repo_id].refs[revision] = sha
        return sha

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Content by path, to look at what a client committed."""
        repository = self.repositories[repo_id]
        sha = {**repository.tags, **repository.refs}.get(revision, revision)
        return {path: blob.read() for path, blob in repository.commits[sha].items()}

    def sent(self) -> int:
        """Bytes of all answers' bodies."""
        return sum(request.sent for request in self.requests)

    def downloads(self) -> list[str]:
        """Names of the files whose content was sent, in order, once per request."""
        sent = [r.path for r in self.requests if r.method == "GET" and r.status in (200, 206)]
        return [unquote(path.rsplit("/", 1)[1]) for path in sent if "/resolve/" in path or path.startswith("/lfs/")]


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """An empty hub, answering on a free port of 127.0.0.1 until the block ends."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("_BoundHandler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def client_environment(hub: Hub, home: Path) -> dict[str, str]:
    """Variables that point a subprocess's huggingface_hub at ``hub``, with a cache of its own and no stored token."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }


class _Problem(Exception):
    """An answer other than the content: status and the hub's error code."""

    def __init__(self, status: int, code: str, commit: str | None = None) -> None:
        super().__init__(code)
        self.status, self.code, self.commit = status, code, commit


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        self._body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        header = self.headers.get("Authorization")
        self._token = header.removeprefix("Bearer ") if header else None
        try:
            if self._is_answered_otherwise(parts.path):
                return
            for pattern, method, route in _ROUTES:
                found = re.fullmatch(pattern, parts.path)
                if found and method == ("GET" if self.command == "HEAD" else self.command):
                    route(self, *(text and unquote(text) for text in found.groups()), query=parse_qs(parts.query))
                    return
            raise _Problem(404, "NotFound")
        except _Problem as problem:
            headers = {"X-Error-Code": problem.code, "X-Error-Message": problem.code}
            headers |= {"X-Repo-Commit": problem.commit} if problem.commit else {}
            self._send(problem.status, headers, json.dumps({"error": problem.code}).encode())
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _is_answered_otherwise(self, path: str) -> bool:
        """Whether the request got a fault that was asked for, or was sent on to a repository's new name."""
        for ending, faults in self.hub.faults.items():
            if path.endswith(ending) and faults:
                fault = faults.pop(0)
                if fault.status == 200:  # none this time
                    return False
                self._send(fault.status, fault.headers, b"")
                return True
        for old, new in self.hub.renamed.items():
            if f"/{old}/" in f"{path}/":
                self._send(307, {"Location": self.path.replace(old, new, 1)}, b"")
                return True
        return False

    # ---- what can be asked for

    def model_info(self, repo_id: str, revision: str | None, query: Query) -> None:
        sha, files = self._find(repo_id, revision, listing=True)
        repository = self.hub.repositories[repo_id]
        content = {
            "id": repo_id,
            "modelId": repo_id,
            "sha": sha,
            "private": repository.private,
            "gated": "manual" if repository.tokens is not None and not repository.private else False,
            "tags": [],
            "siblings": [{"rfilename": path} for path in sorted(files)],
        }
        if "blobs" in query and not self.hub.tells_names_only:
            content["siblings"] = [_sibling(path, files[path]) for path in sorted(files)]
        self._json(content)

    def tree(self, repo_id: str, revision: str, under: str | None, query: Query) -> None:
        sha, files = self._find(repo_id, revision, listing=True)
        recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
        self._json(_tree(files, under or "", recursive, sha))

    def paths_info(self, repo_id: str, revision: str, query: Query) -> None:
        sha, files = self._find(repo_id, revision, listing=True)
        body = self._body.decode()
        paths = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
        self._json([entry for entry in _tree(files, "", True, sha) if entry["path"] in paths])

    def refs(self, repo_id: str, query: Query) -> None:
        self._find(repo_id, None, listing=True)
        repository = self.hub.repositories[repo_id]
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": sha} for name, sha in repository.refs.items()
        ]
        tags = [
            {"name": name, "ref": f"refs/tags/{name}", "targetCommit": sha} for name, sha in repository.tags.items()
        ]
        self._json({"branches": branches, "tags": tags, "converts": []})

    def resolve(self, repo_id: str, revision: str, name: str, query: Query) -> None:
        sha, files = self._find(repo_id, revision)
        if name not in files:
            raise _Problem(404, "EntryNotFound", sha)
        blob = files[name]
        headers = {"X-Repo-Commit": sha, "ETag": f'"{blob.git}"'}
        if not name.endswith(LARGE):
            self._send_content(blob, headers, name)
            return
        headers |= {"X-Linked-ETag": f'"{blob.sha256}"', "X-Linked-Size": str(blob.size)}
        # Another host name, as the real one's content network has: clients then drop the token on the way there.
        location = f"{self.hub.url.replace('127.0.0.1', 'localhost')}/lfs/{blob.sha256}/{name.rsplit('/', 1)[-1]}"
        self._send(302, headers | {"Location": location}, b"")

    def large_file(self, sha256: str, name: str, query: Query) -> None:
        commits = [files for repository in self.hub.repositories.values() for files in repository.commits.values()]
        blobs = [blob for files in commits for blob in files.values() if blob.sha256 == sha256]
        if not blobs:
            raise _Problem(404, "EntryNotFound")
        self._send_content(blobs[0], {"ETag": f'"{sha256}"'}, name)

    def who_am_i(self, query: Query) -> None:
        self._json({"name": "tester", "type": "user", "orgs": []})

    # ---- what can be changed

    def create(self, query: Query) -> None:
        asked = json.loads(self._body)
        repo_id = f"{asked.get('organization') or 'tester'}/{asked['name']}"
        status = 409 if repo_id in self.hub.repositories else 200
        if status == 200:
            private = bool(asked.get("private")) or asked.get("visibility") == "private"
            self.hub.repositories[repo_id] = Repository(tokens=[self._writer()] if private else None, private=private)
            self.hub.commit(repo_id, "main", {})
        self._json({"url": f"{self.hub.url}/{repo_id}", "id": repo_id, "name": repo_id}, status)

    def create_branch(self, repo_id: str, branch: str, query: Query) -> None:
        sha, _ = self._find(repo_id, json.loads(self._body or b"{}").get("startingPoint"))
        refs = self.hub.repositories[repo_id].refs
        if branch in refs:
            raise _Problem(409, "Conflict")
        refs[branch] = sha
        self._json({})

    def create_tag(self, repo_id: str, revision: str, query: Query) -> None:
        self._writer()
        sha, _ = self._find(repo_id, revision)
        tags = self.hub.repositories[repo_id].tags
        tag = json.loads(self._body)["tag"]
        if tag in tags:
            raise _Problem(409, "Conflict")
        tags[tag] = sha
        self._json({})

    def delete_tag(self, repo_id: str, tag: str, query: Query) -> None:
        self._writer()
        if self.hub.repositories[repo_id].tags.pop(tag, None) is None:
            raise _Problem(404, "RevisionNotFound")
        self._json({})

    def lfs_batch(self, repo_id: str, query: Query) -> None:
        self._writer()
        answers: list[dict[str, object]] = []
        for asked in json.loads(self._body)["objects"]:
            answer: dict[str, object] = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.hub.objects:
                answer["actions"] = {"upload": {"href": f"{self.hub.url}/lfs-upload/{asked['oid']}"}}
            answers.append(answer)
        self._json({"transfer": "basic", "objects": answers})

    def lfs_upload(self, oid: str, query: Query) -> None:
        if hashlib.sha256(self._body).hexdigest() != oid:
            raise _Problem(400, "BadRequest")
        self.hub.objects[oid] = self._body
        self._json({})

    def validate_card(self, query: Query) -> None:
        self._json({"errors": [], "warnings": []})

    def preupload(self, repo_id: str, revision: str, query: Query) -> None:
        _, files = self._find(repo_id, revision)
        answers = []
        for name in (entry["path"] for entry in json.loads(self._body)["files"]):
            is_large = name.endswith(LARGE)
            oid = (files[name].sha256 if is_large else files[name].git) if name in files else None
            mode = "lfs" if is_large else "regular"
            answers.append({"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._json({"files": answers})

    def commit(self, repo_id: str, revision: str, query: Query) -> None:
        self._writer()
        head, files = self._find(repo_id, revision)
        repository = self.hub.repositories[repo_id]
        changed = dict(files)
        for line in self._body.splitlines():
            key, value = (entry := json.loads(line))["key"], entry["value"]
            if key == "file":
                content = base64.b64decode(value["content"])
                changed[value["path"]] = Blob.of(content + b"!" if self.hub.mangles else content)
            elif key == "lfsFile":
                changed[value["path"]] = Blob.of(self.hub.objects[value["oid"]])
            elif key == "deletedFile":
                del changed[value["path"]]
            elif key == "deletedFolder":
                changed = {p: blob for p, blob in changed.items() if not p.startswith(value["path"].rstrip("/") + "/")}
            elif key != "header":
                raise _Problem(400, "BadRequest")
            elif value.get("parentCommit", head) != head:
                raise _Problem(412, "PreconditionFailed")
        answer = {}
        if query.get("create_pr") == ["1"]:
            number = 1 + sum(name.startswith("refs/pr/") for name in repository.refs)
            revision = f"refs/pr/{number}"
            answer["pullRequestUrl"] = f"{self.hub.url}/{repo_id}/discussions/{number}"
        sha = self.hub.commit(repo_id, revision, changed)
        self._json({"commitUrl": f"{self.hub.url}/{repo_id}/commit/{sha}", "commitOid": sha, **answer})

    # ---- answering

    def _writer(self) -> str:
        """The token, without which nothing is changed."""
        if self._token is None:
            raise _Problem(401, "Unauthorized")
        return self._token

    def _find(self, repo_id: str, revision: str | None, *, listing: bool = False) -> tuple[str, Files]:
        """Commit and files of a revision; the hub's own errors for what is missing or may not be read."""
        repository = self.hub.repositories.get(repo_id)
        allowed = repository is None or repository.tokens is None or self._token in repository.tokens
        if repository is None or (repository.private and not allowed):
            raise _Problem(404 if self._token else 401, "RepoNotFound")
        if not allowed and not listing:
            raise _Problem(403 if self._token else 401, "GatedRepo")
        name = revision or "main"
        sha = {**repository.tags, **repository.refs}.get(name, name)
        if sha not in repository.commits:
            raise _Problem(404, "RevisionNotFound")
        return sha, repository.commits[sha]

    def _json(self, content: object, status: int = 200) -> None:
        self._send(status, {"Content-Type": "application/json"}, json.dumps(content).encode())

    def _send_content(self, blob: Blob, headers: Mapping[str, str], name: str) -> None:
        """The content or the asked range of it, broken off early where ``cuts`` says so."""
        headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", **headers}
        asked = self.headers.get("Range")
        if asked is None:
            self._send(200, headers, blob.read(), name)
        elif (span := _span(asked, blob.size)) is None:
            self._send(416, {"Content-Range": f"bytes */{blob.size}"}, b"")
        else:
            headers = {**headers, "Content-Range": f"bytes {span[0]}-{span[1]}/{blob.size}"}
            self._send(206, headers, blob.read(*span), name)

    def _send(self, status: int, headers: Mapping[str, str], body: bytes, name: str = "") -> None:
        path = urlsplit(self.path).path
        cuts = self.hub.cuts.get(name) if self.command != "HEAD" else None
        if name in self.hub.spoiled and body:
            body = body[:-1] + bytes([body[-1] ^ 1])
        if self.hub.swaps is not None and status == 206:
            one, other = self.hub.swaps
            body = other.join(part.replace(other, one) for part in body.split(one))
        whole = len(body)
        if cuts:
            body, self.close_connection = body[: cuts.pop(0)], True
        sent = 0 if self.command == "HEAD" else len(body)
        self.hub.requests.append(Request(self.command, path, self.headers.get("Range"), self._token, status, sent))
        if name and self.command == "GET" and self.headers.get("Range") is None:
            self.hub.watcher(name)
            if name in self.hub.stalls:
                self.hub.stalls[name].wait(60)
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(whole)}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


_REPO = r"/api/models/([^/]+/[^/]+)"
_ROUTES: tuple[tuple[str, str, Callable[..., None]], ...] = (
    (rf"{_REPO}(?:/revision/([^/]+))?", "GET", _Handler.model_info),
    (rf"{_REPO}/tree/([^/]+)(?:/(.+?))?/?", "GET", _Handler.tree),
    (rf"{_REPO}/paths-info/([^/]+)", "POST", _Handler.paths_info),
    (rf"{_REPO}/refs", "GET", _Handler.refs),
    (r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", "GET", _Handler.resolve),
    (r"/lfs/([0-9a-f]{64})/([^/]+)", "GET", _Handler.large_file),
    (r"/api/whoami-v2", "GET", _Handler.who_am_i),
    (r"/api/repos/create", "POST", _Handler.create),
    (rf"{_REPO}/branch/([^/]+)", "POST", _Handler.create_branch),
    (r"/api/validate-yaml", "POST", _Handler.validate_card),
    (rf"{_REPO}/preupload/([^/]+)", "POST", _Handler.preupload),
    (rf"{_REPO}/commit/([^/]+)", "POST", _Handler.commit),
    (rf"{_REPO}/tag/([^/]+)", "POST", _Handler.create_tag),
    (rf"{_REPO}/tag/([^/]+)", "DELETE", _Handler.delete_tag),
    (r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", "POST", _Handler.lfs_batch),
    (r"/lfs-upload/([0-9a-f]{64})", "PUT", _Handler.lfs_upload),
)


def _span(asked: str, size: int) -> tuple[int, int] | None:
    """First and last byte of a ``Range`` header with one range; ``None`` when it cannot be served."""
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", asked)
    if found is None or not any(found.groups()):
        return None
    if not found[1]:
        first, last = max(size - int(found[2]), 0), size - 1
    else:
        first, last = int(found[1]), min(int(found[2] or size), size - 1)
    return (first, last) if first <= last else None


def _sibling(path: str, blob: Blob) -> dict[str, object]:
    """A file with its size and ids, as ``blobs=true`` asks for them."""
    entry: dict[str, object] = {"rfilename": path, "size": blob.size, "blobId": blob.git}
    if path.endswith(LARGE):
        entry["lfs"] = {"sha256": blob.sha256, "size": blob.size, "pointerSize": 134}
    return entry


def _tree(files: Files, under: str, recursive: bool, sha: str) -> list[dict[str, object]]:
    """Entries of the folder ``under`` ("" for the root), files and folders, as the hub lists them."""
    prefix = f"{under}/" if under else ""
    below = sorted(path for path in files if path.startswith(prefix))
    if under and not below:
        raise _Problem(404, "EntryNotFound", sha)
    entries: dict[str, dict[str, object]] = {}
    for path in below:
        parents = path[len(prefix) :].split("/")[:-1]
        for depth in range(1, (len(parents) if recursive else min(len(parents), 1)) + 1):
            folder = prefix + "/".join(parents[:depth])
            oid = hashlib.sha1(folder.encode()).hexdigest()
            entries[folder] = {"type": "directory", "path": folder, "oid": oid, "size": 0}
        if recursive or not parents:
            blob = files[path]
            entries[path] = {"type": "file", "path": path, "oid": blob.git, "size": blob.size}
            if path.endswith(LARGE):
                entries[path]["lfs"] = {"oid": blob.sha256, "size": blob.size, "pointerSize": 134}
    return list(entries.values())
