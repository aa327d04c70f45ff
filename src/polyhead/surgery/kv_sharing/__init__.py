"""Fewer KV heads for a trained model, and heads fused into one."""
