"""Rows as token ids on disk: encoded once per machine, mapped by every rank, and known by what went into them.

Memory does not grow with the data, and ranks do not repeat each other's work. The folder's name is a digest of the rows
and of everything that decides how they are encoded, so a run that goes on notices other data.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from qwen3conv.converters.errors import SourceError, enumerate_problems

from .masking import BadRow, Sample, encode_row, kind_of
from .rows import ALL_ROWS, Part, digest_rows, read_rows

BAD_ROWS = "bad rows; mend them, or leave them out with --on-bad-row skip:"
"""What precedes a list of them."""

_MASKING = 2
"""Version of what rows become, so that those of an earlier one are not taken for these."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """What is read, and how it is encoded."""

    source: str
    split: str
    kind: Literal["chat", "completion", "text", "auto"]
    on_bad_row: Literal["stop", "skip"]
    on_long_row: Literal["stop", "skip", "truncate"]
    seq_len: int
    tokenizer: Path
    """Folder with the tokenizer and its chat template."""
    part: Part = ALL_ROWS

    def digest(self, tokenizer: Any) -> str:
        """xxh3_128 of the rows and of all that decides what they become."""
        found = xxhash.xxh3_128(digest_rows(self.source, self.split).encode())
        how = [
            _MASKING,
            self.kind,
            self.on_bad_row,
            self.on_long_row,
            self.seq_len,
            tokenizer.chat_template,
            tokenizer.eos_token,
        ]
        if self.part != ALL_ROWS:
            how.append([self.part.fraction, self.part.held_out])
        found.update(json.dumps(how).encode())
        found.update((self.tokenizer / "tokenizer.json").read_bytes())
        return found.hexdigest()


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Documents one after the other. ``tokens`` int32 (N,), ``trained`` bool (N,), ``ends`` int64 (documents,)."""

    digest: str
    tokens: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]
    ends: npt.NDArray[np.int64]
    bad: tuple[str, ...]
    """Rows left out, and why."""

    def __len__(self) -> int:
        return len(self.ends)

    def lengths(self) -> list[int]:
        """Tokens of every document."""
        return [int(length) for length in np.diff(self.ends, prepend=0)]

    def document(self, number: int) -> Sample:
        """Token ids of a document, and which are trained."""
        begin, end = int(self.ends[number - 1]) if number else 0, int(self.ends[number])
        return Sample(self.tokens[begin:end].tolist(), self.trained[begin:end].tolist())


def encoded_rows(encoding: Encoding, tokenizer: Any, cache: Path) -> EncodedRows:
    """Rows of ``encoding`` from ``cache``; the first rank of each machine encodes them if they are not there.

    Raises:
        SourceError: bad rows under ``on_bad_row="stop"`` (all named), or no usable row.
    """
    import torch.distributed as dist

    digest = encoding.digest(tokenizer)
    folder = cache / digest
    if os.environ.get("LOCAL_RANK", "0") == "0" and not folder.is_dir():
        _encode(encoding, tokenizer, folder)
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
    bad = tuple(json.loads((folder / "bad.json").read_text(encoding="utf-8")))
    tokens, trained, ends = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("tokens", "trained", "ends"))
    return EncodedRows(digest, tokens, trained, ends, bad)


def _encode(encoding: Encoding, tokenizer: Any, folder: Path) -> None:
    bad: list[str] = []
    fatal: list[str] = []
    partial = folder.with_name(f".{folder.name}.{socket.gethostname()}.{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        ends = array("q")
        total = 0
        with (partial / "tokens.raw").open("wb") as tokens, (partial / "trained.raw").open("wb") as trained:
            for sample in _samples(encoding, tokenizer, bad, fatal):
                total += len(sample.tokens)
                ends.append(total)
                tokens.write(array("i", sample.tokens).tobytes())
                trained.write(bytes(sample.trained))
        if fatal:
            raise SourceError(enumerate_problems(BAD_ROWS, fatal))
        if not ends:
            where = "held out to validate with" if encoding.part.held_out else "left to train on"
            what = f"no row is {where}" if encoding.part != ALL_ROWS else "no usable row"
            raise SourceError(enumerate_problems(f"{encoding.source}: {what}", bad))
        for name, kind in (("tokens", np.int32), ("trained", np.bool_)):
            raw = np.memmap(partial / f"{name}.raw", dtype=kind, mode="r")
            np.save(partial / f"{name}.npy", raw)
            os.unlink(partial / f"{name}.raw")
        np.save(partial / "ends.npy", np.frombuffer(ends, np.int64))
        (partial / "bad.json").write_text(json.dumps(bad), encoding="utf-8")
        try:
            os.rename(partial, folder)
        except OSError:
            if not folder.is_dir():
                raise
            shutil.rmtree(partial)  # another machine on the same disk was done first, with the same rows
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _samples(encoding: Encoding, tokenizer: Any, bad: list[str], fatal: list[str]) -> Iterator[Sample]:
    """Documents of at most ``seq_len + 1`` tokens. Rows left out go to ``bad``, what stops to ``fatal``."""
    longest = encoding.seq_len + 1
    for row in read_rows(encoding.source, encoding.split):
        try:
            if row.problem:
                raise BadRow(row.problem)
            if not encoding.part.has(row.value, kind_of(row.value, encoding.kind)):
                continue
            sample = encode_row(row.value, encoding.kind, tokenizer)
        except BadRow as error:
            _leave_out(f"{row.where}: {error}", encoding.on_bad_row, bad, fatal)
            continue
        length = len(sample.tokens)
        if length > longest and kind_of(row.value, encoding.kind) == "text":
            # the last token of a piece is the first of the next: every token but the first is predicted once
            for begin in range(0, length - 1, encoding.seq_len):
                yield Sample(sample.tokens[begin : begin + longest], sample.trained[begin : begin + longest])
            continue
        if length > longest and encoding.on_long_row != "truncate":
            reason = f"{row.where}: {length} tokens, sequence length {encoding.seq_len} takes {longest}"
            _leave_out(reason, encoding.on_long_row, bad, fatal)
            continue
        sample = Sample(sample.tokens[:longest], sample.trained[:longest])
        if any(sample.trained[1:]):
            yield sample
        else:
            _leave_out(f"{row.where}: nothing left to train on", encoding.on_bad_row, bad, fatal)


def _leave_out(reason: str, choice: str, bad: list[str], fatal: list[str]) -> None:
    bad.append(reason)
    if choice == "stop":
        fatal.append(reason)
