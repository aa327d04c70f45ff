"""Inputs for models of transformers, from the parameters of their `forward`."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.coverage.shrinking import IMAGE, PATCH, TEXT

BATCH, DECODED, SAMPLES = 2, 7, 1700
_IMAGES = ("pixel_values", "images", "image")


def inputs_of(model: nn.Module, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield arguments of a model, the most complete first: all modalities, the text, the main input.

    Args:
        model: a model of transformers.
        given: arguments as of the table of overrides, which replace those made here.
    """
    parameters = inspect.signature(model.forward).parameters
    made: dict[str, Any] = {name: make(model) for name, make in _MAKERS.items() if name in parameters}
    if "image_grid_thw" in parameters and "pixel_values" in made:
        made |= _patches(model)
    elif "image_grid_thw" in made:
        del made["image_grid_thw"]
    required = [
        name
        for name, x in parameters.items()
        if x.default is x.empty and x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)
    ]
    made |= {name: make(model) for name, make in _REQUIRED.items() if name in required}
    if "inference_session" in required:
        made = {"inference_session": made["inference_session"], "frame_idx": 1}
    explicit = {name: parsed(text) for name, text in given.items()}
    made = {name: x for name, x in {**made, **explicit}.items() if x is not None and given.get(name) != "none"}
    decoder = {name: x for name, x in made.items() if name.startswith("decoder_input")}
    if len(decoder) and not getattr(model.config, "is_encoder_decoder", False):
        yield {name: x for name, x in made.items() if name not in decoder}
    yield made
    if isinstance(features := made.get("input_features"), Tensor):
        mask = {"input_features_mask": torch.ones(BATCH, features.shape[-1], dtype=torch.long)}
        if "input_features_mask" in parameters and features.ndim == 3:
            yield {**made, **mask}
        yield {**made, "input_features": features.mT.contiguous()}
    if isinstance(sound := made.get("input_values"), Tensor) and sound.ndim == 2:
        yield {**made, "input_values": sound[:, None]}
    text = {name: x for name, x in made.items() if name not in (*_IMAGES, "input_features", "input_values")}
    main = getattr(model, "main_input_name", "input_ids")
    yield {**text, **explicit}
    yield {**{name: x for name, x in made.items() if name == main or name in decoder}, **explicit}
    yield {name: x for name, x in made.items() if name != "input_ids"}
    yield {"pixel_values_videos": _video(model), **explicit}


def parsed(text: Any) -> Any:
    """Return the value of an input of the table: `float 2,3,32`, `float<9 2,3`, `int<9 2,3`, `ones 2,9`, or a literal.

    >>> parsed("int<3 2,5").shape, parsed([[1, 4, 4]])
    (torch.Size([2, 5]), tensor([[1, 4, 4]]))
    """
    if isinstance(text, list):
        return torch.tensor(text)
    if isinstance(text, str) and text.startswith("literal "):
        return json.loads(text.removeprefix("literal "))
    if not isinstance(text, str) or not (match := re.fullmatch(r"(float|ones|int|bool)(?:<(\d+))? ([\d,]+)", text)):
        return text if text != "none" else None
    shape = [int(x) for x in match[3].split(",")]
    if match[1] == "float":
        return torch.randn(shape) if match[2] is None else torch.randint(int(match[2]), shape).float()
    if match[1] in ("ones", "bool"):
        return torch.ones(shape, dtype=torch.bool if match[1] == "bool" else torch.long)
    return torch.randint(int(match[2]), shape)


