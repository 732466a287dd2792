"""Every command, by its own declared options: what is left out or misspelt is a usage error that names it."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from qwen3conv.tools.cli.main import cli
from qwen3conv.tools.cli.values import Place

pytestmark = pytest.mark.torch_free


def commands() -> Iterator[tuple[str, click.Command]]:
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        yield name, command


def required() -> Iterator[tuple[str, str]]:
    for name, command in commands():
        for parameter in command.params:
            if parameter.required:
                yield name, parameter.name or ""


def takers() -> Iterator[tuple[str, str]]:
    """Options whose type can refuse a word; a place that is not there is refused later, with exit code 1."""
    for name, command in commands():
        for option in command.params:
            free = (click.types.StringParamType, click.types.UnprocessedParamType, click.Path, Place)
            if isinstance(option, click.Option) and not option.is_flag and not isinstance(option.type, free):
                yield name, option.opts[-1]


def words(command: click.Command, without: str = "") -> list[str]:
    """All required parameters of ``command`` but one, with some value."""
    found: list[str] = []
    for parameter in command.params:
        if parameter.required and parameter.name != without:
            value = "hf" if parameter.name == "to" else f"some-{parameter.name}"
            found += [parameter.opts[-1], value] if isinstance(parameter, click.Option) else [value]
    return found


@pytest.mark.parametrize(("name", "missing"), list(required()))
def test_a_required_parameter_left_out_is_named(name: str, missing: str) -> None:
    command = dict(commands())[name]
    parameter = next(p for p in command.params if p.name == missing)
    result = CliRunner().invoke(cli, [name, *words(command, without=missing)], prog_name="qwen3conv")
    assert result.exit_code == 2, result.output
    shown = (
        parameter.opts[-1] if isinstance(parameter, click.Option) else parameter.make_metavar(click.Context(command))
    )
    assert "Missing" in result.output
    assert shown.strip("[]") in result.output


@pytest.mark.parametrize(("name", "option"), list(takers()))
def test_a_word_that_an_option_does_not_know_is_a_usage_error(name: str, option: str) -> None:
    command = dict(commands())[name]
    result = CliRunner().invoke(cli, [name, *words(command), option, "no=such=thing"], prog_name="qwen3conv")
    assert result.exit_code == 2, result.output
    assert option in result.output


@pytest.mark.parametrize(
    "name", [name for name, command in commands() if not command.context_settings.get("ignore_unknown_options")]
)
def test_an_option_that_does_not_exist_is_a_usage_error(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--no-such-option"], prog_name="qwen3conv")
    assert result.exit_code == 2
    assert "--no-such-option" in result.output
