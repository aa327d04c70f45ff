"""The layer in what people do with layers: compilers, exporters, autocast, copies, ragged tensors, nothing at all."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._inductor import config as inductor_config

from polyhead import Mask, MultiHeadAttention
from polyhead.errors import OptionError
from polyhead.layers.kv_cache import GrowingCache, PreallocatedCache
from polyhead.layers.positions import ALiBi, Learned, Rotary, Sinusoidal, T5Bias
from tests.error_budget import DRAWS, Compared, assert_draws_within_error_budget
from tests.layers.compiling import QUICK_INDUCTOR, with_dynamic_sizes
from tests.waiting import waiting_is_an_error

BATCH, LENGTH, EMBED, HEADS, KV_HEADS, HEAD_DIM = 3, 7, 24, 4, 2, 6
pytestmark = [
    # Said once by PyTorch on a CPU without bfloat16 instructions.
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning"),
    # Dynamo instantiates an autograd function, which PyTorch itself deprecates.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
OTHER = (5, 11)  # a second batch and length
DOUBLE = torch.float64

OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "causal": lambda: {"causal": True},
    "grouped, causal, rotary": lambda: {"num_kv_heads": KV_HEADS, "causal": True, "positions": Rotary(HEAD_DIM)},
    "ALiBi": lambda: {"causal": True, "positions": ALiBi(HEADS)},
    "T5": lambda: {"positions": T5Bias(HEADS)},
    "learned": lambda: {"positions": Learned(31, EMBED)},
    "sinusoidal": lambda: {"positions": Sinusoidal(EMBED)},
    "sinks, softcap": lambda: {"sinks": True, "softcap": 2.0},
    "window": lambda: {"causal": True, "window": 3},
    "norms, gate, values of their own": lambda: {"qk_norm": "rms", "output_gate": "channel", "value_dim": 5},
}


def make(*names: str, **more: Any) -> MultiHeadAttention:
    """A layer with the options of all these names, none of whose parameters has its neutral value."""
    options = {key: value for name in names for key, value in OPTIONS[name]().items()}
    layer = MultiHeadAttention(EMBED, HEADS, **options, **more)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return layer


def randn(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randn(batch, length, EMBED)


def close(actual: Tensor, expected: Tensor) -> None:
    """float32 whose sums were taken in another order."""
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# ---- torch.compile


def results(call: Callable[[Tensor], Any], layer: MultiHeadAttention, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of every parameter, all in units of the largest."""
    leaf = x.clone().requires_grad_()
    output = call(leaf).output
    grads = torch.autograd.grad(output.square().sum(), [leaf, *layer.parameters()])
    largest = max(float(grad.abs().max()) for grad in grads)
    return [output.detach(), *(grad / largest for grad in grads)]


def assert_compiles(call: Callable[[Tensor], Any], layer: MultiHeadAttention, x: Tensor, tolerance: float) -> None:
    for ours, exact in zip(results(call, layer, x), results(layer, layer, x), strict=True):
        torch.testing.assert_close(ours, exact, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_inductor_compiles_the_layer_whole_forward_and_backward() -> None:
    layer = make("grouped, causal, rotary")
    with inductor_config.patch(QUICK_INDUCTOR):
        assert_compiles(torch.compile(layer, fullgraph=True), layer, randn(), 1e-5)


def test_one_graph_takes_lengths_that_change_from_call_to_call() -> None:
    layer = make("grouped, causal, rotary")
    compiled = torch.compile(lambda x, n: layer(x, mask=Mask.lengths(n)).output, fullgraph=True, backend="eager")
    with torch.no_grad():
        for lengths in ([LENGTH, 0, 4], [1, 2, 3]):
            x = randn()
            close(compiled(x, torch.tensor(lengths)), layer(x, mask=Mask.lengths(lengths)).output)


# Each option once: one here with any batch and length, the others below with one batch and length.
def test_one_graph_trains_with_any_batch_and_length() -> None:
    layer = make("grouped, causal, rotary").double()
    compiled = with_dynamic_sizes(torch.compile(layer, fullgraph=True, backend="aot_eager"), 0, 1)
    assert_compiles(compiled, layer, randn().double(), 1e-12)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_compiles(compiled, layer, randn(*OTHER).double(), 1e-12)


def test_a_graph_with_unrolled_loops_takes_another_batch_and_length_by_another_graph() -> None:
    """T5 trains with `blockwise`, whose loops are unrolled. Dynamo alone traces it here.

    The gradients of a relative table after AOTAutograd are compared in tests/ops/attention/test_programs.py.
    """
    layer = make("T5").double()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for shape in ((BATCH, LENGTH), OTHER):
        assert_compiles(compiled, layer, randn(*shape).double(), 1e-12)


# Options that do not exclude each other share a graph, those of `blockwise` and those of PyTorch's attention apart.
# Biases by distance go through AOTAutograd in tests/ops/attention/test_programs.py; the plain layer does below.
@pytest.mark.parametrize(
    ("options", "backend"),
    [
        (("sinks, softcap", "norms, gate, values of their own"), "aot_eager"),
        (("sinusoidal", "window"), "aot_eager"),
        (("ALiBi",), "eager"),
    ],
)
def test_every_option_traces_whole(options: tuple[str, ...], backend: str) -> None:
    layer = make(*options).double()
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend=backend)
    assert_compiles(compiled, layer, randn().double(), 1e-12)


