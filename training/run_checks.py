"""What of a run cannot be, told before anything is written or trained. Nothing heavy loads."""

from __future__ import annotations

import re
from pathlib import Path

from qwen3conv.converters.config import Qwen3Config
from qwen3conv.converters.errors import PolicyError, SourceError, enumerate_problems
from qwen3conv.converters.placement import Mesh, check_mesh

from .launch import Run, is_file_of_rows
from .layouts import check_size

LOSS_CHUNKS = 8
"""torchtitan 0.3.0 computes the loss in so many parts of a sequence (``ChunkedLossWrapper.num_chunks``)."""


def check_run(run: Run, config: Qwen3Config) -> None:
    """Refuse what would fail at the first step, or train something else than was meant.

    Raises:
        PolicyError: everything that does not fit, at once.
        SourceError: the data are not there.
    """
    for data in filter(None, (run.data, run.validation)):
        is_name = re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", data) is not None and not data.startswith(".")
        if not (Path(data).is_file() if is_file_of_rows(data) else is_name or Path(data).is_dir()):
            raise SourceError(
                f"{data} is not a file of rows (.jsonl, .parquet), a folder of a data set, or org/name[:split], "
                "the name of one on the hub"
            )
    mesh, geometry = run.mesh, config.geometry
    if run.model is not None:
        check_size(run.model, geometry, "the source")
    check_mesh(mesh, geometry)
    problems = shape_problems(config, mesh, run.seq_len)
    if mesh.pp > 1:
        problems.append("pp: torchtitan 0.3's pipelines need a newer torch than 2.13")
    if run.model is not None and run.recipe not in ("pretrain", "sft"):
        problems.append(f"--model is for --recipe pretrain and sft, not {run.recipe}")
    at_once = run.local_batch_size or 1
    each = at_once * mesh.fsdp
    if run.batch_size is not None and run.batch_size % each:
        problems.append(
            f"a batch of {run.batch_size} is no multiple of {each}: {at_once} sequences at a time on each "
            f"of {mesh.fsdp} data-parallel ranks"
        )
    if config.rope_scaling is not None and run.backend != "transformers":
        problems.append(f"torchtitan's native Qwen3 cannot compute RoPE scaling {dict(config.rope_scaling)}")
    if run.backend == "nki-moe" and not geometry.is_moe:
        problems.append("--backend nki-moe is for MoE models; this one is dense")
    if run.backend == "transformers" and (run.balance_experts or mesh.ep > 1):
        problems.append("--balance-experts and --ep are for torchtitan's experts; --backend transformers has its own")
    if run.validate_every is not None and not run.validates:
        problems.append("--validate-every is for rows to validate with; give --validation or --validation-fraction")
    if run.validation is not None and run.validation_fraction is not None:
        problems.append("--validation and --validation-fraction name other rows to validate with; give one of them")
    if run.export_every is not None and run.export_every % (run.save_every or run.export_every):
        problems.append(f"--export-every {run.export_every} is no multiple of --save-every {run.save_every}")
    if run.lora is not None and run.backend != "native":
        problems.append("--lora-rank is for --backend native, whose component it is")
    if run.backend == "transformers" and "auto_map" in config.raw:
        problems.append("config.json has auto_map, code beside the weights, which is not run: remove it")
    if run.balance_experts and not geometry.is_moe:
        problems.append("--balance-experts is for MoE models; this one is dense")
    if problems:
        raise PolicyError(enumerate_problems("this run cannot be:", problems))


def shape_problems(config: Qwen3Config, mesh: Mesh, seq_len: int | None) -> list[str]:
    """What of the model does not divide among ranks, or is less than a sequence of ``seq_len`` tokens."""
    geometry, problems = config.geometry, []
    if geometry.num_key_value_heads % mesh.tp:
        problems.append(f"tp {mesh.tp} does not divide the {geometry.num_key_value_heads} key-value heads")
    if seq_len is not None:
        if seq_len > config.max_position_embeddings:
            most = config.max_position_embeddings
            problems.append(
                f"sequences of {seq_len} are longer than the model's {most}: give --seq-len {most}, or less"
            )
        for number, why in ((LOSS_CHUNKS, "torchtitan's parts of the loss"), (mesh.tp, "tensor-parallel ranks")):
            if seq_len % number:
                problems.append(f"sequences of {seq_len} do not divide among {number} {why}")
    if config.tie_word_embeddings and min(mesh.tp, mesh.fsdp) > 1 and geometry.vocab_size % (mesh.tp * mesh.fsdp):
        # the second step's loss is another one than on one rank; where the rows divide, or the head is untied, the same
        problems.append(
            f"the {geometry.vocab_size} rows of tied embeddings do not divide among tp x fsdp = {mesh.tp * mesh.fsdp}, "
            "which torchtitan 0.3 on torch 2.13 trains wrongly"
        )
    return problems
