"""What every layer promises whose heads are combined by a module: masks, caches, gates, statistics and programs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyhead
from polyhead import KVCache, Mask, MultiHeadAttention
from polyhead.errors import CheckpointError, OptionError
from polyhead.geometry import HeadLayout
from polyhead.layers.combining import HeadCombiner
from polyhead.layers.kv_cache import GrowingCache, PagedCache, PreallocatedCache, RollingCache
from polyhead.layers.multi_head.projected import ProjectedHeads
from polyhead.layers.positions import ALiBi, Learned, Rotary
from polyhead.layers.variants.grouped import GroupedHeads
from polyhead.layers.variants.mixing import HeadMix
from tests.gradients import FAST
from tests.layers.compiling import with_dynamic_sizes
from tests.layers.head_formula import earlier, heads_of

BATCH, LENGTH, EMBED, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 3, 13, 22, 6, 2, 10, 7
WINDOW = 5
DOUBLE = torch.float64
# Dynamo instantiates an autograd function, which PyTorch itself deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

LAYERS: dict[str, Callable[..., ProjectedHeads]] = {
    "grouped": lambda *sizes, **more: GroupedHeads(*sizes, num_groups=3, hidden_dim=17, **more),
    "one group": lambda *sizes, **more: GroupedHeads(*sizes, num_groups=1, hidden_dim=5, **more),
    "mixed": HeadMix,
    "mixed in full, projected": lambda *sizes, **more: HeadMix(
        *sizes, num_rows=4, mix="full", row_attention="projected", **more
    ),
    "mixed alone": lambda *sizes, **more: HeadMix(*sizes, num_rows=5, row_attention=None, **more),
}
both_kinds = pytest.mark.parametrize("kind", ["grouped", "mixed"])
every_kind = pytest.mark.parametrize("kind", LAYERS)


def make(kind: str, **options: Any) -> ProjectedHeads:
    sizes: dict[str, Any] = {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "value_dim": VALUE_DIM, "dtype": DOUBLE}
    layer = LAYERS[kind](EMBED, HEADS, **{**sizes, **options})
    layer.to(options.get("dtype", DOUBLE))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return layer


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    yield
    torch.compiler.reset()


def combined(layer: ProjectedHeads, heads: list[Tensor]) -> Tensor:
    assert layer.combine is not None
    return layer.out_proj(layer.combine(torch.stack(heads, 2)))


# ---- the module itself


class Concatenates(HeadCombiner):
    """What a layer does without a module."""

    def __init__(self, layout: HeadLayout) -> None:
        super().__init__()
        self.num_heads, self.value_dim = layout.num_heads, layout.value_dim
        self.output_dim = layout.num_heads * layout.value_dim

    def forward(self, heads: Tensor) -> Tensor:
        return heads.flatten(2)

    def reset_parameters(self) -> None:
        """It has none."""


def test_a_module_of_ones_own_stands_where_concat_stood(x: Tensor) -> None:
    plain = MultiHeadAttention(EMBED, HEADS, head_dim=HEAD_DIM, causal=True, dtype=DOUBLE)
    layer = MultiHeadAttention(
        EMBED, HEADS, head_dim=HEAD_DIM, causal=True, dtype=DOUBLE, combine=Concatenates(plain.layout)
    )
    layer.load_state_dict(plain.state_dict())
    close(layer(x).output, plain(x).output)


def test_what_does_not_combine_heads_is_refused() -> None:
    with pytest.raises(OptionError, match=r"combine must be a polyhead.layers.combining.HeadCombiner, got Linear"):
        MultiHeadAttention(24, 6, combine=nn.Linear(24, 24))


def test_what_needs_an_output_matrix_for_each_head_is_refused() -> None:
    options = {"combine": Concatenates(MultiHeadAttention(24, 6).layout)}
    layer = MultiHeadAttention(24, 6, **options)
    with pytest.raises(OptionError, match=r"a head's own output matrix exists only if .* combined by Concatenates"):
        layer.heads  # noqa: B018
    with pytest.raises(OptionError, match=r"no counterpart for .*a combine module"):
        layer.to_torch()
    with pytest.raises(OptionError, match=r"counterpart of torch.nn.MultiheadAttention exists only if .* reads Concat"):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(24, 6), **options)
    with pytest.raises(OptionError, match=r"a head's own output matrix exists only if"):
        MultiHeadAttention.from_heads(list(MultiHeadAttention(24, 6).heads), **options)


@pytest.mark.parametrize("kind", [GroupedHeads, HeadMix])
def test_layers_that_always_combine_heads_have_no_methods_for_single_heads(kind: type[ProjectedHeads]) -> None:
    assert not {"heads", "from_heads", "from_torch", "to_torch"} & set(dir(kind))


# ---- masks, padding, gates, statistics


@every_kind
def test_padded_tokens_reach_nothing_whatever_they_hold(kind: str, x: Tensor) -> None:
    layer, lengths = make(kind, causal=True), [LENGTH, 7, 0]
    broken = x.clone()
    for row, length in enumerate(lengths):
        broken[row, length:] = torch.nan
    leaf = broken.requires_grad_()
    output = layer(leaf, mask=Mask.lengths(lengths)).output
    nothing = combined(layer, list(torch.zeros(HEADS, 1, 1, VALUE_DIM, dtype=DOUBLE)))[0, 0]
    real = []
    for row, length in enumerate(lengths):
        if length:
            close(output[row, :length], layer(x[row : row + 1, :length]).output[0])
        close(output[row, length:], nothing.expand(LENGTH - length, -1))
        real.append(output[row, :length])
    (grad,) = torch.autograd.grad(torch.cat(real).square().sum(), leaf)
    for row, length in enumerate(lengths):
        assert grad[row, :length].isfinite().all()
        assert int(grad[row, length:].nan_to_num(1.0).count_nonzero()) == 0


@every_kind
@pytest.mark.parametrize("shape", [(HEADS,), (BATCH, HEADS), (BATCH, HEADS, LENGTH)])
def test_gates_act_on_a_head_before_it_is_combined(kind: str, shape: tuple[int, ...], x: Tensor) -> None:
    layer, gate = make(kind), torch.randn(shape, dtype=DOUBLE)
    factors = gate.view(*(1,) * (2 - len(shape)), *shape).expand(BATCH, HEADS, *shape[2:])
    factors = factors if len(shape) == 3 else factors[..., None].expand(-1, -1, LENGTH)
    gated = [head * factors[:, h, :, None] for h, head in enumerate(heads_of(layer, x))]
    close(layer(x, head_gate=gate).output, combined(layer, gated))
    layer.head_gate = gate
    close(layer(x).output, combined(layer, gated))


@pytest.mark.parametrize("output_gate", ["head", "channel"])
@both_kinds
def test_a_gate_of_the_layers_own_acts_before_heads_are_combined(kind: str, output_gate: str, x: Tensor) -> None:
    layer = make(kind, output_gate=output_gate)
    gate = torch.sigmoid(layer.gate_proj(x)).unflatten(-1, (HEADS, -1))
    gated = [head * gate[:, :, h] for h, head in enumerate(heads_of(layer, x))]
    close(layer(x).output, combined(layer, gated))


@every_kind
def test_statistics_and_weights_are_those_of_the_attention_over_tokens(kind: str, x: Tensor) -> None:
    layer = make(kind, causal=True)
    plain = MultiHeadAttention(
        EMBED, HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, value_dim=VALUE_DIM, causal=True, dtype=DOUBLE
    )
    for name in ("q_proj", "k_proj", "v_proj"):
        plain.get_submodule(name).load_state_dict(layer.get_submodule(name).state_dict())
    requested = {"weights": True, "statistics": True, "logsumexp": True}
    found, expected = layer(x, **requested), plain(x, **requested)
    close(found.output, layer(x).output)
    close(found.output, combined(layer, heads_of(layer, x, visible=earlier(LENGTH))))
    close(found.weights, expected.weights)
    close(found.logsumexp, expected.logsumexp)
    for name, rows in expected.statistics.items():
        close(getattr(found.statistics, name), rows)


@both_kinds
def test_a_session_sees_the_heads_and_gates_them(kind: str, x: Tensor) -> None:
    model = nn.ModuleDict({"attention": make(kind, causal=True)})
    layer = model["attention"]
    gate = torch.rand(HEADS, dtype=DOUBLE)
    expected = layer(x, statistics=("entropy", "mean_distance")).statistics
    with torch.no_grad(), polyhead.observe(model) as session:
        close(layer(x).output, combined(layer, heads_of(layer, x, visible=earlier(LENGTH))))
    for name in ("entropy", "mean_distance"):
        close(session.profile[name], getattr(expected, name).mean((0, 2)))
    assert session.profile["tokens"].eq(BATCH * LENGTH).all()
    with torch.no_grad(), polyhead.observe(model, statistics=False) as session:
        session.gates["attention", "self"] = gate
        gated = layer(x).output
    close(gated, layer(x, head_gate=gate).output)


# ---- gradients


# Heads are combined after any backend alike; blockwise gradients of all options are checked in test_multi_head.py.
@pytest.mark.parametrize(("kind", "backend"), [*((kind, "auto") for kind in LAYERS), ("mixed", "blockwise")])
def test_every_parameter_has_its_gradient(kind: str, backend: str) -> None:
    layer = LAYERS[kind](3, 6, head_dim=2, num_kv_heads=3, causal=True, dtype=DOUBLE)
    x = torch.randn(2, 3, 3, dtype=DOUBLE, requires_grad=True)
    inputs = [x, *layer.parameters()]
    assert torch.autograd.gradcheck(lambda y, *_: layer(y, backend=backend).output, inputs, **FAST)


@both_kinds
def test_every_parameter_has_its_second_derivative(kind: str) -> None:
    layer = LAYERS[kind](3, 6, head_dim=1, bias=False, dtype=DOUBLE, backend="reference")
    x = torch.randn(1, 2, 3, dtype=DOUBLE, requires_grad=True)
    inputs = [x, *layer.parameters()]
    assert torch.autograd.gradgradcheck(lambda y, *_: layer(y).output, inputs, **FAST)


# ---- generation

CACHES: dict[str, tuple[type[KVCache], dict[str, int]]] = {
    "growing": (GrowingCache, {}),
    "preallocated": (PreallocatedCache, {"capacity": 31}),
    "paged": (PagedCache, {"num_pages": 31, "page_size": 4}),
}
PIECES = {"token by token": [1] * LENGTH, "a prompt, then tokens": [9, 1, 1, 1, 1], "in chunks": [5, 1, 4, 3]}
POSITIONS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "rotary": lambda: Rotary(HEAD_DIM),
    "ALiBi": lambda: ALiBi(HEADS),
    "learned": lambda: Learned(31, EMBED),
}


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("cache_kind", CACHES)
@pytest.mark.parametrize("positions", POSITIONS)
@both_kinds
@torch.no_grad()
def test_generation_equals_the_full_forward(kind: str, positions: str, cache_kind: str, pieces: str, x: Tensor) -> None:
    layer = make(kind, causal=True, positions=POSITIONS[positions]())
    build, options = CACHES[cache_kind]
    cache = build.for_layout(layer.layout, batch_size=BATCH, dtype=DOUBLE, **options)
    parts = [layer(part, cache=cache).output for part in x.split(PIECES[pieces], 1)]
    close(torch.cat(parts, 1), layer(x).output)


@every_kind
@torch.no_grad()
def test_a_window_generates_with_a_rolling_cache(kind: str, x: Tensor) -> None:
    layer = make(kind, causal=True, window=WINDOW)
    cache = RollingCache.for_layout(layer.layout, batch_size=BATCH, dtype=DOUBLE, window=WINDOW)
    parts = [layer(part, cache=cache).output for part in x.split(PIECES["in chunks"], 1)]
    close(torch.cat(parts, 1), layer(x).output)


@every_kind
@torch.no_grad()
def test_a_ragged_batch_generates_as_each_sequence_would_alone(kind: str, x: Tensor) -> None:
    layer, lengths, steps = make(kind, causal=True, positions=Rotary(HEAD_DIM)), [9, 2, 5], 4
    cache = GrowingCache.for_layout(layer.layout, batch_size=BATCH, dtype=DOUBLE)
    prompt = x[:, : max(lengths)].clone()
    for row, length in enumerate(lengths):
        prompt[row, length:] = 99.0  # must not matter
    rows, ends = torch.arange(BATCH), torch.tensor(lengths)
    first = layer(prompt, cache=cache, lengths=lengths).output
    later = torch.cat([layer(x[rows, ends + step][:, None], cache=cache).output for step in range(steps)], 1)
    for row, length in enumerate(lengths):
        alone = layer(x[row : row + 1, : length + steps]).output[0]
        close(first[row, :length], alone[:length])
        close(later[row], alone[length:])


# ---- programs


def results(call: Callable[[Tensor], Any], layer: ProjectedHeads, x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    output = call(leaf).output
    return [output.detach(), *torch.autograd.grad(output.square().sum(), [leaf, *layer.parameters()])]


@pytest.mark.parametrize("kind", ["grouped", "mixed", "mixed in full, projected"])
def test_a_layer_compiles_whole_with_any_batch_and_length(kind: str, x: Tensor) -> None:
    layer = make(kind, causal=True)
    compiled = torch.compile(layer, fullgraph=True, backend="eager" if kind == "mixed" else "aot_eager")
    # Dynamic sizes take most of the time, so one kind has them.
    dynamic = kind == "mixed"
    for given in (x, torch.randn(5, 7, EMBED, dtype=DOUBLE))[: 1 + dynamic]:
        with torch._dynamo.config.patch(error_on_recompile=given is not x):
            ours = results(with_dynamic_sizes(compiled, 0, 1) if dynamic else compiled, layer, given)
        for found, expected in zip(ours, results(layer, layer, given), strict=True):
            close(found, expected, 1e-10)


@pytest.mark.parametrize("kind", ["one group", "mixed alone"])
def test_other_modules_that_combine_heads_compile(kind: str) -> None:
    combine, heads = make(kind).combine, torch.randn(BATCH, LENGTH, HEADS, VALUE_DIM, dtype=DOUBLE)
    close(torch.compile(combine, fullgraph=True, backend="eager")(heads), combine(heads))


@torch.no_grad()
def test_a_compiled_layer_generates_with_a_cache(x: Tensor) -> None:
    """Whatever combines the heads comes after the cache, so that one kind is enough.

    A compiled prompt, and writes into a cache after AOTAutograd, are tested with layers that only concatenate.
    """
    layer = make("mixed", causal=True, positions=Rotary(HEAD_DIM)).eval()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    cache = PreallocatedCache.for_layout(layer.layout, batch_size=BATCH, dtype=DOUBLE, capacity=31)
    prompt, *tokens = x.split([10, 1, 1, 1], 1)
    parts = [layer(prompt, cache=cache).output, *(compiled(token, cache=cache).output for token in tokens)]
    close(torch.cat(parts, 1), layer(x).output)


SHAPES = ({0: torch.export.Dim("batch", max=97), 1: torch.export.Dim("length", max=31)},)


def test_export_with_dynamic_batch_and_length(x: Tensor) -> None:
    layer = make("grouped", causal=True).eval()
    program = torch.export.export(layer, (x,), dynamic_shapes=SHAPES, strict=False)
    for shape in ((BATCH, LENGTH), (5, 7)):
        given = torch.randn(*shape, EMBED, dtype=DOUBLE)
        close(program.module()(given).output, layer(given).output)


@pytest.mark.parametrize("kind", ["mixed", "mixed in full, projected"])
def test_other_modules_that_combine_heads_are_exported_with_dynamic_batch_and_length(kind: str) -> None:
    combine, heads = make(kind).combine, torch.randn(BATCH, LENGTH, HEADS, VALUE_DIM, dtype=DOUBLE)
    program = torch.export.export(combine, (heads,), dynamic_shapes=SHAPES, strict=False)
    for given in (heads, torch.randn(5, 7, HEADS, VALUE_DIM, dtype=DOUBLE)):
        close(program.module()(given), combine(given))


@both_kinds
# Said once by PyTorch on a CPU without bfloat16 instructions.
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
def test_autocast_computes_in_its_dtype(kind: str) -> None:
    layer = make(kind, dtype=torch.float32, output_gate="head")
    x = torch.randn(BATCH, LENGTH, EMBED)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x).output
    assert output.dtype is torch.bfloat16
    torch.testing.assert_close(output.float(), layer(x).output, rtol=0.05, atol=0.1)
    output.float().sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


@every_kind
def test_copies_pickles_and_state_dicts_are_the_same_layer(kind: str, x: Tensor) -> None:
    layer, other = make(kind, causal=True), make(kind, causal=True)
    other.load_state_dict(layer.state_dict())
    for twin in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x).output, layer(x).output)


@both_kinds
def test_a_state_dict_of_another_arrangement_is_refused(kind: str) -> None:
    state = make(kind).state_dict()
    with pytest.raises(CheckpointError, match="num_heads 6 where the layer has 3"):
        LAYERS[kind](EMBED, 3, num_kv_heads=1, head_dim=20, value_dim=14).load_state_dict(state)
    different: dict[str, Callable[..., ProjectedHeads]] = {
        "grouped": lambda *sizes, **more: GroupedHeads(*sizes, num_groups=2, hidden_dim=17, **more),
        "mixed": lambda *sizes, **more: HeadMix(*sizes, num_rows=5, **more),
    }
    sizes = {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "value_dim": VALUE_DIM}
    with pytest.raises(RuntimeError, match="size mismatch for combine"):
        different[kind](EMBED, HEADS, **sizes).load_state_dict(state)


@every_kind
def test_a_layer_is_made_on_meta_and_filled_later(kind: str) -> None:
    layer = LAYERS[kind](EMBED, HEADS, head_dim=HEAD_DIM, device="meta")
    assert all(parameter.is_meta for parameter in layer.parameters())
    layer.to_empty(device="cpu")
    torch.manual_seed(5)
    layer.reset_parameters()
    torch.manual_seed(5)
    expected = LAYERS[kind](EMBED, HEADS, head_dim=HEAD_DIM)
    torch.manual_seed(5)
    expected.reset_parameters()
    for ours, theirs in zip(layer.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@both_kinds
def test_jagged_sequences_go_in_and_come_out(kind: str) -> None:
    layer = make(kind, causal=True)
    sequences = [torch.randn(n, EMBED, dtype=DOUBLE) for n in (5, 2, 7)]
    output = layer(torch.nested.nested_tensor(sequences, layout=torch.jagged)).output
    for ours, sequence in zip(output.unbind(), sequences, strict=True):
        close(ours, layer(sequence[None]).output[0])
