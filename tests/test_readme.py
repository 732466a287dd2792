"""The README says what is so: its examples are run, its tables compared with the program.

``python -m tests.test_readme`` writes the examples' outputs anew.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import pytest

from examples import demo
from qwen3conv.converters import refusals
from qwen3conv.converters.errors import SourceError
from qwen3conv.converters.formats import FORMATS
from qwen3conv.converters.layouts import TITAN_SCHEMAS
from qwen3conv.converters.location import locate_checkpoint
from qwen3conv.tools.cli.main import cli
from qwen3conv.tools.generate import generate
from qwen3conv.tools.parity import ParityReport
from tests.cli.conftest import environment
from tests.laws.tiny import scratch

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")

CONSOLE = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)

NOISE = ("converting: ", "reading: ", "comparing: ", "Warning: the output takes ")
"""Lines that come or not as the machine is slow, or short of disk."""

HOLLOW = ("Qwen3-4B-Instruct-2507", "Qwen3-30B-A3B")
"""Released models of the examples, made with headers alone."""


class Example(NamedTuple):
    """A command line of the README and what is printed under it."""

    command: str
    output: tuple[str, ...]

    @property
    def is_slow(self) -> bool:
        return self.command.startswith("qwen3conv parity ")


class Ran(NamedTuple):
    output: str
    code: int


def examples_of(text: str) -> list[Example]:
    """Every ``$`` line of the console blocks, in order."""
    found = []
    for block in CONSOLE.findall(text):
        assert block.startswith("$ ")
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *output = part.splitlines()
            found.append(Example(command, tuple(output)))
    return found


EXAMPLES = examples_of(TEXT)


def make_adapter(base: Path, folder: Path) -> None:
    """A LoRA adapter for two modules of each layer of ``base``, as PEFT 0.21 saves one."""
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    tensors = {}
    weights = load_file(base / "model.safetensors")
    for name in (name.removesuffix(".weight") for name in weights if name.endswith(("q_proj.weight", "o_proj.weight"))):
        rows, columns = weights[f"{name}.weight"].shape
        for half, shape in (("A", (4, columns)), ("B", (rows, 4))):
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = torch.full(shape, 0.01)
    save_file(tensors, folder / "adapter_model.safetensors")


class Session:
    """A folder with the examples' models, in which the examples run one after another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "demo"
        self._folder.mkdir()
        demo.make_models(self._folder)
        make_adapter(self._folder / "qwen3", self._folder / "qwen3-adapter")
        (self._folder / "Qwen").mkdir()
        for name in HOLLOW:
            generate(self._folder / "Qwen" / name, name, sparse=True)
        program = folder / "bin" / "qwen3conv"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m qwen3conv "$@"\n')
        program.chmod(0o755)
        self._environment = environment(COLUMNS="100", PATH=f"{program.parent}{os.pathsep}{os.environ['PATH']}")
        self._code = 0
        self._ran: dict[int, Ran] = {}

    def result(self, index: int) -> Ran:
        """What example ``index`` does, after all those before it, slow ones excepted."""
        for before in range(index):
            if before not in self._ran and not EXAMPLES[before].is_slow:
                self._run(before)
        if index not in self._ran:
            self._run(index)
        return self._ran[index]

    def call(self, command: str) -> Ran:
        """Run any command line there. Its two streams come as one."""
        ran = subprocess.run(
            ["bash", "-c", command.replace("$?", str(self._code))],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        return Ran(ran.stdout, ran.returncode)

    def _run(self, index: int) -> None:
        self._ran[index] = self.call(EXAMPLES[index].command)
        self._code = self._ran[index].code


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with scratch() as folder:
        yield Session(folder)


def normalised(output: str, command: str) -> list[str]:
    """Lines without what differs from run to run and from machine to machine."""
    lines = []
    for line in output.splitlines():
        if line.startswith(NOISE):
            continue
        line = re.sub(r"\b[0-9a-f]{32}\b", "DIGEST", line)
        line = re.sub(r" in [\d.]+ s \([\d.]+ \w+/s\)", " in TIME (RATE)", line)
        line = re.sub(r"[\d.]+ \w+ free", "SIZE free", line)
        line = re.sub(r"[\d.]+ MB at the peak, with \d workers?", "SIZE at the peak", line)
        if command.startswith(("qwen3conv parity", "qwen3conv diff")):
            line = re.sub(r"\d+(\.\d+)?e-\d+|\d+\.\d+", "X", line)
        lines.append(" ".join(line.split()))
    return lines


# -- examples ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(index, id=example.command, marks=pytest.mark.slow if example.is_slow else ())
        for index, example in enumerate(EXAMPLES)
    ],
)
def test_an_example_prints_what_the_readme_shows(index: int, session: Session) -> None:
    example, ran = EXAMPLES[index], session.result(index)
    shown = normalised("\n".join(example.output), example.command)
    assert normalised(ran.output, example.command) == shown, (
        "README.md shows something else; if the new output is right: python -m tests.test_readme"
    )
    follows = EXAMPLES[index + 1].command if index + 1 < len(EXAMPLES) else ""
    assert ran.code == 0 or follows == "echo $?", f"exit code {ran.code}, which the README should show"


