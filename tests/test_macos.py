"""macOS, as far as Linux can simulate it: `sys.platform` "darwin", no Triton, /proc, renameat2 or CPU affinity.

Only Python code sees the simulation; that PyTorch itself runs on a Mac is PyTorch's own test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SAVED = ROOT / "tests" / "formats" / "saved"

MACOS = """
import ctypes, os, pathlib, pkgutil, platform, sys
sys.modules["triton"] = None  # neither found nor imported
import torch, psutil  # compiled parts are those of the real platform
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

def refuse_proc(event, arguments):
    if event == "open" and str(arguments[0]).startswith("/proc/"):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])

class WithoutRenameat2:
    def __init__(self, *arguments, **keywords):
        pass

sys.addaudithook(refuse_proc)
sys.platform = "darwin"
platform.system = lambda: "Darwin"
platform.processor = lambda: "arm"
vars(os).pop("sched_getaffinity", None)
ctypes.CDLL = WithoutRenameat2
"""

COMPUTE = """
import importlib, json, polyhead
from polyhead.costs.measuring import machine_facts
from polyhead.layers.kv_cache import PreallocatedCache

torch.manual_seed(0)
query, key = (torch.randn(2, heads, 7, 16, requires_grad=True) for heads in (4, 2))
outputs = {}
for backend in ("reference", "sdpa", "blockwise", "auto"):
    found = polyhead.attention(query, key, key, mask=polyhead.Mask.causal(), backend=backend)
    found.output.sum().backward()
    outputs[backend] = found.output.detach()
assert all(torch.allclose(x, outputs["reference"], atol=1e-5) for x in outputs.values())
rows = polyhead.attention(query, key, key, statistics=True).statistics  # all of them
assert rows.entropy.isfinite().all()
layer = polyhead.MultiHeadAttention(64, 4, num_kv_heads=2, causal=True).eval()
x = torch.randn(1, 9, 64)
cache = PreallocatedCache(capacity=9)
with torch.no_grad(), polyhead.observe(layer, statistics="entropy") as session:
    whole = layer(x).output
    steps = torch.cat([layer(x[:, i : i + 1], cache=cache).output for i in range(9)], 1)
assert torch.allclose(whole, steps, atol=1e-5)
assert session.profile["entropy"].isfinite().all()
polyhead.plan("llama3.1-8b", machine="cpu-2-cores")
explained = polyhead.explain(query, key, key)
"""

EDIT = """
from polyhead.surgery import fingerprint
from polyhead.observation.run_folder import lock_folder
from polyhead.workflows.model_loading import load_model

folder, saved = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
decoder = load_model(saved / "decoder", dtype="saved")
before = fingerprint(decoder.model)
with lock_folder(folder):
    found = polyhead.inspect(decoder, saved / "text", context=24, tokens=200)
assert len(found.table) == 8
edited = polyhead.prune(decoder, heads="L0H0,L0H1,L1H0,L1H1", text=saved / "text", context=24, tokens=200)
for replace in (False, True):
    edited.save(folder / "pruned", replace=replace)
assert fingerprint(polyhead.undo(folder / "pruned").model) == before
"""

IMPORT = """
names = [module.name for module in pkgutil.walk_packages(polyhead.__path__, "polyhead.")]
names = [name for name in names if ".kernels" not in name and name != "polyhead.__main__"]
for name in names:
    importlib.import_module(name)
"""

REPORT = """
machine = [machine_facts.usable_cores(), machine_facts.cpu_model()]
print(json.dumps([len(names), explained.chosen, explained["fused"].supported, *machine]))
"""


def test_every_module_but_the_kernels_is_imported_and_the_cpu_path_computes_inspects_edits_and_restores(tmp_path):
    pytest.importorskip("starlette", reason="the viewer is in the extra `report`")
    done = subprocess.run(
        [sys.executable, "-c", MACOS + COMPUTE + EDIT + IMPORT + REPORT, str(tmp_path), str(SAVED)],
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    modules, chosen, fused, cores, processor = json.loads(done.stdout)
    assert modules > 250
    assert (chosen, fused) == ("sdpa", False)
    assert (cores, processor) == (os.cpu_count(), "arm")
