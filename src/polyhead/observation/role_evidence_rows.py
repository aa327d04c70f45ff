"""Role evidence of one attention call, summed over the query rows of each text.

The chance baseline is a head with uniform attention over its visible keys, measured by the same code on the same text
under the same mask; only its entropy is that of random logits.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polyhead.masks import Mask
from polyhead.observation.collectors import CollectedCall, exclude_padding, profile_rows
from polyhead.observation.role_evidence_tokens import BINS, KEY_SETS, NEAR, TokenMetadata
from polyhead.observation.rows import dense_terms
from polyhead.ops.attended import Attended
from polyhead.ops.attention import AttentionOutput, RowStatistics, Statistics, attention
from polyhead.ops.profile import profile
from polyhead.ops.profile.request import OFFSET_BINS, AttentionProfile, offset_bins

WINDOW = 8  # keys up to this distance are near
COLUMNS = (
    "rows",  # number of rows
    "self_mass", "previous_mass", "next_mass", "sink_mass", "window_mass",  # sink: the first key; window: `WINDOW`
    *(f"{name}_mass" for name in KEY_SETS),
    "key_set_rows",  # number of rows with token metadata
    "normalized_entropy", "entropy_rows",  # over rows with at least two visible keys
    "mean_distance",
    "long_range", "long_range_rows",  # rows with p > 0.5 on one far key; rows that see one. The first key is excluded
    "duplicate_mass", "duplicate_rows",  # weight on other occurrences of the row's token; rows that see one
    "induction_mass", "induction_rows",  # weight on the tokens after those; rows that see one
    "cosine", "cosine_expected",  # similarity to attended tokens unequal to the row's; expected from offsets
    "shuffled_cosine", "shuffled_cosine_expected",  # the same with shuffled embeddings
    "reshuffled_cosine", "reshuffled_cosine_expected",  # a second shuffle
    "other_token_mass",  # weight on tokens unequal to the row's
    # Weight on other tokens of the row's word; the same expected from offsets; weight on all other tokens. Over rows in
    # multi-token words.
    "word_mass", "word_expected", "word_others",
    "sentence_mass", "sentence_expected", "sentence_others",  # of the row's sentence, in texts of several sentences
    "copy_wins", "copy_pairs", "copy_rows",  # see `_copy_columns`
)  # fmt: skip
PAIRS = ("duplicates", "inductions")  # of `TokenMetadata`
COSINES = ("cosine", "shuffled_cosine", "reshuffled_cosine")  # in the order of `TokenMetadata.meaning`
ROW_STATISTICS = ("entropy", "confidence", "mean_distance")  # computed once more unless the session computes them
PROFILED = {"received": True, "offsets": True, "argmax": True}
PROFILED_PAIRS = {"received": True}
COPY_WEIGHT = 0.1  # a row with less on every ordinary token attends to none
COPY_ROWS = 64  # rows of a text that are sampled
STORED_WEIGHTS, STORED_ROWS = 1 << 21, 64  # weights in memory at a time on a CPU, but at least as many rows
FEW_WEIGHTS, FEW_KEYS = 1 << 20, 512  # on a CPU, the weights of a call up to this size are computed once for all sums


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogits:
    """The tokens of a batch, the directions of the residual stream that raise their logits, and a sample of rows."""

    rows: Tensor  # int64 [batch, rows]: evenly spread over each text, whatever it is batched with
    sampled: Tensor  # bool [batch, rows]: False for repetitions, in texts of fewer rows
    tokens: Tensor  # int64 [batch, keys]
    ordinary: Tensor  # bool [batch, keys]: neither special tokens nor padding nor the first token
    directions: Tensor  # float32 [batch, keys, width]


@dataclass(frozen=True, slots=True, eq=False)
class QueryRows:
    """Properties of the query rows of one batch, the same for all heads."""

    tokens: TokenMetadata
    visible: Tensor  # [batch, 1, queries]: number of visible keys
    counted: Tensor  # bool [batch, 1, queries]: non-padding rows with a visible key
    first: Tensor  # int64 [batch]: index of the first key of each text
    far: Tensor  # bool [batch, 1, queries]: rows with a visible far key other than the first
    duplicate: Tensor  # bool [batch, 1, queries]: rows with another visible occurrence of their token
    induction: Tensor  # bool [batch, 1, queries]: rows that see the token after another occurrence of theirs
    logits: TokenLogits | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BatchBaseline:
    """Head-independent measurements of one batch, shared by all layers with the same mask."""

    query_rows: QueryRows
    sums: Tensor  # float64 [batch, 1, columns]: the columns of uniform attention
    available: Tensor  # as in `HeadEvidence`, for each text
    chance: Tensor  # as in `HeadEvidence`, for each text
    only_pairs: bool = False  # all columns except those of pairs and `sink_mass` are 0


@dataclass(frozen=True, slots=True, eq=False)
class WeightSums:
    """Sums of the weights of each row over keys that belong together, and over the keys' embeddings."""

    inside: Mapping[str, Tensor]  # weight on the row's own "word", "sentence" and "token", [batch, heads, queries]
    # Weighted means of the embeddings `TokenMetadata.meaning`, then the weight on ordinary tokens, then padding:
    # [batch, heads, queries, at least 3 * dims + 1].
    embeddings: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CallWeights:
    """Weights of one attention call that several sums need; those of padding rows are 0."""

    pairs: Mapping[str, Tensor]  # float64 [batch, heads, pairs], by the name of a `Pairs` of `TokenMetadata`
    stored: Tensor | None = None  # all of them, [batch, heads, queries, keys], of a call with few


