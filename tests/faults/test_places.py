"""Sources and destinations that cannot or must not be used: one message, and not a byte out of place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qwen3conv.converters.detection import open_checkpoint
from qwen3conv.converters.errors import DestinationError, SourceError
from qwen3conv.converters.stores.staging import JOURNAL
from tests.faults.conftest import Run, as_ordinary_user, convert, mounted, write_source
from tests.faults.kill_at import snapshot

pytestmark = pytest.mark.torch_free


@pytest.fixture
def source(place: Path) -> Path:
    return write_source(place / "source", "titan")


def refused(place: Path, source: Path, target: Path, **flags: bool) -> str:
    """The message of a refusal that changes nothing in ``place``."""
    before = snapshot(place)
    with pytest.raises(DestinationError) as caught:
        convert(source, target, "titan", **flags)
    assert snapshot(place) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def no_source(place: Path, path: Path) -> str:
    """The same for a source."""
    before = snapshot(place)
    with pytest.raises(SourceError) as caught:
        convert(path, place / "out", "titan")
    assert snapshot(place) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


EVERY_FLAG: list[dict[str, bool]] = [{}, {"overwrite": True}, {"resume": True}, {"overwrite": True, "resume": True}]

# -- destinations ------------------------------------------------------------------------------------------------------


def test_an_existing_destination_is_refused_with_the_option(place: Path, source: Path) -> None:
    convert(source, place / "target", "titan")
    assert "--overwrite" in refused(place, source, place / "target")
    refused(place, source, place / "target", resume=True)


def test_an_empty_folder_is_as_good_as_none(place: Path, source: Path) -> None:
    (place / "target").mkdir()
    convert(source, place / "target", "titan")
    assert open_checkpoint(place / "target").format == "titan"


NO_FOLDERS: dict[str, Callable[[Path], object]] = {
    "a file": lambda path: path.write_bytes(b"mine"),
    "an empty file": lambda path: path.touch(),
    "a link to a file": lambda path: path.symlink_to("some-file"),
    "a link to a folder": lambda path: path.symlink_to("elsewhere"),
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize("flags", EVERY_FLAG)
@pytest.mark.parametrize("kind", NO_FOLDERS)
def test_a_destination_that_is_no_folder_is_refused_whatever_is_asked(
    kind: str, flags: dict[str, bool], place: Path, source: Path
) -> None:
    (place / "elsewhere").mkdir()
    (place / "some-file").touch()
    NO_FOLDERS[kind](place / "target")
    assert "not a folder" in refused(place, source, place / "target", **flags)


@pytest.mark.parametrize("flags", EVERY_FLAG)
@pytest.mark.parametrize("kind", NO_FOLDERS)
def test_something_else_where_the_output_would_grow_is_spared(
    kind: str, flags: dict[str, bool], place: Path, source: Path
) -> None:
    (place / "elsewhere").mkdir()
    (place / "some-file").touch()
    NO_FOLDERS[kind](place / "target.partial")
    assert "move it away" in refused(place, source, place / "target", **flags)


@pytest.mark.parametrize("flags", EVERY_FLAG)
def test_a_folder_of_other_things_where_the_output_would_grow_is_spared(
    flags: dict[str, bool], place: Path, source: Path
) -> None:
    (place / "target.partial" / "deep").mkdir(parents=True)
    (place / "target.partial" / "deep" / "thesis.tex").write_text("years of work")
    assert "move it away" in refused(place, source, place / "target", **flags)


@pytest.mark.parametrize("flags", EVERY_FLAG)
def test_the_source_is_never_where_the_output_grows(flags: dict[str, bool], place: Path, source: Path) -> None:
    source.rename(place / "target.partial")
    refused(place, place / "target.partial", place / "target", **flags)


def test_the_source_may_bear_the_name_that_a_replaced_output_would(place: Path, source: Path) -> None:
    convert(source, place / "target", "titan")
    kept = source.rename(place / "target.replaced")
    before = snapshot(kept)
    convert(kept, place / "target", "titan", overwrite=True)
    assert snapshot(kept) == before


@pytest.mark.parametrize("flags", EVERY_FLAG)
def test_a_folder_that_is_no_checkpoint_is_not_overwritten(flags: dict[str, bool], place: Path, source: Path) -> None:
    (place / "target").mkdir()
    (place / "target" / "thesis.tex").write_text("years of work")
    text = refused(place, source, place / "target", **flags)
    assert ("spares it" in text) == flags.get("overwrite", False)


def test_overwrite_replaces_a_whole_folder_and_nothing_beside_it(place: Path, source: Path) -> None:
    convert(source, place / "fresh", "titan")
    write_source(place / "old", "hf", tied=True)
    (place / "old").rename(place / "target")
    (place / "target" / "extra.txt").write_text("of the old one")
    convert(source, place / "target", "titan", overwrite=True)
    assert snapshot(place / "target", stamps=False) == snapshot(place / "fresh", stamps=False)
    assert {path.name for path in place.iterdir()} == {"source", "fresh", "hub", "target"}


def test_a_failed_overwrite_leaves_the_old_output(place: Path, source: Path) -> None:
    convert(source, place / "target", "titan")
    before = snapshot(place / "target")

    def fail(count: int) -> None:
        raise OSError(5, "Input/output error", "some file")

    with pytest.raises(DestinationError, match="some file"):
        convert(source, place / "target", "titan", overwrite=True, advance=fail)
    assert snapshot(place / "target") == before
    assert {path.name for path in place.iterdir()} == {"source", "target"}


def test_an_output_that_cannot_take_the_place_of_the_old_gives_it_back(
    place: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, place / "target", "titan")
    before = snapshot(place / "target")
    real, calls = os.rename, []

    def rename(one: Path, other: Path) -> None:
        calls.append(one)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        real(one, other)

    with monkeypatch.context() as patch:
        patch.setattr("qwen3conv.converters.stores.staging._exchange", lambda one, other: False)
        patch.setattr(os, "rename", rename)
        with pytest.raises(DestinationError, match=r"whole in .*--resume"):
            convert(source, place / "target", "titan", overwrite=True)
    assert len(calls) == 3
    assert snapshot(place / "target") == before
    convert(source, place / "target", "titan", overwrite=True, resume=True)
    assert {path.name for path in place.iterdir()} == {"source", "target"}


@pytest.mark.parametrize("flags", EVERY_FLAG)
@pytest.mark.parametrize("target", ["source", "source/inside", "source/deep/er", ".", "source/../source", "link"])
def test_a_destination_that_touches_the_source_is_refused(
    target: str, flags: dict[str, bool], place: Path, source: Path
) -> None:
    (source / "deep").mkdir()
    (place / "link").symlink_to("source")
    refused(place, source, place / target, **flags)


def test_a_destination_around_the_source_is_refused(place: Path) -> None:
    write_source(place / "target" / "source", "titan")
    (place / "target" / "qwen3conv.json").touch()
    assert "inside each other" in refused(place, place / "target" / "source", place / "target", overwrite=True)


@pytest.mark.parametrize("target", ["missing/target", "some-file/target", "a/b/c/d"])
def test_a_missing_parent_is_named(target: str, place: Path, source: Path) -> None:
    (place / "some-file").touch()
    text = refused(place, source, place / target)
    assert str((place / target).parent) in text
    assert "create it first" in text


@pytest.mark.parametrize(
    "target",
    [Path(), Path("/"), Path(".."), Path("a/.."), Path("x" * 250), Path("x" * 300), Path("nul\0l"), Path("\ud800")],
)
def test_names_that_no_folder_can_have_are_refused(
    target: Path, place: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source)
    for flags in EVERY_FLAG:
        refused(place, source, target, **flags)


@pytest.mark.parametrize(
    "name", ["with space", "\u5343\u554f \u2713", "-dash", "new\nline", "quo'te\"", "~", "*", "dot.", "a%20b"]
)
def test_odd_names_work_on_both_sides(name: str, place: Path, source: Path) -> None:
    source.rename(place / name)
    (place / "out").mkdir()
    convert(place / name, place / "out" / name, "titan")
    convert(place / "out" / name, place / "out" / f"{name} back", "hf")
    assert open_checkpoint(place / "out" / f"{name} back").format == "hf"


def test_bytes_that_are_no_text_work_as_names(place: Path, source: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    source.rename(place / name)
    convert(place / name, place / f"{name}-out", "titan")
    assert open_checkpoint(place / f"{name}-out").format == "titan"


def test_relative_paths_dots_and_slashes_work(place: Path, source: Path, command: Run) -> None:
    (place / "sub").mkdir()
    command("hf-to-dcp", "../source/", "./out/", cwd=place / "sub")
    command("dcp-to-hf", "sub/../sub/out//", "sub/./back/")
    command("hf-to-dcp", ".", "../again", cwd=source)
    assert {path.name for path in (place / "sub").iterdir()} == {"out", "back"}
    assert open_checkpoint(place / "again").format == "titan"


def test_an_output_may_lie_in_a_linked_folder(place: Path, source: Path) -> None:
    (place / "disk").mkdir()
    (place / "link").symlink_to("disk")
    convert(source, place / "link" / "target", "titan")
    assert {path.name for path in (place / "disk").iterdir()} == {"target"}


# -- permissions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [[], ["--overwrite"], ["--resume"]])
def test_a_parent_without_write_permission_is_refused(
    flags: list[str], place: Path, source: Path, command: Run
) -> None:
    (place / "parent").mkdir(mode=0o555)
    said = command("hf-to-dcp", "source", "parent/out", *flags, code=1, preexec_fn=as_ordinary_user)
    assert said.stdout == ""
    assert said.stderr == "Error: parent is read-only for this user; choose another place\n"
    assert not list((place / "parent").iterdir())


def test_a_parent_that_cannot_be_entered_is_refused(place: Path, source: Path, command: Run) -> None:
    (place / "parent").mkdir(mode=0o000)
    for target in ("parent/out", "parent/deeper/out"):
        said = command("hf-to-dcp", "source", target, code=1, preexec_fn=as_ordinary_user)
        assert said.stdout == ""
        assert said.stderr.startswith("Error: parent")
        assert said.stderr.count("\n") == 1
    (place / "parent").chmod(0o755)


def test_an_output_of_somebody_else_that_cannot_be_listed_is_refused(place: Path, source: Path, command: Run) -> None:
    (place / "out").mkdir(mode=0o000)
    for flags in ([], ["--overwrite"]):
        said = command("hf-to-dcp", "source", "out", *flags, code=1, preexec_fn=as_ordinary_user)
        assert (said.stdout, said.stderr.count("\n")) == ("", 1)
        assert said.stderr.startswith("Error: out")
    (place / "out").chmod(0o755)


UNREADABLE = [
    "model-00001-of-00002.safetensors",
    "config.json",
    "model.safetensors.index.json",
    "generation_config.json",
    ".",
]


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_unreadable_source_is_named(name: str, place: Path, source: Path, command: Run) -> None:
    path = source / name
    mode = path.stat().st_mode
    path.chmod(0o000)
    said = command("hf-to-dcp", "source", "out", code=1, preexec_fn=as_ordinary_user)
    path.chmod(mode)
    assert said.stdout == ""
    assert said.stderr.startswith("Error: ")
    assert path.name in said.stderr
    assert "ermission denied" in said.stderr
    assert "Traceback" not in said.stderr
    assert sorted(p.name for p in place.iterdir()) == ["source"]


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "qwen3conv.json", "hf_assets/config.json", "hf_assets"])
def test_an_unreadable_dcp_is_named(name: str, place: Path, command: Run) -> None:
    write_source(place / "source", "hf")
    shutil.rmtree(place / "hub")
    path = place / "source" / name
    mode = path.stat().st_mode
    path.chmod(0o000)
    said = command("dcp-to-hf", "source", "out", code=1, preexec_fn=as_ordinary_user)
    path.chmod(mode)
    assert said.stdout == ""
    assert said.stderr.startswith("Error: ")
    assert path.name in said.stderr
    assert "Traceback" not in said.stderr
    assert sorted(p.name for p in place.iterdir()) == ["source"]


ENGINE = (
    "import sys; from pathlib import Path\n"
    "from qwen3conv.converters.conversion import carry_out, prepare\n"
    "from qwen3conv.converters.errors import ConversionError\n"
    "try: carry_out(prepare(Path('source'), Path('out'), 'hf'))\n"
    "except ConversionError as error: sys.exit(f'refused: {error}')\n"
)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "qwen3conv.json", "hf_assets/LICENSE", "hf_assets", "."])
def test_the_engine_itself_raises_no_bare_error_of_the_system(name: str, place: Path) -> None:
    write_source(place / "source", "hf")
    path = place / "source" / name
    mode = path.stat().st_mode
    path.chmod(0o000)
    words = [sys.executable, "-P", "-c", ENGINE]
    ended = subprocess.run(words, cwd=place, capture_output=True, text=True, preexec_fn=as_ordinary_user)
    path.chmod(mode)
    assert ended.stderr.startswith("refused: ")
    assert "ermission denied" in ended.stderr
    assert not (place / "out").exists()


def test_a_read_only_destination_is_refused(place: Path, source: Path) -> None:
    with mounted(place / "disk") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for flags in EVERY_FLAG:
            with pytest.raises(DestinationError, match="disk is read-only for this user"):
                convert(source, disk / "target", "titan", **flags)


def test_a_source_on_a_read_only_file_system_works(place: Path, source: Path) -> None:
    with mounted(place / "disk") as disk:
        shutil.copytree(source, disk / "source")
        convert(disk / "source", disk / "dcp", "titan")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        convert(disk / "source", place / "target", "titan")
        convert(disk / "dcp", place / "back", "hf")
    assert open_checkpoint(place / "target").format == "titan"
    assert open_checkpoint(place / "back").format == "hf"


def test_a_mount_point_is_refused_before_the_work_and_not_after(place: Path, source: Path) -> None:
    """It can be empty, as a volume of a container is, and nothing can take its name."""
    with mounted(place / "disk") as disk:
        for flags in EVERY_FLAG:
            with pytest.raises(DestinationError, match=r"disk is where a file system is mounted"):
                convert(source, disk, "titan", **flags)
        convert(source, disk / "target", "titan")


def test_a_name_that_cannot_be_taken_keeps_the_work(place: Path, source: Path) -> None:
    """A folder of the same file system bound over the destination cannot be told from one before it is tried."""
    (place / "target").mkdir()
    (place / "bound").mkdir()
    words = ["mount", "--bind", str(place / "bound"), str(place / "target")]
    if subprocess.run(words, capture_output=True).returncode:
        pytest.skip("this user may not mount")
    try:
        with pytest.raises(DestinationError, match=r"busy.*--resume"):
            convert(source, place / "target", "titan")
    finally:
        subprocess.run(["umount", "-l", str(place / "target")], check=True)
    convert(source, place / "target", "titan", resume=True)
    assert open_checkpoint(place / "target").format == "titan"


# -- sources -----------------------------------------------------------------------------------------------------------


def test_a_source_that_is_a_file_or_nothing_is_refused(place: Path, source: Path, command: Run) -> None:
    assert "name the folder" in no_source(place, source / "config.json")
    assert "does not exist" in no_source(place, place / "nothing")
    (place / "link").symlink_to("nowhere")
    (place / "loop").symlink_to("loop")
    os.mkfifo(place / "pipe")
    no_source(place, place / ("x" * 300))
    no_source(place, place / "nul\0l")
    for name in ("source/config.json", "nothing", "link", "loop", "pipe", "source/config.json/x"):
        no_source(place, place / name)
        said = command("hf-to-dcp", place / name, "out", code=1)
        assert said.stdout == ""
        assert said.stderr.startswith("Error: ")
        assert "Traceback" not in said.stderr


def test_a_source_through_links_is_read_and_left_alone(place: Path, source: Path) -> None:
    """As the hub's cache has them: a folder of links to content elsewhere."""
    (place / "cache").mkdir()
    for path in source.iterdir():
        (place / "cache" / path.name).symlink_to(path)
    before = snapshot(source)
    convert(place / "cache", place / "target", "titan")
    convert(source, place / "direct", "titan")
    assert snapshot(source) == before
    strip = {"qwen3conv.json": None}
    assert {**snapshot(place / "target", stamps=False), **strip} == {
        **snapshot(place / "direct", stamps=False),
        **strip,
    }


def test_an_unfinished_conversion_is_no_source(place: Path, source: Path) -> None:
    (place / "x.partial" / "output").mkdir(parents=True)
    (place / "x.partial" / JOURNAL).touch()
    shutil.copytree(source, place / "x.partial" / "output", dirs_exist_ok=True)
    for path in (place / "x.partial", place / "x.partial" / "output"):
        assert "--resume" in no_source(place, path)
