"""Latency of the live viewer: for the first picture of a head, the exact one, a tile, a word."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.measuring.cases import Case, Pair, Run, Step
from benchmarks.measuring.verdicts import Figure
from polyhead.costs.measuring.runner import Timings
from polyhead.masks import Mask
from polyhead.ops.attention import attention
from polyhead.report.packing import packed_floats
from polyhead.report.viewer import tiles, token_weights
from polyhead.report.viewer.trace import RecordedAttention

FIRST = "first picture, by sampled rows"
PICTURE = "exact picture"
TILE = "tile of 1024 x 1024 tokens"
TOKEN = "row and column of a token, all heads"
PLAIN = "the tile's rows, all of their weights"
BOUNDS_MS = {FIRST: 1000.0, PICTURE: 10_000.0, TILE: 150.0}
ERROR = 1e-5  # of a weight, at most, against float64
_SECONDS, _FEWEST = 30.0, 3


@dataclass(frozen=True)
class Place:
    """One attention: as many queries as keys."""

    tokens: int
    causal: bool
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64

    def __str__(self) -> str:
        kind = ", causal" if self.causal else ""
        return f"{self.heads}/{self.kv_heads} heads of {self.head_dim}, {self.tokens} tokens{kind}"


def plan(*, quick: bool = False, seed: int = 0, gpu: torch.device | None = None) -> list[Step]:
    """Return the steps: 32,768 tokens on a CPU, 131,072 on a GPU; an eighth of them for a quick look."""
    run = Run.on(gpu, seed=seed, quick=quick, seconds=_SECONDS, fewest=_FEWEST)
    tokens = (32_768 if gpu is None else 131_072) // (8 if quick else 1)
    places = [Place(tokens, causal) for causal in (True, False)]
    return [Step("viewer", str(place), run, functools.partial(measure, run, place)) for place in places]


def measure(run: Run, place: Place) -> Iterator[Case]:
    """Yield the case of a place: the server's work up to the text that it sends."""
    recorded = _recorded(run, place)
    head = recorded.head(place.heads - 1)
    first = place.tokens // 2
    side = min(1024, place.tokens - first)
    rows, columns = (first, first + side), (first - side // 3, first - side // 3 + side)
    failed = _error(head, rows, columns)
    coarse = tiles.level_of(head, tiles.ESTIMATE_CELLS)
    fine = tiles.level_of(head, tiles.PICTURE_CELLS)
    rule = tiles.rule_for(head, coarse, "sum")

    def first_picture() -> object:
        made = tiles.strips(head, coarse, "sum") if rule is None else tiles.estimate(head, coarse, rule)
        return packed_floats(tiles.stacked(made)[0])

    def token() -> object:
        rows = [token_weights.attends(recorded, first), token_weights.attended(recorded, first)]
        return [token_weights.row_message(row, 1024) for row in rows]

    def waits(timings: Timings) -> list[Figure]:
        samples = timings.samples_ms
        return [Figure.of_time(name, samples[name], bound) for name, bound in BOUNDS_MS.items() if name in samples]

    calls: dict[str, Callable[[], object]] = {
        FIRST: first_picture,
        PICTURE: lambda: [packed_floats(part.cells[0]) for part in tiles.strips(head, fine, "sum")],
        TILE: lambda: packed_floats(tiles.window(head, rows, columns, 0, "sum")[0]),
        TOKEN: token,
        PLAIN: lambda: packed_floats(_plain(head, rows)[:, columns[0] : columns[1]]),
    }
    yield Case("viewer", str(place), calls, [Pair(TILE, PLAIN, 1.0)], failed=failed, figures=waits)


def _recorded(run: Run, place: Place) -> RecordedAttention:
    query = run.inputs(1, place.heads, place.tokens, place.head_dim, salt=1)
    key = run.inputs(1, place.kv_heads, place.tokens, place.head_dim, salt=2)
    mask = Mask.causal() if place.causal else None
    logsumexp = attention(query, key, key, mask=mask, logsumexp=True).logsumexp
    assert logsumexp is not None
    return RecordedAttention(query, key, logsumexp, mask)


def _plain(head: RecordedAttention, rows: tiles.Span, dtype: torch.dtype = torch.float32) -> Tensor:
    """Compute the weights of some rows by the formula, without the log-sum-exp, [rows, keys]."""
    logits = head.query[0, 0, slice(*rows)].to(dtype) @ head.key[0, 0].to(dtype).T * head.query.shape[3] ** -0.5
    if head.mask is not None:
        index = torch.arange(*rows, device=logits.device)[:, None]
        logits = logits.masked_fill(torch.arange(head.keys, device=logits.device) > index, -torch.inf)
    return logits.softmax(-1)


def _error(head: RecordedAttention, rows: tiles.Span, columns: tiles.Span) -> str:
    """Compare some rows of a tile with float64; return an error message, empty if they agree."""
    some = rows[0], min(rows[0] + 64, rows[1])
    exact = _plain(head, some, torch.float64)[:, slice(*columns)].cpu()
    error = float((tiles.window(head, some, columns, 0, "sum")[0] - exact).abs().max())
    return "" if error <= ERROR else f"a tile is off by {error:.2g}, above {ERROR:g}"
