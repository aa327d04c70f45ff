"""One attention call as polyhead's kernels take it, and as flat arguments of a custom operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyhead.errors import BackendUnsupported
from polyhead.ops.common.kernels.mask_arguments import MASK_SCHEMA, MASK_TENSORS, MaskArguments

# The types of `KernelCall.flat`, in its order.
SCHEMA = (
    "Tensor query, Tensor key, Tensor value, float scale, Tensor? head_scale, float? softcap, Tensor? sinks, "
    f"{MASK_SCHEMA}, float dropout, Tensor? seed, str names, SymInt sink_keys, SymInt window"
)
FLAT = SCHEMA.count(",") + 1  # number of flat arguments
_TENSOR_LIST = 9  # index of `mask_tensors` among them; `mask_numbers` is the next


@dataclass(frozen=True, slots=True, eq=False)
class KernelCall:
    """Tensors, mask and options of one call, the only input of the host code that launches the kernels."""

    query: Tensor  # [batch, heads, queries, head_dim]; [total, head_dim] for selected rows
    key: Tensor  # [batch, kv_heads, keys, head_dim]
    value: Tensor  # [batch, kv_heads, keys, value_dim]
    mask: MaskArguments
    scale: float  # multiplied by `head_scale`, if that is set
    head_scale: Tensor | None = None  # [heads]
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads]
    dropout: float = 0.0
    seed: Tensor | None = None  # int64, one element; not read without dropout
    names: tuple[str, ...] = ()  # of the row statistics
    sink_keys: int = 1
    window: int = 0

    @property
    def is_plain(self) -> bool:
        """True if the logits are dot products times one number, and no weight is dropped."""
        return self.softcap is None and self.sinks is None and self.head_scale is None and not self.dropout

    @property
    def head_vectors(self) -> tuple[Tensor | None, Tensor | None]:
        """`head_scale` and `sinks` as kernels read them: contiguous, which those of a caller need not be."""
        return (
            None if self.head_scale is None else self.head_scale.contiguous(),
            None if self.sinks is None else self.sinks.contiguous(),
        )

    def flat(self) -> tuple[Any, ...]:
        """Return the arguments of an operator, of the types of `SCHEMA`; the inverse of `from_flat`."""
        return (
            *(self.query, self.key, self.value, self.scale, self.head_scale, self.softcap, self.sinks),
            *self.mask.flat(),
            *(self.dropout, self.seed, ",".join(self.names), self.sink_keys, self.window),
        )

    @classmethod
    def from_flat(cls, arguments: Sequence[Any]) -> KernelCall:
        """Return the call of an operator's arguments."""
        query, key, value, scale, head_scale, softcap, sinks, bias, table, tensors, numbers, *rest = arguments
        dropout, seed, names, sink_keys, window = rest
        mask = MaskArguments.from_flat(bias, table, tensors, numbers)
        options = (scale, head_scale, softcap, sinks, dropout, seed, split_names(names), sink_keys, window)
        return cls(query, key, value, mask, *options)


def split_names(joined: str) -> tuple[str, ...]:
    """Return the names of statistics, which operators take as one string."""
    return tuple(joined.split(",")) if joined else ()


def fake_rows(query: Tensor, count: int) -> list[Tensor]:
    """Return `count` uninitialised results with one number per row, for fake kernels."""
    return [query.new_empty(query.shape[:-1], dtype=torch.float32) for _ in range(count)]


# ---- autograd of operators whose last `FLAT` arguments are those of `KernelCall.flat`


