"""torchtitan 0.2.2 itself, training on the CPU: ``python -m tests.older_release JOB.json`` with it first on the path.

It starts from a Hugging Face folder, or goes on from a checkpoint that is in its dump folder, saves its whole state
every ``interval`` steps and writes the loss and gradient norm of each step. The hyper-parameters are
those of ``titan_process``.

Sources: torchtitan 0.2.2, ``train.py``, ``config/job_config.py``, ``models/qwen3/__init__.py``.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.models import even_texts
from tests.real_checkpoints import experts_of

ROOT = Path(__file__).parents[1]
RELEASE = ROOT / ".titan-0.2.2"


def run_older(release: Path, source: Path, base: Path, *, steps: int, interval: int) -> dict[str, list[float]]:
    """Train in ``base/run`` with the torchtitan installed in ``release``; loss and gradient norm by step."""
    base.mkdir(exist_ok=True)
    job = {"source": str(source), "base": str(base), "steps": steps, "interval": interval}
    (base / "job.json").write_text(json.dumps(job))
    path = [str(release), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.older_release", str(base / "job.json")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        cwd=base,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found: dict[str, list[float]] = json.loads((base / "losses.json").read_text())
    return found


def main(job: Mapping[str, Any]) -> None:
    """Train as ``job`` says."""
    assert importlib.metadata.version("torchtitan") == "0.2.2"
    import torch
    from torch.distributed.distributed_c10d import _set_pg_timeout

    from qwen3conv.training.devices import _cpu_device_module
    from tests.titan_process import free_ports

    device = _cpu_device_module()  # 0.2.2 asks for it while it is imported, and keeps many copies
    utils: Any = torch._utils
    utils._get_available_device_type, utils._get_device_module = lambda: "cpu", lambda name: device
    torch.distributed.set_timeout = _set_pg_timeout  # type: ignore[attr-defined]
    histogram = torch.histc
    # of integers, the CPU has none
    torch.histc = lambda counted, **bins: histogram(counted.float(), **bins).to(counted.dtype)

    from datasets import Dataset
    from torchtitan.config import JobConfig
    from torchtitan.hf_datasets import DatasetConfig, text_datasets
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3 import qwen3_args
    from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
    from torchtitan.train import Trainer

    torch.set_num_threads(1)
    host, port = next(free_ports()).split(":")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR=host, MASTER_PORT=port)
    source, base = Path(job["source"]), Path(job["base"])
    config = json.loads((source / "config.json").read_text())
    texts = even_texts(source, 64, 50)  # and one that ends a text: a sequence and its labels
    text_datasets.DATASETS["c4_test"] = DatasetConfig(
        path="-",
        loader=lambda path: Dataset.from_list([{"text": t} for t in texts]),
        sample_processor=lambda s: s["text"],
    )
    experts = len(experts_of(config))
    qwen3_args["small"] = Qwen3ModelArgs(
        dim=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        vocab_size=config["vocab_size"],
        head_dim=config["head_dim"],
        hidden_dim=config["intermediate_size"],
        rope_theta=config["rope_parameters"]["rope_theta"] if "rope_parameters" in config else config["rope_theta"],
        enable_weight_tying=config["tie_word_embeddings"],
        moe_enabled=bool(experts),
        moe_inter_dim=config.get("moe_intermediate_size", 0),
        moe_args=MoEArgs(
            num_experts=experts or 1,  # it is divided by, of a dense model too
            num_shared_experts=0,
            top_k=config.get("num_experts_per_tok", 1),
            score_func="softmax",
            route_norm=True,
            score_before_experts=False,
            load_balance_coeff=None,  # 0.2.2 stores a bias for it and never trains it; 0.3.0 would
            use_grouped_mm=False,  # it sorts tokens by a kernel that the CPU has not
        ),
    )
    settings = JobConfig()
    settings.job.dump_folder = str(base / "run")
    settings.model.name, settings.model.flavor, settings.model.hf_assets_path = "qwen3", "small", str(source)
    settings.optimizer.lr, settings.optimizer.implementation = 1e-3, "for-loop"
    settings.lr_scheduler.warmup_steps = 1
    settings.metrics.log_freq, settings.metrics.disable_color_printing = 1, True
    settings.activation_checkpoint.mode = "none"
    training, checkpoint = settings.training, settings.checkpoint
    training.local_batch_size, training.seq_len, training.steps = 2, 64, job["steps"]
    training.mixed_precision_param = "float32"
    checkpoint.enable, checkpoint.interval = True, job["interval"]
    checkpoint.initial_load_in_hf, checkpoint.last_save_model_only = True, False
    trainer = Trainer(settings)
    found: dict[int, tuple[float, float]] = {}
    log = trainer.metrics_processor.log

    def remember(step: int, loss: float, largest: float, norm: float, **more: Any) -> None:
        found[step] = (loss, norm)
        log(step, loss, largest, norm, **more)

    trainer.metrics_processor.log = remember
    trainer.train()
    (base / "losses.json").write_text(json.dumps(found))
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
