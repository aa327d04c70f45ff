"""Forward + backward of attention by our kernels and PyTorch's, against cuDNN's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import polyhead
from benchmarks.measuring.cases import Case, Entrants, Pair, Run, Step, masked_name
from polyhead import Mask

CUDNN, FLASH, EFFICIENT = "cuDNN", "PyTorch's flash", "PyTorch's efficient"
AUTO, FUSED, STATISTICS = "polyhead, auto", "polyhead, fused", "polyhead, entropy and max logit"
KERNELS = {
    CUDNN: SDPBackend.CUDNN_ATTENTION,
    FLASH: SDPBackend.FLASH_ATTENTION,
    EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
}
ALTERNATIONS, SECONDS = 15, 1.5
# batch, heads, KV heads, tokens, head_dim, value_dim
SHAPES = [
    (16, 12, 12, 512, 64, 64),
    (8, 16, 16, 2048, 64, 64),
    (4, 32, 32, 4096, 64, 64),
    (4, 16, 16, 4096, 128, 128),
    (2, 32, 8, 4096, 128, 128),
    (3, 20, 4, 3333, 96, 96),
    (1, 16, 16, 16384, 128, 128),
    (1, 32, 8, 32768, 128, 128),
    (1, 8, 8, 8192, 256, 256),
    (2, 16, 16, 4096, 192, 128),
    (2, 16, 16, 4096, 64, 128),
]


def plan(*, quick: bool, seed: int, gpu: torch.device) -> list[Step]:
    """Return the steps of every shape, with a causal mask and without; of the first three for a quick look."""
    run = Run.on(gpu, seed=seed, quick=quick, alternations=ALTERNATIONS, seconds=SECONDS)
    return [
        Step("recorded", str(shape), run, functools.partial(recorded, run, shape, causal))
        for shape in SHAPES[: 3 if quick else None]
        for causal in (False, True)
    ]


def recorded(run: Run, shape: tuple[int, ...], causal: bool) -> Iterator[Case]:
    """Yield forward + backward of one shape by every kernel, against cuDNN's."""
    batch, heads, kv_heads, tokens, head_dim, value_dim = shape
    sizes = [(heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim)]
    # In memory as a layer leaves them: [batch, tokens, heads, dim].
    query, key, value = inputs = [
        run.inputs(batch, tokens, count, dim, salt=salt).transpose(1, 2).requires_grad_()
        for salt, (count, dim) in enumerate(sizes)
    ]
    direction = run.inputs(batch, tokens, heads, value_dim, salt=3).transpose(1, 2)
    mask = Mask.causal() if causal else None

    def pytorch(kernel: SDPBackend) -> Tensor:
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=heads != kv_heads)

    def ours(**options: Any) -> Tensor:
        return polyhead.attention(query, key, value, mask=mask, finite=True, **options).output

    attends: dict[str, Callable[[], Tensor]] = {
        **{name: functools.partial(pytorch, kernel) for name, kernel in KERNELS.items()},
        AUTO: ours,
        FUSED: functools.partial(ours, backend="fused"),
        STATISTICS: functools.partial(ours, statistics=("entropy", "max_logit")),
    }

    def step(attend: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attend(), inputs, direction)

    found = Entrants()
    for name, attend in attends.items():
        found.enter(name, functools.partial(step, attend))
    text = f"{batch}, {heads}, {kv_heads}, {tokens}, {head_dim}" + (f"/{value_dim}" if value_dim != head_dim else "")
    pairs = [Pair(name, CUDNN) for name in attends if name != CUDNN]
    notes = {"auto": polyhead.explain(query, key, value, mask=mask, finite=True).chosen}
    yield found.case("forward + backward", masked_name(text, causal), pairs, notes=notes)
