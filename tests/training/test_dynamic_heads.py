"""Heads that are pruned, reset and added in training: which ones, when, and what remains as it was."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import transformers
from torch import nn

import polyhead
from polyhead import MultiHeadAttention
from polyhead.errors import OptionError
from polyhead.surgery import ReorderHeads, find_layers, head_origins
from polyhead.training import (
    DropHead,
    DynamicHeads,
    HeadChange,
    HeadGates,
    HeadMonitor,
    MonitorCallback,
    QKClip,
    StepRecord,
    edit_heads,
)
from tests.surgery.gated import FAMILIES
from tests.surgery.gated import build as build_family

WIDTH, HEADS, DIM = 24, 4, 6


class Blocks(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MultiHeadAttention(WIDTH, HEADS, causal=True, **options) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).output
        return x


def train(model: nn.Module, optimizer: torch.optim.Optimizer, dynamic: DynamicHeads, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dynamic.step(loss)
        losses.append(loss.item())
    return losses


def make_dead(model: nn.Module, *heads: tuple[int, int]) -> None:
    with torch.no_grad():
        for layer, head in heads:
            model.layers[layer].out_proj.weight[:, head * DIM : (head + 1) * DIM] *= 1e-6


def counts(model: nn.Module) -> list[int]:
    return [layer.layout.num_heads for layer in find_layers(model)]


def origins(model: nn.Module) -> list[list[str]]:
    return [[x.label(head) for head in range(len(x.heads))] for x in head_origins(model).values()]


@pytest.mark.parametrize("build", ["polyhead", "gpt2"])
def test_the_importance_is_the_derivative_by_a_gate(build):
    if build == "polyhead":
        model, call = Blocks().double(), lambda model, x: (model(x) ** 3).mean()
        x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    else:
        config = transformers.GPT2Config(vocab_size=61, n_embd=WIDTH, n_layer=2, n_head=HEADS)
        model, x = transformers.GPT2LMHeadModel(config).double().eval(), torch.randint(61, (2, 5))
        call = lambda model, x: model(x, labels=x).loss  # noqa: E731
    sites = [layer.site for layer in find_layers(model)]
    with polyhead.observe(model, statistics=False) as session:
        gates = [torch.ones(HEADS, dtype=torch.float64, requires_grad=True) for _ in sites]
        session.gates.update({(site, "self"): gate for site, gate in zip(sites, gates, strict=True)})
        derivatives = torch.stack(torch.autograd.grad(call(model, x), gates)).abs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with DynamicHeads(model, optimizer, {9: HeadChange(prune=1)}) as dynamic:
        call(model, x).backward()
        optimizer.step()
        dynamic.step()
        shares = torch.tensor(dynamic.state_dict()["shares"][0].tolist() + dynamic.state_dict()["shares"][1].tolist())
    torch.testing.assert_close(shares, (derivatives / derivatives.sum()).flatten().float(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_closure_computes_the_gradients_of_the_importance(by_keyword):
    model, losses, shares = Blocks().double(), [], []
    for with_closure in (False, True):
        trained = copy.deepcopy(model)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
        with DynamicHeads(trained, optimizer, {9: HeadChange(prune=1)}) as dynamic:
            for step in range(3):
                x = torch.randn(2, 7, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))

                def closure(model=trained, x=x, optimizer=optimizer):
                    optimizer.zero_grad()
                    loss = (model(x) ** 3).mean()
                    loss.backward()
                    return loss

                if not with_closure:
                    loss = closure()
                    optimizer.step()
                else:
                    loss = optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
                losses.append(loss.item())
                dynamic.step(loss)
            shares.append(torch.cat(dynamic.state_dict()["shares"]))
    assert losses[:3] == losses[3:]
    assert shares[0].sum() == pytest.approx(3.0)
    torch.testing.assert_close(*shares)


def test_the_heads_with_the_lowest_scores_are_pruned_and_reset_and_new_ones_are_added():
    model = Blocks()
    make_dead(model, (0, 2), (1, 0), (1, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, weight_decay=0.0)
    changes = {2: HeadChange(prune=2), 4: HeadChange(revive=1), 5: HeadChange(grow=3)}
    with DynamicHeads(model, optimizer, changes) as dynamic:
        train(model, optimizer, dynamic, range(2))
        pruned = counts(model)
        train(model, optimizer, dynamic, range(2, 4))
        # One of the three dead heads was left: it is reset where it is.
        (layer, place) = next((i, names.index("new")) for i, names in enumerate(origins(model)) if "new" in names)
        weight = model.layers[layer].out_proj.weight
        assert not weight[:, place * DIM : (place + 1) * DIM].any()
        assert (weight != 0).sum() == weight.numel() - WIDTH * DIM
        x = torch.randn(2, 5, WIDTH)
        before = model(x)
        train(model, optimizer, dynamic, range(4, 5))
        torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-5)
        train(model, optimizer, dynamic, range(5, 8))
    assert sum(pruned) == 2 * HEADS - 2
    assert {(0, 2), (1, 0), (1, 1)} >= {(i, int(x)) for i in range(2) for x in map(str, range(HEADS))
                                       if x not in origins(model)[i]}  # fmt: skip
    assert sum(counts(model)) == 2 * HEADS + 1
    assert [step for step, _ in dynamic.applied] == [2, 4, 5]
    assert max(counts(model)) - min(counts(model)) <= 3


def test_every_layer_keeps_a_head():
    model = Blocks()
    make_dead(model, *[(1, head) for head in range(HEADS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with DynamicHeads(model, optimizer, {1: HeadChange(prune=5)}) as dynamic:
        train(model, optimizer, dynamic, range(2))
    assert counts(model) == [2, 1]


def test_the_only_head_of_a_layer_can_be_reset():
    model = Blocks()
    make_dead(model, *[(1, head) for head in range(HEADS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    changes = {1: HeadChange(prune=3), 2: HeadChange(revive=1)}
    with DynamicHeads(model, optimizer, changes) as dynamic:
        train(model, optimizer, dynamic, range(3))
    assert counts(model) == [HEADS, 1]
    assert origins(model)[1] == ["new"]


def test_the_only_head_of_a_layer_is_reset_where_it_cannot_be_pruned():
    model = Blocks()
    make_dead(model, *[(1, head) for head in range(HEADS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with DynamicHeads(model, optimizer, {1: HeadChange(prune=4, revive=1, below=1e-3)}) as dynamic:
        train(model, optimizer, dynamic, range(2))
    assert origins(model) == [[str(head) for head in range(HEADS)], ["new"]]


@pytest.mark.parametrize("changes", [{1: HeadChange(revive=99, below=1e3)}, {1: HeadChange(revive=7)}])
def test_the_head_with_the_highest_score_is_never_reset(changes):
    model = Blocks()
    with torch.no_grad():
        model.layers[1].out_proj.weight[:, 2 * DIM : 3 * DIM] *= 100
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with DynamicHeads(model, optimizer, changes) as dynamic:
        train(model, optimizer, dynamic, range(2))
    assert origins(model) == [["new"] * HEADS, ["new", "new", "2", "new"]]


@pytest.mark.filterwarnings("ignore:no step of the monitor has ended")
@pytest.mark.parametrize("kind", [HeadMonitor, HeadGates, "QKClip", "DropHead"])
def test_heads_that_something_else_observes_are_not_changed(kind):
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    around = {"QKClip": lambda model: QKClip(model, optimizer), "DropHead": lambda model: DropHead(model, 0.1)}
    with around.get(kind, kind)(model) as observing:
        with (
            pytest.raises(OptionError, match="inside the block of a HeadMonitor, QKClip"),
            DynamicHeads(model, optimizer, {1: HeadChange(revive=1)}),
        ):
            pass
        with pytest.raises(OptionError, match="got Blocks inside the block"):
            edit_heads(model, optimizer, ReorderHeads(0, (3, 2, 1, 0)))
        if kind is HeadMonitor:
            model(torch.randn(2, 5, WIDTH))
            observing.step()
    dynamic = DynamicHeads(model, optimizer, {1: HeadChange(revive=1)})
    with dynamic, around.get(kind, kind)(model), pytest.raises(OptionError, match="got Blocks inside the block"):
        train(model, optimizer, dynamic, range(1))
    assert origins(model) == [[str(head) for head in range(HEADS)]] * 2


def test_a_bound_leaves_heads_that_are_alive():
    model = Blocks()
    make_dead(model, (0, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with DynamicHeads(
        model, optimizer, {1: HeadChange(prune=4, below=1e-3), 2: HeadChange(prune=4, below=1e-3)}
    ) as dynamic:
        train(model, optimizer, dynamic, range(3))
    assert origins(model) == [["0", "1", "2"], ["0", "1", "2", "3"]]
    assert [step for step, _ in dynamic.applied] == [1]


def test_the_columns_of_a_monitor_decide_and_every_stretch_has_a_monitor():
    model = Blocks()
    with torch.no_grad():  # the smallest logits
        model.layers[0].q_proj.weight[DIM : 2 * DIM] *= 1e-3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = functools.partial(HeadMonitor, statistics=("max_logit", "entropy"), every=2)
    dynamic = DynamicHeads(model, optimizer, {3: HeadChange(prune=1)}, monitor=monitor, score="max_logit")
    with dynamic:
        train(model, optimizer, dynamic, range(6))
    assert origins(model) == [["0", "2", "3"], ["0", "1", "2", "3"]]
    assert [x.history.steps for x in dynamic.monitors] == [(0, 2), (4,)]
    assert [len(x.history.heads) for x in dynamic.monitors] == [2 * HEADS, 2 * HEADS - 1]


def test_a_request_to_stop_outlasts_a_change_of_heads():
    class Stopping(MonitorCallback):
        def on_record(self, record: StepRecord) -> None:
            self.should_stop |= record.step == 2

    model, stopping = Blocks(), Stopping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = functools.partial(HeadMonitor, statistics="entropy", callbacks=[stopping])
    with DynamicHeads(model, optimizer, {3: HeadChange(prune=1)}, monitor=monitor) as dynamic:
        train(model, optimizer, dynamic, range(3))
        assert len(dynamic.monitors) == 2
        assert stopping.should_stop


@pytest.mark.parametrize("monitored", [False, True])
def test_a_run_that_is_resumed_ends_as_one_that_was_not_interrupted(monitored):
    options = (
        {"monitor": functools.partial(HeadMonitor, statistics="max_logit"), "score": "max_logit"} if monitored else {}
    )
    changes = {3: HeadChange(prune=2, grow=1), 7: HeadChange(prune=1, revive=1)}
    start = Blocks()

    def begin():
        model = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer, DynamicHeads(model, optimizer, changes, **options)

    model, optimizer, dynamic = begin()
    with dynamic:
        train(model, optimizer, dynamic, range(5))
        saved = (*copy.deepcopy((model.state_dict(), optimizer.state_dict())), dynamic.state_dict())
        train(model, optimizer, dynamic, range(5, 10))
    resumed, second, continued = begin()
    continued.load_state_dict(saved[2])
    resumed.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    with continued:
        train(resumed, second, continued, range(5, 10))
    assert continued.applied == dynamic.applied
    assert len(dynamic.applied) == 2
    for x, y in zip(resumed.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    with pytest.raises(OptionError, match="steps already"):
        continued.load_state_dict(saved[2])


def test_steps_of_a_loss_scaler_that_are_skipped_do_not_count():
    model = Blocks()
    make_dead(model, (0, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with DynamicHeads(model, optimizer, {3: HeadChange(prune=1)}) as dynamic:
        train(model, optimizer, dynamic, range(1))
        for x in model.parameters():
            x.grad = torch.full_like(x, torch.inf)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        dynamic._before_step()
        optimizer.zero_grad()
        dynamic.step()
        train(model, optimizer, dynamic, range(1))
    assert origins(model)[0] == ["0", "2", "3"]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize(
    ("build", "arguments", "words"),
    [
        (lambda: Blocks(num_kv_heads=2), {}, "4 heads share 2 KV heads"),
        (lambda: build_family(FAMILIES["phi3"]), {}, "from the config of all layers"),
        (lambda: nn.Linear(3, 3), {}, "a model without any: Linear"),
        (lambda: nn.MultiheadAttention(WIDTH, HEADS), {}, "from_torch"),
        (Blocks, {"changes": {1: HeadChange(prune=7)}}, "got 7 of 8 heads in 2 layers to prune at step 1"),
        (Blocks, {"changes": {1: HeadChange(prune=4), 2: HeadChange(prune=3)}}, "got 3 of 4 heads"),
        (Blocks, {"changes": {1: HeadChange(revive=8)}}, "got 0 to prune and 8 to revive of 8 heads at step 1"),
        (Blocks, {"changes": {2: HeadChange(prune=1, revive=7)}}, "got 1 to prune and 7 to revive of 8 heads"),
        (Blocks, {"changes": {1: HeadChange(prune=3), 2: HeadChange(revive=5)}}, "5 to revive of 5 heads at step 2"),
        (Blocks, {"changes": {0: HeadChange(prune=1)}}, "at least 1, got 0"),
        (Blocks, {"changes": {1: 2}}, "must be HeadChange by step, got 2 at step 1"),
        (Blocks, {"score": "output_norm_share"}, "output_norm_share.* and no monitor"),
        (Blocks, {"optimizer": lambda model: optimizer_of(model.layers[0])}, r"one without layers\.1\.q_proj\.weight"),
        (
            Blocks,
            {"optimizer": lambda model: [optimizer_of(x) for x in model.layers]},
            "must own the output projections",
        ),
    ],
)
def test_bad_input_is_refused_before_training(build, arguments, words):
    model = build()
    arguments = {"changes": {1: HeadChange(prune=1)}, **arguments}
    optimizer = arguments.pop("optimizer", optimizer_of)(model)
    with pytest.raises(OptionError, match=words):
        DynamicHeads(model, optimizer, **arguments)


def test_a_frozen_output_projection_has_no_importance():
    model = Blocks()
    model.layers[1].out_proj.weight.requires_grad_(False)
    with pytest.raises(OptionError, match=r"frozen one in layers\.1"):
        DynamicHeads(model, optimizer_of(model), {1: HeadChange(prune=1)})


@pytest.mark.parametrize("options", [{}, {"prune": -1}, {"grow": 1.5}, {"revive": True}, {"prune": 1, "below": 0}])
def test_a_change_must_be_one(options):
    with pytest.raises(OptionError, match="got"):
        HeadChange(**options)


def test_a_change_without_evidence_is_refused():
    model = Blocks()
    optimizer = optimizer_of(model)
    dynamic = DynamicHeads(model, optimizer, {1: HeadChange(prune=1)})
    with pytest.raises(OptionError, match="inside the `with` block"):
        dynamic.step()
    with dynamic:
        with pytest.raises(OptionError, match="already entered"):
            dynamic.__enter__()
        with pytest.raises(OptionError, match="importance in 0 steps"):
            dynamic.step()  # the optimizer made none
    assert counts(model) == [HEADS, HEADS]
    other = DynamicHeads(model, optimizer, {1: HeadChange(prune=1)}, monitor=HeadMonitor, score="no_such_column")
    with pytest.raises(OptionError, match=r"a score is importance, or one of entropy, .*no_such_column"), other:
        pass
    with pytest.raises(OptionError, match="HeadMonitor itself or a function that returns a monitor"):
        DynamicHeads(model, optimizer, {1: HeadChange(prune=1)}, monitor=HeadMonitor(model))
