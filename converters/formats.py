"""The formats of the command line: each a point in layout x placement x store, with what can be done to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import PolicyError
from .layouts import (
    ACCELERATE,
    ACCELERATE_PER_EXPERT,
    HF,
    HF_FUSED,
    NXD,
    NXD_GQA,
    NXD_INFERENCE,
    TITAN_TRANSFORMERS,
    VLLM,
    Layout,
    titan_layout,
)

Store = Literal["safetensors", "dcp", "ranks", "vllm", "nxd", "nxd-inference"]

RANK_LAYOUTS: dict[str, Layout | None] = {"hf": HF, "hf-fused": HF_FUSED, "titan": None}
"""Layouts of our per-rank folder; ``titan`` is that of the schema asked for."""


@dataclass(frozen=True, slots=True)
class Format:
    """A row of the table of formats."""

    name: str
    summary: str
    store: Store
    fixed_layout: Layout | None = None
    writable: bool = True
    instead: str = ""
    """What to do in place of writing it."""

    @property
    def needs_config(self) -> bool:
        """Whether the output is unusable without a config.json."""
        return self.store != "dcp"

    @property
    def is_per_rank(self) -> bool:
        """Whether each rank has files of its own, with local tensors."""
        return self.store in ("ranks", "vllm", "nxd", "nxd-inference")

    def layout(self, titan_schema: str, rank_layout: str = "hf-fused", *, repeats: bool = False) -> Layout:
        """The layout that is written; ``titan_schema`` decides for ``titan``, ``rank_layout`` for ``ranks``, and for
        ``nxd`` whether ranks repeat key-value heads.

        Raises:
            PolicyError: one of the two is not known.
        """
        fixed = self.fixed_layout
        if self.store == "nxd" and repeats:
            fixed = NXD_GQA
        if self.store == "ranks":
            if rank_layout not in RANK_LAYOUTS:
                raise PolicyError(
                    f"layout {rank_layout!r} is not known; --layout takes one of {', '.join(RANK_LAYOUTS)}"
                )
            fixed = RANK_LAYOUTS[rank_layout]
        return fixed or titan_layout(titan_schema)


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("hf", "Hugging Face hub: safetensors, one expert per tensor", "safetensors", HF),
        Format("hf-fused", "transformers 5 fused experts, safetensors", "safetensors", HF_FUSED),
        Format(
            "hf-fp8",
            "block-wise FP8 with weight_scale_inv",
            "safetensors",
            HF,
            writable=False,
            instead="quantising changes every number: make FP8 with the tool that serves it",
        ),
        Format("titan", "torchtitan native, DCP, key schemas T1 to T7", "dcp"),
        Format("accelerate", "Accelerate and Trainer FSDP, DCP, transformers 5 fused experts", "dcp", ACCELERATE),
        Format(
            "accelerate-per-expert",
            "the same with one expert per tensor (transformers 4)",
            "dcp",
            ACCELERATE_PER_EXPERT,
        ),
        Format(
            "titan-transformers",
            "torchtitan's transformers backend with torchtitan's MoE, DCP",
            "dcp",
            TITAN_TRANSFORMERS,
        ),
        Format("ranks", "one safetensors file per rank of a mesh, and an index of boxes", "ranks"),
        Format("vllm", "vLLM sharded_state: model-rank-*-part-*.safetensors, tensor parallel", "vllm", VLLM),
        Format("nxd", "neuronx-distributed training shards, v2: model/dp_rank_00_tp_rank_*_pp_rank_*.pt", "nxd", NXD),
        Format("nxd-v1", "neuronx-distributed training shards, v1: tp_rank_*_pp_rank_*/checkpoint.pt", "nxd", NXD),
        Format(
            "nxd-inference",
            "NxD Inference's presharded weights: tp*_sharded_checkpoint.safetensors",
            "nxd-inference",
            NXD_INFERENCE,
        ),
        Format(
            "dcp-hf",
            "DCP of a bare state dict with the hub's names",
            "dcp",
            HF,
            writable=False,
            instead="write accelerate-per-expert, whose names have model. in front",
        ),
        Format(
            "dcp-hf-fused",
            "DCP of a bare transformers 5 MoE state dict",
            "dcp",
            HF_FUSED,
            writable=False,
            instead="write accelerate, whose names have model. in front",
        ),
        Format(
            "torch-full",
            "pickled whole tensors: pytorch_model_fsdp.bin, pytorch_model.bin",
            "safetensors",
            HF,
            writable=False,
            instead="write hf, which needs no pickle",
        ),
        Format(
            "verl",
            "verl FSDP shards: model_world_size_*_rank_*.pt",
            "safetensors",
            HF,
            writable=False,
            instead="write ranks or titan, which a mesh loads without pickles",
        ),
        Format(
            "torch-shards",
            "torch's sharded safetensors (shard-*-model-*)",
            "safetensors",
            HF,
            writable=False,
            instead="write hf, which every reader of these takes",
        ),
    )
}
"""Every format by name."""


def writable_format(name: str) -> Format:
    """The format called ``name``.

    Raises:
        PolicyError: it is unknown or only read.
    """
    found = FORMATS.get(name)
    if found is None:
        raise PolicyError(
            f"format {name!r} is not known; choose one of {', '.join(f.name for f in FORMATS.values() if f.writable)}"
        )
    if not found.writable:
        raise PolicyError(f"format {name} is read, not written; {found.instead}")
    return found
