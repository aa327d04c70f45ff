"""Attention scenes and their exact results: masks are built pair by pair, numbers come from float64."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from polyhead import AttentionOutput, Mask, attention
from polyhead.ops.attention.dispatch import BACKENDS
from tests.error_budget import DRAWS, ORDERS, Formula, plain_formula

# `fused` needs a GPU or Triton's interpreter, and has tests of its own.
ON_THE_CPU = tuple(name for name in BACKENDS if name != "fused")
Rows = tuple[tuple[int, ...], ...]
LARGE = 1 << 16  # pairs of a query and a key
LEARNED = ("query", "key", "value", "bias", "table", "sinks", "scale")


@dataclass(frozen=True, eq=False)
class Who:
    """Every kind of mask in plain Python, combined."""

    causal: bool = False
    left: int | None = None
    right: int | None = None
    first: int = 0
    key_lengths: tuple[int, ...] | None = None
    query_lengths: tuple[int, ...] | None = None
    side: str = "right"
    query_documents: Rows | None = None
    key_documents: Rows | None = None
    query_positions: Rows | None = None
    key_positions: Rows | None = None
    dense: Tensor | None = None  # [batch or 1, heads or 1, queries or 1, keys]

    def mask(self) -> Mask:
        mask = Mask()
        if self.causal:
            mask = mask & Mask.causal()
        if self.left is not None or self.right is not None:
            mask = mask & Mask.window(left=self.left, right=self.right, sinks=self.first)
        if self.key_lengths is not None:
            mask = mask & Mask.lengths(list(self.key_lengths), queries=self.query_lengths, side=self.side)
        if self.query_documents is not None:
            keys = None if self.key_documents is None else torch.tensor(self.key_documents)
            mask = mask & Mask.documents(torch.tensor(self.query_documents), keys)
        if self.query_positions is not None:
            mask = mask & Mask.positions(torch.tensor(self.query_positions), torch.tensor(self.key_positions))
        return mask if self.dense is None else mask & Mask.dense(self.dense)

    def real_queries(self, queries: int, keys: int) -> tuple[int, ...] | None:
        return self.query_lengths or (self.key_lengths if queries == keys else None)

    def place(self, b: int, i: int, j: int, queries: int, keys: int) -> tuple[int, int, int]:
        """Return the positions of query i and key j of sequence b, and the key's index among its real keys."""
        if self.query_positions is not None:
            key = self.key_positions[b % len(self.key_positions)][j]
            return self.query_positions[b % len(self.query_positions)][i], key, key
        if self.query_documents is not None:
            mine = self.query_documents[b % len(self.query_documents)]
            theirs = mine if self.key_documents is None else self.key_documents[b % len(self.key_documents)]
            rank = theirs[:j].count(theirs[j])
            if self.key_documents is None:
                return i, j, rank
            return -mine[i:].count(mine[i]), -theirs[j:].count(theirs[j]), rank
        if self.key_lengths is not None:
            if self.side == "left":
                return i - queries, j - keys, j - (keys - self.key_lengths[b])
            real = self.real_queries(queries, keys)
            return i + self.key_lengths[b] - (queries if real is None else real[b]), j, j
        return i + keys - queries, j, j

    def sees(self, b: int, i: int, j: int, queries: int, keys: int) -> bool:
        """Return True if query i may attend to key j in sequence b, ignoring the dense mask."""
        query, key, rank = self.place(b, i, j, queries, keys)
        if self.causal and key > query:
            return False
        if self.right is not None and key > query + self.right:
            return False
        if self.left is not None and key < query - self.left and not 0 <= rank < self.first:
            return False
        if self.key_lengths is not None:
            real = self.real_queries(queries, keys)
            if self.side == "right":
                hidden = j >= self.key_lengths[b] or (real is not None and i >= real[b])
            else:
                hidden = j < keys - self.key_lengths[b] or (real is not None and i < queries - real[b])
            if hidden:
                return False
        if self.query_documents is not None:
            mine = self.query_documents[b % len(self.query_documents)]
            theirs = mine if self.key_documents is None else self.key_documents[b % len(self.key_documents)]
            if mine[i] < 0 or mine[i] != theirs[j]:
                return False
        return self.key_positions is None or key >= 0

    def visible(self, batch: int, heads: int, queries: int, keys: int) -> Tensor:
        """Return the visible pairs, boolean [batch, heads, queries, keys], built pair by pair."""
        visible = self._seen(batch, queries, keys)[:, None].expand(batch, heads, queries, keys)
        return visible.clone() if self.dense is None else visible & self.dense

    def _seen(self, batch: int, queries: int, keys: int) -> Tensor:
        return _seen(self._rules(), batch, queries, keys)

    def distances(self, batch: int, queries: int, keys: int) -> Tensor:
        """Return key position minus query position, [batch, queries, keys]."""
        return _distances(self._rules(), batch, queries, keys)

    def _rules(self) -> tuple[object, ...]:
        """Return all fields but the dense mask, hashable."""
        return tuple(getattr(self, x.name) for x in fields(Who) if x.name != "dense")


