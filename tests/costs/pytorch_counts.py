"""Counts of built layers: their parameters, and the FLOPs that PyTorch counts for a workload."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from polyhead.costs import Workload
from polyhead.layers import AttentionConfig, build_attention
from polyhead.layers.kv_cache import GrowingCache
from polyhead.layers.kv_cache.latent import LatentCache
from polyhead.layers.latent.config import LatentConfig

BATCH, QUERIES, KEYS, PAST, EMBED, HEADS = 3, 7, 11, 5, 24, 6
WORKLOADS = {
    "forward": Workload.forward(QUERIES, batch=BATCH),
    "training": Workload.training_step(QUERIES, batch=BATCH),
    "prefill": Workload.prefill(QUERIES, past=PAST, batch=BATCH),
    "decode": Workload.decode(PAST, batch=BATCH),
    "cross": Workload.cross(QUERIES, KEYS, batch=BATCH),
    "remembered": Workload.cross(QUERIES, KEYS, batch=BATCH, remembered=True),
    "cross, training": Workload.cross(QUERIES, KEYS, batch=BATCH, training=True),
}
workloads = pytest.mark.parametrize("work", WORKLOADS.values(), ids=WORKLOADS)


def built_parameters(config: AttentionConfig) -> int:
    return sum(parameter.numel() for parameter in build_attention(config, device="meta").parameters())


def counted_flops(config: AttentionConfig, work: Workload) -> int:
    """Return the FLOPs that PyTorch counts while a layer does this work; PyTorch counts no fused kernel of a CPU."""
    layer, cache = build_attention(config), None
    x = torch.randn(work.batch, work.queries, EMBED, requires_grad=True)
    with torch.set_grad_enabled(work.training):
        source: tuple[Any, ...] = ()
        if work.source is not None:
            source = (torch.randn(work.batch, work.source, EMBED, requires_grad=True),)
            source = (layer.remember(*source),) if work.remembered else source
        if work.past:
            cache = LatentCache(value_dim=config.kv_lora_rank) if isinstance(config, LatentConfig) else GrowingCache()
            layer(torch.randn(work.batch, work.past, EMBED), cache=cache)
        with FlopCounterMode(display=False) as counter:
            output = layer(x, *source, cache=cache).output
            if work.training:
                output.sum().backward()
    return counter.get_total_flops()
