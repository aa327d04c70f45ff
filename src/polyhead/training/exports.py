"""Public names of `polyhead.training`."""

from polyhead.training.gated_heads import DropHead, HeadGates
from polyhead.training.qk_clip import ClippedHeads, QKClip
from polyhead.training.regularizers import entropy_band, subspace_overlap

__all__ = ["ClippedHeads", "DropHead", "HeadGates", "QKClip", "entropy_band", "subspace_overlap"]
