"""Every name of torchtitan that ``training`` uses. No other module of it imports torchtitan.

When torchtitan moves a name, or a fork has it elsewhere, it is changed here; ``tests/training/test_titan_contract.py``
says which. What is imported is 0.3.x; ``devices.prepare_torchtitan`` comes before this module, because torchtitan
settles on a device when it is imported. A part that loads a heavy package of its own has a module beside this one.
"""

from __future__ import annotations

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.lora import LoRAConverter
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw, register_moe_load_balancing_hook
from torchtitan.components.validate import Validator
from torchtitan.config import TORCH_DTYPE_MAP, ConfigManager
from torchtitan.config.configs import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.override import derive, override
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.experiments import _supported_experiments
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models import _supported_models
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import ScaledDotProductAttention, VarlenAttention, VarlenMetadata
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.moe import GroupedExperts, MoE
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3 import Qwen3StateDictAdapter, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module
from torchtitan.tools import utils as titan_utils
from torchtitan.tools.utils import set_default_dtype
from torchtitan.train import main as train
from torchtitan.trainer import Trainer

__all__ = [
    "DATASETS",
    "IGNORE_INDEX",
    "TORCH_DTYPE_MAP",
    "CheckpointManager",
    "ChunkedLossWrapper",
    "ConfigManager",
    "CosSinRoPE",
    "CrossEntropyLoss",
    "DatasetConfig",
    "DebugConfig",
    "Embedding",
    "FullAC",
    "GroupedExperts",
    "HuggingFaceTextDataLoader",
    "LRSchedulersContainer",
    "Linear",
    "LoRAConverter",
    "MetricsProcessor",
    "MoE",
    "ModelSpec",
    "Module",
    "ParallelAwareDataloader",
    "ParallelismConfig",
    "Qwen3Model",
    "Qwen3StateDictAdapter",
    "Qwen3TransformerBlock",
    "RMSNorm",
    "ScaledDotProductAttention",
    "SelectiveAC",
    "Trainer",
    "TrainingConfig",
    "Validator",
    "VarlenAttention",
    "VarlenMetadata",
    "_supported_experiments",
    "_supported_models",
    "default_adamw",
    "derive",
    "make_ffn_config",
    "make_gqa_config",
    "make_moe_config",
    "make_routed_experts_config",
    "make_router_config",
    "override",
    "parallelize_qwen3",
    "register_moe_load_balancing_hook",
    "set_default_dtype",
    "skip_param_init",
    "titan_utils",
    "train",
]
