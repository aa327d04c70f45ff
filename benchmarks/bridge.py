"""Statistics of a long text through TransformerLens' `TransformerBridge`: `python -m benchmarks bridge --help`.

TransformerLens is not among the requirements: pip install 'transformer-lens>=4'.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import polyhead
from benchmarks.measuring.json_lines import write_rows
from polyhead.costs.measuring import machine_facts
from polyhead.errors import OptionError

ROOT = Path(__file__).resolve().parents[1]
LAYERS, HEADS, HEAD_DIM, VOCABULARY = 2, 2, 16, 256
LENGTHS = (512, 1024, 2048)  # of texts that `run_with_cache` runs


def rows(tokens: int) -> list[dict[str, Any]]:
    """Return the memory and time of `run_with_cache` for short texts, and of `observe` for them and a long one.

    Each is measured in a process of its own, so that one's peak is not another's.
    """
    found = []
    for length in LENGTHS:
        found.append({"what": "run_with_cache", "tokens": length, **_alone(_cached, length)})
    for length in (LENGTHS[-1], tokens):
        found.append({"what": "observe", "tokens": length, **_alone(_observed, length)})
    last = found[len(LENGTHS) - 1]
    return [{"what": "cache, computed", "tokens": tokens, "cache_bytes": cache_bytes(last, tokens)}, *found]


def cache_bytes(row: dict[str, Any], tokens: int) -> int:
    """Return the size of a cache at another length, from that of a row: by pair of tokens, and by token."""
    length = row["tokens"]
    by_token = (row["cache_bytes"] - row["pair_bytes"]) // length
    return int(row["pair_bytes"] // length**2 * tokens**2 + by_token * tokens)


def _alone(work: Callable[[Any, Tensor], dict[str, Any]], tokens: int) -> dict[str, Any]:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_measured, work, tokens).result()


def _measured(work: Callable[[Any, Tensor], dict[str, Any]], tokens: int) -> dict[str, Any]:
    bridge, ids = _bridge(), _text(tokens)
    with torch.no_grad():
        bridge(ids[:, :64])  # what the first call allocates
        before, cpu, start = _peak(), time.process_time(), time.perf_counter()
        found = work(bridge, ids)
    seconds = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
    return {**found, **seconds, "peak_bytes": _peak() - before, "threads": torch.get_num_threads()}


def _peak() -> int:
    """Return the largest resident memory of this process until now, in bytes."""
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024  # in bytes there, in KiB on Linux


def _cached(bridge: Any, ids: Tensor) -> dict[str, Any]:
    _, cache = bridge.run_with_cache(ids)
    tensors = {x.untyped_storage().data_ptr(): x for x in cache.values()}.values()
    pairs = [x for x in tensors if x.shape[-2:] == (ids.shape[1], ids.shape[1])]
    patterns = torch.stack([cache["pattern", layer] for layer in range(LAYERS)]).double()
    entropy = torch.special.entr(patterns).sum(-1).mean((1, 3)).flatten()
    return {"cache_bytes": _bytes(tensors), "pair_bytes": _bytes(pairs), "entropy": entropy.tolist()}


def _bytes(tensors: Any) -> int:
    return sum(x.untyped_storage().nbytes() for x in tensors)


def _observed(bridge: Any, ids: Tensor) -> dict[str, Any]:
    with polyhead.observe(bridge) as session:
        bridge(ids)
    profile = session.profile
    return {"rows": profile["tokens"].tolist(), "entropy": profile["entropy"].tolist()}


def _text(tokens: int) -> Tensor:
    """Return the bytes of the documentation, [1, tokens]."""
    pages = b"".join(x.read_bytes() for x in sorted((ROOT / "docs").glob("*.md")))
    if len(pages) < tokens:
        raise OptionError(f"--tokens must be at most {len(pages)}, the bytes of docs, got {tokens}")
    return torch.frombuffer(bytearray(pages[:tokens]), dtype=torch.uint8).long()[None]


def _bridge() -> Any:
    """Return a bridge to a small random Llama whose tokens are bytes."""
    from tokenizers import Tokenizer, models
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    width = HEADS * HEAD_DIM
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=1 << 20,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(7)  # logits far from zero
    model.set_attn_implementation("eager")
    with tempfile.TemporaryDirectory() as folder:
        words = Tokenizer(models.WordLevel({f"b{x}": x for x in range(VOCABULARY)}, unk_token="b0"))
        special = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "b0")
        PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
        config.save_pretrained(folder)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        return TransformerBridge.boot_transformers(folder, hf_model=model, tokenizer=tokenizer).eval()


def run(tokens: int, output: Path | None, commit: str | None) -> None:
    """Measure, print the rows and write them."""
    facts: dict[str, Any] = machine_facts.describe(torch.device("cpu"), commit)
    facts["versions"] |= {name: version(name) for name in ("transformer-lens", "transformers")}
    found = rows(tokens)
    for row in found:
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    if output is not None:
        write_rows(output, facts, found)
