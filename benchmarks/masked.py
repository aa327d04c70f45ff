"""Cost of keeping NaN and Inf in masked keys from leaking: our guarded attention against PyTorch's bare kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import polyhead
from benchmarks.contenders import Shape
from benchmarks.layer import padding
from benchmarks.measuring.agreement import Disagreement
from benchmarks.measuring.results import Row
from polyhead.costs.measuring.runner import Run
from polyhead.errors import BackendUnsupported

GUARDED = "polyhead.attention"
BARE = "SDPA, mask at hand"
BUILT = "SDPA, mask built each call"


def guard(run: Run, shape: Shape) -> Iterator[Row]:
    """attention(mask=Mask.lengths) through `sdpa`, against `scaled_dot_product_attention` with the same mask."""
    size = (shape.batch, shape.heads, shape.tokens, shape.head_dim)
    query, key, value = (run.inputs(*size, salt=salt) for salt in (3, 4, 5))
    lengths = padding(run, shape)
    mask = polyhead.Mask.lengths(lengths)

    def real() -> Tensor:
        """[batch, 1, 1, tokens], True at real keys."""
        return (torch.arange(shape.tokens, device=run.device) < lengths[:, None])[:, None, None]

    dense = real()

    def ours() -> Tensor:
        return polyhead.attention(query, key, value, mask=mask, backend="sdpa").output

    def bare() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, dense)

    def built() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, real())

    absent = {}
    try:
        with torch.no_grad():
            _agree(ours(), bare(), dense)
    except BackendUnsupported as reasons:
        absent[GUARDED] = str(reasons)
    upstream = run.inputs(*size, salt=6)
    for mode in ("forward", "forward + backward"):
        backward = mode != "forward"
        for tensor in (query, key, value):
            tensor.requires_grad_(backward)
        wrap = _with_backward(upstream, query, key, value) if backward else _without_gradient
        calls = {GUARDED: wrap(ours), BARE: wrap(bare), BUILT: wrap(built)}
        timings = run.time({name: call for name, call in calls.items() if name not in absent}, absent)
        comparisons = [timings.compare(GUARDED, BARE), timings.compare(GUARDED, BUILT)]
        yield Row.of(f"NaN guard, {mode}", str(shape), run.dtype, timings, comparisons)


def _agree(ours: Tensor, theirs: Tensor, dense: Tensor) -> None:
    """Both run one kernel on the same numbers; what is left is the order of its blocks."""
    theirs = torch.where(dense.transpose(-2, -1), theirs, 0.0)
    error, allowed = float((ours - theirs).abs().max()), 4 * torch.finfo(ours.dtype).eps * float(theirs.abs().max())
    if not error <= allowed:
        raise Disagreement(f"{GUARDED} and {BARE} differ by {error:.3g}, at most {allowed:.3g} is rounding")


def _without_gradient(call: Callable[[], Tensor]) -> Callable[[], object]:
    def forward() -> None:
        with torch.no_grad():
            call()

    return forward


def _with_backward(upstream: Tensor, *leaves: Tensor) -> Callable[[Callable[[], Tensor]], Callable[[], object]]:
    def wrap(call: Callable[[], Tensor]) -> Callable[[], object]:
        def step() -> None:
            for leaf in leaves:
                leaf.grad = None
            call().backward(upstream)

        return step

    return wrap
