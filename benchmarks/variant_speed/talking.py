"""Talking heads: the cost of mixing heads before and after the softmax."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import polyhead
from benchmarks.measuring.agreement import hold
from benchmarks.measuring.calls import FORWARD, TRAINING, with_backward, without_gradients
from benchmarks.measuring.cases import Case, Entrants, Pair, Run, masked_name
from polyhead import Mask
from polyhead.ops.talking_heads.api import talking_attention

HEADS, HEAD_DIM, CHECKED_ROWS = 16, 64, 64
OURS, ORDINARY, MATERIALISED = "polyhead, talking", "ordinary heads, fused", "talking, materialised"
BOUNDS = {FORWARD: 6.0, TRAINING: 8.0}
BOUND_AT = 8192  # tokens


def talking(run: Run, tokens: int) -> Iterator[Case]:
    """Yield 16 heads of 64, causal and not, against plain heads by our kernels and the materialised form."""
    for causal in (False, True):
        for mode in (FORWARD, TRAINING):
            yield _case(run, tokens, causal, mode)


def _case(run: Run, tokens: int, causal: bool, mode: str) -> Case:
    query, key, value, upstream = (run.inputs(1, HEADS, tokens, HEAD_DIM, salt=salt) for salt in (1, 2, 3, 4))
    identity = torch.eye(HEADS, device=run.device, dtype=run.dtype)
    mixes = [identity + 0.2 * run.inputs(HEADS, HEADS, salt=salt) for salt in (5, 6)]
    tensors = (query, key, value, *mixes)
    mask = Mask.causal() if causal else None

    def mixed(backend: str, q: Tensor, k: Tensor, v: Tensor, before: Tensor, after: Tensor) -> Tensor:
        return talking_attention(
            q, k, v, logits_mix=before, weights_mix=after, mask=mask, backend=backend, finite=True
        ).output

    def plain(q: Tensor, k: Tensor, v: Tensor, before: Tensor, after: Tensor) -> Tensor:
        return polyhead.attention(q, k, v, mask=mask, backend="fused", finite=True).output

    last = (query[:, :, -CHECKED_ROWS:], key, value, *mixes)
    exact, rounded = (_formula([x.to(dtype) for x in last], causal) for dtype in (torch.float64, run.dtype))

    def enter(name: str, call: Callable[..., Tensor]) -> None:
        def check(output: Tensor) -> None:
            if name != ORDINARY:
                hold(name, output[:, :, -CHECKED_ROWS:], exact, rounded)

        found.enter(name, lambda: _step(call, tensors, upstream, mode == TRAINING), check)

    found = Entrants()
    enter(OURS, functools.partial(mixed, "fused"))
    enter(ORDINARY, plain)
    enter(MATERIALISED, functools.partial(mixed, "reference"))
    return found.case(
        f"talking, {mode}",
        masked_name(f"1x{HEADS}x{tokens}x{HEAD_DIM}", causal),
        [Pair(OURS, ORDINARY, BOUNDS[mode] if tokens == BOUND_AT else None), Pair(OURS, MATERIALISED, 1.0)],
    )


def _step(
    call: Callable[..., Tensor], tensors: tuple[Tensor, ...], upstream: Tensor, training: bool
) -> Callable[[], Tensor]:
    if not training:
        return without_gradients(lambda: call(*tensors))
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    return with_backward(lambda: call(*leaves), leaves, upstream)


def _formula(tensors: list[Tensor], causal: bool) -> Tensor:
    """Compute the last rows by the formula of `talking_attention`."""
    query, key, value, before, after = tensors
    logits = torch.einsum("hg,bhqk->bgqk", before, query @ key.transpose(-1, -2) * HEAD_DIM**-0.5)
    if causal:
        rows, keys = logits.shape[-2:]
        hidden = (
            torch.arange(keys, device=logits.device) > torch.arange(keys - rows, keys, device=logits.device)[:, None]
        )
        logits = logits.masked_fill(hidden, -torch.inf)
    return torch.einsum("hg,bhqk->bgqk", after, logits.softmax(-1)) @ value
