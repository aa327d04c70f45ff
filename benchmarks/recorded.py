"""Forward + backward of attention without cuDNN's backward: what the kernels that `polyhead` takes cost beside it.

python -m benchmarks.recorded --output results.json
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import polyhead
from benchmarks.measuring import results
from benchmarks.measuring.results import Row
from polyhead import Mask
from polyhead.costs.measuring import machine
from polyhead.costs.measuring.runner import Run
from polyhead.errors import BackendUnsupported

CUDNN, FLASH, EFFICIENT = "cuDNN", "PyTorch's flash", "PyTorch's efficient"
AUTO, FUSED, STATISTICS = "polyhead, auto", "polyhead, fused", "polyhead, entropy and max logit"
KERNELS = {
    CUDNN: SDPBackend.CUDNN_ATTENTION,
    FLASH: SDPBackend.FLASH_ATTENTION,
    EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
}
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


def recorded(run: Run, shape: tuple[int, ...], causal: bool) -> Row:
    batch, heads, kv_heads, tokens, head_dim, value_dim = shape
    sizes = [(heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim)]
    # In memory as a layer leaves them: [batch, tokens, heads, dim].
    inputs = [
        run.inputs(batch, tokens, count, dim, salt=salt).transpose(1, 2).requires_grad_()
        for salt, (count, dim) in enumerate(sizes)
    ]
    query, key, value = inputs
    direction = run.inputs(batch, tokens, heads, value_dim, salt=3).transpose(1, 2)
    mask = Mask.causal() if causal else None
    absent: dict[str, str] = {}
    calls: dict[str, Callable[[], object]] = {}

    def enter(name: str, attend: Callable[[], Tensor]) -> None:
        def step() -> object:
            return torch.autograd.grad(attend(), inputs, direction)

        try:
            step()
        except (RuntimeError, BackendUnsupported) as error:
            absent[name] = str(error).splitlines()[0]
        else:
            calls[name] = step

    def pytorch(kernel: SDPBackend) -> Tensor:
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=heads != kv_heads)

    for name, kernel in KERNELS.items():
        enter(name, functools.partial(pytorch, kernel))
    enter(AUTO, lambda: polyhead.attention(*inputs, mask=mask, finite=True).output)
    enter(FUSED, lambda: polyhead.attention(*inputs, mask=mask, finite=True, backend="fused").output)
    enter(
        STATISTICS,
        lambda: polyhead.attention(*inputs, mask=mask, finite=True, statistics=("entropy", "max_logit")).output,
    )
    timings = run.time(calls, absent)
    pairs = [timings.compare(name, CUDNN) for name in (FLASH, EFFICIENT, AUTO, FUSED, STATISTICS)]
    notes: dict[str, object] = {"auto": polyhead.explain(*inputs, mask=mask, finite=True).chosen}
    text = f"{batch}, {heads}, {kv_heads}, {tokens}, {head_dim}" + (f"/{value_dim}" if value_dim != head_dim else "")
    return Row.of("forward + backward", text + (", causal" if causal else ""), run.dtype, timings, pairs, notes=notes)


def rows(run: Run) -> Iterator[Row]:
    for shape in SHAPES:
        for causal in (False, True):
            yield recorded(run, shape, causal)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--commit", help="what is measured, for a copy of the tree without its repository")
    parser.add_argument("--alternations", type=int, default=15)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("cuDNN's attention needs a CUDA device, and none was found", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    run = Run(device, torch.bfloat16, options.alternations, seconds=1.5)
    measured: list[Row] = []
    for row in rows(run):
        measured.append(row)
        results.write(options.output, machine.describe(device, options.commit), measured)
    print(results.plain_table(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
