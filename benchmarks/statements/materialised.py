"""A model's attention weights, logits and head outputs on one text, all in memory; no code of polyhead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Ends of the names of output projections, whose inputs are the head outputs.
OUTPUT_PROJECTIONS = ("self_attn.o_proj", "self_attn.out_proj", "attention.output.dense")


@dataclass(frozen=True, eq=False)
class Attention:
    """The attention of one text; heads of all layers are one axis, in order of layers."""

    weights: Tensor  # [heads, queries, keys]
    largest_logits: Tensor  # [heads, queries]
    outputs: Tensor  # [tokens, layers, heads, dim], before the output projection
    causal: bool

    @property
    def visible(self) -> Tensor:
        """Return True for the keys that each query can attend to, [queries, keys]."""
        ones = torch.ones(self.weights.shape[1:], dtype=torch.bool)
        return ones.tril() if self.causal else ones


class Model:
    """A transformers model with eager attention, one stack of self-attention layers."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        model.set_attn_implementation("eager")
        self.projections = [
            module for name, module in model.named_modules()
            if name.endswith(OUTPUT_PROJECTIONS) and isinstance(module, nn.Linear)
        ]  # fmt: skip
        self.layers = len(self.projections)
        self.heads = model.config.num_attention_heads

    @cached_property
    def output_weights(self) -> Tensor:
        """W_O of every head, [layers, heads, dim, width]."""
        weights = torch.stack([module.weight.detach().T for module in self.projections])
        return weights.unflatten(1, (self.heads, -1)).double()

    @torch.no_grad()
    def read(self, ids: Tensor) -> Attention:
        """Return the attention of one text, ids [tokens]."""
        outputs: list[Tensor] = []
        with self.on_outputs(lambda layer, x: outputs.append(x.clone())), _largest_logits() as largest:
            result = _base(self.model)(input_ids=ids[None], output_attentions=True, **self.no_cache)
        weights = torch.cat([x[0].double() for x in result.attentions])
        causal = bool((weights.triu(1) == 0).all())
        return Attention(weights, torch.cat(largest), torch.stack([x[0] for x in outputs], 1), causal)

    @property
    def no_cache(self) -> dict[str, bool]:
        return {"use_cache": False} if hasattr(self.model.config, "use_cache") else {}

    @contextmanager
    def on_outputs(self, call: Callable[[int, Tensor], Tensor | None]) -> Iterator[None]:
        """Call a function with the layer and its head outputs, [rows, tokens, heads, dim]; a result replaces them."""

        def hook(layer: int) -> Any:
            def replace(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor] | None:
                changed = call(layer, inputs[0].unflatten(-1, (self.heads, -1)))
                return None if changed is None else (changed.flatten(-2),)

            return replace

        handles = [module.register_forward_pre_hook(hook(layer)) for layer, module in enumerate(self.projections)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def next_token_losses(self, ids: Tensor, counted: Tensor) -> Tensor:
        """Return the sum of the next-token losses of one text over counted targets, in nats."""
        logits = self.model(input_ids=ids[None], **self.no_cache).logits[0].float()
        losses = F.cross_entropy(logits[:-1], ids[1:], reduction="none")
        return losses[counted[1:]].sum()

    def embedding(self, ids: Tensor) -> Tensor:
        """Return the mean of the last hidden states of one text, at unit length."""
        return F.normalize(self.model(input_ids=ids[None]).last_hidden_state[0].double().mean(0), dim=0)

    def gradients(self, ids: Tensor, counted: Tensor) -> tuple[Tensor, float]:
        """Return the gradient of the summed losses of one text for a factor of each head's output, and their number."""
        gates = torch.ones(self.layers, self.heads, requires_grad=True)
        with torch.enable_grad(), self.on_outputs(lambda layer, x: x * gates[layer][:, None]):
            (gradient,) = torch.autograd.grad(self.next_token_losses(ids, counted), gates)
        return gradient.flatten().double(), float(counted[1:].sum())

    @torch.no_grad()
    def ablated(self, ids: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a loss of one text without each head in turn, minus that of the whole model, [heads]."""
        gates = torch.ones(self.layers, self.heads)
        with self.on_outputs(lambda layer, x: x * gates[layer][:, None]):
            intact, changes = loss(ids), []
            for head in range(gates.numel()):
                gates.view(-1)[head] = 0.0
                changes.append(loss(ids) - intact)
                gates.view(-1)[head] = 1.0
        return torch.stack(changes).double()


def random_twin(model: Any, seed: int) -> Model:
    """Return a model of the same config with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Model(type(model)(model.config).float())


def _base(model: Any) -> Any:
    """Return the model without its language-modelling head; a decoder of its own if it has one."""
    base = getattr(model, model.base_model_prefix, model)
    return getattr(base, "decoder", base) if hasattr(base, "decoder") else base


@contextmanager
def _largest_logits() -> Iterator[list[Tensor]]:
    """Record the largest logit of every row that eager attention passes to its softmax."""
    softmax, largest = F.softmax, list[Tensor]()

    def recording(logits: Tensor, *args: Any, **options: Any) -> Tensor:
        largest.append(logits[0].amax(-1).double())
        return softmax(logits, *args, **options)

    F.softmax = recording  # type: ignore[assignment]
    try:
        yield largest
    finally:
        F.softmax = softmax
