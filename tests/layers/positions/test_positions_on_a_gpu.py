"""On a GPU position modules never wait for the device, and their tables survive a captured graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from polyhead.layers.positions import (
    ALiBi,
    DynamicNTKScaling,
    Learned,
    Llama3Scaling,
    QuadraticRelative1D,
    QuadraticRelative2D,
    Rotary,
    Sinusoidal,
    T5Bias,
    YarnScaling,
)
from tests.waiting import waiting_is_an_error

pytestmark = pytest.mark.gpu

BATCH, HEADS, LENGTH, HEAD_DIM = 3, 5, 19, 26


ROTARIES = [
    Rotary(HEAD_DIM, base=7001.0),
    Rotary(HEAD_DIM, base=7001.0, rotary_dim=14, interleaved=True),
    Rotary(HEAD_DIM, scaling=YarnScaling(4.0, 64)),
    Rotary(HEAD_DIM, scaling=Llama3Scaling(8.0, original_length=64)),
    Rotary(HEAD_DIM, scaling=DynamicNTKScaling(2.0, 7)),
]


@pytest.mark.parametrize("rotary", ROTARIES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotation_on_the_gpu_never_waits_and_equals_the_cpu(rotary: Rotary, dtype: torch.dtype) -> None:
    x = torch.randn(BATCH, HEADS, LENGTH, HEAD_DIM).to(dtype)
    on_gpu, row = x.cuda(), torch.arange(5, 5 + LENGTH).cuda()
    with waiting_is_an_error():
        outputs = [rotary(on_gpu, 5), rotary(on_gpu, 70_001), rotary(on_gpu, row, length=5 + LENGTH)]
    tolerance = 4 * torch.finfo(dtype).eps * x.abs().max().item()
    for output, expected in zip(outputs, (rotary(x, 5), rotary(x, 70_001), rotary(x, 5)), strict=True):
        torch.testing.assert_close(output.cpu(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ALiBi(HEADS),
        lambda: ALiBi(HEADS, learnable=True),
        lambda: T5Bias(HEADS),
        lambda: QuadraticRelative1D(HEADS),
        lambda: QuadraticRelative2D(HEADS, 5, 7),
    ],
)
def test_biases_on_the_gpu_never_wait_and_equal_the_cpu(make: Callable[[], ALiBi]) -> None:
    bias = make()
    (expected,) = bias.mask(35, 35).tensors
    bias = bias.cuda()
    with waiting_is_an_error():
        (actual,) = bias.mask(35, 35, device="cuda").tensors
    torch.testing.assert_close(actual.cpu(), expected)


def test_absolute_positions_on_the_gpu_never_wait() -> None:
    x, row = torch.randn(BATCH, LENGTH, 26).cuda(), torch.arange(LENGTH).cuda()
    sinusoidal, learned = Sinusoidal(26, base=7001.0), Learned(97, 26).cuda()
    with waiting_is_an_error():
        outputs = [sinusoidal(x, 3), sinusoidal(x, row), learned(x, 3), learned(x, row)]
    torch.testing.assert_close(outputs[0].cpu(), Sinusoidal(26, base=7001.0)(x.cpu(), 3))


def test_a_table_first_asked_for_while_a_graph_is_captured_is_not_kept() -> None:
    rotary = Rotary(HEAD_DIM, base=7013.0)
    x = torch.randn(BATCH, HEADS, LENGTH, HEAD_DIM).cuda()
    graph = torch.cuda.CUDAGraph()
    Rotary(HEAD_DIM, base=7014.0)(x)  # kernels are loaded outside of the capture
    with torch.cuda.graph(graph):
        captured = rotary(x, 3)
    torch.testing.assert_close(rotary(x, 3).cpu(), rotary(x.cpu(), 3))
    graph.replay()
    torch.testing.assert_close(captured.cpu(), rotary(x.cpu(), 3))


def test_positions_in_a_tensor_are_read_at_replay() -> None:
    rotary = Rotary(HEAD_DIM)
    x, positions = torch.randn(BATCH, HEADS, 1, HEAD_DIM).cuda(), torch.tensor([3]).cuda()
    rotary(x, positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = rotary(x, positions)
    positions.fill_(41)
    graph.replay()
    torch.testing.assert_close(captured.cpu(), rotary(x.cpu(), 41))
