"""Drop-in replacement for `torch.nn.MultiheadAttention`."""

from polyhead.layers.torch_compat.multihead_attention import MultiheadAttention

__all__ = ["MultiheadAttention"]
