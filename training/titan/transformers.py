"""What ``training`` uses of torchtitan's transformers backend, which loads transformers with it. See the package."""

from __future__ import annotations

from torchtitan.distributed.compile import apply_compile
from torchtitan.experiments.transformers_modeling_backend import TitanModelConfig
from torchtitan.experiments.transformers_modeling_backend.model import HFTransformerModel
from torchtitan.experiments.transformers_modeling_backend.parallelize import apply_fsdp

__all__ = ["HFTransformerModel", "TitanModelConfig", "apply_compile", "apply_fsdp"]
