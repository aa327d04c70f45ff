"""Where experience warns of a head layout."""

from __future__ import annotations

import math
from typing import NamedTuple

from polyhead.layers.arrangements import LatentConfig
from polyhead.layers.config import AttentionConfig
from polyhead.plan.timing.machine import Machine
from polyhead.plan.work import Phase

NARROW = 64
# What is warned of, in a word, and why.
KINDS = {
    "one head": "one head makes one map, so that a token attends to one thing at a time",
    "one channel": "as many heads as channels make each map of products of single numbers",
    "narrow": f"heads narrower than {NARROW} leave matrix units half empty, and trained models avoid them",
    "rank": "a head of d channels tells about exp(d / 8) keys apart, and makes maps of rank d at most",
    "idle": "too few heads, sequences and tokens to give every multiprocessor a part of the attention",
}
QUERY_TILE, KEY_TILE = 128, 64  # of the kernels: what one multiprocessor holds at a time


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
    heads, dim = layout.num_heads, layout.head_dim
    found = []
    if heads == 1:
        found.append(Warned("one head", "one head makes one map"))
    if heads == layout.embed_dim:
        found.append(Warned("one channel", f"{heads} heads for {heads} channels"))
    if dim < NARROW:
        found.append(Warned("narrow", f"heads of {dim} channels are narrower than {NARROW}"))
    window = getattr(config, "window", None)
    seen = context if window is None else min(context, window)
    if dim < channels_for(seen):
        words = f"{dim} channels tell about {math.floor(math.exp(dim / 8)):,} keys apart, and a token sees {seen:,}"
        found.append(Warned("rank", f"{words}: {channels_for(seen)} channels would"))
    if machine is not None and machine.device == "cuda":
        programs = _programs(config, seen, context, batch, phase)
        if programs < machine.processors:
            words = f"{programs} of {machine.processors} multiprocessors have work in the attention of this {phase}"
            found.append(Warned("idle", words))
    return tuple(found)


def _programs(config: AttentionConfig, seen: int, context: int, batch: int, phase: Phase) -> int:
    layout = config.layout  # type: ignore[attr-defined]
    if phase == "decode":
        kv_heads = 1 if isinstance(config, LatentConfig) else layout.num_kv_heads
        return batch * kv_heads * -(-seen // KEY_TILE)
    return batch * layout.num_heads * -(-context // QUERY_TILE)
