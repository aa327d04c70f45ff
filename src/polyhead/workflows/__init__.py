"""Workflows: what the command line does, as functions that take a model and a text and return data.

`polyhead` exports them: `inspect`, `syntax`, `prune`, `merge`, `convert`, `shrink` and `undo`. `compare` is in
`polyhead.inspection`, `plan` and `choose` are in `polyhead.costs`.
"""
