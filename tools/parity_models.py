"""The two libraries that ``parity`` sets side by side, opened alike: a forward pass, and the modules to watch in it.

A Hugging Face folder runs in transformers, a torchtitan DCP folder in torchtitan's own Qwen3; no layer is computed
here.

Legend: B rows, T positions, V vocabulary, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from qwen3conv.converters.errors import MappingError, SourceError, enumerate_problems

if TYPE_CHECKING:
    import torch
    from torch import nn

    from qwen3conv.converters.config import Qwen3Config

Implementation = Literal["transformers", "torchtitan"]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two checkpoints, and how it was computed."""

    path: str
    implementation: Implementation
    config: str
    """The config.json that was used."""
    experts: str | None
    """How routed experts were computed; ``None`` for a dense model."""
    notes: tuple[str, ...]
    """What a reader of the numbers should know, such as a routing bias that the other format has no place for."""


class Checkpoint(NamedTuple):
    """A folder that was recognized: which library runs it, and its configuration."""

    folder: Path
    implementation: Implementation
    config_path: Path
    config: Qwen3Config


class Routing(NamedTuple):
    """What a router decided, for N = B * T tokens."""

    scores: torch.Tensor
    """(N, E), the softmax over all experts."""
    experts: torch.Tensor
    """(N, K), indices."""
    weights: torch.Tensor
    """(N, K), what the experts' outputs are multiplied by."""


class Router(NamedTuple):
    """A router module, and how its library packs a ``Routing`` into the module's output."""

    module: nn.Module
    read: Callable[[Any], Routing]
    write: Callable[[Any, Routing], Any]
    """From the output that ``read`` understood and another routing, the output that says so."""


