"""Roles of attention heads: the standard term as the label, with a plain explanation."""

from __future__ import annotations

from polyhead.analysis.languages import Text
from polyhead.inspection.vocabulary.terms import Role


def _role(name: str, letters: str, en: str, zh: str, about_en: str, about_zh: str) -> Role:
    return Role(name, Text(en, zh), Text(about_en, about_zh), letters)


# The most specific first: in this order roles are reported, and a head is drawn with its first one.
_KNOWN = (
    _role(
        "induction", "in", "induction head", "归纳头",
        "Attends to the token that followed an earlier occurrence of the current token, and so can repeat a sequence.",
        "关注当前词元先前出现之后的那个词元，因而能够重复序列。",
    ),
    _role(
        "pronoun", "pn", "pronoun (coreference) head", "代词指代头",
        "Attends from a pronoun to its antecedent more than to another candidate, even where gender and number fit "
        "both and only the meaning of the sentence decides.",
        "从代词关注其先行词，多于其他候选词；即使性和数都相符、只能靠句子的意思判断时也是如此。",
    ),
    _role(
        "agreement", "ag", "pronoun agreement head", "代词一致头",
        "Attends from a pronoun, such as she or they, to the candidate that agrees with it in gender or number. Where "
        "only the meaning of the sentence decides, this was not shown.",
        "从代词（如“她”“他们”）关注性或数与之一致的候选词。只能靠句子的意思判断时，未见此作用。",
    ),
    _role(
        "duplicate-token", "du", "duplicate-token head", "重复词元头",
        "Attends to other occurrences of the current token.",
        "关注当前词元的其他出现位置。",
    ),
    _role(
        "same-meaning", "me", "semantic-similarity head", "语义相似头",
        "Attends to tokens with similar embeddings, more than their distances explain.",
        "关注嵌入相近的词元，超出距离所能解释的程度。",
    ),
    _role(
        "previous", "pr", "previous-token head", "前一词元头",
        "Attends mostly to the token immediately before.",
        "主要关注紧邻的前一个词元。",
    ),
    _role(
        "next", "ne", "next-token head", "后一词元头",
        "Attends mostly to the token immediately after.",
        "主要关注紧邻的后一个词元。",
    ),
    _role(
        "self", "se", "self-token head", "自身词元头",
        "Attends mostly to the token itself.",
        "主要关注词元自身。",
    ),
    _role(
        "positional", "po", "positional head", "位置头",
        "Attends mostly to the token at a fixed offset.",
        "主要关注固定偏移处的词元。",
    ),
    _role(
        "long-range", "lr", "long-range head", "长程头",
        "Has over half of its attention on one token more than 8 away that is not the first.",
        "把一半以上的注意力放在一个相隔 8 个以上、且不是首个的词元上。",
    ),
    _role(
        "rare-token", "ra", "rare-token head", "罕见词元头",
        "Attends to the rarest tokens of the text, those that make up a tenth of it.",
        "关注文本中最罕见的词元，它们合计占文本的十分之一。",
    ),
    _role(
        "local", "lo", "local head", "局部头",
        "Keeps its attention within 8 tokens.",
        "注意力集中在前后 8 个词元以内。",
    ),
    _role(
        "delimiter", "de", "delimiter head", "分隔符头",
        "Attends to special tokens and punctuation.",
        "关注特殊词元和标点符号。",
    ),
    _role(
        "sink", "si", "attention-sink head", "注意力汇聚头",
        "Attends to the first token (attention sink), which usually means that the head contributes little.",
        "关注首个词元（注意力汇聚点，attention sink），通常意味着这个头贡献很小。",
    ),
    _role(
        "broad", "br", "broad (uniform) head", "均匀注意力头",
        "Attends nearly uniformly to all tokens, which averages over the text.",
        "几乎均匀地关注所有词元，相当于取整段文本的平均。",
    ),
    _role(
        "copy", "co", "copying head", "复制头",
        "What it writes raises the logit of the token it attends to, more than that of a token it attends to elsewhere "
        "in the text; directly, without later layers.",
        "其输出直接（不经后面各层）提高所关注词元的 logit，超过它在文本别处关注的词元。",
    ),
    _role(
        "anti-copy", "ac", "anti-copying head", "反复制头",
        "What it writes lowers the logit of the token it attends to, more than that of a token it attends to elsewhere "
        "in the text; directly, without later layers.",
        "其输出直接（不经后面各层）降低所关注词元的 logit，超过它在文本别处关注的词元。",
    ),
)  # fmt: skip
ROLES: dict[str, Role] = {role.name: role for role in _KNOWN}
ROLE_ORDER = tuple(ROLES)


def role_of(name: str) -> Role:
    """Return the label and explanation of a role; one without an entry is labelled with its name.

    Args:
        name: name of the role.
    """
    return ROLES.get(name) or Role(name, Text(name, name), Text("A role of a head.", "头的一种角色。"), name[:2])
