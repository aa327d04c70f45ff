"""Checkpointed layers, which run again in the backward: what a session computes in between is not repeated there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


def is_recomputed() -> bool:
    """Return whether a backward is running, i.e. a checkpointed layer is being recomputed."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def hidden_operators(*, gradients: bool = False) -> Iterator[None]:
    """Run operators that are not the model's: hidden from dispatch modes, and with gradients only if requested.

    Selective checkpointing is such a mode. It caches results in the order of the operators, and in the recomputation,
    which does not repeat those of a session, their results would be taken for the model's.
    """
    with _disable_current_modes(), torch.set_grad_enabled(gradients and torch.is_grad_enabled()):
        yield
