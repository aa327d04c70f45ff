"""Our kernels as a backend: unsupported requests, values and gradients against float64, compilers.

Kernels run in Triton's interpreter, in a separate process, or on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks.call_frames import frames_to_launch
from polyhead import AttentionOutput, Mask, Statistics, attention, explain
from polyhead.errors import BackendUnsupported
from polyhead.ops.attention import fused
from polyhead.ops.common.kernel_call import KernelCall
from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.statistics import NAMES
from tests.error_budget import DRAWS, ORDERS, Compared, assert_draws_within_error_budget
from tests.ops.attention.kernels.test_forward import bounds, by_formula, check_statistics, flags, scene
from tests.ops.attention.test_hidden_values import break_hidden, with_options
from tests.ops.interpreter.interpreted import in_the_interpreter, poisoned_memory
from tests.ops.oracle import Pairs, Scene, Who, normal, result_and_gradients
from tests.two_dtypes import in_two_dtypes

SINK_KEYS, WINDOW = 2, 6
DIFFERENTIABLE = tuple(name for name in NAMES if name != "visible_keys")


@contextmanager
def small_tiles() -> Iterator[None]:
    """Use tiles so small that short sequences have several, some of them full."""
    from polyhead.ops.attention.kernels import backward, forward

    blocks = (backward.Blocks(16, 32, 4, 2), backward.Blocks(32, 16, 4, 2))
    with (
        mock.patch.object(forward, "choose_blocks", return_value=forward.Blocks(16, 16, 4, 1)),
        mock.patch.object(backward, "choose_blocks", return_value=blocks),
    ):
        yield


def tiles_for(device: str) -> object:
    return nullcontext() if device == "cuda" else small_tiles()


def gradients(case: Scene, backend: str, refusal: tuple[str, ...], device: str = "cpu") -> dict[str, Tensor]:
    """Return the gradients of a random functional of the output, the log-sum-exp or named statistics."""
    case = case.with_gradients()
    requested = tuple(
        name for name in refusal if name in NAMES and (name != "learned_sink_mass" or case.sinks is not None)
    )
    statistics = Statistics(*requested, sink_keys=SINK_KEYS, window=WINDOW) if requested else None
    result = case.run(backend, device, statistics=statistics)
    there = {"output": result.output, "logsumexp": result.logsumexp}
    there |= {} if result.statistics is None else dict(result.statistics.items())
    loss = torch.zeros((), dtype=torch.float64)
    for place, (name, told_of) in enumerate(there.items()):
        if name in refusal:
            generator = torch.Generator().manual_seed(place)
            direction = torch.randn(told_of.shape, generator=generator).bfloat16().to(told_of.dtype)
            told_of = told_of.cpu()
            loss = loss + (torch.where(told_of.detach() == -torch.inf, 0.0, told_of) * direction).double().sum()
    inputs = case.learned
    if not loss.requires_grad:
        return {name: torch.zeros_like(x) for name, x in inputs.items()}
    found = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
    named = zip(inputs.items(), found, strict=True)
    return {name: torch.zeros_like(x) if grad is None else grad for (name, x), grad in named}


def check_output(name: str, case: Scene, dtype: torch.dtype, device: str) -> None:
    """Check the output and its gradients against the error budget."""
    case = case.to(dtype).on(device)
    samples = [output_and_gradients(case, device)]
    other = case.reordered(DRAWS if device == "cpu" else ORDERS)
    samples.append(output_and_gradients(other, None if device == "cpu" else device))
    assert_draws_within_error_budget(samples, name=f"{name}, {dtype}")


def check_orders(dtype: torch.dtype) -> None:
    """Check several orders of the keys, queries and channels of one scene."""
    case = scene(queries=19, keys=23, heads=(1, 1), dims=(16, 8), sinks=normal(1, seed=7), who=Who(causal=True))
    case = case.to(dtype)
    assert_draws_within_error_budget([output_and_gradients(case.reordered(), "cpu")], name=f"in any order, {dtype}")


def output_and_gradients(case: Scene, device: str | None) -> dict[str, Compared]:
    """Return our output and gradients (None without a device) and the formula's."""
    exact, plain = result_and_gradients(case.to(torch.float64)), result_and_gradients(case)
    parts = {"output": Compared(None, exact.output, plain.output)}
    parts |= {f"gradient of {x}": Compared(None, grad, plain.gradients[x]) for x, grad in exact.gradients.items()}
    if device is None:
        return parts
    case = case.with_gradients()
    with tiles_for(device), poisoned_memory():
        result = case.run("fused", device)
        output = result.output.to(case.query.device)
        # The functional of `result_and_gradients`.
        direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(7)).bfloat16().to(output)
        found = torch.autograd.grad((output * direction).double().sum(), list(case.learned.values()), allow_unused=True)
    assert result.backend == "fused"
    parts["output"] = parts["output"]._replace(actual=output)
    for learned, grad in zip(case.learned, found, strict=True):
        if not (learned == "table" and isinstance(case.who, Pairs)):
            parts[f"gradient of {learned}"] = parts[f"gradient of {learned}"]._replace(actual=grad)
    return parts


