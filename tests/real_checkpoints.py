"""Checkpoints that the real libraries write, each with the whole tensors it must turn out to hold.

``titan_state_dict`` spells torchtitan's key schemas T1..T7 from first principles, with torch ops only; nothing here
imports the product. ``ranked_checkpoints`` lets four real ranks write (``multi_rank.py``, one launch for all);
``titan_checkpoints`` lets torchtitan 0.3.0 itself write: its model's state dict, or its Trainer's full training state.
torchtitan binds the device when imported, so it runs in a process of its own (``titan_process.py``).
Every checkpoint ``NAME/checkpoint`` has ``NAME/truth.safetensors`` beside it, under the hub's names (and
``model.layers.N.mlp.expert_bias`` for torchtitan's routing bias).

Sources of the schemas: torchtitan git history, ``models/qwen3/model/state_dict_adapter.py`` at v0.2.0 and v0.3.0 and
``models/common/attention.py`` (fused rows: per KV group its query heads, then k, then v).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.models import dense_model, moe_model, once, saved_model

if TYPE_CHECKING:
    import pytest
    import torch

State = dict[str, Any]
SCHEMAS = ("T1", "T2", "T3", "T4", "T5", "T6", "T7")
FUSING_SCHEMAS = ("T3", "T4", "T5")
"""Schemas in which a model with fused QKV saved it fused. In T6 and T7 only the optimizer's names are fused."""


class RealCheckpoint(NamedTuple):
    """A folder that a real library wrote, and the file of the tensors in it, under the hub's names."""

    folder: Path
    truth: Path

    def tensors(self) -> dict[str, torch.Tensor]:
        """The truth, read by the safetensors library."""
        from safetensors.torch import load_file

        return load_file(self.truth)


