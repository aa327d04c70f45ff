"""How alike a model is to what it was: the formula, and which tokens count."""

from __future__ import annotations

import pytest
import torch

from polyhead.errors import OptionError
from polyhead.surgery import PruneHeads, apply, undo
from polyhead.surgery.likeness import last_states, likeness
from tests.huggingface import models
from tests.surgery.gated import FAMILIES, build


def test_the_mean_is_over_tokens_and_the_error_over_texts():
    one, other = torch.eye(3), torch.tensor([[1.0, 0, 0], [0, 1, 1], [0, 0, -1]])
    found = likeness([one, one[:1]], [other, 5 * one[:1]])
    cosines = [1, 0.5**0.5, -1]
    assert found.cosine == pytest.approx((sum(cosines) + 1) / 4)
    means = torch.tensor([sum(cosines) / 3, 1.0])
    assert found.error == pytest.approx(float(means.std() / 2**0.5))
    assert (found.tokens, found.texts) == (4, 2)


def test_other_texts_and_none_are_refused():
    for before, after in (([], []), ([torch.eye(3)], []), ([torch.eye(3)], [torch.ones(2, 3)])):
        with pytest.raises(OptionError, match="the same texts are compared, some at least"):
            likeness(before, after)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_padding_does_not_count_and_a_model_is_like_itself(name):
    model = build(FAMILIES[name], dtype=torch.float32)
    ids, mask = models.tokens(), torch.ones(models.BATCH, models.TOKENS, dtype=torch.int64)
    mask[1, 13:] = 0
    text = [{"input_ids": ids, "attention_mask": mask}, {"input_ids": ids}]
    before = last_states(model, text)
    assert [len(x) for x in before] == [23, 13, 23, 23, 23, 23]
    assert likeness(before, last_states(model, text)).cosine == pytest.approx(1, abs=1e-6)
    alone = last_states(model, [{"input_ids": ids[1:2, :13]}])
    torch.testing.assert_close(before[1], alone[0], rtol=1e-4, atol=1e-4)
    record = apply(model, [PruneHeads(0, (0, 1))])
    changed = likeness(before, last_states(model, text))
    assert changed.cosine < 0.999
    undo(model, record)
    assert torch.equal(last_states(model, text)[0], before[0])
