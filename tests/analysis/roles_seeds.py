"""The roles of planted and of random models, and `python -m tests.analysis.roles_seeds --seeds 20` for many seeds."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field

import torch
from torch import Tensor

import polyhead
from polyhead.analysis.roles import HeadRoles, evidence_of, head_roles
from polyhead.analysis.roles_rules import RULES
from polyhead.geometry import HeadId
from polyhead.layers.transformer import LanguageModel
from polyhead.observation import AttentionSite, BatchMetadata
from polyhead.observation.direct_logits import DirectLogits
from polyhead.observation.role_evidence import EvidenceCollector, HeadEvidence
from polyhead.observation.role_evidence_tokens import TokenVectors, rare_tokens
from polyhead.sources.probes import repeated_batch
from polyhead.sources.token_class import TokenClass
from tests.planted import BEGIN, Sizes, planted_model, random_model, random_tokens

SIZES = Sizes(vocab_size=48, token_dim=48, num_heads=8)  # smaller than the default: eigenvalues take most of the time
WORDS = SIZES.vocab_size
COMMA = 5  # one word that is called punctuation, and has nothing to do with the others
BLOCKS = (19, 23, 29)


def classes_of(tokens: Tensor) -> Tensor:
    classes = torch.full_like(tokens, TokenClass.WORD)
    classes[tokens == BEGIN] = TokenClass.SPECIAL
    classes[tokens == COMMA] = TokenClass.PUNCTUATION
    return classes


@torch.no_grad()
def collected(
    model: LanguageModel, batches: list[Tensor], collector: EvidenceCollector
) -> dict[AttentionSite, HeadEvidence]:
    """Evidence of some batches, each text a document of its own."""
    first = 0
    with polyhead.observe(model, statistics=False, collect=[collector]) as session:
        for tokens in batches:
            documents = torch.arange(first, first + len(tokens))
            session.metadata = BatchMetadata(documents=documents, tokens=tokens, classes=classes_of(tokens))
            model(tokens)
            first += len(tokens)
    return evidence_of(session.observations.collected)


def roles_of(model: LanguageModel, seed: int) -> tuple[HeadRoles, ...]:
    """All roles, by random text and repeated text."""
    texts = [random_tokens(seed + 100 + i, batch=8, length=61, vocab_size=WORDS) for i in range(2)]
    rare = rare_tokens(torch.bincount(torch.cat(texts).flatten(), minlength=WORDS))
    collector = EvidenceCollector(
        rare=rare, meaning=TokenVectors.of(model.embedding.weight), direct_logits=direct_logits_of(model)
    )
    text = collected(model, texts, collector)
    words = torch.arange(1, WORDS)
    probes = [
        repeated_batch(words, batch=6, block=block, seed=seed + 200 + block, before=(BEGIN,)).ids for block in BLOCKS
    ]
    repeated = collected(model, probes, EvidenceCollector())
    return head_roles(text, repeated, seed=seed)


def direct_logits_of(model: LanguageModel) -> DirectLogits:
    outputs = {
        (f"blocks.{number}.attention", "self"): torch.stack([head.output for head in block.attention.heads])
        for number, block in enumerate(model.blocks)
    }
    return DirectLogits(outputs, model.output.weight.detach(), model.norm.weight.detach())


@dataclass
class Margins:
    """How far the scores of heads that have a role lie from those of all others, over all seeds."""

    least: dict[str, float] = field(default_factory=dict)
    most: dict[str, float] = field(default_factory=dict)

    def add(self, found: HeadRoles, truth: frozenset[str]) -> None:
        for score in found.scores:
            better = RULES[score.role].unless
            if score.role in truth:
                self.least[score.role] = min(self.least.get(score.role, 2.0), score.score)
            elif better not in truth:
                self.most[score.role] = max(self.most.get(score.role, -2.0), score.score)

    def __str__(self) -> str:
        lines = [f"{'role':16} threshold  least that has it  most that has it not"]
        for role, rule in RULES.items():
            least = f"{self.least[role]:.3f}" if role in self.least else "none planted"
            lines.append(f"{role:16} {rule.threshold:9.2f}  {least:>17}  {self.most.get(role, float('nan')):20.3f}")
        return "\n".join(lines)


def wrong_roles(seed: int, causal: bool, margins: Margins | None = None) -> list[str]:
    """Where the roles found differ from those planted, and every role found in a random model, in words."""
    margins, wrong = margins or Margins(), []
    planted = planted_model(seed, causal=causal, sizes=SIZES)
    for found in roles_of(planted.model, seed):
        truth = planted.roles[HeadId(found.site.layer, found.head)]
        margins.add(found, truth)
        if found.roles != truth:
            wrong.append(f"seed {seed}, causal {causal}, planted {sorted(truth)}: {found}")
    for found in roles_of(random_model(seed + 50, causal=causal, sizes=SIZES), seed):
        margins.add(found, frozenset())
        if len(found.roles):
            wrong.append(f"seed {seed}, causal {causal}, random: {found}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    margins, right = Margins(), 0
    for seed in range(options.first, options.first + options.seeds):
        wrong = [line for causal in (True, False) for line in wrong_roles(seed, causal, margins)]
        right += not wrong
        print("\n".join(wrong) or f"seed {seed}: all roles found, no other", flush=True)
    print(f"{right} of {options.seeds} seeds\n{margins}")
    return int(right < options.seeds)


if __name__ == "__main__":
    sys.exit(main())
