"""Killed, interrupted, resumed: whole or absent at every moment, and in the end the same bytes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3conv.converters import planning
from qwen3conv.converters.detection import open_checkpoint
from qwen3conv.converters.errors import ConversionError, DestinationError, SourceError
from qwen3conv.converters.manifest import read_manifest
from qwen3conv.converters.policies import Choices
from qwen3conv.converters.stores.staging import JOURNAL, partial_path
from tests.faults.conftest import DENSE, Run, convert, write_source
from tests.faults.kill_at import snapshot
from tests.laws.tiny import scratch

ROOT = Path(__file__).parents[2]


def sweep(folder: Path, to: str, **job: Any) -> list[str]:
    """The calls at which ``kill_at`` stopped a conversion; its failed assertion otherwise."""
    source = folder / "source"
    if not source.exists():
        write_source(source, to)
    job = {"folder": str(folder), "to": to, "shard_bytes": 6000 if to == "titan" else 400, **job}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.faults.kill_at", json.dumps(job)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


class Interrupt:
    """An ``advance`` that ends the run as Ctrl-C does, once ``size`` bytes have been read."""

    def __init__(self, size: int) -> None:
        self.left = size

    def __call__(self, count: int) -> None:
        self.left -= count
        if self.left <= 0:
            raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of a hundred bytes instead of 256 MiB, so that a tiny model has several."""
    monkeypatch.setattr(planning, "UNIT_BYTES", 100)


def interrupted(source: Path, target: Path, to: str, size: int = 250, **options: Any) -> Path:
    """Begin a conversion, stop it on its way, and return the folder that is left."""
    with pytest.raises(KeyboardInterrupt):
        convert(source, target, to, advance=Interrupt(size), **options)
    assert not target.exists()
    assert len(journal(target)) > 2
    return partial_path(target) / "output"


def journal(target: Path) -> list[Any]:
    return [json.loads(line) for line in (partial_path(target) / JOURNAL).read_text().splitlines()]


# -- killed and interrupted everywhere ---------------------------------------------------------------------------------


@pytest.mark.torch_free
@pytest.mark.parametrize("to", ["titan", "hf"])
def test_killed_before_any_write_it_is_absent_and_resumes_to_the_same_bytes(to: str, place: Path) -> None:
    names = sweep(place, to)
    assert {"mkdir", "open", "ftruncate", "pwrite", "fdatasync", "write", "fsync", "unlink", "rmdir"} <= set(names)
    assert len(names) > 50
    assert names.count("rename") == 1


@pytest.mark.torch_free
@pytest.mark.parametrize("digests", [True, False], ids=["digests", "no-digests"])
@pytest.mark.parametrize("to", ["titan", "hf"])
def test_killed_inside_any_write_it_is_absent_and_resumes_to_the_same_bytes(
    to: str, digests: bool, place: Path
) -> None:
    names = sweep(place, to, digests=digests, torn=True)
    copies = not digests and hasattr(os, "copy_file_range")
    assert set(names) == {"write", "pwrite", *(["copy_file_range"] if copies else [])}
    assert len(names) > 15


@pytest.mark.torch_free
@pytest.mark.parametrize("to", ["titan", "hf"])
def test_killed_while_several_workers_write_it_is_absent_and_resumes_to_the_same_bytes(to: str, place: Path) -> None:
    assert len(sweep(place, to, workers=3, every=5)) > 20


@pytest.mark.torch_free
@pytest.mark.parametrize("exchange", [True, False], ids=["in-one-step", "in-two-steps"])
def test_killed_at_any_write_overwrite_leaves_the_old_output_or_the_new(exchange: bool, place: Path) -> None:
    """Where the system cannot exchange two folders, the old one is out of its place for a moment, never lost."""
    write_source(place / "tied", "titan", tied=True)
    (place / "tied").rename(place / "old")
    names = sweep(place, "hf", overwrite=True, exchange=exchange)
    assert names.count("_exchange") == 1
    assert names.count("rename") == (0 if exchange else 2)


@pytest.mark.torch_free
@pytest.mark.parametrize("to", ["titan", "hf"])
def test_interrupted_at_any_write_it_says_so_and_resumes_to_the_same_bytes(to: str, place: Path) -> None:
    assert len(sweep(place, to, interrupt=True, every=3)) > 30


