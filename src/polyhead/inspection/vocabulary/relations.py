"""The matrices of heads by heads: in which sense two heads of a layer are alike."""

from __future__ import annotations

from polyhead.inspection.vocabulary.terms import Term, Text

_KNOWN = (
    Term(
        "cosine",
        Text("say the same", "写入相同"),
        Text(
            "How well what two heads write agrees over all tokens: 1 is the same, 0 unrelated, -1 heads that undo each "
            "other.",
            "两个头写入的内容在所有词元上有多一致：1 为相同，0 为无关，-1 为互相抵消。",
        ),
    ),
    Term(
        "cka",
        Text("say the same, up to a rotation", "写入相同（允许旋转）"),
        Text(
            "Whether two heads tell tokens apart in the same way, even if they write it into other directions: 0 to 1.",
            "两个头是否以同样的方式区分词元，即使写入的方向不同：从 0 到 1。",
        ),
    ),
    Term(
        "subspace_overlap",
        Text("write into the same place", "写入相同的空间"),
        Text(
            "Whether two heads write into the same directions, whatever they write there: 0 to 1.",
            "两个头写入的方向是否相同，不论写的是什么：从 0 到 1。",
        ),
    ),
    Term(
        "mutual_information",
        Text("know of each other", "互信息"),
        Text(
            "How much of what one head says can be told from the other, in nats. 0 is nothing.",
            "由一个头所写的内容能推知另一个头多少，以奈特计。0 表示毫无关系。",
        ),
    ),
    Term(
        "attention_distance",
        Text("look differently", "注视的差异"),
        Text(
            "How differently two heads look, whatever they then say: 0 is the same places, 0.83 never the same.",
            "两个头所看之处有多不同，不论随后写了什么：0 为完全相同，0.83 为毫无重合。",
        ),
    ),
    Term(
        "gradient_overlap",
        Text("are needed together", "同时被需要"),
        Text(
            "Whether the loss wants more or less of both heads at the same tokens: 1 always, -1 always the opposite.",
            "损失是否在相同的词元上同时想要更多或更少的这两个头：1 为总是如此，-1 为总是相反。",
        ),
    ),
)
RELATIONS: dict[str, Term] = {term.name: term for term in _KNOWN}


def relation_of(name: str) -> Term:
    """What a matrix means; one without an entry here goes by its name."""
    found = RELATIONS.get(name)
    plain = Text(name.replace("_", " "), name)
    return found or Term(name, plain, Text("A number for each two heads of a layer.", "同层每两个头之间的一个数。"))