def test_a_compiled_layer_takes_masks_gates_sources_and_gives_weights() -> None:
    layer = make()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, source, gate = randn(), randn(BATCH, 13), torch.rand(BATCH, HEADS, LENGTH, requires_grad=True)
    outputs = [call(x, source, head_gate=gate).output for call in (compiled, layer)]
    close(*outputs)
    learned = [gate, *layer.parameters()]
    for ours, exact in zip(*(torch.autograd.grad(y.mean(), learned) for y in outputs), strict=True):
        close(ours, exact)
    # What AOTAutograd makes of every kind of mask, with gradients: tests/ops/attention/test_programs.py.
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.no_grad():
        requested = {"weights": True, "logsumexp": True}
        found, expected = compiled(x, layer.remember(source), **requested), layer(x, source, **requested)
        for name in ("output", "weights", "logsumexp"):
            close(getattr(found, name), getattr(expected, name))
        lengths, documents = torch.tensor([LENGTH, 1, 4]), torch.tensor([[0, 0, 1, 1, 1, 2, -1]] * BATCH)
        dense, bias = torch.rand(LENGTH, LENGTH) > 0.3, torch.randn(BATCH, HEADS, LENGTH, LENGTH)

        def masked(x: Tensor, lengths: Tensor, documents: Tensor, dense: Tensor, bias: Tensor) -> Tensor:
            mask = Mask.causal() & Mask.lengths(lengths) & Mask.documents(documents) & Mask.dense(dense)
            return layer(x, mask=mask & Mask.bias(bias)).output

        tensors = (x, lengths, documents, dense, bias)
        close(torch.compile(masked, fullgraph=True, backend="eager")(*tensors), masked(*tensors))


@pytest.mark.parametrize("lengths", [None, [LENGTH, 2, 5]])
def test_a_compiled_layer_generates_with_a_cache(lengths: list[int] | None) -> None:
    layer = make("grouped, causal, rotary").eval()
    # AOTAutograd follows the steps with lengths: their writes into the cache by index are those it may get wrong.
    prompt = torch.compile(layer, fullgraph=True, backend="eager")
    step = torch.compile(layer, fullgraph=True, backend="aot_eager" if lengths else "eager")
    with torch.no_grad():
        results = []
        for first, further in ((prompt, step), (layer, layer)):
            torch.manual_seed(5)
            cache = PreallocatedCache.for_layout(layer.layout, batch_size=BATCH, capacity=17)
            steps = [first(randn(), cache=cache, lengths=lengths).output]
            steps += [further(randn(length=1), cache=cache).output for _ in range(3)]
            results.append(torch.cat(steps, 1))
    close(*results)


