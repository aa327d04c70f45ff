"""`session.statistics`: kept on request for one forward, released at the next; missing gradients raise."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import transformers
from torch import nn

import polyhead
from polyhead import HeadId, Mask
from polyhead.errors import GradientError, OptionError
from polyhead.observation import AttentionMaps
from tests.integrations.huggingface import models
from tests.observation.entropy_from_weights import assert_close
from tests.observation.test_session import assert_equal_tables, assert_same_trace, build, observed, trace_of

BATCH, TOKENS, WIDTH, HEADS = 3, 11, 24, 4
KEEP = {"statistics": "entropy", "keep_statistics": True}


def noise(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Stack(nn.Module):
    """Two polyhead layers, called in the given order; with `repeats`, the model calls itself again."""

    def __init__(self, *order: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList([polyhead.MultiHeadAttention(WIDTH, HEADS, causal=True) for _ in range(2)])
        self.order = order or (0, 1)
        self.repeats = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = x + self.layers[index](x).output
        if self.repeats:
            self.repeats -= 1
            x = self(x)
        return x


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=61, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


# ---- outputs of heads


def test_the_outputs_of_heads_are_those_that_the_output_projection_reads():
    model, read = Stack(0, 1, 1), []
    for layer in model.layers:
        layer.out_proj.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0]))
    with polyhead.observe(model, heads=[1, 3], **KEEP) as session:
        model(noise(BATCH, TOKENS, WIDTH))
        first, second = session.statistics.values()
        heads = [x.unflatten(-1, (HEADS, -1)).transpose(1, 2)[:, [1, 3]] for x in read]
        assert_close(first.output, heads[0])
        for call, expected in zip(second.calls, heads[1:], strict=True):
            assert_close(call.output, expected)
        with pytest.raises(OptionError, match="called 2 times"):
            second.output  # noqa: B018
        with torch.no_grad():
            model(noise(BATCH, TOKENS, WIDTH))
        with pytest.raises(OptionError, match="released"):
            first.output  # noqa: B018
        with pytest.raises(GradientError, match="got output of"):
            next(iter(session.statistics.values())).output  # noqa: B018


# ---- missing gradients


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_values_without_a_gradient_are_read_under_no_grad_only(mode):
    model = build()
    with polyhead.observe(model, **KEEP) as session:
        with mode():
            model(input_ids=models.tokens())
            mean = session.statistics.mean("entropy")
            assert_close(mean, session.profile["entropy"])
        with pytest.raises(GradientError, match=r"got entropy of 'model.layers.0.self_attn', which does not"):
            session.statistics.mean("entropy")
        with pytest.raises(GradientError, match=r"use torch.no_grad\(\)"):
            _ = session.statistics["model.layers.1.self_attn"].entropy
        assert session.statistics["model.layers.1.self_attn"].visible_keys.eq(torch.arange(1.0, 24)).all()


def test_a_frozen_part_of_a_model_has_no_gradient_and_the_rest_has():
    model = build()
    for part in (model.model.embed_tokens, model.model.layers[0]):
        part.requires_grad_(False)
    with polyhead.observe(model, **KEEP) as session:
        model(input_ids=models.tokens())
        with pytest.raises(GradientError, match=r"layers\.0.*before it requires grad"):
            session.statistics.mean("entropy")
        session.statistics["model.layers.1.self_attn"].mean("entropy").sum().backward()
    assert model.model.layers[1].self_attn.q_proj.weight.grad.abs().max() > 0


def test_gradients_reach_inputs_of_a_frozen_model():
    layer, x = polyhead.MultiHeadAttention(WIDTH, HEADS).requires_grad_(False), noise(BATCH, TOKENS, WIDTH)
    x.requires_grad_()
    with polyhead.observe(layer, **KEEP) as session:
        layer(x)
        session.statistics.mean("entropy").sum().backward()
    assert x.grad.abs().max() > 0


# ---- lifetime


def test_statistics_that_were_not_requested_are_refused():
    model = Stack()
    with polyhead.observe(model) as session:
        model(noise(BATCH, TOKENS, WIDTH))
        with pytest.raises(OptionError, match=r"only when requested.*observe\(model, keep_statistics=True\)"):
            _ = session.statistics
    with polyhead.observe(model, **KEEP) as session:
        model(noise(BATCH, TOKENS, WIDTH))
        assert repr(session.statistics) == "ForwardStatistics(layers.0, layers.1)"
        rows = session.statistics["layers.0"]
        with pytest.raises(OptionError, match=r"statistics of 'layers.0' are entropy, got 'mean_distance'"):
            _ = rows.mean_distance
        with pytest.raises(OptionError, match="got 'mean_distance'"):
            session.statistics.mean("mean_distance")
        with pytest.raises(OptionError, match="got 'entropie'"):
            session.statistics.mean("entropie")
        with pytest.raises(AttributeError, match="entropie"):
            _ = rows.entropie
        with pytest.raises(OptionError, match=r"got 'layers.7' for the sites \('layers.0', 'self'\)"):
            _ = session.statistics["layers.7"]
    for options, words in (({"statistics": False}, "got True with the statistics none"), ({}, "got 'yes'")):
        with pytest.raises(OptionError, match=words):
            polyhead.observe(model, keep_statistics=True if options else "yes", **options)


class Saved:
    """Count the tensors saved by autograd for a backward inside the block that are still alive.

    Each is packed into a `Box`, which only the graph refers to.
    """

    class Box:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    def __init__(self) -> None:
        self.boxes: list[weakref.ref[Saved.Box]] = []

    def __enter__(self) -> Saved:
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda box: box.tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.hooks.__exit__(*error)

    def pack(self, tensor: torch.Tensor) -> Saved.Box:
        box = Saved.Box(tensor.detach())  # an output that is saved would hold its own graph
        self.boxes.append(weakref.ref(box))
        return box

    def alive(self) -> int:
        gc.collect()
        return sum(box() is not None for box in self.boxes)


@pytest.mark.parametrize("make", [Stack, llama])
def test_the_graph_is_released_when_the_next_forward_begins_and_when_the_session_is_left(make):
    model = make()
    inputs = noise(BATCH, TOKENS, WIDTH) if make is Stack else models.tokens()
    counts: list[int] = []
    with polyhead.observe(model, **KEEP):
        with Saved() as first:
            model(inputs)
        assert first.alive() > 0  # the output was discarded, but the statistics keep their part of the graph
        first_layer = next(module for module in model.modules() if "attention" in type(module).__name__.lower())
        handle = first_layer.register_forward_pre_hook(lambda *given: counts.append(first.alive()))
        with Saved() as second:
            model(inputs)
        handle.remove()
        assert counts[0] == 0
        assert second.alive() > 0
    assert second.alive() == 0


def test_references_do_not_keep_rows_after_the_next_forward_begins():
    model = Stack()
    with polyhead.observe(model, **KEEP) as session:
        model(noise(BATCH, TOKENS, WIDTH))
        kept, site = session.statistics, session.statistics["layers.0"]  # references that do not keep the rows
        (call,) = site.calls
        rows = weakref.ref(site.entropy)
        assert rows() is not None
        model(noise(BATCH, TOKENS, WIDTH, seed=4))
        gc.collect()
        assert rows() is None
        for old in (site, call, kept["layers.1"]):
            with pytest.raises(OptionError, match="released when the model's next forward begins"):
                _ = old.entropy
        with pytest.raises(OptionError, match="released"):
            kept.mean("entropy")
        rows = weakref.ref(session.statistics["layers.0"].entropy)
    gc.collect()
    assert rows() is None
    with pytest.raises(OptionError, match="released when the session exited; read them inside the `with` block"):
        _ = session.statistics


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_forward_that_fails_leaves_nothing_to_read(error):
    model, x = Stack(), noise(BATCH, TOKENS, WIDTH)
    with polyhead.observe(model, **KEEP) as session:
        with pytest.raises(OptionError, match="no forward of the model has finished yet"):
            _ = session.statistics
        model(x)
        expected = session.statistics.mean("entropy").detach()

        def fail(module: nn.Module, inputs: object, output: object) -> None:
            raise error

        handle = model.layers[0].register_forward_hook(fail)
        with pytest.raises(error), Saved() as saved:
            model(x)
        handle.remove()
        # PyTorch calls `always_call` hooks, which release the rows, after an Exception but not after KeyboardInterrupt.
        assert saved.alive() == 0 or error is KeyboardInterrupt
        with pytest.raises(OptionError, match="did not finish"):
            _ = session.statistics
        model(x)
        assert torch.equal(session.statistics.mean("entropy"), expected)
        assert all(len(rows.calls) == 1 for rows in session.statistics.values())


def test_statistics_cannot_be_read_during_a_forward():
    model = Stack()
    with polyhead.observe(model, **KEEP) as session:
        handle = model.layers[1].register_forward_hook(lambda *given: session.statistics and None)
        with pytest.raises(OptionError, match="did not finish"):
            model(noise(BATCH, TOKENS, WIDTH))
        handle.remove()


def test_a_part_that_is_called_by_itself_is_no_forward_of_the_model():
    model, x = Stack(), noise(BATCH, TOKENS, WIDTH)
    with polyhead.observe(model, **KEEP) as session:
        model(x)
        for call in (lambda: model.layers[0](x), lambda: model.forward(x)):
            call()
            with pytest.raises(OptionError, match=r"'layers.\d' was called outside a forward of the observed model"):
                _ = session.statistics
            model(x)
            assert len(session.statistics) == 2


def test_a_model_that_calls_itself_is_refused():
    model, x = Stack(), noise(BATCH, TOKENS, WIDTH)
    with polyhead.observe(model, **KEEP) as session:
        model.repeats = 1
        model(x)
        with pytest.raises(OptionError, match="called inside its own forward"):
            _ = session.statistics
        model.repeats = 1
        handle = model.register_forward_hook(fail_outside)
        with pytest.raises(ZeroDivisionError):
            model(x)
        handle.remove()
        with pytest.raises(OptionError, match="called inside its own forward"):
            _ = session.statistics
        model(x)
        assert len(session.statistics) == 2


def fail_outside(model: Stack, inputs: object, output: object) -> None:
    """Raise at the end of the outer of two forwards."""
    model.ends = getattr(model, "ends", 0) + 1
    if model.ends == 2:
        raise ZeroDivisionError


def test_a_site_that_is_called_several_times_has_several_calls():
    model = Stack(0, 1, 0, 0)
    with polyhead.observe(model, **KEEP) as session:
        model(noise(BATCH, TOKENS, WIDTH))
        rows = session.statistics["layers.0"]
        assert [len(x.calls) for x in session.statistics.values()] == [3, 1]
        with pytest.raises(OptionError, match=r"'layers.0', which was called 3 times.*\.calls.*\.mean\(name\)"):
            _ = rows.entropy
        with pytest.raises(OptionError, match="called 3 times"):
            _ = rows.tokens
        each = torch.stack([call.entropy.mean((0, 2)) for call in rows.calls])
        assert not torch.equal(each[0], each[1])
        torch.testing.assert_close(rows.mean("entropy"), each.mean(0))
        torch.testing.assert_close(rows.calls[2].mean("entropy"), each[2])
        torch.testing.assert_close(session.statistics.mean("entropy").double().detach(), session.profile["entropy"])


def test_generation_keeps_the_last_step():
    model, ids = build(), models.tokens(length=7)
    with torch.no_grad(), polyhead.observe(model, **KEEP) as session:
        model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None)
        for rows in session.statistics.values():
            assert rows.entropy.shape == (models.BATCH, 4, 1)
            assert rows.visible_keys.eq(7 + 4).all()


# ---- values


def test_padding_rows_are_returned_and_not_averaged():
    layer = polyhead.MultiHeadAttention(WIDTH, HEADS)
    with polyhead.observe(layer, **KEEP) as session:
        layer(noise(BATCH, TOKENS, WIDTH), mask=Mask.lengths([11, 4, 7]))
        (rows,) = session.statistics.values()
        assert rows.entropy.shape == rows.tokens.shape == (BATCH, HEADS, TOKENS)
        assert rows.tokens.sum((0, 2)).eq(22).all()
        torch.testing.assert_close(
            rows.mean("entropy"), torch.stack([rows.entropy[:, head][rows.tokens[:, head]].mean() for head in range(4)])
        )


def test_a_head_without_tokens_is_nan_and_leaves_the_gradients_of_others_alone():
    layer = polyhead.layers.variants.RoutedHeads(WIDTH, 8, top_k=1, causal=True)
    with polyhead.observe(layer, **KEEP) as session:
        layer(noise(1, 3, WIDTH))
        mean = session.statistics.mean("entropy")
        assert 0 < int(mean.isnan().sum()) < 8
        mean.nanmean().backward()
    assert layer.query_weight.grad.isfinite().all()
    assert layer.query_weight.grad.abs().max() > 0


def test_only_selected_layers_and_heads_are_kept():
    model = build()
    options = {"layers": [1], "heads": [HeadId(1, 2), HeadId(1, 0)]}
    with polyhead.observe(model, **KEEP) as session:
        model(input_ids=models.tokens())
        whole = session.statistics["model.layers.1.self_attn"].entropy
    with polyhead.observe(model, **KEEP, **options) as session:
        model(input_ids=models.tokens())
        ((key, rows),) = session.statistics.items()
        assert key == ("model.layers.1.self_attn", "self")
        assert rows.heads == (0, 2)
        assert torch.equal(rows.entropy, whole[:, [0, 2]])
        assert rows.tokens.shape == rows.entropy.shape
        torch.testing.assert_close(session.statistics.mean("entropy").detach(), session.profile["entropy"])


def test_a_module_that_attends_in_both_ways_is_named_with_its_kind():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = polyhead.MultiHeadAttention(WIDTH, HEADS)

        def forward(self, x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x).output, source).output

    model = Both()
    with polyhead.observe(model, statistics=("entropy", "mean_distance"), keep_statistics=True) as session:
        model(noise(BATCH, TOKENS, WIDTH), noise(BATCH, 5, WIDTH))
        kept = session.statistics
        assert list(kept) == [("layer", "self"), ("layer", "cross")]
        assert "layer" in kept
        assert ("layer", "cross") in kept
        assert "other" not in kept
        with pytest.raises(OptionError, match=r"\(path, kind\) if it has self- and cross-attention; got 'layer'"):
            _ = kept["layer"]
        assert kept["layer", "cross"].visible_keys.eq(5).all()
        kept["layer", "self"].mean("mean_distance").sum().backward()
        with pytest.raises(
            OptionError,
            match=r"of 'layer' are entropy, got 'mean_distance'.*cross-attention has no positional statistics",
        ):
            kept.mean("mean_distance")


def test_a_windowed_cache_and_a_hidden_key_are_corrected_as_in_the_table():
    """A decoding step past the window does not see the first key; keys with a bias of finfo.min are not visible."""
    model = build("mistral")  # a window of 7
    ids = models.tokens(length=9)
    names = ("sink_mass", "normalized_entropy")
    with torch.no_grad(), polyhead.observe(model, statistics=names, keep_statistics=True) as session:
        cache = model(input_ids=ids, use_cache=True).past_key_values
        before = session.profile["sink_mass"]
        model(input_ids=ids[:, :1], past_key_values=cache)
        assert session.statistics.mean("sink_mass").eq(0).all()
        assert before.gt(0).all()
    bert, mask = build("bert"), (torch.arange(models.TOKENS) < torch.tensor([[23], [9], [17]])).double()
    bias = ((1 - mask) * torch.finfo(torch.float64).min)[:, None, None]
    with torch.no_grad(), polyhead.observe(bert, statistics=names, keep_statistics=True) as session:
        bert(input_ids=models.tokens(), attention_mask=bias)
        for name in names:
            assert_close(session.statistics.mean(name), session.profile[name], name)
        rows = session.statistics["encoder.layer.0.attention.self"]
        assert rows.visible_keys[1].eq(9).all()


@pytest.mark.parametrize("collect", [(), (AttentionMaps(TOKENS),)])
def test_keeping_changes_nothing_else(collect):
    model, x = Stack(), noise(BATCH, TOKENS, WIDTH)
    tables, outputs = [], []
    before = trace_of(model)
    for keep in (False, True):
        with polyhead.observe(model, keep_statistics=keep, collect=collect) as session:
            outputs.append(model(x))
        tables.append(session.profile)
        assert_same_trace(trace_of(model), before)
    assert torch.equal(*outputs)
    assert_equal_tables(*tables, bound=0)
    assert repr(session) == "Session(Stack, 8 heads observed)"


def test_a_session_that_is_entered_again_keeps_again():
    model, ids = build(), models.tokens()
    expected = observed(model, ids, statistics="entropy").profile["entropy"]
    session = polyhead.observe(model, **KEEP)
    for _ in range(2):
        with session:
            with pytest.raises(OptionError, match="got none"):
                _ = session.statistics
            model(input_ids=ids)
            assert_close(session.statistics.mean("entropy").detach(), expected)
    assert session.profile["tokens"].eq(2 * ids.numel()).all()
