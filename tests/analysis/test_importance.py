"""How much heads matter: ablation is the model without the head, slopes are slopes, and the model stays as it was."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import polyhead
from polyhead import HeadId
from polyhead.analysis.importance import (
    Examples,
    GradientOverlap,
    Importance,
    Masked,
    RowLosses,
    ablate,
    as_loss,
    gradient_scores,
)
from polyhead.errors import OptionError, ShapeError
from polyhead.layers.positions import Rotary
from polyhead.layers.transformer import LanguageModel
from polyhead.observation import AttentionSite
from tests.integrations.huggingface import models
from tests.planted import Sizes, planted_model, repeated_tokens

FAMILIES = {family.name: family for family in models.FAMILIES}
MASK = 3


def in_double(model: nn.Module) -> nn.Module:
    """Norms of transformers compute in float32, whose rounding would drown a difference quotient."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ in ("LlamaRMSNorm", "T5LayerNorm"):
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon).double()
                norm.weight = child.weight
                setattr(module, name, norm)
    return model


def llama() -> nn.Module:
    return in_double(models.build(FAMILIES["llama"]))


def with_head(kind: str, maker: str, **options: Any) -> nn.Module:
    """A small encoder with a head, its weights large enough that heads matter."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **FAMILIES[kind].options, **options)
    model = getattr(transformers, maker).from_config(config).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.25)
    return model


class Reader(nn.Module):
    """An encoder of PyTorch's own, read by a classifier."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.embedding, self.head = nn.Embedding(61, 32), nn.Linear(32, 5)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(input_ids)).mean(1))


def ours() -> nn.Module:
    torch.manual_seed(0)
    return LanguageModel(61, 32, 4, 2, num_kv_heads=2, positions=lambda: Rotary(8), source_dim=12).double().eval()


def case(name: str) -> tuple[nn.Module, list[Any], Any]:
    """A model, batches and a loss."""
    ids, more = models.tokens(), models.tokens(batch=2, length=11, seed=5)
    match name:
        case "llama":
            return llama(), [{"input_ids": ids}, {"input_ids": more}], "language"
        case "bert":
            return with_head("bert", "AutoModelForMaskedLM"), [{"input_ids": ids}], Masked(MASK)
        case "t5" | "bart":
            return in_double(models.build(FAMILIES[name])), [models.inputs(FAMILIES[name])], "language"
        case "ours":
            source = torch.randn(3, 7, 12, dtype=torch.float64)
            return ours(), [{"tokens": ids, "source": source}], "language"
        case "torch":
            return (
                Reader().double().eval(),
                [Examples({"input_ids": ids}, labels=torch.tensor([0, 4, 2]))],
                "classification",
            )
    raise AssertionError(name)


CASES = ("llama", "bert", "t5", "bart", "ours", "torch")


def output_weight(model: nn.Module, site: AttentionSite) -> nn.Parameter:
    module = model.get_submodule(site.name)
    for name in ("o_proj", "out_proj", "o"):
        if hasattr(module, name):
            return getattr(module, name).weight
    return model.get_submodule(site.name.rpartition(".")[0]).output.dense.weight


@contextmanager
def scaled(model: nn.Module, site: AttentionSite, head: int, factor: float) -> Iterator[None]:
    """The head's columns of the output projection times a factor: what a gate is to be the same as."""
    weight = output_weight(model, site)
    before = weight.detach().clone()
    size = weight.shape[1] // site.num_heads
    with torch.no_grad():
        weight[:, head * size : (head + 1) * size] *= factor
        yield
        weight.copy_(before)


@torch.no_grad()
def losses_of(model: nn.Module, batches: list[Any], loss: Any) -> tuple[Tensor, Tensor]:
    """Of each row, with our attention (that of transformers' eager has its softmax in float32), and no gate."""
    with polyhead.observe(model, statistics=False):
        found = [as_loss(loss).prepare(model, batch)() for batch in batches]
    return torch.cat([x.totals for x in found]), torch.cat([x.weights for x in found]).double()


# ---- exactness


