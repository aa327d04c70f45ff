"""Head origins follow every edit: in the model, in its files, and after undoing."""

from __future__ import annotations

import copy
import json
import random

import pytest
import torch
import transformers
from torch import nn

import polyhead
from polyhead.errors import CheckpointError, OptionError
from polyhead.geometry import HeadOrigins
from polyhead.layers import MultiHeadAttention
from polyhead.observation.origins import ATTRIBUTE, IN_CONFIG
from polyhead.surgery import (
    AddHeads,
    AlignHeads,
    EditRecord,
    FuseHeads,
    GroupQueries,
    HeadEdit,
    MergeHeads,
    PruneHeads,
    ReorderHeads,
    ShareKeys,
    apply,
    convert_groups,
    find_layers,
    join_records,
    load_record,
    read_heads,
    save,
    take_shape,
    undo,
)
from polyhead.surgery.adapters.attention_layer import layer_origins
from polyhead.surgery.storage.manifest import _digest
from tests.inspection.small_models import MAKERS

IDS = torch.arange(7, 7 + 24).view(1, 24)


def small(name: str = "bert", **options) -> nn.Module:
    torch.manual_seed(0)
    model = MAKERS[name]() if not options else type(MAKERS[name]())(type(MAKERS[name]().config)(**options))
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in path:
                parameter.mul_(6)
    return model.eval()


def origins(model: nn.Module) -> list[tuple[tuple[int, ...], ...]]:
    return [layer_origins(model, layer).heads for layer in find_layers(model)]


def statistics(model: nn.Module) -> dict[str, list[float]]:
    """Return per-head statistics of the first layer, whose input no edit changes, by original head."""
    with torch.no_grad(), polyhead.observe(model) as session:
        model(input_ids=IDS)
    rows = [row for row in session.profile.rows() if row["layer"] == 0]
    return {row["original_head"]: [row["entropy"], row["mean_distance"], row["confidence"]] for row in rows}


def test_the_issues_sequence_head_by_head():
    """The other heads of the first layer are untouched, so their statistics are the same, renumbered."""
    model = small()
    before = statistics(model)
    apply(model, [PruneHeads(0, (1,)), PruneHeads(1, (3,))])
    after = statistics(model)
    assert origins(model) == [((0,), (2,), (3,)), ((0,), (1,), (2,))]
    assert set(after) == {"0", "2", "3"}
    for head, numbers in after.items():
        torch.testing.assert_close(numbers, before[head], rtol=1e-5, atol=1e-6)
        for other in set(before) - {head}:  # a neighbour's numbers would not do
            assert max(abs(x - y) for x, y in zip(numbers, before[other], strict=True)) > 1e-3


EDITS: dict[str, tuple[str, list[HeadEdit], list[tuple[int, ...]]]] = {
    "prune": ("bert", [PruneHeads(0, (0, 2))], [(1,), (3,)]),
    "merge": ("bert", [MergeHeads(0, (1, 3))], [(0,), (1, 3), (2,)]),
    "fuse": ("bert", [FuseHeads(0, (0, 3))], [(0, 3), (1,), (2,)]),
    "reorder": ("bert", [ReorderHeads(0, (3, 0, 2, 1))], [(3,), (0,), (2,), (1,)]),
    "add": ("bert", [AddHeads(0, 2)], [(0,), (1,), (2,), (3,), (-1,), (-2,)]),
    "align": ("bert", [AlignHeads(0, ((0, 2), (1, 3)))], [(0,), (1,), (2,), (3,)]),
    "several": ("bert", [ReorderHeads(0, (3, 2, 1, 0)), MergeHeads(0, (0, 1)), PruneHeads(0, (2,))], [(2, 3), (1,)]),
    "regrown": ("bert", [PruneHeads(0, (3,)), AddHeads(0, 1), MergeHeads(0, (0, 3))], [(-1, 0), (1,), (2,)]),
    "a head of a group": ("llama", [PruneHeads(0, (1,))], [(0,), (2,), (3,)]),
    "a whole group": ("llama", [PruneHeads(0, (0, 1))], [(2,), (3,)]),
    "heads of one KV head": ("llama", [MergeHeads(0, (2, 3))], [(0,), (1,), (2, 3)]),
    "shared keys": ("llama", [GroupQueries(0, ((0, 1),))], [(0,), (1,), (2,), (3,)]),
}


