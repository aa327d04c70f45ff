"""Random cases: what is called, drawn from the name of the case alone, without a tensor."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Any

from polyhead.ops.common.statistics import NAMES

FAMILY = 12  # consecutive cases with the same dtype, head dims and statistics, so that most kernels are compiled once
INPUTS = ("query", "key", "value")
LAYOUTS = (
    *("plain", "plain", "sequence first", "fused", "transposed", "one batch", "one head"),
    *("offset by 1", "offset by 4", "offset by 8", "padded by 1", "padded by 8"),
)


@dataclass(frozen=True)
class SizeRange:
    """Sizes to draw from: tile edges, and how much one call may compute."""

    edges: tuple[int, ...]
    most: int  # tokens of a call that is not at an edge
    many: int  # keys of a call with few queries
    pairs: int  # batch * heads * queries * keys
    dims: tuple[int, ...]


SIZE_RANGES = {
    # For a GPU: around the edges of all tile sizes; head dims with and without kernels of their own.
    "full": SizeRange(
        edges=(
            *(1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129),
            *(191, 192, 193, 255, 256, 257, 300, 383, 385, 511, 513),
        ),
        most=700,
        many=9000,
        pairs=12_000_000,
        dims=(1, 3, 8, 16, 24, 32, 33, 40, 48, 56, 64, 64, 64, 72, 80, 96, 100, 112, 128, 128, 128, 136, 160, 192, 256),
    ),
    # For a CPU, whose tiles have 512 columns.
    "small": SizeRange(
        edges=(1, 2, 3, 5, 8, 13, 15, 16, 17, 31, 33, 40, 63, 64, 65),
        most=90,
        many=1100,
        pairs=120_000,
        dims=(1, 3, 8, 16, 24, 33, 40, 64),
    ),
}


@dataclass(frozen=True)
class CaseId:
    """Name of a case: its sizes, the seed of the run, the stream (one process) and the position in it."""

    sizes: str
    seed: int
    stream: int
    position: int

    def __str__(self) -> str:
        return f"{self.sizes}-{self.seed}-{self.stream}-{self.position}"

    @classmethod
    def parse(cls, text: str) -> CaseId:
        """Return the case that a line of findings names.

        >>> CaseId.parse("small-0-3-57")
        CaseId(sizes='small', seed=0, stream=3, position=57)
        """
        sizes, *numbers = text.split("-")
        if sizes not in SIZE_RANGES or len(numbers) != 3 or not all(x.isdecimal() for x in numbers):
            names = " or ".join(SIZE_RANGES)
            raise ValueError(
                f"a case is SIZES-SEED-STREAM-POSITION with sizes {names}, such as small-0-3-57; got {text!r}"
            )
        return cls(sizes, *map(int, numbers))


@dataclass(frozen=True)
class Family:
    """Options that consecutive cases share, since kernels are compiled for them."""

    dtype: str
    head_dim: int
    value_dim: int
    statistics: tuple[str, ...]
    loss: str  # the results with a gradient: "none", "output", "all" or "some"


@dataclass(frozen=True)
class Sizes:
    """Sizes of one call of attention."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int


@dataclass(frozen=True)
class DenseTerm:
    """A mask tensor or a bias: axes of its full size, share of visible keys (None: causal), dtype and layout."""

    axes: tuple[bool, bool, bool]  # batch, heads, queries
    density: float | None = 0.9
    dtype: str | None = None  # None: the dtype of the query
    layout: str = "plain"


@dataclass(frozen=True)
class MaskDraw:
    """Kinds of mask terms; lengths, ids and positions are drawn with the tensors."""

    tokens: str = "none"
    side: str = "right"
    by_sequence: bool = False  # ids and positions of each sequence, not shared by all
    causal: bool = False
    left: int | None = None
    right: int | None = None
    first: int = 0
    dense: DenseTerm | None = None
    on_device: bool = False  # lengths, ids and positions are on the device of the query before the call
    explicit: bool = False  # Mask() is passed, not None, if nothing is masked


@dataclass(frozen=True)
class Terms:
    """Options of the logits: biases, learned sinks, scale and softcap."""

    bias: DenseTerm | None = None
    table: tuple[int, int] | None = None  # distances and the column of distance 0
    table_by_head: bool = False
    sinks: bool = False
    wide: bool = False  # table and sinks are float32 whatever the dtype of the query is
    spaced: bool = False  # table, sinks and scale are not contiguous
    scale: float | str | None = None  # "heads": one number per head
    softcap: float | None = None


@dataclass(frozen=True)
class ProfileDraw:
    """Results that `polyhead.profile` is called for; a window is a pair of shares of the sequence."""

    options: tuple[str, ...]
    topk: int = 3
    blocks: tuple[int, int] = (4, 4)  # at most so many blocks along each axis
    exact_blocks: bool = False  # blocks of the smallest size that does, not the cheapest
    pool: str = "sum"
    rows: tuple[float, float] = (0.0, 1.0)
    columns: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True)
