"""Columns of the table of heads: the standard term as the label, with a plain explanation."""

from __future__ import annotations

from polyhead.analysis.languages import Text
from polyhead.inspection.vocabulary.role_names import ROLES
from polyhead.inspection.vocabulary.terms import Column, Format, Group


def _column(
    name: str,
    en: str,
    zh: str,
    group: Group,
    number_format: Format,
    about_en: str,
    about_zh: str,
    low: float | None = 0.0,
    high: float | None = None,
) -> Column:
    return Column(name, Text(en, zh), Text(about_en, about_zh), group, number_format, low, high)


def _share(
    name: str, en: str, zh: str, about_en: str, about_zh: str, group: Group = "attention", high: float | None = None
) -> Column:
    """Return a column of shares; most stay far below 1, so its colour scale ends at the largest value by default."""
    return _column(name, en, zh, group, "share", about_en, about_zh, high=high)


_KNOWN = (
    _column(
        "tokens", "tokens", "词元数", "other", "tokens",
        "Number of tokens (words or pieces of words) that the statistics are computed over. Padding is not counted.",
        "统计所基于的词元（词或词的片段）数量，不计填充词元。",
    ),
    _column(
        "entropy", "entropy", "熵", "attention", "nats",
        "Entropy of the attention weights of a query: 0 if all weight is on one token, log n if it is uniform over n "
        "tokens.",
        "一个查询的注意力权重的熵：全部权重落在一个词元上时为 0，均匀分布在 n 个词元上时为 log n。",
    ),
    _share(
        "normalized_entropy", "normalized entropy", "归一化熵",
        "Entropy divided by its maximum, the log of the number of visible tokens: 0 is all weight on a single token, 1 "
        "is uniform attention.",
        "熵除以其最大值（可见词元数的对数）：0 表示全部权重在一个词元上，1 表示均匀注意力。",
        high=1.0,
    ),
    _share(
        "confidence", "max attention weight", "最大注意力权重",
        "Largest attention weight of a query: the share of attention on the token that it attends to most.",
        "一个查询的最大注意力权重，即它最关注的那个词元所占的注意力比例。",
    ),
    _column(
        "max_logit", "max logit", "最大 logit", "other", "number",
        "Largest attention logit of a query, before the softmax, averaged over queries; max_logit_max is the maximum "
        "over queries. Very large logits are a sign of unstable training.",
        "一个查询在 softmax 之前的最大注意力 logit，对所有查询取平均；max_logit_max 是所有查询中的最大值。"
        "过大的 logit 往往说明训练不稳定。",
        low=None,
    ),
    _column(
        "max_abs_logit", "max absolute logit", "logit 的最大绝对值", "other", "number",
        "Largest absolute value of an attention logit of a query, before the softmax.",
        "一个查询在 softmax 之前，注意力 logit 绝对值的最大值。",
    ),
    _column(
        "mean_distance", "mean attention distance", "平均注意力距离", "attention", "tokens",
        "Distance in tokens between query and key, averaged with the attention weights: how far away the head attends.",
        "查询与键之间的距离（以词元计），按注意力权重平均：这个头关注得多远。",
    ),
    _column(
        "mean_offset", "mean attention offset", "平均注意力偏移", "attention", "tokens",
        "Signed mean attention distance: below 0 the head attends to earlier tokens, above 0 to later ones.",
        "带符号的平均注意力距离：小于 0 表示关注前文，大于 0 表示关注后文。",
        low=None,
    ),
    _column(
        "mean_squared_distance", "mean squared distance", "均方注意力距离", "attention", "number",
        "Squared distance in tokens, averaged with the attention weights: large if even a little attention is very far "
        "away.",
        "以词元计的距离的平方，按注意力权重平均：只要有少量注意力落在很远处，它就会很大。",
    ),
    _share(
        "sink_mass", "attention sink", "注意力汇聚点",
        "Attention weight on the first token of each context. Many heads attend there when no other token is relevant, "
        "which makes it an attention sink.",
        "每段上下文首个词元上的注意力权重。没有相关词元时，许多头会注意那里，即注意力汇聚点（attention sink）。",
    ),
    _share(
        "self_mass", "attention to self", "对自身的注意力",
        "Attention weight of a token on itself.",
        "一个词元对自身的注意力权重。",
    ),
    _share(
        "previous_mass", "attention to previous token", "对前一词元的注意力",
        "Attention weight on the token immediately before.",
        "对紧邻的前一个词元的注意力权重。",
    ),
    _share(
        "next_mass", "attention to next token", "对后一词元的注意力",
        "Attention weight on the token immediately after.",
        "对紧邻的后一个词元的注意力权重。",
    ),
    _share(
        "window_mass", "local attention", "局部注意力",
        "Attention weight within 8 tokens on either side.",
        "前后 8 个词元以内的注意力权重。",
    ),
    _share(
        "learned_sink_mass", "learned sink", "可学习的汇聚点",
        "Attention weight on no token at all, in models with a learned sink logit.",
        "不落在任何词元上的注意力权重；只有带可学习汇聚点 logit 的模型才有。",
    ),
    _share(
        "word_share", "attention within the word", "词内注意力",
        "Share of the attention to other tokens that is inside the word, for words of several tokens.",
        "对其他词元的注意力中落在同一个词之内的比例，只计由多个词元组成的词。",
    ),
    _share(
        "sentence_share", "attention within the sentence", "句内注意力",
        "Share of the attention to other tokens that is inside the sentence, in contexts of several sentences.",
        "对其他词元的注意力中落在同一个句子之内的比例，只计含多个句子的上下文。",
    ),
    _share(
        "special_mass", "attention to special tokens", "对特殊词元的注意力",
        "Attention weight on special tokens, such as [CLS] and [SEP].",
        "对特殊词元（例如 [CLS] 和 [SEP]）的注意力权重。",
    ),
    _share(
        "punctuation_mass", "attention to punctuation", "对标点的注意力",
        "Attention weight on punctuation tokens.",
        "对标点词元的注意力权重。",
    ),
    _column(
        "output_norm", "output norm", "输出范数", "output", "number",
        "Norm of the vector that the head adds to the residual stream (root mean square over tokens).",
        "这个头加到残差流上的向量的范数（对词元取均方根）。",
    ),
    _share(
        "output_norm_share", "share of output norm", "输出范数占比",
        "Squared output norm as a share of the sum over all heads of the layer.",
        "输出范数的平方占本层所有头之和的比例。",
        group="output",
    ),
    _column(
        "effective_rank", "effective rank", "有效秩", "output", "number",
        "Effective number of directions in which the output varies: exp of the entropy of its spectrum. Near 1 the "
        "output varies along a single direction of the residual stream.",
        "输出变化的有效方向数，即其谱熵的指数。接近 1 时，输出只沿残差流的一个方向变化。",
        low=1.0,
    ),
    _share(
        "predictable_share", "share predictable by other heads", "可由其他头预测的比例",
        "Share of the head's output (its contribution to the residual stream) that the other heads of its layer "
        "predict linearly, on held-out tokens: what they can compensate if it is removed. Redundant from 75%; 0 for "
        "unrelated heads.",
        "同层其他头在留出词元上可线性预测的、该头输出（对残差流的贡献）的比例：去掉它时其他头所能补偿的部分。"
        "达到 75% 即为冗余；无关的头为 0。",
        group="output",
        high=1.0,
    ),
    _column(
        "total_correlation", "total correlation of the layer", "本层的总相关", "output", "nats",
        "Total correlation of the outputs of all heads of the layer, in nats; the same number for each of them. 0: the "
        "outputs are independent.",
        "本层所有头的输出的总相关，以奈特计；同层各头数值相同。0 表示各输出相互独立。",
        low=None,
    ),
    _share(
        "qk_top_share", "QK top singular direction", "QK 首奇异方向占比",
        "Share of the largest singular value in the spectrum of the QK circuit (squared). At 1 the circuit has rank 1: "
        "attention depends on a single feature of the tokens.",
        "QK 回路的谱中最大奇异值（平方）所占的比例。等于 1 时回路的秩为 1：注意力只取决于词元的一个特征。",
        group="output",
    ),
    _share(
        "ov_top_share", "OV top singular direction", "OV 首奇异方向占比",
        "Share of the largest singular value in the spectrum of the OV circuit (squared). At 1 the circuit has rank 1: "
        "the head can write in a single direction only.",
        "OV 回路的谱中最大奇异值（平方）所占的比例。等于 1 时回路的秩为 1：这个头只能写入一个方向。",
        group="output",
    ),
    *(
        _share(
            f"pronoun_{_cue}_score", f"pronouns decided by {_cue}", f"靠{_zh}判断的代词",
            "Share of built-in sentences in which the head attends from a pronoun to its antecedent more than to "
            f"another name, where {_cue} decides; 0.5 by chance.",
            f"在靠{_zh}判断先行词的内置句子中，从代词关注先行词多于另一个名字的比例；随机水平 0.5。",
        )
        for _cue, _zh in (("gender", "性"), ("number", "数"), ("meaning", "意思"))
    ),
    _column(
        "copying_circuit_score", "copying score of the OV circuit", "OV 回路的复制得分", "output", "number",
        "Sum of the eigenvalues of the OV circuit W_E W_V W_O W_U over the sum of their magnitudes: 1 if the weights "
        "map every token to a higher logit of itself, -1 if to a lower one. A property of the weights; what the head "
        "does in a text is the score of the roles copy and anti-copy.",
        "OV 回路 W_E W_V W_O W_U 的特征值之和与其绝对值之和的比：权重把每个词元映射到自身更高的 logit 时为 1，"
        "更低时为 -1。这是权重的性质；头在文本中的作用见复制头与反复制头的得分。",
        low=None,
    ),
    # Importance by a loss; see _ABLATION_COSINE for models that return a vector.
    _column(
        "ablation", "ablation: loss increase, in nats", "消融：损失增量（奈特）", "importance", "nats",
        "Increase of the loss when this head alone is ablated, in nats per token. Above 0 the model needs the head.",
        "只消融这一个头时损失的增量，以每个词元的奈特计。大于 0 说明模型需要它。",
        low=None,
    ),
    _column(
        "gradient", "gradient of the loss, in nats", "损失的梯度（奈特）", "importance", "nats",
        "Mean absolute gradient of the loss with respect to a gate on the head's output, in nats per token. A small "
        "gradient does not mean that the head can be removed.",
        "损失对该头输出门控的梯度的平均绝对值，以每个词元的奈特计。梯度小并不意味着可以去掉它。",
    ),
    _column(
        "taylor", "Taylor loss increase, in nats", "损失增量的泰勒估计（奈特）", "importance", "nats",
        "First-order Taylor estimate of the loss increase if the head were ablated, in nats per token. Above 0 the "
        "head helps.",
        "消融该头时损失增量的一阶泰勒估计，以每个词元的奈特计。大于 0 说明它有帮助。",
        low=None,
    ),
)  # fmt: skip
COLUMNS: dict[str, Column] = {column.name: column for column in _KNOWN}

