"""Talking-heads attention: heads are mixed before and after the softmax."""

from polyhead.ops.talking_heads.api import talking_attention

__all__ = ["talking_attention"]
