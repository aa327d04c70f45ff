"""Attention of a few new tokens over a KV cache."""
