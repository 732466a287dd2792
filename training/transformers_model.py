"""The transformers model of a checkpoint, as torchtitan's Trainer takes it: the backend that torchtitan has, mended.

torchtitan 0.3.0's transformers backend (``experiments/transformers_modeling_backend``) trains without positions under
transformers 5, insists on flex attention, shards by a scheme that torch 2.13 has not, and loads no experts. Each is put
right here from outside; ``tests/training/test_transformers_faults.py`` shows the stock faults, and fails when one is
mended there, so that its part of this module can go. Import after ``devices.prepare_torchtitan``.

State dict names are those of the model in memory under ``model.``, experts fused: the format ``accelerate``.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from qwen3conv.converters.config import Qwen3Config
from qwen3conv.converters.config_json import read_json_object
from qwen3conv.converters.errors import PolicyError

from .titan import TORCH_DTYPE_MAP, ModelSpec
from .titan.transformers import HFTransformerModel, TitanModelConfig, apply_compile, apply_fsdp


class TransformersModel(HFTransformerModel):
    """The backend's model with positions, and with attention by SDPA inside of documents."""

    @dataclass(kw_only=True, slots=True)
    class Config(HFTransformerModel.Config):
        """The model of the ``config.json`` in ``hf_assets_path``."""

        loops: bool = field(init=False, default=False)
        """Whether experts are computed one after another, in any dtype."""

        def __init__(self, *, loops: bool) -> None:
            # TitanModelConfig, not the one for MoE: that replaces transformers' experts by torchtitan's
            HFTransformerModel.Config.__init__(self, model_config=TitanModelConfig())
            self.loops = loops

        def _configure_hf_attention(self) -> None:
            self._titan_injected_model_args["attn_implementation"] = "sdpa"
            self._choose(attn_implementation="sdpa", _attn_implementation="sdpa")

        def _choose(self, **chosen: str) -> None:
            """Set what transformers keeps outside of the fields that this class declares."""
            for name, value in chosen.items():
                setattr(self, name, value)

        def update_from_config(self, *, config: Any = None, **unused: object) -> TransformersModel.Config:
            """Take every size and number from the ``config.json`` of the source.

            Raises:
                PolicyError: it names code of its own, which the backend would run.
            """
            place = Path(config.hf_assets_path)
            if "auto_map" in read_json_object(place / "config.json")[0]:
                raise PolicyError(
                    f"{place / 'config.json'} has auto_map: code beside the weights is not run; remove it"
                )
            seen = types.SimpleNamespace(
                training=config.training,
                parallelism=config.parallelism,
                debug=config.debug,
                loss=config.loss,
                hf_model=str(place),
            )
            HFTransformerModel.Config.update_from_config(self, config=seen)
            experts = "eager" if self.loops else "grouped_mm"
            self._choose(_attn_implementation="sdpa", _experts_implementation=experts)
            return self

    def __init__(self, config: Config) -> None:
        super().__init__(config)

    def get_attention_masks(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions (B, L) that begin anew with every document -> what may be seen (B, 1, L, L), bool."""
        document_BL = (positions == 0).cumsum(1)
        length = positions.shape[1]
        causal_LL = torch.ones(length, length, dtype=torch.bool, device=positions.device).tril()
        return (causal_LL & (document_BL[:, :, None] == document_BL[:, None, :]))[:, None]

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """What the backend does, and the inverse frequencies of RoPE, which it leaves as they came from ``to_empty``.

        It looks for an attribute ``rope_init_fn``, which transformers 5 has not.
        """
        super().init_states(buffer_device=buffer_device)
        rotary = self.rotary_emb
        device = rotary.inv_freq.device
        with torch.device("cpu"):
            fresh = type(rotary)(rotary.config)
        for name, buffer in fresh.named_buffers():
            getattr(rotary, name).copy_(buffer.to(device))
        rotary.attention_scaling = fresh.attention_scaling


def transformers_spec(config: Qwen3Config, *, device: str) -> ModelSpec:
    """The transformers model of ``config`` for torchtitan's Trainer; experts in a loop on a CPU, in any dtype."""
    return ModelSpec(
        name="transformers",
        flavor="from config.json",
        model=TransformersModel.Config(loops=device == "cpu"),
        parallelize_fn=parallelize_transformers,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )


def parallelize_transformers(
    model: TransformersModel,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
) -> nn.Module:
    """TP over heads, rows and vocabulary; then checkpointing, compilation and FSDP2 by torchtitan's own functions.

    The backend's own way needs types of sharding (``spmd_types``) that FSDP2 of torch 2.13 cannot shard. Experts and
    router are computed whole on every tensor-parallel rank.
    """
    if parallel_dims.tp_enabled:
        _apply_tp(model, parallel_dims.get_mesh("tp"))
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    apply_fsdp(
        model,
        parallel_dims.get_mesh(names),
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        pp_enabled=False,
        cpu_offload=training.enable_cpu_offload,
        reshard_after_forward_policy=parallelism.fsdp_reshard_after_forward,
    )
    assert isinstance(model, FSDPModule)
    return model


def _apply_tp(model: TransformersModel, mesh: DeviceMesh) -> None:
    """Hidden states are whole between the parts of a layer; every parameter is on the mesh, cut or replicated."""
    tied = model.lm_head.weight is model.tok_embeddings.weight
    parallelize_module(model.tok_embeddings, mesh, RowwiseParallel(input_layouts=Replicate()))
    if tied:
        model.lm_head.weight = model.tok_embeddings.weight
    parallelize_module(model.lm_head, mesh, ColwiseParallel(output_layouts=Replicate()))
    if tied:  # the style made a parameter of its own
        model.lm_head.weight = model.tok_embeddings.weight
    _compute_whole(model.norm, mesh)
    for layer in model.layers:
        cuts: dict[str, ParallelStyle] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        cuts["self_attn.o_proj"] = RowwiseParallel()
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            _compute_whole(norm, mesh)
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            _compute_whole(norm, mesh, Partial())  # it sees the heads of one rank
        if hasattr(layer.mlp, "experts"):
            _compute_whole(layer.mlp, mesh)
        else:
            cuts |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
            cuts |= {"mlp.down_proj": RowwiseParallel()}
        parallelize_module(layer, mesh, cuts)


class _Inner(nn.Module):
    """Calls what ``module.forward`` was, under a name that parameters can be given for."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self._forward = module, forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


def _compute_whole(module: nn.Module, mesh: DeviceMesh, gradient: Placement | None = None) -> None:
    """Replicate ``module``'s parameters over ``mesh``, and have every rank compute with its own copy, in plain tensors.

    ``gradient`` is what a rank's gradient of them is: the whole (default), or a part of the sum.
    """
    distribute_module(module, mesh)
    inner = _Inner(module, module.forward)
    placements = (gradient or Replicate(),)

    def forward(*args: Any, **kwargs: Any) -> Any:
        local = {
            f"module.{name}": parameter.to_local(grad_placements=placements)
            for name, parameter in module.named_parameters()
            if isinstance(parameter, DTensor)
        }
        return torch.func.functional_call(inner, local, args, kwargs)

    module.forward = forward
