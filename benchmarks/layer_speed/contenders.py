"""The layers that are timed against each other, with the same weights, each called as `module(x)`."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyhead

OURS = "polyhead"
TRUSTING = "polyhead, finite=True"
TORCH = "nn.MultiheadAttention"
TUTORIAL = "tutorial"
X_TRANSFORMERS = "x-transformers"
FUSED_QKV = "fused QKV + SDPA"
THREE_LINEAR = "three linear + SDPA"
FLOOR = (FUSED_QKV, THREE_LINEAR)
PROJECTIONS = ("query", "key", "value", "output")


class Unavailable(RuntimeError):
    """A contender that is not available on this machine; the message is stored in the results."""


@dataclass(frozen=True)
class Shape:
    """One place of the benchmark, written batch x tokens x width x heads."""

    batch: int
    tokens: int
    embed_dim: int
    heads: int

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.heads

    def __str__(self) -> str:
        return f"{self.batch}x{self.tokens}x{self.embed_dim}x{self.heads}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """
        >>> Shape.parse("2x10x512x8")
        Shape(batch=2, tokens=10, embed_dim=512, heads=8)
        """
        sizes = text.split("x")
        if len(sizes) != 4 or not all(size.isdecimal() and int(size) for size in sizes):
            raise ValueError(f"a shape is BATCHxTOKENSxWIDTHxHEADS, as in 2x10x512x8; got {text!r}")
        return cls(*map(int, sizes))


@dataclass(frozen=True)
class Setting:
    """Mask of a benchmark: none, causal, or the non-padding tokens of a padded batch."""

    causal: bool = False
    lengths: Tensor | None = None  # [batch]

    def real(self, tokens: int) -> Tensor | None:
        """[batch, tokens], True at real tokens; None where all are."""
        if self.lengths is None:
            return None
        return torch.arange(tokens, device=self.lengths.device) < self.lengths[:, None]


PLAIN = Setting()


@dataclass(frozen=True)
class Weights:
    """The four projections of every contender: weights [embed_dim, embed_dim] and biases [embed_dim]."""

    heads: int
    weight: dict[str, Tensor]
    bias: dict[str, Tensor]

    @classmethod
    def random(cls, shape: Shape, *, device: torch.device, dtype: torch.dtype, seed: int) -> Weights:
        """Draw weights in float32 on the CPU, so that a seed draws the same ones for every device."""
        generator = torch.Generator().manual_seed(seed)
        width = shape.embed_dim

        def draw(*size: int) -> Tensor:
            return (torch.randn(*size, generator=generator) / math.sqrt(width)).to(device, dtype)

        return cls(
            shape.heads,
            {name: draw(width, width) for name in PROJECTIONS},
            {name: draw(width) for name in PROJECTIONS},
        )

    def to(self, dtype: torch.dtype) -> Weights:
        return Weights(
            self.heads,
            {name: w.detach().to(dtype) for name, w in self.weight.items()},
            {name: b.detach().to(dtype) for name, b in self.bias.items()},
        )

    def linear(self, *names: str) -> nn.Linear:
        """Return one linear layer with copies of the named projections, stacked."""
        weight = torch.cat([self.weight[name] for name in names])
        linear = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
        linear.weight = nn.Parameter(weight.clone())
        linear.bias = nn.Parameter(torch.cat([self.bias[name] for name in names]))
        return linear


class Polyhead(nn.Module):
    """Ours."""

    def __init__(self, weights: Weights, setting: Setting, *, finite: bool = False) -> None:
        super().__init__()
        example = weights.weight["query"]
        self.layer = polyhead.MultiHeadAttention(
            example.shape[0], weights.heads, finite=finite, device=example.device, dtype=example.dtype
        )
        ours = (self.layer.q_proj, self.layer.k_proj, self.layer.v_proj, self.layer.out_proj)
        with torch.no_grad():
            for name, linear in zip(PROJECTIONS, ours, strict=True):
                linear.weight.copy_(weights.weight[name])
                linear.bias.copy_(weights.bias[name])
        masks = [polyhead.Mask.causal()] if setting.causal else []
        masks += [] if setting.lengths is None else [polyhead.Mask.lengths(setting.lengths)]
        self.mask = None
        for mask in masks:
            self.mask = mask if self.mask is None else self.mask & mask

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, mask=self.mask).output

    def gradients(self) -> list[Tensor | None]:
        layer = self.layer
        return [p.weight.grad for p in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)]


class TorchLayer(nn.Module):
    """`nn.MultiheadAttention` without weights, as its documentation advises; in eval under no_grad its fast path."""

    def __init__(self, weights: Weights, setting: Setting) -> None:
        super().__init__()
        width = weights.weight["query"].shape[0]
        self.layer = nn.MultiheadAttention(width, weights.heads, batch_first=True, device="meta")
        fused = weights.linear("query", "key", "value")
        self.layer.in_proj_weight, self.layer.in_proj_bias = fused.weight, fused.bias  # type: ignore[assignment]
        output = weights.linear("output")
        self.layer.out_proj.weight, self.layer.out_proj.bias = output.weight, output.bias
        self.setting = setting
        self.masks: dict[int, dict[str, Tensor | bool]] = {}

    def _arguments(self, x: Tensor) -> dict[str, Tensor | bool]:
        tokens = x.shape[1]
        if tokens not in self.masks:
            arguments: dict[str, Tensor | bool] = {}
            if self.setting.causal:
                arguments["attn_mask"] = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
                arguments["is_causal"] = True
            if (real := self.setting.real(tokens)) is not None:
                arguments["key_padding_mask"] = ~real
            self.masks[tokens] = arguments
        return self.masks[tokens]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, need_weights=False, **self._arguments(x))[0]

    def gradients(self) -> list[Tensor | None]:
        fused = self.layer.in_proj_weight.grad
        return [*(fused.chunk(3) if fused is not None else [None] * 3), self.layer.out_proj.weight.grad]


class _Plain(nn.Module):
    """Base of the three contenders below: heads by reshaping, and a cache of masks by length."""

    def __init__(self, weights: Weights, setting: Setting) -> None:
        super().__init__()
        self.heads, self.setting = weights.heads, setting
        self.masks: dict[int, Tensor | None] = {}
        self.output = weights.linear("output")

    def key_mask(self, x: Tensor) -> Tensor | None:
        """[batch, 1, 1, tokens], True at real keys."""
        if x.shape[1] not in self.masks:
            real = self.setting.real(x.shape[1])
            self.masks[x.shape[1]] = None if real is None else real[:, None, None, :]
        return self.masks[x.shape[1]]


class FusedQKV(_Plain):
    """One projection for query, key and value, then PyTorch's fused attention."""

    def __init__(self, weights: Weights, setting: Setting) -> None:
        super().__init__(weights, setting)
        self.qkv = weights.linear("query", "key", "value")

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, self.key_mask(x), is_causal=self.setting.causal)
        return self.output(mixed.transpose(1, 2).reshape(batch, tokens, width))

    def gradients(self) -> list[Tensor | None]:
        fused = self.qkv.weight.grad
        return [*(fused.chunk(3) if fused is not None else [None] * 3), self.output.weight.grad]


