"""Weights of one layer's heads as a value: read from a model, edited, packed back into parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.geometry import HeadLayout
from polyhead.surgery.adapters.attention_layer import AttentionLayer, linear_axis
from polyhead.surgery.adapters.projection_formats import PARTS, Part

KV_PARTS = ("key", "value", "key_bias", "value_bias")  # fields with a row per KV head


@dataclass(frozen=True, slots=True, eq=False)
class HeadWeights:
    """Weights of every head of a layer.

    A query is query[head] @ x + query_bias[head]; a head adds output[head].T @ o to the layer's output, o being the
    weighted sum of its values. `origins` gives, for each head, the head of the unedited layer whose output it
    reproduces exactly, or None if it was changed or is new. `made_of` lists the original heads each head was made from,
    as in `HeadOrigins.heads`.
    """

    query: Tensor  # [heads, head_dim, embed_dim]
    key: Tensor  # [kv_heads, head_dim, key_input_dim]
    value: Tensor  # [kv_heads, value_dim, value_input_dim]
    output: Tensor  # [heads, value_dim, embed_dim]
    query_bias: Tensor | None  # [heads, head_dim]
    key_bias: Tensor | None  # [kv_heads, head_dim]
    value_bias: Tensor | None  # [kv_heads, value_dim]
    output_bias: Tensor | None  # [embed_dim]
    key_heads: tuple[int, ...]  # of every query head
    origins: tuple[int | None, ...]
    made_of: tuple[tuple[int, ...], ...]

    @classmethod
    def unedited(cls, layout: HeadLayout, **parts: Tensor | None) -> HeadWeights:
        """Return heads with these parts, each its own origin.

        Args:
            layout: head layout of the layer.
            parts: matrices and biases, by field name.
        """
        heads = range(layout.num_heads)
        return cls(
            **parts,  # type: ignore[arg-type]
            key_heads=tuple(layout.key_head(i) for i in heads),
            origins=tuple(heads),
            made_of=tuple((i,) for i in heads),
        )

    @classmethod
    def blank(cls, layout: HeadLayout, like: HeadWeights | None = None) -> HeadWeights:
        """Return heads of this layout without values, with the biases and dtypes of other heads if passed.

        By default they are on the meta device and have no biases; enough to trace edits.

        Args:
            layout: head layout of the layer.
            like: heads whose biases and dtypes are used.
        """
        sizes = {
            "query": (layout.num_heads, layout.head_dim, layout.embed_dim),
            "key": (layout.num_kv_heads, layout.head_dim, layout.key_input_dim),
            "value": (layout.num_kv_heads, layout.value_dim, layout.value_input_dim),
            "output": (layout.num_heads, layout.value_dim, layout.embed_dim),
        }
        if like is None:
            parts = {part: torch.empty(size, device="meta") for part, size in sizes.items()}
            return cls.unedited(layout, **parts, **dict.fromkeys(f"{part}_bias" for part in sizes))
        parts = {part: getattr(like, part).new_empty(size) for part, size in sizes.items()}
        biases = {f"{part}_bias": getattr(like, f"{part}_bias") for part in sizes}
        for part in ("query", "key", "value"):
            if (bias := biases[f"{part}_bias"]) is not None:
                biases[f"{part}_bias"] = bias.new_empty(sizes[part][:2])
        return cls.unedited(layout, **parts, **biases)

    def to(self, like: Tensor) -> HeadWeights:
        """Return the heads in the dtype and on the device of a tensor.

        Args:
            like: the tensor.
        """
        return self.mapped(
            lambda x: x.to(like), *(name for part in (*PARTS, "output") for name in (part, f"{part}_bias"))
        )

    def mapped(self, change: Callable[[Tensor], Tensor], *names: str) -> HeadWeights:
        """Return the heads with a function applied to some of their tensors; a bias that is None stays None.

        Args:
            change: the function.
            names: names of the fields.
        """
        changed: dict[str, Any] = {name: change(x) for name in names if (x := getattr(self, name)) is not None}
        return replace(self, **changed)

    @property
    def num_heads(self) -> int:
        return self.query.shape[0]

    @property
    def layout(self) -> HeadLayout:
        heads, head_dim, width = self.query.shape
        return HeadLayout(
            embed_dim=width,
            num_heads=heads,
            num_kv_heads=self.key.shape[0],
            head_dim=head_dim,
            value_dim=self.value.shape[1],
            key_input_dim=self.key.shape[2],
            value_input_dim=self.value.shape[2],
            key_heads=self.key_heads,
        )

    @property
    def num_parameters(self) -> int:
        biases = (self.query_bias, self.key_bias, self.value_bias, self.output_bias)
        return self.layout.num_parameters + sum(0 if bias is None else bias.numel() for bias in biases)

    @property
    def readers(self) -> list[list[int]]:
        """Query heads that read each KV head."""
        return [[head for head, kv in enumerate(self.key_heads) if kv == key] for key in range(self.key.shape[0])]

    def augmented(self, part: Part) -> Tensor:
        """Return the matrices of a part with the bias (or zeros) as an extra column, in float64.

        Args:
            part: "query", "key" or "value".
        """
        weight, bias = getattr(self, part), getattr(self, f"{part}_bias")
        column = weight.new_zeros(weight.shape[:2]) if bias is None else bias
        return torch.cat((weight, column[..., None]), -1).to(torch.float64)

    def with_augmented(self, **parts: Tensor) -> HeadWeights:
        """Return heads with these augmented matrices; the last column is dropped where there is no bias.

        Args:
            parts: augmented matrices, by part.
        """
        changed: dict[str, Tensor | None] = {}
        for part, matrices in parts.items():
            changed[part] = matrices[..., :-1].to(getattr(self, part))
            bias = getattr(self, f"{part}_bias")
            changed[f"{part}_bias"] = None if bias is None else matrices[..., -1].to(bias)
        return replace(self, **changed)  # type: ignore[arg-type]

    def select(self, heads: Sequence[int]) -> HeadWeights:
        """Return these query heads in this order, and the KV heads they read in order of their first reader.

        Args:
            heads: indices of query heads.
        """
        index, read = list(heads), list(dict.fromkeys(self.key_heads[head] for head in heads))
        chosen = replace(
            self.mapped(lambda x: x[index], "query", "query_bias", "output"),
            origins=tuple(self.origins[head] for head in heads),
            made_of=tuple(self.made_of[head] for head in heads),
        )
        return chosen.with_keys(read, tuple(read.index(self.key_heads[head]) for head in heads))

    def with_keys(self, keys: Sequence[int], key_heads: tuple[int, ...]) -> HeadWeights:
        """Return all query heads over these KV heads, which may repeat; `key_heads` is the new KV head of each.

        Args:
            keys: KV heads to keep, in order.
            key_heads: for each query head, its index in `keys`.
        """
        index = list(keys)
        return replace(self.mapped(lambda x: x[index], *KV_PARTS), key_heads=key_heads)


def read_heads(
    model: nn.Module,
    layer: AttentionLayer,
    device: torch.device | str | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> HeadWeights:
    """Copy the weights of a layer's heads; `device="meta"` returns shapes only.

    Args:
        model: the model.
        layer: one of its layers, as `find_layers` returns it.
        device: device of the copies; that of the layer by default.
        tensors: what to read in place of the parameters, by their names, e.g. an optimizer's state.

    Returns:
        The weights of every head.
    """
    layout = layer.layout
    assert layout is not None
    parts: dict[str, Tensor | None] = {}
    for source in layer.sources:
        linear = model.get_submodule(source.path)
        weight, bias = _parameters(linear, source.path, device, tensors)
        by_row = weight if linear_axis(linear, outputs=True) == 0 else weight.T  # a row per output channel
        for part, rows in source.rows(layout).items():
            rows = rows.to(weight.device)
            parts[part] = by_row[rows]
            parts[f"{part}_bias"] = None if bias is None else bias[rows]
    linear = model.get_submodule(layer.output)
    weight, bias = _parameters(linear, layer.output, device, tensors)
    by_row = weight if linear_axis(linear, outputs=False) == 0 else weight.T  # a row per input channel
    parts["output"] = by_row.reshape(layout.num_heads, layout.value_dim, -1).clone()
    parts["output_bias"] = None if bias is None else bias.clone()
    return HeadWeights.unedited(layout, **parts)


def pack_heads(model: nn.Module, layer: AttentionLayer, heads: HeadWeights) -> dict[str, Tensor]:
    """Return the parameters that hold these heads, by their names in the model; the model is unchanged."""
    packed: dict[str, Tensor] = {}
    for source in layer.sources:
        linear = model.get_submodule(source.path)
        # The index of each packed row in the concatenation of all parts.
        row_order = torch.cat([rows.flatten() for rows in source.rows(heads.layout).values()]).argsort()
        rows = torch.cat([getattr(heads, part).flatten(0, 1) for part in source.holds])
        row_order = row_order.to(rows.device)
        packed[f"{source.path}.weight"] = oriented(rows[row_order], linear_axis(linear, outputs=True))
        if linear.bias is not None:
            biases = torch.cat([getattr(heads, f"{part}_bias").flatten() for part in source.holds])
            packed[f"{source.path}.bias"] = biases[row_order]
    linear = model.get_submodule(layer.output)
    packed[f"{layer.output}.weight"] = oriented(heads.output.flatten(0, 1), linear_axis(linear, outputs=False))
    if heads.output_bias is not None:
        packed[f"{layer.output}.bias"] = heads.output_bias
    return packed


def with_row(x: Tensor, index: int, row: Tensor) -> Tensor:
    """Return a copy of x with one row replaced."""
    changed = x.clone()
    changed[index] = row.to(x.dtype)
    return changed


def sum_over_readers(by_head: Tensor, key_heads: Sequence[int], count: int) -> Tensor:
    """Sum per-query-head values [heads, ...] over the readers of each of `count` KV heads."""
    sums = by_head.new_zeros(count, *by_head.shape[1:])
    return sums.index_add(0, torch.tensor(key_heads, device=sums.device), by_head)


def _parameters(
    linear: nn.Module, path: str, device: torch.device | str | None, tensors: Mapping[str, Tensor] | None
) -> tuple[Tensor, Tensor | None]:
    weight: Tensor = linear.get_parameter("weight")
    bias = linear.bias if isinstance(linear.bias, Tensor) else None
    if tensors is not None:
        weight, bias = tensors[f"{path}.weight"], None if bias is None else tensors[f"{path}.bias"]
    device = weight.device if device is None else device
    return weight.detach().to(device), None if bias is None else bias.detach().to(device)


def oriented(rows: Tensor, axis: int) -> Tensor:
    """Return rows laid out for a linear module whose weight has them on this axis."""
    return (rows if axis == 0 else rows.T).contiguous()
