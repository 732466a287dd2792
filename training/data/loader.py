"""Chats, prompts with completions, and texts as sequences of one shape, for torchtitan's Trainer.

torchtitan 0.3.0's own chat loader takes one user and one assistant turn and drops long rows without a word
(``hf_datasets/text_datasets.py``); this one takes any conversation that the template renders, and names what it leaves
out. Rows are encoded before the first step, once per machine, into files that all of its ranks map.

Source of the interface: torchtitan 0.3.0, ``components/dataloader.py``.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset

from qwen3conv.converters.errors import PolicyError, SourceError
from qwen3conv.training.titan import IGNORE_INDEX, ParallelAwareDataloader

from .encoded import EncodedRows, Encoding, encoded_rows
from .rows import Part

_POSITION = "position"
"""Key of the place in the data, in a checkpoint under ``dataloader``."""


class SequenceDataset(IterableDataset[Any]):
    """Sequences of one dp rank; every rank gets the same number.

    State: epoch, and how many of its sequences all ranks together have read. Ranks read in turn, so as many of them as
    divide that number go on from there, each step with the sequences that it would have had on others; but for the last
    of an epoch, which are left where they are not enough for every rank.
    """

    def __init__(
        self, rows: EncodedRows, *, seq_len: int, pad: int, packing: bool, rank: int, world: int, infinite: bool
    ) -> None:
        self.rows, self.seq_len, self.pad, self.packing = rows, seq_len, pad, packing
        self.rank, self.world, self.infinite = rank, world, infinite
        self.epoch = self.next = 0

    def sequences(self) -> list[list[int]]:
        """The documents of each sequence of this rank, in the order of this epoch; the last uneven ones are left."""
        order = list(enumerate(self.rows.lengths()))
        random.Random(42 + self.epoch).shuffle(order)
        groups: list[list[int]] = []
        room = 0
        for number, length in order:
            need = length - 1
            if not self.packing or need > room:
                groups.append([])
                room = self.seq_len
            groups[-1].append(number)
            room -= need
        whole = len(groups) // self.world * self.world
        return groups[:whole][self.rank :: self.world]

    def _tensors(self, group: list[int]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        inputs: list[int] = []
        labels: list[int] = []
        positions: list[int] = []
        for tokens, trained in map(self.rows.document, group):
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
            groups = self.sequences()
            if not groups:
                raise SourceError(f"fewer sequences than the {self.world} data-parallel ranks: add data")
            while self.next < len(groups):
                self.next += 1
                yield self._tensors(groups[self.next - 1])
            self.next = 0
            if not self.infinite:
                return
            self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        """Epoch, sequences of it that are read, of what rows, and whether they are packed; the same on every rank."""
        read = self.next * self.world
        return {"epoch": self.epoch, "sequences": read, "rows": self.rows.digest, "packing": self.packing}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the sequences that ``state`` counts.

        Raises:
            PolicyError: it is a place in other rows, or in rows that were encoded or packed otherwise; or not all ranks
                would have read equally much of it.
        """
        if state.get("rows", self.rows.digest) != self.rows.digest:
            raise PolicyError(
                "data, tokenizer or sequence length are others than when the run was saved, so its place in the data "
                "is none here: put them back, or pass --checkpoint.exclude_from_loading dataloader to begin anew"
            )
        if state.get("packing", self.packing) != self.packing:
            raise PolicyError(
                f"the run was saved {_packed(state['packing'])} packing and goes on {_packed(self.packing)} it, so its "
                "place in the data is none here: put it back, or pass --checkpoint.exclude_from_loading dataloader to "
                "begin anew"
            )
        if state["sequences"] % self.world:
            raise PolicyError(
                f"{state['sequences']} sequences of this epoch were read, which {self.world} data-parallel ranks "
                "cannot have read in turn: go on with another number of them, or pass "
                "--checkpoint.exclude_from_loading dataloader to begin the data anew"
            )
        self.epoch, self.next = state["epoch"], state["sequences"] // self.world


def _packed(packing: bool) -> str:
    return "with" if packing else "without"


class ChatDataLoader(ParallelAwareDataloader):
    """Yields ``({"input": (B, L), "positions": (B, L)}, labels (B, L))``, int64; labels are shifted.

    ``bad_rows`` names those left out. Text longer than a sequence is cut into several.

    Raises:
        SourceError: bad rows under ``on_bad_row="stop"`` (all named), or no usable row.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """What to read, and what to do with rows that do not fit."""

        source: str = ""
        """A .jsonl or .parquet file, or what ``datasets`` loads: ``org/name``, ``org/name:split``, a folder."""
        kind: Literal["chat", "completion", "text", "auto"] = "auto"
        packing: bool = True
        on_bad_row: Literal["stop", "skip"] = "stop"
        on_long_row: Literal["stop", "skip", "truncate"] = "stop"
        split: str = "train"
        infinite: bool = True
        tokenizer_path: str = ""
        """Folder with the tokenizer and its chat template."""
        validation_fraction: float = 0.0
        """Of the rows, 0 to 1, that is not trained on; by what they say, so that copies of a row stay together."""
        held_out: bool = False
        """Whether these are that fraction, rather than the other rows."""
        cache: str = ""
        """Folder of encoded rows, shared by the ranks of a machine; without one they go with the process."""

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
        encoding = Encoding(
            config.source,
            config.split,
            config.kind,
            config.on_bad_row,
            config.on_long_row,
            seq_len,
            Path(config.tokenizer_path),
            Part(config.validation_fraction, config.held_out),
        )
        self._room = None if config.cache else tempfile.TemporaryDirectory(prefix="qwen3conv-rows-")
        rows = encoded_rows(encoding, hf, Path(config.cache if self._room is None else self._room.name))
        self.bad_rows = rows.bad
        dataset = SequenceDataset(
            rows,
            seq_len=seq_len,
            pad=hf.eos_token_id,
            packing=config.packing,
            rank=dp_rank,
            world=dp_world_size,
            infinite=config.infinite,
        )
        if not config.infinite and len(dataset.sequences()) < local_batch_size:
            raise SourceError(
                f"{config.source} makes {len(dataset.sequences())} sequences for each of {dp_world_size} data-parallel "
                f"ranks, fewer than the {local_batch_size} of a batch: add rows"
            )
        super().__init__(
            dataset,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            batch_size=local_batch_size,
            drop_last=True,
            snapshot_every_n_steps=snapshot_every_n_steps,
        )

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, for any number of ranks; torchtitan's own is one per rank, for as many ranks alone."""
        return {_POSITION: json.dumps(self.dataset.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the state was taken.

        Raises:
            PolicyError: as ``SequenceDataset.load_state_dict``.
        """
        if _POSITION in state_dict:
            self.dataset.load_state_dict(json.loads(state_dict[_POSITION]))