@pytest.mark.parametrize("name", sorted(EDITS))
def test_every_edit_says_which_heads_its_heads_are(name):
    family, edits, expected = EDITS[name]
    model = small(family)
    state, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    record = apply(model, edits)
    assert origins(model) == [tuple(expected), ((0,), (1,), (2,), (3,))]
    # The config says the same, for whoever saves the model without us.
    entries = getattr(model.config, IN_CONFIG, {})
    edited = tuple(expected) != ((0,), (1,), (2,), (3,))
    assert entries == ({find_layers(model)[0].path: {"heads": list(map(list, expected)), "total": 4}} if edited else {})
    undo(model, record)
    assert origins(model) == [((0,), (1,), (2,), (3,))] * 2
    assert not any(hasattr(module, ATTRIBUTE) for module in model.modules())
    assert model.config.to_dict() == config
    assert all(torch.equal(state[key], x) for key, x in model.state_dict().items())


LLAMA = {
    "vocab_size": 98, "hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 32, "num_attention_heads": 6,
    "head_dim": 4, "max_position_embeddings": 130,
}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "kv_heads", "edits"),
    [
        ("uniform", 6, [PruneHeads(0, (1, 4)), ReorderHeads(1, (5, 0, 1, 4, 3, 2)), PruneHeads(1, (0, 2))]),
        ("padded", 6, [PruneHeads(0, (1, 4)), PruneHeads(1, (0,))]),
        ("padded", 3, [PruneHeads(0, (1, 2, 3)), PruneHeads(1, (4,))]),
        ("uneven", 6, [PruneHeads(0, (0,)), PruneHeads(1, (2, 3))]),
        ("uneven", 2, [PruneHeads(0, (1,)), PruneHeads(1, (3, 4, 5))]),
    ],
)
def test_every_form_of_file_keeps_it(form, kv_heads, edits, tmp_path):
    model = small("llama", **LLAMA, num_key_value_heads=kv_heads)
    before = statistics(model)
    first = apply(model, edits)
    known = origins(model)
    save(model, tmp_path / "model", form=form, record=first)
    again = polyhead.load(tmp_path / "model")
    assert origins(again) == known
    for head, numbers in statistics(again).items():
        torch.testing.assert_close(numbers, before[head], rtol=1e-5, atol=1e-6)
    # Edited once more, after the file, and saved again.
    second = apply(again, [ReorderHeads(0, (2, 0, *range(3, len(known[0])), 1))])
    both = join_records(load_record(tmp_path / "model"), second)
    save(again, tmp_path / "twice", form="uneven", record=both)
    twice = polyhead.load(tmp_path / "twice")
    assert origins(twice)[0] == (known[0][2], known[0][0], *known[0][3:], known[0][1])
    assert origins(twice)[1] == known[1]
    undo(twice, load_record(tmp_path / "twice"))
    assert origins(twice) == [tuple((head,) for head in range(6))] * 2
    undo(again, second)  # and back to the first edit alone
    assert origins(again) == known


