"""Findings: their selection, heads and text in both languages."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from polyhead.analysis.roles import HeadRoles, RoleScore
from polyhead.analysis.roles_evidence import evidence_text
from polyhead.analysis.roles_rules import RULES
from polyhead.errors import OptionError
from polyhead.geometry import HeadOrigins
from polyhead.inspection import Group, Inspection, Pair, Settings
from polyhead.inspection.findings import findings
from polyhead.inspection.heads import RedundancyThreshold
from polyhead.inspection.vocabulary import ROLE_ORDER
from polyhead.inspection.wording import Finding, words_of
from polyhead.observation import AttentionSite, HeadProfile

ONE, TWO = (AttentionSite(f"layer.{n}.attention", "self", "layer.*.attention", n, 3) for n in range(2))
PLACES = [(site, head) for site in (ONE, TWO) for head in range(3)]
PREVIOUS = "attends most to the previous token in 77% of positions (chance 2%)"


def inspection_of(columns: dict[str, list[float]], **more) -> Inspection:
    found = {"tokens": torch.full((6,), 100.0).double()}
    found |= {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}
    table = HeadProfile(tuple(site for site, _ in PLACES), tuple(head for _, head in PLACES), tuple(columns), found)
    return Inspection(Settings(), more.pop("facts", {}), table, **more)


def score_of(role: str, score: float, *, holds: bool = True) -> RoleScore:
    return RoleScore(role, score, score - 0.1, score + 0.1, 0.02, 0.5, holds)


def texts_of(inspection: Inspection, most: int = 3, language: str = "en") -> list[str]:
    return [words_of(finding, language) for finding in findings(inspection, most)]


def test_the_clearest_head_of_the_most_telling_role_comes_first():
    roles = (
        HeadRoles(ONE, 0, (score_of("sink", 0.99), score_of("previous", 0.6))),
        HeadRoles(ONE, 1, (score_of("previous", 0.77),)),
        HeadRoles(TWO, 2, (score_of("induction", 0.9, holds=False),)),
    )
    inspection = inspection_of({}, roles=roles)
    first, second = findings(inspection)
    assert first.heads == ((ONE, 1),)
    assert str(first) == f"L0H1 {PREVIOUS}: a previous-token head"
    assert words_of(first, "zh") == "L0H1 在 77% 的位置上最关注前一个词元（随机水平 2%）：前一词元头"
    assert str(second) == "L0H0 has 99% of its attention on the first token (chance 2%): an attention-sink head"
    assert second.values["role"] == "sink"


def test_similar_heads_are_reported_within_and_across_layers():
    inspection = inspection_of(
        {},
        redundancy=RedundancyThreshold(0.55, 0.1),
        groups=(Group(((ONE, 0), (ONE, 1), (ONE, 2)), 0.8),),
        pairs=(Pair((ONE, 0), (TWO, 1), 0.9, 0.9), Pair((ONE, 2), (TWO, 1), 0.5, 0.5)),
    )
    assert texts_of(inspection) == [
        "heads L0H0 and L1H1 have similar outputs in different layers: cosine 0.90; random weights reach 0.10",
        "heads L0H0, L0H1 and L0H2 have similar outputs: cosine 0.80; random weights reach 0.10",
    ]
    assert texts_of(inspection, language="zh") == [
        "头 L0H0、L1H1 的输出相似（位于不同层）：余弦 0.90；随机权重只到 0.10",
        "头 L0H0、L0H1、L0H2 的输出相似：余弦 0.80；随机权重只到 0.10",
    ]
    assert [finding.values["across"] for finding in findings(inspection)] == [True, False]
    rounded = dataclasses.replace(inspection, redundancy=RedundancyThreshold(0.5, -0.001))
    assert texts_of(rounded)[0].endswith("; random weights reach 0.00")


@pytest.mark.parametrize(
    ("column", "loss", "english", "chinese"),
    [
        (
            "ablation",
            "representation",
            "ablating L1H2 changes the text embedding most: 1 - cosine 0.5, 5 times the median of all heads",
            "消融 L1H2 时文本向量变化最大：1 - 余弦为 0.5，是所有头中位数的 5 倍",
        ),
        (
            "ablation",
            "language",
            "ablating L1H2 increases the loss most: 0.5 nats per token, 5 times the median of all heads",
            "消融 L1H2 时损失增加最多：每个词元 0.5 奈特，是所有头中位数的 5 倍",
        ),
        (
            "gradient",
            "language",
            "L1H2 has the largest loss gradient: 0.5 nats per token, 5 times the median of all heads",
            "L1H2 的损失梯度最大：每个词元 0.5 奈特，是所有头中位数的 5 倍",
        ),
    ],
)
def test_the_head_that_matters_most(column, loss, english, chinese):
    columns = {column: [0.1, math.nan, 0.1, 0.1, 0.05, 0.5], f"{column}_error": [0.04] * 6}
    (finding,) = findings(inspection_of(columns, facts={"loss": loss}))
    assert (str(finding), words_of(finding, "zh"), finding.column) == (english, chinese, column)
    assert finding.heads == ((TWO, 2),)


def test_the_median_of_an_even_number_of_heads_is_between_the_two_in_the_middle():
    columns = {"gradient": [0.1, 0.3, 0.1, 0.1, 0.3, 0.6], "gradient_error": [0.09, 0.09, 0.01, 0.01, 0.09, 0.6]}
    (finding,) = findings(inspection_of(columns))
    assert str(finding).endswith("0.6 nats per token, 3 times the median of all heads")


@pytest.mark.parametrize("errors", [[0.01, 0.2, 0.01, 0.01, 0.2, 0.01], [math.nan] * 6, None])
def test_a_median_that_may_be_zero_is_no_unit(errors):
    columns = {"ablation": [0.1, 0.3, 0.1, 0.1, 0.3, 0.6]} | ({} if errors is None else {"ablation_error": errors})
    (finding,) = findings(inspection_of(columns))
    assert str(finding) == "ablating L1H2 increases the loss most: 0.6 nats per token"


def test_without_a_middle_above_zero_nothing_is_a_multiple_of_it():
    (finding,) = findings(inspection_of({"gradient": [0.0, 0.0, 0.0, 0.0, 0.0, 0.5]}))
    assert str(finding) == "L1H2 has the largest loss gradient: 0.5 nats per token"
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
    found = findings(inspection, limit=9)
    assert [str(x) for x in found] == [
        "2 of 6 heads have over half of their attention on the attention sink",
        "L0H1 has the largest max attention weight: 93% on one token",
        "1 of 6 heads attend almost uniformly (over 90% of the maximum entropy)",
        "L0H2 has the largest mean attention distance: 31 tokens",
        "L0H2 has the largest output norm: 60% of its layer's squared norm",
    ]
    assert [words_of(x, "zh") for x in found] == [
        "6 个头中有 2 个把一半以上的注意力放在注意力汇聚点（首个词元）上",
        "L0H1 的最大注意力权重最高：93% 落在一个词元上",
        "6 个头中有 1 个的注意力几乎均匀分布（超过最大熵的 90%）",
        "L0H2 的平均注意力距离最大：31 个词元",
        "L0H2 的输出范数最大：占本层范数平方和的 60%",
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
    finding = Finding("similar", ((site, 1), (site, 2)), None, {"cosine": 0.9, "across": False}, stacked=True)
    assert str(finding) == (
        "heads decoder cross-attention, L4H1 and decoder cross-attention, L4H2 have similar outputs: cosine 0.90"
    )
    assert words_of(
        dataclasses.replace(finding, kind="extreme", column="mean_distance", values={"value": 3.0}), "zh"
    ) == ("decoder 交叉注意力，L4H1 的平均注意力距离最大：3 个词元")


def test_a_finding_of_a_renumbered_head_gives_both_names():
    site = AttentionSite("layer.4", "self", "layer.*", 4, 2, HeadOrigins(((0,), (2,)), total=3))
    finding = Finding("extreme", ((site, 1),), "mean_distance", {"value": 3.0})
    assert str(finding) == "L4H1 (originally L4H2) has the largest mean attention distance: 3 tokens"
    assert words_of(finding, "zh") == "L4H1（原为 L4H2）的平均注意力距离最大：3 个词元"


SHARES = {
    "previous": ("attends most to the previous token in 60% of positions", "在 60% 的位置上最关注前一个词元"),
    "self": ("attends most to the token itself in 60% of positions", "在 60% 的位置上最关注词元自身"),
    "next": ("attends most to the next token in 60% of positions", "在 60% 的位置上最关注后一个词元"),
    "local": ("has 60% of its attention within 8 tokens", "有 60% 的注意力在 8 个词元以内"),
    "sink": ("has 60% of its attention on the first token", "有 60% 的注意力在首个词元上"),
    "delimiter": (
        "has 60% of its attention on special tokens and punctuation",
        "有 60% 的注意力在特殊词元和标点上",
    ),
    "broad": ("has 60% of the maximum entropy", "达到最大熵的 60%"),
    "long-range": (
        "has over half of its attention on one token more than 8 away in 60% of positions",
        "在 60% 的位置上把一半以上的注意力放在一个相隔 8 个以上的词元上",
    ),
    "rare-token": ("has 60% of its attention on rare tokens", "有 60% 的注意力在罕见词元上"),
    "duplicate-token": (
        "has 60% of its attention on the other occurrence of its token",
        "在自身词元出现两次之处，有 60% 的注意力在另一次出现上",
    ),
    "induction": (
        "has 60% of its attention on the token after the other occurrence of its token",
        "有 60% 的注意力在自身词元另一次出现之后的词元上",
    ),
}
OTHERS = {
    "positional": (
        "attends most 3 tokens back in 60% of positions (chance 12%)",
        "在 60% 的位置上最关注前面第 3 个词元（随机水平 12%）",
    ),
    "pronoun": (
        "attends from a pronoun to its antecedent more than to another in 60% of sentences where only the meaning "
        "decides (chance 12%; by gender 90%), with 31% of its attention",
        "在只能靠意思判断的句子中，有 60% 从代词关注先行词多于另一个名字（随机水平 12%；靠性 90%），占其注意力的 31%",
    ),
    "agreement": (
        "attends from a pronoun to the name that agrees with it more than to another in 60% of sentences decided by "
        "gender or number (chance 12%; by gender 90%), with 31% of its attention",
        "在性或数可判断的句子中，有 60% 从代词关注一致的名字多于另一个名字（随机水平 12%；靠性 90%），占其注意力的 31%",
    ),
    "copy": (
        "directly raises the logit of the token it attends to more than that of a token it attends to elsewhere in "
        "60% of pairs (chance 12%)",
        "在 60% 的比较中，直接提高所关注词元的 logit，幅度超过它在别处关注的另一个词元（随机水平 12%）",
    ),
    "anti-copy": (
        "directly lowers the logit of the token it attends to more than that of a token it attends to elsewhere in "
        "60% of pairs (chance 12%)",
        "在 60% 的比较中，直接降低所关注词元的 logit，幅度超过它在别处关注的另一个词元（随机水平 12%）",
    ),
    "same-meaning": (
        "attends to tokens whose cosine similarity is 0.60 above what offsets explain (chance 0.12)",
        "所关注词元的余弦相似度比偏移所能解释的高 0.60（随机水平 0.12）",
    ),
}


def test_every_role_has_an_order_and_evidence_in_both_languages():
    assert set(ROLE_ORDER) == set(RULES) == {*SHARES, *OTHERS}
    expected = OTHERS | {role: (f"{en} (chance 12%)", f"{zh}（随机水平 12%）") for role, (en, zh) in SHARES.items()}
    for role, (en, zh) in expected.items():
        text = evidence_text(role, 0.6, 0.125, offset=-3, weight=0.31, gender=0.9)
        assert (text.en, text.zh) == (en, zh)


@pytest.mark.parametrize(
    ("offset", "english", "chinese"),
    [
        (-3, "3 tokens back", "前面第 3 个词元"),
        (-1, "1 token back", "前面第 1 个词元"),
        (1, "1 token ahead", "后面第 1 个词元"),
        (0, "to the token itself", "词元自身"),
    ],
)
def test_the_evidence_of_a_positional_head_has_its_offset(offset, english, chinese):
    text = evidence_text("positional", 0.95, 0.02, offset=offset)
    assert text.en == f"attends most {english} in 95% of positions (chance 2%)"
    assert text.zh == f"在 95% 的位置上最关注{chinese}（随机水平 2%）"
    with pytest.raises(OptionError, match="a positional head must have an offset"):
        evidence_text("positional", 0.95, 0.02)
