"""Run one case: every call of it against the formula, and what came of it."""

from __future__ import annotations

import hashlib
import random
import re
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from polyhead import AttentionOutput, Statistics, attention, profile
from polyhead.errors import BackendUnsupported, PolyheadError
from polyhead.ops.common import tiles
from polyhead.ops.profile import BlockMap, blockwise
from tests.fuzz.bounds import Problem, Rounding, Upstream, compare
from tests.fuzz.cases import INPUTS, Call, Case, ProfileDraw, describe
from tests.fuzz.formula import Loss, Results, RowOptions, draw_loss, formula_results, gradients, with_leaves
from tests.fuzz.scenes import CallScene, draw_scene, mask_of
from tests.ops.oracle import LEARNED, Scene
from tests.ops.profile.oracle import TOLERANCE, Question, assert_right


@dataclass
class Outcome:
    """Calls by backend, refusals by message, problems, and hashes of inputs and results if they are requested."""

    ran: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)
    text: str = ""
    trace: str = ""
    inputs: Digest | None = None
    results: Digest | None = None
    lost_device: bool = False  # an error has made the CUDA context of this process unusable


class Digest:
    """A hash of tensors, bit for bit."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, tensors: Mapping[str, Any]) -> None:
        for name in sorted(tensors):
            x = tensors[name]
            if isinstance(x, Tensor):
                data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                self._hash.update(name.encode() + data.numpy().tobytes())

    def __str__(self) -> str:
        return self._hash.hexdigest()[:16]


def run_case(case: Case, device: str, *, digests: bool = False) -> Outcome:
    """Run every call of a case; errors of `polyhead` are counted, all others are problems."""
    case = on_device(case, device)
    outcome = Outcome(text=describe(case), inputs=Digest() if digests else None, results=Digest() if digests else None)
    kept: list[CallScene] = []
    try:
        for number, call in enumerate(case.calls):
            scene = draw_scene(case, call, device)
            kept = [*kept, scene] if case.keep else [scene]
            problems = _checked_call(case, call, scene, device, outcome)
            outcome.problems += [replace(x, name=f"call {number} {x.name}") for x in problems]
    except BackendUnsupported as error:
        outcome.refused[_message(f"{type(error).__name__}: {error.backend}: {error.reasons[0]}")] += 1
    except PolyheadError as error:
        outcome.refused[_message(f"{type(error).__name__}: {error}")] += 1
    except torch.cuda.OutOfMemoryError:
        outcome.refused["out of memory"] += 1
    except Exception as error:  # noqa: BLE001 - whatever is raised is what we look for
        outcome.trace = "".join(traceback.format_exception(error))
        outcome.problems.append(Problem("exception", _one_line(error)))
        outcome.lost_device = not _works(device)
    return outcome


def _works(device: str) -> bool:
    """Return False if a kernel has made the CUDA context unusable."""
    if torch.device(device).type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def on_device(case: Case, device: str) -> Case:
    """Return the case for a device: without a GPU, the formula of `polyhead` replaces the backend of kernels."""
    return case if device != "cpu" or case.backend != "fused" else replace(case, backend="reference")


def _message(text: str) -> str:
    """Return an error message without its numbers, so that refusals for one reason are counted together."""
    return re.sub(r"\d+", "N", " ".join(text.split()))


def _one_line(error: Exception) -> str:
    """Return type, message and place of an exception."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename.rpartition('polyhead/')[2]}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{place}"


def _checked_call(case: Case, call: Call, drawn: CallScene, device: str, outcome: Outcome) -> list[Problem]:
    """Return the problems of one call of `attention`, and of `profile` on the same tensors."""
    judge = Judge.of(case, call, drawn)
    with _context(case, call, device):
        answer = _attend(case, call, drawn, judge)
    outcome.ran[answer.result.backend] += 1
    if outcome.inputs is not None and outcome.results is not None:
        outcome.inputs.update(drawn.passed.learned)
        outcome.results.update({**answer.tensors, **{f"grad {x}": grad for x, grad in answer.gradients.items()}})
    problems = judge.problems(answer)
    if case.profile is not None:
        with _context(case, call, device):
            problems += _check_profile(case.profile, case, call, drawn, judge)
        outcome.ran["profile"] += 1
    return problems


