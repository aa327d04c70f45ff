"""Check the keyword arguments that transformers passes to an attention function.

Models pass their own `**kwargs` down to the attention, so its arguments are mixed with flags and inputs for other parts
of the model. Those known not to affect attention are ignored. Any other argument with a value raises: it might change
the result, and ignoring it would silently give wrong numbers. `attend` supports the arguments in its own signature.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from polyhead.errors import OptionError

# Unsupported arguments, with the reason.
REFUSED: Mapping[str, str] = {
    "cache": "a paged cache of continuous batching is updated inside the attention function",
    "block_indices": "the block size of a selection of key blocks is not passed to the attention function",
    "block_table": "a paged cache stores its keys in blocks",
    "block_mask": "it is a mask of flex attention; pass a 4-D tensor as attention_mask",
    "mask_mod": "it is a mask of flex attention; pass a 4-D tensor as attention_mask",
    "score_mod": "functions of the logits are not supported; pass values to add as position_bias",
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

# Arguments that are used by the model, by other layers, or not at all; none affects what attention computes from its
# query, key, value and mask.
PLUMBING = frozenset(
    {
        # Positions: already used by rotary embeddings, the cache and the mask.
        "position_ids", "cache_position", "position_embeddings", "padding_cache", "rope_deltas",
        # The cache and options of a forward.
        "past_key_values", "past_key_value", "use_cache", "cache_params", "shared_kv_states", "return_dict",
        "num_items_in_batch", "logits_to_keep", "loss_kwargs", "labels", "mems", "is_first", "query_length",
        "next_sequence_length", "is_first_iteration", "max_seqlen", "training",
        # Performance options of other implementations, which do not change the result.
        "max_length_q", "max_length_k", "kernel_options", "deterministic", "target_dtype", "attn_implementation",
        "implementation",
        # Masks that the model has already combined into attention_mask, or that other layers read.
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
# The same by prefix and suffix: output options, and tokens, images and audio before embedding.
PLUMBING_STARTS = ("output_", "return_", "pixel_", "input_", "inputs_")
PLUMBING_ENDS = ("_ids", "_embeds", "_grid_thw", "_position_embeddings", "_embeddings", "_labels", "_sizes")


def refuse_unknown(arguments: Mapping[str, Any]) -> None:
    """Raise for the first argument that has a value and is not known to leave the result unchanged."""
    for name, value in arguments.items():
        if value is None or value is False or name in PLUMBING:
            continue
        if name not in REFUSED and (name.startswith(PLUMBING_STARTS) or name.endswith(PLUMBING_ENDS)):
            continue
        kind = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        reason = REFUSED.get(name, "it may change what attention computes, and polyhead does not know how")
        raise OptionError(f"polyhead attention does not support the argument {name!r}, got {kind}: {reason}")
