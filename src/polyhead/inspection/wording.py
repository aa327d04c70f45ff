"""Text of findings, reasons, kinds of models and losses, in English and Chinese: a template per kind and language."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from polyhead.analysis.roles_evidence import evidence_text
from polyhead.inspection.heads import Head, named, stack_of
from polyhead.inspection.identity import originally
from polyhead.inspection.settings import IN_MEMORY
from polyhead.inspection.vocabulary import Language, Text, role_of

# role: role of a head; redundant: a head that others of its layer predict; importance: the most important head, by
# gradient or ablation; sink: number of heads that attend mostly to the attention sink; uniform: number of heads that
# attend almost uniformly; extreme: the head with the largest value in a column.
FindingKind = Literal["role", "redundant", "importance", "sink", "uniform", "extreme"]


# ---- findings


@dataclass(frozen=True, slots=True)
class Basis:
    """The text that a finding is about."""

    text: str | None  # as in the settings: a path, "-" for standard input, None for the built-in text; or `REPEATED`
    tokens: int | None  # None for `REPEATED`
    context: int | None
    halves: bool  # whether the finding holds on both halves of the text

    def words(self, language: Language) -> str:
        """Return the end of a sentence that names the text."""
        name = _TEXTS[self.text] if self.text in _TEXTS else _name_of_text(str(self.text))
        size = "" if self.tokens is None else _SIZE.format(tokens=self.tokens, context=self.context)
        return _BASES[self.halves].format(name=name, size=size)[language]


REPEATED = "(repeated random words)"
_TEXTS = {
    REPEATED: Text("the repeated random words", "重复的随机词"),
    None: Text("the built-in text", "内置文本"),
    "-": Text("standard input", "标准输入"),
    IN_MEMORY: Text("the text in memory", "内存中的文本"),
}
_BASES = {
    True: Text(", in both halves of {name}{size}", "（在{name}的两半上均成立{size}）"),
    False: Text(", on {name}{size}", "（在{name}上{size}）"),
}  # by `Basis.halves`
_SIZE = Text(" ({tokens:,} tokens in contexts of up to {context:,})", "：{tokens:,} 个词元，上下文最长 {context:,}")


def _name_of_text(path: str) -> Text:
    name = os.path.basename(os.path.normpath(path))
    return Text(name, f" {name} ")  # spaces between Latin and Chinese letters


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding: its kind, the heads it is about and its numbers; `str(finding)` is the English sentence."""

    kind: FindingKind
    heads: tuple[Head, ...]
    column: str | None  # column of the head table that it was derived from
    values: Mapping[str, int | float | str | bool]
    stacked: bool = False  # name the stack of each head, because the model has several, as an encoder-decoder
    basis: Basis | None = None  # None: weights or probes, not a text

    def __str__(self) -> str:
        return words_of(self)


# By kind of finding, variant of a kind, or column of an extreme; see `_template_of`.
_FINDINGS = {
    "role": Text("{place} {evidence}: {label}", "{place}{evidence}：{label}"),
    "redundant": Text(
        "the other heads of its layer predict {share:.0%} of the output of {place} linearly, on held-out tokens",
        "在留出词元上，同层其他头可线性预测 {place}输出的 {share:.0%}",
    ),
    "same": Text(
        "{place} writes much the same as {other} (cosine {cosine:.2f}; {alone:.0%} of its output is linearly "
        "predictable from it, on held-out tokens)",
        "{place}与 {other} 写入的内容大致相同（余弦 {cosine:.2f}；"
        "在留出词元上，其输出的 {alone:.0%} 可由后者线性预测）",
    ),
    "opposite": Text(
        "{place} mostly writes the opposite of {other} (cosine {cosine:.2f}; {alone:.0%} of its output is linearly "
        "predictable from it, on held-out tokens)",
        "{place}写入的大多与 {other} 相反（余弦 {cosine:.2f}；在留出词元上，其输出的 {alone:.0%} 可由后者线性预测）",
    ),
    "linear_map": Text(
        "{place} mostly writes a linear map of what {other} writes (cosine {cosine:.2f}; {alone:.0%} of its output is "
        "linearly predictable from it, on held-out tokens)",
        "{place}写入的大多是 {other} 所写内容的线性映射（余弦 {cosine:.2f}；"
        "在留出词元上，其输出的 {alone:.0%} 可由后者线性预测）",
    ),
    "gradient": Text(
        "{place} has the largest loss gradient: {value:.3g} nats per token",
        "{place}的损失梯度最大：每个词元 {value:.3g} 奈特",
    ),
    "ablation": Text(
        "ablating {place} increases the loss most: {value:.3g} nats per token",
        "消融 {place}时损失增加最多：每个词元 {value:.3g} 奈特",
    ),
    "representation": Text(  # ablation measured by the text embedding instead of a loss
        "ablating {place} changes the text embedding most: 1 - cosine {value:.2g}",
        "消融 {place}时文本向量变化最大：1 - 余弦为 {value:.2g}",
    ),
    "sink": Text(
        "{count} of {of} heads {have} over half of {their} attention on the first token",
        "{of} 个头中有 {count} 个把一半以上的注意力放在首个词元上",
    ),
    "uniform": Text(
        "{count} of {of} heads {attend} almost uniformly (over 90% of the maximum entropy)",
        "{of} 个头中有 {count} 个的注意力几乎均匀分布（超过最大熵的 90%）",
    ),
    "confidence": Text(
        "{place} has the largest max attention weight: {value:.0%} on one token on average",
        "{place}的最大注意力权重最高：平均 {value:.0%} 落在一个词元上",
    ),
    "mean_distance": Text(
        "{place} has the largest mean attention distance: {value:.0f} tokens",
        "{place}的平均注意力距离最大：{value:.0f} 个词元",
    ),
    "output_norm_share": Text(
        "{place} has the largest output norm: {value:.0%} of its layer's squared norm",
        "{place}的输出范数最大：占本层范数平方和的 {value:.0%}",
    ),
}
_ONE = {"have": "has", "their": "its", "attend": "attends"}
_SEVERAL = {word: word for word in _ONE}
# Appended if a finding has a value of that name.
_SUFFIXES = {
    "times": Text(", at least {times:,.1f} times the median of all heads", "，至少是所有头中位数的 {times:,.1f} 倍"),
}


