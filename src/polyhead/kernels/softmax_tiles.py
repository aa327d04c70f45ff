"""The arithmetic that kernels with a softmax share; inlined into them."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x):
    """Hyperbolic tangent to three units in the last place, by exp2 alone."""
    size = tl.abs(x)
    decay = tl.exp2(size * (-2.0 * LOG2E))
    far = (1.0 - decay) / (1.0 + decay)
    far = tl.where(x < 0, -far, far)
    square = x * x
    # Near 0 the fraction cancels; its series does not.
    series = 62.0 / 2835 + square * (-1382.0 / 155925)
    series = 2.0 / 15 + square * (-17.0 / 315 + square * series)
    near = x * (1.0 + square * (-1.0 / 3 + square * series))
    return tl.where(size < 0.4, near, far)
