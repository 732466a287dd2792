"""LoRA adapters: real ones that PEFT makes, merges and saves, and ones written by hand without torch."""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

PREFIX = "base_model.model."
"""What PEFT puts in front of a causal language model's module names."""

DEFAULTS: dict[str, Any] = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", "init_lora_weights": False}
"""A scale of 1.5, and no module that begins as zero."""

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


def save_with_peft(base: Path, folder: Path, *, dtype: str = "float32", std: float = 0.05, **config: Any) -> Path:
    """Give the model in ``base`` an adapter, every tensor with numbers of its own, and let PEFT save it."""
    import torch
    from peft import LoraConfig, get_peft_model

    with quiet():
        model = get_peft_model(load(base, torch.float32), LoraConfig(**{**DEFAULTS, **config}))
        fill(model, std)
        model.to(getattr(torch, dtype)).save_pretrained(str(folder))
    return folder


def merge_with_peft(base: Path, adapter: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The hub's tensors of what PEFT's own merge gives, of the base loaded as ``dtype``."""
    with quiet():
        return hub_tensors(with_adapter(base, adapter, dtype).merge_and_unload())


def with_adapter(base: Path, adapter: Path, dtype: torch.dtype) -> Any:
    """The base as ``dtype`` with its adapter beside it, as PEFT loads them."""
    from peft import PeftModel

    with quiet():
        return PeftModel.from_pretrained(load(base, dtype), str(adapter))


def hub_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The tensors that transformers would save."""
    from transformers.core_model_loading import revert_weight_conversion

    tied = model.config.tie_word_embeddings
    state = {k: v.detach().clone() for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}
    return {k: v.contiguous() for k, v in revert_weight_conversion(model, state).items()}


def magnitudes(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """``|W| + |scale| * |B| @ |A|``, float32: the scale on which rounding errors of a merge are small."""
    import torch

    model = with_adapter(base, adapter, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.abs_()
    with quiet():
        return hub_tensors(model.merge_and_unload())


def load(base: Path, dtype: torch.dtype) -> Any:
    """The model in a folder, as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, dtype=dtype).eval()


def fill(model: Any, std: float) -> None:
    """Give every tensor of an adapter numbers that no other has."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=std, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


@contextmanager
def quiet() -> Iterator[None]:
    """PEFT warns of much that a test does on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def modules_of(tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Plain linear layers under the names of ``tensors``: what transformers 4 has, one module per expert."""
    import torch

    root = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, last, _ = name.split(".")
        parent = root
        for segment in path:
            if not hasattr(parent, segment):
                parent.add_module(segment, torch.nn.Module())
            parent = getattr(parent, segment)
        if tensor.dim() == 2:
            layer = torch.nn.Linear(tensor.shape[1], tensor.shape[0], bias=False)
            layer.weight.data = tensor.float().clone()
            parent.add_module(last, layer)
        else:
            parent.add_module(last, torch.nn.Module())
            getattr(parent, last).register_buffer("weight", tensor.float().clone())
    return root


def write_adapter(folder: Path, tensors: Mapping[str, npt.NDArray[np.float32]], **config: Any) -> Path:
    """A PEFT adapter of float32 tensors, without torch; names without ``base_model.model.``."""
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, tensor in tensors.items():
        raw = tensor.tobytes()
        content[PREFIX + name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [len(body), len(body) + len(raw)],
        }
        body += raw
    header = json.dumps(content).encode()
    header += b" " * (-len(header) % 8)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + body)
    chosen = {"peft_type": "LORA", **DEFAULTS, "bias": "none", "base_model_name_or_path": None, **config}
    (folder / "adapter_config.json").write_text(json.dumps(chosen))
    return folder


def factors(
    module: str, rows: int, columns: int, rank: int, *, ends: tuple[str, str] = (".lora_A.weight", ".lora_B.weight")
) -> dict[str, npt.NDArray[np.float32]]:
    """Both tensors of a module for a matrix of ``rows`` by ``columns``: numbers of no pattern, other ones per name."""
    import numpy as np

    made = {}
    for end, shape in zip(ends, ((rank, columns), (rows, rank)), strict=True):
        generator = np.random.default_rng(zlib.crc32((module + end).encode()))
        made[module + end] = generator.uniform(-0.5, 0.5, shape).astype(np.float32)
    return made
