"""The local hub serves the real huggingface_hub and transformers as the real one does."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import CommitOperationAdd, HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tests.hub_server import Fault, Hub, client_environment, serve_hub
from tests.models import make_moe


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # of which the server has nothing
    with serve_hub() as hub:
        yield hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    (folder / "nested" / "deep").mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (folder / "nested" / "deep" / "note.txt").write_text("hello")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and ".cache" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_a_snapshot_is_the_folder_and_is_not_fetched_twice(hub: Hub, folder: Path, tmp_path: Path) -> None:
    hub.add("Qwen/Tiny", folder)
    options: dict[str, Any] = {"endpoint": hub.url, "cache_dir": tmp_path / "cache", "token": False}
    assert contents(Path(snapshot_download("Qwen/Tiny", **options))) == contents(folder)
    assert sorted(hub.downloads()) == ["config.json", "model.safetensors", "note.txt"]
    hub.requests.clear()
    snapshot_download("Qwen/Tiny", **options)
    assert hub.downloads() == []


def test_patterns_keep_weights_from_being_fetched(hub: Hub, folder: Path, tmp_path: Path) -> None:
    hub.add("Qwen/Tiny", folder)
    snapshot_download(
        "Qwen/Tiny", endpoint=hub.url, local_dir=tmp_path / "out", ignore_patterns=["*.safetensors"], token=False
    )
    assert contents(tmp_path / "out").keys() == {"config.json", "nested/deep/note.txt"}
    assert "model.safetensors" not in hub.downloads()


def test_revisions_by_branch_and_by_sha_are_apart(hub: Hub, folder: Path, tmp_path: Path) -> None:
    first = hub.add("Qwen/Tiny", folder)
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "config.json").write_text("{}")
    second = hub.add("Qwen/Tiny", changed, revision="refs/pr/1")
    assert first != second

    def config(revision: str) -> str:
        path = hf_hub_download(
            "Qwen/Tiny", "config.json", revision=revision, endpoint=hub.url, cache_dir=tmp_path / "cache", token=False
        )
        assert (second if revision in ("refs/pr/1", second) else first) in path
        return Path(path).read_text()

    assert config("main") == config(first) == '{"model_type": "qwen3"}'
    assert config("refs/pr/1") == config(second) == "{}"
    assert HfApi(endpoint=hub.url, token=False).model_info("Qwen/Tiny", revision="refs/pr/1").sha == second


def test_info_and_tree_tell_names_sizes_and_hashes(hub: Hub, folder: Path) -> None:
    sha = hub.add("Qwen/Tiny", folder)
    api = HfApi(endpoint=hub.url, token=False)
    info = api.model_info("Qwen/Tiny")
    assert info.sha == sha
    assert info.siblings is not None
    assert [sibling.rfilename for sibling in info.siblings] == sorted(contents(folder))
    assert {entry.path for entry in api.list_repo_tree("Qwen/Tiny")} == {"config.json", "model.safetensors", "nested"}
    entries: dict[str, Any] = {entry.path: entry for entry in api.list_repo_tree("Qwen/Tiny", recursive=True)}
    assert entries.keys() == contents(folder).keys() | {"nested", "nested/deep"}
    assert entries["model.safetensors"].size == 10240
    assert entries["model.safetensors"].lfs is not None
    assert [entry.path for entry in api.list_repo_tree("Qwen/Tiny", "nested/deep")] == ["nested/deep/note.txt"]
    assert [entry.path for entry in api.get_paths_info("Qwen/Tiny", ["config.json"])] == ["config.json"]
    assert [branch.name for branch in api.list_repo_refs("Qwen/Tiny").branches] == ["main"]


@pytest.mark.parametrize(
    ("header", "expected", "content_range"),
    [
        ("bytes=0-7", slice(0, 8), "bytes 0-7/10240"),
        ("bytes=10000-", slice(10000, None), "bytes 10000-10239/10240"),
        ("bytes=10000-99999", slice(10000, None), "bytes 10000-10239/10240"),
        ("bytes=-5", slice(-5, None), "bytes 10235-10239/10240"),
    ],
)
def test_ranges_are_served_across_the_redirect(
    hub: Hub, folder: Path, header: str, expected: slice, content_range: str
) -> None:
    hub.add("Qwen/Tiny", folder)
    url = f"{hub.url}/Qwen/Tiny/resolve/main/model.safetensors"
    answer = httpx.get(url, headers={"Range": header}, follow_redirects=True)
    assert (answer.status_code, answer.headers["Content-Range"]) == (206, content_range)
    assert answer.content == (folder / "model.safetensors").read_bytes()[expected]
    assert hub.requests[-1].range == header


def test_a_range_past_the_end_is_refused(hub: Hub, folder: Path) -> None:
    hub.add("Qwen/Tiny", folder)
    url = f"{hub.url}/Qwen/Tiny/resolve/main/model.safetensors"
    answer = httpx.get(url, headers={"Range": "bytes=10240-"}, follow_redirects=True)
    assert (answer.status_code, answer.headers["Content-Range"]) == (416, "bytes */10240")


def test_a_download_that_breaks_off_is_resumed_where_it_stopped(hub: Hub, tmp_path: Path) -> None:
    content = bytes(range(251)) * 44_000
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "model.safetensors").write_bytes(content)
    hub.add("Qwen/Tiny", tmp_path / "repo")
    hub.cuts["model.safetensors"] = [10_600_000]
    path = hf_hub_download(
        "Qwen/Tiny", "model.safetensors", endpoint=hub.url, cache_dir=tmp_path / "cache", token=False
    )
    assert Path(path).read_bytes() == content
    assert hub.requests[-1].range == "bytes=10485760-"  # the client keeps whole pieces of 10 MiB


def test_what_is_missing_has_the_errors_of_the_hub(hub: Hub, folder: Path, tmp_path: Path) -> None:
    hub.add("Qwen/Tiny", folder)
    options: dict[str, Any] = {"endpoint": hub.url, "cache_dir": tmp_path / "cache", "token": False}
    with pytest.raises(RepositoryNotFoundError):
        snapshot_download("Qwen/Absent", **options)
    with pytest.raises(RevisionNotFoundError):
        snapshot_download("Qwen/Tiny", revision="nowhere", **options)
    with pytest.raises(EntryNotFoundError):
        hf_hub_download("Qwen/Tiny", "absent.json", **options)


def test_a_gated_repository_tells_its_files_but_not_their_content(hub: Hub, folder: Path, tmp_path: Path) -> None:
    hub.add("Qwen/Gated", folder, gated={"hf_granted"})
    for token, status in ((False, 401), ("hf_other", 403)):
        assert HfApi(endpoint=hub.url, token=token).model_info("Qwen/Gated").gated == "manual"
        with pytest.raises(GatedRepoError) as caught:
            hf_hub_download(
                "Qwen/Gated", "config.json", endpoint=hub.url, cache_dir=tmp_path / f"cache-{token}", token=token
            )
        assert caught.value.response.status_code == status
    path = snapshot_download("Qwen/Gated", endpoint=hub.url, cache_dir=tmp_path / "cache", token="hf_granted")
    assert contents(Path(path)) == contents(folder)


def test_a_private_repository_does_not_exist_for_others(hub: Hub, folder: Path) -> None:
    hub.add("Qwen/Private", folder, private={"hf_granted"})
    with pytest.raises(RepositoryNotFoundError):
        HfApi(endpoint=hub.url, token=False).model_info("Qwen/Private")
    assert HfApi(endpoint=hub.url, token="hf_granted").model_info("Qwen/Private").private


def test_a_pushed_folder_comes_back_and_only_changes_are_sent(hub: Hub, folder: Path, tmp_path: Path) -> None:
    api = HfApi(endpoint=hub.url, token="hf_granted")
    api.create_repo("me/pushed")
    api.create_repo("me/pushed", exist_ok=True)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# x\n")
    commit = api.upload_folder(repo_id="me/pushed", folder_path=folder)
    assert hub.files("me/pushed") == contents(folder)
    assert commit.oid == api.model_info("me/pushed").sha
    back = snapshot_download("me/pushed", endpoint=hub.url, cache_dir=tmp_path / "cache", token=False)
    assert contents(Path(back)) == contents(folder)
    assert api.upload_folder(repo_id="me/pushed", folder_path=folder).oid == commit.oid
    api.create_branch("me/pushed", branch="next")
    api.upload_folder(repo_id="me/pushed", folder_path=folder, revision="next", delete_patterns="nested/*")
    api.delete_file("config.json", "me/pushed", revision="next")
    assert hub.files("me/pushed", "next").keys() == contents(folder).keys() - {"config.json"}
    assert hub.files("me/pushed") == contents(folder)


def test_large_files_are_sent_once_even_when_the_commit_never_came(hub: Hub, folder: Path) -> None:
    api = HfApi(endpoint=hub.url, token="hf_granted")
    api.create_repo("me/pushed")
    adding = [CommitOperationAdd("model.safetensors", folder / "model.safetensors")]
    api.preupload_lfs_files("me/pushed", adding, free_memory=False)
    assert hub.files("me/pushed") == {}
    hub.requests.clear()
    again = [CommitOperationAdd("model.safetensors", folder / "model.safetensors")]
    commit = api.create_commit("me/pushed", again, commit_message="again")
    assert not [request for request in hub.requests if request.method == "PUT"]
    assert hub.files("me/pushed", commit.oid) == {"model.safetensors": (folder / "model.safetensors").read_bytes()}


def test_pull_requests_tags_and_private_repositories(hub: Hub, folder: Path) -> None:
    api = HfApi(endpoint=hub.url, token="hf_granted")
    api.create_repo("me/pushed", private=True)
    with pytest.raises(RepositoryNotFoundError):
        HfApi(endpoint=hub.url, token=False).model_info("me/pushed")
    first = api.create_commit(
        "me/pushed", [CommitOperationAdd("config.json", folder / "config.json")], commit_message="a"
    )
    api.create_tag("me/pushed", tag="step-1")
    proposed = api.create_commit("me/pushed", [CommitOperationAdd("b.json", b"{}")], commit_message="b", create_pr=True)
    assert proposed.pr_revision == "refs/pr/1"
    assert hub.files("me/pushed", "refs/pr/1").keys() == {"config.json", "b.json"}
    assert hub.files("me/pushed").keys() == hub.files("me/pushed", "step-1").keys() == {"config.json"}
    assert {tag.name: tag.target_commit for tag in api.list_repo_refs("me/pushed").tags} == {"step-1": first.oid}
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_tag("me/pushed", tag="step-1")
    api.delete_tag("me/pushed", tag="step-1")
    with pytest.raises(RevisionNotFoundError):
        api.model_info("me/pushed", revision="step-1")


def test_names_sizes_and_hashes_come_in_one_answer(hub: Hub, folder: Path) -> None:
    hub.add("Qwen/Tiny", folder)
    info = HfApi(endpoint=hub.url, token=False).model_info("Qwen/Tiny", files_metadata=True)
    assert info.siblings is not None
    found = {sibling.rfilename: sibling for sibling in info.siblings}
    assert found["config.json"].size == 23
    assert found["config.json"].lfs is None
    large = found["model.safetensors"].lfs
    assert large is not None
    assert large.sha256 == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_faults_come_as_often_as_they_were_asked_for(hub: Hub, folder: Path) -> None:
    hub.add("Qwen/Tiny", folder)
    hub.renamed["Qwen/Old"] = "Qwen/Tiny"
    hub.spoiled.add("model.safetensors")
    hub.faults["/resolve/main/config.json"] = [Fault(429, {"Retry-After": "0"}), Fault(503)]
    url = f"{hub.url}/Qwen/Old/resolve/main"
    answers = [httpx.get(f"{url}/config.json", follow_redirects=True) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [429, 503, 200]
    assert answers[-1].url.path == "/Qwen/Tiny/resolve/main/config.json"
    spoiled = httpx.get(f"{url}/model.safetensors", follow_redirects=True).content
    whole = (folder / "model.safetensors").read_bytes()
    assert [i for i, pair in enumerate(zip(spoiled, whole, strict=True)) if pair[0] != pair[1]] == [len(whole) - 1]


def test_transformers_loads_a_model_from_it_in_a_fresh_process(hub: Hub, tmp_path: Path) -> None:
    hub.add("Qwen/Tiny-MoE", make_moe(tmp_path / "moe", max_shard_size="60KB"))
    script = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model, info = AutoModelForCausalLM.from_pretrained("Qwen/Tiny-MoE", output_loading_info=True)
assert not info["missing_keys"] and not info["unexpected_keys"], info
tokens = AutoTokenizer.from_pretrained("Qwen/Tiny-MoE")("sun moon", return_tensors="pt").input_ids
assert torch.isfinite(model(tokens).logits).all()
"""
    environment = {**os.environ, **client_environment(hub, tmp_path / "home")}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=120)
    assert sum(name.endswith(".safetensors") for name in hub.downloads()) == len(
        list((tmp_path / "moe").glob("*.safetensors"))
    )
