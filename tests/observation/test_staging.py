"""A call of a model is counted atomically when it finishes; one that raises is not counted at all."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import polyhead
from polyhead.errors import OptionError
from polyhead.observation import AttentionMaps, BatchMetadata, Contributions, Session
from polyhead.observation.calls import Call
from polyhead.observation.head_distances import AttentionDistances
from polyhead.observation.role_evidence import EvidenceCollector
from polyhead.observation.token_sample import TokenSample
from polyhead.observation.top_keys import TopKeys
from polyhead.observation.word_attention import SpanAttention, WordAttention, WordMap

BATCH, TOKENS, WIDTH, LAYERS, HEADS = 3, 7, 24, 3, 2


class Blocks(nn.Module):
    """Layers of ours, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(polyhead.MultiHeadAttention(WIDTH, HEADS, causal=True) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).output
        return x


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    call: Callable[[Any], Any]
    options: dict[str, Any]


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=8,
        max_position_embeddings=32,
    )  # fmt: skip
    return transformers.BertModel(config).eval()


def _bloom() -> nn.Module:
    config = transformers.BloomConfig(vocab_size=50, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS)
    return transformers.BloomModel(config).eval()


IDS = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) % 50
HIDDEN = torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
CASES = {
    "transformers": Case(_bert, lambda model: model(input_ids=IDS), {}),
    "ours": Case(Blocks, lambda model: model(HIDDEN), {}),
    "torch": Case(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 8, 0.0, batch_first=True), LAYERS),
        lambda model: model(HIDDEN),
        {},
    ),
    "softmax by hand": Case(_bloom, lambda model: model(input_ids=IDS), {}),
}


def maps_of() -> list[WordMap]:
    words = tuple(range(TOKENS))
    return [WordMap(words, (-1, *words[:-1]), ("x",) * TOKENS, (0,) * TOKENS) for _ in range(BATCH)]


