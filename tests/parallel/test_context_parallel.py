"""Attention over a sequence that is spread over ranks is that of one process: rows, statistics and all gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import examples.context_parallel as example
import polyhead
from polyhead import AttentionOutput, Mask, Statistics
from polyhead.errors import CommunicationError, DtypeError, GradientError, OptionError, ShapeError
from polyhead.layers.positions import ALiBi, DynamicNTKScaling, Rotary
from polyhead.layers.transformer import LanguageModel
from polyhead.layers.variants import TalkingHeads
from polyhead.ops.common.visibility import Visibility
from polyhead.parallel import (
    context_attention,
    context_bytes,
    context_parallel,
    context_received,
    gather_sequence,
    shard_positions,
    shard_sequence,
)
from polyhead.parallel.context.layout import chunk_spans
from polyhead.parallel.context.parts import ContextCall
from polyhead.parallel.context.ring import parts
from polyhead.parallel.groups import RankGroup
from tests.error_budget import assert_within_error_budget, plain_formula
from tests.ranks import Failure, Ranks

BATCH, HEADS, KV_HEADS, TOKENS, HEAD_DIM, VALUE_DIM = 2, 4, 2, 24, 5, 3
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 12 + [-1] * 3, [0] * 2 + [5] * 22])
MASKS: dict[str, Callable[[], Mask | None]] = {
    "none": lambda: None,
    "causal": Mask.causal,
    "window with sinks": lambda: Mask.window(7, sinks=2),
    "two-sided window": lambda: Mask.window(left=3, right=4),
    "documents": lambda: Mask.causal() & Mask.documents(DOCUMENTS),
    "padding": lambda: Mask.causal() & Mask.lengths([13, 24]),
    "padding on the left": lambda: Mask.causal() & Mask.lengths([13, 24], side="left"),
    "positions": lambda: Mask.causal() & Mask.positions(torch.arange(24) * 2, (torch.arange(24) * 5) % 24 * 2),
    "dense": lambda: Mask.dense(torch.rand(2, 4, 24, 24, generator=torch.Generator().manual_seed(7)) < 0.4),
    "relative bias": lambda: Mask.causal() & Mask.relative(torch.linspace(-2, 1, 60).double().view(4, 15), 13),
}
# Every mask with every method and with every layout; other options are spread over them.
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("none", "ring", "zigzag", {"sinks": True}),
    ("none", "all_gather", "contiguous", {"softcap": 1.5}),
    ("causal", "ring", "zigzag", {"softcap": 2.0}),
    ("causal", "all_gather", "zigzag", {"sinks": True}),
    ("causal", "ring", "contiguous", {"scale": 3.0}),
    ("causal", "ring", "zigzag", {"ties": True}),
    ("window with sinks", "ring", "zigzag", {"statistics": Statistics(sink_keys=5, window=2)}),
    ("window with sinks", "all_gather", "contiguous", {"statistics": Statistics(sink_keys=9, window=3)}),
    ("two-sided window", "ring", "contiguous", {}),
    ("two-sided window", "all_gather", "zigzag", {"scale": 2.0}),
    ("documents", "ring", "zigzag", {"statistics": Statistics(sink_keys=3), "sinks": True}),
    ("documents", "all_gather", "contiguous", {}),
    ("padding", "ring", "contiguous", {"sinks": True}),
    ("padding", "all_gather", "zigzag", {}),
    ("padding on the left", "ring", "zigzag", {}),
    ("padding on the left", "all_gather", "contiguous", {"sinks": True}),
    ("positions", "ring", "contiguous", {}),
    ("positions", "all_gather", "zigzag", {}),
    ("dense", "ring", "zigzag", {}),
    ("dense", "all_gather", "contiguous", {}),
    ("relative bias", "ring", "zigzag", {}),
    ("relative bias", "all_gather", "contiguous", {}),
]


def heads(dtype: torch.dtype = torch.float64, seed: int = 3, queries: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (HEADS, queries, HEAD_DIM), (KV_HEADS, TOKENS, HEAD_DIM), (KV_HEADS, TOKENS, VALUE_DIM)
    query, key, value = (torch.randn(BATCH, *shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def named(result: AttentionOutput) -> dict[str, Tensor]:
    statistics = {} if result.statistics is None else dict(result.statistics.items())
    assert result.logsumexp is not None
    return {"output": result.output, "logsumexp": result.logsumexp, **statistics}


def weighted_sum(results: dict[str, Tensor], of_shard: Callable[[Tensor], Tensor]) -> Tensor:
    """Sum all results, each with random factors of its own; `of_shard` selects those of the rank's queries."""
    total = torch.zeros((), dtype=torch.float64)
    for seed, name in enumerate(sorted(results)):
        x, generator = results[name], torch.Generator().manual_seed(seed)
        if name != "visible_keys":
            factors = of_shard(torch.randn(*x.shape[:2], TOKENS, *x.shape[3:], generator=generator).double())
            total = total + (torch.where(x == -torch.inf, 0.0, x) * factors.to(x.dtype)).sum()
    return total