def test_the_recipe_for_a_fingerprint_gives_the_fingerprint(session: Session) -> None:
    (recipe,) = (block for block in blocks("python") if "qwen3conv" not in block)
    for folder in (demo.DENSE, demo.MOE):
        text = recipe.replace('Path("qwen3")', f'Path("{folder}")')
        assert run_python(session, text) == session.call(f"qwen3conv fingerprint {folder}")


def test_the_lines_of_python_convert(session: Session) -> None:
    (lines,) = (block for block in blocks("python") if "qwen3conv" in block)
    assert run_python(session, lines) == session.call("qwen3conv fingerprint from-python")


def run_python(session: Session, text: str) -> Ran:
    return session.call(f"'{sys.executable}' -P - <<'END'\n{text}\nEND")


@pytest.mark.slow
def test_torchtitan_takes_the_options_of_its_command_line() -> None:
    from torchtitan.config import ConfigManager

    (command,) = (block for block in blocks("sh") if "torchtitan.train" in block)
    words = command.replace("\\\n", " ").replace('"$PWD/qwen3-dcp"', "/here/qwen3-dcp").split()
    config = ConfigManager().parse_args(words[words.index("torchtitan.train") + 1 :])
    assert config.hf_assets_path == "qwen3-dcp/hf_assets"
    assert config.checkpoint.enable
    assert config.checkpoint.initial_load_path == "/here/qwen3-dcp"
    assert config.checkpoint.initial_load_model_only
    assert not config.checkpoint.initial_load_in_hf


def test_commands_in_shell_blocks_are_good_usage(session: Session) -> None:
    """Those that need the hub or a training run are parsed, not run."""
    lines = [line.partition(" #")[0].split() for block in blocks("sh") for line in block.splitlines()]
    commands = [line[1:] for line in lines if line and line[0] == "qwen3conv"]
    named = {"hf-to-dcp", "dcp-to-hf", "inspect", "pull", "push", "train", "ladder", "doctor"}
    assert {words[0] for words in commands} == named
    for name, *rest in commands:
        cli.commands[name].make_context(name, rest)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


# -- tables ------------------------------------------------------------------------------------------------------------


def table(heading: str) -> list[list[str]]:
    """Cells of the first table under a heading, without its title row."""
    section = TEXT.split(f"\n{heading}\n", 1)[1].split("\n#", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows[2:]]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_command_has_a_section_with_an_example() -> None:
    section = TEXT.split("\n## Commands\n", 1)[1].split("\n## ", 1)[0]
    parts = dict(part.split("\n", 1) for part in section.split("\n### ")[1:])
    assert set(parts) == {*cli.commands, "Options of a conversion"}
    assert [name for name in cli.commands if f"qwen3conv {name}" not in parts[name]] == []


def test_every_option_of_a_conversion_is_explained() -> None:
    shown = {word.split()[0] for row in table("### Options of a conversion") for word in quoted(row[0])}
    options = {option for parameter in cli.commands["convert"].params for option in parameter.opts if "--" in option}
    assert shown == options - {"--to", "--json", "--debug", "--dry-run", "--help"}


def test_every_format_is_in_the_table_as_it_is() -> None:
    rows = {name: row for row in table("## Formats") for name in quoted(row[0])}
    assert list(rows) == list(FORMATS)
    for name, row in rows.items():
        assert row[1:3] == ["yes", "yes" if FORMATS[name].writable else "no"]
        assert FORMATS[name].writable or re.search(rf"^- .*`{name}`.* not written", TEXT, re.MULTILINE)


def test_every_schema_of_torchtitan_is_named() -> None:
    section = TEXT.split("\n## Formats\n", 1)[1].split("\n## ", 1)[0]
    assert "T1 to T7" in section
    plain = {f"T{number}" for number in range(1, 8)}
    assert [schema for schema in TITAN_SCHEMAS if schema not in plain and f"`{schema}`" not in section] == []


def kinds(cell: str) -> list[str]:
    """What a row of the refused is about, as its error words it: ``gguf`` and ``onnx`` for ``GGUF, ONNX``."""
    return [kind.split()[0].lower() for kind in cell.split(", ")]


