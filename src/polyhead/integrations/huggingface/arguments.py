"""Which keyword arguments reach an attention function of transformers, and what becomes of each.

A model passes its own `**kwargs` down to the attention, so beside the arguments of the attention itself arrive flags
and inputs that other parts of the model have read already. What is known to be such plumbing is let through in
silence. Everything else that holds a value is refused by name: it might change the result, and an argument that is
swallowed gives a wrong number. `attend` honours the arguments in its own signature.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from polyhead.errors import OptionError

# Each name with the reason why it cannot be honoured.
REFUSED: Mapping[str, str] = {
    "cache": "a paged cache of continuous batching is updated inside the attention function",
    "block_indices": "a selection of key blocks has a block size that the attention function is not told",
    "block_table": "a paged cache keeps its keys in blocks",
    "block_mask": "it is a mask of flex attention; pass a 4-D tensor as attention_mask",
    "mask_mod": "it is a mask of flex attention; pass a 4-D tensor as attention_mask",
    "score_mod": "a function of the logits cannot be described; pass values to add as position_bias",
    "alibi": "pass the bias itself as position_bias",
    "alibi_slopes": "pass the bias itself as position_bias",
    "use_top_left_mask": "causality here is aligned to the last key, as the masks of transformers are",
    "attn_mask": "the mask is called attention_mask",
    "key_padding_mask": "the mask is called attention_mask, 4-D here and 2-D where the model is called",
    "attention_bias": "values to add to the logits are called position_bias",
    "attn_bias": "values to add to the logits are called position_bias",
    "window_size": "the window is called sliding_window",
    "softmax_scale": "the scale is called scaling",
    "logits_soft_cap": "the cap is called softcap",
    "sinks": "the learned sinks are called s_aux",
}

# Read by the model, by a layer beside the attention, or by nobody; none changes what attention computes from its query,
# key, value and mask.
PLUMBING = frozenset(
    {
        # Where tokens stand: rotary embeddings and the cache have used it, and the mask says the rest.
        "position_ids", "cache_position", "position_embeddings", "padding_cache", "rope_deltas",
        # The cache and the switches of a forward.
        "past_key_values", "past_key_value", "use_cache", "cache_params", "shared_kv_states", "return_dict",
        "num_items_in_batch", "logits_to_keep", "loss_kwargs", "labels", "mems", "is_first", "query_length",
        "next_sequence_length", "is_first_iteration", "max_seqlen", "training",
        # Other implementations' knobs of speed; they compute the same.
        "max_length_q", "max_length_k", "kernel_options", "deterministic", "target_dtype", "attn_implementation",
        "implementation",
        # Masks that the model has already turned into the one it hands over, or that other layers read.
        "encoder_attention_mask", "decoder_attention_mask", "merged_attention_mask", "conv_attention_mask",
        "conv_mask", "mamba_attention_mask", "feature_attention_mask", "input_features_mask", "pixel_mask",
        "padding_mask", "cross_attention_mask", "image_attention_mask", "pair_attention_mask", "prompt_mask",
        "protein_attention_mask", "full_text_row_masked_out_mask", "from_mask", "to_mask", "from_blocked_mask",
        "to_blocked_mask", "band_mask", "text_cross_attn_mask", "vision_cross_attn_mask", "prompt_cross_attn_mask",
        "visual_pos_masks",
        # Inputs of other parts of the model.
        "hidden_states", "hidden_state", "encoder_hidden_states", "token_hidden_states", "global_hidden_states",
        "key_value_states", "encoder_outputs", "mm_encoder_outputs", "reference_points", "spatial_shapes",
        "spatial_shapes_list", "level_start_index", "cu_seqlens", "sub_sampled_lengths", "audio_feature_lengths",
        "use_audio_in_video", "video_second_per_grid", "interpolate_pos_encoding", "flattened_patches", "freqs_ci",
        "vision_feats", "vision_features", "vision_pos_encoding", "text_features", "prompt_feats", "query_pos",
        "t_cond", "modality", "per_layer_inputs", "deepstack_visual_embeds",
    }
)  # fmt: skip
# The same by the shape of the name: what to return, and tokens, pictures and sounds before they were embedded.
PLUMBING_STARTS = ("output_", "return_", "pixel_", "input_", "inputs_")
PLUMBING_ENDS = ("_ids", "_embeds", "_grid_thw", "_position_embeddings", "_embeddings", "_labels", "_sizes")


def refuse_unknown(arguments: Mapping[str, Any]) -> None:
    """Raise for the first argument that holds a value and is not known to leave the result alone."""
    for name, value in arguments.items():
        if value is None or value is False or name in PLUMBING:
            continue
        if name not in REFUSED and (name.startswith(PLUMBING_STARTS) or name.endswith(PLUMBING_ENDS)):
            continue
        kind = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        reason = REFUSED.get(name, "it may change what attention computes, and polyhead does not know how")
        raise OptionError(f"polyhead attention does not honour the argument {name!r}, got {kind}: {reason}")
