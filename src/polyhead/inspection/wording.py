"""Findings, evidence and the facts of a run in words, in English and in Chinese: the one place where they are said."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from polyhead.inspection.heads import Head
from polyhead.inspection.identity import described, originally
from polyhead.inspection.vocabulary import Language, Text, role_of
from polyhead.observation.role_evidence_rows import WINDOW

FindingKind = Literal["role", "alike", "matters", "resting", "wide", "extreme"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One telling thing: what kind it is, which heads show it, and the numbers; `str(finding)` says it in English."""

    kind: FindingKind
    heads: tuple[Head, ...]
    column: str | None  # of the table, that it is read off
    values: Mapping[str, float | str | bool]
    stacked: bool = False  # whether a head's place needs its stack, as in an encoder and a decoder

    def __str__(self) -> str:
        return words_of(self)


def words_of(finding: Finding, language: Language = "en") -> str:
    """A finding as a sentence.

    >>> from polyhead.observation import AttentionSite
    >>> site = AttentionSite("encoder.layer.2.attention.self", "self", "encoder.layer.*.attention.self", 2, 12)
    >>> print(words_of(Finding("extreme", ((site, 7),), "confidence", {"value": 0.93})))
    layer 2 head 7 is the sharpest: 93% of its attention on one token
    >>> print(words_of(Finding("extreme", ((site, 7),), "confidence", {"value": 0.93}), "zh"))
    第 2 层第 7 头最专注：93% 的注意力落在一个词元上
    """
    return _chinese(finding) if language == "zh" else _english(finding)


def place_of(head: Head, language: Language = "en", *, stacked: bool = False) -> str:
    """`layer 2 head 7`, with the stack where a model has several, and the origin of a head that was edited."""
    site, number = head
    stack, origin = site.stack.partition(".")[0], originally(head)
    if language == "zh":
        kind = "交叉注意力" if site.kind == "cross" else "自注意力"
        told = "" if origin is None else f"（{origin.zh}）"
        return f"{f'{stack} {kind}，' if stacked else ''}第 {site.layer} 层第 {number} 头{told}"
    told = "" if origin is None else f" ({origin.en})"
    return f"{f'{stack} {site.kind}-attention, ' if stacked else ''}layer {site.layer} head {number}{told}"


# ---- English


def _english(finding: Finding) -> str:
    values: Any = finding.values
    place = place_of(finding.heads[0], stacked=finding.stacked)
    if finding.kind == "role":
        return f"{place} {values['evidence']}: {_article(values['role'])} head"
    if finding.kind == "alike":
        where = ", in different layers" if values["across"] else ""
        null = f"; random weights reach {values['null']:.2f}" if "null" in values else ""
        return f"heads {_listed(finding)} say the same thing{where}, cosine {values['cosine']:.2f}{null}"
    if finding.kind == "matters":
        times = f", {values['times']:.0f} times the middle head" if "times" in values else ""
        if finding.column == "gradient":
            return f"the loss hangs most on {place}: its slope is {values['value']:.3g} nats a token{times}"
        if values["turned"]:
            return f"taking out {place} turns a text's vector the most: 1 - cosine {values['value']:.2g}{times}"
        return f"taking out {place} costs the most: {values['value']:.3g} nats a token{times}"
    if finding.kind == "resting":
        return f"{values['count']} of {values['of']} heads put over half of their attention on the first token"
    if finding.kind == "wide":
        return (
            f"{values['count']} of {values['of']} heads look nearly everywhere alike (over 90% of the largest entropy)"
        )
    said = {
        "confidence": "is the sharpest: {:.0%} of its attention on one token",
        "mean_distance": "looks furthest: {:.0f} tokens away on average",
        "output_norm_share": "writes the most: {:.0%} of what its layer's heads write",
    }[str(finding.column)]
    return f"{place} {said.format(values['value'])}"


def _article(role: str) -> str:
    return f"{'an' if role[0] in 'aeiou' else 'a'} {role}"


