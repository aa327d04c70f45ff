"""Loss terms that keep the entropy of heads inside a band, and make the heads of a layer differ.

`position_overlap`, `output_overlap` and `weight_overlap` are the disagreement of heads on attended positions, outputs
and subspaces of Li et al. 2018 (arXiv:1810.10183), negated: a loss that contains them falls as heads differ more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.observation.forward_statistics import ForwardStatistics, SiteRows
from polyhead.surgery.adapters.attention_layer import AttentionLayer, linear_axis
from polyhead.surgery.adapters.discovery import find_layers

Part = Literal["query", "key", "value", "output"]


def entropy_band(statistics: ForwardStatistics, *, floor: float | None = None, ceiling: float | None = None) -> Tensor:
    """Return the mean over heads of the squared distance of a head's normalized entropy from a band.

    Zero while the mean normalized entropy of every head, between 0 (one key) and 1 (uniform), is inside the band. Its
    gradient raises the entropy of heads below the floor and lowers that of heads above the ceiling; memory is linear in
    the context.

    Args:
        statistics: `session.statistics` of `polyhead.observe(model, statistics="normalized_entropy",
            keep_statistics=True)` after a forward.
        floor: smallest mean normalized entropy without a penalty.
        ceiling: largest one.

    Raises:
        OptionError: neither bound, or bounds that are not 0 <= floor <= ceiling <= 1.

    >>> import torch, polyhead
    >>> from polyhead.training import entropy_band
    >>> layer = polyhead.MultiHeadAttention(16, 4, causal=True)
    >>> with polyhead.observe(layer, statistics="normalized_entropy", keep_statistics=True) as session:
    ...     output = layer(torch.randn(3, 5, 16)).output
    ...     loss = output.square().mean() + 0.1 * entropy_band(session.statistics, floor=0.2)
    ...     loss.backward()
    """
    low, high = 0.0 if floor is None else floor, 1.0 if ceiling is None else ceiling
    if (floor is None and ceiling is None) or not 0 <= low <= high <= 1:
        raise OptionError(
            f"an entropy band needs a floor or a ceiling, 0 <= floor <= ceiling <= 1, got {floor!r} and {ceiling!r}"
        )
    entropy = statistics.mean("normalized_entropy")
    has_rows = ~entropy.isnan()  # a head whose rows see a single key has no normalized entropy
    distance = (low - entropy).clamp_min(0) + (entropy - high).clamp_min(0)
    return torch.where(has_rows, distance.square(), 0.0).sum() / has_rows.sum().clamp_min(1)


def position_overlap(statistics: ForwardStatistics) -> Tensor:
    """Return how much two heads of a layer attend to the same positions, between 0 and 1; memory linear in the context.

    Li et al. 2018 penalise `sum_k p_k q_k` of the weights p and q of two heads in a row. Here a row counts
    as a Gaussian around its mean position whose width is given by its effective number of keys, `w = exp(entropy)`:

        sqrt(2 / (w_p^2 + w_q^2)) exp(-2 pi (mean_p - mean_q)^2 / (w_p^2 + w_q^2)).

    This is exact for two heads that attend to one key, or uniformly to the same keys, and close for rows with one peak.
    The Gaussian of a row with several peaks is centred at their mean: a head that attends to the first and the last key
    appears to agree with one that attends to the keys between them. The term is averaged over tokens, pairs of heads
    and layers of self-attention.

    Args:
        statistics: `session.statistics` of `polyhead.observe(model, statistics=("entropy", "mean_offset"),
            keep_statistics=True)` after a forward.

    Raises:
        OptionError: other statistics, learned sinks, or no self-attention with two heads.

    >>> import torch, polyhead
    >>> from polyhead.training import position_overlap
    >>> layer = polyhead.MultiHeadAttention(16, 4, causal=True)
    >>> with polyhead.observe(layer, statistics=("entropy", "mean_offset"), keep_statistics=True) as session:
    ...     output = layer(torch.randn(3, 5, 16)).output
    ...     loss = output.square().mean() + 0.1 * position_overlap(session.statistics)
    ...     loss.backward()
    """

    def overlap(call: SiteRows) -> tuple[Tensor, Tensor]:
        if call.learned_sinks:
            raise OptionError(
                f"positions are those of keys, got {call.site.name!r}, where a learned sink takes a part of the weights"
            )
        first, second = torch.triu_indices(len(call.heads), len(call.heads), 1).unbind()
        # A NaN of padding would reach the gradient through the `where` below.
        offset, entropy = (torch.where(call.tokens, x, 0.0) for x in (call.mean_offset, call.entropy))
        squared_width = (2 * entropy).exp()
        squared_widths = squared_width[:, first] + squared_width[:, second]  # [batch, pairs, queries]
        distance = offset[:, first] - offset[:, second]
        overlaps = (2 / squared_widths).sqrt() * (-2 * math.pi * distance.square() / squared_widths).exp()
        pairs = call.tokens[:, first] & call.tokens[:, second]
        return torch.where(pairs, overlaps, 0.0).sum(), pairs.sum()

    return _mean_over_pairs(statistics, overlap, [key for key in statistics if key[1] == "self"])


def output_overlap(statistics: ForwardStatistics) -> Tensor:
    """Return the mean cosine of the outputs of two heads of a layer, between -1 and 1; memory linear in the context.

    As in Li et al. 2018: the cosine of the outputs for a token before the output projection, in the mean over
    tokens, pairs of heads and layers. Each head writes in coordinates of its own, which W_O maps to those of the layer;
    the term makes heads differ there, not in what they add to the layer. A head without output has a cosine of 0, and
    no gradient.

    Args:
        statistics: `session.statistics` of `polyhead.observe(model, keep_statistics=True)` after a forward.

    Raises:
        OptionError: head outputs that are not available (`torch.nn.MultiheadAttention`), or no layer
            with two heads.

    >>> import torch, polyhead
    >>> from polyhead.training import output_overlap
    >>> layer = polyhead.MultiHeadAttention(16, 4, causal=True)
    >>> with polyhead.observe(layer, statistics="entropy", keep_statistics=True) as session:
    ...     output = layer(torch.randn(3, 5, 16)).output
    ...     loss = output.square().mean() + 0.1 * output_overlap(session.statistics)
    ...     loss.backward()
    """

    def overlap(call: SiteRows) -> tuple[Tensor, Tensor]:
        output = call.output
        output = torch.where(call.tokens[..., None], output, 0.0).to(torch.promote_types(output.dtype, torch.float32))
        norm, heads = torch.linalg.vector_norm(output, dim=-1, keepdim=True), call.tokens.sum(1)
        # A head without output has no direction; the gradient of `F.normalize` would be that of the output over 1e-12.
        direction = torch.where(norm > 0, output / torch.where(norm > 0, norm, 1.0), 0.0)
        # The sum over ordered pairs: the square of the sum, less the squares.
        total = direction.sum(1).square().sum() - direction.square().sum()
        return total, (heads * (heads - 1)).sum()

    return _mean_over_pairs(statistics, overlap, list(statistics))


def _mean_over_pairs(
    statistics: ForwardStatistics, overlap: Callable[[SiteRows], tuple[Tensor, Tensor]], sites: list[tuple[str, str]]
) -> Tensor:
    """Return the mean over layers; `overlap` returns the sum and the number of pairs of heads of a call's tokens."""
    means = []
    for site in sites:
        if len(statistics[site].heads) > 1:
            totals, counts = zip(*map(overlap, statistics[site].calls), strict=True)
            means.append(torch.stack(totals).sum() / torch.stack(counts).sum().clamp_min(1))
    if not means:
        got = ", ".join(f"{name} ({kind})" for name, kind in statistics) or "none"
        raise OptionError(f"an overlap needs a layer with two heads or more that it is defined for, got {got}")
    return torch.stack([x.to(means[0]) for x in means]).mean()


