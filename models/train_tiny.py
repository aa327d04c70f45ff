"""Train the packaged model `tiny`: a byte-level Llama of 5 layers and 8 heads, in minutes on one GPU.

    python models/train_tiny.py --wikipedia enwik8.gz --plays shakespeare.txt --output tiny --run tiny-run

The text is the start of enwik8 (English Wikipedia, March 2006), without its markup, and plays of Shakespeare. The last
5% of each are held out; the weights with the smallest loss there are kept. Writes the model in bfloat16 with a
tokenizer of bytes, and `training.json`: loss curve, sources with digests, versions, and the previous-token and
induction scores of every head, measured on materialised attention weights. `loss.svg` shows the curve; the card,
README.md, is written by hand.

`--run` is a run directory of polyhead: statistics of every head along both parts of the training, and its induction
score. `polyhead view tiny-run` shows it.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import hashlib
import html
import json
import math
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

import polyhead
from polyhead.training import HeadMonitor, RunDirectory, StepRecord

CONTEXT = 512
HELD_OUT = 0.05
SPECIAL = ("<pad>", "</s>", "<unk>")  # as in ByT5
FIRST_BYTE = len(SPECIAL)
END_OF_TEXT = 1
CONFIG = {
    "vocab_size": FIRST_BYTE + 256,
    "hidden_size": 256,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 640,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": END_OF_TEXT,
    "bos_token_id": None,
}
WATCHED = (
    *("normalized_entropy", "max_logit", "mean_distance", "sink_mass", "previous_mass"),
    *("output_norm", "output_norm_share", "gradient_norm"),
)


def read_wikipedia(path: Path) -> list[str]:
    """Return the articles of a Wikipedia dump as plain text, without redirects."""
    dump = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode("utf-8", "ignore")
    articles = []
    for title, body in re.findall(r"<title>(.*?)</title>.*?<text[^>]*>(.*?)</text>", dump, re.DOTALL):
        if not body.startswith("#REDIRECT") and ":" not in title:
            text = plain_text(html.unescape(html.unescape(body)))
            if len(text) > 500:
                articles.append(f"{title}\n\n{text}\n")
    return articles


def plain_text(body: str) -> str:
    """Remove wiki markup: comments, references, tables, templates, images, links and emphasis."""
    body = re.sub(r"<!--.*?-->|<ref[^>]*/>|<ref.*?</ref>|<math>.*?</math>|<gallery>.*?</gallery>", "", body, flags=re.S)
    for nested in (r"\{\|[^{}]*\|\}", r"\{\{[^{}]*\}\}", r"\{\|.*?\|\}"):
        before = None
        while before != body:
            before, body = body, re.sub(nested, "", body, flags=re.S)
    body = re.sub(r"\[\[(?:Image|Category|File|[a-z-]{2,12}):[^\[\]]*(?:\[\[[^\[\]]*\]\][^\[\]]*)*\]\]", "", body)
    body = re.sub(r"\[\[(?:[^|\[\]]*\|)?([^\[\]]*)\]\]", r"\1", body)
    body = re.sub(r"\[https?://\S+ ?([^\]]*)\]", r"\1", body)
    body = re.sub(r"'{2,}|<[^<>]*>", "", body)
    body = re.sub(r"^=+ *(.*?) *=+ *$", r"\1", body, flags=re.M)
    body = re.sub(r"^[*#:;]+ *", "- ", body, flags=re.M)
    body = re.sub(r"^[|!].*$", "", body, flags=re.M)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+", " ", body)).strip()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are bytes, with the ids of ByT5, and which knows the offsets of its tokens."""
    vocabulary = dict(zip(SPECIAL, range(FIRST_BYTE), strict=True))
    vocabulary |= {character: FIRST_BYTE + byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=CONTEXT, **names)


def as_ids(documents: list[str]) -> Tensor:
    """Return documents as ids of the tokenizer: bytes, and an end of text after each document."""
    parts = [x for text in documents for x in (*(FIRST_BYTE + byte for byte in text.encode()), END_OF_TEXT)]
    return torch.tensor(parts, dtype=torch.int16)


def split(ids: Tensor) -> tuple[Tensor, Tensor]:
    cut = int(len(ids) * (1 - HELD_OUT))
    return ids[:cut], ids[cut:]


