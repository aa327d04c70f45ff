"""`DescribedMask` keeps its information through any tensor operation of model code."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from polyhead import Mask
from polyhead.integrations.huggingface import DescribedMask
from polyhead.integrations.huggingface.attention import attend

pytest.importorskip("transformers", reason="the attention function asks transformers whether weights are wanted")

SHAPE = (2, 1, 5, 7)
LEAST = torch.finfo(torch.float32).min


def described(mask: Mask | None = None) -> DescribedMask:
    description = Mask.causal() & Mask.lengths([7, 4], side="left") if mask is None else mask
    return DescribedMask(description, SHAPE, torch.float32, torch.device("cpu"))


def test_a_described_mask_equals_the_tensor_of_eager():
    mask = described()
    assert isinstance(mask, torch.Tensor)
    assert (mask.shape, mask.ndim, mask.dtype, mask.device.type) == (SHAPE, 4, torch.float32, "cpu")
    assert mask.size(-1) == 7
    values = mask + 0
    assert type(values) is torch.Tensor
    index = torch.arange(7)
    seen = (index <= torch.arange(5)[:, None] + 2) & (index >= torch.tensor([0, 3])[:, None, None])
    assert torch.equal(values, torch.where(seen[:, None], 0.0, LEAST))


MOVES = {
    "to": lambda x: x.to("cpu"),
    "copy": lambda x: x.to("cpu", copy=True),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}
DOCUMENTS = Mask.documents(torch.zeros(2, 5).long(), torch.zeros(2, 7).long())
MASKS = (
    Mask.causal(),
    Mask.window(3) & Mask.lengths([7, 4], queries=[5, 5], side="left"),
    DOCUMENTS & Mask.positions(torch.arange(5), torch.arange(7)),
    Mask.dense(torch.arange(7)[None, None, None] < 6),
)


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_moving_and_copying_keep_the_description(move, mask):
    before = described(mask)
    after = MOVES[move](before)
    assert isinstance(after, DescribedMask)
    assert repr(after) == repr(before)
    assert torch.equal(after.dense(), before.dense())


def test_it_moves_to_another_device_without_being_made():
    moved = described().to("meta")
    assert isinstance(moved, DescribedMask)
    assert {x.device.type for x in moved.description.tensors} == {moved.device.type} == {"meta"}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("write", ["a slice", "the whole", "masked_fill_"])
def test_in_place_changes_take_effect(write, inference):
    with torch.inference_mode(inference):
        mask = described(Mask.causal())
        if write == "a slice":
            mask[:, :, :, 0] = LEAST
        elif write == "the whole":
            mask += torch.where(torch.arange(7) == 0, LEAST, 0.0)
        else:
            assert mask.masked_fill_(torch.arange(7) == 0, LEAST) is mask
        query, key = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)
        weights = attend(torch.nn.Module(), query, key, key, mask, output_attentions=True)[1]
    assert weights[..., 0].abs().max() == 0
    assert weights[..., 1].abs().min() > 0


def test_reading_it_changes_nothing():
    query, key = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)
    mask = described()
    before = attend(torch.nn.Module(), query, key, key, mask)[0]
    assert mask.made is None
    assert int((mask == 0).sum()) == int((mask[:, :, :, :] == 0).sum()) > 0
    assert mask.made is not None
    after = attend(torch.nn.Module(), query, key, key, mask)[0]
    # The first query of the second row sees nothing: the description gives zeros, the values what eager gives.
    torch.testing.assert_close(after[0], before[0])
    torch.testing.assert_close(after[1, 1:], before[1, 1:])


@pytest.mark.parametrize("mask", [MASKS[0], Mask.causal() & MASKS[2], MASKS[3]], ids=repr)
def test_a_compiled_graph_takes_it_as_an_input(mask):
    module = torch.nn.Module()

    def step(query, key, held):
        return attend(module, query, key, key, held)[0]

    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
    expected = step(query, key, described(mask))
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    assert torch.equal(compiled(query, key, described(mask)), expected)