def assert_close(actual: Tensor, expected: Tensor, name: str, tolerance: float = 1e-11) -> None:
    assert actual.shape == expected.shape, name
    actual, expected = actual.detach(), expected.detach()
    infinite = expected == -torch.inf
    assert torch.equal(actual == -torch.inf, infinite), name
    expected = torch.where(infinite, 0.0, expected)
    error = float(torch.where(infinite, 0.0, actual - expected).abs().max())
    assert error <= tolerance * max(1.0, float(expected.abs().max())), f"{name}: error {error:.2e}"


# ---- functions of ranks


def compare_with_one_process(
    cases: list[tuple[str, str, str, dict[str, Any]]], dtype: torch.dtype = torch.float64, backend: str = "auto"
) -> list[str]:
    """Hold every result and gradient of the ranks against the formula; return the backends."""
    tolerance = 1e-11 if dtype is torch.float64 else 2e-5
    backends = []
    for mask_name, method, layout, case in cases:
        options = dict(case)
        mask, title = MASKS[mask_name](), f"{mask_name}, {method}, {layout}, {case}"
        query, key, value = (x.double() for x in heads(dtype))
        if options.pop("ties", False):
            key = key[:, :, :1].expand_as(key).contiguous()
        sinks = torch.tensor([0.3, -1.0, 2.0, -math.inf]).double() if options.pop("sinks", False) else None
        options = {"statistics": True, "mask": mask, **options}
        inputs = [x.clone().requires_grad_() for x in (query, key, value, *([] if sinks is None else [sinks]))]
        learned = {} if sinks is None else {"sinks": inputs[3]}
        exact = named(polyhead.attention(*inputs[:3], backend="reference", logsumexp=True, **learned, **options))
        exact_grads = torch.autograd.grad(weighted_sum(exact, lambda x: x), inputs)

        def shard(x: Tensor, layout: Any = layout) -> Tensor:
            return shard_sequence(x, dim=2, layout=layout)

        local = [shard(x).to(dtype).requires_grad_() for x in (query, key, value)]
        local += [] if sinks is None else [sinks.to(dtype).requires_grad_()]
        options |= {"layout": layout, "method": method, "backend": backend, "logsumexp": True}
        result = context_attention(*local[:3], **({} if sinks is None else {"sinks": local[3]}), **options)
        backends.append(result.backend)
        actual = named(result)
        assert list(actual) == list(exact), title
        for name, x in actual.items():
            assert_close(x, shard(exact[name]), f"{title}: {name}", tolerance)
        grads = list(torch.autograd.grad(weighted_sum(actual, shard), local))
        for name, grad, expected in zip(("query", "key", "value"), grads, exact_grads, strict=False):
            assert_close(grad, shard(expected), f"{title}: gradient of {name}", tolerance)
        if sinks is not None:
            dist.all_reduce(grads[3])
            assert_close(grads[3], exact_grads[3], f"{title}: gradient of sinks", tolerance)
    return backends


