"""The tensors of a call: masks without a loop over pairs, any memory layout, NaN and Inf that no result depends on."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyhead import Mask
from tests.fuzz.cases import INPUTS, Call, Case, DenseTerm, Sizes
from tests.ops.oracle import Rows, Scene, Who

POISON = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}


class Places(NamedTuple):
    """Positions of queries [batch or 1, queries, 1] and keys, and the keys' indices among those of their sequence."""

    query: Tensor
    key: Tensor  # [batch or 1, 1, keys]
    ordinal: Tensor  # [batch or 1, 1, keys]


@dataclass(frozen=True, eq=False)
class VectorisedMask(Who):
    """The masks of `Who` by comparing whole tensors, for more pairs than it can visit one by one."""

    device: str = "cpu"

    @classmethod
    def of(cls, who: Who, device: str = "cpu") -> VectorisedMask:
        return cls(**{x.name: getattr(who, x.name) for x in fields(Who)}, device=device)

    def mask(self) -> Mask:
        """Return the mask; a window that ends at the query is given by its size."""
        if self.left is None or self.right != 0:
            return super().mask()
        return Mask.window(self.left + 1, sinks=self.first) & replace(self, left=None, right=None, first=0).mask()

    def visible(self, batch: int, heads: int, queries: int, keys: int) -> Tensor:
        visible = self._seen(batch, queries, keys)[:, None].expand(batch, heads, queries, keys)
        return visible.clone() if self.dense is None else visible & self.dense

    def distances(self, batch: int, queries: int, keys: int) -> Tensor:
        """Return key position minus query position, [batch, queries, keys]."""
        places = self.places(queries, keys)
        return (places.key - places.query).expand(batch, queries, keys)

    def ordinals(self, batch: int, queries: int, keys: int) -> Tensor:
        """Return each key's index among the keys of its sequence or document, [batch, 1, keys]."""
        return self.places(queries, keys).ordinal.expand(batch, 1, keys)

    def places(self, queries: int, keys: int) -> Places:
        """Return the positions, as `Who.place` defines them."""
        i, j = self._arange(queries)[:, None], self._arange(keys)[None]
        if self.query_positions is not None:
            query, key = self._rows(self.query_positions), self._rows(self.key_positions)
            return Places(query[:, :, None], key[:, None], key[:, None])
        if self.query_documents is not None:
            mine = self._rows(self.query_documents)
            theirs = mine if self.key_documents is None else self._rows(self.key_documents)
            ordinal = _earlier(theirs)[:, None]
            if self.key_documents is None:
                return Places(i[None], j[None], ordinal)
            return Places(-1 - _later(mine)[:, :, None], -1 - _later(theirs)[:, None], ordinal)
        if self.key_lengths is not None:
            real_keys = self._column(self.key_lengths)
            if self.side == "left":
                return Places(i[None] - queries, j[None] - keys, j - (keys - real_keys))
            real = self.real_queries(queries, keys)
            real_queries = queries if real is None else self._column(real)
            return Places(i + real_keys - real_queries, j[None], j[None])
        return Places(i[None] + keys - queries, j[None], j[None])

    def _seen(self, batch: int, queries: int, keys: int) -> Tensor:
        places = self.places(queries, keys)
        distance = places.key - places.query
        seen = torch.ones(batch, queries, keys, dtype=torch.bool, device=self.device)
        right = 0 if self.causal else self.right
        if right is not None:
            seen = seen & (distance <= (right if self.right is None else min(right, self.right)))
        if self.left is not None:
            kept = (places.ordinal >= 0) & (places.ordinal < self.first)
            seen = seen & ((distance >= -self.left) | kept)
        if self.key_lengths is not None:
            seen = seen & self._unpadded(self.key_lengths, keys)[:, None]
            real = self.real_queries(queries, keys)
            if real is not None:
                seen = seen & self._unpadded(real, queries)[:, :, None]
        if self.query_documents is not None:
            mine = self._rows(self.query_documents)[:, :, None]
            theirs = mine.mT if self.key_documents is None else self._rows(self.key_documents)[:, None]
            seen = seen & (mine >= 0) & (mine == theirs)
        return seen if self.key_positions is None else seen & (places.key >= 0)

    def _unpadded(self, lengths: tuple[int, ...], size: int) -> Tensor:
        """Return False for padding, boolean [batch, size]."""
        index, real = self._arange(size), torch.tensor(lengths, device=self.device)[:, None]
        return index < real if self.side == "right" else index >= size - real

    def _rows(self, rows: Rows | None) -> Tensor:
        return torch.tensor(rows, device=self.device)

    def _column(self, lengths: tuple[int, ...]) -> Tensor:
        return torch.tensor(lengths, device=self.device)[:, None, None]

    def _arange(self, size: int) -> Tensor:
        return torch.arange(size, device=self.device)


