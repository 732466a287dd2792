"""A model there and back, Hugging Face -> torchtitan DCP -> Hugging Face, with the proof that nothing changed.

    make demo                          two small models made on the spot: dense with tied embeddings, and MoE
    make demo MODEL=Qwen/Qwen3-0.6B    a model of the hub, or a folder
    make demo ARGS="--keep demo"       the same, and the models stay in demo/

Everything is done by public commands, each shown as it can be typed. The exit code is 0 only if every step succeeded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
DENSE, MOE = "qwen3", "qwen3-moe"
VOCABULARY = 1024
"""Rows of the embeddings of both models; their tokenizer has at most as many tokens."""


class StepFailed(Exception):
    """A step did not do what it promises; the message is for the user."""


class Done(NamedTuple):
    """A row of the table at the end."""

    model: str
    step: str
    result: str
    seconds: float


def main() -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(description="Convert a model there and back, and prove that nothing changed.")
    parser.add_argument("--model", metavar="MODEL", help="a hub id such as Qwen/Qwen3-0.6B, or a folder")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="work there and leave everything in place")
    options = parser.parse_args()
    if options.keep is not None and options.keep.exists() and not (options.keep.is_dir() and empty(options.keep)):
        parser.error(f"{options.keep} exists and is not an empty folder: remove it, or name another")
    try:
        with workplace(options.keep) as folder:
            Demo(folder).run(options.model)
    except StepFailed as failure:
        print(f"demo failed: {failure}", file=sys.stderr)
        return 1
    except ImportError as error:
        print(f"demo failed: {error}; it needs qwen3conv with the [train] extra", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo interrupted", file=sys.stderr)
        return 130
    return 0


def empty(folder: Path) -> bool:
    """Whether nothing is in ``folder``."""
    return not any(folder.iterdir())


@contextmanager
def workplace(keep: Path | None) -> Iterator[Path]:
    """The folder to work in: ``keep``, or one that is gone afterwards."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="qwen3conv-demo-") as name:
        yield Path(name)


