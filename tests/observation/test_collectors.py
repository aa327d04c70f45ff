"""Collectors agree with materialised weights, also split and merged, saved and resumed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from safetensors.torch import load_file
from safetensors.torch import save as serialise
from torch import nn

import polyhead
from polyhead.errors import OptionError
from polyhead.observation import (
    AttentionDistances,
    AttentionMaps,
    BatchMetadata,
    Contributions,
    Sums,
    load,
    save,
    saving,
)
from polyhead.observation.collectors import CallRecorder
from polyhead.observation.contributions import SiteContributions
from polyhead.observation.top_keys import TopKeys
from polyhead.ops.profile.request import offset_bins
from tests.integrations.huggingface import models

FAMILIES = {family.name: family for family in models.FAMILIES}
GATHERERS = (
    AttentionMaps(24, resolution=4),
    Contributions(),
    AttentionDistances(),
    TopKeys(torch.tensor([41, 7, 12, 5])),
)


def batches(name: str, count: int = 4, *, padded: bool = True):
    generator = torch.Generator().manual_seed(3)
    found = []
    for index in range(count):
        length = 9 + 5 * index % 13
        ids = torch.randint(5, 60, (2, length), generator=generator)
        mask = torch.ones_like(ids)
        if padded:
            mask[0, :3] = 0 if name == "llama" else 1
            mask[1, -2:] = 1 if name == "llama" else 0
        found.append({"input_ids": ids, "attention_mask": mask})
    return found


def collected(model, inputs, **options):
    session = polyhead.observe(model, collect=GATHERERS, **options)
    with torch.no_grad(), session:
        for one in inputs:
            session.metadata = BatchMetadata(tokens=one["input_ids"])
            model(**one)
    return session


def eager_weights(model, one):
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(**one, output_attentions=True).attentions


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_maps_are_sums_of_the_weights(name):
    model = models.build(FAMILIES[name], dtype=torch.float32)  # in float64 eager gives NaN for padding on the left
    inputs = batches(name)
    session = collected(model, inputs)
    maker = GATHERERS[0]
    expected = None
    for one in inputs:
        real = one["attention_mask"].bool()
        for layer, weights in enumerate(eager_weights(model, one)):
            weights = torch.where(real[:, None, :, None], weights.double(), 0.0)
            n = weights.shape[-1]
            place = torch.arange(n) // maker.block
            grid = torch.zeros(2, weights.shape[1], maker.side, maker.side, dtype=torch.float64)
            for row in range(n):
                for column in range(n):
                    last = maker.side - 1
                    grid[:, :, min(int(place[row]), last), min(int(place[column]), last)] += weights[:, :, row, column]
            # Positions count the real tokens; here the padding of a row is on one side, so differences are the same.
            bins, offsets = offset_bins(), torch.zeros(weights.shape[1], len(offset_bins()), dtype=torch.float64)
            for row in range(n):
                for column in range(n):
                    place_of = int(((bins[:, 0] <= column - row) & (column - row <= bins[:, 1])).nonzero())
                    offsets[:, place_of] += weights[:, :, row, column].sum(0)
            rows = torch.zeros(maker.side, dtype=torch.float64)
            rows.index_add_(0, place.clamp_max(maker.side - 1), real.sum(0).double())
            expected = expected or {}
            sums = expected.setdefault(layer, [0, 0, 0])
            expected[layer] = [sums[0] + grid.sum(0), sums[1] + offsets, sums[2] + rows]
    assert expected is not None
    for site, values in session.observations.collected.items():
        found = values["maps"]
        grid, offsets, rows = expected[site.layer]
        torch.testing.assert_close(found.map, grid, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.offsets, offsets, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.rows, rows, rtol=0, atol=0)
        torch.testing.assert_close(found.received, grid.sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_distances_are_those_of_the_weights(name):
    model = models.build(FAMILIES[name], dtype=torch.float32)
    inputs = batches(name, 2)
    session = collected(model, inputs)
    sums, rows = {}, 0
    for one in inputs:
        real = one["attention_mask"].bool()
        rows += int(real.sum())
        for layer, weights in enumerate(eager_weights(model, one)):
            p = weights.double().transpose(1, 2)[real]  # [rows, heads, keys]
            mean = (p[:, :, None] + p[:, None]) / 2
            entropy = torch.special.entr(mean).sum(-1) - (
                (torch.special.entr(p).sum(-1)[:, :, None] + torch.special.entr(p).sum(-1)[:, None]) / 2
            )
            sums[layer] = sums.get(layer, 0) + entropy.clamp_min(0).sqrt().sum(0)
    for site, values in session.observations.collected.items():
        found = values["distances"].compute()
        torch.testing.assert_close(found, sums[site.layer] / rows, rtol=1e-3, atol=1e-4)
        assert found.max() <= 0.6931**0.5


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_top_keys_are_sums_of_the_weights_and_padding_is_none_of_them(name):
    model = models.build(FAMILIES[name], dtype=torch.float32)
    inputs = batches(name, 3)
    for one in inputs:
        one["input_ids"] = torch.where(one["attention_mask"] > 0, one["input_ids"] % 9, 5)  # padding looks like a token
    every = TopKeys(torch.tensor([5, 3, 0, 8, 7]))
    session = polyhead.observe(model, statistics=False, collect=[every])
    with torch.no_grad(), session:
        for one in inputs:
            session.metadata = BatchMetadata(tokens=one["input_ids"])
            model(**one)
    sums, rows = {}, sum(int(one["attention_mask"].sum()) for one in inputs)
    for one in inputs:
        real = one["attention_mask"].bool()
        for layer, weights in enumerate(eager_weights(model, one)):
            received = (weights.double() * real[:, None, :, None]).sum(2)  # [batch, heads, keys]
            table = sums.setdefault(layer, torch.zeros(weights.shape[1], 9, dtype=torch.float64))
            for token in range(9):
                table[:, token] += (received * (one["input_ids"] == token)[:, None]).sum((0, 2))
    for site, values in session.observations.collected.items():
        exact = sums[site.layer] / rows
        ids, shares = values["top_keys"].compute(3)
        told = exact[:, every.tokens]
        torch.testing.assert_close(shares, told.sort(descending=True).values[:, :3], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(exact.gather(1, ids), shares, rtol=1e-5, atol=1e-6)
        others = (values["top_keys"].received[:, -1] / values["top_keys"].rows).cpu()
        torch.testing.assert_close(others, exact[:, [1, 2, 4, 6]].sum(1), rtol=1e-5, atol=1e-6)


def test_collectors_on_a_cpu_receive_the_keys_stored_by_channel():
    layer, x, calls = polyhead.MultiHeadAttention(32, 4, num_kv_heads=2), torch.randn(3, 7, 32), []
    recorder = CallRecorder(lambda site, attended, non_padding, metadata: calls.append(attended.key))
    with torch.no_grad(), polyhead.observe(layer, collect=[recorder]):
        layer(x)
    (key,) = calls
    assert key.mT.is_contiguous()
    torch.testing.assert_close(key, layer.k_proj(x).unflatten(-1, (2, 8)).transpose(1, 2))


def test_top_keys_without_token_metadata_are_rejected():
    layer = polyhead.MultiHeadAttention(16, 2)
    session = polyhead.observe(layer, collect=[TopKeys(torch.tensor([3]))])
    with torch.no_grad(), session, pytest.raises(OptionError, match=r"the ids of the 7 tokens of each text.* got None"):
        layer(torch.randn(1, 7, 16))
    with pytest.raises(OptionError, match="distinct ids, got duplicates"):
        TopKeys(torch.tensor([3, 3]))


def test_positions_beyond_the_map_fall_into_the_last_block():
    layer = polyhead.MultiHeadAttention(16, 2)
    with torch.no_grad(), polyhead.observe(layer, collect=[AttentionMaps(8, resolution=2)]) as session:
        layer(torch.randn(3, 21, 16))
    (values,) = session.observations.collected.values()
    assert values["maps"].rows.tolist() == [12, 51]
    torch.testing.assert_close(values["maps"].map.sum((1, 2)), torch.full((2,), 63.0, dtype=torch.float64))


@pytest.mark.parametrize("numbers", [range(7), [11 * piece for piece in range(7)]])  # documents, and contexts of one
def test_contributions_of_the_two_halves_of_the_documents_are_kept_apart(numbers):
    layer, x = polyhead.MultiHeadAttention(16, 4), torch.randn(7, 5, 16)

    def seen(texts: list[int], documents: torch.Tensor | None) -> SiteContributions:
        with torch.no_grad(), polyhead.observe(layer, collect=[Contributions()]) as session:
            session.metadata = BatchMetadata(documents=documents)
            layer(x[texts])
        (values,) = session.observations.collected.values()
        return values["contributions"]

    documents = torch.tensor(list(numbers))
    state = seen(list(range(7)), documents)
    halves = [seen(texts, None).moments for texts in ([0, 2, 4, 6], [1, 3, 5])]
    for half, expected in zip(state.halves, halves, strict=True):
        torch.testing.assert_close(half.state(), expected.state())
    torch.testing.assert_close(state.moments.state(), seen(list(range(7)), None).moments.state())
    merged = seen([0, 1], documents[:2]).merge(seen([2, 3, 4, 5, 6], documents[2:]))
    torch.testing.assert_close(merged.state(), state.state())
    again = SiteContributions().with_state(state.state())
    assert [half.state().keys() for half in again.halves] == [half.state().keys() for half in state.halves]
    # An earlier version saved the moments of all tokens only; other shapes of metadata leave the halves unknown, too.
    earlier = SiteContributions().with_state(state.moments.state())
    assert earlier.halves[1] is None
    torch.testing.assert_close(earlier.moments.state(), state.moments.state())
    assert seen(list(range(7)), documents[:1]).halves[1] is None


@pytest.mark.parametrize("kind", ["ours", "torch", "llama", "bert"])
def test_contributions_are_moments_of_the_heads_outputs(kind):
    torch.manual_seed(0)
    if kind in ("llama", "bert"):
        model = models.build(FAMILIES[kind])
        inputs = batches(kind, 3)
        session = collected(model, inputs)
        sites = session.observations.collected
        total = sum(int(one["attention_mask"].sum()) for one in inputs)
        assert all(int(values["contributions"].moments.count) == total for values in sites.values())
        return
    x = torch.randn(2, 7, 16)
    if kind == "ours":
        layer = polyhead.MultiHeadAttention(16, 4)
        run = layer
    else:
        layer = nn.MultiheadAttention(16, 4, batch_first=True).eval()
        run = lambda x: layer(x, x, x)  # noqa: E731
    with torch.no_grad(), polyhead.observe(layer, statistics=False, collect=[Contributions()]) as session:
        run(x)
        ours = layer if kind == "ours" else polyhead.MultiHeadAttention.from_torch(layer)
        heads = []
        for head in range(4):
            gate = torch.zeros(4)
            gate[head] = 1.0
            heads.append(ours(x, head_gate=gate).output - ours.out_proj.bias)
    ((_, values),) = list(session.observations.collected.items())[:1]
    moments = values["contributions"].moments
    contributions = torch.stack(heads, 2).flatten(0, 1).double()  # [tokens, heads, width]
    centred = contributions - contributions.mean(0)
    weights = torch.stack([head.output.detach() for head in ours.heads]).double()
    found = torch.einsum("iaf,iajb,jbg->ijfg", weights, moments.scatter / _calls(session), weights)
    exact = torch.einsum("tif,tjg->ijfg", centred, centred)
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


def _calls(session):
    """The gated calls of a layer of ours are watched as well, and say the same each time."""
    return max(session.observations.calls.values())


@pytest.mark.parametrize("name", ["llama", "bert", "bart"])
def test_any_split_merged_in_any_order_equals_one_pass(name):
    model = models.build(FAMILIES[name])
    inputs = batches(name)
    whole = collected(model, inputs).observations
    parts = [collected(model, [one]).observations for one in inputs]
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        merged = parts[order[0]]
        for index in order[1:]:
            merged = merged.merge(parts[index])
        assert merged.calls == whole.calls
        for site, values in whole.collected.items():
            for collector, value in values.items():
                state, other = value.state(), merged.collected[site][collector].state()
                assert state.keys() == other.keys()
                for key in state:
                    torch.testing.assert_close(other[key], state[key], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["llama", "bart"])
@pytest.mark.parametrize("every", [1, 2])
def test_a_resumed_session_is_bitwise_identical(tmp_path, name, every):
    model = models.build(FAMILIES[name])
    inputs = batches(name)
    whole = collected(model, inputs, every=every).observations
    save(tmp_path / "seen.safetensors", collected(model, inputs[:2], every=every).observations)
    session = polyhead.observe(model, collect=GATHERERS, every=every)
    session.resume_from(load(tmp_path / "seen.safetensors", GATHERERS))
    with torch.no_grad(), session:
        for one in inputs[2:]:
            session.metadata = BatchMetadata(tokens=one["input_ids"])
            model(**one)
    assert_bit_equal(session.observations, whole)
    save(tmp_path / "all.safetensors", whole)
    assert_bit_equal(load(tmp_path / "all.safetensors", GATHERERS), whole)


def assert_bit_equal(one, other):
    assert one.wanted == other.wanted
    assert one.calls == other.calls
    assert [x.site for x in one.sites] == [x.site for x in other.sites]
    for mine, theirs in zip(one.sites, other.sites, strict=True):
        for key, tensor in mine.state().items():
            assert torch.equal(tensor, theirs.state()[key]), key
    assert one.collected.keys() == other.collected.keys()
    for site, values in one.collected.items():
        for name, value in values.items():
            for key, tensor in value.state().items():
                assert torch.equal(tensor, other.collected[site][name].state()[key]), (site, name, key)


def test_other_files_are_rejected(tmp_path):
    path = tmp_path / "other.safetensors"
    path.write_bytes(b"not tensors")
    with pytest.raises(OptionError, match="must be a safetensors file"):
        load(path)
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(OptionError, match="must be a file saved by polyhead"):
        load(path)
    layer = polyhead.MultiHeadAttention(16, 2)
    with torch.no_grad(), polyhead.observe(layer, collect=GATHERERS) as session:
        session.metadata = BatchMetadata(tokens=torch.zeros(1, 4, dtype=torch.int64))
        layer(torch.randn(1, 4, 16))
    save(path, session.observations)
    with pytest.raises(OptionError, match="contains states of the collector 'maps', got collectors none"):
        load(path)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    layer = polyhead.MultiHeadAttention(16, 2)
    with torch.no_grad(), polyhead.observe(layer) as session:
        layer(torch.randn(1, 4, 16))
    path = tmp_path / "seen.safetensors"
    save(path, session.observations)
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(polyhead.errors.OptionError, match="disk full"):
        save(path, session.observations)
    assert path.read_bytes() == before
    assert [x.name for x in tmp_path.iterdir()] == ["seen.safetensors"]


def test_resuming_needs_the_same_model_and_statistics():
    layer, other = polyhead.MultiHeadAttention(16, 2), polyhead.MultiHeadAttention(16, 4)
    with torch.no_grad(), polyhead.observe(layer) as session:
        layer(torch.randn(1, 4, 16))
    with pytest.raises(OptionError, match="of the same statistics"):
        polyhead.observe(layer, statistics="entropy").resume_from(session.observations)
    again = polyhead.observe(other)
    with torch.no_grad(), again:
        other(torch.randn(1, 4, 16))
    with pytest.raises(OptionError, match="the same model"):
        again.resume_from(session.observations)


@dataclass(frozen=True)
class Scripted:
    """A collector that returns a given state, to get its protocol wrong."""

    state: object = None
    name: object = "scripted"

    def empty(self, site, device):
        return self.state


@dataclass(frozen=True)
class Forgetful(Sums):
    calls: torch.Tensor = field(default_factory=lambda: torch.zeros(()))

    def update(self, attended, non_padding, metadata):
        replace(self, calls=self.calls + 1)  # and not returned


@pytest.mark.parametrize(
    ("collect", "words"),
    [
        (Contributions(), "must be a list of collectors.*got Contributions"),
        ([Contributions], "got the class Contributions; pass an instance"),
        ([print], "got builtin_function_or_method"),
        ([Scripted(name=3)], "a `name` and a method `empty.*got Scripted"),
    ],
)
def test_what_is_no_collector_is_refused(collect, words):
    with pytest.raises(OptionError, match=words):
        polyhead.observe(polyhead.MultiHeadAttention(16, 2), collect=collect)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ([], r"'scripted' must return a state with .*, got list without update, merge, state, with_state"),
        (Forgetful(), "`update` of the collector 'scripted' must return the new state, a Forgetful, got NoneType"),
    ],
)
def test_states_that_break_the_protocol_are_refused(state, words):
    layer = polyhead.MultiHeadAttention(16, 2)
    with pytest.raises(OptionError, match=words), polyhead.observe(layer, collect=[Scripted(state)]):
        layer(torch.randn(1, 4, 16))


def test_collector_names_must_be_distinct():
    with pytest.raises(OptionError, match="distinct names"):
        polyhead.observe(polyhead.MultiHeadAttention(16, 2), collect=[Contributions(), Contributions()])


def test_states_that_share_memory_or_are_views_are_saved_whole(tmp_path) -> None:
    base = torch.arange(35.0).view(5, 7)
    tensors = {"whole": base, "same": base, "columns": base[:, 2:5], "transposed": base.T, "none": base[:0]}
    path = tmp_path / "tensors.safetensors"
    path.write_bytes(serialise(saving._unshared(tensors)))
    assert all(torch.equal(x, tensors[name]) for name, x in load_file(path).items())
    assert saving._unshared({"whole": base})["whole"].data_ptr() == base.data_ptr()  # no second copy in memory