# Many tests use the same pairs, whose construction takes longer than everything else on a CPU.
@functools.lru_cache(maxsize=32)
def _seen(rules: tuple[Any, ...], batch: int, queries: int, keys: int) -> Tensor:
    who = Who(*rules)
    table = [[[who.sees(b, i, j, queries, keys) for j in range(keys)] for i in range(queries)] for b in range(batch)]
    return torch.tensor(table, dtype=torch.bool).reshape(batch, queries, keys)


@functools.lru_cache(maxsize=32)
def _distances(rules: tuple[Any, ...], batch: int, queries: int, keys: int) -> Tensor:
    who = Who(*rules)
    places = [[[who.place(b, i, j, queries, keys) for j in range(keys)] for i in range(queries)] for b in range(batch)]
    steps = torch.tensor(places, dtype=torch.int64).reshape(batch, queries, keys, 3)
    return steps[..., 1] - steps[..., 0]


@dataclass(frozen=True, eq=False)
class Pairs(Who):
    """Visible pairs of every head as `dense`, and key position minus query position."""

    apart: Tensor | None = None  # [batch, heads, queries, keys], as `dense`

    def visible(self, batch: int, heads: int, queries: int, keys: int) -> Tensor:
        return self.dense

    def distances(self, batch: int, queries: int, keys: int) -> Tensor:
        return self.apart


