"""Bad input, case by case: each is refused with the rule and what arrived, or gives the right result."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyhead import HeadId, KVCache, Mask, MultiHeadAttention, attention, explain
from polyhead.errors import (
    BackendUnsupported,
    CacheError,
    CheckpointError,
    DeviceError,
    DtypeError,
    MaskError,
    OptionError,
    PolyheadError,
    ShapeError,
)
from polyhead.geometry import HeadLayout
from polyhead.layers import Memory
from polyhead.layers.kv_cache import GrowingCache, PagedCache, PreallocatedCache, QuantizedCache, RollingCache
from polyhead.layers.positions import ALiBi, Learned, LinearScaling, Rotary, Sinusoidal, T5Bias

GENERATOR = torch.Generator().manual_seed(1)
# Distinct primes where sizes are free: batch 2, 6 query heads over 2 KV heads, 19 queries, 23 keys, widths 13 and 11.
Q, K, V = (torch.randn(shape, generator=GENERATOR) for shape in ((2, 6, 19, 13), (2, 2, 23, 13), (2, 2, 23, 11)))
ALLOWED = torch.ones(19, 23, dtype=torch.bool)
X, SOURCE = torch.randn(2, 5, 12, generator=GENERATOR), torch.randn(2, 7, 12, generator=GENERATOR)
LAYER = MultiHeadAttention(12, 3)
BLOCK = torch.randn(2, 3, 5, 4)

Refusal = tuple[str, Callable[[], object], type[Exception], str]


def attend(mask: Mask | None = None, query: Tensor = Q, key: Tensor = K, value: Tensor = V, **options: Any) -> Tensor:
    return attention(query, key, value, mask=mask, **options).output


def unclaimed(memory: Memory) -> Memory:
    """Return a memory that every layer takes."""
    return Memory(memory.key, memory.value)


def without_gradients(call: Callable[[], object]) -> Callable[[], object]:
    return torch.no_grad()(call)


def cache(**changes: Any) -> PreallocatedCache:
    return PreallocatedCache(**{"capacity": 17, "batch_size": 2, "num_kv_heads": 3, "head_dim": 4} | changes)


def filled(kind: type[KVCache] = PreallocatedCache, **options: Any) -> KVCache:
    sizes = {} if kind is GrowingCache else {"batch_size": 2, "num_kv_heads": 3, "head_dim": 4}
    made = kind(**options, **sizes)
    made.append(BLOCK, BLOCK)
    return made


def load(saved: MultiHeadAttention, into: MultiHeadAttention, **options: Any) -> None:
    into.load_state_dict(saved.state_dict(), **options)


ATTENTION: list[Refusal] = [
    (
        "query of rank 3",
        lambda: attend(query=Q[0]),
        ShapeError,
        r"\[batch, heads, sequence, head_dim\], got shapes \[6, 19, 13\]",
    ),
    ("key of rank 5", lambda: attend(key=K[None]), ShapeError, r"got shapes .* \[1, 2, 2, 23, 13\] and"),
    ("value of rank 2", lambda: attend(value=V[0, 0]), ShapeError, r"and \[23, 11\]$"),
    ("no tensor", lambda: attend(key=K.numpy()), DtypeError, "must be tensors, got Tensor, ndarray and Tensor"),
    ("nothing", lambda: attend(query=None), DtypeError, "must be tensors, got NoneType, Tensor and Tensor"),
    (
        "two dtypes",
        lambda: attend(key=K.double()),
        DtypeError,
        "one dtype, got torch.float32, torch.float64 and torch.float32",
    ),
    (
        "integers",
        lambda: attend(None, Q.int(), K.int(), V.int()),
        DtypeError,
        "float16, bfloat16, float32 or float64, got torch.int32",
    ),
    ("complex", lambda: attend(None, Q.cfloat(), K.cfloat(), V.cfloat()), DtypeError, "got torch.complex64"),
    ("two devices", lambda: attend(value=V.to("meta")), DeviceError, "on one device, got cpu, cpu and meta"),
    ("two batches", lambda: attend(key=K[:1], value=V[:1]), ShapeError, "one batch size, got 2, 1 and 1"),
    ("values of another batch", lambda: attend(value=V[:1]), ShapeError, "one batch size, got 2, 2 and 1"),
    ("two widths", lambda: attend(key=K[..., :11]), ShapeError, "one head_dim, got 13 and 11"),
    ("fewer values than keys", lambda: attend(value=V[:, :, :7]), ShapeError, "got 2 heads of 23 and 2 heads of 7"),
    ("values of fewer heads", lambda: attend(value=V[:, :1]), ShapeError, "got 2 heads of 23 and 1 heads of 23"),
    ("heads that do not divide", lambda: attend(query=Q[:, :5]), ShapeError, "a multiple of KV heads, got 5 and 2"),
    ("more KV heads than heads", lambda: attend(query=Q[:, :1]), ShapeError, "a multiple of KV heads, got 1 and 2"),
    (
        "no heads",
        lambda: attend(key=K[:, :0], value=V[:, :0]),
        ShapeError,
        "at least one head .* got 6 heads, 0 KV heads",
    ),
    ("no channels", lambda: attend(query=Q[..., :0], key=K[..., :0]), ShapeError, "one channel, .* head_dim 0"),
    (
        "a boolean tensor for a mask",
        lambda: attend(ALLOWED),
        MaskError,
        r"a polyhead.Mask, got Tensor; use Mask.dense\(mask\)",
    ),
    ("a string for a mask", lambda: attend("causal"), MaskError, "a polyhead.Mask, got str"),
    ("infinite scale", lambda: attend(scale=float("inf")), OptionError, "scale must be a finite number, .* got inf"),
    ("scale in words", lambda: attend(scale="0.5"), OptionError, "scale must be a finite number, .* got '0.5'"),
    ("scale of KV heads", lambda: attend(scale=torch.ones(2)), ShapeError, r"got shape \[2\] for 6 heads"),
    (
        "integer scales",
        lambda: attend(scale=torch.ones(6).int()),
        DtypeError,
        "scale must be floating point, got torch.int32",
    ),
    ("softcap of 0", lambda: attend(softcap=0.0), OptionError, "softcap must be positive and finite, got 0.0"),
    ("negative softcap", lambda: attend(softcap=-2), OptionError, "softcap must be positive and finite, got -2"),
    (
        "infinite softcap",
        lambda: attend(softcap=float("inf")),
        OptionError,
        "got inf; pass None for no softcap",
    ),
    ("softcap that is no number", lambda: attend(softcap=float("nan")), OptionError, "got nan"),
    (
        "one sink for all",
        lambda: attend(sinks=torch.ones(1)),
        ShapeError,
        r"one number per head, got shape \[1\] for 6 heads",
    ),
    (
        "a number for sinks",
        lambda: attend(sinks=0.5),
        OptionError,
        "sinks must be a tensor with one number per head, got float",
    ),
    (
        "sinks elsewhere",
        lambda: attend(sinks=torch.ones(6, device="meta")),
        DeviceError,
        "of the query, got meta and cpu",
    ),
    ("dropout of 1", lambda: attend(dropout=1.0), OptionError, "at least 0 and less than 1, got 1.0"),
    ("negative dropout", lambda: attend(dropout=-0.1), OptionError, "at least 0 and less than 1, got -0.1"),
    ("dropout that is no number", lambda: attend(dropout=float("nan")), OptionError, "less than 1, got nan"),
    ("dropout in words", lambda: attend(dropout="0.1"), OptionError, "less than 1, got '0.1'"),
    ("fractional seed", lambda: attend(dropout=0.1, seed=1.5), OptionError, "an integer of 64 bits, got 1.5"),
    (
        "seed of 65 bits",
        lambda: attend(dropout=0.1, seed=1 << 64),
        OptionError,
        "an integer of 64 bits, got 18446744073709551616",
    ),
    (
        "two seeds",
        lambda: attend(dropout=0.1, seed=torch.tensor([1, 2])),
        OptionError,
        r"of one element, got torch.int64 of shape \[2\]",
    ),
    (
        "seed elsewhere",
        lambda: attend(dropout=0.1, seed=torch.zeros(1, dtype=torch.int64, device="meta")),
        DeviceError,
        "got meta and cpu",
    ),
    (
        "unknown backend",
        lambda: attend(backend="flash"),
        OptionError,
        "'sdpa', 'fused', 'blockwise', 'reference', got 'flash'",
    ),
    (
        "backend that cannot",
        lambda: attend(backend="sdpa", softcap=2.0),
        BackendUnsupported,
        "'sdpa' cannot serve this request: .* no softcap",
    ),
    ("unknown statistic", lambda: attend(statistics="sharpness"), OptionError, "entropy, .* got 'sharpness'"),
    ("statistics of no kind", lambda: attend(statistics=3), OptionError, "must be True, a name, .* got int"),
    (
        "share of sinks that are not there",
        lambda: attend(statistics=("learned_sink_mass",)),
        OptionError,
        "got an attention without sinks",
    ),
    ("explaining the wrong", lambda: explain(Q, K[:1], V), ShapeError, "one batch size, got 2, 1 and 2"),
]

MASKS: list[Refusal] = [
    (
        "mask turned around",
        lambda: attend(Mask.dense(ALLOWED.T)),
        MaskError,
        r"\[2 or 1, 6 or 1, 19 or 1, 23\] .* got \[1, 1, 23, 19\]",
    ),
    ("one key for all", lambda: attend(Mask.dense(ALLOWED[:, :1])), MaskError, r"got \[1, 1, 19, 1\]$"),
    (
        "padding as queries",
        lambda: attend(Mask.dense(ALLOWED[:2])),
        MaskError,
        r"got \[1, 1, 2, 23\]; pass a key padding mask \[batch, keys\] as mask\[:, None, None\]",
    ),
    (
        "mask of three axes",
        lambda: Mask.dense(ALLOWED[None]),
        MaskError,
        r"a 3-D mask is ambiguous: .* mask\[:, None\]",
    ),
    ("mask of KV heads", lambda: attend(Mask.dense(ALLOWED.expand(1, 2, 19, 23))), MaskError, r"got \[1, 2, 19, 23\]"),
    ("mask of another batch", lambda: attend(Mask.bias(torch.randn(3, 1, 19, 23))), MaskError, r"got \[3, 1, 19, 23\]"),
    (
        "0/1 floats as booleans",
        lambda: Mask.dense(ALLOWED.float()),
        DtypeError,
        r"got torch.float32; for a 0/1 mask pass mask.bool\(\)",
    ),
    ("0/1 integers as booleans", lambda: Mask.dense(ALLOWED.long()), DtypeError, "got torch.int64; for a 0/1 mask"),
    (
        "0/1 floats as a bias",
        lambda: Mask.bias(torch.eye(5)),
        MaskError,
        r"zeros and ones, which masks nothing; .* Mask.dense\(mask.bool\(\)\)",
    ),
    (
        "booleans as a bias",
        lambda: Mask.bias(ALLOWED),
        DtypeError,
        r"got torch.bool; for a boolean mask \(True = may attend\) use Mask.dense",
    ),
    ("a list for a mask", lambda: Mask.dense([[True]]), MaskError, "takes a boolean tensor, got list"),
    (
        "mask elsewhere",
        lambda: attend(Mask.dense(ALLOWED.to("meta"))),
        DeviceError,
        r"got meta and cpu; use mask.to\('cpu'\)",
    ),
    (
        "lengths elsewhere",
        lambda: attend(Mask.lengths([3, 5]).to("meta")),
        DeviceError,
        "got a tensor on the meta device",
    ),
    ("mask and tensor", lambda: Mask.causal() & ALLOWED, MaskError, "combined with another mask, got a tensor"),
    ("empty window", lambda: Mask.window(0), OptionError, "window size must be at least 1, got 0"),
    ("negative side", lambda: Mask.window(left=-1), OptionError, "window left must be at least 0, got -1"),
    ("fractional window", lambda: Mask.window(2.5), OptionError, "window size must be an integer, got 2.5"),
    ("boolean window", lambda: Mask.window(True), OptionError, "window size must be an integer, got True"),
    ("window without a size", lambda: Mask.window(), OptionError, "a size, or left and/or right; got none of them"),
    (
        "window with two sizes",
        lambda: Mask.window(3, right=1),
        OptionError,
        "either a size or left/right, got size 3, left None, right 1",
    ),
    ("first keys without a window", lambda: Mask.window(right=2, sinks=1), OptionError, "got sinks 1 and no left edge"),
    ("negative length", lambda: Mask.lengths([3, -1]), MaskError, "must not be negative, got -1"),
    (
        "length out of range",
        lambda: attend(Mask.lengths([24, 3])),
        MaskError,
        "key lengths must not exceed the sequence, got 24 for 23 tokens",
    ),
    (
        "query length out of range",
        lambda: attend(Mask.lengths([23, 3], queries=[20, 1])),
        MaskError,
        "query lengths .* got 20 for 19 tokens",
    ),
    ("lengths of another batch", lambda: attend(Mask.lengths([3, 5, 7])), MaskError, "got 3 lengths for 2 sequences"),
    (
        "fractional lengths",
        lambda: Mask.lengths([1.5, 2.0]),
        DtypeError,
        "keys lengths must be integers, got torch.float32",
    ),
    ("boolean lengths", lambda: Mask.lengths([True, False]), DtypeError, "must be integers, got torch.bool"),
    ("one length", lambda: Mask.lengths(5), MaskError, r"one integer per sequence, \[batch\], got shape \[\]"),
    (
        "ragged lengths",
        lambda: Mask.lengths([[1], [2, 3]]),
        MaskError,
        r"a list of integers or an integer tensor, got \[\[1\], \[2, 3\]\]",
    ),
    (
        "lengths that disagree",
        lambda: Mask.lengths([1, 2], queries=[1]),
        MaskError,
        "same number of sequences, got 2 and 1",
    ),
    ("unknown side", lambda: Mask.lengths([1], side="top"), OptionError, "'left' or 'right', got 'top'"),
    (
        "fractional documents",
        lambda: Mask.documents(torch.zeros(19)),
        DtypeError,
        "must be integers, got torch.float32",
    ),
    (
        "documents of the keys missing",
        lambda: attend(Mask.documents([0] * 19)),
        MaskError,
        "got 19 queries and 23 keys",
    ),
    (
        "documents too short",
        lambda: attend(Mask.documents([0] * 19, [0] * 19)),
        MaskError,
        r"of the keys must be \[2 or 1, 23\], got \[1, 19\]",
    ),
    ("documents by head", lambda: Mask.documents(torch.zeros(2, 6, 19).long()), MaskError, r"got shape \[2, 6, 19\]"),
    (
        "positions of another batch",
        lambda: attend(Mask.positions(torch.zeros(3, 19).long(), torch.arange(23))),
        MaskError,
        r"of the queries must be \[2 or 1, 19\], got \[3, 19\]",
    ),
    (
        "flat relative table",
        lambda: Mask.relative(torch.randn(9), 4),
        MaskError,
        r"table \[heads, distances\], got torch.float32 of shape \[9\]",
    ),
    ("zero outside the table", lambda: Mask.relative(torch.randn(6, 9), 9), MaskError, "0 to 8, got 9"),
    (
        "fractional zero",
        lambda: Mask.relative(torch.randn(6, 9), 1.5),
        MaskError,
        "a column of the table, 0 to 8, got 1.5",
    ),
    ("table of other heads", lambda: attend(Mask.relative(torch.randn(5, 9), 4)), MaskError, "got 5 rows for 6 heads"),
    (
        "torch mask without heads",
        lambda: Mask.from_torch(ALLOWED.expand(12, 19, 23)),
        MaskError,
        r"requires num_heads, got shape \[12, 19, 23\]",
    ),
    (
        "torch mask of other heads",
        lambda: Mask.from_torch(ALLOWED.expand(12, 19, 23), num_heads=5),
        MaskError,
        "got 12 rows and num_heads 5",
    ),
    (
        "integer torch mask",
        lambda: Mask.from_torch(ALLOWED.long()),
        DtypeError,
        r"boolean \(True = masked\) or floating point \(added\), got torch.int64",
    ),
]

VALUES: list[Refusal] = [
    ("head in words", lambda: HeadId.parse("three.7"), OptionError, "L5H3, for layer 5 and head 3; got 'three.7'"),
    ("layout that does not divide", lambda: HeadLayout(512, 7), ShapeError, "got 512 and 7"),
    ("groups that do not divide", lambda: HeadLayout(512, 8, num_kv_heads=3), ShapeError, "num_kv_heads, got 8 and 3"),
    ("layout of unknown sizes", lambda: HeadLayout.from_dict({"width": 3}), ShapeError, r"unknown names \['width'\]"),
]

LAYERS: list[Refusal] = [
    ("heads that do not divide the width", lambda: MultiHeadAttention(12, 5), ShapeError, "got 12 and 5"),
    (
        "groups of a layer that do not divide",
        lambda: MultiHeadAttention(12, 3, num_kv_heads=2),
        ShapeError,
        "got 3 and 2",
    ),
    (
        "no KV heads",
        lambda: MultiHeadAttention(12, 3, num_kv_heads=0),
        ShapeError,
        "num_kv_heads must be at least 1, got 0",
    ),
    (
        "negative head_dim",
        lambda: MultiHeadAttention(12, 3, head_dim=-1),
        ShapeError,
        "head_dim must be at least 1, got -1",
    ),
    ("fractional width", lambda: MultiHeadAttention(12.0, 3), ShapeError, "embed_dim must be an integer, got 12.0"),
    ("layer dropout of 1", lambda: MultiHeadAttention(12, 3, dropout=1.0), OptionError, "less than 1, got 1.0"),
    (
        "layer softcap of 0",
        lambda: MultiHeadAttention(12, 3, softcap=0.0),
        OptionError,
        "softcap must be positive.* got 0.0",
    ),
    (
        "unknown norm",
        lambda: MultiHeadAttention(12, 3, qk_norm="batch"),
        OptionError,
        "'rms', 'layer' or None, got 'batch'",
    ),
    (
        "unknown gate",
        lambda: MultiHeadAttention(12, 3, output_gate="token"),
        OptionError,
        "'head', 'channel' or None, got 'token'",
    ),
    (
        "window without causal",
        lambda: MultiHeadAttention(12, 3, window=4),
        OptionError,
        "needs causal=True.* got window 4",
    ),
    ("layer window of 0", lambda: MultiHeadAttention(12, 3, causal=True, window=0), OptionError, "at least 1, got 0"),
    (
        "positions by name",
        lambda: MultiHeadAttention(12, 3, positions="rope"),
        OptionError,
        "polyhead.layers.positions, got str",
    ),
    (
        "rotary of another width",
        lambda: MultiHeadAttention(12, 3, positions=Rotary(8)),
        ShapeError,
        "for a layer with head_dim 4; build them with head_dim=4",
    ),
    (
        "biases of other heads",
        lambda: MultiHeadAttention(12, 3, positions=ALiBi(5)),
        ShapeError,
        "for a layer with num_heads 3; build them with num_heads=3",
    ),
    (
        "sinusoids of another width",
        lambda: MultiHeadAttention(12, 3, positions=Sinusoidal(10)),
        ShapeError,
        "embed_dim 12; build them",
    ),
    ("input of rank 2", lambda: LAYER(X[0]), ShapeError, r"query must be \[batch, sequence, 12\], got shape \[5, 12\]"),
    (
        "input of another width",
        lambda: LAYER(X[..., :11]),
        ShapeError,
        r"\[batch, sequence, 12\], got shape \[2, 5, 11\]",
    ),
    (
        "tokens instead of embeddings",
        lambda: LAYER(X.long()),
        DtypeError,
        "got torch.int64; embed tokens before attention",
    ),
    (
        "key of another width",
        lambda: LAYER(X, SOURCE[..., :7]),
        ShapeError,
        r"key must be \[batch, sequence, 12\], got shape \[2, 7, 7\]",
    ),
    ("key of another batch", lambda: LAYER(X, SOURCE[:1]), ShapeError, "one batch size, got 2, 1 and 1"),
    ("value shorter than key", lambda: LAYER(X, SOURCE, SOURCE[:, :3]), ShapeError, r"got \[2, 7\] and \[2, 3\]"),
    ("value without key", lambda: LAYER(X, value=X), OptionError, "got a value without a key"),
    (
        "lengths without a cache",
        lambda: LAYER(X, lengths=[3, 5]),
        OptionError,
        r"without one use mask=Mask.lengths\(...\)",
    ),
    ("mask of another length", lambda: LAYER(X, mask=Mask.lengths([6, 1])), MaskError, "got 6 for 5 tokens"),
    (
        "a tensor for a layer's mask",
        lambda: LAYER(X, mask=torch.ones(5, 5).bool()),
        MaskError,
        "a polyhead.Mask, got Tensor",
    ),
    (
        "gate of other heads",
        lambda: LAYER(X, head_gate=torch.ones(2)),
        ShapeError,
        r"\[3\], \[2, 3\] or \[2, 3, 5\], got \[2\]",
    ),
    ("unknown backend in a constructor", lambda: LAYER(X, backend="flash"), OptionError, "got 'flash'"),
    ("unknown statistic of a layer", lambda: LAYER(X, statistics="sharpness"), OptionError, "got 'sharpness'"),
    (
        "positions of a cross-attention",
        lambda: LAYER(X, X, statistics=("entropy", "mean_distance")),
        OptionError,
        "no common positions, got a request for mean_distance",
    ),
    (
        "self-attention of three widths",
        lambda: MultiHeadAttention(12, 3, key_input_dim=7)(X),
        ShapeError,
        "of width 12, 7 and 7; pass a key to forward",
    ),
    (
        "key for a wider value",
        lambda: MultiHeadAttention(12, 3, key_input_dim=7, value_input_dim=5)(X, torch.randn(2, 4, 7)),
        ShapeError,
        "got 7 and 5; pass a value to forward",
    ),
    ("remembered key of another width", lambda: LAYER.remember(SOURCE[..., :5]), ShapeError, r"got shape \[2, 7, 5\]"),
    (
        "memory of another layer",
        lambda: LAYER(X, MultiHeadAttention(12, 3).remember(SOURCE)),
        OptionError,
        "got a MultiHeadAttention with a memory of another layer, which is gone; call remember of this layer",
    ),
    (
        "memory of other heads",
        lambda: LAYER(X, unclaimed(MultiHeadAttention(12, 6).remember(SOURCE))),
        ShapeError,
        "keys of 3 heads of 4, got 6 heads of 2",
    ),
    (
        "memory of a layer with other KV heads",
        lambda: MultiHeadAttention(12, 3, num_kv_heads=1)(X, unclaimed(LAYER.remember(SOURCE))),
        ShapeError,
        "keys of 1 heads of 4, got 3 heads of 4",
    ),
    ("value beside a memory", lambda: LAYER(X, LAYER.remember(SOURCE), SOURCE), OptionError, "got a value as well"),
    ("input of another dtype than the layer", lambda: LAYER(X.double()), DtypeError, "torch.float64 and torch.float32"),
    ("input on another device than the layer", lambda: LAYER(X.to("meta")), DeviceError, "got meta and cpu"),
    (
        "source of another dtype than the layer",
        lambda: LAYER(X, SOURCE.half()),
        DtypeError,
        "key must have the dtype of the layer",
    ),
    ("query that is no tensor", lambda: LAYER([[1.0]]), DtypeError, "query must be a tensor .* got list"),
    ("cache that is a dict", lambda: LAYER(X, cache={}), OptionError, "cache must be a polyhead.KVCache, got dict"),
    ("gate that is a number", lambda: LAYER(X, head_gate=0.5), ShapeError, "a gate must have .* got float"),
    ("softcap inf", lambda: MultiHeadAttention(12, 3, softcap=math.inf), OptionError, "finite, got inf"),
    ("scale nan", lambda: MultiHeadAttention(12, 3, scale=math.nan), OptionError, "finite number, got nan"),
    ("dropout None", lambda: MultiHeadAttention(12, 3, dropout=None), OptionError, "less than 1, got None"),
    ("value_dim as text", lambda: MultiHeadAttention(12, 3, value_dim="4"), ShapeError, "integer, got '4'"),
    ("qk_norm as a list", lambda: MultiHeadAttention(12, 3, qk_norm=["rms"]), OptionError, "qk_norm must be 'rms'"),
    (
        "unknown backend of a layer",
        lambda: MultiHeadAttention(12, 3, backend="flash"),
        OptionError,
        "backend must be 'auto', 'sdpa', 'fused', 'blockwise' or 'reference', got 'flash'",
    ),
    ("integer layer", lambda: MultiHeadAttention(12, 3, dtype=torch.int64), DtypeError, "got torch.int64"),
    ("from_torch of a linear", lambda: MultiHeadAttention.from_torch(torch.nn.Linear(2, 2)), OptionError, "got Linear"),
    ("from_heads of tuples", lambda: MultiHeadAttention.from_heads([(1, 2)]), OptionError, "got tuple for head 0"),
    (
        "output_bias of another width",
        lambda: MultiHeadAttention.from_heads(list(LAYER.heads), output_bias=torch.zeros(5)),
        ShapeError,
        r"output_bias must be \[12\], got \[5\]",
    ),
    (
        "checkpoint with a broken layout",
        lambda: LAYER.load_state_dict({**LAYER.state_dict(), "_extra_state": torch.zeros(2)}),
        CheckpointError,
        r"7 integers; got Tensor of shape \[2\]",
    ),
    (
        "memory of another batch",
        lambda: LAYER(X, LAYER.remember(SOURCE[:1])),
        ShapeError,
        "query and memory must have the same batch size, got 2 and 1",
    ),
    (
        "positions of another length",
        lambda: MultiHeadAttention(12, 3, positions=Rotary(4))(X, token_positions=torch.arange(3)),
        ShapeError,
        r"a sequence of 5, got \[3\]",
    ),
    (
        "fractional positions",
        lambda: MultiHeadAttention(12, 3, positions=Rotary(4))(X, token_positions=torch.arange(5.0)),
        DtypeError,
        "must be integers, got torch.float32",
    ),
    (
        "sequence beyond the table",
        lambda: MultiHeadAttention(12, 3, positions=Learned(3, 12))(X),
        ShapeError,
        "0 to 2, got position 4; build it with max_length=5",
    ),
    ("no heads at all", lambda: MultiHeadAttention.from_heads([]), ShapeError, "at least one head, got an empty list"),
    (
        "heads of two widths",
        lambda: MultiHeadAttention.from_heads(
            [LAYER.heads[0], dataclasses.replace(LAYER.heads[1], query=torch.randn(12, 5))]
        ),
        ShapeError,
        r"query of head 1 must be \[12, 4\], got \[12, 5\]",
    ),
    (
        "heads that share what they have not",
        lambda: MultiHeadAttention.from_heads(list(LAYER.heads), num_kv_heads=1),
        OptionError,
        "got different ones in heads 0 and 1",
    ),
    ("a head too many", lambda: LAYER.heads[3], IndexError, "heads 0 to 2, got 3"),
    (
        "torch module with a bias token",
        lambda: MultiHeadAttention.from_torch(nn.MultiheadAttention(12, 3, add_bias_kv=True)),
        OptionError,
        "add_bias_kv and add_zero_attn are not supported",
    ),
    (
        "what torch has not",
        lambda: MultiHeadAttention(12, 6, num_kv_heads=2, softcap=3.0).to_torch(),
        OptionError,
        "no counterpart for this head layout, softcap",
    ),
    ("odd rotary", lambda: Rotary(13), ShapeError, "must be even.* got 13"),
    (
        "rotary of heads that are not",
        lambda: Rotary(26)(torch.randn(2, 19, 26)),
        ShapeError,
        r"got shape \[2, 19, 26\]",
    ),
    ("scaling that shrinks", lambda: LinearScaling(0.5), OptionError, "at least 1, got 0.5"),
    ("odd buckets", lambda: T5Bias(3, num_buckets=7), OptionError, "even .* got 7"),
    (
        "checkpoint of other heads",
        lambda: load(MultiHeadAttention(12, 3), MultiHeadAttention(12, 6)),
        CheckpointError,
        "num_heads 3 where the layer has 6",
    ),
    (
        "checkpoint of other heads, not strict",
        lambda: load(MultiHeadAttention(12, 3), MultiHeadAttention(12, 6), strict=False),
        CheckpointError,
        "num_heads 3 where the layer has 6",
    ),
    (
        "checkpoint of other groups",
        lambda: load(MultiHeadAttention(12, 6, num_kv_heads=2), MultiHeadAttention(12, 6)),
        CheckpointError,
        "num_kv_heads 2 where the layer has 6",
    ),
    (
        "checkpoint of another width",
        lambda: load(MultiHeadAttention(12, 3), MultiHeadAttention(24, 3)),
        CheckpointError,
        "embed_dim 12 where the layer has 24",
    ),
]

CACHES: list[Refusal] = [
    (
        "cache of another batch",
        without_gradients(lambda: LAYER(X, cache=cache(batch_size=3))),
        CacheError,
        "has a batch size of 3, got a block of batch 2",
    ),
    (
        "cache of other heads",
        without_gradients(lambda: LAYER(X, cache=cache(num_kv_heads=1))),
        CacheError,
        "has num_kv_heads 1, got num_kv_heads 3",
    ),
    (
        "cache of another head_dim",
        without_gradients(lambda: LAYER(X, cache=cache(head_dim=5))),
        CacheError,
        "has head_dim 5, got head_dim 4",
    ),
    (
        "cache of another value_dim",
        without_gradients(lambda: LAYER(X, cache=cache(value_dim=3))),
        CacheError,
        "has value_dim 3, got value_dim 4",
    ),
    (
        "cache of another dtype",
        without_gradients(lambda: LAYER(X, cache=cache(dtype=torch.float16))),
        CacheError,
        "has dtype torch.float16, got dtype torch.float32",
    ),
    (
        "cache elsewhere",
        without_gradients(lambda: LAYER(X, cache=cache(device="meta"))),
        CacheError,
        "has device meta, got device cpu",
    ),
    (
        "cache too small",
        without_gradients(lambda: LAYER(X, cache=cache(capacity=3))),
        CacheError,
        "capacity of 3 tokens per sequence, got 5: 2 too many",
    ),
    (
        "cache in training",
        lambda: LAYER(X, cache=GrowingCache()),
        CacheError,
        "does not support gradients, .* generate under torch.no_grad",
    ),
    (
        "cache in cross-attention",
        without_gradients(lambda: LAYER(X, SOURCE, cache=GrowingCache())),
        OptionError,
        r"use layer.remember\(key\)",
    ),
    (
        "more real tokens than there are",
        without_gradients(lambda: LAYER(X, cache=GrowingCache(), lengths=[6, 1])),
        CacheError,
        "the block's 5 tokens, got 6 for sequence 0",
    ),
    (
        "lengths of one sequence",
        without_gradients(lambda: LAYER(X, cache=GrowingCache(), lengths=[1])),
        CacheError,
        "got 1 for a batch of 2",
    ),
    ("negative capacity", lambda: cache(capacity=-1), CacheError, "capacity must be at least 0, got -1"),
    (
        "cache of integers",
        lambda: cache(dtype=torch.int8),
        CacheError,
        "floating point, got torch.int8",
    ),
    ("cache without heads", lambda: cache(num_kv_heads=0), CacheError, "num_kv_heads must be at least 1, got 0"),
    ("empty rolling window", lambda: filled(RollingCache, window=0), CacheError, "window must be at least 1, got 0"),
    (
        "empty pages",
        lambda: filled(PagedCache, num_pages=3, page_size=0),
        CacheError,
        "page_size must be at least 1, got 0",
    ),
    (
        "too few pages",
        lambda: filled(PagedCache, num_pages=3, page_size=2),
        CacheError,
        "needs 6 more pages of 2 tokens, got a pool of 3 .* 3 missing",
    ),
    ("quantised overflow", lambda: filled(QuantizedCache, capacity=3), CacheError, "got 5: 2 too many"),
    ("keys of rank 3", lambda: GrowingCache().append(BLOCK[0], BLOCK[0]), CacheError, r"got shape \[3, 5, 4\]"),
    (
        "more keys than values",
        lambda: GrowingCache().append(BLOCK, BLOCK[:, :, :2]),
        CacheError,
        r"got \[2, 3, 5\] and \[2, 3, 2\]",
    ),
    (
        "another batch in a growing cache",
        lambda: filled(GrowingCache).append(BLOCK[:1], BLOCK[:1]),
        CacheError,
        "has a batch size of 2, got a block of batch 1",
    ),
    (
        "another dtype in a rolling cache",
        lambda: filled(RollingCache, window=4).append(BLOCK.double(), BLOCK.double()),
        CacheError,
        "has dtype torch.float32, got dtype torch.float64",
    ),
    ("a beam that is not there", lambda: filled(GrowingCache).reorder([0, 5]), CacheError, "rows 0 to 1, got 5"),
    (
        "fractional beams",
        lambda: filled(GrowingCache).reorder(torch.tensor([0.0, 1.0])),
        CacheError,
        "int32 or int64, got torch.float32",
    ),
    ("reordering nothing", lambda: GrowingCache().reorder([0]), CacheError, "before the first append"),
    ("negative crop", lambda: filled(GrowingCache).crop(-1), CacheError, "crop length must be at least 0, got -1"),
    ("crop of one sequence", lambda: filled(GrowingCache).crop([1]), CacheError, "got 1 for a batch of 2"),
    (
        "crop beyond the window",
        lambda: filled(RollingCache, window=2).crop(3),
        CacheError,
        "can be cropped to .* got 3; build it with rollback at least",
    ),
]

REFUSALS = ATTENTION + MASKS + VALUES + LAYERS + CACHES


@pytest.mark.parametrize(
    ("call", "error", "words"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS]
)
def test_bad_input_is_refused_with_the_rule_and_what_arrived(
    call: Callable[[], object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        call()
    assert isinstance(caught.value, PolyheadError | IndexError)


def broken_behind(mask: Mask, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with NaN in the hidden keys [batch, keys], and without."""
    where = hidden[:, None, :, None]
    key, value = torch.where(where, torch.nan, K), torch.where(where, torch.inf, V)
    return attend(mask, key=key, value=value), attend(mask)


