"""Random calls of attention, compared with the formula in float64 on the same device.

    python -m tests.fuzz_attention --seconds 280 --jobs 16      # on a GPU
    python -m tests.fuzz_attention --seconds 60 --device cpu    # without one
    python -m tests.fuzz_attention --case full-0-3-57           # one case again, from the line of a finding

A case is a few calls of `polyhead.attention`, and often of `polyhead.profile`, with the same sizes and options: sizes
at the edges of tiles, all dtypes, masks, biases, statistics and modes of autograd, tensors that are not aligned, and
NaN and Inf where no result depends on them. Cases are drawn from their names alone, on the CPU, so that a name repeats
the same call with the same numbers in any process and on any device. `tests/fuzz/bounds.py` derives how large an error
may be.

Errors of `polyhead` are counted as refusals; every other exception, wrong result or dead process is a finding, in one
line. The exit status is 1 if there are findings. A finding that does not repeat alone depends on earlier calls of its
process: `--history` runs all cases before it as well.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from tests.fuzz.calls import run_case
from tests.fuzz.cases import SIZE_RANGES, CaseId, draw_case
from tests.fuzz.workers import Pool, Run, finding_line, prepare, start_worker, work


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    sizes = given.sizes or ("small" if device == "cpu" else "full")
    run = Run(given.seed, sizes, device, given.seconds, given.jobs)
    prepare()
    if given.worker is not None:
        return work(run, given.worker)
    if given.case is not None:
        return repeat(given.case, run, history=given.history)
    tally = Pool(run, lambda line: print(line, flush=True), start_worker).wait()
    print("\n".join(tally.lines()))
    return 1 if tally.findings else 0


def repeat(case: CaseId, run: Run, *, history: bool) -> int:
    """Run one case again, after the cases before it if `history` is set; print its problems and its numbers' hashes."""
    for position in range(case.position) if history else ():
        run_case(draw_case(CaseId(case.sizes, case.seed, case.stream, position)), run.device)
    outcome = run_case(draw_case(case), run.device, digests=True)
    print(f"{case} on {run.device}: {outcome.text}")
    print(f"inputs {outcome.inputs}, results {outcome.results}, calls {dict(outcome.ran)}")
    for message in outcome.refused:
        print(f"refused: {message}")
    for problem in outcome.problems:
        print(f"problem: {problem}")
    if outcome.trace:
        print(outcome.trace, end="")
    if outcome.problems:
        print(finding_line(case, outcome, run.command(case)))
    return 1 if outcome.problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="start no case after so many seconds")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--seed", type=int, default=0, help="other cases for every number")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu; by default a GPU if there is one")
    parser.add_argument("--sizes", choices=SIZE_RANGES, help="by default full on a GPU and small on a CPU")
    parser.add_argument("--case", type=_case, metavar="ID", help="repeat the case of a finding")
    parser.add_argument("--history", action="store_true", help="with --case, run the cases before it first")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    return parser


def _case(text: str) -> CaseId:
    try:
        return CaseId.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
