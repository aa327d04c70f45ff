"""The drop-in where modules are used: in PyTorch's transformer layers, compiled, exported, scripted, under autocast."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyhead.layers.torch_compat import MultiheadAttention

BATCH, TOKENS, MEMORY, WIDTH, HEADS = 3, 7, 5, 22, 2


def switched(model: nn.Module) -> nn.Module:
    """The same model with every attention of PyTorch replaced by ours, weights and mode kept."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.MultiheadAttention:
                continue
            ours = MultiheadAttention(
                child.embed_dim,
                child.num_heads,
                dropout=child.dropout,
                bias=child.in_proj_bias is not None,
                batch_first=child.batch_first,
                dtype=child.out_proj.weight.dtype,
            )
            ours.load_state_dict(child.state_dict())
            setattr(parent, name, ours.train(child.training))
    assert any(isinstance(module, MultiheadAttention) for module in model.modules())
    return model


def with_biases(model: Any) -> Any:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.normal_()
    return model


def masks(batch: int = BATCH, tokens: int = TOKENS) -> dict[str, dict[str, Any]]:
    padding = torch.zeros(batch, tokens, dtype=torch.bool)
    padding[1, 4:] = True
    scattered = padding.clone()
    scattered[0, 2] = True
    causal = nn.Transformer.generate_square_subsequent_mask(tokens, dtype=torch.float64)
    return {
        "no mask": {},
        "padding": {"src_key_padding_mask": padding},
        "padding in the middle": {"src_key_padding_mask": scattered},
        "causal": {"src_mask": causal, "is_causal": True},
        "causal boolean": {"src_mask": causal == -math.inf},
        "causal and padding": {
            "src_mask": causal,
            "src_key_padding_mask": padding.double().masked_fill(padding, -math.inf),
        },
    }


@pytest.fixture(autouse=True)
def _warnings_of_pytorch_about_itself() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors is in prototype stage")
        warnings.filterwarnings("ignore", message="enable_nested_tensor is True, but")
        # A CPU without bfloat16 instructions: PyTorch says so once, wherever it first multiplies.
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed, switching to BLAS gemm")
        yield


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["sequence first", "batch first"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", masks())
def test_an_encoder_layer_gives_the_numbers_of_pytorch(
    name: str, training: bool, batch_first: bool, norm_first: bool
) -> None:
    options = {"batch_first": batch_first, "norm_first": norm_first, "dtype": torch.float64, "dropout": 0.2}
    theirs = with_biases(nn.TransformerEncoderLayer(WIDTH, HEADS, 31, **options)).train(training)
    source = torch.randn((BATCH, TOKENS, WIDTH) if batch_first else (TOKENS, BATCH, WIDTH), dtype=torch.float64)
    results = []
    for model in (switched(theirs), theirs):
        model.zero_grad()
        torch.manual_seed(3)
        with torch.set_grad_enabled(training):
            output = model(source, **masks()[name])
        results.append([output])
        if training:
            output.square().sum().backward()
            results[-1] += [p.grad for p in model.parameters()]
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("nested", [False, True], ids=["padded", "nested"])
@pytest.mark.parametrize("name", masks())
def test_an_encoder_in_inference_gives_the_numbers_of_pytorch(name: str, nested: bool) -> None:
    layer = with_biases(nn.TransformerEncoderLayer(WIDTH, HEADS, 31, batch_first=True, dtype=torch.float64))
    theirs = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    options = {"mask" if k == "src_mask" else k: v for k, v in masks()[name].items()}
    source = torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        mine, expected = (model(source, **options) for model in (switched(theirs), theirs))
    torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_a_sequence_without_a_real_token_stays_finite_in_an_encoder_layer(training: bool) -> None:
    """PyTorch's shortcut in inference gives NaN here and would step around our attention; it is not to be taken."""
    theirs = nn.TransformerEncoderLayer(WIDTH, HEADS, 31, batch_first=True, dropout=0.0).train(training)
    padding = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    padding[1] = True
    source = torch.randn(BATCH, TOKENS, WIDTH)
    ours = switched(theirs)
    with torch.set_grad_enabled(training):
        output = ours(source, src_key_padding_mask=padding)
        attended = theirs.norm1(source[1] + theirs.self_attn.out_proj.bias)
        expected = theirs.norm2(attended + theirs._ff_block(attended))
    torch.testing.assert_close(output[1], expected)
    assert output.isfinite().all()
    if training:
        output.sum().backward()
        assert all(p.grad.isfinite().all() for p in ours.parameters())


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["sequence first", "batch first"])
def test_a_decoder_layer_and_a_whole_transformer_give_the_numbers_of_pytorch(batch_first: bool, training: bool) -> None:
    options = {"batch_first": batch_first, "dtype": torch.float64, "dropout": 0.2}
    theirs = with_biases(nn.Transformer(WIDTH, HEADS, 1, 2, 31, **options)).train(training)
    source, target = (
        torch.randn((BATCH, n, WIDTH) if batch_first else (n, BATCH, WIDTH), dtype=torch.float64)
        for n in (MEMORY, TOKENS)
    )
    padding = torch.zeros(BATCH, MEMORY, dtype=torch.bool)
    padding[1, 3:] = True
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    results = []
    for model in (switched(theirs), theirs):
        torch.manual_seed(3)
        with torch.set_grad_enabled(training):
            results.append(
                model(
                    source,
                    target,
                    tgt_mask=causal,
                    tgt_is_causal=True,
                    src_key_padding_mask=padding,
                    memory_key_padding_mask=padding,
                )
            )
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


