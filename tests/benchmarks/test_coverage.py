"""The judge of coverage finds a number that differs, a site that nobody mentions, and a trace left behind."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import polyhead
from benchmarks.coverage import importance as judging_importance
from benchmarks.coverage import judge as judging
from benchmarks.coverage.catalogue import Call, strengthened
from benchmarks.coverage.classics import CLASSICS, WIDTH, MinGPTAttention, NanoGPTAttention, classic
from benchmarks.coverage.editing import judge_editing, other_inputs
from benchmarks.coverage.importance import judge_importance
from benchmarks.coverage.inputs import inputs_of, parsed
from benchmarks.coverage.judge import judge
from benchmarks.coverage.oracle import Softmax, rows_of, softmaxes_of
from benchmarks.coverage.pool import forked
from benchmarks.coverage.shrinking import HEAD_DIM, HEADS, PATCH, VOCABULARY, shrunk
from benchmarks.coverage.shrinking import WIDTH as HIDDEN
from benchmarks.coverage.table import read, rendered
from benchmarks.measuring.json_lines import write_rows
from polyhead.observation.statistics import SiteStatistics
from polyhead.surgery import HeadWeights


def _input() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 13, WIDTH)


def test_an_observed_model_is_exact():
    model, x = classic("nanoGPT"), _input()
    verdict = judge(model, lambda: model(x))
    assert (verdict.verdict, verdict.sites, verdict.observed) == ("exact", 2, 2)
    assert verdict.worst < judging.TOLERANCE


def test_a_model_whose_eager_attention_has_other_outputs_is_judged_by_its_own(monkeypatch):
    from transformers import LlamaModel
    from transformers.models.llama import configuration_llama, modeling_llama

    original = modeling_llama.eager_attention_forward

    def other(module, query, *args, **options):
        return original(module, 3 * query, *args, **options)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", other)
    model = strengthened(LlamaModel(shrunk(configuration_llama.LlamaConfig)))
    verdict = judge(model, Call(model, {"input_ids": torch.arange(13)[None]}))
    assert (verdict.verdict, verdict.sites, verdict.observed) == ("exact", 2, 2)


def _with_entropy(monkeypatch, factor):
    """Multiply entropies by a function of their dtype."""
    original = SiteStatistics.update

    def scaled(self, rows, *args, **kwargs):
        values = {name: getattr(rows, name) for name in rows.__dataclass_fields__}
        rows = type(rows)(**{**values, "entropy": rows.entropy * factor(rows.entropy.dtype)})
        return original(self, rows, *args, **kwargs)

    monkeypatch.setattr(SiteStatistics, "update", scaled)


def test_a_number_that_differs_is_wrong(monkeypatch):
    _with_entropy(monkeypatch, lambda dtype: 1.01)
    model, x = classic("nanoGPT"), _input()
    verdict = judge(model, lambda: model(x))
    assert verdict.verdict == "wrong"
    assert "entropy" in verdict.wrong[0]


def test_rounding_is_no_error_if_float64_has_none(monkeypatch):
    monkeypatch.setattr(judging, "TOLERANCE", 1e-10)
    model, x = classic("nanoGPT"), _input()
    assert judge(model, lambda: model(x)).verdict == "wrong"
    verdict = judge(model, Call(model, {"input": x}))
    assert (verdict.verdict, verdict.observed, verdict.notes) == ("exact", 2, ["within float32 rounding"])


@pytest.mark.parametrize(
    ("factor", "note"),
    [
        (lambda dtype: 1.01, "also in float64"),
        (lambda dtype: 1 + 1e-4 * (dtype is torch.float32), "in float64 it is right, in float32 beyond rounding"),
    ],
)
def test_an_error_beyond_rounding_is_wrong(monkeypatch, factor, note):
    _with_entropy(monkeypatch, factor)
    model, x = classic("nanoGPT"), _input()
    verdict = judge(model, Call(model, {"input": x}))
    assert verdict.verdict == "wrong"
    assert len(verdict.notes) == 1
    assert verdict.notes[0].startswith(note)


def test_an_output_that_a_session_changes_is_wrong_whatever_eager_attention_computes(monkeypatch):
    model, x = classic("nanoGPT"), _input()
    original = judging.polyhead.observe

    def changing(model, **options):
        with torch.no_grad():
            next(model.parameters()).mul_(1.1)
        return original(model, **options)

    monkeypatch.setattr(judging.polyhead, "observe", changing)
    verdict = judge(model, Call(model, {"input": x}))
    assert verdict.verdict == "wrong"
    assert "outputs of the model differ" in verdict.wrong[0]


class _TwoWays(nn.Module):
    """Both softmaxes first, then their products with values in the other order."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (3, -1)).transpose(1, 2)
        weights = [(heads @ heads.mT * scale).softmax(-1) for scale in (0.1, 0.7)]
        return torch.cat([(w @ heads).transpose(1, 2).flatten(2) for w in reversed(weights)])