def _profile(
    attended: Attended, counted: Tensor, tokens: TokenMetadata, requested: Mapping[str, bool], *, store: bool = False
) -> tuple[AttentionProfile, CallWeights]:
    """Return the requested profile of the counted rows, and the weights of pairs; `store` all weights if they are few.

    One profile of the call has both, unless other collectors need a profile of other blocks.
    """
    pairs = {name: x for name in PAIRS if (x := getattr(tokens, name)) is not None}
    positions = torch.cat([x.positions for x in pairs.values()], 1) if len(pairs) else None
    blocks = {"block_map": (1, 1)} if store and _has_few_weights(attended) else {}  # of one query and one key
    if isinstance(attended, CollectedCall) and not blocks.items() <= attended.requested.items():
        summary = profile_rows(attended, counted[:, 0], requested)
        of_weights = exclude_padding(attended, counted[:, 0]).profile(pairs=positions, **blocks)
    else:
        summary = of_weights = profile_rows(attended, counted[:, 0], {**requested, **blocks}, positions)
    of_pairs: dict[str, Tensor] = {}
    if of_weights.pair_weights is not None:
        parts = of_weights.pair_weights.to(torch.float64).split([x.positions.shape[1] for x in pairs.values()], -1)
        of_pairs = {name: x * pairs[name].valid[:, None] for name, x in zip(pairs, parts, strict=True)}
    return summary, CallWeights(of_pairs, of_weights.block_map if len(blocks) else None)