def check_statistics_gradients(name: str, case: Scene, refusal: tuple[str, ...], device: str) -> None:
    """Check gradients of statistics in float32; the float32 formula sets the budget, over several draws."""
    case = case.to(torch.float32)
    with tiles_for(device), poisoned_memory():
        found = gradients(case, "fused", refusal, device)
    exact, plain = (gradients(x, "reference", refusal) for x in (case.to(torch.float64), case))
    draws = case.redrawn(ORDERS)
    others = [gradients(x, "reference", refusal) for x in (draws.to(torch.float64), draws)]
    samples = [
        {f"gradient of {x}": Compared(grad, exact[x], plain[x]) for x, grad in found.items()},
        {f"gradient of {x}": Compared(None, others[0][x], others[1][x]) for x in found},
    ]
    assert_draws_within_error_budget(samples, name=f"{name}, through {', '.join(refusal)}")


def causal_scene() -> Scene:
    return scene(sinks=normal(2, seed=7), who=Who(causal=True))


def statistics_scene() -> Scene:
    """Return a scene in which every input is learned."""
    return scene(
        bias=normal(1, 2, 1, 41, seed=4),
        table=normal(2, 9, seed=6),
        zero=5,
        sinks=normal(2, seed=7),
        scale=torch.tensor([0.4, -0.7], dtype=torch.float64),
        softcap=2.5,
        who=Who(causal=True),
    )


# Names of statistics, each with the output, in the scene of their gradients.
TOLD: dict[str, tuple[Callable[[], Scene], tuple[str, ...]]] = {
    **{name: (causal_scene, (name,)) for name in ("logsumexp", *DIFFERENTIABLE)},
    **{f"{name}, every input": (statistics_scene, (name,)) for name in ("max_logit", "max_abs_logit", "confidence")},
    "all, every input": (statistics_scene, ("logsumexp", *DIFFERENTIABLE)),
}


def check_statistic(kind: str, device: str) -> None:
    make, names = TOLD[kind]
    check_statistics_gradients(kind, make(), ("output", *names), device)


def check_every_statistic(device: str) -> None:
    for kind in TOLD:
        check_statistic(kind, device)
    check_zero_scale(device)


