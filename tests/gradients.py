"""Settings of `torch.autograd.gradcheck` and `gradgradcheck` where every element of a Jacobian would take seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# A random direction of each Jacobian: a wrong element is one of many, so the tolerance is a hundredth of the default.
# (After a failure, gradcheck computes every element to say which is wrong.)
FAST = {"fast_mode": True, "atol": 1e-7, "rtol": 1e-5}


def of_one_vector(
    function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Return a function of all inputs in one vector, with all results in one: one direction for all of them."""

    def joined(vector: Tensor) -> Tensor:
        parts = vector.split([x.numel() for x in inputs])
        results = function(*(part.view_as(x) for part, x in zip(parts, inputs, strict=True)))
        return torch.cat([result.flatten() for result in results])

    return joined, torch.cat([x.detach().flatten() for x in inputs]).requires_grad_()
