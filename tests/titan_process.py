"""torchtitan 0.3.0 writing checkpoints on the CPU: ``python -m tests.titan_process JOBS.json``, see ``TitanJob``.

It binds the device and the device's module when imported, hence a process of its own. Imports happen once; each
training run is forked from there, so that no run leaves state to the next.

Sources: torchtitan 0.3.0, ``trainer.py``, ``tools/utils.py``, ``components/metrics.py`` (what is asked of the device's
module), ``models/qwen3/__init__.py`` (how a flavor is built).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.models import even_texts, sample_texts
from tests.real_checkpoints import expert_biases, experts_of, read_model, save_dcp, save_truth


def prepare_cpu() -> None:
    """Make torchtitan 0.3.0 take the CPU on torch 2.13: before any other part of it is imported."""
    import resource
    from types import ModuleType, SimpleNamespace

    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout
    from torchtitan.tools import utils

    class Cpu(ModuleType):
        """``torch.cpu`` with the functions of an accelerator's module that the Trainer calls."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch.cpu, name)

    cpu, memory = Cpu("cpu_device"), {"num_alloc_retries": 0, "num_ooms": 0}
    memory |= dict.fromkeys(("active_bytes.all.peak", "reserved_bytes.all.peak"), resource.getrusage(0).ru_maxrss << 10)
    cpu.__dict__.update(
        current_device=lambda: 0,
        device_count=lambda: 1,
        set_device=lambda device: None,
        get_device_name=lambda device=None: "cpu",
        get_device_properties=lambda device=None: SimpleNamespace(name="cpu", total_memory=1 << 34),
        memory_stats=lambda device=None: memory,
        reset_peak_memory_stats=lambda device=None: None,
        empty_cache=lambda: None,
    )
    utils.device_type, utils.device_module = "cpu", cpu
    if not hasattr(dist, "set_timeout"):
        setattr(dist, "set_timeout", _set_pg_timeout)  # noqa: B010  (not a name that torch 2.13 has)


def titan_model_config(config: Mapping[str, Any], *, fuse_qkv: bool, load_balance: bool) -> Any:
    """torchtitan's own configuration of the model that an HF ``config.json`` describes."""
    from torchtitan.models import qwen3
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear
    from torchtitan.models.common.attention import ScaledDotProductAttention

    hidden, vocab, tied = config["hidden_size"], config["vocab_size"], config["tie_word_embeddings"]
    theta = config["rope_parameters"]["rope_theta"] if "rope_parameters" in config else config["rope_theta"]
    common = {
        "n_layers": config["num_hidden_layers"],
        "dim": hidden,
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "fuse_qkv": fuse_qkv,
        "attn_backend": "varlen",
        "rope": CosSinRoPE.Config(dim=config["head_dim"], max_seq_len=256, theta=theta),
    }
    if experts_of(config):
        layers = qwen3._build_qwen3_moe_layers(
            moe_hidden_dim=config["moe_intermediate_size"],
            num_experts=len(experts_of(config)),
            top_k=config["num_experts_per_tok"],
            moe_comm_backend="standard",
            **common,
        )
    else:
        layers = qwen3._build_qwen3_layers(hidden_dim=config["intermediate_size"], **common)
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        if experts_of(config) and not load_balance:
            layer.moe.load_balance_coeff = None
    return qwen3.Qwen3Model.Config(
        vocab_size=vocab,
        dim=hidden,
        norm=qwen3._qwen3_norm(hidden),
        enable_weight_tying=tied,
        layers=layers,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocab,
            embedding_dim=hidden,
            param_init=qwen3._EMBEDDING_SKIP_INIT if tied else qwen3._EMBEDDING_INIT,
        ),
        lm_head=Linear.Config(in_features=hidden, out_features=vocab, param_init=qwen3._LINEAR_INIT),
    )


def _save_titan_model(job: Mapping[str, Any]) -> None:
    """The state dict of torchtitan's model, filled through torchtitan's adapter, saved as its converter script does."""
    import torch
    from torchtitan.models.qwen3 import Qwen3StateDictAdapter

    source, base = Path(job["source"]), Path(job["base"])
    hub, config = read_model(source)
    titan = titan_model_config(config, fuse_qkv=job["fuse_qkv"], load_balance=job["load_balance"])
    model = titan.build()
    model.init_states(buffer_device=torch.device("cpu"))
    loaded = model.load_state_dict(Qwen3StateDictAdapter(titan, None).from_hf(dict(hub)), strict=False)
    lacking = [name for name in loaded.missing_keys if not name.endswith("expert_bias_E")]
    assert not lacking, lacking
    assert not loaded.unexpected_keys, loaded.unexpected_keys
    dtype = getattr(torch, job["dtype"])
    state = {name: t if "expert_bias" in name else t.to(dtype) for name, t in model.state_dict().items()}
    biases = expert_biases(config, 0.01) if job["load_balance"] else {}
    for name, bias in biases.items():
        state[name.removeprefix("model.").replace("mlp.expert_bias", "moe.expert_bias_E")].copy_(bias)
    save_dcp(state, base / "checkpoint")
    save_truth({name: tensor.to(dtype) for name, tensor in hub.items()} | biases, base / "truth.safetensors")


