"""What importing costs and which way imports may go, where import-linter cannot see it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import qwen3conv

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("converters", "tools", "training")
FOLDERS = (*ROOMS, "src")

HEAVY = ("accelerate", "datasets", "huggingface_hub", "numpy", "safetensors", "torch", "torchtitan", "transformers")
TERMINAL = ("click", "rich")

IMPORT_ALL = """
import importlib, json, pkgutil, sys
name, refused = sys.argv[1], set(sys.argv[2:])
loaded, asked = [name], []

class Refuse:
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in refused:
            asked.append(f"{loaded[-1]} asks for {fullname}")
            raise ImportError(f"{fullname} is refused in this test")

sys.meta_path.insert(0, Refuse())
package = importlib.import_module(name)
for module in pkgutil.walk_packages(package.__path__, name + "."):
    loaded.append(module.name)
    importlib.import_module(module.name)
print(json.dumps([loaded, asked]))
"""

RUN_COMMAND = """
import json, sys
from qwen3conv.tools.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as leaving:
    assert not leaving.code, leaving.code
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def python(program: str, *args: str) -> str:
    """What ``program`` prints, run in a fresh interpreter without the repository's root on its path."""
    command = [sys.executable, "-P", "-c", program, *args]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def sources(*folders: str) -> list[Path]:
    """The Python files of the repository's ``folders``."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    """``converters/stores/dcp.py`` -> ``qwen3conv.converters.stores.dcp``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("qwen3conv", *parts[:-1], *([] if parts[-1] == "__init__" else [parts[-1]])))


def imported_names(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every absolute import in a file, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module


@pytest.mark.torch_free
def test_the_tests_run_against_this_tree() -> None:
    assert Path(qwen3conv.__file__).resolve().parent == ROOT / "src" / "qwen3conv"


@pytest.mark.torch_free
def test_every_module_of_converters_loads_without_a_heavy_library_or_a_terminal() -> None:
    loaded, asked = json.loads(python(IMPORT_ALL, "qwen3conv.converters", *HEAVY, *TERMINAL))
    assert asked == []
    assert set(loaded) == {module_name(path) for path in sources("converters")}


def test_every_module_of_the_command_line_loads_without_a_heavy_library() -> None:
    loaded, asked = json.loads(python(IMPORT_ALL, "qwen3conv.tools.cli", *HEAVY))
    assert asked == []
    assert set(loaded) == {module_name(path) for path in sources("tools/cli")}


@pytest.mark.parametrize(("option", "answer"), [("--help", "hf-to-dcp"), ("--version", qwen3conv.__version__)])
def test_help_and_version_load_no_heavy_library(option: str, answer: str) -> None:
    *text, modules = python(RUN_COMMAND, option).splitlines()
    assert answer in "\n".join(text)
    assert set(HEAVY).isdisjoint(json.loads(modules))


@pytest.mark.torch_free
def test_no_file_imports_a_room_by_its_bare_name() -> None:
    # The folders lie on sys.path when Python starts in the repository, and would load as a second copy of each module.
    bare = [
        f"{path.relative_to(ROOT)}:{line} imports {name}; write qwen3conv.{name}"
        for path in sources(*FOLDERS, "tests", "examples")
        for line, name in imported_names(path)
        if name.partition(".")[0] in ROOMS
    ]
    assert not bare, "\n".join(bare)


@pytest.mark.torch_free
def test_training_takes_torchtitan_from_one_place() -> None:
    # A release or a fork with other names is met there. devices.py makes torchtitan importable, so it comes before.
    allowed = {ROOT / "training" / "devices.py", *sources("training/titan")}
    elsewhere = [
        f"{path.relative_to(ROOT)}:{line} imports {name}; take it from qwen3conv.training.titan"
        for path in sources("training")
        if path not in allowed
        for line, name in imported_names(path)
        if name.partition(".")[0] == "torchtitan"
    ]
    assert not elsewhere, "\n".join(elsewhere)


@pytest.mark.torch_free
def test_source_is_ascii() -> None:
    paths = [path for path in sources(*FOLDERS, "examples") if not path.read_bytes().isascii()]
    assert not paths


@pytest.mark.torch_free
def test_no_module_has_a_name_that_says_nothing() -> None:
    paths = [path for path in sources(*FOLDERS) if path.stem in {"common", "helpers", "misc", "utils"}]
    assert not paths