def with_placeholders(arguments: dict[str, Any], model: nn.Module, error: str) -> dict[str, Any] | None:
    """Return arguments with as many placeholder tokens as a model says that it has features; None if it does not.

    Args:
        arguments: arguments for which the model raised.
        model: a model whose text has placeholders for images or sounds.
        error: what it raised.
    """
    match = re.search(
        r"(image|audio|video|speech)?.*tokens: (\d+),? .*?features:? (\d+)", error, re.IGNORECASE | re.DOTALL
    )
    ids = arguments.get("input_ids")
    if match is None or not isinstance(ids, Tensor):
        return None
    token = _placeholder(model, (match[1] or "image").lower())
    per_row, rest = divmod(int(match[3]), len(ids))
    if token is None or rest or per_row > 2000 or int(match[2]) == int(match[3]):
        return None
    filler = torch.full((len(ids), per_row), token)
    changed = {**arguments, "input_ids": torch.cat([ids[:, :3], filler, ids[:, -(TEXT - 3) :]], 1)}
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        changed["mm_token_type_ids"] = (changed["input_ids"] == token).long()
    return changed


def _placeholder(model: nn.Module, kind: str) -> int | None:
    configs = [model.config, getattr(model.config, "text_config", None)]
    for config in configs:
        for name in (f"{kind}_token_id", f"{kind}_token_index", f"{kind}_id", "image_token_id", "image_token_index"):
            if isinstance(value := getattr(config, name, None), int):
                return value
    return None


def _setting(model: nn.Module, *names: str, default: Any) -> Any:
    """Return the first of these settings of a model or of the configs inside it."""
    pending: list[Any] = [model.config]
    while pending:
        config = pending.pop(0)
        for name in names:
            if isinstance(value := getattr(config, name, None), int | list | tuple):
                return value
        pending += [x for name in getattr(config, "sub_configs", {}) if (x := getattr(config, name, None)) is not None]
    return default


def _text(model: nn.Module, tokens: int = TEXT) -> Tensor:
    return torch.randint(5, 45, (BATCH, tokens))


def _image(model: nn.Module) -> Tensor:
    size = _setting(model, "image_size", "img_size", default=IMAGE)
    height, width = size[-2:] if isinstance(size, list | tuple) and len(size) > 1 else (size, size)
    channels = _setting(model, "num_channels", "in_channels", "in_chans", default=3)
    shape = (BATCH, channels if isinstance(channels, int) else 3, height, width)
    frames = _setting(model, "num_frames", "frames_per_clip", default=None)
    return torch.randn((shape[0], frames, *shape[1:]) if isinstance(frames, int) else shape)


def _patches(model: nn.Module) -> dict[str, Tensor]:
    """Return two images as rows of patches, with their grid, as Qwen2-VL takes them."""
    grid = 4
    size = _setting(model, "patch_size", default=PATCH)
    channels = _setting(model, "in_channels", "in_chans", "num_channels", default=3)
    width = channels * _setting(model, "temporal_patch_size", default=1) * size**2
    return {
        "pixel_values": torch.randn(BATCH * grid**2, width),
        "image_grid_thw": torch.tensor([[1, grid, grid]] * BATCH),
    }


def _video(model: nn.Module) -> Tensor:
    image = _image(model)
    frames = _setting(model, "num_frames", "frames_per_clip", default=4)
    return image if image.ndim == 5 else image[:, None].repeat(1, frames, 1, 1, 1)


def _sound(model: nn.Module) -> Tensor:
    bins = _setting(
        model,
        "num_mel_bins",
        "feature_projection_input_dim",
        "input_feat_per_channel",
        "feature_size",
        "n_mels",
        "num_mels",
        default=16,
    )
    frames = 2 * _setting(model, "max_source_positions", default=32)
    return torch.randn(BATCH, bins, frames)


def _boxes(model: nn.Module) -> Tensor:
    corners = torch.randint(1, 40, (BATCH, TEXT, 2))
    return torch.cat([corners, corners + torch.randint(1, 40, (BATCH, TEXT, 2))], -1)


