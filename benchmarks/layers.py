"""`python -m benchmarks layers`: run, write the JSON, show the table."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.contenders import Shape
from benchmarks.decode import decode
from benchmarks.layer import causal, layer, padded
from benchmarks.masked import guard
from benchmarks.measuring import results
from benchmarks.measuring.agreement import Disagreement
from benchmarks.measuring.results import Row
from benchmarks.overhead import overhead
from polyhead.costs.measuring import machine
from polyhead.costs.measuring.runner import ALTERNATIONS, Run

SHAPES = {
    "cpu": ("2x10x512x8", "8x128x768x12", "2x1024x768x12", "1x4096x512x8"),
    "cuda": ("32x512x768x12", "8x2048x1024x16", "2x8192x2048x16", "1x32768x4096x32"),
}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
BENCHES: dict[str, Callable[[Run, Shape], Iterator[Row]]] = {
    "layer": layer,
    "causal": causal,
    "padded": padded,
    "guard": guard,
    "decode": decode,
    "overhead": overhead,
}
QUICK_ALTERNATIONS = 5
RESULTS = Path(__file__).resolve().parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    device = torch.device(options.device)
    run = Run(device, DTYPES[device.type], QUICK_ALTERNATIONS if options.quick else ALTERNATIONS, options.seed)
    facts = {**machine.describe(device, options.commit), "alternations": run.alternations, "quick": options.quick}
    path = options.output or RESULTS / f"{_file_name(device, facts)}{_suffix(options)}.json"
    rows: list[Row] = []
    try:
        for row in _rows(run, options.only, options.shapes or [Shape.parse(text) for text in SHAPES[device.type]]):
            rows.append(row)
            results.write(path, facts, rows)
            print(f"measured {row.bench} at {row.shape}", file=sys.stderr, flush=True)
    except Disagreement as disagreement:
        print(f"no figures: {disagreement}", file=sys.stderr)
        return 2
    show(rows)
    print(f"written to {path}")
    return 1 if options.strict and results.misses(rows) else 0


def _rows(run: Run, only: Sequence[str], shapes: Sequence[Shape]) -> Iterator[Row]:
    for name in only:
        # The overhead has shapes of its own, at which the arithmetic vanishes.
        for shape in shapes if name != "overhead" else shapes[:1]:
            yield from BENCHES[name](run, shape)


def show(rows: Sequence[Row]) -> None:
    """Print the table, then the misses by name."""
    if importlib.util.find_spec("rich") is not None:
        from rich.console import Console

        console = Console()
        # Files and pipes have no width of their own; a wrapped table there is no table.
        (console if console.is_terminal else Console(width=150)).print(results.rich_table(rows))
    else:
        print(results.plain_table(rows))
    print(f"\n{results.count_of_misses(rows)}")


def _file_name(device: torch.device, facts: dict[str, object]) -> str:
    """One file a machine, so that a new run replaces the old one of the same machine and no other."""
    described = facts["machine"]
    assert isinstance(described, dict)
    words = described["gpu"] if device.type == "cuda" else f"{described['cpu']} {described['cores']} cores"
    return f"{device.type}-" + re.sub(r"[^a-z0-9]+", "-", str(words).lower()).strip("-")


def _suffix(options: argparse.Namespace) -> str:
    """A look or a part never takes the place of a machine's whole run."""
    part = options.shapes is not None or options.only != list(BENCHES)
    return ("-quick" if options.quick else "") + ("-partial" if part else "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks layers",
        description="Time polyhead against the contenders in one run: medians of paired ratios, 95% intervals.",
    )
    parser.add_argument(
        "--device", choices=tuple(SHAPES), default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: cuda where there is one",
    )  # fmt: skip
    parser.add_argument(
        "--shapes", type=_shapes, metavar="BxNxDxH,...", help="batch, tokens, width, heads; default: the table's"
    )
    parser.add_argument(
        "--only", type=_benches, default=list(BENCHES), metavar="BENCH,...", help=f"any of {', '.join(BENCHES)}"
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ALTERNATIONS} alternations: a look, no figure")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="where the JSON goes; default: benchmarks/results/")
    parser.add_argument("--commit", help="what is measured, for a copy of the tree without its repository")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a bound is missed")
    return parser


def _shapes(text: str) -> list[Shape]:
    try:
        return [Shape.parse(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _benches(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in BENCHES]:
        raise argparse.ArgumentTypeError(f"no bench is called {', '.join(unknown)}; there are {', '.join(BENCHES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
