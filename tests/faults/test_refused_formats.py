"""What is recognised and not read: refused by its name, with the next step, whether files, config or tensors tell.

The folders hold the files that each tool writes, by the names it gives them; what is in them is not read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from qwen3conv.converters.boxes import TensorSpec
from qwen3conv.converters.detection import open_checkpoint
from qwen3conv.converters.errors import ConversionError, MappingError, SourceError
from qwen3conv.converters.geometry import Geometry
from qwen3conv.converters.location import locate_checkpoint
from qwen3conv.converters.parameters import logical_parameters
from qwen3conv.converters.stores.dcp_writing import arrange_dcp
from tests.faults.conftest import DENSE, MOE, Run, convert, write_source
from tests.faults.kill_at import snapshot
from tests.laws.tiny import write_tiny

pytestmark = pytest.mark.torch_free

HUB_FILES = ("config.json", "tokenizer.json", "generation_config.json")


def make(folder: Path, names: Iterable[str]) -> Path:
    """A folder with files of these names; one that ends in ``/`` is a folder."""
    for name in names:
        path = folder / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"{}" if name.endswith(".json") else b"\0" * 16)
    return folder


def write_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """A safetensors folder of zeros with these names."""
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, object] = {}
    end = 0
    for name, shape in shapes.items():
        size = 2
        for dim in shape:
            size *= dim
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(end))
    return folder


def write_dcp(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """A DCP folder of zeros with these names."""
    folder.mkdir(parents=True)
    arrangement = arrange_dcp([TensorSpec(n, "BF16", s) for n, s in shapes.items()], file_bytes=10**6)
    for file in arrangement.files:
        with open(folder / file.name, "wb") as out:
            out.truncate(file.size)
            for at, content in file.seals():
                out.seek(at)
                out.write(content)
    for name, content in arrangement.trailers():
        (folder / name).write_bytes(content)
    return folder


def shapes_of(geometry: Geometry, **renamed: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model, parts of the names replaced."""
    found = dict(logical_parameters(geometry, tied=False))
    for old, new in renamed.items():
        found = {name.replace(old, new): shape for name, shape in found.items()}
    return found


def refusal(folder: Path, kind: type[ConversionError] = SourceError) -> str:
    """The message of opening and of converting ``folder``, which say the same and change nothing."""
    before = snapshot(folder.parent)
    with pytest.raises(kind) as caught:
        open_checkpoint(folder)
    with pytest.raises(kind) as again:
        convert(folder, folder.parent / "out", "titan")
    assert str(again.value) == str(caught.value)
    assert snapshot(folder.parent) == before
    return str(caught.value)


# -- by the names of files ---------------------------------------------------------------------------------------------

