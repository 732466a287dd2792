"""What the benchmark compares with, each in a process of its own: ``python -m qwen3conv.tools.bench_peers WHAT ...``.

``titan-script SCRIPT FLAVOR SRC [ARGUMENT ...]`` runs one of torchtitan's conversion scripts, after cutting a flavor
down to the sizes in ``SRC/config.json``: the script knows released sizes only. ``titan-from-hf`` and ``titan-to-hf``
make the library calls of these scripts where there is no checkout: a float32 model is built, its state dict goes
through torchtitan's adapter, and ``torch.distributed.checkpoint`` loads and saves. ``dcp-reshard`` and
``transformers`` load and save.

Sources: torchtitan, ``scripts/checkpoint_conversion/convert_from_hf.py`` (commit 813159b8) and ``convert_to_hf.py``
(commit cfb93265), and ``models/qwen3/__init__.py`` of 0.3.0 (what a flavor's configuration holds).
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CUT = "cut-for-bench"
"""Name under which the cut flavor is offered to torchtitan's scripts."""


def titan_script(script: str, flavor: str, source: str, *arguments: str) -> None:
    """Run a script of torchtitan's with a flavor ``CUT``: ``flavor`` with the sizes of ``source``."""
    from torchtitan.models import qwen3

    qwen3.qwen3_configs[CUT] = lambda **options: _cut(qwen3.qwen3_configs[flavor](**options), Path(source))
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def titan_from_hf(flavor: str, source: str, destination: str) -> None:
    """Hugging Face folder -> float32 DCP, by torchtitan's adapter and ``dcp.save``."""
    import torch
    from torch.distributed import checkpoint as dcp

    with torch.inference_mode():
        adapter, state = _titan_state(flavor, Path(source))
        hub = adapter.to_hf(state)
        dcp.load(hub, storage_reader=dcp.HuggingFaceStorageReader(path=source))
        dcp.save(adapter.from_hf(hub), checkpoint_id=destination)


def titan_to_hf(flavor: str, source: str, destination: str, like: str) -> None:
    """DCP -> bfloat16 Hugging Face folder, split as the one in ``like``, by ``dcp.load`` and torchtitan's adapter."""
    import torch
    from torch.distributed import checkpoint as dcp

    with torch.inference_mode():
        adapter, state = _titan_state(flavor, Path(like))
        dcp.load(state, checkpoint_id=source)
        hub = {name: tensor.to(torch.bfloat16) for name, tensor in adapter.to_hf(state).items()}
        writer = dcp.HuggingFaceStorageWriter(
            path=destination,
            save_distributed=True,
            fqn_to_index_mapping=adapter.fqn_to_index_mapping,
            enable_consolidation=True,
            thread_count_consolidation=5,
        )
        dcp.save(hub, storage_writer=writer)


def dcp_reshard(source: str, destination: str) -> None:
    """DCP -> DCP by ``dcp.load`` and ``dcp.save``, every tensor whole in memory: a change of ranks without ranks."""
    import torch
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=source, no_dist=True)
    dcp.save(state, checkpoint_id=destination, no_dist=True)


def transformers(source: str, destination: str) -> None:
    """Hugging Face folder -> Hugging Face folder, by ``from_pretrained`` and ``save_pretrained``."""
    import torch
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(destination)


def _titan_state(flavor: str, source: Path) -> tuple[Any, dict[str, Any]]:
    """torchtitan's adapter and the state dict of its model on the CPU, values not initialised."""
    import torch
    from torchtitan.components.checkpoint import ModelWrapper
    from torchtitan.models import qwen3

    spec = qwen3.model_registry(flavor)
    config = _cut(spec.model, source)
    with torch.device("cpu"):
        model = config.build()
    return spec.state_dict_adapter(config, str(source)), ModelWrapper(model).state_dict()


def _cut(config: Any, source: Path) -> Any:
    """torchtitan's configuration of a released size, with the layers, experts and vocabulary of ``config.json``."""
    cut = json.loads((source / "config.json").read_text())
    config.layers = config.layers[: cut["num_hidden_layers"]]
    config.vocab_size = config.tok_embeddings.num_embeddings = config.lm_head.out_features = cut["vocab_size"]
    for moe in (layer.moe for layer in config.layers if "num_experts" in cut):
        moe.num_experts = moe.router.num_experts = moe.router.gate.out_features = cut["num_experts"]
        moe.routed_experts.inner_experts.num_experts = cut["num_experts"]
        moe.routed_experts.token_dispatcher.num_experts = cut["num_experts"]
        moe.router.top_k = moe.routed_experts.token_dispatcher.top_k = cut["num_experts_per_tok"]
    return config


PEERS: dict[str, Callable[..., None]] = {
    "titan-script": titan_script,
    "titan-from-hf": titan_from_hf,
    "titan-to-hf": titan_to_hf,
    "dcp-reshard": dcp_reshard,
    "transformers": transformers,
}


if __name__ == "__main__":
    PEERS[sys.argv[1]](*sys.argv[2:])