class Call:
    """One call of a case: numbers, memory layouts of query, key and value, and the mode of autograd."""

    seed: int
    layouts: tuple[str, ...] = ("plain",) * 3
    mode: str = "grad"  # or "no_grad", "inference_mode"
    fixed: tuple[str, ...] = ()  # tensors among query, key and value that require no gradient


@dataclass(frozen=True)
class Case:
    """Calls of attention that differ in numbers, addresses and strides, and in nothing else.

    Launches are planned once for sizes and strides, so a call may be wrong only after another.
    """

    family: Family
    sizes: Sizes
    calls: tuple[Call, ...]
    mask: MaskDraw = field(default_factory=MaskDraw)
    terms: Terms = field(default_factory=Terms)
    backend: str = "auto"
    logsumexp: bool = False
    magnitude: float = 1.0  # of the query
    window: int = 8
    sink_keys: int = 1
    by_name: bool = False  # statistics are requested by name, not as `Statistics`
    poison: str | None = None  # NaN or Inf in keys, values and queries that no result depends on
    finite: bool = False
    autocast: bool = False  # float32 tensors under torch.autocast to the family's dtype
    stream: bool = False  # on a CUDA stream that is not the default one
    keep: bool = False  # tensors of earlier calls stay allocated, so that addresses differ
    profile: ProfileDraw | None = None
    small_tiles: bool = False  # tiles of plain PyTorch so small that these sizes have several

    @property
    def statistics(self) -> tuple[str, ...]:
        """The statistics that are requested, in the order of `NAMES`."""
        return tuple(x for x in self.family.statistics if x != "learned_sink_mass" or self.terms.sinks)


def describe(value: Any) -> str:
    """Return a case in one line, without fields that have their default.

    >>> describe(MaskDraw(causal=True, dense=DenseTerm((True, False, True))))
    'MaskDraw(causal=True, dense=DenseTerm(axes=(True, False, True)))'
    """
    if isinstance(value, tuple):
        return "(" + ", ".join(map(describe, value)) + ("," if len(value) == 1 else "") + ")"
    if not is_dataclass(value):
        return repr(value)
    parts = []
    for x in fields(value):
        default = x.default if x.default_factory is MISSING else x.default_factory()
        if getattr(value, x.name) != default:
            parts.append(f"{x.name}={describe(getattr(value, x.name))}")
    return f"{type(value).__name__}({', '.join(parts)})"


