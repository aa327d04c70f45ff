"""Which matrices a model's heads are made of, found by watching numbers pass: no table of names, no family left out.

One short call is watched. A linear layer whose output holds a head's value, number for number, has that head's W_V in
its columns; the one that is given the heads' outputs side by side has W_O in its rows. Queries and keys are compared
at the first token, where rotary positions turn by nothing, and in length at every token, since turning leaves that
alone. What is put in between (a norm of queries, a gate) breaks the match, and then the matrix is None: it would not
say what the head does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.layers import MultiHeadAttention
from polyhead.layers.variants.collaborative.layer import CollaborativeAttention
from polyhead.layers.variants.differential.layer import DifferentialAttention
from polyhead.layers.variants.routed.layer import RoutedHeads
from polyhead.layers.variants.talking.layer import TalkingHeads
from polyhead.observation.collectors import BatchMetadata
from polyhead.observation.session import observe
from polyhead.observation.statistics import AttentionSite
from polyhead.ops.attended import Attended

# Of the size of a vector: how far the same numbers may be apart after they were scaled or rounded to another dtype.
TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True, eq=False)
class HeadProjections:
    """The matrices of a site's heads, as they stand in its layers; None where nothing matched.

    A query is x @ query[head], and a head's contribution is its output @ output[head]. Scales of queries are in them.
    """

    query: Tensor | None = None  # [heads, embed_dim, head_dim]
    key: Tensor | None = None  # [kv_heads, embed_dim, head_dim]
    value: Tensor | None = None  # [kv_heads, embed_dim, value_dim]
    output: Tensor | None = None  # [heads, value_dim, embed_dim]


def find_projections(model: nn.Module, run: Callable[[], object]) -> dict[AttentionSite, HeadProjections]:
    """The wiring of every site that `run`, a short call of the model, passes through."""
    tracer = _Tracer({name or type(module).__name__: module for name, module in model.named_modules()})
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), tracer.listening(model), observe(model, statistics=False, collect=[tracer]):
            run()
    finally:
        model.train(was_training)
    return {site: tracer.head_projections(site) for site in tracer.seen}


@dataclass(eq=False)
class _Passed:
    """The rows that a linear layer was given, and what it gave, [rows, features]."""

    module: nn.Module
    given: Tensor
    gave: Tensor

    @property
    def matrix(self) -> Tensor:
        """[in, out]."""
        weight: Tensor = self.module.get_parameter("weight").detach()
        return weight.T if isinstance(self.module, nn.Linear) else weight


@dataclass(eq=False)
class _Tracer:
    """Gathers nothing: it only notes what passes."""

    modules: Mapping[str, nn.Module]
    name: str = "head_projections"
    passed: list[_Passed] = field(default_factory=list)
    seen: dict[AttentionSite, tuple[int, Attended]] = field(default_factory=dict)

    def empty(self, site: AttentionSite, device: torch.device) -> _Site:
        return _Site(self, site)

    @contextmanager
    def listening(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as undo:
            for module in model.modules():
                if _is_linear(module):
                    undo.callback(module.register_forward_hook(self._note).remove)
            yield

    def _note(self, module: nn.Module, given: tuple[Any, ...], gave: Any) -> None:
        if len(given) and isinstance(given[0], Tensor) and isinstance(gave, Tensor) and given[0].numel():
            self.passed.append(_Passed(module, *(x.detach().reshape(-1, x.shape[-1]) for x in (given[0], gave))))

    def head_projections(self, site: AttentionSite) -> HeadProjections:
        module = self.modules.get(site.name)
        if isinstance(module, MultiHeadAttention):
            return _of_ours(module)
        if isinstance(module, RoutedHeads):
            return _of_routed(module)
        if isinstance(module, nn.MultiheadAttention):
            return _of_ours(MultiHeadAttention.from_torch(module))
        moment, attended = self.seen[site]
        before, after = self.passed[:moment], self.passed[moment:]
        output = _rows(after, _by_row(attended.result.output))

        def columns(heads: Tensor) -> Tensor | None:
            found = _columns(before, _by_row(heads))
            # Columns of a layer that is not given the embedding, as of latent heads, are only a part of the way.
            is_whole = found is None or output is None or found.shape[1] == output.shape[2]
            return found if is_whole else None

        return HeadProjections(columns(attended.query), columns(attended.key), columns(attended.value), output)


@dataclass(frozen=True, slots=True, eq=False)
class _Site:
    tracer: _Tracer
    site: AttentionSite

    def update(self, attended: Attended, real: Tensor | None, metadata: BatchMetadata) -> _Site:
        self.tracer.seen.setdefault(self.site, (len(self.tracer.passed), attended))
        return self

    def merge(self, other: _Site) -> _Site:
        return self

    def state(self) -> dict[str, Tensor]:
        return {}

    def with_state(self, state: Mapping[str, Tensor]) -> _Site:
        return self


def _is_linear(module: nn.Module) -> bool:
    """`torch.nn.Linear`, or transformers' Conv1D, whose weight is the other way round."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _of_ours(layer: MultiHeadAttention) -> HeadProjections:
    if isinstance(layer, DifferentialAttention):  # a map writes nothing by itself, and each has half of the channels
        query, key, value = _sources(layer)
        query, key = (torch.cat(x.chunk(2, -1)) for x in (query, key))
        return HeadProjections(query, key, torch.cat((value, value)))
    if isinstance(layer, CollaborativeAttention):
        query, key = (linear.weight.detach().mT for linear in (layer.q_proj, layer.k_proj))
        heads = layer.layout.num_heads
        value = layer.v_proj.weight.detach().unflatten(0, (heads, -1)).mT
        output = layer.out_proj.weight.detach().mT.unflatten(0, (heads, -1))
        return HeadProjections(query * layer.mixing.detach()[:, None], key.expand(heads, -1, -1), value, output)
    if isinstance(layer, TalkingHeads):  # a map reads every query and every key
        query, key, value = _sources(layer)
        output = layer.out_proj.weight.detach().mT.unflatten(0, (layer.layout.num_heads, -1))
        query = torch.einsum("hed,hg->gehd", query, layer.logits_mix.detach()).flatten(2)
        key = key.repeat_interleave(layer.layout.group_size, 0).transpose(0, 1).flatten(1)[None]
        return HeadProjections(query, key, value, output)
    if layer.combine is not None:  # the output projection reads no head by itself
        return HeadProjections(*_sources(layer))
    output = layer.out_proj.weight.detach().mT.unflatten(0, (layer.layout.num_heads, -1))
    return HeadProjections(*_sources(layer), output)


