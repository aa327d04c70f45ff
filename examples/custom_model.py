"""Observe a model with attention of its own, through an adapter.

A PyTorch model with a hand-written causal attention class is neither a transformers model nor built of polyhead's
layers. An adapter of one method passes its queries, keys, values and outputs to `polyhead.observe`; all statistics,
collectors and gates work through it. Prints each head's entropy beside that of its weights, and a head's effect.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import polyhead


class CausalSoftmax(nn.Module):  # written out
    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        hidden = torch.ones(query.shape[2], key.shape[2]).triu(1).bool()
        return (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.weights(query, key) @ value


class HandWrittenAttention(nn.Module):
    """Causal attention, added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.joint, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attend = CausalSoftmax()

    def project(self, x: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.joint(x).chunk(3, -1)]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.attend(*self.project(x)).transpose(1, 2).flatten(2))


class Adapter:
    """Report each attention of a module, with its own output, and apply the gates that the session returns."""

    gates = True

    def watch(self, module: HandWrittenAttention, notify: Any) -> Any:
        def after(attend: CausalSoftmax, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> Tensor:
            gate = notify(*inputs, mask=polyhead.Mask.causal(), output=output)  # raises if the mask is not the module's
            return output if gate is None else output * gate[:, None, None]  # one factor per head

        return module.attend.register_forward_hook(after)  # the session removes it on exit


def main(batch: int = 16, length: int = 200) -> tuple[list[float], list[float], float]:
    """Return observed entropies, those computed from the weights, and the change of the output without L0H1."""
    torch.manual_seed(0)
    model = nn.Sequential(*(HandWrittenAttention(64, 4) for _ in range(2))).eval()
    x = 3 * torch.randn(batch, length, 64)
    with torch.no_grad(), polyhead.observe(model, adapters={HandWrittenAttention: Adapter()}) as session:
        output = model(x)
        observed = session.profile["entropy"]
        session.gates["0", "self"] = torch.tensor([1.0, 0, 1, 1])
        change = float((model(x) - output).norm() / output.norm())
    expected = []
    with torch.no_grad():
        for layer in model:
            entropy = torch.special.entr(layer.attend.weights(*layer.project(x)[:2])).sum(-1)
            expected += entropy.mean((0, 2)).tolist()
            x = layer(x)
    for row, (one, other) in enumerate(zip(observed.tolist(), expected, strict=True)):
        print(f"{polyhead.HeadId(row // 4, row % 4)}: entropy observed {one:.5f}, from the weights {other:.5f}")
    print(f"without L0H1 the output changes by {change:.1%}")
    print("Both columns agree up to rounding; the first needs memory linear in the sequence length.")
    return observed.tolist(), expected, change


if __name__ == "__main__":
    main()
