"""The columns of the table of heads, for a reader who has never heard of attention heads."""

from __future__ import annotations

from polyhead.inspection.vocabulary.terms import Column, Format, Group, Text


def _column(
    name: str,
    en: str,
    zh: str,
    about_en: str,
    about_zh: str,
    group: Group,
    written: Format,
    low: float | None = 0.0,
    high: float | None = None,
) -> Column:
    return Column(name, Text(en, zh), Text(about_en, about_zh), group, written, low, high)


def _share(
    name: str, en: str, zh: str, about_en: str, about_zh: str, group: Group = "looks", high: float | None = None
) -> Column:
    """Most shares stay far below 1, so a picture of them ends at the largest that there is."""
    return _column(name, en, zh, about_en, about_zh, group, "share", 0.0, high)


_KNOWN = (
    _column(
        "tokens",
        "tokens watched",
        "观察的词元数",
        "How many tokens (words or pieces of words) of the text the head was watched on. Padding never counts.",
        "在多少个词元（词或词的片段）上观察了这个头。填充的空位从不计入。",
        "other",
        "tokens",
    ),
    _column(
        "entropy",
        "spread of attention",
        "注意力的分散程度",
        "How widely a token's attention is spread. 0 means all of it on one token; spread alike over n tokens it is "
        "log n.",
        "一个词元的注意力散得多开。0 表示全部落在一个词元上；平均散在 n 个词元上时等于 log n。",
        "looks",
        "nats",
    ),
    _share(
        "normalized_entropy",
        "spread, of the most possible",
        "分散程度占上限的比例",
        "The spread of attention as a share of the most it could be with the tokens in view: 0 looks at a single "
        "token, 1 looks at everything alike.",
        "注意力的分散程度占可能的最大值的比例：0 表示只看一个词元，1 表示对所有词元一视同仁。",
        high=1.0,
    ),
    _share(
        "confidence",
        "largest share",
        "最大的一份注意力",
        "The part of its attention that a token gives to the one token it looks at most.",
        "一个词元分给它看得最多的那个词元的注意力比例。",
    ),
    _column(
        "max_logit",
        "largest score",
        "最大得分",
        "The largest score before shares are made of scores. Very large ones are a sign of unstable training.",
        "得分化为比例之前的最大值。特别大的得分往往说明训练不稳定。",
        "other",
        "number",
        None,
    ),
    _column(
        "max_abs_logit",
        "largest score, without its sign",
        "得分的最大绝对值",
        "The largest size of a score, above or below zero, before shares are made of scores.",
        "得分化为比例之前，绝对值的最大值。",
        "other",
        "number",
    ),
    _column(
        "mean_distance",
        "distance",
        "注视距离",
        "How far away the head looks: the distance in tokens, averaged by attention.",
        "这个头看得多远：按注意力加权的平均距离，以词元计。",
        "looks",
        "tokens",
    ),
    _column(
        "mean_offset",
        "distance and direction",
        "带方向的距离",
        "The same distance with a minus for tokens that stand before: below 0 the head looks back, above 0 ahead.",
        "同样的距离，看向前文的记为负：小于 0 表示往回看，大于 0 表示往后看。",
        "looks",
        "tokens",
        None,
    ),
    _column(
        "mean_squared_distance",
        "squared distance",
        "距离的平方",
        "The squared distance in tokens, averaged by attention: large where some attention goes very far.",
        "以词元计的距离的平方，按注意力加权平均：只要有少量注意力看得很远，它就会很大。",
        "looks",
        "number",
    ),
    _share(
        "sink_mass",
        "on the first token",
        "落在首个词元上",
        "The part of its attention that goes to the first token of the text, which is where a head rests when it has "
        "nothing to do.",
        "落在文本首个词元上的注意力比例；无事可做的头常常停在那里。",
    ),
    _share(
        "self_mass",
        "on itself",
        "落在自身上",
        "The part of its attention that a token gives to itself.",
        "一个词元分给自己的注意力比例。",
    ),
    _share(
        "previous_mass",
        "on the token before",
        "落在前一个词元上",
        "The part of its attention that goes to the token just before.",
        "落在紧邻的前一个词元上的注意力比例。",
    ),
    _share(
        "next_mass",
        "on the token after",
        "落在后一个词元上",
        "The part of its attention that goes to the token just after.",
        "落在紧邻的后一个词元上的注意力比例。",
    ),
    _share(
        "window_mass",
        "close by",
        "落在附近",
        "The part of its attention that stays within 8 tokens on either side.",
        "落在前后 8 个词元以内的注意力比例。",
    ),
    _share(
        "learned_sink_mass",
        "on nothing",
        "不落在任何词元上",
        "The part of its attention that goes to no token at all, in models that learn to look at nothing.",
        "不分给任何词元的注意力比例；只有学会了“什么都不看”的模型才有。",
    ),
    _share(
        "word_share",
        "inside the word",
        "落在同一个词内",
        "The part of its attention that stays inside the word that the token belongs to.",
        "落在该词元所属的词之内的注意力比例。",
    ),
    _share(
        "sentence_share",
        "inside the sentence",
        "落在同一句内",
        "The part of its attention that stays inside the sentence that the token stands in.",
        "落在该词元所在句子之内的注意力比例。",
    ),
    _share(
        "special_mass",
        "on special tokens",
        "落在特殊词元上",
        "The part of its attention that goes to tokens which stand for no text, such as [CLS] and [SEP].",
        "落在不代表文字的特殊词元（例如 [CLS] 和 [SEP]）上的注意力比例。",
    ),
    _share(
        "punctuation_mass",
        "on punctuation",
        "落在标点上",
        "The part of its attention that goes to punctuation marks.",
        "落在标点符号上的注意力比例。",
    ),
    _column(
        "output_norm",
        "how much it writes",
        "写入的多少",
        "The length of what the head adds to a token's vector, on average (root of the mean square).",
        "这个头加到词元向量上的内容的平均长度（均方根）。",
        "writes",
        "number",
    ),
    _share(
        "output_norm_share",
        "share of the layer's writing",
        "占本层写入的比例",
        "The square of how much it writes, as a share of that of all heads of its layer.",
        "写入量的平方占本层所有头总和的比例。",
        "writes",
    ),
    _column(
        "effective_rank",
        "directions it writes in",
        "写入的方向数",
        "In how many directions the head writes. Near 1, it only says more or less of one single thing.",
        "这个头在多少个方向上写入。接近 1 时，它只是在说同一件事的“多”或“少”。",
        "writes",
        "number",
        1.0,
    ),
    _column(
        "total_correlation",
        "its layer's heads together",
        "本层各头的总相关",
        "How much all heads of the layer say in common, in nats; the same number for each of them. 0: each says "
        "something of its own.",
        "本层所有头所说内容的重合程度，以奈特计；同层各头数值相同。0 表示各说各的。",
        "writes",
        "nats",
        None,
    ),
    _share(
        "qk_top_share",
        "looks by one property",
        "凭单一特征选择",
        "Of the matrix by which the head decides where to look, the share of the strongest direction. At 1 it looks by "
        "a single property of tokens.",
        "在决定看哪里的矩阵中，最强方向所占的比例。等于 1 时，它只凭词元的一种特征来选择。",
        "writes",
    ),
    _share(
        "ov_top_share",
        "writes one thing",
        "写入内容的单一程度",
        "Of the matrix by which the head writes, the share of the strongest direction. At 1 all it can write is one "
        "thing.",
        "在决定写什么的矩阵中，最强方向所占的比例。等于 1 时，它只能写一种内容。",
        "writes",
    ),
    # How much a head matters by a loss; of a model that makes vectors see _TURN.
    _column(
        "ablation",
        "loss added without it, in nats",
        "去掉它后增加的损失（奈特）",
        "How much worse the model predicts when this head alone is taken out: by how much its loss grows, in nats a "
        "token. Above 0 the head is needed.",
        "只去掉这一个头，模型的预测会变差多少，即损失上升的幅度，以每个词元的奈特计。大于 0 说明需要它。",
        "matters",
        "nats",
        None,
    ),
    _column(
        "gradient",
        "slope of the loss, in nats",
        "损失的斜率（奈特）",
        "How fast the loss, in nats a token, changes when a little of the head is taken away. A small number does not "
        "mean that the head can go.",
        "把这个头减弱一点点时，损失（每个词元的奈特）变化得多快。数值小并不意味着可以去掉它。",
        "matters",
        "nats",
    ),
    _column(
        "taylor",
        "loss added by slope, in nats",
        "按斜率估计增加的损失（奈特）",
        "What taking the head out would cost, in nats a token, if the loss were a straight line. Above 0 the head "
        "helps.",
        "假如损失是一条直线，去掉这个头要付出的代价，以每个词元的奈特计。大于 0 说明它有帮助。",
        "matters",
        "nats",
        None,
    ),
)  # fmt: skip
COLUMNS: dict[str, Column] = {column.name: column for column in _KNOWN}

# The same where no loss was measured, but how far the vector of a text turns.
_TURN = _column(
    "ablation",
    "1 - cosine without it",
    "去掉它后的 1 - 余弦",
    "How far the vector of a text turns when this head alone is taken out: 1 - the cosine between the vectors with and "
    "without it. 0: not at all; 1: a right angle.",
    "只去掉这一个头，文本向量转动多少：1 减去有它和没有它时两个向量的余弦。0 表示不动，1 表示直角。",
    "matters",
    "number",
    None,
)
IMPORTANCE = ("ablation", "gradient", "taylor")  # the columns that are of a loss


def column_of(name: str, loss: str | None = None) -> Column:
    """What a column means; one that has no entry here, as a user's own may have none, goes by its name.

    `loss` is what the importance of heads was measured by, as the facts of a run have it.
    """
    if name == _TURN.name and loss == "representation":
        return _TURN
    found = COLUMNS.get(name)
    plain = Text(name.replace("_", " "), name)
    return found or Column(name, plain, Text("A column of the table.", "表中的一列。"))
