"""Chats, prompts with completions, and texts as sequences of one shape, for torchtitan's Trainer.

torchtitan 0.3.0's own chat loader takes one user and one assistant turn and drops long rows without a word
(``hf_datasets/text_datasets.py``); this one takes any conversation that the template renders, and names what it leaves
out. Rows are encoded before the first step, all of them in memory on every rank.

Source of the interface: torchtitan 0.3.0, ``components/dataloader.py``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset

from qwen3conv.converters.errors import PolicyError, SourceError, enumerate_problems
from qwen3conv.training.titan import IGNORE_INDEX, ParallelAwareDataloader

from .masking import BadRow, Sample, encode_row
from .rows import read_rows


class SequenceDataset(IterableDataset[Any]):
    """Sequences of one dp rank; every rank gets the same number. State: epoch and next sequence."""

    def __init__(
        self, samples: list[Sample], *, seq_len: int, pad: int, packing: bool, rank: int, world: int, infinite: bool
    ) -> None:
        self.samples, self.seq_len, self.pad, self.packing = samples, seq_len, pad, packing
        self.rank, self.world, self.infinite = rank, world, infinite
        self.epoch = self.next = 0

    def _groups(self) -> list[list[Sample]]:
        order = list(self.samples)
        random.Random(42 + self.epoch).shuffle(order)
        groups: list[list[Sample]] = []
        room = 0
        for sample in order:
            need = len(sample.tokens) - 1
            if not self.packing or need > room:
                groups.append([])
                room = self.seq_len
            groups[-1].append(sample)
            room -= need
        whole = len(groups) // self.world * self.world
        return groups[:whole][self.rank :: self.world]

    def _tensors(self, group: list[Sample]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        inputs: list[int] = []
        labels: list[int] = []
        positions: list[int] = []
        for tokens, trained in group:
            inputs += tokens[:-1]
            labels += [t if on else IGNORE_INDEX for t, on in zip(tokens[1:], trained[1:], strict=True)]
            positions += range(len(tokens) - 1)
        rest = self.seq_len - len(inputs)
        inputs += [self.pad] * rest
        labels += [IGNORE_INDEX] * rest
        positions += range(rest)
        return {"input": torch.tensor(inputs), "positions": torch.tensor(positions)}, torch.tensor(labels)

    def __iter__(self) -> Iterator[Any]:
        while True:
            groups = self._groups()
            if not groups:
                raise SourceError(f"fewer sequences than the {self.world} data-parallel ranks: add data")
            while self.next < len(groups):
                self.next += 1
                yield self._tensors(groups[self.next - 1])
            self.next = 0
            if not self.infinite:
                return
            self.epoch += 1

    def state_dict(self) -> dict[str, int]:
        """Epoch, and index in it of the next sequence of this rank."""
        return {"epoch": self.epoch, "next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on with the sequence that ``state`` names."""
        self.epoch, self.next = state["epoch"], state["next"]


class ChatDataLoader(ParallelAwareDataloader):
    """Yields ``({"input": (B, L), "positions": (B, L)}, labels (B, L))``, int64; labels are shifted.

    All rows are read and encoded before the first step. ``bad_rows`` counts those left out.

    Raises:
        SourceError: bad rows under ``on_bad_row="stop"`` (all named), or no usable row.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """What to read, and what to do with rows that do not fit."""

        source: str = ""
        """Path of a .jsonl or .parquet file, or a hub dataset id."""
        kind: Literal["chat", "completion", "text", "auto"] = "auto"
        packing: bool = True
        on_bad_row: Literal["stop", "skip"] = "stop"
        on_long_row: Literal["stop", "skip", "truncate"] = "stop"
        split: str = "train"
        infinite: bool = True
        tokenizer_path: str = ""
        """Folder with the tokenizer and its chat template."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        tokenizer: Any = None,
        snapshot_every_n_steps: int | None = 1,
        **kwargs: Any,
    ) -> None:
        from transformers import AutoTokenizer

        if config.num_workers:
            raise PolicyError("num_workers must be 0: rows are encoded once, and workers would repeat sequences")
        hf = AutoTokenizer.from_pretrained(config.tokenizer_path)
        samples: list[Sample] = []
        bad: list[str] = []
        fatal: list[str] = []
        for row in read_rows(config.source, config.split):
            try:
                if row.problem:
                    raise BadRow(row.problem)
                sample = encode_row(row.value, config.kind, hf)
            except BadRow as error:
                bad.append(f"{row.where}: {error}")
                if config.on_bad_row == "stop":
                    fatal.append(bad[-1])
                continue
            length = len(sample.tokens)
            if length - 1 > seq_len:
                if config.on_long_row != "truncate":
                    bad.append(f"{row.where}: {length} tokens, sequence length {seq_len} takes {seq_len + 1}")
                    if config.on_long_row == "stop":
                        fatal.append(bad[-1])
                    continue
                sample = Sample(sample.tokens[: seq_len + 1], sample.trained[: seq_len + 1])
            if not any(sample.trained[1:]):
                bad.append(f"{row.where}: nothing left to train on")
                if config.on_bad_row == "stop":
                    fatal.append(bad[-1])
                continue
            samples.append(sample)
        if fatal:
            raise SourceError(enumerate_problems("bad rows; mend them, or skip (on_bad_row, on_long_row):", fatal))
        if not samples:
            raise SourceError(enumerate_problems(f"{config.source}: no usable row", bad))
        self.bad_rows = bad
        dataset = SequenceDataset(
            samples,
            seq_len=seq_len,
            pad=hf.eos_token_id,
            packing=config.packing,
            rank=dp_rank,
            world=dp_world_size,
            infinite=config.infinite,
        )
        super().__init__(
            dataset,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            batch_size=local_batch_size,
            drop_last=True,
            snapshot_every_n_steps=snapshot_every_n_steps,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the state was taken.

        Raises:
            PolicyError: the state is of another dp degree.
        """
        if state_dict and state_dict.get("world_size") != self.dp_world_size:
            raise PolicyError(
                f"the data position was saved by {state_dict.get('world_size')} data-parallel ranks, this run has "
                f"{self.dp_world_size}: pass --checkpoint.exclude_from_loading dataloader to start the data anew"
            )
        super().load_state_dict(state_dict)
