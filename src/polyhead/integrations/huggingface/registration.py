"""Register polyhead's attention and mask functions with transformers."""

from __future__ import annotations

from typing import Any

from polyhead.errors import OptionError
from polyhead.integrations.huggingface.attention import attend
from polyhead.integrations.huggingface.mask_functions import make_mask, make_mask_or_none

NAME = "polyhead"
OBSERVED = "polyhead_observed"  # in compiled code that a session observes
OBSERVED_EAGER = "polyhead_observed_eager"  # the same, of a model with eager attention, which has a mask for everything


def register() -> str:
    """Make `"polyhead"` an attention implementation of transformers, and return that name.

    Idempotent. Select it per model:

    Returns:
        The name, "polyhead".

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import polyhead.integrations.huggingface
    >>> config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
    ...                      num_key_value_heads=2, vocab_size=17)
    >>> model = LlamaForCausalLM(config)
    >>> model.set_attn_implementation(polyhead.integrations.huggingface.register())
    >>> model.config._attn_implementation
    'polyhead'
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise OptionError(
            "polyhead.integrations.huggingface needs transformers 5 or newer, with AttentionInterface and "
            "AttentionMaskInterface, "
            f"got: {error}; install it with: pip install 'polyhead[hf]'"
        ) from error
    for name, mask_function in ((NAME, make_mask), (OBSERVED, make_mask_or_none), (OBSERVED_EAGER, make_mask)):
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, mask_function)
    return NAME


def set_attention(model: Any, name: str) -> None:
    """Set the attention implementation of a transformers model and of all models inside it.

    Stacks may have a copy of the config, which the model's `set_attn_implementation` does not reach in every version
    of transformers: in 5.17 the encoder and decoder of T5 keep theirs, without an error.

    Args:
        model: a transformers model.
        name: name of an attention implementation, such as "polyhead", "sdpa" or "eager".
    """
    from transformers import PreTrainedModel

    model.set_attn_implementation(name)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config._attn_implementation != name:
            module.set_attn_implementation(name)
