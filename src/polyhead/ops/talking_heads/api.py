"""`talking_attention`: exact talking-heads attention in memory linear in the sequence length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyhead.errors import BackendUnsupported, DeviceError, DtypeError, MaskError, OptionError, ShapeError
from polyhead.masks import Mask
from polyhead.ops.attention.validation import checked_request
from polyhead.ops.common.combined_weights import COMBINED, CombinedWeights, checked_names
from polyhead.ops.common.request import AttentionOutput
from polyhead.ops.common.statistics import RowStatistics, Statistics
from polyhead.ops.common.tracing import is_exporting
from polyhead.ops.common.validation import check_backend, without_autocast
from polyhead.ops.talking_heads import blockwise, fused, reference
from polyhead.ops.talking_heads.request import TalkingRequest

if TYPE_CHECKING:
    from jaxtyping import Float

_BACKENDS: dict[str, Any] = {"fused": fused, "blockwise": blockwise, "reference": reference}
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
    """Talking-heads attention (Shazeer et al. 2020): heads are mixed before and after the softmax.

        L_g = sum_h logits_mix[h, g] (scale Q_h K_h^T)
        W_g = softmax(L_g)
        U_g = sum_h weights_mix[h, g] W_h
        O_g = U_g V_g

    Args:
        query, key, value, scale, finite: as in `polyhead.attention`; the scale is one number.
        logits_mix, weights_mix: [heads, heads], from heads on the first axis to heads on the second.
        mask: causal, window, lengths, documents, positions and a dense boolean mask shared by all heads, in any
            combination. Biases, and masks that differ between heads, are rejected: it would be ambiguous whether they
            apply before or after mixing.
        backend: "auto", or one of "fused", "blockwise", "reference". A named backend never falls back.
        weights: also return the weights W, before they are mixed; only "reference" has them.
        statistics, logsumexp: of the rows of L and W, as in `polyhead.attention`, but without a gradient.
            `mixed_weights` returns statistics of U.

    Returns:
        The output O, the name of the backend that computed it, and weights, statistics and log-sum-exp if requested.

    >>> x, mix = torch.randn(2, 8, 5, 16), torch.eye(8)
    >>> result = talking_attention(x, x, x, logits_mix=mix, weights_mix=mix, mask=Mask.causal())
    >>> result.output.shape, result.backend
    (torch.Size([2, 8, 5, 16]), 'blockwise')
    """
    options: dict[str, Any] = {
        "weights": weights, "logsumexp": logsumexp, "finite": finite, "statistics": statistics,
    }  # fmt: skip
    request = _talking_request(query, key, value, logits_mix, weights_mix, mask=mask, scale=scale, **options)
    backend_name = _choose(request) if backend == "auto" else _named(backend, request)
    with without_autocast(query.device.type):
        result = _BACKENDS[backend_name].run(request)
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
    """Return signed mass, absolute mass and max |weight| per row of the mixed weights U.

    Mixed weights can be negative and need not sum to 1, so no other statistics, such as the entropy, are available.

    >>> x, mix = torch.randn(2, 8, 5, 16), torch.full((8, 8), -0.5)
    >>> stats = mixed_weights(x, x, logits_mix=torch.eye(8), weights_mix=mix)
    >>> bool((stats.signed_mass + 4).abs().max() < 1e-5), bool((stats.absolute_mass - 4).abs().max() < 1e-5)
    (True, True)
    """
    names = checked_names(statistics)
    request = _talking_request(query, key, key, logits_mix, weights_mix, mask=mask, scale=scale, finite=finite)
    backend_name = _choose(request) if backend == "auto" else _named(backend, request)
    stats: CombinedWeights = _BACKENDS[backend_name].mixed_weights(request)  # one pass computes all of them
    return CombinedWeights(**{name: getattr(stats, name) for name in names})


def _choose(request: TalkingRequest) -> str:
    """Return the first backend that supports the request, without "fused" where that is slower.

    An exported graph uses the reference, which has only plain operators.
    """
    if is_exporting():
        return "reference"
    for name, backend in _BACKENDS.items():
        if name == "fused" and fused.is_slower(request):
            continue
        if not backend.unsupported_reasons(request):
            return name
    return "reference"


def _named(backend: str, request: TalkingRequest) -> str:
    check_backend(backend, _BACKENDS)
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
    *,
    mask: Mask | None,
    scale: float | None,
    statistics: Any = None,
    **options: Any,
) -> TalkingRequest:
    if isinstance(scale, Tensor):
        raise OptionError(
            "scale must be one number for talking heads, got a tensor; put a scale per head in logits_mix"
        )
    if isinstance(mask, Mask):
        _check_mask(mask)
    inputs = checked_request(query, key, value, mask=mask, scale=scale, statistics=statistics, **options)
    heads = inputs.query.shape[1]
    for name, matrix in (("logits_mix", logits_mix), ("weights_mix", weights_mix)):
        if not isinstance(matrix, Tensor) or not matrix.is_floating_point():
            got = matrix.dtype if isinstance(matrix, Tensor) else type(matrix).__name__
            raise DtypeError(f"{name} must be a floating-point tensor [{heads}, {heads}], got {got}")
        if matrix.shape != (heads, heads):
            raise ShapeError(f"{name} must be [{heads}, {heads}], heads by heads, got {list(matrix.shape)}")
        if matrix.device != query.device:
            raise DeviceError(f"{name} must be on the device of the query, got {matrix.device} and {query.device}")
    logits_mix, weights_mix = (x.to(inputs.query.dtype) for x in (logits_mix, weights_mix))
    sm_scale = 1.0 / math.sqrt(inputs.query.shape[-1]) if scale is None else scale
    return TalkingRequest(inputs, mask, sm_scale, logits_mix, weights_mix, statistics)


def _check_mask(mask: Mask) -> None:
    unsupported = [f"a Mask.dense of {list(x.shape)}" for x in mask.allowed if x.shape[1] != 1]
    unsupported += ["Mask.bias"] if len(mask.biases) else []
    unsupported += ["a relative bias (ALiBi, T5)"] if len(mask.relative_biases) else []
    if unsupported:
        raise MaskError(
            "talking heads support causal, window, lengths, documents and positions masks and a Mask.dense of "
            f"[batch, 1, queries, keys], got {unsupported[0]}; masks that may differ between heads are ambiguous when "
            "heads are mixed"
        )


def _detached(statistics: RowStatistics) -> RowStatistics:
    return RowStatistics(**{name: x.detach() for name, x in statistics.items()})