FILES: dict[str, tuple[tuple[str, ...], str, str]] = {
    "GGUF": (("Qwen3-8B-Q4_K_M.gguf", "README.md"), "GGUF", "original Hugging Face folder"),
    "GGUF with a config": (("model.gguf", *HUB_FILES), "GGUF", "original Hugging Face folder"),
    "ONNX": (("model.onnx", "model.onnx_data", *HUB_FILES), "ONNX", "original Hugging Face folder"),
    "ONNX in a subfolder": (("onnx/model.onnx", "onnx/model.onnx_data", *HUB_FILES), "ONNX", "original"),
    "a .pth": (("consolidated.00.pth", "params.json"), "pickled", "safetensors"),
    "a .ckpt": (("last.ckpt",), "pickled", "safetensors"),
    "a .pt": (("model.pt",), "pickled", "safetensors"),
    "an adapter": (("adapter_config.json", "adapter_model.safetensors", "README.md"), "LoRA adapter", "merge-lora"),
    "an adapter beside a model": (
        ("adapter_config.json", "adapter_model.safetensors", "model.safetensors", *HUB_FILES),
        "LoRA adapter",
        "merge-lora",
    ),
    "an adapter without config": (("adapter_model.safetensors",), "LoRA adapter", "merge-lora"),
    "Megatron-Core": (
        (".metadata", "__0_0.distcp", "common.pt", "metadata.json"),
        "Megatron",
        "Megatron-Bridge",
    ),
    "Megatron's folder": (
        ("iter_0000100/.metadata", "iter_0000100/common.pt", "latest_checkpointed_iteration.txt"),
        "Megatron",
        "Megatron-Bridge",
    ),
    "Megatron's folder without its note": (("iter_0000100/mp_rank_00/model.pt",), "Megatron", "Megatron-Bridge"),
    "Megatron-Bridge": (
        ("iter_0000100/run_config.yaml", "iter_0000100/common.pt", "latest_train_state.pt"),
        "Megatron",
        "Megatron-Bridge",
    ),
    "Megatron's older form": (
        ("mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt"),
        "Megatron",
        "Megatron-Bridge",
    ),
    "DeepSpeed": (
        ("global_step500/zero_pp_rank_0_mp_rank_00_optim_states.pt", "latest", "zero_to_fp32.py", "rng_state_0.pth"),
        "DeepSpeed",
        "zero_to_fp32.py",
    ),
    "DeepSpeed's step": (
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"),
        "DeepSpeed",
        "zero_to_fp32.py",
    ),
    "DeepSpeed ZeRO 3's step": (
        ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
        "DeepSpeed",
        "zero_to_fp32.py",
    ),
    "DeepSpeed universal": (
        ("zero/model.norm.weight/fp32.pt", "zero/model.norm.weight/exp_avg.pt", "mp_rank_00_model_states.pt"),
        "DeepSpeed",
        "zero_to_fp32.py",
    ),
    "FSDP1 local": (
        ("pytorch_model_fsdp_rank0.bin", "pytorch_model_fsdp_rank1.bin"),
        "FSDP1 local",
        "SHARDED_STATE_DICT",
    ),
    "FSDP1 local of accelerate": (
        ("pytorch_model_fsdp_0_rank0.bin", "pytorch_model_fsdp_0_rank1.bin", "optimizer.bin"),
        "FSDP1 local",
        "SHARDED_STATE_DICT",
    ),
    "verl's folder": (
        ("global_step_50/actor/model_world_size_1_rank_0.pt", "latest_checkpointed_iteration.txt"),
        "verl",
        "model_world_size_",
    ),
    "verl's step": (
        ("actor/model_world_size_1_rank_0.pt", "actor/huggingface/config.json", "data.pt"),
        "holds no checkpoint itself",
        "actor does",
    ),
    "torchtune": (("hf_model_0001_0.pt", "hf_model_0002_0.pt"), "torchtune", "safetensors"),
    "torchtune's recipe state": (("recipe_state/recipe_state.pt",), "torchtune", "safetensors"),
    "torchtune's adapter": (("adapter_0.pt",), "torchtune", "PEFT"),
    "torch_checkpointing": (("model_0.pt", "model_1.pt", "metadata"), "torch_checkpointing", "checkpoint instead"),
    "Flax": (("flax_model.msgpack", *HUB_FILES), "Flax", "safetensors"),
    "TensorFlow": (("tf_model.h5", *HUB_FILES), "TensorFlow", "safetensors"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_known_format_is_refused_by_its_name_with_the_next_step(case: str, place: Path) -> None:
    names, said, step = FILES[case]
    text = refusal(make(place / "given", names))
    assert said in text
    assert step in text
    assert str(place / "given") in text
    assert "\n" not in text


@pytest.mark.parametrize("case", ["GGUF", "DeepSpeed", "an adapter", "Megatron-Core", "torchtune"])
def test_the_command_line_says_the_same(case: str, place: Path, command: Run) -> None:
    make(place / "given", FILES[case][0])
    for words in (["hf-to-dcp", "given", "out"], ["dcp-to-hf", "given", "out"], ["inspect", "given"]):
        ended = command(*words, code=1)
        assert ended.stdout == ""
        assert ended.stderr.startswith("Error: given holds ")
        assert FILES[case][1] in ended.stderr
        assert ended.stderr.count("\n") == 1
    assert [path.name for path in place.iterdir()] == ["given"]


# -- by the folder's shape ---------------------------------------------------------------------------------------------


def test_an_empty_folder_is_told_what_was_expected(place: Path) -> None:
    text = refusal(make(place / "given", ["./"]))
    assert "found nothing" in text
    assert all(word in text for word in ("model.safetensors", ".metadata", "shard-*"))


def test_a_folder_of_other_things_is_told_what_was_found(place: Path) -> None:
    text = refusal(make(place / "given", [f"photo-{i}.jpg" for i in range(20)]))
    assert "photo-0.jpg" in text
    assert "12 more" in text


def test_a_folder_of_steps_names_the_latest(place: Path) -> None:
    for step in (5, 40, 100):
        write_source(place / "given" / f"step-{step}", "titan")
    assert f"the latest is {place / 'given' / 'step-100'}" in refusal(place / "given")


@pytest.mark.parametrize("name", ["checkpoint-500", "epoch_0", "epoch_2_step_99/model", "my model"])
def test_a_folder_around_a_checkpoint_names_it(name: str, place: Path) -> None:
    write_source(place / "given" / name, "titan")
    assert f"{place / 'given' / name} does" in refusal(place / "given")


def test_two_stores_in_one_folder_are_ambiguous(place: Path) -> None:
    write_source(place / "given", "titan")
    write_source(place / "more", "hf")
    for path in (place / "more").iterdir():
        if path.name != "hf_assets":
            path.rename(place / "given" / path.name)
    text = refusal(place / "given")
    assert "ambiguous" in text
    assert "Hugging Face" in text
    assert "DCP" in text


def test_torchs_shards_beside_a_consolidated_model_are_ambiguous(place: Path) -> None:
    write_source(place / "given", "titan")
    make(place / "given", ["shard-00001-model-00001-of-00001.safetensors"])
    assert "ambiguous" in refusal(place / "given")


def test_what_is_read_is_not_refused_for_what_lies_beside_it(place: Path) -> None:
    """A Trainer's folder holds optimizer pickles, a hub folder a GGUF or an ONNX subfolder."""
    write_source(place / "given", "titan")
    make(place / "given", ["optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin", "x.gguf"])
    make(place / "given", ["global_step500/zero_pp_rank_0.pt", "zero_to_fp32.py", "onnx/model.onnx", "iter_5/"])
    assert open_checkpoint(place / "given").format == "hf"
    assert locate_checkpoint(place / "given") == (place / "given", "safetensors")


# -- by config ---------------------------------------------------------------------------------------------------------

CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "GPTQ": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "GPTQ"),
    "AWQ": ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "AWQ"),
    "bitsandbytes": ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
    "bitsandbytes by its switch": ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes"),
    "compressed-tensors": ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
    "ModelOpt": ({"quantization_config": {"quant_method": "modelopt"}}, "ModelOpt"),
    "MXFP4": ({"quantization_config": {"quant_method": "mxfp4"}}, "MXFP4"),
    "MLX": ({"quantization": {"group_size": 64, "bits": 4}}, "MLX"),
    "FP8 per tensor": ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size"),
    "Qwen2": ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, "Qwen2"),
    "Qwen2-MoE": ({"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"]}, "Qwen2"),
    "Qwen3-Next": ({"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}, "Qwen3-Next"),
    "Qwen3.5": ({"model_type": "qwen3_5", "architectures": ["Qwen3_5ForCausalLM"]}, "Qwen3.5"),
    "Qwen3-VL": ({"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"]}, "Qwen3-VL"),
    "Qwen3-VL-MoE": ({"model_type": "qwen3_vl_moe", "vision_config": {}}, "Qwen3-VL"),
    "Qwen3-Omni": ({"model_type": "qwen3_omni_moe", "thinker_config": {}}, "Qwen3-Omni"),
    "another model": ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "'llama' is not read"),
    "a backbone": ({"architectures": ["Qwen3Model"]}, "embedding model"),
    "a classifier": ({"architectures": ["Qwen3ForSequenceClassification"]}, "reranker or classifier"),
    "biases": ({"attention_bias": True}, "attention_bias"),
    "sliding windows": ({"use_sliding_window": True}, "sliding window"),
    "a shared expert": ({"shared_expert_intermediate_size": 512}, "shared experts"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_of_something_else_is_refused_by_its_name(case: str, place: Path) -> None:
    change, said = CONFIGS[case]
    path = write_source(place / "given", "titan") / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    text = refusal(place / "given")
    assert said in text
    assert str(path) in text


def test_a_mark_of_modelopt_is_enough(place: Path) -> None:
    (write_source(place / "given", "titan") / "hf_quant_config.json").write_text("{}")
    assert "ModelOpt" in refusal(place / "given")


@pytest.mark.parametrize("change", [{"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}])
def test_dense_layers_between_moe_layers_are_refused(change: dict[str, object], place: Path) -> None:
    path = write_source(place / "given", "titan") / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert "dense layers between MoE layers" in refusal(place / "given")


# -- by the names of tensors, with no config to tell -------------------------------------------------------------------

FUSED = "model.layers.0.mlp.experts"
TENSORS: dict[str, tuple[dict[str, tuple[int, ...]], str, str]] = {
    "GPTQ": ({"model.layers.0.mlp.up_proj.qweight": (1,), "model.layers.0.mlp.up_proj.g_idx": (1,)}, "GPTQ", "from"),
    "AWQ": ({"model.layers.0.mlp.up_proj.qweight": (1,), "model.layers.0.mlp.up_proj.qzeros": (1,)}, "AWQ", "from"),
    "bitsandbytes": ({"model.layers.0.mlp.up_proj.weight.absmax": (1,)}, "bitsandbytes", "from"),
    "bitsandbytes 4 bit": (
        {"model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4": (1,)},
        "bitsandbytes",
        "from",
    ),
    "compressed-tensors": ({"model.layers.0.mlp.up_proj.weight_packed": (1,)}, "compressed-tensors", "from"),
    "NVFP4": ({"model.layers.0.mlp.up_proj.weight_scale_2": (1,)}, "ModelOpt", "from"),
    "MXFP4": ({"model.layers.0.mlp.experts.gate_up_proj_blocks": (1,)}, "MXFP4", "from"),
    "MLX": ({"model.layers.0.mlp.up_proj.biases": (1,), "model.layers.0.mlp.up_proj.scales": (1,)}, "MLX", "from"),
    "NeMo Automodel": (
        {f"{FUSED}.gate_and_up_projs": (2, 4, 6), f"{FUSED}.down_projs": (2, 3, 4)},
        "NeMo Automodel",
        "consolidation",
    ),
    "LoRA": ({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": (2, 4)}, "LoRA", "merge"),
    "Megatron": (
        {"decoder.layers.self_attention.linear_qkv.weight": (1, 8, 4), "decoder.final_layernorm.weight": (4,)},
        "Megatron",
        "Megatron-Bridge",
    ),
    "Megatron under a prefix": ({"model.decoder.layers.mlp.linear_fc1.weight": (1, 8)}, "Megatron", "Megatron-Bridge"),
    "FSDP1": ({"model.layers.0._fsdp_wrapped_module._flat_param": (9,)}, "FSDP1", "FULL_STATE_DICT"),
    "torchtune": ({"layers.0.attn.output_proj.weight": (4, 4), "layers.0.sa_norm.scale": (4,)}, "torchtune", "safe"),
    "Qwen2": ({"model.layers.0.self_attn.q_proj.bias": (4,)}, "Qwen2", "not read"),
    "Qwen3-Next": ({"model.layers.0.linear_attn.in_proj_qkvz.weight": (4, 4)}, "Qwen3-Next", "not read"),
    "a shared expert": ({"model.layers.0.mlp.shared_expert.up_proj.weight": (4, 4)}, "shared experts", "not read"),
    "VL": ({"model.visual.patch_embed.proj.weight": (4, 4)}, "vision-language", "not read"),
    "VL by its language model": ({"model.language_model.norm.weight": (4,)}, "vision-language", "not read"),
    "Omni": ({"thinker.audio_tower.conv.weight": (4,)}, "audio", "not read"),
    "vLLM": ({"model.layers.0.self_attn.qkv_proj.weight": (4, 4)}, "vLLM", "made from"),
    "vLLM's experts": ({"model.layers.0.mlp.experts.w13_weight": (2, 4, 4)}, "vLLM", "made from"),
    "a reranker": ({"score.weight": (1, 4)}, "reranker", "not read"),
    "a reward model": ({"v_head.summary.weight": (1, 4)}, "reward", "not read"),
}


@pytest.mark.parametrize("alone", [False, True], ids=["in-a-model", "alone"])
@pytest.mark.parametrize("store", ["safetensors", "dcp"])
@pytest.mark.parametrize("case", TENSORS)
def test_foreign_tensors_are_refused_by_the_name_of_what_has_them(
    case: str, store: str, alone: bool, place: Path
) -> None:
    shapes, said, step = TENSORS[case]
    shapes = shapes if alone else {**shapes_of(DENSE), **shapes}
    text = refusal((write_dcp if store == "dcp" else write_tensors)(place / "given", shapes))
    assert said in text
    assert step in text
    assert str(place / "given") in text


def test_a_backbone_without_prefix_is_refused_as_an_embedding_model(place: Path) -> None:
    """As Qwen3-Embedding-0.6B is stored: its config says Qwen3ForCausalLM."""
    names = {n.removeprefix("model."): s for n, s in shapes_of(DENSE).items() if n != "lm_head.weight"}
    write_tiny(place / "given", DENSE, tied=True)
    write_tensors(place / "given", names)
    assert "Qwen3-Embedding" in refusal(place / "given")


def test_names_of_no_known_model_are_listed(place: Path) -> None:
    text = refusal(write_tensors(place / "given", {"conv1.weight": (3, 3), "bn1.weight": (3,)}), MappingError)
    assert "conv1.weight" in text
    assert "no Qwen3 layout" in text


def test_only_optimizer_state_is_no_model(place: Path) -> None:
    shapes = {f"optimizer.state.{name}.exp_avg": shape for name, shape in shapes_of(DENSE).items()}
    assert "only optimizer" in refusal(write_dcp(place / "given", shapes))


def test_the_fused_experts_of_vl_are_not_taken_for_transposed_ones_of_a_moe(place: Path) -> None:
    """The same names with the last two dims exchanged: nothing is guessed from shapes."""
    shapes = {n: s for n, s in shapes_of(MOE).items() if ".experts." not in n}
    shapes |= {f"{FUSED}.gate_up_proj": (2, 4, 6), f"{FUSED}.down_proj": (2, 3, 4)}
    assert "down_proj" in refusal(write_tensors(place / "given", shapes), MappingError)
