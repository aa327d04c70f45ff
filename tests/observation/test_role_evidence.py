"""Role evidence agrees with materialised weights, and any split of the documents equals one pass."""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import polyhead
from polyhead.errors import OptionError, ShapeError
from polyhead.masks import Mask
from polyhead.observation import AttentionMaps, BatchMetadata, role_evidence, role_evidence_rows, role_evidence_tokens
from polyhead.observation.role_evidence import EvidenceCollector, HeadEvidence
from polyhead.observation.role_evidence_rows import COLUMNS, COSINES, WINDOW
from polyhead.observation.role_evidence_tokens import BINS, NEAR, NEAREST, TokenVectors, rare_tokens
from polyhead.observation.top_keys import TopKeys
from polyhead.observation.transformers_models import interface_modules
from polyhead.ops.attended import Attended
from polyhead.sources.token_class import TokenClass
from tests.integrations.huggingface import models
from tests.waiting import waiting_is_an_error

FAMILIES = {family.name: family for family in models.FAMILIES}
SPECIAL, PUNCTUATION = 0, 5


@pytest.mark.parametrize("few", [True, False])
def test_one_profile_of_a_call_serves_all_collectors(monkeypatch, few):
    """If the weights are few, all of them are stored, and sums over words of several tokens need no other profile."""
    if not few:
        monkeypatch.setattr(role_evidence_rows, "FEW_WEIGHTS", 0)
    layer = polyhead.MultiHeadAttention(32, 4, causal=True)
    x, tokens = torch.randn(2, 19, 32), torch.randint(5, 11, (2, 19))
    sentences = torch.arange(19).expand(2, -1) // 7
    words = torch.arange(19).clamp_min(3).expand(2, -1)  # the first of four tokens, the others of one
    calls = []

    def recorded(query, *tensors, **requested):
        calls.append((query.shape[1], {name for name, x in requested.items() if x is not None}))
        return polyhead.profile(query, *tensors, **requested)

    def observed(*collect):
        with torch.no_grad(), polyhead.observe(layer, statistics=False, collect=collect) as session:
            session.metadata = BatchMetadata(documents=torch.tensor([0, 1]), tokens=tokens)
            layer(x)
        (states,) = session.observations.collected.values()
        return {f"{name}.{part}": x for name, state in states.items() for part, x in state.state().items()}

    def collectors():
        evidence = EvidenceCollector(segments=lambda _: (words, sentences))
        return AttentionMaps(19), evidence, TopKeys(torch.tensor([7, 5]))

    alone = {name: x for collector in collectors() for name, x in observed(collector).items()}
    monkeypatch.setattr("polyhead.ops.attended.profile", recorded)
    together = observed(*collectors())
    of_heads = [requested for heads, requested in calls if heads == 4]
    assert sum({"received", "block_map", "offsets", "argmax"} <= requested for requested in of_heads) == 1
    assert sum("received" in requested for requested in of_heads) == 1
    assert sum("offsets" in requested for requested in of_heads) == (1 if few else 2)
    assert together.keys() == alone.keys()
    assert all(torch.equal(together[name], x) for name, x in alone.items())


def classes_of(tokens: Tensor) -> Tensor:
    """The first of a text is special, every seventh id punctuation."""
    classes = torch.where(tokens % 7 == 0, PUNCTUATION, 2)
    classes[:, 0] = SPECIAL
    return classes


