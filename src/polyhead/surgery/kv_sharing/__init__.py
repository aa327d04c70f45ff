"""Heads brought together: one key head for several, one head of two."""
