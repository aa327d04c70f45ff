"""Our attention and PyTorch's on cuDNN, in sequence on one shape: are the gradients independent?

    python -m tests.ops.attention.plan_cases "own plans" fused ours tokens-first heads-first

PyTorch's cache of cuDNN plans belongs to the process, so a case is an order in which both run, on a shape that nothing
in the process has used yet. Prints the relative errors of the gradients against the float32 formula.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import polyhead
from polyhead import Mask
from polyhead.layers.torch_compat import MultiheadAttention
from polyhead.ops.attention import cudnn_backward

HEADS, DIM = 4, 64
WIDTH = HEADS * DIM

# The same numbers in another layout, of [batch, heads, tokens, dim]; "expanded" repeats the first sequence.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads-first": lambda x: x.contiguous(),
    "tokens-first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "expanded": lambda x: x[:1].expand_as(x),
    "sliced": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
}
ORDERS = ("ours", "theirs")  # which runs first


def _fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return polyhead.attention(q, k, v, mask=Mask.causal(), backend="fused").output


def _statistics(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return polyhead.attention(q, k, v, mask=Mask.causal(), statistics="entropy").output


def _auto(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return polyhead.attention(q, k, v, mask=Mask.causal()).output


def _compiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    torch.compiler.reset()
    return torch.compile(_auto, fullgraph=True)(q, k, v)


FUNCTIONS = {"fused": _fused, "fused with statistics": _statistics, "auto": _auto, "compiled": _compiled}


def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v


# Every layer computes softmax(Q Kᵀ) V between the same four matrices, so that one formula serves all.


class Projected(nn.Module):
    """A handwritten layer whose heads have one of the layouts of joint or separate projections."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], layout: str) -> None:
        super().__init__()
        self.attend, self.layout = attend, layout
        self.in_weight = nn.Parameter(torch.empty(3 * WIDTH, WIDTH))
        self.out_weight = nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        joined = F.linear(x, self.in_weight)
        if self.layout == "split":  # three column blocks, as our layer takes them where gradients are recorded
            heads = [part.view(batch, length, HEADS, DIM).transpose(1, 2) for part in joined.split(WIDTH, -1)]
        elif self.layout == "separate":
            parts = (F.linear(x, weight) for weight in self.in_weight.chunk(3))
            heads = [part.view(batch, length, HEADS, DIM).transpose(1, 2) for part in parts]
        elif self.layout == "sequence-first":  # as nn.MultiheadAttention leaves them
            parts = (part.transpose(0, 1).contiguous() for part in joined.split(WIDTH, -1))
            heads = [
                part.view(length, batch * HEADS, DIM).transpose(0, 1).view(batch, HEADS, length, DIM) for part in parts
            ]
        else:
            heads = [part.view(batch, length, HEADS, DIM).transpose(1, 2).contiguous() for part in joined.chunk(3, -1)]
        return F.linear(self.attend(*heads).transpose(1, 2).reshape(batch, length, WIDTH), self.out_weight)


SPLITS = ("split", "separate", "sequence-first", "contiguous")


class _DropIn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype)
        return self.inner(x, x, x, attn_mask=hidden, is_causal=True, need_weights=False)[0]


class _Ours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = polyhead.MultiHeadAttention(WIDTH, HEADS, causal=True, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).output


class _HuggingFace(nn.Module):
    """Llama's attention with rotations of angle 0, which equals the formula."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaAttention

        config = LlamaConfig(hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=DIM)
        config._attn_implementation = polyhead.integrations.huggingface.register()
        self.inner = LlamaAttention(config, 0)

    def forward(self, x: Tensor) -> Tensor:
        angles = x.new_zeros(1, x.shape[1], DIM)
        return self.inner(x, position_embeddings=(angles + 1, angles), attention_mask=None)[0]


LAYERS: dict[str, Callable[[], nn.Module]] = {"drop-in": _DropIn, "layer": _Ours, "transformers": _HuggingFace}


def _weights(layer: nn.Module) -> list[nn.Parameter]:
    """Return W_Q, W_K, W_V (joint or separate), then W_O, under each layer's parameter names."""
    named = dict(layer.named_parameters())
    order = ("in_proj", "in_weight", "q_proj", "k_proj", "v_proj", "out_proj", "out_weight", "o_proj")
    return [named[name] for part in order for name in named if part in name]


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)


def _errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    pairs = zip(found, exact, strict=True)
    return [float((ours.float() - right.float()).norm() / right.float().norm()) for ours, right in pairs]


