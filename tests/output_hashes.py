"""Hashes of public outputs on a CPU, to compare two versions: `python -m tests.output_hashes FILE`.

    python -m tests.output_hashes before.json     # in a checkout of one version
    python -m tests.output_hashes after.json --against before.json

Equal hashes mean equal bits. Names that changed between versions are looked up under both, so the script itself can be
copied into an older checkout.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
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
        found.update(b"none" if x is None else x.detach().contiguous().view(torch.uint8).numpy().tobytes())
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
            run("prune", model, "--heads", "0.1,1.2", "--text", "text", "--context", 24, "--tokens", 200, "-o", pruned)
            yield f"prune {model}", digest(*(x for _, x in sorted(polyhead.load(pruned).state_dict().items())))
            shrunk = Path(folder) / f"shrunk-{model}"
            read = ["--text", "text", "--context", 24, "--tokens", 200]
            run("shrink", model, "--target", "25%-heads", *read, "-o", shrunk)
            yield f"shrink {model}", digest(*(x for _, x in sorted(polyhead.load(shrunk).state_dict().items())))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: x for part in (attention, layers, commands) for name, x in part()}
    options.file.write_text(json.dumps(found, indent=1) + "\n")
    if options.against is None:
        return 0
    before = json.loads(options.against.read_text())
    different = sorted(name for name in before.keys() | found.keys() if before.get(name) != found.get(name))
    print(f"{len(found) - len(different)} of {len(before.keys() | found.keys())} equal; different: {different}")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
