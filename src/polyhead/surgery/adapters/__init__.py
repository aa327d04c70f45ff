"""Attention layers of a model and the weights of their heads."""