def _listed(finding: Finding) -> str:
    places = [place_of(head, stacked=True) if finding.stacked else described(head) for head in finding.heads]
    return ", ".join(places[:-1]) + f" and {places[-1]}"


# ---- Chinese


def _chinese(finding: Finding) -> str:
    values: Any = finding.values
    place = place_of(finding.heads[0], "zh", stacked=finding.stacked)
    if finding.kind == "role":
        evidence = chinese_evidence(values["role"], values["score"], values["null"], values["evidence"])
        return f"{place}{evidence}：“{role_of(values['role']).label.zh}”头"
    if finding.kind == "alike":
        heads = [
            place_of(head, "zh", stacked=True) if finding.stacked else described(head, "zh") for head in finding.heads
        ]
        where = "（位于不同层）" if values["across"] else ""
        null = f"；随机权重只到 {values['null']:.2f}" if "null" in values else ""
        return f"头 {'、'.join(heads)} 说的是同一件事{where}，余弦 {values['cosine']:.2f}{null}"
    if finding.kind == "matters":
        times = f"，是中位的头的 {values['times']:.0f} 倍" if "times" in values else ""
        if finding.column == "gradient":
            return f"损失最依赖{place}：斜率为每个词元 {values['value']:.3g} 奈特{times}"
        if values["turned"]:
            return f"去掉{place}时文本向量转动最大：1 - 余弦为 {values['value']:.2g}{times}"
        return f"去掉{place}的代价最大：每个词元 {values['value']:.3g} 奈特{times}"
    if finding.kind == "resting":
        return f"{values['of']} 个头中有 {values['count']} 个把一半以上的注意力放在首个词元上"
    if finding.kind == "wide":
        return f"{values['of']} 个头中有 {values['count']} 个几乎对所有词元一视同仁（超过最大熵的 90%）"
    said = {
        "confidence": "最专注：{:.0%} 的注意力落在一个词元上",
        "mean_distance": "看得最远：平均相隔 {:.0f} 个词元",
        "output_norm_share": "写入最多：占本层所有头写入的 {:.0%}",
    }[str(finding.column)]
    return f"{place}{said.format(values['value'])}"


_SHARES = {
    "previous": "在 {} 的位置上看向前一个词元",
    "self": "在 {} 的位置上看向词元自身",
    "next": "在 {} 的位置上看向后一个词元",
    "local": f"有 {{}} 的权重在 {WINDOW} 个词元以内",
    "sink": "有 {} 的权重在首个词元上",
    "delimiter": "有 {} 的权重在特殊词元和标点上",
    "broad": "达到最大可能的熵的 {}",
    "long-range": f"在 {{}} 的位置上看向一个相隔 {WINDOW} 个以上的词元",
    "rare-token": "有 {} 的权重在罕见词元上",
    "duplicate-token": "在自身词元出现两次之处，有 {} 的权重在另一处",
    "induction": "有 {} 的权重在自身词元另一次出现之后的内容上",
}
# What of the evidence is neither the score nor the null stands in its English words alone.
_OFFSET = re.compile(r"looks (?:(\d+) tokens? (back|ahead)|at the token itself)")
_WEIGHT = re.compile(r"with (\d+%) of its weight")


