"""A compiled model stays compiled inside the monitor's block, and the values are those of its eager mode."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from functorch.compile import make_boxed_func, nop
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

import polyhead
from polyhead import MultiHeadAttention
from polyhead.errors import OptionError
from polyhead.integrations.huggingface.attention import TRACED, WATCHERS
from polyhead.observation.compiled import TracedCall, TracedModule
from polyhead.ops.attention import fused
from polyhead.ops.common.kernel_call import KernelCall
from polyhead.training import HeadGates, HeadHistory, HeadMonitor
from tests.layers.compiling import QUICK_INDUCTOR

SIZES = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 20}
EVERY_COLUMN = ("max_logit", "entropy", "normalized_entropy", "sink_mass", "mean_distance", "normalized_entropy_p10",
                "output_norm", "output_norm_share", "gradient_norm", "output_cosine", "gradient_cosine")  # fmt: skip


def llama(layers: int = 2) -> nn.Module:
    config = transformers.LlamaConfig(
        **SIZES, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, use_cache=False
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=61, n_embd=24, n_layer=1, n_head=3, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        **SIZES, num_hidden_layers=1, num_attention_heads=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return transformers.BertForMaskedLM(config)


def checkpointed(layers: int = 1) -> nn.Module:
    model = llama(layers)
    model.gradient_checkpointing_enable()
    return model


def seeded(create: Callable[[], nn.Module] = lambda: llama(1)) -> nn.Module:
    torch.manual_seed(0)
    return create().double().train()


def batches(count: int, *lengths: int) -> list[dict[str, Tensor]]:
    """Batches of which one sequence ends in padding."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(count):
        length = lengths[index % len(lengths)] if lengths else 11
        ids = torch.randint(1, 61, (3, length), generator=generator)
        real = torch.ones_like(ids)
        real[1, length - 4 :] = 0
        labels = ids.masked_fill(real == 0, -100)
        found.append({"input_ids": ids, "attention_mask": real, "labels": labels})
    return found


