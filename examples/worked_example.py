"""Multi-head attention small enough for paper: three tokens, four channels, two heads, every intermediate kept."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import polyhead
from polyhead.errors import PolyheadError

NUM_HEADS = 2
TOKENS = ((1, 0, 1, 0), (0, 2, 0, 1), (1, 1, 0, 3))
QUERY_WEIGHT = ((1, 0, 1, 0), (0, 1, 0, 1), (1, 1, 0, 0), (0, 0, 1, 1))
KEY_WEIGHT = ((1, 1, 0, 0), (0, 0, 1, 1), (1, 0, 1, 0), (0, 1, 0, 1))
VALUE_WEIGHT = QUERY_WEIGHT
OUTPUT_WEIGHT = ((1, 2, 0, 0), (0, 1, 0, 3), (2, 0, 1, 0), (0, 0, 1, 1))

# A result passes through two short dot products, an exponential, a quotient and two more dot products: about sixteen
# roundings, each of at most half a unit in the last place of the largest number there is.
_ROUNDINGS = 16


@dataclass(frozen=True, slots=True, eq=False)
class WorkedExample:
    """Every matrix on the way from the tokens to the output, in float64, by the formula as it is written.

    Matrices multiply from the right, as in the paper: `queries = tokens @ query_weight`. Head i, from 0, takes
    columns 2 i and 2 i + 1.
    """

    tokens: Tensor  # [tokens, embed_dim]
    query_weight: Tensor  # [embed_dim, embed_dim], as the three below
    key_weight: Tensor
    value_weight: Tensor
    output_weight: Tensor
    queries: Tensor  # [tokens, embed_dim], as the two below
    keys: Tensor
    values: Tensor
    head_queries: Tensor  # [heads, tokens, head_dim], as the two below
    head_keys: Tensor
    head_values: Tensor
    products: Tensor  # [heads, tokens, tokens], dot products of queries and keys
    scores: Tensor  # [heads, tokens, tokens], the same over sqrt(head_dim)
    weights: Tensor  # [heads, tokens, tokens], softmax of each row
    head_outputs: Tensor  # [heads, tokens, head_dim]
    concatenated: Tensor  # [tokens, embed_dim]
    output: Tensor  # [tokens, embed_dim]
    layer_output: Tensor  # [tokens, embed_dim], by polyhead.MultiHeadAttention
    backend: str  # which served the layer

    @property
    def head_dim(self) -> int:
        return self.head_queries.shape[-1]

    @property
    def largest_difference(self) -> float:
        """Between the output by hand and the layer's."""
        return float((self.output - self.layer_output).abs().max())


def work_through() -> WorkedExample:
    """Compute the example by the formula, and refuse to return it if the library computes anything else.

    >>> example = work_through()
    >>> example.products[0].tolist()
    [[5.0, 1.0, 6.0], [2.0, 2.0, 8.0], [3.0, 1.0, 5.0]]
    """
    x, w_q, w_k, w_v, w_o = (
        torch.tensor(rows, dtype=torch.float64)
        for rows in (TOKENS, QUERY_WEIGHT, KEY_WEIGHT, VALUE_WEIGHT, OUTPUT_WEIGHT)
    )
    queries, keys, values = x @ w_q, x @ w_k, x @ w_v
    head_queries, head_keys, head_values = _split(queries), _split(keys), _split(values)
    products = head_queries @ head_keys.transpose(-2, -1)
    scores = products / math.sqrt(head_queries.shape[-1])
    exponentials = torch.exp(scores)
    weights = exponentials / exponentials.sum(-1, keepdim=True)
    head_outputs = weights @ head_values
    concatenated = head_outputs.transpose(0, 1).flatten(1)
    output = concatenated @ w_o

    result = _layer(w_q, w_k, w_v, w_o)(x[None])
    example = WorkedExample(
        x, w_q, w_k, w_v, w_o, queries, keys, values, head_queries, head_keys, head_values,
        products, scores, weights, head_outputs, concatenated, output, result.output[0].detach(), result.backend,
    )  # fmt: skip
    heads = polyhead.attention(head_queries[None], head_keys[None], head_values[None], weights=True)
    assert heads.weights is not None
    _hold("the layer's output", example.layer_output, output)
    _hold("attention's output", heads.output[0], head_outputs)
    _hold("attention's weights", heads.weights[0], weights)
    return example


def _split(x: Tensor) -> Tensor:
    """[tokens, embed_dim] to [heads, tokens, head_dim]: head i takes the i-th run of columns."""
    return torch.stack(x.chunk(NUM_HEADS, dim=1))


def _layer(w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor) -> polyhead.MultiHeadAttention:
    layer = polyhead.MultiHeadAttention(w_q.shape[0], NUM_HEADS, bias=False, dtype=torch.float64)
    projections = (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
    with torch.no_grad():
        for linear, matrix in zip(projections, (w_q, w_k, w_v, w_o), strict=True):
            linear.weight.copy_(matrix.T)  # nn.Linear multiplies by its weight's transpose
    return layer


def _hold(what: str, found: Tensor, by_hand: Tensor) -> None:
    difference = float((found - by_hand).abs().max())
    allowed = _ROUNDINGS * torch.finfo(by_hand.dtype).eps * float(by_hand.abs().max())
    if not difference <= allowed:
        raise PolyheadError(
            f"{what} must equal the formula's to within rounding ({allowed:.1e}), got a difference of {difference:.1e}"
        )