def _sources(layer: MultiHeadAttention) -> tuple[Tensor, Tensor, Tensor]:
    """What queries, keys and values are made by, [heads, embed_dim, dim] of each."""
    layout = layer.layout
    parts = ((layer.q_proj, layout.num_heads), (layer.k_proj, layout.num_kv_heads), (layer.v_proj, layout.num_kv_heads))
    query, key, value = (linear.weight.detach().unflatten(0, (size, -1)).mT for linear, size in parts)
    if layout.key_heads is not None:  # who watches sees every head with a key and a value of its own
        key, value = key[list(layout.key_heads)], value[list(layout.key_heads)]
    return query, key, value


def _of_routed(layer: RoutedHeads) -> HeadProjections:
    """A head that reads several KV heads is as many rows, those of one KV head side by side."""
    query = layer.query_weight.detach().unflatten(2, (layer.rows_per_head, -1)).permute(2, 0, 1, 3).flatten(0, 1)
    output = layer.output_weight.detach().unflatten(1, (layer.rows_per_head, -1)).transpose(0, 1).flatten(0, 1)
    key, value = (
        linear.weight.detach().unflatten(0, (layer.layout.num_kv_heads, -1)).mT
        for linear in (layer.k_proj, layer.v_proj)
    )
    return HeadProjections(query, key, value, output)


def _by_row(x: Tensor) -> Tensor:
    """[batch, heads, tokens, dim] to [rows, heads, dim]."""
    return x.detach().transpose(1, 2).flatten(0, 1)


def _columns(passed: Sequence[_Passed], heads: Tensor) -> Tensor | None:
    """The columns of the layer that gave these vectors [rows, heads, dim], the latest that did: [heads, in, dim]."""
    count, dim = heads.shape[1:]
    for one in reversed(passed):
        if one.gave.shape[0] != heads.shape[0] or one.gave.shape[1] < dim or one.gave.device != heads.device:
            continue
        found = [_place(one.gave[0], vector) for vector in heads[0]]
        starts = [start for start in found if start is not None]
        if len(starts) < count:
            continue
        there = torch.stack([one.gave[:, start : start + dim] for start in starts], 1)
        longer = heads.double().norm(dim=-1) / there.double().norm(dim=-1)
        if bool((longer / longer[0, 0] - 1).abs().max() <= TOLERANCE):
            scale = float(longer[0, 0])
            columns = torch.stack([one.matrix[:, start : start + dim] for start in starts])
            return columns if abs(scale - 1) <= TOLERANCE else columns * scale
    return None


def _place(row: Tensor, vector: Tensor) -> int | None:
    """Where in a row a multiple of a vector stands."""
    windows, wanted = row.double().unfold(0, vector.shape[0], 1), vector.double()
    along, sizes = windows @ wanted, windows.square().sum(-1) * wanted.square().sum()
    # The sine of the angle between the two, squared.
    missing = (1 - along.square() / sizes.clamp_min(torch.finfo(torch.float64).tiny)).clamp_min(0)
    best = int(torch.where(along > 0, missing, 1.0).argmin())
    return best if float(along[best]) > 0 and float(missing[best]) <= TOLERANCE**2 else None


def _rows(passed: Sequence[_Passed], heads: Tensor) -> Tensor | None:
    """The rows of the first layer that was given these vectors [rows, heads, dim] side by side: [heads, dim, out]."""
    together = heads.flatten(1).double()
    for one in passed:
        given = one.given.double()
        same = given.shape == together.shape and given.device == together.device
        if same and float((given - together).norm()) <= TOLERANCE * float(together.norm()):
            return one.matrix.unflatten(0, heads.shape[1:])
    return None