def collectors() -> list[Any]:
    names = [(f"layers.{layer}", "self") for layer in range(LAYERS)]
    generator = torch.Generator().manual_seed(1)
    projections = {name: torch.randn(HEADS, WIDTH // HEADS, 4, generator=generator) for name in names}
    return [
        AttentionMaps(TOKENS),
        Contributions(),
        EvidenceCollector(),
        TokenSample(projections, tokens=5),
        WordAttention(maps_of()),
        SpanAttention([[0, 1, *[-1] * (TOKENS - 2)]] * BATCH, 1),
        TopKeys(torch.arange(9)),
        AttentionDistances(),
    ]


def state_of(session: Session) -> dict[str, Tensor]:
    found = {}
    for index, site in enumerate(session.observations.sites):
        found |= {f"{index}.{name}": x for name, x in site.state().items()}
    for index, values in enumerate(session.observations.collected.values()):
        found |= {f"{index}.{name}.{key}": x for name, value in values.items() for key, x in value.state().items()}
    return {name: x.clone() for name, x in found.items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, x in one.items():
        assert torch.equal(x, other[name]), name


@contextmanager
def stopped_at(monkeypatch, number: int, error: type[BaseException]) -> Iterator[None]:
    """Let the attention of this number raise, after it was counted."""
    notify, seen = Call.notify, []

    def told(call: Call, attended: object) -> None:
        notify(call, attended)
        seen.append(call)
        if len(seen) == number:
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(Call, "notify", told)
        yield


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, MemoryError, SystemExit])
@pytest.mark.parametrize("name", CASES)
def test_a_call_that_raised_at_any_attention_is_not_counted(name, error, monkeypatch):
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make()
    with torch.no_grad(), polyhead.observe(model, **case.options) as session:
        case.call(model)
        once, profile = state_of(session), session.profile
        for number in range(1, LAYERS + 1):
            with stopped_at(monkeypatch, number, error), pytest.raises(error):
                case.call(model)
            assert_same(state_of(session), once)
            assert session.observations.calls == dict.fromkeys(session.observations.calls, 1)
        assert torch.equal(session.profile["tokens"], profile["tokens"])
        case.call(model)
    assert session.profile["tokens"].tolist() == [2 * BATCH * TOKENS] * LAYERS * HEADS


@pytest.mark.parametrize("name", CASES)
def test_a_first_call_that_raised_leaves_nothing(name, monkeypatch):
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make()
    with torch.no_grad(), polyhead.observe(model, **case.options) as session:
        with stopped_at(monkeypatch, 2, RuntimeError), pytest.raises(RuntimeError):
            case.call(model)
        assert session.observations.sites == ()
        assert session.observations.calls == {}
        case.call(model)
    with torch.no_grad(), polyhead.observe(model, **case.options) as other:
        case.call(model)
    assert [x.site for x in session.observations.sites] == [x.site for x in other.observations.sites]
    assert_same(state_of(session), state_of(other))


@pytest.mark.parametrize("number", range(1, LAYERS + 1))
def test_nothing_that_is_gathered_is_counted_of_a_call_that_raised(number, monkeypatch):
    torch.manual_seed(0)
    model = Blocks()

    def watched(stop: int | None) -> dict[str, Tensor]:
        with torch.no_grad(), polyhead.observe(model, collect=collectors()) as session:
            ids = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) % 9
            session.metadata = BatchMetadata(torch.arange(BATCH), torch.zeros(BATCH, dtype=torch.int64), ids, ids % 5)
            model(HIDDEN)
            before = state_of(session)
            if stop is not None:
                with stopped_at(monkeypatch, stop, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
                    model(HIDDEN)
                assert_same(state_of(session), before)
            model(HIDDEN)
            assert state_of(session)["0.moments.count"].ne(before["0.moments.count"]).all()
            return state_of(session)

    assert_same(watched(number), watched(None))


def test_every_second_call_counts_whatever_raised_between(monkeypatch):
    torch.manual_seed(0)
    model = Blocks()
    with torch.no_grad(), polyhead.observe(model, every=2) as session:
        model(HIDDEN)
        for _ in range(3):  # none of these takes the place of the second call
            handle = model.layers[1].register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(HIDDEN)
            handle.remove()
        model(HIDDEN)
        model(HIDDEN)
    assert session.profile["tokens"].tolist() == [2 * BATCH * TOKENS] * LAYERS * HEADS


def test_an_error_after_the_last_attention_drops_the_call_as_well():
    model = Blocks()
    with torch.no_grad(), polyhead.observe(model) as session:
        model.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(HIDDEN)
    assert len(session.profile) == 0


def test_after_an_interrupt_parts_of_the_model_can_be_called_by_themselves(monkeypatch):
    """Nothing of the call that was interrupted makes the next one seem a part of it."""
    model = Blocks()
    with torch.no_grad(), polyhead.observe(model) as session:
        with stopped_at(monkeypatch, 1, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            model(HIDDEN)
        model.layers[1](HIDDEN)
        assert session.profile["tokens"].tolist() == [BATCH * TOKENS] * HEADS
        model.layers[1].forward(HIDDEN)  # without hooks nobody is told
    assert session.profile["tokens"].tolist() == [BATCH * TOKENS] * HEADS


def test_what_a_running_call_adds_is_not_there_yet():
    model, seen = Blocks(), []
    with torch.no_grad(), polyhead.observe(model) as session:
        handle = model.layers[2].register_forward_hook(lambda *_: seen.append(len(session.profile)))
        model(HIDDEN)
        model(HIDDEN)
        handle.remove()
    assert seen == [0, LAYERS * HEADS]


def test_the_model_is_left_as_it_was_and_copies_are_their_own():
    model = Blocks()
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    with torch.no_grad(), polyhead.observe(nn.Sequential(model)):
        pass
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before
    bert = _bert()
    with torch.no_grad(), polyhead.observe(bert) as session:
        for copied in (copy.deepcopy(bert), pickle.loads(pickle.dumps(bert.pooler))):
            assert "_Wrapped" not in repr(copied.__dict__.get("_call_impl"))
        other = copy.deepcopy(bert)
        for parameter in other.parameters():
            parameter.zero_()
        assert not torch.equal(other(input_ids=IDS).last_hidden_state, bert(input_ids=IDS).last_hidden_state)
    assert session.profile["tokens"].tolist() == [BATCH * TOKENS] * LAYERS * HEADS


def test_a_module_that_compiles_itself_counts_as_a_whole(monkeypatch):
    model = Blocks()
    model.compile(backend="eager")
    with torch.no_grad(), polyhead.observe(model) as session:
        model(HIDDEN)
        with stopped_at(monkeypatch, 2, RuntimeError), pytest.raises(RuntimeError):
            model(HIDDEN)
    assert session.profile["tokens"].tolist() == [BATCH * TOKENS] * LAYERS * HEADS
    assert "_call_impl" not in model.__dict__


def test_gradients_and_checkpointed_layers_count_once(monkeypatch):
    bert = _bert().train()
    bert.gradient_checkpointing_enable()
    with polyhead.observe(bert) as session:
        bert(input_ids=IDS).last_hidden_state.sum().backward()
        with stopped_at(monkeypatch, 3, RuntimeError), pytest.raises(RuntimeError):
            bert(input_ids=IDS)
        bert(input_ids=IDS).last_hidden_state.sum().backward()
    assert session.profile["tokens"].tolist() == [2 * BATCH * TOKENS] * LAYERS * HEADS


def test_a_session_that_has_counted_does_not_take_up_another_one():
    model = Blocks()
    with torch.no_grad(), polyhead.observe(model) as session:
        model(HIDDEN)
    with pytest.raises(OptionError, match="before its first call"):
        session.resume_from(session.observations)
    assert session.profile["tokens"].tolist() == [BATCH * TOKENS] * LAYERS * HEADS


def test_a_session_is_of_one_model_whose_heads_stay():
    layer, other = polyhead.MultiHeadAttention(WIDTH, 2), polyhead.MultiHeadAttention(WIDTH, 4)
    with torch.no_grad(), polyhead.observe(layer) as session:
        layer(HIDDEN)
    again = polyhead.observe(other)
    again.resume_from(session.observations)
    with torch.no_grad(), again, pytest.raises(OptionError, match="got 4 heads in 'MultiHeadAttention', which had 2"):
        other(HIDDEN)
    assert again.profile["tokens"].tolist() == [BATCH * TOKENS] * 2


@pytest.mark.parametrize("layers", [[3], [0, 3], [99]])
def test_layers_that_the_model_does_not_have_are_refused(layers):
    with pytest.raises(OptionError, match="numbered 0 to 2 in each stack, got"):
        polyhead.observe(Blocks(), layers=layers)
    with pytest.raises(OptionError, match="numbered 0 to 2 in each stack, got"):
        polyhead.observe(_bert(), layers=layers)


@pytest.mark.gpu
def test_on_a_gpu_a_call_that_raised_is_not_counted(monkeypatch):
    """Nothing is computed again, so what is counted has the same bits."""
    torch.manual_seed(0)
    model, x = Blocks().cuda(), HIDDEN.cuda()
    with torch.no_grad(), polyhead.observe(model, collect=[AttentionMaps(TOKENS), Contributions()]) as session:
        model(x)
        once = state_of(session)
        for number in range(1, LAYERS + 1):
            for error in (RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError):
                with stopped_at(monkeypatch, number, error), pytest.raises(error):
                    model(x)
        assert_same(state_of(session), once)
