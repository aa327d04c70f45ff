"""What the heads of a layer write side by side, as far as repair needs it: sums over tokens, in float64.

Memory is the square of a layer's width and does not grow with the text. Sums are values with three verbs, so that any
split of a corpus, merged in any order, equals one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError, ShapeError
from polyhead.surgery.adapters.attention_layer import AttentionLayer
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.adapters.head_weights import read_heads
from polyhead.surgery.calibration.layer_capture import non_padding_mask
from polyhead.surgery.calibration.temporary import evaluating

MIN_RELATIVE_ENERGY = 1e-12  # of the largest: a direction of this energy is none


@dataclass(frozen=True, slots=True, eq=False)
class OutputMoments:
    """Sums over the tokens that a layer's W_O was given: how many, of the heads' outputs, of their products."""

    count: int
    total: Tensor  # [channels]
    products: Tensor  # [channels, channels]
    signature: Tensor | None = None  # [channels], `output_signature` of the layer that they were gathered from

    @classmethod
    def empty(
        cls, channels: int, device: torch.device | str | None = None, signature: Tensor | None = None
    ) -> OutputMoments:
        zeros = torch.zeros(channels, channels, dtype=torch.float64, device=device)
        return cls(0, zeros[0].clone(), zeros, signature)

    def update(self, rows: Tensor) -> OutputMoments:
        """With these rows, [tokens, channels]."""
        rows = rows.detach().to(torch.float64)
        total, products = self.total + rows.sum(0), self.products + rows.T @ rows
        return replace(self, count=self.count + rows.shape[0], total=total, products=products)

    def merge(self, other: OutputMoments) -> OutputMoments:
        if other.total.shape != self.total.shape:
            raise ShapeError(f"moments of one layer are merged, got {len(self.total)} channels and {len(other.total)}")
        if not same_layer(self.signature, other.signature):
            raise OptionError("moments of one layer are merged, got moments of layers with other output matrices")
        total, products = other.total.to(self.total.device), other.products.to(self.products.device)
        signature = other.signature if self.signature is None else self.signature
        return OutputMoments(self.count + other.count, self.total + total, self.products + products, signature)

    def compute(self, *, centred: bool) -> tuple[Tensor, Tensor]:
        """The mean of the heads' outputs and the mean of their products, on the CPU; of those without the mean."""
        if not self.count:
            raise OptionError("moments are computed of some tokens, got none; is the calibration text empty?")
        mean, products = self.total.cpu() / self.count, self.products.cpu() / self.count
        return mean, products - torch.outer(mean, mean) if centred else products


@torch.no_grad()
def collect_moments(
    model: nn.Module, batches: Iterable[Mapping[str, Any]], *, paths: Sequence[str] | None = None
) -> dict[str, OutputMoments]:
    """The moments of every attention layer, by path, over calibration text.

    Args:
        batches: what the model is called with, as `model(**batch)`; tokens that its attention mask hides are left out.
        paths: only of these layers.
    """
    layers = [layer for layer in find_layers(model) if not layer.refusals and (paths is None or layer.path in paths)]
    unknown = set(paths or ()) - {layer.path for layer in layers}
    if unknown:
        raise OptionError(f"moments are gathered of attention layers whose heads are known, got {sorted(unknown)}")
    collected: dict[str, OutputMoments] = {}
    current: Mapping[str, Any] = {}

    def listen(layer: AttentionLayer) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def note(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            rows = given[0].detach()
            real = non_padding_mask(model, layer, current, rows)
            rows = rows.flatten(0, -2) if real is None else rows[real]
            held = collected.get(layer.path)
            if held is None:
                signature = output_signature(read_heads(model, layer).output)
                held = OutputMoments.empty(rows.shape[-1], rows.device, signature)
            collected[layer.path] = held.update(rows)

        return note

    with evaluating(model), ExitStack() as undo:
        for layer in layers:
            undo.callback(model.get_submodule(layer.output).register_forward_pre_hook(listen(layer)).remove)
        for batch in batches:
            current = batch
            model(**batch)
    if not collected:
        raise OptionError(
            "calibration needs some text, got no batch, or batches that no attention layer was called for"
        )
    return collected


def output_signature(output: Tensor) -> Tensor:
    """W_O, [heads, value_dim, embed_dim], times fixed random signs: [channels], in float64 on the CPU.

    Enough to tell layers apart, and nearly the same in another dtype.
    """
    matrix = output.detach().flatten(0, 1).to("cpu", torch.float64)
    signs = torch.randint(2, (matrix.shape[1],), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return matrix @ (2 * signs - 1)


def same_layer(first: Tensor | None, second: Tensor | None) -> bool:
    """Whether two signatures differ by rounding alone; one that is not known may be that of any layer."""
    if first is None or second is None:
        return True
    return first.shape == second.shape and bool((first - second).norm() <= 0.05 * first.norm())


def root(symmetric: Tensor) -> Tensor:
    """Matrices R with R Rᵀ = the given ones."""
    values, vectors = torch.linalg.eigh(symmetric)
    return vectors * values.clamp_min(0.0).sqrt()[..., None, :]
