"""Evidence for roles as phrases in English and Chinese, from the numbers of a score."""

from __future__ import annotations

from polyhead.analysis.languages import Text
from polyhead.errors import OptionError
from polyhead.observation.role_evidence_rows import WINDOW


def _share(en: str, zh: str) -> Text:
    return Text(f"{en} (chance {{null:.0%}})", f"{zh}（随机水平 {{null:.0%}}）")


def _offset(en: str, zh: str) -> Text:
    return _share(f"attends most {en} in {{score:.0%}} of positions", f"在 {{score:.0%}} 的位置上最关注{zh}")


def _attention(en: str, zh: str) -> Text:
    return _share(f"has {{score:.0%}} of its attention {en}", f"有 {{score:.0%}} 的注意力在{zh}")


def _copying(en: str, zh: str) -> Text:
    return _share(
        f"directly {en} the logit of the token it attends to more than that of a token it attends to elsewhere in "
        "{score:.0%} of pairs",
        f"在 {{score:.0%}} 的比较中，直接{zh}所关注词元的 logit，幅度超过它在别处关注的另一个词元",
    )


def _pronoun(en: str, which_en: str, which_zh: str, zh: str) -> Text:
    return Text(
        f"attends from a pronoun to {en} more than to another in {{score:.0%}} of sentences {which_en} (chance "
        "{null:.0%}; {cues}), with {weight:.0%} of its attention",
        f"在{which_zh}的句子中，有 {{score:.0%}} 从代词关注{zh}多于另一个名字（随机水平 {{null:.0%}}；{{cues}}），"
        "占其注意力的 {weight:.0%}",
    )


_CUES = {
    "gender": Text("by gender {share:.0%}", "靠性 {share:.0%}"),
    "number": Text("by number {share:.0%}", "靠数 {share:.0%}"),
    "meaning": Text("by meaning alone {share:.0%}", "只靠意思 {share:.0%}"),
}
# Arguments of `evidence_text`, which are fields of a score.
EVIDENCE = ("role", "score", "null", "offset", "weight", *_CUES, "saved_evidence")

# By role. For a positional head the sign of its offset selects "back", "ahead" or "self".
_PHRASES = {
    "back": _offset("{tokens} back", "前面第 {distance} 个词元"),
    "ahead": _offset("{tokens} ahead", "后面第 {distance} 个词元"),
    "previous": _offset("to the previous token", "前一个词元"),
    "self": _offset("to the token itself", "词元自身"),
    "next": _offset("to the next token", "后一个词元"),
    "long-range": _share(
        f"has over half of its attention on one token more than {WINDOW} away in {{score:.0%}} of positions",
        f"在 {{score:.0%}} 的位置上把一半以上的注意力放在一个相隔 {WINDOW} 个以上的词元上",
    ),
    "local": _attention(f"within {WINDOW} tokens", f" {WINDOW} 个词元以内"),
    "sink": _attention("on the first token", "首个词元上"),
    "delimiter": _attention("on special tokens and punctuation", "特殊词元和标点上"),
    "rare-token": _attention("on rare tokens", "罕见词元上"),
    "induction": _attention(
        "on the token after the other occurrence of its token", "自身词元另一次出现之后的词元上"
    ),
    "duplicate-token": _share(
        "has {score:.0%} of its attention on the other occurrence of its token",
        "在自身词元出现两次之处，有 {score:.0%} 的注意力在另一次出现上",
    ),
    "broad": _share("has {score:.0%} of the maximum entropy", "达到最大熵的 {score:.0%}"),
    "pronoun": _pronoun("its antecedent", "where only the meaning decides", "只能靠意思判断", "先行词"),
    "agreement": _pronoun("the name that agrees with it", "decided by gender or number", "性或数可判断", "一致的名字"),
    "copy": _copying("raises", "提高"),
    "anti-copy": _copying("lowers", "降低"),
    "same-meaning": Text(
        "attends to tokens whose cosine similarity is {score:.2f} above what offsets explain (chance {null:.2f})",
        "所关注词元的余弦相似度比偏移所能解释的高 {score:.2f}（随机水平 {null:.2f}）",
    ),
}  # fmt: skip


def evidence_text(
    role: str,
    score: float,
    null: float,
    offset: int | None = None,
    weight: float | None = None,
    gender: float | None = None,
    number: float | None = None,
    meaning: float | None = None,
    saved_evidence: str | None = None,
) -> Text:
    """Return the evidence for a role as a phrase; the fields are those of `RoleScore`.

    >>> evidence_text("positional", 0.95, 0.02, offset=-3).en
    'attends most 3 tokens back in 95% of positions (chance 2%)'
    >>> evidence_text("previous", 0.77, 0.02).zh
    '在 77% 的位置上最关注前一个词元（随机水平 2%）'
    """
    if saved_evidence is not None:
        return Text(saved_evidence, saved_evidence)
    if role != "positional":
        scores = {"gender": gender, "number": number, "meaning": meaning}
        cues = [_CUES[cue].format(share=x) for cue, x in scores.items() if x is not None]
        listed = Text(", ".join(x.en for x in cues), "，".join(x.zh for x in cues))
        return _PHRASES[role].format(score=score, null=null, weight=weight, cues=listed)
    if offset is None:
        raise OptionError("a positional head must have an offset, got none")
    distance = abs(offset)
    phrase = _PHRASES["back" if offset < 0 else "ahead" if offset else "self"]
    return phrase.format(score=score, null=null, distance=distance, tokens=f"{distance} token{'s' * (distance != 1)}")
