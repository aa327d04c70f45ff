"""Moments of a layer's concatenated head outputs, the input of W_O, and of the gradients of a loss by its output.

They are sums over tokens in float64, of a size that is quadratic in the layer width and independent of the text length,
and mergeable: any split of a corpus, merged in any order, equals one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.errors import NonFiniteError, OptionError, ShapeError
from polyhead.observation.evaluation_mode import evaluating, frozen
from polyhead.ops.attention.scaled_dot_product import without_cudnn
from polyhead.surgery.adapters.attention_layer import AttentionLayer
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.adapters.head_weights import read_heads
from polyhead.surgery.calibration.streams import non_padding_mask, rows_of

Loss = Callable[[nn.Module, Mapping[str, Any]], Tensor]
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
        """Return moments of no tokens.

        Args:
            channels: channels of all heads together.
            device: device of the sums.
            signature: identifies the weights that the moments belong to.
        """
        zeros = torch.zeros(channels, channels, dtype=torch.float64, device=device)
        return cls(0, zeros[0].clone(), zeros, signature)

    def update(self, rows: Tensor) -> OutputMoments:
        """Return the moments with these rows, [tokens, channels], added.

        Args:
            rows: head outputs, concatenated.
        """
        rows = rows.detach().to(torch.float64)
        total, products = self.total + rows.sum(0), self.products + rows.T @ rows
        return replace(self, count=self.count + rows.shape[0], total=total, products=products)

    def merge(self, other: OutputMoments) -> OutputMoments:
        """Return the moments of both; refused if they are of different weights.

        Args:
            other: moments of the same layer.
        """
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
        """Return the moments that `to_tensors` was called on.

        Args:
            tensors: what `to_tensors` returned.
        """
        return cls(int(tensors["count"]), tensors["total"], tensors["products"], tensors.get("signature"))

    def compute(self, *, centred: bool) -> tuple[Tensor, Tensor]:
        """Return the mean and the second moment of the head outputs, or with `centred` their covariance, on the CPU.

        Args:
            centred: subtract the mean.
        """
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
        model: the model.

    Returns:
        The moments of each layer, by path.
    """
    layers = [layer for layer in find_layers(model) if not layer.refusals and (paths is None or layer.path in paths)]
    unknown = set(paths or ()) - {layer.path for layer in layers}
    if unknown:
        raise OptionError(f"paths must name attention layers with a known head layout, got {sorted(unknown)}")
    collected: dict[str, OutputMoments] = {}
    current: Mapping[str, Any] = {}

    def record_hook(layer: AttentionLayer) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            head_outputs = args[0].detach()
            rows = rows_of(head_outputs, non_padding_mask(model, layer, current, head_outputs))
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


def loss_weights(model: nn.Module, batches: Iterable[Mapping[str, Any]], loss: Loss) -> dict[str, float]:
    """Return a weight for each attention layer, by path, for `choose_heads(orders, count, weights=...)`.

    The weight is the mean over tokens and channels of the squared gradient of the loss by the layer's output: to second
    order, with the empirical Fisher information for the Hessian, and for errors without a preferred direction, the mean
    square error of the output times this weight is the increase of the loss. Padding tokens, whose gradient is zero,
    count equally in every layer.

    Args:
        loss: `loss(model, batch)`, which calls the model and returns the loss summed over its predictions.
        model: the model.
        batches: arguments of the model for each batch.
    """
    squares: dict[str, float] = {}
    counts: dict[str, int] = {}
    for path, _, gradient in _gradients(model, batches, loss):
        squares[path] = squares.get(path, 0.0) + float(gradient.double().square().sum())
        counts[path] = counts.get(path, 0) + gradient.numel()
    return {path: squares[path] / counts[path] for path in squares}


@dataclass(frozen=True, slots=True, eq=False)
class Sensitivity:
    """Empirical Fisher information of a layer's output: the mean outer product G of its gradient.

    An error e in the output costs eᵀ G e, up to a factor shared by all layers.
    """

    products: Tensor  # [embed_dim, embed_dim], float64

    @property
    def weight(self) -> float:
        """Mean cost of an error without a preferred direction."""
        return float(self.products.diagonal().mean())

    def root(self) -> Tensor:
        """Return R with R Rᵀ = G."""
        return root(self.products)


