"""Write one small file or folder of every format that polyhead saves; `test_saved_formats.py` reads them back.

    python -m tests.formats.make FOLDER

`tests/formats/saved` was written by version 0.1.0 at 494200a and is never written again: files that users have are
like these, whatever a later version calls what is in them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import torch
import transformers
from typer.testing import CliRunner

import polyhead
from polyhead.cli import app
from polyhead.costs import Workload, estimate_cost
from polyhead.costs.layouts.model_layout import ModelLayout, grouped
from polyhead.costs.timing.machine import Machine
from polyhead.inspection import Settings
from polyhead.layers import AttentionConfig, MultiHeadConfig
from polyhead.layers.latent.config import LatentConfig
from polyhead.layers.positions.config import RotaryConfig
from polyhead.layers.variants import GroupedHeadsConfig, HeadMixConfig
from polyhead.layers.variants.collaborative.layer import CollaborativeConfig
from polyhead.layers.variants.differential.layer import DifferentialConfig
from polyhead.layers.variants.routed.config import RoutedConfig
from polyhead.layers.variants.talking import TalkingHeadsConfig
from polyhead.progress import Progress
from polyhead.surgery import (
    AddHeads,
    GroupQueries,
    MergeHeads,
    PruneHeads,
    ReorderHeads,
    apply,
    edits_to_json,
    save,
)
from polyhead.workflows.inspecting import inspect_model
from tests.inspection import small_models
from tests.layers.test_config import OPTIONS, POSITIONS
from tests.sources.small_tokenizers import WORDPIECE, wordpiece

TREEBANK = Path(__file__).parents[1] / "sources" / "small.conllu"
SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 8}
READ = ["--text", "text", "--context", "24", "--tokens", "200", "--device", "cpu"]


def models() -> None:
    """A decoder with grouped keys, an encoder, and one that reads the words of the treebank."""
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": len(small_models.NAMES), "max_position_embeddings": 32}
    decoder = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2))
    encoder = transformers.BertModel(transformers.BertConfig(**sizes))
    reader = transformers.BertModel(
        transformers.BertConfig(**{**sizes, "vocab_size": len(WORDPIECE), "max_position_embeddings": 37})
    )
    for name, model, tokenizer in (
        ("decoder", decoder, small_models.tokenizer()),
        ("encoder", encoder, small_models.tokenizer()),
        ("reader", reader, wordpiece()),
    ):
        with torch.no_grad():  # attention far from uniform
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(6)
        model.save_pretrained(name)
        tokenizer.save_pretrained(name)
    small_models.text_folder(Path("text"), documents=3, words=40)


def command(*arguments: object) -> None:
    result = CliRunner().invoke(app, [str(x) for x in arguments], env={"COLUMNS": "250", "NO_COLOR": "1"})
    if result.exit_code:
        raise RuntimeError(f"polyhead {' '.join(map(str, arguments))}:\n{result.output}")


def runs() -> None:
    """Inspections with everything in them, one that was stopped after its first batch, and a table of syntax."""
    for name in ("decoder", "encoder"):
        command("inspect", name, *READ, "--save", f"run-{name}")

    def stop(now: Progress) -> None:
        if now.step == "read the text" and now.done > 0:
            raise KeyboardInterrupt

    settings = Settings(
        model="encoder", text="text", context=24, tokens=200, batch_tokens=50, importance="none", chance=False,
        device="cpu",
    )  # fmt: skip
    inspect_model(settings, folder=Path("run-stopped"), progress=stop)
    for form in ("json", "parquet"):
        command("syntax", "reader", "--treebank", TREEBANK, "--minimum", 2, "--output", f"syntax.{form}")


def edited_models() -> None:
    """Each form of a checkpoint, with what undoes its edits beside it, and a journal of how heads were chosen."""
    decoder, encoder = transformers.LlamaForCausalLM, transformers.BertModel
    every = []
    for form, kind, edits in (
        ("uniform", decoder, [GroupQueries(0, [(0, 1)]), GroupQueries(1, [(0, 1)])]),
        ("padded", decoder, [PruneHeads(0, (1,)), ReorderHeads(1, (2, 3, 0, 1))]),
        ("uneven", encoder, [MergeHeads(0, (0, 1)), AddHeads(1, 2)]),
    ):
        model = kind.from_pretrained("decoder" if kind is decoder else "encoder")
        record = apply(model, edits)
        save(model, f"model-{form}", form=form, record=record)
        every += edits
    Path("edits.json").write_text(edits_to_json(every) + "\n", encoding="utf-8")
    shrink = ["shrink", "encoder", "--target", "25%-heads", "--form", "uneven", *READ]
    command(*shrink, "--resume", "journal", "--output", "shrunk")
    shutil.rmtree("shrunk")


def configs() -> list[AttentionConfig]:
    """Every option of the plain layer, every kind of positions, and every other kind of layer."""
    sizes = {"embed_dim": 24, "num_heads": 6, "head_dim": 8}
    return [
        *(MultiHeadConfig(**sizes, **options) for options in OPTIONS.values()),
        *(MultiHeadConfig(30, 6, head_dim=10, positions=positions) for positions, _ in POSITIONS.values()),
        GroupedHeadsConfig(**sizes, num_groups=2, hidden_dim=5, activation="linear"),
        HeadMixConfig(**sizes, num_rows=4, mix="full", row_attention="projected"),
        LatentConfig(
            24, 6, kv_lora_rank=5, q_lora_rank=7, qk_rope_head_dim=4, positions=RotaryConfig(interleaved=True)
        ),
        CollaborativeConfig(**sizes, shared_dim=11),
        DifferentialConfig(**sizes, layer_index=3, norm_eps=1e-4),
        RoutedConfig(24, 6, top_p=0.5, k_max=4, always_on=1, noise=0.25, shape="full"),
        TalkingHeadsConfig(**sizes, causal=True),
    ]


def plans() -> None:
    """Configs, the layout and the cost of a model, and a machine."""
    every = configs()
    write_json("configs.json", [config.to_dict() for config in every])
    layout = ModelLayout("a model", grouped(every[:3]), 4096, torch.bfloat16, torch.int8, metadata=("a note",))
    write_json("layout.json", layout.to_dict())
    cost = estimate_cost(every[0], Workload.training_step(tokens=77, batch=3))
    Path("cost.json").write_text(cost.to_json() + "\n", encoding="utf-8")
    machine = Machine.load("cpu-2-cores").to_dict()
    write_json("machine.json", {**machine, "samples": machine["samples"][::40]})


def write_json(name: str, value: object) -> None:
    Path(name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    os.chdir(folder)  # paths in the files are relative
    torch.set_num_threads(1)
    models()
    runs()
    edited_models()
    plans()
    print(f"polyhead {polyhead.__version__}: {sum(x.stat().st_size for x in Path().rglob('*') if x.is_file()):,} bytes")


if __name__ == "__main__":
    main()
