"""The arithmetic that kernels with a softmax share; inlined into them."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def products(tile_a, tile_b):
    """Dot products of the rows of two tiles, [rows, channels] and [columns, channels], float32 [rows, columns].

    In float32 one chain of additions over all channels loses more than PyTorch's products do; several short ones,
    added up at the end, do not. In 16 bits the inputs' own rounding is far larger.
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
    """total + tile_a @ tile_b, float32. In float32 each tile is a chain of additions of its own, as above.

    Added as it is, the product would be: Triton makes `total + dot` the dot that starts from `total`, and with that one
    chain over all tiles. A difference it leaves alone.
    """
    if tile_a.dtype == tl.float32:
        total -= tl.dot(-tile_a, tile_b, input_precision="ieee")
    else:
        total = tl.dot(tile_a, tile_b, total)
    return total


@triton.jit
def exp2(x, EXACT: tl.constexpr):
    """2 to the power of x, below 2 to the 127th. EXACT: to one unit in the last place, by products alone.

    The units made for exponentials are off by two, which 16-bit inputs hide and float32's do not.
    """
    if EXACT:
        x = tl.where(x < -127.0, -127.0, x)  # NaN stays; from there on the result is 0
        whole = tl.floor(x + 0.5)
        part = x - whole
        # 2**part between -1/2 and 1/2, within 2e-9, and exactly 1 at 0.
        series = 9.61843736e-03 + part * (1.33988744e-03 + part * 1.53533618e-04)
        series = 2.40226479e-01 + part * (5.55033247e-02 + part * series)
        near = 1.0 + part * (6.93147203e-01 + part * series)
        result = near * ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    else:
        result = tl.exp2(x)
    return result


@triton.jit
def log2(x, EXACT: tl.constexpr):
    """The logarithm of x, which is a positive normal number or NaN. EXACT: to one unit in the last place of the larger
    of it and 1."""
    if EXACT:
        bits = x.to(tl.int32, bitcast=True)
        whole = (bits - 0x3F3504F3) >> 23  # so that the rest lies between the root of 1/2 and that of 2
        rest = (bits - (whole << 23)).to(tl.float32, bitcast=True)
        # log(m) = 2 atanh((m - 1) / (m + 1))
        part = tl.div_rn(rest - 1.0, rest + 1.0)
        square = part * part
        series = 1.0 / 5 + square * (1.0 / 7 + square * (1.0 / 9))
        series = 1.0 + square * (1.0 / 3 + square * series)
        result = whole.to(tl.float32) + part * (2.0 * LOG2E) * series
        result += x - x  # NaN stays
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
    """Hyperbolic tangent by exp2 alone, to three units in the last place; EXACT: to two."""
    size = tl.abs(x)
    decay = exp2(size * (-2.0 * LOG2E), EXACT)
    far = _ratio(1.0 - decay, 1.0 + decay, EXACT)
    far = tl.where(x < 0, -far, far)
    square = x * x
    # Near 0 the fraction cancels; its series does not.
    series = 62.0 / 2835 + square * (-1382.0 / 155925)
    series = 2.0 / 15 + square * (-17.0 / 315 + square * series)
    near = x * (1.0 + square * (-1.0 / 3 + square * series))
    return tl.where(size < 0.4, near, far)


@triton.jit
def tanh_slope(x, bent, EXACT: tl.constexpr):
    """The derivative of tanh at x, where it is `bent`."""
    result = 1.0 - bent * bent
    if EXACT:
        # Far from 0 that cancels.
        size = tl.abs(x)
        decay = exp2(size * (-2.0 * LOG2E), EXACT)
        far = _ratio(4.0 * decay, (1.0 + decay) * (1.0 + decay), EXACT)
        result = tl.where(size < 0.4, result, far)
    return result
