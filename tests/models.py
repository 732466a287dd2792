"""Small real Qwen3 models, made and saved by transformers, with the sidecar files a hub repository has.

Sizes are uneven on purpose: heads * head_dim differs from hidden, nothing is a power of two that does not have to be,
and every tensor is drawn from its own seed, so that a swap, a transposition or a wrong head order cannot pass.
Heavy libraries load inside the functions that use them.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pytest
    import torch

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1, 2; a chat turn ends with id 2, a document with id 0."""

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers of a small Qwen3. ``experts == 0`` means dense."""

    hidden: int = 48
    layers: int = 3
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 100
    vocab: int = 330
    experts: int = 0
    top_k: int = 2
    moe_intermediate: int = 24
    context: int = 256
    rope_theta: float = 1e6


DENSE = Sizes()
MOE = Sizes(experts=5)
MOE_TRAINABLE = Sizes(experts=8, moe_intermediate=32)
"""Small and uneven still, yet torch's ``_grouped_mm`` (rows of 16 bytes) and expert parallelism of 2 x FSDP 2 take it,
so torchtitan can train it, with TP 2 as well."""
FP8_DENSE = Sizes(hidden=144, head_dim=32, intermediate=300, layers=2)
"""No dim but q/k/v rows divides by the 128 of an FP8 block, and each has at least one ragged block."""
FP8_MOE = replace(FP8_DENSE, experts=3, moe_intermediate=136)


def make_dense(
    folder: Path,
    *,
    tied: bool = False,
    sizes: Sizes = DENSE,
    dtype: str = "bfloat16",
    max_shard_size: str = "5GB",
    lm_head: Literal["as saved", "equal", "different"] = "as saved",
    config_style: Literal["v4", "v5", "both"] = "v5",
    inv_freq: bool = False,
    seed: int = 0,
) -> Path:
    """Save a ``Qwen3ForCausalLM`` to ``folder`` and return it.

    ``lm_head`` other than ``"as saved"`` adds the head that transformers leaves out of a tied model, bit-equal to the
    embedding or not; ``inv_freq`` adds the derived rotary buffers that some old dumps carry.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=tied, **_config_arguments(sizes)))
    _save(model, folder, sizes, dtype, max_shard_size, config_style, seed, original_format=True)
    if lm_head != "as saved":
        head = read_tensors(folder)["model.embed_tokens.weight"]
        add_tensors(folder, {"lm_head.weight": head if lm_head == "equal" else head.flip(0)})
    if inv_freq:
        _add_inv_freq(folder, sizes)
    return folder


