"""polyhead's own kernels as a backend: supported requests, operators and gradients.

The forward is one kernel. The gradient of plain heads is computed by cuDNN's backward on separate plans, given our
output and log-sum-exp, and by our own kernel otherwise. The gradient of a maximum belongs to one key per row, and is
gathered and scattered here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyhead.errors import BackendUnsupported
from polyhead.ops.attention import cudnn_backward
from polyhead.ops.attention.kernels.outputs import output_like
from polyhead.ops.common.dropout import draw_seed
from polyhead.ops.common.kernel_masks import mask_reasons, pack, shared_strides
from polyhead.ops.common.kernels.availability import HAS_TRITON, IS_INTERPRETED, capability, has_hopper_kernels
from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.nonfinite import without_broken
from polyhead.ops.common.request import AttentionOutput, AttentionRequest
from polyhead.ops.common.statistics import RowStatistics
from polyhead.ops.common.tracing import TRANSFORMED, is_traced, is_transformed

LARGEST_DIM = 256

_MAXIMA = ("max_logit", "max_abs_logit", "confidence")
_MASK_TENSORS = (
    "query_position",
    "key_position",
    "key_ordinal",
    "query_document",
    "key_document",
    "first_key",
    "last_key",
    "first_query",
    "last_query",
    "allowed",
    "poison",
)
_MASK_OPTIONS = ("left", "right", "sinks")
_MASK_NUMBERS = ("offset", "stride_query", "stride_key", "table_zero")


def unsupported_reasons(request: AttentionRequest) -> list[str]:
    query = request.query
    reasons = []
    if not HAS_TRITON:
        reasons.append("our kernels need Triton, which is not installed")
    if query.device.type == "cuda":
        if torch.version.cuda is None:
            reasons.append("our kernels are written for NVIDIA's GPUs")
        elif not torch.compiler.is_compiling() and capability(query.device.index) < (8, 0):
            major, minor = capability(query.device.index)
            reasons.append(f"our kernels need compute capability 8.0, got {major}.{minor}")
    elif query.device.type != "cpu" or not IS_INTERPRETED:
        reasons.append(f"our kernels run on CUDA devices, got tensors on {query.device.type}")
    if query.dtype is torch.float64:
        reasons.append("our kernels take float16, bfloat16 or float32, got torch.float64")
    head_dim, value_dim = query.shape[-1], request.value.shape[-1]
    if head_dim > LARGEST_DIM or not 0 < value_dim <= LARGEST_DIM:
        reasons.append(f"our kernels take head and value dims from 1 to {LARGEST_DIM}, got {head_dim} and {value_dim}")
    if request.weights:
        reasons.append("our kernels never materialise the weights")
    if is_transformed():
        reasons.append(TRANSFORMED)
    if request.needs_grad and torch.are_deterministic_algorithms_enabled() and _learns_shared_bias(request):
        reasons.append(
            "our kernels sum the gradient of a bias or a table in a varying order, and deterministic "
            "algorithms were requested"
        )
    return reasons + mask_reasons(request.visibility)


def _learns_shared_bias(request: AttentionRequest) -> bool:
    """Return True if a broadcast bias or a table needs a gradient, which is then a sum over blocks."""
    visibility = request.visibility
    if visibility is None:
        return False
    full_shape = request.query.shape[:3]
    shared = [bias for bias in visibility.biases if bias.shape[:3] != full_shape]
    return any(x.requires_grad for x in (*shared, *(term.table for term in visibility.relative_biases)))


def kernel(request: AttentionRequest) -> str:
    """Return a description of the kernel that would run."""
    name = "our kernel, statistics in the same pass" if request.statistics is not None else "our kernel"
    return f"{name}, on {request.query.device.type}"


def run(request: AttentionRequest) -> AttentionOutput:
    query, key, value, visibility = request.query, request.key, request.value, request.visibility
    requested = request.statistics
    names = () if requested is None else requested.names
    needs_grad = request.needs_grad
    bias, table = None, None
    if visibility is None:
        mask = MaskArguments(offset=key.shape[2] - query.shape[2])
    else:
        poison = None
        if not request.finite:
            key, value, poison = without_broken(key, value)
        mask = pack(visibility, poison=poison, for_columns=needs_grad)
        # The tensors in the mask are detached; these are the ones that autograd records.
        bias = visibility.biases[0] if len(visibility.biases) else None
        table = visibility.relative_biases[0].table if len(visibility.relative_biases) else None
    seed = draw_seed(query.device) if request.dropout and request.seed is None else request.seed
    scale, head_scale = (1.0, request.scale) if isinstance(request.scale, Tensor) else (request.scale, None)
    dropout, sink_keys, window = request.dropout, 1, 0
    if requested is not None:
        sink_keys, window = requested.sink_keys, requested.window
    seed = seed if dropout else None
    traced = is_traced(query)
    if traced or needs_grad:
        tensors, numbers = _flat(mask)
        # Calling an operator takes as much Python time as launching a kernel, twice that if gradients are recorded.
        output, logsumexp, *statistics_rows = (_forward_operator if traced else _Attention.apply)(
            query,
            key,
            value,
            scale,
            head_scale,
            request.softcap,
            request.sinks,
            bias,
            table,
            tensors,
            numbers,
            dropout,
            seed,
            ",".join(names),
            sink_keys,
            window,
        )
        rows = dict(zip(names, statistics_rows[: len(names)], strict=True))
        if "visible_keys" in rows:
            rows["visible_keys"] = rows["visible_keys"].detach()
    else:
        output, logsumexp, rows = _compute(
            query,
            key,
            value,
            scale,
            head_scale,
            request.softcap,
            request.sinks,
            mask,
            dropout,
            seed,
            names,
            sink_keys,
            window,
        )
    statistics = None if requested is None else RowStatistics(**rows)
    return AttentionOutput(output, logsumexp, statistics=statistics, backend="fused")


def _flat(mask: MaskArguments) -> tuple[list[Tensor | None], list[int]]:
    """Flatten a mask without its biases into the arguments of an operator; the inverse of `_mask`."""
    tensors = [getattr(mask, name) for name in _MASK_TENSORS]
    options = [getattr(mask, name) for name in _MASK_OPTIONS]
    numbers = [n for x in options for n in ((0, 0) if x is None else (1, x))]
    return tensors, numbers + [getattr(mask, name) for name in _MASK_NUMBERS]


def _mask(
    tensors: Sequence[Tensor | None], numbers: Sequence[int], bias: Tensor | None, table: Tensor | None
) -> MaskArguments:
    count = len(_MASK_OPTIONS)
    options = {name: numbers[2 * i + 1] if numbers[2 * i] else None for i, name in enumerate(_MASK_OPTIONS)}
    plain = dict(zip(_MASK_NUMBERS, numbers[2 * count :], strict=True))
    mask = MaskArguments(**options, **plain, **dict(zip(_MASK_TENSORS, tensors, strict=True)))  # type: ignore[arg-type]
    if mask.allowed is not None:
        batch, head, query, key = shared_strides(mask.allowed)
        mask = mask._replace(allowed_batch=batch, allowed_head=head, allowed_query=query, allowed_key=key)
    if bias is not None:
        batch, head, query, key = shared_strides(bias)
        mask = mask._replace(bias=bias, bias_batch=batch, bias_head=head, bias_query=query, bias_key=key)
    if table is not None:
        heads, width = table.shape
        mask = mask._replace(table=table.contiguous(), table_head=width if heads > 1 else 0, table_width=width)
    return mask


_FORWARD_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, float scale, Tensor? head_scale, float? softcap, Tensor? sinks, "
    "Tensor? bias, Tensor? table, Tensor?[] mask_tensors, SymInt[] mask_numbers, float dropout, Tensor? seed, "
    "str names, SymInt sink_keys, SymInt window) -> Tensor[]"
)
_BACKWARD_SCHEMA = (
    "(Tensor grad_output, Tensor query, Tensor key, Tensor value, Tensor output, Tensor logsumexp, float scale, "
    "Tensor? head_scale, float? softcap, Tensor? sinks, Tensor? bias, Tensor? table, Tensor?[] mask_tensors, "
    "SymInt[] mask_numbers, float dropout, Tensor? seed, str names, SymInt sink_keys, SymInt window, "
    "Tensor? grad_logsumexp, Tensor?[] grad_statistics, Tensor?[] statistics, bool[] needed) "
    "-> Tensor[]"
)


def _names(joined: str) -> tuple[str, ...]:
    return tuple(joined.split(",")) if joined else ()


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    head_scale: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    table: Tensor | None,
    mask_tensors: list[Tensor | None],
    mask_numbers: list[int],
    dropout: float,
    seed: Tensor | None,
    names: str,
    sink_keys: int,
    window: int,
) -> list[Tensor]:
    """Return output, log-sum-exp and the statistics in the order of their names."""
    mask = _mask(mask_tensors, mask_numbers, bias, table)
    requested = _names(names)
    output, logsumexp, rows = _compute(
        query, key, value, scale, head_scale, softcap, sinks, mask, dropout, seed, requested, sink_keys, window
    )
    return [output, logsumexp, *(rows[name] for name in requested)]


def _compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    head_scale: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    mask: MaskArguments,
    dropout: float,
    seed: Tensor | None,
    requested: tuple[str, ...],
    sink_keys: int,
    window: int,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return output, log-sum-exp and the statistics by name, from the fastest suitable kernel."""
    query, key, value = (_with_dense_rows(x) for x in (query, key, value))
    plain = softcap is None and sinks is None and head_scale is None and not dropout and scale > 0
    if plain and has_hopper_kernels(query.device):
        from polyhead.ops.attention.kernels import forward_hopper, local_mass

        # Masses of a few keys are not computed in that kernel's loop, and cost almost nothing in a separate kernel.
        in_kernel, separate = _split_names(requested, local_mass.STATISTICS)
        if len(separate) and not local_mass.can_serve(query, key, mask, sink_keys, window):
            in_kernel, separate = requested, ()
        if forward_hopper.can_serve(query, key, value, mask, in_kernel):
            left, right = mask.left, mask.right
            output, logsumexp, statistics = forward_hopper.forward(
                query,
                key,
                value,
                scale=scale,
                left=left,
                right=right,
                row_poison=None if mask.poison is None else _row_poison(mask.poison, mask, query.shape[2]),
                names=in_kernel,
            )
            if len(separate):
                statistics |= local_mass.masses(
                    query,
                    key,
                    logsumexp,
                    scale=scale,
                    left=left,
                    right=right,
                    names=separate,
                    sink_keys=sink_keys,
                    window=window,
                )
            return output, logsumexp, statistics
    from polyhead.ops.attention.kernels.forward import forward

    output, logsumexp, statistics, _ = forward(
        query,
        key,
        value,
        scale=scale,
        head_scale=head_scale,
        softcap=softcap,
        sinks=sinks,
        mask=mask,
        dropout=dropout,
        seed=seed,
        names=requested,
        sink_keys=sink_keys,
        window=window,
        argmax=False,
    )
    return output, logsumexp, statistics