def test_calls_are_numbered_by_the_product_with_the_values():
    model, x = _TwoWays(), _input()
    verdict = judge(model, lambda: model(x))
    assert (verdict.verdict, verdict.observed, verdict.wrong) == ("slow", 2, [])


@pytest.mark.parametrize("lowest", [0.0, -2e4])
def test_large_logits_are_masked_only_where_no_product_is_as_large(lowest):
    rows = rows_of(Softmax("softmax", torch.full((1, 1, 3, 3), -1.2e4), [], True, lowest, {3}), 1, 1)
    assert bool(rows.columns["entropy"].isnan().all()) == (lowest == 0)


class _Hidden(nn.Module):
    """Attention that a session sees, then attention by exponentials and their sum, which it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.hidden = NanoGPTAttention(), MinGPTAttention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.seen(x)
        weights = torch.exp(self.hidden.query(x) @ self.hidden.key(x).mT)
        return weights / weights.sum(-1, keepdim=True) @ x


def test_a_site_that_nobody_mentions_is_wrong():
    model, x = _Hidden(), _input()
    verdict = judge(model, lambda: model(x))
    assert verdict.verdict == "wrong"
    assert (verdict.missing, verdict.wrong) == (["_Hidden"], [])


def test_a_trace_that_a_session_leaves_is_wrong(monkeypatch):
    model, x = classic("nanoGPT"), _input()
    original = judging.polyhead.observe

    def leaving(model, **options):
        model.mark = object()
        return original(model, **options)

    monkeypatch.setattr(judging.polyhead, "observe", leaving)
    verdict = judge(model, lambda: model(x))
    assert verdict.verdict == "wrong"
    assert verdict.wrong == ["left behind by the session: .mark"]


@pytest.mark.parametrize("name", CLASSICS)
def test_the_oracle_sees_attention_however_it_is_written(name):
    model, x = classic(name), _input()
    found = [softmax for softmax in softmaxes_of(model, lambda: model(x))[0] if softmax.is_attention]
    assert len(found) == 2
    assert all(softmax.path.startswith(f"{index}.attn") for index, softmax in enumerate(found))
    assert all(tuple(softmax.logits.shape) == (2, 3, 13, 13) for softmax in found)


def test_the_oracle_sees_attention_in_inference_mode():
    model, x = classic("nanoGPT"), _input()
    model.forward = torch.inference_mode()(model.forward)
    found = [softmax for softmax in softmaxes_of(model, lambda: model(x))[0] if softmax.is_attention]
    assert [tuple(softmax.logits.shape) for softmax in found] == [(2, 3, 13, 13)] * 2


class _Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 5), nn.Parameter(torch.randn(5, WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bte,eio,bti->bto", F.softmax(self.gate(x), -1), self.experts, x)


def test_a_router_is_no_attention():
    model, x = _Router(), _input()
    softmaxes, _ = softmaxes_of(model, lambda: model(x))
    assert [softmax.is_attention for softmax in softmaxes] == [False]
    assert judge(model, lambda: model(x)).verdict == "no attention"


class _OfParameters(nn.Module):
    """Attention, and beside it exponentials of products with a parameter, copied for each sequence, as in Zamba."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.weight = NanoGPTAttention(), nn.Parameter(torch.randn(1, 5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attn(x)
        steps = torch.exp(self.weight.expand(len(x), -1, -1) @ F.layer_norm(x, (WIDTH,)).mT)
        return steps.mT @ (steps @ x)


