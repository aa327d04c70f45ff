"""Prune a quarter of the heads of a model, save it, load it, and undo the edit.

Selects heads of the packaged sentence encoder by the error that remains after compensation, refits the output
projections of the other heads by least squares and distillation on polyhead's built-in texts, and saves the result in
the uneven form: a BERT in plain transformers cannot have fewer heads of the same width. Prints the size and the
fidelity, and that the loaded model computes the same and the restored one has the original weights.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import polyhead
from polyhead.surgery import fingerprint


def main(share: float = 0.25, tokens: int = 65_536) -> dict[str, Any]:
    """Return head counts, the difference of the loaded model's outputs, and whether undo restored the weights."""
    model = polyhead.load("minilm")
    original = fingerprint(model)
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    inputs = tokenizer(["A river bends where the rock is soft."], return_tensors="pt")

    edited = polyhead.prune(model, tokenizer=tokenizer, share=share, tokens=tokens, form="uneven")
    before, after = edited.preview.before, edited.preview.after
    print(f"heads {before.heads} -> {after.heads}, attention parameters {before.parameters:,} -> {after.parameters:,}")
    for edit in edited.edits:
        print(f"  layer {edit.layer}: without heads {', '.join(map(str, edit.heads))}")
    if edited.quality is not None:
        print(f"cosine with the original on {edited.held_out_tokens} held-out tokens: {edited.quality.value:.4f}")

    with tempfile.TemporaryDirectory() as folder:
        saved = edited.save(Path(folder, "pruned"))
        assert saved.undo_folder is not None
        sizes = [saved.num_bytes, sum(file.stat().st_size for file in saved.undo_folder.iterdir())]
        print(f"saved in the {saved.form} form, {sizes[0]:,} bytes: {saved.native}")
        print(f"the record that undoes the edit is beside it, in {saved.undo_folder.name}: {sizes[1]:,} bytes")
        reloaded = polyhead.load(Path(folder, "pruned"))
        with torch.no_grad():
            outputs = [one(**inputs).last_hidden_state for one in (edited.model, reloaded)]
        restored = polyhead.undo(Path(folder, "pruned")).model
    difference = float((outputs[0] - outputs[1]).abs().max())
    same_bits = fingerprint(restored) == original
    print(f"largest difference between the pruned model and the loaded one: {difference}")
    print(f"undo restores the original weights bit for bit: {same_bits}")
    print(
        "The cosine compares final hidden states, and 1 is no loss. The record contains the weights before the edit, so"
    )
    print("that it can be undone in another process; a model that is never to be restored does not need it.")
    return {"heads": (before.heads, after.heads), "difference": difference, "restored": same_bits, "edited": edited}


if __name__ == "__main__":
    main()
