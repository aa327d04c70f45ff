"""Edits of heads as values: previewed, applied and undone."""
