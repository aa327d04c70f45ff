"""Where experience warns of a head layout."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from polyhead.costs.timing.machine import Machine
from polyhead.costs.work import Phase
from polyhead.layers.config import AttentionConfig
from polyhead.layers.latent.config import LatentConfig
from polyhead.layers.variants.collaborative.config import CollaborativeConfig
from polyhead.layers.variants.differential.config import DifferentialConfig

NARROW = 64
# What is warned of, in a word, and why.
KINDS = {
    "one head": "one head makes one map, so that a token attends to one thing at a time",
    "one channel": "heads of one channel make each map of products of single numbers",
    "narrow": f"heads narrower than {NARROW} leave matrix units half empty, and trained models avoid them",
    "rank": "a head of d channels tells about exp(d / 8) keys apart, and makes maps of rank d at most",
    "idle": "too few heads, sequences and tokens to give every multiprocessor a part of the attention",
}
QUERY_TILE, KEY_TILE = 128, 64  # of the kernels: what one multiprocessor holds at a time
_CALLS: dict[Phase, str] = {"training": "a training step", "prefill": "this prefill", "decode": "decoding a token"}


class Warned(NamedTuple):
    """One of `KINDS`, and what it says of this layout."""

    kind: str
    words: str


def channels_for(context: int) -> int:
    """How wide a head should be to tell the keys of a context apart.

    Directions of d channels drawn at random overlap: among n of them the nearest two have a cosine of about
    sqrt(2 ln n / d), which eats so much of the margin by which a query can prefer one. Below half is asked for here:
    d >= 8 ln n. A head can only make every map there is with d >= n (Bhojanapalli et al. 2020, "Low-Rank Bottleneck in
    Multi-head Attention Models"), which no long context affords.

    >>> channels_for(512), channels_for(2048), channels_for(131072)
    (50, 61, 95)
    """
    return math.ceil(8 * math.log(max(context, 1)))


def warnings_of(
    config: AttentionConfig, *, context: int, batch: int = 1, phase: Phase = "prefill", machine: Machine | None = None
) -> tuple[Warned, ...]:
    """What to think twice about.

    >>> from polyhead.layers.config import MultiHeadConfig
    >>> warnings_of(MultiHeadConfig(512, 8, causal=True), context=512)
    ()
    >>> [warned.kind for warned in warnings_of(MultiHeadConfig(512, 16, causal=True), context=512)]
    ['narrow', 'rank']
    """
    layout = config.layout  # type: ignore[attr-defined]
    heads, dim = layout.num_heads, _channels(config)
    found = []
    if heads == 1:
        found.append(Warned("one head", "one head makes one map"))
    if dim == 1:
        found.append(Warned("one channel", f"{_several(heads, 'head')} of one channel each"))
    if dim < NARROW:
        found.append(Warned("narrow", f"heads of {_several(dim, 'channel')} are narrower than {NARROW}"))
    window = getattr(config, "window", None)
    seen = context if window is None else min(context, window)
    if dim < channels_for(seen):
        keys, tells = _several(math.floor(math.exp(dim / 8)), "key"), "tells" if dim == 1 else "tell"
        words = f"{_several(dim, 'channel')} {tells} about {keys} apart, and a token sees {seen:,}"
        found.append(Warned("rank", f"{words}: {channels_for(seen)} channels would"))
    if machine is not None and machine.device == "cuda":
        programs = _programs(config, seen, context, batch, phase)
        if programs < machine.processors:
            words = f"{programs} of {machine.processors} multiprocessors have work in the attention of {_CALLS[phase]}"
            under = f" under a window of {window:,}" if phase == "decode" and seen < context else ""
            found.append(Warned("idle", words + under))
    return tuple(found)


def explained(warned: Iterable[Warned]) -> list[tuple[str, str]]:
    """Each kind of warning that is among them once, and why it is one.

    >>> explained([Warned("one head", "one head makes one map")])
    [('one head', 'one head makes one map, so that a token attends to one thing at a time')]
    """
    kinds = {warning.kind for warning in warned}
    return [(kind, why) for kind, why in KINDS.items() if kind in kinds]


def _channels(config: AttentionConfig) -> int:
    """What one map is made of: a half of a differential head, all that collaborative heads share."""
    if isinstance(config, CollaborativeConfig) and config.shared_dim is not None:
        return config.shared_dim
    dim: int = config.layout.head_dim  # type: ignore[attr-defined]
    return dim // 2 if isinstance(config, DifferentialConfig) else dim


def _several(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _programs(config: AttentionConfig, seen: int, context: int, batch: int, phase: Phase) -> int:
    layout = config.layout  # type: ignore[attr-defined]
    if phase == "decode":
        kv_heads = 1 if isinstance(config, LatentConfig) else layout.num_kv_heads
        return batch * kv_heads * -(-seen // KEY_TILE)
    return batch * layout.num_heads * -(-context // QUERY_TILE)
