"""One attention, measured: what every role is decided from, summed over the rows of each text.

Beside the heads stands chance: a head that looks alike at all the keys it may see, measured by the same steps on the
same text under the same mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyhead.masks import Mask
from polyhead.observation.role_evidence_tokens import BINS, KEY_SETS, NEAR, Pairs, Pieces, TokenMetadata
from polyhead.ops.attended import Attended
from polyhead.ops.attention import RowStatistics, Statistics, attention
from polyhead.ops.profile import profile
from polyhead.ops.profile.request import OFFSET_BINS

WINDOW = 8  # a key at most so far away is near
COLUMNS = (
    "rows",  # how many rows there are
    "self", "previous", "next", "first", "near",  # the weight there, and within `WINDOW`
    *KEY_SETS,
    "key_set_rows",  # how many rows there are whose tokens are known
    "normalized_entropy", "entropy_rows",  # of rows that see two keys or more
    "mean_distance",
    "far", "far_rows",  # rows with most of their weight on one far key; rows that see such a key. The first is none
    "duplicate", "duplicate_rows",  # the weight on other occurrences of the row's token; rows that see one
    "induction", "induction_rows",  # the weight on what follows those; rows that see it
    "alike", "alike_expected",  # cosine of what is attended to, other tokens only; what their offsets alone would give
    "shuffled", "shuffled_expected",  # the same with meanings dealt out anew
    "reshuffled", "reshuffled_expected",  # and once more
    "different",  # the weight on other tokens
    "word", "word_rows",  # the weight inside the row's word; rows of words of several tokens
    "sentence", "sentence_rows",  # the weight inside the row's sentence; rows of texts of several
)  # fmt: skip
_ROW_NAMES = ("entropy", "confidence", "mean_distance")


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """Sums over the rows of each text of a batch, in float64; the counts are whole numbers."""

    sums: Tensor  # float64 [batch, heads + 1, columns]; the last row is chance
    hits: Tensor  # int64 [batch, heads, bins]: rows whose largest weight is at an offset
    available: Tensor  # int64 [batch, bins]: rows that see a key there
    chance: Tensor  # float64 [batch, bins]: the weight there of a head that looks everywhere alike


@dataclass(frozen=True, slots=True, eq=False)
class Ground:
    """What one batch shows before any head is looked at: the same for all layers with one mask."""

    tokens: TokenMetadata
    visible: Tensor  # [batch, 1, queries]: how many keys each row sees
    counted: Tensor  # bool [batch, 1, queries]: rows that count
    first: Tensor  # int64 [batch]: the first key of each text
    far: Tensor  # bool [batch, 1, queries]: rows that see a far key which is not the first
    duplicate: Tensor  # bool [batch, 1, queries]: rows that see their token elsewhere
    induction: Tensor
    sums: Tensor  # [batch, 1, columns]
    available: Tensor
    chance: Tensor


def ground(attended: Attended, real: Tensor | None, tokens: TokenMetadata) -> Ground:
    """Measure chance."""
    batch, _, queries, _ = attended.query.shape
    flat, mask = attended.query.new_zeros(batch, 1, queries, 8), without_biases(attended.mask)
    requested = Statistics(*_ROW_NAMES, "visible_keys", "window_mass", "sink_mass", sink_keys=1, window=WINDOW)
    result = attention(flat, flat, flat, mask=mask, statistics=requested, logsumexp=True)
    rows, alike = result.statistics, Attended(flat, flat, flat, result, mask)
    assert rows is not None and rows.visible_keys is not None
    assert rows.window_mass is not None and rows.sink_mass is not None
    visible = rows.visible_keys
    counted = visible > 0
    if real is not None:
        counted = counted & real[:, None]
    index = torch.arange(queries, device=visible.device)
    first = torch.zeros(batch, dtype=torch.int64, device=visible.device)
    if real is not None:
        first = real.to(torch.uint8).argmax(-1).expand(batch)
    first_is_far = (index - first[:, None]).abs() > WINDOW
    others = visible * (1 - rows.window_mass - rows.sink_mass * first_is_far[:, None])
    none = torch.zeros_like(counted)
    made = Ground(tokens, visible, counted, first, counted & (others > 0.5), none, none, none, none, none)
    made = replace(
        made,
        duplicate=_seeing(alike, tokens.duplicates, counted),
        induction=_seeing(alike, tokens.inductions, counted),
    )
    columns, histogram = _columns(alike, rows, made, learned_sink=attended.sinks is not None)
    # A head is not broad for being no sharper than random ones: those of unit variance, for which logits are scaled,
    # have an entropy of log(n) - (1 - 1/n) / 2.
    most = visible + (attended.sinks is not None)
    expected = 1 - (1 - 1 / most.clamp_min(2)) / (2 * most.clamp_min(2).log())
    columns["normalized_entropy"] = _total(expected, counted & (most > 1))
    # Nothing is summed over rows that do not count; those that do have a weight of one on each key they see.
    ones = torch.where(counted, 0.0, -torch.inf).to(result.logsumexp.dtype)  # type: ignore[union-attr]
    seen = profile(flat, flat, ones, mask=mask, offsets=True).offsets
    assert seen is not None
    return replace(
        made, sums=_stacked(columns), available=_folded(seen)[:, 0].round().to(torch.int64), chance=histogram[:, 0]
    )


def measure(attended: Attended, found: Ground) -> Measured:
    """Measure every head."""
    rows, meant = _rows(attended, found.tokens)
    columns, _ = _columns(attended, rows, found, learned_sink=attended.sinks is not None, meant=meant)
    argmax = columns.pop("argmax")
    queries = argmax.shape[2]
    offset = argmax - torch.arange(queries, device=argmax.device)
    looked = (argmax >= 0) & found.counted
    bins = offset.clamp(-NEAR - 1, NEAR + 1) + NEAR + 1
    hits = torch.zeros(*argmax.shape[:2], BINS, dtype=torch.int64, device=argmax.device)
    hits = hits.scatter_add(2, torch.where(looked, bins, 0), looked.to(torch.int64))
    return Measured(torch.cat([_stacked(columns), found.sums], 1), hits, found.available, found.chance)


def without_biases(mask: Mask | None) -> Mask | None:
    """The same keys in view, all alike. What some heads see and others do not counts as seen."""
    if mask is None:
        return None
    # transformers hides with the least number of a dtype as well as with -inf.
    shown = [bias.detach() > torch.finfo(bias.dtype).min / 2 for bias in mask.biases]
    allowed = tuple(x.any(1, keepdim=True) for x in (*mask.allowed, *shown))
    return replace(mask, allowed=allowed, biases=(), relative_biases=())


def _rows(attended: Attended, tokens: TokenMetadata) -> tuple[RowStatistics, Tensor | None]:
    """Statistics of the rows, and what they attend to, [batch, heads, queries, 3 dims + 1]; told again if they must."""
    told = attended.result.statistics
    if tokens.meaning is None and told is not None and all(getattr(told, name) is not None for name in _ROW_NAMES):
        return told, None
    value, names = attended.value, list(_ROW_NAMES)
    if tokens.meaning is not None:
        assert tokens.ordinary is not None
        names.append("self_mass")
        value = torch.cat([tokens.meaning.flatten(2), tokens.ordinary[..., None]], -1)
        value = torch.nn.functional.pad(value, (0, -value.shape[-1] % 8)).to(attended.query.dtype)
        value = value[:, None].expand(-1, attended.key.shape[1], -1, -1)
    result = attention(
        attended.query.detach(),
        attended.key.detach(),
        value.detach(),
        mask=attended.mask,
        scale=attended.scale,
        softcap=attended.softcap,
        sinks=attended.sinks,
        statistics=Statistics(*names),
    )
    assert result.statistics is not None
    return result.statistics, None if tokens.meaning is None else result.output


def _columns(
    attended: Attended, rows: RowStatistics, found: Ground, *, learned_sink: bool, meant: Tensor | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """Sums over rows, [batch, heads] each, the argmax [batch, heads, queries], and the weight by offset."""
    tokens, counted = found.tokens, found.counted
    assert attended.result.logsumexp is not None
    # A row whose log-sum-exp is -inf has no weight anywhere: padding is left out of every sum.
    silenced = replace(
        attended, result=replace(attended.result, logsumexp=attended.result.logsumexp.masked_fill(~counted, -torch.inf))
    )
    seen = silenced.profile(received=True, offsets=True, argmax=True)
    assert seen.received is not None and seen.offsets is not None and seen.argmax is not None
    assert rows.entropy is not None and rows.confidence is not None and rows.mean_distance is not None
    received, histogram, heads = seen.received.to(torch.float64), _folded(seen.offsets), attended.query.shape[1]
    here = NEAR + 1
    count = _total(torch.ones_like(found.visible), counted)
    nothing = torch.zeros_like(count).expand(-1, heads)
    columns = dict.fromkeys(COLUMNS, nothing)
    columns |= {
        "rows": count,
        "self": histogram[..., here],
        "previous": histogram[..., here - 1],
        "next": histogram[..., here + 1],
        "near": histogram[..., here - WINDOW : here + WINDOW + 1].sum(-1),
        "first": received.gather(2, found.first[:, None, None].expand(-1, heads, 1))[..., 0],
        "mean_distance": _total(rows.mean_distance, counted),
    }
    if tokens.key_sets is not None:
        masses = received @ tokens.key_sets.transpose(1, 2)
        columns |= {name: masses[..., index] for index, name in enumerate(KEY_SETS)}
        columns["key_set_rows"] = count
    most = found.visible + learned_sink
    several = counted & (most > 1)
    columns["normalized_entropy"] = _total(rows.entropy / most.clamp_min(2).log(), several)
    columns["entropy_rows"] = _total(torch.ones_like(found.visible), several)

    distance = seen.argmax - torch.arange(seen.argmax.shape[2], device=received.device)
    lies_far = (distance.abs() > WINDOW) & (seen.argmax != found.first[:, None, None])
    columns["far"] = _total((rows.confidence > 0.5).to(torch.float64), found.far & lies_far)
    for name, pairs, able in (
        ("duplicate", tokens.duplicates, found.duplicate),
        ("induction", tokens.inductions, found.induction),
    ):
        if pairs is not None:
            columns[name] = _on_pairs(silenced, pairs).sum(-1)
            columns[f"{name}_rows"] = _total(torch.ones_like(found.visible), able)
    columns["far_rows"] = _total(torch.ones_like(found.visible), found.far)
    for name, pieces in (("word", tokens.words), ("sentence", tokens.sentences)):
        if pieces is not None:
            requested = counted & pieces.requested[:, None]
            columns[name] = _total(_inside(attended, pieces), requested)
            columns[f"{name}_rows"] = _total(torch.ones_like(found.visible), requested)
    if meant is not None:
        columns |= _meaning(rows, found, meant, histogram, columns["duplicate"])
    return columns | {"argmax": seen.argmax}, histogram


def _meaning(
    rows: RowStatistics, found: Ground, meant: Tensor, histogram: Tensor, duplicate: Tensor
) -> dict[str, Tensor]:
    """The cosine of a row's token with what it attends to: e_i . sum_j p_ij e_j, without a weight of its own."""
    tokens = found.tokens
    assert tokens.meaning is not None and tokens.ordinary is not None and tokens.alike is not None
    assert rows.self_mass is not None
    dims = tokens.meaning.shape[3]
    rows_of_text = found.counted & tokens.ordinary[:, None]
    attended_to = meant[..., : 3 * dims].unflatten(-1, (3, dims)).to(torch.float64)
    cosines = torch.einsum("bhqsd,bqsd->bhqs", attended_to, tokens.meaning.to(torch.float64))
    # A token is like itself and like the others of its kind; that is no likeness of meaning. Occurrences that are not
    # among the nearest are left in, here and with the meanings dealt out anew.
    same = _total(rows.self_mass, rows_of_text) + duplicate
    different = _total(meant[..., 3 * dims], rows_of_text) - same
    # What the offsets alone would give: the mean cosine at each offset, weighted as the head weighs offsets.
    by_offset = histogram.clone()
    by_offset[..., NEAR + 1] = 0.0
    by_offset = by_offset / by_offset.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    expected = by_offset @ tokens.alike.transpose(1, 2) * different[..., None]
    made = {"different": different}
    for index, name in enumerate(("alike", "shuffled", "reshuffled")):
        made[name] = _total(cosines[..., index], rows_of_text) - same
        made[f"{name}_expected"] = expected[..., index]
    return made


