"""Decoding over MLA latents, whose values are the first channels of their keys, against the formula in float64."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from polyhead.errors import BackendUnsupported
from polyhead.ops.common.kernels.availability import has_hopper_kernels
from polyhead.ops.common.statistics import NAMES
from polyhead.ops.decode import fused as decoding
from polyhead.ops.decode.fused import CacheArguments, decode, decode_reasons
from polyhead.ops.decode.kernels.latent_tiles import plan_latent_blocks
from tests.error_budget import DRAWS
from tests.ops.decode import test_split_keys as plain
from tests.ops.decode.test_split_keys import BATCH, KV_HEADS, Case
from tests.ops.interpreter.interpreted import in_the_interpreter
from tests.two_dtypes import in_two_dtypes

CASES = [
    Case(dims=(24, 16)),
    Case(dims=(16, 16), splits=1),  # nothing turns
    Case(dims=(72, 48), splits=None, lengths=None, names=("max_logit", "entropy")),  # no power of two
    Case(dims=(56, 48), splits=7, names=()),
    Case(dims=(528, 512), group=8, splits=9, lengths=(97, 0), names=("max_logit", "entropy", "visible_keys")),
    Case(dims=(576, 512), group=5, splits=2, lengths=(70, 33), names=("confidence", "mean_distance")),
    Case(dims=(136, 128), group=19, splits=1, lengths=(5, 130), names=("mean_squared_distance", "max_logit")),
    Case(dims=(40, 32), queries=3, group=1),
    Case(dims=(40, 32), queries=3, splits=1, new_lengths=(2, 0)),
    # More rows than one tile of float32 has.
    Case(dims=(24, 16), queries=6, group=3, splits=1, lengths=(61, 31), new_lengths=(6, 4), names=("self_mass",)),
    Case(dims=(24, 16), queries=2, causal=False, splits=2, names=("next_mass", "mean_offset")),
    Case(dims=(24, 16), queries=5, group=1, lengths=(397, 4), splits=1),  # the first queries see nothing
    Case(dims=(24, 16), left=211, first_keys=3, splits=1, queries=3, sinks=True, names=NAMES),
    Case(dims=(24, 16), left=2, splits=5, names=("window_mass", "visible_keys", "sink_mass")),
    Case(dims=(24, 16), softcap=5.0, sinks=True, head_scale=True, names=NAMES, spread=4.0),
    Case(dims=(24, 16), sinks=True, names=NAMES, splits=1, new_lengths=(1, 0)),
    Case(dims=(24, 16), table=64, queries=2, names=()),
    Case(dims=(24, 16), spread=3000.0, names=("max_logit", "max_abs_logit", "entropy", "confidence")),
]


class Scene(plain.Scene):
    """A case whose values are a view of its keys, with NaN in all unused slots and channels."""

    def _lay(self, key: Tensor, value: Tensor, random: Any) -> tuple[CacheArguments, Tensor, Tensor]:
        case = self.case
        width, rank = case.dims
        hidden = ~self.real[:, None, :, None]
        buffer = key.new_full((BATCH, self.keys + 3, KV_HEADS, width + 8), torch.nan)
        held = buffer[:, : self.keys, :, :width].transpose(1, 2)
        held.copy_(key.masked_fill(hidden, torch.nan))
        exact = key.double().masked_fill(hidden, 0.0)
        lengths, new_lengths = self.integers(case.lengths), self.integers(case.new_lengths)
        cache = CacheArguments(held, held[..., :rank], lengths, new_lengths, shared=True)
        return cache, exact, exact[..., :rank]


def check(case: Case, dtype: torch.dtype, device: str, draws: int = 1) -> None:
    plain.check(case, dtype, device, kind=Scene, draws=draws)


def check_all() -> None:
    """Check every case in float16 and every third in float32, whose tiles have fewer rows."""
    from polyhead.ops.decode.kernels import latent as kernels

    pairs = [(case, torch.float16) for case in CASES] + [(case, torch.float32) for case in CASES[::3]]
    with mock.patch.object(kernels, "leave_parts", wraps=kernels.leave_parts) as taken:
        for case, dtype in pairs:
            check(case, dtype, "cpu")
    assert taken.call_count == len(pairs)


def check_nonfinite_values(dtype: torch.dtype, device: str) -> None:
    """Check that a NaN in the latents of the new tokens reaches only the rows that see it."""
    scene = Scene(Case(dims=(40, 32), queries=3, lengths=None, splits=2, names=()), dtype, device)
    clean = scene.run()[0]
    scene.cache.value[1, 0, -1, 5] = torch.nan
    broken = scene.run()[0]
    sees = torch.zeros_like(clean, dtype=torch.bool)
    sees[1, : scene.case.group, 2] = True
    assert broken[sees].isnan().all()
    assert broken[~sees].equal(clean[~sees])


def check_operator(device: str) -> None:
    """Check the operator with opcheck (schema, fake tensors) and compile it without a graph break."""
    case = Case(dims=(24, 16), queries=2, group=1, sinks=True, splits=1, names=("entropy", "learned_sink_mass"))
    scene = Scene(case, torch.float32, device)
    numbers = (0.25, None, None, 0, 0, 0, [2, 13], 1, 64, 1)
    torch.library.opcheck(decoding._decode, (scene.query, *scene.cache, None, scene.sinks, None, *numbers))
    compiled = torch.compile(Scene.run, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(compiled(scene)[:2], scene.run()[:2], strict=True):
        assert ours.equal(theirs)


def check_small_shared_memory() -> None:
    """Check that smaller tiles give the same results if shared memory is too small."""
    from triton.runtime.errors import OutOfResources

    from polyhead.ops.decode.kernels import latent as kernels

    tried = []
    launch = kernels.latent_kernel.run

    def refusing(*arguments: Any, **options: Any) -> object:
        tried.append((options["BLOCK_M"], options["BLOCK_N"]))
        if tried[-1] > (16, 64):
            raise OutOfResources(300000, 100000, "shared memory")
        return launch(*arguments, **options)

    case = Case(dims=(24, 16), group=33, lengths=(70, 5), names=("entropy",))
    with mock.patch.object(kernels.latent_kernel, "run", refusing):
        check(case, torch.float16, "cpu")
    assert tried == [(64, 128), (32, 128), (16, 128), (16, 64)]


@pytest.mark.numerics
def test_in_the_interpreter_latents_give_the_formula() -> None:
    in_the_interpreter(check_all)


@pytest.mark.numerics
def test_in_the_interpreter_nonfinite_latents_tracing_and_small_shared_memory() -> None:
    in_the_interpreter(check_nonfinite_values, torch.float32, "cpu")
    in_the_interpreter(check_operator, "cpu")
    in_the_interpreter(check_small_shared_memory)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype"), in_two_dtypes(CASES))
def test_on_a_gpu_latents_give_the_formula(case: Case, dtype: torch.dtype) -> None:
    # One token of few heads and channels is a hundred numbers; 16 bits hide their errors by their own rounding.
    check(case, dtype, "cuda", DRAWS if dtype is torch.float32 else 1)


# Many heads and one token, which on Hopper have a kernel of their own; there are KV_HEADS times as many heads.
BAND = ("max_logit", "entropy", "confidence", "mean_distance", "mean_offset", "visible_keys")
MANY_HEADS = [
    Case(dims=(576, 512), group=128, names=BAND),
    Case(dims=(576, 512), group=64, names=(), splits=1),
    Case(dims=(576, 512), group=17, names=("entropy",), splits=7, lengths=(64, 449)),  # more parts than tiles of keys
    Case(dims=(576, 512), group=70, names=("max_logit",), lengths=(0, 1), new_lengths=(0, 1)),
    Case(dims=(576, 512), group=64, names=BAND, left=100, splits=2),
    Case(dims=(576, 512), group=64, names=("visible_keys",), left=0, splits=1),
    Case(dims=(576, 512), group=32, names=("max_logit", "entropy"), lengths=None, splits=None),
    Case(dims=(576, 512), group=32, names=("entropy", "learned_sink_mass"), sinks=True),
    Case(dims=(400, 384), group=40, names=("mean_distance",)),
    Case(dims=(512, 512), group=33, names=BAND),
    Case(dims=(136, 80), group=33, names=("entropy",)),
    Case(dims=(320, 256), group=64, names=("max_logit", "entropy"), spread=20.0),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype"), in_two_dtypes(MANY_HEADS, float32=False))
def test_on_a_gpu_many_heads_give_the_formula(case: Case, dtype: torch.dtype) -> None:
    from polyhead.ops.decode.kernels import latent as kernels

    plans = []
    plan = kernels.plan_parts
    with mock.patch.object(kernels, "plan_parts", lambda *a: plans.append(plan(*a)) or plans[-1]):
        check(case, dtype, "cuda")
    assert [blocks.on_hopper for blocks in plans] == [has_hopper_kernels(torch.device("cuda", 0))]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu_nonfinite_latents_reach_only_rows_that_see_them(dtype: torch.dtype) -> None:
    check_nonfinite_values(dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("group", [16, 128])
def test_on_a_gpu_a_graph_follows_lengths_that_change_between_replays(group: int) -> None:
    case = Case(dims=(576, 512), group=group, names=("max_logit", "entropy"), splits=None)
    scene = Scene(case, torch.bfloat16, "cuda")
    assert scene.cache.lengths is not None
    scene.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, logsumexp, found = scene.run()
    scene.cache.lengths.copy_(torch.tensor([17, 130], dtype=torch.int32))
    graph.replay()
    shorter = scene.run()
    assert output.equal(shorter[0])
    assert logsumexp.equal(shorter[1])
    assert all(found[name].equal(shorter[2][name]) for name in found)


# ---- refusals and plans


def latents(width: int, rank: int, **changes: Any) -> tuple[Tensor, CacheArguments]:
    held = torch.zeros(2, 1, 19, width)
    return torch.zeros(2, 6, 1, width), CacheArguments(held, held[..., :rank], shared=True)._replace(**changes)


@pytest.mark.parametrize(
    ("width", "rank", "words"),
    [
        (592, 528, "latents must have a multiple of 16 channels up to 512, got 528"),
        (352, 296, "latents must have a multiple of 16 channels up to 512, got 296"),
        (648, 512, "rotary channels of latents must be a multiple of 8 up to 128, got 136"),
        (516, 512, "rotary channels of latents must be a multiple of 8 up to 128, got 4"),
    ],
)
def test_unsupported_widths_raise_with_a_reason(width: int, rank: int, words: str) -> None:
    with pytest.raises(BackendUnsupported, match=words):
        decode(*latents(width, rank), scale=0.25)


def test_latents_are_read_by_their_own_kernels_or_as_plain_keys_and_values() -> None:
    positions = {"key_position": torch.zeros(1, 19), "query_position": torch.zeros(1, 1)}
    for width, rank, changes, own in (
        (576, 512, {}, True),
        (24, 16, {}, True),
        (24, 8, {}, False),  # as keys of 24 channels and values of 8
        (24, 16, positions, False),
        (24, 16, {"shared": False}, False),
    ):
        query, cache = latents(width, rank, **changes)
        assert cache.holds_latents is own
        assert all("CUDA devices" in reason for reason in decode_reasons(query, cache))
    query, cache = latents(576, 512, **positions)
    assert any("up to 256, got 576" in reason for reason in decode_reasons(query, cache))


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("width", "rank"), [(16, 16), (136, 128), (400, 384), (576, 512), (640, 512)])
@pytest.mark.parametrize("rows", [1, 19, 40, 512])
def test_tiles_are_powers_of_two_and_fit_into_shared_memory(rows: int, width: int, rank: int, itemsize: int) -> None:
    blocks = plan_latent_blocks(rows, width, rank, itemsize)
    for size in (blocks.rows, blocks.keys, blocks.rank, blocks.rope_dim):
        assert size >= 16
        assert size & (size - 1) == 0
    assert blocks.rank >= rank
    assert blocks.rope_dim >= width - rank
    taken = (blocks.rank + blocks.rope_dim) * itemsize * (blocks.rows + (blocks.stages - 1) * blocks.keys)
    assert blocks.resident * taken <= 220 * 1024
    while (less := blocks.smaller()) is not None:
        assert less.rows * less.keys < blocks.rows * blocks.keys
        blocks = less
    assert (blocks.rows, blocks.keys) == (16, 16)
