"""The head-by-head matrices of a layer: similarity of outputs, of attention and of gradients."""

from __future__ import annotations

from polyhead.analysis.languages import Text
from polyhead.inspection.vocabulary.terms import Term


def _relation(name: str, en: str, zh: str, about_en: str, about_zh: str) -> Term:
    return Term(name, Text(en, zh), Text(about_en, about_zh))


_KNOWN = (
    _relation(
        "cosine", "cosine similarity of outputs", "输出余弦相似度",
        "Cosine similarity of two heads' outputs over all tokens: 1 identical, 0 unrelated, -1 cancelling each "
        "other.",
        "两个头的输出在所有词元上的余弦相似度：1 为相同，0 为无关，-1 为互相抵消。",
    ),
    _relation(
        "cka", "CKA of outputs", "输出的 CKA",
        "Centered kernel alignment: similarity of two heads' outputs up to rotation and scale, 0 to 1.",
        "中心核对齐（CKA）：两个头的输出在旋转和缩放意义下的相似度，从 0 到 1。",
    ),
    _relation(
        "predictable_share", "share predictable by one head", "可由单个头预测的比例",
        "Share of the variance of the row head's output that the column head alone predicts linearly, on held-out "
        "tokens: 1 if the output is a linear map of the column head's, whatever their cosine, 0 if they are unrelated. "
        "Not symmetric.",
        "列所对应的头单独在留出词元上可线性预测的、行所对应的头输出的比例：若后者是前者的线性映射则为 1"
        "（无论余弦多少），无关则为 0。不对称。",
    ),
    _relation(
        "subspace_overlap", "subspace overlap", "子空间重合度",
        "Overlap of the subspaces of the residual stream that two heads can write to, by W_O alone: 0 to 1.",
        "两个头可写入的残差流子空间的重合度，仅由 W_O 决定：从 0 到 1。",
    ),
    _relation(
        "mutual_information", "mutual information", "互信息",
        "Mutual information of two heads' outputs under a Gaussian model, in nats. 0: independent.",
        "高斯假设下两个头的输出的互信息，以奈特计。0 表示相互独立。",
    ),
    _relation(
        "attention_distance", "Jensen-Shannon distance", "注意力的 JS 距离",
        "Jensen-Shannon distance of two heads' attention weights: 0 for the same attention, √ln 2 = 0.83 for no "
        "overlap.",
        "两个头的注意力权重的 Jensen-Shannon 距离：0 为完全相同，√ln 2 = 0.83 为毫无重合。",
    ),
    _relation(
        "gradient_overlap", "gradient overlap", "梯度重合度",
        "Cosine similarity, over tokens, of the gradients of the loss with respect to gates on the two heads: 1 if "
        "both affect the loss alike at every token, -1 if oppositely.",
        "损失对两个头的门控的梯度在各词元上的余弦相似度：1 为方向一致，-1 为相反。",
    ),
)  # fmt: skip
RELATIONS: dict[str, Term] = {term.name: term for term in _KNOWN}


def relation_of(name: str) -> Term:
    """Return the label and explanation of a matrix; one without an entry is labelled with its name.

    Args:
        name: name of the matrix.
    """
    term = RELATIONS.get(name)
    label = Text(name.replace("_", " "), name)
    return term or Term(name, label, Text("A number for each pair of heads of a layer.", "同层每两个头之间的一个数。"))
