"""Context parallel: one sequence over several ranks, with exact attention and exact statistics."""
