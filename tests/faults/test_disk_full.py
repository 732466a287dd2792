"""A disk that is full or fails: foreseen where it can be, and nothing that looks finished where it cannot."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from qwen3conv.converters import planning
from qwen3conv.converters.conversion import prepare
from qwen3conv.converters.errors import DestinationError
from qwen3conv.converters.geometry import Geometry
from qwen3conv.converters.parameters import logical_parameters
from qwen3conv.converters.stores.staging import partial_path
from tests.faults.conftest import DENSE, Run, convert, mounted, write_source
from tests.faults.kill_at import snapshot, watch_changes

pytestmark = pytest.mark.torch_free


def fill(folder: Path) -> Path:
    """Take every byte that is left in the file system of ``folder``."""
    path = folder / "filler"
    with open(path, "ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    assert shutil.disk_usage(folder).free == 0
    return path


def nothing_is_left(target: Path) -> bool:
    return not os.path.lexists(target) and not os.path.lexists(partial_path(target))


# -- foreseen ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [False, True], ids=["small", "full"])
@pytest.mark.parametrize("to", ["titan", "hf"])
def test_too_small_a_disk_is_refused_before_the_first_byte_with_both_numbers(to: str, full: bool, place: Path) -> None:
    write_source(place / "source", to, geometry=Geometry(5000, 40, 1, 2, 1, 2, intermediate_size=3))
    with mounted(place / "disk", "size=300k") as disk:
        if full:
            fill(disk)
        begun: list[int] = []
        with pytest.raises(DestinationError) as caught:
            convert(place / "source", disk / "target", to, advance=begun.append)
        free = shutil.disk_usage(disk).free
        need = prepare(place / "source", disk / "target", to).disk_bytes
        assert f"{disk} has {free:,} free" in str(caught.value)
        said = int(str(caught.value).split(" takes ")[1].split(" bytes")[0].replace(",", ""))
        assert need <= said <= need + 20_000
        assert not begun
        assert {path.name for path in disk.iterdir()} <= {"filler"}


def test_a_file_system_that_does_not_know_its_size_is_tried(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_source(place / "source", "titan")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 0))
    convert(place / "source", place / "target", "titan")


def test_a_resume_that_lacks_space_keeps_what_is_done(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "UNIT_BYTES", 100)
    write_source(place / "source", "titan")

    def stop(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(place / "source", place / "target", "titan", advance=stop)
    before = snapshot(partial_path(place / "target"), stamps=False)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 5, 5))
        with pytest.raises(DestinationError, match="5 free"):
            convert(place / "source", place / "target", "titan", resume=True)
    assert snapshot(partial_path(place / "target"), stamps=False) == before
    convert(place / "source", place / "target", "titan", resume=True)


def test_a_resume_needs_space_only_for_what_is_missing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "UNIT_BYTES", 4000)
    sizes = Geometry(2000, 40, 1, 2, 1, 2, intermediate_size=3)
    write_source(place / "source", "titan", geometry=sizes)
    asked: list[int] = []
    monkeypatch.setattr("qwen3conv.converters.conversion.check_space", lambda parent, needed: asked.append(needed))
    left = [200_000]

    def stop(count: int) -> None:
        left[0] -= count
        if left[0] < 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(place / "source", place / "target", "titan", advance=stop)
    whole = asked[0]
    asked.clear()
    convert(place / "source", place / "target", "titan", resume=True)
    assert whole * 0.2 < min(asked) < whole * 0.6


def test_a_huge_sparse_source_is_refused_up_front(place: Path, command: Run) -> None:
    """Headers that promise 64 TB cost their writer nothing; nothing of them is read."""
    source = place / "source"
    write_source(source, "titan", geometry=DENSE)
    sizes = Geometry(2**24, 2**20, 1, 2, 1, 2, intermediate_size=3)
    header: dict[str, object] = {}
    end = 0
    for name, shape in logical_parameters(sizes, tied=False):
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    for path in source.glob("*.safetensors*"):
        path.unlink()
    with open(source / "model.safetensors", "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)
    config = json.loads((source / "config.json").read_text())
    config |= {"vocab_size": 2**24, "hidden_size": 2**20, "num_hidden_layers": 1}
    (source / "config.json").write_text(json.dumps(config))
    said = command("hf-to-dcp", source, "target", code=1)
    assert said.stdout == ""
    assert f"{place} has " in said.stderr or ". has " in said.stderr
    assert " takes 70,3" in said.stderr
    assert sorted(path.name for path in place.iterdir()) == ["source"]


# -- not foreseen ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("digests", [True, False], ids=["digests", "no-digests"])
@pytest.mark.parametrize("to", ["titan", "hf"])
def test_a_disk_that_fills_up_meanwhile_leaves_nothing(to: str, digests: bool, place: Path) -> None:
    write_source(place / "source", to, geometry=Geometry(1500, 40, 1, 2, 1, 2, intermediate_size=3))
    with mounted(place / "disk", "size=600k") as disk:
        with pytest.raises(DestinationError, match=r"[Nn]o space left.*target") as caught:
            convert(place / "source", disk / "target", to, advance=lambda count: fill(disk), digests=digests)
        assert "\n" not in str(caught.value)
        assert nothing_is_left(disk / "target")
        (disk / "filler").unlink()
        convert(place / "source", disk / "target", to)


@pytest.mark.parametrize(
    ("to", "number"),
    [("titan", errno.ENOSPC), ("hf", errno.ENOSPC), ("hf", errno.EIO)],
    ids=["titan-full", "hf-full", "hf-broken"],
)
def test_an_error_at_any_write_is_one_message_and_leaves_nothing(
    to: str, number: int, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_source(place / "source", to)
    convert(place / "source", place / "reference", to)
    before, whole = snapshot(place / "source"), snapshot(place / "reference", stamps=False)
    at, tried = 0, []
    while True:
        at += 1
        hit: list[str] = []

        def act(count: int, name: str, args: tuple[object, ...], at: int = at, hit: list[str] = hit) -> None:
            if count == at:
                hit.append(name)
                raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            watch_changes(act, patch.setattr)
            try:
                convert(place / "source", place / "target", to)
                failed = None
            except DestinationError as error:
                failed = error
        if not hit:
            break
        tried += hit
        assert snapshot(place / "source") == before
        if not (place / "target").exists():
            assert failed is not None
            if hit != ["rename"]:  # then all is there, and --resume finishes it
                assert nothing_is_left(place / "target"), f"call {at}, {hit}: {failed}"
            assert os.strerror(number).lower() in str(failed).lower() or "no space left" in str(failed)
            convert(place / "source", place / "target", to, resume=hit == ["rename"])
        assert snapshot(place / "target", stamps=False) == whole, f"call {at}, {hit}"
        shutil.rmtree(place / "target")
        shutil.rmtree(partial_path(place / "target"), ignore_errors=True)
    assert {"mkdir", "open", "ftruncate", "write", "pwrite", "fdatasync", "fsync", "rename"} <= set(tried)


def test_short_writes_are_carried_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_source(place / "source", "titan")
    convert(place / "source", place / "reference", "titan")
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: real(file, memoryview(data)[:7], at))
    convert(place / "source", place / "target", "titan")
    assert snapshot(place / "target", stamps=False) == snapshot(place / "reference", stamps=False)


def limited(size: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize("size", [0, 20, 300, 3000])
def test_a_limit_on_file_sizes_is_one_message_and_leaves_nothing(size: int, place: Path, command: Run) -> None:
    write_source(place / "source", "titan")
    words = ["hf-to-dcp", "source", "target", "--workers", "1"]
    said = command(*words, code=1, preexec_fn=limited(size))
    assert said.stdout == ""
    assert said.stderr.startswith("Error: target.partial/")
    assert said.stderr.endswith("File too large\n")
    assert nothing_is_left(place / "target")
    command(*words)
