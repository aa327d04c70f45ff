"""`python -m benchmarks collectives`: bytes that four gloo processes send, beside those of `polyhead plan`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.options import Commit
from polyhead.cli.options import ResultFile


def collectives(
    output: ResultFile = None,
    width: Annotated[int, typer.Option(metavar="N", help="Width of the layers.")] = 256,
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of each sequence.")] = 512,
    commit: Commit = None,
) -> None:
    """Count the bytes that four gloo processes send, and compare them with those of `polyhead plan`.

    Exits with 1 if a number of calls or of bytes differs. About a minute on two cores.
    """
    import torch
    from torch.multiprocessing.spawn import spawn

    from benchmarks.collectives.runs import CASES, WORLD, predicted
    from benchmarks.measuring.json_lines import write_rows
    from polyhead.costs.measuring import machine_facts

    with tempfile.TemporaryDirectory(prefix="polyhead-collectives.") as folder:
        spawn(_serve, (folder, width, tokens), nprocs=WORLD)
        rows, differs = [], False
        for index, case in enumerate(CASES):
            expected = json.loads(json.dumps(predicted(case, width, tokens)))
            found = [json.loads(Path(folder, f"{index}-{rank}.json").read_text()) for rank in range(WORLD)]
            for part in ("forward", "backward", "monitor"):
                if part in expected:
                    differs |= any(each[part] != expected[part] for each in found)
                    counted, sockets = [each[part] for each in found], [each[f"{part}, sockets"] for each in found]
                    row = {"case": case.name, "part": part, "predicted": expected[part]}
                    rows.append({**row, "counted": counted, "sockets": sockets})
    for row in rows:
        total = sum(sent for _, sent in row["predicted"].values())
        same = "as predicted" if all(x == row["predicted"] for x in row["counted"]) else "NOT as predicted"
        ratio = max(row["sockets"]) / total if total else 1.0
        typer.echo(f"{row['case']:>40}, {row['part']:>8}: {total:>10,} bytes, {same}; sockets {ratio:.3f} of it")
    if output is not None:
        facts = {**machine_facts.describe(torch.device("cpu"), commit), "width": width, "tokens": tokens}
        write_rows(output, facts, rows)
    if differs:
        raise typer.Exit(1)


def _serve(rank: int, folder: str, width: int, tokens: int) -> None:
    import torch
    import torch.distributed as dist

    from benchmarks.collectives.runs import CASES, WORLD, run

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    for index, case in enumerate(CASES):
        Path(folder, f"{index}-{rank}.json").write_text(json.dumps(run(case, width, tokens)), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