def make_moe(
    folder: Path,
    *,
    sizes: Sizes = MOE,
    dtype: str = "bfloat16",
    max_shard_size: str = "5GB",
    fused: bool = False,
    config_style: Literal["v4", "v5", "both"] = "v5",
    inv_freq: bool = False,
    seed: int = 0,
) -> Path:
    """Save a ``Qwen3MoeForCausalLM`` to ``folder`` and return it.

    ``fused`` stores ``experts.gate_up_proj`` (E, 2M, H) and ``experts.down_proj`` (E, H, M) as transformers 5 holds
    them in memory; otherwise the per-expert names of the hub.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
        moe_intermediate_size=sizes.moe_intermediate,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
        **_config_arguments(sizes),
    )
    _save(Qwen3MoeForCausalLM(config), folder, sizes, dtype, max_shard_size, config_style, seed, not fused)
    if inv_freq:
        _add_inv_freq(folder, sizes)
    return folder


def make_fp8(
    folder: Path,
    *,
    scale_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    moe: bool = False,
    block: int = 128,
    max_shard_size: str = "5GB",
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Save a block-quantised FP8 model as ``-FP8`` repositories are; return what its tensors dequantise to, in float32.

    A quantised weight's expected value is ``float32(fp8) * float32(scale)`` of its block, so ``expected.to(dtype)`` is
    the one rounding that a conversion may do. Projections are quantised; embedding, norms, router and head are not.
    Layout: ``weight`` F8_E4M3 [out, in], ``weight_scale_inv`` [ceil(out/block), ceil(in/block)].
    """
    import torch

    source = folder.with_name(folder.name + ".bf16")
    if moe:
        make_moe(source, sizes=FP8_MOE, config_style="v4", max_shard_size=max_shard_size, seed=seed)
    else:
        make_dense(source, sizes=FP8_DENSE, config_style="v4", max_shard_size=max_shard_size, seed=seed)
    expected: dict[str, torch.Tensor] = {}

    def quantised(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in tensors.items():
            if not name.endswith("_proj.weight"):
                expected[name] = weight.float()
                yield name, weight
                continue
            codes, scale = _quantise_blocks(weight.float(), block, getattr(torch, scale_dtype))
            expected[name] = codes.float() * _spread(scale.float(), block, weight.shape)
            yield name, codes
            yield f"{name}_scale_inv", scale

    _rewrite(source, quantised)
    config = json.loads((source / "config.json").read_text())
    router = [f"model.layers.{layer}.mlp.gate" for layer in range(config["num_hidden_layers"])] if moe else []
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [block, block],
        "modules_to_not_convert": ["lm_head", *router],
    }
    _write_json(source / "config.json", config)
    source.rename(folder)
    return expected


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a safetensors folder, read by the safetensors library, whatever the index says."""
    from safetensors.torch import load_file

    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def add_tensors(folder: Path, extra: Mapping[str, torch.Tensor]) -> None:
    """Store more tensors in the last weight file of ``folder``, and list them in its index when there is one."""
    last = max(folder.glob("*.safetensors"))

    def more(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        yield from {**tensors, **extra}.items()

    _rewrite(folder, more, only=last)


def make_tokenizer(folder: Path, *, vocab: int = 325) -> None:
    """Train a byte-level BPE of at most ``vocab`` tokens and write it as hub repositories do, chat template included.

    Every byte is a token, so any text has ids; like the released models it has fewer tokens than the embedding rows.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab < len(alphabet) + len(SPECIAL_TOKENS):
        raise ValueError(f"a byte-level tokenizer needs {len(alphabet) + len(SPECIAL_TOKENS)} rows, got {vocab}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(sample_texts(200), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))
    content = {
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
        "eos_token": "<|im_end|>",
        "model_max_length": 256,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write_json(folder / "tokenizer_config.json", content)


def sample_texts(count: int, *, seed: int = 0) -> Iterator[str]:
    """Short English-looking texts, the same for the same seed."""
    import random

    words = ("sun", "moon", "river", "stone", "bird", "tree", "cloud", "fish", "wind", "rain", "hill", "leaf", "seed")
    rng = random.Random(seed)
    for _ in range(count):
        sentences = [" ".join(rng.choices(words, k=rng.randint(4, 12))) + "." for _ in range(rng.randint(2, 6))]
        yield " ".join(sentences)


def even_texts(model: Path, tokens: int, count: int) -> list[str]:
    """Texts that the tokenizer of ``model`` makes ``tokens`` of each."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    found: list[str] = []
    for text in sample_texts(100 * count, seed=1):
        if len(found) == count:
            return found
        words: list[str] = []
        for word in (text.replace(".", "") + " ").split(" ") * 4:
            words.append(word)
            if len(tokenizer.encode(" ".join(words)).ids) >= tokens:
                break
        if len(tokenizer.encode(" ".join(words)).ids) == tokens:
            found.append(" ".join(words))
    raise ValueError(f"{len(found)} texts of {tokens} tokens found")


VARIANTS: dict[str, Callable[[Path], object]] = {
    "dense": lambda folder: make_dense(folder),
    "dense-tied": lambda folder: make_dense(folder, tied=True),
    "dense-tied-head-stored": lambda folder: make_dense(folder, tied=True, lm_head="equal"),
    "dense-tied-head-differs": lambda folder: make_dense(folder, tied=True, lm_head="different"),
    "dense-sharded": lambda folder: make_dense(folder, max_shard_size="60KB"),
    "dense-fp32": lambda folder: make_dense(folder, dtype="float32"),
    "dense-v4": lambda folder: make_dense(folder, config_style="v4"),
    "dense-both-styles": lambda folder: make_dense(folder, config_style="both"),
    "dense-tied-sharded-head-stored": lambda folder: make_dense(
        folder, tied=True, max_shard_size="60KB", lm_head="equal", config_style="v4"
    ),
    "dense-inv-freq": lambda folder: make_dense(folder, inv_freq=True),
    "moe": lambda folder: make_moe(folder),
    "moe-sharded": lambda folder: make_moe(folder, max_shard_size="60KB"),
    "moe-fused": lambda folder: make_moe(folder, fused=True),
    "moe-fp32": lambda folder: make_moe(folder, dtype="float32"),
    "moe-v4": lambda folder: make_moe(folder, config_style="v4"),
    "moe-both-styles": lambda folder: make_moe(folder, config_style="both"),
    "moe-inv-freq": lambda folder: make_moe(folder, inv_freq=True),
    "moe-trainable": lambda folder: make_moe(folder, sizes=MOE_TRAINABLE),
}
"""Ready-made folders by name, for ``saved_model``."""


def saved_model(tmp_path_factory: pytest.TempPathFactory, variant: str) -> Path:
    """The folder of a variant, built once per session. Read it, do not write to it: copy it first."""
    return once(tmp_path_factory, f"models/{variant}", VARIANTS[variant])


def dense_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied dense bf16 model in one file, built once per session."""
    return saved_model(tmp_path_factory, "dense")


def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied dense bf16 model without a stored head, built once per session."""
    return saved_model(tmp_path_factory, "dense-tied")


def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A MoE bf16 model with per-expert names in one file, built once per session."""
    return saved_model(tmp_path_factory, "moe")


def once(tmp_path_factory: pytest.TempPathFactory, name: str, build: Callable[[Path], object]) -> Path:
    """The folder that ``build`` filled, made at most once per test session, shared by all test processes of a run.

    ``build`` gets a folder that does not exist yet, whose name changes afterwards: keep no path it made.
    """
    base = tmp_path_factory.getbasetemp()
    base = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    folder = base / "made-once" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            building = folder.with_name(f"{folder.name}.building")
            shutil.rmtree(building, ignore_errors=True)
            build(building)
            building.rename(folder)
    return folder


def _config_arguments(sizes: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": sizes.context,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": sizes.rope_theta, "rope_type": "default"},
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def _save(
    model: Any,
    folder: Path,
    sizes: Sizes,
    dtype: str,
    max_shard_size: str,
    config_style: str,
    seed: int,
    original_format: bool,
) -> None:
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(seed * 2**32 + zlib.crc32(name.encode()))
            if "norm" in name:  # transformers starts norms at 1, where a swap would not show
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(std=0.08, generator=generator)
    model.to(getattr(torch, dtype)).save_pretrained(
        folder, max_shard_size=max_shard_size, save_original_format=original_format
    )
    if config_style != "v5":
        path = folder / "config.json"
        _write_json(path, with_v4_keys(json.loads(path.read_text()), keep_v5=config_style == "both"))
    make_tokenizer(folder, vocab=sizes.vocab - 5)
    generation = {
        "bos_token_id": 0,
        "do_sample": True,
        "eos_token_id": [2, 0],
        "pad_token_id": 0,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "transformers_version": "4.51.0",
    }
    _write_json(folder / "generation_config.json", generation)
    (folder / "LICENSE").write_text("Apache License, Version 2.0 (the text of a test)\n")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model made for a test\n")


def with_v4_keys(config: Mapping[str, Any], *, keep_v5: bool) -> dict[str, Any]:
    """A config.json as transformers 4 writes it, from one that transformers 5 wrote; with both spellings on request."""
    old = {
        "torch_dtype": config["dtype"],
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "rope_scaling": None,
        "transformers_version": "4.51.0",
    }
    if "num_local_experts" in config:
        old["num_experts"] = config["num_local_experts"]
    new_only = () if keep_v5 else ("dtype", "rope_parameters", "num_local_experts")
    return {**{key: value for key, value in config.items() if key not in new_only}, **old}


def _add_inv_freq(folder: Path, sizes: Sizes) -> None:
    import torch

    halves = torch.arange(0, sizes.head_dim, 2, dtype=torch.float32) / sizes.head_dim
    names = (f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(sizes.layers))
    add_tensors(folder, {name: (1.0 / sizes.rope_theta**halves).clone() for name in names})


def _quantise_blocks(weight: torch.Tensor, block: int, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 codes [out, in] of a float32 weight, and one scale per block; edge blocks cover what is left."""
    import torch

    rows, columns = (-(-size // block) for size in weight.shape)
    scale = torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            scale[i, j] = weight[i * block : (i + 1) * block, j * block : (j + 1) * block].abs().amax() / 448
    scale = scale.to(scale_dtype)
    codes = (weight / _spread(scale.float(), block, weight.shape)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, scale


def _spread(scale: torch.Tensor, block: int, shape: torch.Size) -> torch.Tensor:
    """A scale per block, repeated to one per element of ``shape``."""
    return scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[: shape[0], : shape[1]]


def _rewrite(
    folder: Path,
    change: Callable[[Mapping[str, torch.Tensor]], Iterator[tuple[str, torch.Tensor]]],
    only: Path | None = None,
) -> None:
    """Save each weight file again with its tensors changed, and its index with the new names and total size."""
    from safetensors.torch import load_file, save_file

    index_path = folder / "model.safetensors.index.json"
    weight_map: dict[str, str] = json.loads(index_path.read_text())["weight_map"] if index_path.exists() else {}
    for path in sorted(folder.glob("*.safetensors")):
        if only in (None, path):
            tensors = {name: tensor.contiguous() for name, tensor in change(load_file(path))}
            save_file(tensors, path, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(tensors, path.name))
    if index_path.exists():
        stored = read_tensors(folder)
        _write_json(
            index_path,
            {
                "metadata": {
                    "total_parameters": sum(tensor.numel() for tensor in stored.values()),
                    "total_size": sum(tensor.nbytes for tensor in stored.values()),
                },
                "weight_map": {name: weight_map[name] for name in sorted(stored)},
            },
        )


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
