"""Text of findings, role evidence and facts of a run, in English and Chinese."""

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
    """One finding: its kind, the heads it is about and its numbers; `str(finding)` is the English sentence."""

    kind: FindingKind
    heads: tuple[Head, ...]
    column: str | None  # of the table, from which it was derived
    values: Mapping[str, float | str | bool]
    stacked: bool = False  # whether the stack is part of a head's name, as in an encoder-decoder

    def __str__(self) -> str:
        return words_of(self)


def words_of(finding: Finding, language: Language = "en") -> str:
    """Return a finding as a sentence.

    >>> from polyhead.observation import AttentionSite
    >>> site = AttentionSite("encoder.layer.2.attention.self", "self", "encoder.layer.*.attention.self", 2, 12)
    >>> print(words_of(Finding("extreme", ((site, 7),), "confidence", {"value": 0.93})))
    layer 2 head 7 has the largest max attention weight: 93% on one token
    >>> print(words_of(Finding("extreme", ((site, 7),), "confidence", {"value": 0.93}), "zh"))
    第 2 层第 7 头的最大注意力权重最高：93% 落在一个词元上
    """
    return _chinese(finding) if language == "zh" else _english(finding)


def place_of(head: Head, language: Language = "en", *, stacked: bool = False) -> str:
    """Return `layer 2 head 7`, with the stack if the model has several, and the origin of an edited head."""
    site, number = head
    stack, origin = site.stack.partition(".")[0], originally(head)
    if language == "zh":
        kind = "交叉注意力" if site.kind == "cross" else "自注意力"
        suffix = "" if origin is None else f"（{origin.zh}）"
        return f"{f'{stack} {kind}，' if stacked else ''}第 {site.layer} 层第 {number} 头{suffix}"
    suffix = "" if origin is None else f" ({origin.en})"
    return f"{f'{stack} {site.kind}-attention, ' if stacked else ''}layer {site.layer} head {number}{suffix}"


# ---- English


def _english(finding: Finding) -> str:
    values: Any = finding.values
    place = place_of(finding.heads[0], stacked=finding.stacked)
    if finding.kind == "role":
        return f"{place} {values['evidence']}: {_article(role_of(values['role']).label.en)}"
    if finding.kind == "alike":
        where = " in different layers" if values["across"] else ""
        null = f"; random weights reach {values['null']:.2f}" if "null" in values else ""
        return f"heads {_listed(finding)} have similar outputs{where}: cosine {values['cosine']:.2f}{null}"
    if finding.kind == "matters":
        times = f", {values['times']:.0f} times the median head" if "times" in values else ""
        if finding.column == "gradient":
            return f"{place} has the largest loss gradient: {values['value']:.3g} nats per token{times}"
        if values["turned"]:
            return f"ablating {place} changes the text embedding most: 1 - cosine {values['value']:.2g}{times}"
        return f"ablating {place} increases the loss most: {values['value']:.3g} nats per token{times}"
    if finding.kind == "resting":
        return f"{values['count']} of {values['of']} heads have over half of their attention on the attention sink"
    if finding.kind == "wide":
        return f"{values['count']} of {values['of']} heads attend almost uniformly (over 90% of the maximum entropy)"
    text = {
        "confidence": "has the largest max attention weight: {:.0%} on one token",
        "mean_distance": "has the largest mean attention distance: {:.0f} tokens",
        "output_norm_share": "has the largest output norm: {:.0%} of its layer's squared norm",
    }[str(finding.column)]
    return f"{place} {text.format(values['value'])}"


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _listed(finding: Finding) -> str:
    places = [place_of(head, stacked=True) if finding.stacked else described(head) for head in finding.heads]
    return ", ".join(places[:-1]) + f" and {places[-1]}"


# ---- Chinese


