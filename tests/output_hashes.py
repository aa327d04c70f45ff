"""Hashes of public outputs, to compare two versions: `python -m tests.output_hashes FILE`.

    python -m tests.output_hashes before.json     # in a checkout of one version
    python -m tests.output_hashes after.json --against before.json

`--device cuda` hashes the outputs of the kernels instead of those on a CPU.

Equal hashes mean equal bits. Names that changed between versions are looked up under both, so the script itself can be
copied into an older checkout.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import multiprocessing
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

import polyhead

SAVED = Path(__file__).parent / "formats" / "saved"
MODULES = (
    ("polyhead.layers.config", "polyhead.layers"),
    ("polyhead.ops.talking_heads", "polyhead.functional"),
)


def module(name: str) -> Any:
    """Import a module by its current name, or by the name it had before."""
    for names in MODULES:
        if names[0] == name:
            for candidate in names:
                try:
                    return importlib.import_module(candidate)
                except ImportError:
                    continue
    return importlib.import_module(name)


def digest(*tensors: torch.Tensor | None) -> str:
    found = hashlib.sha256()
    for x in tensors:
        found.update(b"none" if x is None else x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def attention() -> Iterator[tuple[str, str]]:
    masks = {
        "none": None,
        "causal": polyhead.Mask.causal(),
        "window": polyhead.Mask.window(7, sinks=2),
        "lengths": polyhead.Mask.lengths([19, 11]) & polyhead.Mask.causal(),
    }
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for backend in ("reference", "blockwise", "sdpa"):
            for name, mask in masks.items():
                torch.manual_seed(1)
                q, k, v = (torch.randn(2, heads, 19, 24, dtype=dtype, requires_grad=True) for heads in (6, 2, 2))
                try:
                    result = polyhead.attention(q, k, v, mask=mask, statistics=True, logsumexp=True, backend=backend)
                except polyhead.errors.BackendUnsupported:
                    continue
                assert result.statistics is not None
                # `window_mass` had another default window before.
                rows = [x for key, x in result.statistics.items() if key != "window_mass"]
                result.output.float().square().sum().backward()
                yield (
                    f"attention {dtype} {backend} {name}",
                    digest(result.output, result.logsumexp, *rows, q.grad, k.grad, v.grad),
                )
        torch.manual_seed(2)
        q, k = torch.randn(1, 4, 33, 16, dtype=dtype), torch.randn(1, 4, 33, 16, dtype=dtype)
        causal = polyhead.Mask.causal()
        logsumexp = polyhead.attention(q, k, q, mask=causal, logsumexp=True, backend="blockwise").logsumexp
        found = polyhead.profile(q, k, logsumexp, mask=causal, received=True, offsets=True, argmax=True, topk=3)
        yield f"profile {dtype}", digest(*(x for x in vars_of(found) if isinstance(x, torch.Tensor)))
        mix = torch.randn(4, 4, dtype=dtype)
        talking = module("polyhead.ops.talking_heads").talking_attention
        yield f"talking {dtype}", digest(talking(q, k, q, logits_mix=mix, weights_mix=mix).output)


def kernels() -> Iterator[tuple[str, str]]:
    """Outputs, statistics and gradients of the kernels on a GPU; a process per case, since most of it is compiling."""
    cases = [
        (dtype, mask)
        for dtype in ("float32", "bfloat16", "float16")
        for mask in ("none", "causal", "window", "lengths")
    ]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for found in pool.map(kernels_of, *zip(*cases, strict=True)):
            yield from found.items()


def kernels_of(dtype_name: str, mask_name: str) -> dict[str, str]:
    dtype = getattr(torch, dtype_name)
    mask = {
        "none": None,
        "causal": polyhead.Mask.causal(),
        "window": polyhead.Mask.window(70, sinks=4),
        "lengths": polyhead.Mask.lengths(torch.tensor([300, 170], device="cuda")) & polyhead.Mask.causal(),
    }[mask_name]
    found = {}
    # The default window of `window_mass` was another one before.
    for statistics in (None, polyhead.Statistics("max_logit", "entropy", "sink_mass", "window_mass", window=16)):
        torch.manual_seed(1)
        q, k, v = (
            torch.randn(2, heads, 300, 64, dtype=dtype, device="cuda", requires_grad=True) for heads in (8, 2, 2)
        )
        result = polyhead.attention(q, k, v, mask=mask, statistics=statistics, logsumexp=True, backend="fused")
        rows = [x for _, x in result.statistics.items()] if result.statistics else []
        case = f"{dtype_name} {mask_name} {'statistics' if statistics else 'plain'}"
        found[f"fused {case} forward"] = digest(result.output, result.logsumexp, *rows)
        result.output.float().square().sum().backward()
        found[f"fused {case} gradients"] = digest(q.grad, k.grad, v.grad)
        with torch.no_grad():
            last = polyhead.attention(q[:, :, -1:], k, v, mask=mask, statistics=statistics, backend="fused")
            found[f"decode {case}"] = digest(last.output)
    torch.manual_seed(2)
    q, k = (torch.randn(2, 8, 300, 64, dtype=dtype, device="cuda") for _ in range(2))
    logsumexp = polyhead.attention(q, k, q, mask=mask, logsumexp=True, backend="fused").logsumexp
    assert logsumexp is not None
    profile = polyhead.profile(q, k, logsumexp, mask=mask, received=True, offsets=True, argmax=True, topk=3)
    # `received` and `offsets` are summed by atomic additions and differ between two runs of one version.
    found[f"profile {dtype_name} {mask_name}"] = digest(profile.argmax, profile.top_keys, profile.top_weights)
    mix = torch.randn(8, 8, dtype=dtype, device="cuda")
    talking = module("polyhead.ops.talking_heads").talking_attention
    output = talking(q, k, q, mask=mask, logits_mix=mix, weights_mix=mix).output
    found[f"talking {dtype_name} {mask_name}"] = digest(output)
    return found


def vars_of(value: Any) -> list[Any]:
    return [getattr(value, name) for name in value.__dataclass_fields__]


def layers() -> Iterator[tuple[str, str]]:
    config = module("polyhead.layers.config")
    for index, described in enumerate(json.loads((SAVED / "configs.json").read_text())):
        torch.manual_seed(3)
        layer = polyhead.build_attention(config.AttentionConfig.from_dict(described))
        x = torch.randn(2, 13, described["embed_dim"], requires_grad=True)
        try:
            result = layer(x)
        except polyhead.errors.ShapeError:  # a layer over several inputs
            continue
        result.output.square().sum().backward()
        weights = [p.grad for _, p in sorted(layer.named_parameters())]
        yield f"layer {index} {described['kind']}", digest(result.output, x.grad, *weights)


def commands() -> Iterator[tuple[str, str]]:
    import pyarrow.parquet

    def run(*arguments: object) -> None:
        command = [sys.executable, "-m", "polyhead", *map(str, arguments), "--device", "cpu"]
        subprocess.run(command, check=True, capture_output=True, cwd=SAVED)

    with tempfile.TemporaryDirectory() as folder:
        for model in ("decoder", "encoder"):
            place = Path(folder) / model
            run("inspect", model, "--text", "text", "--tokens", 400, "--context", 24, "--save", place)
            table = pyarrow.parquet.read_table(place / "heads.parquet")
            columns = [column.to_pylist() for column in table.columns]
            yield f"inspect {model}", hashlib.sha256(repr(columns).encode()).hexdigest()[:16]
            pruned = Path(folder) / f"pruned-{model}"
            read = ["--text", "text", "--context", 24, "--tokens", 200, "--form", "uneven"]
            run("prune", model, "--heads", "L0H1,L1H2", *read, "-o", pruned)
            yield f"prune {model}", digest(*(x for _, x in sorted(polyhead.load(pruned).state_dict().items())))
            shrunk = Path(folder) / f"shrunk-{model}"
            run("shrink", model, "--target", "50%-heads", *read, "-o", shrunk)
            yield f"shrink {model}", digest(*(x for _, x in sorted(polyhead.load(shrunk).state_dict().items())))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = (kernels,) if options.device == "cuda" else (attention, layers, commands)
    found = {name: x for part in parts for name, x in part()}
    options.file.write_text(json.dumps(found, indent=1) + "\n")
    if options.against is None:
        return 0
    before = json.loads(options.against.read_text())
    different = sorted(name for name in before.keys() | found.keys() if before.get(name) != found.get(name))
    print(f"{len(found) - len(different)} of {len(before.keys() | found.keys())} equal; different: {different}")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
