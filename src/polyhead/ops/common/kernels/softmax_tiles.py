"""Arithmetic shared by kernels with a softmax; all functions are inlined into them."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def products(tile_a, tile_b):
    """Return tile_a @ tile_b^T of [rows, channels] and [columns, channels], float32 [rows, columns].

    In float32, one chain of additions over all channels is less accurate than PyTorch's products; several short chains,
    summed at the end, are not. With 16-bit inputs their own rounding is far larger.
    """
    if (tile_a.dtype == tl.float32) and (tile_a.shape[1] > 16):
        CHAINS: tl.constexpr = tile_a.shape[1] // 16
        rows = tl.permute(tl.reshape(tile_a, [tile_a.shape[0], CHAINS, 16]), [1, 0, 2])
        columns = tl.permute(tl.reshape(tile_b, [tile_b.shape[0], CHAINS, 16]), [1, 2, 0])
        result = tl.sum(tl.dot(rows, columns, input_precision="ieee"), 0)
    else:
        result = tl.dot(tile_a, tl.trans(tile_b), input_precision="ieee")
    return result


@triton.jit
def add_product(total, tile_a, tile_b):
    """Return total + tile_a @ tile_b, float32; for float32 inputs each tile is summed separately.

    Triton fuses `total + dot` into a dot that accumulates into `total`, one chain over all tiles. It does not fuse a
    difference, hence the negated product.
    """
    if tile_a.dtype == tl.float32:
        total -= tl.dot(-tile_a, tile_b, input_precision="ieee")
    else:
        total = tl.dot(tile_a, tile_b, total)
    return total


@triton.jit
def exp2(x, EXACT: tl.constexpr):
    """Return 2^x, for results below 2^127. EXACT: within one unit in the last place, by a polynomial.

    The hardware's exponential is off by two units, which matters for float32 inputs but not for 16-bit ones.
    """
    if EXACT:
        x = tl.where(x < -127.0, -127.0, x)  # NaN propagates; at -127 the result is 0
        integer = tl.floor(x + 0.5)
        fraction = x - integer
        # 2**fraction for a fraction between -1/2 and 1/2, within 2e-9, and exactly 1 at 0.
        series = 9.61843736e-03 + fraction * (1.33988744e-03 + fraction * 1.53533618e-04)
        series = 2.40226479e-01 + fraction * (5.55033247e-02 + fraction * series)
        near = 1.0 + fraction * (6.93147203e-01 + fraction * series)
        result = near * ((integer.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    else:
        result = tl.exp2(x)
    return result


@triton.jit
def log2(x, EXACT: tl.constexpr):
    """Return log2(x) of a positive normal number or NaN.

    EXACT: within one unit in the last place of the larger of the result and 1.
    """
    if EXACT:
        bits = x.to(tl.int32, bitcast=True)
        integer = (bits - 0x3F3504F3) >> 23  # so that the mantissa is between sqrt(1/2) and sqrt(2)
        mantissa = (bits - (integer << 23)).to(tl.float32, bitcast=True)
        # log(m) = 2 atanh((m - 1) / (m + 1))
        fraction = tl.div_rn(mantissa - 1.0, mantissa + 1.0)
        square = fraction * fraction
        series = 1.0 / 5 + square * (1.0 / 7 + square * (1.0 / 9))
        series = 1.0 + square * (1.0 / 3 + square * series)
        result = integer.to(tl.float32) + fraction * (2.0 * LOG2E) * series
        result += x - x  # propagate NaN
    else:
        result = tl.log2(x)
    return result


@triton.jit
def _ratio(a, b, EXACT: tl.constexpr):
    if EXACT:
        result = tl.div_rn(a, b)
    else:
        result = a / b
    return result


@triton.jit
def tanh(x, EXACT: tl.constexpr):
    """Return tanh(x), computed by exp2 alone, within three units in the last place; EXACT: within two."""
    magnitude = tl.abs(x)
    decay = exp2(magnitude * (-2.0 * LOG2E), EXACT)
    far = _ratio(1.0 - decay, 1.0 + decay, EXACT)
    far = tl.where(x < 0, -far, far)
    square = x * x
    # Near 0 the ratio suffers from cancellation; the series does not.
    series = 62.0 / 2835 + square * (-1382.0 / 155925)
    series = 2.0 / 15 + square * (-17.0 / 315 + square * series)
    near = x * (1.0 + square * (-1.0 / 3 + square * series))
    return tl.where(magnitude < 0.4, near, far)


@triton.jit
def tanh_slope(x, tanh_x, EXACT: tl.constexpr):
    """Return the derivative of tanh at x, given `tanh_x` = tanh(x)."""
    result = 1.0 - tanh_x * tanh_x
    if EXACT:
        # Far from 0, 1 - tanh^2 suffers from cancellation.
        magnitude = tl.abs(x)
        decay = exp2(magnitude * (-2.0 * LOG2E), EXACT)
        far = _ratio(4.0 * decay, (1.0 + decay) * (1.0 + decay), EXACT)
        result = tl.where(magnitude < 0.4, result, far)
    return result