# ---- nested tensors


def nested(*lengths: int) -> Tensor:
    return torch.nested.nested_tensor([torch.randn(n, WIDTH) for n in lengths])


def test_a_nested_tensor_in_inference_gives_the_numbers_of_pytorch() -> None:
    theirs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    ours = MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    ours.load_state_dict(theirs.state_dict())
    tokens = nested(7, 3, 5)
    with torch.no_grad():
        mine, expected = (module(tokens, tokens, tokens, need_weights=False)[0] for module in (ours, theirs))
        for sequence, output in zip(tokens.unbind(), mine.unbind(), strict=True):
            torch.testing.assert_close(output, ours(sequence, sequence, sequence)[0])
    assert mine.is_nested
    for a, b in zip(mine.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reason", ["training", "grad", "mask", "add_bias_kv", "cross"])
def test_a_nested_tensor_elsewhere_is_refused_in_the_words_of_pytorch(reason: str) -> None:
    words = []
    for kind in (nn.MultiheadAttention, MultiheadAttention):
        module = kind(WIDTH, HEADS, batch_first=True, add_bias_kv=reason == "add_bias_kv").train(reason == "training")
        tokens = nested(7, 3)
        options = {"key_padding_mask": torch.zeros(2, 7, dtype=torch.bool)} if reason == "mask" else {}
        keys = nested(7, 3) if reason == "cross" else tokens
        with (
            torch.set_grad_enabled(reason == "grad"),
            pytest.raises(AssertionError, match="outside of its fast path") as e,
        ):
            module(tokens, keys, keys, **options)
        words.append(str(e.value))
    assert words[0] == words[1]


# ---- compilers


CALLS: dict[str, dict[str, Any]] = {
    "weights": {"need_weights": True},
    "no weights": {"need_weights": False},
    "padding": {"need_weights": False, "key_padding_mask": torch.arange(TOKENS).expand(BATCH, -1) >= 4},
    "padding and weights": {"key_padding_mask": torch.arange(TOKENS).expand(BATCH, -1) >= 4},
    "causal": {
        "need_weights": False,
        "attn_mask": nn.Transformer.generate_square_subsequent_mask(TOKENS),
        "is_causal": True,
    },
    "per head": {
        "attn_mask": torch.arange(TOKENS).expand(BATCH * HEADS, TOKENS, -1) >= 4,
        "average_attn_weights": False,
    },
}


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# Every call once, with and without weights in both modes, and a mask in both, all but one by Dynamo alone; the next
# test trains with padding through AOTAutograd.
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    ("name", "training"),
    [
        *((name, False) for name in ("no weights", "padding", "padding and weights", "per head")),
        *((name, True) for name in ("weights", "no weights", "causal", "per head")),
    ],
)
def test_a_call_compiles_into_one_graph(name: str, training: bool) -> None:
    module = MultiheadAttention(WIDTH, HEADS, batch_first=True).train(training)
    backend = "aot_eager" if training and name == "per head" else "eager"
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    tokens = torch.randn(BATCH, TOKENS, WIDTH)
    with torch.set_grad_enabled(training):
        mine, expected = compiled(tokens, tokens, tokens, **CALLS[name]), module(tokens, tokens, tokens, **CALLS[name])
    torch.testing.assert_close(mine, expected)


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_call_has_the_gradients_of_eager() -> None:
    module = MultiheadAttention(WIDTH, HEADS, batch_first=True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    tokens = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
    results = []
    for run in (compiled, module):
        module.zero_grad()
        tokens.grad = None
        output, _ = run(tokens, tokens, tokens, **CALLS["padding"])
        output.square().sum().backward()
        results.append([output, tokens.grad, *(p.grad.clone() for p in module.parameters())])
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["weights", "padding", "causal", "per head"])
def test_an_exported_program_gives_the_numbers_of_eager(name: str) -> None:
    module = MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    tokens = torch.randn(BATCH, TOKENS, WIDTH)
    program = torch.export.export(module, (tokens, tokens, tokens), CALLS[name])
    mine, expected = (
        program.module()(tokens, tokens, tokens, **CALLS[name]),
        module(tokens, tokens, tokens, **CALLS[name]),
    )
    torch.testing.assert_close(mine, expected)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated", "ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_a_script_computes_what_pytorch_scripts(training: bool) -> None:
    module = MultiheadAttention(WIDTH, HEADS, batch_first=True).train(training)
    tokens = torch.randn(BATCH, TOKENS, WIDTH)
    torch.testing.assert_close(torch.jit.script(module)(tokens, tokens, tokens), module(tokens, tokens, tokens))
    layer = switched(nn.TransformerEncoderLayer(WIDTH, HEADS, 31, dropout=0.0)).train(training)
    torch.testing.assert_close(torch.jit.script(layer)(tokens), layer(tokens))
    assert isinstance(layer.self_attn, MultiheadAttention)