@pytest.mark.parametrize("to", ["titan", "hf"])
def test_no_reader_takes_what_a_kill_leaves_for_a_checkpoint(to: str, place: Path) -> None:
    """The real readers, in the middle and at the last moment, with every file written and only the name missing."""
    import torch.distributed.checkpoint as dcp
    from safetensors import SafetensorError, safe_open
    from transformers import AutoConfig, AutoModelForCausalLM

    names = sweep(place, to, only=-1)
    for at in (len(names) // 2, names.index("rename") + 1):
        sweep(place, to, only=at)
        left = partial_path(place / "target")
        assert left.is_dir()
        with pytest.raises(dcp.CheckpointException):
            dcp.load({}, checkpoint_id=left)
        for load in (AutoConfig.from_pretrained, AutoModelForCausalLM.from_pretrained):
            with pytest.raises((OSError, ValueError)):
                load(left)
        for path in left.rglob("*.safetensors"):
            if names[at - 1] != "rename":
                with pytest.raises(SafetensorError), safe_open(path, "np"):
                    pass
        shutil.rmtree(left)


def test_the_real_command_stops_at_ctrl_c_and_resumes(place: Path, command: Run) -> None:
    """A process of its own and a signal from outside; the sweeps above send theirs from inside."""
    write_source(place / "source", "titan", geometry=DENSE)
    slow = (
        "import os, sys, time\n"
        "real, wrote = os.pwrite, open('wrote', 'w')\n"
        "def pwrite(*call):\n"
        "    wrote.write('.'); wrote.flush(); time.sleep(0.02)\n"
        "    return real(*call)\n"
        "os.pwrite = pwrite\n"
        "from qwen3conv.tools.cli.main import main\n"
        "main(sys.argv[1:])\n"
    )
    for at in (1, 9, 21):
        (place / "wrote").unlink(missing_ok=True)
        words = [sys.executable, "-P", "-c", slow, "hf-to-dcp", "source", "out"]
        running = subprocess.Popen(words, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while not (place / "wrote").exists() or (place / "wrote").stat().st_size < at:
            assert running.poll() is None, running.communicate()
        running.send_signal(2)
        stdout, stderr = running.communicate(timeout=60)
        assert (running.returncode, stdout) == (130, "")
        assert stderr == "Error: interrupted; run again with --resume\n"
        assert not (place / "out").exists()
        refused = command("hf-to-dcp", "source", "out", code=1)
        assert "--resume" in refused.stderr
        assert "--overwrite" in refused.stderr
        command("hf-to-dcp", "source", "out", "--resume")
        command("verify", "out")
        shutil.rmtree(place / "out")


# -- what a resumed run checks again -----------------------------------------------------------------------------------


def resumes_to_the_same(source: Path, target: Path, to: str, **options: Any) -> None:
    convert(source, target.with_name("uninterrupted"), to, **options)
    convert(source, target, to, resume=True, **options)
    assert snapshot(target, stamps=False) == snapshot(target.with_name("uninterrupted"), stamps=False)
    assert not partial_path(target).exists()


def finished_bytes(output: Path) -> list[tuple[Path, int]]:
    """Where ``output`` holds bytes that were written: file and offset of one in each run of them."""
    found = []
    for path in sorted(p for p in output.rglob("*") if p.is_file()):
        content = path.read_bytes()
        found += [(path, at) for at in range(0, len(content), 16) if any(content[at : at + 16])]
    return found


@pytest.mark.torch_free
@pytest.mark.parametrize("to", ["titan", "hf"])
def test_a_flipped_byte_of_a_finished_unit_is_written_again(to: str, place: Path) -> None:
    write_source(place / "source", to)
    output = interrupted(place / "source", place / "target", to, 330)
    shutil.copytree(output.parent, place / "kept", symlinks=True)
    spots = finished_bytes(output)
    assert len(spots) > 20
    for path, at in spots[:: max(1, len(spots) // 25)]:
        content = bytearray(path.read_bytes())
        content[at + 3] ^= 0x10
        path.write_bytes(content)
        resumes_to_the_same(place / "source", place / "target", to)
        for name in ("target", "uninterrupted"):
            shutil.rmtree(place / name)
        shutil.copytree(place / "kept", output.parent)


@pytest.mark.torch_free
@pytest.mark.parametrize("which", [0, 1])
def test_both_copies_of_a_tied_head_are_checked_again(which: int, place: Path) -> None:
    write_source(place / "source", "titan", tied=True)
    choices = Choices(lm_head="write", shard_bytes=100_000)
    output = interrupted(place / "source", place / "target", "hf", choices=choices)
    embedding = planning.plan_reads(open_checkpoint(place / "source").table(tied=True))
    (move,) = [move for unit in embedding for move in unit if "embed_tokens" in move.name]
    raw = (place / "source" / move.source[0].file).read_bytes()[move.source[0].offset :][:16]
    path = output / "model.safetensors"
    content = bytearray(path.read_bytes())
    copies = [at for at in range(len(content)) if content.startswith(raw, at)]
    assert len(copies) == 2
    content[copies[which] + 5] ^= 1
    path.write_bytes(content)
    resumes_to_the_same(place / "source", place / "target", "hf", choices=choices)


@pytest.mark.torch_free
def test_rows_that_must_be_zero_are_zero_again(place: Path) -> None:
    """Vocabulary padding is never written: in a new file it is a hole."""
    write_source(place / "source", "titan")
    choices = Choices(vocab_rows=32, shard_bytes=100_000)
    output = interrupted(place / "source", place / "target", "hf", choices=choices)
    path = output / "model.safetensors"
    content = bytearray(path.read_bytes())
    size = 32 * 4 * 2
    convert(place / "source", place / "reference", "hf", choices=choices)
    whole = (place / "reference" / "model.safetensors").read_bytes()
    ends = [at for at in range(len(whole) - size) if whole.startswith(bytes(25 * 8), at) and any(whole[at - 56 : at])]
    assert len(ends) >= 2  # of the embeddings and of the head
    for at in ends:
        content[at + 100] = 1
    path.write_bytes(content)
    resumes_to_the_same(place / "source", place / "target", "hf", choices=choices)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a data file is gone": lambda output: next(iter(sorted(output.glob("*.*")))).unlink(),
    "a data file is short": lambda output: os.truncate(next(iter(sorted(output.glob("*.*")))), 40),
    "a data file is long": lambda output: os.truncate(next(iter(sorted(output.glob("*.*")))), 100_000),
    "everything is gone": shutil.rmtree,
    "other files are there": lambda output: (output / "model-00009-of-00009.safetensors").write_bytes(b"old"),
    "a sidecar of another try": lambda output: (output / "tokenizer.json").write_text("{}"),
    "a folder of another try": lambda output: (output / "hf_assets" / "deep").mkdir(parents=True),
    "an index of another try": lambda output: (output / "model.safetensors.index.json").write_text("{}"),
}


@pytest.mark.torch_free
@pytest.mark.parametrize("to", ["titan", "hf"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_partial_folder_that_was_tampered_with_is_made_good(damage: str, to: str, place: Path) -> None:
    write_source(place / "source", to)
    DAMAGE[damage](interrupted(place / "source", place / "target", to))
    resumes_to_the_same(place / "source", place / "target", to)


@pytest.mark.torch_free
def test_a_link_in_the_partial_folder_is_not_written_through(place: Path) -> None:
    write_source(place / "source", "titan")
    output = interrupted(place / "source", place / "target", "titan")
    victim = place / "victim"
    victim.write_bytes(b"mine")
    first = next(iter(sorted(output.glob("*.distcp"))))
    first.unlink()
    first.symlink_to(victim)
    with contextlib.suppress(DestinationError):
        convert(place / "source", place / "target", "titan", resume=True)
    assert victim.read_bytes() == b"mine"


JOURNALS: dict[str, Callable[[bytes], bytes]] = {
    "cut inside its last line": lambda raw: raw[:-7],
    "cut inside its first line": lambda raw: raw[:9],
    "empty": lambda raw: b"",
    "a line of garbage at its end": lambda raw: raw + b"\x80\xff garbage\n",
    "a line of garbage inside": lambda raw: raw.replace(b"\n", b"\n\0\n", 2),
    "garbage first": lambda raw: b"\xff\n" + raw,
    "a list first": lambda raw: b"[]\n" + raw,
    "a bottomless line": lambda raw: raw + b"[" * 100_000 + b"\n",
    "a plan that is no text": lambda raw: b'{"plan": 5}\n' + raw.split(b"\n", 1)[1],
    "a unit that is none": lambda raw: raw + b'{"unit": 999, "digests": {}}\n',
    "a unit below none": lambda raw: raw + b'{"unit": -1, "digests": {}}\n',
    "a unit that is text": lambda raw: raw + b'{"unit": "0", "digests": {}}\n',
    "a unit without digests": lambda raw: raw + b'{"unit": 3}\n',
    "a unit of no parameters": lambda raw: raw + b'{"unit": 3, "digests": {}}\n',
    "digests that are none": lambda raw: raw + b'{"unit": 3, "digests": {"a": 5, "b": []}}\n',
    "digests of others": lambda raw: raw.replace(b'"unit": 1,', b'"unit": 0,'),
    "other digests": lambda raw: raw.replace(b'": ["', b'": ["f'),
    "lines twice": lambda raw: raw + raw.split(b"\n", 1)[1],
}


@pytest.mark.torch_free
@pytest.mark.parametrize("case", JOURNALS)
def test_a_damaged_journal_never_spoils_the_output(case: str, place: Path) -> None:
    write_source(place / "source", "titan")
    interrupted(place / "source", place / "target", "titan")
    path = partial_path(place / "target") / JOURNAL
    path.write_bytes(JOURNALS[case](path.read_bytes()))
    resumes_to_the_same(place / "source", place / "target", "titan")


@pytest.mark.torch_free
def test_after_a_damaged_journal_the_next_resume_still_knows_what_was_done(place: Path) -> None:
    write_source(place / "source", "titan")
    interrupted(place / "source", place / "target", "titan")
    path = partial_path(place / "target") / JOURNAL
    path.write_bytes(path.read_bytes()[:-7])
    before = len(path.read_bytes().splitlines())
    with pytest.raises(KeyboardInterrupt):
        convert(place / "source", place / "target", "titan", resume=True, advance=Interrupt(350))
    assert len(journal(place / "target")) >= before
    resumes_to_the_same(place / "source", place / "target", "titan")


@settings(max_examples=40)
@given(at=st.integers(0, 10_000), mask=st.integers(1, 255), cut=st.integers(0, 200))
@pytest.mark.torch_free
def test_a_journal_with_flipped_and_lost_bytes_is_refused_or_made_good(at: int, mask: int, cut: int) -> None:
    with scratch() as place:
        write_source(place / "source", "titan")
        interrupted(place / "source", place / "target", "titan")
        path = partial_path(place / "target") / JOURNAL
        raw = bytearray(path.read_bytes())
        raw[at % len(raw)] ^= mask
        path.write_bytes(raw[: len(raw) - cut])
        refused = ""
        try:
            resumes_to_the_same(place / "source", place / "target", "titan")
        except DestinationError as error:
            refused = str(error)
        assert not refused or "another source or with other options" in refused


# -- what cannot be resumed --------------------------------------------------------------------------------------------


@pytest.mark.torch_free
@pytest.mark.parametrize("keep_time", [False, True], ids=["new-time", "time-set-back"])
def test_a_source_that_changed_meanwhile_is_not_mixed_in(keep_time: bool, place: Path) -> None:
    source = write_source(place / "source", "titan")
    interrupted(source, place / "target", "titan")
    before = snapshot(partial_path(place / "target"))
    path = sorted(source.glob("*.safetensors"))[0]
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    if keep_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(DestinationError, match=r"another source or with other options.*--overwrite"):
        convert(source, place / "target", "titan", resume=True)
    assert snapshot(partial_path(place / "target")) == before
    convert(source, place / "target", "titan", overwrite=True)
    convert(source, place / "uninterrupted", "titan")
    assert snapshot(place / "target", stamps=False) == snapshot(place / "uninterrupted", stamps=False)


@pytest.mark.torch_free
@pytest.mark.parametrize("how", ["copy", "options", "format"])
def test_another_plan_does_not_take_over_what_is_there(how: str, place: Path) -> None:
    source = write_source(place / "source", "titan")
    interrupted(source, place / "target", "titan")
    before = snapshot(partial_path(place / "target"))
    other = source
    if how == "copy":  # of another model, made with the same names, sizes and times
        other = place / "copy"
        shutil.copytree(source, other, copy_function=shutil.copy2)
    choices = Choices(shard_bytes=400, dtype="F32" if how == "options" else None)
    with pytest.raises(DestinationError, match="another source or with other options"):
        convert(other, place / "target", "accelerate" if how == "format" else "titan", resume=True, choices=choices)
    assert snapshot(partial_path(place / "target")) == before


@pytest.mark.torch_free
def test_without_digests_a_resumed_manifest_holds_none(place: Path) -> None:
    source = write_source(place / "source", "titan")
    interrupted(source, place / "target", "titan")
    resumes_to_the_same(source, place / "target", "titan", digests=False)


@pytest.mark.torch_free
def test_begun_without_digests_it_resumes_with_them(place: Path) -> None:
    source = write_source(place / "source", "titan")
    with pytest.raises(KeyboardInterrupt):
        convert(source, place / "target", "titan", advance=Interrupt(250), digests=False)
    resumes_to_the_same(source, place / "target", "titan")


@pytest.mark.torch_free
def test_resume_with_nothing_to_resume_is_a_plain_conversion(place: Path) -> None:
    resumes_to_the_same(write_source(place / "source", "titan"), place / "target", "titan")


@pytest.mark.torch_free
def test_a_finished_output_is_not_touched_by_resume(place: Path) -> None:
    source = write_source(place / "source", "titan")
    convert(source, place / "target", "titan")
    before = snapshot(place / "target")
    with pytest.raises(DestinationError, match="exists"):
        convert(source, place / "target", "titan", resume=True)
    assert snapshot(place / "target") == before


# -- two at once -------------------------------------------------------------------------------------------------------


@pytest.mark.torch_free
@pytest.mark.parametrize("to", ["titan", "hf"])
@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"overwrite": True}, {"overwrite": True, "resume": True}])
def test_a_second_conversion_to_the_same_place_is_refused_and_disturbs_nothing(
    flags: dict[str, bool], to: str, place: Path
) -> None:
    source = write_source(place / "source", to)
    reached, go_on = threading.Event(), threading.Event()

    def wait(count: int) -> None:
        reached.set()
        assert go_on.wait(60)

    first = threading.Thread(target=convert, args=(source, place / "target", to), kwargs={"advance": wait})
    first.start()
    assert reached.wait(60)
    try:
        with pytest.raises(DestinationError, match=r"another conversion is writing|is an unfinished conversion"):
            convert(source, place / "target", to, **flags)
    finally:
        go_on.set()
        first.join()
    convert(source, place / "alone", to)
    assert snapshot(place / "target", stamps=False) == snapshot(place / "alone", stamps=False)


@pytest.mark.torch_free
def test_of_two_commands_at_once_one_writes_and_one_refuses(place: Path) -> None:
    write_source(place / "source", "titan")
    words = [sys.executable, "-P", "-m", "qwen3conv", "hf-to-dcp", "source", "target"]
    pair = [subprocess.Popen(words, cwd=place, stderr=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    said = [process.communicate(timeout=120)[1].decode() for process in pair]
    assert sorted(process.returncode for process in pair) == [0, 1], said
    assert any("target" in text and text.startswith("Error: ") for text in said)
    convert(place / "source", place / "alone", "titan")
    one, other = (read_manifest(place / name) for name in ("target", "alone"))
    assert one is not None
    assert other is not None
    assert one.fingerprint == other.fingerprint
    assert not partial_path(place / "target").exists()


@pytest.mark.torch_free
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_destination_that_comes_to_be_meanwhile_is_not_replaced_unasked(overwrite: bool, place: Path) -> None:
    source = write_source(place / "source", "titan")

    def appear(count: int) -> None:
        (place / "target").mkdir(exist_ok=True)
        (place / "target" / "thesis.tex").write_text("years of work")

    with pytest.raises(DestinationError, match="--resume") as caught:
        convert(source, place / "target", "titan", advance=appear, overwrite=overwrite)
    assert str(place / "target") in str(caught.value)
    assert (place / "target" / "thesis.tex").read_text() == "years of work"
    (place / "target").rename(place / "saved")
    convert(source, place / "target", "titan", resume=True)
    convert(source, place / "alone", "titan")
    assert snapshot(place / "target", stamps=False) == snapshot(place / "alone", stamps=False)


@pytest.mark.torch_free
def test_a_source_that_changes_under_the_conversion_is_noticed(place: Path) -> None:
    source = write_source(place / "source", "titan")
    path = sorted(source.glob("*.safetensors"))[0]

    def change(count: int) -> None:
        path.write_bytes(path.read_bytes())

    with pytest.raises(SourceError, match="changed while it was being read"):
        convert(source, place / "target", "titan", advance=change)
    assert not (place / "target").exists()
    assert not partial_path(place / "target").exists()


@pytest.mark.torch_free
def test_a_file_system_without_locks_is_no_obstacle(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_source(place / "source", "titan")

    def unsupported(*arguments: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    convert(source, place / "target", "titan")
    assert open_checkpoint(place / "target").manifest is not None
    with pytest.raises(ConversionError):
        convert(source, place / "target", "titan")
