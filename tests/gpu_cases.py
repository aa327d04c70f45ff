"""Generated cases for the fused kernels on a GPU: many shapes and masks, few compiled variants.

    python -m tests.gpu_cases --cases 2000 --workers 12

A case is drawn from a variant, which fixes all that a kernel is compiled for; sizes, masks and values are drawn anew.
Output and gradients are held to the error budget, statistics to bounds of their own, both against float64. The workers
only fill Triton's cache, each with some of the variants, before the cases are run one by one. Without a GPU the same
cases are put to `blockwise`.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyhead import Mask, Statistics, attention
from polyhead.ops.common.statistics import NAMES
from polyhead.ops.common.visibility import resolve
from tests.error_budget import Compared, budget_used, plain_formula

FEW = ("max_logit", "entropy", "mean_distance")
ALL = tuple(name for name in NAMES if name != "learned_sink_mass")
DEVICE, BACKEND = ("cuda", "fused") if torch.cuda.is_available() else ("cpu", "blockwise")


@dataclass(frozen=True)
class Variant:
    mask: str
    dtype: torch.dtype
    dims: tuple[int, int] = (64, 64)
    group: int = 1
    names: tuple[str, ...] = FEW
    aligned: bool = True  # as many queries as keys
    options: dict[str, Any] = field(default_factory=dict)
    backward: bool = True

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        extra = "".join(f" {name}" for name in self.options)
        names = "all" if self.names == ALL else len(self.names)
        return f"{self.mask}{extra} {kind} {self.dims} group {self.group} statistics {names}"


def variants() -> list[Variant]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    return [
        Variant("none", bf16, (128, 128), 2),
        Variant("none", bf16, (64, 64), names=(*FEW, "mean_offset", "confidence"), aligned=False),
        Variant("causal", bf16, (128, 128), 4),
        Variant("causal", bf16, (64, 64)),
        Variant("causal", fp16, (96, 64), 2, aligned=False),
        Variant("window", bf16, (128, 128), 2),
        Variant("window", bf16, (64, 64), aligned=False),
        Variant("causal", bf16, (64, 64), names=ALL),
        Variant("none", fp16, (80, 80), 2, names=ALL, aligned=False),
        Variant("causal", fp32, (64, 64), names=ALL),
        Variant("window", bf16, (128, 128), 2, names=ALL),
        Variant("window and first keys", fp16, (64, 64), names=ALL),
        Variant("lengths", bf16, (64, 64), 2, names=ALL),
        Variant("left padding", bf16, (128, 128), names=ALL),
        Variant("documents", bf16, (64, 64), names=ALL),
        Variant("documents", fp32, (32, 48), 2),
        Variant("dense", bf16, (64, 64), names=ALL),
        Variant("bias", bf16, (128, 128), 2, names=ALL),
        Variant("table", fp16, (64, 64), names=ALL),
        Variant("positions", bf16, (64, 64), names=ALL, aligned=False),
        Variant("causal", bf16, (64, 64), 2, names=(*ALL, "learned_sink_mass"), options={"sinks": True}),
        Variant("causal", bf16, (128, 128), names=ALL, options={"softcap": True}),
        Variant("causal", fp16, (64, 64), names=FEW, options={"dropout": True}),
        Variant("none", bf16, (256, 256), names=FEW),
        Variant("causal", bf16, (24, 40), 3, names=ALL),
        Variant("causal", fp32, (16, 16), 2, aligned=False),
    ]


@dataclass(frozen=True)
class Case:
    variant: Variant
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None
    options: dict[str, Any]


def draw(variant: Variant, seed: int) -> Case:
    """A case of odd sizes, so that it needs no other variant: no length is 1 or a multiple of 16."""
    chance = random.Random(seed)
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape: int, spread: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE) * spread

    batch, kv_heads = chance.choice([2, 3]), chance.choice([2, 3])
    heads = kv_heads * variant.group
    keys = chance.choice([3, 5, 17, 33, 63, 65, 127, 129, 131, 191, 255, 257, 301, 383, 511])
    queries = keys if variant.aligned else max(3, keys - 2 * chance.choice([1, 3, 5, 33, 63, 77]))
    keys = queries if variant.aligned else queries + 2 * chance.choice([1, 3, 5, 33, 63, 77])
    spread = chance.choice([1.0, 1.0, 1.0, 4.0])
    # Heads beside each other in memory, as a layer leaves them.
    query = normal(batch, queries, heads, variant.dims[0], spread=spread).transpose(1, 2).to(variant.dtype)
    key = normal(batch, keys, kv_heads, variant.dims[0]).transpose(1, 2).to(variant.dtype)
    value = normal(batch, keys, kv_heads, variant.dims[1]).transpose(1, 2).to(variant.dtype)
    options: dict[str, Any] = {}
    if "sinks" in variant.options:
        options["sinks"] = normal(heads).to(variant.dtype)
    if "softcap" in variant.options:
        options["softcap"] = 5.0
    if "dropout" in variant.options:
        options |= {"dropout": 0.3, "seed": seed}
    mask = _mask(variant, chance, generator, batch, heads, queries, keys)
    return Case(variant, query, key, value, mask, options)


def _mask(
    variant: Variant,
    chance: random.Random,
    generator: torch.Generator,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
) -> Mask | None:
    kind = variant.mask

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator, device=DEVICE)

    if kind == "none":
        return None
    if kind == "window":
        return Mask.window(left=chance.choice([3, 5, 37, 101]), right=chance.choice([3, 5, 37]))
    if kind == "window and first keys":
        return Mask.window(left=chance.choice([3, 37, 101]), right=0, sinks=chance.choice([3, 5]))
    if kind == "lengths":
        return Mask.causal() & Mask.lengths(integers(keys + 1, batch))
    if kind == "left padding":
        return Mask.causal() & Mask.lengths(integers(keys + 1, batch), side="left")
    if kind == "documents":
        ids = torch.cumsum((torch.rand(batch, keys, generator=generator, device=DEVICE) < 0.05).long(), -1)
        return Mask.causal() & Mask.documents(ids)
    if kind == "dense":
        return Mask.dense(torch.rand(batch, heads, queries, keys, generator=generator, device=DEVICE) < 0.3)
    if kind == "bias":
        bias = torch.randn(1, heads, queries, keys, generator=generator, device=DEVICE)
        return Mask.bias(torch.where(bias > 2, -torch.inf, bias).to(variant.dtype))
    if kind == "table":
        return Mask.causal() & Mask.relative(torch.randn(heads, 67, generator=generator, device=DEVICE), 65)
    if kind == "positions":
        places = integers(2 * keys, batch, keys) - 3
        return Mask.causal() & Mask.positions(integers(2 * keys, batch, queries), places)
    return Mask.causal()


def check(case: Case) -> dict[str, float]:
    """The share of its bound that each result used; above 1 is a failure."""
    variant = case.variant
    names = Statistics(*variant.names, sink_keys=3, window=5)
    exact = _run(case, names, torch.float64, "reference")
    ours = _run(case, names, variant.dtype, BACKEND)
    plain = _plain(case)
    used = {}
    for name in ("output", "query", "key", "value"):
        if name in exact and name in plain:
            used[name], _, _ = budget_used(Compared(ours[name], exact[name], plain[name]), name=name)
    key_norm = case.key.double().norm(dim=-1).amax()
    logit = 1e-5 * variant.dims[0] ** -0.5 * (case.query.double().norm(dim=-1) * key_norm)
    for name in ("logsumexp", *variant.names):
        got, want = ours[name].double(), exact[name]
        assert torch.equal(got.isinf(), want.isinf()), f"{name}: infinities stand elsewhere"
        error = torch.where(want.isinf(), 0.0, got - want).abs()
        assert error.isfinite().all(), f"{name} is not finite"
        used[name] = float((error / _bound(name, want, logit, case.key.shape[2])).max())
    return used


def _bound(name: str, exact: Tensor, logit: Tensor, keys: int) -> Tensor | float:
    if name in ("max_logit", "max_abs_logit"):
        return logit
    if name == "logsumexp":
        return logit + 1e-6  # the largest logit and a logarithm
    if name == "entropy":
        return 1e-3
    if name == "visible_keys":
        return 1e-9
    # Weights carry the rounding of their logits; a moment of the distance carries it times the distance.
    weight = logit + 1e-5
    if name == "mean_squared_distance":
        return weight * keys**2
    return weight * keys if "mean_distance" in name else weight


def _run(case: Case, names: Statistics, dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
    variant = case.variant
    inputs = [x.to(dtype).detach().requires_grad_(variant.backward) for x in (case.query, case.key, case.value)]
    options = {k: x.to(dtype) if isinstance(x, Tensor) else x for k, x in case.options.items()}
    result = attention(
        *inputs, mask=_to(case.mask, dtype), statistics=names, logsumexp=True, backend=backend, **options
    )
    assert result.statistics is not None
    assert result.logsumexp is not None
    found = {"output": result.output, "logsumexp": result.logsumexp, **dict(result.statistics.items())}
    if variant.backward:
        # Through the output alone: that is what the plain formula sets a budget for.
        direction = torch.randn(result.output.shape, generator=torch.Generator().manual_seed(7)).bfloat16()
        grads = torch.autograd.grad(result.output, inputs, direction.to(DEVICE, dtype))
        found |= dict(zip(("query", "key", "value"), grads, strict=True))
    return {name: x.detach() for name, x in found.items()}


def _plain(case: Case) -> dict[str, Tensor]:
    variant = case.variant
    inputs = [x.detach().requires_grad_(variant.backward) for x in (case.query, case.key, case.value)]
    batch, heads, queries, _ = case.query.shape
    keys = case.key.shape[2]
    everything = (0, queries), (0, keys)
    visible, bias = None, None
    if case.mask is not None:
        seen = resolve(case.mask, batch=batch, heads=heads, queries=queries, keys=keys, device=case.query.device)
        if seen is not None:
            visible, bias = seen.allowed_tile(*everything), seen.bias_tile(*everything, variant.dtype)
    if bias is not None:
        bias = torch.where(bias == -torch.inf, 0.0, bias).expand(batch, heads, queries, keys)
    keep, rate = None, case.options.get("dropout", 0.0)
    if rate:
        from polyhead.ops.common.dropout import keep_tile

        seed = torch.tensor([case.options["seed"]], device=DEVICE)
        keep = keep_tile(seed, rate, batch, heads, *everything)
    result = plain_formula(
        *inputs,
        visible=None if visible is None else visible.expand(batch, heads, queries, keys),
        bias=bias,
        softcap=case.options.get("softcap"),
        sinks=case.options.get("sinks"),
        keep=keep,
        rate=rate,
    )
    found = {"output": result.output}
    if variant.backward:
        direction = torch.randn(result.output.shape, generator=torch.Generator().manual_seed(7)).bfloat16()
        grads = torch.autograd.grad(result.output, inputs, direction.to(DEVICE, variant.dtype))
        found |= dict(zip(("query", "key", "value"), grads, strict=True))
    return {name: x.detach() for name, x in found.items()}


def _to(mask: Mask | None, dtype: torch.dtype) -> Mask | None:
    """Biases in the dtype of the run, so that float64 is exact."""
    if mask is None or not len(mask.biases):
        return mask
    return Mask.bias(mask.biases[0].to(dtype))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--only", default="", help="variants whose names hold this, such as float32")
    parser.add_argument("--share", help="of the variants, as I/N: compile them and stop")
    arguments = parser.parse_args()
    everyone = [variant for variant in variants() if arguments.only in str(variant)]
    if arguments.share:
        index, count = map(int, arguments.share.split("/"))
        for variant in everyone[index::count]:
            check(draw(variant, 0))
        return 0
    began = time.perf_counter()
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu_cases", "--share", f"{i}/{arguments.workers}", "--only", arguments.only]
        )
        for i in range(arguments.workers)
    ]
    codes = [worker.wait() for worker in workers]
    print(f"compiled {len(everyone)} variants in {time.perf_counter() - began:.0f} s, exit codes {set(codes)}")
    worst: dict[str, tuple[float, str]] = {}
    failures: list[str] = []
    ran: Counter[str] = Counter()
    for seed in range(arguments.cases):
        variant = everyone[seed % len(everyone)]
        if seed % 200 == 0:
            seconds = time.perf_counter() - began
            print(f"{seed} cases, {len(failures)} failures, {seconds:.0f} s", flush=True)
        try:
            used = check(draw(variant, seed))
        except AssertionError as error:
            failures.append(f"case {seed}, {variant}: {error}")
            continue
        ran[str(variant)] += 1
        for name, share in used.items():
            if share > worst.get(name, (0.0, ""))[0]:
                worst[name] = share, f"case {seed}, {variant}"
            if not share <= 1:
                failures.append(f"case {seed}, {variant}: {name} used {share:.2f} of its bound")
    for name, (share, where) in worst.items():
        print(f"{name:18} used at most {share:.3f} of its bound: {where}")
    for failure in failures[:40]:
        print("FAILED", failure)
    total = sum(ran.values())
    print(f"{total} cases of {len(ran)} variants ran, {len(failures)} failures, {time.perf_counter() - began:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