def measure_baseline(
    attended: Attended,
    non_padding: Tensor | None,
    tokens: TokenMetadata,
    logits: TokenLogits | None = None,
    *,
    only_pairs: bool = False,
) -> BatchBaseline:
    """Measure the chance baseline: uniform attention over the visible keys."""
    batch, _, queries, _ = attended.query.shape
    zeros, mask = attended.query.new_zeros(batch, 1, queries, 8), without_biases(attended.mask)
    names = () if only_pairs else (*ROW_STATISTICS, "window_mass", "sink_mass")
    requested = Statistics("visible_keys", *names, sink_keys=1, window=WINDOW)
    result = attention(zeros, zeros, zeros, mask=mask, statistics=requested, logsumexp=True)
    rows, uniform = result.statistics, Attended(zeros, zeros, zeros, result, mask)
    assert rows is not None and rows.visible_keys is not None
    visible = rows.visible_keys
    counted = visible > 0
    if non_padding is not None:
        counted = counted & non_padding[:, None]
    index = torch.arange(queries, device=visible.device)
    first = torch.zeros(batch, dtype=torch.int64, device=visible.device)
    if non_padding is not None:
        first = non_padding.to(torch.uint8).argmax(-1).expand(batch)
    profiled = PROFILED_PAIRS if only_pairs else PROFILED
    summary, weights = _profile(uniform, counted, tokens, profiled, store=not only_pairs)
    assert summary.received is not None
    duplicate, induction = (_has_visible_pair(weights, tokens, name, counted) for name in PAIRS)
    if only_pairs:
        query_rows = QueryRows(tokens, visible, counted, first, torch.zeros_like(counted), duplicate, induction)
        columns = _pair_columns(weights, query_rows, summary.received)
        none = zeros.new_zeros(batch, BINS, dtype=torch.float64)
        return BatchBaseline(query_rows, _stack_columns(columns), none.to(torch.int64), none, only_pairs=True)
    assert rows.window_mass is not None and rows.sink_mass is not None
    first_is_far = (index - first[:, None]).abs() > WINDOW
    others = visible * (1 - rows.window_mass - rows.sink_mass * first_is_far[:, None])
    query_rows = QueryRows(tokens, visible, counted, first, counted & (others > 0.5), duplicate, induction, logits)
    inside = _weight_sums(uniform, replace(tokens, meaning=None), weights.stored)
    columns, histogram = _columns(
        uniform, rows, query_rows, summary, weights, inside, learned_sink=attended.sinks is not None
    )
    # Baseline entropy: random logits of unit variance, which the 1/sqrt(d) scale aims for, give
    # log(n) - (1 - 1/n) / 2 rather than the log(n) of uniform attention.
    num_targets = visible + (attended.sinks is not None)
    expected = 1 - (1 - 1 / num_targets.clamp_min(2)) / (2 * num_targets.clamp_min(2).log())
    columns["normalized_entropy"] = _masked_sum(expected, counted & (num_targets > 1))
    if weights.stored is not None:
        offset_counts = _sum_by_offset((weights.stored > 0).to(weights.stored.dtype))
    else:
        # A log-sum-exp of 0 gives counted rows a weight of 1 on each visible key; -inf excludes the other rows.
        ones = torch.where(counted, 0.0, -torch.inf).to(result.logsumexp.dtype)  # type: ignore[union-attr]
        of_ones = profile(zeros, zeros, ones, mask=mask, offsets=True).offsets
        assert of_ones is not None
        offset_counts = of_ones
    available = _merge_far_bins(offset_counts)[:, 0].round().to(torch.int64)
    return BatchBaseline(query_rows, _stack_columns(columns), available, histogram[:, 0])


def measure(attended: Attended, baseline: BatchBaseline, output: Tensor | None = None) -> dict[str, Tensor]:
    """Return the sums of `HeadEvidence` by name for each text of one attention call, [batch, ...].

    `output` is W_O, [heads, value_dim, width], if it is known.
    """
    query_rows, learned_sink, values = baseline.query_rows, attended.sinks is not None, attended.result.output
    tokens = query_rows.tokens
    if baseline.only_pairs:
        summary, weights = _profile(attended, query_rows.counted, tokens, PROFILED_PAIRS)
        assert summary.received is not None
        sums = _stack_columns(_pair_columns(weights, query_rows, summary.received))
        none = sums.new_zeros(*summary.received.shape[:2], BINS, dtype=torch.int64)
        return _with_baseline(sums, none, baseline)
    needs_weights = any(x is not None for x in (tokens.words, tokens.sentences, tokens.meaning, query_rows.logits))
    summary, weights = _profile(attended, query_rows.counted, tokens, PROFILED, store=needs_weights)
    weight_sums, argmax = _weight_sums(attended, tokens, weights.stored), summary.argmax
    assert argmax is not None
    columns, _ = _columns(
        attended, _row_statistics(attended), query_rows, summary, weights, weight_sums, learned_sink=learned_sink
    )
    offset = argmax - torch.arange(argmax.shape[2], device=argmax.device)
    counted = (argmax >= 0) & query_rows.counted
    logits, packed = query_rows.logits, attended.mask is not None and len(attended.mask.packed) > 0
    if logits is not None and output is not None and not packed and values.shape[1::2] == output.shape[:2]:
        columns |= _copy_columns(attended, logits, output, weights.stored)
    bins = offset.clamp(-NEAR - 1, NEAR + 1) + NEAR + 1
    hits = torch.zeros(*argmax.shape[:2], BINS, dtype=torch.int64, device=argmax.device)
    hits = hits.scatter_add(2, torch.where(counted, bins, 0), counted.to(torch.int64))
    return _with_baseline(_stack_columns(columns), hits, baseline)


def _with_baseline(sums: Tensor, hits: Tensor, baseline: BatchBaseline) -> dict[str, Tensor]:
    of_heads = {"sums": torch.cat([sums, baseline.sums], 1), "hits": hits}
    return {**of_heads, "available": baseline.available, "chance": baseline.chance}