@pytest.mark.parametrize("name", CASES)
def test_ablation_is_the_loss_of_the_model_without_the_head(name):
    model, batches, loss = case(name)
    found = ablate(model, batches, loss)
    intact, weights = losses_of(model, batches, loss)
    assert found.intact_loss == pytest.approx(float(intact.sum() / weights.sum()), abs=1e-9)
    assert len(found) == {"llama": 8, "bert": 8, "t5": 24, "bart": 16, "ours": 16, "torch": 8}[name]
    assert {site.kind for site in found.sites} == ({"self", "cross"} if name in ("t5", "bart", "ours") else {"self"})
    expected = []
    for site, head in zip(found.sites, found.heads, strict=True):
        with scaled(model, site, head, 0.0):
            without, _ = losses_of(model, batches, loss)
        expected.append(float((without - intact).sum() / weights.sum()))
    torch.testing.assert_close(found["ablation"], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)
    assert found["ablation"].abs().max() > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_slopes_of_each_rows_loss(name):
    model, batches, loss = case(name)
    found = gradient_scores(model, batches, loss)
    step = 1e-6  # so small that hardly a ReLU changes sides
    slopes = []
    for site, head in zip(found.sites, found.heads, strict=True):
        two = []
        for factor in (1 + step, 1 - step):
            with scaled(model, site, head, factor):
                totals, weights = losses_of(model, batches, loss)
            two.append(totals)
        slopes.append((two[0] - two[1]) / (2 * step))
    by_row = torch.stack(slopes, 1)
    torch.testing.assert_close(found["gradient"], by_row.abs().sum(0) / weights.sum(), rtol=0, atol=1e-6)
    torch.testing.assert_close(found["taylor"], -by_row.sum(0) / weights.sum(), rtol=0, atol=1e-6)
    assert found["gradient"].max() > 1e-3
    assert (found["gradient"] > found["taylor"].abs() * (1 + 1e-9)).any()  # rows that pull in opposite directions


def test_the_slope_predicts_a_small_change_of_all_heads():
    model, batches, loss = case("llama")
    found = gradient_scores(model, batches, loss)
    share = 1e-4
    torch.manual_seed(3)
    less = share * torch.rand(len(found), dtype=torch.float64)
    with torch.no_grad(), polyhead.observe(model, statistics=False) as session:
        for site in dict.fromkeys(found.sites):
            rows = [index for index, place in enumerate(found.sites) if place == site]
            session.gates[site.name, site.kind] = 1 - less[rows]
        changed = [as_loss(loss).prepare(model, batch)() for batch in batches]
    mean = sum(x.totals.sum() for x in changed) / sum(x.weights.sum() for x in changed)
    predicted = float((less * found["taylor"]).sum())
    assert abs(predicted) > 1e-6
    assert float(mean) - found.intact_loss == pytest.approx(predicted, rel=1e-2)


# ---- what is known to matter


@pytest.mark.parametrize("seed", range(2))
def test_planted_heads_that_predict_matter_and_those_that_write_where_nothing_reads_do_not(seed):
    planted = planted_model(seed)
    block = 23
    tokens = repeated_tokens(seed, batch=4, block=block, vocab_size=Sizes().vocab_size)
    first = torch.zeros_like(tokens, dtype=torch.bool)
    first[:, : block + 2] = True  # nothing can predict the first block, nor where the second begins
    batches = [Examples({"tokens": tokens}, special=first)]
    found = ablate(planted.model, batches, "language").beside(gradient_scores(planted.model, batches, "language"))
    rows = {
        HeadId(site.layer, head): row for row, (site, head) in enumerate(zip(found.sites, found.heads, strict=True))
    }
    (previous,), (induction,) = (planted.having(role) for role in ("previous", "induction"))
    needed = [rows[previous], rows[induction]]
    writing = [rows[head] for role in ("copy", "anti-copy") for head in planted.having(role)]  # to the output
    quiet = [row for row in rows.values() if row not in (*needed, *writing)]
    assert len(quiet) == 16
    assert set(found["ablation"].argsort(descending=True)[:2].tolist()) == set(needed)
    least = float(found["ablation"][needed].min())
    assert found["ablation"][quiet].abs().max() < 1e-3 * least
    assert (found["ablation"][needed] > 10 * found["ablation_error"][needed]).all()
    assert found["gradient"][quiet].max() < 0.1 * found["gradient"][writing].min()
    # A head that does its work with a margin has next to no slope, however much hangs on it.
    assert found["gradient"][rows[previous]] < 1e-3 * found["ablation"][rows[previous]]


