"""The variants that are compared, each with sizes that suit a model of this width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.training.model import Sizes
from benchmarks.training.trials import Contest
from polyhead.layers import AttentionConfig, LatentConfig, MultiHeadConfig
from polyhead.layers.positions.config import RotaryConfig
from polyhead.layers.variants import (
    CollaborativeConfig,
    DifferentialConfig,
    GroupedHeadsConfig,
    HeadMixConfig,
    RoutedConfig,
    TalkingHeadsConfig,
)

# A look instead of a figure: it takes a minute on two cores.
QUICK_SIZES, QUICK_BATCH, QUICK_STEPS = Sizes(embed_dim=64, layers=2, context=64, hidden=256), 8, 20


def contest(*, quick: bool = False) -> Contest:
    """More than ten million parameters, 1,000 steps of 16,384 bytes; others are held to multi-head attention."""
    if quick:
        return Contest(variants(QUICK_SIZES.embed_dim, 4), QUICK_SIZES, QUICK_BATCH, QUICK_STEPS)
    return Contest(variants(384, 6), Sizes(), batch=32, steps=1000)


def variants(width: int, heads: int) -> Mapping[str, AttentionConfig]:
    """Return the variants by their names in the docs; all are rotary, with head_dim `width / heads` by default."""
    dim = width // heads
    common: dict[str, Any] = {"causal": True, "positions": RotaryConfig()}
    return {
        "multi-head": MultiHeadConfig(width, heads, **common),
        "grouped-query": MultiHeadConfig(width, heads, num_kv_heads=heads // 2, **common),
        "multi-query": MultiHeadConfig(width, heads, num_kv_heads=1, **common),
        "gated": MultiHeadConfig(width, heads, output_gate="channel", **common),
        "latent": LatentConfig(
            width, heads, kv_lora_rank=width // 3, qk_nope_head_dim=dim // 2, qk_rope_head_dim=dim // 2, **common
        ),
        "groups and MLP": GroupedHeadsConfig(width, heads, num_groups=heads // 2, **common),
        "across heads": HeadMixConfig(width, heads, **common),
        "talking": TalkingHeadsConfig(width, heads, **common),
        "collaborative": CollaborativeConfig(width, heads, shared_dim=width // 6 * 2, **common),
        # Two maps a head, so half as many heads of twice the width.
        "differential": DifferentialConfig(width, heads // 2, **common),
        # As many heads at work as elsewhere, out of twice as many.
        "routed, shared": RoutedConfig(width, 2 * heads, top_k=heads, head_dim=dim, **common),
        "routed, full": RoutedConfig(width, 2 * heads, shape="full", top_k=heads, head_dim=dim, **common),
    }
