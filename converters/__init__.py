"""Qwen3 checkpoints as boxes: layouts, stores, plans and proofs. Imports no torch.

The front door for other rooms and for programs. Names are imported at first use, so that a command pays only for what
it calls.

    from qwen3conv.converters import carry_out, prepare
    manifest = carry_out(prepare(Path("Qwen3-8B"), Path("Qwen3-8B-dcp"), "titan"))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .config import Qwen3Config, read_config
    from .conversion import carry_out
    from .detection import open_checkpoint
    from .errors import ConversionError
    from .formats import FORMATS
    from .geometry import Geometry
    from .inspection import inspect
    from .manifest import Manifest, fingerprint_of, read_manifest
    from .policies import Choices, settle
    from .preparation import Conversion, prepare
    from .verification import compute_records, diff, verify

__all__ = [
    "FORMATS",
    "Checkpoint",
    "Choices",
    "Conversion",
    "ConversionError",
    "Geometry",
    "Manifest",
    "Qwen3Config",
    "carry_out",
    "compute_records",
    "diff",
    "fingerprint_of",
    "inspect",
    "open_checkpoint",
    "prepare",
    "read_config",
    "read_manifest",
    "settle",
    "verify",
]

_MODULES = {
    "config": ("Qwen3Config", "read_config"),
    "conversion": ("carry_out",),
    "checkpoint": ("Checkpoint",),
    "detection": ("open_checkpoint",),
    "errors": ("ConversionError",),
    "formats": ("FORMATS",),
    "geometry": ("Geometry",),
    "inspection": ("inspect",),
    "manifest": ("Manifest", "fingerprint_of", "read_manifest"),
    "policies": ("Choices", "settle"),
    "preparation": ("Conversion", "prepare"),
    "verification": ("compute_records", "diff", "verify"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
