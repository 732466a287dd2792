"""``train --lora-rank``: adapters are trained, come out as PEFT loads them, and merged; the model stays what it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.adapters import quiet, with_adapter
from tests.conversions import differing
from tests.models import even_texts, once, read_tensors, saved_model
from tests.training.test_native import for_two_ranks, run, steps_of, write_texts

STEPS = 4
RANK = 4
TOLERANCE = 1e-4


def train(source: Path, data: Path, output: Path, *more: object, steps: int = STEPS, code: int = 0) -> Any:
    base = ["train", "--from", source, "--data", data, "--output", output, "--recipe", "tiny", "--device", "cpu"]
    adapters = ["--lora-rank", RANK, "--learning-rate", 3e-3]
    return run(*base, *adapters, "--steps", steps, "--lr_scheduler.total_steps", STEPS, *more, code=code)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory, "dense-tied")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory, "moe-trainable")


@pytest.fixture(scope="module")
def texts(dense: Path) -> list[str]:
    return even_texts(dense, 64, 2) * 12


@pytest.fixture(scope="module")
def data(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("data") / "text.jsonl", texts)


@pytest.fixture(scope="module")
def trained(dense: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def build(folder: Path) -> None:
        train(dense, data, folder / "run", "--dtype", "float32")

    return once(tmp_path_factory, "lora-trained", build) / "run"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(40)[None]).logits
        return found


def test_peft_loads_the_adapter_and_computes_what_the_merged_export_does(trained: Path, dense: Path) -> None:
    from transformers import AutoModelForCausalLM

    with quiet():
        merged = logits(AutoModelForCausalLM.from_pretrained(trained / "export", dtype=torch.float32))
        before = logits(AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32))
    beside = logits(with_adapter(dense, trained / "adapter", torch.float32))
    assert (merged - before).abs().max() > 1e-3  # it learned something
    assert (merged - beside).abs().max() < 1e-5  # float32, added up in another order
    config = json.loads((trained / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], len(config["target_modules"])) == (RANK, 2.0 * RANK, 7)


def test_everything_but_the_adapted_matrices_stays_bit_for_bit(trained: Path, dense: Path) -> None:
    after, before = read_tensors(trained / "export"), read_tensors(dense)
    changed = {name for name in before if not torch.equal(after[name], before[name].float())}
    assert changed == {name for name in before if name.endswith("_proj.weight")}


def test_the_loss_falls_and_the_record_says_what_was_trained(trained: Path) -> None:
    found = steps_of(trained)
    assert found[str(STEPS)][0] < found["1"][0]
    record = json.loads((trained / "run.json").read_text())
    assert (record["lora"]["rank"], record["lora"]["alpha"]) == (RANK, 2.0 * RANK)


def test_a_moe_gets_adapters_of_its_attention(moe: Path, data: Path, tmp_path: Path) -> None:
    said = train(moe, data, tmp_path / "run", "--lora-targets", "q_proj,gate_proj", steps=1, code=1)
    assert "gate_proj: expected some of q_proj, k_proj, v_proj, o_proj (experts get no adapters" in said.stderr
    train(moe, data, tmp_path / "run", "--lora-targets", "o_proj, q_proj", "--lora-alpha", 1, steps=2)
    tensors = read_tensors(tmp_path / "run" / "adapter")
    assert {name.split(".")[-3] for name in tensors} == {"q_proj", "o_proj"}
    logits(with_adapter(moe, tmp_path / "run" / "adapter", torch.float32))


@pytest.mark.parametrize(
    ("flags", "words", "code"),
    [
        (["--backend", "transformers"], "--lora-rank is for --backend native", 1),
        (["--lora-targets", "q_proj,v_proj"], "k_proj and v_proj together", 1),
        (["--lora-targets", "lm_head"], "--lora-targets lm_head: expected some of", 1),
    ],
)
def test_what_has_no_adapters_is_refused(
    flags: list[str], words: str, code: int, dense: Path, data: Path, tmp_path: Path
) -> None:
    assert words in train(dense, data, tmp_path / "run", *flags, code=code).stderr
    assert not (tmp_path / "run").exists()


def test_a_run_does_not_go_on_with_other_adapters_or_none(trained: Path, dense: Path, data: Path) -> None:
    for flags in (["--lora-rank", 8], ["--lora-alpha", 3], ["--lora-targets", "q_proj"]):
        assert "with other adapters or none" in train(dense, data, trained, *flags, code=1).stderr
    base = ["train", "--from", dense, "--data", data, "--output", trained, "--recipe", "tiny"]
    assert "with other adapters or none" in run(*base, code=1).stderr
    assert "give --lora-rank" in run(*base, "--lora-alpha", 2, code=2).stderr


def test_what_is_exported_can_be_chosen(trained: Path, dense: Path, data: Path, tmp_path: Path) -> None:
    """Of a run that has no step left, so that nothing is trained."""
    shutil.copytree(trained, tmp_path / "run")
    for choice, expected in (("none", set()), ("adapter", {"adapter"}), ("merged", {"adapter", "export"})):
        for name in ("adapter", "export", "exports"):
            shutil.rmtree(tmp_path / "run" / name, ignore_errors=True)
        ended = train(dense, data, tmp_path / "run", "--export", choice, "--export-every", STEPS, "--dtype", "float32")
        assert "no step is left to train" in ended.stderr
        assert {name for name in ("adapter", "export") if (tmp_path / "run" / name).is_dir()} == expected
        on_the_way = {path.name for path in (tmp_path / "run").glob("exports/*")}
        assert on_the_way == {f"{'step' if name == 'export' else name}-{STEPS}" for name in expected}
    assert differing(read_tensors(tmp_path / "run" / "export"), read_tensors(trained / "export")) == []
    base = ["train", "--from", dense, "--data", data, "--output", tmp_path / "new", "--recipe", "tiny"]
    assert "give --lora-rank" in run(*base, "--export", "adapter", code=2).stderr
    assert "--no-export is --export none" in run(*base, "--export", "merged", "--no-export", code=2).stderr


@pytest.mark.slow
def test_a_run_goes_on_where_it_stopped_and_on_more_ranks(
    trained: Path, dense: Path, data: Path, tmp_path: Path
) -> None:
    """The first factor begins at random, other numbers on other meshes, so both meshes go on from one first step."""
    train(dense, data, tmp_path / "run", "--no-export", steps=1)
    shutil.copytree(tmp_path / "run", tmp_path / "tp")
    train(dense, data, tmp_path / "run", "--no-export")
    assert steps_of(tmp_path / "run") == steps_of(trained)
    train(dense, data, tmp_path / "tp", "--tp", 2, "--no-export")
    for step, found in steps_of(trained).items():
        assert steps_of(tmp_path / "tp")[step] == pytest.approx(found, rel=TOLERANCE), step


@pytest.mark.slow
def test_fsdp_ranks_begin_with_the_loss_of_one_and_export_one_adapter(
    trained: Path, dense: Path, texts: list[str], tmp_path: Path
) -> None:
    data = write_texts(tmp_path / "text.jsonl", for_two_ranks(texts))
    train(dense, data, tmp_path / "run", "--fsdp", 2, "--local-batch-size", 1, "--batch-size", 2)
    whole, shared = steps_of(trained), steps_of(tmp_path / "run")
    assert shared["1"][0] == pytest.approx(whole["1"][0], rel=TOLERANCE)
    assert shared[str(STEPS)][0] < shared["1"][0]
    ours, theirs = (read_tensors(folder / "adapter") for folder in (tmp_path / "run", trained))
    assert {name: t.shape for name, t in ours.items()} == {name: t.shape for name, t in theirs.items()}