def _chinese(finding: Finding) -> str:
    values: Any = finding.values
    place = place_of(finding.heads[0], "zh", stacked=finding.stacked)
    if finding.kind == "role":
        evidence = chinese_evidence(values["role"], values["score"], values["null"], values["evidence"])
        return f"{place}{evidence}：{role_of(values['role']).label.zh}"
    if finding.kind == "alike":
        heads = [
            place_of(head, "zh", stacked=True) if finding.stacked else described(head, "zh") for head in finding.heads
        ]
        where = "（位于不同层）" if values["across"] else ""
        null = f"；随机权重只到 {values['null']:.2f}" if "null" in values else ""
        return f"头 {'、'.join(heads)} 的输出相似{where}：余弦 {values['cosine']:.2f}{null}"
    if finding.kind == "matters":
        times = f"，是中位数的 {values['times']:.0f} 倍" if "times" in values else ""
        if finding.column == "gradient":
            return f"{place}的损失梯度最大：每个词元 {values['value']:.3g} 奈特{times}"
        if values["turned"]:
            return f"消融{place}时文本向量变化最大：1 - 余弦为 {values['value']:.2g}{times}"
        return f"消融{place}时损失增加最多：每个词元 {values['value']:.3g} 奈特{times}"
    if finding.kind == "resting":
        return f"{values['of']} 个头中有 {values['count']} 个把一半以上的注意力放在注意力汇聚点（首个词元）上"
    if finding.kind == "wide":
        return f"{values['of']} 个头中有 {values['count']} 个的注意力几乎均匀分布（超过最大熵的 90%）"
    text = {
        "confidence": "的最大注意力权重最高：{:.0%} 落在一个词元上",
        "mean_distance": "的平均注意力距离最大：{:.0f} 个词元",
        "output_norm_share": "的输出范数最大：占本层范数平方和的 {:.0%}",
    }[str(finding.column)]
    return f"{place}{text.format(values['value'])}"


_SHARES = {
    "previous": "在 {} 的位置上最关注前一个词元",
    "self": "在 {} 的位置上最关注词元自身",
    "next": "在 {} 的位置上最关注后一个词元",
    "local": f"有 {{}} 的注意力在 {WINDOW} 个词元以内",
    "sink": "有 {} 的注意力在首个词元上",
    "delimiter": "有 {} 的注意力在特殊词元和标点上",
    "broad": "达到最大熵的 {}",
    "long-range": f"在 {{}} 的位置上最关注一个相隔 {WINDOW} 个以上的词元",
    "rare-token": "有 {} 的注意力在罕见词元上",
    "duplicate-token": "在自身词元出现两次之处，有 {} 的注意力在另一次出现上",
    "induction": "有 {} 的注意力在自身词元另一次出现之后的词元上",
}
# Only the English text of the evidence contains these. Runs saved by earlier versions say "looks" and "weight".
_OFFSET = re.compile(r"(?:attends most|looks) (?:(\d+) tokens? (back|ahead)|(?:to|at) the token itself)")
_WEIGHT = re.compile(r"with (\d+%) of its (?:attention|weight)")