@dataclass(frozen=True)
class Scene:
    """One call of attention with all its arguments."""

    query: Tensor
    key: Tensor
    value: Tensor
    who: Who = field(default_factory=Who)
    bias: Tensor | None = None
    table: Tensor | None = None
    zero: int = 0
    sinks: Tensor | None = None
    scale: float | Tensor | None = None
    softcap: float | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        batch, heads, queries, _ = self.query.shape
        return batch, heads, queries, self.key.shape[2]

    @property
    def mask(self) -> Mask | None:
        mask = self.who.mask()
        if isinstance(self.who, Pairs) and self.table is not None:
            # No mask has distances that differ by head, so the table becomes a fixed bias here.
            term = replace(self, table=self.table.detach(), bias=None)._added()
            return mask & Mask.bias(term if self.bias is None else self.bias + term)
        if self.bias is not None:
            mask = mask & Mask.bias(self.bias)
        if self.table is not None:
            mask = mask & Mask.relative(self.table, self.zero)
        return None if mask.is_everything else mask

    @property
    def learned(self) -> dict[str, Tensor]:
        return {name: x for name in LEARNED if isinstance(x := getattr(self, name), Tensor)}

    def to(self, dtype: torch.dtype) -> Scene:
        return replace(self, **{name: x.detach().to(dtype) for name, x in self.learned.items()})

    def on(self, device: str) -> Scene:
        """Return the scene on a device, where the formula is then computed as well.

        A small one stays on the CPU: the many tests that share a GPU would synchronise at every step.
        """
        batch, heads, queries, keys = self.sizes
        if batch * heads * queries * keys < LARGE:
            return self
        return replace(self, **{name: x.detach().to(device) for name, x in self.learned.items()})

    def with_gradients(self) -> Scene:
        return replace(self, **{name: x.detach().clone().requires_grad_() for name, x in self.learned.items()})

    def visible(self) -> Tensor:
        visible = self.who.visible(*self.sizes).to(self.query.device)
        return visible if self.bias is None else visible & (self.bias.detach() != -torch.inf)

    def options(self) -> dict[str, object]:
        return {"mask": self.mask, "scale": self.scale, "softcap": self.softcap, "sinks": self.sinks}

    def run(self, backend: str, device: str = "cpu", **options: object) -> AttentionOutput:
        inputs = {"query": self.query, "key": self.key, "value": self.value, **self.options()}
        if device != "cpu":
            inputs = {name: x.to(device) if isinstance(x, Tensor | Mask) else x for name, x in inputs.items()}
        return attention(**inputs, backend=backend, **options)

    def _added(self) -> Tensor | None:
        """Return the additive bias [batch, heads, queries, keys], 0 where it masks."""
        batch, heads, queries, keys = self.sizes
        added: Tensor | None = None
        if self.bias is not None:
            added = torch.where(self.bias.detach() == -torch.inf, 0.0, self.bias).expand(batch, heads, queries, keys)
        if self.table is not None:
            place = self.who.distances(batch, queries, keys).to(self.table.device) + self.zero
            place = place.clamp(0, self.table.shape[1] - 1)
            if place.ndim == 4:
                term = self.table[torch.arange(heads, device=place.device)[:, None, None], place]
            else:
                term = self.table[:, place].transpose(0, 1)  # [batch, heads or 1, queries, keys]
            added = term if added is None else added + term
        return added

    def redrawn(self, draws: int = DRAWS) -> Scene:
        """Return several draws of this scene as additional heads, the first of them this one.

        The others have its numbers in another order, so that the magnitudes are equal; scales and masks are unchanged.
        """
        generator = torch.Generator().manual_seed(draws)

        def shuffled(x: Tensor) -> Tensor:
            return x.flatten()[torch.randperm(x.numel(), generator=generator)].view_as(x)

        heads = self.sizes[1]
        bias = None if self.bias is None else self.bias.expand(-1, heads, -1, -1)
        table = None if self.table is None else self.table.expand(heads, -1)
        own = replace(self, bias=bias, table=table)
        fresh = {name: x for name, x in own.learned.items() if name != "scale"}
        all_draws = [own] + [replace(own, **{name: shuffled(x) for name, x in fresh.items()}) for _ in range(1, draws)]
        return beside(all_draws)

    def reordered(self, orders: int = ORDERS, seed: int = 0) -> Scene:
        """Return this scene in several orders of keys, queries and channels, as additional heads."""
        batch, heads, queries, keys = self.sizes
        generator = torch.Generator().manual_seed(orders + 1000 * seed)

        def permutations(size: int) -> list[Tensor]:
            return [torch.randperm(size, generator=generator).to(self.query.device) for _ in range(orders)]

        rows, columns = permutations(queries), permutations(keys)
        channels, value_channels = permutations(self.query.shape[3]), permutations(self.value.shape[3])

        def ordered(x: Tensor, second: list[Tensor], third: list[Tensor]) -> Tensor:
            """Apply each order to [batch, heads, ...]."""
            parts = []
            for some, others in zip(second, third, strict=True):
                part = x if x.shape[2] == 1 else x[:, :, some]
                parts.append(part[..., others])
            return torch.cat(parts, 1)

        apart: Tensor | None = None
        if self.table is not None:  # nothing else asks how far a key is
            apart = self.who.distances(batch, queries, keys).to(self.query.device)
            apart = ordered(apart if apart.ndim == 4 else apart[:, None].expand(-1, heads, -1, -1), rows, columns)
        bias = None if self.bias is None else ordered(self.bias.expand(-1, heads, -1, -1), rows, columns)
        return replace(
            self,
            query=ordered(self.query, rows, channels),
            key=ordered(self.key, columns, channels),
            value=ordered(self.value, columns, value_channels),
            bias=bias,
            table=None if self.table is None else self.table.expand(heads, -1).repeat(orders, 1),
            sinks=None if self.sinks is None else self.sinks.repeat(orders),
            scale=self.scale.repeat(orders) if isinstance(self.scale, Tensor) else self.scale,
            who=Pairs(dense=ordered(self.visible(), rows, columns), apart=apart),
        )

    def formula(self, keep: Tensor | None = None, rate: float = 0.0) -> Formula:
        """Compute the formula in the scene's dtype, with the mask built pair by pair."""
        return plain_formula(
            self.query,
            self.key,
            self.value,
            visible=self.visible(),
            bias=self._added(),
            scale=self.scale,
            softcap=self.softcap,
            sinks=self.sinks,
            keep=keep,
            rate=rate,
        )


def beside(scenes: Sequence[Scene]) -> Scene:
    """Concatenate scenes that differ in their numbers alone, as the heads of one scene."""
    first = scenes[0]
    axes = {"query": 1, "key": 1, "value": 1, "bias": 1, "table": 0, "sinks": 0, "scale": 0}
    joined = {name: torch.cat([getattr(x, name) for x in scenes], axes[name]) for name in first.learned}
    dense = first.who.dense
    if dense is None or dense.shape[1] == 1:
        return replace(first, **joined)
    return replace(first, **joined, who=replace(first.who, dense=dense.repeat(1, len(scenes), 1, 1)))


