"""``completion``: the script that teaches a shell to complete qwen3conv's commands, options and formats."""

from __future__ import annotations

import click

from .command import Command


@click.command(cls=Command, example='eval "$(qwen3conv completion bash)"')
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Shell completion: print the script for a shell.

    Put the example into the shell's start-up file.
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    root = ctx.find_root()
    name = root.info_name or "qwen3conv"
    click.echo(kind(root.command, {}, name, f"_{name}_COMPLETE".replace("-", "_").upper()).source())
