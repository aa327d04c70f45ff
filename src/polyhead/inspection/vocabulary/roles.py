"""The roles a head may have, for a reader who has never heard of attention heads."""

from __future__ import annotations

from polyhead.inspection.vocabulary.terms import Role, Text


def _role(name: str, letters: str, en: str, zh: str, about_en: str, about_zh: str) -> Role:
    return Role(name, Text(en, zh), Text(about_en, about_zh), letters)


_KNOWN = (
    _role(
        "induction", "in", "repeats what followed", "归纳",
        "Looks at what followed its token the last time it occurred, and so can repeat it.",
        "看向同一词元上次出现之后跟着的内容，因而能够重复它。",
    ),
    _role(
        "duplicate-token", "du", "finds the same token", "重复词元",
        "Looks at other places where its own token stands.",
        "看向自身词元出现的其他位置。",
    ),
    _role(
        "pronoun", "pn", "finds whom a pronoun means", "代词指代",
        "Looks from a pronoun, such as she or it, at the word it stands for, more than at another that it might.",
        "从代词（如“她”“它”）看向它所指代的词，多于看向其他可能的词。",
    ),
    _role(
        "same-meaning", "me", "finds similar meaning", "相近含义",
        "Looks at tokens that mean something similar, more than their distances explain.",
        "看向含义相近的词元，超出距离所能解释的程度。",
    ),
    _role(
        "previous", "pr", "previous token", "前一词元",
        "Looks most at the token just before.",
        "最常看向紧邻的前一个词元。",
    ),
    _role(
        "next", "ne", "next token", "后一词元",
        "Looks most at the token just after.",
        "最常看向紧邻的后一个词元。",
    ),
    _role(
        "positional", "po", "fixed distance", "固定距离",
        "Looks most at the token that stands a fixed number of tokens away.",
        "最常看向相隔固定距离的词元。",
    ),
    _role(
        "long-range", "lr", "far away", "远距离",
        "Has over half of its attention on one token more than 8 away that is not the first.",
        "把一半以上的注意力放在一个相隔 8 个以上、且不是首个的词元上。",
    ),
    _role(
        "rare-token", "ra", "rare tokens", "罕见词元",
        "Looks at the rarest tokens of the text, those that make up a tenth of it.",
        "看向文本中最罕见的词元，它们合计占文本的十分之一。",
    ),
    _role(
        "local", "lo", "close by", "附近",
        "Keeps its attention within 8 tokens.",
        "注意力不离开前后 8 个词元。",
    ),
    _role(
        "self", "se", "itself", "自身",
        "Looks most at the token itself.",
        "最常看向词元自身。",
    ),
    _role(
        "delimiter", "de", "punctuation", "分隔符",
        "Rests on special tokens and punctuation.",
        "停留在特殊词元和标点符号上。",
    ),
    _role(
        "sink", "si", "rests on the first token", "停在首词元",
        "Rests on the first token, which is how a head does nothing.",
        "停留在首个词元上，也就是什么都不做。",
    ),
    _role(
        "broad", "br", "everything alike", "一视同仁",
        "Looks at everything alike, so that it takes the mean of the text.",
        "对所有词元一视同仁，相当于取整段文本的平均。",
    ),
    _role(
        "copy", "co", "makes it likelier", "复制",
        "Makes a token it looks at more likely to come next. Read off the weights alone.",
        "使它看到的词元更可能成为下一个词元。仅由权重得出。",
    ),
    _role(
        "anti-copy", "ac", "makes it less likely", "反复制",
        "Makes a token it looks at less likely to come next. Read off the weights alone.",
        "使它看到的词元更不可能成为下一个词元。仅由权重得出。",
    ),
)  # fmt: skip
ROLES: dict[str, Role] = {role.name: role for role in _KNOWN}


def role_of(name: str) -> Role:
    """What a role means; one without an entry here goes by its name."""
    found = ROLES.get(name)
    return found or Role(name, Text(name, name), Text("A role of a head.", "头的一种角色。"), name[:2])


# Which roles are worth telling first: a head that works with content says more of a model than one that rests.
TELLING = (
    "induction",
    "pronoun",
    "duplicate-token",
    "same-meaning",
    "previous",
    "next",
    "positional",
    "long-range",
    "rare-token",
    "local",
    "self",
    "delimiter",
    "sink",
    "broad",
    "copy",
    "anti-copy",
)
