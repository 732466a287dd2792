"""The Python that a kernel may be written in, so that NKI 0.6's parser and 0.7's tracer both take it.

Source: AWS Neuron 2.32, NKI 0.6.0 documentation, kernel language. Checked in the kernel's own source and in that of
the plain functions of its module or package that it names, before anything runs.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from qwen3conv.converters.errors import enumerate_problems

from .errors import CallError

_REFUSED: dict[type[ast.AST], str] = {
    ast.Try: "try",
    ast.TryStar: "try",
    ast.Lambda: "lambda",
    ast.Yield: "a generator",
    ast.YieldFrom: "a generator",
    ast.GeneratorExp: "a generator",
    ast.Is: "`is`",
    ast.IsNot: "`is not`",
    ast.Await: "await",
    ast.Global: "global",
    ast.Nonlocal: "nonlocal",
}


def check_source(function: Callable[..., Any]) -> None:
    """Raise CallError naming every construct outside the subset, with its line."""
    problems: list[str] = []
    seen: set[Callable[..., Any]] = set()
    waiting = [function]
    while waiting:
        now = waiting.pop()
        if now in seen:
            continue
        seen.add(now)
        try:
            lines, first = inspect.getsourcelines(now)
        except (OSError, TypeError):  # typed at a prompt, or built by exec
            continue
        tree = ast.parse(textwrap.dedent("".join(lines)))
        problems += [f"{now.__name__}, line {first + line - 1}: {what}" for line, what in _problems(tree)]
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        called = (now.__globals__.get(name) for name in sorted(names))
        waiting += [f for f in called if inspect.isfunction(f) and _are_together(f, now)]
    if problems:
        raise CallError(enumerate_problems(f"kernel {function.__name__} leaves NKI's subset of Python:", problems))


def _are_together(function: Callable[..., Any], other: Callable[..., Any]) -> bool:
    mine, theirs = function.__module__, other.__module__
    package = theirs.rpartition(".")[0]
    return mine == theirs or (bool(package) and mine.rpartition(".")[0] == package)


def _problems(tree: ast.AST) -> Iterator[tuple[int, str]]:
    line = 1
    for node in ast.walk(tree):
        line = getattr(node, "lineno", line)
        if type(node) in _REFUSED:
            yield line, _REFUSED[type(node)]
        elif isinstance(node, ast.With) and not all(_is_no_reorder(item.context_expr) for item in node.items):
            yield line, "with, other than nl.no_reorder()"
        elif isinstance(node, ast.arguments) and node.kwonlyargs:
            yield line, "keyword-only parameters"


def _is_no_reorder(expression: ast.expr) -> bool:
    return ast.unparse(expression) == "nl.no_reorder()"