def test_nan_in_padded_keys_changes_nothing() -> None:
    for side in ("left", "right"):
        index = torch.arange(23) if side == "right" else torch.arange(23).flip(0)
        actual, expected = broken_behind(Mask.lengths([17, 3], side=side), index >= torch.tensor([[17], [3]]))
        assert torch.equal(actual, expected)


def test_nan_behind_a_window_changes_nothing() -> None:
    actual, expected = broken_behind(Mask.window(4), (torch.arange(23) < 23 - 19 - 3)[None].expand(2, -1))
    assert torch.equal(actual, expected)


def test_nan_in_padding_never_reaches_a_layers_real_tokens() -> None:
    x = X.clone()
    x[0, 3:] = torch.nan
    mask = Mask.lengths([3, 5])
    actual, expected = LAYER(x, mask=mask).output, LAYER(X, mask=mask).output
    assert torch.equal(actual[0, :3], expected[0, :3])
    assert torch.equal(actual[1], expected[1])
    torch.testing.assert_close(actual[0, 3:], LAYER.out_proj.bias.expand(2, 12))


def test_float16_logits_that_overflow_give_the_right_result() -> None:
    query, key = torch.full((1, 1, 3, 16), 200.0).half(), torch.full((1, 1, 5, 16), 200.0).half()
    key[:, :, 2] = 200.25
    value = torch.randn(1, 1, 5, 7).half()
    for backend in ("sdpa", "blockwise", "reference"):
        output = attend(None, query, key, value, scale=1.0, backend=backend)
        assert torch.equal(output, value[:, :, 2:3].expand(1, 1, 3, 7))


