"""Small real runs for ``doctor``, each a process that prints JSON.

They are ``device WANTED ROOM``, ``collective DEVICE ROOM`` and ``step DEVICE ROOM``.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path


def device(wanted: str, room: Path) -> dict[str, object]:
    """What can be used, and which Neuron packages are here."""
    from qwen3conv.converters.errors import ConversionError
    from qwen3conv.training.neuron_probe import nki, torch_neuronx

    found: dict[str, object] = {"torch_neuronx": torch_neuronx(), "nki": nki()}
    import torch

    from qwen3conv.training.devices import choose_device

    try:
        chosen = choose_device(wanted or None)
    except ConversionError as error:
        return {**found, "error": str(error)}
    return {
        **found,
        "device": chosen,
        "count": 1 if chosen == "cpu" else torch.get_device_module(chosen).device_count(),
    }


def collective(device: str, room: Path) -> dict[str, object]:
    """Two processes add up their ranks."""
    import torch.multiprocessing as mp

    mp.spawn(_add_ranks, args=(device, str(room / "store")), nprocs=2)
    return {"found": "two processes added up what they hold"}


def _add_ranks(rank: int, device: str, store: str) -> None:
    import torch
    import torch.distributed as dist

    backend = {"cuda": "nccl", "cpu": "gloo"}.get(device, device)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
    place = device if device == "cpu" else f"{device}:{rank}"
    total = torch.full((4,), float(rank + 1), device=place)
    dist.all_reduce(total)
    assert total.tolist() == [3.0] * 4, f"1 + 2 gave {total.tolist()}"
    dist.destroy_process_group()


def step(device: str, room: Path) -> dict[str, object]:
    """One step of a tiny native Qwen3, and its parameters saved and loaded with DCP."""
    from qwen3conv.training.devices import prepare_torchtitan

    prepare_torchtitan(device)
    import torch
    import torch.distributed.checkpoint as dcp

    from qwen3conv.converters.config import parse_config
    from qwen3conv.training.native_model import native_config
    from qwen3conv.training.titan import ScaledDotProductAttention

    raw = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 256,
        "max_position_embeddings": 128,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
    }
    made = native_config(
        parse_config(raw, "the doctor's model"), max_seq_len=64, inner_attention=ScaledDotProductAttention.Config()
    )
    model = made.build().to(device)
    model.init_states(buffer_device=torch.device(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = (torch.arange(128, device=device) * 7 % 256).view(2, 64)
    losses = []
    for _ in range(2):
        logits = model(tokens, positions=torch.arange(64, device=device).expand(2, 64))
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    finite = all(map(math.isfinite, losses)) and losses[1] < losses[0]
    state = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    dcp.save(dict(state), checkpoint_id=room / "checkpoint", no_dist=True)
    again = {name: torch.zeros_like(value) for name, value in state.items()}
    dcp.load(again, checkpoint_id=room / "checkpoint", no_dist=True)
    same = all(torch.equal(again[name], value) for name, value in state.items())
    said = f"loss {losses[0]:.3f}, then {losses[1]:.3f}"
    return {
        "step": said if finite else f"failed: {said}, not finite or not falling",
        "checkpoint": "saved and loaded, the same bits" if same else "failed: loaded what was not saved",
    }


if __name__ == "__main__":
    kind, chosen, place = sys.argv[1:]
    print(json.dumps({"device": device, "collective": collective, "step": step}[kind](chosen, Path(place))))  # noqa: T201
