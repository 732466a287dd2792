"""Block-wise FP8 is dequantised in float32 and rounded once, as torch and transformers do it.

The truth is torch's ``float32(fp8) * float32(scale)`` per block (``make_fp8``). Two readers of others agree with it:
torch's ``QuantizedHuggingFaceStorageReader``, and transformers, where every block is whole (5.24 takes ragged blocks
for smaller ones: ``integrations/finegrained_fp8.py`` divides rows by blocks).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from qwen3conv.converters.errors import ConversionError, PolicyError, SourceError
from qwen3conv.converters.inspection import inspect
from qwen3conv.converters.quantization import SCALE_SUFFIX
from tests.conversions import convert, differing, fingerprint, load_dcp, policies
from tests.laws.tiny import content_of
from tests.models import make_fp8, once, read_tensors
from tests.real_checkpoints import read_model, save_truth, titan_state_dict

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Make = Callable[..., "Fp8"]
KINDS: dict[str, dict[str, Any]] = {
    "bf16-scales": {"scale_dtype": "bfloat16"},
    "f16-scales": {"scale_dtype": "float16"},
    "f32-scales": {"scale_dtype": "float32"},
    "moe-bf16-scales": {"moe": True, "scale_dtype": "bfloat16"},
    "moe-f32-scales": {"moe": True, "scale_dtype": "float32"},
    "small-blocks": {"block": 48, "scale_dtype": "float32"},
    "sharded": {"max_shard_size": "150KB"},
}
WHOLE_BLOCKS = {"whole-blocks": {"block": 4}, "moe-whole-blocks": {"block": 4, "moe": True}}
"""Every dim is a multiple of the block."""
SOME = ("q_proj", "gate_proj", "down_proj")


class Fp8(NamedTuple):
    """An FP8 folder and the float32 tensors in it."""

    folder: Path
    truth: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Make:
    def build(folder: Path, **options: Any) -> None:
        folder.mkdir()
        save_truth(make_fp8(folder / "model", **options), folder / "truth.safetensors")

    def make(kind: str) -> Fp8:
        options = {**KINDS, **WHOLE_BLOCKS}[kind]
        base = once(tmp_path_factory, f"fp8/{kind}", partial(build, **options))
        return Fp8(base / "model", load_file(base / "truth.safetensors"))

    return make


def stored_in(folder: Path) -> dict[str, torch.Tensor]:
    """What is stored, codes and scales."""
    return read_tensors(folder)


def load_strictly(folder: Path, **options: Any) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    return model


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "BF16", "F32", "F16"])
@pytest.mark.parametrize("kind", [*KINDS, *WHOLE_BLOCKS])
def test_values_are_torchs_bit_for_bit(kind: str, dtype: str | None, fp8: Make, room: Path) -> None:
    wanted = {None: torch.bfloat16, "BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}[dtype]
    convert(fp8(kind).folder, room / "out", "hf", dtype=dtype)
    assert differing(read_tensors(room / "out"), fp8(kind).truth, lambda tensor: tensor.to(wanted)) == []


def test_the_sources_are_what_they_should_be(fp8: Make) -> None:
    """Scales of all dtypes, ragged blocks, and values that a wrong block, or a second rounding, would change."""
    dtypes = set()
    for kind in KINDS:
        stored = stored_in(fp8(kind).folder)
        scales = {name: tensor for name, tensor in stored.items() if name.endswith(SCALE_SUFFIX)}
        quantised = {name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn}
        assert {name.removesuffix(SCALE_SUFFIX) for name in scales} == quantised
        dtypes |= {scale.dtype for scale in scales.values()}
        block = KINDS[kind].get("block", 128)
        assert all(any(size % block for size in stored[name].shape) for name in quantised if SOME[1] in name)
        assert not any("lm_head" in name or "norm" in name or "mlp.gate." in name for name in quantised)
    assert dtypes == {torch.bfloat16, torch.float16, torch.float32}
    truth = fp8("f32-scales").truth
    codes = stored_in(fp8("f32-scales").folder)
    name = "model.layers.0.mlp.gate_proj.weight"
    scale = codes[f"{name}{SCALE_SUFFIX}"]
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: truth[name].shape[0], : truth[name].shape[1]]
    twice = codes[name].bfloat16() * spread.bfloat16()
    assert not torch.equal(twice, truth[name].bfloat16())


def test_torchs_own_reader_of_such_files_agrees(fp8: Make, room: Path) -> None:
    """It needs an index, and float32 for its arithmetic."""
    made = fp8("sharded")
    convert(made.folder, room / "out", "hf", dtype="F32")
    ours = read_tensors(room / "out")
    state = {name: torch.full_like(tensor, float("nan")) for name, tensor in ours.items()}
    reader = QuantizedHuggingFaceStorageReader(str(made.folder), block_size=128)
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert differing(ours, state) == []


@pytest.mark.parametrize("kind", WHOLE_BLOCKS)
def test_transformers_dequantises_to_the_same_model(kind: str, fp8: Make, room: Path) -> None:
    convert(fp8(kind).folder, room / "out", "hf")
    theirs = load_strictly(
        fp8(kind).folder, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.bfloat16
    )
    assert differing(load_strictly(room / "out").state_dict(), theirs.state_dict()) == []


# --- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "name"), [(None, "bfloat16"), ("F32", "float32")])
@pytest.mark.parametrize("kind", ["bf16-scales", "moe-bf16-scales"])
def test_the_output_is_no_longer_called_quantised_and_loads(
    kind: str, dtype: str | None, name: str, fp8: Make, room: Path
) -> None:
    manifest = convert(fp8(kind).folder, room / "out", "hf", dtype=dtype)
    before, after = (json.loads((p / "config.json").read_text()) for p in (fp8(kind).folder, room / "out"))
    assert before.pop("quantization_config")["quant_method"] == "fp8"
    assert after == {**before, "torch_dtype": name}
    assert load_strictly(room / "out").dtype == getattr(torch, name)
    count = sum(tensor.dtype == torch.float8_e4m3fn for tensor in stored_in(fp8(kind).folder).values())
    assert policies(manifest)["dequantise"]["tensors"] == count
    assert not any(file.name.endswith(".partial") for file in room.iterdir())


@pytest.mark.parametrize("kind", ["f16-scales", "moe-f32-scales", "sharded"])
def test_every_format_is_reached_without_a_step_between(kind: str, fp8: Make, room: Path) -> None:
    made = fp8(kind)
    convert(made.folder, room / "hf", "hf")
    for to in ("titan", "hf-fused", "accelerate"):
        convert(made.folder, room / f"direct-{to}", to)
        convert(room / "hf", room / f"by-way-of-hf-{to}", to)
        a, b = content_of(room / f"direct-{to}"), content_of(room / f"by-way-of-hf-{to}")
        # the index of FP8 names scales, on which torchtitan's export would fail: it is not carried
        index = {"hf_assets/model.safetensors.index.json"} if kind == "sharded" else set()
        assert {file for file in {*a, *b} if a.get(file) != b.get(file)} <= index
    hub, config = read_model(room / "hf")
    assert differing(load_dcp(room / "direct-titan"), titan_state_dict("T7", hub, config)) == []


@pytest.mark.parametrize("kind", ["bf16-scales", "moe-f32-scales"])
def test_the_fingerprint_is_that_of_the_bf16_conversion(kind: str, fp8: Make, room: Path) -> None:
    manifest = convert(fp8(kind).folder, room / "hf", "hf")
    assert fingerprint(fp8(kind).folder) == fingerprint(room / "hf") == manifest.fingerprint
    assert fingerprint(fp8(kind).folder, dtype="F32") != manifest.fingerprint


def test_inspect_says_what_it_is_and_what_a_conversion_does(fp8: Make) -> None:
    report = inspect(fp8("moe-bf16-scales").folder)
    assert (report.format, report.complete) == ("hf-fp8", True)
    assert report.dtypes.keys() == {"float8_e4m3fn", "bfloat16"}
    assert any("FP8" in trap and "dequantise" in trap for trap in report.traps)


def test_fp8_is_never_written(fp8: Make, room: Path) -> None:
    for source in ("bf16-scales", "moe-bf16-scales"):
        with pytest.raises(PolicyError, match="hf-fp8 is read, not written"):
            convert(fp8(source).folder, room / "out", "hf-fp8")
    assert list(room.iterdir()) == []


def test_fp16_that_would_overflow_is_refused_by_name(fp8: Make, room: Path) -> None:
    name = "model.layers.1.self_attn.v_proj.weight"
    folder = changed(fp8("f32-scales").folder, room, lambda tensors: tensors[f"{name}_scale_inv"].fill_(200.0))
    with pytest.raises(PolicyError, match=re.escape(name)) as refused:
        convert(folder, room / "out", "hf", dtype="F16")
    assert "65504" in str(refused.value)
    assert not (room / "out").exists()
    convert(folder, room / "out", "hf")


# --- damaged ones -----------------------------------------------------------------------------------------------------


def changed(folder: Path, room: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of a one-file folder with other tensors."""
    copy = shutil.copytree(folder, room / "changed")
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def refusal(folder: Path, room: Path) -> str:
    with pytest.raises(ConversionError) as refused:
        convert(folder, room / "out", "hf")
    assert not (room / "out").exists()
    assert not inspect(folder).complete
    return str(refused.value)