@contextmanager
def _context(case: Case, call: Call, device: str) -> Iterator[None]:
    """Enter the autograd mode, autocast, the CUDA stream and the tile sizes of a call."""
    kind = torch.device(device).type
    with ExitStack() as stack:
        if case.small_tiles:
            stack.enter_context(patch.multiple(tiles, TILE_COLUMNS=13, TILE_ELEMENTS=1))
            stack.enter_context(patch.multiple(blockwise, _TILE_COLUMNS=8, _TILE_ELEMENTS=1))
        if case.stream and kind == "cuda":
            side, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
            side.wait_stream(current)
            stack.callback(lambda: current.wait_stream(side))
            stack.enter_context(torch.cuda.stream(side))
        if call.mode != "grad":
            stack.enter_context(torch.no_grad() if call.mode == "no_grad" else torch.inference_mode())
        if case.autocast:
            stack.enter_context(torch.autocast(kind, getattr(torch, case.family.dtype)))
        yield


@dataclass(frozen=True)
class Answer:
    """Results of one call, and their gradients."""

    result: AttentionOutput
    tensors: dict[str, Tensor]
    gradients: dict[str, Tensor]


def _attend(case: Case, call: Call, drawn: CallScene, judge: Judge) -> Answer:
    scene, leaves = with_leaves(drawn.passed, judge.leaves)
    result = attention(
        scene.query,
        scene.key,
        scene.value,
        mask=mask_of(case, scene),
        scale=scene.scale,
        softcap=scene.softcap,
        sinks=scene.sinks,
        backend=case.backend,
        statistics=_requested(case),
        logsumexp=case.logsumexp,
        finite=case.finite,
    )
    tensors = {"output": result.output, **(dict(result.statistics.items()) if result.statistics else {})}
    if case.logsumexp:
        assert result.logsumexp is not None
        tensors["logsumexp"] = result.logsumexp
    grads = gradients(judge.loss(tensors), leaves) if judge.loss is not None else {}
    return Answer(result, tensors, grads)


def _requested(case: Case) -> Statistics | tuple[str, ...] | None:
    if not case.statistics:
        return None
    if case.by_name:
        return case.statistics
    return Statistics(*case.statistics, sink_keys=case.sink_keys, window=case.window)


@dataclass(frozen=True)
class Judge:
    """Exact and plain results of one call, and the functional whose gradients are compared."""

    case: Case
    dtype: torch.dtype
    scene: Scene  # in float64
    exact: Results
    plain: Results
    rounding: Rounding
    leaves: tuple[str, ...]
    loss: Loss | None
    exact_gradients: dict[str, Tensor]
    plain_gradients: dict[str, Tensor]

    @classmethod
    def of(cls, case: Case, call: Call, drawn: CallScene) -> Judge:
        """Compute the formula in float64 and in the dtype of the inputs."""
        dtype = getattr(torch, case.family.dtype)
        differentiates = call.mode == "grad" and case.family.loss != "none"
        leaves = tuple(x for x in drawn.clean.learned if differentiates and x not in call.fixed)
        rounded = replace(drawn.clean, **{x: getattr(drawn.clean, x).to(dtype) for x in INPUTS})
        options = RowOptions(case.window, case.sink_keys)
        scene, exact_leaves = with_leaves(rounded.to(torch.float64), leaves)
        plain_scene, plain_leaves = with_leaves(rounded.to(dtype), leaves)
        with torch.set_grad_enabled(differentiates):
            exact = formula_results(scene, options)
            plain = formula_results(plain_scene, options, exact.largest)
        rounding = Rounding.of(scene, exact.weights, dtype)
        loss = None
        if leaves:
            loss = draw_loss(_differentiated(case, call), exact, scene, rounding, call.seed, dtype)
        return cls(
            case=case,
            dtype=dtype,
            scene=scene,
            exact=exact,
            plain=plain,
            rounding=rounding,
            leaves=leaves,
            loss=loss,
            exact_gradients={} if loss is None else gradients(loss(exact.tensors), exact_leaves),
            plain_gradients={} if loss is None else gradients(loss(plain.tensors), plain_leaves),
        )

    def problems(self, answer: Answer) -> list[Problem]:
        """Compare results and gradients."""
        expected = {"output", *self.case.statistics, *(["logsumexp"] if self.case.logsumexp else [])}
        if answer.tensors.keys() != expected:
            return [Problem("names", f"got {sorted(answer.tensors)}, requested {sorted(expected)}")]
        checks = [self._result(name, x) for name, x in answer.tensors.items()]
        checks += [self._form(answer), self._empty_rows(answer)]
        if self.loss is not None:
            upstream = Upstream.of(self.loss.directions, self.scene)
            checks += [self._gradient(name, x, upstream) for name, x in answer.gradients.items()]
        return [x for x in checks if x is not None]

    def _result(self, name: str, actual: Tensor) -> Problem | None:
        exact, rounding = self.exact.tensors[name], self.rounding
        if name == "output":
            bound = rounding.output(exact, self.plain.tensors["output"])
        else:
            bound = rounding.logsumexp(exact) if name == "logsumexp" else rounding.statistic(exact)
        return compare(name, actual, exact, bound)

    def _gradient(self, name: str, actual: Tensor, upstream: Upstream) -> Problem | None:
        exact, plain = self.exact_gradients[name], self.plain_gradients[name]
        if torch.finfo(actual.dtype).eps > torch.finfo(plain.dtype).eps:  # a float32 bias of float64 attention
            plain = plain.to(actual.dtype)
        return compare(f"grad {name}", actual, exact, self.rounding.gradient(name, exact, plain, self.scene, upstream))

    def _form(self, answer: Answer) -> Problem | None:
        """Check dtypes, and that results require gradients where an input does."""
        accumulated = torch.float64 if self.dtype is torch.float64 else torch.float32
        for name, x in answer.tensors.items():
            if x.dtype is not (self.dtype if name == "output" else accumulated):
                return Problem(name, f"dtype is {x.dtype}")
        if answer.result.output.requires_grad != bool(self.leaves):
            return Problem("output", f"requires_grad is {answer.result.output.requires_grad}, inputs: {self.leaves}")
        return None

    def _empty_rows(self, answer: Answer) -> Problem | None:
        """Check that rows without visible keys have exactly zero output and zero gradient."""
        empty = ~self.scene.visible().any(-1)
        for name, x in (("output", answer.tensors["output"]), ("grad query", answer.gradients.get("query"))):
            if x is not None and x.detach()[empty].count_nonzero():
                return Problem(name, "rows without visible keys are not exactly 0")
        return None


