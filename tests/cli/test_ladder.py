"""``ladder``: every rung is a real run; the first that computes something else is named, with its axis."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from qwen3conv.converters.errors import PolicyError
from qwen3conv.converters.placement import Mesh
from qwen3conv.tools.cli.ladder_table import live_table
from qwen3conv.tools.cli.main import cli
from qwen3conv.tools.ladder import Rung, check_resumed, compare, parse_rung, read_rungs, usual_rungs, write_ladder
from tests.models import even_texts, saved_model

REFERENCE = {str(step): {"loss": 5.0 / step, "grad_norm": 2.0, "seconds": float(step)} for step in range(1, 6)}


def run(*words: object, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, [*map(str, words)], prog_name="qwen3conv")
    assert result.exit_code == code, result.output
    return result


def test_the_first_step_that_leaves_the_tolerance_names_the_axis() -> None:
    rung = Rung("tp", "tensor parallelism", Mesh(tp=2))
    assert compare(rung, REFERENCE, None, 1e-3).status == "reference"
    near = {step: {**found, "loss": found["loss"] * 1.0005} for step, found in REFERENCE.items()}
    found = compare(rung, near, REFERENCE, 1e-3)
    assert (found.status, found.step, found.norm_difference) == ("agrees", None, 0.0)
    assert found.loss_difference == pytest.approx(5e-4)
    assert found.step_seconds == 4.0  # of steps 3, 4 and 5
    for value in (2.1, float("nan"), float("inf")):
        far = {step: {**f, "grad_norm": value if int(step) >= 3 else 2.0} for step, f in REFERENCE.items()}
        found = compare(rung, far, REFERENCE, 1e-3)
        assert (found.status, found.step) == ("parts", 3)
        assert found.message == "tensor parallelism: computes something else from step 3 on"
        assert not (found.norm_difference or 0) <= 1e-3


def test_rungs_add_one_axis_at_a_time() -> None:
    names = [rung.name for rung in usual_rungs(4, 16, is_moe=True, compile_backend="neuron")]
    assert names == ["eager", "fsdp", "tp", "tp-fsdp", "compile", "nki"]
    assert [r.name for r in usual_rungs(4, 16, is_moe=False, compile_backend="x")] == names[:-1]
    own = parse_rung("mine:tp=2,ep=2,fsdp=4,backend=transformers,compile=inductor")
    assert (own.mesh, own.backend, own.compile) == (Mesh(tp=2, ep=2, fsdp=4), "transformers", "inductor")
    assert own.flags() == ("--compile.enable", "--compile.backend", "inductor")


def test_on_a_terminal_the_table_fills_while_rungs_are_climbed() -> None:
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    eager, both = Rung("eager", "one process"), Rung("tp-fsdp", "TP x FSDP together", Mesh(tp=2, fsdp=2))
    with live_table(["eager", "tp-fsdp", "compile"], stream) as show:
        first = compare(eager, REFERENCE, None, 1e-3)
        show([first], both)
        running = stream.getvalue()
        show([first, compare(both, REFERENCE, REFERENCE, 1e-3)], None)
    assert "reference" in running
    assert "runs: TP x FSDP together" in running
    assert "waits" in running
    after = stream.getvalue()[len(running) :]
    assert "agrees" in after
    assert "4" in after


def test_a_recipe_adds_rungs_a_line_each(tmp_path: Path) -> None:
    recipe = tmp_path / "rungs.txt"
    recipe.write_text("# what we run\nwide:tp=2,fsdp=4\n\n  far:fsdp=8,compile=inductor\n")
    found = read_rungs(["one:tp=2", f"@{recipe}"])
    assert [rung.name for rung in found] == ["one", "wide", "far"]
    assert found[2] == parse_rung("far:fsdp=8,compile=inductor")


def test_a_folder_goes_on_with_the_same_ladder_only(tmp_path: Path) -> None:
    settings = {"from": "model", "steps": 4, "seq_len": 64, "tolerance": 1e-3}
    rung = parse_rung("mine:tp=2")
    check_resumed(tmp_path, settings, [rung])
    write_ladder(tmp_path / "ladder.json", settings, [])
    place = tmp_path / "rungs" / "mine"
    place.mkdir(parents=True)
    (place / "rung.json").write_text(json.dumps(asdict(rung)))
    check_resumed(tmp_path, {**settings, "tolerance": 1e-6}, [rung])
    with pytest.raises(PolicyError, match="steps was 4, and is 6") as error:
        check_resumed(tmp_path, {**settings, "steps": 6}, [parse_rung("mine:tp=4")])
    assert "rung mine was another one" in str(error.value)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory, "dense")


@pytest.fixture(scope="module")
def data(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in even_texts(dense, 64, 24)))
    return path


def words(dense: Path, data: Path, output: Path, *more: object) -> list[object]:
    base: list[object] = ["ladder", "--from", dense, "--data", data, "--output", output, "--recipe", "tiny_sft"]
    return [*base, "--device", "cpu", "--steps", 4, *more]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rungs", "eager,up"], "--rungs up: there are eager, fsdp, tp, tp-fsdp, compile"),
        (["--rung", "x:tp=0"], "--rung x:tp=0: expected NAME:"),
        (["--rung", "x:speed=2"], "expected NAME:"),
        (["--rung", "fsdp:fsdp=2"], "two rungs are called fsdp"),
        (["--rung", "../x:fsdp=2"], "would have no folder"),
        (["--rung", "@nowhere.txt"], "--rung @nowhere.txt: the file cannot be read"),
        (["--tp", 4], "rung tp: "),
        (["--batch-size", 3], "rung fsdp: a batch of 3 does not divide among 2 FSDP ranks"),
        (["--rung", "x:backend=nki-moe"], "rung x: "),
    ],
)
def test_rungs_that_cannot_run_are_refused_before_the_first_does(
    flags: list[object], said: str, dense: Path, data: Path, tmp_path: Path
) -> None:
    assert said in run(*words(dense, data, tmp_path / "ladder", *flags), code=1).stderr
    assert not (tmp_path / "ladder").exists()


@pytest.mark.slow
def test_a_ladder_is_climbed_goes_on_and_stops_where_losses_part(dense: Path, data: Path, tmp_path: Path) -> None:
    ladder = tmp_path / "ladder"
    two = words(dense, data, ladder, "--rungs", "eager,tp")
    document: dict[str, Any] = json.loads(run(*two, "--json").stdout)
    assert [rung["status"] for rung in document["rungs"]] == ["reference", "agrees"]
    assert json.loads((ladder / "ladder.json").read_text())["rungs"] == document["rungs"]
    assert (ladder / "ladder.png").stat().st_size > 10_000
    assert (ladder / "rungs" / "tp" / "checkpoint" / "step-2" / ".metadata").is_file()  # saved, and gone on from
    before = (ladder / "rungs" / "tp" / "run.json").stat().st_mtime_ns
    own = ["--rung", "half:tp=2,backend=transformers", "--rung", "after:tp=1", "--tolerance", "1e-9"]
    three = words(dense, data, ladder, "--rungs", "eager,half,after", *own)
    said = run(*three, code=3).stdout
    assert "tp=2,backend=transformers: computes something else from step" in said
    assert "not tried" in said
    assert (ladder / "rungs" / "tp" / "run.json").stat().st_mtime_ns == before
    assert not (ladder / "rungs" / "after").exists()


@pytest.mark.slow
def test_a_rung_that_fails_says_where_its_log_is(dense: Path, data: Path, tmp_path: Path) -> None:
    broken = words(dense, data, tmp_path / "ladder", "--rungs", "eager,x", "--rung", "x:compile=no_such_compiler")
    said = run(*broken, code=1).stdout
    assert "failed" in said
    assert str(tmp_path / "ladder" / "rungs" / "x" / "log") in said
