"""A model's fingerprint changes with any bit of it."""

from __future__ import annotations

import torch

from polyhead.layers import MultiHeadAttention
from polyhead.surgery import PruneHeads, apply, fingerprint, undo


def test_tensors_that_lie_in_one_piece_of_memory_are_told_apart_wherever_each_begins() -> None:
    memory = torch.arange(12.0)
    layer, other = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)
    layer.weight = torch.nn.Parameter(memory[3:5].view(1, 2))  # 12 bytes from the start
    other.weight = torch.nn.Parameter(memory[3:5].view(1, 2).clone())
    assert fingerprint(layer) == fingerprint(other)
    layer = MultiHeadAttention(12, 4, num_kv_heads=2)
    before = fingerprint(layer)
    record = apply(layer, [PruneHeads(0, (0,))])
    undo(layer, record)
    assert fingerprint(layer) == before
