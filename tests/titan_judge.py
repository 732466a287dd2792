"""torchtitan 0.3.0 judging DCP folders: ``python -m tests.titan_judge JOBS.json``, see ``TitanVerdict``.

It writes down what its own code makes of a folder; whether that is right is for the tests to say. One launch for all
jobs, and torchtitan's Trainer runs in forked ranks, as in ``titan_process``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.conversions import ones_of_bits
from tests.real_checkpoints import launch, read_model, save_truth
from tests.titan_process import build_trainer, end_trainer, free_ports, prepare_cpu, titan_model_config, whole_state

if TYPE_CHECKING:
    import torch


class TitanVerdict:
    """What torchtitan made of one folder.

    Jobs of kind ``model``: a DCP and a Hugging Face folder of the same model meet torchtitan's model and adapter.
    ``trainer``: the Trainer's CheckpointManager loads a DCP by ``initial_load_path``, on ``ranks`` ranks.
    ``backend``: a DCP meets the model of torchtitan's transformers backend.
    """

    def __init__(self, base: Path) -> None:
        self._base = base

    def shapes(self, model: str) -> dict[str, list[int]]:
        """State dict of a freshly built model (``fused-qkv``, ``separate-qkv``, ``backend``): FQN to shape."""
        found: dict[str, list[int]] = json.loads((self._base / f"{model}.json").read_text())
        return found

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """``fused-qkv``, ``separate-qkv``, ``backend``: the model after ``dcp.load`` and ``load_state_dict``.

        ``to-hf`` and ``from-hf``: what the adapter makes of those, and of the Hugging Face folder. ``trainer``: the
        live model after the load. ``logits``: those of the model in fp32 for ``logit_ids``, with its ``stock`` experts,
        which compute in bfloat16, and with ``wide`` ones in fp32.
        """
        from safetensors.torch import load_file

        return load_file(self._base / f"{name}.safetensors")

    def refusal(self) -> str:
        """Why a ``trainer`` job could not load."""
        return (self._base / "refusal.txt").read_text()


def titan_verdicts(base: Path, jobs: Mapping[str, Mapping[str, Any]]) -> dict[str, TitanVerdict]:
    """Let torchtitan judge jobs of ``kind``, ``dcp``, ``hf`` (folder with config.json) and settings of the Trainer."""
    spec = []
    for name, job in jobs.items():
        (base / name).mkdir(parents=True)
        options = {"fuse_qkv": True, "load_balance": True, "ranks": 1, "tensor": 1, "expert": 1, "steps": 1, **job}
        places = {"dcp": str(job["dcp"]), "hf": str(job["hf"]), "source": str(job["hf"]), "base": str(base / name)}
        spec.append({**options, **places})
    launch("tests.titan_judge", base / "jobs.json", spec)
    return {name: TitanVerdict(base / name) for name in jobs}


def logit_ids(vocab: int) -> torch.Tensor:
    """Token ids (2, 24) for logits."""
    import torch

    return torch.arange(2 * 24).reshape(2, 24) * 7 % vocab


def _judge_model(job: Mapping[str, Any]) -> None:
    import torch
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.models.qwen3 import Qwen3StateDictAdapter

    base = Path(job["base"])
    hub, config = read_model(Path(job["source"]))
    for fuse_qkv in (True, False):
        which = "fused-qkv" if fuse_qkv else "separate-qkv"
        titan = titan_model_config(config, fuse_qkv=fuse_qkv, load_balance=job["load_balance"])
        model = titan.build()
        model.init_states(buffer_device=torch.device("cpu"))
        state = _loaded(model, Path(job["dcp"]), base / f"{which}.json")
        save_truth(state, base / f"{which}.safetensors")
    adapter = Qwen3StateDictAdapter(titan, None)
    save_truth(adapter.to_hf(state), base / "to-hf.safetensors")
    save_truth(adapter.from_hf(dict(hub)), base / "from-hf.safetensors")
    if job.get("logits"):
        ids, model = logit_ids(config["vocab_size"]), model.float().eval()
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        with torch.no_grad():
            logits = {"stock": model(ids, positions=positions)}
            for module in model.modules():
                if isinstance(module, GroupedExperts):
                    module.forward = partial(_wide_experts, module)
            logits["wide"] = model(ids, positions=positions)
        save_truth(logits, base / "logits.safetensors")


def _wide_experts(experts: Any, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """``GroupedExperts.forward`` in the dtype of its parameters; the stock one always computes in bfloat16."""
    import torch
    from torch.nn.functional import linear, silu

    weights = zip(rows.split(counts.tolist()), experts.w1_EFD, experts.w2_EDF, experts.w3_EFD, strict=True)
    return torch.cat([linear(silu(linear(row, w1)) * linear(row, w3), w2) for row, w1, w2, w3 in weights])


def _judge_backend(job: Mapping[str, Any]) -> None:
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config import TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.experiments.transformers_modeling_backend import (
        HFTransformerModel,
        TitanModelConfig,
        TitanMoeModelConfig,
    )
    from torchtitan.experiments.transformers_modeling_backend.configs import TransformersBackendConfig
    from torchtitan.experiments.transformers_modeling_backend.moe_replacement import build_and_swap_native_moe

    titan_moe = TitanMoeModelConfig() if job["titan_moe"] else TitanModelConfig()
    model_config = HFTransformerModel.Config(model_config=titan_moe)
    whole = TransformersBackendConfig(
        loss=CrossEntropyLoss.Config(), hf_model=job["source"], training=TrainingConfig(seq_len=64)
    )
    model_config.update_from_config(config=whole)
    model, base = model_config.build(), Path(job["base"])
    if job["titan_moe"]:  # as parallelize_hf_transformers does first of all
        alone = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "world_size"), 1)
        build_and_swap_native_moe(model, ParallelDims(**alone))
    save_truth(_loaded(model, Path(job["dcp"]), base / "backend.json"), base / "backend.safetensors")


def _loaded(model: Any, folder: Path, shapes: Path) -> dict[str, Any]:
    """The model's own state dict, after torch loaded ``folder`` into every tensor of it, in the dtype that is stored.

    ``dcp.load`` raises for a tensor that the folder lacks, ``load_state_dict`` for one that the model does not have.
    """
    import torch.distributed.checkpoint as dcp

    own = model.state_dict()
    shapes.write_text(json.dumps({name: list(tensor.shape) for name, tensor in own.items()}))
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    dtypes = {name: entry.properties.dtype for name, entry in stored.items() if hasattr(entry, "properties")}
    state = {name: ones_of_bits(tensor.shape, dtypes.get(name, tensor.dtype)) for name, tensor in own.items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    for name in [name for name in dtypes if name not in state]:
        raise KeyError(f"{folder} holds {name}, which the model does not have")
    (dtype,) = {tensor.dtype for name, tensor in state.items() if not name.endswith("expert_bias_E")}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.load_state_dict(state, strict=True)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _judge_by_trainer(rank: int, job: Mapping[str, Any], rendezvous: str) -> None:
    trainer = build_trainer(rank, job, rendezvous, initial_load_path=job["dcp"])
    base = Path(job["base"])
    try:
        loaded = trainer.checkpointer.load(step=trainer.config.checkpoint.load_step)  # as Trainer.train begins
    except BaseException as error:  # torch's CheckpointException is no Exception
        if not job.get("refused"):
            raise
        (base / "refusal.txt").write_text(str(error))
    else:
        assert loaded
        assert not job.get("refused")
        whole = whole_state(trainer)
        if rank == 0:
            save_truth(whole, base / "trainer.safetensors")
    end_trainer(trainer)


def main(spec: Path) -> None:
    """Import torchtitan once, then do the jobs in order."""
    prepare_cpu()
    import torch.multiprocessing
    import torchtitan.models.qwen3
    import torchtitan.trainer  # noqa: F401  (before the forks, once)

    jobs = json.loads(spec.read_text())
    for job, address in zip(jobs, free_ports(), strict=False):
        if job["kind"] == "trainer":
            torch.multiprocessing.start_processes(
                _judge_by_trainer, (job, address), nprocs=job["ranks"], start_method="fork"
            )
    for job in jobs:  # after all forks: a model that ran keeps threads, which a fork does not survive
        if job["kind"] == "model":
            _judge_model(job)
        elif job["kind"] == "backend":
            _judge_backend(job)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