def test_a_file_that_the_table_of_the_refused_names_is_refused_for_that_reason(tmp_path: Path) -> None:
    patterns = [(row, name) for row in table("### Recognised and refused") for name in quoted(row[1])]
    files = [(row, name) for row, name in patterns if re.search(r"[*\[]", name) or name.endswith((".txt", ".pt"))]
    assert len(files) > 20
    for number, (row, pattern) in enumerate(files):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / pattern.replace("[0-9]", "0").replace("*", "0")).touch()
        with pytest.raises(SourceError) as error:
            locate_checkpoint(folder)
        assert any(kind in str(error.value).lower() for kind in kinds(row[0])), (pattern, error.value)


def test_every_kind_of_file_that_is_refused_is_in_the_table() -> None:
    known = [kind for row in table("### Recognised and refused") for kind in kinds(row[0])]
    reasons = {reason for _, reason in (*refusals._ALWAYS, *refusals._WITHOUT_STORE)}
    assert [reason for reason in reasons if not any(kind in reason.lower() for kind in known)] == []


def test_every_policy_is_in_the_table() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "converters").glob("*.py"))
    made = set(re.findall(r"\bPolicy\(\s*\"([a-z-]+)\"", sources))
    assert len(made) > 10
    assert {quoted(row[0])[0] for row in table("### Policies")} == made


def test_the_keys_of_every_json_document_are_listed(session: Session) -> None:
    listed = {command: set(quoted(row[1])) - {"--tensors"} for row in table("### JSON") for command in quoted(row[0])}
    assert set(listed) == set(cli.commands) - {"completion"}
    session.call("rm -rf json-*")
    commands = {
        "hf-to-dcp": "qwen3 json-dcp",
        "dcp-to-hf": "json-dcp json-back",
        "convert": "qwen3 json-fused --to hf-fused",
        "shard": "qwen3 json-ranks --tp 2",
        "reshard": "json-ranks json-more --fsdp 3",
        "merge": "json-more json-merged",
        "plan": "qwen3 json-plan --to titan",
        "inspect": "json-dcp --tensors",
        "fingerprint": "json-dcp",
        "verify": "json-dcp",
        "diff": "qwen3 json-dcp",
        "formats": "",
    }
    for command, arguments in commands.items():
        document = json.loads(session.call(f"qwen3conv {command} {arguments} --json").output)
        assert set(document) == listed[command], command
    keys = ["run", "export", "record", "data", "versions", "device", "ranks", "degrees", "tokens_per_step", "lora"]
    keys += ["run.json", "learning_rate", "rows_left_out", "legs", "shapes", "seconds", "source", "steps"]
    assert listed["train"] == {*keys}  # and see test_native
    assert listed["ladder"] >= {"rungs", "tolerance"}  # and see test_ladder
    simulated = json.loads(session.call("qwen3conv simulate --model 0.6B --json").output)
    suggested = json.loads(session.call("qwen3conv simulate --model 0.6B --suggest --json").output)
    assert listed["simulate"] == {*simulated, *suggested, "--suggest"}
    assert listed["doctor"] == {"usable", "checks"}  # and see test_doctor
    assert listed["runs"] == {"equal", "first_difference", "common_steps", "settings", "exports"}  # and see test_runs
    assert listed["parity"] == {"agrees", *(field.name for field in fields(ParityReport))}
    manifest = json.loads(session.call("cat json-dcp/qwen3conv.json").output)
    assert {key for row in table("### Manifest") for key in quoted(row[0])} == set(manifest)


def test_every_path_that_is_named_exists() -> None:
    paths = re.findall(r"`((?:tests|examples|converters|tools)/[\w/.]*|[A-Z]+\.md|constraints\.txt)`", TEXT)
    assert len(paths) > 3
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_target_of_make_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {target for block in blocks("sh") for target in re.findall(r"^make ([a-z-]+)", block, re.MULTILINE)}
    assert {"demo", "test", "bench"} <= named
    assert [target for target in named if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


# -- new outputs -------------------------------------------------------------------------------------------------------


def rewrite() -> None:
    """Run every example and write what it prints into the README. What is only noise stays as it was."""
    with scratch() as folder:
        running = Session(folder)
        indices = iter(range(len(EXAMPLES)))

        def rewritten(block: re.Match[str]) -> str:
            lines = []
            for index in (next(indices) for _ in examples_of(block[0])):
                command, shown = EXAMPLES[index]
                new = running.result(index).output
                if normalised(new, command) != normalised("\n".join(shown), command):
                    shown = tuple(line for line in new.splitlines() if not line.startswith(NOISE))
                lines += [f"$ {command}", *shown]
            return "\n".join(["```console", *lines, "```"])

        text = CONSOLE.sub(rewritten, TEXT)
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    rewrite()
