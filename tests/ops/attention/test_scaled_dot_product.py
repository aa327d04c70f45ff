"""Gradients of our and PyTorch's attention do not depend on which ran first in the process."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import polyhead
from polyhead import Mask
from polyhead.ops.attention import cudnn_backward
from polyhead.ops.attention import scaled_dot_product as scaled_dot_product_module
from polyhead.ops.attention.scaled_dot_product import kernel_name, scaled_dot_product, without_cudnn
from tests.ops.attention import plan_cases

# bfloat16 inputs round the gradients to 0.003 and a layer's to 0.006; a plan of another layout makes them wrong by 1.4.
BOUND = 0.01
CASES = plan_cases.all_cases()
PROBLEMS = list(dict.fromkeys(case[:4] for case in CASES))


def unused_shape(case: tuple[str, ...]) -> tuple[int, int]:
    """Return a batch size and a length that no other case uses: both are part of PyTorch's cache key.

    Other tests of this file use multiples of 16, and may run earlier in the same process.
    """
    batch, step = divmod(CASES.index(case), 64)
    return 2 + batch, 280 + 16 * step


def modules_calling(root: Path, name: str) -> set[str]:
    """Return the modules below a folder that call an attribute whose name contains `name`."""
    found = set()
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if name in text else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and name in node.func.attr:
                found.add(path.relative_to(root).as_posix())
    return {path for path in found if not path.startswith("lab/")}


def test_one_module_of_each_device_calls_pytorchs_attention_and_one_cudnns(project_root):
    root = project_root / "src" / "polyhead"
    assert modules_calling(root, "scaled_dot_product_attention") == {
        "ops/attention/cpu_calls.py",
        "ops/attention/scaled_dot_product.py",
    }
    assert modules_calling(root, "cudnn_attention") == {"ops/attention/cudnn_backward.py"}


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_on_a_cpu_it_is_pytorchs_function(grouped, masked):
    query, key, value = (torch.randn(2, heads, 7, 5) for heads in (6, 3 if grouped else 6, 3 if grouped else 6))
    mask = torch.rand(7, 7) > 0.3 if masked else None
    ours = scaled_dot_product(query, key, value, mask, causal=not masked, scale=0.3, grouped=grouped)
    theirs = F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=not masked, scale=0.3, enable_gqa=grouped
    )
    assert torch.equal(ours, theirs)


def test_cudnn_is_off_inside_and_the_users_choice_is_back_outside():
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
        with without_cudnn():
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            assert not torch.backends.cuda.flash_sdp_enabled()
            assert torch.backends.cuda.math_sdp_enabled()
        assert torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()


def test_a_compiler_traces_the_way_without_cudnn(monkeypatch):
    monkeypatch.setattr(scaled_dot_product_module, "_avoids_cudnn", lambda *tensors: True)
    seen = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product(query, key, value, causal=True)

    def compiler(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    inputs = [torch.randn(1, 2, 7, 8, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(attend, fullgraph=True, backend=compiler)(*inputs)
    torch.testing.assert_close(compiled, F.scaled_dot_product_attention(*inputs, is_causal=True))
    assert sum("_sdpa_kernel" in name for name in seen) == 2  # cuDNN is off, and on again
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_the_backward_kernel_is_named():
    query = torch.randn(1, 2, 3, 8, requires_grad=True)
    explanation = polyhead.explain(query, query, query)
    assert explanation.backward == "PyTorch's flash kernel"
    assert explanation["reference"].backward == "autograd of the formula"
    assert "-> sdpa       PyTorch's flash kernel on cpu; backward: PyTorch's flash kernel" in str(explanation)
    with torch.no_grad():
        assert polyhead.explain(query, query, query).backward == ""


@pytest.mark.gpu
# Of inputs that are not leaves Dynamo reads `.grad`.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("plans", "name", "first", "inputs"), PROBLEMS)
def test_gradients_do_not_depend_on_the_order_of_calls(plans, name, first, inputs):
    for case in CASES:
        if case[:4] != (plans, name, first, inputs):
            continue
        found = plan_cases.errors(*case, *unused_shape(case))
        assert "theirs" in found or inputs == "expanded"
        for who, errors in found.items():
            assert max(errors) < BOUND, f"{case}, {who}: {errors}"


FRESH = [
    ("own plans", name, first, inputs, "heads-first")
    for name, inputs in [
        ("fused", "tokens-first"),
        ("fused with statistics", "tokens-first"),
        ("auto", "tokens-first"),
        ("drop-in", "sequence-first"),
        ("layer", "split"),
        ("transformers", "separate"),
    ]
    for first in plan_cases.ORDERS
]


@pytest.mark.gpu
def test_twelve_cases_in_processes_of_their_own(project_root):
    def run(case: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.ops.attention.plan_cases", *case]
        return subprocess.run(command, cwd=project_root, capture_output=True, text=True, timeout=300, check=False)

    with ThreadPoolExecutor(len(FRESH)) as started:
        for case, process in zip(FRESH, started.map(run, FRESH), strict=True):
            assert process.returncode == 0, process.stderr
            for who, errors in json.loads(process.stdout.splitlines()[-1]).items():
                assert max(errors) < BOUND, f"{case}, {who}: {errors}"


def heads(length: int, *, dim: int = 64, dtype: torch.dtype = torch.bfloat16, kv_heads: int = 4) -> list[Tensor]:
    return [
        torch.randn(2, length, count, dim, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()
        for count in (4, kv_heads, kv_heads)
    ]


def nodes_of(output: Tensor) -> set[str]:
    """Return the names of all autograd nodes behind a tensor."""
    names, waiting = set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in names:
            names.add(node)
            waiting += [following for following, _ in node.next_functions]
    return {node.name() for node in names}


def relative(found: Tensor, exact: Tensor) -> float:
    found, exact = found.detach().double(), exact.detach().double()
    return float((found - exact).norm() / exact.norm())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("make", "options", "kernel"),
    [
        (lambda: heads(336), {"causal": True}, "flash"),
        (lambda: heads(336, kv_heads=2), {"grouped": True}, "flash"),
        (lambda: heads(336, dim=60), {}, "flash"),  # padded to a multiple of 8
        (lambda: heads(336, dtype=torch.float32), {"causal": True}, "efficient"),
        (lambda: heads(331), {"mask": "bool"}, "efficient"),
        (lambda: heads(331), {"mask": "row"}, "efficient"),
        (lambda: heads(336), {"mask": "bias"}, "efficient"),
        (lambda: heads(37, dtype=torch.float64), {}, "math"),
        (lambda: heads(37, dtype=torch.float64), {"mask": "bool"}, "math"),
    ],
)
def test_every_kernel_of_a_recorded_call_gives_the_formulas_gradients(make, options, kernel):
    inputs = make()
    length, dtype = inputs[0].shape[2], inputs[0].dtype
    kind = options.pop("mask", None) if (options := dict(options)) else None
    masks = {
        "bool": torch.rand(1, 1, length, length, device="cuda") > 0.3,
        "row": torch.rand(2, 1, 1, length, device="cuda") > 0.3,
        "bias": torch.randn(1, 4, length, length, device="cuda", dtype=dtype),
    }
    mask = None if kind is None else masks[kind]
    assert kernel_name(*inputs, mask, **options) == kernel
    direction = torch.randn_like(inputs[0])
    output = scaled_dot_product(*inputs, mask, **options)
    assert not any("Cudnn" in name for name in nodes_of(output))
    wide = [x.double() for x in inputs]
    exact = torch.ops.aten._scaled_dot_product_attention_math(
        *wide,
        mask.double().log()
        if mask is not None and mask.dtype is torch.bool
        else None
        if mask is None
        else mask.double(),
        0.0,
        options.get("causal", False),
        enable_gqa=options.get("grouped", False),
    )[0]
    bound = {torch.bfloat16: BOUND, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    assert relative(output, exact) < bound
    found = torch.autograd.grad(output, inputs, direction)
    wanted = torch.autograd.grad(exact, inputs, direction.double())
    for ours, right in zip(found, wanted, strict=True):
        assert relative(ours, right) < bound


@pytest.mark.gpu
def test_forward_only_calls_keep_cudnn():
    inputs = heads(352)
    with torch.no_grad():
        assert kernel_name(*inputs, causal=True) == "cudnn"
    assert kernel_name(*inputs, causal=True) == "flash"


@pytest.mark.gpu
def test_large_calls_run_cudnns_backward_in_a_thread_of_our_own(monkeypatch):
    inputs = heads(368)
    monkeypatch.setattr(cudnn_backward, "MIN_MULTIPLY_ADDS", 0)
    assert kernel_name(*inputs, causal=True) == "cudnn"
    threads = []
    planned = cudnn_backward._run_backward
    monkeypatch.setattr(
        cudnn_backward, "_run_backward", lambda *rest: threads.append(threading.current_thread().name) or planned(*rest)
    )
    scaled_dot_product(*inputs, causal=True).sum().backward()
    polyhead.attention(*inputs, mask=Mask.causal(), backend="fused").output.sum().backward()
    assert len(threads) == 2
    assert all(name.startswith("polyhead-cudnn-backward") for name in threads)


@pytest.mark.gpu
def test_a_cache_that_all_threads_share_would_be_noticed(monkeypatch):
    """Runs our calls in a thread that has built a plan for another layout, as with a shared cache."""
    assert cudnn_backward._has_separate_plans(0)
    with ThreadPoolExecutor(1) as shared:
        monkeypatch.setattr(cudnn_backward, "_worker_thread", lambda: shared)
        monkeypatch.setattr(cudnn_backward, "ThreadPoolExecutor", lambda _: nullcontext(shared))
        assert not cudnn_backward._has_separate_plans(0)


@pytest.mark.gpu
def test_a_step_on_plans_of_our_own_can_be_captured(monkeypatch):
    monkeypatch.setattr(cudnn_backward, "MIN_MULTIPLY_ADDS", 0)
    inputs = heads(384)
    direction = torch.randn_like(inputs[0])

    def step() -> list[Tensor]:
        return list(torch.autograd.grad(scaled_dot_product(*inputs, causal=True), inputs, direction))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = step()
    with torch.no_grad():
        for x in inputs:
            x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    wide = [x.detach().float().requires_grad_() for x in inputs]
    exact = torch.autograd.grad(plan_cases.formula(*wide), wide, direction.float())
    assert max(map(relative, captured, exact)) < BOUND


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 4, 0, 64), (0, 4, 5, 64)])
@pytest.mark.parametrize("recorded", [False, True])
def test_empty_tensors_give_empty_outputs(shape, recorded):
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=recorded)
    assert scaled_dot_product(x, x, x).shape == shape


def _checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return checkpoint(plan_cases._auto, q, k, v, use_reentrant=False)  # type: ignore[no-any-return]


def _reentrant(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return checkpoint(plan_cases._auto, q, k, v, use_reentrant=True)  # type: ignore[no-any-return]


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return scaled_dot_product(q.float(), k.float(), v.float(), causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("call", [_checkpointed, _reentrant, _autocast], ids=["checkpoint", "reentrant", "autocast"])
def test_other_ways_of_recording_do_not_reach_a_plan_of_pytorchs(call: Callable[..., Tensor]):
    inputs = heads(368 + 16 * [_checkpointed, _reentrant, _autocast].index(call))
    direction = torch.randn(2, 4, inputs[0].shape[2], 64, device="cuda", dtype=torch.bfloat16)
    torch.autograd.grad(plan_cases.theirs(*inputs), inputs, direction)
    output = call(*inputs)
    assert output.dtype is torch.bfloat16
    output.backward(direction)
    wide = [x.detach().float().requires_grad_() for x in inputs]
    exact = torch.autograd.grad(plan_cases.formula(*wide), wide, direction.float())
    assert max(relative(x.grad, right) for x, right in zip(inputs, exact, strict=True)) < BOUND


@pytest.mark.gpu
def test_function_transforms_do_not_reach_a_plan_of_pytorchs():
    inputs = [x.detach() for x in heads(416)]
    direction = torch.randn(2, 4, 416, 64, device="cuda", dtype=torch.bfloat16)
    leaves = [x.clone().requires_grad_() for x in inputs]
    torch.autograd.grad(plan_cases.theirs(*leaves), leaves, direction)

    def loss(*tensors: Tensor) -> Tensor:
        return (polyhead.attention(*tensors, mask=Mask.causal(), backend="sdpa").output.float() * direction).sum()

    found = torch.func.grad(loss, argnums=(0, 1, 2))(*inputs)
    wide = [x.float().requires_grad_() for x in inputs]
    exact = torch.autograd.grad(plan_cases.formula(*wide), wide, direction.float())
    assert max(map(relative, found, exact)) < BOUND


@pytest.mark.gpu
def test_a_subclass_of_tensors_in_the_drop_in_does_not_reach_a_plan_of_pytorchs():
    class Tagged(Tensor):
        pass

    layer = polyhead.layers.torch_compat.multihead_attention.MultiheadAttention(256, 4, batch_first=True).to(
        "cuda", torch.bfloat16
    )
    x = torch.randn(2, 432, 256, device="cuda", dtype=torch.bfloat16).as_subclass(Tagged)
    output, _ = layer(x, x, x, need_weights=False)
    assert not any("Cudnn" in name for name in nodes_of(output))


@pytest.mark.gpu
def test_gradient_scores_of_a_model_with_pytorchs_attention_do_not_reach_a_plan_of_pytorchs():
    from transformers import LlamaConfig, LlamaForCausalLM

    from polyhead.surgery.calibration.moments import loss_weights

    config = LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    names: set[str] = set()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        value = model(**batch, labels=batch["input_ids"]).loss
        names.update(nodes_of(value))
        return value

    loss_weights(model, [{"input_ids": torch.randint(64, (2, 448), device="cuda")}], loss)
    assert not any("Cudnn" in name for name in names)
    assert any("Flash" in name for name in names)