def words_of(finding: Finding, language: Language = "en") -> str:
    """Return a finding as a sentence.

    >>> from polyhead.observation import AttentionSite
    >>> site = AttentionSite("encoder.layer.2.attention.self", "self", "encoder.layer.*.attention.self", 2, 12)
    >>> print(words_of(Finding("extreme", ((site, 7),), "confidence", {"value": 0.93})))
    L2H7 has the largest max attention weight: 93% on one token on average
    >>> print(words_of(Finding("extreme", ((site, 7),), "confidence", {"value": 0.93}), "zh"))
    L2H7 的最大注意力权重最高：平均 93% 落在一个词元上
    """
    values: Any = finding.values
    basis = "" if finding.basis is None else finding.basis.words(language)
    place = place_of(finding.heads[0], language, stacked=finding.stacked)
    if language == "zh" and place[-1].isascii():
        place += " "  # between Latin and Chinese letters
    if finding.kind == "role":
        name = role_of(values["role"]).label
        label = Text(f"{'an' if name.en[0] in 'aeiou' else 'a'} {name.en}", name.zh)
        sentence = _FINDINGS["role"].format(place=place, evidence=evidence_text(**values), label=label)
        return sentence[language] + basis
    text = _FINDINGS[_template_of(finding)][language]
    text += "".join(suffix[language] for name, suffix in _SUFFIXES.items() if name in values)
    other = place_of(finding.heads[-1], language, stacked=finding.stacked)
    verbs = _ONE if values.get("count") == 1 else _SEVERAL
    return text.format(place=place, other=other, **verbs, **values) + basis


def _template_of(finding: Finding) -> str:
    """Return the key in `_FINDINGS` of the template for a finding."""
    values = finding.values
    if finding.kind == "redundant":
        return str(values.get("relation", "redundant"))
    if finding.kind == "importance" and finding.column != "gradient":
        return "representation" if values["by_representation"] else "ablation"
    return finding.kind if finding.kind in ("sink", "uniform") else str(finding.column)


def place_of(head: Head, language: Language = "en", *, stacked: bool = False) -> str:
    """Return the name of a head, with the stack if `stacked`, and with the origin of an edited head."""
    site, _ = head
    origin = originally(head)
    if language == "zh":
        kind = "交叉注意力" if site.kind == "cross" else "自注意力"
        suffix = "" if origin is None else f"（{origin.zh}）"
        return f"{f'{stack_of(site)} {kind}，' if stacked else ''}{named(head)}{suffix}"
    suffix = "" if origin is None else f" ({origin.en})"
    return f"{named(head, stacked=stacked)}{suffix}"


# ---- reasons


@dataclass(frozen=True, slots=True)
class Reason:
    """Reason why a part of a run is missing, or the method of a measurement; `str(reason)` is the English text.

    >>> print(Reason("every_pair", {"heads": 72, "tokens": 1024, "mebibytes": 9.0}).text.zh)
    72 个头，在抽样的 1,024 个词元上（9 MiB）：每一对都经过测量
    """

    kind: str
    fields: Mapping[str, int | float | str] = field(default_factory=dict)

    @property
    def text(self) -> Text:
        return _REASONS[self.kind].format(**self.fields)

    def __str__(self) -> str:
        return self.text.en


