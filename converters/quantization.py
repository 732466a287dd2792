"""Which quantised checkpoints are read (block-wise FP8) and which are refused, by config and by tensor names.

FP8 as hub repositories named ``-FP8`` store it: ``X.weight`` F8_E4M3 [out, in] and ``X.weight_scale_inv``
[ceil(out / rows), ceil(in / columns)] per block of ``weight_block_size``. Source: transformers 5.24,
``utils/quantization_config.py``, ``FineGrainedFP8Config``; methods: ``quantizers/auto.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .errors import SourceError

SCALE_SUFFIX = "_scale_inv"
"""What a block-quantised weight's name has more than the weight's own, for its scales."""

_METHODS: dict[str, str] = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "bitsandbytes_4bit": "bitsandbytes",
    "bitsandbytes_8bit": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "modelopt": "ModelOpt (NVFP4 or FP8)",
    "modelopt_fp4": "ModelOpt NVFP4",
    "mxfp4": "MXFP4",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
    "gguf": "GGUF",
    "auto-round": "AutoRound",
}

_TENSOR_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("GPTQ", (".g_idx",)),
    ("GPTQ or AWQ", (".qweight", ".qzeros")),
    ("bitsandbytes", (".absmax", ".quant_map", ".nested_absmax", ".quant_state.")),
    ("compressed-tensors or ModelOpt", (".weight_packed", ".weight_scale", ".weight_scale_2", ".input_scale")),
    ("MXFP4", ("_blocks",)),
    ("MLX", (".biases",)),
)
"""Ends of tensor names; one that itself ends in a dot may stand anywhere. The first format that matches is named."""

_NEXT_STEP = (
    "its tensors are packed, and unpacking them would invent numbers: convert the repository it was quantised from "
    "(usually the same name without the suffix), or one named -FP8, whose block-wise FP8 is read"
)


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """Block-wise FP8: one scale per block of each quantised weight; value = fp8 * scale."""

    block_size: tuple[int, int]
    """(rows, columns) of a block, in elements; blocks at the edges may be cut."""
    modules_to_not_convert: tuple[str, ...] = ()
    """Modules that stayed unquantised, as the config lists them. What is stored decides, not this list."""


def parse_quantization(raw: Mapping[str, object], where: str) -> Fp8Blocks | None:
    """How a config.json says its weights are quantised; None for not at all.

    Raises:
        SourceError: any other format than block-wise FP8 with one scale per block, by its name and with the next step.
    """
    for key, name in (("quantization", "MLX"), ("compression_config", "compressed-tensors")):
        if raw.get(key):
            raise SourceError(f"{where}: {key!r} marks a checkpoint quantised by {name}; {_NEXT_STEP}")
    config = raw.get("quantization_config")
    if config is None:
        return None
    if not isinstance(config, dict):
        raise SourceError(f"{where}: quantization_config is {config!a:.60}, expected an object")
    method = config.get("quant_method")
    if method is None and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        method = "bitsandbytes"
    if not isinstance(method, str):
        raise SourceError(f"{where}: quantization_config has no quant_method, so its tensors' meaning is unknown")
    if method.lower() != "fp8":
        known = _METHODS.get(method.lower(), "a method that is not known here")
        raise SourceError(f"{where}: quantised by {known} (quant_method {method!a:.60}); {_NEXT_STEP}")
    return _parse_fp8(config, where)


def quantization_of_tensors(names: Iterable[str]) -> str | None:
    """The name of the quantisation format that tensor ``names`` betray, or None. Block-wise FP8 betrays none."""
    ends = tuple((rank, mark) for rank, (_, marks) in enumerate(_TENSOR_MARKS) for mark in marks)
    found = {
        rank for name in names for rank, mark in ends if name.endswith(mark) or (mark.endswith(".") and mark in name)
    }
    return _TENSOR_MARKS[min(found)][0] if found else None


def refuse_quantized_tensors(names: Iterable[str], where: str) -> None:
    """Raise ``SourceError`` when tensor ``names`` betray a quantisation format that is not read."""
    name = quantization_of_tensors(names)
    if name:
        raise SourceError(f"{where}: tensor names are those of {name} quantisation; {_NEXT_STEP}")


def _parse_fp8(config: Mapping[str, object], where: str) -> Fp8Blocks:
    block = config.get("weight_block_size")
    if block is None:
        raise SourceError(
            f"{where}: quant_method fp8 without weight_block_size (one scale per tensor or per row) is not read; "
            "only block-wise FP8 is, as in the repositories that Qwen names -FP8"
        )
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or any(type(size) is not int or not 1 <= size <= 2**16 for size in sizes):
        raise SourceError(f"{where}: weight_block_size is {block!a:.60}, expected [rows, columns]")
    fixed: tuple[tuple[str, tuple[object, ...], str], ...] = (
        ("fmt", (None, "e4m3", "float8_e4m3fn"), "e4m3"),
        ("activation_scheme", (None, "dynamic"), "dynamic"),
        ("expert_dtype", (None, "fp8"), "fp8"),
        ("scale_fmt", (None, "float", "ue8m0"), "float or ue8m0"),
    )
    for key, allowed, expected in fixed:
        if config.get(key) not in allowed:
            raise SourceError(f"{where}: FP8 with {key} {config.get(key)!a:.60} is not read, only {expected}")
    skipped = config.get("modules_to_not_convert")
    if skipped is None:
        skipped = config.get("ignored_layers")
    if skipped is None:
        skipped = []
    if not isinstance(skipped, list) or not all(isinstance(name, str) for name in skipped):
        raise SourceError(f"{where}: modules_to_not_convert is {skipped!a:.60}, expected a list of module names")
    return Fp8Blocks((sizes[0], sizes[1]), tuple(skipped))
