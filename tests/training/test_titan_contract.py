"""What ``training`` takes from torchtitan by name: when a release moves one of these, the test says which."""

from __future__ import annotations

import dataclasses
import importlib
import inspect

import pytest

from qwen3conv.training.devices import prepare_torchtitan

NAMES = {
    "torchtitan.components.checkpointer": ["CheckpointManager"],
    "torchtitan.components.dataloader": ["ParallelAwareDataloader"],
    "torchtitan.components.lora": ["LoRAConverter"],
    "torchtitan.components.loss": ["ChunkedLossWrapper", "CrossEntropyLoss", "IGNORE_INDEX"],
    "torchtitan.components.metrics": ["MetricsProcessor"],
    "torchtitan.components.optimizer": ["LRSchedulersContainer", "default_adamw", "register_moe_load_balancing_hook"],
    "torchtitan.components.validate": ["Validator"],
    "torchtitan.config": ["ConfigManager", "TORCH_DTYPE_MAP"],
    "torchtitan.config.configs": ["DebugConfig", "ParallelismConfig", "TrainingConfig"],
    "torchtitan.config.override": ["derive"],
    "torchtitan.distributed.activation_checkpoint": ["FullAC", "SelectiveAC"],
    "torchtitan.distributed.compile": ["apply_compile"],
    "torchtitan.experiments": ["_supported_experiments"],
    "torchtitan.experiments.transformers_modeling_backend": ["TitanModelConfig"],
    "torchtitan.experiments.transformers_modeling_backend.model": ["HFTransformerModel"],
    "torchtitan.experiments.transformers_modeling_backend.parallelize": ["apply_fsdp"],
    "torchtitan.hf_datasets": ["DatasetConfig"],
    "torchtitan.hf_datasets.text_datasets": ["DATASETS", "HuggingFaceTextDataLoader"],
    "torchtitan.models": ["_supported_models"],
    "torchtitan.models.common": ["CosSinRoPE", "Embedding", "Linear"],
    "torchtitan.models.common.attention": ["ScaledDotProductAttention", "VarlenAttention", "VarlenMetadata"],
    "torchtitan.models.common.moe": ["GroupedExperts"],
    "torchtitan.models.qwen3": ["Qwen3StateDictAdapter", "parallelize_qwen3"],
    "torchtitan.models.qwen3.model": ["Qwen3Model", "Qwen3TransformerBlock"],
    "torchtitan.protocols.model_spec": ["ModelSpec"],
    "torchtitan.tools.utils": ["device_module", "device_type"],
    "torchtitan.train": ["main"],
    "torchtitan.trainer": ["Trainer"],
}

FIELDS = {
    "torchtitan.trainer:Trainer.Config": [
        "model_spec",
        "hf_assets_path",
        "dump_folder",
        "dataloader",
        "optimizer",
        "loss",
    ],
    "torchtitan.config.configs:TrainingConfig": [
        *("local_batch_size", "global_batch_size", "seq_len", "steps", "mixed_precision_param", "disable_cuda_graphs"),
    ],
    "torchtitan.config.configs:ParallelismConfig": [
        *("spmd_backend", "data_parallel_shard_degree", "tensor_parallel_degree", "expert_parallel_degree"),
        *("data_parallel_replicate_degree", "context_parallel_degree", "pipeline_parallel_degree"),
    ],
    "torchtitan.components.checkpointer:CheckpointManager.Config": [
        *("enable", "interval", "initial_load_path", "exclude_from_loading", "last_save_model_only"),
    ],
    "torchtitan.components.optimizer:LRSchedulersContainer.Config": [
        *("warmup_steps", "total_steps", "decay_type", "min_lr_factor"),
    ],
    "torchtitan.hf_datasets.text_datasets:HuggingFaceTextDataLoader.Config": ["dataset", "dataset_path"],
    "torchtitan.components.validate:Validator.Config": ["enable", "freq", "steps", "dataloader"],
    "torchtitan.protocols.model_spec:ModelSpec": [
        *(
            "name",
            "flavor",
            "model",
            "parallelize_fn",
            "pipelining_fn",
            "post_optimizer_build_fn",
            "state_dict_adapter",
        ),
    ],
    "torchtitan.models.common.attention:VarlenMetadata": ["cu_seq_q"],
}

PARAMETERS = {
    "torchtitan.models.common.attention:VarlenAttention.forward": ["q_BLNH", "k_BLNH", "v_BLNH", "attention_masks"],
    "torchtitan.experiments.transformers_modeling_backend.model:HFTransformerModel.init_states": ["buffer_device"],
    "torchtitan.experiments.transformers_modeling_backend.model:HFTransformerModel.get_attention_masks": ["positions"],
    "torchtitan.experiments.transformers_modeling_backend.model:HFTransformerModel.Config.update_from_config": [
        "config"
    ],
    "torchtitan.models.common.moe:GroupedExperts.forward": ["x_RD", "num_tokens_per_expert_E"],
    "torchtitan.trainer:Trainer.post_dataloading_process": ["input_dict", "labels"],
    "torchtitan.trainer:Trainer.load_state_dict": ["state_dict"],
    "torchtitan.trainer:Trainer.should_continue_training": ["self"],
    "torchtitan.trainer:Trainer.close": ["self"],
    "torchtitan.components.metrics:MetricsProcessor.log_validation": ["loss", "step"],
    "torchtitan.components.metrics:MetricsProcessor.log": ["step", "global_avg_loss", "global_max_loss", "grad_norm"],
}


def find(path: str) -> object:
    module, _, names = path.partition(":")
    found: object = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


@pytest.fixture(scope="module", autouse=True)
def prepared() -> None:
    prepare_torchtitan("cpu")


def test_every_name_is_where_we_import_it_from() -> None:
    absent = []
    for module, names in NAMES.items():
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            absent.append(f"{module}: {error}")
            continue
        absent += [f"{module}.{name}" for name in names if not hasattr(found, name)]
    assert absent == []


def test_every_field_that_is_set_is_there() -> None:
    absent = []
    for path, names in FIELDS.items():
        kind = find(path)
        fields = getattr(kind, "_fields", None) or [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
        absent += [f"{path}.{name}" for name in names if name not in fields]
    assert absent == []


def test_what_is_overridden_is_called_as_before() -> None:
    absent = []
    for path, names in PARAMETERS.items():
        parameters = inspect.signature(find(path)).parameters  # type: ignore[arg-type]
        absent += [f"{path}({name})" for name in names if name not in parameters]
    assert absent == []