@dataclass(frozen=True, slots=True, eq=False)
class GradientStatistics:
    """Statistics of one layer from the gradients of a loss by its output."""

    moments: OutputMoments  # of head outputs, each token weighted by the norm of its gradient, 1 on average
    sensitivity: Sensitivity

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the fields as tensors, to be stored."""
        return {**self.moments.to_tensors(), "sensitivity": self.sensitivity.products}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> GradientStatistics:
        """Return the statistics that `to_tensors` was called on."""
        return cls(OutputMoments.from_tensors(tensors), Sensitivity(tensors["sensitivity"]))


def gradient_statistics(
    model: nn.Module, batches: Iterable[Mapping[str, Any]], loss: Loss
) -> dict[str, GradientStatistics]:
    """Return statistics of each layer, by path, in one pass with gradients; arguments as in `loss_weights`.

    Compensation over the weighted moments favours tokens to which the loss is sensitive. To second order the weight
    would be the square of the gradient's norm, but few tokens then dominate, and with little text the norm itself gives
    the better compensation. Padding tokens have no gradient, and so no weight.
    """
    layers = {layer.path: layer for layer in find_layers(model)}
    sums: dict[str, OutputMoments] = {}
    weights: dict[str, float] = {}
    products: dict[str, Tensor] = {}
    tokens: dict[str, int] = {}
    for path, head_outputs, gradient in _gradients(model, batches, loss):
        # Products of a batch in float32, if the model is not in float64, take half the time; the sums are in float64.
        gradients, rows = (_wide(x.flatten(0, -2)) for x in (gradient, head_outputs))
        token_weight = gradients.norm(dim=-1)
        moments = sums.get(path)
        if moments is None:
            signature = output_signature(read_heads(model, layers[path]).output)
            moments = OutputMoments.empty(head_outputs.shape[-1], head_outputs.device, signature)
        outer = moments.products + rows.T @ (rows * token_weight[:, None])
        count = moments.count + int((token_weight > 0).sum())
        sums[path] = replace(moments, count=count, total=moments.total + token_weight @ rows, products=outer)
        weights[path] = weights.get(path, 0.0) + float(token_weight.sum())
        products[path] = products.get(path, 0.0) + (gradients.T @ gradients).double()
        tokens[path] = tokens.get(path, 0) + len(gradients)
    return {
        path: GradientStatistics(_scaled(moments, weights[path]), Sensitivity(products[path] / tokens[path]))
        for path, moments in sums.items()
    }


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


def _scaled(moments: OutputMoments, weight: float) -> OutputMoments:
    """Rescale weighted sums as if the weights, which have this sum, had mean 1."""
    factor = moments.count / weight if weight else 0.0
    return replace(moments, total=moments.total * factor, products=moments.products * factor)


def _gradients(
    model: nn.Module, batches: Iterable[Mapping[str, Any]], loss: Loss
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield, per layer and batch, the input of W_O and the gradient of the loss by its output."""
    layers = [layer for layer in find_layers(model) if not layer.refusals]
    probes: list[tuple[str, Tensor, Tensor]] = []
    any_batch = False

    def probe_hook(layer: AttentionLayer) -> Callable[..., Tensor]:
        def add_probe(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            probe = torch.zeros_like(output, requires_grad=True)
            probes.append((layer.path, args[0].detach(), probe))
            return output + probe

        return add_probe

    with evaluating(model), frozen(model), ExitStack() as hooks:
        for layer in layers:
            hooks.callback(model.get_submodule(layer.output).register_forward_hook(probe_hook(layer)).remove)
        for batch in batches:
            probes.clear()
            with torch.enable_grad(), without_cudnn():
                value = loss(model, batch)
            if not probes or value.numel() != 1 or not value.requires_grad:
                raise OptionError(
                    "a loss must call the model and return one number with a gradient, got "
                    + ("a loss that calls no attention layer" if not probes else f"a tensor {list(value.shape)}")
                )
            if not bool(value.isfinite()):
                raise NonFiniteError(
                    f"the loss on the calibration text must be finite, got {float(value.detach())}: the weights or the "
                    "text give NaN or Inf; polyhead inspect names the heads"
                )
            with without_cudnn():  # checkpointed activations are recomputed here
                gradients = torch.autograd.grad(value, [probe for _, _, probe in probes], allow_unused=True)
            for (path, head_outputs, probe), gradient in zip(probes, gradients, strict=True):
                yield path, head_outputs, torch.zeros_like(probe) if gradient is None else gradient
            any_batch = True
    if not any_batch:
        raise OptionError("measuring weights needs some text, got no batch")
