"""A group of one rank: the results without a group; on a GPU with NCCL and PyTorch's own context parallel."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel

from benchmarks.one_rank import one_rank
from polyhead import Mask, attention
from polyhead.parallel import context_attention, context_received
from polyhead.training import HeadMonitor, QKClip

STATISTICS = ("entropy", "max_logit", "mean_distance")


@pytest.fixture
def _group():
    with one_rank(torch.device("cuda")):
        yield


@pytest.mark.parametrize("method", ["all_gather", "ring"])
def test_context_attention_of_one_rank_is_attention_bit_for_bit(method):
    query, key, value = (torch.randn(2, 4, 12, 8, requires_grad=True) for _ in range(3))
    results = []
    with one_rank(torch.device("cpu")):
        for call in (attention, partial(context_attention, method=method)):
            found = call(query, key, value, mask=Mask.causal(), statistics=STATISTICS, logsumexp=True)
            rows = [found.output, found.logsumexp, *(getattr(found.statistics, name) for name in STATISTICS)]
            results.append([*rows, *torch.autograd.grad(found.output.sum(), [query, key, value])])
    for one, other in zip(*results, strict=True):
        if method == "ring" and one.shape == query.shape and one is not results[0][0]:
            close(other, one, 1e-5)  # its backward goes through the log-sum-exp of each part
        else:
            assert torch.equal(other, one)


def close(found, expected, tolerance):
    error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error <= tolerance, float(error)


@pytest.mark.gpu
@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("method", ["all_gather", "ring"])
def test_on_a_gpu_it_takes_what_pytorchs_context_parallel_has_sharded(method):
    """Within PyTorch's context its attention and ours compute the same from the tensors that it sharded."""
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("context",))
    query, key, value = (torch.randn(1, 8, 1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    whole = attention(query, key, value, mask=Mask.causal(), statistics=STATISTICS, logsumexp=True)
    shards = [x.clone() for x in (query, key, value)]
    with torch_context_parallel(mesh, buffers=shards, buffer_seq_dims=[2, 2, 2]):
        theirs = torch.nn.functional.scaled_dot_product_attention(*shards, is_causal=True)
        ours = context_attention(
            *shards, mesh=mesh, method=method, mask=Mask.causal(), statistics=STATISTICS, logsumexp=True
        )
    close(ours.output, theirs, 2e-2)
    close(ours.output, whole.output, 2e-2)
    for name in STATISTICS:
        close(getattr(ours.statistics, name), getattr(whole.statistics, name), 1e-4)
    received = context_received(query, key, ours.logsumexp, mesh=mesh, mask=Mask.causal())
    close(received.sum(-1), torch.full((1, 8), 1024.0, device="cuda"), 1e-3)


@pytest.mark.gpu
@pytest.mark.usefixtures("_group")
def test_on_a_gpu_a_sharded_model_is_monitored_and_clipped_as_the_whole_one():
    config = transformers.LlamaConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=100
    )
    alone = transformers.LlamaForCausalLM(config).cuda()
    sharded = deepcopy(alone)
    mesh = init_device_mesh("cuda", (1,))
    policy = MixedPrecisionPolicy()
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(sharded, mesh=mesh, mp_policy=policy)
    ids = torch.randint(100, (3, 2, 64), device="cuda")
    histories = []
    for model in (alone, sharded):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with HeadMonitor(model) as monitor, QKClip(model, optimizer, threshold=0.05):
            for tokens in ids:
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                monitor.step(loss)
        histories.append(monitor.history)
    one, other = histories
    assert one.columns == other.columns
    for name in one.columns:
        found, expected = (torch.as_tensor(history[name]) for history in (other, one))
        torch.testing.assert_close(
            found, expected, rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )
    for (name, parameter), shard in zip(alone.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(shard.full_tensor(), parameter, rtol=1e-4, atol=1e-6, msg=name)
