"""Checkpoints that are recognised and not read, each by its name and with the next step: by names of files and tensors.

What config.json gives away is in ``config_refusals``, quantisation in ``quantization``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from .errors import SourceError

_PICKLED = "pickled PyTorch weights, which are not read: load them where they come from and save them as safetensors"
_MEGATRON = "a Megatron checkpoint: export it to Hugging Face with Megatron-Bridge first"
_DEEPSPEED = "a DeepSpeed checkpoint: run DeepSpeed's zero_to_fp32.py with --safe_serialization first"
_TORCHTUNE = (
    "torchtune's own .pt files, which are not read: let its checkpointer write safetensors, and name that epoch_N"
)
_LORA = "a LoRA adapter, not a whole model: add it to its base with `qwen3conv merge-lora BASE ADAPTER DST`"

_ALWAYS: tuple[tuple[str, str], ...] = (
    ("adapter_config.json", _LORA),
    ("common.pt", _MEGATRON),
)
"""Files that decide, whatever lies beside them."""

_WITHOUT_STORE: tuple[tuple[str, str], ...] = (
    ("global_step_[0-9]*", "training steps of verl: name the folder of one whose files are model_world_size_*"),
    ("latest_checkpointed_iteration.txt", _MEGATRON),
    ("iter_[0-9]*", _MEGATRON),
    ("mp_rank_[0-9]*_model_states.pt", _DEEPSPEED),
    ("mp_rank_[0-9]*", _MEGATRON),
    ("zero_pp_rank_*", _DEEPSPEED),
    ("global_step[0-9]*", _DEEPSPEED),
    ("zero_to_fp32.py", _DEEPSPEED),
    ("*.gguf", "GGUF, a quantised single-file format: convert the original Hugging Face folder instead"),
    ("*.onnx", "ONNX: convert the original Hugging Face folder instead"),
    ("adapter_model.*", _LORA),
    (
        "pytorch_model_fsdp_*rank*.bin",
        "FSDP1 local shards, which do not say how to put them together: save again with "
        "SHARDED_STATE_DICT or FULL_STATE_DICT",
    ),
    ("recipe_state.pt", _TORCHTUNE),
    ("hf_model_*.pt", _TORCHTUNE),
    ("meta_model_*.pt", _TORCHTUNE),
    ("torchtune_model_*.pt", _TORCHTUNE),
    ("adapter_*.pt", "torchtune's own adapter files, which are not read: let its checkpointer write PEFT's form"),
)
"""Files and subfolders that decide where nothing lies that is read, the telling ones first."""

_PICKLES: tuple[tuple[str, str], ...] = (
    (
        "*_[0-9]*.pt",
        "one .pt file per rank, as torch_checkpointing writes them, which are not read yet: "
        "save with torch.distributed.checkpoint instead",
    ),
    *((f"*{suffix}", _PICKLED) for suffix in (".bin", ".pt", ".pth", ".ckpt")),
    ("*.msgpack", "Flax weights: save them as safetensors first"),
    ("*.h5", "TensorFlow weights: save them as safetensors first"),
)
"""Files that decide where neither the folder nor one below it holds anything more telling."""

_TENSORS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (".experts.gate_and_up_projs", ".experts.down_projs"),
        "NeMo Automodel's experts as it holds them in memory, stored transposed: "
        "export them with its offline consolidation tool first",
    ),
    (("lora_A", "lora_B", "lora_embedding_", "lora_magnitude_vector"), _LORA),
    ((".linear_qkv.", ".linear_fc1.", "decoder.layers.", "decoder.final_layernorm."), _MEGATRON),
    (
        ("_flat_param", "flat_param."),
        "FSDP1's flat parameters, which do not say how to put them together: save again with SHARDED_STATE_DICT or "
        "FULL_STATE_DICT",
    ),
    ((".attn.output_proj.", ".sa_norm.scale", ".mlp_norm.scale"), _TORCHTUNE),
    (("visual.", "vision_tower.", ".language_model.", "language_model."), "a vision-language model: it is not read"),
    (("audio_tower.", "thinker.", "talker."), "an audio model: it is not read"),
    (
        (".linear_attn.", ".shared_expert.", ".shared_experts.", ".shared_expert_gate."),
        "Qwen3-Next, Qwen3.5 or another model with linear attention or shared experts: it is not read",
    ),
    (
        (".q_proj.bias", ".k_proj.bias", ".v_proj.bias"),
        "a model with q/k/v biases, such as Qwen2 or Qwen2.5, which Qwen3 does not have: it is not read",
    ),
    (
        (".qkv_proj.", ".gate_up_proj.weight", ".w13_weight", ".w2_weight"),
        "a serving engine's fused weights (vLLM, SGLang, NxD), which are not read yet: use the folder it was made from",
    ),
    (("score.", "classifier.", "v_head.", "value_head."), "a reranker, classifier or reward model: it is not read"),
)
"""Parts of tensor names; one that does not begin with a dot stands at the name's start or after a dot."""

_BACKBONE = (
    "a model without head and without 'model.' in front of its names, as the Qwen3-Embedding models are: it is not read"
)


def refuse_files(folder: Path, names: Sequence[str], *, has_store: bool) -> None:
    """Raise ``SourceError`` when ``names`` in ``folder`` are those of a known format that is not read.

    ``has_store``: something that is read lies there too; then only few names decide.
    """
    _refuse(folder, names, _ALWAYS if has_store else (*_ALWAYS, *_WITHOUT_STORE))


def refuse_pickles(folder: Path, names: Sequence[str]) -> None:
    """Raise ``SourceError`` when ``names`` in ``folder`` are those of weights of no particular format."""
    _refuse(folder, names, _PICKLES)


def _refuse(folder: Path, names: Sequence[str], patterns: Sequence[tuple[str, str]]) -> None:
    for pattern, reason in patterns:
        hit = next((name for name in names if fnmatchcase(name, pattern)), None)
        if hit is not None:
            raise SourceError(f"{folder} holds {hit}: {reason}")


def refuse_foreign_tensors(names: Iterable[str], where: str) -> None:
    """Raise ``SourceError`` when tensor ``names`` are those of a known format or model that is not read."""
    best: tuple[int, str] | None = None
    bare = False
    for name in names:
        bare = bare or name == "embed_tokens.weight"
        dotted = f".{name}"
        for rank, (marks, _) in enumerate(_TENSORS):
            if best is not None and rank >= best[0]:
                break
            if any((mark if mark.startswith((".", "_")) else f".{mark}") in dotted for mark in marks):
                best = rank, name
    if best is not None:
        raise SourceError(f"{where} holds {best[1]}: {_TENSORS[best[0]][1]}")
    if bare:
        raise SourceError(f"{where} holds embed_tokens.weight: {_BACKBONE}")