@functools.cache
def _split_names(names: tuple[str, ...], subset: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split the names into those outside and those inside a subset."""
    return tuple(name for name in names if name not in subset), tuple(name for name in names if name in subset)


def _row_poison(poison: Tensor, mask: MaskArguments, queries: int) -> Tensor:
    """Return NaN for rows of a band that see a non-finite key, else 0, [batch, kv_heads, queries]."""
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


_forward_operator = torch.library.custom_op("polyhead::attention_forward", mutates_args=(), schema=_FORWARD_SCHEMA)(
    _forward
)


@_forward_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> list[Tensor]:
    batch, heads, queries, _ = query.shape
    output = output_like(_with_dense_rows(query), value.shape[3])
    count = 1 + len(_names(options[-3]))
    return [output, *(query.new_empty((batch, heads, queries), dtype=torch.float32) for _ in range(count))]


def _with_dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    query, key, value, scale, head_scale, softcap, sinks, bias, table, mask_tensors, mask_numbers, *rest = inputs
    dropout, seed, names, sink_keys, window = rest
    # Absent gradients stay None: which gradients are present decides which kernel can run.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, head_scale, sinks, bias, table, seed, *mask_tensors, *output)
    ctx.mask_numbers, ctx.scale, ctx.softcap, ctx.dropout = mask_numbers, scale, softcap, dropout
    ctx.names, ctx.sink_keys, ctx.window = names, sink_keys, window
    ctx.lists = [_no_gradients(x) for x in (mask_tensors, mask_numbers)]


def _no_gradients(arguments: Sequence[Any]) -> list[None] | None:
    """Return the gradient of a list argument: PyTorch expects a list of None if all elements are tensors."""
    return [None] * len(arguments) if all(isinstance(x, Tensor) for x in arguments) else None


def _run_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    query, key, value, head_scale, sinks, bias, table, seed, *rest = ctx.saved_tensors
    mask_tensors, results = rest[: len(_MASK_TENSORS)], rest[len(_MASK_TENSORS) :]
    output, logsumexp, *statistics = results
    needed = [ctx.needs_input_grad[i] for i in (4, 6, 7, 8)]
    grad_output = torch.zeros_like(output) if grads[0] is None else grads[0]
    backward = _backward_operator if torch.is_grad_enabled() or is_traced(query) else _backward
    gradients = backward(
        grad_output,
        query,
        key,
        value,
        output,
        logsumexp,
        ctx.scale,
        head_scale,
        ctx.softcap,
        sinks,
        bias,
        table,
        mask_tensors,
        ctx.mask_numbers,
        ctx.dropout,
        seed,
        ctx.names,
        ctx.sink_keys,
        ctx.window,
        grads[1],
        grads[2:],
        statistics,
        needed,
    )
    grad_query, grad_key, grad_value, *learned = gradients
    learned_grads = iter(learned)
    grad_scale, grad_sinks, grad_bias, grad_table = (next(learned_grads) if need else None for need in needed)
    mask_grads = ctx.lists
    return (
        *(grad_query, grad_key, grad_value, None, grad_scale, None, grad_sinks, grad_bias, grad_table),
        *mask_grads,
        *(None,) * 5,
    )


_forward_operator.register_autograd(_run_backward, setup_context=_save_for_backward)


class _Attention(torch.autograd.Function):
    """The operator as an autograd function, for eager calls.

    With a `setup_context` PyTorch would inspect the signature in every call.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        output = tuple(_forward(*arguments))
        _save_for_backward(ctx, arguments, list(output))
        ctx.lists = (None, None)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return _run_backward(ctx, list(grads))


def _backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    scale: float,
    head_scale: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    table: Tensor | None,
    mask_tensors: list[Tensor | None],
    mask_numbers: list[int],
    dropout: float,
    seed: Tensor | None,
    names: str,
    sink_keys: int,
    window: int,
    grad_logsumexp: Tensor | None,
    grad_statistics: list[Tensor | None],
    statistics: list[Tensor | None],
    needed: list[bool],
) -> list[Tensor]:
    """Return the gradients of query, key and value, and of head_scale, sinks, bias and table if `needed`."""
    mask = _mask(mask_tensors, mask_numbers, bias, table)
    row_values = {name: x for name, x in zip(_names(names), statistics, strict=True) if x is not None}
    row_gradients = {
        name: x.contiguous() for name, x in zip(_names(names), grad_statistics, strict=True) if x is not None
    }
    row_gradients.pop("visible_keys", None)
    indices: dict[str, Tensor] = {}
    requested = tuple(name for name in _MAXIMA if name in row_gradients)
    if len(requested):
        # The argmax is recomputed only if a gradient of a maximum is needed, so that the forward need not store it.
        from polyhead.ops.attention.kernels.forward import forward

        *_, indices = forward(
            *(_with_dense_rows(x) for x in (query, key, value)),
            scale=scale,
            head_scale=head_scale,
            softcap=softcap,
            sinks=sinks,
            mask=mask,
            dropout=0.0,
            seed=None,
            names=requested,
            sink_keys=sink_keys,
            window=window,
            argmax=True,
        )
    argmax_grads = _ArgmaxGradients(row_gradients, row_values, indices)
    for name in ("max_logit", "max_abs_logit"):
        row_gradients.pop(name, None)
    if grad_logsumexp is not None:
        row_gradients["logsumexp"] = grad_logsumexp.contiguous()

    need_scale, need_sinks, need_bias, need_table = needed
    inner_query, inner_scale = query, head_scale
    if head_scale is not None and need_scale:
        # A scale of 0 would make its gradient 0 / 0; a query of 0 with a scale of 1 has the same logits and does not.
        is_zero = head_scale == 0
        inner_query = torch.where(is_zero[:, None, None], 0.0, query)
        inner_scale = torch.where(is_zero, 1.0, head_scale)
    inner_query, key, value, grad_output = (_with_dense_rows(x) for x in (inner_query, key, value, grad_output))
    plain = softcap is None and sinks is None and head_scale is None and bias is None and table is None and not dropout
    if plain and not len(row_gradients) and _can_use_cudnn(query, key, value, mask):
        grads: list[Tensor | None] = [
            *_cudnn_gradients(grad_output, inner_query, key, value, output, logsumexp, scale, mask),
            *(None, None, None),
        ]
    else:
        from polyhead.ops.attention.kernels.backward import backward

        grads = [
            *backward(
                grad_output,
                inner_query,
                key,
                value,
                output,
                logsumexp,
                scale=scale,
                head_scale=inner_scale,
                softcap=softcap,
                sinks=sinks,
                mask=mask,
                dropout=dropout,
                seed=seed,
                row_gradients=row_gradients,
                row_values={name: x for name, x in row_values.items() if name in row_gradients},
                sink_keys=sink_keys,
                window=window,
                bias_shape=tuple(bias.shape) if bias is not None and need_bias else None,
                table_shape=tuple(table.shape) if table is not None and need_table else None,
            )
        ]
    if len(argmax_grads.weights):
        factor = scale if inner_scale is None else scale * inner_scale.float()[:, None]
        grads = argmax_grads.add_to(grads, inner_query, key, factor, softcap, mask)
    grad_query, grad_key, grad_value, grad_sinks, grad_bias, grad_table = grads
    assert grad_query is not None and grad_key is not None and grad_value is not None
    result = []
    if head_scale is not None and inner_scale is not None and need_scale:
        # The logits are linear in both: grad_scale = sum(grad_query * query) / scale. Rows without keys have no
        # gradient, even if the query is not finite. The terms cancel in a long sum, hence float64.
        product = grad_query.double() * torch.where(grad_query == 0, 0.0, query.double())
        result.append((product.sum((0, 2, 3)) / inner_scale).to(head_scale.dtype))
        grad_query = torch.where((head_scale == 0)[:, None, None], 0.0, grad_query)
    for need, like, grad in (
        (need_sinks, sinks, grad_sinks),
        (need_bias, bias, grad_bias),
        (need_table, table, grad_table),
    ):
        if need and like is not None and grad is not None:
            result.append(_laid_out_like(grad, like))
    inputs = zip((grad_query, grad_key, grad_value), (query, key, value), strict=True)
    return [*(_laid_out_like(grad, like) for grad, like in inputs), *result]