def batch_of(ids: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Return contexts from random places of the text; one in four repeats a passage, half of these random bytes."""
    noise, repeated = size // 8, size // 4
    offsets = torch.arange(CONTEXT, device=ids.device).repeat(size, 1)
    offsets[noise:repeated] %= random_integers(CONTEXT // 8, CONTEXT // 2, (repeated - noise, 1), generator)
    contexts = ids[random_integers(0, len(ids) - CONTEXT, (size, 1), generator) + offsets].long()
    contexts[:noise] = copying_batch(noise, CONTEXT, generator)
    return contexts


def copying_batch(size: int, length: int, generator: torch.Generator) -> Tensor:
    """Return random bytes that repeat after an eighth to a half of the length."""
    periods = random_integers(length // 8, length // 2, (size, 1), generator)
    bytes_ = random_integers(FIRST_BYTE, FIRST_BYTE + 256, (size, length), generator)
    return bytes_.gather(1, torch.arange(length, device=bytes_.device) % periods)


def random_integers(low: int, high: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(low, high, shape, generator=generator, device=generator.device)


def repeated_bytes(count: int, period: int, device: torch.device) -> Tensor:
    """Return contexts of random bytes that repeat after `period` bytes, the same in every call."""
    generator = torch.Generator(device).manual_seed(0)
    passages = torch.randint(FIRST_BYTE, FIRST_BYTE + 256, (count, period), generator=generator, device=device)
    return passages.repeat(1, CONTEXT // period)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, ids: Tensor) -> float:
    """Return the mean loss per byte, in nats, over contexts that cover the held-out text once."""
    contexts = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT).long()
    losses = [model(input_ids=x, labels=x).loss.float() * len(x) for x in contexts.split(128)]
    return float(torch.stack(losses).sum()) / len(contexts)


@torch.no_grad()
def copying_loss(model: LlamaForCausalLM, device: torch.device) -> float:
    """Return the mean loss, in nats, of random bytes that repeat: small once the model copies what it has seen."""
    x = repeated_bytes(16, CONTEXT // 4, device)
    labels = x.clone()
    labels[:, : CONTEXT // 4] = -100
    return float(model(input_ids=x, labels=labels).loss)


@torch.no_grad()
def head_scores(model: LlamaForCausalLM, ids: Tensor) -> dict[str, list[list[float]]]:
    """Return each head's mean weight on the previous byte and, in repeated random bytes, on the byte after the match.

    Both are read from materialised attention weights [batch, heads, queries, keys].
    """
    model.set_attn_implementation("eager")
    contexts = ids[: 16 * CONTEXT].view(16, CONTEXT).long()
    previous = [x.float().diagonal(-1, 2, 3).mean((0, 2)) for x in attention_weights(model, contexts)]
    period = CONTEXT // 2
    repeated = attention_weights(model, repeated_bytes(16, period, ids.device))
    induction = [x.float()[:, :, period:].diagonal(1, 2, 3).mean((0, 2)) for x in repeated]
    return {
        name: [[round(value, 4) for value in layer.tolist()] for layer in layers]
        for name, layers in {"previous_token": previous, "induction": induction}.items()
    }


class InductionRun(RunDirectory):
    """A run directory with one more column, `induction_score` as `polyhead inspect` measures it; in float32."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.scores: dict[int, Tensor] = {}  # of the heads, by step

    def measure(self, step: int, model: LlamaForCausalLM) -> None:
        """Measure the heads as they are at the start of a step. The text is not used by the score, so it is short."""
        sizes = {"context": CONTEXT // 4, "tokens": CONTEXT // 2, "importance": "none", "chance": False}
        with evaluating(model):
            self.scores[step] = polyhead.inspect(model, tokenizer=byte_tokenizer(), **sizes).table["induction_score"]

    def on_record(self, record: StepRecord) -> None:
        score = self.scores.pop(record.step)[None]
        columns, values = (*record.columns, "induction_score"), torch.cat([record.values, score]).float()
        super().on_record(replace(record, columns=columns, values=values, measured=None))


@contextmanager
def evaluating(model: LlamaForCausalLM) -> Iterator[None]:
    """Set a model to evaluation mode, in which a monitor does not count its forwards."""
    model.eval()
    yield
    model.train()


def attention_weights(model: LlamaForCausalLM, ids: Tensor) -> tuple[Tensor, ...]:
    return model(input_ids=ids, output_attentions=True).attentions


def adamw(model: LlamaForCausalLM, rate: float) -> torch.optim.AdamW:
    weights = [x for x in model.parameters() if x.dim() > 1]
    gains = [x for x in model.parameters() if x.dim() <= 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=model.device.type == "cuda")


def take_step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, ids: Tensor, monitor: HeadMonitor) -> Tensor:
    (run,) = monitor.callbacks
    if monitor.is_observing:
        run.measure(monitor.steps, model)
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    monitor.step(loss)
    return loss.detach()


def learn_to_copy(
    model: LlamaForCausalLM, generator: torch.Generator, monitor: HeadMonitor, *, steps: int, batch: int, rate: float
) -> None:
    """Train on random bytes that repeat, two thirds of the steps with short contexts, the rest with full ones.

    Without it no induction head was seen to form: there is too little text, and too little to copy in it.
    """
    optimizer = adamw(model, rate)
    for step in range(steps):
        is_short = step < steps * 2 // 3
        x = copying_batch(batch if is_short else batch // 4, CONTEXT // 4 if is_short else CONTEXT, generator)
        take_step(model, optimizer, x, monitor)
        if (step + 1) % 100 == 0:
            with evaluating(model):
                loss = copying_loss(model, generator.device)
            print(json.dumps({"step": step + 1, "copying": loss}), flush=True)


def train(
    model: LlamaForCausalLM,
    ids: Tensor,
    held_out: dict[str, Tensor],
    generator: torch.Generator,
    monitor: HeadMonitor,
    *,
    steps: int,
    batch: int,
    rate: float,
) -> list[dict[str, float]]:
    """Train with a warmup and a cosine decay; keep the best weights on held-out text; return the loss curve."""
    optimizer, warmup = adamw(model, rate), max(1, steps // 20)

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / warmup) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    curve, running = [], []
    best, kept = math.inf, {}
    for step in range(steps):
        running.append(take_step(model, optimizer, batch_of(ids, batch, generator), monitor))
        schedule.step()
        if (step + 1) % max(1, steps // 40) == 0:
            point = {"step": step + 1, "train": float(torch.stack(running).mean()), "rate": schedule.get_last_lr()[0]}
            with evaluating(model):
                point |= {name: held_out_loss(model, x) for name, x in held_out.items()}
                point["copying"] = copying_loss(model, ids.device)
            curve.append({name: round(value, 6) for name, value in point.items()})
            running.clear()
            total = sum(point[name] for name in held_out)
            if total < best:
                best, kept = total, {name: x.clone() for name, x in model.state_dict().items()}
            print(json.dumps(curve[-1]), flush=True)
    model.load_state_dict(kept)
    return curve


def draw_curve(curve: list[dict[str, float]], path: Path) -> None:
    """Draw the losses over the steps, in bits per byte."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "tiny", "axes.spines.top": False}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    names = {"train": "training batches", "wikipedia": "Wikipedia, held out", "plays": "plays, held out"}
    for name, label in names.items():
        axes.plot([x["step"] for x in curve], [x[name] / math.log(2) for x in curve], label=label)
    axes.set(xlabel="steps on the text", ylabel="bits per byte", ylim=(1, None))
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wikipedia", type=Path, required=True, help="the first 5,000,000 bytes of enwik8, or more")
    parser.add_argument("--plays", type=Path, required=True, help="plain text of Shakespeare's plays")
    parser.add_argument("--output", type=Path, required=True, help="folder of the model")
    parser.add_argument("--run", type=Path, required=True, help="folder of the run directory")
    parser.add_argument("--every", type=int, default=30, help="steps between two of the run directory")
    parser.add_argument(
        "--copying-steps", type=int, default=1500, help="steps on repeated random bytes, before the text"
    )
    parser.add_argument(
        "--steps", type=int, default=1200, help="steps on the text; 0 writes the run directory, and no model"
    )
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--commit", help="the commit of this script, where git cannot be asked")
    options = parser.parse_args()

    start = time.time()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sources = {"wikipedia": read_wikipedia(options.wikipedia), "plays": [options.plays.read_text()]}
    parts = {name: split(as_ids(documents).to(device)) for name, documents in sources.items()}
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).to(device)
    model.generation_config.pad_token_id = 0
    held_out = {name: held for name, (_, held) in parts.items()}
    ids = torch.cat([ids for ids, _ in parts.values()])
    generator = torch.Generator(device).manual_seed(0)
    sizes = {"batch": options.batch, "rate": options.rate}
    run = InductionRun(options.run)
    with HeadMonitor(model, every=options.every, statistics=WATCHED, callbacks=[run]) as monitor:
        copying = sizes | {"steps": options.copying_steps, "rate": options.rate / 2}
        learn_to_copy(model, generator, monitor, **copying)
        if not options.steps:
            return
        curve = train(model, ids, held_out, generator, monitor, steps=options.steps, **sizes)

    model = model.to(torch.bfloat16).eval()
    model.config.dtype = torch.float32  # for computing: many CPUs have no arithmetic in bfloat16
    model.save_pretrained(options.output)
    byte_tokenizer().save_pretrained(options.output)
    model = model.float()
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    record = {
        "date": datetime.date.today().isoformat(),
        "commit": options.commit or head,
        "machine": torch.cuda.get_device_name() if device == "cuda" else device,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "seconds": round(time.time() - start),
        "parameters": sum(x.numel() for x in model.parameters()),
        "copying_steps": options.copying_steps,
        "steps": options.steps,
        "bytes_per_step": options.batch * CONTEXT,
        "peak_learning_rate": options.rate,
        "sources": {
            name: {
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                "training_bytes": len(parts[name][0]),
                "held_out_bytes": len(parts[name][1]),
                "held_out_bits_per_byte": round(held_out_loss(model, held_out[name]) / math.log(2), 4),
            }
            for name, path in {"wikipedia": options.wikipedia, "plays": options.plays}.items()
        },
        "curve": curve,
        "scores": head_scores(model, held_out["wikipedia"]),
    }
    (options.output / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    draw_curve(curve, options.output / "loss.svg")
    print(json.dumps(record["sources"]), json.dumps(record["scores"]))


if __name__ == "__main__":
    main()
