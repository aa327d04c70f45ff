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
from polyhead.inspection import Inspection, Pair, Settings
from polyhead.inspection.findings import findings, least_important
from polyhead.inspection.settings import IN_MEMORY
from polyhead.inspection.vocabulary import ROLE_ORDER
from polyhead.inspection.wording import Finding, words_of
from polyhead.observation import AttentionSite, HeadProfile

ONE, TWO = (AttentionSite(f"layer.{n}.attention", "self", "layer.*.attention", n, 3) for n in range(2))
PLACES = [(site, head) for site in (ONE, TWO) for head in range(3)]
PREVIOUS = "attends most to the previous token in 77% of positions (chance 2%)"


def inspection_of(
    columns: dict[str, list[float]], *, odd: dict[str, list[float]] | None = None, documents: int = 30, **more
) -> Inspection:
    """An inspection whose halves equal the columns; `odd` has other values of the second half."""
    found = {"tokens": torch.full((6,), 100.0).double()}
    both = {name: torch.tensor([column, {**columns, **(odd or {})}[name]]) for name, column in columns.items()}
    halves = {site: {name: x[:, start : start + 3] for name, x in both.items()} for site, start in ((ONE, 0), (TWO, 3))}
    found |= {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}
    table = HeadProfile(tuple(site for site, _ in PLACES), tuple(head for _, head in PLACES), tuple(columns), found)
    settings = more.pop("settings", Settings())
    influence = {site: dict.fromkeys(("ablation", "gradient"), torch.zeros(documents, 3)) for site in (ONE, TWO)}
    more = {"halves": halves, "influence": influence, **more}
    return Inspection(settings, more.pop("facts", {}), table, **more)


def score_of(role: str, score: float, *, holds: bool = True, odd: float | None = None) -> RoleScore:
    halves = (score, score if odd is None else odd)
    return RoleScore(role, score, score - 0.1, score + 0.1, 0.02, 0.5, holds, halves=halves)


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


def test_redundant_heads_are_reported_with_the_head_that_predicts_them():
    """Heads 0 and 1 of layer 0 predict each other; head 2 needs both; those of layer 1 are a map, a copy and none."""
    alone = {
        ONE: [[1.0, 0.74, 0.2], [0.72, 1.0, 0.1], [0.45, 0.4, 1.0]],
        TWO: [[1.0, 0.86, 0.1], [0.1, 1.0, 0.9], [0.2, math.nan, 1.0]],
    }
    cosines = {ONE: {(0, 1): -0.61}, TWO: {(0, 1): -0.08, (1, 2): 0.83}}
    relations = {}
    for site, by_pair in cosines.items():
        matrix = torch.eye(3, dtype=torch.float64)
        for (one, other), value in by_pair.items():
            matrix[one, other] = matrix[other, one] = value
        relations[site] = {"cosine": matrix, "predictable_share": torch.tensor(alone[site], dtype=torch.float64)}
    columns = {
        "predictable_share": [0.85, 0.76, 0.75, 0.88, 0.95, 0.749],
        "predictable_alone": [0.74, 0.72, 0.45, 0.86, 0.9, 0.2],
    }
    inspection = inspection_of(columns, relations=relations)
    assert [x.head for x in inspection.redundant] == [(TWO, 1), (TWO, 0), (ONE, 0), (ONE, 1), (ONE, 2)]
    tail = "of its output is linearly predictable from it, on held-out tokens)"
    assert texts_of(inspection, 9) == [
        f"L1H1 writes much the same as L1H2 (cosine 0.83; 90% {tail}",
        f"L1H0 mostly writes a linear map of what L1H1 writes (cosine -0.08; 86% {tail}",
        f"L0H0 mostly writes the opposite of L0H1 (cosine -0.61; 74% {tail}",
        "the other heads of its layer predict 75% of the output of L0H2 linearly, on held-out tokens",
    ]
    assert texts_of(inspection, 9, "zh") == [
        "L1H1 与 L1H2 写入的内容大致相同（余弦 0.83；在留出词元上，其输出的 90% 可由后者线性预测）",
        "L1H0 写入的大多是 L1H1 所写内容的线性映射（余弦 -0.08；在留出词元上，其输出的 86% 可由后者线性预测）",
        "L0H0 写入的大多与 L0H1 相反（余弦 -0.61；在留出词元上，其输出的 74% 可由后者线性预测）",
        "在留出词元上，同层其他头可线性预测 L0H2 输出的 75%",
    ]
    # In one half of the text L1H2 predicts less of L1H1, and the others predict less of L1H0 and of L0H2.
    odd = {
        "predictable_share": [0.85, 0.76, 0.74, 0.7, 0.95, 0.749],
        "predictable_alone": [0.74, 0.72, 0.45, 0.86, 0.4, 0.2],
    }
    assert texts_of(inspection_of(columns, odd=odd, relations=relations), 9) == [
        "the other heads of its layer predict 95% of the output of L1H1 linearly, on held-out tokens",
        f"L0H0 mostly writes the opposite of L0H1 (cosine -0.61; 74% {tail}",
    ]