_backward_operator = torch.library.custom_op("polyhead::attention_backward", mutates_args=(), schema=_BACKWARD_SCHEMA)(
    _backward
)


@_backward_operator.register_fake
def _(grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, *options: Any) -> list[Tensor]:
    head_scale, sinks, bias, table = options[3], options[5], options[6], options[7]
    learned = (x for x, need in zip((head_scale, sinks, bias, table), options[-1], strict=True) if need)
    return [torch.empty_like(x) for x in (query, key, value, *learned)]


def _no_second_derivative(ctx: Any, *grads: Any) -> None:
    raise BackendUnsupported(
        "fused",
        ['our kernels have no second derivative; use backend="blockwise", which has derivatives of every order'],
    )


_backward_operator.register_autograd(_no_second_derivative)


def _laid_out_like(grad: Tensor, like: Tensor) -> Tensor:
    """Return the gradient with dtype and strides of `torch.empty_like(like)`, as the fake kernel does."""
    expected = torch.empty_like(like, device="meta")
    if grad.dtype is expected.dtype and grad.stride() == expected.stride():
        return grad
    return torch.empty_like(like).copy_(grad)


class _ArgmaxGradients:
    """Gradients of the rows' maxima, each of which belongs to one key, the argmax.

    d max_logit / d s_j is 1 at the max logit; of the confidence p_j there remains p_j, as the rest of its derivative is
    the same for all keys of the row; d max_abs_logit / d s_j is the sign of the logit with the largest magnitude.
    """

    def __init__(self, grads: dict[str, Tensor], values: dict[str, Tensor], indices: dict[str, Tensor]) -> None:
        self.weights: list[tuple[Tensor, Tensor]] = []  # key indices and gradients, both [batch, heads, queries]
        i_key = indices.get("argmax")
        weight: Tensor | None = grads.get("max_logit")
        if "confidence" in grads:
            share = grads["confidence"] * values["confidence"]
            weight = share if weight is None else weight + share
        if weight is not None and i_key is not None:
            self.weights.append((i_key, torch.where(i_key >= 0, weight, 0.0)))
        signed_index, weight = indices.get("argmax_abs"), grads.get("max_abs_logit")
        if weight is not None and signed_index is not None:
            sign = 1 - 2 * (signed_index & 1)
            self.weights.append((signed_index >> 1, torch.where(signed_index >= 0, sign * weight, 0.0)))

    def add_to(
        self,
        grads: Sequence[Tensor | None],
        query: Tensor,
        key: Tensor,
        factor: float | Tensor,
        softcap: float | None,
        mask: MaskArguments,
    ) -> list[Tensor | None]:
        """Return the gradients of query, key, value, sinks, bias and table with these terms added."""
        batch, heads, queries, _ = query.shape
        index = [torch.arange(n, device=query.device) for n in (batch, heads, queries)]
        i_batch, i_head, i_query = index[0][:, None, None], index[1][:, None], index[2]
        i_kv_head = i_head // (heads // key.shape[1])
        grad_query, grad_key, grad_value, grad_sinks = (None if x is None else x.float() for x in grads[:4])
        # Sums over many rows, in the kernel's precision.
        grad_bias, grad_table = (None if x is None else x.double() for x in grads[4:])
        assert grad_query is not None and grad_key is not None
        for i_key, weight in self.weights:
            is_valid = i_key >= 0
            i_key = i_key.clamp_min(0).long()
            tile_key = key[i_batch, i_kv_head, i_key].float()  # [batch, heads, queries, head_dim]
            tile_query = torch.where(is_valid[..., None], query.float(), 0.0)
            slope = weight * factor
            if softcap is not None:
                tanh_logits = torch.tanh((tile_query * tile_key).sum(-1) * factor / softcap)
                slope = slope * (1 - tanh_logits * tanh_logits)
            grad_query = grad_query + slope[..., None] * tile_key
            grad_key.index_put_((i_batch, i_kv_head, i_key), slope[..., None] * tile_query, accumulate=True)
            if grad_bias is not None:
                broadcast = [
                    i if size > 1 else i * 0
                    for i, size in zip((i_batch, i_head, i_query), grad_bias.shape, strict=False)
                ]
                grad_bias.index_put_((*broadcast, i_key), weight.double(), accumulate=True)
            if grad_table is not None:
                i_row = i_batch if mask.stride_query else i_batch * 0
                query_position = (
                    i_query + mask.offset if mask.query_position is None else mask.query_position[i_row, i_query]
                )
                key_position = i_key if mask.key_position is None else mask.key_position[i_row, i_key]
                column = (key_position - query_position + mask.table_zero).clamp(0, mask.table_width - 1).long()
                i_table = i_head if mask.table_head else i_head * 0
                grad_table.index_put_((i_table, column), weight.double(), accumulate=True)
        return [grad_query, grad_key, grad_value, grad_sinks, grad_bias, grad_table]


