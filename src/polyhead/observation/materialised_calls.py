"""Calls of hand-written attention, which are reported when their module returns."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.observation.followed_tensors import version_of
from polyhead.observation.recomputation import hidden_operators
from polyhead.observation.softmax_calls import WIDTH, SoftmaxCall
from polyhead.ops.attended import Attended
from polyhead.ops.attention import attention

if TYPE_CHECKING:
    from polyhead.observation.calls import Call


@dataclass(slots=True, eq=False)
class MaterialisedCall:
    """A call of hand-written attention; until its module returns, its weights may be multiplied with something else."""

    site: str
    observed: Call
    read: SoftmaxCall | None  # None once it was reported
    heads: Tensor | None  # [batch, heads, queries, value_dim]
    version: int | None = field(init=False)
    is_partial: bool = False  # whether the weights are multiplied with more than these values

    def __post_init__(self) -> None:
        assert self.heads is not None
        self.version = version_of(self.heads)

    def add_product(self) -> None:
        """Note another product of the weights."""
        if self.read is not None and self.observed.gate is not None:
            raise OptionError(
                f"gates need the whole output of a head, got a gate for {self.site!r}, whose weights are multiplied "
                "with values and with something else"
            )
        self.is_partial = True

    def release(self) -> None:
        """Release all tensors: the weights may outlive the call of their module."""
        self.read = self.heads = None

    def report(self) -> None:
        """Compute the statistics from the logits, and report them."""
        observed, read, heads = self.observed, self.read, self.heads
        assert read is not None and heads is not None
        is_complete = not self.is_partial and self.version == version_of(heads)
        self.release()
        if not (observed.counts or observed.differentiable or observed.has_listener):
            return
        call, value, mask = read.call, read.call.value, read.call.mask
        if not is_complete:
            heads, value = heads[..., :0], value[..., :0]  # only the weights are known
        observed.mask = mask
        has_gradients = observed.differentiable and torch.is_grad_enabled()
        with hidden_operators(gradients=has_gradients):
            if has_gradients:
                assert mask is not None
                mask = replace(mask, biases=(read.bias(),))
            result = attention(
                call.query.new_zeros(*call.query.shape[:3], WIDTH),
                zeros := call.key.new_zeros(*call.key.shape[:3], WIDTH),
                zeros,
                mask=mask,
                scale=1.0,
                sinks=read.sinks,
                statistics=observed.requested,
                logsumexp=observed.has_collectors,
                finite=True,
            )
            result = replace(result, output=heads)
            observed.notify(Attended(call.query, call.key, value, result, call.mask, call.scale, sinks=read.sinks))
