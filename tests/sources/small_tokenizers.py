"""One small handmade tokenizer per family, with known token classes and positions."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDPIECE = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "river", "run", "##ning", "##s", ".", "1968", "河", "+")


def wordpiece() -> PreTrainedTokenizerFast:
    """Like BERT: [CLS] before and [SEP] after, and a length to cut to in its own file, which must not be followed."""
    vocabulary = {token: number for number, token in enumerate(WORDPIECE)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=7)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]",
    )  # fmt: skip


def byte_level() -> PreTrainedTokenizerFast:
    """Like GPT-2: every byte is a token, a few words are; its unknown token is the end of text and never happens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("Ġ", "r"),
        ("Ġr", "u"),
        ("Ġru", "n"),
        ("i", "n"),
        ("in", "g"),
        ("Ċ", "Ċ"),
        ("æ", "²"),
        ("æ²", "³"),
        ("Ġ", "Ġ"),
    ]
    names = ["<|end|>", *letters, *("".join(merge) for merge in merges)]
    vocabulary = {token: number for number, token in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<|end|>", bos_token="<|end|>", eos_token="<|end|>"
    )


def sentence_piece() -> PreTrainedTokenizerFast:
    """Like Llama 2: ▁ for a space, bytes for what the vocabulary lacks, <s> before the text."""
    bytes_of_text = [f"<0x{byte:02X}>" for byte in range(256)]
    names = ["<unk>", "<s>", "</s>", *bytes_of_text, "▁", "a", "▁a", "r", "u", "n", "▁r", "▁ru", "▁run", "s", "河", "."]
    vocabulary = {token: number for number, token in enumerate(names)}
    merges = [("▁", "a"), ("▁", "r"), ("▁r", "u"), ("▁ru", "n")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


FAMILIES = {"WordPiece": wordpiece, "byte level": byte_level, "SentencePiece": sentence_piece}
