"""Choice of a backend: every branch is taken, and every reason is checked."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from polyhead import Mask, attention, explain
from polyhead.errors import BackendUnsupported, OptionError
from polyhead.ops.attention import dispatch, fused, mask_rule, sdpa
from polyhead.ops.attention.dispatch import BACKENDS, Explanation
from polyhead.ops.common.kernels import availability
from tests.ops.oracle import ON_THE_CPU, normal

Q, K, V = normal(2, 6, 19, 8, seed=1).float(), normal(2, 2, 23, 8, seed=2).float(), normal(2, 2, 23, 11, seed=3).float()


def kernels_run(**options: Any) -> list[str]:
    """Return the operators of attention and its parts, in the order PyTorch ran them."""
    names: list[str] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    query, key, value = options.pop("tensors", (Q, K, K))
    with Recorder():
        attention(query, key, value, **options)
    return [name for name in names if any(part in name for part in ("scaled_dot", "bmm", "softmax"))]


FLASH = ["aten._scaled_dot_product_flash_attention_for_cpu.default"]


# ---- every reason

REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "weights": ({"weights": True}, "do not return weights"),
    "softcap": ({"softcap": 3.0}, "have no softcap"),
    "sinks": ({"sinks": torch.zeros(6)}, "have no learned sinks"),
    "log-sum-exp": ({"logsumexp": True}, "return no differentiable log-sum-exp"),
    "seeded dropout": ({"dropout": 0.1, "seed": 3}, "cannot replay a seed"),
    "dropout": ({"dropout": 0.1}, "math path, which materialises the weights: its CPU kernel has no dropout"),
    "gradient of a bias": (
        {"mask": Mask.bias(torch.randn(19, 23, requires_grad=True))},
        "its CPU kernel has no gradient of a bias",
    ),
    "gradient of a relative bias": (
        {"mask": Mask.relative(torch.randn(6, 5, requires_grad=True), 2)},
        "its CPU kernel has no gradient of a bias",
    ),
}


@pytest.mark.parametrize("case", REASONS)
def test_a_named_backend_that_cannot_run_reports_why(case: str) -> None:
    options, words = REASONS[case]
    choice = explain(Q, K, K, **options)["sdpa"]
    assert not choice.supported
    assert choice.kernel == choice.avoided == ""
    assert any(words in reason for reason in choice.reasons)
    with pytest.raises(BackendUnsupported, match=words) as caught:
        attention(Q, K, K, backend="sdpa", **options)
    assert caught.value.backend == "sdpa"
    assert caught.value.reasons == choice.reasons


@pytest.mark.parametrize("case", REASONS)
def test_auto_takes_another_backend_where_pytorch_cannot_run(case: str) -> None:
    options, _ = REASONS[case]
    expected = "reference" if case == "weights" else "blockwise"
    assert explain(Q, K, K, **options).chosen == expected
    assert attention(Q, K, K, **options).backend == expected


def test_all_reasons_are_given_at_once() -> None:
    bias = Mask.bias(torch.randn(19, 23, requires_grad=True))
    everything = {
        "weights": True,
        "softcap": 2.0,
        "sinks": torch.zeros(6),
        "logsumexp": True,
        "dropout": 0.1,
        "seed": 1,
    }
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(BackendUnsupported) as caught:
        attention(Q, K, K, mask=bias, backend="sdpa", **everything)
    assert len(caught.value.reasons) == 8
    assert all(reason in str(caught.value) for reason in caught.value.reasons)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.backend, copy.reasons, str(copy)) == ("sdpa", caught.value.reasons, str(caught.value))


def test_a_bias_that_needs_no_gradient_is_served_by_pytorch() -> None:
    learned = Mask.bias(torch.randn(19, 23, requires_grad=True))
    assert explain(Q, K, K, mask=Mask.bias(torch.randn(19, 23))).chosen == "sdpa"
    with torch.no_grad():
        assert explain(Q, K, K, mask=learned).chosen == "sdpa"
        assert kernels_run(mask=learned) == FLASH


def test_unknown_backends_are_named_with_the_known_ones() -> None:
    for name in ("flash", None, ["sdpa"], 3):
        with pytest.raises(OptionError, match=r"'auto' or one of 'sdpa', 'fused', 'blockwise', 'reference', got"):
            attention(Q, K, K, backend=name)
    with pytest.raises(OptionError, match="one of sdpa, fused, blockwise, reference, got 'flash'"):
        explain(Q, K, K)["flash"]


# ---- what auto chooses, and what runs

MASKS = {
    "nothing": None,
    "causal": Mask.causal(),
    "window": Mask.window(5),
    "two-sided window": Mask.window(left=3, right=2),
    "first keys": Mask.window(4, sinks=2),
    "lengths": Mask.lengths([17, 3]),
    "left padding": Mask.lengths([17, 3], side="left") & Mask.causal(),
    "documents": Mask.documents([0] * 9 + [1] * 10, [0] * 13 + [1] * 10) & Mask.causal(),
    "positions": Mask.positions(torch.arange(19), torch.arange(23)) & Mask.causal(),
    "dense": Mask.dense(torch.rand(19, 23) < 0.5),
    "dense, transposed": Mask.dense((torch.rand(23, 19) < 0.5).T),
    "dense, expanded": Mask.dense((torch.rand(2, 1, 19, 1) < 0.5).expand(2, 1, 19, 23)),
    "keys alone": Mask.dense(torch.rand(2, 1, 1, 23) < 0.5),
    "bias": Mask.bias(torch.randn(1, 6, 19, 23)),
    "bias of another dtype": Mask.bias(torch.randn(1, 6, 19, 23, dtype=torch.float64)),
    "relative": Mask.relative(torch.randn(6, 9), 5),
}
TENSORS = {
    "plain": (Q, K, K),
    "another value width": (Q, K, V),
    "narrower values": (Q, K, V[..., :3]),
    "same heads": (Q, K.repeat_interleave(3, 1), V.repeat_interleave(3, 1)),
    "one KV head": (Q, K[:, :1], V[:, :1]),
    "layer strides": tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (Q, K, V)),
    "columns first": tuple(x.mT.contiguous().mT for x in (Q, K, V)),
    "every other channel": tuple(torch.randn(*x.shape[:3], 16)[..., ::2] for x in (Q, K, K)),
    "every other token": (torch.randn(2, 6, 38, 8)[:, :, ::2], K, V),
    "head width 1": (Q[..., :1], K[..., :1], V[..., :1]),
    "float64": (Q.double(), K.double(), V.double()),
    "bfloat16": (Q.bfloat16(), K.bfloat16(), V.bfloat16()),
    "float16": (Q.half(), K.half(), V.half()),
}


@pytest.mark.parametrize("tensors", TENSORS)
@pytest.mark.parametrize("mask", MASKS)
def test_explain_reports_fused_kernels_correctly(mask: str, tensors: str) -> None:
    query, key, value = TENSORS[tensors]
    explanation = explain(query, key, value, mask=MASKS[mask])
    assert explanation.chosen == "sdpa"
    assert explanation.kernel == "PyTorch's flash kernel on cpu"
    assert kernels_run(tensors=TENSORS[tensors], mask=MASKS[mask]) == FLASH


def test_a_scale_per_head_is_fused() -> None:
    assert kernels_run(scale=torch.rand(6)) == FLASH
    assert kernels_run(scale=torch.rand(6).requires_grad_()) == FLASH


@pytest.mark.parametrize("tensors", TENSORS)
def test_values_of_another_width_and_any_strides_give_the_same_numbers(tensors: str) -> None:
    query, key, value = TENSORS[tensors]
    ours = attention(query, key, value, mask=Mask.causal(), backend="reference").output
    theirs = attention(query, key, value, mask=Mask.causal(), backend="sdpa").output
    assert theirs.shape == ours.shape == (*query.shape[:3], value.shape[3])
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3}.get(query.dtype, 1e-5)
    torch.testing.assert_close(theirs, ours, rtol=tolerance, atol=tolerance)


def test_the_math_path_is_reported_and_avoided() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        explanation = explain(Q, K, K)
        assert explanation.chosen == "blockwise"
        assert "flash attention is switched off" in explanation["sdpa"].reasons[0]
        assert attention(Q, K, K).backend == "blockwise"
        with pytest.raises(BackendUnsupported, match="its math path, which materialises the weights"):
            attention(Q, K, K, backend="sdpa")
    assert explain(Q, K, K).chosen == "sdpa"


def test_the_order_of_auto() -> None:
    assert BACKENDS == ("sdpa", "fused", "blockwise", "reference")
    assert attention(Q, K, K).backend == "sdpa"
    assert attention(Q, K, K, softcap=2.0).backend == "blockwise"
    assert attention(Q, K, K, weights=True).backend == "reference"
    assert attention(Q, K, K, weights=True, softcap=2.0, dropout=0.2, seed=1).backend == "reference"
    assert attention(Q, K, K, logsumexp=True).backend == "blockwise"
    assert attention(Q, K, K, statistics="entropy").backend == "blockwise"


@pytest.mark.parametrize("backend", ON_THE_CPU)
def test_a_named_backend_is_the_one_that_answers(backend: str) -> None:
    assert attention(Q, K, V, mask=Mask.causal(), backend=backend).backend == backend


# ---- masks too large to be materialised


@pytest.mark.parametrize(
    ("mask", "elements", "item"),
    [
        (None, 0, 0),
        (Mask.window(5), 19 * 23, 1),
        (Mask.causal(), 19 * 23, 1),
        (Mask.lengths([17, 3]), 2 * 23, 1),
        (Mask.lengths([17, 3]) & Mask.causal(), 2 * 19 * 23, 1),
        (Mask.dense(torch.ones(1, 6, 19, 23, dtype=torch.bool)), 6 * 19 * 23, 1),
        (Mask.dense(torch.ones(2, 1, 1, 23, dtype=torch.bool)), 2 * 23, 1),
        (Mask.bias(torch.randn(1, 6, 19, 23)), 6 * 19 * 23, 4),
        (Mask.relative(torch.randn(6, 9), 5), 6 * 19 * 23, 4),
    ],
    ids=repr,
)
def test_auto_avoids_a_mask_that_would_be_too_large(
    monkeypatch: pytest.MonkeyPatch, mask: Mask | None, elements: int, item: int
) -> None:
    size = elements * item
    monkeypatch.setattr(mask_rule, "LARGEST_MASK", size)
    assert explain(Q, K, K, mask=mask).chosen == "sdpa"
    monkeypatch.setattr(mask_rule, "LARGEST_MASK", size - 1)
    explanation = explain(Q, K, K, mask=mask)
    if mask is None:
        return
    assert explanation.chosen == "blockwise"
    assert explanation["sdpa"].supported
    assert "its mask would be materialised" in explanation["sdpa"].avoided
    assert "its mask would be materialised" in str(explanation)
    assert attention(Q, K, K, mask=mask).backend == "blockwise"
    assert attention(Q, K, K, mask=mask, backend="sdpa").backend == "sdpa"  # a named backend is used


def test_explaining_a_large_mask_does_not_build_it() -> None:
    x = torch.zeros(1, 1, 40_000, 1)
    explanation = explain(x, x, x, mask=Mask.window(7))
    assert "1.5 GiB" in explanation["sdpa"].avoided
    assert explanation.chosen == "blockwise"


@pytest.mark.parametrize("mask", [m for m in MASKS.values() if m is not None], ids=repr)
def test_the_size_of_a_mask_is_known_before_it_is_built(mask: Mask) -> None:
    request = _request_of(mask)
    call = sdpa._prepare(request)
    assert call.mask is not None
    assert call.mask.nbytes <= sdpa.materialised_bytes(request)


def _request_of(mask: Mask) -> Any:
    caught: list[Any] = []
    original = dispatch.run

    def catch(request: Any, backend: str) -> Any:
        caught.append(request)
        return original(request, backend)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "run", catch)
        attention(Q, K, K, mask=mask)
    return caught[0]


@pytest.mark.parametrize(
    "mask",
    [Mask.causal(), Mask.lengths([17, 3]) & Mask.causal(), Mask.lengths([23, 0]) & Mask.causal()],
    ids=repr,
)
def test_a_causal_self_attention_needs_no_mask_tensor(monkeypatch: pytest.MonkeyPatch, mask: Mask) -> None:
    monkeypatch.setattr(mask_rule, "LARGEST_MASK", 0)
    x = torch.randn(2, 6, 23, 8)
    assert explain(x, K, K, mask=mask).chosen == "sdpa"
    assert explain(x[:, :, :1], K, K, mask=Mask.causal()).chosen == "sdpa"


# ---- windows whose hidden pairs cost more than our kernel

SKIPS = "it computes every pair that the window masks"


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend that tensors are on a GPU whose kernels support every request."""
    monkeypatch.setattr(sdpa, "kernel", lambda request: "efficient")
    monkeypatch.setattr(availability, "capability", lambda device: (9, 0))
    monkeypatch.setattr(availability, "HAS_TRITON", True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with FakeTensorMode():
        yield


def far(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, **sizes: int) -> tuple[torch.Tensor, ...]:
    """Return queries, keys and values of exactly 2^35 multiply-adds, unless sizes are passed."""
    size = {"batch": 2, "heads": 4, "kv_heads": 2, "queries": 8192, "keys": 8192, "dim": 64} | sizes
    query = torch.empty(size["batch"], size["heads"], size["queries"], size["dim"], device=device, dtype=dtype)
    key = torch.empty(size["batch"], size["kv_heads"], size["keys"], size["dim"], device=device, dtype=dtype)
    return query, key, key


@pytest.mark.parametrize("mask", [Mask.window(256), Mask.window(left=99, right=7), Mask.window(left=99, right=None)])
def test_auto_leaves_a_long_window_on_a_gpu_to_our_kernel(a_gpu: None, mask: Mask) -> None:
    explanation = explain(*far(), mask=mask)
    assert explanation.chosen == "fused"
    assert explanation["sdpa"].supported
    assert SKIPS in explanation["sdpa"].avoided
    assert SKIPS in str(explanation)


@pytest.mark.parametrize("size", ["batch", "heads", "queries", "keys", "dim"])
def test_less_work_under_a_window_stays_with_pytorch(a_gpu: None, size: str) -> None:
    less = {"batch": 1, "heads": 2, "queries": 8191, "keys": 8191, "dim": 56}
    explanation = explain(*far(**{size: less[size]}), mask=Mask.window(256))
    assert (explanation.chosen, explanation["sdpa"].avoided) == ("sdpa", "")


OTHERS: dict[str, Callable[[], Mask | None]] = {
    "nothing": lambda: None,
    "causal": Mask.causal,
    "edge ahead": lambda: Mask.window(left=None, right=5),
    "first keys": lambda: Mask.window(256, sinks=4),
    "documents": lambda: Mask.window(256) & Mask.documents(torch.empty(2, 8192, dtype=torch.int64, device="cuda")),
    "dense": lambda: Mask.window(256) & Mask.dense(torch.empty(1, 1, 1, 8192, dtype=torch.bool, device="cuda")),
    "bias": lambda: Mask.window(256) & Mask.bias(torch.empty(1, 1, 1, 8192, device="cuda")),
}


@pytest.mark.parametrize("mask", OTHERS)
def test_masks_that_are_no_window_alone_stay_with_pytorch(a_gpu: None, mask: str) -> None:
    explanation = explain(*far(), mask=OTHERS[mask]())
    assert (explanation.chosen, explanation["sdpa"].avoided) == ("sdpa", "")


@pytest.mark.parametrize("mask", [name for name, mask in MASKS.items() if mask is not None])
def test_only_a_window_by_itself_is_one(mask: str) -> None:
    with_window = _request_of(MASKS[mask] & Mask.window(5)) if MASKS[mask].sinks == 0 else _request_of(MASKS[mask])
    is_band = mask in ("causal", "window", "two-sided window")
    assert with_window.visibility.is_window == is_band
    assert _request_of(MASKS[mask]).visibility.is_window == (is_band and mask != "causal")


def test_what_our_kernel_cannot_serve_or_was_not_timed_in_stays_with_pytorch(
    a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert explain(*far(dtype=torch.float32), mask=Mask.window(256)).chosen == "sdpa"
    assert explain(*far("cpu"), mask=Mask.window(256)).chosen == "sdpa"
    assert explain(*far(dim=320), mask=Mask.window(256)).chosen == "sdpa"
    monkeypatch.setattr(availability, "capability", lambda device: (7, 5))
    assert explain(*far(), mask=Mask.window(256)).chosen == "sdpa"


def test_an_exported_window_stays_with_pytorch(a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)
    assert explain(*far(), mask=Mask.window(256)).chosen == "sdpa"


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_choice_is_the_same_in_a_compiled_program(monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    """Applies the rule to a CPU and to less work, with the formula as our kernel."""
    monkeypatch.setattr(mask_rule, "DEVICE", "cpu")
    monkeypatch.setattr(mask_rule, "DTYPES", (torch.float32,))
    monkeypatch.setattr(mask_rule, "LARGEST_WINDOWED", 2 * 6 * 19 * 23 * 8)
    monkeypatch.setitem(dispatch._RUN, "fused", dispatch._RUN["reference"])
    monkeypatch.setitem(dispatch._REASONS, "fused", lambda request: [])
    monkeypatch.setattr(fused, "unsupported_reasons", lambda request: [])
    torch.compiler.reset()

    def compute(query: torch.Tensor, key: torch.Tensor) -> Any:
        return attention(query, key, key, mask=Mask.window(5))

    compiled = torch.compile(compute, fullgraph=True, backend="eager", dynamic=False)
    for queries, backend in ((19, "reference"), (18, "sdpa")):
        query = Q[:, :, :queries].clone()
        if dynamic:
            torch._dynamo.mark_dynamic(query, 2)
        for result in (compute(query, K), compiled(query, K)):
            assert result.backend == backend
            torch.testing.assert_close(result.output, compute(query, K).output)


@pytest.mark.gpu
def test_a_long_window_is_the_same_from_our_kernel_and_from_pytorch() -> None:
    query, key, value = (torch.randn(1, 8, 8192, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    leaves = [x.requires_grad_() for x in (query, key, value)]

    def call(backend: str) -> tuple[str, list[torch.Tensor]]:
        result = attention(query, key, value, mask=Mask.window(256), backend=backend)
        return result.backend, [result.output, *torch.autograd.grad(result.output.float().square().sum(), leaves)]

    chosen, ours = call("auto")
    _, theirs = call("sdpa")
    assert chosen == "fused"
    for actual, expected in zip(ours, theirs, strict=True):
        scale = float(expected.detach().float().abs().max())
        torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=0.02 * scale)


# ---- biases by distance, which PyTorch is handed pair by pair

BY_DISTANCE = "it needs the bias of every pair materialised, and our kernel reads it by distance"


def near(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, dim: int = 64) -> tuple[torch.Tensor, ...]:
    return far(device, dtype, queries=19, keys=23, dim=dim)


def table(heads: int = 4, *, learned: bool = False, device: str = "cuda") -> Mask:
    return Mask.relative(torch.empty(heads, 41, device=device, requires_grad=learned), 22)


BIASED: dict[str, Callable[[], Mask]] = {
    "fixed": table,
    "learned": lambda: table(learned=True),
    "one for all heads": lambda: table(1),
    "causal": lambda: table(learned=True) & Mask.causal(),
    "window": lambda: table() & Mask.window(5),
    "first keys": lambda: table() & Mask.window(5, sinks=2),
    "positions": lambda: table() & Mask.positions(*(torch.empty(1, n, dtype=torch.int64) for n in (19, 23))),
    "dense": lambda: table() & Mask.dense(torch.empty(1, 1, 1, 23, dtype=torch.bool, device="cuda")),
    "another bias": lambda: table() & Mask.bias(torch.empty(1, 1, 1, 23, device="cuda")),
}


@pytest.mark.parametrize("mask", BIASED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_auto_leaves_a_bias_by_distance_on_a_gpu_to_our_kernel(a_gpu: None, mask: str, dtype: torch.dtype) -> None:
    with torch.no_grad():
        explanation = explain(*near(dtype=dtype), mask=BIASED[mask]())
    assert explanation.chosen == "fused"
    assert explanation["sdpa"].supported
    assert explanation["sdpa"].avoided == BY_DISTANCE
    assert BY_DISTANCE in str(explanation)


def test_the_gradient_of_a_bias_by_distance_is_left_to_our_kernel_where_it_is_learned_and_large(
    a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = near()
    pairs = query.shape[0] * query.shape[1] * 19 * 23
    for least, chosen in ((pairs, "fused"), (pairs + 1, "sdpa")):
        monkeypatch.setattr(mask_rule, "MOST_LEARNED_PAIRS", least)
        assert explain(query, key, value, mask=table(learned=True)).chosen == chosen
        assert explain(query, key, value, mask=table()).chosen == "fused"
        assert explain(query.clone().requires_grad_(), key, value, mask=table()).chosen == "sdpa"


def test_a_bias_of_every_pair_stays_with_pytorch(a_gpu: None) -> None:
    explanation = explain(*near(), mask=Mask.bias(torch.empty(1, 4, 19, 23, device="cuda")))
    assert (explanation.chosen, explanation["sdpa"].avoided) == ("sdpa", "")


def test_a_bias_by_distance_that_our_kernel_cannot_serve_or_was_not_timed_in_stays_with_pytorch(
    a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert explain(*near(dtype=torch.float32), mask=table()).chosen == "sdpa"
    assert explain(*near("cpu"), mask=table(device="cpu")).chosen == "sdpa"
    assert explain(*near(dim=320), mask=table()).chosen == "sdpa"
    assert explain(*near(), mask=table() & table()).chosen == "sdpa"
    monkeypatch.setattr(availability, "capability", lambda device: (7, 5))
    assert explain(*near(), mask=table()).chosen == "sdpa"


def test_the_gradient_of_a_table_is_left_to_pytorch_where_it_must_be_the_same_at_every_run(
    a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_rule, "MOST_LEARNED_PAIRS", 0)
    assert explain(*near(), mask=table(learned=True)).chosen == "fused"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert explain(*near(), mask=table(learned=True)).chosen == "sdpa"
    assert explain(*near(), mask=table()).chosen == "fused"


def test_an_exported_bias_by_distance_stays_with_pytorch(a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)
    assert explain(*near(), mask=table()).chosen == "sdpa"


def test_a_bias_by_distance_goes_to_our_kernel_in_a_compiled_program_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Applies the rule to a CPU, with the formula as our kernel."""
    monkeypatch.setattr(mask_rule, "DEVICE", "cpu")
    monkeypatch.setattr(mask_rule, "DTYPES", (torch.float32,))
    monkeypatch.setitem(dispatch._RUN, "fused", dispatch._RUN["reference"])
    monkeypatch.setitem(dispatch._REASONS, "fused", lambda request: [])
    monkeypatch.setattr(fused, "unsupported_reasons", lambda request: [])
    torch.compiler.reset()

    def compute(query: torch.Tensor, key: torch.Tensor, by_distance: torch.Tensor) -> Any:
        return attention(query, key, key, mask=Mask.causal() & Mask.relative(by_distance, 22))

    given = Q, K, torch.randn(6, 41)
    compiled = torch.compile(compute, fullgraph=True, backend="eager")
    results = [compute(*given), compiled(*given)]
    assert [result.backend for result in results] == ["reference", "reference"]
    torch.testing.assert_close(results[1].output, results[0].output)


@pytest.mark.gpu
@pytest.mark.parametrize("learned", [False, True])
def test_a_bias_by_distance_is_the_same_from_our_kernel_and_from_pytorch(learned: bool) -> None:
    query, key, value = (torch.randn(2, 4, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    by_distance = torch.randn(4, 1023, device="cuda", requires_grad=learned)
    leaves = [x.requires_grad_() for x in (query, key, value)] + ([by_distance] if learned else [])

    def call(backend: str) -> list[torch.Tensor]:
        mask = Mask.causal() & Mask.relative(by_distance, 511)
        output = attention(query, key, value, mask=mask, backend=backend).output
        return [output, *torch.autograd.grad(output.float().square().sum(), leaves)]

    ours, theirs = call("fused"), call("sdpa")
    for actual, expected in zip(ours, theirs, strict=True):
        scale = float(expected.detach().float().abs().max())
        torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=0.03 * scale)


# ---- the explanation itself


def test_an_explanation_prints_as_a_table() -> None:
    text = str(explain(Q, K, K, softcap=2.0, sinks=torch.zeros(6)))
    assert text.splitlines() == [
        "   sdpa       no: PyTorch's fused kernels have no softcap; PyTorch's fused kernels have no learned sinks",
        "   fused      no: our kernels run on CUDA devices, got tensors on cpu",
        "-> blockwise  tiles of plain PyTorch, online softmax",
        "   reference  the formula, weights materialised; auto tries blockwise first",
    ]


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"statistics": "entropy"}, {"weights": True}], ids=str)
def test_every_backend_that_is_not_chosen_has_a_reason(options: dict[str, Any]) -> None:
    explanation = explain(Q, K, K, **options)
    for choice in explanation.choices:
        assert bool(choice.reasons or choice.avoided) == (choice.backend != explanation.chosen)


def test_an_explanation_names_the_second_pass_for_statistics() -> None:
    explanation = explain(Q, K, K, statistics="entropy")
    assert explanation.chosen == "blockwise"
    assert "second pass" in explanation["sdpa"].avoided
    assert explanation["sdpa"].kernel.endswith("then a second pass over the logits for the statistics")


def test_an_explanation_has_an_entry_for_every_backend() -> None:
    explanation = explain(Q, K, K)
    assert isinstance(explanation, Explanation)
    assert tuple(choice.backend for choice in explanation.choices) == BACKENDS
    assert explanation["reference"].kernel == "the formula, weights materialised"
    assert explanation["blockwise"].kernel == "tiles of plain PyTorch, online softmax"


@pytest.mark.parametrize("backend", ON_THE_CPU)
def test_every_backend_gives_the_same_statistics(backend: str) -> None:
    expected = attention(Q, K, K, statistics=True, backend="reference").statistics
    found = attention(Q, K, K, statistics=True, backend=backend).statistics
    torch.testing.assert_close(dict(found.items()), dict(expected.items()), rtol=1e-4, atol=1e-5)
    for nothing in (None, False, ()):
        assert attention(Q, K, K, statistics=nothing, backend=backend).statistics is None


def test_tensors_without_memory_are_served() -> None:
    query, key = torch.empty(2, 6, 19, 8, device="meta"), torch.empty(2, 2, 23, 8, device="meta")
    for mask in (None, Mask.causal(), Mask.lengths([17, 3])):
        assert attention(query, key, key, mask=mask).output.shape == (2, 6, 19, 8)


@pytest.mark.parametrize("backend", ON_THE_CPU)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_decides_the_dtype(backend: str, dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype):
        result = attention(Q, K, V, mask=Mask.causal(), backend=backend).output
        mixed = attention(Q, K.to(dtype), V.to(dtype), mask=Mask.causal(), backend=backend).output
    expected = attention(Q.to(dtype), K.to(dtype), V.to(dtype), mask=Mask.causal(), backend=backend).output
    assert result.dtype is dtype
    assert torch.equal(result, expected)
    assert torch.equal(mixed, expected)


@pytest.mark.parametrize("backend", ON_THE_CPU)
def test_a_backward_inside_autocast_is_that_outside(backend: str) -> None:
    grads = []
    for is_inside in (True, False):
        inputs = [x.clone().requires_grad_() for x in (Q, K, V)]
        with torch.autocast("cpu", torch.bfloat16):
            output = attention(*inputs, mask=Mask.causal(), backend=backend).output
            if is_inside:
                output.float().square().sum().backward()
        if not is_inside:
            output.float().square().sum().backward()
        grads.append([x.grad for x in inputs])
    for inside, outside in zip(*grads, strict=True):
        if backend == "blockwise":
            assert torch.equal(inside, outside)
        torch.testing.assert_close(inside, outside, rtol=2e-2, atol=2e-2)


def test_a_promise_of_finite_keys_changes_no_number() -> None:
    for backend in ON_THE_CPU:
        options: dict[str, Any] = {"mask": Mask.causal() & Mask.lengths([17, 3]), "backend": backend}
        assert torch.equal(
            attention(Q, K, V, finite=True, **options).output, attention(Q, K, V, finite=False, **options).output
        )