def test_compiled_dropout_with_a_seed_is_that_of_the_formula() -> None:
    layer, x = make(dropout=0.4), randn()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    seed = torch.tensor([11])
    with torch.no_grad():  # gradients of a compiled dropout: tests/ops/attention/test_programs.py
        close(compiled(x, seed=seed).output, layer(x, seed=seed, backend="reference").output)


def test_compiled_layers_see_weights_that_change() -> None:
    layer, x = make(), randn()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        output = compiled(x).output
        close(output, layer(x).output)
        output.square().mean().backward()
        optimizer.step()


# ---- torch.export and ONNX

BATCHES, LENGTHS = torch.export.Dim("batch", max=97), torch.export.Dim("length", max=31)


class OutputOnly(nn.Module):
    """Files of programs hold tensors alone; the layer's output also names its backend."""

    def __init__(self, layer: MultiHeadAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).output


# Every option, several in a layer; the tracer that is not strict meets the common layer in the test of files below.
@pytest.mark.parametrize(
    ("options", "strict"),
    [
        (("grouped, causal, rotary",), True),
        (("ALiBi",), False),
        (("T5", "sinks, softcap"), False),
        (("learned", "norms, gate, values of their own"), False),
        (("sinusoidal", "window"), False),
    ],
)
def test_export_with_dynamic_batch_and_length(options: tuple[str, ...], strict: bool) -> None:
    layer = make(*options).eval()
    program = torch.export.export(layer, (randn(),), dynamic_shapes=({0: BATCHES, 1: LENGTHS},), strict=strict)
    for shape in ((BATCH, LENGTH), OTHER, (2, 31)):
        x = randn(*shape)
        result = program.module()(x)
        assert type(result) is type(layer(x))
        close(result.output, layer(x).output)


# The projections lie side by side in one piece of memory, none of them all of it; the archive then saves the piece.
@pytest.mark.filterwarnings("ignore:No complete tensor found in the group:UserWarning")
# torch 2.11 reads the archive into a tensor over memory that it may not write to.
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
def test_an_exported_program_survives_its_file() -> None:
    module = OutputOnly(make("grouped, causal, rotary")).eval()
    shapes = ({0: BATCHES, 1: LENGTHS},)
    program = torch.export.export(module, (randn(),), dynamic_shapes=shapes, strict=False)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for shape in ((BATCH, LENGTH), OTHER, (2, 31)):
        x = randn(*shape)
        close(loaded(x), module(x))