def test_all_missing_and_extra_scales_are_named_at_once(fp8: Make, room: Path) -> None:
    lost = [f"model.layers.{layer}.self_attn.{part}.weight" for layer, part in ((0, "q_proj"), (1, "k_proj"))]
    odd = "model.layers.0.input_layernorm.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in lost:
            del tensors[f"{name}_scale_inv"]
        tensors[f"{odd}_scale_inv"] = torch.ones(2, 1)

    message = refusal(changed(fp8("bf16-scales").folder, room, change), room)
    assert all(f"{name} is F8_E4M3, but has no {name}_scale_inv" in message for name in lost)
    assert f"{odd}_scale_inv has no FP8 tensor" in message


def test_a_lost_scale_of_one_expert_is_named(fp8: Make, room: Path) -> None:
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    folder = changed(fp8("moe-bf16-scales").folder, room, lambda tensors: tensors.pop(f"{name}_scale_inv"))
    assert f"{name} is F8_E4M3, but has no {name}_scale_inv" in refusal(folder, room)


@pytest.mark.parametrize("shape", [(2, 1), (2, 3), (3, 2, 1), ()])
def test_a_scale_of_another_shape_is_named_with_the_shape_it_should_have(
    shape: tuple[int, ...], fp8: Make, room: Path
) -> None:
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"  # of [300, 144] in blocks of 128

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = torch.ones(shape)

    message = refusal(changed(fp8("bf16-scales").folder, room, change), room)
    assert f"{name}: expected shape [3, 2] for blocks of 128x128, found {list(shape)}" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_is_named(value: float, fp8: Make, room: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{name}_scale_inv"][-1, -1] = value

    folder = changed(fp8("f32-scales").folder, room, change)
    with pytest.raises(SourceError, match=re.escape(name)):
        convert(folder, room / "out", "hf")
    assert not (room / "out").exists()


def test_without_its_config_the_blocks_are_not_guessed(fp8: Make, room: Path) -> None:
    copy = shutil.copytree(fp8("bf16-scales").folder, room / "copy")
    config = json.loads((copy / "config.json").read_text())
    del config["quantization_config"]
    (copy / "config.json").write_text(json.dumps(config))
    assert "weight_block_size" in refusal(copy, room)