def test_heads_that_say_the_same_pull_the_same_way():
    """A layer with a head twice, and once with the opposite sign: their effects at every token are those of one."""
    torch.manual_seed(1)
    model = LanguageModel(61, 32, 4, 1, positions=lambda: Rotary(8)).double().eval()
    layer = model.blocks[0].attention
    with torch.no_grad():
        for weight in (layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight):
            weight[8:16] = weight[16:24] = weight[:8]
        layer.out_proj.weight[:, 8:16] = layer.out_proj.weight[:, :8]
        layer.out_proj.weight[:, 16:24] = -layer.out_proj.weight[:, :8]
    found = gradient_scores(model, [{"tokens": models.tokens()}], "language")
    overlap = found.overlap(found.sites[0])
    assert overlap[0, 1] == pytest.approx(1.0, abs=1e-9)
    assert overlap[0, 2] == pytest.approx(-1.0, abs=1e-9)
    assert abs(overlap[0, 3]) < 0.9


# ---- overlap of gradients


def test_overlap_is_the_cosine_of_the_effects_at_each_token():
    model, batches, loss = case("ours")
    batches = [*batches, {"tokens": models.tokens(2, 5), "source": torch.randn(2, 3, 12, dtype=torch.float64)}]
    found = gradient_scores(model, batches, loss)
    assert len(found.overlaps) == 4
    for index, block in enumerate(model.blocks):
        for kind, layer in (("self", block.attention), ("cross", block.cross_attention)):
            effects = []
            for batch in batches:
                rows, queries = batch["tokens"].shape
                layer.head_gate = torch.ones(rows, 4, queries, dtype=torch.float64, requires_grad=True)
                total = as_loss(loss).prepare(model, batch)().totals.sum()
                effects.append(torch.autograd.grad(total, layer.head_gate)[0].transpose(0, 1).flatten(1))
                layer.head_gate = None
            columns = F.normalize(torch.cat(effects, 1), dim=1)
            (site,) = [x for x in found.overlaps if (x.layer, x.kind) == (index, kind)]
            torch.testing.assert_close(found.overlap(site), columns @ columns.T, rtol=0, atol=1e-9)


def test_overlap_of_a_head_without_effect_is_unknown_and_parts_merge():
    effects = torch.randn(3, 4, 7)
    effects[:, 2] = 0.0
    whole = GradientOverlap.empty(4).update(effects)
    parts = [GradientOverlap.empty(4).update(effects[row : row + 1]) for row in range(3)]
    torch.testing.assert_close(parts[2].merge(parts[0]).merge(parts[1]).products, whole.products)
    assert whole.compute()[2].isnan().all()
    assert whole.compute()[0, 0] == pytest.approx(1.0)
    assert torch.equal(GradientOverlap(**whole.state()).products, whole.products)
    with pytest.raises(ShapeError, match=r"\[batch, 4 heads, tokens\], got shape \[3, 5, 7\]"):
        whole.update(torch.ones(3, 5, 7))
    with pytest.raises(ShapeError, match="same number of heads, got 4 and 5"):
        whole.merge(GradientOverlap.empty(5))


# ---- losses


def test_the_loss_of_language_is_that_of_transformers():
    model, ids = llama(), models.tokens()
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    special = torch.zeros_like(ids, dtype=torch.bool)
    special[:, 4] = True
    labels = torch.where(mask.bool() & ~special, ids, -100)
    inputs = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        expected = float(model(**inputs, labels=labels).loss)
    found = ablate(model, [Examples(inputs, special=special)], "language", heads=[0], layers=[1])
    assert found.intact_loss == pytest.approx(expected, abs=1e-6)
    assert len(found) == 1
    assert found.weights.tolist() == [21.0, 13.0, 21.0]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side):
    model, ids = llama(), models.tokens()
    lengths = [23, 11, 17]
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, slice(23 - length, None) if side == "left" else slice(length)] = 1
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    padded = [Examples({"input_ids": ids, "attention_mask": mask, "position_ids": positions}, torch.tensor([4, 2, 4]))]
    alone = [
        Examples({"input_ids": ids[row : row + 1, mask[row].bool()]}, torch.tensor([document]))
        for row, document in enumerate([4, 2, 4])
    ]
    for measure in (ablate, gradient_scores):
        one, other = measure(model, padded, "language"), measure(model, alone, "language")
        assert one.documents.tolist() == other.documents.tolist() == [2, 4]
        for name in one.columns:
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-9, msg=name)
        for site in one.overlaps:
            torch.testing.assert_close(one.overlap(site), other.overlap(site), rtol=0, atol=1e-9)


