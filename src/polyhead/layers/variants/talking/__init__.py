"""Talking-heads attention (Shazeer et al. 2020): 3.6 times the forward of MHA, no gain seen.

Logits are mixed over heads before the softmax and weights after it. Against multi-head attention of the same width
(2 x 4,096 causal tokens of width 2,048, 16 heads, bfloat16, H200) the forward takes 2.41 instead of 0.67 ms and a
training step 17.1 instead of 2.30 ms. Byte models of 11M parameters end 0.008 bits per byte above multi-head attention
over equal tokens, within the noise of seeds. Figures from docs/arrangements.md.
"""

from polyhead.layers.variants.talking.config import TalkingHeadsConfig
from polyhead.layers.variants.talking.layer import TalkingHeads

__all__ = ["TalkingHeads", "TalkingHeadsConfig"]
