"""Public names of `polyhead.training`."""

from polyhead.training.qk_clip import ClippedHeads, QKClip

__all__ = ["ClippedHeads", "QKClip"]