def test_hidden_tokens_are_the_same_in_every_batch_and_never_special():
    ids = models.tokens(5, 41)
    special = torch.zeros_like(ids, dtype=torch.bool)
    special[:, [0, 40]] = True
    loss = Masked(MASK)
    whole = loss.hidden(Examples({"input_ids": ids}, special=special))
    assert whole.sum(1).tolist() == [6] * 5  # 15% of 39
    assert not whole[special].any()
    padded, mask = (F.pad(x, (2, 0)) for x in (ids, torch.ones_like(ids)))
    again = loss.hidden(Examples({"input_ids": padded, "attention_mask": mask}, special=F.pad(special, (2, 0))))
    assert torch.equal(again[:, 2:], whole)
    alone = loss.hidden(Examples({"input_ids": ids[3:4]}, special=special[3:4]))
    assert torch.equal(alone, whole[3:4])
    assert not torch.equal(Masked(MASK, seed=1).hidden(Examples({"input_ids": ids}, special=special)), whole)
    assert (whole.sum(0) < 5).all()
    nothing = Examples({"input_ids": ids}, special=torch.ones_like(special))
    assert not loss.hidden(nothing).any()


def test_the_loss_of_masked_tokens_is_that_of_transformers():
    model, batches, loss = case("bert")
    hidden = loss.hidden(Examples.of(batches[0]))
    ids = batches[0]["input_ids"]
    with torch.no_grad():
        expected = model(input_ids=ids.masked_fill(hidden, MASK), labels=torch.where(hidden, ids, -100)).loss
    found = gradient_scores(model, batches, loss)
    assert found.intact_loss == pytest.approx(float(expected), abs=1e-6)
    assert found.weights.tolist() == [3.0] * 3


@pytest.mark.parametrize("kind", ["rows", "tokens", "several"])
def test_the_loss_of_classification_is_that_of_transformers(kind):
    maker = "AutoModelForTokenClassification" if kind == "tokens" else "AutoModelForSequenceClassification"
    more = {"problem_type": "multi_label_classification"} if kind == "several" else {}
    model = with_head("bert", maker, num_labels=5, **more)
    ids = models.tokens()
    labels = {
        "rows": torch.tensor([3, 0, 4]),
        "tokens": torch.where(ids % 3 == 0, -100, ids % 5),
        "several": (torch.arange(15).view(3, 5) % 2).double(),
    }[kind]
    with torch.no_grad():
        expected = float(model(input_ids=ids, labels=labels).loss)
    found = ablate(model, [{"input_ids": ids, "labels": labels}], "classification", layers=[0])
    assert found.intact_loss == pytest.approx(expected, abs=1e-6)
    assert found.weights.sum() == (int((labels >= 0).sum()) if kind == "tokens" else 3)
    assert gradient_scores(model, [{"input_ids": ids, "labels": labels}], "classification")["gradient"].max() > 1e-3


def test_the_representation_is_compared_with_that_of_the_intact_model():
    model, ids = models.build(FAMILIES["bert"]), models.tokens()
    mask = torch.ones_like(ids)
    mask[2, 9:] = 0

    def pooled() -> Tensor:
        with torch.no_grad(), polyhead.observe(model, statistics=False):
            states = model(input_ids=ids, attention_mask=mask).last_hidden_state
        return torch.stack([states[row, : int(mask[row].sum())].mean(0) for row in range(3)])

    found = ablate(model, [{"input_ids": ids, "attention_mask": mask}], "representation")
    assert found.intact_loss == 0
    intact = pooled()
    for index, (site, head) in enumerate(zip(found.sites, found.heads, strict=True)):
        with scaled(model, site, head, 0.0):
            expected = 1 - F.cosine_similarity(pooled(), intact)
        assert float(found["ablation"][index]) == pytest.approx(float(expected.mean()), abs=1e-10)
    assert (found["ablation"] > 0).all()
    classifier = with_head("bert", "AutoModelForSequenceClassification")
    classifier.base_model.load_state_dict(model.state_dict(), strict=False)  # without the pooler
    same = ablate(classifier, [{"input_ids": ids, "attention_mask": mask}], "representation")
    torch.testing.assert_close(same["ablation"], found["ablation"], rtol=1e-9, atol=1e-12)
    with pytest.raises(OptionError, match=r"loss with a gradient, got 'representation'.*use ablate"):
        gradient_scores(model, [{"input_ids": ids}], "representation")


