"""`context_parallel`: attention layers of a model whose tokens are spread over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from polyhead.errors import OptionError
from polyhead.layers.base_attention import BaseAttention, CallOptions, Memory
from polyhead.layers.kv_cache import KVCache
from polyhead.layers.multi_head.layer import MultiHeadAttention
from polyhead.layers.positions import BiasesLogits, DynamicNTKScaling, Rotary
from polyhead.ops.common.request import AttentionOutput
from polyhead.parallel.context.api import Method, context_attention
from polyhead.parallel.context.layout import Layout, check_layout
from polyhead.parallel.groups import rank_group


@contextmanager
def context_parallel(
    module: nn.Module,
    *,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    dimension: str | None = None,
    layout: Layout = "zigzag",
    method: Method = "auto",
    check: bool = True,
) -> Iterator[None]:
    """Let every `MultiHeadAttention` of a module attend over the tokens of all ranks; each rank passes its own.

    Within the context the layers are called with the tokens of the rank (`shard_sequence`), with
    `token_positions=shard_positions(...)`, and with the mask of the whole sequence. Forward and backward must both be
    inside it on every rank. Parameters are replicated: sum or average their gradients over the ranks, as in data
    parallel training.

    Args:
        module: a `MultiHeadAttention`, or a model that contains some.
        mesh, dimension, layout, method, check: as in `context_attention`.

    Yields:
        None; afterwards the layers are as before.

    Raises:
        OptionError: the module has an attention layer whose attention cannot be split, or is in such a context already.
    """
    rank_group(mesh, dimension)
    check_layout(layout)
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, BaseAttention)}
    if not layers:
        raise OptionError(
            f"context_parallel takes a module with MultiHeadAttention layers, got {type(module).__name__}"
        )
    for name, layer in layers.items():
        check_layer(f"{name or 'the module itself'} ({type(layer).__name__})", layer)
    options = {"mesh": mesh, "dimension": dimension, "layout": layout, "method": method, "check": check}
    operator = _ContextOperator(options)
    try:
        for layer in layers.values():
            layer._operator = operator
        yield
    finally:
        for layer in layers.values():
            layer.__dict__.pop("_operator", None)


def check_layer(name: str, layer: BaseAttention) -> None:
    """Raise `OptionError` unless the attention of a layer can be split over the tokens of several ranks."""
    if not isinstance(layer, MultiHeadAttention):
        raise OptionError(f"context_parallel splits the attention of MultiHeadAttention layers alone, got {name}")
    if layer._operator is not None:
        raise OptionError(f"context_parallel cannot be nested, got {name} in such a context already")
    if layer.layout.key_heads is not None:
        raise OptionError(f"context_parallel takes KV groups of equal size, got uneven groups in {name}")
    if isinstance(layer.positions, BiasesLogits):
        raise OptionError(
            f"a bias by distance is built for the tokens of one rank, got {type(layer.positions).__name__} in {name}; "
            "call context_attention with Mask.relative"
        )
    if isinstance(layer.positions, Rotary) and isinstance(layer.positions.scaling, DynamicNTKScaling):
        raise OptionError(f"DynamicNTKScaling depends on the length of the whole sequence, got it in {name}")


@dataclass(frozen=True, slots=True)
class _ContextOperator:
    """The `AttentionOperator` of the layers within the context."""

    options: dict[str, Any]  # of `context_attention`

    def check_call(
        self, layer: BaseAttention, key: Tensor | Memory | None, cache: KVCache | None, token_positions: Tensor | None
    ) -> None:
        if key is not None or cache is not None:
            raise OptionError("context_parallel is for self-attention without a cache, got a key or a cache")
        if token_positions is None:
            raise OptionError(
                "within context_parallel a rank holds tokens of any position, got no token_positions; pass "
                "token_positions=polyhead.parallel.shard_positions(tokens, ...)"
            )
        if layer._listener is not None:
            raise OptionError("an observer needs the keys of all ranks, got an observed layer within context_parallel")

    def attend(
        self, layer: BaseAttention, q: Tensor, k: Tensor, v: Tensor, call: CallOptions, **options: Any
    ) -> AttentionOutput:
        if call.dropout or call.weights:
            raise OptionError("context_parallel has no attention dropout and returns no weights, got one of them")
        return context_attention(
            q,
            k,
            v,
            mask=call.mask,
            scale=options["scale"],
            softcap=layer.softcap,
            sinks=options["sinks"],
            backend=call.backend,
            statistics=call.statistics,
            logsumexp=call.logsumexp,
            finite=layer.finite,
            **self.options,
        )
