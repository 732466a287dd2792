"""``push`` and ``pull`` against a hub on this machine: models, pull requests, states, tokens, faults."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import RepoCard

from qwen3conv.converters.conversion import carry_out, prepare
from tests.cli.conftest import HubClient, flip_byte, write_model, write_sharded
from tests.hub_server import Fault

TOKEN = "hf_" + "SecretOfTheTests"


@pytest.fixture
def me(client: HubClient) -> HubClient:
    """A client that is logged in as ``hf auth login`` does it: by a file in the cache."""
    client.cache.mkdir()
    (client.cache / "token").write_text(TOKEN)
    return client


def pushed(me: HubClient, *words: str | Path) -> dict[str, object]:
    made: dict[str, object] = json.loads(me.run("push", *words, "--json").stdout)
    return made


def parts_of(card: bytes) -> tuple[dict[str, object], str]:
    found = RepoCard(card.decode(), ignore_metadata_errors=False)
    return found.data.to_dict(), found.text.lstrip()


def test_a_folder_arrives_as_it_is_private_and_comes_back(me: HubClient) -> None:
    folder = write_sharded(me.folder / "mine")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# My own words\n")
    (folder / "notes.pickle").write_bytes(b"not to be sent")
    made = pushed(me, "mine", "me/mine")
    there = me.hub.files("me/mine")
    expected = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "notes.pickle"}
    assert there == expected
    assert me.hub.repositories["me/mine"].private
    assert made["fingerprint"] == me.run("fingerprint", "mine").stdout.strip()
    assert made["commit"] == me.hub.repositories["me/mine"].refs["main"]

    me.run("pull", "me/mine", "back")
    assert {path.name: path.read_bytes() for path in (me.folder / "back").iterdir()} == expected
    me.hub.requests.clear()
    again = pushed(me, "mine", "me/mine")
    assert again["commit"] == made["commit"]
    assert not [request for request in me.hub.requests if request.method == "PUT"]


def test_a_dcp_is_converted_on_the_way_and_gets_a_card(me: HubClient) -> None:
    source = write_model(me.folder / "model")
    me.hub.add("Qwen/Tiny", source)
    me.run("hf-to-dcp", "Qwen/Tiny", "dcp")
    record = {"steps": {"1": {"loss": 3.5, "grad_norm": 1.0}, "9": {"loss": 2.25, "grad_norm": 1.0}}, "device": "cpu"}
    (me.folder / "run.json").write_text(json.dumps(record))
    made = pushed(me, "dcp", "me/tuned", "--public")
    front, text = parts_of(me.hub.files("me/tuned")["README.md"])
    assert front == {"library_name": "transformers", "pipeline_tag": "text-generation", "base_model": "Qwen/Tiny"}
    commit = me.hub.repositories["Qwen/Tiny"].refs["main"]
    for word in (f"Qwen/Tiny at {commit}", str(made["fingerprint"]), "step 1 loss 3.5000, step 9 loss 2.2500"):
        assert word in text
    assert not me.hub.repositories["me/tuned"].private
    assert not (me.folder / "dcp.push").exists()
    assert str(me.folder) not in json.dumps({k: v.decode("latin1") for k, v in me.hub.files("me/tuned").items()})
    flip_byte(next((me.folder / "dcp").glob("*.distcp")), 2000)
    assert me.run("push", "dcp", "me/broken", code=1).stderr
    assert "me/broken" not in me.hub.repositories
    me.run("pull", "me/tuned", "back")
    me.run("verify", "back")
    assert me.run("diff", "back", source).returncode == 0


def test_a_card_that_came_with_the_source_says_what_this_is(me: HubClient) -> None:
    source = write_model(me.folder / "model")
    (source / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Tiny\n")
    me.hub.add("Qwen/Tiny", source)
    me.run("convert", "Qwen/Tiny", "cast", "--to", "hf", "--dtype", "float16")
    pushed(me, "cast", "me/cast")
    front, text = parts_of(me.hub.files("me/cast")["README.md"])
    assert front == {"license": "apache-2.0", "base_model": "Qwen/Tiny"}
    assert text.startswith("# Tiny\n\n## How this copy was made\n")
    assert (me.folder / "cast" / "README.md").read_bytes() == (source / "README.md").read_bytes()
    me.run("pull", "me/cast", "back")
    me.run("verify", "back")


def test_branches_and_pull_requests_leave_main_alone(me: HubClient) -> None:
    write_model(me.folder / "model")
    pushed(me, "model", "me/tiny")
    before = me.hub.files("me/tiny")
    (me.folder / "model" / "tokenizer.json").write_text('{"version": "2.0"}')
    asked = pushed(me, "model", "me/tiny", "--pr")
    assert asked["pull_request"] == f"{me.hub.url}/me/tiny/discussions/1"
    pushed(me, "model", "me/tiny", "--revision", "next")
    assert me.hub.files("me/tiny") == before
    for branch in ("refs/pr/1", "next"):
        assert me.hub.files("me/tiny", branch)["tokenizer.json"] == b'{"version": "2.0"}'


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("absent", "me/tiny"), "neither a folder here nor a hub id"),
        (("model", "tiny"), "no repository to send to; name one as org/name"),
        (("model", "me/tiny@main"), "a branch is given with --revision"),
        (("model", "me/theirs"), "is public; pass --public"),
        (("broken", "me/tiny"), "does not exist"),
        (("model", "me/tiny", "--state"), "is no run of train with a whole checkpoint"),
    ],
)
def test_what_cannot_be_sent_is_refused_and_nothing_is_made(me: HubClient, words: tuple[str, ...], said: str) -> None:
    write_model(me.folder / "model")
    broken = me.folder / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((me.folder / "model" / "config.json").read_text())
    (broken / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    me.hub.add("me/theirs", me.folder / "broken")
    assert said in me.run("push", *words, code=1).stderr
    assert me.hub.repositories.keys() == {"me/theirs"}
    assert [request for request in me.hub.requests if request.method == "PUT"] == []


def test_without_a_login_and_with_a_hub_that_fails_there_is_a_word(client: HubClient) -> None:
    write_model(client.folder / "model")
    assert "log in with `hf auth login`" in client.run("push", "model", "me/tiny", code=1).stderr
    assert "HF_HUB_OFFLINE is set" in client.run("push", "model", "me/tiny", code=1, HF_HUB_OFFLINE="1").stderr
    client.hub.faults["/commit/main"] = [Fault(429, {"Retry-After": "0"}), Fault(500)]
    said = client.run("push", "model", "me/tiny", code=1, HF_TOKEN=TOKEN).stderr
    assert "failed (status 500); run the same command again" in said
    client.hub.requests.clear()
    client.run("push", "model", "me/tiny", HF_TOKEN=TOKEN)
    assert [request for request in client.hub.requests if request.method == "PUT"] == []


def test_a_hub_that_keeps_other_bytes_is_found_out(me: HubClient) -> None:
    write_model(me.folder / "model")
    me.hub.mangles = True
    said = me.run("push", "model", "me/tiny", code=1).stderr
    assert "is not what was sent; do not use it" in said
    assert "tokenizer.json: has hash" in said


def test_a_pull_that_broke_off_goes_on_and_a_wrong_hash_is_refused(me: HubClient) -> None:
    served = write_sharded(me.folder / "served")
    me.hub.add("Qwen/Tiny", served)
    names = sorted(path.name for path in served.glob("*.safetensors"))
    me.hub.spoiled.add(names[1])
    assert f"{names[1]} of Qwen/Tiny came with the wrong hash" in me.run("pull", "Qwen/Tiny", "back", code=1).stderr
    assert not (me.folder / "back").exists()
    me.hub.spoiled.clear()
    me.hub.cuts[names[1]] = [1000]
    me.run("pull", "Qwen/Tiny", "back")
    assert me.run("diff", "back", served).returncode == 0
    assert "exists" in me.run("pull", "Qwen/Tiny", "back", code=1).stderr
    assert sorted(path.name for path in me.folder.iterdir()) == ["back", "hf-home", "served"]


def test_a_file_goes_on_where_an_earlier_process_lost_it(me: HubClient) -> None:
    folder = write_model(me.folder / "model")
    (folder / "model.safetensors").write_bytes(bytes(range(251)) * 50_000)
    commit = me.hub.add("me/large", folder)
    sha256 = me.hub.repositories["me/large"].commits[commit]["model.safetensors"].sha256
    me.hub.cuts["model.safetensors"] = [11_000_000]
    me.hub.faults[f"{sha256}/model.safetensors"] = [Fault(200), Fault(403)]
    assert "status 403" in me.run("pull", "me/large", "back", code=1).stderr
    assert not (me.folder / "back").exists()
    me.hub.requests.clear()
    me.run("pull", "me/large", "back")
    ranges = [r.range for r in me.hub.requests if r.path.startswith("/lfs/")]
    assert ranges == ["bytes=10485760-"]  # whole pieces of 10 MiB are kept
    assert (me.folder / "back" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_the_token_is_nowhere_but_in_requests(me: HubClient) -> None:
    source = write_model(me.folder / "model")
    said = []
    for words in (
        ("push", "model", "me/tiny", "--debug"),
        ("hf-to-dcp", "me/tiny", "dcp", "--debug"),
        ("pull", "me/tiny", "back"),
    ):
        ran = me.run(*words, HF_HUB_VERBOSITY="debug")
        said += [ran.stdout, ran.stderr]
    flip_byte(source / "model.safetensors", -1)
    me.hub.faults["/commit/main"] = [Fault(403)]
    failed = me.run("push", "model", "me/tiny", "--debug", code=1)
    said += [failed.stdout, failed.stderr]
    assert TOKEN in {request.token for request in me.hub.requests}
    assert not [text for text in said if TOKEN in text]
    holding = [path for path in me.folder.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert holding == [me.cache / "token"]
    sent_on = [request.token for request in me.hub.requests if request.path.startswith("/lfs/")]
    assert sent_on
    assert set(sent_on) == {None}  # the content network is another host


# ---- states


@pytest.fixture
def run(me: HubClient) -> Path:
    """A folder as ``train`` leaves it, with two steps of other weights."""
    folder = me.folder / "run"
    (folder / "checkpoint").mkdir(parents=True)
    model = write_model(me.folder / "model")
    carry_out(prepare(model, folder / "source", "titan"))
    for step in (500, 1000):
        flip_byte(model / "model.safetensors", -step)
        place = folder / "checkpoint" / f"step-{step}"
        carry_out(prepare(model, place, "titan"))
        (place / "qwen3conv.json").unlink()
        shutil.rmtree(place / "hf_assets")
    record = {"degrees": {"fsdp": 1}, "steps": {"500": {"loss": 2.0, "grad_norm": 1.0}}}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def test_each_step_is_a_commit_under_its_tag_and_never_written_over(me: HubClient, run: Path) -> None:
    first = pushed(me, "run", "me/run", "--state", "--step", "500")
    second = pushed(me, "run", "me/run", "--state", "--keep", "2")
    assert second["dropped"] == []
    assert (first["tag"], second["tag"]) == ("step-500", "step-1000")
    tags = me.hub.repositories["me/run"].tags
    assert tags == {"step-500": first["commit"], "step-1000": second["commit"], "latest": second["commit"]}
    for step in (500, 1000):
        there = me.hub.files("me/run", f"step-{step}")
        place = run / "checkpoint" / f"step-{step}"
        local = {path.name: path.read_bytes() for path in place.iterdir()}
        assert {name: there[name] for name in local} == local
    assert me.run("diff", "me/run@step-500", run / "checkpoint" / "step-500").returncode == 0
    assert me.hub.repositories["me/run"].private

    shutil.rmtree(run / "checkpoint" / "step-1000")
    shutil.copytree(run / "checkpoint" / "step-500", run / "checkpoint" / "step-1000")
    said = me.run("push", "run", "me/run", "--state", code=1).stderr
    assert "another checkpoint as step-1000" in said
    assert me.hub.repositories["me/run"].tags == tags

    again = pushed(me, "run", "me/run", "--state", "--step", "500", "--keep", "1")
    assert (again["commit"], again["dropped"]) == (first["commit"], ["step-500"])
    assert me.hub.repositories["me/run"].tags.keys() == {"step-1000", "latest"}


def test_a_run_goes_on_from_the_hub_with_the_files_that_were_sent(me: HubClient, run: Path) -> None:
    pushed(me, "run", "me/run", "--state", "--step", "500")
    (me.folder / "data.jsonl").write_text('{"text": "sun"}\n')
    words = ("train", "--resume", "me/run@step-500", "--data", "data.jsonl", "--output", "on", "--print")
    printed = me.run(*words)
    assert "goes on from step 500 of me/run@step-500" in printed.stderr
    on = me.folder / "on"
    for path in (run / "checkpoint" / "step-500").iterdir():
        assert (on / "checkpoint" / "step-500" / path.name).read_bytes() == path.read_bytes()
    assert (on / "source" / "hf_assets" / "config.json").is_file()
    assert json.loads((on / "run.json").read_text())["steps"].keys() == {"500"}
    me.hub.requests.clear()
    assert me.run(*words).stdout == printed.stdout
    assert me.hub.requests == []
    said = me.run(*(word.replace("step-500", "latest") for word in words), code=1).stderr
    assert "is no run that began from me/run@latest" in said
    me.run("train", "--data", "data.jsonl", "--output", "on", code=2)


def test_a_state_that_is_not_what_its_manifest_says_is_refused(me: HubClient, run: Path) -> None:
    pushed(me, "run", "me/run", "--state")
    there = me.hub.repositories["me/run"]
    files = there.commits[there.refs["main"]]
    state = json.loads(files["qwen3conv-state.json"].read())
    name = next(name for name in state["files"] if name.endswith(".distcp"))
    state["files"][name]["sha256"] = "0" * 64
    me.hub.commit("me/run", "main", {**files, "qwen3conv-state.json": type(files[name]).of(json.dumps(state).encode())})
    (me.folder / "data.jsonl").write_text('{"text": "sun"}\n')
    words = ("train", "--resume", "me/run", "--data", "data.jsonl", "--output", "on", "--print")
    assert f"{name}: is not the file that was sent" in me.run(*words, code=1).stderr
    assert not (me.folder / "on").exists()
    me.hub.add("Qwen/Tiny", me.folder / "model")
    assert "no training state lies there" in me.run(*words[:2], "Qwen/Tiny", *words[3:], code=1).stderr