def test_a_function_gives_rows_or_one_number():
    model, ids = llama(), models.tokens()
    batches = [ids, models.tokens(3, 11, seed=7)]

    def rows(model: nn.Module, ids: Tensor) -> Tensor:
        return model(input_ids=ids).logits.square().mean((1, 2))

    def number(model: nn.Module, ids: Tensor) -> Tensor:
        return rows(model, ids).mean()

    def weighted(model: nn.Module, ids: Tensor) -> RowLosses:
        return RowLosses(2.0 * rows(model, ids), torch.full((3,), 2.0))

    one, other, third = (ablate(model, batches, loss) for loss in (rows, number, weighted))
    assert (one.loss, len(one.documents), len(other.documents)) == ("rows", 6, 2)
    torch.testing.assert_close(other["ablation"], one["ablation"])
    torch.testing.assert_close(third["ablation"], one["ablation"])
    torch.testing.assert_close(third["ablation_error"], one["ablation_error"])
    slopes = [gradient_scores(model, batches, loss) for loss in (rows, number)]
    torch.testing.assert_close(slopes[0]["taylor"], slopes[1]["taylor"])
    assert (slopes[0]["gradient"] >= slopes[1]["gradient"] - 1e-12).all()  # of the batch's mean, where rows cancel
    plain = [gradient_scores(model, batches, loss, overlap=False) for loss in (rows, number)]
    for with_tokens, without_tokens in zip(slopes, plain, strict=True):
        assert not without_tokens.overlaps
        torch.testing.assert_close(without_tokens["gradient"], with_tokens["gradient"])


