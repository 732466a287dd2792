"""The files of a Hugging Face folder that are not weights and travel with them: tokenizer, chat template, licence.

They are copied byte for byte, never parsed, never executed. Reloading and saving a tokenizer instead changes its class
and drops files, so that other versions cannot load it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ..errors import DestinationError, SourceError, enumerate_problems
from .staging import flush_folder

TEMPLATES = "additional_chat_templates"
"""The one subfolder that is carried: its ``*.jinja`` (transformers 5.24, ``CHAT_TEMPLATE_DIR``)."""

_NAMES = frozenset(
    {
        "added_tokens.json",
        "chat_template.json",
        "configuration.json",
        "feature_extractor_config.json",
        "generation_config.json",
        "image_processor_config.json",
        "normalizer.json",
        "preprocessor_config.json",
        "processor_config.json",
        "special_tokens_map.json",
        "video_preprocessor_config.json",
        "vocab.json",
    }
)
_SUFFIXES = (".jinja", ".md", ".model", ".py", ".tiktoken", ".txt")
_STEMS = ("licence", "license", "notice", "readme", "copying")
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".distcp", ".ckpt", ".npz"),
    ".index.json",
)
_HANDLED = frozenset({"config.json", "qwen3conv.json", "qwen3conv-ranks.json", ".metadata"})
_READ_ELSEWHERE = (".safetensors", ".safetensors.index.json", ".distcp")
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Sidecars:
    """What travels with the weights, and what does not."""

    carried: Mapping[str, int]
    """Name relative to the folder, ``/``-separated -> bytes."""
    left: tuple[str, ...]
    """Other names in the folder, subfolders with a ``/`` at their end. Neither ``config.json`` and ``qwen3conv.json``,
    which are written anew, nor what the stores read as weights (safetensors, their index, ``.distcp``)."""


def list_sidecars(folder: Path) -> Sidecars:
    """The sidecar files of ``folder``, found by name; links to files count as files.

    Raises:
        SourceError: the folder cannot be listed.
    """
    carried: dict[str, int] = {}
    left: list[str] = []
    for name in _names(folder):
        size = _file_size(folder / name)
        if size is not None and _travels(name):
            carried[name] = size
        elif name == TEMPLATES and (folder / name).is_dir():
            for below in _names(folder / name):
                size = _file_size(folder / name / below)
                if size is not None and below.endswith(".jinja") and not below.startswith(".") and below.isprintable():
                    carried[f"{name}/{below}"] = size
                else:
                    left.append(f"{name}/{below}")
        elif name not in _HANDLED and not name.endswith(_READ_ELSEWHERE):
            left.append(f"{name}/" if (folder / name).is_dir() else name)
    return Sidecars(carried, tuple(left))


def copy_sidecars(source: Path, destination: Path, names: Iterable[str]) -> dict[str, str]:
    """Copy ``names`` from one folder to another, byte for byte; return the xxh3_128 hex digest of each.

    ``destination`` is a folder that is still being staged: what is there under these names is replaced. When this
    returns, files and folder entries are on the disk.

    Raises:
        SourceError: a name leaves the folder, or its file is gone or unreadable.
        DestinationError: a copy cannot be written.
    """
    chosen = list(names)
    hostile = [name for name in chosen if not name.isprintable() or "\\" in name or not _is_plain(name)]
    if hostile:
        raise SourceError(enumerate_problems(f"{source}: these are not sidecar names:", map(repr, hostile)))
    digests = {name: _copy_file(source / name, destination / name) for name in chosen}
    for folder in sorted({(destination / name).parent for name in chosen}, reverse=True):  # the subfolder first
        flush_folder(folder)
    return digests


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise SourceError(f"{folder} cannot be listed: {error.strerror}") from None


def _file_size(path: Path) -> int | None:
    """Bytes of the file at ``path``, through links; ``None`` for anything that is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _travels(name: str) -> bool:
    lower = name.lower()
    if name.startswith(".") or not name.isprintable() or name in _HANDLED or lower.endswith(_WEIGHTS):
        return False
    if name in _NAMES or lower.endswith(_SUFFIXES) or lower.startswith(_STEMS):
        return True
    return lower.startswith("tokenizer") and lower.endswith(".json")


def _is_plain(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    return folder in ("", TEMPLATES) and file not in ("", ".", "..") and not name.startswith("/")


def _copy_file(source: Path, destination: Path) -> str:
    digest = xxhash.xxh3_128()
    if _file_size(source) is None:
        raise SourceError(f"{source} is gone, or is not a file")
    try:
        if destination.exists() and destination.samefile(source):
            raise DestinationError(f"{destination} is the very file to be copied; choose another place")
        destination.parent.mkdir(exist_ok=True)
        destination.unlink(missing_ok=True)
        with destination.open("xb") as writer:
            for block in _read_blocks(source):
                digest.update(block)
                writer.write(block)
            writer.flush()
            os.fsync(writer.fileno())
    except OSError as error:
        raise DestinationError(f"{destination} cannot be written: {error.strerror}") from error
    return digest.hexdigest()


def _read_blocks(path: Path) -> Iterator[bytes]:
    """The file's bytes. Its failures are the source's, whatever the reader of the blocks makes of its own."""
    try:
        with path.open("rb") as reader:
            while block := reader.read(_BLOCK):
                yield block
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error
