"""Terms of the loss on entropies and subspaces, against their formulas."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn

import polyhead
from polyhead import MultiHeadAttention
from polyhead.errors import OptionError
from polyhead.training import entropy_band, output_overlap, position_overlap, weight_overlap

WIDTH, HEADS = 32, 4


def normalized_entropies(layer: MultiHeadAttention, x: torch.Tensor) -> torch.Tensor:
    query, key = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj))
    weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
    return (torch.special.entr(weights).sum(-1) / torch.log(torch.tensor(float(x.shape[1])))).mean((0, 2))


@pytest.mark.parametrize(("floor", "ceiling"), [(0.9, None), (None, 0.2), (0.6, 0.62), (0.0, 1.0)])
def test_the_band_penalises_what_is_outside_and_has_its_gradient(floor, ceiling):
    layer, x = MultiHeadAttention(WIDTH, HEADS).double(), 2 * torch.randn(3, 5, WIDTH, dtype=torch.float64)
    entropy = normalized_entropies(layer, x)
    low, high = floor if floor is not None else 0.0, ceiling if ceiling is not None else 1.0
    expected = ((low - entropy).clamp_min(0) ** 2 + (entropy - high).clamp_min(0) ** 2).mean()
    assert (expected > 0) == ((floor, ceiling) != (0.0, 1.0))
    with polyhead.observe(layer, statistics="normalized_entropy", keep_statistics=True) as session:
        layer(x)
        found = entropy_band(session.statistics, floor=floor, ceiling=ceiling)
        ours = torch.autograd.grad(found, [layer.q_proj.weight, layer.k_proj.weight])
    torch.testing.assert_close(found, expected)
    theirs = torch.autograd.grad(expected, [layer.q_proj.weight, layer.k_proj.weight])
    torch.testing.assert_close(ours, theirs)


def test_heads_that_see_a_single_key_have_no_entropy_and_no_penalty():
    layer = MultiHeadAttention(WIDTH, HEADS)
    with polyhead.observe(layer, statistics="normalized_entropy", keep_statistics=True) as session:
        layer(torch.randn(3, 1, WIDTH))
        found = entropy_band(session.statistics, floor=0.5)
        (grad,) = torch.autograd.grad(found, [layer.q_proj.weight], allow_unused=True)
    assert found == 0
    assert grad is None or not grad.any()


@pytest.mark.parametrize("options", [{}, {"floor": 0.5, "ceiling": 0.4}, {"floor": -0.1}, {"ceiling": 1.1}])
def test_a_band_needs_bounds_between_0_and_1(options):
    layer = MultiHeadAttention(WIDTH, HEADS)
    with polyhead.observe(layer, statistics="normalized_entropy", keep_statistics=True) as session:
        layer(torch.randn(3, 4, WIDTH))
        with pytest.raises(OptionError, match="floor or a ceiling"):
            entropy_band(session.statistics, **options)


def overlap_by_hand(heads: torch.Tensor) -> torch.Tensor:
    pairs = [(i, j) for i in range(len(heads)) for j in range(i)]
    norm = torch.linalg.matrix_norm
    return torch.stack(
        [
            norm(heads[i] @ heads[j].T) ** 2 / (norm(heads[i] @ heads[i].T) * norm(heads[j] @ heads[j].T))
            for i, j in pairs
        ]
    ).mean()


@pytest.mark.parametrize("part", ["query", "key", "value", "output"])
def test_overlap_of_subspaces_is_the_formula_in_every_layout(part):
    layer = MultiHeadAttention(WIDTH, HEADS, num_kv_heads=2).double()
    linear = {"query": layer.q_proj, "key": layer.k_proj, "value": layer.v_proj}.get(part)
    if linear is None:
        heads = layer.out_proj.weight.T.unflatten(0, (HEADS, -1))
    else:
        heads = linear.weight.unflatten(0, (HEADS if part == "query" else 2, -1))
    torch.testing.assert_close(weight_overlap(layer, part), overlap_by_hand(heads))


def test_overlap_of_fused_projections_is_that_of_their_heads():
    config = transformers.GPT2Config(vocab_size=61, n_embd=WIDTH, n_layer=2, n_head=HEADS)
    model = transformers.GPT2LMHeadModel(config)
    values = [block.attn.c_attn.weight[:, 2 * WIDTH :].T.unflatten(0, (HEADS, -1)) for block in model.transformer.h]
    expected = torch.stack([overlap_by_hand(heads) for heads in values]).mean()
    torch.testing.assert_close(weight_overlap(model), expected)


def test_training_on_the_overlap_makes_heads_orthogonal():
    layer = MultiHeadAttention(WIDTH, HEADS)
    assert weight_overlap(layer) > 0.1
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    for _ in range(200):
        optimizer.zero_grad()
        weight_overlap(layer).backward()
        optimizer.step()
    value = layer.v_proj.weight.unflatten(0, (HEADS, -1))
    assert weight_overlap(layer) < 1e-3
    assert (value[0] @ value[1].T).abs().max() < 0.1 * value.norm(dim=-1).square().mean()


def test_equal_heads_have_an_overlap_of_one():
    layer = MultiHeadAttention(WIDTH, 2)
    with torch.no_grad():
        layer.v_proj.weight[WIDTH // 2 :] = layer.v_proj.weight[: WIDTH // 2]
    torch.testing.assert_close(weight_overlap(layer), torch.tensor(1.0))


@pytest.mark.parametrize("where", ["weights", "autocast"])
def test_an_overlap_in_float16_is_that_of_the_weights(where):
    layer = MultiHeadAttention(WIDTH, HEADS)
    with torch.no_grad():
        layer.v_proj.weight.mul_(0.02)  # squares of inner products are below the smallest number of float16
    expected = overlap_by_hand(layer.v_proj.weight.detach().double().unflatten(0, (HEADS, -1)))
    layer = layer.half() if where == "weights" else layer
    with torch.autocast("cpu", torch.float16, enabled=where == "autocast"):
        found = weight_overlap(layer)
    found.backward()
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=0)
    assert layer.v_proj.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("model", "part", "words"),
    [
        (lambda: MultiHeadAttention(WIDTH, HEADS), "values", "query, key, value or output"),
        (lambda: MultiHeadAttention(WIDTH, 1), "value", "two heads or more"),
        (lambda: nn.MultiheadAttention(WIDTH, HEADS), "value", "must be known"),
        (lambda: nn.Linear(3, 3), "value", "two heads or more"),
    ],
)
def test_an_overlap_needs_known_heads(model, part, words):
    with pytest.raises(OptionError, match=words):
        weight_overlap(model(), part)


def attended(layer: MultiHeadAttention, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the causal weights [batch, heads, queries, keys] and head outputs, materialised."""
    query, key, value = (
        p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
    weights = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    return weights, weights @ value


def positions_by_hand(weights: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    mean = weights @ torch.arange(weights.shape[-1]).to(weights)
    width = (-weights * weights.clamp_min(1e-300).log()).sum(-1).exp()
    pairs = []
    for i in range(HEADS):
        for j in range(i):
            variance = (width[:, i] ** 2 + width[:, j] ** 2) / (4 * torch.pi)
            distance = mean[:, i] - mean[:, j]
            pairs.append((-(distance**2) / (2 * variance)).exp() / (2 * torch.pi * variance).sqrt())
    return torch.stack(pairs).mean(0)[tokens].mean()


def cosines_by_hand(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    pairs = [
        torch.cosine_similarity(output[:, i], output[:, j], dim=-1)[tokens].mean()
        for i in range(HEADS)
        for j in range(i)
    ]
    return torch.stack(pairs).mean()


@pytest.mark.parametrize("term", ["position", "output"])
def test_overlaps_of_heads_are_their_formulas_with_gradients_and_ignore_padding(term):
    layer, x = MultiHeadAttention(WIDTH, HEADS, causal=True).double(), torch.randn(3, 7, WIDTH, dtype=torch.float64)
    lengths = torch.tensor([7, 4, 5])
    tokens = torch.arange(7) < lengths[:, None]
    weights, output = attended(layer, 2 * x)
    expected = positions_by_hand(weights, tokens) if term == "position" else cosines_by_hand(output, tokens)
    x = torch.where(tokens[..., None], 2 * x, 1e3)
    with polyhead.observe(layer, statistics=("entropy", "mean_offset"), keep_statistics=True) as session:
        layer(x, mask=polyhead.Mask.lengths(lengths))
        found = (position_overlap if term == "position" else output_overlap)(session.statistics)
    parameters = [layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight][: 2 if term == "position" else 3]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters))


def test_a_head_without_output_has_no_gradient_of_the_overlap():
    layer = MultiHeadAttention(WIDTH, HEADS, bias=False, causal=True).double()
    x = torch.randn(3, 7, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        layer.v_proj.weight[: WIDTH // HEADS] = 0.0
    _, others = attended(layer, x)
    expected = sum(
        torch.cosine_similarity(others[:, i], others[:, j], dim=-1).mean() for i in range(1, HEADS) for j in range(1, i)
    ) / (HEADS * (HEADS - 1) / 2)
    with polyhead.observe(layer, statistics="entropy", keep_statistics=True) as session:
        layer(x)
        found = output_overlap(session.statistics)
        (grad,) = torch.autograd.grad(found, layer.v_proj.weight)
    (of_others,) = torch.autograd.grad(expected, layer.v_proj.weight)
    torch.testing.assert_close(found, expected)
    assert not grad[: WIDTH // HEADS].any()
    torch.testing.assert_close(grad[WIDTH // HEADS :], of_others[WIDTH // HEADS :])


@pytest.mark.parametrize("peaks", ["one key", "the same keys", "apart", "one peak"])
def test_the_overlap_of_positions_is_the_published_one_for_heads_with_one_peak(peaks):
    keys = torch.arange(61, dtype=torch.float64)
    logits = {
        "one key": [-1e4 * (keys - 20).abs(), -1e4 * (keys - 20).abs()],
        "the same keys": [torch.where((keys >= 8) & (keys < 21), 0.0, -1e4).double()] * 2,
        "apart": [-1e4 * (keys - 20).abs(), -1e4 * (keys - 25).abs()],
        "one peak": [-((keys - 30) ** 2) / 40, -((keys - 37) ** 2) / 90],
    }[peaks]
    weights = torch.stack(logits).softmax(-1)
    # Queries of ones and keys that are the logits, one channel per head.
    layer = MultiHeadAttention(2, 2, bias=True).double()
    with torch.no_grad():
        for linear in (layer.q_proj, layer.k_proj):
            linear.weight.zero_()
            linear.bias.zero_()
        layer.q_proj.bias.fill_(1.0)
        layer.k_proj.weight.copy_(torch.eye(2))
    with polyhead.observe(layer, statistics=("entropy", "mean_offset"), keep_statistics=True) as session:
        layer(torch.stack(logits, -1)[None])
        found = position_overlap(session.statistics).item()
    published = (weights[0] * weights[1]).sum().item()
    # The sum of squares of a Gaussian is exp(-entropy) sqrt(e / 2), for which the overlap has exp(-entropy).
    assert found == pytest.approx(published, rel=0.2 if peaks == "one peak" else 1e-6, abs=1e-6)


def test_pairs_of_which_a_head_attends_to_nothing_are_left_out():
    layer, x = MultiHeadAttention(WIDTH, HEADS).double(), torch.randn(1, 5, WIDTH, dtype=torch.float64)
    allowed = torch.ones(1, HEADS, 5, 5, dtype=torch.bool)
    allowed[:, 2:, 1:] = False  # heads 2 and 3 attend to nothing but in the first row
    with polyhead.observe(layer, statistics=("entropy", "mean_offset"), keep_statistics=True) as session:
        layer(x, mask=polyhead.Mask.dense(allowed))
        rows = session.statistics["MultiHeadAttention"]
        output, offset, width = rows.output, rows.mean_offset, rows.entropy.exp()
        cosines, positions = [], []
        for i in range(HEADS):
            for j in range(i):
                for row in range(1 if i > 1 else 5):
                    cosines.append(torch.cosine_similarity(output[0, i, row], output[0, j, row], dim=0))
                    squares = width[0, i, row] ** 2 + width[0, j, row] ** 2
                    distance = offset[0, i, row] - offset[0, j, row]
                    positions.append((2 / squares).sqrt() * (-2 * torch.pi * distance**2 / squares).exp())
        torch.testing.assert_close(output_overlap(session.statistics), torch.stack(cosines).mean())
        torch.testing.assert_close(position_overlap(session.statistics), torch.stack(positions).mean())


@pytest.mark.parametrize("checkpointed", [False, True])
def test_overlaps_of_a_transformers_model_reach_its_weights(checkpointed):
    config = transformers.GPT2Config(vocab_size=61, n_embd=WIDTH, n_layer=2, n_head=HEADS)
    model, ids = transformers.GPT2LMHeadModel(config).train(), torch.randint(61, (2, 9))
    plain = copy.deepcopy(model)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for each in (model, plain):
        torch.manual_seed(0)  # of dropout
        with polyhead.observe(each, statistics=("entropy", "mean_offset"), keep_statistics=True) as session:
            loss = each(ids, labels=ids, use_cache=False).loss
            (loss + position_overlap(session.statistics) + output_overlap(session.statistics)).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    without = copy.deepcopy(plain)
    without.zero_grad()
    torch.manual_seed(0)
    without(ids, labels=ids).loss.backward()
    changed = [name for (name, x), y in zip(plain.named_parameters(), without.parameters(), strict=True)
               if not torch.allclose(x.grad, y.grad)]  # fmt: skip
    assert any("h.1.attn.c_attn.weight" in name for name in changed)


def test_the_overlap_terms_save_nothing_of_the_size_of_the_weights():
    layer, context = MultiHeadAttention(8, 2, causal=True), 600
    sizes = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.numel())
        return x

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        polyhead.observe(layer, statistics=("entropy", "mean_offset"), keep_statistics=True) as session,
    ):
        layer(torch.randn(1, context, 8))
        (position_overlap(session.statistics) + output_overlap(session.statistics)).backward()
    assert 0 < max(sizes) <= 3 * 8 * context


def test_training_on_the_overlaps_moves_heads_apart():
    layer, x = MultiHeadAttention(WIDTH, HEADS), torch.randn(2, 23, WIDTH)
    with torch.no_grad():  # heads that are almost the same
        for linear in (layer.q_proj, layer.k_proj, layer.v_proj):
            same = 3 * linear.weight[: WIDTH // HEADS].repeat(HEADS, 1)
            linear.weight.copy_(same + 0.1 * torch.randn_like(same))
    optimizer, first = torch.optim.Adam(layer.parameters(), lr=0.01), None
    with polyhead.observe(layer, statistics=("entropy", "mean_offset"), keep_statistics=True) as session:
        for _ in range(60):
            optimizer.zero_grad()
            layer(x)
            terms = torch.stack([position_overlap(session.statistics), output_overlap(session.statistics)])
            first = terms.detach() if first is None else first
            terms.sum().backward()
            optimizer.step()
    assert (terms < 0.5 * first).all()


def test_overlaps_need_two_heads_and_what_they_are_computed_from():
    def statistics_of(layer, **options):
        session = polyhead.observe(layer, keep_statistics=True, **options)
        session.__enter__()
        x = torch.randn(2, 5, WIDTH)
        layer(x, x, x) if isinstance(layer, nn.MultiheadAttention) else layer(x)
        return session

    for layer, options, term, words in [
        (MultiHeadAttention(WIDTH, HEADS), {"statistics": "entropy"}, position_overlap, "mean_offset"),
        (MultiHeadAttention(WIDTH, 1), {"statistics": ("entropy", "mean_offset")}, position_overlap, "two heads"),
        (
            MultiHeadAttention(WIDTH, HEADS, sinks=True),
            {"statistics": ("entropy", "mean_offset")},
            position_overlap,
            "sink",
        ),
        (MultiHeadAttention(WIDTH, HEADS), {"heads": [1], "statistics": "entropy"}, output_overlap, "two heads"),
        (
            nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
            {"statistics": "entropy"},
            output_overlap,
            "from_torch",
        ),
    ]:
        session = statistics_of(layer, **options)
        with pytest.raises(OptionError, match=words):
            term(session.statistics)
        session.__exit__(None, None, None)