def without_biases(mask: Mask | None) -> Mask | None:
    """Return the mask without biases; a key visible to any head counts as visible."""
    if mask is None:
        return None
    allowed = tuple(x.any(1, keepdim=True) for x in dense_terms(mask))
    return replace(mask, allowed=allowed, biases=(), relative_biases=())


def _row_statistics(attended: Attended) -> RowStatistics:
    """Return the row statistics that roles need, recomputed unless the session has them."""
    computed = attended.result.statistics
    if computed is not None and all(getattr(computed, name) is not None for name in ROW_STATISTICS):
        return computed
    result = _attention(
        attended, attended.value, attended.mask, sinks=attended.sinks, statistics=Statistics(*ROW_STATISTICS)
    )
    assert result.statistics is not None
    return result.statistics


def _weight_sums(attended: Attended, tokens: TokenMetadata, stored: Tensor | None) -> WeightSums:
    """Return the weights of each row within its segments, and its weighted mean of the keys' embeddings.

    `stored` are all weights, [batch, heads, queries, keys], if they were computed.
    On a CPU, one product of queries and keys serves all of them; on other devices, fused attention computes each.
    """
    segments = {"word": tokens.words, "sentence": tokens.sentences}
    groups = {name: x.indices for name, x in segments.items() if x is not None}
    embeddings: Tensor | None = None
    if tokens.meaning is not None:
        assert tokens.ordinary_ids is not None
        groups["token"] = tokens.ordinary_ids
        is_ordinary = (tokens.ordinary_ids >= 0)[..., None]
        embeddings = torch.cat([tokens.meaning.flatten(2), is_ordinary], -1).to(attended.query.dtype)
    if attended.query.is_cpu and len(groups):
        return _sums_of_stored_weights(attended, groups, embeddings, stored)
    means: Tensor | None = None
    if embeddings is not None:
        padded = torch.nn.functional.pad(embeddings, (0, -embeddings.shape[-1] % 8))[:, None]
        means = _attention(
            attended, padded.expand(-1, attended.key.shape[1], -1, -1), attended.mask, sinks=attended.sinks
        ).output
    return WeightSums({name: _weight_inside(attended, indices) for name, indices in groups.items()}, means)


