"""Every kernel once or more on small, uneven sizes, for compute-sanitizer to watch.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck python -m tests.gpu_sanitize
    compute-sanitizer --tool racecheck python -m tests.gpu_sanitize

Without PyTorch's caching each tensor is an allocation of its own, and an access past its end is seen: `--planted` makes
one, to show it. What is computed is held to the tests' bounds elsewhere; here it must only be finite.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

import polyhead
from polyhead import Mask
from polyhead.ops.common.kernels.head_sums import quadratic_forms, squared_norms, tokens_and_entropies
from polyhead.ops.common.kernels.row_ends import mask_ends
from polyhead.ops.common.kernels.row_reduction import reduce_rows
from polyhead.ops.common.statistics import NAMES
from polyhead.ops.decode.fused import CacheArguments, decode
from polyhead.ops.profile import BlockMap
from polyhead.ops.selected_rows.api import RaggedRows, ragged_attention
from polyhead.ops.selected_rows.row_products import RowGroups, spread_product, summed_product
from polyhead.ops.talking_heads.api import mixed_weights, talking_attention

STATISTICS = tuple(name for name in NAMES if name != "learned_sink_mass")
BF16, FP32 = torch.bfloat16, torch.float32


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def forward_and_backward(
    dtype: torch.dtype, dim: int, mask: Mask | None, statistics: tuple[str, ...], queries: int = 131, keys: int = 131
) -> list[Tensor]:
    tensors = [normal(2, heads, n, dim, dtype=dtype) for heads, n in ((4, queries), (2, keys), (2, keys))]
    for x in tensors:
        x.requires_grad_()
    result = polyhead.attention(*tensors, mask=mask, statistics=statistics, logsumexp=True, backend="fused")
    loss = result.output.float().square().sum()
    if "entropy" in statistics:
        assert result.statistics is not None
        assert result.statistics.entropy is not None
        loss = loss + result.statistics.entropy.sum()
    return list(torch.autograd.grad(loss, tensors))


def profiled(mask: Mask | None, dim: int = 64, dtype: torch.dtype = BF16, **requested: object) -> list[Tensor]:
    query, key = normal(2, 4, 263, dim, dtype=dtype), normal(2, 2, 263, dim, dtype=dtype)
    with torch.no_grad():
        lse = polyhead.attention(query, key, key, mask=mask, logsumexp=True, backend="fused").logsumexp
    assert lse is not None
    found = polyhead.profile(query, key, lse, mask=mask, backend="fused", **requested)  # type: ignore[arg-type]
    return [x for x in (found.received, found.block_map, found.offsets, found.top_weights) if x is not None]


def decoded(kind: str) -> list[Tensor]:
    layer = polyhead.MultiHeadAttention(256, 4, num_kv_heads=2, device="cuda", dtype=BF16).eval()
    kinds: dict[str, tuple[type[polyhead.KVCache], dict[str, int]]] = {
        "preallocated": (polyhead.layers.kv_cache.PreallocatedCache, {"capacity": 80}),
        "rolling": (polyhead.layers.kv_cache.RollingCache, {"window": 33}),
        "paged": (polyhead.layers.kv_cache.PagedCache, {"num_pages": 30, "page_size": 16}),
        "int8": (polyhead.layers.kv_cache.QuantizedCache, {"capacity": 80}),
    }
    cls, options = kinds[kind]
    cache = cls.for_layout(layer.layout, batch_size=3, dtype=BF16, device="cuda", **options)
    found = []
    with torch.no_grad():
        layer(normal(3, 61, 256), cache=cache)
        for count in (1, 3):
            found.append(layer(normal(3, count, 256), cache=cache, statistics=("max_logit", "entropy")).output)
    return found


def watched(left_padded: bool) -> list[Tensor]:
    layer = polyhead.MultiHeadAttention(256, 4, num_kv_heads=2, device="cuda", dtype=BF16).eval()
    mask = Mask.causal()
    if left_padded:
        mask = mask & Mask.lengths(torch.tensor([67, 131], device="cuda"), side="left")
    with torch.no_grad(), polyhead.observe(layer) as session:
        layer(normal(2, 131, 256), mask=mask)
    return list(session.profile.columns.values())


def broken_keys() -> list[Tensor]:
    """Keys that hold NaN, which only the rows that see them may show."""
    query, key, value = (normal(2, 4, 131, 64) for _ in range(3))
    key[0, :, 130] = torch.nan
    result = polyhead.attention(query, key, value, mask=Mask.causal(), backend="fused").output
    return [result[:, :, :130]]


def talked(heads: int, mask: Mask | None) -> list[Tensor]:
    tensors = [normal(2, h, 67, 40) for h in (heads, heads // 2, heads // 2)] + [normal(heads, heads) for _ in range(2)]
    for x in tensors:
        x.requires_grad_()
    query, key, value, *mixes = tensors
    mixing = dict(zip(("logits_mix", "weights_mix"), mixes, strict=True))
    output = talking_attention(query, key, value, mask=mask, backend="fused", **mixing).output
    grads = torch.autograd.grad(output.float().square().sum(), tensors)
    detached = {name: x.detach() for name, x in mixing.items()}
    mixed = mixed_weights(query.detach(), key.detach(), mask=mask, backend="fused", **detached)
    with torch.no_grad():
        rows = talking_attention(query, key, value, mask=mask, statistics="entropy", backend="fused", **detached)
    assert rows.statistics is not None
    assert rows.statistics.entropy is not None
    return [output, *grads, rows.statistics.entropy, mixed.signed_mass, mixed.absolute_mass, mixed.largest_weight]


def ragged(dtype: torch.dtype, dim: int, mask: Mask | None) -> list[Tensor]:
    """Rows of two heads, none of a third, all of a fourth, and padding behind them."""
    counts = torch.tensor([90, 0, 131, 101])
    positions = torch.cat([torch.arange(int(count)) * 131 // max(int(count), 1) for count in counts])
    rows = RaggedRows(
        torch.cat([positions, torch.zeros(9, dtype=torch.int64)]).cuda(),
        torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int().cuda(),
        131,
    )
    tensors = [normal(331, dim, dtype=dtype), *(normal(1, 2, 131, dim, dtype=dtype) for _ in range(2))]
    for x in tensors:
        x.requires_grad_()
    result = ragged_attention(*tensors, rows, mask=mask, statistics="entropy", backend="fused")
    assert result.statistics is not None
    assert result.statistics.entropy is not None
    loss = result.output.float().square().sum() + result.statistics.entropy.sum()
    return [result.output, *torch.autograd.grad(loss, tensors)]


def decoded_latents(dims: tuple[int, int], group: int, queries: int) -> list[Tensor]:
    held = normal(2, 131, 2, dims[0]).transpose(1, 2)
    cache = CacheArguments(held, held[..., : dims[1]], torch.tensor([131, 67], device="cuda").int(), shared=True)
    query = normal(2, 2 * group, queries, dims[0])
    output, logsumexp, rows = decode(query, cache, scale=0.1, right=0, names=("max_logit", "entropy"))
    return [output, logsumexp, *rows.values()]


def multiplied(inner: int, dtype: torch.dtype = BF16) -> list[Tensor]:
    """Rows times the matrix that each has chosen; some have chosen none."""
    groups = RowGroups.of(torch.randint(0, 5, (67, 3), device="cuda"), 5, torch.rand(67, 3, device="cuda") < 0.6)
    found = []
    for product, rows in ((spread_product, 67), (summed_product, 67 * 3)):
        left, stack = normal(rows, inner, dtype=dtype).requires_grad_(), normal(5, inner, 24, dtype=dtype)
        stack.requires_grad_()
        result = product(left, stack, groups)
        found += [result, *torch.autograd.grad(result.float().square().sum(), (left, stack))]
    return found


def reduced_in_chunks() -> list[Tensor]:
    entropy, keys = (torch.rand(3, 4, 2003, device="cuda") + 1 for _ in range(2))
    state = [torch.zeros(1, 4, dtype=torch.float64, device="cuda") for _ in range(4)]
    return [reduce_rows([entropy], keys, None, state, heads=range(4), share=0, learned_sinks=False, chunks=3)]


def summed_by_head() -> list[Tensor]:
    """Sums of a monitor, with uneven sizes."""
    entropy, keys = (torch.rand(3, 37, 67, device="cuda") + 1 for _ in range(2))
    real = torch.rand(3, 67, device="cuda") < 0.7
    tokens, number, counts = tokens_and_entropies(entropy, 2 * keys, real, bins=7, learned_sinks=False)
    x = torch.randn(3, 67, 37, 24, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    squares = squared_norms(x, tokens)
    rows, matrices = torch.randn(67, 5, 136, device="cuda"), torch.randn(5, 136, 136, device="cuda")
    forms = [quadratic_forms(rows.to(dtype), matrices, tokens[0]) for dtype in (torch.bfloat16, torch.float32)]
    return [tokens.float(), number.float(), counts.float(), squares, *forms]


def searched() -> list[Tensor]:
    """Ends of the rows and of the columns of a mask and of a bias, with uneven sizes."""
    shown = torch.rand(2, 131, 67, device="cuda") < 0.1
    masks = (shown, shown.transpose(1, 2), torch.zeros(2, 131, 67, device="cuda").masked_fill(~shown, -torch.inf))
    return [x.float() for mask in masks for x in mask_ends(mask)]


@triton.jit
def _planted_kernel(ptr, size, BLOCK: tl.constexpr):
    tl.store(ptr + tl.arange(0, BLOCK), 1.0, mask=tl.arange(0, BLOCK) <= size)


def planted() -> list[Tensor]:
    """One element too many is written: what the sanitizer must say, if it sees our kernels at all."""
    x = torch.zeros(256, device="cuda")  # allocations end at multiples of 256 elements at least
    _planted_kernel[(1,)](x, x.numel(), BLOCK=512)
    return [x]


FEW = ("max_logit", "entropy", "mean_distance")
BAND = Mask.window(37)
CASES: dict[str, Callable[[], list[Tensor]]] = {
    "hopper, full, 64": lambda: forward_and_backward(BF16, 64, None, FEW),
    "hopper, causal, 128": lambda: forward_and_backward(BF16, 128, Mask.causal(), FEW),
    "hopper, window, 64, more keys": lambda: forward_and_backward(BF16, 64, BAND, FEW, 67, 131),
    "portable, all statistics, 128": lambda: forward_and_backward(BF16, 128, Mask.causal(), STATISTICS),
    "portable, fp32, 40": lambda: forward_and_backward(FP32, 40, Mask.causal(), STATISTICS),
    "portable, lengths, 24": lambda: forward_and_backward(
        torch.float16, 24, Mask.causal() & Mask.lengths(torch.tensor([57, 131], device="cuda")), FEW
    ),
    "portable, documents, 64": lambda: forward_and_backward(
        BF16, 64, Mask.causal() & Mask.documents(torch.arange(131, device="cuda") // 50), FEW
    ),
    "dense masks searched": searched,
    "portable, bias, 256": lambda: forward_and_backward(BF16, 256, Mask.bias(normal(1, 4, 131, 131, dtype=FP32)), FEW),
    "profile, columns, causal": lambda: profiled(Mask.causal(), received=True, block_map=(128, 128)),
    "profile, columns, 128, full": lambda: profiled(None, 128, received=True, block_map=(64, 64), offsets=True),
    "profile, columns, window": lambda: profiled(BAND, received=True, block_map=BlockMap(block=(7, 5)), offsets=True),
    "profile, columns, fp32": lambda: profiled(Mask.causal(), 40, FP32, received=True, offsets=True),
    "profile, rows": lambda: profiled(Mask.causal(), argmax=True, topk=5, key_set=[0, 3], received=True),
    "profile, head pairs": lambda: profiled(Mask.causal(), head_pairs=[(0, 1), (2, 3)], received=True),
    **{f"decode, {kind}": lambda kind=kind: decoded(kind) for kind in ("preallocated", "rolling", "paged", "int8")},
    "rows reduced": lambda: watched(False),
    "rows reduced, left-padded": lambda: watched(True),
    "broken keys": broken_keys,
    "masses": lambda: forward_and_backward(BF16, 64, Mask.causal(), (*FEW, "self_mass", "sink_mass", "window_mass")),
    "talking, 6 heads, causal": lambda: talked(6, Mask.causal()),
    "talking, 32 heads": lambda: talked(32, None),
    "ragged, hopper, causal, 64": lambda: ragged(BF16, 64, Mask.causal()),
    "ragged, portable, window, fp32, 40": lambda: ragged(FP32, 40, BAND),
    "latents": lambda: decoded_latents((40, 32), 3, 3),
    "latents, hopper": lambda: decoded_latents((576, 512), 17, 1),
    "grouped products, short": lambda: multiplied(40),
    "grouped products, long": lambda: multiplied(260),
    "grouped products, fp32": lambda: multiplied(40, FP32),
    "rows reduced in chunks": reduced_in_chunks,
    "sums of a monitor": summed_by_head,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run cases whose name begins with one of these, with commas between")
    parser.add_argument("--planted", action="store_true", help="write past the end of a tensor, and nothing else")
    requested = parser.parse_args()
    wanted = tuple(requested.only.split(","))
    if not torch.cuda.is_available():
        print("no CUDA device was found; there is nothing to watch")
        return 2
    torch.manual_seed(0)
    failed = 0
    for name, case in {"planted": planted}.items() if requested.planted else CASES.items():
        if not (requested.planted or name.startswith(wanted)):
            continue
        began = time.perf_counter()
        found = case()
        torch.cuda.synchronize()
        finite = all(bool(torch.isfinite(x).all()) for x in found)
        failed += not finite
        print(f"{'ok' if finite else 'NOT FINITE':10}  {name}  {time.perf_counter() - began:.1f} s", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
