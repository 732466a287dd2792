"""The benchmark runs: one round of its smallest shape, and plans of hollow checkpoints. Speed itself is not tested."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from qwen3conv.converters.conversion import prepare
from qwen3conv.converters.detection import open_checkpoint
from qwen3conv.tools.bench import _order, hollow_copy, main
from qwen3conv.tools.bench_cases import SHAPES, Folders, own_cases, shard_cases, titan_cases
from qwen3conv.tools.bench_process import CommandFailed, measure
from qwen3conv.tools.generate import generate
from tests.laws.tiny import scratch

pytestmark = pytest.mark.torch_free


def test_one_round_measures_every_case_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with scratch() as root:
        report = tmp_path / "report.json"
        arguments = ["--shapes", "smallest", "--rounds", "1", "--only", "copy,cast,shard"]
        result = CliRunner().invoke(main, [*arguments, "--folder", str(root), "--json", str(report)])
        assert result.exit_code == 0, result.output
        assert not list(root.iterdir())
    (shape,) = json.loads(report.read_text())["reports"]
    cases = {case["case"]: case for case in shape["cases"]}
    assert list(cases) == [
        case.name for case in (*own_cases(Folders(tmp_path)), *shard_cases(Folders(tmp_path), SHAPES["smallest"]))
    ]
    assert [name for name, case in cases.items() if case["failed"]] == []
    for name, case in cases.items():
        assert case["rounds"]["0"]["wall"] > 0, name
        beside = cases.get(case["beside"])
        assert beside is None or case["written"] == pytest.approx(beside["written"], rel=0.005), name
    assert cases["cp dcp fp32"]["written"] > 1.9 * cases["cp dcp"]["written"]
    assert "hf-to-dcp, bf16 to fp32" in result.output


def test_a_shape_that_does_not_fit_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10**9}))
    result = CliRunner().invoke(main, ["--shapes", "smallest,0.6B", "--folder", str(tmp_path)])
    assert result.exit_code == 1
    assert "0.6B takes" in result.output
    assert "1.00 GB free" in result.output
    assert not list(tmp_path.iterdir())


def test_peak_memory_is_the_command_s_own_and_its_time_that_of_all_it_starts(tmp_path: Path) -> None:
    ballast = bytearray(b"x" * (200 << 20))  # what a child would be blamed for, were it started from here
    small = measure([sys.executable, "-I", "-S", "-c", "pass"], tmp_path / "log")
    large = measure([sys.executable, "-I", "-S", "-c", "x = bytearray(b'x' * (64 << 20))"], tmp_path / "log")
    assert small.peak < 40 << 20 < 64 << 20 < large.peak < len(ballast)
    spin = "import time\nwhile time.process_time() < 0.2: pass"
    nested = measure(["sh", "-c", '"$0" -c "$1"; true', sys.executable, spin], tmp_path / "log")
    assert 0.15 < nested.user + nested.system <= nested.wall * 1.5


def test_a_command_that_fails_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="exit code 3: so it is"):
        measure(["sh", "-c", "echo first; echo so it is >&2; exit 3"], tmp_path / "log")


def test_each_round_has_every_case_once_and_no_two_begin_alike() -> None:
    cases = [*own_cases(Folders(Path("x")))]
    rounds = [_order(cases, number) for number in range(6)]
    assert all(sorted(map(id, order)) == sorted(map(id, cases)) for order in rounds)
    assert len({order[0].name for order in rounds}) == 6


def test_every_comparison_names_a_case_that_is_run() -> None:
    for shape in SHAPES.values():
        folders = Folders(Path("x"))
        own = [*own_cases(folders), *shard_cases(folders, shape)]
        peers = [case for case in shard_cases(folders, shape, torch=True) if case.is_peer]
        peers += [*titan_cases(folders, shape, None), *titan_cases(folders, shape, Path("checkout"))]
        names = {case.name for case in own}
        assert {case.beside for case in own if case.beside} <= names
        assert {ours for case in peers for ours in case.faster} <= names
        assert all(case.is_peer for case in peers)
        assert not any(case.is_peer for case in own)


def test_a_hollow_copy_plans_back_to_the_source_and_takes_no_space(tmp_path: Path) -> None:
    made = generate(tmp_path / "hf", "moe-study", sparse=True)
    hollow_copy(prepare(made.folder, tmp_path / "dcp", "titan"))
    back = prepare(tmp_path / "dcp", tmp_path / "back", "hf")
    assert set(back.arrangement.tensors) == set(open_checkpoint(made.folder).tensors)
    assert back.disk_bytes > 3 * 10**9
    assert sum(path.stat().st_blocks * 512 for path in (tmp_path / "dcp").rglob("*")) < 20 << 20
