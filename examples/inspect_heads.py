"""Find out what every head of a model does, in sentences.

`polyhead.inspect` reads a text with the model, here the packaged sentence encoder and polyhead's built-in texts, and
measures statistics, roles, redundancy and importance of each head. Prints its findings, how many heads have each role,
and the three most important heads.
"""

from __future__ import annotations

from collections import Counter

import polyhead
from polyhead.inspection import Inspection


def main(tokens: int = 1024, layers: tuple[int, ...] | None = None) -> Inspection:
    """Return the inspection of at most `tokens` tokens."""
    found = polyhead.inspect("minilm", tokens=tokens, layers=layers)
    print(f"{found.facts['model']}: {len(found.table)} heads, {found.facts['tokens']:,} tokens\n")

    for finding in found.findings:
        print(f"- {finding}")

    roles = Counter(role for head in found.roles for role in head.roles)
    print("\nheads by role:", ", ".join(f"{role} {count}" for role, count in roles.most_common()) or "none")

    importance = found.table["ablation"]  # 1 - cosine of the text embeddings with and without a head
    for row in importance.argsort(descending=True)[:3]:
        head = polyhead.HeadId(found.table.sites[row].layer, found.table.heads[row])
        print(f"ablating {head!s:<5} changes the text embedding by {importance[row]:.4f}")
    print("A head has a role only if the evidence exceeds chance; a large change means that other heads do not")
    print("replace the head. `polyhead inspect --html page.html` shows the same as a page.")
    return found


if __name__ == "__main__":
    main()
