"""The tables of rotary and sinusoidal positions survive whatever a program does with a module."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config

from polyhead.layers.positions import ALiBi, DynamicNTKScaling, Learned, QuadraticRelative1D, Rotary, Sinusoidal, T5Bias
from polyhead.layers.positions.row_tables import FIRST_CAPACITY, MAX_CAPACITY, row_table
from tests.layers.compiling import QUICK_INDUCTOR, with_dynamic_sizes

BATCH, HEADS, LENGTH, HEAD_DIM = 3, 5, 19, 26


def tokens(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.fixture
def rotary() -> Rotary:
    """A module whose table nothing else in the process has built yet."""
    rotary_fixture_count[0] += 1
    return Rotary(HEAD_DIM, base=10000.0 + rotary_fixture_count[0])


rotary_fixture_count = [0]


def test_a_module_holds_no_tensor(rotary: Rotary) -> None:
    rotary(tokens(BATCH, HEADS, LENGTH, HEAD_DIM))
    assert not list(rotary.parameters())
    assert not list(rotary.buffers())
    assert not rotary.state_dict()


def test_equal_modules_share_one_table_and_the_last_of_them_frees_it() -> None:
    first, second = Rotary(HEAD_DIM, base=31.0), Rotary(HEAD_DIM, base=31.0)
    x = tokens(BATCH, HEADS, LENGTH, HEAD_DIM)
    assert first.rotation(x).cos is second.rotation(x).cos
    recipe = first._recipe
    table = row_table(recipe)
    assert table._grown
    del first, second, table
    assert not row_table(recipe)._grown


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_rotate_alike_and_carry_no_table(copied, rotary: Rotary) -> None:
    x = tokens(BATCH, HEADS, LENGTH, HEAD_DIM)
    expected = rotary(x, 3)
    assert torch.equal(copied(rotary)(x, 3), expected)
    buffer = io.BytesIO()
    torch.save(rotary, buffer)
    assert buffer.tell() < 5000
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(x, 3), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_casting_the_module_keeps_the_table_precise(dtype: torch.dtype, rotary: Rotary) -> None:
    x = tokens(BATCH, HEADS, LENGTH, HEAD_DIM)
    expected = rotary(x, 211)
    assert torch.equal(rotary.to(dtype)(x, 211), expected)
    assert torch.equal(rotary.half().double()(x, 211), expected)


def test_dtypes_take_turns_without_mixing(rotary: Rotary) -> None:
    x = tokens(BATCH, HEADS, LENGTH, HEAD_DIM, dtype=torch.float64)
    exact = rotary(x, 2)
    single = rotary(x.float(), 2)
    assert torch.equal(rotary(x, 2), exact)
    assert torch.equal(rotary(x.float(), 2), single)
    assert exact.dtype is torch.float64
    assert 0 < (exact - single).abs().max() < 1e-5


def test_construction_on_the_meta_device_needs_no_repair() -> None:
    x = tokens(BATCH, HEADS, LENGTH, HEAD_DIM)
    with torch.device("meta"):
        rotary = Rotary(HEAD_DIM)
        assert torch.equal(rotary(x, 3), Rotary(HEAD_DIM)(x, 3))
    rotary = rotary.to_empty(device="cpu")
    assert torch.equal(rotary(x, 3), Rotary(HEAD_DIM)(x, 3))
    assert rotary(x.to("meta"), 3).is_meta


def test_a_table_grows_and_stays_right(rotary: Rotary) -> None:
    x = tokens(BATCH, HEADS, LENGTH, HEAD_DIM)
    for start in (0, FIRST_CAPACITY - 3, 5 * FIRST_CAPACITY, 1, MAX_CAPACITY - LENGTH, MAX_CAPACITY - 3):
        assert torch.equal(rotary(x, start), rotary(x, torch.arange(start, start + LENGTH)))
    assert rotary._table._grown[x.device, x.dtype][0].shape[1] == MAX_CAPACITY


@pytest.mark.parametrize("start", [0, MAX_CAPACITY])
def test_writing_to_a_rotation_or_bias_leaves_those_of_later_calls_as_they_are(start: int, rotary: Rotary) -> None:
    x = tokens(BATCH, HEADS, LENGTH, HEAD_DIM)
    expected = rotary(x, start)
    for mode in (torch.inference_mode, torch.enable_grad):
        with mode():
            for part in rotary.rotation(x, start):
                part.mul_(2.0)
                assert torch.equal(rotary(x, start), expected)
                next_positions = torch.arange(start + 1, start + 1 + LENGTH)
                assert torch.equal(rotary(x, start + 1), rotary(x, next_positions))
    bias = ALiBi(HEADS)
    before = bias.mask(LENGTH, LENGTH).relative_biases[0].table.clone()
    bias.mask(LENGTH, LENGTH).relative_biases[0].table.zero_()
    assert torch.equal(ALiBi(HEADS).mask(LENGTH, LENGTH).relative_biases[0].table, before)


def test_a_table_made_in_inference_mode_serves_training(rotary: Rotary) -> None:
    for start in (0, MAX_CAPACITY):
        with torch.inference_mode():
            expected = rotary(tokens(BATCH, HEADS, LENGTH, HEAD_DIM), start).clone()
        x = tokens(BATCH, HEADS, LENGTH, HEAD_DIM).requires_grad_()
        rotated = rotary(x, start)
        rotated.square().sum().backward()
        assert torch.equal(rotated, expected)
        assert x.grad is not None
        torch.testing.assert_close(x.grad, 2 * x.detach())


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch.func.jvp uses it
def test_a_table_is_not_kept_from_a_function_transform(rotary: Rotary) -> None:
    x = tokens(BATCH, HEADS, LENGTH, HEAD_DIM)
    gradient = torch.func.grad(lambda x: rotary(x, 7).square().sum())(x)
    torch.testing.assert_close(gradient, 2 * x)
    batched = torch.func.vmap(lambda x: rotary(x[None], 7)[0])(x)
    assert torch.equal(batched, rotary(x, 7))
    _, tangent = torch.func.jvp(lambda x: rotary(x, 7), (x,), (x,))
    torch.testing.assert_close(tangent, rotary(x, 7))


def test_fake_tensors_neither_meet_nor_leave_a_table(rotary: Rotary) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = tokens(BATCH, HEADS, LENGTH, HEAD_DIM)
    for _ in range(2):
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(x)
            assert rotary(fake, 3).shape == x.shape
            assert ALiBi(HEADS).mask(LENGTH, LENGTH).tensors[0].shape == (HEADS, 2 * LENGTH - 1)
        assert type(rotary(x, 3)) is Tensor


def test_autocast_leaves_the_rotation_in_float32(rotary: Rotary) -> None:
    x = tokens(BATCH, HEADS, LENGTH, HEAD_DIM)
    expected = rotary(x, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(Rotary(HEAD_DIM, base=rotary.base)(x, 3), expected)


# ---- compiled and exported programs
# AOTAutograd and Inductor follow the whole block and a rotation below, Dynamo alone the rest; a rotation in ONNX at
# lengths beyond its table is in tests/layers/multi_head/test_multi_head_programs.py.


class Block(nn.Module):
    """Everything at once, as a model would have it."""

    def __init__(self, base: float = 10000.0) -> None:
        super().__init__()
        self.sinusoidal = Sinusoidal(HEADS * HEAD_DIM)
        self.learned = Learned(600, HEADS * HEAD_DIM)
        self.rotary = Rotary(HEAD_DIM, base=base, rotary_dim=14)
        self.interleaved = Rotary(HEAD_DIM, base=500.0, interleaved=True)

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        x = self.learned(self.sinusoidal(x, offset), offset)
        heads = x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
        return self.rotary(heads, offset) + self.interleaved(heads, offset)


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_same_with_gradients(actual, expected, x: Tensor) -> None:
    x = x.requires_grad_()
    (left,), (right,) = (torch.autograd.grad(function(x).square().sum(), x) for function in (actual, expected))
    torch.testing.assert_close(actual(x), expected(x), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(left, right, rtol=1e-6, atol=8e-6)


@pytest.mark.usefixtures("fresh_dynamo")
def test_one_graph_serves_all_lengths_and_offsets() -> None:
    block = Block()
    compiled = with_dynamic_sizes(torch.compile(block, fullgraph=True, backend="aot_eager"), 1)
    assert_same_with_gradients(compiled, block, tokens(BATCH, 19, HEADS * HEAD_DIM))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (23, 301, 37):
            assert_same_with_gradients(compiled, block, tokens(BATCH, length, HEADS * HEAD_DIM))


@pytest.mark.usefixtures("fresh_dynamo")
def test_one_graph_decodes_at_changing_offsets() -> None:
    rotary = Rotary(HEAD_DIM)
    compiled = torch.compile(rotary, fullgraph=True, backend="eager")
    x = tokens(BATCH, HEADS, 1, HEAD_DIM)
    for offset in (1, 2, 3):
        torch.testing.assert_close(compiled(x, offset), rotary(x, offset), rtol=1e-6, atol=1e-6)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for offset in (5, 255, 256, 4000):
            torch.testing.assert_close(compiled(x, offset), rotary(x, offset), rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_graph_takes_positions_as_tensors() -> None:
    rotary = Rotary(HEAD_DIM)
    x = tokens(BATCH, HEADS, LENGTH, HEAD_DIM)
    positions = torch.randint(0, 5000, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    actual = torch.compile(rotary, fullgraph=True, backend="eager")(x, positions)
    torch.testing.assert_close(actual, rotary(x, positions), rtol=1e-6, atol=2e-6)


@pytest.mark.usefixtures("fresh_dynamo")
def test_layers_that_share_compiled_code_keep_their_own_frequencies() -> None:
    x = tokens(BATCH, HEADS, LENGTH, HEAD_DIM)
    for base in (10000.0, 500000.0, 10000.0):
        rotary = Rotary(HEAD_DIM, base=base)
        expected = rotary(x, 2)
        rotary.compile(fullgraph=True, backend="eager")
        torch.testing.assert_close(rotary(x, 2), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.skipif(
    torch.__version__ < (2, 12),
    reason="Inductor of torch 2.11 inlines the table all the same: same numbers, more cosines",
)
def test_inductor_computes_a_table_once_and_not_for_every_head() -> None:
    from torch._inductor.utils import run_and_get_code

    rotary, x = Rotary(HEAD_DIM), tokens(BATCH, HEADS, LENGTH, HEAD_DIM)
    with inductor_config.patch(QUICK_INDUCTOR):
        found, (code,) = run_and_get_code(torch.compile(rotary, fullgraph=True), x)
    torch.testing.assert_close(found, rotary(x), rtol=1e-6, atol=2e-6)
    loops_with_cosines = [part for part in code.split("for(int64_t x0=") if ".cos()" in part or "std::cos" in part]
    assert loops_with_cosines
    assert all("in_ptr0" not in loop for loop in loops_with_cosines)


@pytest.mark.usefixtures("fresh_dynamo")
def test_dynamic_ntk_compiles_on_both_sides_of_the_original_length() -> None:
    rotary = Rotary(HEAD_DIM, scaling=DynamicNTKScaling(2.0, original_length=23))
    compiled = with_dynamic_sizes(torch.compile(rotary, fullgraph=True, backend="eager"), 2)
    for length in (19, 29, 37, 17, 21):
        # Up to the original length one graph serves all; beyond it each length has its own frequencies and graph.
        with torch._dynamo.config.patch(error_on_recompile=length in (17, 21)):
            x = tokens(BATCH, HEADS, length, HEAD_DIM)
            torch.testing.assert_close(compiled(x), rotary(x), rtol=1e-6, atol=2e-6)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("bias", [ALiBi(5), ALiBi(5, learnable=True), T5Bias(5), QuadraticRelative1D(5)], ids=repr)
def test_relative_biases_compile(bias) -> None:
    def table(query_length: int, key_length: int) -> Tensor:
        return bias.mask(query_length, key_length).relative_biases[0].table * 1.0

    compiled = torch.compile(table, fullgraph=True, dynamic=True, backend="eager")
    for lengths in ((19, 23), (29, 31)):
        with torch._dynamo.config.patch(error_on_recompile=lengths != (19, 23)):
            torch.testing.assert_close(compiled(*lengths), table(*lengths), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("strict", [False, True])
def test_export_has_dynamic_batch_and_length_and_no_table(strict: bool) -> None:
    block = Block().eval()
    example = tokens(BATCH, LENGTH, HEADS * HEAD_DIM)
    block(example)  # a table that exists already must not become a constant of the program
    dynamic = {"x": {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=600)}}
    program = torch.export.export(block, (example,), dynamic_shapes=dynamic, strict=strict)
    assert not program.constants
    assert list(program.state_dict) == ["learned.weight"]
    other = tokens(2, 599, HEADS * HEAD_DIM)
    torch.testing.assert_close(program.module()(other), block(other), rtol=1e-6, atol=2e-6)
