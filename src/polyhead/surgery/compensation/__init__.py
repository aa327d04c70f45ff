"""Compensation for edited heads: W_O of the remaining heads is solved by least squares, and distilled."""
