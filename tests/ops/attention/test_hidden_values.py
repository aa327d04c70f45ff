"""Masked NaN and Inf never spread, empty rows are exactly zero, and empty tensors work."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from polyhead import Mask, MultiHeadAttention, attention
from polyhead.ops.common import tiles
from tests.error_budget import assert_within_error_budget, plain_formula
from tests.ops.oracle import ON_THE_CPU, Scene, Who, normal, result_and_gradients
from tests.pairs import in_turn

OURS = ("reference", "blockwise")
NON_FINITE = (torch.nan, torch.inf, -torch.inf)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE_COLUMNS", 7)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 1)


def mask_with_empty_rows(queries: int, keys: int) -> Tensor:
    """Return a random mask with keys that no row sees and rows without visible keys."""
    allowed = torch.rand(2, 1, queries, keys, generator=torch.Generator().manual_seed(3)) < 0.6
    allowed[:, :, :, 3:9] = False
    allowed[:, :, 5:8] = False
    return allowed


# Numbers of queries and keys, and a mask under which some queries have no visible key or no query sees some keys.
MASKS = {
    "causal with more queries": (23, 19, Who(causal=True)),
    "window": (7, 23, Who(left=3, right=0)),
    "window of both sides": (7, 31, Who(left=3, right=2)),
    "window with first keys": (7, 23, Who(left=3, right=0, first=2)),
    "right padding": (23, 23, Who(key_lengths=(17, 0))),
    "right padding, causal": (23, 23, Who(key_lengths=(17, 11), causal=True)),
    "left padding": (23, 23, Who(key_lengths=(17, 0), side="left")),
    "left padding, causal": (23, 23, Who(key_lengths=(17, 11), side="left", causal=True)),
    "padding of keys alone": (19, 23, Who(key_lengths=(17, 11))),
    "query lengths": (19, 23, Who(key_lengths=(17, 23), query_lengths=(13, 0), causal=True)),
    "documents": (
        19,
        19,
        Who(query_documents=((0,) * 5 + (-1,) * 3 + (1,) * 11, (-1,) * 2 + (2,) * 17), causal=True),
    ),
    "two documents": (5, 19, Who(query_documents=((0, 0, 2, 2, -1),), key_documents=((0,) * 7 + (1,) * 8 + (2,) * 4,))),
    "positions": (
        5,
        13,
        Who(
            query_positions=(tuple(range(4, 9)),),
            key_positions=((-1, 5, 4, -1, 3, 9, 11, 0, 1, 2, 8, 7, 6),),
            causal=True,
        ),
    ),
    "dense": (19, 23, Who(dense=mask_with_empty_rows(19, 23))),
    "keys alone": (19, 23, Who(dense=mask_with_empty_rows(1, 23)[:, :, :1])),
    "everything hidden": (19, 23, Who(dense=torch.zeros(1, 1, 1, 23, dtype=torch.bool))),
}


def scene_of(kind: str, dtype: torch.dtype = torch.float32) -> Scene:
    queries, keys, who = MASKS[kind]
    parts = normal(2, 6, queries, 13, seed=1), normal(2, 2, keys, 13, seed=2), normal(2, 2, keys, 11, seed=3)
    return Scene(*(x.to(dtype) for x in parts), who=who)


def with_options(scene: Scene) -> Scene:
    _, heads, queries, keys = scene.sizes
    dtype = scene.query.dtype
    bias = normal(1, heads, queries, keys, seed=4, dtype=dtype)
    return replace(
        scene,
        bias=torch.where(bias > 1.3, -torch.inf, bias),
        table=normal(heads, 9, seed=5, dtype=dtype),
        zero=5,
        sinks=normal(heads, seed=6, dtype=dtype),
        scale=normal(heads, seed=7, dtype=dtype) / 4,
        softcap=3.0,
    )


def break_hidden(scene: Scene) -> tuple[Scene, int]:
    """Put NaN and infinities into every query without visible keys and every key that no row sees."""
    visible = scene.visible()
    batch, _, _, keys = scene.sizes
    kv_heads = scene.key.shape[1]
    unseen = ~visible.view(batch, kv_heads, -1, keys).any(2)[..., None]  # by no head of the group
    empty = ~visible.any(-1, keepdim=True)

    def broken(x: Tensor, where: Tensor) -> Tensor:
        filler = torch.tensor(NON_FINITE, dtype=x.dtype).repeat(x.numel() // 3 + 1)[: x.numel()].view_as(x)
        return torch.where(where, filler, x)

    parts = {"query": broken(scene.query, empty), "key": broken(scene.key, unseen)}
    parts["value"] = broken(scene.value, unseen)
    if scene.bias is not None:
        hidden = ~scene.who.visible(*scene.sizes).any(0, keepdim=True)
        parts["bias"] = torch.where(hidden, torch.nan, scene.bias)
    return replace(scene, **parts), int(unseen.sum() + empty.sum())


DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.mark.parametrize(("backend", "kind", "dtype"), in_turn(ON_THE_CPU, MASKS, DTYPES), ids=str)
def test_broken_numbers_behind_a_mask_change_nothing(backend: str, kind: str, dtype: torch.dtype) -> None:
    clean = scene_of(kind, dtype)
    broken, count = break_hidden(clean)
    assert count > 0
    expected = result_and_gradients(clean, backend)
    actual = result_and_gradients(broken, backend)
    assert torch.equal(actual.output, expected.output)
    for name, grad in expected.gradients.items():
        assert torch.equal(actual.gradients[name], grad), name


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("backend", OURS)
def test_broken_numbers_behind_a_mask_change_nothing_with_every_option(backend: str, kind: str) -> None:
    clean = with_options(scene_of(kind))
    broken, _ = break_hidden(clean)
    expected = result_and_gradients(clean, backend, everything=True)
    actual = result_and_gradients(broken, backend, everything=True)
    for name in ("output", "logsumexp", "weights"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    for name, grad in expected.gradients.items():
        assert torch.equal(actual.gradients[name], grad), name


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("backend", ON_THE_CPU)
def test_broken_numbers_behind_a_mask_do_not_reach_the_gradients_of_the_scales(backend: str, kind: str) -> None:
    clean = replace(scene_of(kind), scale=normal(6, seed=7, dtype=torch.float32) / 4)
    broken, _ = break_hidden(clean)
    gradients = [result_and_gradients(scene, backend).gradients["scale"] for scene in (clean, broken)]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("backend", ON_THE_CPU)
@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("filler", NON_FINITE)
@pytest.mark.parametrize(
    "who",
    [
        Who(causal=True),
        Who(left=4, right=1),
        Who(left=2, right=0, first=3),
        Who(key_lengths=(19, 15)),
        Who(key_lengths=(19, 15), causal=True),
        Who(key_lengths=(19, 15), causal=True, side="left"),
        Who(query_documents=((0,) * 9 + (1,) * 10,)),
        Who(dense=torch.rand(2, 6, 19, 19, generator=torch.Generator().manual_seed(4)) < 0.5),
    ],
    ids=lambda who: repr(who.mask()),
)
def test_a_broken_key_reaches_the_rows_that_see_it_and_no_other(
    backend: str, part: str, filler: float, who: Who
) -> None:
    clean = Scene(
        normal(2, 6, 19, 13, seed=1, dtype=torch.float32),
        normal(2, 2, 19, 13, seed=2, dtype=torch.float32),
        normal(2, 2, 19, 13, seed=3, dtype=torch.float32),
        who=who,
    )
    tensor = getattr(clean, part).clone()
    tensor[1, 1, 6, 2] = filler
    result = replace(clean, **{part: tensor}).run(backend).output
    sees = torch.zeros(2, 6, 19, dtype=torch.bool)
    sees[1, 3:] = clean.visible()[1, 3:, :, 6]  # heads 3 to 5 share KV head 1
    assert sees.any()
    assert result[sees].isnan().all()
    assert torch.equal(result[~sees], clean.run(backend).output[~sees])


@pytest.mark.parametrize("backend", ON_THE_CPU)
def test_a_broken_key_is_seen_under_a_bias_that_hides_nothing(backend: str) -> None:
    query, key = normal(1, 2, 19, 8, seed=1).float(), normal(1, 2, 23, 8, seed=2).float()
    key[0, 1, 5, 3] = torch.nan
    output = attention(query, key, key.nan_to_num(), mask=Mask.relative(torch.ones(2, 5), 2), backend=backend).output
    assert output[:, 1].isnan().all()
    assert output[:, 0].isfinite().all()


@pytest.mark.parametrize("backend", ON_THE_CPU)
def test_a_broken_query_that_sees_keys_gives_nan_in_its_own_row_alone(backend: str) -> None:
    scene = scene_of("dense")
    filled = scene.visible().any(-1)
    query = scene.query.clone()
    query[0, 2, 1, 3] = torch.nan
    assert filled[0, 2, 1]
    result = replace(scene, query=query).run(backend).output
    assert result[0, 2, 1].isnan().all()
    others = torch.ones_like(filled)
    others[0, 2, 1] = False
    assert torch.equal(result[others], scene.run(backend).output[others])


@pytest.mark.parametrize("backend", OURS)
def test_every_statistic_of_a_query_that_is_nan_is_nan_also_with_finite_keys(backend: str) -> None:
    query, key = (normal(1, 2, 23, 8, seed=seed) for seed in (0, 1))
    query[0, 0, 11] = torch.nan
    names = ("max_logit", "max_abs_logit", "confidence", "entropy", "mean_distance", "sink_mass")
    for finite in (True, False):
        rows = attention(
            query, key, key, mask=Mask.causal(), finite=finite, statistics=names, backend=backend
        ).statistics
        for name, values in rows.items():
            assert values.isnan().nonzero().tolist() == [[0, 0, 11]], (name, finite)


@pytest.mark.parametrize("backend", ON_THE_CPU)
def test_a_nan_that_flows_back_into_an_empty_row_stops_there(backend: str) -> None:
    scene = scene_of("dense").with_gradients()
    empty = ~scene.visible().any(-1)
    output = scene.run(backend).output
    arriving = torch.where(empty[..., None], torch.nan, torch.ones_like(output))
    for grad in torch.autograd.grad(output, list(scene.learned.values()), arriving):
        assert grad.isfinite().all()


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("backend", ON_THE_CPU)
def test_a_row_with_nothing_to_attend_to_is_exactly_zero(backend: str, kind: str) -> None:
    scene = scene_of(kind)
    visible = scene.visible()
    empty = ~visible.any(-1)
    unseen = ~visible.view(2, 2, -1, visible.shape[-1]).any(2)  # by no head of the group
    result = result_and_gradients(scene, backend, everything=backend in OURS)
    assert (result.output[empty] == 0).all()
    assert (result.output[~empty] != 0).any() or empty.all()
    assert (result.gradients["query"][empty] == 0).all()
    assert (result.gradients["key"][unseen] == 0).all()
    assert (result.gradients["value"][unseen] == 0).all()
    if backend in OURS:
        assert (result.logsumexp[empty] == -torch.inf).all()
        assert result.logsumexp[~empty].isfinite().all()
        assert (result.weights[~visible] == 0).all()
        sums = result.weights.sum(-1)
        torch.testing.assert_close(sums, (~empty).to(sums.dtype))


@pytest.mark.parametrize("backend", OURS)
def test_an_empty_row_with_a_sink_gives_all_its_weight_to_the_sink(backend: str) -> None:
    scene = replace(scene_of("dense"), sinks=normal(6, seed=6).float())
    empty = ~scene.visible().any(-1)
    result = result_and_gradients(scene, backend, everything=True)
    assert empty.any()
    assert (result.output[empty] == 0).all()
    assert (result.weights[empty] == 0).all()
    expected = scene.sinks[None, :, None].expand_as(result.logsumexp)
    torch.testing.assert_close(result.logsumexp[empty], expected[empty])


@pytest.mark.parametrize("backend", OURS)
def test_a_sink_of_minus_infinity_is_no_sink(backend: str) -> None:
    scene = scene_of("dense", torch.float64)
    sinks = torch.full((6,), -torch.inf, dtype=torch.float64)
    result = replace(scene, sinks=sinks).run(backend, weights=True)
    expected = scene.run(backend, weights=True)
    torch.testing.assert_close(result.output, expected.output)
    torch.testing.assert_close(result.weights, expected.weights)
    torch.testing.assert_close(result.logsumexp, expected.logsumexp)


NO_TOKENS = {
    "empty batch": (0, 19, 23),
    "no queries": (2, 0, 23),
    "no keys": (2, 19, 0),
    "no tokens": (2, 0, 0),
}
ANY_MASK = {
    "nothing": lambda b, q, k: None,
    "causal": lambda b, q, k: Mask.causal(),
    "window": lambda b, q, k: Mask.window(3, sinks=2),
    "lengths": lambda b, q, k: Mask.lengths([0] * b) & Mask.causal(),
    "left lengths": lambda b, q, k: Mask.lengths([0] * b, side="left"),
    "query lengths": lambda b, q, k: Mask.lengths([0] * b, queries=[0] * b) & Mask.causal(),
    "documents": lambda b, q, k: Mask.documents(torch.zeros(b, q).long(), torch.zeros(b, k).long()) & Mask.causal(),
    "documents with first keys": lambda b, q, k: (
        Mask.documents(torch.zeros(b, q).long(), torch.zeros(b, k).long()) & Mask.window(3, sinks=2)
    ),
    "positions": lambda b, q, k: Mask.positions(torch.arange(q), torch.arange(k)) & Mask.causal(),
    "dense": lambda b, q, k: Mask.dense(torch.ones(q, k, dtype=torch.bool)),
    "bias": lambda b, q, k: Mask.bias(torch.randn(q, k)),
    "relative": lambda b, q, k: Mask.relative(torch.randn(6, 5), 2),
}


@pytest.mark.parametrize("mask", ANY_MASK)
@pytest.mark.parametrize("size", NO_TOKENS)
@pytest.mark.parametrize("backend", ON_THE_CPU)
def test_empty_batches_and_sequences_work(backend: str, size: str, mask: str) -> None:
    batch, queries, keys = NO_TOKENS[size]
    query = torch.randn(batch, 6, queries, 13, requires_grad=True)
    key, value = (torch.randn(batch, 2, keys, dim, requires_grad=True) for dim in (13, 11))
    described = ANY_MASK[mask](batch, queries, keys)
    ours = backend in OURS
    result = attention(query, key, value, mask=described, backend=backend, logsumexp=ours, weights=ours)
    assert result.output.shape == (batch, 6, queries, 11)
    assert (result.output == 0).all()
    if ours:
        assert result.weights.shape == (batch, 6, queries, keys)
        assert result.logsumexp.shape == (batch, 6, queries)
        assert (result.logsumexp == -torch.inf).all()
    inputs = (query, key, value)
    for tensor, grad in zip(inputs, torch.autograd.grad(result.output.sum(), inputs), strict=True):
        assert grad.shape == tensor.shape
        assert (grad == 0).all()


@pytest.mark.parametrize("mask", ANY_MASK)
@pytest.mark.parametrize("size", NO_TOKENS)
@pytest.mark.parametrize("backend", OURS)
def test_empty_batches_and_sequences_have_statistics_of_their_shape(backend: str, size: str, mask: str) -> None:
    batch, queries, keys = NO_TOKENS[size]
    query = torch.randn(batch, 6, queries, 13, requires_grad=True)
    key = torch.randn(batch, 2, keys, 13, requires_grad=True)
    described = ANY_MASK[mask](batch, queries, keys)
    found = attention(query, key, key, mask=described, backend=backend, statistics=True)
    rows = found.statistics
    assert all(x.shape == (batch, 6, queries) for _, x in rows.items())
    grads = torch.autograd.grad(found.output.sum() + rows.entropy.sum(), (query, key))
    assert all((grad == 0).all() for grad in grads)


def test_auto_serves_empty_tensors_with_every_option() -> None:
    for batch, queries, keys in NO_TOKENS.values():
        query, key = torch.randn(batch, 6, queries, 13), torch.randn(batch, 2, keys, 13)
        result = attention(query, key, key, softcap=2.0, sinks=torch.zeros(6), scale=torch.ones(6), dropout=0.3)
        assert result.output.shape == (batch, 6, queries, 13)


# ---- forwards on a GPU, which recompute rows instead of replacing keys and values

ROWS = ("entropy", "max_logit", "mean_distance", "mean_offset", "confidence", "sink_mass")
ON_A_GPU = [  # batch, heads, KV heads, tokens, head_dim, tokens that the window reaches back
    (2, 4, 2, 300, 64, None),
    (1, 4, 4, 515, 128, None),
    (1, 6, 2, 2100, 96, None),  # long enough for our kernel without statistics
    (1, 2, 2, 200, 256, None),
    (2, 4, 4, 130, 40, None),
    (2, 4, 2, 300, 64, 50),
]


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("names", [None, ROWS[:3], ROWS], ids=["output", "some", "all"])
@pytest.mark.parametrize("sizes", ON_A_GPU, ids=str)
def test_on_a_gpu_a_broken_key_reaches_the_rows_that_see_it_and_no_other(
    sizes: tuple[int, ...], names: tuple[str, ...] | None, dtype: torch.dtype
) -> None:
    batch, heads, kv_heads, tokens, dim, left = sizes
    torch.manual_seed(0)
    query = torch.randn(batch, heads, tokens, dim, device="cuda", dtype=dtype)
    key, value = torch.randn(2, batch, kv_heads, tokens, dim, device="cuda", dtype=dtype).unbind(0)
    mask = Mask.causal() if left is None else Mask.window(left=left, right=0)
    exact = attention(*(x.double() for x in (query, key, value)), mask=mask, statistics=ROWS, backend="reference")
    distance = torch.arange(tokens, device="cuda") - torch.arange(tokens, device="cuda")[:, None]
    visible = (distance <= 0) & (distance >= -(tokens if left is None else left))
    plain = plain_formula(query, key, value, visible=visible.expand(batch, heads, tokens, tokens)).output
    group = heads // kv_heads
    for part, filler in [("key", torch.nan), *(("value", filler) for filler in NON_FINITE), ("key", torch.inf)]:
        for place in (0, 77, tokens - 1):
            parts = {"key": key.clone(), "value": value.clone()}
            parts[part][-1, -1, place, 3] = filler
            found = attention(query, **parts, mask=mask, statistics=names)
            sees = torch.zeros(batch, heads, tokens, dtype=torch.bool, device="cuda")
            sees[-1, -group:] = visible[:, place]
            others = ~sees
            if (part, filler) == ("key", torch.inf):
                # A logit of -Inf has weight 0: the formula is finite there.
                sees[-1, -group:] &= query[-1, -group:, :, 3] >= 0
            assert found.output[sees].isnan().all(), (part, filler, place)
            compared = {"exact": exact.output[others], "plain": plain[others]}
            assert_within_error_budget(found.output[others], **compared, name=f"{part} {filler} at {place}")
            for name in names or ():
                values, expected = getattr(found.statistics, name), getattr(exact.statistics, name)
                assert values[sees].isnan().all(), (name, part, filler, place)
                torch.testing.assert_close(values[others].double(), expected[others], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("autocast", [False, True])
def test_on_a_gpu_a_broken_token_of_a_causal_layer_reaches_no_earlier_one(autocast: bool) -> None:
    torch.manual_seed(0)
    for width, heads, tokens in ((128, 2, 140), (192, 2, 2100)):
        dtype = torch.float32 if autocast else torch.bfloat16
        layer = MultiHeadAttention(width, heads, causal=True, device="cuda", dtype=dtype).eval()
        x = torch.randn(2, tokens, width, device="cuda", dtype=dtype)
        broken = x.clone()
        broken[1, 77] = torch.nan
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            expected, found = layer(x).output, layer(broken).output
        assert found[1, 77:].isnan().all()
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
        exact = layer.double()(x.double()).output[1, :77]
        assert_within_error_budget(found[1, :77], exact=exact, plain=expected[1, :77])