def _earlier(ids: Tensor) -> Tensor:
    """Return the number of earlier tokens with the same id, [rows, tokens]."""
    same = ids[:, :, None] == ids[:, None]
    return same.tril(-1).sum(-1)


def _later(ids: Tensor) -> Tensor:
    """Return the number of later tokens with the same id, [rows, tokens]."""
    same = ids[:, :, None] == ids[:, None]
    return same.triu(1).sum(-1)


@dataclass(frozen=True)
class CallScene:
    """One call: the scene as it is passed, and the same numbers in plain tensors, without what nobody sees."""

    passed: Scene
    clean: Scene


class Draws:
    """Random numbers of one call, drawn on the CPU so that every device computes with the same ones."""

    def __init__(self, seed: int, device: str) -> None:
        self.python = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator).to(self.device)

    def integers(self, low: int, high: int, rows: int, size: int) -> Rows:
        numbers = torch.randint(low, high + 1, (rows, size), generator=self.generator).tolist()
        return tuple(tuple(row) for row in numbers)


def draw_scene(case: Case, call: Call, device: str) -> CallScene:
    """Return the tensors of one call of a case."""
    draws = Draws(call.seed, device)
    dtype = torch.float32 if case.autocast else getattr(torch, case.family.dtype)
    numbers = _draw_inputs(draws, case, dtype)
    query, key, value = (_repeated(x, layout) for x, layout in zip(numbers, call.layouts, strict=True))
    scene = Scene(query, key, value, who=_draw_who(draws, case), **_draw_terms(draws, case, dtype))
    passed = scene
    if case.poison is not None:
        passed = replace(scene, **_poisoned(draws, scene, POISON[case.poison]))
    placed: dict[str, Any] = {
        x: in_layout(getattr(passed, x), "plain" if layout.startswith("one") and case.poison else layout)
        for x, layout in zip(INPUTS, call.layouts, strict=True)
    }
    return CallScene(replace(passed, **placed), scene)


def mask_of(case: Case, scene: Scene) -> Mask | None:
    """Return the mask that is passed with the tensors of a scene."""
    mask = scene.mask
    if mask is None:
        return Mask() if case.mask.explicit else None
    return mask.to(scene.query.device) if case.mask.on_device else mask


