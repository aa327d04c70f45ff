"""The direct path from the outputs of heads to the logits of a causal language model: W_O, final norm, unembedding.

What a head adds to the residual stream reaches the logits directly through the final norm and the unembedding, and
indirectly through later layers. The norm divides a row by one number; with it held fixed, the direct effect on the
logit of a token is linear (direct logit attribution; Elhage et al., 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.observation.evaluation_mode import evaluating
from polyhead.observation.projections import TOLERANCE, HeadProjections
from polyhead.observation.statistics import AttentionSite


@dataclass(frozen=True, slots=True, eq=False)
class DirectLogits:
    """W_O of each head and the unembedding, with the weight of the final norm.

    The norm also divides each row by a positive number, which is left out: effects of one row on several tokens are
    comparable, effects of several rows are not.
    """

    outputs: Mapping[tuple[str, str], Tensor]  # W_O by name and kind of the site, [heads, value_dim, width]
    unembedding: Tensor  # [vocabulary, width]
    gain: Tensor  # [width]: weight of the final norm
    centred: bool = False  # whether the norm subtracts the mean of a row, as LayerNorm does

    def directions(self, tokens: Tensor) -> Tensor:
        """Return the directions of the residual stream that raise the logits of tokens, float32 [..., width]."""
        rows = self.unembedding[tokens.to(self.unembedding.device)].float() * self.gain.float()
        return rows - rows.mean(-1, keepdim=True) if self.centred else rows


def find_direct_logits(
    model: Any, run: Callable[[], object], projections: Mapping[AttentionSite, HeadProjections]
) -> DirectLogits | None:
    """Return the direct path of every site whose heads write to the stream that the final norm reads.

    Args:
        model: causal language model of transformers.
        run: function without arguments that calls it, on a short text.
        projections: from `find_projections`.

    Returns:
        None if the unembedding does not read a norm of the output of the last block. Sites whose output passes
        through another module with parameters, such as a norm after the attention, are left out.
    """
    unembedding, calls = model.get_output_embeddings(), list[_Call]()
    if not isinstance(unembedding, nn.Linear):
        return None
    hooks = [
        module.register_forward_hook(
            lambda module, inputs, output, name=name: _record(calls, name, module, inputs, output)
        )
        for name, module in model.named_modules()
    ]
    try:
        with torch.no_grad(), evaluating(model):
            run()
    finally:
        for hook in hooks:
            hook.remove()
    read = next((call.input for call in calls if call.module is unembedding), None)
    norm = next((call for call in calls if read is not None and _same(call.output, read)), None)
    blocks = (call for call in calls if call.name.rpartition(".")[2].isdigit())
    if norm is None or not any(_same(call.output, norm.input) for call in blocks):
        return None
    for centred in (False, True):
        gain = _gain(norm.module, norm.input, centred)
        if gain is not None:
            break
    else:
        return None
    outputs: dict[tuple[str, str], Tensor] = {}
    for site, matrices in projections.items():
        written = next((call.output for call in calls if call.name == site.name), None)
        is_direct = written is not None and not any(
            _same(call.input, written) and next(call.module.parameters(), None) is not None for call in calls
        )
        if is_direct and matrices.output is not None and matrices.output.shape[2] == len(gain):
            outputs[site.name, site.kind] = matrices.output
    return DirectLogits(outputs, unembedding.weight.detach(), gain, centred)


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    name: str
    module: nn.Module
    input: Tensor
    output: Tensor


def _record(calls: list[_Call], name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    output = output[0] if isinstance(output, tuple) else output
    if isinstance(output, Tensor):
        first = inputs[0] if len(inputs) and isinstance(inputs[0], Tensor) else output.new_zeros(0)
        calls.append(_Call(name, module, first, output))


def _same(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are the same activations, not merely equal ones."""
    return first.data_ptr() == second.data_ptr() and first.shape == second.shape


@torch.no_grad()
def _gain(norm: nn.Module, like: Tensor, centred: bool) -> Tensor | None:
    """Return the weight of a norm, from its values at two opposite rows; None if random rows do not confirm it.

    This includes norms that store their weight minus one.
    """
    width = like.shape[-1]
    random = torch.randn(5, width, generator=torch.Generator().manual_seed(0)).to(like)
    row = (1.0 - 2.0 * (torch.arange(width) % 2)).to(like)[None]
    there, back, output = (norm(x).double() for x in (row, -row, random))
    gain, bias = (there - back) / 2 / _normalised(row, centred), (there + back) / 2
    expected = _normalised(random, centred) * gain + bias
    return gain[0] if bool((expected - output).norm() <= TOLERANCE * output.norm()) else None


def _normalised(rows: Tensor, centred: bool) -> Tensor:
    rows = rows.double()
    rows = rows - rows.mean(-1, keepdim=True) if centred else rows
    return rows / rows.square().mean(-1, keepdim=True).sqrt()
