"""A small Qwen3 of transformers, fine-tuned on chats, exported, and asked again with transformers.

What the examples ``train_native.py``, ``train_transformers.py`` and ``train_nki_moe.py`` share: they differ in a model
and a backend. The same commands with ``--from Qwen/Qwen3-8B --tp 4 --fsdp 16`` are for a trn2.48xlarge; they were not
run there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from demo import make_models

TEMPLATE = """{% for message in messages %}{{ message['role'] }}
{{ message['content'] }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}assistant
{% endif %}"""
PAIRS = {"sun": "moon", "river": "stone", "bird": "tree", "cloud": "rain"}


def write_chats(path: Path) -> None:
    """Four questions, each with one answer."""
    with path.open("w", encoding="utf-8") as file:
        for asked, answer in PAIRS.items():
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")


def run(*words: str | Path) -> None:
    """Show and run a command of qwen3conv."""
    print("$ qwen3conv", *words, flush=True)
    subprocess.run([sys.executable, "-m", "qwen3conv", *map(str, words)], check=True, stderr=subprocess.DEVNULL)


def ask(folder: Path) -> dict[str, str]:
    """What the model in ``folder`` answers, with its own chat template."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    answers = {}
    for asked in PAIRS:
        messages = [{"role": "user", "content": asked}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        made = model.generate(**prompt, max_new_tokens=8, do_sample=False)
        answers[asked] = tokenizer.decode(made[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    return answers


def main(model: str, backend: str) -> int:
    """Make, train, export and ask in the folder that the command line names; 0 when all answers were learned."""
    if len(sys.argv) > 1:
        return fine_tune(Path(sys.argv[1]), model, backend)
    with tempfile.TemporaryDirectory() as name:
        return fine_tune(Path(name), model, backend)


def fine_tune(folder: Path, model: str, backend: str) -> int:
    """The same in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    make_models(folder)
    source, data, output = folder / model, folder / "chats.jsonl", folder / "run"
    (source / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    write_chats(data)
    flags = ["--recipe", "tiny_sft", "--steps", "40", "--seq-len", "128", "--local-batch-size", "4", "--no-packing"]
    run("train", "--backend", backend, "--from", source, "--data", data, "--output", output, *flags)
    run("inspect", output / "export")
    answers = ask(output / "export")
    for asked, answer in answers.items():
        print(f"{asked} -> {answer}")
    return 0 if answers == PAIRS else 1