def test_a_model_may_be_called_twice_in_one_loss():
    model = llama()

    def pairs(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        one, other = (model(input_ids=ids).logits.mean(1) for ids in batch)
        return 1 - F.cosine_similarity(one, other)

    batches = [(models.tokens(), models.tokens(length=11, seed=4))]
    with pytest.raises(OptionError, match=r"queries \(3, 11\) and \(3, 23\); pass overlap=False"):
        gradient_scores(model, batches, pairs)
    found = gradient_scores(model, batches, pairs, overlap=False)
    site, head, step, two = found.sites[0], found.heads[0], 1e-4, []
    for factor in (1 - step, 1 + step):
        with scaled(model, site, head, factor):
            two.append(losses_of(model, batches, pairs)[0])
    assert float(found["taylor"][0]) == pytest.approx(float((two[0] - two[1]).mean() / (2 * step)), abs=1e-7)


# ---- documents, errors, merging


def test_errors_are_the_jackknife_over_documents():
    model, ids = llama(), models.tokens(5)
    found = ablate(model, [{"input_ids": ids}], "language", heads=[HeadId(0, 1)])
    values = found.totals["ablation"][:, 0] / 22
    assert float(found["ablation_error"][0]) == pytest.approx(float(values.std() / 5**0.5), rel=1e-9)

    # Of unequal documents: the ratio without each in turn.
    documents = torch.tensor([0, 0, 1, 2, 2])
    found = ablate(model, [Examples({"input_ids": ids}, documents)], "language", heads=[HeadId(0, 1)])
    totals, weights = found.totals["ablation"][:, 0], found.weights
    assert weights.tolist() == [44.0, 22.0, 44.0]
    left = torch.stack([(totals.sum() - totals[i]) / (weights.sum() - weights[i]) for i in range(3)])
    expected = ((left - left.mean()).square().sum() * 2 / 3).sqrt()
    assert float(found["ablation_error"][0]) == pytest.approx(float(expected), rel=1e-9)
    assert ablate(model, [{"input_ids": ids[:1]}], "language", heads=[0])["ablation_error"].isnan().all()


@functools.cache
def three_runs() -> tuple[Importance, ...]:
    model, documents = llama(), [torch.tensor([7, 3]), torch.tensor([3, 5]), torch.tensor([9, 7])]
    batches = [Examples({"input_ids": models.tokens(2, 11, seed=i)}, documents[i]) for i in range(3)]
    runs = [(ablate(model, x, "language"), gradient_scores(model, x, "language")) for x in ([b] for b in batches)]
    whole = ablate(model, batches, "language").beside(gradient_scores(model, batches, "language"))
    return (*(one.beside(other) for one, other in runs), whole)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_runs_merged_in_any_order_are_one_run(order):
    *parts, whole = three_runs()
    one, two, three = (parts[i] for i in order)
    found = one.merge(two.merge(three))
    assert found.documents.tolist() == whole.documents.tolist() == [3, 5, 7, 9]
    assert found.columns == ("ablation", "ablation_error", "gradient", "gradient_error", "taylor", "taylor_error")
    for name in found.columns:
        torch.testing.assert_close(found[name], whole[name], rtol=1e-12, atol=1e-12, msg=name)
    for site in whole.overlaps:
        torch.testing.assert_close(found.overlap(site), whole.overlap(site), rtol=1e-12, atol=1e-12)
    assert found.intact_loss == pytest.approx(whole.intact_loss, abs=1e-12)


def test_documents_without_numbers_stay_apart():
    model = llama()
    one, other = (ablate(model, [{"input_ids": models.tokens(2, 11, seed=i)}], "language") for i in range(2))
    found = one.merge(other)
    assert found.weights.tolist() == [10.0] * 4
    torch.testing.assert_close(found["ablation"], (one["ablation"] + other["ablation"]) / 2)


def test_the_table_reads_well():
    *_, whole = three_runs()
    (row, *rest) = whole.rows()
    assert len(rest) == 7
    assert (row["site"], row["kind"], row["layer"], row["head"]) == ("model.layers.0.self_attn", "self", 0, 0)
    assert row["ablation_error"] == float(whole["ablation_error"][0])
    assert (
        repr(whole)
        == "Importance(8 heads for 'language' over 60 predictions in 4 documents: ablation, gradient, taylor)"
    )
    with pytest.raises(OptionError, match=r"one of ablation, ablation_error, .* got 'entropy'"):
        whole["entropy"]
    with pytest.raises(OptionError, match="computed for 2 sites, got 'elsewhere'"):
        whole.overlap(AttentionSite("elsewhere", "self", "elsewhere", 0, 4))


def test_other_runs_are_not_joined():
    *_, whole = three_runs()
    model, batches = llama(), [Examples({"input_ids": models.tokens(2, 11)}, torch.tensor([1, 2]))]
    part = ablate(model, batches, "language")
    with pytest.raises(OptionError, match=r"the same measures, got ablation, gradient, taylor with 2 overlaps and"):
        whole.merge(part)
    with pytest.raises(
        OptionError, match=r"different measures of the same rows, got .* 60 predictions in 4 documents and"
    ):
        whole.beside(part)
    with pytest.raises(OptionError, match="the same heads, got 8 and 4 of them"):
        part.merge(ablate(model, batches, "language", layers=[1]))
    with pytest.raises(OptionError, match="the same way to number documents, got True and False"):
        part.merge(ablate(model, [batches[0].inputs], "language"))
    with pytest.raises(OptionError, match="the same loss, got 'language' and 'mean'"):
        part.merge(ablate(model, batches, as_loss(named_mean)))


def named_mean(model: nn.Module, batch: Examples) -> Tensor:
    return model(**batch.inputs).logits.mean((1, 2))


named_mean.__name__ = "mean"


# ---- asking for less, and leaving no trace


def test_some_layers_and_some_heads():
    model, batches, loss = case("llama")
    ablated, sloped = ablate(model, batches, loss), gradient_scores(model, batches, loss)
    for options, rows in (
        ({"layers": [1]}, [4, 5, 6, 7]),
        ({"heads": [0, 3]}, [0, 3, 4, 7]),
        ({"heads": iter([HeadId(0, 2), HeadId(1, 1)])}, [2, 5]),
        ({"heads": 2, "layers": iter(["model.layers.1.self_attn"])}, [6]),
    ):
        options = {name: x if isinstance(x, int) else list(x) for name, x in options.items()}
        for measure, whole in ((ablate, ablated), (gradient_scores, sloped)):
            given = {name: x if isinstance(x, int) else iter(x) for name, x in options.items()}
            found = measure(model, iter(batches), loss, **given)
            for name in found.totals:
                torch.testing.assert_close(found[name], whole[name][rows], msg=f"{options} {name}")


def test_progress_is_told():
    model, batches, loss = case("llama")
    told: list[tuple[int, int | None]] = []
    ablate(model, batches, loss, layers=[0], progress=lambda *x: told.append(x))
    assert told == [(i, 8) for i in range(1, 9)]
    told.clear()
    ablate(model, iter(batches), loss, heads=[HeadId(0, 0)], progress=lambda *x: told.append(x))
    assert told == [(1, None), (2, None)]
    told.clear()
    gradient_scores(model, batches, loss, progress=lambda *x: told.append(x))
    assert told == [(1, 2), (2, 2)]


def test_gradient_scores_run_the_model_once_per_batch():
    model, batches, loss = case("llama")
    calls = []
    with model.register_forward_hook(lambda *_: calls.append(1)):
        gradient_scores(model, [batches[0], *batches], loss)
    assert len(calls) == 3


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("measure", [ablate, gradient_scores])
def test_the_model_is_as_it_was(measure, fails):
    model = Reader().train()
    model.encoder.layers[0].eval()
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 3 > 0)
        parameter.grad = torch.full_like(parameter, float(number)) if number % 2 else None
    before = {name: x.clone() for name, x in model.state_dict().items()}
    modes, random = [x.training for x in model.modules()], torch.get_rng_state()
    hooks = [(len(x._forward_hooks), len(x._forward_pre_hooks)) for x in model.modules()]
    seen = []

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        seen.append(any(x.training for x in model.modules()))
        if fails and len(seen) == 2:
            raise ZeroDivisionError
        return model(ids)[:, 0]

    if fails:
        with pytest.raises(ZeroDivisionError):
            measure(model, [models.tokens()] * 2, loss)
    else:
        assert len(measure(model, [models.tokens()], loss)) == 8
    assert not any(seen)
    assert [x.training for x in model.modules()] == modes
    assert [(len(x._forward_hooks), len(x._forward_pre_hooks)) for x in model.modules()] == hooks
    assert torch.equal(torch.get_rng_state(), random)
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name])
    for number, parameter in enumerate(model.parameters()):
        assert parameter.requires_grad == (number % 3 > 0)
        assert (parameter.grad is None) == (number % 2 == 0)
        assert parameter.grad is None or bool(parameter.grad.eq(number).all())