def test_stock_transformers_carries_it_on(tmp_path):
    """The config keeps origins when transformers alone, or another class, loads and saves the model."""
    model = small("llama", **LLAMA, num_key_value_heads=6)
    apply(model, [PruneHeads(0, (1, 4)), PruneHeads(1, (0, 2))])
    known = origins(model)
    save(model, tmp_path / "edited", form="uniform")
    native = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "edited")
    assert origins(native) == known
    native.save_pretrained(tmp_path / "trained")
    assert origins(polyhead.load(tmp_path / "trained")) == known
    body = transformers.LlamaModel.from_pretrained(tmp_path / "trained")
    assert origins(body) == known
    # A live model that transformers saves, without polyhead.save.
    model.save_pretrained(tmp_path / "live")
    assert origins(polyhead.load(tmp_path / "live")) == known


def test_heads_of_zeros_are_no_heads_of_the_original(tmp_path):
    model = small()
    apply(model, [PruneHeads(0, (1,))])
    save(model, tmp_path / "padded", form="padded")
    native = transformers.BertModel.from_pretrained(tmp_path / "padded")
    assert origins(native)[0] == ((0,), (2,), (3,), ())
    assert layer_origins(native, find_layers(native)[0]).removed == (1,)
    assert "padding" in statistics(native)


@pytest.mark.parametrize("record", [True, False], ids=["with its record", "without"])
def test_a_folder_of_before_says_it_by_its_record(record, tmp_path):
    model = small()
    made = apply(model, [PruneHeads(0, (1,)), ReorderHeads(1, (3, 2, 1, 0))])
    save(model, tmp_path / "model", form="uneven", record=made if record else None)
    _as_before(tmp_path / "model")
    again = polyhead.load(tmp_path / "model")
    expected = [((0,), (2,), (3,)), ((3,), (2,), (1,), (0,))] if record else [((0,), (1,), (2,))]
    assert origins(again)[: len(expected)] == expected


def _as_before(folder) -> None:
    """Remove from a folder what earlier versions did not write."""
    manifest = json.loads((folder / "polyhead.json").read_text())
    del manifest["origins"], manifest["digest"]
    manifest["digest"] = _digest(manifest)
    (folder / "polyhead.json").write_text(json.dumps(manifest))
    config = json.loads((folder / "config.json").read_text())
    del config[IN_CONFIG]
    (folder / "config.json").write_text(json.dumps(config))


def test_origins_that_are_not_of_the_layers_heads_are_refused(tmp_path):
    model = small()
    apply(model, [PruneHeads(0, (1,))])
    save(model, tmp_path / "model", form="uneven")
    manifest = json.loads((tmp_path / "model" / "polyhead.json").read_text())
    (path,) = manifest["origins"]
    for wrong, words in (
        ({"heads": [[0], [2]], "total": 4}, "must cover all heads"),
        ({"heads": [[0], [2], [2]], "total": 4}, "use each head of 0 to 3 at most once"),
        ({"heads": [[0], [2], [7]], "total": 4}, "use each head of"),
        ({"heads": 3, "total": 4}, "origins must have heads"),
    ):
        manifest["origins"][path] = wrong
        content = {name: value for name, value in manifest.items() if name != "digest"}
        (tmp_path / "model" / "polyhead.json").write_text(json.dumps({**content, "digest": _digest(content)}))
        with pytest.raises(CheckpointError, match=words):
            polyhead.load(tmp_path / "model")


def test_a_record_in_another_process_gives_shapes_and_origins(tmp_path):
    model = small()
    record = apply(model, [PruneHeads(0, (1,))])
    second = apply(model, [PruneHeads(0, (0,))])
    second.save(tmp_path / "second")
    join_records(record, second).save(tmp_path / "both")
    fresh = small()
    take_shape(fresh, EditRecord.load(tmp_path / "both"))
    assert origins(fresh)[0] == ((2,), (3,))
    # A record of the second edit alone says what the heads were before it.
    (layer,) = EditRecord.load(tmp_path / "second").layers
    assert layer.origins == HeadOrigins(((0,), (2,), (3,)), 4)
    undo(model, EditRecord.load(tmp_path / "second"))
    assert origins(model)[0] == ((0,), (2,), (3,))


