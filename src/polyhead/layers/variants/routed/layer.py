"""Routed heads: a gate selects a few of many heads for each token, and only those are computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.geometry import HeadLayout
from polyhead.layers import checks
from polyhead.layers.base_attention import BaseAttention, CallOptions, Memory
from polyhead.layers.joint_projection import JointProjection, apply_linears
from polyhead.layers.kv_cache import KVCache
from polyhead.layers.kv_cache.tokens import integers
from polyhead.layers.positions import Positions, RotatesHeads
from polyhead.layers.steps import apply_norm, init_linear, layer_forward, qk_norms, reset_norms, split_heads
from polyhead.layers.variants.routed.router import HeadRouter, Routing
from polyhead.layers.variants.routed.row_order import (
    RowsByHead,
    by_head,
    factors_of,
    reshaped,
    result_by_head,
    rows_by_slot,
)
from polyhead.layers.variants.routed.validation import (
    check_routing,
    check_shape_options,
    check_shape_positions,
    check_shared_mask,
    check_source,
    routed_layout,
)
from polyhead.masks import Mask
from polyhead.ops.attended import Attended
from polyhead.ops.attention import AttentionOutput, Statistics
from polyhead.ops.common.gates import gate_factors
from polyhead.ops.common.validation import is_autocast
from polyhead.ops.common.visibility import resolve
from polyhead.ops.selected_rows.api import ragged_attention
from polyhead.ops.selected_rows.row_products import RowGroups, spread_product, summed_product, weighs_rows


@dataclass(frozen=True, slots=True, eq=False)
class RoutedOutput(AttentionOutput):
    """Result of `RoutedHeads`: an `AttentionOutput` with the `routing` of the call and its losses."""

    routing: Routing | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RoutedAttended(Attended):
    """Attention of routed heads for observers; rows of unselected heads count as fully masked."""

    routing: Routing | None = None


torch.export.register_dataclass(RoutedOutput, serialized_type_name="polyhead.RoutedOutput")


class RoutedHeads(BaseAttention):
    """Sparse mixture of attention heads over [batch, sequence, embed_dim].

    For a token x, with the gate's probabilities p = softmax(x W_g) and C the set of selected heads:

        head_i = softmax(x Wq_i K_i^T / sqrt(head_dim)) V_i
        output = sum over i in C of w_i head_i Wo_i                 w_i = p_i, or p_i / sum over C of p

    Zhang et al. 2022, "Mixture of Attention Heads: Selecting Attention Heads Per Token", and Jin et al. 2024, "MoH:
    Multi-Head Attention as Mixture-of-Head Attention". No token is dropped, and a head is computed only for the tokens
    that selected it: query and output projections are grouped by head, and so is the attention.

    In shape "shared" all heads read the same keys and values: K_i = K. With several `num_kv_heads`, a head is a group
    of that many queries, one per KV head, as in JetMoe (Shen et al. 2024). The cache is that of multi-query attention.
    In shape "full" every head (or group of heads, with fewer num_kv_heads) has its own keys and values; they are
    computed and cached for every token, whichever heads it selected, since later tokens may select the others.

    `forward` returns a `RoutedOutput`, whose `routing` contains the selected heads and the auxiliary losses that keep
    heads in use: `loss + 0.01 * result.routing.balance_loss + 0.001 * result.routing.z_loss`.

    Statistics, weights and gates are by head, [batch, heads, queries]: a row that did not select a head counts as fully
    masked, so that means are over the rows that did. In shape "shared" with several KV heads, head i of the gate has
    rows i, num_heads + i, ..., one per KV head.

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of heads to select from.
        shape: "shared" or "full".
        top_k, top_p, threshold, k_min, k_max, budget, normalise, always_on, noise: selection and weights of heads; see
            `polyhead.layers.variants.routed.router.HeadRouter`. Exactly one of the first three must be given.
        num_kv_heads: number of KV heads; 1 by default in shape "shared", num_heads in shape "full".
        head_dim, value_dim: channels of a query and key, and of a value; embed_dim / num_heads and head_dim by default.
        bias: whether the query, key and value projections have a bias.
        output_bias: whether the output has one; same as `bias` by default.
        positions: a module of `polyhead.layers.positions`. Shape "shared" supports rotary and additive positions only,
            since a bias of the logits is per head.
        sinks: whether every head has a learned sink logit, in shape "full".
        dropout: attention dropout rate in training; for shape "shared" with top_k.
        qk_norm, causal, window, softcap, scale, finite, backend: as in `MultiHeadAttention`.
        device: device of the parameters.
        dtype: dtype of the parameters.

    >>> layer = RoutedHeads(512, 16, top_k=4, causal=True)
    >>> result = layer(torch.randn(2, 10, 512))
    >>> result.output.shape, result.routing.heads.shape
    (torch.Size([2, 10, 512]), torch.Size([2, 10, 4]))
    """

    layout: HeadLayout
    q_norm: nn.Module | None
    k_norm: nn.Module | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        shape: Literal["shared", "full"] = "shared",
        top_k: int | None = None,
        top_p: float | None = None,
        threshold: float | None = None,
        k_min: int = 1,
        k_max: int | None = None,
        budget: float | None = None,
        normalise: Literal["all", "chosen"] = "all",
        always_on: int = 0,
        noise: float = 0.0,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        bias: bool = True,
        output_bias: bool | None = None,
        positions: Positions | None = None,
        causal: bool = False,
        window: int | None = None,
        qk_norm: Literal["rms", "layer"] | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        sinks: bool = False,
        dropout: float = 0.0,
        finite: bool = False,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "value_dim": value_dim}
        self.layout = layout = routed_layout(embed_dim, num_heads, shape, sizes)
        self._set_options(
            positions=positions,
            causal=causal,
            window=window,
            softcap=softcap,
            scale=scale,
            dropout=dropout,
            finite=finite,
            backend=backend,
            dtype=dtype,
        )
        check_shape_options(shape, top_k, sinks=sinks, dropout=dropout)
        if positions is not None:
            check_shape_positions(shape, type(positions))
            positions.check(layout)
        self.router = HeadRouter(
            embed_dim,
            num_heads,
            top_k=top_k,
            top_p=top_p,
            threshold=threshold,
            k_min=k_min,
            k_max=k_max,
            budget=budget,
            normalise=normalise,
            always_on=always_on,
            noise=noise,
            device=device,
            dtype=dtype,
        )
        self.shape = shape
        self.positions = positions

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        def linear(outputs: int) -> nn.Linear:
            return nn.Linear(embed_dim, outputs, bias=bias, device=device, dtype=dtype)

        rows = self.rows_per_head
        self.query_weight = parameter(num_heads, embed_dim, rows * layout.head_dim)
        self.query_bias = parameter(num_heads, rows * layout.head_dim) if bias else None
        self.k_proj = linear(layout.num_kv_heads * layout.head_dim)
        self.v_proj = linear(layout.num_kv_heads * layout.value_dim)
        self.output_weight = parameter(num_heads, rows * layout.value_dim, embed_dim)
        self.output_bias = parameter(embed_dim) if (bias if output_bias is None else output_bias) else None
        self.q_norm, self.k_norm = qk_norms(qk_norm, layout.head_dim, device=device, dtype=dtype)
        self.sinks = parameter(num_heads) if sinks else None
        self.reset_parameters()
        self._join_projections()

    @property
    def num_heads(self) -> int:
        """Number of heads to select from."""
        return self.router.num_heads

    @property
    def rows_per_head(self) -> int:
        """Queries of a selected head, one for each KV head that it reads."""
        return self.layout.num_kv_heads if self.shape == "shared" else 1

    def reset_parameters(self) -> None:
        """Initialise matrices Glorot-uniformly by the fan of all heads; biases and sinks zero, norms one."""
        reset_norms(self.q_norm, self.k_norm)
        heads = self.num_heads
        for stack, joined in ((self.query_weight, 2), (self.output_weight, 1)):
            sides = [stack.shape[1], stack.shape[2]]
            sides[joined - 1] *= heads
            nn.init.uniform_(stack, -((6 / sum(sides)) ** 0.5), (6 / sum(sides)) ** 0.5)
        init_linear(self.k_proj)
        init_linear(self.v_proj)
        for parameter in (self.query_bias, self.output_bias, self.sinks):
            if parameter is not None:
                nn.init.zeros_(parameter)
        self.router.reset_parameters()

    # ---- the computation

    @layer_forward
    def forward(
        self,
        query: Tensor,
        key: Tensor | Memory | None = None,
        *,
        mask: Mask | None = None,
        cache: KVCache | None = None,
        lengths: Sequence[int] | None = None,
        token_positions: Tensor | None = None,
        head_gate: Tensor | None = None,
        routing: Routing | None = None,
        seed: int | Tensor | None = None,
        weights: bool = False,
        statistics: bool | str | Sequence[str] | Statistics | None = None,
        logsumexp: bool = False,
        backend: str | None = None,
    ) -> RoutedOutput:
        """Attend from `query` to `key` (to itself by default), each token with its selected heads.

        Args:
            query: [batch, queries, embed_dim].
            key: [batch, keys, embed_dim], for cross-attention. May be a `Memory` returned by `remember`.
            routing: heads and weights to use instead of the gate's.
            weights: also return the attention weights, [batch, heads, queries, keys], zero for unselected heads; for
                shape "shared" with the same number of heads for every token.
            mask, cache, lengths, token_positions, head_gate, statistics: as in `MultiHeadAttention.forward`.
            seed, logsumexp, backend: as in `polyhead.attention`.

        Returns:
            The output [batch, queries, embed_dim], and the routing that was used.
        """
        layout = self.layout
        checks.check_padded("routed heads take", "query", query, layout.embed_dim, self.k_proj)
        batch, queries, _ = query.shape
        if key is not None:
            check_source(key, batch, layout, self.k_proj)
        if routing is not None:
            check_routing(routing, query, self.num_heads)
        query, start = self._begin(query, key, cache, lengths, token_positions)
        is_given = routing is not None
        routing = self.router(query) if routing is None else routing
        rows = RowsByHead.of(routing)
        q = self._project_queries(query, routing, rows.groups)  # [batch, rows_per_head * slots, queries, head_dim]
        k, v = (key.key, key.value) if isinstance(key, Memory) else self._project(query if key is None else key)
        q, k = self._rotate(q, k, start, cache, key)
        mask = self._combined_mask(mask)
        call = self._call_options(
            q,
            k,
            v,
            mask,
            cache,
            lengths,
            cross=key is not None,
            seed=seed,
            weights=weights,
            statistics=statistics,
            logsumexp=logsumexp,
            backend=backend,
        )
        view = call.view
        if not is_given:
            # After the append, because the mask refers to all keys of the cache.
            new_lengths = None if view is None or lengths is None else view.new_lengths
            real = _non_padding(mask, new_lengths, query, k.shape[2] if view is None else view.num_keys)
            routing = routing if real is None else replace(routing, real=real)
        if self.shape == "shared" and call.mask is not None:
            check_shared_mask(call.mask)
        sizes = (batch, self.rows_per_head, routing.heads.shape[2], queries)
        if self.shape == "shared" and routing.counts is None:
            # The same number of heads for every token, over shared keys: a slot may be any head.
            result = reshaped(self._attend_heads(q, k, v, call, scale=self.scale, sinks=None), sizes)
        else:
            result = self._ragged(q, *call.keys_and_values(k, v), rows, routing, call)
        heads = result_by_head(result if logsumexp else replace(result, logsumexp=None), routing)
        if self._listener is not None:
            k, v = call.keys_and_values(k, v)
            full = replace(heads, output=by_head(heads.output, routing, 0.0))
            options = (call.mask, self.scale, self.softcap, self.sinks, routing)
            self._listener(RoutedAttended(by_head(q.unflatten(1, sizes[1:3]), routing, 0.0), k, v, full, *options))
        output = self._combine(result.output, query, routing, head_gate, rows.groups)
        return RoutedOutput(output, heads.logsumexp, heads.weights, heads.statistics, heads.backend, routing)

    def remember(self, key: Tensor) -> Memory:
        """Project a source once, for repeated cross-attention with `forward(query, memory)`.

        Args:
            key: source [batch, keys, embed_dim].

        Returns:
            Keys and values, which `forward` takes as `key`.
        """
        checks.check_padded("routed heads take", "key", key, self.layout.embed_dim, self.k_proj)
        k, v = self._project(key)
        # Views of the joint projection keep all of it in memory.
        is_view = self.k_norm is None and not isinstance(self.positions, RotatesHeads)
        return self._memory(self._apply_rotary(k), v if is_view else v.clone())

    def _project_queries(self, x: Tensor, routing: Routing, groups: RowGroups) -> Tensor:
        """Return the queries of the selected heads, [batch, rows_per_head * slots, queries, head_dim]."""
        batch, queries, _ = x.shape
        x, weight = _autocast(x, self.query_weight)
        q = spread_product(x.flatten(0, 1), weight, groups)
        if self.query_bias is not None:
            # The backward of indexing rounds to the dtype of the bias after every row; that of embedding only once.
            q = q + F.embedding(routing.heads.reshape(-1), self.query_bias.to(q.dtype))
        q = q.view(batch, queries, routing.heads.shape[2], self.rows_per_head, self.layout.head_dim)
        return apply_norm(self.q_norm, q.permute(0, 3, 2, 1, 4).flatten(1, 2))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        projected = apply_linears(self._of_source, (self.k_proj, self.v_proj), x)
        k, v = (split_heads(part, self.layout.num_kv_heads) for part in projected)
        return apply_norm(self.k_norm, k), v

    def _ragged(
        self, q: Tensor, k: Tensor, v: Tensor, rows: RowsByHead, routing: Routing, call: CallOptions
    ) -> AttentionOutput:
        """Attend with the selected rows of each head, or over shared keys of each slot."""
        if call.weights:
            raise OptionError(
                "weights require shape 'shared' with the same number of heads for every token, got shape "
                f"{self.shape!r}{'' if routing.counts is None else ' with a varying number of heads'}; "
                "request statistics instead"
            )
        if call.dropout:
            raise OptionError(f"dropout requires shape 'shared' with top_k, got a rate of {call.dropout} in training")
        batch, _, queries, dim = q.shape
        slots, per_head = routing.heads.shape[2], self.rows_per_head
        if self.shape == "full":
            order, ragged = rows.groups.order, rows.ragged()
        else:
            order, ragged = rows_by_slot(routing, per_head)
        q = q.unflatten(1, (per_head, slots)).permute(0, 3, 2, 1, 4).reshape(-1, dim)[order]
        result = ragged_attention(
            q,
            k,
            v,
            ragged,
            mask=call.mask,
            scale=self.scale,
            softcap=self.softcap,
            sinks=self.sinks,
            statistics=call.statistics,
            finite=self.finite,
            backend=call.backend,
        )
        return reshaped(result, (batch, per_head, slots, queries), order)

    def _combine(
        self, heads: Tensor, x: Tensor, routing: Routing, head_gate: Tensor | None, groups: RowGroups
    ) -> Tensor:
        """Sum weighted heads' outputs [batch, rows_per_head, slots, queries, value_dim] per token."""
        batch, per_head, _, queries, _ = heads.shape
        factors = routing.weights[..., None].to(heads.dtype)  # [batch, queries, slots, rows_per_head or 1]
        for gate in (self.head_gate, head_gate):
            if gate is not None:
                full = gate_factors(gate, batch, self.layout.num_heads, queries)
                factors = factors * factors_of(full, routing, per_head).to(heads.dtype)
        rows = heads.permute(0, 3, 2, 1, 4)
        row_factors: Tensor | None = None
        if factors.shape[-1] == 1 and weighs_rows(rows, self.output_weight, factors):
            row_factors = factors.flatten()
        else:
            rows = rows * factors[..., None]
        rows, weight = _autocast(rows.flatten(3).flatten(0, 2), self.output_weight)
        output = summed_product(rows, weight, groups, row_factors).view(batch, queries, self.layout.embed_dim)
        return output if self.output_bias is None else output + self.output_bias.to(output.dtype)

    def _join_projections(self) -> None:
        linears = [self.k_proj, self.v_proj]
        plain = all(type(linear) is nn.Linear for linear in linears)
        self._of_source = JointProjection(linears) if plain else None

    def extra_repr(self) -> str:
        layout = self.layout
        parts = [f"{layout.embed_dim}, {self.num_heads}, shape={self.shape!r}, num_kv_heads={layout.num_kv_heads}"]
        parts += [f"head_dim={layout.head_dim}"] if layout.head_dim * self.num_heads != layout.embed_dim else []
        parts += [f"value_dim={layout.value_dim}"] if layout.value_dim != layout.head_dim else []
        return self._described(*parts)