def _can_use_cudnn(query: Tensor, key: Tensor, value: Tensor, mask: MaskArguments) -> bool:
    """Return True if cuDNN's backward computes the gradient of this call, and faster than our kernel."""
    is_unmasked = mask.left is None and mask.right is None
    is_causal = mask.left is None and mask.right == 0 and query.shape[2] == key.shape[2]
    dim = query.shape[-1]
    return (
        query.dtype in (torch.float16, torch.bfloat16)
        and (is_unmasked or is_causal)
        and all(getattr(mask, name) is None for name in _MASK_TENSORS if name not in ("poison", "key_ordinal"))
        and dim == value.shape[-1]
        and dim <= 128
        and dim % 8 == 0
        and torch.backends.cudnn.enabled
        and torch.backends.cudnn.is_available()
        and cudnn_backward.is_worth_it(query, key)
        and cudnn_backward.is_available(query)
    )


def _cudnn_gradients(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    scale: float,
    mask: MaskArguments,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run cuDNN's backward after our forward, of which it needs only the output and the log-sum-exp."""
    is_causal = mask.right is not None
    if mask.poison is None:
        return cudnn_backward.backward(grad_output, query, key, value, output, logsumexp, is_causal, scale)
    # A NaN row would spread, as 0 * NaN, to keys it does not see. Its own gradient is set to NaN below.
    is_nonfinite = logsumexp.isnan()
    output = torch.where(is_nonfinite[..., None], 0.0, output)
    logsumexp = torch.where(is_nonfinite, torch.inf, logsumexp)
    grad_query, grad_key, grad_value = cudnn_backward.backward(
        grad_output, query, key, value, output, logsumexp, is_causal, scale
    )
    return torch.where(is_nonfinite[..., None], torch.nan, grad_query), grad_key, grad_value