class TwoWays(nn.Module):
    """A layer that goes through the formula, and one that goes through PyTorch's attention with lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.formula = make("sinks, softcap")
        self.common = make(num_kv_heads=KV_HEADS, causal=True, positions=Rotary(HEAD_DIM, rotary_dim=4))

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return self.formula(x).output, self.common(x, mask=Mask.lengths(lengths)).output


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:# The axis name:UserWarning")  # that batch names one size in both inputs
def test_onnx_runs_in_onnxruntime_with_any_batch_and_length_and_lengths_as_an_input(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    module, any_length = TwoWays().eval(), torch.export.Dim("length")
    shapes = ({0: BATCHES, 1: any_length}, {0: BATCHES})
    inputs = (randn(), torch.tensor([LENGTH, 1, 4]))
    program = torch.onnx.export(module, inputs, dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert program is not None
    program.save(str(path := tmp_path / "layer.onnx"))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]
    for lengths in ([LENGTH, 1, 4], [11, 0, 3, 1, 7], [301, 2], [1]):
        x, given = randn(len(lengths), max(lengths)), torch.tensor(lengths)
        found = session.run(None, dict(zip(names, (x.numpy(), given.numpy()), strict=True)))
        for ours, expected in zip(found, module(x, given), strict=True):
            close(torch.from_numpy(ours), expected.detach())


# ---- dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS)
def test_autocast_computes_in_half_precision_and_keeps_the_weights(options: str, dtype: torch.dtype) -> None:
    layer, x = make(options), randn()
    exact = copy.deepcopy(layer).double()(x.double()).output.detach()
    with torch.autocast("cpu", dtype):
        output = layer(x).output
    assert output.dtype is dtype
    # Sums of 24 numbers of size 1, a handful of them in a row, each rounded to `dtype`.
    bound = 16 * torch.finfo(dtype).eps * float(exact.abs().max())
    assert float((output.double() - exact).abs().max().detach()) < bound
    output.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_dtype_goes_in_and_comes_out(dtype: torch.dtype) -> None:
    layer = make("grouped, causal, rotary").to(dtype)
    result = layer(randn().to(dtype), weights=True, logsumexp=True)
    accumulated = torch.float64 if dtype is DOUBLE else torch.float32
    assert (result.output.dtype, result.weights.dtype, result.logsumexp.dtype) == (dtype, accumulated, accumulated)
    assert MultiHeadAttention(EMBED, HEADS, dtype=dtype, sinks=True, qk_norm="layer").sinks.dtype is dtype


# ---- copies, files and devices


@pytest.mark.parametrize("options", OPTIONS)
def test_copies_and_files_give_the_same_numbers(options: str, tmp_path: Path) -> None:
    layer, x = make(options), randn()
    exact = layer(x).output
    assert torch.equal(copy.deepcopy(layer)(x).output, exact)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x).output, exact)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = make(options)
    assert not torch.allclose(other(x).output, exact)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x).output, exact)
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    again = make(options)
    again.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    assert torch.equal(again(x).output, exact)


def test_a_copy_shares_nothing_with_the_original() -> None:
    layer, x = make(), randn()
    exact, twin = layer(x).output.detach(), copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(layer(x).output, exact)


@pytest.mark.parametrize(
    "options", ["plain", "grouped, causal, rotary", "sinks, softcap", "norms, gate, values of their own"]
)
def test_a_layer_made_on_the_meta_device_takes_no_memory_and_loads(options: str) -> None:
    source, x = make(options), randn()
    built = OPTIONS[options]()
    layer = MultiHeadAttention(EMBED, HEADS, **built, device="meta")
    assert all(parameter.is_meta for parameter in layer.parameters())
    assert layer(x.to("meta")).output.shape == (BATCH, LENGTH, EMBED)
    layer.to_empty(device="cpu")
    layer.load_state_dict(source.state_dict())
    assert torch.equal(layer(x).output, source(x).output)
    with torch.device("meta"):
        other = MultiHeadAttention(EMBED, HEADS, **OPTIONS[options]())
    other.load_state_dict(source.state_dict(), assign=True)
    close(other(x).output, source(x).output)


def test_a_layer_made_on_the_meta_device_can_be_initialised_in_place() -> None:
    layer = MultiHeadAttention(EMBED, HEADS, sinks=True, output_gate="head", device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    assert bool((layer.q_proj.bias == 0).all())
    assert bool((layer.sinks == 0).all())
    bound = (6 / (2 * EMBED)) ** 0.5
    assert 0.8 * bound < float(layer.q_proj.weight.detach().abs().max()) <= bound


# ---- ragged batches

SEQUENCES = [5, 1, 0, 11, 3]


def sequences() -> list[Tensor]:
    return [torch.randn(length, EMBED, dtype=DOUBLE) for length in SEQUENCES]


def jagged(parts: list[Tensor]) -> Tensor:
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


@pytest.mark.parametrize("options", OPTIONS)
def test_jagged_and_packed_sequences_are_the_sequences_one_by_one(options: str) -> None:
    layer, parts = make(options).double(), sequences()
    alone = [layer(part[None]).output[0] for part in parts]
    result = layer(jagged(parts))
    assert result.output.is_nested
    for ours, exact in zip(result.output.unbind(), alone, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-11)
    packed = torch.cat(parts)[None]
    ids = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(SEQUENCES))
    places = torch.cat([torch.arange(length) for length in SEQUENCES])
    together = layer(packed, mask=Mask.documents(ids), token_positions=places).output[0]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-11, atol=1e-11)
    padded = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=torch.nan)
    within = layer(padded.nan_to_num(7.0), mask=Mask.lengths(SEQUENCES)).output
    for row, exact in enumerate(alone):
        torch.testing.assert_close(within[row, : len(exact)], exact, rtol=1e-11, atol=1e-11)


def test_jagged_sequences_have_the_gradients_of_the_sequences_one_by_one() -> None:
    layer, parts = make("causal").double(), sequences()
    sum(layer(part[None]).output.square().sum() for part in parts).backward()  # type: ignore[union-attr]
    alone = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    layer(jagged(parts)).output.values().square().sum().backward()
    for parameter, exact in zip(layer.parameters(), alone, strict=True):
        torch.testing.assert_close(parameter.grad, exact, rtol=1e-11, atol=1e-11)


def test_jagged_sequences_take_a_mask_and_a_gate() -> None:
    layer, parts = make().double(), sequences()
    gate = torch.rand(HEADS, dtype=DOUBLE)
    result = layer(jagged(parts), mask=Mask.window(2), head_gate=gate).output
    for ours, part in zip(result.unbind(), parts, strict=True):
        exact = layer(part[None], mask=Mask.window(2), head_gate=gate).output[0]
        torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-11)


def test_jagged_sequences_refuse_what_has_no_jagged_form() -> None:
    layer, x = make().double(), jagged(sequences())
    with pytest.raises(OptionError, match="a jagged nested query attends to itself"):
        layer(x, x)
    with pytest.raises(OptionError, match="takes no cache, lengths, token_positions or value"):
        layer(x, cache=GrowingCache())
    with pytest.raises(OptionError, match=r"have no jagged form; pad and use Mask.lengths"):
        layer(x, weights=True)


# ---- nothing at all


@pytest.mark.parametrize("backend", ["auto", "reference", "blockwise", "sdpa"])
@pytest.mark.parametrize("shape", [(0, LENGTH), (BATCH, 0), (0, 0)])
@pytest.mark.parametrize("options", ["plain", "grouped, causal, rotary", "ALiBi", "learned", "window"])
def test_empty_batches_and_sequences_go_through_forward_and_backward(
    options: str, shape: tuple[int, int], backend: str
) -> None:
    layer = make(options)
    for mask in (None, Mask.lengths([0] * shape[0])):
        x = randn(*shape).requires_grad_()
        result = layer(x, mask=mask, backend=backend)
        assert result.output.shape == (*shape, EMBED)
        layer.zero_grad()
        result.output.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape
        assert all(p.grad is None or not bool(p.grad.any()) for p in layer.parameters())


def test_a_sequence_without_a_real_token_gives_the_output_bias_and_no_gradient() -> None:
    layer = make("causal")
    x = randn().requires_grad_()
    output = layer(x, mask=Mask.lengths([LENGTH, 0, 2])).output
    assert torch.equal(output[1], layer.out_proj.bias.expand(LENGTH, -1))
    output[1].sum().backward()
    assert x.grad is not None
    assert not bool(x.grad.any())
    assert not bool(layer.v_proj.weight.grad.any())


# ---- on a GPU


GPU_CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "alone": dict,
    "causal": lambda: {"mask": Mask.causal()},
    "lengths on the host": lambda: {"mask": Mask.causal() & Mask.lengths([64, 5, 31])},
    "lengths on the device": lambda: {"mask": Mask.lengths(torch.tensor([64, 0, 31]).cuda())},
    "documents": lambda: {"mask": Mask.documents(torch.arange(64).cuda() // 17)},
    "gate": lambda: {"head_gate": torch.rand(8).cuda()},
    "weights": lambda: {"weights": True},
}


def gpu_layer(**options: Any) -> MultiHeadAttention:
    return MultiHeadAttention(256, 8, **options, device="cuda", dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("call", GPU_CALLS)
@pytest.mark.parametrize("options", ["plain", "grouped, causal, rotary", "ALiBi", "everything"])
def test_a_forward_on_a_gpu_never_waits_for_it(options: str, call: str, training: bool) -> None:
    built: dict[str, Any] = {
        "plain": {},
        "grouped, causal, rotary": {"num_kv_heads": 2, "causal": True, "positions": Rotary(32)},
        "ALiBi": {"positions": ALiBi(8), "causal": True},
        "everything": {"sinks": True, "softcap": 9.0, "qk_norm": "rms", "output_gate": "head", "dropout": 0.1},
    }[options]
    layer = gpu_layer(**built).train(training)
    x, arguments = torch.randn(3, 64, 256, device="cuda", dtype=torch.bfloat16), GPU_CALLS[call]()
    with torch.set_grad_enabled(training):
        layer(x, **arguments)  # kernels are loaded on first use, which waits
        with waiting_is_an_error():
            output = layer(x, **arguments).output
            if training:
                output.float().square().mean().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [None, [64, 5, 31]])
def test_decoding_on_a_gpu_never_waits_for_it(lengths: list[int] | None) -> None:
    layer = gpu_layer(num_kv_heads=2, causal=True, positions=Rotary(32)).eval()
    prompt, token = (torch.randn(3, n, 256, device="cuda", dtype=torch.bfloat16) for n in (64, 1))
    for attempt in range(2):
        cache = PreallocatedCache.for_layout(
            layer.layout, batch_size=3, capacity=97, dtype=torch.bfloat16, device="cuda"
        )
        with torch.no_grad():
            if attempt == 0:
                layer(prompt, cache=cache, lengths=lengths)
                layer(token, cache=cache)
                continue
            with waiting_is_an_error():
                layer(prompt, cache=cache, lengths=lengths)
                for _ in range(3):
                    layer(token, cache=cache)


def plain_formula(layer: MultiHeadAttention, x: Tensor, causal: bool) -> Tensor:
    """The formula with every intermediate rounded to the input's dtype: what the error budget is measured by."""
    split = lambda y, heads: y.unflatten(-1, (heads, -1)).transpose(1, 2)  # noqa: E731
    layout = layer.layout
    q = split(layer.q_proj(x), layout.num_heads)
    k, v = (
        split(linear(x), layout.num_kv_heads).repeat_interleave(layout.group_size, 1)
        for linear in (layer.k_proj, layer.v_proj)
    )
    if layer.positions is not None:
        q, k = layer.positions(q), layer.positions(k)
    logits = (q @ k.mT) * layout.head_dim**-0.5
    if causal:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        logits = logits.masked_fill(later, -torch.inf)
    return layer.out_proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))


