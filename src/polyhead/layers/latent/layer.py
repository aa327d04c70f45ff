"""Multi-head latent attention: keys and values are projected from one cached latent per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError, ShapeError
from polyhead.geometry import checked_integer
from polyhead.layers import checks
from polyhead.layers.base_attention import BaseAttention, CallOptions, Memory
from polyhead.layers.joint_projection import hooks_of, is_plain_linear
from polyhead.layers.kv_cache import KVCache
from polyhead.layers.kv_cache.latent import LatentStorage
from polyhead.layers.latent.forms import (
    FORMS,
    FormChoice,
    LatentLayout,
    absorbing_is_cheaper,
    decode_refusals,
    form_products,
    resolve_nope_head_dim,
)
from polyhead.layers.positions import Positions, RotatesHeads
from polyhead.layers.positions.position_encoding import Rotation
from polyhead.layers.steps import apply_norm, init_linear, layer_forward, split_heads
from polyhead.masks import Mask
from polyhead.ops.attention import AttentionOutput, Statistics

Form = Literal["auto", "expanded", "absorbed"]


class LatentAttention(BaseAttention):
    """Multi-head latent attention (MLA; DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

    For a token x at position t, R_t its rotation and N an RMS norm, head i has

        c = N(W_kv_a x),  r = R_t W_kr x                        the latent and the rotary key, shared by all heads
        z = N(W_q_a x)                                          or x itself, where queries are not compressed
        q_i = [W_uq_i z ; R_t W_qr_i z],  k_i = [W_uk_i c ; r],  v_i = W_uv_i c
        head_i = softmax(q_i k_i^T / sqrt(qk_nope_head_dim + qk_rope_head_dim)) v_i

    and the output is W_O [head_1 ; .. ; head_h]. Two forms are equivalent: "expanded" as written, and "absorbed",
    which uses (W_uq_i z)·(W_uk_i c) = (W_uk_i^T W_uq_i z)·c and sums latents before W_uv_i: multi-query attention over
    the cached [c ; r]. "auto" takes the one with fewer multiply-adds; `explain` reports which.

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of heads.
        kv_lora_rank: channels of the latent of keys and values.
        q_lora_rank: channels of the queries' latent; None projects queries from the input.
        qk_nope_head_dim: channels of a head's query and key without rotary positions; embed_dim / num_heads by default.
        qk_rope_head_dim: channels with rotary positions; those of `positions` by default, 0 without rotary positions.
        value_head_dim: channels of a head's value; qk_nope_head_dim by default.
        bias: whether the projections of the input have a bias; those of latents have none.
        output_bias: whether the output projection has one; same as `bias` by default.
        positions: a module of `polyhead.layers.positions`; `Rotary(qk_rope_head_dim, interleaved=True)` in DeepSeek.
        norm_eps: epsilon of the RMS norms of latents.
        form: "auto", "expanded" or "absorbed".
        causal, window, softcap, scale, sinks, dropout, finite, backend: as in `MultiHeadAttention`.
        device: device of the parameters.
        dtype: dtype of the parameters.

    >>> from polyhead.layers.positions import Rotary
    >>> layer = LatentAttention(512, 8, kv_lora_rank=128, positions=Rotary(32, interleaved=True), causal=True)
    >>> layer(torch.randn(2, 10, 512)).output.shape
    torch.Size([2, 10, 512])
    >>> print(layer.explain(1, 1000))
       expanded  132,352,000 multiply-adds
    -> absorbed  2,435,072 multiply-adds  fewer multiply-adds
       absorbed, a LatentCache is read by attention: our kernels run on CUDA devices, got tensors on cpu
    """

    layout: LatentLayout
    q_proj: nn.Linear | None
    q_a_proj: nn.Linear | None
    q_a_norm: nn.Module | None
    q_b_proj: nn.Linear | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kv_lora_rank: int,
        q_lora_rank: int | None = None,
        qk_nope_head_dim: int | None = None,
        qk_rope_head_dim: int | None = None,
        value_head_dim: int | None = None,
        bias: bool = True,
        output_bias: bool | None = None,
        positions: Positions | None = None,
        norm_eps: float = 1e-6,
        form: Form = "auto",
        causal: bool = False,
        window: int | None = None,
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
        for name, size in (
            ("kv_lora_rank", kv_lora_rank),
            ("q_lora_rank", q_lora_rank),
            ("qk_nope_head_dim", qk_nope_head_dim),
            ("value_head_dim", value_head_dim),
        ):
            checks.check_size(name, size)
        checks.check_positive("norm_eps", norm_eps)
        checks.check_one_of("form", form, ("auto", *FORMS))
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
        qk_nope_head_dim = resolve_nope_head_dim(embed_dim, num_heads, qk_nope_head_dim)
        self.layout = layout = LatentLayout(
            embed_dim,
            num_heads,
            kv_lora_rank,
            q_lora_rank or 0,
            qk_nope_head_dim,
            _resolve_rope_head_dim(positions, qk_rope_head_dim),
            value_head_dim or qk_nope_head_dim,
        )
        if positions is not None and not isinstance(positions, RotatesHeads):
            positions.check(layout.expanded)
        self.positions = positions
        self.form = form

        def linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias, device=device, dtype=dtype)

        def norm(width: int) -> nn.RMSNorm:
            return nn.RMSNorm(width, eps=norm_eps, device=device, dtype=dtype)

        is_compressed, queries = q_lora_rank is not None, num_heads * layout.head_dim
        self.q_proj = None if is_compressed else linear(embed_dim, queries, bias)
        self.q_a_proj = linear(embed_dim, layout.q_lora_rank, bias) if is_compressed else None
        self.q_a_norm = norm(layout.q_lora_rank) if is_compressed else None
        self.q_b_proj = linear(layout.q_lora_rank, queries, False) if is_compressed else None
        self.kv_a_proj = linear(embed_dim, layout.cache_width, bias)
        self.kv_a_norm = norm(kv_lora_rank)
        self.kv_b_proj = linear(kv_lora_rank, num_heads * (qk_nope_head_dim + layout.value_head_dim), False)
        output_bias = bias if output_bias is None else output_bias
        self.out_proj = linear(num_heads * layout.value_head_dim, embed_dim, output_bias)
        self.sinks = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype)) if sinks else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise projections Glorot-uniformly, biases and sinks with zeros, norm weights with ones."""
        for module in self.children():
            if isinstance(module, nn.Linear):
                init_linear(module)
            elif isinstance(module, nn.RMSNorm):
                module.reset_parameters()
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

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
        seed: int | Tensor | None = None,
        weights: bool = False,
        statistics: bool | str | Sequence[str] | Statistics | None = None,
        logsumexp: bool = False,
        backend: str | None = None,
        form: Form | None = None,
    ) -> AttentionOutput:
        """Attend from `query` to `key` (to itself by default) and project the concatenated heads.

        Args:
            query: [batch, queries, embed_dim].
            key: [batch, keys, embed_dim], for cross-attention: keys and values are both projected from its latents.
                May be a `Memory` returned by `remember`.
            cache: a `LatentCache`, which stores kv_lora_rank + qk_rope_head_dim numbers per token, or any other
                `KVCache` for `layout.absorbed`, which stores the latent twice.
            form: "auto", "expanded" or "absorbed" for this call; the layer's by default.
            mask, lengths, token_positions, head_gate, statistics: as in `MultiHeadAttention.forward`.
            seed, weights, logsumexp, backend: as in `polyhead.attention`.

        Returns:
            The output [batch, queries, embed_dim], with weights, statistics and log-sum-exp if requested.
        """
        layout = self.layout
        checks.check_padded("latent attention takes", "query", query, layout.embed_dim, self.kv_a_proj)
        form = self._checked_form(form)
        query, start = self._begin(query, key, cache, lengths, token_positions)
        batch, queries, _ = query.shape
        q_nope, q_rope = self._project_queries(query)
        source = None
        if isinstance(key, Memory):
            checks.check_memory(key.key, key.value, batch, layout.absorbed)
            source = key.key
        elif key is not None:
            source = self.remember(key).key
        rotation = self._rotation(q_rope, start, cache, source)
        q_rope = self._apply_rotary(q_rope, rotation)
        latents = self._compress(query, rotation) if source is None else source
        if isinstance(cache, LatentStorage):
            cache.take_value_dim(layout.kv_lora_rank)
        call = self._call_options(
            q_nope,
            latents,
            None if isinstance(cache, LatentStorage) else latents[..., : layout.kv_lora_rank],
            self._combined_mask(mask),
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
        keys = latents.shape[2] if view is None else view.num_keys
        if self._is_absorbed(form, queries, None if view is None and key is None else keys):
            result = self._absorbed(q_nope, q_rope, latents, call)
        else:
            result = self._expanded(q_nope, q_rope, latents if view is None else view.key, call)
        heads = self._gated(result.output, head_gate)
        return replace(result, output=self.out_proj(heads.transpose(1, 2).flatten(2)))

    def remember(self, key: Tensor) -> Memory:
        """Compress a source once, for repeated cross-attention with `forward(query, memory)`.

        Args:
            key: source [batch, keys, embed_dim].

        Returns:
            The compressed source, which `forward` takes as `key`.
        """
        checks.check_padded("latent attention takes", "key", key, self.layout.embed_dim, self.kv_a_proj)
        latents = self._compress(key, None)
        return self._memory(latents, latents[..., : self.layout.kv_lora_rank])

    def explain(self, queries: int, keys: int | None = None, *, form: Form | None = None) -> FormChoice:
        """Return the form chosen for these numbers of queries and keys, and the cost of both forms.

        The result also lists why the decode kernels would not read a `LatentCache` of that length, if so.

        Args:
            queries: queries of a call.
            keys: keys of a call, as many as queries by default.
            form: form to explain instead of the layer's own.
        """
        form = self._checked_form(form)
        absorbed = self._is_absorbed(form, queries, keys)
        keys = queries if keys is None else keys
        expanded_cost, absorbed_cost = (form_products(self.layout, name, queries, keys) for name in FORMS)
        if form != "auto":
            reason = f"form={form!r} was requested"
        elif self._kv_b_proj_issue():
            reason = f"kv_b_proj {self._kv_b_proj_issue()}"
        else:
            reason = "equal multiply-adds" if expanded_cost == absorbed_cost else "fewer multiply-adds"
        refusals = decode_refusals(self.layout, self.kv_a_proj.weight, queries, keys, self.mask)
        if self.backend not in ("auto", "fused"):
            refusals.insert(0, f"backend={self.backend!r} was requested")
        return FormChoice(FORMS[absorbed], expanded_cost, absorbed_cost, reason, tuple(refusals))

    def _checked_form(self, form: Form | None) -> Form:
        """Return the form requested for this call, or the layer's."""
        form = self.form if form is None else form
        checks.check_one_of("form", form, ("auto", *FORMS))
        if form == "absorbed" and (issue := self._kv_b_proj_issue()):
            raise OptionError(
                f"the absorbed form reads the weight of kv_b_proj, got a kv_b_proj that {issue}; "
                "use form='expanded' or 'auto'"
            )
        return form

    def _is_absorbed(self, form: Form, queries: int, keys: int | None) -> bool:
        """Return True if this call uses the absorbed form; `keys` is None for self-attention without a cache."""
        if form != "auto":
            return form == "absorbed"
        return not self._kv_b_proj_issue() and absorbing_is_cheaper(self.layout, queries, keys)

    def _kv_b_proj_issue(self) -> str:
        """Return why kv_b_proj is not a plain product with its weight; empty if it is."""
        if type(self.kv_b_proj) is not nn.Linear:
            return f"is a {type(self.kv_b_proj).__name__}"
        if not is_plain_linear(self.kv_b_proj):
            return "has a replaced forward"
        if self.kv_b_proj.bias is not None:
            return "has a bias"
        return "has hooks" if any(hooks_of(self.kv_b_proj)) else ""

    @property
    def _logit_scale(self) -> float:
        """Scale of the logits, in either form that of the expanded heads."""
        return self.layout.head_dim**-0.5 if self.scale is None else self.scale

    def _project_queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return non-rotary and rotary queries, [batch, heads, queries, qk_nope_head_dim or qk_rope_...]."""
        if self.q_proj is not None:
            q = self.q_proj(x)
        else:
            assert self.q_a_proj is not None and self.q_b_proj is not None
            q = self.q_b_proj(apply_norm(self.q_a_norm, self.q_a_proj(x)))
        layout = self.layout
        q_nope, q_rope = split_heads(q, layout.num_heads).split((layout.qk_nope_head_dim, layout.qk_rope_head_dim), -1)
        return q_nope, q_rope

    def _compress(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        """Return latents and rotated shared key, [batch, 1, keys, kv_lora_rank + qk_rope_head_dim].

        Without a `rotation`, tokens are at positions 0, 1, ...
        """
        latent, k_rope = self._split_latents(self.kv_a_proj(x).unsqueeze(1))
        return _concat_channels(apply_norm(self.kv_a_norm, latent), self._apply_rotary(k_rope, rotation))

    def _split_latents(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        latent, k_rope = latents.split((self.layout.kv_lora_rank, self.layout.qk_rope_head_dim), -1)
        return latent, k_rope

    def _expanded(self, q_nope: Tensor, q_rope: Tensor, latents: Tensor, call: CallOptions) -> AttentionOutput:
        """Attend in the expanded form, with a key and value per head."""
        layout = self.layout
        latent, k_rope = self._split_latents(latents)
        up = split_heads(self.kv_b_proj(latent.squeeze(1)), layout.num_heads)
        k_nope, v = up.split((layout.qk_nope_head_dim, layout.value_head_dim), -1)
        q = _concat_channels(q_nope, q_rope)
        k = _concat_channels(k_nope, k_rope.expand(-1, layout.num_heads, -1, -1))
        result = self._attention(q, k, v, call, scale=self._logit_scale, sinks=self.sinks)
        self._notify(q, k, v, result, call.mask, self._logit_scale)
        return result

    def _absorbed(self, q_nope: Tensor, q_rope: Tensor, latents: Tensor, call: CallOptions) -> AttentionOutput:
        """Attend in the absorbed form: multi-query attention whose values are the first channels of its keys."""
        layout = self.layout
        # [heads, qk_nope_head_dim + value_head_dim, kv_lora_rank]
        up = self.kv_b_proj.weight.view(layout.num_heads, -1, layout.kv_lora_rank)
        up_key, up_value = up.split((layout.qk_nope_head_dim, layout.value_head_dim), 1)
        q = _concat_channels(torch.einsum("bhqn,hnr->bhqr", q_nope, up_key), q_rope)
        result = self._decode(q, call, scale=self._logit_scale, sinks=self.sinks)
        if call.view is not None and (result is None or self._listener is not None):
            latents = call.view.key
        v = latents[..., : layout.kv_lora_rank]
        if result is None:
            result = self._attention(q, latents, v, call, scale=self._logit_scale, sinks=self.sinks)
        result = replace(result, output=torch.einsum("bhqr,hvr->bhqv", result.output, up_value))
        self._notify(q, latents, v, result, call.mask, self._logit_scale)
        return result

    def extra_repr(self) -> str:
        layout = self.layout
        parts = [f"{layout.embed_dim}, {layout.num_heads}, kv_lora_rank={layout.kv_lora_rank}"]
        parts += [f"q_lora_rank={layout.q_lora_rank}"] if layout.q_lora_rank else []
        parts += [
            f"{name}={getattr(layout, name)}" for name in ("qk_nope_head_dim", "qk_rope_head_dim", "value_head_dim")
        ]
        parts += [f"form={self.form!r}"] if self.form != "auto" else []
        return self._described(*parts)


def _resolve_rope_head_dim(positions: Positions | None, given: int | None) -> int:
    """Return qk_rope_head_dim as given, or the `head_dim` of rotary positions."""
    if given is not None:
        checked_integer("qk_rope_head_dim", given)
    if not isinstance(positions, RotatesHeads):
        if given:
            raise OptionError(
                f"qk_rope_head_dim requires rotary positions, got {given} with positions "
                f"{type(positions).__name__ if positions is not None else None}; pass positions=Rotary({given})"
            )
        return 0
    checks.check_size("qk_rope_head_dim", given)
    if given is not None and given != positions.head_dim:
        raise ShapeError(
            f"rotary positions must have head_dim=qk_rope_head_dim, got {type(positions).__name__}(head_dim="
            f"{positions.head_dim}) for a qk_rope_head_dim of {given}; build them with head_dim={given}"
        )
    return positions.head_dim


def _concat_channels(channels: Tensor, rotary: Tensor) -> Tensor:
    return torch.cat((channels, rotary), -1) if rotary.shape[-1] else channels
