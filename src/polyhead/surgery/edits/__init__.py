"""Edits of heads as values: counted, made and undone."""