BUDGET: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": lambda head_dim: {},
    "causal": lambda head_dim: {"causal": True},
    "grouped, causal, rotary": lambda head_dim: {"num_kv_heads": 2, "causal": True, "positions": Rotary(head_dim)},
}


@pytest.mark.numerics
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("options", BUDGET)
def test_bfloat16_outputs_and_gradients_stay_within_the_error_budget(options: str, device: str) -> None:
    """error <= 2 * error of the plain formula + 2 * eps * max|exact|, for the output and every gradient."""
    heads, head_dim, length = (8, 32, 67) if device == "cuda" else (4, 10, 19)
    settings, embed = BUDGET[options](head_dim), heads * head_dim
    layer = MultiHeadAttention(embed, heads, **settings, device=device, dtype=torch.bfloat16)
    exact_layer = copy.deepcopy(layer).double()
    causal = bool(settings.get("causal"))
    names = ["output", "input", *dict(layer.named_parameters())]

    def sample() -> dict[str, Compared]:
        x, direction = (torch.randn(3, length, embed, device=device, dtype=torch.bfloat16) for _ in range(2))

        def outcome(module: MultiHeadAttention, call: Callable[[Tensor], Tensor], dtype: torch.dtype) -> list[Tensor]:
            leaf = x.to(dtype).requires_grad_()
            output = call(leaf)
            grads = torch.autograd.grad(output, [leaf, *module.parameters()], direction.to(dtype))
            return [t.detach() for t in (output, *grads)]

        ours = outcome(layer, lambda y: layer(y).output, torch.bfloat16)
        exact = outcome(exact_layer, lambda y: exact_layer(y, backend="reference").output, DOUBLE)
        plain = outcome(layer, lambda y: plain_formula(layer, y, causal), torch.bfloat16)
        found = {name: Compared(*parts) for name, *parts in zip(names, ours, exact, plain, strict=True)}
        if layer.positions is None:
            del found["k_proj.bias"]  # it is exactly zero: a bias on all keys moves all logits of a row alike
        return found

    assert_draws_within_error_budget([sample() for _ in range(DRAWS)])
