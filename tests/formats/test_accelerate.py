"""Accelerate's FSDP checkpoints: read as accelerate 1.15 writes them, and written so that it and torch load them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from qwen3conv.converters.detection import open_checkpoint
from qwen3conv.converters.errors import SourceError
from qwen3conv.converters.inspection import inspect
from tests.conversions import convert, differing, fingerprint, load_dcp, policies
from tests.laws.tiny import content_of
from tests.models import read_tensors, saved_model
from tests.real_checkpoints import RealCheckpoint, ranked_session

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing")

Variant = Callable[[str], Path]
NAMES = {"accelerate": "dense", "accelerate-moe": "moe"}
"""Checkpoints of four ranks and the variants that they started from."""
WRITTEN = ["dense", "dense-tied", "dense-tied-head-stored", "moe", "moe-fp32"]


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Variant:
    return lambda name: saved_model(tmp_path_factory, name)


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RealCheckpoint]:
    return ranked_session(tmp_path_factory)


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["", "pytorch_model_fsdp_0"])
@pytest.mark.parametrize("name", NAMES)
def test_what_accelerate_saved_is_read_from_either_folder(
    name: str, inner: str, ranked: dict[str, RealCheckpoint], variant: Variant, room: Path
) -> None:
    """Experts, which transformers 5 holds fused, come out one by one as on the hub."""
    folder = ranked[name].folder / inner
    report = inspect(folder)
    assert (report.format, report.complete, report.problems) == ("accelerate", True, ())
    convert(folder, room / "hf", "hf", like=variant(NAMES[name]))
    assert differing(read_tensors(room / "hf"), ranked[name].tensors()) == []
    model, info = AutoModelForCausalLM.from_pretrained(room / "hf", output_loading_info=True)
    assert not any(info.values())
    assert model.dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_the_fingerprint_is_that_of_the_model_in_float32(
    name: str, ranked: dict[str, RealCheckpoint], variant: Variant
) -> None:
    assert fingerprint(ranked[name].folder) == fingerprint(variant(NAMES[name]), dtype="F32")


@pytest.mark.parametrize("name", NAMES)
def test_it_becomes_the_torchtitan_checkpoint_that_its_source_becomes(
    name: str, ranked: dict[str, RealCheckpoint], variant: Variant, room: Path
) -> None:
    convert(ranked[name].folder, room / "a", "titan", like=variant(NAMES[name]))
    convert(variant(NAMES[name]), room / "b", "titan", dtype="F32")
    a, b = content_of(room / "a"), content_of(room / "b")
    assert [file for file in sorted({*a, *b}) if a.get(file) != b.get(file)] == []


def test_the_optimizers_folder_is_not_taken_for_a_model(ranked: dict[str, RealCheckpoint]) -> None:
    with pytest.raises(SourceError, match="no model tensors, only optimizer"):
        open_checkpoint(ranked["accelerate"].folder / "optimizer_0")


# --- writing ----------------------------------------------------------------------------------------------------------


def in_memory(folder: Path) -> dict[str, torch.Tensor]:
    """State dict of transformers' model, which keeps a tied head under both names."""
    state: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return state


def poisoned(folder: Path, dtype: Any = "auto") -> Any:
    """The model of a folder with every parameter NaN."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    return model


@pytest.mark.parametrize("name", WRITTEN)
def test_names_and_bits_are_those_of_the_model_in_memory(name: str, variant: Variant, room: Path) -> None:
    convert(variant(name), room / "dcp", "accelerate")
    expected = {f"model.{key}": tensor for key, tensor in in_memory(variant(name)).items()}
    assert differing(load_dcp(room / "dcp"), expected) == []


@pytest.mark.parametrize("name", WRITTEN)
def test_torch_loads_it_strictly_into_transformers_model(name: str, variant: Variant, room: Path) -> None:
    convert(variant(name), room / "dcp", "accelerate")
    model = poisoned(variant(name))
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=room / "dcp", no_dist=True)
    model.load_state_dict(state["model"], strict=True)
    assert differing(model.state_dict(), in_memory(variant(name))) == []


@pytest.mark.parametrize("name", NAMES)
def test_its_metadata_nests_like_accelerates_own(
    name: str, ranked: dict[str, RealCheckpoint], variant: Variant, room: Path
) -> None:
    """The state dict sits in ``{"model": ...}``, which whoever loads without a model to fill gets to see."""
    convert(variant(NAMES[name]), room / "dcp", "accelerate")
    ours, theirs = (
        dcp.FileSystemReader(folder).read_metadata().planner_data
        for folder in (room / "dcp", ranked[name].folder / "pytorch_model_fsdp_0")
    )
    assert ours == theirs
    assert theirs["model.model.norm.weight"] == ("model", "model.norm.weight")


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_accelerates_own_merge_takes_it(name: str, variant: Variant, room: Path) -> None:
    from accelerate.utils import merge_fsdp_weights

    convert(variant(name), room / "pytorch_model_fsdp_0", "accelerate")
    merge_fsdp_weights(str(room / "pytorch_model_fsdp_0"), str(room / "merged"))
    (file,) = (room / "merged").glob("*.safetensors")
    assert differing(load_file(file), in_memory(variant(name))) == []  # what `accelerate merge-weights` leaves


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one, which accelerate and FSDP2 ask for."""
    from accelerate import PartialState

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    PartialState._reset_state()
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["dense", "dense-tied", "moe"])
def test_accelerate_loads_it_into_a_model_under_fsdp(name: str, variant: Variant, room: Path) -> None:
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils.fsdp_utils import load_fsdp_model

    convert(variant(name), room / "pytorch_model_fsdp_0", "accelerate")
    model = poisoned(variant(name))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    plugin.set_state_dict_type()
    load_fsdp_model(plugin, PartialState(cpu=True), model, str(room))
    found = {key: value.full_tensor() for key, value in model.state_dict().items()}
    assert differing(found, in_memory(variant(name))) == []


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_the_form_of_transformers_4_has_one_expert_per_tensor(name: str, variant: Variant, room: Path) -> None:
    convert(variant(name), room / "dcp", "accelerate-per-expert")
    expected = {f"model.{key}": tensor for key, tensor in read_tensors(variant(name)).items()}
    assert differing(load_dcp(room / "dcp"), expected) == []
    assert inspect(room / "dcp").format == ("accelerate" if name == "dense" else "accelerate-per-expert")


@pytest.mark.parametrize("name", ["dense-tied", "dense-tied-head-stored"])
def test_a_tied_head_is_stored_once_under_both_names(name: str, variant: Variant, room: Path) -> None:
    manifest = convert(variant(name), room / "dcp", "accelerate")
    assert "tied-head" in policies(manifest)
    places = dcp.FileSystemReader(room / "dcp").read_metadata().storage_data
    embedding, head = (
        next((info.relative_path, info.offset) for index, info in places.items() if index.fqn == fqn)
        for fqn in ("model.model.embed_tokens.weight", "model.lm_head.weight")
    )
    assert embedding == head
    convert(room / "dcp", room / "back", "hf")
    a, b = content_of(room / "back"), content_of(variant(name))
    assert [file for file in sorted({*a, *b}) if a.get(file) != b.get(file)] == []