def test_bfloat16_and_float16_bias_of_minus_a_billion_is_no_minus_infinity() -> None:
    bias = Mask.bias(torch.full((19, 23), -1e9))
    for dtype in (torch.float16, torch.bfloat16):
        assert attend(bias, Q.to(dtype), K.to(dtype), V.to(dtype)).abs().amin() > 0


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 19, 23), (2, 0, 23), (2, 19, 0), (0, 0, 0)])
def test_zero_length_sequences_and_empty_batches_work(batch: int, queries: int, keys: int) -> None:
    output = attend(Mask.causal(), Q[:batch, :, :queries], K[:batch, :, :keys], V[:batch, :, :keys])
    assert output.shape == (batch, 6, queries, 11)
    assert (output == 0).all()


@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0), (0, 0)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"positions": Rotary(4)}, {"positions": ALiBi(3)}], ids=str)
def test_layers_take_zero_length_sequences_and_empty_batches(batch: int, length: int, options: dict[str, Any]) -> None:
    layer = MultiHeadAttention(12, 3, **options)
    assert layer(X[:batch, :length]).output.shape == (batch, length, 12)
    assert layer(X[:batch], X[:batch, :length]).output.shape == (batch, 5, 12)


def test_a_fully_masked_row_of_a_layer_is_its_output_bias() -> None:
    layer = MultiHeadAttention(12, 3)
    nn.init.normal_(layer.out_proj.bias)
    output = layer(X, mask=Mask.dense(torch.zeros(1, 5, dtype=torch.bool))).output
    assert torch.equal(output, layer.out_proj.bias.expand(2, 5, 12))


