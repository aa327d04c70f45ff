"""Moments of a layer's concatenated head outputs, the input of W_O: sums over tokens in float64.

Memory is quadratic in the layer width and independent of the text length. The sums are mergeable accumulators: any
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

EIGENVALUE_FLOOR = 1e-12  # eigenvalues below this share of the largest are treated as zero


@dataclass(frozen=True, slots=True, eq=False)
class OutputMoments:
    """Number of tokens, sum and sum of outer products of the inputs of a layer's W_O."""

    count: int
    total: Tensor  # [channels]
    products: Tensor  # [channels, channels]
    signature: Tensor | None = None  # [channels], `output_signature` of the layer they were collected from

    @classmethod
    def empty(
        cls, channels: int, device: torch.device | str | None = None, signature: Tensor | None = None
    ) -> OutputMoments:
        zeros = torch.zeros(channels, channels, dtype=torch.float64, device=device)
        return cls(0, zeros[0].clone(), zeros, signature)

    def update(self, rows: Tensor) -> OutputMoments:
        """Return the moments with these rows, [tokens, channels], added."""
        rows = rows.detach().to(torch.float64)
        total, products = self.total + rows.sum(0), self.products + rows.T @ rows
        return replace(self, count=self.count + rows.shape[0], total=total, products=products)

    def merge(self, other: OutputMoments) -> OutputMoments:
        if other.total.shape != self.total.shape:
            raise ShapeError(
                f"merged moments must be of one layer, got {len(self.total)} and {len(other.total)} channels"
            )
        if not same_layer(self.signature, other.signature):
            raise OptionError("merged moments must be of one layer, got layers with different output matrices")
        total, products = other.total.to(self.total.device), other.products.to(self.products.device)
        signature = other.signature if self.signature is None else self.signature
        return OutputMoments(self.count + other.count, self.total + total, self.products + products, signature)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the fields as tensors, to be stored."""
        tensors = {"count": torch.tensor(self.count, dtype=torch.float64), "total": self.total}
        tensors["products"] = self.products
        return tensors if self.signature is None else {**tensors, "signature": self.signature}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> OutputMoments:
        """Return the moments that `to_tensors` was called on."""
        return cls(int(tensors["count"]), tensors["total"], tensors["products"], tensors.get("signature"))

    def compute(self, *, centred: bool) -> tuple[Tensor, Tensor]:
        """Return the mean and the second moment of the head outputs, or with `centred` their covariance, on the CPU."""
        if not self.count:
            raise OptionError("moments need at least one token, got none; is the calibration text empty?")
        mean, products = self.total.cpu() / self.count, self.products.cpu() / self.count
        return mean, (products - torch.outer(mean, mean) if centred else products)


@torch.no_grad()
def collect_moments(
    model: nn.Module, batches: Iterable[Mapping[str, Any]], *, paths: Sequence[str] | None = None
) -> dict[str, OutputMoments]:
    """Collect the output moments of every attention layer over calibration text, by path.

    Args:
        batches: keyword arguments of the model, as `model(**batch)`; tokens masked by the batch's attention mask
            are excluded.
        paths: layers to collect; all editable ones by default.
    """
    layers = [layer for layer in find_layers(model) if not layer.refusals and (paths is None or layer.path in paths)]
    unknown = set(paths or ()) - {layer.path for layer in layers}
    if unknown:
        raise OptionError(f"paths must name attention layers with a known head layout, got {sorted(unknown)}")
    collected: dict[str, OutputMoments] = {}
    current: Mapping[str, Any] = {}

    def record_hook(layer: AttentionLayer) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            rows = args[0].detach()
            mask = non_padding_mask(model, layer, current, rows)
            rows = rows.flatten(0, -2) if mask is None else rows[mask]
            moments = collected.get(layer.path)
            if moments is None:
                signature = output_signature(read_heads(model, layer).output)
                moments = OutputMoments.empty(rows.shape[-1], rows.device, signature)
            collected[layer.path] = moments.update(rows)

        return hook

    with evaluating(model), ExitStack() as hooks:
        for layer in layers:
            hooks.callback(model.get_submodule(layer.output).register_forward_pre_hook(record_hook(layer)).remove)
        for batch in batches:
            current = batch
            model(**batch)
    if not collected:
        raise OptionError(
            "calibration needs some text, got no batch, or batches for which no attention layer was called"
        )
    return collected


def output_signature(output: Tensor) -> Tensor:
    """Return a fingerprint of W_O [heads, value_dim, embed_dim]: its product with fixed random signs, [channels].

    In float64 on the CPU. It differs between layers, but hardly between dtypes of the same layer.
    """
    matrix = output.detach().flatten(0, 1).to("cpu", torch.float64)
    signs = torch.randint(2, (matrix.shape[1],), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return matrix @ (2 * signs - 1)


def same_layer(first: Tensor | None, second: Tensor | None) -> bool:
    """Return whether two signatures agree to 5%, more than 16-bit rounding changes them; None matches any layer."""
    if first is None or second is None:
        return True
    return first.shape == second.shape and bool((first - second).norm() <= 0.05 * first.norm())


def root(symmetric: Tensor) -> Tensor:
    """Return R with R Rᵀ equal to a symmetric positive semi-definite matrix (batched)."""
    values, vectors = torch.linalg.eigh(symmetric)
    return vectors * values.clamp_min(0.0).sqrt()[..., None, :]