def test_conversion_to_groups_says_where_it_put_the_query_heads():
    """Heads are reordered by group, which their count alone does not show."""
    model = small("llama", **LLAMA, num_key_value_heads=6)
    wanted = read_heads(model, find_layers(model)[0])
    record = convert_groups(model, 2, lambda: [{"input_ids": IDS + shift} for shift in range(0, 60, 4)])
    (edit, _) = record.edits
    assert isinstance(edit, ShareKeys)
    assert origins(model)[0] == tuple((head,) for group in edit.groups for head in group)
    # The values of a group are shared, the queries are refitted copies of those that were there.
    assert sorted(head for (head,) in origins(model)[0]) == list(range(wanted.num_heads))
    undo(model, record)
    assert origins(model)[0] == tuple((head,) for head in range(6))


@pytest.mark.parametrize("seed", range(25))
def test_any_edits_in_any_order_agree_with_the_weights(seed):
    """Every head writes into its own channel, so the channels of a head identify what it was made from."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    count = 7
    layer = MultiHeadAttention(21, count, bias=False).double()
    with torch.no_grad():
        written = torch.zeros(count, 3, 21, dtype=torch.float64)
        written[range(count), 0, range(count)] = 1.0
        layer.out_proj.weight.copy_(written.flatten(0, 1).T)
    records = []
    for _ in range(8):
        heads = layer.layout.num_heads
        some = draw.sample(range(heads), min(heads, draw.randint(1, 3)))
        edits: list[HeadEdit] = [ReorderHeads(0, tuple(draw.sample(range(heads), heads)))]
        edits += [AddHeads(0, draw.randint(1, 2))] if heads < 9 else []
        edits += [PruneHeads(0, tuple(some))] if len(some) < heads else []
        edits += [MergeHeads(0, tuple(some)), FuseHeads(0, tuple(some))] if len(some) > 1 else []
        try:
            records.append(apply(layer, draw.sample(edits, 1)))
        except OptionError:
            continue  # no KV head of its own for a new head, for instance
        made_of = layer_origins(layer, find_layers(layer)[0])
        output = read_heads(layer, find_layers(layer)[0]).output
        seen = [tuple((x.abs().amax(0) > 1e-9).nonzero()[:, 0].tolist()) for x in output]
        assert [tuple(x for x in some if x >= 0) for some in made_of.heads] == seen
        assert made_of.removed == tuple(head for head in range(count) if not any(head in some for some in seen))
    assert len(records) > 3
    for record in reversed(records):
        undo(layer, record)
    assert layer_origins(layer, find_layers(layer)[0]).is_unedited


def test_a_module_inside_another_model_keeps_it():
    outer = nn.Sequential(nn.Identity(), small())
    apply(outer, [PruneHeads(0, (1,))])
    assert origins(outer)[0] == origins(outer[1])[0] == ((0,), (2,), (3,))
    assert origins(copy.deepcopy(outer))[0] == ((0,), (2,), (3,))


def test_heads_that_somebody_else_changed_since_are_refused():
    model = small()
    apply(model, [PruneHeads(0, (1,))])
    module = find_layers(model)[0].module
    setattr(module, ATTRIBUTE, HeadOrigins.unedited(4))
    with pytest.raises(OptionError, match="with 3 heads, of which the last edit left 4"):
        statistics(model)


def test_a_session_does_not_go_on_over_an_edit():
    model = small()
    session = polyhead.observe(model)
    with torch.no_grad(), session:
        model(input_ids=IDS)
    apply(model, [ReorderHeads(0, (3, 2, 1, 0))])
    with torch.no_grad(), session, pytest.raises(OptionError, match="must not change during a session"):
        model(input_ids=IDS)
    other = polyhead.observe(model)
    with torch.no_grad(), other:
        model(input_ids=IDS)
    with pytest.raises(OptionError, match="only observations of the same model can be merged"):
        session.observations.merge(other.observations)