class ThreeLinear(_Plain):
    """Three projections, then PyTorch's fused attention."""

    def __init__(self, weights: Weights, setting: Setting) -> None:
        super().__init__(weights, setting)
        self.query, self.key, self.value = (weights.linear(name) for name in ("query", "key", "value"))

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        mixed = F.scaled_dot_product_attention(query, key, value, self.key_mask(x), is_causal=self.setting.causal)
        return self.output(mixed.transpose(1, 2).reshape(x.shape))

    def gradients(self) -> list[Tensor | None]:
        return [p.weight.grad for p in (self.query, self.key, self.value, self.output)]


class Tutorial(ThreeLinear):
    """The implementation of tutorials, with materialised attention weights."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        if self.setting.causal:
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(future, -torch.inf)
        if (real := self.key_mask(x)) is not None:
            scores = scores.masked_fill(~real, -torch.inf)
        mixed = torch.softmax(scores, dim=-1) @ value
        return self.output(mixed.transpose(1, 2).contiguous().view(x.shape))


class XTransformers(nn.Module):
    """Attention of x-transformers with flash kernels; it has no biases by itself and gets those of the others."""

    def __init__(self, weights: Weights, setting: Setting) -> None:
        super().__init__()
        if importlib.util.find_spec("x_transformers") is None:
            raise Unavailable("not installed")
        from x_transformers.x_transformers import Attention

        width = weights.weight["query"].shape[0]
        self.layer = Attention(
            width, dim_head=width // weights.heads, heads=weights.heads, flash=True, causal=setting.causal
        )
        theirs = (self.layer.to_q, self.layer.to_k, self.layer.to_v, self.layer.to_out)
        for name, linear in zip(PROJECTIONS, theirs, strict=True):
            same = weights.linear(name)
            linear.weight, linear.bias = same.weight, same.bias
        self.setting = setting

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x, mask=self.setting.real(x.shape[1]))
        return out[0] if isinstance(out, tuple) else out

    def gradients(self) -> list[Tensor | None]:
        layer = self.layer
        return [p.weight.grad for p in (layer.to_q, layer.to_k, layer.to_v, layer.to_out)]


CONTENDERS: dict[str, Callable[[Weights, Setting], nn.Module]] = {
    OURS: Polyhead,
    TRUSTING: functools.partial(Polyhead, finite=True),
    TORCH: TorchLayer,
    TUTORIAL: Tutorial,
    X_TRANSFORMERS: XTransformers,
    FUSED_QKV: FusedQKV,
    THREE_LINEAR: ThreeLinear,
}