def _differentiated(case: Case, call: Call) -> tuple[str, ...]:
    """Return the results that the loss depends on."""
    names = ["output", *(["logsumexp"] if case.logsumexp else [])]
    names += [x for x in case.statistics if x != "visible_keys"]
    if case.family.loss == "output":
        return ("output",)
    if case.family.loss == "all":
        return tuple(names)
    r = random.Random(call.seed)
    return tuple(r.sample(names, r.randint(1, len(names))))


# ---- profiles


def _check_profile(draw: ProfileDraw, case: Case, call: Call, drawn: CallScene, judge: Judge) -> list[Problem]:
    """Call `polyhead.profile` with the exact log-sum-exp, and compare with the weights of the formula."""
    passed = drawn.passed
    question = profile_question(draw, case, call, judge.scene)
    accumulated = torch.float64 if judge.dtype is torch.float64 else torch.float32
    found = profile(
        passed.query,
        passed.key,
        judge.exact.tensors["logsumexp"].detach().to(accumulated),
        mask=mask_of(case, passed),
        scale=passed.scale,
        softcap=passed.softcap,
        rows=question.rows,
        columns=question.columns,
        **question.options,
    )
    try:
        assert_right(found, question, TOLERANCE + 4 * judge.rounding.weight)
    except AssertionError as error:
        return [Problem(f"profile by {found.backend}", _one_line(error))]
    return []


def profile_question(draw: ProfileDraw, case: Case, call: Call, scene: Scene) -> Question:
    """Return the arguments of `profile` for the sizes of a case."""
    sizes, r = case.sizes, random.Random(call.seed + 1)
    rows, columns = _window(draw.rows, sizes.queries), _window(draw.columns, sizes.keys)
    options: dict[str, Any] = {x: True for x in draw.options if x in ("received", "received_by_group", "argmax")}
    if "offsets" in draw.options:
        options["offsets"] = True
    if "topk" in draw.options:
        options["topk"] = draw.topk
    if "block_map" in draw.options:
        options["block_map"] = BlockMap(resolution=draw.blocks, pool=draw.pool)  # type: ignore[arg-type]
        if draw.exact_blocks:
            spans = (rows[1] - rows[0], columns[1] - columns[0])
            block = tuple(-(-span // most) for span, most in zip(spans, draw.blocks, strict=True))
            options["block_map"] = BlockMap(block=block, pool=draw.pool)  # type: ignore[arg-type]
    if "key_set" in draw.options:
        options["key_set"] = torch.rand(sizes.keys, generator=torch.Generator().manual_seed(call.seed)) < 0.4
    if "pairs" in draw.options:
        options["pairs"] = [(r.randrange(*rows), r.randrange(*columns)) for _ in range(r.randint(1, 6))]
    if "head_pairs" in draw.options:
        options["head_pairs"] = [(r.randrange(sizes.heads), r.randrange(sizes.heads)) for _ in range(3)]
    detached = {x: getattr(scene, x).detach() for x in LEARNED if isinstance(getattr(scene, x), Tensor)}
    return Question(replace(scene, **detached), rows, columns, options)


def _window(shares: tuple[float, float], size: int) -> tuple[int, int]:
    low, high = sorted(min(int(share * size), size) for share in shares)
    low = min(low, size - 1)
    return low, max(high, low + 1)
