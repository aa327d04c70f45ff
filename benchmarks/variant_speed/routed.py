"""Routed heads: whether time decreases with the number of heads per token."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import polyhead
from benchmarks.measuring.agreement import hold
from benchmarks.measuring.calls import CHECKED_TOKENS, FORWARD, TRAINING, check, drawn, layer_cases, on_its_own
from benchmarks.measuring.cases import Case, Entrants, Pair, Run, masked_name
from polyhead import Mask
from polyhead.layers import MultiHeadAttention
from polyhead.layers.variants import RoutedHeads
from polyhead.ops.selected_rows.api import RaggedRows, ragged_attention

DENSE = "every head (multi-query attention)"
BOUNDS = {(8, FORWARD): 0.45, (16, FORWARD): 0.70, (8, TRAINING): 0.50, (16, TRAINING): 0.75}
ROWS_BOUND = 0.40
ALL_ROWS = "all rows of every head"


@dataclass(frozen=True)
class Place:
    """One sequence, and the heads that its tokens select from."""

    tokens: int = 8192
    width: int = 4096
    heads: int = 32
    head_dim: int = 128

    def __str__(self) -> str:
        return f"{self.tokens} tokens of {self.width}, {self.heads} heads of {self.head_dim}"


def layers(run: Run, place: Place, causal: bool) -> Iterator[Case]:
    """Yield the shape "shared": k of the heads over one KV head, against all heads without a gate.

    A routed layer launches many small kernels, so that its Python may take longer than they do; the bounds are on
    device time, and the time of a call with its Python is reported as well.
    """
    options: dict[str, Any] = {"head_dim": place.head_dim, "causal": causal, "bias": False, "finite": True}
    x = run.inputs(1, place.tokens, place.width, salt=1)
    chosen = {k: RoutedHeads(place.width, place.heads, top_k=k, **options) for k in (8, 16)}
    every: dict[str, nn.Module] = {DENSE: MultiHeadAttention(place.width, place.heads, num_kv_heads=1, **options)}
    every |= {_ours(k, place): layer for k, layer in chosen.items()}
    modules = {name: drawn(layer, run) for name, layer in every.items()}
    yield from layer_cases(
        "routed",
        masked_name(place, causal),
        run,
        x,
        {name: (module, functools.partial(_output, module)) for name, module in modules.items()},
        lambda name, layer, *_: check_routed(name, layer, x),
        lambda mode, graphed: [Pair(_ours(k, place), DENSE, BOUNDS[k, mode] if graphed else None) for k in chosen],
    )


def _output(layer: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = layer(x).output
    return output


def _ours(k: int, place: Place) -> str:
    return f"polyhead, {k} of {place.heads} heads"


def check_routed(name: str, layer: nn.Module, x: Tensor) -> None:
    """Check a layer with the heads that it selects itself, since the gate selects others in another precision."""
    routing = None
    if isinstance(layer, RoutedHeads):
        with torch.no_grad():
            routing = layer(x[:1, :CHECKED_TOKENS]).routing

    def call(layer: nn.Module, x: Tensor, backend: str | None) -> Tensor:
        given: dict[str, Any] = {"backend": backend}
        if routing is not None:
            given["routing"] = replace(routing, weights=routing.weights.to(x.dtype))
        output: Tensor = layer(x, **given).output
        return output

    check(name, layer, call, lambda x: call(layer, x, None), x)


def chosen_rows(run: Run, place: Place, causal: bool) -> Iterator[Case]:
    """Yield attention of the shape "full" with 8 random heads per token, against all heads for all tokens."""
    size = (1, place.heads, place.tokens, place.head_dim)
    query, key, value = (run.inputs(*size, salt=salt) for salt in (1, 2, 3))
    mask = Mask.causal() if causal else None
    generator = torch.Generator().manual_seed(run.seed)
    order = torch.rand(place.tokens, place.heads, generator=generator).argsort(-1)
    taken = (order < 8).T.to(run.device)  # [heads, tokens]
    heads, positions = taken.nonzero(as_tuple=True)
    offsets = torch.cat((taken.new_zeros(1, dtype=torch.int32), taken.sum(-1).cumsum(0).to(torch.int32)))
    rows = RaggedRows(positions.to(torch.int32), offsets, place.tokens)
    collected = query[0, heads, positions]
    some = torch.randperm(len(positions), generator=generator)[:CHECKED_TOKENS].to(run.device)

    def formula(dtype: torch.dtype) -> Tensor:
        logits = torch.einsum("rd,rkd->rk", collected[some].to(dtype), key[0, heads[some]].to(dtype))
        logits = logits * place.head_dim**-0.5
        if causal:
            after = torch.arange(place.tokens, device=run.device) > positions[some, None]
            logits = logits.masked_fill(after, -torch.inf)
        return torch.einsum("rk,rkd->rd", logits.softmax(-1), value[0, heads[some]].to(dtype))

    ours = f"polyhead, 8 of {place.heads} heads"
    found, exact, plain = Entrants(), formula(torch.float64), formula(run.dtype)

    def ragged() -> Callable[[], Tensor]:
        def call() -> Tensor:
            with torch.no_grad():
                return ragged_attention(collected, key, value, rows, mask=mask, finite=True).output

        return call

    def whole(backend: str) -> Callable[[], Callable[[], Tensor]]:
        def call() -> Tensor:
            with torch.no_grad():
                return polyhead.attention(query, key, value, mask=mask, backend=backend, finite=True).output

        return lambda: call

    def check_whole(name: str, output: Tensor) -> None:
        hold(name, output[0, heads[some], positions[some]], exact, plain)

    found.enter(ours, on_its_own(ragged, run.device), lambda output: hold(ours, output[some], exact, plain))
    names = {f"{ALL_ROWS}, {backend}": backend for backend in ("sdpa", "fused")}
    for name, backend in names.items():
        found.enter(name, on_its_own(whole(backend), run.device), functools.partial(check_whole, name))
    pairs = [Pair(ours, tuple(names), ROWS_BOUND), *(Pair(ours, name) for name in names)]
    yield found.case("chosen rows, forward", masked_name(place, causal), pairs)
