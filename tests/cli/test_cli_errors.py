"""What goes wrong ends in one message, the right exit code, and no traceback."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from qwen3conv.converters.errors import ConversionError
from tests.cli.conftest import TINY_MOE, Run, config_of, environment, flip_byte, process, write_model

pytestmark = pytest.mark.torch_free

CONVERTING = (["hf-to-dcp", "SRC", "DST"], ["convert", "SRC", "DST", "--to", "hf"])

SLOW = """
import sys, time
from qwen3conv.converters import execution
log, arguments = sys.argv[1], sys.argv[2:]
carry = execution.Worker.carry
def slow(self, unit):
    with open(log, "a") as file:
        file.write(".")
    time.sleep(0.15)
    return carry(self, unit)
execution.Worker.carry = slow
from qwen3conv.tools.cli.main import main
main(arguments)
"""
"""The real program with a pause before each unit, so that there is a middle to interrupt it in, and a dot for each."""


def contents(folder: Path) -> Mapping[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- exit codes and streams of real processes --------------------------------------------------------------------------


def test_exit_codes_tell_done_refused_usage_and_different(tiny: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(tiny, changed)
    flip_byte(changed / "model.safetensors", -2)
    wanted = {
        ("fingerprint", tiny): 0,
        ("diff", tiny, tiny): 0,
        ("diff", tiny, changed): 3,
        ("verify", tiny): 1,
        ("inspect", tmp_path / "nothing"): 1,
        ("hf-to-dcp", tiny): 2,
        ("hf-to-dcp", tiny, "out", "--dtype", "int8"): 2,
        ("nonsense",): 2,
    }
    found = {arguments: process(*arguments, cwd=tmp_path).returncode for arguments in wanted}
    assert found == wanted


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_of_a_command_that_fails_stdout_holds_nothing(options: list[str], tiny: Path, tmp_path: Path) -> None:
    (tiny / "config.json").write_text("{}")
    for arguments in (["inspect", "nothing"], ["fingerprint", tiny], ["plan", tiny, "out", "--to", "titan"]):
        ran = process(*arguments, *options, cwd=tmp_path)
        assert (ran.returncode, ran.stdout) == (1, "")
        assert ran.stderr.splitlines()[-1]
        assert "Error: " in ran.stderr
        assert "Traceback" not in ran.stderr


def test_progress_and_warnings_stay_off_stdout(tmp_path: Path) -> None:
    source = write_model(tmp_path / "tied", tied=True)
    other = write_model(tmp_path / "other", tied=True)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 5000000.0}))
    ran = process("hf-to-dcp", source, "out", "--like", other, "--config-from", "like", "--json", cwd=tmp_path)
    assert json.loads(ran.stdout)["format"] == "titan"
    assert ran.stderr.startswith("Warning: of two configs that differ in rope_theta")


def test_a_reader_that_closes_the_pipe_is_no_error(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "qwen3conv", "inspect", str(tiny), "--tensors"]
    for reader in ("true", "head -n 1"):
        shell = f"{' '.join(command)} | {reader}"
        ran = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, cwd=tmp_path, env=environment())
        assert (ran.returncode, ran.stderr) == (0, "")


def test_a_full_disk_under_stdout_is_reported(tiny: Path, tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs Linux's /dev/full")
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-P", "-m", "qwen3conv", "inspect", str(tiny)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=environment(),
        )
    assert ran.returncode == 1
    assert ran.stderr == f"Error: {os.strerror(errno.ENOSPC)}\n"


# -- interrupted and resumed -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlowConversion:
    """``hf-to-dcp`` to ``out``, some ten units long, in a process of its own."""

    process: subprocess.Popen[str]
    log: Path

    def wait_for(self, units: int) -> None:
        """Return when so many units have begun."""
        deadline = time.monotonic() + 60
        while not self.log.exists() or self.log.stat().st_size < units:
            assert self.process.poll() is None, "it ended early"
            assert time.monotonic() < deadline
            time.sleep(0.02)


@contextmanager
def slow_conversion(source: Path, stderr: int = subprocess.PIPE) -> Iterator[SlowConversion]:
    log = source.parent / "units"
    words = ["hf-to-dcp", str(source), "out", "--shard-size", "4KB", "--workers", "1"]
    running = subprocess.Popen(
        [sys.executable, "-P", "-c", SLOW, str(log), *words],
        cwd=source.parent,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )
    try:
        yield SlowConversion(running, log)
    finally:
        running.kill()
        running.communicate()


def test_ctrl_c_says_how_to_go_on_and_resume_finishes_the_work(tiny_moe: Path, tmp_path: Path, run: Run) -> None:
    with slow_conversion(tiny_moe) as slow:
        slow.wait_for(units=3)
        slow.process.send_signal(signal.SIGINT)
        stdout, stderr = slow.process.communicate(timeout=60)
    assert (slow.process.returncode, stdout) == (130, "")
    assert stderr == "Error: interrupted; run again with --resume\n"
    assert not (tmp_path / "out").exists()

    report = json.loads(run("inspect", "out.partial", "--json").stdout)
    assert not report["complete"]
    assert "--resume" in report["problems"][0]
    assert "out.partial" in run("inspect", "out", code=1).stderr
    words = ["hf-to-dcp", tiny_moe, "out", "--shard-size", "4KB"]
    assert "--resume" in run(*words, code=1).stderr
    run(*words, "--resume")
    run("hf-to-dcp", tiny_moe, "whole", "--shard-size", "4KB")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_ctrl_c_in_a_command_that_cannot_resume_does_not_promise_it(
    tiny: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("qwen3conv.converters.verification.run", interrupt)
    assert run("fingerprint", tiny, code=130).stderr == "Error: interrupted\n"


def test_a_terminal_that_goes_away_does_not_stop_the_work(tiny_moe: Path, tmp_path: Path) -> None:
    reading, writing = pty.openpty()
    with slow_conversion(tiny_moe, stderr=writing) as slow:
        os.close(writing)
        slow.wait_for(units=3)
        assert b"converting" in os.read(reading, 10_000)
        os.close(reading)
        stdout, _ = slow.process.communicate(timeout=60)
    assert slow.process.returncode == 0
    assert stdout.startswith("out: done")
    assert (tmp_path / "out" / ".metadata").is_file()


def test_a_terminal_shows_a_bar_in_bytes_and_leaves_none_behind(tiny_moe: Path) -> None:
    reading, writing = pty.openpty()
    seen = bytearray()

    def collect() -> None:
        # reading fails when the other side is closed: that is a pseudo terminal's end of file
        with contextlib.suppress(OSError):
            while block := os.read(reading, 4096):
                seen.extend(block)

    with slow_conversion(tiny_moe, stderr=writing) as slow:
        os.close(writing)
        collector = threading.Thread(target=collect)
        collector.start()
        stdout, _ = slow.process.communicate(timeout=60)
        collector.join(timeout=10)
    os.close(reading)
    assert slow.process.returncode == 0
    text = seen.decode()
    assert all(word in text for word in ("converting", "kB", "/s", "%"))
    assert text.rstrip().endswith("\x1b[2K")  # the last thing is to erase the line
    assert stdout.startswith("out: done")


# -- messages ----------------------------------------------------------------------------------------------------------


def test_the_two_main_commands_refuse_each_others_source(run: Run, tiny: Path, tmp_path: Path) -> None:
    run("hf-to-dcp", tiny, "dcp")
    wrong = run("hf-to-dcp", "dcp", "out", code=1).stderr
    assert "dcp is a DCP checkpoint" in wrong
    assert "qwen3conv convert dcp out --to titan" in wrong
    wrong = run("dcp-to-hf", tiny, "out", code=1).stderr
    assert f"qwen3conv convert {tiny} out --to hf" in wrong
    assert not (tmp_path / "out").exists()
    for words in (["convert", "dcp", "out", "--to", "titan"], ["convert", tiny, "out2", "--to", "hf"]):
        run(*words)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--to", "gguf"], "choose one of hf, hf-fused, titan"),
        (["--to", "hf", "--shard-size", "5G"], "such as 5GB"),
        (["--to", "hf", "--max-memory", "0"], "is not a size"),
        (["--to", "titan", "--titan-schema", "T9"], "takes one of: T7"),
        (["--to", "hf", "--titan-schema", "T7"], "--titan-schema is for --to titan"),
        (["--to", "titan", "--flavor", "7B"], "it has debugmodel"),
        (["--to", "hf", "--flavor", "8B"], "--flavor is for --to titan"),
        (["--to", "titan", "--lm-head", "drop"], "--lm-head is for Hugging Face outputs"),
        (["--to", "hf", "--config-from", "like"], "give --like"),
        (["--to", "hf", "--set", "rope_theta"], "expected KEY=VALUE"),
        (["--to", "hf", "--set", "rope_thata=1"], "did you mean rope_theta?"),
        (["--to", "hf", "--workers", "0"], "workers"),
    ],
)
def test_wrong_usage_is_exit_2_and_says_what_is_right(options: list[str], said: str, run: Run, tiny: Path) -> None:
    for command in ("convert", "plan"):
        result = run(command, tiny, "out", *options, code=2)
        assert said in " ".join(result.stderr.split())
        assert f"Usage: qwen3conv {command}" in result.stderr
        assert result.stdout == ""


def test_a_format_that_is_only_read_says_what_to_do_instead(run: Run, tiny: Path) -> None:
    assert "make FP8 with the tool that serves it" in run("convert", tiny, "out", "--to", "hf-fp8", code=1).stderr


def test_a_destination_is_refused_before_the_source_is_looked_for(run: Run, tmp_path: Path) -> None:
    write_model(tmp_path / "taken")
    wrong = run("hf-to-dcp", "Qwen/Qwen3-0.6B", "taken", code=1).stderr
    assert wrong == "Error: taken exists; choose another place, or pass --overwrite to replace it\n"
    assert "create it first" in run("hf-to-dcp", "Qwen/Qwen3-0.6B", "no/where", code=1).stderr


def test_the_engines_own_refusals_pass_through(run: Run, tiny: Path, tmp_path: Path) -> None:
    assert (
        "too little for 2 workers"
        in run("hf-to-dcp", tiny, "out", "--max-memory", "4KiB", "--workers", 2, code=1).stderr
    )
    (tiny / "config.json").write_text(json.dumps(config_of(TINY_MOE, tied=False)))
    assert "config.json" in run("hf-to-dcp", tiny, "out", code=1).stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny"]


def test_an_error_of_the_operating_system_names_the_file(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tiny / "config.json"))

    monkeypatch.setattr("qwen3conv.converters.detection.open_checkpoint", refuse)
    assert run("fingerprint", tiny, code=1).stderr == f"Error: {tiny / 'config.json'}: Permission denied\n"


@pytest.mark.parametrize("place", ["before", "behind"])
@pytest.mark.parametrize("error", [ConversionError("no good"), ZeroDivisionError("by zero")])
def test_debug_and_only_debug_shows_a_traceback(
    error: Exception, place: str, run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise error

    monkeypatch.setattr("qwen3conv.converters.detection.open_checkpoint", fail)
    quiet = run("fingerprint", tiny, code=1).stderr
    assert "Traceback" not in quiet
    assert str(error) in quiet
    assert ("internal error" in quiet) == (not isinstance(error, ConversionError))
    words = ["--debug", "fingerprint", tiny] if place == "before" else ["fingerprint", tiny, "--debug"]
    loud = run(*words, code=1).stderr
    assert loud.startswith("Traceback (most recent call last):")
    assert loud.endswith(quiet)


def test_hostile_names_cannot_write_to_the_terminal(run: Run, tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    path = source / "model.safetensors"
    evil = "\x1b]0;owned\x07\u202egnp"
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    header[evil] = header.pop("model.norm.weight")
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + path.read_bytes()[8 + length :])
    for words in (["inspect", source], ["fingerprint", source], ["inspect", source, "--json"]):
        result = run(*words, code=1 if words[0] == "fingerprint" else 0)
        for stream in (result.stdout, result.stderr):
            assert all(char == "\n" or char.isprintable() for char in stream)
    assert "owned" in result.stdout


def test_a_path_that_is_not_utf_8_is_no_reason_to_crash(tiny: Path, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"\xff\xfe")
    tiny.rename(odd)
    commands: list[list[str | Path]] = [
        ["inspect", odd],
        ["inspect", odd, "--json"],
        ["plan", odd, "out", "--to", "titan"],
    ]
    for words in commands:
        ran = process(*words, cwd=tmp_path)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert "\\udcff\\udcfe" in ran.stdout