def draw_case(name: CaseId) -> Case:
    """Return the case of this name, the same on every machine and device."""
    size_range = SIZE_RANGES[name.sizes]
    family = _draw_family(_random(name, "family", name.position // FAMILY), size_range)
    r = _random(name, "case", name.position)
    sizes = _draw_sizes(r, size_range)
    poison = r.choice(["nan", "inf", "-inf"]) if r.random() < 0.35 else None
    fields_of_case: dict[str, Any] = {
        "mask": _draw_mask(r, sizes),
        "terms": _draw_terms(r, sizes),
        "backend": r.choice(["auto", "auto", "auto", "fused", "sdpa", "blockwise"]),
        "logsumexp": r.random() < 0.3,
        "magnitude": r.choice([1.0, 1.0, 1.0, 3.0, 0.1]),
        "poison": poison,
        "finite": poison is None and r.random() < 0.1,
        "autocast": family.dtype in ("bfloat16", "float16") and r.random() < 0.1,
        "stream": r.random() < 0.1,
        "keep": r.random() < 0.5,
        "profile": _draw_profile(r) if r.random() < 0.2 else None,
        "calls": tuple(_draw_call(r, family) for _ in range(r.choice([1, 1, 2, 3]))),
    }
    if r.random() < 0.3:
        fields_of_case["by_name"] = True
    else:
        fields_of_case |= {"window": r.choice([0, 3, 8, 100]), "sink_keys": r.choice([1, 2, 5])}
    fields_of_case["small_tiles"] = name.sizes == "small" and r.random() < 0.4
    return Case(family, sizes, **fields_of_case)


def _random(name: CaseId, kind: str, number: int) -> random.Random:
    return random.Random(f"{name.sizes} {name.seed} {name.stream} {kind} {number}")


def _draw_family(r: random.Random, size_range: SizeRange) -> Family:
    dtype = r.choice(["bfloat16"] * 4 + ["float16"] * 2 + ["float32"] * 3 + ["float64"])
    head_dim = r.choice(size_range.dims)
    value_dim = head_dim if r.random() < 0.8 else r.choice(size_range.dims)
    kind = r.random()
    if kind < 0.3:
        names: Sequence[str] = ()
    elif kind < 0.45:
        names = NAMES
    elif kind < 0.6:
        names = ("max_logit", "entropy", "mean_distance")
    else:
        names = [x for x in NAMES if r.random() < 0.3]
    return Family(dtype, head_dim, value_dim, tuple(names), r.choice(["none", "output", "all", "some"]))


def _draw_sizes(r: random.Random, size_range: SizeRange) -> Sizes:
    """Draw sizes, and shrink those that are not the sequence's until the call is small enough."""

    def tokens(most: int) -> int:
        return r.choice((*size_range.edges, r.randint(1, most)))

    if r.random() < 0.12:  # like a decoding step
        queries, keys = r.choice([1, 1, 2, 3, 5, 8, 15, 16]), r.randint(1, size_range.many)
    else:
        keys = tokens(size_range.most)
        queries = keys if r.random() < 0.6 else tokens(size_range.most)
    batch, kv_heads, group = r.choice([1, 1, 2, 3]), r.choice([1, 2, 3]), r.choice([1, 1, 2, 3, 4])
    while batch * kv_heads * group * queries * keys > size_range.pairs and batch * kv_heads * group > 1:
        batch, kv_heads, group = max(1, batch - 1), max(1, kv_heads - (batch == 1)), max(1, group - (kv_heads == 1))
    return Sizes(batch, kv_heads * group, kv_heads, queries, keys)


def _draw_mask(r: random.Random, sizes: Sizes) -> MaskDraw:
    tokens = r.choice(["none"] * 3 + ["lengths", "lengths", "query lengths", "documents", "positions"])
    if tokens == "documents":
        square = sizes.queries == sizes.keys
        tokens = r.choice(["packed", "packed", "documents", "two documents"]) if square else "two documents"
    mask = MaskDraw(
        tokens=tokens,
        side=r.choice(["left", "right"]),
        by_sequence=r.random() < 0.5,
        dense=_draw_dense(r) if r.random() < 0.25 else None,
        on_device=r.random() < 0.5,
        explicit=r.random() < 0.5,
    )
    band = r.choice(["none", "causal", "causal", "window", "left", "both", "sinks"])
    if band == "causal":
        return replace(mask, causal=True)
    if band == "window":
        return replace(mask, left=r.choice([0, 1, 7, 63, 64, 100, 300]), right=0)
    if band == "left":
        return replace(mask, left=r.choice([0, 3, 64, 200]))
    if band == "both":
        return replace(mask, left=r.choice([0, 5, 70]), right=r.choice([0, 5, 130]))
    if band == "sinks":
        return replace(mask, left=r.choice([1, 20, 100]), right=0, first=r.choice([1, 4, 70]))
    return mask


def _draw_dense(r: random.Random) -> DenseTerm:
    causal = r.random() < 0.3
    axes = (r.random() < 0.5, r.random() < 0.5, causal or r.random() < 0.5)
    return DenseTerm(axes, None if causal else r.choice([0.1, 0.5, 0.95]), layout=_draw_layout(r))


def _draw_terms(r: random.Random, sizes: Sizes) -> Terms:
    terms = Terms(wide=r.random() < 0.5, spaced=r.random() < 0.2, table_by_head=r.random() < 0.5)
    if r.random() < 0.2:
        axes = (r.random() < 0.5, r.random() < 0.5, r.random() < 0.5)
        terms = replace(terms, bias=DenseTerm(axes, dtype=r.choice([None, "float32"]), layout=_draw_layout(r)))
    if r.random() < 0.15:
        width = r.randint(1, 2 * min(sizes.keys, 1000) + 3)
        terms = replace(terms, table=(width, r.randrange(width)))
    if r.random() < 0.15:
        terms = replace(terms, sinks=True)
    kind = r.random()
    if kind < 0.25:
        terms = replace(terms, scale="heads" if kind < 0.1 else r.choice([0.3, -0.2, 0.0, 1.0]))
    return replace(terms, softcap=r.choice([2.5, 30.0])) if r.random() < 0.12 else terms


def _draw_call(r: random.Random, family: Family) -> Call:
    draws = r.random()
    mode = "grad" if draws < 0.85 else "no_grad" if draws < 0.93 else "inference_mode"
    if family.loss == "none":  # in the first mode, no tensor requires a gradient
        mode = r.choice(["grad", "no_grad", "inference_mode"])
    fixed = tuple(x for x in INPUTS if r.random() < 0.1)
    return Call(r.getrandbits(48), tuple(_draw_layout(r) for _ in INPUTS), mode, fixed)


def _draw_layout(r: random.Random) -> str:
    return r.choice(LAYOUTS)


def _draw_profile(r: random.Random) -> ProfileDraw:
    all_options = ("received", "received_by_group", "block_map", "offsets", "argmax", "topk", "key_set", "pairs")
    options = tuple(x for x in (*all_options, "head_pairs") if r.random() < 0.35) or ("received",)

    def window() -> tuple[float, float]:
        return (0.0, 1.0) if r.random() < 0.6 else (r.random(), r.random())

    return ProfileDraw(
        options,
        topk=r.randint(1, 16),
        blocks=(r.choice([1, 3, 8, 20]), r.choice([1, 3, 8, 20])),
        exact_blocks=r.random() < 0.5,
        pool=r.choice(["sum", "mean", "max"]),
        rows=window(),
        columns=window(),
    )
