"""Findings: their selection, heads and text in both languages."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from polyhead.analysis.roles import HeadRoles, RoleScore
from polyhead.analysis.roles_rules import RULES
from polyhead.inspection import Group, Inspection, Pair, Settings
from polyhead.inspection.findings import findings
from polyhead.inspection.heads import Likeness
from polyhead.inspection.vocabulary import TELLING
from polyhead.inspection.wording import Finding, chinese_evidence, words_of
from polyhead.observation import AttentionSite, HeadProfile

ONE, TWO = (AttentionSite(f"layer.{n}.attention", "self", "layer.*.attention", n, 3) for n in range(2))
PLACES = [(site, head) for site in (ONE, TWO) for head in range(3)]
PREVIOUS = "attends most to the previous token in 77% of positions (chance 2%)"


def inspection_of(columns: dict[str, list[float]], **more) -> Inspection:
    found = {"tokens": torch.full((6,), 100.0).double()}
    found |= {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}
    table = HeadProfile(tuple(site for site, _ in PLACES), tuple(head for _, head in PLACES), tuple(columns), found)
    return Inspection(Settings(), more.pop("facts", {}), table, **more)


def score_of(role: str, score: float, evidence: str, *, holds: bool = True) -> RoleScore:
    return RoleScore(role, score, score - 0.1, score + 0.1, 0.02, 0.5, holds, evidence)


def texts_of(inspection: Inspection, most: int = 3, language: str = "en") -> list[str]:
    return [words_of(finding, language) for finding in findings(inspection, most)]


def test_the_clearest_head_of_the_most_telling_role_comes_first():
    roles = (
        HeadRoles(ONE, 0, (score_of("sink", 0.99, "rests"), score_of("previous", 0.6, "a weaker one"))),
        HeadRoles(ONE, 1, (score_of("previous", 0.77, PREVIOUS),)),
        HeadRoles(TWO, 2, (score_of("induction", 0.9, "has much", holds=False),)),
    )
    inspection = inspection_of({}, roles=roles)
    first, second = findings(inspection)
    assert first.heads == ((ONE, 1),)
    assert str(first) == f"layer 0 head 1 {PREVIOUS}: a previous-token head"
    assert words_of(first, "zh") == "第 0 层第 1 头在 77% 的位置上最关注前一个词元（随机水平 2%）：前一词元头"
    assert str(second) == "layer 0 head 0 rests: an attention-sink head"
    assert second.values["role"] == "sink"


def test_similar_heads_are_reported_within_and_across_layers():
    inspection = inspection_of(
        {},
        likeness=Likeness(0.55, 0.1),
        groups=(Group(((ONE, 0), (ONE, 1), (ONE, 2)), 0.8),),
        pairs=(Pair((ONE, 0), (TWO, 1), 0.9, 0.9), Pair((ONE, 2), (TWO, 1), 0.5, 0.5)),
    )
    assert texts_of(inspection) == [
        "heads 0.0 and 1.1 have similar outputs in different layers: cosine 0.90; random weights reach 0.10",
        "heads 0.0, 0.1 and 0.2 have similar outputs: cosine 0.80; random weights reach 0.10",
    ]
    assert texts_of(inspection, language="zh") == [
        "头 0.0、1.1 的输出相似（位于不同层）：余弦 0.90；随机权重只到 0.10",
        "头 0.0、0.1、0.2 的输出相似：余弦 0.80；随机权重只到 0.10",
    ]
    assert [finding.values["across"] for finding in findings(inspection)] == [True, False]


@pytest.mark.parametrize(
    ("column", "loss", "english", "chinese"),
    [
        (
            "ablation",
            "representation",
            "ablating layer 1 head 2 changes the text embedding most: 1 - cosine 0.5, 5 times the median head",
            "消融第 1 层第 2 头时文本向量变化最大：1 - 余弦为 0.5，是中位数的 5 倍",
        ),
        (
            "ablation",
            "language",
            "ablating layer 1 head 2 increases the loss most: 0.5 nats per token, 5 times the median head",
            "消融第 1 层第 2 头时损失增加最多：每个词元 0.5 奈特，是中位数的 5 倍",
        ),
        (
            "gradient",
            "language",
            "layer 1 head 2 has the largest loss gradient: 0.5 nats per token, 5 times the median head",
            "第 1 层第 2 头的损失梯度最大：每个词元 0.5 奈特，是中位数的 5 倍",
        ),
    ],
)
def test_the_head_that_matters_most(column, loss, english, chinese):
    inspection = inspection_of({column: [0.1, math.nan, 0.1, 0.1, 0.05, 0.5]}, facts={"loss": loss})
    (finding,) = findings(inspection)
    assert (str(finding), words_of(finding, "zh"), finding.column) == (english, chinese, column)
    assert finding.heads == ((TWO, 2),)


def test_without_a_middle_above_zero_nothing_is_a_multiple_of_it():
    (finding,) = findings(inspection_of({"gradient": [0.0, 0.0, 0.0, 0.0, 0.0, 0.5]}))
    assert str(finding) == "layer 1 head 2 has the largest loss gradient: 0.5 nats per token"
    assert "times" not in finding.values


def test_what_is_common_and_what_is_extreme():
    columns = {
        "sink_mass": [0.6, 0.5, 0.51, 0.0, 0.1, 0.2],
        "normalized_entropy": [0.91, 0.2, 0.3, 0.4, 0.5, 0.6],
        "confidence": [0.1, 0.93, 0.2, 0.3, 0.1, 0.1],
        "mean_distance": [1.0, math.nan, 31.4, 2.0, 3.0, 4.0],
        "output_norm_share": [0.2, 0.2, 0.6, 0.3, 0.3, 0.4],
    }
    inspection = inspection_of(columns)
    found = findings(inspection, most=9)
    assert [str(x) for x in found] == [
        "2 of 6 heads have over half of their attention on the attention sink",
        "layer 0 head 1 has the largest max attention weight: 93% on one token",
        "1 of 6 heads attend almost uniformly (over 90% of the maximum entropy)",
        "layer 0 head 2 has the largest mean attention distance: 31 tokens",
        "layer 0 head 2 has the largest output norm: 60% of its layer's squared norm",
    ]
    assert [words_of(x, "zh") for x in found] == [
        "6 个头中有 2 个把一半以上的注意力放在注意力汇聚点（首个词元）上",
        "第 0 层第 1 头的最大注意力权重最高：93% 落在一个词元上",
        "6 个头中有 1 个的注意力几乎均匀分布（超过最大熵的 90%）",
        "第 0 层第 2 头的平均注意力距离最大：31 个词元",
        "第 0 层第 2 头的输出范数最大：占本层范数平方和的 60%",
    ]
    assert found[0].heads == ((ONE, 0), (ONE, 2))
    assert [x.column for x in found] == [
        "sink_mass",
        "confidence",
        "normalized_entropy",
        "mean_distance",
        "output_norm_share",
    ]


def test_a_place_in_one_of_several_stacks_says_which():
    site = AttentionSite("decoder.layer.4.cross", "cross", "decoder.layer.*.cross", 4, 8)
    finding = Finding("alike", ((site, 1), (site, 2)), None, {"cosine": 0.9, "across": False}, stacked=True)
    assert str(finding) == (
        "heads decoder cross-attention, layer 4 head 1 and decoder cross-attention, layer 4 head 2 "
        "have similar outputs: cosine 0.90"
    )
    assert words_of(
        dataclasses.replace(finding, kind="extreme", column="mean_distance", values={"value": 3.0}), "zh"
    ) == ("decoder 交叉注意力，第 4 层第 1 头的平均注意力距离最大：3 个词元")


def test_every_role_has_an_order_and_chinese_evidence():
    assert set(TELLING) == set(RULES)
    for role in RULES:
        words = chinese_evidence(role, 0.6, 0.125, "")
        assert "得分" not in words, role  # the fallback for a role without a text of its own
        assert ("60%" in words) != ("0.60" in words), role
        assert ("12%" in words) != ("0.12" in words), role


@pytest.mark.parametrize(
    ("evidence", "place"),
    [
        ("attends most 3 tokens back in 95% of positions (chance 2%)", "前面第 3 个词元"),
        ("attends most 1 token ahead in 95% of positions (chance 2%)", "后面第 1 个词元"),
        ("attends most to the token itself in 95% of positions (chance 2%)", "词元自身"),
        ("looks 3 tokens back in 95% of positions (chance 2%)", "前面第 3 个词元"),  # runs of earlier versions
        ("looks at the token itself in 95% of positions (chance 2%)", "词元自身"),
    ],
)
def test_the_offset_of_a_positional_head_is_part_of_the_chinese_evidence(evidence, place):
    assert chinese_evidence("positional", 0.95, 0.02, evidence) == f"在 95% 的位置上最关注{place}（随机水平 2%）"