def _session(model: nn.Module) -> Any:
    """Return a session of a tracker of objects in videos, with a point or a prompt, whose first frame is segmented."""
    sessions = [x for name, x in vars(sys.modules[type(model).__module__]).items() if name.endswith("InferenceSession")]
    size = _image(model).shape[-1]
    video = torch.randn(2, 3, size, size)
    session = sessions[0](video=video, video_height=size, video_width=size, dtype=torch.float32)
    if hasattr(session, "add_prompt"):
        prompt = session.add_prompt("objects of this kind")
        session.prompt_input_ids[prompt] = torch.randint(5, 45, (1, TEXT))
        session.prompt_attention_masks[prompt] = torch.ones(1, TEXT, dtype=torch.long)
    else:
        points = {
            "point_coords": torch.full((1, 1, 1, 2), size / 2),
            "point_labels": torch.ones(1, 1, 1, dtype=torch.int32),
        }
        session.add_point_inputs(session.obj_id_to_idx(1), 0, points)
        session.obj_with_new_inputs = [1]
    model(inference_session=session, frame_idx=0)
    return session


def _atoms(model: nn.Module) -> Any:
    """Return two atoms for each token, as EsmFold2 takes them."""
    tokens = torch.arange(TEXT).repeat_interleave(2).expand(BATCH, -1)
    charges, positions = torch.randn(BATCH, 2 * TEXT), torch.randn(BATCH, 2 * TEXT, 3)
    return sys.modules[type(model).__module__].EsmFold2AtomInputs(
        ref_pos=positions,
        ref_charge=charges,
        atom_attention_mask=torch.ones_like(tokens, dtype=torch.bool),
        ref_element=torch.randint(40, tokens.shape),
        ref_atom_name_chars=torch.randint(40, (*tokens.shape, 4)),
        ref_space_uid=tokens,
        atom_to_token=tokens,
    )


def _shared_keys(model: nn.Module) -> dict[str, tuple[Tensor, ...]]:
    """Return keys and values of the last layer of each kind of a main model, as Gemma 4's drafters take them."""
    drafter: Any = model.model
    shared = {}
    for layer, kind in zip(drafter.layers, drafter.config.layer_types, strict=True):
        attention = layer.self_attn
        heads = drafter.config.num_attention_heads // attention.num_key_value_groups
        shape = (BATCH, heads, TEXT, attention.head_dim)
        shared[kind] = tuple(torch.randn(shape, dtype=torch.float32).to(torch.get_default_dtype()) for _ in range(2))
    return shared


_MAKERS: dict[str, Callable[[nn.Module], Any]] = {
    "shared_kv_states": lambda model: partial(_shared_keys, model),
    "input_ids": _text,
    "decoder_input_ids": lambda model: _text(model, DECODED),
    "pixel_values": _image,
    "input_features": _sound,
    "input_values": lambda model: torch.randn(BATCH, SAMPLES),
    "bbox": _boxes,
    "visual_feats": lambda model: torch.randn(BATCH, 5, _setting(model, "visual_feat_dim", default=8)),
    "visual_pos": lambda model: torch.rand(BATCH, 5, _setting(model, "visual_pos_dim", default=4)),
    "qformer_input_ids": _text,
    "past_values": lambda model: torch.randn(
        BATCH, _setting(model, "context_length", default=32), _setting(model, "num_input_channels", default=1)
    ),
}

# Only for parameters without a default.
_REQUIRED = {
    "atom_inputs": lambda model: partial(_atoms, model),
    "attention_mask": lambda model: torch.ones(BATCH, TEXT, dtype=torch.long),
    "input_features_mask": lambda model: torch.ones(BATCH, _sound(model).shape[-1], dtype=torch.long),
    "inference_session": lambda model: partial(_session, model),
    "pixel_values_videos": _video,
    "hidden_states": lambda model: _patches(model)["pixel_values"],
    "grid_thw": lambda model: _patches(model)["image_grid_thw"],
    "task_inputs": lambda model: torch.randint(5, 45, (BATCH, _setting(model, "task_seq_len", default=TEXT))),
}
