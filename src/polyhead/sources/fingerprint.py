"""Fingerprint of a model, a hash of all tensors in its state dict.

It is compared before an edit is undone or a run is resumed, to refuse a different model.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn

# Number of 8-byte words per weighted sum; the sums of all pieces are hashed.
_PIECE = 1 << 20


def fingerprint(model: nn.Module) -> str:
    """Return 32 hexadecimal digits that depend on every bit, name, shape and dtype in the state dict.

    Computed on the device of the weights, and the same for a sharded model, whose ranks all have to call it. Not
    cryptographically secure.

    Args:
        model: the module.

    >>> layer = nn.Linear(3, 2)
    >>> before = fingerprint(layer)
    >>> with torch.no_grad():
    ...     _ = layer.bias.add_(1)
    >>> fingerprint(layer) == before
    False
    """
    digest, factors = hashlib.blake2b(digest_size=16), dict[torch.device, Tensor]()
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if not isinstance(tensor, Tensor):
            continue
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # of a DTensor
        digest.update(_weighted_sums(whole.detach(), factors))
    return digest.hexdigest()


def model_digest(model: nn.Module) -> str:
    """Return a digest of the fingerprint and the config, which also affects what a model computes."""
    digest = hashlib.blake2b(fingerprint(model).encode(), digest_size=16)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        # Source path and version do not affect the computation.
        config_dict = {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
        digest.update(json.dumps(config_dict, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _weighted_sums(tensor: Tensor, factors: dict[torch.device, Tensor]) -> bytes:
    """Return, for each piece of the tensor's bytes, the sum of its words times odd position-dependent factors.

    `factors` are those of the tensors before, by device; more are added if this one is larger.
    """
    data = tensor.contiguous().flatten().view(torch.uint8)
    if data.numel() % 8:
        data = torch.cat((data, data.new_zeros(-data.numel() % 8)))
    elif data.storage_offset() % 8:  # an unaligned view into a shared storage
        data = data.clone()
    words = data.view(torch.int64)
    longest, device = min(_PIECE, words.numel()), words.device
    if device not in factors or len(factors[device]) < longest:
        factors[device] = torch.arange(1, 2 * longest + 1, 2, device=device)
    pairs = [(piece, factors[device][: piece.numel()]) for piece in words.split(_PIECE)]
    # On a CPU, `dot` of integers needs no product in memory; other devices have none.
    sums = [torch.dot(piece, x) if words.is_cpu else (piece * x).sum() for piece, x in pairs]
    return torch.stack(sums).cpu().numpy().tobytes() if sums else b""
