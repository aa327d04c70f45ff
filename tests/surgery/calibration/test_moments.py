"""Output moments: any split merged in any order gives the same, without padding tokens."""

from __future__ import annotations

import pytest
import torch

from polyhead.errors import ShapeError
from polyhead.surgery import OutputMoments, collect_moments, find_layers
from tests.integrations.huggingface import models
from tests.surgery.gated import FAMILIES, build


@pytest.mark.parametrize("seed", range(3))
def test_moments_of_any_split_merged_in_any_order_are_those_of_one_pass(seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(97, 13, generator=generator, dtype=torch.float64)
    whole = OutputMoments.empty(13).update(rows)
    cuts = sorted(torch.randint(0, 98, (4,), generator=generator).tolist())
    parts = [OutputMoments.empty(13).update(part) for part in rows.tensor_split(cuts)]
    merged = OutputMoments.empty(13)
    for index in torch.randperm(len(parts), generator=generator):
        merged = merged.merge(parts[index])
    assert merged.count == whole.count == 97
    torch.testing.assert_close(merged.total, whole.total)
    torch.testing.assert_close(merged.products, whole.products)
    with pytest.raises(ShapeError, match="got 13 and 7 channels"):
        whole.merge(OutputMoments.empty(7))


def test_padding_is_no_calibration_text_in_encoders_and_decoders():
    family = FAMILIES["bart"]
    model = build(family)
    given = models.inputs(family)
    source, target = torch.ones(3, 23), torch.ones(3, 11)
    source[0, 20:], target[1, 4:] = 0, 0
    found = collect_moments(model, [{**given, "attention_mask": source, "decoder_attention_mask": target}])
    counts = {path.rpartition(".")[0].rpartition(".")[0]: x.count for path, x in found.items()}
    assert counts == {"model.encoder.layers": 3 * 23 - 3, "model.decoder.layers": 3 * 11 - 7}
    assert not model.training
    assert all(not x.module._forward_pre_hooks for x in find_layers(model))


def test_every_module_has_the_mode_that_it_had_before():
    """A model in training may have parts in evaluation mode, such as a frozen encoder."""
    family = FAMILIES["bart"]
    model = build(family).train()
    model.model.encoder.eval()
    before = {name: module.training for name, module in model.named_modules()}
    collect_moments(model, [models.inputs(family)])
    assert {name: module.training for name, module in model.named_modules()} == before