def test_pairs_of_different_layers_are_no_finding_and_runs_without_shares_have_no_redundant_heads():
    inspection = inspection_of({}, pairs=(Pair((ONE, 0), (TWO, 1), 0.99, 0.99),))
    assert inspection.redundant == findings(inspection) == ()


@pytest.mark.parametrize(
    ("column", "loss", "english", "chinese"),
    [
        (
            "ablation",
            "representation",
            "ablating L1H2 changes the text embedding most: 1 - cosine 0.5, at least 5.0 times the median of all heads",
            "消融 L1H2 时文本向量变化最大：1 - 余弦为 0.5，至少是所有头中位数的 5.0 倍",
        ),
        (
            "ablation",
            "language",
            "ablating L1H2 increases the loss most: 0.5 nats per token, at least 5.0 times the median of all heads",
            "消融 L1H2 时损失增加最多：每个词元 0.5 奈特，至少是所有头中位数的 5.0 倍",
        ),
        (
            "gradient",
            "language",
            "L1H2 has the largest loss gradient: 0.5 nats per token, at least 5.0 times the median of all heads",
            "L1H2 的损失梯度最大：每个词元 0.5 奈特，至少是所有头中位数的 5.0 倍",
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
    assert str(finding).endswith("0.6 nats per token, at least 3.0 times the median of all heads")


def test_few_documents_make_the_median_less_certain():
    """An error of 0.04 is 2.5 times below the median of 0.1: enough for the t of 30 documents, not for that of 4."""
    columns = {"gradient": [0.1, 0.1, 0.1, 0.1, 0.1, 0.6], "gradient_error": [0.04] * 6}
    times = ["times" in findings(inspection_of(columns, documents=n))[0].values for n in (30, 4, 1)]
    assert times == [True, False, False]


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
    }
    inspection = inspection_of(columns)
    found = findings(inspection, limit=9)
    assert [str(x) for x in found] == [
        "2 of 6 heads have over half of their attention on the first token",
        "L0H1 has the largest max attention weight: 93% on one token on average",
        "1 of 6 heads attends almost uniformly (over 90% of the maximum entropy)",
        "L0H2 has the largest mean attention distance: 31 tokens",
    ]
    assert [words_of(x, "zh") for x in found] == [
        "6 个头中有 2 个把一半以上的注意力放在首个词元上",
        "L0H1 的最大注意力权重最高：平均 93% 落在一个词元上",
        "6 个头中有 1 个的注意力几乎均匀分布（超过最大熵的 90%）",
        "L0H2 的平均注意力距离最大：31 个词元",
    ]
    one = dataclasses.replace(found[0], values={"count": 1, "of": 6})
    assert str(one) == "1 of 6 heads has over half of its attention on the first token"
    assert found[0].heads == ((ONE, 0), (ONE, 2))
    assert [x.column for x in found] == ["sink_mass", "confidence", "normalized_entropy", "mean_distance"]


def test_what_holds_in_one_half_of_the_text_is_no_finding():
    columns = {
        "sink_mass": [0.6, 0.7, 0.51, 0.0, 0.1, 0.2],
        "normalized_entropy": [0.91, 0.2, 0.3, 0.4, 0.5, 0.6],
        "confidence": [0.1, 0.93, 0.2, 0.3, 0.1, 0.1],
        "mean_distance": [1.0, 9.0, 31.4, 2.0, 3.0, 4.0],
        "gradient": [0.1, 0.1, 0.1, 0.1, 0.1, 0.5],
        "gradient_error": [0.01] * 6,
    }
    odd = {
        "sink_mass": [0.6, 0.4, 0.51, 0.9, 0.1, 0.2],  # one head less, and one that has it in this half alone
        "normalized_entropy": [0.89, 0.2, 0.3, 0.4, 0.5, 0.6],
        "confidence": [0.1, 0.93, 0.2, 0.94, 0.1, 0.1],
        "mean_distance": [1.0, 9.0, 30.0, 2.0, 3.0, 4.0],
        "gradient": [0.1, 0.1, 0.1, 0.1, 0.1, 0.37],
    }
    roles = (HeadRoles(ONE, 0, (score_of("previous", 0.9, odd=0.49), score_of("self", 0.6, odd=0.5))),)
    found = findings(inspection_of(columns, odd=odd, roles=roles), limit=9)
    assert [str(x) for x in found] == [
        "L0H0 attends most to the token itself in 60% of positions (chance 2%): a self-token head",
        "L1H2 has the largest loss gradient: 0.5 nats per token, at least 3.7 times the median of all heads",
        "2 of 6 heads have over half of their attention on the first token",
        "L0H2 has the largest mean attention distance: 31 tokens",
    ]
    assert found[2].heads == ((ONE, 0), (ONE, 2))
    other_head = findings(inspection_of({"gradient": columns["gradient"]}, odd={"gradient": [0.6, *[0.1] * 5]}))
    assert other_head == ()


@pytest.mark.parametrize(
    "halves", [{}, {site: {"sink_mass": torch.tensor([[0.9], [math.nan]]).expand(2, 3)} for site in (ONE, TWO)}]
)
def test_without_two_halves_there_is_no_finding_about_the_text(halves):
    """As of a single context, or of a run of an earlier version; what is not of documents remains."""
    agreement, copy, old = (RoleScore(x, 0.9, 0.8, 1.0, 0.1, 0.5, True) for x in ("agreement", "copy", "previous"))
    roles = (HeadRoles(ONE, 0, (agreement, copy, old)),)
    (finding,) = findings(inspection_of({"sink_mass": [0.9] * 6}, halves=halves, roles=roles))
    assert finding.values["role"] == "agreement"


@pytest.mark.parametrize(
    ("text", "english", "chinese"),
    [
        ("texts/corpus.txt", "corpus.txt", " corpus.txt "),
        ("texts/", "texts", " texts "),
        (None, "the built-in text", "内置文本"),
        ("-", "standard input", "标准输入"),
        (IN_MEMORY, "the text in memory", "内存中的文本"),
    ],
)
def test_a_finding_names_the_text_and_the_context(text, english, chinese):
    facts = {"tokens": 4096, "context": 256, "importance_tokens": 1024, "importance_context": 128}
    columns = {"sink_mass": [0.6, 0.5, 0.51, 0.0, 0.1, 0.2], "gradient": [0.1] * 5 + [0.5]}
    columns["predictable_share"] = [0.8] + [0.1] * 5
    roles = (HeadRoles(ONE, 0, (score_of("previous", 0.77), score_of("induction", 0.6))),)
    matrices = {"cosine": torch.eye(3).double(), "predictable_share": torch.eye(3).double()}
    found = findings(
        inspection_of(
            columns,
            facts=facts,
            settings=Settings(text=text),
            roles=roles,
            relations={ONE: matrices},
        ),
        limit=9,
    )
    ends = {
        "previous": f"a previous-token head, in both halves of {english} (4,096 tokens in contexts of up to 256)",
        "induction": "an induction head, in both halves of the repeated random words",
        "sink": f"the first token, in both halves of {english} (4,096 tokens in contexts of up to 256)",
        "importance": f"nats per token, in both halves of {english} (1,024 tokens in contexts of up to 128)",
        "redundant": f"on held-out tokens, in both halves of {english} (4,096 tokens in contexts of up to 256)",
    }
    by_kind = {str(x.values.get("role", x.kind)): x for x in found}
    assert {name: str(x)[-len(ends[name]) :] for name, x in by_kind.items()} == ends
    assert words_of(by_kind["sink"], "zh") == (
        f"6 个头中有 2 个把一半以上的注意力放在首个词元上（在{chinese}的两半上均成立：4,096 个词元，上下文最长 256）"
    )
    earlier = dataclasses.replace(by_kind["sink"].basis, halves=False)  # of a run of an earlier format
    assert words_of(dataclasses.replace(by_kind["sink"], basis=earlier)).endswith(
        f"first token, on {english} (4,096 tokens in contexts of up to 256)"
    )
    assert words_of(by_kind["induction"], "zh").endswith("（在重复的随机词的两半上均成立）")


def test_heads_that_cannot_be_told_apart_from_the_least_important_are_counted():
    values = [0.1, 0.11, 0.13, 0.5, math.nan, 0.6]
    # By document: the second differs from the third in each, by 0.02; the others vary together.
    shared = torch.tensor([0.3, -0.3, 0.1, -0.1])[:, None].expand(4, 6)
    own = torch.tensor([[0.0, 0.01, 0.0, 0.0, 0.0, 0.0], [0.0, -0.01, 0.0, 0.0, 0.0, 0.0]] * 2)
    effects = shared + own
    inspection = inspection_of({"gradient": values})

    def told(effects, count=1):
        influence = {ONE: {"gradient": effects[:, :3]}, TWO: {"gradient": effects[:, 3:]}}
        return least_important(dataclasses.replace(inspection, influence=influence), "gradient", count)

    assert told(effects) == ([0], 2)  # the error of the difference to L0H1 is 0.023
    assert told(shared) == ([0], 1), "they vary alike"
    assert told(effects, 2) == ([0, 1], 3)
    assert told(effects[:1]) == ([0], None)
    without = dataclasses.replace(inspection, influence={})
    assert least_important(without, "gradient", 1) == ([0], None)


def test_a_place_in_one_of_several_stacks_says_which():
    site = AttentionSite("decoder.layer.4.cross", "cross", "decoder.layer.*.cross", 4, 8)
    values = {"share": 0.9, "relation": "same", "alone": 0.8, "cosine": 0.9}
    finding = Finding("redundant", ((site, 1), (site, 2)), None, values, stacked=True)
    assert str(finding).startswith(
        "decoder cross-attention, L4H1 writes much the same as decoder cross-attention, L4H2 (cosine 0.90; 80% of"
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