def test_a_product_with_a_copy_of_a_parameter_is_no_attention():
    model, x = _OfParameters(), _input()
    softmaxes, _ = softmaxes_of(model, lambda: model(x))
    assert [softmax.path for softmax in softmaxes if softmax.is_attention] == ["attn"]


class _Written(nn.Module):
    """Queries that start as a copy of a parameter, to which activations are added."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 13, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.start.repeat(len(x), 1, 1)
        query += x
        return (query @ x.mT).softmax(-1) @ x


def test_a_copy_of_a_parameter_with_activations_is_an_activation():
    model, x = _Written(), _input()
    assert [softmax.is_attention for softmax in softmaxes_of(model, lambda: model(x))[0]] == [True]


def test_experts_run_in_float64():
    config = shrunk(transformers.MixtralConfig)
    call = Call(strengthened(transformers.MixtralModel(config)), {"input_ids": torch.arange(13)[None]})
    assert call.model.config._experts_implementation == "grouped_mm"
    exact = call.in_float64()
    assert call.model.config._experts_implementation == "grouped_mm"
    output = exact().last_hidden_state
    assert output.dtype == torch.float64
    assert judging.output_difference(output, call().last_hidden_state) < judging.TOLERANCE


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    return strengthened(transformers.BertModel(config))


def test_surgery_is_judged_by_masked_heads(monkeypatch):
    tokens = {"input_ids": torch.randint(3, 61, (2, 9))}
    model = _bert()
    assert judge_editing(model, tokens) == {"surgery": "known"}
    assert judge_editing(classic("nanoGPT"), {"input": _input()})["surgery"] == "refused"
    roformer = transformers.RoFormerConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    assert judge_editing(strengthened(transformers.RoFormerModel(roformer)), tokens) == {"surgery": "traced"}
    original = HeadWeights.select
    monkeypatch.setattr(HeadWeights, "select", lambda self, heads: original(self, [x - 1 for x in heads]))
    found = judge_editing(model, tokens)  # it keeps head 0 and removes the last
    assert found["surgery"] == "wrong"
    assert "the pruned and the masked model differ by" in found["surgery_reason"]


class _Tracker(nn.Module):
    """A model whose outputs depend on how often it has seen its session."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = _bert()

    def forward(self, input_ids: torch.Tensor, session: list[int]) -> torch.Tensor:
        session.append(1)
        return len(session) * self.encoder(input_ids).last_hidden_state


def test_surgery_is_judged_with_a_new_session_for_every_run():
    assert judge_editing(_Tracker(), {"input_ids": torch.randint(3, 61, (2, 9)), "session": list})["surgery"] == "known"


@pytest.mark.parametrize("name", ["nanoGPT", "einsum"])
def test_importance_is_judged_by_the_weights_of_the_model(monkeypatch, name):
    call = Call(classic(name), {"input": _input()})
    found = judge_importance(call.model, call)
    assert (found["importance"], found["importance_heads"]) == ("every", 6)
    assert found["importance_effect"] > 0.01
    original = judging_importance.ablate

    def next_head(*args):
        importance = original(*args)
        return replace(importance, totals={key: x.roll(1, -1) for key, x in importance.totals.items()})

    monkeypatch.setattr(judging_importance, "ablate", next_head)
    found = judge_importance(call.model, call)
    assert found["importance"] == "wrong"
    assert "the loss changes by" in found["importance_reason"]


class _Again(nn.Module):
    """Two calls in one module, of which a session names the second by a number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (3, -1)).transpose(1, 2)
        for scale in (0.5, 2.0):
            heads = heads + F.scaled_dot_product_attention(heads, heads, heads, scale=scale)
        return heads.transpose(1, 2).flatten(2)


class _Failing(_Again):
    """A model that raises without a head."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if abs(float(x.sum()) - self.total) > 1e-2:
            raise RuntimeError("another sum")
        return x


