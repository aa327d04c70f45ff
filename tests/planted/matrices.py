"""Circuits taken apart into the matrices of a head, behind random rotations that no output can see."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polyhead.layers.head_matrices import HeadMatrices
from tests.planted.circuits import Circuit, Sharpness
from tests.planted.spaces import Sizes, Spaces, gaussian, random_rotation


def matrices_of(
    circuit: Circuit, spaces: Spaces, sharpness: Sharpness, *, length: float, generator: torch.Generator
) -> HeadMatrices:
    """Matrices that do what the circuit says in a stream of the given length, divided by its RMS before the head."""
    head_dim, embed_dim = len(circuit.logits), spaces.token.shape[1]
    per_unit = math.sqrt(embed_dim) / length  # what the norm makes of a vector of length 1
    query = torch.cat((spaces.position, spaces.token))
    content = spaces.token if circuit.key_content == "token" else spaces.previous / sharpness.write
    key = torch.cat((spaces.position, content))
    target: Tensor = getattr(spaces, circuit.target)
    to_query, to_key = _apart(circuit.logits * math.sqrt(head_dim) / per_unit**2, head_dim, generator)
    to_value, to_output = _apart(circuit.writes * sharpness.write / per_unit, head_dim, generator)
    matrices = (query.T @ to_query, key.T @ to_key, spaces.token.T @ to_value, to_output.T @ target)
    return HeadMatrices(*(matrix.float() for matrix in matrices))


def random_head(
    sizes: Sizes, sharpness: Sharpness, *, target: Tensor | None, generator: torch.Generator
) -> HeadMatrices:
    """Gaussian matrices of the same sharpness and strength; with a `target`, writing to as many of its axes as others.

    `target` [axes, embed_dim] is the subspace that may be written to; without one it is the whole stream.
    """
    embed_dim, head_dim = sizes.embed_dim, sizes.head_dim
    # The stream comes from the norm with entries of mean square 1, so logits have the standard deviation `spread`.
    deviation = math.sqrt(sharpness.spread / embed_dim)
    query, key = (deviation * gaussian(embed_dim, head_dim, generator=generator) for _ in range(2))
    value = gaussian(embed_dim, head_dim, generator=generator) / math.sqrt(embed_dim)
    if target is None:
        output = gaussian(head_dim, embed_dim, generator=generator) / math.sqrt(embed_dim)
    else:
        mixing = gaussian(head_dim, sizes.write_dim, generator=generator) / math.sqrt(sizes.write_dim)
        output = mixing @ random_rotation(len(target), generator)[: sizes.write_dim] @ target
    output = output * sharpness.write / math.sqrt(head_dim)
    return HeadMatrices(*(matrix.float() for matrix in (query, key, value, output)))


def _apart(product: Tensor, head_dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two equally large factors of head_dim columns, rotated together at random, with left @ right.T = product."""
    u, s, vh = torch.linalg.svd(product, full_matrices=False)
    rotation = random_rotation(head_dim, generator)[: len(s)]
    return u * s.sqrt() @ rotation, vh.T * s.sqrt() @ rotation
