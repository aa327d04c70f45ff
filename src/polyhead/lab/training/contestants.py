"""The arrangements that are compared, each as one would choose it for a model of this width."""

from __future__ import annotations

from collections.abc import Mapping

from polyhead.lab.training.model import Sizes
from polyhead.lab.training.trials import Contest
from polyhead.layers import (
    AttentionConfig,
    CollaborativeConfig,
    DifferentialConfig,
    GroupedHeadsConfig,
    HeadMixConfig,
    LatentConfig,
    MultiHeadConfig,
    RoutedConfig,
    TalkingHeadsConfig,
)

# A look instead of a figure: it takes a minute on two cores.
QUICK_SIZES, QUICK_BATCH, QUICK_STEPS = Sizes(embed_dim=64, layers=2, context=64, hidden=256), 8, 20


def contest(*, quick: bool = False) -> Contest:
    """More than ten million parameters, 800 steps of 32,768 bytes; multi-head attention is what others are held to."""
    if quick:
        return Contest(arrangements(QUICK_SIZES.embed_dim, 4), QUICK_SIZES, QUICK_BATCH, QUICK_STEPS)
    return Contest(arrangements(384, 6), Sizes(), batch=64, steps=800)


def arrangements(width: int, heads: int) -> Mapping[str, AttentionConfig]:
    """By the names that the docs use. Heads are `width / heads` wide where nothing else is said."""
    dim = width // heads
    return {
        "multi-head": MultiHeadConfig(width, heads, causal=True),
        "grouped-query": MultiHeadConfig(width, heads, num_kv_heads=heads // 2, causal=True),
        "multi-query": MultiHeadConfig(width, heads, num_kv_heads=1, causal=True),
        "gated": MultiHeadConfig(width, heads, output_gate="channel", causal=True),
        "latent": LatentConfig(width, heads, kv_lora_rank=width // 3, causal=True),
        "groups and MLP": GroupedHeadsConfig(width, heads, num_groups=heads // 2, causal=True),
        "across heads": HeadMixConfig(width, heads, causal=True),
        "talking": TalkingHeadsConfig(width, heads, causal=True),
        "collaborative": CollaborativeConfig(width, heads, shared_dim=width // 3, causal=True),
        # Two maps a head, so half as many heads of twice the width.
        "differential": DifferentialConfig(width, heads // 2, causal=True),
        # As many heads at work as elsewhere, out of twice as many.
        "routed, shared": RoutedConfig(width, 2 * heads, top_k=heads, head_dim=dim, causal=True),
        "routed, full": RoutedConfig(width, 2 * heads, shape="full", top_k=heads, head_dim=dim, causal=True),
    }
