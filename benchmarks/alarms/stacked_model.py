"""Small causal language models trained side by side: their weights are stacked, so that a step of 30 costs little more
than a step of one, and every model has its own loss, gradient norm and learning rate.

The statistics of heads are computed from the materialised weights, as in the definitions of `HeadMonitor`, without any
effect on training: a run is the same whether it is monitored or not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

VOCABULARY = 32
COLUMNS = (
    "max_logit",
    "entropy",
    "normalized_entropy",
    "sink_mass",
    "mean_distance",
    "output_norm",
    "output_norm_share",
    "output_cosine",
    "gradient_norm",
)
BETAS, EPSILON, DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 1.0


@dataclass(frozen=True)
class Sizes:
    """Sizes of each model of a stack."""

    width: int = 32
    heads: int = 4
    layers: int = 2
    context: int = 32
    batch: int = 4


class StackedModels:
    """Pre-norm transformers with learned positions; model i is initialised from `seeds[i]`."""

    def __init__(self, sizes: Sizes, seeds: list[int], rates: list[float]) -> None:
        self.sizes = sizes
        width, std = sizes.width, sizes.width**-0.5
        shapes: dict[str, tuple[int, int]] = {"embed": (VOCABULARY, width), "position": (sizes.context, width)}
        for layer in range(sizes.layers):
            shapes |= {f"{layer}.{name}": (width, width) for name in ("query", "key", "value", "output")}
            shapes |= {f"{layer}.up": (width, 4 * width), f"{layer}.down": (4 * width, width)}
        shapes["unembed"] = (width, VOCABULARY)
        self.shapes = shapes
        self.names = list(shapes)
        self.counts = [rows * columns for rows, columns in shapes.values()]
        scales = [0.02 if name in ("embed", "position") else std for name in shapes]
        rows = []
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            rows.append(
                torch.cat([torch.randn(n, generator=generator) * s for n, s in zip(self.counts, scales, strict=True)])
            )
        self.weights = torch.stack(rows).requires_grad_()  # [models, parameters]
        self.rates = torch.tensor(rates)[:, None]
        self.rate_factor = torch.ones_like(self.weights.detach())
        self.mean, self.square = torch.zeros_like(self.rate_factor), torch.zeros_like(self.rate_factor)
        self.steps = 0
        self.hidden = torch.full((sizes.context, sizes.context), -math.inf).triu(1)
        places = torch.arange(sizes.context)
        self.distance = (places[:, None] - places).clamp(min=0).float()
        self.log_keys = (places[1:] + 1.0).log()

    def part(self, name: str) -> slice:
        """Return the columns of `weights` that hold a matrix, whose last axis is the output."""
        index = self.names.index(name)
        start = sum(self.counts[:index])
        return slice(start, start + self.counts[index])

    def scale_query(self, model: int, layer: int, head: int, factor: float) -> None:
        """Multiply W_Q of one head of one model."""
        width, dim = self.sizes.width, self.sizes.width // self.sizes.heads
        matrix = self.weights.detach()[model, self.part(f"{layer}.query")].view(width, width)
        matrix[:, head * dim : (head + 1) * dim] *= factor

    def step(self, tokens: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        """Train every model on its tokens [models, batch, context + 1] at `factor` of its learning rate.

        Returns:
            Losses [models] and statistics [models, columns, layers * heads], both before the update.
        """
        losses, found = self._forward(tokens)
        outputs = [output for _, _, output in found]
        gradient, *output_gradients = torch.autograd.grad(losses.sum(), [self.weights, *outputs])
        with torch.no_grad():
            values = [
                self._statistics(logits, weights, output, grad, layer)
                for layer, ((logits, weights, output), grad) in enumerate(zip(found, output_gradients, strict=True))
            ]
            self._update(gradient, factor)
        return losses.detach(), torch.cat(values, 2)

    def _forward(self, tokens: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
        sizes, count = self.sizes, len(self.weights)
        parts = self.weights.split(self.counts, 1)
        w = {name: x.view(count, *self.shapes[name]) for name, x in zip(self.names, parts, strict=True)}
        ids = tokens[..., :-1] + VOCABULARY * torch.arange(count)[:, None, None]
        x = F.embedding(ids, w["embed"].reshape(-1, sizes.width)) + w["position"][:, None]
        x = x.flatten(1, 2)  # [models, batch * context, width]
        found = []
        for layer in range(sizes.layers):
            normed = F.layer_norm(x, (sizes.width,))
            q, k, v = (self._heads(torch.bmm(normed, w[f"{layer}.{name}"])) for name in ("query", "key", "value"))
            logits = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5) + self.hidden
            weights = logits.softmax(-1)
            output = weights @ v  # [models, batch, heads, context, dim]
            found.append((logits, weights, output))
            x = x + torch.bmm(output.transpose(2, 3).reshape(x.shape), w[f"{layer}.output"])
            up = F.relu(torch.bmm(F.layer_norm(x, (sizes.width,)), w[f"{layer}.up"]))
            x = x + torch.bmm(up, w[f"{layer}.down"])
        scores = torch.bmm(F.layer_norm(x, (sizes.width,)), w["unembed"])
        each = F.cross_entropy(scores.flatten(0, 1), tokens[..., 1:].flatten(), reduction="none")
        return each.view(count, -1).mean(1), found

    def _heads(self, x: Tensor) -> Tensor:
        sizes = self.sizes
        return x.view(len(x), sizes.batch, sizes.context, sizes.heads, -1).transpose(2, 3)

    def _statistics(self, logits: Tensor, weights: Tensor, output: Tensor, gradient: Tensor, layer: int) -> Tensor:
        """Return [models, columns, heads]."""
        sizes, dim = self.sizes, output.shape[-1]
        entropy = -(weights * (weights + 1e-30).log()).sum(-1)  # [models, batch, heads, context]
        matrix = self.weights.detach()[:, self.part(f"{layer}.output")].view(-1, sizes.heads, dim, sizes.width)
        written = torch.einsum("mbhtd,mhdw->mhbtw", output, matrix).flatten(2)  # [models, heads, everything]
        gram = written @ written.transpose(1, 2)
        square = gram.diagonal(dim1=1, dim2=2)
        norm = square.sqrt()
        cosine = gram / (norm[:, None] * norm[..., None]).clamp(min=1e-30)
        cosine.diagonal(dim1=1, dim2=2).zero_()
        columns = (
            logits.amax((1, 3, 4)),
            entropy.mean((1, 3)),
            (entropy[..., 1:] / self.log_keys).mean((1, 3)),
            weights[..., 0].mean((1, 3)),
            (weights * self.distance).sum(-1).mean((1, 3)),
            norm / (sizes.batch * sizes.context) ** 0.5,
            square / square.sum(1, keepdim=True),
            cosine.gather(2, cosine.abs().argmax(2, keepdim=True))[..., 0],
            gradient.square().sum((1, 3, 4)).sqrt(),
        )
        return torch.stack(columns, 1)

    def _update(self, gradient: Tensor, factor: float) -> None:
        """AdamW with the gradient of each model clipped by its norm."""
        self.steps += 1
        gradient *= (CLIP / gradient.norm(dim=1, keepdim=True)).clamp(max=1)
        self.mean.lerp_(gradient, 1 - BETAS[0])
        self.square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        first, second = (1 - beta**self.steps for beta in BETAS)
        rate = self.rates * factor * self.rate_factor
        change = (self.mean / first) / ((self.square / second).sqrt() + EPSILON)
        weights = self.weights.detach()
        weights.sub_(rate * (change + DECAY * weights))