def weight_overlap(model: nn.Module, part: Part = "value") -> Tensor:
    """Return the mean overlap of the weights of two heads of a layer, between 0 (orthogonal) and 1 (the same subspace).

    The overlap of heads with matrices A and B is `norm(A B^T)^2 / (norm(A A^T) norm(B B^T))`, in Frobenius norms:
    linear CKA without centring (Kornblith et al. 2019, arXiv:1905.00414) of the subspaces that they read or write.
    Add a multiple of it to the loss to make heads differ; its cost does not depend on the batch.

    Args:
        model: a model whose heads can be edited, as for `polyhead.prune`.
        part: "query", "key" or "value", the subspace that a head reads; or "output", the one that it writes.

    Raises:
        OptionError: another part, a layer whose heads are not known, or no layer with two heads.

    >>> import polyhead
    >>> from polyhead.training import weight_overlap
    >>> layer = polyhead.MultiHeadAttention(16, 4)
    >>> 0 < weight_overlap(layer) < 1
    tensor(True)
    """
    if part not in ("query", "key", "value", "output"):
        raise OptionError(f"part must be query, key, value or output, got {part!r}")
    overlaps = []
    for layer in find_layers(model):
        if layer.refusals:
            raise OptionError(
                f"the weights of each head must be known, got {layer.path or type(layer.module).__name__}: "
                f"{'; '.join(layer.refusals)}"
            )
        heads = _matrices(model, layer, part)  # [heads, dim, width]
        if len(heads) < 2:
            continue
        with torch.autocast(heads.device.type, enabled=False):  # squares of 16-bit numbers underflow
            heads = heads.to(torch.promote_types(heads.dtype, torch.float32))
            gram = torch.einsum("iaw,jbw->ijab", heads, heads).square().sum((2, 3))  # [heads, heads]
        norm = gram.diagonal().clamp_min(torch.finfo(gram.dtype).tiny).sqrt()
        overlap = gram / (norm[:, None] * norm)
        overlaps.append(overlap.triu(1).sum() * (2 / (len(heads) * (len(heads) - 1))))
    if not overlaps:
        raise OptionError(f"an overlap needs a layer with two heads or more, got none in {type(model).__name__}")
    return torch.stack([x.to(overlaps[0]) for x in overlaps]).mean()


def _matrices(model: nn.Module, layer: AttentionLayer, part: Part) -> Tensor:
    """Return the weights of every head as views of the parameters, [heads or kv_heads, dim, width]."""
    layout = layer.layout
    assert layout is not None
    source = None if part == "output" else next(source for source in layer.sources if part in source.holds)
    linear = model.get_submodule(layer.output if source is None else source.path)
    weight = linear.get_parameter("weight")
    rows = weight if linear_axis(linear, outputs=source is not None) == 0 else weight.T
    if source is None or part == "output":
        return rows.unflatten(0, (layout.num_heads, -1))
    return rows[source.rows(layout)[part].to(weight.device)]
