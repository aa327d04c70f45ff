"""Observe the attention heads of a model while it runs.

Runs the packaged sentence encoder on polyhead's built-in texts inside `polyhead.observe`, and prints the most focused,
the least focused, the most local and the most distant head, and how far the outputs are from those of an unobserved
call. Attention weights are never materialised.
"""

from __future__ import annotations

import torch
from transformers import AutoTokenizer

import polyhead
from polyhead.sources import default_documents


def main(documents: int = 7) -> tuple[polyhead.HeadProfile, float]:
    """Return the table of heads, and the largest difference between observed and unobserved outputs."""
    model = polyhead.load("minilm")
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    texts = [document.text for document in default_documents()[:documents]]
    inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")

    with torch.no_grad():
        unobserved = model(**inputs).last_hidden_state
        with polyhead.observe(model, statistics=("entropy", "confidence", "mean_distance")) as session:
            observed = model(**inputs).last_hidden_state
    table = session.profile  # one row per head: print(table), table["entropy"], table.to_pandas()
    print(repr(table))

    for title, column, row in (
        ("most focused", "entropy", table["entropy"].argmin()),
        ("least focused", "entropy", table["entropy"].argmax()),
        ("most local", "mean_distance", table["mean_distance"].argmin()),
        ("most distant", "mean_distance", table["mean_distance"].argmax()),
    ):
        head = polyhead.HeadId(table.sites[row].layer, table.heads[row])
        confidence = table["confidence"][row]
        print(f"{title:>13}: {head!s:<5} {column} {table[column][row]:.2f}, confidence {confidence:.2f}")

    tokens = inputs["attention_mask"].bool()  # outputs at padding are not defined
    difference = float((observed - unobserved)[tokens].abs().max())
    print(f"largest difference to the unobserved outputs: {difference:.1e}")
    print("Entropy is in nats: exp(entropy) is the effective number of keys of a token. Confidence is the largest")
    print("weight, distances are in tokens. The difference is rounding: observing a model does not change what it")
    print("computes.")
    return table, difference


if __name__ == "__main__":
    main()
