"""polyhead as an attention implementation of Hugging Face transformers, registered as `"polyhead"` by `register()`.

transformers has two registries: attention functions and mask functions. An implementation without an entry in the
second silently loses its mask, so `register` always fills both. This package can be imported without transformers,
which is imported by the functions that need it.
"""

from polyhead.integrations.huggingface.described_masks import DescribedMask
from polyhead.integrations.huggingface.families import Family, families
from polyhead.integrations.huggingface.registration import NAME, register, set_attention

__all__ = ["NAME", "DescribedMask", "Family", "families", "register", "set_attention"]
