"""The README says what is so: its examples are run, its tables and those of docs/ compared with the program."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from examples import demo
from qwen3conv.converters import refusals
from qwen3conv.converters.errors import SourceError
from qwen3conv.converters.formats import FORMATS
from qwen3conv.converters.layouts import TITAN_SCHEMAS
from qwen3conv.converters.location import locate_checkpoint
from qwen3conv.tools.cli.main import cli
from qwen3conv.tools.parity import ParityReport
from tests.pages import DOCS, README, ROOT, Page, Ran, Session, mismatch, session_of

PAGE = Page(README)
EXAMPLES = PAGE.examples
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in (README, *DOCS))
"""What is said anywhere: tables may lie in either."""


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with session_of(PAGE) as running:
        yield running


# -- examples ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(index, id=example.command, marks=pytest.mark.slow if example.is_slow else ())
        for index, example in enumerate(EXAMPLES)
    ],
)
def test_an_example_prints_what_the_readme_shows(index: int, session: Session) -> None:
    follows = EXAMPLES[index + 1].command if index + 1 < len(EXAMPLES) else ""
    differing = mismatch(EXAMPLES[index], session.result(index), follows)
    assert differing is None, f"{differing}\nif the new output is right: python -m tests.pages README.md"


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


def test_commands_in_shell_blocks_are_good_usage() -> None:
    """Those that need the hub or a training run are parsed, not run."""
    texts = [block.replace("\\\n", " ") for block in blocks("sh")]
    lines = [shlex.split(line, comments=True) for text in texts for line in text.splitlines()]
    commands = [line[1:] for line in lines if line and line[0] == "qwen3conv"]
    assert {words[0] for words in commands} >= {"hf-to-dcp", "dcp-to-hf", "pull", "push", "train", "ladder", "doctor"}
    for name, *rest in commands:
        cli.commands[name].make_context(name, rest)


def blocks(language: str) -> list[str]:
    return [block for page in (README, *DOCS) for block in Page(page).blocks(language)]


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
    assert set(parts) == {*cli.commands}
    assert [name for name in cli.commands if f"qwen3conv {name}" not in parts[name]] == []


def test_every_option_of_a_conversion_is_explained() -> None:
    shown = {word.split()[0] for row in table("## Options of a conversion") for word in quoted(row[0])}
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
    patterns = [(row, name) for row in table("## Recognised and refused") for name in quoted(row[1])]
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
    known = [kind for row in table("## Recognised and refused") for kind in kinds(row[0])]
    reasons = {reason for _, reason in (*refusals._ALWAYS, *refusals._WITHOUT_STORE)}
    assert [reason for reason in reasons if not any(kind in reason.lower() for kind in known)] == []


def test_every_policy_is_in_the_table() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "converters").glob("*.py"))
    made = set(re.findall(r"\bPolicy\(\s*\"([a-z-]+)\"", sources))
    assert len(made) > 10
    assert {quoted(row[0])[0] for row in table("## Policies")} == made


def test_the_keys_of_every_json_document_are_listed(session: Session) -> None:
    listed = {command: set(quoted(row[1])) - {"--tensors"} for row in table("## JSON") for command in quoted(row[0])}
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
    modelled = json.loads(session.call("qwen3conv kernel-check --model --shape study --json").output)
    compared = {
        "passes",
        "where",
        "nki",
        "hardware",
        "hidden",
        "expert_hidden",
        "experts",
        "findings",
    }  # and see test_kernel_check
    assert listed["kernel-check"] == {*modelled, *compared, "--model"}
    assert listed["runs"] == {"equal", "first_difference", "common_steps", "settings", "exports"}  # and see test_runs
    assert listed["parity"] == {"agrees", *(field.name for field in fields(ParityReport))}
    manifest = json.loads(session.call("cat json-dcp/qwen3conv.json").output)
    assert {key for row in table("## Manifest") for key in quoted(row[0])} == set(manifest)


def test_every_path_that_is_named_exists() -> None:
    paths = re.findall(r"`((?:tests|examples|converters|tools)/[\w/.]*|[A-Z]+\.md|constraints\.txt)`", TEXT)
    assert len(paths) > 3
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_target_of_make_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {target for block in blocks("sh") for target in re.findall(r"^make ([a-z-]+)", block, re.MULTILINE)}
    assert {"demo", "test", "bench"} <= named
    assert [target for target in named if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []
