"""`talking_attention`: attention whose heads are mixed before and after the softmax, exactly and without n² memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyhead.errors import BackendUnsupported, DeviceError, DtypeError, MaskError, OptionError, ShapeError
from polyhead.masks import Mask
from polyhead.ops.attention.api import _request
from polyhead.ops.common.combined_weights import COMBINED, CombinedWeights, checked_names
from polyhead.ops.common.request import AttentionOutput
from polyhead.ops.common.statistics import RowStatistics, Statistics
from polyhead.ops.common.tracing import is_exporting
from polyhead.ops.talking_heads import blockwise, fused, reference
from polyhead.ops.talking_heads.request import TalkingRequest

if TYPE_CHECKING:
    from jaxtyping import Float

_BACKENDS: dict[str, Any] = {
    "fused": fused,
    "blockwise": blockwise,
    "reference": reference,
}
TALKING_BACKENDS = tuple(_BACKENDS)


def talking_attention(
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch kv_heads keys head_dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    *,
    logits_mix: Float[Tensor, "heads heads"],
    weights_mix: Float[Tensor, "heads heads"],
    mask: Mask | None = None,
    scale: float | None = None,
    backend: str = "auto",
    weights: bool = False,
    statistics: bool | str | Sequence[str] | Statistics | None = None,
    logsumexp: bool = False,
    finite: bool = False,
) -> AttentionOutput:
    """Talking heads (Shazeer et al. 2020, "Talking-Heads Attention"): heads are mixed before and after the softmax.

        L_g = sum_h logits_mix[h, g] (scale Q_h K_h^T)
        W_g = softmax(L_g)
        U_g = sum_h weights_mix[h, g] W_h
        O_g = U_g V_g

    Args:
        query, key, value, scale, finite: as in `polyhead.attention`; the scale is one number.
        logits_mix, weights_mix: [heads, heads], from heads on the first axis to heads on the second.
        mask: a causal edge, a window, lengths, documents, positions, a dense boolean mask that all heads share, in any
            combination. What differs from head to head or is added to logits is refused: it would have to say before
            or after which mix.
        backend: "auto", or one of "fused", "blockwise", "reference". A named backend never falls back.
        weights: also return the weights W of every softmax, before they are mixed; only "reference" holds them.
        statistics, logsumexp: of every softmax, after the logits are mixed and before the weights are. They carry no
            gradient. `mixed_weights` tells of U what can be told.

    >>> x, mix = torch.randn(2, 8, 5, 16), torch.eye(8)
    >>> result = talking_attention(x, x, x, logits_mix=mix, weights_mix=mix, mask=Mask.causal())
    >>> result.output.shape, result.backend
    (torch.Size([2, 8, 5, 16]), 'blockwise')
    """
    request = _talking_request(
        query, key, value, logits_mix, weights_mix, mask, scale, weights, logsumexp, finite, statistics
    )
    chosen = _choose(request) if backend == "auto" else _named(backend, request)
    kind = query.device.type
    if kind == "meta":
        result = _BACKENDS[chosen].run(request)
    else:
        with torch.autocast(kind, enabled=False):
            result = _BACKENDS[chosen].run(request)
    return replace(
        result,
        logsumexp=None if result.logsumexp is None else result.logsumexp.detach(),
        statistics=None if result.statistics is None else _detached(result.statistics),
    )


@torch.no_grad()
def mixed_weights(
    query: Tensor,
    key: Tensor,
    *,
    logits_mix: Tensor,
    weights_mix: Tensor,
    mask: Mask | None = None,
    scale: float | None = None,
    statistics: str | Sequence[str] = COMBINED,
    backend: str = "auto",
    finite: bool = False,
) -> CombinedWeights:
    """Signed mass, absolute mass and largest |weight| of every row of the mixed weights U of `talking_attention`.

    They can be negative and need not sum to 1, so that nothing else is told of them: an entropy is refused.

    >>> x, mix = torch.randn(2, 8, 5, 16), torch.full((8, 8), -0.5)
    >>> told = mixed_weights(x, x, logits_mix=torch.eye(8), weights_mix=mix)
    >>> bool((told.signed_mass + 4).abs().max() < 1e-5), bool((told.absolute_mass - 4).abs().max() < 1e-5)
    (True, True)
    """
    names = checked_names(statistics)
    request = _talking_request(query, key, key, logits_mix, weights_mix, mask, scale, False, False, finite, None)
    chosen = _choose(request) if backend == "auto" else _named(backend, request)
    found: CombinedWeights = _BACKENDS[chosen].mixed_weights(request)  # one pass for all of them
    return CombinedWeights(**{name: getattr(found, name) for name in names})


def _choose(request: TalkingRequest) -> str:
    """Our kernels, then tiles of plain PyTorch, then the formula; an exported graph is to hold plain operators."""
    if is_exporting():
        return "reference"
    for name, backend in _BACKENDS.items():
        if name == "fused" and fused.is_slower(request):
            continue
        if not backend.unsupported_reasons(request):
            return name
    return "reference"


def _named(backend: str, request: TalkingRequest) -> str:
    if not isinstance(backend, str) or backend not in _BACKENDS:
        known = ", ".join(map(repr, _BACKENDS))
        raise OptionError(f"backend of talking heads must be 'auto' or one of {known}, got {backend!r}")
    reasons = _BACKENDS[backend].unsupported_reasons(request)
    if reasons:
        raise BackendUnsupported(backend, reasons)
    return backend


def _talking_request(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    logits_mix: Tensor,
    weights_mix: Tensor,
    mask: Mask | None,
    scale: float | None,
    weights: bool,
    logsumexp: bool,
    finite: bool,
    statistics: Any,
) -> TalkingRequest:
    if isinstance(scale, Tensor):
        raise OptionError("talking heads have one scale, got a tensor; a scale a head can stand in logits_mix")
    if isinstance(mask, Mask):
        _check_mask(mask)
    plain = _request(query, key, value, mask, scale, None, None, 0.0, None, weights, logsumexp, finite, statistics)
    heads = plain.query.shape[1]
    for name, matrix in (("logits_mix", logits_mix), ("weights_mix", weights_mix)):
        if not isinstance(matrix, Tensor) or not matrix.is_floating_point():
            got = matrix.dtype if isinstance(matrix, Tensor) else type(matrix).__name__
            raise DtypeError(f"{name} must be a floating-point tensor [{heads}, {heads}], got {got}")
        if matrix.shape != (heads, heads):
            raise ShapeError(f"{name} must be [{heads}, {heads}], heads by heads, got {list(matrix.shape)}")
        if matrix.device != query.device:
            raise DeviceError(f"{name} must be on the device of the query, got {matrix.device} and {query.device}")
    logits_mix, weights_mix = (x.to(plain.query.dtype) for x in (logits_mix, weights_mix))
    factor = 1.0 / math.sqrt(plain.query.shape[-1]) if scale is None else scale
    return TalkingRequest(plain, mask, factor, logits_mix, weights_mix, statistics)


def _check_mask(mask: Mask) -> None:
    refused = [f"a Mask.dense of {list(x.shape)}" for x in mask.allowed if x.shape[1] != 1]
    refused += ["Mask.bias"] if len(mask.biases) else []
    refused += ["a relative bias (ALiBi, T5)"] if len(mask.relative_biases) else []
    if refused:
        raise MaskError(
            "talking heads take a causal edge, a window, lengths, documents, positions and a Mask.dense of "
            f"[batch, 1, queries, keys], got {refused[0]}: what may differ from head to head has no one place among "
            "heads that are mixed"
        )


def _detached(statistics: RowStatistics) -> RowStatistics:
    return RowStatistics(**{name: x.detach() for name, x in statistics.items()})