def check_scenes(dtype: torch.dtype, examples: int) -> None:
    """Check values and gradients under random masks and options."""
    from hypothesis import HealthCheck, Phase, given, settings

    from tests.ops.oracle import scenes

    # An interpreted kernel takes seconds, so that shrinking a failure would take hours.
    @settings(
        max_examples=examples,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(scenes(max_heads=2))
    def each(case: Scene) -> None:
        check_output("any scene", case, dtype, "cpu")

    each()


def check_zero_scale(device: str) -> None:
    """Check the gradient of a scale of 0."""
    for scale in ([0.0, 0.3], [0.0, 0.0]):
        case = scene(scale=torch.tensor(scale, dtype=torch.float64), who=Who(causal=True))
        check_output("scale of 0", case, torch.float32, device)
        check_statistics_gradients("scale of 0", case, ("max_logit", "entropy"), device)


HIDING = {
    "padding": Who(key_lengths=(17, 0), causal=True),
    "documents": Who(query_documents=((0,) * 5 + (-1,) * 3 + (1,) * 11,)),
    "dense": Who(dense=torch.arange(19) % 3 > 0),
}


def hiding_scene(kind: str) -> Scene:
    """Return a scene with keys that no row sees and, in two of three, rows without visible keys."""
    who = HIDING[kind]
    if who.dense is not None:
        who = replace(who, dense=(who.dense[:, None] & (torch.arange(19) % 5 > 0))[None, None])
    return scene(batch=2, queries=19, keys=19, dims=(8, 8), who=who)


def check_hidden(kind: str, device: str, dtype: torch.dtype) -> None:
    """Check that masked keys and rows without visible keys affect no output, statistic or gradient."""
    plain = hiding_scene(kind).to(dtype)
    for clean, refusal in ((plain, ("output",)), (with_options(plain), ("output", "entropy", "max_abs_logit"))):
        broken, count = break_hidden(clean)
        assert count > 0
        with tiles_for(device):
            expected, actual = (x.run("fused", device, statistics=True) for x in (clean, broken))
            grads, broken_grads = (gradients(x, "fused", refusal, device) for x in (clean, broken))
        assert torch.equal(actual.output, expected.output)
        assert actual.statistics is not None
        assert expected.statistics is not None
        for (name, rows), (_, right) in zip(actual.statistics.items(), expected.statistics.items(), strict=True):
            assert torch.equal(rows, right), name
        for name, grad in grads.items():
            assert torch.equal(broken_grads[name], grad), name


def check_seen(device: str) -> None:
    """Check that a non-finite key affects the rows that see it, and no others."""
    case = hiding_scene("padding").to(torch.float32)
    key = case.key.clone()
    key[0, 0, 6, 3] = torch.nan
    with tiles_for(device):
        result = replace(case, key=key).run("fused", device, statistics=True)
        clean = case.run("fused", device, statistics=True)
    group = case.query.shape[1] // key.shape[1]
    seen = torch.zeros(case.query.shape[:3], dtype=torch.bool)
    seen[0, :group] = case.visible()[0, :group, :, 6]
    assert seen.any()
    assert result.output.cpu().isnan().all(-1).equal(seen)
    assert result.output.cpu()[~seen].equal(clean.output.cpu()[~seen])
    assert result.statistics is not None
    assert result.statistics.entropy is not None
    assert result.statistics.entropy.cpu().isnan().equal(seen)


FEW = {
    "one query": scene(batch=2, heads=(4, 2), queries=1, keys=70, dims=(16, 8)),
    "causal": scene(heads=(4, 2), queries=5, keys=41, dims=(16, 8), who=Who(causal=True)),
    "as many as keys": scene(queries=16, keys=16, dims=(8, 8), who=Who(causal=True)),
    "window": scene(queries=3, keys=77, dims=(8, 16), who=Who(left=20, right=0, first=2)),
    "one query, window": scene(queries=1, keys=77, dims=(8, 8), who=Who(left=20)),
    "options": scene(
        queries=4,
        dims=(8, 8),
        sinks=normal(2, seed=7),
        scale=torch.tensor([0.4, -0.7], dtype=torch.float64),
        softcap=2.5,
        who=Who(causal=True),
    ),
}


def check_few_queries(device: str, dtype: torch.dtype) -> None:
    """Check that a few last queries run the decode kernel, which keeps the promises of `attention` by itself."""
    requested = Statistics(sink_keys=SINK_KEYS, window=WINDOW)
    for name, case in FEW.items():
        case = case.to(dtype)
        broken, count = break_hidden(case)
        assert (count > 0) == ("window" in name)
        with mock.patch.object(fused, "decode", wraps=fused.decode) as decode, poisoned_memory():
            found, same = (x.run("fused", device, statistics=requested) for x in (case, broken))
        assert decode.call_count == 2, name
        assert torch.equal(same.output, found.output), name
        assert torch.equal(same.logsumexp, found.logsumexp), name
        exact = case.to(torch.float64).run("reference", statistics=requested)
        samples = [by_formula(case, 0.0), by_formula(case.reordered(DRAWS), 0.0)]
        for part, actual in (("output", found.output), ("logsumexp", found.logsumexp)):
            samples[0][part] = samples[0][part]._replace(actual=actual.cpu())
        assert_draws_within_error_budget(samples, name=f"{name}, {dtype}")
        rows = {statistic: x.cpu() for statistic, x in found.statistics.items()}
        check_statistics(name, rows, exact.statistics, bounds(case.to(torch.float64)))
    case = FEW["causal"].to(dtype)
    key, value = case.key.clone(), case.value.clone()
    key[:, :1, -1], value[:, 1:, -1] = torch.nan, torch.inf
    result, clean = (x.run("fused", device).output for x in (replace(case, key=key, value=value), case))
    assert torch.equal(result[:, :, :-1], clean[:, :, :-1])
    assert result[:, :, -1].isfinite().logical_not().all()
    assert case.with_gradients().run("fused", device).output.requires_grad

    def few(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        found = attention(query, key, value, mask=Mask.causal(), statistics=("entropy",), backend="fused")
        return found.output, found.statistics.entropy

    inputs = [x.to(device) for x in (case.query, case.key, case.value)]
    torch._dynamo.reset()
    compiled = torch.compile(few, fullgraph=True, backend="aot_eager")(*inputs)
    assert all(map(torch.equal, compiled, few(*inputs)))


def check_dropout(device: str) -> None:
    """Check that dropout matches the other backends, and that statistics ignore it."""
    case = scene(batch=2, who=Who(causal=True)).to(torch.float32)
    options = {"dropout": 0.3, "seed": 5, "statistics": ("entropy",)}
    with tiles_for(device):
        dropped, kept = case.run("fused", device, **options), case.run("fused", device, statistics=("entropy",))
    expected = case.run("reference", **options)
    assert torch.allclose(dropped.output.cpu(), expected.output, atol=1e-5)
    assert not torch.allclose(dropped.output, kept.output, atol=1e-2)
    assert dropped.statistics is not None
    assert kept.statistics is not None
    assert torch.equal(dropped.statistics.entropy, kept.statistics.entropy)


def check_refusals(device: str) -> None:
    """Check that there is no second derivative, and no derivative of a count."""
    case = scene(who=Who(causal=True)).to(torch.float32).with_gradients()
    result = case.run("fused", device, statistics=True)
    assert result.statistics is not None
    assert result.statistics.visible_keys is not None
    assert not result.statistics.visible_keys.requires_grad
    (grad,) = torch.autograd.grad(result.output.sum(), case.query, create_graph=True)
    with pytest.raises(BackendUnsupported, match='backend="blockwise"'):
        torch.autograd.grad(grad.sum(), case.query)


def check_programs(device: str) -> None:
    """Check torch.compile without graph breaks, export as one operator, and `torch.library.opcheck`."""
    query, key, value = (torch.randn(2, heads, 23, 16, device=device) for heads in (4, 2, 2))
    bias = torch.randn(1, 1, 1, 23, device=device)
    leaves = [x.requires_grad_() for x in (query, key, value, bias)]
    lengths = torch.tensor([17, 23], device=device)

    def call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        mask = Mask.causal() & Mask.lengths(lengths) & Mask.bias(bias)
        result = attention(query, key, value, mask=mask, statistics=True, dropout=0.1, seed=3, backend="fused")
        rows = result.statistics
        assert rows is not None
        return result.output, rows.entropy, rows.sink_mass, rows.confidence

    def all_of(function: Callable[..., tuple[Tensor, ...]]) -> list[Tensor]:
        found = function(*leaves)
        return [*found, *torch.autograd.grad(sum(x.square().sum() for x in found), leaves)]

    expected = all_of(call)
    backend = "inductor" if device == "cuda" else "aot_eager"
    for dynamic in (False, True) if device == "cuda" else (True,):
        torch._dynamo.reset()
        compiled = all_of(torch.compile(call, fullgraph=True, backend=backend, dynamic=dynamic))
        for actual, right in zip(compiled, expected, strict=True):
            assert torch.allclose(actual, right, atol=1e-5)

    class Layer(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> AttentionOutput:
            return attention(query, key, value, mask=Mask.causal(), statistics=("entropy",), backend="fused")

    inputs = tuple(x.detach() for x in (query, key, value))
    program = torch.export.export(Layer(), inputs)
    assert "polyhead.attention_forward.default" in [str(node.target) for node in program.graph.nodes]
    assert torch.equal(program.module()(*inputs).output, Layer()(*inputs).output)

    kernel_call = KernelCall(query, key, value, MaskArguments(right=0), scale=0.25, names=("max_logit", "entropy"))
    torch.library.opcheck(torch.ops.polyhead.attention_forward.default, kernel_call.flat())


def check_layouts(device: str) -> None:
    """Check that the output has the query's axis order, and the same values for every order."""
    heads_first = torch.randn(2, 3, 23, 16, device=device)
    tokens_first = heads_first.transpose(1, 2).contiguous().transpose(1, 2)
    both = torch.cat([tokens_first, tokens_first], -1)[..., 16:]  # a part of something wider
    outputs = []
    for query in (heads_first, tokens_first, both):
        output = attention(query, heads_first, heads_first, backend="fused").output
        assert output.stride() == torch.empty_like(query).stride()
        outputs.append(output)
    assert outputs[0].equal(outputs[1])
    assert outputs[0].equal(outputs[2])
    narrow = attention(heads_first, heads_first, heads_first[..., :8], backend="fused").output
    assert narrow.transpose(1, 2).is_contiguous()


def check_frames() -> None:
    """Check how many of polyhead's frames are between `attention` and the launch of the kernel."""
    for records_grad, most in ((False, 8), (True, 9)):
        x = torch.randn(1, 2, 24, 16, requires_grad=records_grad)

        def call(x: Tensor = x) -> AttentionOutput:
            return attention(x, x, x, mask=Mask.causal(), statistics=True, backend="fused")

        stack, entered = frames_to_launch(call)
        assert stack[0].endswith(".attention")
        assert len(stack) <= most, stack
        assert set(stack) <= set(entered)


def test_in_the_interpreter_few_frames_lead_to_the_launch() -> None:
    in_the_interpreter(check_frames)


@pytest.mark.numerics
@pytest.mark.parametrize(("dtype", "examples"), [(torch.float32, 10), (torch.float16, 5)])
def test_in_the_interpreter_any_scene_keeps_to_the_budget(dtype: torch.dtype, examples: int) -> None:
    in_the_interpreter(check_scenes, dtype, examples)


@pytest.mark.numerics
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_in_the_interpreter_any_order_of_the_keys_keeps_to_the_budget(dtype: torch.dtype) -> None:
    in_the_interpreter(check_orders, dtype)


@pytest.mark.numerics
def test_in_the_interpreter_every_statistic_passes_its_gradient_on() -> None:
    in_the_interpreter(check_every_statistic, "cpu")


@pytest.mark.parametrize("kind", HIDING)
def test_in_the_interpreter_what_is_hidden_changes_nothing(kind: str) -> None:
    in_the_interpreter(check_hidden, kind, "cpu", torch.float32)


def test_in_the_interpreter_a_nonfinite_key_reaches_only_rows_that_see_it() -> None:
    in_the_interpreter(check_seen, "cpu")


@pytest.mark.numerics
def test_in_the_interpreter_a_few_queries_are_decoded() -> None:
    in_the_interpreter(check_few_queries, "cpu", torch.float32)


def test_in_the_interpreter_dropout_is_that_of_the_other_backends() -> None:
    in_the_interpreter(check_dropout, "cpu")
    in_the_interpreter(check_refusals, "cpu")


def test_in_the_interpreter_compile_and_export_work() -> None:
    in_the_interpreter(check_programs, "cpu")
    in_the_interpreter(check_layouts, "cpu")


def reasons_of(*shape: int, **options: object) -> tuple[str, ...]:
    dtype = options.pop("dtype", torch.float32)
    x = torch.zeros(*shape, dtype=dtype, device=options.pop("device", "cpu"))
    return explain(x, x, x, **options)["fused"].reasons


def test_without_a_gpu_the_backend_reports_what_it_needs() -> None:
    assert reasons_of(1, 2, 5, 8) == ("our kernels run on CUDA devices, got tensors on cpu",)
    assert "our kernels run on CUDA devices, got tensors on meta" in reasons_of(1, 2, 5, 8, device="meta")
    x = torch.zeros(1, 2, 5, 8)
    with pytest.raises(BackendUnsupported, match="'fused' cannot serve this request: our kernels run on CUDA devices"):
        attention(x, x, x, backend="fused")


def test_every_limit_of_the_kernels_is_a_reason() -> None:
    assert "our kernels take float16, bfloat16 or float32, got torch.float64" in reasons_of(
        1, 2, 5, 8, dtype=torch.float64
    )
    assert "our kernels take head and value dims from 1 to 256, got 264 and 264" in reasons_of(1, 2, 5, 264)
    assert "our kernels never materialise the weights" in reasons_of(1, 2, 5, 8, weights=True)
    bias = Mask.bias(torch.zeros(1, 1, 5, 5))
    assert "our kernels read one bias tensor, got 2" in reasons_of(1, 2, 5, 8, mask=bias & bias)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), in_two_dtypes(flags(), torch.float16))
def test_on_a_gpu_every_option_keeps_to_the_budget(name: str, dtype: torch.dtype) -> None:
    check_output(name, flags()[name], dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", TOLD)
def test_on_a_gpu_every_statistic_passes_its_gradient_on(kind: str) -> None:
    check_statistic(kind, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "dtype"), in_two_dtypes(HIDING))
def test_on_a_gpu_what_is_hidden_changes_nothing(kind: str, dtype: torch.dtype) -> None:
    check_hidden(kind, "cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_gpu_a_few_queries_are_decoded(dtype: torch.dtype) -> None:
    check_few_queries("cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "check", [check_zero_scale, check_seen, check_dropout, check_refusals, check_programs, check_layouts]
)
def test_on_a_gpu_the_rest_holds_too(check: Callable[[str], None]) -> None:
    check("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_plain_heads_keep_to_the_bounds(causal: bool, kv_heads: int, dtype: torch.dtype) -> None:
    case = scene(batch=2, heads=(4, kv_heads), queries=333, keys=333, dims=(64, 64), who=Who(causal=causal))
    check_output("plain heads", case, dtype, "cuda")


@pytest.mark.parametrize("kind", ["shared bias", "table"])
def test_a_gradient_summed_in_varying_order_is_refused_under_deterministic_algorithms(kind: str) -> None:
    tensors = [torch.randn(1, 2, 5, 8) for _ in range(3)]
    learned = torch.randn((1, 2, 1, 5) if kind == "shared bias" else (2, 3), requires_grad=True)

    def refusal() -> str:
        mask = Mask.bias(learned) if kind == "shared bias" else Mask.relative(learned, 1)
        with pytest.raises(BackendUnsupported) as caught:  # at the least because there is no GPU
            attention(*(x.double() for x in tensors), mask=mask, backend="fused")
        return " / ".join(caught.value.reasons)

    assert "in a varying order" not in refusal()
    torch.use_deterministic_algorithms(True)
    try:
        assert "in a varying order" in refusal()
        with torch.no_grad():
            assert "in a varying order" not in refusal()
    finally:
        torch.use_deterministic_algorithms(False)
