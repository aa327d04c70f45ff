"""Time saved by pruned heads: attention blocks with half of their query heads, over the whole ones.

A block consists of the attention layers of a model, one after the other: Q, K, V, the core and O. The heads are
removed physically. The bound on the ratio of times is 1.10 times the ratio of counted FLOPs. Weights are random, since
time does not depend on them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.measuring.calls import drawn, on_its_own, without_gradients
from benchmarks.measuring.cases import Case, Pair, Run, Step
from benchmarks.measuring.verdicts import Figure
from polyhead.costs import Workload, estimate_cost
from polyhead.costs.measuring.runner import ALTERNATIONS
from polyhead.layers import MultiHeadAttention, MultiHeadConfig
from polyhead.surgery import PruneHeads, apply

ALLOWED = 1.10
FEWER, WHOLE = "half of the heads", "all heads"


@dataclass(frozen=True)
class Block:
    """The attention of a model: its layers, how many heads each loses, and the call that is timed."""

    name: str
    config: MultiHeadConfig
    gone: tuple[tuple[int, ...], ...]  # by layer
    batch: int
    tokens: int

    @property
    def shape(self) -> str:
        return f"batch {self.batch}, {self.tokens} tokens"


def minilm(gone: Sequence[int], name: str) -> Block:
    """Return the six layers of MiniLM, from each of which so many heads are removed."""
    config = MultiHeadConfig(384, 12)
    return Block(f"MiniLM, {name}", config, tuple(tuple(range(count)) for count in gone), batch=16, tokens=128)


def llama() -> Block:
    """Return a layer of Llama-1B, from whose groups of four heads two are removed."""
    config = MultiHeadConfig(2048, 32, num_kv_heads=8, causal=True, bias=False)
    gone = tuple(head for head in range(32) if head % 4 >= 2)
    return Block("Llama-1B, 32/8 to 16/8 heads", config, (gone,), batch=32, tokens=2048)


BLOCKS = {
    "cpu": (minilm([6] * 6, "6 of 12 heads in every layer"), minilm([9, 6, 5, 6, 8, 2], "36 of 72 heads, unevenly")),
    "cuda": (llama(),),
}


class Chain(nn.Module):
    """Layers one after the other."""

    def __init__(self, layers: Sequence[MultiHeadAttention]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).output
        return x

    def flops(self, work: Workload) -> int:
        """Return the counted FLOPs of all layers."""
        configs = [MultiHeadConfig.of(layer) for layer in self.layers]
        return sum(estimate_cost(config, work).forward.total for config in configs)


def chains(block: Block, run: Run) -> dict[str, Chain]:
    """Return the whole block, and the same without the removed heads."""
    found = {}
    for name in (WHOLE, FEWER):
        chain = Chain([block.config.build() for _ in block.gone])
        drawn(chain, run)
        if name == FEWER:
            apply(chain, [PruneHeads(number, heads) for number, heads in enumerate(block.gone)])
        found[name] = chain.eval()
    return found


def plan(*, quick: bool, seed: int, gpu: torch.device | None) -> list[Step]:
    """Return the steps of a machine: MiniLM's blocks on a CPU, Llama's on a GPU as CUDA graphs."""
    run = Run.on(gpu, seed=seed, quick=quick, alternations=7 if quick else ALTERNATIONS)
    blocks = BLOCKS[run.device.type]
    return [Step("surgery", block.name, run, functools.partial(block_cases, block, run)) for block in blocks]


def block_cases(block: Block, run: Run) -> Iterator[Case]:
    """Yield the case of a block with half of its heads against the whole one."""
    found = chains(block, run)
    x = run.inputs(block.batch, block.tokens, block.config.layout.embed_dim)
    work = Workload.forward(block.tokens, batch=block.batch)
    counted = found[FEWER].flops(work) / found[WHOLE].flops(work)

    def forward(chain: Chain) -> Callable[[], Tensor]:
        return without_gradients(lambda: chain(x))

    yield Case(
        f"time of {block.name}",
        block.shape,
        {name: on_its_own(functools.partial(forward, chain), run.device)() for name, chain in found.items()},
        [Pair(FEWER, WHOLE, ALLOWED * counted)],
        notes={"counted": counted},
        figures=lambda timings: [Figure("counted FLOPs over the whole block's", counted)],
    )
