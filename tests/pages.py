"""The examples of README.md and of the pages in docs/: run where small models lie, and written anew.

``python -m tests.pages [FILE...]`` writes outputs as they are now into these files, or into all of them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from examples import demo
from qwen3conv.tools.generate import generate
from tests.cli.conftest import environment
from tests.hub_server import Hub, client_environment, serve_hub
from tests.laws.tiny import scratch

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCS = tuple(sorted((ROOT / "docs").glob("*.md")))

_CONSOLE = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)

_NOISE = ("converting: ", "reading: ", "comparing: ", "Warning: the output takes ")
"""Lines that come or not as the machine is slow, or short of disk."""

_HOLLOW = ("Qwen3-4B-Instruct-2507", "Qwen3-30B-A3B")
"""Released models of the examples, made with headers alone."""

_SLOW = ("qwen3conv parity ", "qwen3conv train ", "qwen3conv ladder ", "qwen3conv doctor", "torchrun ", "python ")


class Example(NamedTuple):
    """A command line of a page and what is printed under it."""

    command: str
    output: tuple[str, ...]

    @property
    def is_slow(self) -> bool:
        """Whether it takes more than some seconds."""
        return self.command.startswith(_SLOW)


class Ran(NamedTuple):
    """What a command line printed, both streams as one, and its exit code."""

    output: str
    code: int


@dataclass(frozen=True)
class Page:
    """A Markdown file."""

    path: Path

    @property
    def text(self) -> str:
        """All of it."""
        return self.path.read_text(encoding="utf-8")

    @property
    def examples(self) -> list[Example]:
        """Every ``$`` line of its console blocks, in order."""
        return _examples(self.text)

    @property
    def needs_hub(self) -> bool:
        """Whether its examples are run beside a hub on this machine, which serves the models as ``me/...``."""
        return self.path.name == "hub.md"

    def blocks(self, language: str) -> list[str]:
        """Its code blocks of a language."""
        return re.findall(rf"^```{language}\n(.*?)^```", self.text, re.DOTALL | re.MULTILINE)


def _examples(text: str) -> list[Example]:
    found = []
    for block in _CONSOLE.findall(text):
        assert block.startswith("$ "), block
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *output = part.splitlines()
            found.append(Example(command, tuple(output)))
    return found


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
    """A folder with the examples' models, in which the examples of a page run one after another."""

    def __init__(self, page: Page, folder: Path, hub: Hub | None = None) -> None:
        self._examples = page.examples
        self._folder = folder / "demo"
        self._folder.mkdir()
        demo.make_models(self._folder)
        demo.write_texts(self._folder / "text.jsonl")
        make_adapter(self._folder / "qwen3", self._folder / "qwen3-adapter")
        if "Qwen/" in page.text:
            (self._folder / "Qwen").mkdir()
            for name in _HOLLOW:
                generate(self._folder / "Qwen" / name, name, sparse=True)
        (self._folder / "examples").symlink_to(ROOT / "examples")
        programs = folder / "bin"
        programs.mkdir()
        for name, words in (("qwen3conv", "-P -m qwen3conv"), ("python", "-P")):
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
            (programs / name).chmod(0o755)
        more: Mapping[str, str] = {}
        if hub is not None:
            for name in ("qwen3", "qwen3-moe"):
                hub.add(f"me/{name}", self._folder / name)
            more = client_environment(hub, folder / "hf-home")
            (folder / "hf-home").mkdir()
            (folder / "hf-home" / "token").write_text("hf_of_this_page")  # logged in, as `hf auth login` does it
        paths = (str(programs), str(Path(sys.executable).parent), os.environ["PATH"])
        self._environment = environment(COLUMNS="100", PATH=os.pathsep.join(paths), **more)
        self._code = 0
        self._ran: dict[int, Ran] = {}

    def result(self, index: int, *, with_slow: bool = False) -> Ran:
        """What example ``index`` does, after all those before it, slow ones excepted."""
        for before in range(index):
            if before not in self._ran and (with_slow or not self._examples[before].is_slow):
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
            timeout=600,
        )
        return Ran(ran.stdout, ran.returncode)

    def _run(self, index: int) -> None:
        self._ran[index] = self.call(self._examples[index].command)
        self._code = self._ran[index].code


@contextmanager
def session_of(page: Page) -> Iterator[Session]:
    """A session in a folder that is gone afterwards."""
    with ExitStack() as stack:
        folder = stack.enter_context(scratch())
        hub = stack.enter_context(serve_hub()) if page.needs_hub else None
        yield Session(page, folder, hub)


def normalised(output: str, command: str) -> list[str]:
    """Lines without what differs from run to run and from machine to machine."""
    lines = []
    for line in output.splitlines():
        if line.startswith(_NOISE):
            continue
        line = re.sub(r"\b[0-9a-f]{40}\b", "COMMIT", line)
        line = re.sub(r"\b[0-9a-f]{32}\b", "DIGEST", line)
        line = re.sub(r"http://127.0.0.1:\d+", "HUB", line)
        line = re.sub(r" in [\d.]+ s \([\d.]+ \w+/s\)", " in TIME (RATE)", line)
        line = re.sub(r"\bin [\d.]+ s\b", "in TIME", line)
        line = re.sub(r"[\d.]+ \w+ free", "SIZE free", line)
        line = re.sub(r"\([\d,]+ bytes\)", "(N bytes)", line)  # the tokenizer of the models is not always the same
        line = re.sub(r"[\d.]+ MB at the peak, with \d workers?", "SIZE at the peak", line)
        line = re.sub(r"'generated_text': .*", "TEXT", line)
        if command.startswith("qwen3conv doctor"):
            line = re.sub(r"\d[\w.+]*", "X", line)
        if command.startswith(
            ("qwen3conv parity", "qwen3conv diff", "qwen3conv train", "qwen3conv runs", "qwen3conv ladder")
        ):
            line = re.sub(r"\d+(\.\d+)?e[-+]\d+|\d+\.\d+", "X", line)
        if command.startswith("qwen3conv kernel-check --emulate"):
            line = re.sub(r"\d\.\de-\d+ +\d\.\de-\d+ +ok .*", "X X ok", line)
        lines.append(" ".join(line.split()))
    return lines


def mismatch(example: Example, ran: Ran, follows: str) -> str | None:
    """What differs between a page and the program, if anything does."""
    shown = normalised("\n".join(example.output), example.command)
    printed = normalised(ran.output, example.command)
    if printed != shown:
        return f"$ {example.command}\nshown:\n{chr(10).join(shown)}\nprinted:\n{chr(10).join(printed)}"
    if ran.code != 0 and follows != "echo $?":
        return f"$ {example.command}: exit code {ran.code}, which the page should show"
    return None


def rewrite(page: Page) -> None:
    """Run every example and write what it prints into the page. What is only noise stays as it was."""
    examples, text = page.examples, page.text
    with session_of(page) as running:
        indices = iter(range(len(examples)))

        def rewritten(block: re.Match[str]) -> str:
            lines = []
            for index in (next(indices) for _ in _examples(block[0])):
                command, shown = examples[index]
                new = running.result(index, with_slow=True).output
                if normalised(new, command) != normalised("\n".join(shown), command):
                    shown = tuple(line for line in new.splitlines() if not line.startswith(_NOISE))
                lines += [f"$ {command}", *shown]
            return "\n".join(["```console", *lines, "```"])

        text = _CONSOLE.sub(rewritten, text)
    page.path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else (README, *DOCS):
        rewrite(Page(path.resolve()))
