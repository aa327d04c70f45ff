"""Plans over ranks: bytes of collectives by their formulas, what a rank stores, and refused input.

tests/parallel/test_counted_collectives.py holds the same plans against runs over four processes.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import polyhead
from polyhead.cli import app
from polyhead.costs import LayerGroup, ModelLayout, Ranks, estimate_memory
from polyhead.costs.collectives import monitor_bytes
from polyhead.costs.options import parse_ranks
from polyhead.costs.plan_wording import rank_words
from polyhead.costs.quantities import parse_bandwidth
from polyhead.costs.ranks_plan import RanksPlan
from polyhead.costs.workload import Workload
from polyhead.errors import OptionError
from polyhead.layers import MultiHeadConfig
from polyhead.layers.positions.config import ALiBiConfig
from polyhead.layers.variants import TalkingHeadsConfig

WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS, TOKENS, BATCH = 52, 8, 2, 6, 3, 80, 5
CONFIG = MultiHeadConfig(WIDTH, HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, causal=True, bias=False)
MODEL = ModelLayout("model", (LayerGroup(CONFIG, LAYERS),), other_parameters=9001)


def planned(ranks: Ranks, model: ModelLayout = MODEL, **options: Any) -> RanksPlan:
    found = polyhead.plan(model, context=TOKENS, batch=BATCH, ranks=ranks, **options).ranks
    assert found is not None
    return found


def sent(plan: RanksPlan, phase: str = "training") -> dict[str, tuple[bool, int, int]]:
    return {x.name: (x.is_backward, x.calls, x.bytes) for x in plan[phase].collectives if not x.is_backward} | {
        f"{x.name}, backward": (x.is_backward, x.calls, x.bytes) for x in plan[phase].collectives if x.is_backward
    }


def test_tensor_parallel_sums_outputs_and_gradients_of_inputs_and_shared_projections():
    plan = planned(Ranks(tensor=4))
    hidden = BATCH * TOKENS * WIDTH * 2 * 3 // 2  # an all-reduce over 4 sends 3/2 of a tensor
    shared = KV_HEADS * HEAD_DIM * WIDTH * 2 * 3 // 2  # two KV heads over 4 ranks are on every rank
    assert sent(plan) == {
        "sum of the heads' outputs": (False, LAYERS, LAYERS * hidden),
        "sum of the input's gradients, backward": (True, LAYERS, LAYERS * hidden),
        "sums of shared parameters' gradients, backward": (True, 2 * LAYERS, 2 * LAYERS * shared),
    }
    assert plan["training"].sent == 2 * LAYERS * (hidden + shared)
    assert sent(plan, "decode") == {"sum of the heads' outputs": (False, LAYERS, LAYERS * hidden // TOKENS)}
    assert [(x.heads, x.kv_heads, x.padding) for x in plan.heads] == [(2, 1, 0)]
    assert plan.parameters == LAYERS * WIDTH * HEAD_DIM * (2 + KV_HEADS + KV_HEADS + 2)
    assert plan.cache_bytes_per_token == LAYERS * 2 * HEAD_DIM * 2


def test_padding_is_stored_and_named():
    model = ModelLayout.of(MultiHeadConfig(WIDTH, 6, num_kv_heads=3, head_dim=HEAD_DIM, causal=True), LAYERS)
    whole = polyhead.plan(model, context=TOKENS, ranks=Ranks(tensor=4))
    assert whole.ranks is not None
    assert [(x.heads, x.kv_heads, x.padding) for x in whole.ranks.heads] == [(2, 1, 2)]
    by_rank = WIDTH * HEAD_DIM * (2 + 1 + 1 + 2) + HEAD_DIM * (2 + 1 + 1) + WIDTH  # weights and biases
    assert whole.ranks.parameters == LAYERS * by_rank
    assert "a rank computes 2 of 6 heads and 1 of 3 KV heads; 2 zero heads as padding" in rank_words(whole, whole.ranks)
    uneven = ModelLayout.of(MultiHeadConfig(WIDTH, 6, num_kv_heads=2, positions=ALiBiConfig(), causal=True, head_dim=4))
    (share,) = planned(Ranks(tensor=4), uneven).heads  # some ranks have heads of one KV head, rank 1 of both
    assert (share.heads, share.kv_heads) == (2, 2)


def test_sequence_parallel_moves_the_bytes_of_all_reduces_in_halves():
    plan, sharded = planned(Ranks(tensor=4)), planned(Ranks(tensor=4, sequence_parallel=True))
    names = [(x.operation, x.is_backward) for x in sharded["training"].collectives]
    assert names[:2] == [("all-gather", False), ("reduce-scatter", False)]
    assert sharded["training"].sent == plan["training"].sent
    assert sharded["prefill"] == plan["prefill"]
    with pytest.raises(OptionError, match="needs tokens that 3 ranks divide, got 80; pad to 81"):
        planned(Ranks(tensor=3, sequence_parallel=True))


def test_fsdp_gathers_weights_twice_and_scatters_gradients_once():
    plan = planned(Ranks(fsdp=3))
    rows = (HEADS + 2 * KV_HEADS) * HEAD_DIM  # of W_Q, W_K and W_V, each padded to a multiple of 3 rows
    assert rows % 3 == 0
    shard = (rows // 3 * WIDTH + (WIDTH + 2) // 3 * HEADS * HEAD_DIM) * 2
    attention = LAYERS * 2 * shard
    found = sent(plan)
    assert found["the layers' weights"] == (False, LAYERS, attention)
    assert found["the layers' weights, backward"] == (True, LAYERS, attention)
    assert found["the layers' gradients, backward"] == (True, LAYERS, attention)
    assert found["all other weights"] == (False, LAYERS, 2 * 2 * 3001)
    monitor = monitor_bytes([HEADS] * LAYERS, 3)
    assert found["HeadMonitor, in an observed step, backward"] == (True, 1, -(-4 * monitor // 3))
    phase = plan["training"]
    assert phase.memory.parameters == phase.memory.gradients == LAYERS * shard
    assert phase.optimizer_state == 8 * (LAYERS * shard // 2 + 3001)
    assert phase.other_weights == 2 * 2 * 3001
    block = MODEL.parameters.total // LAYERS + 9001 // LAYERS
    assert phase.gathered == 3 * 2 * block  # weights of two blocks, gradients of one
    assert not any("HeadMonitor" in name for name in sent(planned(Ranks(fsdp=3, tensor=2))))


def test_context_parallel_plans_what_it_supports():
    plan = planned(Ranks(context=4, method="ring"))
    assert [x.phase for x in plan.phases] == ["training"]
    assert plan.notes == ("context parallel has no cache: phases with one are not planned over ranks",)
    shard = BATCH * KV_HEADS * TOKENS // 4 * 2 * HEAD_DIM
    found = sent(plan)
    assert found["keys and values (ring)"] == (False, 6 * LAYERS, LAYERS * 3 * shard * 2)
    assert found["keys and values, and their gradients, backward"] == (True, 12 * LAYERS, LAYERS * 3 * shard * (2 + 4))
    assert found["the layers' gradients, backward"][2] == MODEL.parameters.total * 2 * 3 // 2
    gathered = planned(Ranks(context=4, method="all_gather"))["training"]
    assert gathered.gathered == LAYERS * 3 * shard * 2  # which autograd saves
    local = estimate_memory(CONFIG, Workload.training_step(TOKENS // 4, batch=BATCH), layers=LAYERS)
    assert gathered.memory == local
    with pytest.raises(OptionError, match=r"phase must be one of those that are planned over ranks, training; got 'd"):
        _ = plan["decode"]
    with pytest.raises(OptionError, match="over 7 ranks needs a multiple of 14 tokens, got 80; pad to 84"):
        planned(Ranks(context=7))
    with pytest.raises(OptionError, match="got ALiBi in MultiHeadAttention"):
        planned(Ranks(context=4), ModelLayout.of(MultiHeadConfig(WIDTH, 4, positions=ALiBiConfig())))


def test_dimensions_combine():
    plan, alone = planned(Ranks(tensor=4, fsdp=2)), planned(Ranks(tensor=4))
    assert plan.ranks.total == 8
    assert sent(plan)["sum of the heads' outputs"] == sent(alone)["sum of the heads' outputs"]
    assert plan.parameters == alone.parameters // 2
    split = planned(Ranks(tensor=4, context=2, method="ring"))
    assert sent(split)["sum of the heads' outputs"][2] == sent(alone)["sum of the heads' outputs"][2] // 2
    shard = BATCH * 1 * TOKENS // 2 * 2 * HEAD_DIM * 2  # of the one KV head of a rank
    assert sent(split)["keys and values (ring)"][2] == LAYERS * shard


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_gathered_weights_and_the_keys_of_other_ranks_are_stored_at_once(method: Any):
    both = planned(Ranks(fsdp=2, context=4, method=method))["training"].gathered
    weights, keys = planned(Ranks(fsdp=2)), planned(Ranks(context=4, method=method))
    assert both == weights["training"].gathered + keys["training"].gathered
    assert 0 < keys["training"].gathered < both


def test_of_kinds_of_layers_one_gathers_keys_at_a_time_unless_autograd_saves_them():
    def gathered(phase: str, method: Any, *layers: tuple[MultiHeadConfig, int]) -> int:
        model = ModelLayout("model", tuple(LayerGroup(*each) for each in layers))
        return planned(Ranks(context=4, method=method), model)[phase].gathered

    few, many = (MultiHeadConfig(WIDTH, HEADS, num_kv_heads=x, head_dim=HEAD_DIM) for x in (KV_HEADS, HEADS))
    for phase, method in (("prefill", "ring"), ("prefill", "all_gather"), ("training", "ring")):
        assert gathered(phase, method, (few, 2), (many, 3)) == gathered(phase, method, (many, 1)) > 0, (phase, method)
    saved = gathered("training", "all_gather", (few, 2)), gathered("training", "all_gather", (many, 3))
    assert gathered("training", "all_gather", (few, 2), (many, 3)) == sum(saved)


def test_one_rank_sends_nothing_and_stores_everything():
    plan = planned(Ranks())
    assert all(x.collectives == () and x.sent == 0 for x in plan.phases)
    whole = polyhead.plan(MODEL, context=TOKENS, batch=BATCH)
    assert [x.needed for x in plan.phases] == [x.needed for x in whole.phases]
    assert (plan.parameters, plan.cache_bytes_per_token) == (whole.parameters.total, whole.cache_bytes_per_token)


def test_without_a_machine_the_memory_of_a_rank_is_in_the_unit_of_the_tables():
    whole = polyhead.plan(MODEL, context=TOKENS, batch=BATCH, ranks=Ranks(tensor=2))
    assert whole.ranks is not None
    lines = [line for line in rank_words(whole, whole.ranks) if " needs " in line]
    assert len(lines) == 3
    assert all("iB on each for" in line for line in lines)


def test_times_are_those_of_named_links():
    plan = planned(Ranks(tensor=4, fsdp=2, bandwidth={"tensor": 64e9}))
    for x in plan["training"].collectives:
        assert x.seconds == (x.bytes / 64e9 if x.dimension == "tensor" else None)
    assert parse_ranks({"fsdp": 2}, False, "auto", None) == Ranks(fsdp=2)
    assert parse_ranks({"tensor": None}, False, "auto", None) is None
    assert parse_ranks({"tensor": 2}, True, "ring", "fsdp=1GB/s, tensor=16Gbit/s") == Ranks(
        tensor=2, sequence_parallel=True, method="ring", bandwidth={"fsdp": 1e9, "tensor": 2e9}
    )
    for text in ("450", "fast", "0GB/s", "-1GB/s", "1e3GB/s", "450GB"):
        with pytest.raises(OptionError, match=r"a bandwidth must be a bandwidth such as 450GB/s, .* got"):
            parse_bandwidth(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor": 0}, "tensor must be a positive integer, got 0"),
        ({"context": 2.0}, "context must be a positive integer, got 2.0"),
        ({"sequence_parallel": True, "fsdp": 2}, "needs tensor parallelism over at least 2 ranks, got tensor=1"),
        ({"method": "star"}, "method must be 'auto', 'ring' or 'all_gather', got 'star'"),
        ({"bandwidth": float("nan")}, "bandwidth must be a positive number of bytes per second, got nan"),
        ({"bandwidth": {"pipeline": 1.0}}, "the keys of bandwidth must be among tensor, context, fsdp; got 'pipeline'"),
    ],
)
def test_bad_ranks_are_refused(options: dict[str, Any], words: str):
    with pytest.raises(OptionError, match=words):
        Ranks(**options)


def test_layers_whose_heads_interact_are_refused_with_their_collective():
    model = ModelLayout.of(TalkingHeadsConfig(WIDTH, 4))
    with pytest.raises(OptionError, match="got TalkingHeads, which would need an all-gather of the queries"):
        planned(Ranks(tensor=2), model)
    assert planned(Ranks(fsdp=2), model)["training"].sent > 0  # which needs no rule


def invoke(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "150", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return result


def test_the_command_prints_writes_and_refuses(tmp_path):
    sizes = ("--d-model", 512, "--heads", 6, "--kv-heads", 3, "--head-dim", 64, "--context", 256, "--dtype", "float32")
    options = ("--tensor-parallel", 4, "--link-bandwidth", "tensor=2GB/s", "--machine", "cpu-2-cores")
    page = tmp_path / "plan.html"
    shown = invoke(*sizes, *options, "--output", page).output
    assert "4 of tensor parallel" in shown
    assert "a rank computes 2 of 6 heads and 1 of 3 KV heads; 2 zero heads as padding" in shown
    assert "decode fits" in shown
    assert "prefill of the full context: bytes that a rank sends" in shown
    assert "393 µs" in shown  # 256 tokens x 512 x 4 bytes x 3/2 at 2 GB/s
    html = page.read_text()
    assert "sum of the heads&#x27; outputs" in html or "sum of the heads' outputs" in html
    assert "每个进程发送的字节" in html
    content = json.loads(invoke(*sizes, *options, "--json").output)["ranks"]
    assert content["ranks"]["tensor"] == 4
    assert content["phases"][0]["sent"] == sum(x["bytes"] for x in content["phases"][0]["collectives"])
    assert json.loads(invoke(*sizes, "--json").output)["ranks"] is None
    assert "time" not in invoke(*sizes, "--fsdp", 2).output.split("bytes that a rank sends")[1].splitlines()[1]
    assert "need ranks, got none; add --tensor-parallel" in invoke(*sizes, "--sequence-parallel", code=2).stderr
    assert torch.float32.itemsize == 4
