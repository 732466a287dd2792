"""Headers by range requests, and conversions that fetch a file when they come to it, from a hub on this machine."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from qwen3conv.tools.generate import generate
from qwen3conv.tools.hub_meter import Meter, meter_class
from tests.cli.conftest import HubClient, write_model, write_sharded
from tests.hub_server import Blob, Fault


@pytest.fixture
def repository(client: HubClient) -> Path:
    """A model in five files, served as Qwen/Tiny."""
    folder = write_sharded(client.folder / "served")
    client.hub.add("Qwen/Tiny", folder)
    return folder


def weights_sent(client: HubClient) -> list[str]:
    """Whole weight files that were sent, in order."""
    sent = (r for r in client.hub.requests if r.path.startswith("/lfs/") and r.range is None and r.method == "GET")
    return [request.path.rsplit("/", 1)[1] for request in sent]


def test_inspect_and_plan_of_235b_move_a_few_megabytes(client: HubClient) -> None:
    hollow = generate(client.folder / "hollow", "Qwen3-235B-A22B", sparse=True).folder
    paths = {path.name: path for path in hollow.iterdir()}
    files = {name: Blob.of_holes(p) if name.endswith(".safetensors") else Blob.of(p) for name, p in paths.items()}
    assert sum(blob.size for blob in files.values()) > 470e9
    client.hub.add("Qwen/Large", write_model(client.folder / "small"))
    client.hub.commit("Qwen/Large", "main", files)

    told = json.loads(client.run("inspect", "Qwen/Large", "--json").stdout)
    assert (told["complete"], told["tensors"], told["path"]) == (True, 36_945, "Qwen/Large")
    assert client.hub.sent() < 12e6
    assert weights_sent(client) == []

    client.hub.requests.clear()
    planned = json.loads(client.run("plan", "Qwen/Large", "out", "--to", "titan", "--json").stdout)
    assert sum(file["bytes"] for file in planned["reads"]) == told["bytes"] == 470_187_269_120
    assert client.hub.sent() < 6e6  # config and index are in the cache by now
    assert sorted(path.name for path in client.folder.iterdir()) == ["hf-home", "hollow", "small"]


def test_each_file_comes_once_and_goes_after_its_last_use(client: HubClient, repository: Path) -> None:
    beside: list[set[str]] = []

    def watch(name: str) -> None:
        fetched = client.folder / "dcp.download" / "fetched"
        beside.append({path.name for path in fetched.glob("*.safetensors")})

    client.hub.watcher = watch
    made = json.loads(client.run("hf-to-dcp", "Qwen/Tiny", "dcp", "--workers", "1", "--json").stdout)
    assert len(beside) > 5  # the small files too
    assert set().union(*beside) == set()  # each was gone before the next one came
    assert weights_sent(client) == sorted(path.name for path in repository.glob("*.safetensors"))
    assert made["fingerprint"] == client.run("fingerprint", repository).stdout.strip()
    assert not list(client.cache.rglob("*.safetensors"))
    assert not [path for path in client.folder.iterdir() if path.name.startswith("dcp.")]
    client.run("hf-to-dcp", repository, "local")
    for name in (path.name for path in (client.folder / "local").glob("*.distcp")):
        assert (client.folder / "dcp" / name).read_bytes() == (client.folder / "local" / name).read_bytes()


def test_what_the_cache_holds_is_not_fetched_again_and_stays(client: HubClient, repository: Path) -> None:
    client.run("fingerprint", "Qwen/Tiny", "--keep-download")
    cached = {path.resolve() for path in client.cache.rglob("*.safetensors")}
    client.hub.requests.clear()
    client.run("hf-to-dcp", "Qwen/Tiny", "dcp")
    assert weights_sent(client) == []
    assert cached
    assert all(path.is_file() for path in cached)
    client.run("hf-to-dcp", "Qwen/Tiny", "offline", HF_HUB_OFFLINE="1")
    client.run("hf-to-dcp", "Qwen/Tiny", "cut-off", HF_ENDPOINT="http://127.0.0.1:9")


def kept_bytes(folder: Path, ending: str) -> int:
    """Bytes of data files below ``folder``, links not counted; of a mounted folder only headers are there."""
    files = [path for path in folder.rglob(f"*{ending}*") if path.is_file() and not path.is_symlink()]
    return sum(path.stat().st_size for path in files)


@pytest.fixture
def dcp(client: HubClient, repository: Path) -> Path:
    """The same model as a DCP in several files, served as Qwen/Dcp, with what it was made of beside it."""
    client.run("hf-to-dcp", repository, "made", "--shard-size", "4000")
    client.hub.add("Qwen/Dcp", client.folder / "made")
    assert len(list((client.folder / "made").glob("*.distcp"))) > 3
    return client.folder / "made"


@pytest.mark.parametrize("name", ["Qwen/Tiny", "Qwen/Dcp"])
@pytest.mark.parametrize("command", ["fingerprint", "verify", "diff"])
def test_what_reads_every_byte_once_has_one_file_on_the_disk_at_a_time(
    client: HubClient, repository: Path, dcp: Path, name: str, command: str
) -> None:
    folder, ending = (repository, ".safetensors") if name == "Qwen/Tiny" else (dcp, ".distcp")
    sizes = sorted(path.stat().st_size for path in folder.glob(f"*{ending}"))
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in folder.glob("*.safetensors"))
    most = [0]

    def watch(requested: str) -> None:
        most[0] = max(most[0], kept_bytes(client.cache, ending))

    client.hub.requests.clear()
    client.hub.watcher = watch
    words = {
        "fingerprint": (name, "--workers", "1"),
        "verify": (name, "--workers", "1", "--manifest", dcp / "qwen3conv.json"),
        "diff": (name, repository),
    }[command]
    client.run(command, *words)
    assert weights_sent(client) == sorted(path.name for path in folder.glob(f"*{ending}"))  # each once
    assert most[0] <= headers + 2 * sizes[-1], (most, sizes)  # one that is in use, one that is coming
    assert most[0] < sum(sizes)
    assert kept_bytes(client.cache, ending) == 0
    assert not list(client.cache.glob("qwen3conv-*"))


def test_of_two_ids_each_file_comes_once_and_what_was_kept_is_used(
    client: HubClient, repository: Path, dcp: Path
) -> None:
    client.run("diff", "Qwen/Tiny", "Qwen/Dcp", "--keep-download")
    assert len(weights_sent(client)) == len([*repository.glob("*.safetensors"), *dcp.glob("*.distcp")])
    client.hub.requests.clear()
    told = json.loads(client.run("fingerprint", "Qwen/Dcp", "--json", HF_HUB_OFFLINE="1").stdout)
    assert client.run("fingerprint", "Qwen/Dcp").stdout.strip() == told["fingerprint"]
    assert weights_sent(client) == []
    assert client.run("verify", "Qwen/Dcp").stdout.startswith("Qwen/Dcp: verified")


def test_a_dcp_is_converted_file_by_file(client: HubClient, repository: Path, dcp: Path) -> None:
    sizes = [path.stat().st_size for path in dcp.glob("*.distcp")]
    most = [0]

    def watch(requested: str) -> None:
        most[0] = max(most[0], kept_bytes(client.folder / "back.download", ".distcp"))

    client.hub.requests.clear()
    client.hub.watcher = watch
    client.run("dcp-to-hf", "Qwen/Dcp", "back", "--workers", "1")
    assert weights_sent(client) == sorted(path.name for path in dcp.glob("*.distcp"))
    assert most[0] <= 2 * max(sizes) < sum(sizes)
    assert client.run("diff", repository, "back").returncode == 0


START = """
import sys
from pathlib import Path
from qwen3conv.tools.training_run import look, make_source
from qwen3conv.training.launch import Run
run = Run(Path("run"), "rows.jsonl")
said = lambda text: print(text, file=sys.stderr)
found, config = look(sys.argv[1], announce=said)
make_source(run, found, sys.argv[1], announce=said)
"""


def start(client: HubClient, place: str | Path) -> subprocess.CompletedProcess[str]:
    """What ``train`` does before it trains."""
    command = [sys.executable, "-P", "-c", START, str(place)]
    return subprocess.run(command, cwd=client.folder, env=client.environment(), capture_output=True, text=True)


def test_the_start_of_a_run_is_made_file_by_file_and_made_once(client: HubClient, repository: Path) -> None:
    sizes = [path.stat().st_size for path in repository.glob("*.safetensors")]
    most = [0]

    def watch(requested: str) -> None:
        download = client.folder / "run" / "source.download" / "fetched"
        most[0] = max(most[0], kept_bytes(download, ".safetensors"))

    client.hub.watcher = watch
    names = sorted(path.name for path in repository.glob("*.safetensors"))
    client.hub.spoiled.add(names[3])
    broken = start(client, "Qwen/Tiny")
    assert broken.returncode
    assert f"{names[3]} of Qwen/Tiny came with the wrong hash" in broken.stderr
    client.hub.spoiled.clear()
    client.hub.requests.clear()
    ran = start(client, "Qwen/Tiny")
    assert ran.returncode == 0, ran.stderr
    assert len(set(weights_sent(client))) <= 3  # it went on: two of five were done before the fourth began
    assert 0 < most[0] <= 3 * max(sizes) < sum(sizes)  # two workers, and the one that is coming
    assert kept_bytes(client.cache, ".safetensors") == 0
    assert [path.name for path in (client.folder / "run").iterdir()] == ["source"]
    assert client.run("diff", repository, "run/source").returncode == 0
    manifest = json.loads((client.folder / "run" / "source" / "qwen3conv.json").read_text())["source"]
    assert manifest["hub"] == "Qwen/Tiny"
    assert manifest["trains"] == f"Qwen/Tiny@{manifest['commit']}"
    client.hub.requests.clear()
    assert start(client, "Qwen/Tiny").returncode == 0
    assert weights_sent(client) == []
    assert "is a run of another checkpoint" in start(client, repository).stderr


def test_what_a_killed_reader_left_is_removed_by_the_next(client: HubClient, repository: Path) -> None:
    name = sorted(path.name for path in repository.glob("*.safetensors"))[2]
    client.hub.stalls[name] = threading.Event()
    words = [sys.executable, "-P", "-m", "qwen3conv", "fingerprint", "Qwen/Tiny", "--workers", "1"]
    running = subprocess.Popen(words, cwd=client.folder, env=client.environment(), stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while name not in weights_sent(client) and time.monotonic() < until:
        time.sleep(0.02)
    assert len(list(client.cache.glob("qwen3conv-*"))) == 1
    running.send_signal(signal.SIGKILL)
    running.wait()
    client.hub.stalls.pop(name).set()
    assert len(list(client.cache.glob("qwen3conv-*"))) == 1
    client.run("fingerprint", "Qwen/Tiny")
    assert not list(client.cache.glob("qwen3conv-*"))


@pytest.mark.parametrize("interrupt", [False, True])
def test_a_wrong_hash_or_an_interrupt_ends_a_reader_and_nothing_stays(
    client: HubClient, repository: Path, interrupt: bool
) -> None:
    names = sorted(path.name for path in repository.glob("*.safetensors"))
    if not interrupt:
        client.hub.spoiled.add(names[2])
        said = client.run("fingerprint", "Qwen/Tiny", code=1).stderr
        assert f"{names[2]} of Qwen/Tiny came with the wrong hash" in said
    else:
        client.hub.stalls[names[2]] = threading.Event()
        words = [sys.executable, "-P", "-m", "qwen3conv", "fingerprint", "Qwen/Tiny", "--workers", "1"]
        running = subprocess.Popen(words, cwd=client.folder, env=client.environment(), stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while names[2] not in weights_sent(client) and time.monotonic() < until:
            time.sleep(0.02)
        running.send_signal(signal.SIGINT)
        client.hub.stalls.pop(names[2]).set()
        assert running.wait(30) == 130
    assert not list(client.cache.glob("qwen3conv-*"))
    assert kept_bytes(client.cache, ".safetensors") == 0


def test_a_file_with_another_hash_is_refused_and_what_came_before_is_kept(client: HubClient, repository: Path) -> None:
    names = sorted(path.name for path in repository.glob("*.safetensors"))
    client.hub.spoiled.add(names[2])
    said = client.run("hf-to-dcp", "Qwen/Tiny", "dcp", "--workers", "1", code=1).stderr
    assert f"{names[2]} of Qwen/Tiny came with the wrong hash" in said
    assert not (client.folder / "dcp").exists()
    client.hub.spoiled.clear()
    client.hub.requests.clear()
    assert "--resume" in client.run("hf-to-dcp", "Qwen/Tiny", "dcp", code=1).stderr
    client.run("hf-to-dcp", "Qwen/Tiny", "dcp", "--resume")
    assert sorted(weights_sent(client)) == names[2:]
    assert client.run("diff", repository, "dcp").returncode == 0
    assert sorted(path.name for path in client.folder.iterdir() if path.name.startswith("dcp")) == ["dcp"]


def test_a_killed_conversion_goes_on_with_the_file_that_was_coming(client: HubClient, repository: Path) -> None:
    names = sorted(path.name for path in repository.glob("*.safetensors"))
    client.hub.stalls[names[3]] = threading.Event()
    words = [sys.executable, "-P", "-m", "qwen3conv", "hf-to-dcp", "Qwen/Tiny", "dcp", "--workers", "1"]
    running = subprocess.Popen(words, cwd=client.folder, env=client.environment(), stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while names[3] not in weights_sent(client) and time.monotonic() < until:
        time.sleep(0.02)
    running.send_signal(signal.SIGKILL)
    running.wait()
    client.hub.stalls.pop(names[3]).set()
    assert (client.folder / "dcp.download").is_dir()
    client.hub.requests.clear()
    client.run("hf-to-dcp", "Qwen/Tiny", "dcp", "--resume")
    assert sorted(weights_sent(client)) == names[3:]
    client.run("verify", "dcp")
    assert client.run("diff", repository, "dcp").returncode == 0


def test_a_header_that_was_another_than_the_files_is_noticed(client: HubClient) -> None:
    client.hub.add("Qwen/One", write_model(client.folder / "one"))
    client.hub.swaps = b"k_proj", b"v_proj"
    said = client.run("hf-to-dcp", "Qwen/One", "dcp", code=1).stderr
    assert "has another header than the hub gave before" in said
    assert not (client.folder / "dcp").exists()


def test_a_new_commit_is_another_source(client: HubClient, repository: Path) -> None:
    names = sorted(path.name for path in repository.glob("*.safetensors"))
    client.hub.spoiled.add(names[2])
    client.run("hf-to-dcp", "Qwen/Tiny", "dcp", code=1)
    client.hub.spoiled.clear()
    changed = shutil.copytree(repository, client.folder / "changed")
    (changed / "README.md").write_text("changed\n")
    client.hub.add("Qwen/Tiny", changed)
    said = client.run("hf-to-dcp", "Qwen/Tiny", "dcp", "--resume", code=1).stderr
    assert "begun from another source" in said


def test_a_tied_head_is_taken_on_trust_by_a_plan_and_compared_by_a_conversion(client: HubClient) -> None:
    folder = write_model(client.folder / "tied")  # its head is another than its embeddings
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    client.hub.add("Qwen/Tied", folder)
    planned = json.loads(client.run("plan", "Qwen/Tied", "out", "--to", "titan", "--json").stdout)
    assert "tie-not-compared" in [policy["name"] for policy in planned["policies"]]
    assert weights_sent(client) == []
    said = client.run("hf-to-dcp", "Qwen/Tied", "out", code=1).stderr
    assert "differ from row 0 on" in said
    assert not [path for path in client.folder.iterdir() if path.name.startswith("out")]


def test_a_half_uploaded_repository_is_named_as_such(client: HubClient, repository: Path) -> None:
    files = client.hub.repositories["Qwen/Tiny"].commits[client.hub.repositories["Qwen/Tiny"].refs["main"]]
    name = sorted(file for file in files if file.endswith(".safetensors"))[1]
    client.hub.commit("Qwen/Tiny", "main", {path: blob for path, blob in files.items() if path != name})
    for words in (("inspect", "Qwen/Tiny"), ("hf-to-dcp", "Qwen/Tiny", "dcp")):
        said = client.run(*words, code=1).stderr
        assert "half uploaded: of 5 files that its index names, 1 are not there" in said
        assert name in said
    assert weights_sent(client) == []


def test_a_renamed_repository_is_followed_and_its_new_name_told(client: HubClient, repository: Path) -> None:
    client.hub.renamed["Qwen/Old"] = "Qwen/Tiny"
    ran = client.run("hf-to-dcp", "Qwen/Old", "dcp")
    assert "Qwen/Old is called Qwen/Tiny now; use that name" in ran.stderr
    assert client.run("diff", repository, "dcp").returncode == 0


def test_a_mirror_that_tells_names_only_is_asked_for_sizes_and_hashes(client: HubClient, repository: Path) -> None:
    client.hub.tells_names_only = True
    name = sorted(path.name for path in repository.glob("*.safetensors"))[1]
    assert client.run("fingerprint", "Qwen/Tiny").stdout == client.run("fingerprint", repository).stdout
    client.hub.spoiled.add(name)
    assert f"{name} of Qwen/Tiny came with the wrong hash" in client.run("fingerprint", "Qwen/Tiny", code=1).stderr


def test_a_busy_hub_is_asked_again_and_one_that_stays_busy_told(client: HubClient, repository: Path) -> None:
    wait = {"Retry-After": "0"}
    client.hub.faults["/api/models/Qwen/Tiny"] = [Fault(429, wait), Fault(503, wait)]
    client.hub.faults["model-00001-of-00005.safetensors"] = [Fault(500, wait)]
    assert "complete    yes" in client.run("inspect", "Qwen/Tiny").stdout
    assert not any(client.hub.faults.values())
    client.hub.faults["/api/models/Qwen/Tiny"] = [Fault(429, wait)] * 4
    said = client.run("inspect", "Qwen/Tiny", code=1).stderr
    assert "too many requests (status 429); wait some minutes" in said
    client.hub.faults["/api/models/Qwen/Tiny"] = [Fault(502, wait)] * 4
    assert "failed (status 502); try again" in client.run("inspect", "Qwen/Tiny", code=1).stderr


def test_a_folder_in_the_way_of_downloads_is_not_touched(client: HubClient, repository: Path) -> None:
    theirs = client.folder / "dcp.download"
    theirs.mkdir()
    (theirs / "mine.txt").write_text("mine")
    said = client.run("hf-to-dcp", "Qwen/Tiny", "dcp", code=1).stderr
    assert "which is something else; move it away" in said
    assert (theirs / "mine.txt").read_text() == "mine"


def test_bytes_that_come_are_counted_once_with_and_without_xet() -> None:
    for tell in (_told_plainly, _told_by_xet):
        counts: list[int] = []
        tell(meter_class(counts.append))
        assert sum(counts) == 30


def _told_plainly(bar: type[Meter]) -> None:
    with bar(total=30) as shown:
        for _ in range(3):
            shown.update(10)


def _told_by_xet(bar: type[Meter]) -> None:
    from huggingface_hub.utils._xet_progress_reporting import XetDownloadProgressReporter

    with XetDownloadProgressReporter(reconstruction_desc="x", total=30, log_level=20, tqdm_class=bar) as reporter:
        for done in (10, 20, 30):
            reporter.update_progress(
                SimpleNamespace(
                    total_bytes_completed=done,
                    total_transfer_bytes_completed=done // 2,
                    total_bytes_completion_rate=1.0,
                    total_transfer_bytes_completion_rate=1.0,
                    total_bytes=30,
                )
            )
