"""Least-squares compensation: W_O of the remaining heads is solved to reconstruct the layer's output."""
