"""Adapters for custom attention modules: they report queries, keys and values to a session."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError, ShapeError
from polyhead.masks import Mask
from polyhead.observation.recomputation import hidden_operators
from polyhead.observation.rows import Tokens, with_documents
from polyhead.ops.attended import Attended
from polyhead.ops.attention import AttentionOutput, attention

if TYPE_CHECKING:
    from polyhead.observation.session import Session

Adapters = Mapping[str | type[nn.Module], "Adapter"]


@dataclass(slots=True, eq=False)
class AttentionNotifier:
    """Callback that an adapter calls whenever its module computes attention."""

    module: nn.Module
    adapter: Adapter
    session: Session
    unchecked: dict[str, None]  # names of the session's sites whose own outputs were not passed, in order of calls

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
        output: Tensor | None = None,
    ) -> Tensor | None:
        """Report one attention call, with the arguments of `polyhead.attention`.

        Args:
            query, key, value: [batch, heads, sequence, head_dim], as they enter the softmax: after position
                embeddings, including the keys of a KV cache.
            mask, scale, softcap, sinks: as for `polyhead.attention`.
            cross: whether queries and keys come from different sequences.
            tokens: [batch, queries], False for padding; derived from the mask by default.
            output: the module's own head outputs, [batch, heads, queries, value_dim], without dropout and before the
                output projection and any gates. Every observed call is compared with the attention of the other
                arguments, which synchronises with the device. Without it, the profile names the module as not compared.

        Returns:
            The gates for the heads' outputs (see `Session.gates`), or None where there are none.

        Raises:
            ShapeError: a tensor has the wrong shape.
            OptionError: the outputs differ by more than rounding, or the adapter ignores gates.
        """
        if not all(isinstance(x, Tensor) and x.ndim == 4 for x in (query, key, value)):
            got = [list(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in (query, key, value)]
            raise ShapeError(
                f"an adapter must pass tensors [batch, heads, sequence, head_dim], got {got[0]}, {got[1]}, {got[2]}"
            )
        if tokens is not None and tokens.shape != (query.shape[0], query.shape[2]):
            raise ShapeError(f"tokens must be [batch, queries], here {[*query.shape[::2]]}, got {list(tokens.shape)}")
        token_mask = Tokens.of(mask, query, key) if tokens is None else tokens
        call = self.session.call(self.module, query.shape[1], token_mask, cross=cross, learned_sinks=sinks is not None)
        if call is None:
            return None
        if call.gate is not None and not getattr(self.adapter, "gates", False):
            raise OptionError(
                f"gates need an adapter that declares `gates = True` and multiplies the heads' outputs, "
                f"got a gate for {call.site.name!r} and {type(self.adapter).__name__}"
            )
        if call.counts or call.differentiable:
            call.tokens = call.tokens if tokens is None else tokens
            with hidden_operators(gradients=call.differentiable):
                if not cross:
                    mask, call.statistics_mask = with_documents(mask, query.shape[2], key.shape[2])
                call.mask = mask
                # Only collectors and the check read the output; the statistics need no values.
                is_output_needed = call.has_collectors or output is not None
                result = attention(
                    query, key, value if is_output_needed else value[..., :1], mask=mask, scale=scale, softcap=softcap,
                    sinks=sinks, statistics=call.requested, logsumexp=is_output_needed,
                )  # fmt: skip
                if output is None:
                    self.unchecked[call.site.name] = None
                else:
                    _check_output(call.site.name, output.detach(), result)
                call.notify(Attended(query, key, value, result, mask, scale, softcap, sinks))
        return call.gate


@torch.no_grad()
def _check_output(site: str, output: Tensor, result: AttentionOutput) -> None:
    """Raise if a module's own head outputs differ from the recomputed ones in rows with visible keys."""
    if output.shape != result.output.shape:
        raise ShapeError(
            f"output must be the head outputs [batch, heads, queries, value_dim], here {list(result.output.shape)}, "
            f"got {list(output.shape)}"
        )
    assert result.logsumexp is not None
    rows = torch.isfinite(result.logsumexp)
    own, recomputed = output[rows].double(), result.output[rows].double()
    error = float((own - recomputed).norm() / own.norm().clamp_min(torch.finfo(torch.float64).tiny))
    # A wrong scale, mask or position changes the outputs by far more than the square root of the rounding unit.
    allowed = torch.finfo(output.dtype).eps ** 0.5
    if not error <= allowed:
        raise OptionError(
            f"an adapter must pass the queries, keys, values, mask and scale of the module's own attention, got head "
            f"outputs for {site!r} that differ from the module's by {error:.2g} of their norm (rounding is below "
            f"{allowed:.1g}); compare the scale, the mask and the position embeddings, and call `eval()` if the module "
            "has dropout"
        )


def unchecked_note(sites: Collection[str]) -> str:
    """Return a note that names up to three sites whose own outputs were not compared; empty without any."""
    names = ", ".join(list(sites)[:3]) + (", …" if len(sites) > 3 else "")
    return f"not compared with the module's own output, pass `output` to `notify`: {names}" if len(sites) else ""


class Adapter(Protocol):
    """Protocol of adapters, passed as `observe(model, adapters={path or class: adapter})`.

    The session recomputes the attention for its statistics; the output of the module itself is unchanged.

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
    ...         def hook(module, inputs, output):
    ...             notify(*module.heads(*inputs), output=output.unflatten(-1, (2, 8)).transpose(1, 2))
    ...         return module.register_forward_hook(hook)
    >>> model = nn.Sequential(Handwritten(), nn.Linear(16, 16), Handwritten())
    >>> with polyhead.observe(model, adapters={Handwritten: HandwrittenAdapter()}) as session:
    ...     output = model(torch.randn(3, 5, 16))
    >>> session.profile["tokens"].tolist()
    [15.0, 15.0, 15.0, 15.0]

    `output`, the module's own head outputs, is optional: each is compared with the attention of the arguments that the
    adapter passes, and a difference raises. `session.profile` names modules without it in its repr.

    An adapter with an attribute `gates = True` promises to multiply the heads' outputs by the return value of `notify`.
    Without it, a session that sets gates for the module raises.
    """

    def watch(self, module: nn.Module, notify: AttentionNotifier) -> AbstractContextManager[Any]:
        """Attach to a module; return a context manager that detaches on exit, such as a PyTorch hook handle.

        Args:
            module: attention module of the model.
            notify: function to call with each finished attention: `notify(query, key, value, *, mask, scale, softcap,
                sinks, cross, tokens, output)`, described in `AttentionNotifier.__call__`.

        Returns:
            The context manager.
        """


def adapted_modules(
    model: nn.Module, adapters: Adapters, interface_modules: tuple[nn.Module, ...]
) -> dict[nn.Module, Adapter]:
    """Return modules with their adapters; an adapter for a module's path takes precedence over one for its class."""
    adapted: dict[nn.Module, Adapter] = {}
    used = set()
    for path, module in model.named_modules():
        classes = [name for name in adapters if isinstance(name, type) and isinstance(module, name)]
        matched = path if path in adapters else next(iter(classes), None)
        if matched is None:
            continue
        if any(module is other for other in interface_modules):
            raise OptionError(
                f"{path!r} is already observed through the attention interface of transformers, got an adapter for it"
            )
        used.update([matched, *classes])
        adapted[module] = adapters[matched]
    for name in adapters:
        if name not in used:
            label = name.__name__ if isinstance(name, type) else repr(name)
            raise OptionError(
                f"adapters are keyed by path or class of the model's modules, got {label}, which matches none"
            )
    return adapted