# Ablation of a model without a loss: the change of the text's embedding.
_ABLATION_COSINE = _column(
    "ablation", "ablation: 1 - cosine", "消融：1 - 余弦", "importance", "number",
    "Change of the text's embedding when this head alone is ablated: 1 - the cosine similarity between the embeddings "
    "with and without it. 0: no change; 1: orthogonal.",
    "只消融这一个头时文本向量的变化：1 减去有它和没有它时两个向量的余弦相似度。0 表示不变，1 表示正交。",
    low=None,
)  # fmt: skip
IMPORTANCE = ("ablation", "gradient", "taylor")  # the columns that are measured by a loss


def score_column(role: str) -> str:
    """Return the name of the column with the scores of a role.

    Args:
        role: name of the role.

    >>> score_column("duplicate-token")
    'duplicate_token_score'
    """
    return f"{role.replace('-', '_')}_score"


for _role in ROLES.values():
    _name = score_column(_role.name)
    COLUMNS[_name] = _column(
        _name, f"{_role.label.en} score", f"{_role.label.zh}得分", "other", "number",
        f"Score of the role {_role.name}. {_role.about.en}", f"角色 {_role.name} 的得分。{_role.about.zh}",
        low=None,
    )  # fmt: skip


# Columns that accompany a statistic, by the end of their name.
_COMPANIONS = {
    "_std": (
        Text("{label}, standard deviation", "{label}：标准差"),
        Text(
            "Standard deviation over tokens; the column {name} is the mean.", "在词元之间的标准差；列 {name} 为均值。"
        ),
    ),
    "_max": (
        Text("{label}, maximum", "{label}：最大值"),
        Text("Maximum over tokens; the column {name} is the mean.", "在词元之间的最大值；列 {name} 为均值。"),
    ),
    "_error": (
        Text("{label}, standard error", "{label}：标准误"),
        Text("Standard error of the column {name}.", "列 {name} 的标准误。"),
    ),
    "_chance": (
        Text("{label}, chance", "{label}：随机水平"),
        Text(
            "Value of the column {name} by chance: for uniform attention over the visible tokens; if it is a share "
            "inside the word or the sentence, for attention at the same distances, of which those over 64 tokens count "
            "as one; if it is a copying score, |mean| plus 1.96 standard deviations of heads with random weights.",
            "列 {name} 的随机水平：注意力在可见词元上均匀分布时的值；词内与句内的比例则为距离相同的注意力的值，"
            "其中超过 64 个词元的距离视为同一距离；复制得分则为随机权重的头的 |均值| 加 1.96 个标准差。",
        ),
    ),
}


def column_of(name: str, loss: str | None = None) -> Column:
    """Return the label and explanation of a column; one without an entry is labelled with its name.

    Args:
        name: name of the column.
        loss: loss by which importance was measured, `facts["loss"]` of a run.

    >>> column_of("entropy_std").label.en
    'entropy, standard deviation'
    """
    if name == _ABLATION_COSINE.name and loss == "representation":
        return _ABLATION_COSINE
    if name in COLUMNS:
        return COLUMNS[name]
    suffix = next((suffix for suffix in _COMPANIONS if name.endswith(suffix)), "")
    if suffix:
        return _companion(column_of(name.removesuffix(suffix), loss), suffix)
    return Column(name, Text(name.replace("_", " "), name), Text("A column of the table.", "表中的一列。"))


def _companion(column: Column, suffix: str) -> Column:
    label, about = _COMPANIONS[suffix]
    low = 0.0 if suffix in ("_std", "_error") else column.low
    return Column(
        column.name + suffix,
        label.format(label=column.label),
        about.format(name=column.name),
        "companion",
        column.format,
        low,
        column.high if suffix == "_chance" else None,
    )