def chinese_evidence(role: str, score: float, null: float, evidence: str) -> str:
    """A role's evidence in Chinese, from its numbers and from what its English words tell beside them.

    >>> chinese_evidence("previous", 0.77, 0.02, "looks at the previous token in 77% of positions (chance 2%)")
    '在 77% 的位置上看向前一个词元（随机水平 2%）'
    >>> chinese_evidence("positional", 0.95, 0.02, "looks 3 tokens back in 95% of positions (chance 2%)")
    '在 95% 的位置上看向前面第 3 个词元（随机水平 2%）'
    """
    if role in _SHARES:
        return f"{_SHARES[role].format(f'{score:.0%}')}（随机水平 {null:.0%}）"
    if role == "positional":
        found = _OFFSET.match(evidence)
        side = {"back": "前面", "ahead": "后面"}.get(found[2] if found else "", "")
        place = f"{side}第 {found[1]} 个词元" if found and side else "词元自身" if found else "固定距离处的词元"
        return f"在 {score:.0%} 的位置上看向{place}（随机水平 {null:.0%}）"
    if role == "pronoun":
        weight = _WEIGHT.search(evidence)
        more = f"，占其权重的 {weight[1]}" if weight else ""
        return f"在 {score:.0%} 的句子中从代词看向它所指代的词，多于另一个名字（随机水平 {null:.0%}）{more}"
    if role in ("copy", "anti-copy"):
        effect = "更可能" if role == "copy" else "更不可能"
        return f"使它看到的词元{effect}出现：OV 回路特征值的 {score:.2f}（随机 {null:.2f}）"
    if role == "same-meaning":
        return f"看向的词元的余弦比距离所能给出的高 {score:.2f}（随机水平 {null:.2f}）"
    return f"得分 {score:.2f}（随机水平 {null:.2f}）"


# ---- the facts of a run

_KINDS = {
    "causal": Text("language model", "语言模型"),
    "masked": Text("masked language model", "掩码语言模型"),
    "decoder": Text("decoder", "解码器"),
    "encoder": Text("encoder", "编码器"),
    "encoder-decoder": Text("encoder-decoder", "编码器-解码器"),
}
_LOSSES = {
    "language": Text("the loss of the next token", "下一个词元的损失"),
    "masked": Text("the loss of hidden tokens", "被遮盖词元的损失"),
    "classification": Text("the loss of the class", "类别的损失"),
    "representation": Text("how far the vector of a text turns, 1 - cosine", "文本向量转动多少，即 1 - 余弦"),
}
# A run keeps its reasons in English; what is said of them in Chinese is read off those words.
_REASONS = (
    (r"induction and duplicate-token: (.*)", "归纳与重复词元：{}"),
    (r"pronoun: (.*)", "代词指代：{}"),
    (
        r"a probe repeats (\d+) different words or more, got room for (\d+) twice and (\d+) words in the vocabulary",
        "探针至少重复 {} 个不同的词，此处可重复 {} 个，词表中有 {} 个词",
    ),
    (
        r"of (\d+) sentences with pronouns the tokenizer can read (\d+) in a context of (\d+) tokens",
        "{0} 个含代词的句子中，分词器在 {2} 个词元的上下文里能读 {1} 个",
    ),
    (
        r"what heads write, which say the same, copying and importance: the weights that the model itself returns do "
        r"not tell what is done with them",
        "头写入什么、哪些头相同、复制与重要性：模型自身返回的权重并不说明它们作何用途",
    ),
    (r"([\d,]+) heads at ([\d,]+) sampled tokens \((\d+) MiB\): (.*)", "{} 个头，在抽样的 {} 个词元上（{} MiB）：{}"),
    (r"every pair is measured", "每一对都经过测量"),
    (
        r"projected at random to (\d+) numbers; the (\d+) most alike are then measured without that",
        "随机投影为 {} 个数；其中最相似的 {} 对再不经投影加以测量",
    ),
)


def kind_of_model(kind: str) -> Text:
    """What a kind of model is called."""
    return _KINDS.get(kind, Text(kind, kind))


def loss_in_words(loss: str) -> Text:
    """By what the importance of heads was measured."""
    return _LOSSES.get(loss, Text(loss, loss))


def reason_in_words(reason: str) -> Text:
    """Why something was left out, or how something was measured; words that are not known stay as they are.

    >>> reason_in_words("72 heads at 1,024 sampled tokens (9 MiB): every pair is measured").zh
    '72 个头，在抽样的 1,024 个词元上（9 MiB）：每一对都经过测量'
    """
    return Text(reason, _chinese_reason(reason))


def _chinese_reason(reason: str) -> str:
    for pattern, said in _REASONS:
        found = re.fullmatch(pattern, reason, re.DOTALL)
        if found is not None:
            return said.format(*(_chinese_reason(part) for part in found.groups()))
    return reason