def _sums_of_stored_weights(
    attended: Attended, groups: Mapping[str, Tensor], embeddings: Tensor | None, stored: Tensor | None = None
) -> WeightSums:
    """Compute the sums from the weights of some rows at a time, or from all weights if they are `stored`."""
    batch, heads, queries, _ = attended.query.shape
    keys = attended.key.shape[2]
    step = max(STORED_ROWS, STORED_WEIGHTS // max(1, batch * heads * keys)) if stored is None else max(1, queries)
    indices = torch.stack(list(groups.values()), -1)  # [batch, keys, groups]
    inside, means = [], []
    for start in range(0, queries, step):
        rows = (start, min(start + step, queries))
        weights = attended.profile(rows=rows, block_map=(1, 1)).block_map if stored is None else stored
        assert weights is not None
        same = (indices[:, slice(*rows), None] == indices[:, None]).to(weights.dtype)
        inside.append(torch.einsum("bhqk,bqkg->gbhq", weights, same))
        if embeddings is not None:
            mean = torch.bmm(weights.flatten(1, 2), embeddings.to(weights.dtype))
            means.append(mean.unflatten(1, (heads, -1)))
    sums = torch.cat(inside, 3)
    return WeightSums(dict(zip(groups, sums, strict=True)), torch.cat(means, 2) if len(means) else None)


def _attention(attended: Attended, value: Tensor, mask: Mask | None, **options: Any) -> AttentionOutput:
    """Attend once more with the same queries and keys."""
    return attention(
        attended.query.detach(),
        attended.key.detach(),
        value.detach(),
        mask=mask,
        scale=attended.scale,
        softcap=attended.softcap,
        **options,
    )


def _columns(
    attended: Attended,
    rows: RowStatistics,
    query_rows: QueryRows,
    summary: AttentionProfile,
    weights: CallWeights,
    weight_sums: WeightSums,
    *,
    learned_sink: bool,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the columns, [batch, heads] each, and the weights by offset."""
    tokens, counted = query_rows.tokens, query_rows.counted
    assert summary.received is not None and summary.offsets is not None and summary.argmax is not None
    assert rows.entropy is not None and rows.confidence is not None and rows.mean_distance is not None
    received, histogram = summary.received.to(torch.float64), _merge_far_bins(summary.offsets)
    center = NEAR + 1
    num_rows = _count(counted)
    columns = _pair_columns(weights, query_rows, summary.received)
    columns |= {
        "rows": num_rows,
        "self_mass": histogram[..., center],
        "previous_mass": histogram[..., center - 1],
        "next_mass": histogram[..., center + 1],
        "window_mass": histogram[..., center - WINDOW : center + WINDOW + 1].sum(-1),
        "mean_distance": _masked_sum(rows.mean_distance, counted),
    }
    if tokens.key_sets is not None:
        masses = received @ tokens.key_sets.transpose(1, 2)
        columns |= {f"{name}_mass": masses[..., index] for index, name in enumerate(KEY_SETS)}
        columns["key_set_rows"] = num_rows
    num_targets = query_rows.visible + learned_sink
    has_several = counted & (num_targets > 1)
    columns["normalized_entropy"] = _masked_sum(rows.entropy / num_targets.clamp_min(2).log(), has_several)
    columns["entropy_rows"] = _count(has_several)

    distance = summary.argmax - torch.arange(summary.argmax.shape[2], device=received.device)
    is_far = (distance.abs() > WINDOW) & (summary.argmax != query_rows.first[:, None, None])
    columns["long_range"] = _count(query_rows.far & is_far & (rows.confidence > 0.5))
    columns["long_range_rows"] = _count(query_rows.far)
    for name, segments in (("word", tokens.words), ("sentence", tokens.sentences)):
        if segments is not None:
            in_segments = counted & segments.counted[:, None]
            by_offset = _offsets_of_rows(attended, weights.stored, in_segments, counted, histogram)
            inside = _masked_sum(weight_sums.inside[name], in_segments) - by_offset[..., center]
            columns[f"{name}_mass"] = inside.clamp_min(0.0)
            by_offset[..., center] = 0.0  # attention of a token to itself
            columns[f"{name}_expected"] = (by_offset * segments.inside_by_offset[:, None]).sum(-1)
            columns[f"{name}_others"] = by_offset.sum(-1)
    if weight_sums.embeddings is not None:
        columns |= _similarity_columns(query_rows, weight_sums.inside["token"], weight_sums.embeddings, histogram)
    return columns, histogram


def _pair_columns(weights: CallWeights, query_rows: QueryRows, received: Tensor) -> dict[str, Tensor]:
    """Return the columns of pairs of tokens and `sink_mass`, [batch, heads] each; the other columns are 0."""
    heads = received.shape[1]
    columns = dict.fromkeys(COLUMNS, torch.zeros(len(received), heads, dtype=torch.float64, device=received.device))
    first = query_rows.first[:, None, None].expand(-1, heads, 1)
    columns["sink_mass"] = received.to(torch.float64).gather(2, first)[..., 0]
    possible = {"duplicates": query_rows.duplicate, "inductions": query_rows.induction}
    for name, of_pairs in weights.pairs.items():
        column = name.removesuffix("s")
        columns[f"{column}_mass"] = of_pairs.sum(-1)
        columns[f"{column}_rows"] = _count(possible[name])
    return columns


def _has_few_weights(attended: Attended) -> bool:
    """Return whether all weights of a call may be stored, and summed by offset by `_sum_by_offset`."""
    (batch, heads, queries, _), keys, mask = attended.query.shape, attended.key.shape[2], attended.mask
    if not attended.query.is_cpu or keys > FEW_KEYS or batch * heads * queries * keys > FEW_WEIGHTS:
        return False
    # Other offsets than those of the indices.
    positions = mask is not None and (
        mask.placed is not None or len(mask.packed) or any(x.queries is not None for x in mask.padding)
    )
    return not positions


@functools.cache
def _last_offsets() -> Tensor:
    """Return the last offset of each bin of `profile(offsets=True)`."""
    return offset_bins()[:, 1].contiguous().cpu()


def _sum_by_offset(weights: Tensor) -> Tensor:
    """Return the sums of weights [batch, heads, queries, keys] by offset, in the bins of `offset_bins`."""
    height, width = weights.shape[2:]
    # Shift each row right by one against the row before it, from the last to the first: diagonals become columns.
    skewed = torch.nn.functional.pad(weights.flip(2), (0, height)).flatten(2)[..., : height * (height + width - 1)]
    diagonals = skewed.unflatten(2, (height, height + width - 1)).sum(2)
    offsets = torch.arange(1 - height, width, device=weights.device)
    bins = torch.bucketize(offsets, _last_offsets())
    sums = weights.new_zeros(*weights.shape[:2], OFFSET_BINS)
    return sums.index_add_(2, bins, diagonals)


def _offsets_of_rows(
    attended: Attended, stored: Tensor | None, rows: Tensor, counted: Tensor, histogram: Tensor
) -> Tensor:
    """Return the weights by offset of some of the counted rows, from the `histogram` of all of them if it suffices."""
    if rows.is_cpu:  # on a device this would synchronise
        is_all, is_none = (rows == counted).all(-1, keepdim=True), ~rows.any(-1, keepdim=True)
        if bool((is_all | is_none).all()):
            return torch.where(is_none, 0.0, histogram)
    if stored is not None:
        return _merge_far_bins(_sum_by_offset(torch.where(rows[..., None], stored, 0.0)))
    offsets = exclude_padding(attended, rows[:, 0]).profile(offsets=True).offsets
    assert offsets is not None
    return _merge_far_bins(offsets)


def _similarity_columns(
    query_rows: QueryRows, same_token: Tensor, attended_embeddings: Tensor, histogram: Tensor
) -> dict[str, Tensor]:
    """Return cosine similarities of tokens with what they attend to, e_i . sum_j p_ij e_j, excluding equal tokens."""
    tokens = query_rows.tokens
    assert tokens.meaning is not None and tokens.ordinary_ids is not None and tokens.mean_cosines is not None
    dims = tokens.meaning.shape[3]
    ordinary_rows = query_rows.counted & (tokens.ordinary_ids >= 0)[:, None]
    attended_to = attended_embeddings[..., : 3 * dims].unflatten(-1, (3, dims)).to(torch.float64)
    cosines = torch.einsum("bhqsd,bqsd->bhqs", attended_to, tokens.meaning.to(torch.float64))
    # Equal tokens are excluded: their cosine of 1 is no evidence of semantic similarity.
    same = _masked_sum(same_token, ordinary_rows)
    different = _masked_sum(attended_embeddings[..., 3 * dims], ordinary_rows) - same
    # Expected from offsets alone: the mean cosine at each offset, weighted by the head's attention by offset.
    by_offset = histogram.clone()
    by_offset[..., NEAR + 1] = 0.0
    by_offset = by_offset / by_offset.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    expected = by_offset @ tokens.mean_cosines.transpose(1, 2) * different[..., None]
    columns = {"other_token_mass": different}
    for index, name in enumerate(COSINES):
        columns[name] = _masked_sum(cosines[..., index], ordinary_rows) - same
        columns[f"{name}_expected"] = expected[..., index]
    return columns


def _copy_columns(attended: Attended, logits: TokenLogits, output: Tensor, stored: Tensor | None) -> dict[str, Tensor]:
    """Return how often a row raises the logit of the token it attends to more than that of another row's token.

    A row attends to the ordinary token, other than its own, with the largest weight. Any two sampled rows of a text
    that attend to different tokens are compared, by the direct effect of what the head adds to the stream in the first
    row on the logits of both tokens. If its outputs were unrelated to the tokens it attends to, the first token would
    win in half of the pairs; in exactly half if its output were constant.
    """
    values, rows = attended.result.output.detach(), logits.rows[:, None, :, None]
    if stored is not None:
        weights = stored.gather(2, rows.expand(-1, stored.shape[1], -1, stored.shape[3]))
    else:
        of_blocks = _sampled(attended, logits.rows).profile(block_map=(1, 1)).block_map  # of one query and one key
        assert of_blocks is not None
        weights = of_blocks
    is_self = rows == torch.arange(weights.shape[3], device=rows.device)
    weight, keys = torch.where(logits.ordinary[:, None, None] & ~is_self, weights, 0.0).max(-1)
    batch = torch.arange(len(keys), device=keys.device)[:, None, None]
    tokens, attends = logits.tokens[batch, keys], logits.sampled[:, None] & (weight >= COPY_WEIGHT)
    written = values.gather(2, rows.expand(-1, values.shape[1], -1, values.shape[3])).float() @ output
    effect = written @ logits.directions[batch, keys].mT  # [batch, heads, rows, rows]: of a row on each row's token
    own = effect.diagonal(dim1=2, dim2=3)[..., None]
    compared = attends[..., None] & attends[..., None, :] & (tokens[..., None] != tokens[..., None, :])
    wins = torch.where(compared, (torch.sign(own - effect) + 1) / 2, 0.0)  # NaN for an output of NaN
    return {
        "copy_wins": wins.sum((2, 3), dtype=torch.float64),
        "copy_pairs": compared.sum((2, 3), dtype=torch.float64),
        "copy_rows": _count(compared.any(-1)),
    }


def _sampled(attended: Attended, rows: Tensor) -> Attended:
    """Return the attention of some rows, indices [batch, rows]."""

    def of_rows(x: Tensor) -> Tensor:
        """Return rows of [batch or 1, any, queries or 1, any]."""
        index = rows[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
        return x if x.shape[2] == 1 else x.detach().expand(len(rows), -1, -1, -1).gather(2, index)

    mask, logsumexp = attended.mask, attended.result.logsumexp
    assert logsumexp is not None
    if mask is not None:
        keys = torch.arange(attended.key.shape[2], device=rows.device)[None]
        placed = (
            (rows, keys)
            if mask.placed is None
            else (mask.placed[0].expand(len(rows), -1).gather(1, rows), mask.placed[1])
        )
        padding = tuple(replace(x, queries=torch.full_like(x.keys, rows.shape[1])) for x in mask.padding)
        allowed, biases = (tuple(map(of_rows, x)) for x in (mask.allowed, mask.biases))
        mask = replace(mask, placed=placed, padding=padding, allowed=allowed, biases=biases)
    result = replace(attended.result, logsumexp=of_rows(logsumexp[..., None])[..., 0])
    return replace(attended, query=of_rows(attended.query), result=result, mask=mask)


def _weight_inside(attended: Attended, groups: Tensor) -> Tensor:
    """Return the weight of each row on keys of its own group, such as its word, [batch, heads, queries].

    This is the ratio of softmax denominators: restricted to the group, over unrestricted. `groups` are [batch, tokens].
    """
    assert attended.result.logsumexp is not None
    same_group = Mask.documents(groups)
    zeros = attended.value.new_zeros(*attended.key.shape[:3], 8)
    mask = same_group if attended.mask is None else attended.mask & same_group
    group_logsumexp = _attention(attended, zeros, mask, logsumexp=True).logsumexp
    assert group_logsumexp is not None
    return (group_logsumexp - attended.result.logsumexp).exp()


def _has_visible_pair(uniform: CallWeights, tokens: TokenMetadata, name: str, counted: Tensor) -> Tensor:
    """Return the rows with a visible key among their pairs, bool [batch, 1, queries]."""
    if name not in uniform.pairs:
        return torch.zeros_like(counted)
    positions = getattr(tokens, name).positions
    visible_weight = torch.zeros(counted.shape[0], counted.shape[2], dtype=torch.float64, device=counted.device)
    return counted & (visible_weight.scatter_add(1, positions[..., 0], uniform.pairs[name][:, 0]) > 0)[:, None]


def _masked_sum(values: Tensor, counted: Tensor) -> Tensor:
    """Return the sum over counted rows, float64 [batch, heads]; other rows are ignored, even if NaN."""
    return torch.where(counted, values, 0).sum(-1, dtype=torch.float64)


def _count(counted: Tensor) -> Tensor:
    """Return the number of counted rows, float64 [batch, heads]."""
    return counted.sum(-1, dtype=torch.float64)


def _merge_far_bins(offsets: Tensor) -> Tensor:
    """Return the offset histogram with the far bins of each side summed, float64 [batch, heads, bins]."""
    far = (OFFSET_BINS - (2 * NEAR + 1)) // 2
    offsets = offsets.to(torch.float64)
    sides = [offsets[..., :far], offsets[..., OFFSET_BINS - far :]]
    before, after = (side.sum(-1, keepdim=True) for side in sides)
    return torch.cat([before, offsets[..., far : OFFSET_BINS - far], after], -1)


def _stack_columns(columns: dict[str, Tensor]) -> Tensor:
    heads = max(x.shape[1] for x in columns.values())
    return torch.stack([columns[name].expand(-1, heads) for name in COLUMNS], -1)