def chinese_evidence(role: str, score: float, null: float, evidence: str) -> str:
    """Return the evidence for a role in Chinese, from its numbers and those in the English text.

    >>> chinese_evidence("previous", 0.77, 0.02, "attends most to the previous token in 77% of positions (chance 2%)")
    '在 77% 的位置上最关注前一个词元（随机水平 2%）'
    >>> chinese_evidence("positional", 0.95, 0.02, "attends most 3 tokens back in 95% of positions (chance 2%)")
    '在 95% 的位置上最关注前面第 3 个词元（随机水平 2%）'
    """
    if role in _SHARES:
        return f"{_SHARES[role].format(f'{score:.0%}')}（随机水平 {null:.0%}）"
    if role == "positional":
        offset = _OFFSET.match(evidence)
        side = {"back": "前面", "ahead": "后面"}.get(offset[2] if offset else "", "")
        place = f"{side}第 {offset[1]} 个词元" if offset and side else "词元自身" if offset else "固定偏移处的词元"
        return f"在 {score:.0%} 的位置上最关注{place}（随机水平 {null:.0%}）"
    if role == "pronoun":
        weight = _WEIGHT.search(evidence)
        more = f"，占其注意力的 {weight[1]}" if weight else ""
        return f"在 {score:.0%} 的句子中从代词关注其先行词，多于另一个名字（随机水平 {null:.0%}）{more}"
    if role in ("copy", "anti-copy"):
        effect = "提高" if role == "copy" else "降低"
        return f"{effect}所关注词元的 logit：OV 回路特征值得到 {score:.2f}（随机 {null:.2f}）"
    if role == "same-meaning":
        return f"所关注词元的余弦相似度比偏移所能解释的高 {score:.2f}（随机水平 {null:.2f}）"
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
    "language": Text("next-token loss", "下一词元损失"),
    "masked": Text("masked-token loss", "掩码词元损失"),
    "classification": Text("classification loss", "分类损失"),
    "representation": Text("change of the text embedding, 1 - cosine", "文本向量的变化，即 1 - 余弦"),
}
# A run stores its reasons in English; their Chinese text is derived from the English, also of earlier versions.
_REASONS = (
    (r"induction and duplicate-token: (.*)", "归纳与重复词元：{}"),
    (r"pronoun: (.*)", "代词指代：{}"),
    (
        r"a probe needs at least (\d+) distinct words that fit twice into the context, "
        r"got room for (\d+) twice and (\d+) words in the vocabulary",
        "探针至少需要 {} 个不同的词，且上下文能容纳两遍，此处可容纳 {} 个，词表中有 {} 个词",
    ),
    (
        r"a probe repeats (\d+) different words or more, got room for (\d+) twice and (\d+) words in the vocabulary",
        "探针至少重复 {} 个不同的词，此处可重复 {} 个，词表中有 {} 个词",
    ),
    (
        r"of (\d+) sentences with pronouns the tokenizer can read (\d+) in a context of (\d+) tokens",
        "{0} 个含代词的句子中，分词器在 {2} 个词元的上下文里能读 {1} 个",
    ),
    (
        r"head outputs, redundancy, copying and importance: attention weights returned by the model do not determine "
        r"them|what heads write, which say the same, copying and importance: the weights that the model itself returns "
        r"do not tell what is done with them",
        "头的输出、冗余、复制与重要性：模型返回的注意力权重不足以得出这些",
    ),
    (r"([\d,]+) heads at ([\d,]+) sampled tokens \((\d+) MiB\): (.*)", "{} 个头，在抽样的 {} 个词元上（{} MiB）：{}"),
    (r"every pair is measured", "每一对都经过测量"),
    (
        r"random projection to (\d+) dimensions; the (\d+) most similar pairs are then measured exactly",
        "随机投影到 {} 维；其中最相似的 {} 对再作精确测量",
    ),
    (
        r"projected at random to (\d+) numbers; the (\d+) most alike are then measured without that",
        "随机投影到 {} 维；其中最相似的 {} 对再作精确测量",
    ),
)


def kind_of_model(kind: str) -> Text:
    """Return the label of a kind of model."""
    return _KINDS.get(kind, Text(kind, kind))


def loss_in_words(loss: str) -> Text:
    """Return the label of the loss by which importance was measured."""
    return _LOSSES.get(loss, Text(loss, loss))


def reason_in_words(reason: str) -> Text:
    """Return a reason (something left out, a method of measurement) in both languages; unknown text is kept as is.

    >>> reason_in_words("72 heads at 1,024 sampled tokens (9 MiB): every pair is measured").zh
    '72 个头，在抽样的 1,024 个词元上（9 MiB）：每一对都经过测量'
    """
    return Text(reason, _chinese_reason(reason))


def _chinese_reason(reason: str) -> str:
    for pattern, template in _REASONS:
        match = re.fullmatch(pattern, reason, re.DOTALL)
        if match is not None:
            return template.format(*(_chinese_reason(part) for part in match.groups()))
    return reason
