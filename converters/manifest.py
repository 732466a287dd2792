"""``qwen3conv.json``: what a conversion made, tensor by tensor, so that it can be proved again without the source.

Digests are xxh3_128 (xxHash, the reference implementation through python-xxhash): at memory speed it costs a conversion
almost nothing, and with 128 bits two different tensors do not collide by accident. It guards against faults, not
against someone who wants to deceive: for that, sign the manifest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from .boxes import Shape
from .errors import SourceError
from .parameters import EMBEDDING, HEAD

MANIFEST = "qwen3conv.json"
ASSETS = "hf_assets"
"""Folder inside a DCP that keeps config.json, tokenizer and the like; torchtitan can use it as ``hf_assets_path``."""

STATE_MARK = ":"
"""Parts the kind from the parameter in the names of training state: ``exp_avg:model.norm.weight``."""

_VERSION = 1


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A logical parameter as it was written; ``digest`` is ``None`` after ``--no-digests``."""

    dtype: str
    shape: Shape
    digest: str | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of ``qwen3conv.json``."""

    tool: str
    source: Mapping[str, Any]
    format: str
    schema: str | None
    policies: tuple[Mapping[str, Any], ...]
    tensors: Mapping[str, TensorRecord]
    files: Mapping[str, str] = field(default_factory=dict)
    """Sidecar files, relative to the folder, and their xxh3_128."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Training state that is not tensors, by its first key (``lr_scheduler``), and the xxh3_128 of all of it."""

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of ``tensors``; ``None`` without digests."""
        return fingerprint_of(self.tensors)

    def to_json(self) -> bytes:
        """The file's bytes."""
        head = json.dumps(
            {
                "manifest_version": _VERSION,
                "tool": self.tool,
                "source": self.source,
                "format": self.format,
                "schema": self.schema,
                "policies": self.policies,
                "digest": "xxh3_128",
                "fingerprint": self.fingerprint,
                "files": self.files,
                **({"values": self.values} if self.values else {}),
            },
            indent=1,
        )
        rows = (f"  {json.dumps(name)}: {json.dumps([r.dtype, r.shape, r.digest])}" for name, r in self.tensors.items())
        # one line per tensor: json's own indent would take six
        return (head.removesuffix("\n}") + ',\n "tensors": {\n' + ",\n".join(rows) + "\n }\n}\n").encode()


def fingerprint_of(tensors: Mapping[str, TensorRecord]) -> str | None:
    """One hash over name, dtype, shape and digest of every logical parameter, sorted; ``None`` if one has no digest.

    A head that equals the embeddings is left out, so a tied model prints the same value whether a format stores
    the head or not, and whether or not a config says that it is tied. Training state is no part of the model.
    """
    head, embedding = tensors.get(HEAD), tensors.get(EMBEDDING)
    whole = xxhash.xxh3_128()
    for name in sorted(tensors):
        record = tensors[name]
        if STATE_MARK in name:
            continue
        if record.digest is None:
            return None
        if name == HEAD and head == embedding:
            continue
        whole.update(f"{name} {record.dtype} {list(record.shape)} {record.digest}\n".encode())
    return whole.hexdigest()


def read_manifest(path: Path) -> Manifest | None:
    """The manifest in the folder or file ``path``, ``None`` when there is none.

    Raises:
        SourceError: the file is not a manifest that this version reads.
    """
    path = path / MANIFEST if path.is_dir() else path
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path} cannot be read: {error}") from error
    try:
        if raw["manifest_version"] != _VERSION:
            raise SourceError(f"{path} has version {raw['manifest_version']!r}, this program reads {_VERSION}")
        tensors = {
            str(name): TensorRecord(
                str(dtype), tuple(int(size) for size in shape), None if digest is None else str(digest)
            )
            for name, (dtype, shape, digest) in raw["tensors"].items()
        }
        manifest = Manifest(
            tool=str(raw["tool"]),
            source=dict(raw["source"]),
            format=str(raw["format"]),
            schema=None if raw["schema"] is None else str(raw["schema"]),
            policies=tuple(dict(policy) for policy in raw["policies"]),
            tensors=tensors,
            files={str(name): str(digest) for name, digest in raw["files"].items()},
            values={str(name): str(digest) for name, digest in raw.get("values", {}).items()},
        )
        follows = manifest.fingerprint == raw.get("fingerprint")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise SourceError(
            f"{path} is not a whole manifest ({type(error).__name__}: {error}); it was edited or cut short"
        ) from error
    if not follows:
        raise SourceError(f"{path}: its fingerprint does not follow from its own digests; it was edited")
    return manifest


def records(entries: Iterable[tuple[str, str, Shape, str | None]]) -> dict[str, TensorRecord]:
    """Tensor records by name, from ``(name, dtype, shape, digest)``."""
    return {name: TensorRecord(dtype, shape, digest) for name, dtype, shape, digest in entries}
