"""Cost of keeping NaN and Inf in masked keys from leaking: our guarded attention against PyTorch's bare kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import polyhead
from benchmarks.layer_speed.contenders import Shape
from benchmarks.layer_speed.layer import padding
from benchmarks.measuring.agreement import hold_within
from benchmarks.measuring.calls import FORWARD, TRAINING, with_backward, without_gradients
from benchmarks.measuring.cases import Case, Entrants, Pair, Run

GUARDED = "polyhead.attention"
BARE = "SDPA, mask at hand"
BUILT = "SDPA, mask built each call"


def guard(run: Run, shape: Shape) -> Iterator[Case]:
    """Yield `attention(mask=Mask.lengths)` by `sdpa`, and `scaled_dot_product_attention` with the same mask."""
    size = (shape.batch, shape.heads, shape.tokens, shape.head_dim)
    query, key, value = tensors = [run.inputs(*size, salt=salt) for salt in (3, 4, 5)]
    upstream = run.inputs(*size, salt=6)
    lengths = padding(run, shape)
    mask = polyhead.Mask.lengths(lengths)

    def real() -> Tensor:
        """[batch, 1, 1, tokens], True at real keys."""
        return (torch.arange(shape.tokens, device=run.device) < lengths[:, None])[:, None, None]

    dense = real()
    calls: dict[str, Callable[[], Tensor]] = {
        GUARDED: lambda: polyhead.attention(query, key, value, mask=mask, backend="sdpa").output,
        BARE: lambda: F.scaled_dot_product_attention(query, key, value, dense),
        BUILT: lambda: F.scaled_dot_product_attention(query, key, value, real()),
    }
    with torch.no_grad():
        exact = torch.where(dense.transpose(-2, -1), calls[BARE](), 0.0).double()

    def check(output: Tensor) -> None:
        """Allow for another order of the kernel's blocks alone, since both run it on the same numbers."""
        hold_within(GUARDED, output, exact, 4 * torch.finfo(output.dtype).eps * float(exact.abs().max()))

    for mode in (FORWARD, TRAINING):
        for tensor in tensors:
            tensor.requires_grad_(mode == TRAINING)
        found = Entrants()
        for name, call in calls.items():
            build = functools.partial(without_gradients, call)
            if mode == TRAINING:
                build = functools.partial(with_backward, call, tensors, upstream)
            found.enter(name, build, check if name == GUARDED else None)
        yield found.case(f"NaN guard, {mode}", shape, [Pair(GUARDED, BARE), Pair(GUARDED, BUILT)])
