"""Configs that are refused because their model is not a plain Qwen3, each by name.

Sources: transformers 5.24, ``models/auto/configuration_auto.py`` (model types), ``models/qwen3/configuration_qwen3.py``
and ``models/qwen3_moe/configuration_qwen3_moe.py`` (keys and defaults).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .errors import SourceError

ARCHITECTURES: dict[str, str] = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
"""The model types that are read, and the one architecture of each."""

_OTHER_TYPES: tuple[tuple[str, str], ...] = (
    ("qwen2", "a Qwen2 or Qwen2.5 model: it has q/k/v biases and no q_norm or k_norm"),
    ("qwen3_next", "Qwen3-Next: most of its layers are linear attention"),
    ("qwen3_5", "Qwen3.5: most of its layers are linear attention"),
    ("qwen3_vl", "Qwen3-VL: a vision tower, and experts stored transposed"),
    ("qwen3_omni", "Qwen3-Omni: audio and vision towers"),
    ("qwen3_asr", "Qwen3-ASR: an audio tower"),
)

_OTHER_HEADS: tuple[tuple[str, str], ...] = (
    ("ForSequenceClassification", "a reranker or classifier: its head is not a language model's"),
    ("ForTokenClassification", "a token classifier: its head is not a language model's"),
    ("ForQuestionAnswering", "a question answering model: its head is not a language model's"),
    ("Model", "an embedding model or bare backbone: it has no head, and names without 'model.' in front"),
)

_SHARED_EXPERTS = (
    "shared_expert_intermediate_size",
    "num_shared_experts",
    "n_shared_experts",
    "num_shared_expert",
    "shared_intermediate_size",
)


def refuse_other_models(raw: Mapping[str, object], where: str) -> None:
    """Raise ``SourceError`` unless model_type and architectures are those of a Qwen3 language model."""
    kind = raw.get("model_type")
    supported = " and ".join(repr(name) for name in ARCHITECTURES)
    if not isinstance(kind, str):
        found = "is missing" if kind is None else f"is {kind!a:.60}"
        raise SourceError(f"{where}: model_type {found}; models of type {supported} are read")
    if kind not in ARCHITECTURES:
        reason = next((f" ({text})" for prefix, text in _OTHER_TYPES if kind.startswith(prefix)), "")
        raise SourceError(f"{where}: model_type {kind!a:.60} is not read{reason}; models of type {supported} are")
    if "text_config" in raw or "vision_config" in raw:
        raise SourceError(f"{where}: a multimodal config (text_config) with model_type {kind!r} is not read")
    architectures = raw.get("architectures")
    if architectures is None:
        return
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise SourceError(f"{where}: architectures is {architectures!a:.60}, expected a list of class names")
    for name in architectures:
        if name != ARCHITECTURES[kind]:
            reason = next((f" ({text})" for suffix, text in _OTHER_HEADS if name.endswith(suffix)), "")
            raise SourceError(
                f"{where}: architecture {name!a:.60} with model_type {kind!r} is not read{reason}; "
                f"{ARCHITECTURES[kind]} is"
            )


def unsupported_features(raw: Mapping[str, object]) -> Iterator[str]:
    """What a config switches on that a plain Qwen3 does not have, one line each, in the config's own words.

    A key that is absent is off: so are the class defaults.
    """
    for key in ("attention_bias", "qkv_bias", "mlp_bias"):
        if raw.get(key) not in (None, False):
            yield f"{key} is {raw[key]!a:.40}: Qwen3 has no biases, and a checkpoint with them is not read"
    if raw.get("use_qk_norm") not in (None, True):
        yield f"use_qk_norm is {raw['use_qk_norm']!a:.40}: Qwen3 always has q_norm and k_norm"
    if raw.get("use_sliding_window") not in (None, False):
        yield f"use_sliding_window is {raw['use_sliding_window']!a:.40}: sliding window attention is not read"
    if raw.get("hidden_act") not in (None, "silu"):
        yield f"hidden_act is {raw['hidden_act']!a:.40}: only 'silu' is read"
    if raw.get("attn_output_gate") not in (None, False):
        yield f"attn_output_gate is {raw['attn_output_gate']!a:.40}: gated attention is not read"
    if raw.get("per_layer_config"):
        yield "per_layer_config is set: layers of different sizes are not read"
    yield from _unequal_layers(raw)
    if raw.get("partial_rotary_factor") not in (None, 1):
        yield f"partial_rotary_factor is {raw['partial_rotary_factor']!a:.40}: Qwen3 rotates whole heads"
    for key in _SHARED_EXPERTS:
        if raw.get(key) not in (None, 0):
            yield f"{key} is {raw[key]!a:.40}: shared experts are not read"


def _unequal_layers(raw: Mapping[str, object]) -> Iterator[str]:
    if raw.get("decoder_sparse_step") not in (None, 1):
        yield f"decoder_sparse_step is {raw['decoder_sparse_step']!a:.40}: dense layers between MoE layers are not read"
    if raw.get("mlp_only_layers") not in (None, []):
        yield f"mlp_only_layers is {raw['mlp_only_layers']!a:.40}: dense layers between MoE layers are not read"
    types = raw.get("layer_types")
    if types is None:
        return
    if not isinstance(types, list):
        yield f"layer_types is {types!a:.40}, expected a list"
        return
    other = next((kind for kind in types if kind != "full_attention"), None)
    if other is not None:
        yield f"layer_types has {other!a:.40}: only 'full_attention' is read"
    if len(types) != raw.get("num_hidden_layers"):
        yield f"layer_types lists {len(types)} layers, num_hidden_layers is {raw.get('num_hidden_layers')!a:.40}"
