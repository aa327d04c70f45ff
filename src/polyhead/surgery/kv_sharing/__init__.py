"""Heads brought together: one KV head for several, one head of two."""