def test_a_length_of_zero_attends_to_nothing() -> None:
    output = attend(Mask.lengths([23, 0]))
    assert (output[0] != 0).all()
    assert (output[1] == 0).all()


def test_a_window_wider_than_the_sequence_hides_nothing_before() -> None:
    x = torch.randn(2, 3, 19, 8)
    assert torch.equal(attend(Mask.window(1000), x, x, x), attend(Mask.causal() & Mask.window(19), x, x, x))


def test_a_failed_load_leaves_the_weights_alone() -> None:
    layer = MultiHeadAttention(12, 6)
    before = {name: x.clone() for name, x in layer.state_dict().items()}
    with pytest.raises(CheckpointError):
        load(MultiHeadAttention(12, 3), layer)
    assert all(torch.equal(x, before[name]) for name, x in layer.state_dict().items())


@torch.no_grad()
def test_a_failed_append_leaves_the_cache_alone() -> None:
    held = filled(PreallocatedCache, capacity=7)
    before = held.view().key.clone()
    with pytest.raises(CacheError, match="3 too many"):
        held.append(BLOCK, BLOCK)
    assert held.lengths == (5, 5)
    assert torch.equal(held.view().key, before)


def test_the_table_is_long_enough() -> None:
    assert len(REFUSALS) >= 60
    assert len({case[0] for case in REFUSALS}) == len(REFUSALS)
