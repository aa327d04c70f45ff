"""Which model this is: a short name made of every tensor of its state.

No edit is undone in another one, and no run goes on with another one.
"""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor, nn

# Words of 8 bytes that are summed at once; the sums of all pieces go into the name.
_PIECE = 1 << 20


def fingerprint(model: nn.Module) -> str:
    """32 hexadecimal digits that change with any bit of any tensor in the state, its name, its shape or its dtype.

    Sums are computed where the weights lie; it tells models apart and keeps nobody out.

    >>> layer = nn.Linear(3, 2)
    >>> before = fingerprint(layer)
    >>> with torch.no_grad():
    ...     _ = layer.bias.add_(1)
    >>> fingerprint(layer) == before
    False
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if not isinstance(tensor, Tensor):
            continue
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(_sums(tensor.detach()))
    return digest.hexdigest()


def model_digest(model: nn.Module) -> str:
    """The fingerprint together with the configuration, which changes what a model computes as well."""
    digest = hashlib.blake2b(fingerprint(model).encode(), digest_size=16)
    config = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        # Where it was loaded from, and by which version, is not what it is.
        known = {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
        digest.update(json.dumps(known, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _sums(tensor: Tensor) -> bytes:
    """For each piece of the tensor's bytes, the sum of its words, each times an odd number that tells its place."""
    held = tensor.contiguous().flatten().view(torch.uint8)
    if held.numel() % 8:
        held = torch.cat((held, held.new_zeros(-held.numel() % 8)))
    elif held.storage_offset() % 8:  # it lies in one piece of memory with others
        held = held.clone()
    words = held.view(torch.int64)
    places = torch.arange(1, 2 * min(_PIECE, max(words.numel(), 1)), 2, device=words.device)
    sums = [(piece * places[: piece.numel()]).sum() for piece in words.split(_PIECE)]
    return torch.stack(sums).cpu().numpy().tobytes() if sums else b""