def save_call(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    """Save arguments and results of an operator for `saved_call`."""
    i_list = len(inputs) - FLAT + _TENSOR_LIST
    # Absent gradients stay None: which gradients are present decides which kernel can run.
    ctx.set_materialize_grads(False)
    tensors = (x if isinstance(x, Tensor) else None for x in inputs)
    ctx.save_for_backward(*tensors, *inputs[i_list], *output)
    ctx.options = [None if isinstance(x, Tensor) or i == i_list else x for i, x in enumerate(inputs)]
    # The gradients of the two list arguments: PyTorch expects a list of None if all elements are tensors.
    ctx.lists = [
        [None] * len(x) if all(isinstance(element, Tensor) for element in x) else None
        for x in inputs[i_list : i_list + 2]
    ]


def saved_call(ctx: Any) -> tuple[list[Any], list[Tensor]]:
    """Return the arguments and the results that `save_call` saved."""
    saved, count = ctx.saved_tensors, len(ctx.options)
    inputs = [option if x is None else x for x, option in zip(saved, ctx.options, strict=False)]
    outputs = count + len(MASK_TENSORS)
    inputs[count - FLAT + _TENSOR_LIST] = list(saved[count:outputs])
    return inputs, list(saved[outputs:])


def flat_gradients(
    ctx: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    table: Tensor | None = None,
) -> tuple[Any, ...]:
    """Return the gradients of the arguments of `SCHEMA`, given those of its tensors."""
    return query, key, value, None, head_scale, None, sinks, bias, table, *ctx.lists, *(None,) * 5


def eager_function(
    name: str,
    compute: Callable[..., Sequence[Tensor]],
    backward: Callable[..., tuple[Any, ...]],
    save: Callable[..., None] = save_call,
) -> Any:
    """Return an operator as an autograd function, for eager calls.

    It takes the arguments of the operator and, as a tuple, those of `compute`. It has no `setup_context`, for which
    PyTorch inspects the signature in every call.
    """

    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        *flat, inputs = arguments
        output = tuple(compute(*inputs))
        save(ctx, flat, output)
        ctx.lists = (None, None)
        return output

    methods = {"forward": forward, "backward": lambda ctx, *grads: (*backward(ctx, list(grads)), None)}
    return type(name, (torch.autograd.Function,), {key: staticmethod(method) for key, method in methods.items()})


def no_second_derivative(alternative: str) -> Callable[..., None]:
    """Return the gradient of a backward operator, which raises BackendUnsupported and names another backend."""

    def backward(ctx: Any, *grads: Any) -> None:
        raise BackendUnsupported("fused", [f'our kernels have no second derivative; backend="{alternative}" has one'])

    return backward


def with_dense_rows(x: Tensor) -> Tensor:
    """Make the last axis contiguous, as every kernel requires."""
    return x if x.stride(-1) == 1 else x.contiguous()


def laid_out_like(grad: Tensor, like: Tensor) -> Tensor:
    """Return the gradient with dtype and strides of `torch.empty_like(like)`, as fake kernels return it."""
    expected = torch.empty_like(like, device="meta")
    if grad.dtype is expected.dtype and grad.stride() == expected.stride():
        return grad
    return torch.empty_like(like).copy_(grad)


def row_poison(mask: MaskArguments, queries: int) -> Tensor | None:
    """Return NaN for rows that see a non-finite key under a band, else 0, [batch, kv_heads, queries].

    None if the mask has no poison: the keys are known to be finite, or all rows see all keys.
    """
    poison = mask.poison
    if poison is None:
        return None
    if mask.left is None and mask.right == 0 and mask.offset >= 0:
        # A running sum is NaN from the first poisoned key on, which is exactly where a causal row sees it.
        causal_poison = poison.cumsum(-1, dtype=torch.float32)
        return causal_poison if mask.offset == 0 else causal_poison[..., mask.offset :].contiguous()
    keys = poison.shape[-1]
    num_nonfinite = torch.nn.functional.pad(poison.isnan().int().cumsum(-1), (1, 0))  # before each key, and in total
    position = torch.arange(queries, device=poison.device) + mask.offset
    stop = keys if mask.right is None else position + mask.right + 1
    start = 0 if mask.left is None else position - mask.left
    visible = (
        num_nonfinite[..., (position * 0 + stop).clamp(0, keys)]
        - num_nonfinite[..., (position * 0 + start).clamp(0, keys)]
    )
    return torch.where(visible > 0, torch.nan, 0.0)