def build_trainer(rank: int, job: Mapping[str, Any], rendezvous: str, **checkpoint: Any) -> Any:
    """torchtitan's ``Trainer`` as one rank of ``job`` runs it; ``checkpoint`` goes to its ``CheckpointManager``.

    Joins the process group, which stays after the run: ``end_trainer`` leaves it.
    """
    import torch
    from datasets import Dataset
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import (
        LRSchedulersContainer,
        default_adamw,
        register_moe_load_balancing_hook,
    )
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.hf_datasets import DatasetConfig, text_datasets
    from torchtitan.models.qwen3 import Qwen3StateDictAdapter, parallelize_qwen3
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.trainer import Trainer

    torch.set_num_threads(1)
    host, port = rendezvous.split(":")
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["ranks"]), MASTER_ADDR=host, MASTER_PORT=port
    )
    source, base = Path(job["source"]), Path(job["base"])
    config = json.loads((source / "config.json").read_text())
    titan = titan_model_config(config, fuse_qkv=job["fuse_qkv"], load_balance=job["load_balance"])
    texts = even_texts(source, 64, 50) if job.get("even") else list(sample_texts(200))
    text_datasets.DATASETS["c4_test"] = DatasetConfig(
        path="-",
        loader=lambda path: Dataset.from_list([{"text": t} for t in texts]),
        sample_processor=lambda s: s["text"],
    )

    def parallelize(model: Any, **options: Any) -> Any:
        model = parallelize_qwen3(model, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):  # gloo has no PREMUL_SUM
                module.set_force_sum_reduction_for_comms(True)
        return model

    return Trainer.Config(
        model_spec=ModelSpec(
            name="qwen3",
            flavor="small",
            model=titan,
            parallelize_fn=parallelize,
            pipelining_fn=None,
            post_optimizer_build_fn=register_moe_load_balancing_hook,
            state_dict_adapter=Qwen3StateDictAdapter,
        ),
        hf_assets_path=str(source),
        dump_folder=str(base / "run"),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=config["vocab_size"])),
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        dataloader=text_datasets.HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path="-"),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        training=TrainingConfig(
            local_batch_size=2,
            seq_len=64,
            steps=job["steps"],
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            spmd_backend="partial_dtensor",
            tensor_parallel_degree=job["tensor"],
            expert_parallel_degree=job["expert"],
        ),
        checkpoint=CheckpointManager.Config(**{"enable": True, "interval": 1000, **checkpoint}),
    ).build()


def whole_state(trainer: Any) -> dict[str, Any]:
    """The live model's state dict with every shard gathered; all ranks call this."""
    (model,) = trainer.model_parts
    state = model.state_dict()
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def end_trainer(trainer: Any) -> None:
    """Close the trainer and leave the process group."""
    import torch.distributed as dist

    trainer.close()
    dist.destroy_process_group()


def _train(rank: int, job: Mapping[str, Any], rendezvous: str) -> None:
    """One rank of a short Trainer run that starts from the HF weights and saves its state at the end."""
    import torch
    from torchtitan.models.qwen3 import Qwen3StateDictAdapter

    last = {"export_dtype": job["export_dtype"]} if job["export_dtype"] else {"last_save_model_only": False}
    trainer = build_trainer(rank, job, rendezvous, initial_load_in_hf=True, **last)
    trainer.train()
    whole = whole_state(trainer)
    if job["export_dtype"]:
        whole = {name: value.to(getattr(torch, job["export_dtype"])) for name, value in whole.items()}
    if rank == 0:
        config = json.loads((Path(job["source"]) / "config.json").read_text())
        titan = titan_model_config(config, fuse_qkv=job["fuse_qkv"], load_balance=job["load_balance"])
        truth = Qwen3StateDictAdapter(titan, None).to_hf(whole)
        biases = {name: value for name, value in whole.items() if name.endswith("expert_bias_E")}
        truth |= {f"model.{name.replace('moe.expert_bias_E', 'mlp.expert_bias')}": v for name, v in biases.items()}
        save_truth(truth, Path(job["base"]) / "truth.safetensors")
    end_trainer(trainer)


def free_ports() -> Iterator[str]:
    import socket

    while True:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{listener.getsockname()[1]}"
        yield address


def main(spec: Path) -> None:
    """Import torchtitan once, then do the jobs in order; training runs in forked ranks, so that no state leaks."""
    prepare_cpu()
    import torch.multiprocessing
    import torchtitan.models.qwen3
    import torchtitan.trainer  # noqa: F401  (before the forks, once)

    for job, address in zip(json.loads(spec.read_text()), free_ports(), strict=False):
        if job["steps"]:
            torch.multiprocessing.start_processes(_train, (job, address), nprocs=job["ranks"], start_method="fork")
        else:
            _save_titan_model(job)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