def padded_on_the_left(data: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    for batch in data:
        batch["attention_mask"] = batch["attention_mask"].flip(1)
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return data


def train(
    model: nn.Module,
    call: Callable[..., Any],
    data: list[dict[str, Tensor]],
    monitor: HeadMonitor | None = None,
    *,
    micro_batches: int = 1,
    evaluate: bool = False,
    rate: float = 0.1,
) -> list[list[Tensor]]:
    """Train, optionally with an evaluation in every step, and return the gradients of all steps."""
    optimizer, gradients = torch.optim.SGD(model.parameters(), lr=rate), []
    for start in range(0, len(data), micro_batches):
        for batch in data[start : start + micro_batches]:
            loss = call(**batch).loss
            loss.backward()
        if evaluate:
            model.eval()
            with torch.no_grad():
                call(**data[0])
            model.train()
        gradients.append([x.grad.clone() for x in model.parameters() if x.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.step(loss)
    return gradients


def whole(model: nn.Module, backend: str = "aot_eager") -> nn.Module:
    return torch.compile(model, backend=backend)


# In which way a model is compiled is a matter of Dynamo alone.
def in_place(model: nn.Module, backend: str = "eager") -> nn.Module:
    model.compile(backend=backend)
    return model


def layer_by_layer(model: nn.Module, backend: str = "eager") -> nn.Module:
    for layer in _layers(model):
        layer.compile(backend=backend)
    return model


def their_forwards(model: nn.Module, backend: str = "eager") -> nn.Module:
    for layer in _layers(model):
        layer.forward = torch.compile(layer.forward, backend=backend)
    return model


def _layers(model: nn.Module) -> list[nn.Module]:
    return [x for x in model.modules() if isinstance(x, transformers.modeling_layers.GradientCheckpointingLayer)]


def attention_alone(model: nn.Module, backend: str = "eager") -> nn.Module:
    """Compile what differs between models with and without a monitor, in a third of the time of a model."""
    for module in model.modules():
        if type(module).__name__ in ("LlamaAttention", "BertSelfAttention"):
            module.compile(backend=backend)
    return model


def assert_same(history: HeadHistory, expected: HeadHistory, columns: tuple[str, ...] = EVERY_COLUMN) -> None:
    assert (history.steps, history.heads, history.columns) == (expected.steps, expected.heads, expected.columns)
    for name in columns:
        torch.testing.assert_close(history[name], expected[name], rtol=1e-6, atol=1e-9, equal_nan=True, msg=name)
    assert not torch.allclose(history["max_logit"][0], history["max_logit"][-1], rtol=1e-3)


def compiled_graphs() -> int:
    return counters["stats"]["unique_graphs"]


class Compiled(NamedTuple):
    """A model of two layers that is compiled as a whole, in whose observed steps nothing is compiled any more."""

    model: nn.Module
    call: nn.Module
    weights: dict[str, Tensor]
    runs: list[int]  # an item for each run of a compiled graph
    graphs: int
    breaks: int


@pytest.fixture(scope="module")
def shared() -> Iterator[list[Compiled]]:
    """Compiled models that tests share; empty after compiled code was discarded."""
    yield []
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def _nothing_compiled(request: pytest.FixtureRequest, shared: list[Compiled]) -> Iterator[None]:
    """Start without compiled code; a warning, such as that of a model that falls back to eager mode, is an error."""
    if "compiled" not in request.fixturenames:
        torch.compiler.reset()
        shared.clear()
    counters.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*eager mode")
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # PyTorch's own
        yield


@pytest.fixture
def compiled(shared: list[Compiled]) -> Compiled:
    """The model that tests beside each other share, with its first weights. `compiled_graphs` counts the later ones."""
    if not shared:
        torch.compiler.reset()
        model, runs = seeded(llama), []

        def counting(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
            def run(*inputs: Any) -> Any:
                runs.append(1)
                return graph.forward(*inputs)

            return run

        call, weights = torch.compile(model, backend=counting), copy.deepcopy(model.state_dict())
        with HeadMonitor(model) as monitor:
            train(model, call, batches(2), monitor)
        shared.append(Compiled(model, call, weights, runs, compiled_graphs(), sum(counters["graph_break"].values())))
        counters.clear()
    shared[0].model.load_state_dict(shared[0].weights)
    shared[0].model.zero_grad()
    shared[0].runs.clear()
    return shared[0]


@pytest.mark.parametrize(
    ("create", "wrap"),
    [(llama, layer_by_layer), (gpt2, layer_by_layer), (bert, in_place), (checkpointed, attention_alone),
     (bert, their_forwards)],
)  # fmt: skip
def test_values_are_those_of_eager_mode_in_one_graph_without_a_break(create, wrap):
    model = seeded(create)
    assert_values_of_eager_mode(create, model, wrap(model), evaluate=create is gpt2)
    assert (compiled_graphs(), sum(counters["graph_break"].values())) == (1 + (create is gpt2), 0)


def assert_values_of_eager_mode(
    create: Callable[[], nn.Module], model: nn.Module, call: nn.Module, *, evaluate: bool = False
) -> None:
    data, eager_model = batches(6), seeded(create)
    with HeadMonitor(eager_model) as eager:
        train(eager_model, eager_model, data, eager, micro_batches=2, evaluate=evaluate)
    with HeadMonitor(model) as monitor:
        train(model, call, data, monitor, micro_batches=2, evaluate=evaluate)
    assert_same(monitor.history, eager.history)
    assert monitor.history["gradient_norm"].isfinite().all()
    assert monitor.history["output_norm"].isfinite().all()


def test_two_layers_of_a_graph_have_the_values_of_eager_mode(compiled):
    assert_values_of_eager_mode(llama, compiled.model, compiled.call)
    assert (compiled.graphs, compiled.breaks, compiled_graphs(), len(compiled.runs)) == (1, 0, 0, 4)


def test_the_first_token_is_the_first_after_padding_on_the_left(compiled):
    data = padded_on_the_left(batches(3))
    model = seeded(llama)
    with HeadMonitor(model) as eager:
        train(model, model, data, eager)
    with HeadMonitor(compiled.model) as monitor:
        train(compiled.model, compiled.call, data, monitor)
    assert (compiled_graphs(), len(compiled.runs)) == (0, 2)
    assert_same(monitor.history, eager.history)


def test_copies_and_other_models_are_not_observed(compiled):
    data = batches(2)
    model = seeded(llama)
    with HeadMonitor(model) as eager:
        train(model, model, data, eager)
    other = attention_alone(seeded(llama))
    with HeadMonitor(compiled.model) as monitor:
        for batch in data:
            copied = attention_alone(copy.deepcopy(compiled.model))
            copied(**data[0]).loss.backward()
            other(**data[0]).loss.backward()
            train(compiled.model, compiled.call, [batch], monitor)
    assert_same(monitor.history, eager.history)
    assert (compiled_graphs(), len(compiled.runs)) == (2, 1)


def test_other_sessions_force_eager_mode_and_change_nothing(compiled):
    data = batches(4)
    model = seeded(llama)
    with HeadMonitor(model) as eager:
        train(model, model, data, eager)
    with HeadMonitor(compiled.model) as monitor:
        train(compiled.model, compiled.call, data[:2], monitor)
        with polyhead.observe(compiled.model, statistics="entropy") as session:
            train(compiled.model, compiled.call, data[2:3], monitor)
        train(compiled.model, compiled.call, data[3:], monitor)
    assert_same(monitor.history, eager.history)
    assert session.profile["tokens"].unique().tolist() == [29]  # of one batch, without its padding
    assert (compiled_graphs(), len(compiled.runs)) == (0, 2)


def test_gates_of_a_session_that_is_entered_later_make_outputs_unknown(compiled):
    data, gates = batches(3), HeadGates(compiled.model)
    with HeadMonitor(compiled.model) as monitor:
        train(compiled.model, compiled.call, data[:2], monitor)
        with gates:
            train(compiled.model, compiled.call, data[2:], monitor)
    assert monitor.history["output_norm"].isnan().all(1).tolist() == [False, False, True]
    assert (compiled_graphs(), len(compiled.runs)) == (0, 1)


def test_a_resumed_run_has_the_history_of_an_uninterrupted_one(compiled):
    model, call, data = compiled.model, compiled.call, batches(4)
    with HeadMonitor(model) as uninterrupted:
        train(model, call, data, uninterrupted)
    model.load_state_dict(compiled.weights)
    with HeadMonitor(call) as first:
        train(model, call, data[:2], first)
    second = HeadMonitor(call)
    second.load_state_dict(first.state_dict())
    with second:
        train(model, call, data[2:], second)
    rows = tuple(x for x in EVERY_COLUMN if not x.endswith("cosine"))  # of the first observed step of each
    assert_same(second.history, uninterrupted.history, rows)
    assert (compiled_graphs(), len(compiled.runs)) == (0, 5)


def test_an_error_leaves_the_model_as_it_was(compiled, shared):
    model, call, data = compiled.model, compiled.call, batches(2)
    implementation, monitor = model.config._attn_implementation, HeadMonitor(model)
    with pytest.raises(ValueError, match="exactly one of input_ids"), monitor:
        train(model, call, [*data, {"labels": data[0]["labels"]}], monitor)
    shared.clear()  # Dynamo runs a function that has raised in eager mode from then on
    assert monitor.history.steps == (0, 1)
    assert (compiled_graphs(), len(compiled.runs)) == (0, 1)
    assert not any(hasattr(x, TRACED) or "_call_impl" in vars(x) for x in (call, *model.modules()))
    assert (model.config._attn_implementation, len(WATCHERS)) == (implementation, 0)


def test_gradients_are_those_of_the_compiled_model_without_a_monitor():
    data = batches(2)
    model = seeded(bert)  # without grouped heads, whose gradients transformers adds up in another order
    expected = train(model, attention_alone(model, "aot_eager"), data, rate=0.0)
    model = seeded(bert)
    with HeadMonitor(model) as monitor:
        gradients = train(model, attention_alone(model, "aot_eager"), data, monitor, rate=0.0)
    # The first step is in eager mode.
    assert all(torch.equal(x, y) for x, y in zip(gradients[1], expected[1], strict=True))


@pytest.mark.parametrize("padded", [False, True])
def test_gradients_of_a_model_with_eager_attention_are_its_own(padded):
    data = batches(2)
    for batch in data:
        batch["labels"] = batch["input_ids"]  # of padding as well
        if not padded:
            del batch["attention_mask"]
    gradients, histories = [], []
    for wrap, is_monitored in ((attention_alone, False), (lambda model: model, True), (attention_alone, True)):
        model = seeded()
        model.set_attn_implementation("eager")
        with HeadMonitor(model) if is_monitored else nullcontext() as monitor:
            gradients.append(train(model, wrap(model), data, monitor, rate=0.0))
            histories.append(None if monitor is None else monitor.history)
        torch.compiler.reset()
    assert_same(histories[2], histories[1])
    for step in (0, 1):
        for own, *others in zip(*(x[step] for x in gradients), strict=True):
            for other in others:
                torch.testing.assert_close(other, own, rtol=1e-5, atol=1e-7)


def test_between_observed_steps_the_compiled_code_is_the_models_own_and_nothing_is_compiled_twice():
    model, data, graphs = attention_alone(seeded()), batches(9), []
    model(**data[0])  # transformers stores the loss function
    torch.compiler.reset()
    counters.clear()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    implementation, saved = model.config._attn_implementation, set(model.state_dict())
    with HeadMonitor(model, every=2) as monitor:
        for batch in data:
            train(model, model, [batch], monitor, evaluate=True)
            graphs.append(compiled_graphs())
            is_traced = all(hasattr(x, TRACED) for x in model.modules() if type(x).__name__ == "LlamaAttention")
            assert is_traced == (monitor.is_observing and monitor.steps > 1)
    # Step 0 is in eager mode, step 1 plain, step 2 observed; each with its evaluation.
    assert graphs == [0, 2, 4, 4, 4, 4, 4, 4, 4]
    train(model, model, data[:2], evaluate=True)
    assert compiled_graphs() == 4
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert (model.config._attn_implementation, set(model.state_dict()), len(WATCHERS)) == (implementation, saved, 0)
    eager_model = seeded()
    with HeadMonitor(eager_model, every=2) as eager:
        train(eager_model, eager_model, data, eager)
    assert_same(monitor.history, eager.history)


@pytest.mark.parametrize("most_versions", [8, 1])
def test_batches_of_other_lengths_are_observed_in_eager_mode_as_well(most_versions):
    """Above the limit of recompilations PyTorch continues in eager mode."""
    data = batches(3, 11, 7, 13)
    model = seeded()
    with HeadMonitor(model) as eager:
        train(model, model, data, eager)
    model = seeded()
    call = attention_alone(model)
    with HeadMonitor(model) as monitor, torch._dynamo.config.patch(recompile_limit=most_versions):
        train(model, call, data, monitor)
    assert compiled_graphs() == min(most_versions, 2)
    assert_same(monitor.history, eager.history)


def test_modules_that_are_replaced_between_observed_steps_are_observed():
    data, histories = batches(7), []
    for wrap in (lambda model: model, attention_alone):
        model = wrap(seeded())
        with HeadMonitor(model, every=2) as monitor:
            train(model, model, data[:3], monitor)
            model.model.layers[0].self_attn = copy.deepcopy(model.model.layers[0].self_attn)
            train(model, model, data[3:], monitor)
        histories.append(monitor.history)
    assert_same(histories[1], histories[0], ("max_logit", "entropy", "gradient_norm"))
    assert histories[1]["output_norm"].isfinite().all()


def test_packed_documents_are_observed_in_eager_mode():
    """Their sinks are the first tokens of documents."""
    ids = batches(1)[0]["input_ids"]
    positions = torch.cat([torch.arange(5), torch.arange(6)]).expand_as(ids)
    model = seeded()
    call = whole(model, "eager")
    with HeadMonitor(model) as monitor:
        with pytest.warns(UserWarning, match="within packed documents"):
            monitor.step(_backward(call(ids, position_ids=positions, labels=ids).loss))
        monitor.step(_backward(call(ids, position_ids=positions, labels=ids).loss))
    torch.testing.assert_close(monitor.history["sink_mass"][1], monitor.history["sink_mass"][0])
    assert compiled_graphs() == 0


def test_a_forward_that_raises_does_not_count():
    data, histories = batches(3), []
    for wrap in (lambda model: model, attention_alone):
        model = wrap(seeded())
        with HeadMonitor(model) as monitor:
            train(model, model, data[:1], monitor)

            def fail(*_: object) -> None:
                raise ZeroDivisionError

            hook = model.model.norm.register_forward_pre_hook(fail)  # after all layers
            with pytest.raises(ZeroDivisionError):
                model(**data[2])
            hook.remove()
            train(model, model, data[1:2], monitor)
        histories.append(monitor.history)
    assert compiled_graphs() > 0
    assert_same(histories[1], histories[0])


def test_a_compiled_backward_computes_the_forward_again_without_counting_it():
    model = seeded(checkpointed)
    call = whole(model)
    with functorch_config.patch(donated_buffer=False):  # for two backwards
        assert_values_of_eager_mode(checkpointed, model, call)
        assert_two_backwards_have_no_gradient_norm(model, call)
    assert (compiled_graphs(), sum(counters["graph_break"].values())) == (1, 0)


def test_two_backwards_through_one_forward_have_no_gradient_norm():
    model = attention_alone(seeded())
    assert_two_backwards_have_no_gradient_norm(model, model)
    assert compiled_graphs() == 1


def assert_two_backwards_have_no_gradient_norm(model: nn.Module, call: nn.Module) -> None:
    first, second = batches(2)
    with HeadMonitor(model) as monitor:
        train(model, call, [first], monitor)
        loss = call(**second).loss
        loss.backward(retain_graph=True)
        loss.backward()
        monitor.step(loss)
    norms = monitor.history["gradient_norm"]
    assert norms[0].isfinite().all()
    assert norms[1].isnan().all()


def test_an_unscaled_loss_in_half_autocast_is_refused():
    torch.manual_seed(0)
    model = attention_alone(llama(1).train())
    first, second = batches(2)
    with HeadMonitor(model) as monitor:
        train(model, model, [first], monitor)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(**second).loss
        with pytest.raises(OptionError, match="GradScaler"):
            monitor.step(loss)
        monitor._session.take()


def test_a_cache_that_the_first_step_had_not_is_refused():
    model = attention_alone(seeded())
    first, second = batches(2)
    cache = transformers.DynamicCache(config=model.config)
    with HeadMonitor(model) as monitor:
        train(model, model, [first], monitor)
        with torch.no_grad(), torch._dynamo.set_stance("force_eager"):
            model.eval()(second["input_ids"], past_key_values=cache, use_cache=True)
        model.train()
        with pytest.raises(OptionError, match=r"the same tokens, got a cache in 'model\.layers\.0"):
            model(input_ids=second["input_ids"], past_key_values=cache, use_cache=True)


class OurLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x).output


def test_what_stays_in_eager_mode_is_warned_about_once_and_measured():
    layer = OurLayer().train()
    call, x = torch.compile(layer, backend="eager"), torch.randn(2, 5, 24)
    model, (batch, *_) = seeded(), batches(1)
    by_function = torch.compile(lambda **inputs: model(**inputs).loss, backend="eager")
    cases = [
        (layer, lambda: call(x).square().mean(), "MultiHeadAttention does not use the attention interface"),
        (model, lambda: by_function(**batch), "called by a compiled function; compile the model itself"),
    ]
    for observed, compute, reason in cases:
        with HeadMonitor(observed) as monitor:
            with pytest.warns(UserWarning, match=f"runs in eager mode in observed steps: .*{reason}"):
                monitor.step(_backward(compute()))
            monitor.step(_backward(compute()))  # without a warning, which would be an error
        assert monitor.history["gradient_norm"].isfinite().all()
    assert compiled_graphs() == 0


def _backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss


def test_inductor_computes_the_same_up_to_rounding():
    data, names = batches(3), ("max_logit", "entropy", "output_norm", "gradient_norm")
    model = seeded(bert)
    with HeadMonitor(model, statistics=names) as eager:
        train(model, model, data, eager)
    model = seeded(bert)
    model.bert.encoder.layer[0].attention.self.compile()  # the C++ compiler takes seconds for each kernel
    with inductor_config.patch(QUICK_INDUCTOR), HeadMonitor(model, statistics=names) as monitor:
        train(model, model, data, monitor)
    assert compiled_graphs() == 1
    assert_same(monitor.history, eager.history, names)


def test_one_pass_for_output_and_statistics_has_the_same_values(monkeypatch):
    """As with the kernels of a GPU, whose gradients also pass the attention that computes statistics."""

    def with_kernel(self: TracedModule, _: nn.Module, *inputs: Any, learned_sinks: bool) -> TracedCall:
        return TracedCall(self, *inputs, has_kernel=True)

    monkeypatch.setattr(TracedModule, "__call__", with_kernel)
    data = padded_on_the_left(batches(3))
    model = seeded()
    with HeadMonitor(model) as eager:
        train(model, model, data, eager)
    model = seeded()
    with HeadMonitor(model) as monitor:
        train(model, attention_alone(model, "aot_eager"), data, monitor)
    assert compiled_graphs() == 1
    assert_same(monitor.history, eager.history)


def test_outputs_of_heads_are_saved_once_for_the_backward(monkeypatch):
    """In the graphs of a GPU; the operator of its kernels computes nothing here but has their shapes and layout."""

    def with_kernel(self: TracedModule, _: nn.Module, *inputs: Any, learned_sinks: bool) -> TracedCall:
        return TracedCall(self, *inputs, has_kernel=True)

    def no_reasons(device: torch.device) -> list[str]:
        return [] if torch.compiler.is_compiling() else ["only compiled code pretends to have kernels"]

    def fake_compute(call: KernelCall) -> list[Tensor]:
        rows = [torch.ones(call.query.shape[:-1]) for _ in range(1 + len(call.names))]
        return [torch.full_like(call.query, 0.375), *rows]

    saved: list[int] = []

    def counting(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        def run(*inputs: Tensor) -> Any:
            results = graph.forward(*inputs)
            outputs = [x for x in results if isinstance(x, Tensor) and x.numel() == sizes and (x == 0.375).all()]
            saved.append(len({x.untyped_storage().data_ptr() for x in outputs}))
            return results

        return make_boxed_func(run)

    monkeypatch.setattr(TracedModule, "__call__", with_kernel)
    monkeypatch.setattr(fused, "device_reasons", no_reasons)
    monkeypatch.setattr(fused, "compute", fake_compute)
    torch.manual_seed(0)
    model, ids = llama().train(), batches(1)[0]["input_ids"]
    sizes, layers = ids.numel() * SIZES["hidden_size"], len(_layers(model))
    call = torch.compile(model, backend=aot_autograd(fw_compiler=counting, bw_compiler=nop))
    with HeadMonitor(model) as monitor:
        for _ in range(2):
            monitor.step(call(ids, labels=ids).loss)
    assert saved == [layers]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_forward_without_gradients_is_observed(backend):
    """Nothing reads what its operators return."""
    (first, second), names = batches(2), ("max_logit", "output_norm")
    model = seeded(bert).requires_grad_(False)
    with HeadMonitor(model, statistics=names) as eager:
        for batch in (first, second):
            eager.step(model(**batch).loss)
    model.bert.encoder.layer[0].attention.self.compile(backend=backend)
    with inductor_config.patch(QUICK_INDUCTOR), HeadMonitor(model, statistics=names) as monitor:
        for batch in (first, second):
            monitor.step(model(**batch).loss)
    assert compiled_graphs() == 1
    assert monitor.history["output_norm"].isfinite().all()
    torch.testing.assert_close(monitor.history["output_norm"], eager.history["output_norm"])


# Inductor would rather have TensorFloat32, which is not requested here.
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.gpu
def test_compiled_steps_on_a_gpu():
    """Nothing waits for the device after the first steps, and the values are those of eager mode."""
    from tests.waiting import waiting_is_an_error

    torch.manual_seed(0)
    state = llama().state_dict()
    data, histories = [batch["input_ids"].cuda() for batch in batches(6)], []
    for is_compiled in (False, True):
        model = llama().train().cuda()
        model.load_state_dict(state)
        call = torch.compile(model) if is_compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with HeadMonitor(model, pairs_every=2) as monitor:
            for step, ids in enumerate(data):
                with waiting_is_an_error() if is_compiled and step == 3 else nullcontext():
                    loss = call(ids, labels=ids).loss
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                monitor.step(loss)
        histories.append(monitor.history)
    assert compiled_graphs() == 1
    for name in EVERY_COLUMN:
        torch.testing.assert_close(histories[1][name], histories[0][name], rtol=1e-3, atol=1e-3, equal_nan=True)