def result_and_gradients(
    scene: Scene, backend: str | None = None, *, everything: bool = False, **options: object
) -> Formula:
    """Return the result of a backend (or the formula), and the gradients of a random functional of it.

    `everything` lets the functional include the log-sum-exp and the weights as well as the output.
    """
    scene = scene.with_gradients()
    if backend is not None:
        options = {"weights": everything, "logsumexp": everything, **options}
    result = scene.formula(**options) if backend is None else scene.run(backend, **options)
    generator = torch.Generator().manual_seed(7)
    loss = torch.zeros((), dtype=torch.float64, device=scene.query.device)
    for name in ("output", "logsumexp", "weights") if everything else ("output",):
        tensor = getattr(result, name)
        # bfloat16 numbers, so that the functional is the same one in every dtype.
        direction = torch.randn(tensor.shape, generator=generator).bfloat16().to(tensor)
        loss = loss + (torch.where(tensor.detach() == -torch.inf, 0.0, tensor) * direction).double().sum()
    inputs = scene.learned
    grads = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
    found = {
        name: torch.zeros_like(x) if grad is None else grad
        for (name, x), grad in zip(inputs.items(), grads, strict=True)
    }
    parts = (x if x is None else x.detach() for x in (result.output, result.logsumexp, result.weights))
    return Formula(*parts, found)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return random numbers that bfloat16 represents exactly, so that a scene is equal in every dtype."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(dtype)


@st.composite
def bands(draw: st.DrawFn) -> Who:
    """Draw a causal mask, a window, both or neither."""
    edge = st.none() | st.integers(0, 9)
    left, right = draw(edge), draw(edge)
    first = draw(st.integers(0, 4)) if left is not None else 0
    return Who(causal=draw(st.booleans()), left=left, right=right, first=first)


@st.composite
def whos(draw: st.DrawFn, batch: int, heads: int, queries: int, keys: int) -> Who:
    """Draw any band combined with any padding, packing or positions, and a dense mask."""

    def rows(size: int, low: int, high: int) -> Rows:
        count = draw(st.sampled_from([1, batch]))
        return tuple(tuple(draw(st.lists(st.integers(low, high), min_size=size, max_size=size))) for _ in range(count))

    def lengths(size: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(0, size), min_size=batch, max_size=batch)))

    who = draw(bands())
    kind = draw(st.sampled_from(["none", "lengths", "query lengths", "documents", "two documents", "positions"]))
    if kind in ("lengths", "query lengths"):
        both = kind == "query lengths"
        who = replace(who, key_lengths=lengths(keys), query_lengths=lengths(queries) if both else None)
        who = replace(who, side=draw(st.sampled_from(["left", "right"])))
    elif kind == "two documents" or (kind == "documents" and queries != keys):
        who = replace(who, query_documents=rows(queries, -1, 3), key_documents=rows(keys, -1, 3))
    elif kind == "documents":
        who = replace(who, query_documents=rows(queries, -1, 3))
    elif kind == "positions":
        who = replace(who, query_positions=rows(queries, 0, 40), key_positions=rows(keys, -1, 40))
    if draw(st.booleans()):
        shape = [draw(st.sampled_from([1, size])) for size in (batch, heads, queries)]
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        who = replace(who, dense=torch.rand(*shape, keys, generator=generator) < draw(st.sampled_from([0.2, 0.7])))
    return who


@st.composite
def scenes(draw: st.DrawFn, max_heads: int = 6) -> Scene:
    """Draw any sizes, masks and options, combined, in float64."""
    batch = draw(st.integers(1, max(max_heads // 2, 2)))
    heads = draw(st.sampled_from([n for n in (1, 2, 3, 6) if n <= max_heads]))
    kv_heads = draw(st.sampled_from([n for n in (1, 2, 3, 6) if heads % n == 0]))
    keys = draw(st.integers(1, 37))
    queries = draw(st.just(keys) | st.integers(1, 37))
    head_dim, value_dim = draw(st.sampled_from([(1, 1), (3, 3), (8, 8), (5, 7), (11, 2)]))
    seed = draw(st.integers(0, 999))
    bias, table, zero, sinks, scale = None, None, 0, None, None
    if draw(st.booleans()):
        shape = [draw(st.sampled_from([1, size])) for size in (batch, heads, queries)]
        bias = normal(*shape, keys, seed=seed + 3)
        bias = torch.where(normal(*shape, keys, seed=seed + 4) > 1.2, -torch.inf, bias)
    if draw(st.booleans()):
        width = draw(st.integers(1, 15))
        table = normal(draw(st.sampled_from([1, heads])), width, seed=seed + 5)
        zero = draw(st.integers(0, width - 1))
    if draw(st.booleans()):
        sinks = normal(heads, seed=seed + 6)
    if draw(st.booleans()):
        scale = normal(heads, seed=seed + 7) if draw(st.booleans()) else 0.375
    return Scene(
        normal(batch, heads, queries, head_dim, seed=seed),
        normal(batch, kv_heads, keys, head_dim, seed=seed + 1),
        normal(batch, kv_heads, keys, value_dim, seed=seed + 2),
        who=draw(whos(batch, heads, queries, keys)),
        bias=bias,
        table=table,
        zero=zero,
        sinks=sinks,
        scale=scale,
        softcap=draw(st.none() | st.just(2.5)),
    )
