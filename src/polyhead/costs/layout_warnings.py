"""Warnings about head layouts that are known to work badly."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from polyhead.costs.options import Phase
from polyhead.costs.quantities import plural
from polyhead.costs.timing.limits import KEY_TILE, QUERY_TILE
from polyhead.costs.timing.machine import Machine
from polyhead.layers.config import AttentionConfig
from polyhead.layers.latent.config import LatentConfig
from polyhead.layers.variants.collaborative.layer import CollaborativeConfig
from polyhead.layers.variants.differential.layer import DifferentialConfig

NARROW = 64
# Kind of warning and its explanation.
KINDS = {
    "one head": "one head has one attention map, so a token attends to one thing at a time",
    "one channel": "with a head_dim of 1 every logit is a product of two scalars",
    "narrow": f"a head_dim below {NARROW} leaves matrix units half empty, and trained models avoid it",
    "rank": "with a head_dim of d, a head can separate some exp(d / 8) keys, and its logits have rank d at most",
    "idle": "too few heads, sequences and tokens to occupy every multiprocessor",
}
_CALLS: dict[Phase, str] = {"training": "a training step", "prefill": "the prefill", "decode": "a decode step"}


class Warned(NamedTuple):
    """A warning: one of `KINDS`, and the text for one layout."""

    kind: str
    words: str


def channels_for(context: int) -> int:
    """Return the head_dim that a head needs to distinguish the keys of a context.

    Random directions in d dimensions overlap: of n keys, the one closest to a given key has a cosine of about
    sqrt(2 ln n / d) with it, which reduces the margin by which a query can prefer one key. This rule keeps the cosine
    below one half: d >= 8 ln n. A head can represent every attention map only if d >= n (Bhojanapalli et al. 2020,
    "Low-Rank Bottleneck in Multi-head Attention Models"), which is out of reach for long contexts.

    >>> channels_for(512), channels_for(2048), channels_for(131072)
    (50, 61, 95)
    """
    return math.ceil(8 * math.log(max(context, 1)))


def warnings_of(
    config: AttentionConfig, *, context: int, batch: int = 1, phase: Phase = "prefill", machine: Machine | None = None
) -> tuple[Warned, ...]:
    """Return the warnings for a layer at this context, batch and phase; "idle" needs a GPU as `machine`.

    >>> from polyhead.layers import MultiHeadConfig
    >>> warnings_of(MultiHeadConfig(512, 8, causal=True), context=512)
    ()
    >>> [warned.kind for warned in warnings_of(MultiHeadConfig(512, 16, causal=True), context=512)]
    ['narrow', 'rank']
    """
    layout = config.layout  # type: ignore[attr-defined]
    heads, dim = layout.num_heads, _channels(config)
    warnings = []
    if heads == 1:
        warnings.append(Warned("one head", "one head has one attention map"))
    if dim == 1:
        warnings.append(Warned("one channel", f"{plural(heads, 'head')} of one channel each"))
    if dim < NARROW:
        warnings.append(Warned("narrow", f"heads of {plural(dim, 'channel')} are narrower than {NARROW}"))
    window = getattr(config, "window", None)
    visible = context if window is None else min(context, window)
    if dim < channels_for(visible):
        keys, verb = plural(math.floor(math.exp(dim / 8)), "key"), "distinguishes" if dim == 1 else "distinguish"
        text = f"{plural(dim, 'channel')} {verb} about {keys}, and a token sees {visible:,}"
        warnings.append(Warned("rank", f"{text}: {channels_for(visible)} channels would do"))
    if machine is not None and machine.device == "cuda":
        programs = _programs(config, visible, context, batch, phase)
        if programs < machine.processors:
            text = f"{programs} of {machine.processors} multiprocessors have work in the attention of {_CALLS[phase]}"
            suffix = f" under a window of {window:,}" if phase == "decode" and visible < context else ""
            warnings.append(Warned("idle", text + suffix))
    return tuple(warnings)


def explained(warned: Iterable[Warned]) -> list[tuple[str, str]]:
    """Return each kind of warning in `warned` once, with its explanation.

    >>> explained([Warned("one head", "one head has one attention map")])
    [('one head', 'one head has one attention map, so a token attends to one thing at a time')]
    """
    kinds = {warning.kind for warning in warned}
    return [(kind, explanation) for kind, explanation in KINDS.items() if kind in kinds]


def _channels(config: AttentionConfig) -> int:
    """Return the channels of one attention map: half of a differential head, the shared width of collaborative ones."""
    if isinstance(config, CollaborativeConfig) and config.shared_dim is not None:
        return config.shared_dim
    dim: int = config.layout.head_dim  # type: ignore[attr-defined]
    return dim // 2 if isinstance(config, DifferentialConfig) else dim


def _programs(config: AttentionConfig, visible: int, context: int, batch: int, phase: Phase) -> int:
    """Return the number of kernel programs that run the attention in parallel, one per tile."""
    layout = config.layout  # type: ignore[attr-defined]
    if phase == "decode":
        kv_heads = 1 if isinstance(config, LatentConfig) else layout.num_kv_heads
        return batch * kv_heads * -(-visible // KEY_TILE)
    return batch * layout.num_heads * -(-context // QUERY_TILE)
