"""Conversions as tests run them, and what came out as torch tensors, compared bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3conv.converters.conversion import carry_out, prepare
from qwen3conv.converters.detection import open_checkpoint
from qwen3conv.converters.manifest import Manifest, fingerprint_of
from qwen3conv.converters.policies import Choices, settle
from qwen3conv.converters.verification import compute_records

if TYPE_CHECKING:
    import torch


def convert(source: Path, destination: Path, to: str, **choices: Any) -> Manifest:
    """Convert ``source`` to format ``to``; ``choices`` are fields of ``Choices``."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    return carry_out(prepare(source, destination, to, Choices(**choices)), workers=1)


def policies(manifest: Manifest) -> dict[str, Mapping[str, Any]]:
    """The policies of a conversion by name; the last one of a name."""
    return {str(policy["name"]): policy for policy in manifest.policies}


def fingerprint(folder: Path, **choices: Any) -> str:
    """The fingerprint of what is stored in ``folder``, computed from its bytes, whatever a manifest says."""
    chosen = Choices(**choices)
    found = fingerprint_of(
        compute_records(settle(open_checkpoint(folder, like=chosen.like), chosen), workers=1, choices=chosen)
    )
    assert found is not None
    return found


def differing(
    found: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    change: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> list[str]:
    """What keeps ``found`` from being ``change`` of ``expected``: names, dtypes, shapes, bits. Empty when it is."""
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is not expected" for name in found if name not in expected]
    for name in expected:
        if name in found:
            have, want = found[name], change(expected[name])
            if (have.dtype, have.shape) != (want.dtype, want.shape):
                problems.append(f"{name}: {have.dtype} {list(have.shape)}, not {want.dtype} {list(want.shape)}")
            elif raw_bytes(have) != raw_bytes(want):
                problems.append(f"{name}: other bits")
    return problems


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The elements as they lie in memory, row-major: what ``torch.equal`` does not tell apart differs here."""
    import torch

    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def load_dcp(folder: Path, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
    """Every tensor of a DCP folder (or those named), loaded by torch's own ``dcp.load`` with nothing left to chance.

    Targets are made from the stored dtypes and shapes and filled with ones first.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state: dict[str, Any] = {}
    for name, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata) and (names is None or name in names):
            state[name] = ones_of_bits(entry.size, entry.properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def ones_of_bits(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose every byte is 0xFF (a NaN in the floating dtypes): what is not overwritten shows."""
    import torch

    size = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
    return torch.full((size,), 0xFF, dtype=torch.uint8).view(dtype).reshape(tuple(shape))
