"""Rows of text: bad ones are named and left out, and a part can be held out to validate with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qwen3conv.converters.errors import SourceError
from qwen3conv.training.data.rows import Part
from qwen3conv.training.devices import prepare_torchtitan
from tests.models import even_texts, make_tokenizer, saved_model
from tests.training.test_native import train, write_texts

GOOD = [f"the sun {number} and the river" for number in range(40)]
BAD = (b"\xff", b"{", b'{"txt": "x"}', b'{"text": ""}', b'{"text": 5}', b'["text"]')
WHY = ("UTF-8", "not JSON", "only txt", "empty", "no string field", "not a JSON object")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prepare_torchtitan("cpu")
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return folder


def text_loader(folder: Path, source: Path, **config: Any) -> Any:
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    from qwen3conv.training.text import TextDataLoader

    made = TextDataLoader.Config(dataset_path=str(source), infinite=False, **config)
    tokenizer = HuggingFaceTokenizer.Config().build(tokenizer_path=str(folder))
    return made.build(dp_world_size=1, dp_rank=0, tokenizer=tokenizer, seq_len=16, local_batch_size=1)


def batches(loader: Any) -> list[list[int]]:
    return [inputs["input"][0].tolist() for inputs, _ in loader]


def with_bad_rows(path: Path) -> tuple[Path, list[int]]:
    """A file of good rows with bad ones between them, and the lines of the bad ones."""
    rows = [json.dumps({"text": text}).encode() for text in GOOD]
    lines = [3 * number + 2 for number in range(len(BAD))]
    for line, row in zip(lines, BAD, strict=True):
        rows.insert(line - 1, row)
    path.write_bytes(b"\n".join(rows) + b"\n")
    return path, lines


def test_bad_texts_are_all_named_by_line_and_left_out_when_asked(folder: Path, tmp_path: Path) -> None:
    path, lines = with_bad_rows(tmp_path / "rows.jsonl")
    with pytest.raises(SourceError, match="--on-bad-row skip") as refused:
        text_loader(folder, path)
    for line, why in zip(lines, WHY, strict=True):
        assert any(f"rows.jsonl:{line}: " in told and why in told for told in str(refused.value).splitlines()), why
    loader = text_loader(folder, path, on_bad_row="skip")
    assert len(loader.bad_rows) == len(BAD)
    assert batches(loader) == batches(text_loader(folder, write_texts(tmp_path / "good.jsonl", GOOD)))


def test_a_table_with_rows_without_text_names_them_too(folder: Path, tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list([{"text": text} for text in [*GOOD[:4], None, "", *GOOD[4:]]]).to_parquet(tmp_path / "t.parquet")
    with pytest.raises(SourceError, match=r"row 5: no string field 'text'(.|\n)*row 6: text is empty"):
        text_loader(folder, tmp_path / "t.parquet")
    loader = text_loader(folder, tmp_path / "t.parquet", on_bad_row="skip")
    assert batches(loader) == batches(text_loader(folder, write_texts(tmp_path / "good.jsonl", GOOD)))


def test_rows_none_of_which_is_a_text_are_refused(folder: Path, tmp_path: Path) -> None:
    path = write_texts(tmp_path / "rows.jsonl", [""])
    with pytest.raises(SourceError, match=r"no usable row(.|\n)*rows.jsonl:1: text is empty"):
        text_loader(folder, path, on_bad_row="skip")


def test_a_held_out_part_and_the_rest_are_the_whole_and_copies_stay_together(folder: Path, tmp_path: Path) -> None:
    from qwen3conv.training.data.loader import ChatDataLoader

    path = write_texts(tmp_path / "rows.jsonl", [*GOOD, *GOOD[:20]])

    def documents(**config: Any) -> list[tuple[int, ...]]:
        made = ChatDataLoader.Config(source=str(path), tokenizer_path=str(folder), infinite=False, **config)
        rows = ChatDataLoader(made, dp_world_size=1, dp_rank=0, seq_len=64, local_batch_size=1).dataset.rows
        return [tuple(rows.document(number).tokens) for number in range(len(rows))]

    whole = documents()
    trained, held_out = documents(validation_fraction=0.3), documents(validation_fraction=0.3, held_out=True)
    assert not set(trained) & set(held_out)
    assert sorted([*trained, *held_out]) == sorted(whole)
    part = Part(0.3, held_out=True)
    assert sum(part.has({"text": f"row {number}"}, "text") for number in range(4000)) == pytest.approx(1200, rel=0.1)
    loader = text_loader(folder, path, validation_fraction=0.3)
    kept = write_texts(
        tmp_path / "kept.jsonl", [text for text in [*GOOD, *GOOD[:20]] if encoded(folder, text) in trained]
    )
    assert batches(loader) == batches(text_loader(folder, kept))


def encoded(folder: Path, text: str) -> tuple[int, ...]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_a_part_that_leaves_nothing_is_refused(folder: Path, tmp_path: Path, fraction: float) -> None:
    from qwen3conv.training.data.loader import ChatDataLoader

    held_out = fraction < 0.5
    source = str(write_texts(tmp_path / "rows.jsonl", GOOD))
    config = ChatDataLoader.Config(
        source=source, tokenizer_path=str(folder), validation_fraction=fraction, held_out=held_out
    )
    words = "no row is held out to validate with" if held_out else "no row is left to train on"
    with pytest.raises(SourceError, match=words):
        ChatDataLoader(config, dp_world_size=1, dp_rank=0, seq_len=64, local_batch_size=1)


def test_the_part_is_asked_for_once_and_does_not_change(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from qwen3conv.converters.errors import PolicyError
    from qwen3conv.tools.training_run import check_data
    from qwen3conv.training.launch import Run

    model, rows = saved_model(tmp_path_factory, "dense"), write_texts(tmp_path / "rows.jsonl", GOOD)
    shown = train(model, rows, tmp_path / "run", "--validation-fraction", 0.2, "--on-bad-row", "skip", "--print").stdout
    assert "--dataloader.validation_fraction 0.2 " in shown
    assert f"--validator.dataloader.source {rows} --validator.dataloader.validation_fraction 0.2 " in shown
    assert "--validator.enable --validator.dataloader.held_out" in shown
    both = train(model, rows, tmp_path / "run", "--validation-fraction", 0.2, "--validation", rows, code=1).stderr
    assert "--validation and --validation-fraction" in both
    check_data(Run(tmp_path / "run", str(rows), validation_fraction=0.2))
    (tmp_path / "run" / "checkpoint" / "step-2").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint" / "step-2" / ".metadata").touch()
    check_data(Run(tmp_path / "run", str(rows), validation_fraction=0.2))
    for fraction in (None, 0.3):
        with pytest.raises(PolicyError, match=r"was trained with --validation-fraction 0\.2 so far"):
            check_data(Run(tmp_path / "run", str(rows), validation_fraction=fraction))


@pytest.mark.slow
def test_two_ranks_validate_as_one_does(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = saved_model(tmp_path_factory, "dense")
    rows = write_texts(tmp_path / "rows.jsonl", even_texts(model, 64, 48))
    common: tuple[object, ...] = ("--validation-fraction", 0.25, "--validate-every", 2, "--no-export")

    def losses(folder: Path) -> dict[str, float]:
        steps = json.loads((folder / "run.json").read_text())["steps"]
        return {step: found["validation_loss"] for step, found in steps.items() if "validation_loss" in found}

    # the same weights on the same held-out rows, whatever the ranks: before training has moved anything
    still: tuple[object, ...] = (*common, "--learning_rate", "0.0")
    train(model, rows, tmp_path / "one", *still, steps=2)
    train(model, rows, tmp_path / "two", *still, "--fsdp", 2, "--local-batch-size", 1, steps=2)
    train(model, rows, tmp_path / "tp", *still, "--tp", 2, steps=2)
    assert list(losses(tmp_path / "one")) == ["1", "2"]
    for other in ("two", "tp"):
        assert losses(tmp_path / other) == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
