"""Attention modules of a user's own: an adapter tells a session what they attend with."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError, ShapeError
from polyhead.masks import Mask
from polyhead.observation.rows import Tokens
from polyhead.observation.watcher import Watcher
from polyhead.ops.attended import Attended
from polyhead.ops.attention import attention

Adapters = Mapping[str | type[nn.Module], "Adapter"]


@dataclass(frozen=True, slots=True, eq=False)
class Tell:
    """Called by an adapter whenever its module attends."""

    module: nn.Module
    adapter: Adapter
    watcher: Watcher

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Mask | None = None,
        scale: float | Tensor | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        cross: bool = False,
        tokens: Tensor | None = None,
    ) -> Tensor | None:
        """Tell of one attention, in the words of `polyhead.attention`.

        Args:
            query, key, value: [batch, heads, sequence, head_dim], as they meet in the softmax: after position
                embeddings, with the keys of a cache.
            mask, scale, softcap, sinks: as `polyhead.attention` takes them.
            cross: whether queries and keys are different sequences.
            tokens: [batch, queries], False for padding; without it, what the mask says.

        Returns the factors of the heads' outputs (as `Session.gates` has them), None where there are none.
        """
        if not all(isinstance(x, Tensor) and x.ndim == 4 for x in (query, key, value)):
            got = [list(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in (query, key, value)]
            raise ShapeError(
                f"an adapter tells of [batch, heads, sequence, head_dim], got {got[0]}, {got[1]}, {got[2]}"
            )
        if tokens is not None and tokens.shape != (query.shape[0], query.shape[2]):
            raise ShapeError(f"tokens are [batch, queries], here {[*query.shape[::2]]}, got {list(tokens.shape)}")
        rows = Tokens.of(mask, query, key) if tokens is None else tokens
        call = self.watcher.call(self.module, query.shape[1], rows, cross=cross, learned_sinks=sinks is not None)
        if call is None:
            return None
        if call.gate is not None and not getattr(self.adapter, "gates", False):
            raise OptionError(
                f"an adapter without a true attribute `gates` leaves the heads' outputs alone, "
                f"got a gate for {call.site.name!r} and {type(self.adapter).__name__}"
            )
        if call.counts or call.differentiable:
            call.mask = mask
            call.tokens = call.tokens if tokens is None else tokens
            with torch.set_grad_enabled(call.differentiable and torch.is_grad_enabled()):
                seen = value if call.whole else value[..., :1]
                result = attention(
                    query, key, seen, mask=mask, scale=scale, softcap=softcap, sinks=sinks, statistics=call.requested,
                    logsumexp=call.whole,
                )  # fmt: skip
                call.notify(Attended(query, key, value, result, mask, scale, softcap, sinks))
        return call.gate


class Adapter(Protocol):
    """Knows how modules of one kind attend; handed to `observe(model, adapters={path or class: adapter})`.

    The session computes its statistics beside the module, whose results stay its own.

    >>> import torch, polyhead
    >>> from torch import nn
    >>> class Handwritten(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.input = nn.Linear(16, 48)
    ...     def heads(self, x):
    ...         return [part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.input(x).chunk(3, -1)]
    ...     def forward(self, x):
    ...         query, key, value = self.heads(x)
    ...         weights = (query @ key.mT / 8**0.5).softmax(-1)
    ...         return (weights @ value).transpose(1, 2).flatten(2)
    >>> class HandwrittenAdapter:
    ...     def watch(self, module, notify):
    ...         def note(module, inputs):
    ...             notify(*module.heads(*inputs))
    ...         return module.register_forward_pre_hook(note)
    >>> model = nn.Sequential(Handwritten(), nn.Linear(16, 16), Handwritten())
    >>> with polyhead.observe(model, adapters={Handwritten: HandwrittenAdapter()}) as session:
    ...     output = model(torch.randn(3, 5, 16))
    >>> session.profile["tokens"].tolist()
    [15.0, 15.0, 15.0, 15.0]

    An adapter with a true attribute `gates` promises to multiply the heads' outputs with what `notify` returns. For
    others the gates of a session are refused.
    """

    def watch(self, module: nn.Module, notify: Tell) -> AbstractContextManager[Any]:
        """Begin to watch a module. What comes back ends it on leaving, as the handle of a PyTorch hook does."""


def adapted_modules(model: nn.Module, adapters: Adapters, asking: tuple[nn.Module, ...]) -> dict[nn.Module, Adapter]:
    """The modules that have an adapter: one for their path, or else the first for a class that they are of."""
    found: dict[nn.Module, Adapter] = {}
    used = set()
    for path, module in model.named_modules():
        classes = [name for name in adapters if isinstance(name, type) and isinstance(module, name)]
        name = path if path in adapters else next(iter(classes), None)
        if name is None:
            continue
        if any(module is other for other in asking):
            raise OptionError(
                f"{path!r} uses the attention interface of transformers and is watched there, got an adapter for it"
            )
        used.update([name, *classes])
        found[module] = adapters[name]
    for name in adapters:
        if name not in used:
            what = name.__name__ if isinstance(name, type) else repr(name)
            raise OptionError(f"adapters go by paths or classes of the model's modules, got {what}, which it has not")
    return found


def watched(module: nn.Module, adapter: Adapter, watcher: Watcher) -> AbstractContextManager[Any]:
    """An adapter at work, until it is left."""
    return adapter.watch(module, Tell(module, adapter, watcher))