def rounded_results(dtype: torch.dtype, method: str) -> dict[str, Tensor]:
    """Return output, gradients of keys and queries, and entropy of the whole sequence."""
    local = [shard_sequence(x, dim=2).requires_grad_() for x in heads(dtype)]
    result = context_attention(*local, mask=Mask.causal(), method=method, statistics="entropy")  # type: ignore[arg-type]
    factors = torch.randn(BATCH, HEADS, TOKENS, VALUE_DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    grads = torch.autograd.grad((result.output * shard_sequence(factors, dim=2)).sum(), local)
    tensors = {"output": result.output.detach(), "query": grads[0], "key": grads[1], "value": grads[2]}
    assert result.statistics is not None
    assert result.statistics.entropy is not None
    tensors["entropy"] = result.statistics.entropy.detach()
    return {name: gather_sequence(x, dim=2) for name, x in tensors.items()}


def large_logits(size: float) -> tuple[float, float]:
    """Return the errors of entropy and output in float32 at logits of this size, which float32 holds exactly."""
    query, key, value = heads(torch.float32)
    query, key = (query * 4).round() / 4, (key * 4).round() / 4
    shift = torch.full_like(key[..., :1], size)  # a channel that adds the same large number to every logit
    query, key = torch.cat([query, torch.ones_like(query[..., :1])], -1), torch.cat([key, shift], -1)
    options: dict[str, Any] = {"mask": Mask.causal(), "statistics": "entropy", "scale": 1.0}
    exact = polyhead.attention(query.double(), key.double(), value.double(), backend="reference", **options)
    result = context_attention(*(shard_sequence(x, dim=2) for x in (query, key, value)), method="ring", **options)
    assert exact.statistics is not None
    assert result.statistics is not None
    pairs = (exact.statistics.entropy, result.statistics.entropy), (exact.output, result.output)
    errors = [float((shard_sequence(a, dim=2) - b).abs().max()) for a, b in pairs]  # type: ignore[arg-type,operator]
    return errors[0], errors[1]


def spread_nan(method: str) -> None:
    """Hold keys that are NaN away from rows that do not see them, and from all gradients of those rows."""
    query, key, value = heads()
    key[0, :, 20:] = torch.nan  # padding of the first sequence
    value[0, :, 20:] = torch.inf
    key[1, 0, 9] = torch.nan  # a key that rows 9 and later of two heads see
    mask = Mask.causal() & Mask.lengths([20, 24])
    local = [shard_sequence(x, dim=2).requires_grad_() for x in (query, key, value)]
    result = context_attention(*local, mask=mask, method=method, statistics=True)  # type: ignore[arg-type]
    sees_nan = torch.zeros(BATCH, HEADS, TOKENS, dtype=torch.bool)
    sees_nan[1, :2, 9:] = True
    sees_nan = shard_sequence(sees_nan, dim=2)
    for name, x in named(result).items():
        rows = x.detach().isnan().any(-1) if x.ndim == 4 else x.isnan()
        assert torch.equal(rows, sees_nan & (name != "visible_keys")), name
    padding = shard_sequence(torch.arange(TOKENS), dim=0) >= 20
    assert result.output[0][:, padding].eq(0).all()
    kept = torch.where(sees_nan[..., None], 0.0, result.output)
    assert result.statistics is not None
    assert result.statistics.entropy is not None
    entropy = torch.where(sees_nan, 0.0, result.statistics.entropy)
    grads = torch.autograd.grad(kept[0].sum() + entropy[0].sum(), local)
    for name, grad in zip(("query", "key", "value"), grads, strict=True):
        assert grad[0].isfinite().all(), name
    assert all(grad[0][:, padding].eq(0).all() for grad in grads)


def cross_attention_of_a_longer_sequence(method: str) -> None:
    query, key, value = heads(queries=8)
    options: dict[str, Any] = {"mask": Mask.causal(), "statistics": True}
    exact = polyhead.attention(query, key, value, backend="reference", logsumexp=True, **options)
    local = [shard_sequence(x, dim=2) for x in (query, key, value)]
    result = context_attention(*local, method=method, logsumexp=True, **options)  # type: ignore[arg-type]
    for name, x in named(result).items():
        assert_close(x, shard_sequence(named(exact)[name], dim=2), name)


def received_is_that_of_one_process(mask_name: str, layout: Any) -> None:
    query, key, value = heads()
    mask = MASKS[mask_name]()
    logsumexp = polyhead.attention(query, key, value, mask=mask, logsumexp=True, backend="reference").logsumexp
    assert logsumexp is not None
    exact = polyhead.profile(query, key, logsumexp, mask=mask, received=True).received
    assert exact is not None
    q, k, lse = (shard_sequence(x, dim=2, layout=layout) for x in (query, key, logsumexp))
    received = context_received(q.requires_grad_(), k, lse, mask=mask, layout=layout)
    assert not received.requires_grad
    assert_close(received, shard_sequence(exact, dim=2, layout=layout), f"received, {mask_name}, {layout}")


def second_derivatives() -> str:
    local = [shard_sequence(x, dim=2).requires_grad_() for x in heads()]

    def twice(method: Any) -> Tensor:
        output = context_attention(*local, mask=Mask.causal(), method=method, backend="blockwise").output
        (grad,) = torch.autograd.grad(output.square().sum(), local[1], create_graph=True)
        return torch.autograd.grad(grad.square().sum(), local[1])[0]

    whole = [x.requires_grad_() for x in heads()]
    output = polyhead.attention(*whole, mask=Mask.causal(), backend="reference").output
    (grad,) = torch.autograd.grad(output.square().sum(), whole[1], create_graph=True)
    expected = torch.autograd.grad(grad.square().sum(), whole[1])[0]
    assert_close(twice("all_gather"), shard_sequence(expected, dim=2), "second derivative")
    with pytest.raises(GradientError, match="the ring has no second derivative, got create_graph=True"):
        twice("ring")
    return "done"


def gradients_of_bias_and_scale() -> None:
    table, scale = torch.linspace(-2, 1, 60).double().view(4, 15), torch.tensor([0.3, 0.5, 0.7, 1.1]).double()
    both = [x.clone().requires_grad_() for x in (table, scale)]
    mask = Mask.causal() & Mask.relative(both[0], 13)
    exact = polyhead.attention(*heads(), mask=mask, scale=both[1], backend="reference").output
    expected = torch.autograd.grad(exact.square().sum(), both)
    local = [shard_sequence(x, dim=2) for x in heads()]
    result = context_attention(*local, mask=mask, scale=both[1])
    assert result.backend.startswith("all_gather/")
    for grad, wanted in zip(torch.autograd.grad(result.output.square().sum(), both), expected, strict=True):
        dist.all_reduce(grad)
        assert_close(grad, wanted, "gradient of a replicated parameter")
    with pytest.raises(OptionError, match="got one that requires a gradient; use method='all_gather'"):
        context_attention(*local, mask=mask, method="ring")


def losses_that_differ_between_ranks(method: str) -> None:
    """Use the entropy alone on rank 0 and the output alone on the others; empty batches; a mask that is changed."""
    local = [shard_sequence(x, dim=2).requires_grad_() for x in heads()]
    documents = DOCUMENTS.clone()
    options: dict[str, Any] = {"mask": Mask.documents(documents), "statistics": "entropy", "method": method}

    def loss(result: AttentionOutput, by_entropy: Tensor) -> Tensor:
        assert result.statistics is not None
        entropy = result.statistics.entropy
        assert entropy is not None
        rows = torch.where(by_entropy, entropy, result.output.sum(-1))
        return rows.sum()

    result = context_attention(*local, **options)
    assert result.statistics is not None
    is_first = dist.get_rank() == 0
    chosen = result.statistics.entropy if is_first else result.output
    assert chosen is not None
    grads = torch.autograd.grad(chosen.sum(), local, allow_unused=True)
    whole = [x.requires_grad_() for x in heads()]
    exact = polyhead.attention(*whole, mask=options["mask"], statistics="entropy", backend="reference")
    first = torch.zeros(TOKENS, dtype=torch.bool)
    for start, stop in chunk_spans(TOKENS // dist.get_world_size(), 0, dist.get_world_size(), "zigzag"):
        first[start:stop] = True
    expected = torch.autograd.grad(loss(exact, first), whole)
    for grad, wanted in zip(grads, expected, strict=True):
        assert_close(grad, shard_sequence(wanted, dim=2), method)
    empty = context_attention(*(x[:0] for x in local), **options | {"mask": Mask.causal()})
    assert empty.output.shape == (0, HEADS, TOKENS // dist.get_world_size(), VALUE_DIM)
    result = context_attention(*local, **options)
    documents[0, 0] = 5
    with pytest.raises(RuntimeError, match="modified"):
        result.output.sum().backward()


def a_model_over_ranks() -> None:
    """Hold loss and gradients of a small decoder over ranks against one process."""
    torch.manual_seed(0)
    model = LanguageModel(31, 16, 4, 2, num_kv_heads=2, positions=Rotary(4)).double()
    tokens = torch.randint(31, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(2))
    mask = Mask.documents(DOCUMENTS)
    padding = DOCUMENTS < 0
    labels = torch.where(padding, -100, tokens[:, 1:])

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    expected_loss = loss_of(model(tokens[:, :-1], mask), labels)
    expected = torch.autograd.grad(expected_loss, list(model.parameters()))
    for method in ("ring", "all_gather"):
        with context_parallel(model, method=method):  # type: ignore[arg-type]
            shard, local_labels = (shard_sequence(x, dim=1) for x in (tokens[:, :-1], labels))
            positions = shard_positions(shard.shape[1])
            loss = loss_of(model(shard, mask, token_positions=positions), local_labels)
            grads = torch.autograd.grad(loss, list(model.parameters()))
            with pytest.raises(OptionError, match="got no token_positions; pass token_positions="):
                model(shard, mask)
            with pytest.raises(OptionError, match="cannot be nested"), context_parallel(model):
                pass
            with (
                pytest.raises(OptionError, match="got an observed layer within context_parallel"),
                polyhead.observe(model),
            ):
                model(shard, mask, token_positions=positions)
        loss = loss.detach()
        for x in (loss, *grads):
            dist.all_reduce(x)
        assert_close(loss, expected_loss, method)
        for grad, wanted in zip(grads, expected, strict=True):
            assert_close(grad, wanted, method)
    assert torch.equal(loss_of(model(tokens[:, :-1], mask), labels), expected_loss)


def refused_layers() -> None:
    for layer, words in (
        (torch.nn.Linear(2, 2), "a module with MultiHeadAttention layers, got Linear"),
        (polyhead.MultiHeadAttention(16, 4, positions=ALiBi(4)), "got ALiBi in the module itself"),
        (polyhead.MultiHeadAttention(16, 4, num_kv_heads=2, key_heads=(0, 0, 0, 1)), "got uneven groups"),
        (polyhead.MultiHeadAttention(16, 4, positions=Rotary(4, scaling=DynamicNTKScaling(2.0, 8))), "Dynamic"),
        (TalkingHeads(16, 4), "got the module itself .TalkingHeads."),
    ):
        with pytest.raises(OptionError, match=words), context_parallel(layer):
            pass
    layer = polyhead.MultiHeadAttention(16, 4, dropout=0.5)
    x, positions = torch.randn(2, 4, 16), shard_positions(4)
    with context_parallel(layer):
        with pytest.raises(OptionError, match="no attention dropout and returns no weights"):
            layer(x, token_positions=positions)
        with pytest.raises(OptionError, match="no attention dropout and returns no weights"):
            layer.eval()(x, token_positions=positions, weights=True)
        with pytest.raises(OptionError, match="got a key or a cache"):
            layer(x, x, token_positions=positions)


def in_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    replica = mesh.get_local_rank("data")
    query, key, value = heads(seed=10 + replica)  # other sequences in each replica
    exact = polyhead.attention(query, key, value, mask=Mask.causal(), backend="reference", logsumexp=True)
    for where in (
        {"mesh": mesh, "dimension": "context"},
        {"mesh": mesh["context"]},
        {"mesh": mesh.get_group("context")},
    ):
        local = [shard_sequence(x, dim=2, **where) for x in (query, key, value)]
        for method in ("ring", "all_gather"):
            result = context_attention(*local, mask=Mask.causal(), method=method, **where)  # type: ignore[arg-type]
            assert_close(result.output, shard_sequence(exact.output, dim=2, **where), method)
    with pytest.raises(OptionError, match=r"one of the mesh's, \('data', 'context'\), got 'sequence'"):
        context_attention(*local, mesh=mesh, dimension="sequence")
    with pytest.raises(OptionError, match="needs dimension=, the name of one of them, got 2 dimensions"):
        context_attention(*local, mesh=mesh)
    from torch.distributed.tensor import DTensor, Shard  # a second of imports

    whole = DTensor.from_local(local[0], mesh["context"], [Shard(2)])
    with pytest.raises(OptionError, match="got a DTensor"):
        context_attention(whole, *local[1:], **where)
    with pytest.raises(DtypeError, match="must be tensors, got list, Tensor and Tensor"):
        context_attention(local[0].tolist(), *local[1:], **where)
    with pytest.raises(OptionError, match="got 'context' without a mesh"):
        context_attention(*local, dimension="context")
    with pytest.raises(OptionError, match="a ProcessGroup or None, got str"):
        context_attention(*local, mesh="context")  # type: ignore[arg-type]
    lonely = dist.new_group([0])
    if dist.get_rank():
        with pytest.raises(OptionError, match=f"got rank {dist.get_rank()} outside of it"):
            context_attention(*local, mesh=lonely)
    else:
        one = context_attention(query, key, value, mesh=lonely, layout="contiguous", mask=Mask.causal(), method="ring")
        assert_close(one.output, exact.output, "a group of one rank")


def count_bytes(dtype: torch.dtype, method: str) -> tuple[int, int, int]:
    """Return the bytes that this rank hands to torch.distributed in the check, the forward and the backward."""
    sent = [0]
    originals = {name: getattr(dist, name) for name in ("batch_isend_irecv", "all_gather", "all_to_all_single")}
    ranks = dist.get_world_size()

    def point_to_point(operations: list[Any]) -> Any:
        sent[0] += sum(x.tensor.nbytes for x in operations if x.op is dist.isend)
        return originals["batch_isend_irecv"](operations)

    def all_gather(shards: list[Tensor], shard: Tensor, group: Any) -> Any:
        sent[0] += shard.nbytes * (ranks - 1)
        return originals["all_gather"](shards, shard, group)

    def all_to_all(received: Tensor, shards: Tensor, group: Any) -> Any:
        sent[0] += shards.nbytes // ranks * (ranks - 1)
        return originals["all_to_all_single"](received, shards, group=group)

    local = [shard_sequence(x, dim=2).requires_grad_() for x in heads(dtype)]
    dist.batch_isend_irecv, dist.all_gather, dist.all_to_all_single = point_to_point, all_gather, all_to_all
    try:
        totals = []
        for check in (False, True):
            sent[0] = 0
            options: dict[str, Any] = {"method": method, "check": check, "statistics": True}
            result = context_attention(*local, mask=Mask.causal(), **options)
            totals.append(sent[0])
        sent[0] = 0
        result.output.sum().backward()
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)
    return totals[1] - totals[0], totals[0], sent[0]


def disagree(what: str) -> None:
    """Make rank 1 pass something else than the others."""
    is_other = dist.get_rank() == 1
    query, key, value = (shard_sequence(x, dim=2) for x in heads())
    options: dict[str, Any] = {"mask": Mask.causal() & Mask.documents(DOCUMENTS)}
    if what == "shape":
        options = {}
        key, value = (key[:, :, 2:], value[:, :, 2:]) if is_other else (key, value)
    elif is_other and what == "dtype":
        query, key, value = query.float(), key.float(), value.float()
    elif is_other and what == "option":
        options["softcap"] = 30.0
    elif is_other and what == "values":
        other = DOCUMENTS.clone()
        other[0, 8:10] = torch.tensor([1, 0])  # the same ids, two of them exchanged
        options["mask"] = Mask.causal() & Mask.documents(other)
    elif is_other and what == "mask of the shard":
        options["mask"] = Mask.causal() & Mask.documents(shard_sequence(DOCUMENTS, dim=1))
    elif is_other and what == "gradient":
        query.requires_grad_()
    elif what == "sinks":
        options = {"sinks": torch.zeros(HEADS, dtype=torch.float64).requires_grad_(is_other)}
    elif is_other and what == "layout":
        options["layout"] = "contiguous"
    context_attention(query, key, value, method="ring", **options)


def leave_one_out(check: bool) -> float:
    """Let rank 1 not make the call; return the seconds after which the others raise."""
    local = [shard_sequence(x, dim=2) for x in heads()]
    start = time.monotonic()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["raised"], timedelta(seconds=30))
    else:
        with pytest.raises(CommunicationError) as caught:
            context_attention(*local, method="ring", check=check)
        words = str(caught.value)
        assert words.startswith("every rank of the group must make the same calls")
        assert f"rank {dist.get_rank()} of 2 got no answer from rank 1" in words
        store.set("raised", "")
    return time.monotonic() - start


def shards_of_a_sequence() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.arange(3 * 24 * 2).view(3, 24, 2).double().requires_grad_()
    for layout in ("zigzag", "contiguous"):
        shard = shard_sequence(x, dim=1, layout=layout)  # type: ignore[arg-type]
        positions = shard_positions(24 // ranks, layout=layout)  # type: ignore[arg-type]
        assert torch.equal(shard, x[:, positions])
        whole = gather_sequence(shard, dim=-2, layout=layout)  # type: ignore[arg-type]
        assert torch.equal(whole, x)
        (grad,) = torch.autograd.grad((whole * (rank + 1)).sum(), shard)
        assert torch.equal(grad, torch.full_like(shard, ranks * (ranks + 1) / 2))
    with pytest.raises(ShapeError, match=r"needs a multiple of 8 tokens, got 21; pad the sequence to 24"):
        shard_sequence(x[:, :21], dim=1)
    with pytest.raises(ShapeError, match="an even number of tokens, got 3"):
        gather_sequence(x[:, :3], dim=1)
    with pytest.raises(OptionError, match="'zigzag' or 'contiguous', got 'striped'"):
        shard_sequence(x, dim=1, layout="striped")  # type: ignore[arg-type]


# ---- tests


@pytest.mark.parametrize("world", [2, 4])
def test_rows_statistics_and_gradients_are_those_of_one_process(ranks: Ranks, world: int) -> None:
    cases = CASES[10:] if world == 2 else CASES[:14]
    for backends in ranks.run(compare_with_one_process, cases, world=world):
        assert backends == [f"{method}/blockwise" for _, method, _, _ in cases]


@pytest.mark.parametrize("method", ["ring", "all_gather"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rounding_errors_are_within_the_budget(ranks: Ranks, dtype: torch.dtype, method: str) -> None:
    actual = ranks.run(rounded_results, dtype, method, world=4)[2]
    visible = torch.ones(TOKENS, TOKENS).tril().bool().expand(BATCH, HEADS, -1, -1)
    factors = torch.randn(BATCH, HEADS, TOKENS, VALUE_DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    results = []
    for kind in (torch.float64, dtype):
        inputs = [x.to(kind).requires_grad_() for x in heads(dtype)]
        formula = plain_formula(*inputs, visible=visible)
        grads = torch.autograd.grad((formula.output * factors.to(kind)).sum(), inputs)
        weights = formula.weights.detach()
        entropy = -(weights * torch.where(visible, weights, 1.0).log()).sum(-1)
        results.append(dict(zip(("output", "query", "key", "value"), (formula.output.detach(), *grads), strict=True)))
        results[-1]["entropy"] = entropy
    exact, plain = results
    for name in ("output", "query", "key", "value"):
        assert actual[name].dtype is dtype
        assert_within_error_budget(actual[name], exact=exact[name], plain=plain[name], name=name)
    assert float((actual["entropy"] - exact["entropy"]).abs().max()) < 1e-5


def test_merging_loses_no_digits_at_large_logits(ranks: Ranks) -> None:
    # A log-sum-exp of this size is rounded to 5e-4 in float32, and shares that are computed from it are as inexact.
    for entropy, output in ranks.run(large_logits, 8192.0, world=4):
        assert entropy < 3e-6
        assert output < 3e-6


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_nan_reaches_the_rows_that_see_it_alone(ranks: Ranks, method: str) -> None:
    ranks.run(spread_nan, method, world=4)


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_fewer_queries_than_keys_are_aligned_at_the_end(ranks: Ranks, method: str) -> None:
    ranks.run(cross_attention_of_a_longer_sequence, method, world=4)


@pytest.mark.parametrize(("mask", "layout"), [("causal", "zigzag"), ("documents", "contiguous"), ("none", "zigzag")])
def test_received_attention_is_that_of_one_process(ranks: Ranks, mask: str, layout: str) -> None:
    ranks.run(received_is_that_of_one_process, mask, layout, world=4)


def test_an_all_gather_has_second_derivatives_and_a_ring_refuses_them(ranks: Ranks) -> None:
    assert ranks.run(second_derivatives, world=2) == ["done"] * 2


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_ranks_may_differ_in_what_their_loss_uses(ranks: Ranks, method: str) -> None:
    ranks.run(losses_that_differ_between_ranks, method, world=2)


def test_learned_biases_and_scales_get_the_gradient_of_each_ranks_queries(ranks: Ranks) -> None:
    ranks.run(gradients_of_bias_and_scale, world=2)


def test_a_model_over_ranks_has_the_loss_and_the_gradients_of_one_process(ranks: Ranks) -> None:
    ranks.run(a_model_over_ranks, world=2)


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_the_example_computes_what_one_process_does(ranks: Ranks, method: str) -> None:
    first, second = ranks.run(example.main, 48, method, world=2)
    assert first == second
    assert all(first[name] < 1e-5 for name in ("loss", "gradient", "entropy", "mean_distance"))
    shard = 2 * 24 * 16 * 2 * 4  # KV heads, tokens, head_dim, keys and values, bytes
    assert first["bytes"] == shard * (3 if method == "ring" else 2)


def test_layers_whose_attention_cannot_be_split_are_refused(ranks: Ranks) -> None:
    ranks.run(refused_layers, world=2)


def test_ranks_are_a_dimension_of_a_mesh_a_group_or_all(ranks: Ranks) -> None:
    ranks.run(in_a_mesh, world=4)


@pytest.mark.parametrize("method", ["ring", "all_gather"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_predicted_bytes_are_sent(ranks: Ranks, dtype: torch.dtype, method: Any) -> None:
    sizes = {"batch": BATCH, "kv_heads": KV_HEADS, "tokens": TOKENS, "head_dim": HEAD_DIM, "value_dim": VALUE_DIM}
    predicted = context_bytes(**sizes, ranks=4, dtype=dtype, method=method)
    for counted in ranks.run(count_bytes, dtype, method, world=4):
        assert counted == (predicted.check, predicted.forward, predicted.backward)


def test_auto_takes_the_ring_where_gathered_keys_would_be_large() -> None:
    sizes: dict[str, Any] = {"batch": 1, "kv_heads": 8, "head_dim": 128, "ranks": 4}
    assert context_bytes(tokens=1 << 16, **sizes).method == "all_gather"
    assert context_bytes(tokens=1 << 17, **sizes).method == "ring"
    with pytest.raises(OptionError, match="got 10 tokens for 4 ranks"):
        context_bytes(tokens=10, **sizes)
    with pytest.raises(OptionError, match="tokens must be at least 1, got 0"):
        context_bytes(tokens=0, **sizes)
    with pytest.raises(OptionError, match="value_dim must be at least 1, got -64"):
        context_bytes(tokens=1 << 16, value_dim=-64, **sizes)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shape", "every rank must pass the same shape of the key, got [2, 2, 4, 5] on rank 1 and [2, 2, 6, 5] on"),
        ("dtype", "every rank must pass the same dtype, got torch.float32 on rank 1 and torch.float64 on rank 0 of 4"),
        ("option", "every rank must pass the same softcap, got 30.0 on rank 1 and None on rank 0 of 4"),
        ("values", "every rank must pass the same mask, scale and sinks, got other values on rank 1 than on rank 0"),
        ("layout", "every rank must pass the same layout, got contiguous on rank 1 and zigzag on rank 0 of 4"),
        ("gradient", "every rank must pass the same inputs with a gradient, got query on rank 1 and none on rank 0"),
        ("sinks", "every rank must pass the same inputs with a gradient, got sinks on rank 1 and none on rank 0"),
    ],
)
def test_ranks_that_disagree_raise_the_same_error_on_every_rank(ranks: Ranks, what: str, words: str) -> None:
    failures = ranks.outcomes(disagree, what, world=4, collective_seconds=5)
    for failure in failures:
        assert isinstance(failure, Failure)
        assert failure.error == "OptionError"
        assert failure.message.startswith(words)


def test_arguments_that_one_rank_refuses_are_an_error_on_every_rank(ranks: Ranks) -> None:
    first, second = ranks.outcomes(disagree, "mask of the shard", world=2, collective_seconds=5)
    assert second.error == "MaskError"
    assert second.message == "document ids of the queries must be [2 or 1, 24], got [2, 12]"
    assert first.error == "OptionError"
    assert (
        first.message
        == f"every rank must pass valid arguments; rank 1 of 2 refused its own: MaskError: {second.message}"
    )


@pytest.mark.parametrize("check", [True, False])
def test_a_rank_that_makes_no_call_is_named_after_the_time_out(ranks: Ranks, check: bool) -> None:
    first, _ = ranks.outcomes(leave_one_out, check, world=2, collective_seconds=1)
    assert not isinstance(first, Failure), first
    assert 0.9 < first < 1.9


def test_a_process_without_ranks_is_refused() -> None:
    with pytest.raises(OptionError, match="got a process in which it is not initialised"):
        context_attention(*heads())


def test_sequences_are_sharded_and_gathered_in_their_order(ranks: Ranks) -> None:
    ranks.run(shards_of_a_sequence, world=4)


@pytest.mark.parametrize("ranks_", [1, 2, 3, 8])
def test_a_zigzag_layout_is_the_order_of_pytorchs_load_balancer(ranks_: int) -> None:
    balancer = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._load_balancer")
    tokens = 4 * ranks_
    order = balancer._HeadTailLoadBalancer(tokens * ranks_, ranks_, "cpu")._generate_indices()[0].tolist()
    spans = [span for rank in range(ranks_) for span in chunk_spans(tokens, rank, ranks_, "zigzag")]
    assert order == [i for start, stop in spans for i in range(start, stop)]


@pytest.mark.parametrize(("layout", "balanced"), [("zigzag", True), ("contiguous", False)])
def test_a_zigzag_layout_balances_a_causal_mask_in_every_step(layout: Any, balanced: bool) -> None:
    size, tokens = 4, 6
    visibility = Visibility(size * tokens, size * tokens, torch.device("cpu"), right=0)
    by_step = []
    for step in range(1, size):
        pairs = []
        for rank in range(size):
            group = RankGroup(None, rank, size)  # type: ignore[arg-type]
            call = ContextCall(group, layout, tokens, tokens, visibility, 1.0, None, False, "auto")
            chosen = parts(call, (rank - step) % size)
            pairs.append(sum((rows[1] - rows[0]) * (keys[1] - keys[0]) for _, rows, _, keys in chosen))
        by_step.append(pairs)
    if balanced:
        assert by_step == [[tokens * tokens // 2] * size] * (size - 1)
    else:
        assert by_step[0] == [0, 36, 36, 36]
        assert by_step[2] == [0, 0, 0, 36]
