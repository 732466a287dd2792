"""A run that is sent to the hub and goes on elsewhere, with torchtitan on the CPU and a hub on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import HubClient
from tests.hub_server import serve_hub
from tests.models import even_texts, saved_model

STEPS = 4


def losses(folder: Path) -> dict[str, float]:
    steps = json.loads((folder / "run.json").read_text())["steps"]
    return {step: found["loss"] for step, found in steps.items()}


@pytest.mark.slow
def test_a_state_from_the_hub_goes_on_as_the_run_would_have(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Two steps, sent, two more elsewhere: bit for bit what four steps are. On two ranks, to 2e-4."""
    model = saved_model(tmp_path_factory, "dense-tied")
    texts = even_texts(model, 64, 24)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with serve_hub() as hub:
        client = HubClient(hub, tmp_path)
        hub.add("Qwen/Tiny", model)
        common = ["--data", "data.jsonl", "--recipe", "tiny", "--device", "cpu", "--no-export"]
        common += ["--lr_scheduler.total_steps", str(STEPS), "--batch-size", "4"]

        def train(*words: str, steps: int) -> None:
            client.run("train", *words, "--steps", str(steps), *common, HF_TOKEN="hf_good", OMP_NUM_THREADS="1")

        train("--from", "Qwen/Tiny", "--output", "whole", steps=STEPS)
        train("--from", "Qwen/Tiny", "--output", "begun", steps=2)
        client.run("push", "begun", "me/run", "--state", HF_TOKEN="hf_good")
        train("--resume", "me/run@step-2", "--output", "same", steps=STEPS)
        train("--resume", "me/run@latest", "--output", "tp2", "--tp", "2", steps=STEPS)
        source = json.loads((tmp_path / "same" / "source" / "qwen3conv.json").read_text())["source"]
        assert (source["hub"], source["commit"]) == ("Qwen/Tiny", hub.repositories["Qwen/Tiny"].refs["main"])
    whole = losses(tmp_path / "whole")
    assert losses(tmp_path / "same") == whole
    assert losses(tmp_path / "tp2") == pytest.approx(whole, rel=2e-4)
    assert len(set(whole.values())) == STEPS