# ---- number formats


@pytest.mark.parametrize("need_weights", [False, True], ids=["no weights", "weights"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("tokens", [TOKENS, 67])
@pytest.mark.parametrize("masked", [None, "bool", "float"])
def test_autocast_gives_the_dtypes_and_the_numbers_of_pytorch(
    masked: str | None, tokens: int, training: bool, need_weights: bool
) -> None:
    theirs = with_biases(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)).train(training)
    ours = MultiheadAttention(WIDTH, HEADS, batch_first=True).train(training)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(BATCH, tokens, WIDTH)
    hidden = torch.arange(tokens).expand(BATCH, -1) >= 4
    mask = hidden if masked == "bool" else torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)
    options = {} if masked is None else {"key_padding_mask": mask}
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(training):
        mine, expected = (module(x, x, x, need_weights=need_weights, **options) for module in (ours, theirs))
    assert [None if t is None else t.dtype for t in mine] == [None if t is None else t.dtype for t in expected]
    torch.testing.assert_close(mine[0], expected[0], rtol=0.02, atol=0.02)
    if need_weights:
        torch.testing.assert_close(mine[1], expected[1], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("need_weights", [False, True], ids=["no weights", "weights"])
def test_half_precision_keeps_its_dtype_and_is_as_exact_as_pytorch(need_weights: bool, dtype: torch.dtype) -> None:
    theirs = with_biases(nn.MultiheadAttention(WIDTH, HEADS, dtype=dtype))
    ours = MultiheadAttention(WIDTH, HEADS, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(TOKENS, BATCH, WIDTH, dtype=dtype)
    exact, _ = copy.deepcopy(theirs).double()(*(x.double(),) * 3)
    mine, expected = (module(x, x, x, need_weights=need_weights) for module in (ours, theirs))
    assert mine[0].dtype is dtype
    assert mine[1] is None or mine[1].dtype is dtype
    errors = [(result[0] - exact).abs().max().item() for result in (mine, expected)]
    assert errors[0] <= 2 * errors[1] + 2 * torch.finfo(dtype).eps * exact.abs().max().item()