class Demo:
    """The steps, in ``folder``, and what came of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.console = Console(highlight=False)
        self.done: list[Done] = []
        self.model = ""

    def run(self, model: str | None) -> None:
        """Do all of it with ``model``, or with two models of our own."""
        self.console.print("Hugging Face to torchtitan DCP and back, and the proof that nothing changed.")
        self.console.print(Text(f"The commands run in {self.folder}"), soft_wrap=True)
        if model:
            place = Path(model).expanduser()
            self.there_and_back(str(place.resolve()) if place.exists() else model, short_name(model))
        else:
            begun = time.monotonic()
            make_models(self.folder)
            self.done.append(Done("both", "make them", "saved by transformers", time.monotonic() - begun))
            self.there_and_back(DENSE, DENSE)
            self.there_and_back(MOE, MOE)
            self.train(DENSE)
        self.summary()

    def train(self, model: str) -> None:
        """Train ``model`` for a few steps with torchtitan, and look at what came out."""
        self.model = model
        write_texts(self.folder / "text.jsonl")
        self.console.print(Text(f"\n{model}, trained", style="bold"))
        words = ("train", "--from", model, "--data", "text.jsonl", "--output", f"{model}-run", "--recipe", "tiny")
        self.command(*words, shows=(f"{model}-run: step", "The trained"), result="trained", logs=True)
        self.command("inspect", f"{model}-run/export", shows=("format", "complete"), result="whole")

    def there_and_back(self, source: str, name: str) -> None:
        """Convert ``source`` (a folder or a hub id) to DCP and back, and prove every step."""
        self.model = name
        dcp, back = f"{name}-dcp", f"{name}-back"
        self.console.print(Text(f"\n{name}", style="bold"))
        self.command("hf-to-dcp", source, dcp, shows=("bytes", "tied-head", "expert-bias-zero"), result="written")
        seen = self.command("inspect", dcp, shows=("format", "stored", "complete"), result="whole")
        if not any(line.split() == ["complete", "yes"] for line in seen):
            raise StepFailed(f"inspect does not say that {dcp} is complete")
        (before,) = self.command("fingerprint", source, result="taken")
        (after,) = self.command("fingerprint", dcp, result="equal")
        if before != after:
            raise StepFailed(f"the fingerprint of {source} is {before}, that of {dcp} is {after}")
        self.command("dcp-to-hf", dcp, back, shows=("bytes",), result="written")
        self.command("diff", source, back, result="the same")
        self.command("verify", back, result="verified")
        self.command("parity", source, dcp, shows=("logits", "top token"), result="logits agree")

    def command(self, *words: str, result: str, shows: tuple[str, ...] = ("",), logs: bool = False) -> list[str]:
        """Run one command and show it, with the first line of its output that begins so, for each of ``shows``.

        ``logs`` says that it writes a log, which is shown when it fails. Returns all lines of its output.
        """
        self.console.print(Text(f"$ python -m qwen3conv {' '.join(words)}"), soft_wrap=True)
        begun = time.monotonic()
        # Warnings and progress go to stderr, which is the terminal's.
        ran = subprocess.run(
            [sys.executable, "-m", "qwen3conv", *words],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if logs else None,
            text=True,
            env={**os.environ, "COLUMNS": "100"},
        )
        lines = ran.stdout.splitlines()
        if ran.returncode != 0:
            for line in [*lines, *(ran.stderr or "").splitlines()[-40:]]:
                self.console.print(Text(f"  {line}"), soft_wrap=True)
            why = f"signal {-ran.returncode}, too little memory?" if ran.returncode < 0 else f"exit {ran.returncode}"
            raise StepFailed(f"{words[0]} of {words[1]} ended with {why}")
        self.done.append(Done(self.model, words[0], result, time.monotonic() - begun))
        for start in shows:
            found = next((line.strip() for line in lines if line.strip().startswith(start)), None)
            if found is not None:
                self.console.print(Text(f"  {found}", style="dim"), soft_wrap=True)
        return lines

    def summary(self) -> None:
        """The table at the end."""
        table = Table(box=None, padding=(0, 2, 0, 0))
        for title in ("MODEL", "STEP", "RESULT"):
            table.add_column(title)
        table.add_column("SECONDS", justify="right")
        model = ""
        for row in self.done:
            table.add_row(row.model if row.model != model else "", row.step, row.result, f"{row.seconds:.1f}")
            model = row.model
        self.console.print()
        self.console.print(table)
        total = sum(row.seconds for row in self.done)
        self.console.print(f"All {len(self.done)} steps succeeded in {total:.0f} s.")


def short_name(model: str) -> str:
    """A name for folders: ``qwen3-0.6b`` for ``Qwen/Qwen3-0.6B@main``."""
    return Path(model.partition("@")[0]).resolve().name.lower() or "model"


def make_models(folder: Path) -> None:
    """Save a dense Qwen3 with tied embeddings and a Qwen3-MoE, each with a tokenizer, as transformers saves them.

    Both have more heads * head_dim than hidden size, as the released models do; weights are random and the same each
    time.
    """
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "initializer_range": 0.05,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "dtype": torch.bfloat16,
    }
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
    tokenizer = make_tokenizer(VOCABULARY)
    torch.manual_seed(0)
    dense = transformers.Qwen3Config(**sizes, intermediate_size=448, tie_word_embeddings=True)
    moe = transformers.Qwen3MoeConfig(**sizes, **experts, tie_word_embeddings=False)
    save(transformers.Qwen3ForCausalLM(dense), tokenizer, folder / DENSE)
    save(transformers.Qwen3MoeForCausalLM(moe), tokenizer, folder / MOE)


def write_texts(file: Path) -> None:
    """Four hundred rows to train on."""
    texts = (f"{number} and {number} are {2 * number}" for number in range(400))
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a model in bfloat16. Norms get values of their own: all ones would hide one taken for another."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer(rows: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most ``rows`` tokens, trained on this project's own texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=rows,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [path.read_text(encoding="utf-8") for path in sorted([*ROOT.glob("*.md"), Path(__file__)])]
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")


if __name__ == "__main__":
    sys.exit(main())