def function_errors(
    name: str, first: str, inputs: str, gradient: str, batch: int, length: int
) -> dict[str, list[float]]:
    """Return the relative errors of the gradients of query, key and value, ours and PyTorch's."""
    generator = torch.Generator("cuda").manual_seed(length)
    leaves = [_normal(generator, batch, HEADS, length, DIM).requires_grad_() for _ in range(3)]
    direction = LAYOUTS[gradient](_normal(generator, batch, HEADS, length, DIM))

    def gradients(call: Callable[[Tensor, Tensor, Tensor], Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        output = call(*(LAYOUTS[inputs](x.to(dtype)) for x in leaves))
        return torch.autograd.grad(output, leaves, direction.to(dtype))

    exact = gradients(formula, torch.float32)
    calls = {"ours": FUNCTIONS[name], "theirs": theirs}
    with torch.no_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        heads = [LAYOUTS[inputs](x) for x in leaves]
        cudnn_serves = torch._fused_sdp_choice(*heads, None, 0.0, True) == SDPBackend.CUDNN_ATTENTION.value
    order = ORDERS if first == "ours" else ORDERS[::-1]
    # cuDNN may refuse overlapping inputs; then there is no plan for them either.
    order = order if cudnn_serves else ("ours",)
    return {who: _errors(gradients(calls[who], torch.bfloat16), exact) for who in order}


def layer_errors(name: str, first: str, split: str, gradient: str, batch: int, length: int) -> dict[str, list[float]]:
    """Return the relative errors of the gradients of input, W_Q, W_K, W_V and W_O, ours and PyTorch's."""
    generator = torch.Generator("cuda").manual_seed(length)
    x = _normal(generator, batch, length, WIDTH)
    weights = [_normal(generator, WIDTH, WIDTH) * WIDTH**-0.5 for _ in range(4)]
    direction = _normal(generator, batch, length, WIDTH).transpose(0, 1).contiguous().transpose(0, 1)

    def gradients(layer: nn.Module, dtype: torch.dtype) -> list[Tensor]:
        layer = layer.to("cuda", dtype)
        held = _weights(layer)
        with torch.no_grad():
            *joined, out = held
            rows = torch.cat(weights[:3]).to(dtype)
            for target, part in zip(joined, rows.split([len(w) for w in joined]), strict=True):
                target.copy_(part)
            out.copy_(weights[3])
        leaf = x.to(dtype).requires_grad_()
        by_x, *others = torch.autograd.grad(layer(leaf), [leaf, *held], direction.to(dtype))
        return [by_x, torch.cat(others[:-1]), others[-1]]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Laid.apply(theirs(q, k, v), gradient)  # type: ignore[no-any-return]

    exact = gradients(Projected(formula, split), torch.float32)
    calls: dict[str, Callable[[], list[Tensor]]] = {
        "ours": lambda: gradients(LAYERS[name](), torch.bfloat16),
        "theirs": lambda: gradients(Projected(attend, split), torch.bfloat16),
    }
    order = ORDERS if first == "ours" else ORDERS[::-1]
    return {who: _errors(calls[who](), exact) for who in order}


class _Laid(torch.autograd.Function):
    """Identity whose gradient has the named layout."""

    @staticmethod
    def forward(ctx: object, x: Tensor, layout: str) -> Tensor:
        ctx.layout = layout  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return LAYOUTS[ctx.layout](grad), None  # type: ignore[attr-defined]


# Our attention may run cuDNN's backward on separate plans, or not at all, as for small problems.
PLANS = {"own plans": 0, "no plans": 1 << 62}


def errors(
    plans: str, name: str, first: str, inputs: str, gradient: str, batch: int, length: int
) -> dict[str, list[float]]:
    measure = function_errors if name in FUNCTIONS else layer_errors
    with mock.patch.object(cudnn_backward, "MIN_MULTIPLY_ADDS", PLANS[plans]):
        return measure(name, first, inputs, gradient, batch, length)


def all_cases() -> list[tuple[str, str, str, str, str]]:
    """Return every (plans, ours, which runs first, layout of the inputs, layout of the output gradient)."""
    functions = itertools.product(PLANS, FUNCTIONS, ORDERS, LAYOUTS, LAYOUTS)
    # A layer's own output gradient cannot be expanded: the numbers would differ.
    layers = itertools.product(PLANS, LAYERS, ORDERS, SPLITS, [layout for layout in LAYOUTS if layout != "expanded"])
    return [*functions, *layers]


if __name__ == "__main__":
    print(json.dumps(errors(*sys.argv[1:], 2, 704)), flush=True)  # type: ignore[call-arg, arg-type]
    # One such process aborted while the interpreter ended, after its results were printed; the cause is not known.
    os._exit(0)