def test_frozen_weights_and_no_grad_around_change_nothing():
    model, batches, loss = case("llama")
    expected = gradient_scores(model, batches, loss)
    model.requires_grad_(False)
    with torch.no_grad():
        found = gradient_scores(model, batches, loss)
    torch.testing.assert_close(found["gradient"], expected["gradient"])


def stored_by(model: nn.Module, batches: list[Any], loss: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors that autograd stores, weights excluded."""
    weights, shapes = {x.untyped_storage().data_ptr() for x in model.parameters()}, []

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            shapes.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        gradient_scores(model, batches, loss)
    return shapes


def test_no_activation_is_stored_for_the_gradients_of_parameters():
    model, batches, loss = case("llama")
    stored = stored_by(model, batches[:1], loss)
    assert all(x.requires_grad for x in model.parameters())
    assert stored == stored_by(model.requires_grad_(False), batches[:1], loss)


def test_the_loss_of_language_copies_no_logits(monkeypatch):
    model, batches, _ = case("llama")
    addresses = []
    cross_entropy = F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda x, *rest, **options: addresses.append(x.data_ptr()) or
                        cross_entropy(x, *rest, **options))  # fmt: skip
    with model.register_forward_hook(lambda *call: addresses.append(call[-1].logits.data_ptr())):
        as_loss("language").prepare(model, batches[0])()
    assert len(addresses) == 2
    assert len(set(addresses)) == 1


def test_a_head_that_writes_nothing_has_exactly_no_importance():
    model, batches, loss = case("llama")
    model = model.float()
    site = ablate(model, batches, loss, layers=[0]).sites[0]
    with scaled(model, site, 2, 0.0):
        assert ablate(model, batches, loss, layers=[0])["ablation"][2] == 0
        assert gradient_scores(model, batches, loss, layers=[0])["gradient"][2] == 0


def test_a_batch_of_a_source_of_texts_is_understood():
    class Batch:
        ids = models.tokens()
        mask = torch.ones_like(ids)
        special = torch.zeros_like(ids, dtype=torch.bool)
        documents = torch.tensor([2, 2, 6])

    found = ablate(llama(), [Batch()], "language", heads=[0])
    assert found.documents.tolist() == [2, 6]
    assert found.weights.tolist() == [44.0, 22.0]


# ---- refusing


def test_what_cannot_be_measured_is_refused():
    model, ids = llama(), models.tokens()
    good = [{"input_ids": ids}]
    encoder = models.build(FAMILIES["bert"])
    without_body = llama()
    without_body.base_model_prefix = "absent"

    def raising(words: str, batches: Any, loss: Any, model: nn.Module = model, measure: Any = ablate, **options: Any):
        with pytest.raises((OptionError, ShapeError), match=words):
            measure(model, batches, loss, **options)

    raising("one of language, masked, classification, representation or a function .* got 'accuracy'", good, "accuracy")
    raising("got 3", good, 3)
    raising(r"with a mask token, got none; pass Masked\(mask_token=", good, "masked")
    raising("at least one batch, got none", [], "language")
    raising("a batch must be a mapping .* got list", [[1, 2]], "language")
    raising("in one of decoder_input_ids, input_ids, tokens, got none of them", [{"x": ids}], "language")
    raising(r"tokens\], .*got shape \[23\]|got shape \[23\]", [{"input_ids": ids[0]}], "language")
    raising(r"shape of the token ids, \[3, 23\], got \[3, 5\]",
            [{"input_ids": ids, "attention_mask": torch.ones(3, 5)}], "language")  # fmt: skip
    raising(r"special must be \[rows, tokens\], \[3, 23\], got \[3, 2\]",
            [Examples({"input_ids": ids}, special=torch.ones(3, 2))], "language")  # fmt: skip
    raising("causal model, got BertModel, which cannot generate", good, "language", encoder)
    raising(
        "needs logits, got BaseModelOutput.* from BertModel; load the model with its task head",
        good,
        Masked(3),
        encoder,
    )
    raising(
        "needs the last hidden states .* from LlamaForCausalLM; use the model without its task head",
        good,
        "representation",
        without_body,
    )
    raising(
        "needs labels, got a batch without",
        good,
        "classification",
        with_head("bert", "AutoModelForSequenceClassification"),
    )
    raising(r"classes of shape \[3\] or .* got torch.int64 of shape \[2\]",
            [{"input_ids": ids, "labels": torch.tensor([1, 0])}], "classification",
            with_head("bert", "AutoModelForSequenceClassification"))  # fmt: skip
    raising(r"documents must be \[3\], one number per row, got shape \[2\]",
            [Examples({"input_ids": ids}, torch.tensor([1, 2]))], "language")  # fmt: skip
    raising("are numbered 0 to 1 in each stack, got 5", good, "language", layers=[5])
    raising(r"\[rows\] or a scalar, got torch.float64 of shape \[3, 23, 61\] from '<lambda>'",
            good, lambda model, batch: model(**batch).logits)  # fmt: skip
    raising("a loss must be a floating-point tensor .* got 1.0", good, lambda model, batch: 1.0)
    raising("must be finite, got nan for row 1", good,
            lambda model, batch: model(**batch).logits.mean((1, 2)) * torch.tensor([1, torch.nan, 1]))  # fmt: skip
    raising("differentiable loss, got one without a gradient from '<lambda>'; does it run", good,
            lambda model, batch: model(**batch).logits.mean((1, 2)).detach(), measure=gradient_scores)  # fmt: skip
    raising("a loss of 2 rows needs a model that computes 2 rows, got 'model.layers.0.self_attn', .* with 3", good,
            lambda model, batch: model(**batch).logits.mean((1, 2))[:2], measure=gradient_scores)  # fmt: skip
    weights = iter(range(1, 99))

    def changing(model: nn.Module, batch: Any) -> RowLosses:
        return RowLosses(model(**batch).logits.mean((1, 2)), torch.full((3,), next(weights)))

    raising("same row weights for every call on a batch", good, changing)
    with pytest.raises(OptionError, match="share must be over 0 and at most 1, got 0"):
        Masked(3, share=0)
    with pytest.raises(OptionError, match=r"id of the tokenizer's mask token, .* got None"):
        Masked(None)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_says_what_the_cpu_says(dtype):
    model, batches, loss = case("llama")
    expected = ablate(model, batches, loss).beside(gradient_scores(model, batches, loss))
    model = model.to("cuda", dtype)
    found = ablate(model, batches, loss).beside(gradient_scores(model, batches, loss))
    bound = {torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    for name in ("ablation", "gradient", "taylor"):
        size = float(expected[name].abs().max())
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=bound * size, msg=name)