def cut(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Ids that 3 divides go on with the word before; behind one that 7 divides a sentence begins; none is the first."""
    words = (tokens % 3 != 0).cumsum(-1)
    sentences = torch.nn.functional.pad(tokens % 7 == 0, (1, -1)).cumsum(-1)
    words[:, 0] = sentences[:, 0] = -1
    return words, sentences


def expected_sums(
    weights: Tensor,
    visible: Tensor,
    real: Tensor,
    tokens: Tensor,
    classes: Tensor,
    rare: Tensor,
    meaning: Tensor | None,
) -> tuple[dict[str, list[float]], list[list[int]], list[int], list[float]]:
    """Of one text, weights [heads, queries, keys], by plain loops over its pairs; the last head is chance."""
    size = len(tokens)
    rows = [i for i in range(size) if real[i] and visible[i].any()]
    uniform = visible.double() / visible.sum(-1, keepdim=True).clamp_min(1)
    weights = torch.cat([weights.double(), uniform[None]])
    first = int(real.to(torch.uint8).argmax())
    special, punctuation = classes == SPECIAL, classes == PUNCTUATION
    sets = {
        "special": special,
        "punctuation": punctuation,
        "delimiter": special | punctuation,
        "rare": rare[tokens] & ~special,
    }
    distance = torch.arange(size) - torch.arange(size)[:, None]
    same = (tokens[:, None] == tokens) & ~special & ~special[:, None] & ~torch.eye(size, dtype=torch.bool)
    follows = torch.zeros_like(same)
    follows[:, 1:] = same[:, :-1]
    follows.fill_diagonal_(False)
    keep = torch.zeros(size, 1)
    keep[rows] = 1
    # What no head's weights decide: how many keys a row sees, those far away, and the words and sentences asked about.
    seen = visible.sum(-1).tolist()
    far = visible & (distance.abs() > WINDOW)
    far[:, first] = False
    far_rows = sum(bool(far[i].any()) for i in rows)
    pair_rows = {
        name: sum(bool((pairs[i] & visible[i]).any()) for i in rows)
        for name, pairs in (("duplicate", same), ("induction", follows))
    }
    inside: dict[str, list[tuple[int, Tensor]]] = {"word": [], "sentence": []}
    for name, numbers in zip(inside, (x[0] for x in cut(tokens[None])), strict=True):
        several = len(set(numbers[real & (numbers >= 0)].tolist())) > 1
        for i in rows:
            own = (numbers == numbers[i]) & real
            if numbers[i] >= 0 and (own.sum() > 1 if name == "word" else several):
                inside[name].append((i, own))
    cosines, by_offset = [], []
    if meaning is not None:
        text = real & ~special
        other = text[:, None] & text & (tokens[:, None] != tokens)
        cosines = [vectors @ vectors.T for vectors in meaning[tokens].double().unbind(1)]
        for offset in [*range(-NEAR, NEAR + 1), -size, size]:
            at = distance == offset if abs(offset) <= NEAR else distance * offset > NEAR * size
            if (at & other).any():
                by_offset.append((at, [float(cosine[at & other].mean()) for cosine in cosines]))
    sums: dict[str, list[float]] = {name: [] for name in COLUMNS}
    hits = []
    for p in weights:
        p = p * keep
        found = dict.fromkeys(COLUMNS, 0.0)
        found["rows"] = found["key_set_rows"] = len(rows)
        for name, at in (("self_mass", 0), ("previous_mass", -1), ("next_mass", 1)):
            found[name] = float(p[distance == at].sum())
        found["window_mass"] = float(p[distance.abs() <= WINDOW].sum())
        found["sink_mass"] = float(p[:, first].sum())
        for name, chosen in sets.items():
            found[f"{name}_mass"] = float(p[:, chosen].sum())
        found["mean_distance"] = float((p * distance.abs()).sum())
        offsets = [0] * BINS
        for i in rows:
            if seen[i] > 1:
                found["entropy_rows"] += 1
                found["normalized_entropy"] += float(-torch.xlogy(p[i], p[i]).sum()) / math.log(seen[i])
            top = int(p[i].argmax())
            offsets[max(-NEAR - 1, min(NEAR + 1, top - i)) + NEAR + 1] += 1
            found["long_range"] += bool(far[i, top]) and bool(p[i, top] > 0.5)
        found["long_range_rows"] = far_rows
        for name, count in pair_rows.items():
            found[f"{name}_rows"] = count
        for name, chosen in inside.items():
            apart = p * (distance != 0)
            found[f"{name}_mass"] = sum(float(apart[i][own].sum()) for i, own in chosen)
            found[f"{name}_others"] = sum(float(apart[i].sum()) for i, _ in chosen)
            at_bin, within, pairs = torch.zeros(3, BINS, dtype=torch.float64)
            for i, own in chosen:  # how often the token at an offset is inside, times the attention at that offset
                bins_of_row = distance[i].clamp(-NEAR - 1, NEAR + 1) + NEAR + 1
                at_bin += torch.bincount(bins_of_row, apart[i].double(), BINS)
                within += torch.bincount(bins_of_row, own.double(), BINS)
                pairs += torch.bincount(bins_of_row, real.double(), BINS)
            found[f"{name}_expected"] = float((at_bin * within / pairs.clamp_min(1)).sum())
        found["duplicate_mass"], found["induction_mass"] = float(p[same].sum()), float(p[follows].sum())
        if meaning is not None:
            found["other_token_mass"] = float(p[other].sum())
            apart = p * (distance != 0)
            apart_shares = [(float(apart[at].sum() / apart.sum()), means) for at, means in by_offset]
            for index, name in enumerate(COSINES):
                found[name] = float((p * cosines[index])[other].sum())
                mean = sum(share * means[index] for share, means in apart_shares)
                found[f"{name}_expected"] = mean * found["other_token_mass"]
        for name in COLUMNS:
            sums[name].append(found[name])
        hits.append(offsets)
    shares = [
        1 - (1 - 1 / n) / (2 * float(torch.tensor(n).double().log())) for n in visible[rows].sum(-1).tolist() if n > 1
    ]
    sums["normalized_entropy"][-1] = sum(shares)
    for name in COLUMNS[COLUMNS.index("cosine") : COLUMNS.index("word_mass")]:
        sums[name][-1] = 0.0  # chance is not asked what it means
    bins = (distance.clamp(-NEAR - 1, NEAR + 1) + NEAR + 1)[rows]
    available = [int((visible[rows] & (bins == index)).sum()) for index in range(BINS)]
    chance = [float(uniform[rows][bins == index].sum()) for index in range(BINS)]
    return sums, hits[:-1], available, chance


def assert_evidence(found: HeadEvidence, expected: list, bound: float) -> None:
    for index, (sums, hits, available, chance) in enumerate(expected):
        for name in COLUMNS:
            actual, wanted = found.column(name)[index].tolist(), sums[name]
            for head, (one, other) in enumerate(zip(actual, wanted, strict=True)):
                assert abs(one - other) <= bound * max(1.0, sums["rows"][0]), (index, name, head, one, other)
                if name == "rows" or name.endswith("_rows"):
                    assert one == other, (index, name, head)
        assert found.hits[index].tolist() == hits
        assert found.available[index].tolist() == available
        assert found.chance[index].tolist() == pytest.approx(chance, abs=bound * sums["rows"][0])


@pytest.mark.parametrize(
    ("side", "known"),
    [("none", "nothing"), ("none", "statistics"), ("left", "meaning"), ("right", "meaning"), ("right", "statistics")],
)
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_evidence_equals_the_weights_of_eager_attention(name: str, side: str, known: str) -> None:
    model = models.build(FAMILIES[name], dtype=torch.float32)
    tokens = models.tokens() % 19 + 3  # few different ones, so that some occur again
    size = tokens.shape[1]
    lengths = torch.tensor([size, 17, 11]) if side != "none" else torch.tensor([size] * 3)
    place = torch.arange(size)
    real = place >= size - lengths[:, None] if side == "left" else place < lengths[:, None]
    classes = classes_of(tokens)
    rare = rare_tokens(torch.bincount(tokens.flatten(), minlength=models.VOCABULARY), 0.2)
    meaning = TokenVectors.of(model.get_input_embeddings().weight, dims=7) if known == "meaning" else None
    collector = EvidenceCollector(rare=rare, meaning=meaning, segments=cut)
    with torch.no_grad():
        eager = model(input_ids=tokens, attention_mask=real.long(), output_attentions=True)
        with polyhead.observe(
            model, statistics=None if known == "statistics" else False, collect=[collector]
        ) as session:
            session.metadata = BatchMetadata(documents=torch.tensor([4, 0, 9]), tokens=tokens, classes=classes)
            model(input_ids=tokens, attention_mask=real.long(), use_cache=False)
    visible = real[:, None, :] & (place <= place[:, None] if name == "llama" else torch.ones(size, size).bool())
    assert len(session.observations.collected) == 2
    for (_, values), weights in zip(session.observations.collected.items(), eager.attentions, strict=True):
        found = values["evidence"]
        assert found.documents.tolist() == [0, 4, 9]
        expected = [
            expected_sums(weights[b], visible[b], real[b], tokens[b], classes[b], rare, meaning and meaning.vectors)
            for b in (1, 0, 2)
        ]
        assert_evidence(found, expected, 2e-6)


@pytest.mark.parametrize("padded", [True, False])
def test_the_baseline_is_shared_by_layers_with_the_same_mask(padded: bool, monkeypatch) -> None:
    """T5 joins a mask and a bias anew in every layer; encoder and decoder see different keys."""
    model = models.build(FAMILIES["t5"], dtype=torch.float32)
    tokens = models.tokens() % 19 + 3
    real = torch.arange(tokens.shape[1]) < torch.tensor([tokens.shape[1], 17 if padded else 24, 24])[:, None]
    metadata = BatchMetadata(documents=torch.arange(3), tokens=tokens, classes=classes_of(tokens))

    def collected() -> tuple[int, list[dict[str, Tensor]]]:
        made: list[object] = []
        true = role_evidence.measure_baseline
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(role_evidence, "measure_baseline", lambda *given: made.append(given) or true(*given))
            with polyhead.observe(model, statistics=False, collect=[EvidenceCollector(segments=cut)]) as session:
                session.metadata = metadata
                masks = {"attention_mask": real.long(), "decoder_attention_mask": real.long()}
                model(input_ids=tokens, decoder_input_ids=tokens, use_cache=False, **masks)
        values = session.observations.collected.values()
        return len(made), [x["evidence"].state() for x in values if "evidence" in x]

    count, found = collected()
    monkeypatch.setattr(role_evidence, "_same_keys", lambda *_: False)
    count_apart, apart = collected()
    assert (count, count_apart) == (2, 4)
    assert len(found) == len(apart) == 4
    for one, other in zip(found, apart, strict=True):
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), name


def test_masks_with_other_parts_show_other_keys() -> None:
    same, bias = role_evidence._same_keys, torch.randn(1, 2, 5, 5)
    dense, lengths, packed = Mask.dense(torch.ones(5, 5).bool().tril()), Mask.lengths([5]), Mask.documents([0] * 5)
    placed = Mask.positions(torch.arange(5), torch.arange(5))
    masks = [None, Mask.causal(), Mask.window(3), Mask.window(3, sinks=1), Mask.bias(bias), Mask.bias(bias.clone())]
    masks += [Mask.relative(torch.zeros(2, 3), 1), Mask.relative(torch.zeros(2, 3), 1)]
    masks += [dense, lengths, Mask.lengths([5]), packed, placed, Mask.causal() & lengths, lengths & packed]
    for one, other in itertools.product(masks, masks):
        assert same(one, other) == (one is other), (one, other)
    for one, other in ((lengths, Mask.bias(bias)), (Mask.causal(), dense), (placed, packed)):
        assert same(one & other, one & other)


def attended_layer(causal: bool = True) -> polyhead.MultiHeadAttention:
    torch.manual_seed(3)
    layer = polyhead.MultiHeadAttention(24, 3, num_kv_heads=1, causal=causal).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(3)
    return layer


def drawn_tokens(batch: int, size: int, vocabulary: int = 31) -> Tensor:
    return torch.randint(vocabulary, (batch, size), generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("causal", [True, False])
def test_far_offsets_and_many_keys(causal: bool) -> None:
    layer, tokens = attended_layer(causal), drawn_tokens(2, 149, 199)
    stream = torch.randn(199, 24, dtype=torch.float64)[tokens] + torch.randn(149, 24, dtype=torch.float64)
    meaning = TokenVectors.of(torch.randn(199, 24), dims=11)
    rare = rare_tokens(torch.bincount(tokens.flatten(), minlength=199))
    collector = EvidenceCollector(rare=rare, meaning=meaning, segments=cut)
    with torch.no_grad(), polyhead.observe(layer, statistics=False, collect=[collector]) as session:
        session.metadata = BatchMetadata(documents=torch.arange(2), tokens=tokens, classes=classes_of(tokens))
        weights = layer(stream, weights=True).weights
    ((_, values),) = session.observations.collected.items()
    visible = torch.ones(149, 149).bool()
    visible = visible.tril() if causal else visible
    every = torch.ones(149).bool()
    expected = [
        expected_sums(weights[b], visible, every, tokens[b], classes_of(tokens)[b], rare, meaning.vectors)
        for b in range(2)
    ]
    assert values["evidence"].hits[..., 0].sum() > 0
    assert_evidence(values["evidence"], expected, 1e-6)


def test_of_many_occurrences_the_nearest_count() -> None:
    layer = attended_layer()
    tokens = torch.full((1, 29), 3)
    with torch.no_grad(), polyhead.observe(layer, statistics=False, collect=[EvidenceCollector()]) as session:
        session.metadata = BatchMetadata(documents=torch.zeros(1, dtype=torch.int64), tokens=tokens)
        weights = layer(torch.randn(1, 29, 24, dtype=torch.float64), weights=True).weights
    ((_, values),) = session.observations.collected.items()
    found = values["evidence"]
    distance = torch.arange(29)[:, None] - torch.arange(29)
    nearest = (distance > 0) & (distance <= NEAREST)
    torch.testing.assert_close(found.column("duplicate_mass")[0, :-1], (weights[0] * nearest).sum((1, 2)))
    assert found.column("duplicate_rows")[0].tolist() == [28.0] * 4


@pytest.mark.parametrize("causal", [True, False])
def test_evidence_of_one_kind_is_that_of_all_kinds(causal: bool) -> None:
    layer, tokens = attended_layer(causal), drawn_tokens(2, 61, 7)
    classes, rare = classes_of(tokens), rare_tokens(torch.bincount(tokens.flatten(), minlength=7))
    kinds = (None, "rows", "pairs")
    collectors = [EvidenceCollector(name=str(x), rare=rare, segments=cut, only=x) for x in kinds]
    with torch.no_grad():
        found = []
        for collector in collectors:  # one at a time, as a session computes one profile for all
            with polyhead.observe(layer, statistics=False, collect=[collector]) as session:
                session.metadata = BatchMetadata(documents=torch.arange(2), tokens=tokens, classes=classes)
                layer(torch.randn(2, 61, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))
            ((_, values),) = session.observations.collected.items()
            found.append(values[collector.name])
    whole, rows, pairs = found
    of_pairs = {f"{kind}_{part}" for kind in ("duplicate", "induction") for part in ("mass", "rows")}
    for name in role_evidence_rows.COLUMNS:
        for one, collected in ((rows, name not in of_pairs), (pairs, name in of_pairs or name == "sink_mass")):
            expected = whole.column(name) if collected else torch.zeros_like(whole.column(name))
            assert torch.equal(one.column(name), expected), name
    assert all((whole.column(name) > 0).all() for name in of_pairs)
    for name in ("hits", "available", "chance"):
        assert torch.equal(getattr(rows, name), getattr(whole, name))
        assert getattr(whole, name).any()
        assert not getattr(pairs, name).any()


@pytest.mark.parametrize("causal", [True, False])
def test_equal_tokens_are_no_evidence_of_similar_meaning_however_many_there_are(causal: bool) -> None:
    layer, tokens = attended_layer(causal), drawn_tokens(1, 61, 5)
    assert int(tokens.unique(return_counts=True)[1].min()) > 2 * NEAREST
    meaning = TokenVectors.of(torch.randn(5, 24), dims=3)
    with torch.no_grad(), polyhead.observe(layer, statistics=False, collect=[EvidenceCollector(meaning=meaning)]) as s:
        s.metadata = BatchMetadata(documents=torch.zeros(1, dtype=torch.int64), tokens=tokens)
        weights = layer(torch.randn(1, 61, 24, dtype=torch.float64), weights=True).weights[0]
    ((_, values),) = s.observations.collected.items()
    other = tokens[0][:, None] != tokens[0]
    vectors = meaning.vectors[tokens[0], 0].double()
    found = {name: values["evidence"].column(name)[0, :-1] for name in ("other_token_mass", "cosine")}
    torch.testing.assert_close(found["other_token_mass"], (weights * other).sum((1, 2)), rtol=0, atol=1e-5)
    cosine = (weights * (vectors @ vectors.T) * other).sum((1, 2))
    torch.testing.assert_close(found["cosine"], cosine, rtol=0, atol=1e-5)


def run_in_parts(parts: list[Tensor], texts: Tensor, tokens: Tensor, documents: Tensor) -> HeadEvidence:
    layer = attended_layer()
    collector = EvidenceCollector(meaning=TokenVectors.of(torch.eye(31) + 0.1, dims=5), segments=cut, max_documents=5)
    with torch.no_grad(), polyhead.observe(layer, statistics=False, collect=[collector]) as session:
        for part in parts:
            session.metadata = BatchMetadata(
                documents=documents[part], tokens=tokens[part], classes=classes_of(tokens[part])
            )
            layer(texts[part])
    ((_, values),) = session.observations.collected.items()
    return values["evidence"]


@pytest.mark.parametrize("seed", range(4))
def test_any_split_merged_in_any_order_equals_one_pass(seed: int) -> None:
    tokens = drawn_tokens(11, 19)
    texts = torch.randn(11, 19, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    documents = torch.tensor([0, 1, 1, 2, 3, 3, 3, 6, 8, 9, 12])  # modulo 5 there are five
    order = random.Random(seed)
    whole = run_in_parts([torch.arange(11)], texts, tokens, documents)
    shuffled = list(range(11))
    order.shuffle(shuffled)
    cuts = sorted(order.sample(range(1, 11), 3))
    parts = [torch.tensor(shuffled[a:b]) for a, b in itertools.pairwise([0, *cuts, 11])]
    waiting = [run_in_parts([part], texts, tokens, documents) for part in parts]
    while len(waiting) > 1:
        order.shuffle(waiting)
        waiting.append(waiting.pop().merge(waiting.pop()))
    for found in (waiting[0], run_in_parts(parts, texts, tokens, documents)):
        assert found.documents.tolist() == whole.documents.tolist() == [0, 1, 2, 3, 4]
        for name in ("hits", "available"):
            assert torch.equal(getattr(found, name), getattr(whole, name))
        for name in ("sums", "chance"):
            torch.testing.assert_close(getattr(found, name), getattr(whole, name), rtol=1e-12, atol=1e-12)


def test_a_state_goes_through_a_file_and_back(tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    found = run_in_parts([torch.arange(3)], torch.randn(3, 19, 24).double(), drawn_tokens(3, 19), torch.arange(3))
    save_file({name: x.contiguous() for name, x in found.state().items()}, tmp_path / "evidence.safetensors")
    empty = HeadEvidence.empty(found.collector, found.site, torch.device("cpu"))
    back = empty.with_state(load_file(tmp_path / "evidence.safetensors"))
    for name, tensor in found.state().items():
        assert torch.equal(back.state()[name], tensor)
    with pytest.raises(OptionError, match="a saved HeadEvidence must contain documents, sums"):
        empty.with_state({})


def observed(metadata: BatchMetadata, **given: Tensor) -> None:
    layer = attended_layer()
    with torch.no_grad(), polyhead.observe(layer, statistics=False, collect=[EvidenceCollector()]) as session:
        session.metadata = metadata
        layer(torch.randn(2, 7, 24, dtype=torch.float64), **given)


def test_invalid_metadata_is_rejected() -> None:
    with pytest.raises(OptionError, match="the document index of each of the 2 texts"):
        observed(BatchMetadata())
    with pytest.raises(ShapeError, match=r"must have the shape of the batch, \[2, 7\], got \[2, 5\]"):
        observed(BatchMetadata(documents=torch.arange(2), tokens=torch.zeros(2, 5, dtype=torch.int64)))
    tokens = torch.zeros(2, 7, dtype=torch.int64)
    with pytest.raises(ShapeError, match="tokens and classes must have the same shape"):
        observed(BatchMetadata(documents=torch.arange(2), tokens=tokens, classes=tokens[:, :5]))
    with pytest.raises(OptionError, match="at least two documents"):
        EvidenceCollector(max_documents=1)
    with pytest.raises(ShapeError, match="rare must be boolean"):
        EvidenceCollector(rare=torch.ones(3))
    one, other = (HeadEvidence.empty(EvidenceCollector(max_documents=n), SITE, torch.device("cpu")) for n in (3, 5))
    with pytest.raises(OptionError, match="the same max_documents can be merged, got 3 and 5"):
        one.merge(other)
    rows, pairs = (HeadEvidence.empty(EvidenceCollector(only=x), SITE, torch.device("cpu")) for x in ("rows", "pairs"))
    with pytest.raises(OptionError, match="the same only can be merged, got rows and pairs"):
        rows.merge(pairs)
    with pytest.raises(OptionError, match="only must be 'rows', 'pairs' or None, got 'copy'"):
        EvidenceCollector(only="copy")


SITE = polyhead.observation.AttentionSite("layer", "self", "layer", 0, 2)


def test_a_call_that_goes_on_from_a_cache_and_a_cross_attention_have_no_evidence() -> None:
    model = models.build(FAMILIES["llama"], dtype=torch.float32)
    with torch.no_grad(), polyhead.observe(model, statistics=False, collect=[EvidenceCollector()]) as session:
        session.metadata = BatchMetadata(documents=torch.arange(3))
        cache = model(input_ids=models.tokens(), use_cache=True).past_key_values
        with pytest.raises(OptionError, match="1 queries over 24 keys"):
            model(input_ids=models.tokens()[:, :1], past_key_values=cache)
    cross = polyhead.observation.AttentionSite("layer", "cross", "layer", 0, 2)
    assert EvidenceCollector().empty(cross, torch.device("cpu")) is None


def test_rows_stored_at_a_time_and_fused_attention_give_the_same_sums(monkeypatch) -> None:
    """Groups include the row's own token; keys of another sequence, later keys and padding have no weight."""
    generator = torch.Generator().manual_seed(3)
    query, key = (torch.randn(2, heads, 19, 8, generator=generator) for heads in (6, 3))
    mask = Mask.causal() & Mask.lengths([19, 13])
    result = polyhead.attention(query, key, key, mask=mask, logsumexp=True)
    attended = Attended(query, key, key, result, mask)
    groups = {name: torch.randint(0, 5, (2, 19), generator=generator) for name in ("word", "token")}
    embeddings = torch.randn(2, 19, 7, generator=generator)
    whole = role_evidence_rows._sums_of_stored_weights(attended, groups, embeddings)
    monkeypatch.setattr(role_evidence_rows, "STORED_WEIGHTS", 1)
    monkeypatch.setattr(role_evidence_rows, "STORED_ROWS", 5)
    in_blocks = role_evidence_rows._sums_of_stored_weights(attended, groups, embeddings)
    means = polyhead.attention(query, key, embeddings[:, None].expand(-1, 3, -1, -1), mask=mask).output
    for sums in (whole, in_blocks):
        torch.testing.assert_close(sums.embeddings[0], means[0])
        torch.testing.assert_close(sums.embeddings[1, :, :13], means[1, :, :13])
        for name, indices in groups.items():
            expected = role_evidence_rows._weight_inside(attended, indices)
            torch.testing.assert_close(sums.inside[name][0], expected[0])
            torch.testing.assert_close(sums.inside[name][1, :, :13], expected[1, :, :13])
    assert list(in_blocks.inside) == list(groups)


PLACES = torch.arange(149)
SEVERAL_MASKS = {
    "causal": Mask.causal(),
    "window": Mask.window(31) & Mask.lengths([149, 131]),
    "bias": Mask.bias(torch.randn(1, 6, 149, 149, generator=torch.Generator().manual_seed(2))),
    "lengths": Mask.causal() & Mask.lengths([149, 131], queries=[149, 127]),
    "documents": Mask.documents(PLACES // 60) & Mask.causal(),
    "positions": Mask.positions(PLACES * 2, PLACES * 2) & Mask.window(90),
}


@pytest.mark.parametrize("name", SEVERAL_MASKS)
def test_all_weights_of_a_call_give_the_sums_of_a_profile_for_each(name: str, monkeypatch) -> None:
    """Bit for bit; the weights are stored once if they are few, and else profiled again for some rows or words."""
    generator, mask = torch.Generator().manual_seed(4), SEVERAL_MASKS[name]
    query, key = (torch.randn(2, heads, 149, 8, generator=generator) * 2 for heads in (6, 3))
    attended = Attended(query, key, key, polyhead.attention(query, key, key, mask=mask, logsumexp=True), mask)
    real = torch.tensor([[149], [131 if mask.padding else 149]]) > PLACES
    tokens, site = drawn_tokens(2, 149), polyhead.observation.AttentionSite("layer", "self", "layer", 0, 6)
    embedding, output = torch.randn(31, 12, generator=generator), torch.randn(6, 8, 12, generator=generator)
    logits = SimpleNamespace(outputs={("layer", "self"): output}, directions=lambda ids: embedding[ids])
    metadata = BatchMetadata(documents=torch.arange(2), tokens=tokens, classes=classes_of(tokens))

    def sums() -> HeadEvidence:
        meaning = TokenVectors.of(embedding, dims=5)
        collector = EvidenceCollector(meaning=meaning, segments=cut, direct_logits=logits)
        return collector.empty(site, query.device).update(attended, real, metadata)

    few = sums()
    monkeypatch.setattr(role_evidence_rows, "FEW_WEIGHTS", 0)
    for name, expected in sums().state().items():
        assert torch.equal(few.state()[name], expected), name
    columns = ("word_others", "word_expected", "sentence_mass", "sentence_others", "duplicate_mass")
    assert all((few.column(column) > 0).all() for column in columns)
    assert (few.column("copy_pairs")[:, :-1].sum(0) > 0).all() or len(mask.packed)


def test_the_rarest_tokens_make_up_no_more_than_their_share() -> None:
    counts = torch.tensor([5, 0, 90, 1, 4])
    assert rare_tokens(counts, 0.06).tolist() == [False, True, False, True, True]
    with pytest.raises(OptionError, match=r"share in \(0, 1\)"):
        rare_tokens(counts, 1.5)


def guarded(forward):
    def run(*positional, **keywords):
        with waiting_is_an_error():
            return forward(*positional, **keywords)

    return run


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    model = models.build(FAMILIES["llama"], dtype=torch.float32).cuda()
    tokens = models.tokens()
    collector = EvidenceCollector(
        rare=torch.zeros(models.VOCABULARY).bool(), meaning=TokenVectors.of(model.get_input_embeddings().weight, dims=7)
    )
    given = tokens.cuda()
    with torch.no_grad(), polyhead.observe(model, statistics=False, collect=[collector]) as session:
        for number in range(2):
            session.metadata = BatchMetadata(
                documents=torch.arange(3) + number, tokens=tokens, classes=classes_of(tokens)
            )
            model(input_ids=given, use_cache=False)
            if number == 0:  # the kernels are compiled; transformers itself waits where it makes its mask
                for module in interface_modules(model):
                    module.forward = guarded(module.forward)
    for module in interface_modules(model):
        del module.forward
    on_cpu = model.cpu()
    with torch.no_grad(), polyhead.observe(on_cpu, statistics=False, collect=[collector]) as again:
        for number in range(2):
            again.metadata = BatchMetadata(
                documents=torch.arange(3) + number, tokens=tokens, classes=classes_of(tokens)
            )
            on_cpu(input_ids=tokens, use_cache=False)
    for site, values in session.observations.collected.items():
        expected = again.observations.collected[site]["evidence"]
        torch.testing.assert_close(values["evidence"].sums.cpu(), expected.sums, rtol=1e-4, atol=1e-4)
        assert torch.equal(values["evidence"].available.cpu(), expected.available)


def test_token_classes_are_those_of_the_texts():
    assert role_evidence_tokens.SPECIAL == TokenClass.SPECIAL
    assert role_evidence_tokens.PUNCTUATION == (TokenClass.PUNCTUATION, TokenClass.NEWLINE)
