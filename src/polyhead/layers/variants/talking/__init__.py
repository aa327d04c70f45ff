"""Talking heads."""

from polyhead.layers.variants.talking.config import TalkingHeadsConfig
from polyhead.layers.variants.talking.layer import TalkingHeads

__all__ = ["TalkingHeads", "TalkingHeadsConfig"]