@contextmanager
def collect_routings(model: nn.Module) -> Iterator[list[Routing]]:
    """Collect the routing of every `RoutedHeads` call in `model`, in call order, for auxiliary losses.

    Args:
        model: module that contains routed layers.

    Returns:
        A context manager, whose value is the list that the routings are appended to.

    >>> model = nn.Sequential(RoutedHeads(16, 4, top_k=2))
    >>> with collect_routings(model) as routings:
    ...     result = model(torch.randn(1, 3, 16))
    >>> auxiliary = sum(routing.balance_loss for routing in routings) / len(routings)
    """
    routings: list[Routing] = []

    def record(module: nn.Module, inputs: Any, result: RoutedOutput) -> None:
        assert result.routing is not None
        routings.append(result.routing)

    with ExitStack() as undo:
        for module in model.modules():
            if isinstance(module, RoutedHeads):
                undo.callback(module.register_forward_hook(record).remove)
        yield routings


def _non_padding(mask: Mask | None, lengths: Sequence[int] | None, query: Tensor, keys: int) -> Tensor | None:
    """Return True for non-padding queries, [batch or 1, queries]; None without padding information."""
    batch, queries, _ = query.shape
    real = None
    if lengths is not None:
        real = torch.arange(queries, device=query.device) < integers(lengths, query.device)[:, None]
    if mask is None or not (len(mask.padding) or len(mask.packed)):
        return real
    padding = Mask(padding=mask.padding, packed=mask.packed)
    visibility = resolve(padding, batch=batch, heads=1, queries=queries, keys=keys, device=query.device)
    if visibility is None or visibility.query_real is None:
        return real
    return visibility.query_real if real is None else real & visibility.query_real


def _autocast(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Cast as a linear layer would under autocast."""
    kind = x.device.type
    if not is_autocast(kind):
        return x, weight
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), weight.to(dtype)
