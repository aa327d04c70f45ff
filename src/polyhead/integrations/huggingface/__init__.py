"""polyhead as an attention implementation of Hugging Face transformers: `register()`, then `"polyhead"` is a name.

transformers asks two registries for a name: one for the function that computes attention, one for the function that
makes the mask. A name missing from the second silently loses its mask, so `register` always fills both. transformers
itself is imported by `register` and not before.
"""

from polyhead.integrations.huggingface.described_masks import DescribedMask
from polyhead.integrations.huggingface.families import Family, families
from polyhead.integrations.huggingface.registration import NAME, register

__all__ = ["NAME", "DescribedMask", "Family", "families", "register"]