def _draw_inputs(draws: Draws, case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    sizes, family = case.sizes, case.family
    query = draws.normal(sizes.batch, sizes.heads, sizes.queries, family.head_dim) * case.magnitude
    key = draws.normal(sizes.batch, sizes.kv_heads, sizes.keys, family.head_dim)
    value = draws.normal(sizes.batch, sizes.kv_heads, sizes.keys, family.value_dim)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _draw_who(draws: Draws, case: Case) -> VectorisedMask:
    mask, sizes, r = case.mask, case.sizes, draws.python
    batch, queries, keys = sizes.batch, sizes.queries, sizes.keys
    who = VectorisedMask(causal=mask.causal, left=mask.left, right=mask.right, first=mask.first, device=draws.device)
    rows = batch if mask.by_sequence else 1
    if mask.tokens in ("lengths", "query lengths"):
        key_lengths = tuple(r.randint(0, keys) if r.random() < 0.7 else keys for _ in range(batch))
        query_lengths = tuple(r.randint(0, queries) for _ in range(batch)) if mask.tokens == "query lengths" else None
        who = replace(who, key_lengths=key_lengths, query_lengths=query_lengths, side=mask.side)
    elif mask.tokens == "packed":  # one document after the other
        ids = tuple(tuple(sorted(row)) for row in draws.integers(0, 4, rows, keys))
        who = replace(who, query_documents=ids)
    elif mask.tokens == "documents":
        who = replace(who, query_documents=draws.integers(-1, 3, rows, keys))
    elif mask.tokens == "two documents":
        who = replace(
            who, query_documents=draws.integers(-1, 3, rows, queries), key_documents=draws.integers(-1, 3, rows, keys)
        )
    elif mask.tokens == "positions":
        who = replace(
            who,
            query_positions=draws.integers(0, keys + 4, rows, queries),
            key_positions=draws.integers(-1, keys + 4, rows, keys),
        )
    return who if mask.dense is None else replace(who, dense=_draw_dense(draws, mask.dense, sizes))


def _shape(term: DenseTerm, sizes: Sizes) -> tuple[int, int, int, int]:
    full = (sizes.batch, sizes.heads, sizes.queries)
    batch, heads, queries = (size if full else 1 for size, full in zip(full, term.axes, strict=True))
    return batch, heads, queries, sizes.keys


def _draw_dense(draws: Draws, term: DenseTerm, sizes: Sizes) -> Tensor:
    shape = _shape(term, sizes)
    if term.density is None:
        causal = torch.ones(shape[2:], dtype=torch.bool, device=draws.device).tril(sizes.keys - sizes.queries)
        return in_layout(causal.expand(shape).contiguous(), term.layout)
    return in_layout(_repeated(draws.uniform(*shape) < term.density, term.layout), term.layout)


def _draw_terms(draws: Draws, case: Case, dtype: torch.dtype) -> dict[str, Any]:
    terms, sizes = case.terms, case.sizes
    vector_dtype = torch.float32 if terms.wide else dtype
    drawn: dict[str, Any] = {"scale": None, "softcap": terms.softcap}
    if terms.bias is not None:
        shape = _shape(terms.bias, sizes)
        bias = draws.normal(*shape).masked_fill(draws.normal(*shape) > 1.5, -torch.inf)
        bias = bias.to(getattr(torch, terms.bias.dtype) if terms.bias.dtype else dtype)
        drawn["bias"] = in_layout(_repeated(bias, terms.bias.layout), terms.bias.layout)
    if terms.table is not None:
        width, drawn["zero"] = terms.table
        drawn["table"] = draws.normal(sizes.heads if terms.table_by_head else 1, width).to(vector_dtype)
    if terms.sinks:
        drawn["sinks"] = draws.normal(sizes.heads).to(vector_dtype)
    drawn["scale"] = draws.normal(sizes.heads) if terms.scale == "heads" else terms.scale
    if terms.spaced:
        drawn |= {x: _spaced(drawn[x]) for x in ("table", "sinks", "scale") if isinstance(drawn.get(x), Tensor)}
    return drawn


def _poisoned(draws: Draws, scene: Scene, number: float) -> dict[str, Any]:
    """Return query, key and value with `number` in keys that no query sees, and often in queries that see no key."""
    batch, heads, queries, keys = scene.sizes
    kv_heads = scene.key.shape[1]
    visible = scene.visible()
    seen = visible.view(batch, kv_heads, heads // kv_heads, queries, keys).any(2).any(2)[..., None]
    filled = {x: getattr(scene, x).masked_fill(~seen, number) for x in ("key", "value")}
    if draws.python.random() < 0.5:
        filled["query"] = scene.query.masked_fill(~visible.any(-1, keepdim=True), number)
    return filled


# ---- memory layouts


def _repeated(x: Tensor, layout: str) -> Tensor:
    """Return numbers that the layout can store: those with a stride of 0 repeat the first batch or the first head."""
    if layout == "one batch":
        return x[:1].expand(x.shape)
    return x[:, :1].expand(x.shape) if layout == "one head" else x


def in_layout(x: Tensor, layout: str) -> Tensor:
    """Return the same 4-D tensor in another memory layout; memory beside it is NaN, or True."""
    batch, heads, tokens, dim = x.shape
    kind, _, number = layout.partition(" by ")

    def memory(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan if x.is_floating_point() else True, dtype=x.dtype, device=x.device)

    if layout == "sequence first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "fused":  # as a slice of a joint projection
        joint = memory(batch, tokens, heads * 3 + 1, dim)
        joint[:, :, heads : 2 * heads] = x.transpose(1, 2)
        return joint[:, :, heads : 2 * heads].transpose(1, 2)
    if kind == "offset":  # not aligned
        flat, first = memory(x.numel() + 16), int(number)
        flat[first : first + x.numel()] = x.reshape(-1)
        return flat[first : first + x.numel()].view(x.shape)
    if kind == "padded":
        larger = memory(batch, heads, tokens + 2, dim + int(number))
        larger[:, :, 1:-1, :dim] = x
        return larger[:, :, 1:-1, :dim]
    if layout == "transposed":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    if layout == "one batch":
        return x[:1].contiguous().expand(x.shape)
    if layout == "one head":
        return x[:, :1].contiguous().expand(x.shape)
    return x.contiguous()


def _spaced(x: Tensor) -> Tensor:
    """Return the same numbers with a stride of 2 along the last axis."""
    return x.repeat_interleave(2, -1)[..., ::2]
