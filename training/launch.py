"""From a checkpoint of any format to a training run and out again: what is checked, made and run. Nothing heavy loads.

A run is a folder: ``source`` (the start as torchtitan's DCP, with config and tokenizer), ``checkpoint`` (torchtitan's
own), ``run.json``, and at the end ``export``, a Hugging Face folder.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from qwen3conv.converters.config_json import read_json_object
from qwen3conv.converters.errors import ConversionError, SourceError
from qwen3conv.converters.manifest import ASSETS
from qwen3conv.converters.placement import Mesh

from .layouts import recipe_name

ERRORS = "QWEN3CONV_ERRORS"
"""Environment variable with a file that the first rank to fail writes a reason to, for the command that launched it."""

JOINS = "QWEN3CONV_JOINS"
"""Environment variable of ranks whose command holds the lock of the run, which rank 0 shares then."""


class CommandLineError(ConversionError):
    """What ``torchrun`` was given is no run: a module, recipe, flag, value or number of ranks."""


@dataclass(frozen=True, slots=True)
class Lora:
    """Low-rank adapters that are trained in place of the model."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()
    """By PEFT's names; without any, every linear matrix of the layers but experts and router."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run as its user asks for it."""

    folder: Path
    data: str
    """Rows: a .jsonl or .parquet file, a folder, or a data set of the hub, ``org/name[:split]``."""
    recipe: str = "pretrain"
    model: str | None = None
    """Size of the recipe, which the source must have; only of ``pretrain`` and ``sft``."""
    backend: str = "native"
    steps: int | None = None
    seq_len: int | None = None
    batch_size: int | None = None
    """Sequences per step of all ranks together."""
    local_batch_size: int | None = None
    learning_rate: float | None = None
    save_every: int | None = None
    mesh: Mesh = field(default_factory=Mesh)
    device: str | None = None
    balance_experts: bool = False
    on_bad_row: str | None = None
    packing: bool = True
    lora: Lora | None = None
    validation: str | None = None
    """Rows whose loss is computed every ``validate_every`` steps, and that are not trained on."""
    validation_fraction: float | None = None
    """In place of ``validation``: the part of ``data``, 0 to 1, that is held out for it."""
    validate_every: int | None = None
    export_every: int | None = None
    """Steps between exports on the way; checkpoints are saved as often, unless ``save_every`` says more often."""
    extra: tuple[str, ...] = ()
    """Flags of torchtitan's own, behind all others."""

    @property
    def config(self) -> str:
        """The recipe as ``--config`` names it."""
        return self.recipe if self.model is None else recipe_name(self.model, sft=self.is_sft)

    @property
    def is_sft(self) -> bool:
        """Whether rows are chats or completions, read by our loader, and not texts, read by torchtitan's."""
        return self.recipe.endswith("sft")

    @property
    def validates(self) -> bool:
        """Whether a loss of rows that are not trained on is computed."""
        return self.validation is not None or self.validation_fraction is not None

    @property
    def source_format(self) -> str:
        """The format that the backend's model loads; where it has adapters, a DCP would have to hold them already."""
        if self.lora is not None:
            return "hf"
        return "accelerate" if self.backend == "transformers" else "titan"

    @property
    def source(self) -> Path:
        """The start, as torchtitan loads it."""
        return self.folder / "source"

    @property
    def assets(self) -> Path:
        """Config and tokenizer of the start."""
        return self.source if self.source_format == "hf" else self.source / ASSETS

    @property
    def export(self) -> Path:
        """The trained model."""
        return self.folder / "export"

    @property
    def adapter(self) -> Path:
        """The trained adapter, as PEFT saves it."""
        return self.folder / "adapter"

    @property
    def record(self) -> Path:
        """What happened."""
        return self.folder / "run.json"

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Whole checkpoints, by step."""
        found = ((path.name.removeprefix("step-"), path) for path in self.folder.glob("checkpoint/step-*"))
        return sorted((int(step), path) for step, path in found if step.isdigit() and (path / ".metadata").is_file())

    def command(self, *, log_dir: Path | None = None) -> list[str]:
        """``torchrun`` with torchtitan's command line, as it can be typed.

        ``log_dir`` is where torchrun keeps its own files; without one it leaves a folder among the temporary ones.
        """
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        words += ["--log-dir", str(log_dir)] if log_dir is not None else []
        words += ["--nproc_per_node", str(self.mesh.ranks), "-m", "qwen3conv.training"]
        words += ["--device", self.device] if self.device is not None else []
        words += ["--module", f"qwen3conv.training.recipes.{self.backend.replace('-', '_')}", "--config", self.config]
        for flag, value in self._flags().items():
            words += [f"--{flag}", str(value)]
        words += ["--validator.enable"] if self.validates else []
        words += ["--validator.dataloader.held_out"] if self.validation_fraction is not None else []
        words += ["--balance_experts"] if self.balance_experts else []
        if self.lora is not None:
            words += ["--checkpoint.initial_load_in_hf", "--lora_rank", str(self.lora.rank)]
            words += ["--lora_alpha", str(self.lora.alpha), "--lora_targets", ",".join(self.lora.targets)]
        words += ["--dataloader.no-packing"] if self.is_sft and not self.packing else []
        if self.changes_data_ranks():
            words += ["--checkpoint.exclude_from_loading", "dataloader"]
        return [*words, *self.extra]

    def _flags(self) -> dict[str, object]:
        given = {
            "training.steps": self.steps,
            "training.local_batch_size": self.local_batch_size,
            "training.seq_len": self.seq_len,
            "training.global_batch_size": self.batch_size,
            "checkpoint.interval": self.save_every or self.export_every,
            "learning_rate": self.learning_rate,
            "dataloader.on_bad_row": self.on_bad_row,
            "dataloader.on_long_row": self.on_bad_row if self.is_sft else None,
            "dataloader.validation_fraction": self.validation_fraction,
            "validator.dataloader.source": place_of(self.validation or self.data) if self.validates else None,
            "validator.dataloader.validation_fraction": self.validation_fraction,
            "validator.dataloader.on_bad_row": self.on_bad_row if self.validates else None,
            "validator.dataloader.on_long_row": self.on_bad_row if self.validates else None,
            "validator.freq": self.validate_every,
        }
        return {
            "hf_assets_path": self.assets.absolute(),
            "dump_folder": self.folder.absolute(),
            "checkpoint.initial_load_path": self.source.absolute(),
            f"dataloader.{'source' if self.is_sft else 'dataset_path'}": place_of(self.data),
            "parallelism.data_parallel_shard_degree": self.mesh.fsdp,
            "parallelism.tensor_parallel_degree": self.mesh.tp,
            "parallelism.expert_parallel_degree": self.mesh.ep,
            **{flag: value for flag, value in given.items() if value is not None},
        }

    def has_the_same_adapters(self) -> bool:
        """Whether what the run recorded before had adapters as they are asked for now."""
        if not self.record.is_file():
            return True
        recorded, asked = read_record(self.record).get("lora"), self.lora
        if asked is None or not isinstance(recorded, Mapping):
            return asked is None and recorded is None
        return (recorded.get("rank"), recorded.get("alpha"), recorded.get("targets")) == (
            asked.rank,
            asked.alpha,
            list(asked.targets),
        )

    def changes_data_ranks(self) -> bool:
        """Whether the run goes on with another number of data-parallel ranks, whose places in the text do not fit.

        Those in rows of ``sft`` do: our loader keeps one for all ranks.
        """
        if self.is_sft or not self.checkpoints() or not self.record.is_file():
            return False
        degrees = read_record(self.record).get("degrees")
        return isinstance(degrees, Mapping) and degrees.get("fsdp") != self.mesh.fsdp


def read_record(path: Path) -> dict[str, object]:
    """The record of a run.

    Raises:
        SourceError: it is not one.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        where = path.parent if path.name == "run.json" else path
        what = f"has no {path.name}: it is no run of train, or has not begun" if where.is_dir() else "does not exist"
        raise SourceError(f"{where} {what}") from None
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise SourceError(f"{path} cannot be read as the record of a run: {error}") from None
    steps = content.get("steps") if isinstance(content, dict) else None
    if not isinstance(steps, dict) or not all(step.isdigit() and _is_step(found) for step, found in steps.items()):
        raise SourceError(f"{path} is not the record of a run: its steps are not a loss and a gradient norm each")
    return content


def _is_step(found: object) -> bool:
    return isinstance(found, dict) and all(isinstance(found.get(key), int | float) for key in ("loss", "grad_norm"))


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer in ``folder`` has a chat template, in a file of its own or in its config."""
    if (folder / "chat_template.jinja").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and "chat_template" in read_json_object(config)[0]


def is_file_of_rows(data: str) -> bool:
    """Whether ``data`` names a file, rather than a data set of the hub or a folder."""
    return data.endswith((".jsonl", ".parquet"))


def place_of(data: str) -> str:
    """``data`` for a process that may work elsewhere: an absolute path, or the name of a data set."""
    return str(Path(data).absolute()) if is_file_of_rows(data) or Path(data).is_dir() else data


def typed(words: list[str]) -> str:
    """A command as a line to type."""
    return shlex.join(words)
