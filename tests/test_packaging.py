"""What is shipped: the list of packages, the wheel, the source distribution, and the pins beside them."""

from __future__ import annotations

import csv
import email
import email.message
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import qwen3conv

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ROOMS = {"qwen3conv": "src/qwen3conv", **{f"qwen3conv.{room}": room for room in ("converters", "tools", "training")}}

NOT_SOURCE = shutil.ignore_patterns(
    ".*cache",
    ".coverage*",
    ".git",
    ".hypothesis",
    ".venv*",
    ".titan-*",
    ".olah-*",
    "*.egg-info",
    "__pycache__",
    "build",
    "dist",
    "outputs",
)


def shipped() -> dict[str, Path]:
    """Path inside the wheel -> file in the repository, for every file that the wheel must hold."""
    files = {
        f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder).as_posix()}": path
        for package, folder in ROOMS.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    return {**files, "qwen3conv/py.typed": ROOT / "src/qwen3conv/py.typed"}


def run(*command: str | Path, cwd: Path, path: Path | None = None) -> str:
    """What ``command`` prints, away from this interpreter's PYTHONPATH; ``path`` takes its place."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    ran = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=cwd, env=env, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@dataclass(frozen=True, slots=True)
class Built:
    """A source distribution, the wheel made from it, and the wheel made from the tree."""

    sdist: Path
    wheel: Path
    direct: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Built from a copy: setuptools leaves folders beside what it builds."""
    tree = tmp_path_factory.mktemp("source") / "qwen3conv"
    shutil.copytree(ROOT, tree, ignore=NOT_SOURCE)
    out = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-P", "-m", "build", "--no-isolation", tree, "--outdir")
    run(*build, out / "both", cwd=tree)
    run(*build, out / "direct", "--wheel", cwd=tree)
    (sdist,), (wheel,) = (out / "both").glob("*.tar.gz"), (out / "both").glob("*.whl")
    (direct,) = (out / "direct").glob("*.whl")
    return Built(sdist, wheel, direct)


def digests(wheel: Path) -> dict[str, str]:
    """File name -> digest, as the wheel's own RECORD lists them."""
    with zipfile.ZipFile(wheel) as archive:
        (record,) = (name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
        rows = csv.reader(io.StringIO(archive.read(record).decode()))
        return {name: digest for name, digest, _ in rows}


def metadata(wheel: Path) -> email.message.Message:
    """The wheel's METADATA."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


@pytest.mark.torch_free
def test_every_package_of_the_tree_is_listed_and_no_other() -> None:
    found = {
        ".".join((package, *init.parent.relative_to(ROOT / folder).parts))
        for package, folder in ROOMS.items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found
    assert PROJECT["tool"]["setuptools"]["package-dir"] == ROOMS


@pytest.mark.torch_free
def test_every_folder_with_python_files_is_a_package() -> None:
    # Without __init__.py a folder imports from the tree and is missing from the wheel.
    folders = {path.parent for folder in ROOMS.values() for path in (ROOT / folder).rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


@pytest.mark.torch_free
def test_every_direct_dependency_is_pinned_inside_its_range() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    assert len(versions) == len(pins)
    assert not [version for version in versions.values() if "+" in version]  # a local build exists on one machine

    project = PROJECT["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values(), PROJECT["build-system"]["requires"]]
    outside = []
    for requirement in (Requirement(text) for group in groups for text in group):
        pinned = versions.get(canonicalize_name(requirement.name))
        if pinned is None or not requirement.specifier.contains(pinned):
            outside.append(f"{requirement}: pinned to {pinned}")
    assert outside == []


def test_the_wheel_holds_every_module_and_nothing_else(built: Built) -> None:
    names = {name for name in digests(built.wheel) if ".dist-info/" not in name}
    assert names == set(shipped())
    with zipfile.ZipFile(built.wheel) as archive:
        assert {name: archive.read(name) for name in names} == {n: p.read_bytes() for n, p in shipped().items()}


def test_the_wheel_built_from_the_sdist_equals_the_one_built_from_the_tree(built: Built) -> None:
    assert digests(built.wheel) == digests(built.direct)


def test_the_sdist_carries_what_the_checks_need(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tests = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")}
    wanted = {"LICENSE", "Makefile", "README.md", "constraints.txt", "pyproject.toml", ".ci/run", *tests}
    assert wanted <= names


def test_the_metadata_says_what_the_package_is(built: Built) -> None:
    said = metadata(built.wheel)
    assert said["Name"] == "qwen3conv"
    assert said["Version"] == qwen3conv.__version__
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Requires-Python"] == ">=3.11"
    needed = {canonicalize_name(Requirement(text).name) for text in PROJECT["project"]["dependencies"]}
    listed = [Requirement(text) for text in said.get_all("Requires-Dist", [])]
    assert {canonicalize_name(each.name) for each in listed if "extra" not in str(each.marker)} == needed
    assert [each for each in listed if each.url] == []


def test_the_installed_wheel_answers_with_click_alone(built: Built, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    pip = (sys.executable, "-P", "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "--no-deps", "--no-index", built.wheel, cwd=tmp_path)

    import click

    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "click").symlink_to(Path(click.__file__).parent)
    for command in ([python, "-m", "qwen3conv"], [python.with_name("qwen3conv")]):
        assert qwen3conv.__version__ in run(*command, "--version", cwd=tmp_path, path=tmp_path / "path")
        assert "hf-to-dcp" in run(*command, "--help", cwd=tmp_path, path=tmp_path / "path")
    where = run(python, "-c", "import qwen3conv; print(qwen3conv.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path / "env")
