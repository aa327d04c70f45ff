"""Draw a figure for a paper: one number per head, as layers by heads.

Observes the packaged sentence encoder on polyhead's built-in texts and writes a heat map of the normalised entropy of
its heads, with a colour bar, as SVG and PDF, whose text stays editable. Prints the files and the range of the values.
Needs `pip install matplotlib`.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from transformers import AutoTokenizer

import polyhead
from polyhead.sources import default_documents


def main(folder: str | Path = "build", documents: int = 7) -> tuple[torch.Tensor, list[Path]]:
    """Return the entropies [layers, heads] and the files."""
    model = polyhead.load("minilm")
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    texts = [document.text for document in default_documents()[:documents]]
    inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad(), polyhead.observe(model, statistics="normalized_entropy") as session:
        model(**inputs)
    table = session.profile
    layers, heads = max(site.layer for site in table.sites) + 1, max(table.heads) + 1
    values = table["normalized_entropy"].view(layers, heads)

    Path(folder).mkdir(parents=True, exist_ok=True)
    files = [Path(folder, f"head-entropy.{ending}") for ending in ("svg", "pdf")]
    with plt.rc_context({"font.size": 8, "svg.fonttype": "none", "pdf.fonttype": 42}):  # text stays text
        figure, axes = plt.subplots(figsize=(3.4, 2.0), layout="constrained")  # the width of a column
        image = axes.pcolormesh(range(heads), range(layers), values, cmap="viridis", vmin=0, vmax=1)
        axes.set(xlabel="head", ylabel="layer", xticks=range(heads), yticks=range(layers))
        axes.invert_yaxis()  # the first layer on top
        figure.colorbar(image, label="normalised entropy")
        for file in files:
            figure.savefig(file)
        plt.close(figure)

    print("wrote", *files)
    print(f"{values.numel()} heads on {int(table['tokens'][0])} tokens: {values.min():.2f} to {values.max():.2f}")
    print("0 is attention to a single token, 1 is uniform attention: dark heads are selective, bright ones average.")
    return values, files


if __name__ == "__main__":
    main()