def titan_state_dict(
    schema: str,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    *,
    fused_qkv: bool = False,
    expert_bias: float | None = 0.0,
) -> dict[str, torch.Tensor]:
    """What a torchtitan model of ``schema`` saves for the hub's ``tensors`` (one per expert) and ``config.json``.

    A tied head is stored a second time, as torchtitan does. MoE layers get ``expert_biases(config, expert_bias)``;
    ``None`` leaves the key out (``load_balance_coeff=None``).
    """
    import torch

    age = SCHEMAS.index(schema)
    if age == 0 and experts_of(config):
        raise ValueError("T1 is dense only")
    if fused_qkv and schema not in FUSING_SCHEMAS:
        raise ValueError(f"a model of schema {schema} does not save fused QKV")
    state = {"tok_embeddings.weight": tensors["model.embed_tokens.weight"], "norm.weight": tensors["model.norm.weight"]}
    head = tensors["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    state["lm_head.weight" if age >= 3 else "output.weight"] = head.clone()
    for layer in range(config["num_hidden_layers"]):
        hub, own = f"model.layers.{layer}", f"layers.{layer}"
        qkv = [tensors[f"{hub}.self_attn.{part}_proj.weight"] for part in "qkv"]
        if fused_qkv:
            state[f"{own}.attention.qkv_linear.wqkv.weight"] = fuse_qkv(qkv, config)
        else:
            place = f"{own}.attention.qkv_linear" if age >= 2 else f"{own}.attention"
            state |= {f"{place}.w{part}.weight": weight for part, weight in zip("qkv", qkv, strict=True)}
        state[f"{own}.attention.wo.weight"] = tensors[f"{hub}.self_attn.o_proj.weight"]
        for norm in ("q_norm", "k_norm"):
            state[f"{own}.attention.{norm}.weight"] = tensors[f"{hub}.self_attn.{norm}.weight"]
        state[f"{own}.attention_norm.weight"] = tensors[f"{hub}.input_layernorm.weight"]
        state[f"{own}.ffn_norm.weight"] = tensors[f"{hub}.post_attention_layernorm.weight"]
        for short, projection in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            if not experts_of(config):
                state[f"{own}.feed_forward.{short}.weight"] = tensors[f"{hub}.mlp.{projection}.weight"]
                continue
            stacked = torch.stack([tensors[f"{hub}.mlp.experts.{e}.{projection}.weight"] for e in experts_of(config)])
            suffix = "" if age < 4 else "_EDF" if short == "w2" else "_EFD"
            place = f"{own}.moe.routed_experts.inner_experts" if age >= 6 else f"{own}.moe.experts"
            state[f"{place}.{short}{suffix}"] = stacked
        if experts_of(config):
            state[f"{own}.moe.router.gate.weight"] = tensors[f"{hub}.mlp.gate.weight"]
            if expert_bias is not None:
                bias = expert_biases(config, expert_bias)[f"{hub}.mlp.expert_bias"]
                state[f"{own}.moe.expert_bias{'_E' if age >= 4 else ''}"] = bias
    return state


ADAMW: dict[str, object] = {
    "lr": 1e-3,
    "initial_lr": 1e-3,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    **dict.fromkeys(("amsgrad", "maximize", "foreach", "capturable", "differentiable"), False),
    **dict.fromkeys(("fused", "decoupled_weight_decay"), True),
}

WHOLE_SCHEDULER: dict[str, object] = {
    "base_lrs": [1e-3],
    "last_epoch": 7,
    "_step_count": 8,
    "_is_initial": False,
    "_get_lr_called_within_step": False,
    "_last_lr": [1e-3],
}
"""What torchtitan 0.2.2 saves of its scheduler."""
"""The settings that torchtitan 0.3.0 stores once per parameter."""


def titan_training_state(
    schema: str,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    *,
    fused_qkv: bool = False,
    expert_bias: float | None = 0.0,
) -> State:
    """A full training checkpoint of ``schema`` as a state dict: model, AdamW state, scheduler, step.

    The moments are elementwise in the (float32) weight, ``exp_avg = w / 2`` and ``exp_avg_sq = w * w``, so their truth
    is the same functions of the hub's tensors. Optimizer names follow parameters: from T3 on fused QKV stays fused in
    them, whatever the model's own keys do; a tied head and the routing bias have none.
    """
    import torch

    model = titan_state_dict(
        schema, tensors, config, fused_qkv=fused_qkv and schema in FUSING_SCHEMAS, expert_bias=expert_bias
    )
    parameters = {name: value for name, value in model.items() if "expert_bias" not in name}
    if config["tie_word_embeddings"]:
        parameters = {
            name: value for name, value in parameters.items() if name not in {"lm_head.weight", "output.weight"}
        }
    if fused_qkv:
        parameters = {name: value for name, value in parameters.items() if ".qkv_linear." not in name}
        for layer in range(config["num_hidden_layers"]):
            qkv = [tensors[f"model.layers.{layer}.self_attn.{part}_proj.weight"] for part in "qkv"]
            parameters[f"layers.{layer}.attention.qkv_linear.wqkv.weight"] = fuse_qkv(qkv, config)
    optimizer: State = {}
    for name, value in parameters.items():
        optimizer[f"state.{name}.exp_avg"] = value.float() / 2
        optimizer[f"state.{name}.exp_avg_sq"] = value.float() ** 2
        optimizer[f"state.{name}.step"] = torch.tensor(7.0)
        optimizer |= {f"param_groups.{name}.{key}": setting for key, setting in ADAMW.items()}
    return {
        **model,
        "optimizer": optimizer,
        "lr_scheduler": dict(WHOLE_SCHEDULER) if schema in ("T1", "T2") else {"last_epoch": 7},
        "train_state": {"step": 7, "ntokens_seen": 7 * 512},
        "dataloader": {"dp_rank_0": b"opaque", "world_size": 1},
    }


def fuse_qkv(qkv: Sequence[torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor:
    """Rows of a fused ``wqkv``: for each KV group its query heads, then its k head, then its v head; (R, H)."""
    import torch

    q, k, v = qkv
    groups, head_dim = config["num_key_value_heads"], config["head_dim"]
    per_group = [q.reshape(groups, -1, q.shape[1]), k.reshape(groups, head_dim, -1), v.reshape(groups, head_dim, -1)]
    return torch.cat(per_group, dim=1).reshape(-1, q.shape[1])


def expert_biases(config: Mapping[str, Any], scale: float) -> dict[str, torch.Tensor]:
    """A float32 routing bias per layer, (E,), every entry distinct; all zero for ``scale`` 0."""
    import torch

    count = len(experts_of(config))
    layers = range(config["num_hidden_layers"] if count else 0)
    pattern = torch.tensor([(-1.0) ** e * (e + 1) for e in range(count)])
    return {  # + 0.0: no negative zeros
        f"model.layers.{layer}.mlp.expert_bias": scale * (pattern + count * layer) + 0.0 for layer in layers
    }


WRAPPERS = ("model.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def wrapped(state: Mapping[str, Any], wrapper: str) -> State:
    """The same state under a wrapper's names: ``model.`` in front, or a module wrapper's segment.

    ``torch.compile`` and activation checkpointing wrap blocks (``layers.0._orig_mod.x``), FSDP1 the root as well.
    """
    renamed: State = {}
    for name, value in state.items():
        segments = name.split(".")
        if wrapper == "model.":
            segments.insert(0, "model")
        else:
            if segments[0] == "layers":
                segments.insert(2, wrapper.rstrip("."))
            if wrapper == "_fsdp_wrapped_module.":
                segments.insert(0, wrapper.rstrip("."))
        renamed[".".join(segments)] = value
    return renamed


def experts_of(config: Mapping[str, Any]) -> range:
    """Expert numbers; empty for a dense model. Both spellings of the count are read."""
    return range(config.get("num_experts") or config.get("num_local_experts") or 0)


def save_dcp(state: Mapping[str, Any], folder: Path) -> Path:
    """``dcp.save`` in this process, without a process group."""
    import torch.distributed.checkpoint as dcp

    dcp.save(dict(state), checkpoint_id=str(folder), no_dist=True)
    return folder


def save_truth(tensors: Mapping[str, torch.Tensor], path: Path) -> Path:
    """The expected tensors as one safetensors file."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path)
    return path


RANKED: tuple[tuple[str, str, str, str], ...] = (
    ("titan-fsdp", "titan dense", "fsdp", "dcp"),
    ("titan-hybrid", "titan dense", "hybrid", "dcp"),
    ("titan-tp", "titan dense", "tp", "dcp"),
    ("titan-fsdp-tp", "titan dense", "fsdp-tp", "dcp"),
    ("titan-pp", "titan dense", "pp", "dcp"),
    ("titan-moe-fsdp", "titan moe", "fsdp", "dcp"),
    ("titan-moe-fsdp-tp", "titan moe", "fsdp-tp", "dcp"),
    ("titan-moe-ep", "titan moe", "ep", "dcp"),
    ("titan-moe-ep-dim-1", "titan moe", "ep-dim-1", "dcp"),
    ("titan-moe-ep4", "titan moe", "ep4", "dcp"),
    ("hf-fsdp-tp", "hf dense", "fsdp-tp", "dcp"),
    ("hf-tp4", "hf dense", "tp4", "dcp"),
    ("hf-moe-fsdp", "hf moe", "fsdp", "dcp"),
    ("hf-shards", "hf dense", "fsdp-tp", "hf-shards"),
    ("hf-moe-shards", "hf moe", "fsdp", "hf-shards"),
    ("verl", "hf dense", "fsdp", "verl"),
    ("verl-hybrid", "hf dense", "hybrid", "verl"),
    ("verl-fsdp-tp", "hf dense", "fsdp-tp", "verl"),
    ("verl-tp4", "hf dense", "tp4", "verl"),
    ("verl-moe", "hf moe", "fsdp", "verl"),
    ("accelerate", "dense", "", "accelerate"),
    ("accelerate-moe", "moe", "", "accelerate"),
)
"""Checkpoints that four ranks write: name, source, placement (``multi_rank.PLACEMENTS``), writer. Titan sources are
float32 with nonzero routing biases; ``hf`` sources keep the dtype of the model; accelerate saves float32."""


def ranked_checkpoints(base: Path, *, dense: Path, moe: Path, only: Sequence[str] = ()) -> dict[str, RealCheckpoint]:
    """Let four ranks write every checkpoint of ``RANKED`` (or those named) under ``base``; about 12 s in one launch.

    ``dense`` and ``moe`` are model folders of per-expert names in one file. The checkpoint is ``base/NAME/checkpoint``;
    accelerate's has ``pytorch_model_fsdp_0`` and ``optimizer_0`` inside.
    """
    chosen = [row for row in RANKED if not only or row[0] in only]
    sources: dict[str, Path] = {"dense": dense, "moe": moe}
    truths: dict[str, dict[str, torch.Tensor]] = {}
    for kind in ("dense", "moe"):
        hub, config = read_model(sources[kind])
        wide = {name: tensor.float() for name, tensor in hub.items()}
        state = titan_state_dict("T7", wide, config, expert_bias=0.01)
        sources[f"hf {kind}"] = save_truth(hub, base / "sources" / f"hf-{kind}.safetensors")
        sources[f"titan {kind}"] = save_truth(state, base / "sources" / f"titan-{kind}.safetensors")
        truths |= {kind: wide, f"hf {kind}": hub, f"titan {kind}": wide | expert_biases(config, 0.01)}
    made, jobs = {}, []
    for name, source, placement, writer in chosen:
        folder = base / name / "checkpoint"
        folder.parent.mkdir(parents=True)
        made[name] = RealCheckpoint(folder, save_truth(truths[source], base / name / "truth.safetensors"))
        jobs.append(
            {
                "source": str(sources[source]),
                "folder": str(folder),
                "placement": placement,
                "writer": writer,
                "placements": str(base / name / "placements.json"),
            }
        )
    launch("tests.multi_rank", base / "jobs.json", jobs)
    for name, _, _, writer in chosen:
        if writer == "verl":
            (base / name / "checkpoint" / "huggingface").mkdir()
            text = ((moe if "moe" in name else dense) / "config.json").read_text()
            (base / name / "checkpoint" / "huggingface" / "config.json").write_text(text)
    return made


def ranked_session(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RealCheckpoint]:
    """All of ``RANKED`` from the dense and the MoE model, written once per session. Not to be changed."""

    def build(folder: Path) -> None:
        ranked_checkpoints(folder, dense=dense_model(tmp_path_factory), moe=moe_model(tmp_path_factory))

    base = once(tmp_path_factory, "ranked", build)
    names = [name for name, *_ in RANKED]
    return {name: RealCheckpoint(base / name / "checkpoint", base / name / "truth.safetensors") for name in names}


class TitanJob(NamedTuple):
    """One checkpoint that torchtitan itself writes. ``steps == 0``: the state dict of its model, no training."""

    name: str
    source: Path
    """HF model folder that the weights come from."""
    fuse_qkv: bool = True
    steps: int = 0
    ranks: int = 1
    tensor: int = 1
    """Degree of tensor parallelism; the remaining ranks are FSDP."""
    expert: int = 1
    load_balance: bool = True
    dtype: str = "float32"
    """Of the model whose state dict is saved; the Trainer always keeps float32."""
    export_dtype: str = ""
    """Of a Trainer's last save, which is then the model alone, as it is by default."""


def titan_checkpoints(base: Path, jobs: Sequence[TitanJob]) -> dict[str, RealCheckpoint]:
    """Let torchtitan 0.3.0 write one checkpoint per job on the CPU, all in one launch of some 10 s.

    A trained one is the Trainer's ``step-N`` with optimizer, lr_scheduler, dataloader and train_state, from its own
    ``CheckpointManager``; its truth is what the live model held when the run ended.
    """
    made = {job.name: _made(base, job) for job in jobs}
    for checkpoint in made.values():
        checkpoint.truth.parent.mkdir(parents=True)
    launch(
        "tests.titan_process",
        base / "titan-jobs.json",
        [{**job._asdict(), "source": str(job.source), "base": str(base / job.name)} for job in jobs],
    )
    return made


SESSION_JOBS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dense", {"source": "dense"}),
    ("tied", {"source": "dense-tied"}),
    ("separate-qkv", {"source": "dense", "fuse_qkv": False}),
    ("bf16", {"source": "dense-sharded", "dtype": "bfloat16"}),
    ("moe", {"source": "moe"}),
    ("moe-without-bias", {"source": "moe", "load_balance": False}),
    ("trained-tied", {"source": "dense-tied", "steps": 2}),
    ("trained-separate-qkv", {"source": "dense", "fuse_qkv": False, "steps": 2}),
    ("trained-moe", {"source": "moe-trainable", "steps": 3}),
    ("exported-moe", {"source": "moe-trainable", "steps": 2, "export_dtype": "bfloat16"}),
    ("trained-tied-fsdp-tp", {"source": "dense-tied", "steps": 2, "ranks": 4, "tensor": 2}),
    ("trained-moe-fsdp-tp-ep", {"source": "moe-trainable", "steps": 2, "ranks": 4, "tensor": 2, "expert": 2}),
)
"""What ``titan_session`` makes: names, and ``TitanJob`` fields with the source's name in ``models.VARIANTS``."""


def titan_session(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RealCheckpoint]:
    """All of ``SESSION_JOBS`` by torchtitan itself, written once per session in some 20 s. Not to be changed."""
    jobs = [
        TitanJob(name=name, **{**fields, "source": saved_model(tmp_path_factory, fields["source"])})
        for name, fields in SESSION_JOBS
    ]
    base = once(tmp_path_factory, "titan", lambda folder: titan_checkpoints(folder, jobs))
    return {job.name: _made(base, job) for job in jobs}


def _made(base: Path, job: TitanJob) -> RealCheckpoint:
    last = f"run/checkpoint/step-{job.steps}" if job.steps else "checkpoint"
    return RealCheckpoint(base / job.name / last, base / job.name / "truth.safetensors")


def read_model(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and ``config.json`` of an HF folder."""
    from safetensors.torch import load_file

    tensors = {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}
    return tensors, json.loads((folder / "config.json").read_text())


def launch(module: str, spec: Path, jobs: object) -> None:
    """Run one of the modules of this folder on a job list; its output is shown when it fails."""
    spec.parent.mkdir(parents=True, exist_ok=True)
    spec.write_text(json.dumps(jobs, indent=1))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", module, str(spec)],
        cwd=Path(__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{module} {spec} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