def _inside(attended: Attended, pieces: Pieces) -> Tensor:
    """The weight of each row inside its own word or sentence, [batch, heads, queries].

    What the softmax is divided by if nothing else may be seen, over what it is divided by.
    """
    assert attended.result.logsumexp is not None
    alone = Mask.documents(pieces.numbers)
    narrow = attended.value.new_zeros(*attended.key.shape[:3], 8)
    within = attention(
        attended.query.detach(),
        attended.key.detach(),
        narrow,
        mask=alone if attended.mask is None else attended.mask & alone,
        scale=attended.scale,
        softcap=attended.softcap,
        logsumexp=True,
    ).logsumexp
    assert within is not None
    return (within - attended.result.logsumexp).exp()


def _on_pairs(attended: Attended, pairs: Pairs) -> Tensor:
    """The weight of each pair, float64 [batch, heads, pairs]."""
    weights = attended.profile(pairs=pairs.places).pair_weights
    assert weights is not None
    return weights.to(torch.float64) * pairs.there[:, None]


def _seeing(alike: Attended, pairs: Pairs | None, counted: Tensor) -> Tensor:
    """Which rows see the key of one of their pairs."""
    if pairs is None:
        return torch.zeros_like(counted)
    weights = _on_pairs(alike, pairs)[:, 0]
    reached = torch.zeros(counted.shape[0], counted.shape[2], dtype=torch.float64, device=counted.device)
    return counted & (reached.scatter_add(1, pairs.places[..., 0], weights) > 0)[:, None]


def _total(values: Tensor, counted: Tensor) -> Tensor:
    """The sum over the rows that count, float64 [batch, heads]; the others are never read."""
    return torch.where(counted, values, 0).sum(-1, dtype=torch.float64)


def _folded(offsets: Tensor) -> Tensor:
    """The histogram of a profile with all far bins of a side as one, float64 [batch, heads, bins]."""
    far = (OFFSET_BINS - (2 * NEAR + 1)) // 2
    offsets = offsets.to(torch.float64)
    sides = [offsets[..., :far], offsets[..., OFFSET_BINS - far :]]
    before, after = (side.sum(-1, keepdim=True) for side in sides)
    return torch.cat([before, offsets[..., far : OFFSET_BINS - far], after], -1)


def _stacked(columns: dict[str, Tensor]) -> Tensor:
    heads = max(x.shape[1] for name, x in columns.items() if name in COLUMNS)
    return torch.stack([columns[name].expand(-1, heads) for name in COLUMNS], -1)