def test_importance_of_later_calls_of_some_sites_and_of_a_model_that_needs_its_heads():
    x = _input()
    again, hidden, failing = _Again(), _Hidden(), _Failing()
    assert judge_importance(again, Call(again, {"x": x}))["importance"] == "every"
    found = judge_importance(hidden, Call(hidden, {"x": x}))
    assert (found["importance"], found["importance_reason"]) == ("part", "not measured at _Hidden")
    with polyhead.observe(_Again()) as session:
        failing.total = float(session.model(x).sum())
    found = judge_importance(failing, Call(failing, {"x": x}))
    assert found == {
        "importance": "refused",
        "importance_reason": "without a head the model raises RuntimeError: another sum",
    }


def test_other_inputs_are_other_ones_that_the_model_takes():
    model, tokens = _bert(), torch.tensor([[5, 7, 11]])
    assert other_inputs(model, {"input_ids": tokens})["input_ids"].tolist() == [[11, 5, 7]]

    class Ordered(nn.Module):
        def forward(self, input_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            if int(input_ids[0, 0]) != 5:
                raise ValueError("the first token must be that of an image")
            return x

    x = torch.zeros(3)
    others = other_inputs(Ordered(), {"input_ids": tokens, "x": x})
    assert others["input_ids"] is tokens
    assert not others["x"].equal(x)


def test_a_process_that_dies_does_not_end_the_run():
    def work(task: str) -> dict[str, str]:
        if task == "dies":
            os._exit(7)
        if task == "raises":
            raise RuntimeError("of its own")
        return {"verdict": "exact"}

    results = dict(forked(["dies", "fine", "raises"], work, jobs=2))
    assert results["fine"] == {"verdict": "exact"}
    assert results["dies"]["reason"] == "its process ended with 7"
    assert (results["raises"]["verdict"], results["raises"]["reason"]) == ("refused", "RuntimeError: of its own")


def test_configs_shrink_by_their_names():
    from transformers import CLIPConfig, LlamaConfig

    config = shrunk(LlamaConfig, {"num_hidden_layers": 3})
    assert (config.hidden_size, config.num_attention_heads, config.vocab_size) == (HIDDEN, HEADS, VOCABULARY)
    assert config.num_hidden_layers == 3
    assert shrunk(CLIPConfig).vision_config.hidden_size == HIDDEN


def test_a_nested_config_keeps_what_its_parent_gave():
    from transformers import CHMv2Config, DepthAnythingConfig, UperNetConfig

    assert shrunk(UperNetConfig).backbone_config.out_features == ["stage1", "stage2", "stage3", "stage4"]
    backbone = shrunk(DepthAnythingConfig).backbone_config  # its stages 9 to 12 are its last layers
    assert (backbone.num_hidden_layers, backbone.out_features) == (4, ["stage1", "stage2", "stage3", "stage4"])
    assert shrunk(CHMv2Config).backbone_config.return_class_token  # no field of its class


def test_the_entry_of_a_type_holds_where_its_config_is_nested():
    from transformers import MaskFormerConfig, SwinConfig

    assert shrunk(SwinConfig).image_size == shrunk(MaskFormerConfig).backbone_config.image_size == 128


def test_sections_of_rotary_embeddings_and_windows_fit_the_small_sizes():
    from transformers import Qwen2_5_VLConfig

    config = shrunk(Qwen2_5_VLConfig)
    assert sum(config.text_config.rope_parameters["mrope_section"]) == HEAD_DIM // 2
    assert config.vision_config.window_size == 2 * config.vision_config.spatial_merge_size * PATCH


def test_a_config_with_other_sizes_in_some_layers_shrinks():
    from transformers import Gemma4Config

    assert shrunk(Gemma4Config).text_config.hidden_size == HIDDEN


def test_a_config_that_does_not_accept_its_own_defaults_is_built_from_its_overrides():
    from benchmarks.coverage.catalogue import _built

    model, call = _built("gemma4_assistant", transformers.Gemma4AssistantConfig)
    config = model.config.text_config  # hidden_size_per_layer_input must be 0, and is not by default
    assert (config.hidden_size, config.hidden_size_per_layer_input) == (HIDDEN, 0)
    assert call().logits.shape == (2, 5, VOCABULARY)


def test_a_type_without_a_model_of_its_own_is_judged_as_its_checkpoints_are():
    from benchmarks.coverage.catalogue import _built

    model, _ = _built("nougat", transformers.NougatConfig)
    assert type(model).__name__ == "VisionEncoderDecoderModel"
    assert type(model.encoder).__name__ == "DonutSwinModel"


class _Tower(nn.Module):
    """A model that cannot be called without these arguments, and can without a mask of features."""

    class config:  # noqa: N801 - as in transformers
        patch_size, in_channels, sub_configs = PATCH, 3, ()

    def forward(self, hidden_states, grid_thw, task_inputs, input_features=None, input_features_mask=None, **options):
        return options


def test_a_model_is_given_what_its_forward_requires():
    first, second = list(inputs_of(_Tower(), {"task_inputs": "int<9 2,5"}))[:2]
    assert first["hidden_states"].shape == (32, 3 * PATCH**2)
    assert first["grid_thw"].tolist() == [[1, 4, 4]] * 2
    assert first["task_inputs"].shape == (2, 5)
    assert "input_features_mask" not in first
    assert second["input_features_mask"].shape == (2, second["input_features"].shape[-1])


def test_an_argument_with_a_state_is_made_anew_for_every_call():
    class Counting(nn.Module):
        def forward(self, session: list[int]) -> int:
            session.append(1)
            return len(session)

    call = Call(Counting(), {"session": list})
    assert (call(), call()) == (1, 1)


def test_a_composite_without_a_forward_is_judged_by_a_part():
    from transformers import BarkConfig

    from benchmarks.coverage.catalogue import _built

    model, call = _built("bark", BarkConfig)
    assert type(model).__name__ == "BarkFineModel"
    assert call().logits.shape[:2] == (2, 13)


def test_inputs_of_the_table():
    whole = parsed("float<3 2,50")
    assert sorted(set(whole.flatten().tolist())) == [0.0, 1.0, 2.0]
    assert parsed("float 2,3").shape == (2, 3)
    assert int(parsed("int<4 100").max()) == 3
    assert parsed([[1, 4]]).tolist() == [[1, 4]]


def test_a_record_is_the_table_of_the_page(tmp_path):
    rows = [
        {
            "library": "timm",
            "name": "vit",
            "verdict": "exact",
            "sites": 2,
            "observed": 2,
            "seconds": 60.0,
            "surgery": "known",
        },
        {"library": "timm", "name": "odd", "verdict": "wrong", "sites": 2, "wrong": ["a | b"], "seconds": 60.0},
        {"library": "timm", "name": "none", "verdict": "refused", "sites": 0, "built": False, "reason": "too new"},
    ]
    rows[0] |= {"surgery": "known", "importance": "every", "importance_seconds": 60.0}
    facts = {"libraries": {"timm": "1.0"}, "versions": {"torch": "2.13"}, "commit": "abc"}
    write_rows(tmp_path / "record", facts, rows)
    assert [*read(tmp_path / "record").values()] == rows
    assert json.loads((tmp_path / "record").read_text().split("\n")[0]) == {"facts": facts}
    page = rendered(facts, rows)
    assert "| timm | 3 | 1 | 0 | 0 | 1 | 1 | 33.3% | 33.3% | 50.0% |" in page
    assert "| odd | wrong | 0 of 2 | a \\| b |" in page
    assert "3 minutes of CPU time" in page
    assert "| none | refused | not built | too new |" in page
    assert "| timm | 1 | 1 | 0 | 0 | 0 | 0 |" in page
    assert "**Surgery, heads can be pruned** (1): vit." in page
    assert "| library | built | importance at every site |" in page
    assert "| timm | 2 | 1 | 0 | 0 | 0 | 1 |" in page