_REASONS = {
    "text": Text("{text}", "{text}"),  # runs saved in an earlier format contain only the text
    "repeated_words": Text(
        "induction and duplicate-token: a probe needs at least {least} distinct words that fit twice into the context, "
        "got room for {room} twice and {words} words in the vocabulary",
        "归纳与重复词元：探针至少需要 {least} 个不同的词，且上下文能容纳两遍，此处可容纳 {room} 个，"
        "词表中有 {words} 个词",
    ),
    "one_context": Text(
        "{roles}: a role that is measured on the text needs an interval, which needs two contexts, got a text of one; "
        "findings about the text are left out as well, because they must hold in two halves of it; "
        "use a longer text, or a smaller context",
        "{roles}：在文本上测量的角色需要置信区间，至少要两个上下文，而此文本只有一个；关于文本的发现须在文本的两半上均成立，"
        "因此也从略；请用更长的文本或更小的上下文",
    ),
    "pronoun_sentences": Text(
        "agreement and pronoun: of {sentences} sentences with pronouns the tokenizer can read {readable} in a context "
        "of {context} tokens",
        "代词指代：{sentences} 个含代词的句子中，分词器在 {context} 个词元的上下文里能读 {readable} 个",
    ),
    "direct_logits": Text(
        "copy, anti-copy: the unembedding does not read a norm of the stream that the heads write to, so that their "
        "direct effect on logits is not defined",
        "复制、反复制：输出嵌入读取的不是各头所写残差流的归一化，头对 logit 的直接作用无从定义",
    ),
    "pronoun_error": Text("pronoun: {error}", "代词指代：{error}"),
    "returned_weights": Text(
        "head outputs, redundancy, copying and importance: attention weights returned by the model do not determine "
        "them",
        "头的输出、冗余、复制与重要性：模型返回的注意力权重不足以得出这些",
    ),
    "non_finite": Text(
        "values of {heads}: non-finite activations, the weights or the text give NaN or Inf",
        "{heads} 的数值：激活值非有限，权重或文本产生 NaN 或 Inf",
    ),
    "few_tokens": Text(
        "redundancy: the prediction of a head by the others of its layer needs {needed:,} tokens in each half of the "
        "documents, got {got:,}; use a longer text, or more tokens",
        "冗余：由同层其他头预测一个头，每一半文档至少需要 {needed:,} 个词元，此处只有 {got:,} 个；"
        "请用更长的文本或更多词元",
    ),
    "interrupted_probes": Text(
        "measurements after the text was read: interrupted; those that are missing, such as importance, are made when "
        "a saved run is resumed",
        "读完文本之后的测量：已中断；缺少的部分（如重要性）在继续已保存的运行时补上",
    ),
    "no_mask_token": Text(
        "importance: the loss of a masked language model needs a mask token, got a tokenizer without one",
        "重要性：掩码语言模型的损失需要掩码词元，而此分词器没有",
    ),
    "two_stacks": Text(
        "importance: auto does not measure encoder-decoders; call polyhead.analysis.importance.ablate with batches "
        "that contain decoder_input_ids",
        "重要性：自动方式不测量编码器-解码器模型；请用含有解码器输入的批次调用消融函数",
    ),
    "importance_error": Text("importance: {error}", "重要性：{error}"),
    "every_pair": Text(
        "{heads} heads at {tokens:,} sampled tokens ({mebibytes:.0f} MiB): every pair is measured",
        "{heads} 个头，在抽样的 {tokens:,} 个词元上（{mebibytes:.0f} MiB）：每一对都经过测量",
    ),
    "projected_pairs": Text(
        "{heads} heads at {tokens:,} sampled tokens ({mebibytes:.0f} MiB): random projection to {width} dimensions; "
        "the {candidates} most similar pairs are then measured exactly",
        "{heads} 个头，在抽样的 {tokens:,} 个词元上（{mebibytes:.0f} MiB）：随机投影到 {width} 维；"
        "其中最相似的 {candidates} 对再作精确测量",
    ),
}


# ---- kinds of models and losses

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


def kind_of_model(kind: str) -> Text:
    """Return the label of a kind of model."""
    return _KINDS.get(kind, Text(kind, kind))


def loss_in_words(loss: str, tokens: int | None = None) -> Text:
    """Return the label of the loss by which importance was measured, with the number of tokens if it is known.

    >>> loss_in_words("language", 2048).en
    'next-token loss, on 2,048 tokens'
    """
    label = _LOSSES.get(loss, Text(loss, loss))
    return label if tokens is None else Text(f"{label.en}, on {tokens:,} tokens", f"{label.zh}，基于 {tokens:,} 个词元")
