"""Small models with a tokenizer, in folders, and a text for them."""

from __future__ import annotations

import random
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = ["a", *(f"w{number}" for number in range(90))]
NAMES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", ",", *WORDS]


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A word a token."""
    made = Tokenizer(models.WordLevel({name: number for number, name in enumerate(NAMES)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]",
    )  # fmt: skip


SIZES = {"vocab_size": len(NAMES), "hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 32}
MAKERS = {
    "bert": lambda: transformers.BertModel(
        transformers.BertConfig(**SIZES, num_attention_heads=4, max_position_embeddings=130)
    ),
    "masked": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(**SIZES, num_attention_heads=4, max_position_embeddings=130)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=130)
    ),
    "t5": lambda layers=2: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=len(NAMES), d_model=24, d_kv=6, d_ff=32, num_layers=layers, num_heads=4, decoder_start_token_id=0
        )
    ),
}


def model_folder(folder: Path, name: str, seed: int = 0, **options: int) -> Path:
    torch.manual_seed(seed)
    model = MAKERS[name](**options)
    with torch.no_grad():  # attention far from uniform, as a trained model's is
        for path, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in path:
                parameter.mul_(6)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def broken_folder(folder: Path, original: Path, layer: int, head: int) -> Path:
    """A copy of a llama with NaN in the query weights of one head."""
    model = transformers.LlamaForCausalLM.from_pretrained(original)
    attention = model.model.layers[layer].self_attn
    with torch.no_grad():
        attention.q_proj.weight.unflatten(0, (-1, attention.head_dim))[head] = torch.nan
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def text_folder(folder: Path, documents: int = 6, words: int = 120) -> Path:
    folder.mkdir(exist_ok=True)
    draw = random.Random(5)
    for number in range(documents):
        drawn = [draw.choice(WORDS) + (" ." if draw.random() < 0.1 else "") for _ in range(words + 7 * number)]
        (folder / f"{number}.txt").write_text(" ".join(drawn))
    return folder


ODD_LENGTHS = (31, 37, 41, 47, 61, 65, 67, 69, 71, 73, 75, 95)  # in tokens


def odd_text_folder(folder: Path) -> Path:
    """Documents of odd lengths, for which Triton compiles the same kernels: 16 divides none of their strides.

    In batches of up to 100 tokens there are two of two documents, and eight of one.
    """
    folder.mkdir(exist_ok=True)
    draw = random.Random(5)
    for number, length in enumerate(ODD_LENGTHS):
        words = ["." if place % 11 == 10 else draw.choice(WORDS) for place in range(length - 2)]
        (folder / f"{number:02}.txt").write_text(" ".join(words))
    return folder