class Opened(NamedTuple):
    """A model that is ready to run."""

    side: Side
    places: dict[str, nn.Module]
    """Modules whose outputs are hidden states (B, T, H), in the order in which they run."""
    routers: tuple[Router, ...]
    """One per layer; none where routing is steered by a bias, which the scores do not show."""
    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Ids and positions, (B, T) each, to logits (B, T, V)."""


def recognize(folder: Path, config: Path | None) -> Checkpoint:
    """Which library computes ``folder``, and with which config: ``config`` (a file, or a folder with one) or its own.

    A DCP folder's own config.json is in ``hf_assets/``, else beside ``.metadata``. Raises ``SourceError`` when the
    folder is not exactly one kind of checkpoint, has no readable config, or is quantized.
    """
    from qwen3conv.converters.config import read_config

    if not folder.is_dir():
        raise SourceError(f"{folder}: no such folder")
    is_dcp = (folder / ".metadata").is_file()
    is_hf = any(folder.glob("*.safetensors"))
    if is_dcp == is_hf:
        found = "both .metadata and safetensors files" if is_dcp else "neither .metadata nor safetensors files"
        steps = sorted((entry for entry in folder.glob("step-*") if (entry / ".metadata").is_file()), key=_step)
        hint = f"; did you mean {steps[-1]}?" if steps else ""
        raise SourceError(f"{folder}: {found}, so it is not one Hugging Face or torchtitan checkpoint{hint}")
    if config is not None:
        candidates = [config / "config.json" if config.is_dir() else config]
    else:
        candidates = [folder / "hf_assets" / "config.json"] * is_dcp + [folder / "config.json"]
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        looked = " or ".join(str(candidate) for candidate in candidates)
        raise SourceError(f"{folder}: no model configuration at {looked}; name a config.json or a folder that has one")
    parsed = read_config(path)
    if parsed.quantization is not None:
        raise SourceError(f"{folder}: {path} says the weights are quantized; convert them to bfloat16 first")
    return Checkpoint(folder, "torchtitan" if is_dcp else "transformers", path, parsed)


def open_model(checkpoint: Checkpoint, dtype: torch.dtype, device: str, length: int) -> Opened:
    """Build the model of ``checkpoint`` and load its weights, for sequences of up to ``length`` positions.

    Raises ``MissingPackageError``, ``SourceError`` or ``MappingError``, see ``parity.compare``.
    """
    if checkpoint.implementation == "torchtitan":
        return _open_torchtitan(checkpoint, dtype, device, length)
    return _open_transformers(checkpoint, dtype, device)


def _open_transformers(checkpoint: Checkpoint, dtype: torch.dtype, device: str) -> Opened:
    """transformers' model: eager attention, experts in a plain loop, only safetensors, no code from the folder."""
    from qwen3conv.training.devices import require_packages

    require_packages(f"{checkpoint.folder}: a Hugging Face folder", "transformers", "safetensors")
    from transformers import AutoConfig, AutoModelForCausalLM

    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        with _quiet_transformers():
            model, info = AutoModelForCausalLM.from_pretrained(
                checkpoint.folder,
                config=AutoConfig.from_pretrained(checkpoint.config_path, **local),
                dtype=dtype,
                attn_implementation="eager",
                experts_implementation="eager",
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # they are listed below, with their shapes
                output_loading_info=True,
                **local,
            )
    except Exception as error:  # transformers raises whatever its parts raise; all of it is about this folder
        raise SourceError(f"{checkpoint.folder}: transformers cannot load it: {error}") from error
    problems = [f"missing: {name}" for name in sorted(info["missing_keys"])]
    problems += [f"no such parameter in the model: {name}" for name in sorted(info["unexpected_keys"])]
    problems += [
        f"{name}: stored {tuple(stored)}, the config asks for {tuple(asked)}"
        for name, stored, asked in sorted(info["mismatched_keys"])
    ]
    problems += list(info["error_msgs"])
    if problems:
        heading = f"{checkpoint.folder}: not the model that {checkpoint.config_path} describes:"
        raise MappingError(enumerate_problems(heading, problems))
    config = checkpoint.config
    if config.tie_word_embeddings and model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr():
        raise SourceError(
            f"{checkpoint.folder}: the config says tie_word_embeddings, but lm_head.weight is stored and differs from "
            "model.embed_tokens.weight; set tie_word_embeddings to false, or drop lm_head.weight"
        )
    model = model.to(device).eval()
    is_moe = config.geometry.is_moe

    def forward(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        return logits

    def read(output: Any) -> Routing:
        router_logits, weights, experts = output
        return Routing(router_logits.float().softmax(-1), experts, weights)

    def write(output: Any, routing: Routing) -> Any:
        return output[0], routing.weights.to(output[1].dtype), routing.experts

    return Opened(
        Side(
            path=str(checkpoint.folder),
            implementation="transformers",
            config=str(checkpoint.config_path),
            experts="transformers' loop over experts" if is_moe else None,
            notes=(),
        ),
        _places(model.model.embed_tokens, model.model.layers, model.model.norm),
        tuple(Router(layer.mlp.gate, read, write) for layer in model.model.layers) if is_moe else (),
        forward,
    )


def _open_torchtitan(checkpoint: Checkpoint, dtype: torch.dtype, device: str, length: int) -> Opened:
    """torchtitan's native model, with RoPE caches of ``length`` positions."""
    from qwen3conv.training.devices import prepare_torchtitan

    prepare_torchtitan(device.partition(":")[0])
    from qwen3conv.training.native_model import ReferenceExperts
    from qwen3conv.training.native_weights import largest_expert_bias, load_native

    model = load_native(checkpoint.folder, checkpoint.config, max_seq_len=length, dtype=dtype, device=device)
    is_moe = checkpoint.config.geometry.is_moe
    reference = any(isinstance(module, ReferenceExperts) for module in model.modules())
    name = f"{str(dtype).removeprefix('torch.')} reference" if reference else "torchtitan's bfloat16 grouped_mm"
    bias = largest_expert_bias(model)

    def read(output: Any) -> Routing:
        weights, experts, scores = output
        return Routing(scores.flatten(0, 1).float(), experts.flatten(0, 1), weights.flatten(0, 1))

    def write(output: Any, routing: Routing) -> Any:
        weights, experts, scores = output
        return routing.weights.view_as(weights).to(weights.dtype), routing.experts.view_as(experts), scores

    return Opened(
        Side(
            path=str(checkpoint.folder),
            implementation="torchtitan",
            config=str(checkpoint.config_path),
            experts=name if is_moe else None,
            notes=(f"expert_bias_E reaches {bias:.3g}; a Hugging Face model has no such term",) if bias else (),
        ),
        _places(model.tok_embeddings, model.layers.values(), model.norm),
        tuple(Router(layer.moe.router, read, write) for layer in model.layers.values()) if is_moe and not bias else (),
        lambda ids, positions: model(ids, positions=positions),
    )


def _places(embeddings: nn.Module, layers: Any, norm: nn.Module) -> dict[str, nn.Module]:
    return {"embeddings": embeddings, **{f"layer {i}": layer for i, layer in enumerate(layers)}, "final norm": norm}


def _step(folder: Path) -> int:
    number = folder.name.removeprefix("step-")
    return int(number) if number.isdecimal() else -1


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bar and no load report: what goes wrong is in the error."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
