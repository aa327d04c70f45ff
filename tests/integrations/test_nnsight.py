"""nnsight: a model that it traces is observed as without it, and statistics are values inside a trace."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import polyhead

pytestmark = pytest.mark.skipif(find_spec("nnsight") is None, reason="needs nnsight: pip install nnsight")
IDS = torch.randint(31, (2, 13), generator=torch.Generator().manual_seed(5))


def in_a_fork(test: Callable[[Any], None]) -> Callable[[Any], None]:
    """Run a test in a child of this process: importing nnsight adds a method `save` to every object."""

    @wraps(test)
    def run(model: Any) -> None:
        pid, code = os.fork(), 1
        if not pid:
            try:
                torch.set_num_threads(1)  # the threads of the parent are not here
                test(model)
                code = 0
            except BaseException:  # noqa: BLE001 - its traceback is in the captured output
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0

    return run


@pytest.fixture
def model() -> Any:
    sizes = {"hidden_size": 24, "intermediate_size": 16, "num_attention_heads": 3, "num_key_value_heads": 1}
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=31, num_hidden_layers=2, **sizes)).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(7)
    return model


def entropy_without_nnsight(model: Any) -> torch.Tensor:
    with polyhead.observe(model, statistics="entropy") as session:
        model(IDS)
    return session.profile["entropy"]


@in_a_fork
@torch.no_grad()
def test_a_traced_model_is_observed_as_without_nnsight(model):
    import nnsight

    expected = entropy_without_nnsight(model)
    traced = nnsight.NNsight(model)
    with polyhead.observe(model, statistics="entropy") as session, traced.trace(IDS):
        traced.lm_head.output.save()
    torch.testing.assert_close(session.profile["entropy"], expected, rtol=0, atol=0)


@in_a_fork
@torch.no_grad()
def test_statistics_are_saved_inside_a_trace(model):
    import nnsight

    expected = entropy_without_nnsight(model)
    traced = nnsight.NNsight(model)
    with polyhead.observe(model.model.layers, statistics="entropy") as session, traced.trace(IDS):
        traced.model.layers[1].input  # noqa: B018 (waits until layer 0 has returned)
        first = session.profile["entropy"].save()
        traced.model.norm.input  # noqa: B018
        both = session.profile["entropy"].save()
    torch.testing.assert_close(first, expected[:3], rtol=0, atol=0)
    torch.testing.assert_close(both, expected, rtol=0, atol=0)


@in_a_fork
@torch.no_grad()
def test_statistics_are_those_of_the_forward_with_its_interventions(model):
    import nnsight

    expected = entropy_without_nnsight(model)
    traced = nnsight.NNsight(model)
    with polyhead.observe(model.model.layers, statistics="entropy") as session, traced.trace(IDS):
        traced.model.layers[0].output[:] = 0
        traced.model.norm.input  # noqa: B018
        entropy = session.profile["entropy"].save()
    torch.testing.assert_close(entropy[:3], expected[:3], rtol=0, atol=0)
    uniform = torch.arange(1, 14).double().log().mean().expand(3)  # queries and keys of zeros
    torch.testing.assert_close(entropy[3:], uniform, rtol=0, atol=1e-6)
