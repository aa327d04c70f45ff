"""Run every script and notebook in full, show output and CPU seconds, and record both: `python -m examples [FILE]`."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

from notebooks import NOTEBOOKS

EXAMPLES = (
    "observe",
    "inspect_heads",
    "compare_checkpoints",
    "entropy_regulariser",
    "qk_clip",
    "monitor_loop",
    "monitor_trainer",
    "monitor_lightning",
    "kv_cache",
    "prune_and_reload",
    "convert_to_gqa",
    "plan_layout",
    "custom_model",
    "paper_figure",
    "context_parallel",
    "tensor_parallel",
    "sharded_training",
)


def run(name: str) -> dict[str, str | float]:
    """Run a script or notebook in its own process; its seconds are CPU time, which other processes affect little."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    program = ["-m", "notebooks", name] if name in NOTEBOOKS else [str(Path(__file__).parent / f"{name}.py")]
    command = [sys.executable, "-X", "utf8", *program]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return {"name": name, "seconds": round(seconds, 1), "output": output}


def main(record: str = "build/examples.json") -> None:
    results = []
    for name in (*EXAMPLES, *NOTEBOOKS):
        print(f"== {name}", flush=True)
        results.append(run(name))
        print(f"{results[-1]['output']}{results[-1]['seconds']} CPU seconds\n", flush=True)
    path = Path(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
