"""``upgrade`` between torchtitan 0.2.2 itself and 0.3.0: each goes on with the other's run.

Needs 0.2.2 in a folder of its own, beside the 0.3.0 that is installed: ``make test-slow`` puts it there.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from qwen3conv.converters.detection import open_checkpoint
from tests.conversions import convert
from tests.models import saved_model
from tests.older_release import RELEASE, run_older
from tests.titan_resume import SAVED, STEPS, go_on, losses, step_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not RELEASE.is_dir(), reason="torchtitan 0.2.2 is not there: make test-slow"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing"),
]

MODELS = ("dense", "dense-tied", "moe-trainable")
SCHEMA = "T2"
REST = [str(step) for step in range(SAVED + 1, STEPS + 1)]
TOLERANCE = {"moe-trainable": 5e-4}
"""Relative, of losses and gradient norms, where it is not 2e-5: on the CPU 0.3.0 multiplies experts in bfloat16, 0.2.2
in float32. Measured: 3e-4. From step 3 to 4 they change by 3e-3 and 1e-1."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each model trained by either release, and each run carried on by the other after an upgrade."""
    base = tmp_path_factory.mktemp("releases")
    sources = {model: saved_model(tmp_path_factory, model) for model in MODELS}
    for model, source in sources.items():
        run_older(RELEASE, source, base / f"{model}-0.2", steps=STEPS, interval=SAVED)
        convert(step_folder(base, f"{model}-0.2", SAVED), base / f"{model}-up", "titan", optimizer="default")
    starts = {f"{model}-0.3": [source] for model, source in sources.items()}
    starts |= {f"{model}-0.2-0.3": [source, base / f"{model}-up"] for model, source in sources.items()}
    go_on(base / "new", starts)
    for model, source in sources.items():
        down = step_folder(base, f"{model}-0.3-0.2", SAVED)
        down.parent.mkdir(parents=True)
        saved = step_folder(base / "new", f"{model}-0.3", SAVED)
        convert(saved, down, "titan", titan_schema=SCHEMA, optimizer="default")
        run_older(RELEASE, source, base / f"{model}-0.3-0.2", steps=STEPS, interval=SAVED)
    return base


def test_the_two_releases_are_the_ones_meant() -> None:
    assert importlib.metadata.version("torchtitan") == "0.3.0"
    found = [*importlib.metadata.distributions(name="torchtitan", path=[str(RELEASE)])]
    assert [one.version for one in found] == ["0.2.2"]


@pytest.mark.parametrize("model", MODELS)
def test_what_0_2_saved_is_of_the_schema_we_say(model: str, runs: Path) -> None:
    checkpoint = open_checkpoint(step_folder(runs, f"{model}-0.2", SAVED))
    assert (checkpoint.format, checkpoint.layout.schema) == ("titan", SCHEMA)


@pytest.mark.parametrize("model", MODELS)
def test_0_3_goes_on_with_a_run_of_0_2(model: str, runs: Path) -> None:
    whole = json.loads((runs / f"{model}-0.2" / "losses.json").read_text())
    rest = losses(runs / "new", f"{model}-0.2-0.3")
    assert list(rest) == REST
    assert {step: pytest.approx(whole[step], rel=TOLERANCE.get(model, 2e-5)) for step in REST} == rest


@pytest.mark.parametrize("model", MODELS)
def test_0_2_goes_on_with_a_run_of_0_3(model: str, runs: Path) -> None:
    whole = losses(runs / "new", f"{model}-0.3")
    rest = json.loads((runs / f"{model}-0.3-0.2" / "losses.json").read_text())
    assert list(rest) == REST
    assert {step: pytest.approx(whole[step], rel=TOLERANCE.get(model, 2e-5)) for step in REST} == rest
