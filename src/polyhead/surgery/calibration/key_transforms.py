"""Detect the transform between projections and logits: rotary positions, norms, or none.

Detected numerically, never by names: the outputs of the projections (or of the norms after them) are compared with
the inputs of the attention. Pairs of channels rotated by one angle for all heads of a token are rotary position
embeddings (RoPE, Su et al. 2021), in one of two pairings; anything else that changes the values is rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.geometry import HeadLayout
from polyhead.layers.registry import Registry
from polyhead.observation import observe
from polyhead.observation.collectors import CallRecorder
from polyhead.observation.evaluation_mode import evaluating
from polyhead.ops.attended import Attended
from polyhead.surgery.adapters.attention_layer import AttentionLayer
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.adapters.projection_formats import NORMS

Pairing = Literal["none", "half", "interleaved"]
Norm = Literal["none", "rms", "layer"]
KEY_TRANSFORMS: Registry[KeyTransform] = Registry("a key transform")


@KEY_TRANSFORMS.register("key_form")
@dataclass(frozen=True, slots=True)
class KeyTransform:
    """Transform of queries and keys between their projections and the logits.

    The first `rotary_dim` channels are rotated in pairs: "half" pairs channel i with i + rotary_dim / 2 (Llama),
    "interleaved" 2 i with 2 i + 1 (GPT-J). With an RMS norm, `classes` labels the channels; channels of one class have
    the same weights in the norms of queries and keys.

    >>> KeyTransform("half", 4).pairs
    ((0, 2), (1, 3))
    """

    pairing: Pairing = "none"
    rotary_dim: int = 0
    norm: Norm = "none"
    classes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.pairing not in ("none", "half", "interleaved") or self.norm not in ("none", "rms", "layer"):
            raise OptionError(
                "pairing must be none, half or interleaved and norm must be none, rms or layer, got "
                f"{self.pairing!r} and {self.norm!r}"
            )
        if isinstance(self.rotary_dim, bool) or not isinstance(self.rotary_dim, int) or self.rotary_dim % 2:
            raise OptionError(f"rotary_dim must be an even integer, got {self.rotary_dim!r}")
        if (self.pairing == "none") != (self.rotary_dim == 0) or self.rotary_dim < 0:
            raise OptionError(f"pairing {self.pairing!r} cannot have a rotary_dim of {self.rotary_dim}")
        object.__setattr__(self, "classes", tuple(self.classes))
        if (self.norm == "rms") != bool(self.classes):
            raise OptionError(f"classes must be passed for an rms norm only, got {self.norm!r} and {self.classes}")

    @property
    def halves(self) -> tuple[list[int], list[int]]:
        """Rotated channels: the first of every pair, and the second."""
        return [first for first, _ in self.pairs], [second for _, second in self.pairs]

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Pairs of channels that are rotated together."""
        half = self.rotary_dim // 2
        if self.pairing == "interleaved":
            return tuple((2 * i, 2 * i + 1) for i in range(half))
        return tuple((i, i + half) for i in range(half))

    def check(self, layout: HeadLayout) -> None:
        """Raise `OptionError` if heads of this layout cannot have this transform.

        Args:
            layout: head layout of a layer.
        """
        if self.rotary_dim > layout.head_dim or (self.classes and len(self.classes) != layout.head_dim):
            raise OptionError(
                f"a key transform must match the head width, got rotary_dim {self.rotary_dim} and {len(self.classes)} "
                f"classes for heads of {layout.head_dim} channels"
            )


def find_key_transforms(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, KeyTransform]:
    """Detect the key transform of every editable attention layer that this call reaches, by path.

    Args:
        batch: keyword arguments of the model, as `model(**batch)`: a few tokens, at least two.
        model: the model.

    Returns:
        The transform of each layer, by path.
    """
    layers = [layer for layer in find_layers(model) if not layer.refusals]
    projections, first = _ProjectionRecorder(), dict[str, Attended]()  # call of each site
    recorder = CallRecorder(lambda site, attended, *_: first.setdefault(site.name, attended))
    observing = observe(model, statistics=False, collect=[recorder])
    with evaluating(model), torch.no_grad(), projections.recording(model, layers), observing:
        model(**batch)
    return {x.path: _transform_of(x, projections, first[x.site]) for x in layers if x.site in first}


@dataclass(eq=False)
class _ProjectionRecorder:
    """Records each layer's projected and normed queries and keys in its first call."""

    projected: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # path -> part -> [batch, n, heads, dim]
    normed: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    norms: dict[str, dict[str, nn.Module]] = field(default_factory=dict)

    @contextmanager
    def recording(self, model: nn.Module, layers: Sequence[AttentionLayer]) -> Iterator[None]:
        with ExitStack() as hooks:
            for layer in layers:
                assert layer.layout is not None
                for source in layer.sources:
                    for part, rows in source.rows(layer.layout).items():
                        if part != "value":
                            hook = _record_hook(self.projected.setdefault(layer.path, {}), part, rows)
                            hooks.callback(model.get_submodule(source.path).register_forward_hook(hook).remove)
                for name, child in layer.module.named_children():
                    if name in NORMS:
                        part = "query" if name.startswith("q") else "key"
                        self.norms.setdefault(layer.path, {})[part] = child
                        hook = _record_hook(self.normed.setdefault(layer.path, {}), part)
                        hooks.callback(child.register_forward_hook(hook).remove)
            yield


def _record_hook(store: dict[str, Tensor], part: str, rows: Tensor | None = None) -> Any:
    def hook(module: nn.Module, args: object, output: Tensor) -> None:
        if part not in store:
            store[part] = output.detach() if rows is None else output.detach()[..., rows.to(output.device)]

    return hook


def _transform_of(layer: AttentionLayer, projections: _ProjectionRecorder, attended: Attended) -> KeyTransform:
    layout, path = layer.layout, layer.path
    assert layout is not None
    tokens = attended.query.shape[2]
    if tokens < 2 or attended.key.shape[2] < 2:
        raise OptionError(f"detecting rotary positions needs at least two tokens, got {tokens} token")
    norm, classes = _norm_of(layer, projections.norms.get(path, {}))
    stages = projections.projected[path] if norm == "none" else projections.normed[path]
    if set(stages) != {"query", "key"}:
        raise OptionError(f"{path!r} must norm both queries and keys or neither, got a norm of {sorted(stages)}")
    before_after: list[tuple[Tensor, Tensor]] = []
    for part, after in (("query", attended.query), ("key", attended.key)):
        before = _by_head(stages[part], after, layout if part == "key" else None)
        if before is None:
            raise OptionError(
                f"the projections of {path!r} must have the shape of its attention inputs, got {part} of "
                f"{list(stages[part].shape)} and then {list(after.shape)}"
            )
        before_after.append((before, after.double()))
    full_precision = attended.key.dtype in (torch.float32, torch.float64)
    tolerance = 1e-4 if full_precision else 3e-2
    for pairing, rotary_dim in _candidates(
        layout.head_dim, _last_changed(*before_after[1]) if full_precision else layout.head_dim
    ):
        if _rotation_error(before_after, pairing, rotary_dim) <= tolerance:
            return KeyTransform(pairing, rotary_dim, norm, classes)
    raise OptionError(
        f"between the projections of {path!r} and its logits there may only be norms followed by rotary positions, "
        "half-split or interleaved; got queries and keys that are changed in another way"
    )


def _norm_of(layer: AttentionLayer, norms: Mapping[str, nn.Module]) -> tuple[Norm, tuple[int, ...]]:
    """Classify the norm, and label channels of equal norm weight.

    Flipping the sign of one input channel flips that output channel of an RMS norm and changes nothing else; the mean
    of a layer norm changes.
    """
    assert layer.layout is not None
    if not norms:
        return "none", ()
    weights = []
    for module in norms.values():
        parameter = next(module.parameters())
        dim = layer.layout.head_dim
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1, 1, 1, dim, generator=generator).to(parameter)
        signs = torch.ones(dim).to(parameter)
        signs[0] = -1
        with torch.no_grad():
            plain, flipped = module(x), module(x * signs)
            weight = module(torch.ones_like(x)).flatten()
        if not torch.allclose(flipped, plain * signs, rtol=1e-4, atol=1e-5):
            return "layer", ()
        weights.append(weight.double().cpu())
    classes: dict[tuple[float, ...], int] = {}
    columns = torch.stack(weights, 1).tolist()
    return "rms", tuple(classes.setdefault(tuple(column), len(classes)) for column in columns)


def _by_head(stage: Tensor, attended: Tensor, keys: HeadLayout | None) -> Tensor | None:
    """Return recorded values as [batch, heads, tokens, dim], in the axis order closest to the attention's input.

    None if no axis order has its shape.
    """
    if stage.ndim == 3:  # a norm over the rows of all heads at once
        stage = stage.unflatten(0, (attended.shape[0], -1)) if stage.shape[0] != attended.shape[0] else stage
    if stage.ndim != 4:
        return None
    orders = [stage.transpose(1, 2), stage]
    # Observers may receive KV heads repeated per query head.
    if keys is not None and attended.shape[1] != keys.num_kv_heads:
        kv_heads = [keys.key_head(head) for head in range(keys.num_heads)]
        orders = [x[:, kv_heads] for x in orders if x.shape[1] == keys.num_kv_heads]
    fitting = [x.double() for x in orders if x.shape == attended.shape]
    return min(fitting, key=lambda x: float((x - attended).norm()), default=None)


def _last_changed(before: Tensor, after: Tensor) -> int:
    """Return the number of leading channels up to the last one that changed in any bit."""
    changed = (before != after).flatten(0, -2).any(0).nonzero()
    return 0 if not len(changed) else int(changed[-1]) + 1


def _candidates(head_dim: int, num_changed: int) -> Iterator[tuple[Pairing, int]]:
    yield "none", 0
    for rotary_dim in range(head_dim - head_dim % 2, 0, -2):
        yield "half", rotary_dim
        # Trailing channels that are not rotated also pass as interleaved pairs rotated by 0, so those are excluded; in
        # half-split pairing, the partner of every channel depends on rotary_dim.
        if rotary_dim <= num_changed + num_changed % 2:
            yield "interleaved", rotary_dim


def _rotation_error(before_after: list[tuple[Tensor, Tensor]], pairing: Pairing, rotary_dim: int) -> float:
    """Return the relative error of the best-fitting rotation per token and channel pair, shared by queries and keys.

    Scales are factored out: some families scale their queries, some the rotated vectors.
    """
    error = 0.0
    for before, after in before_after:
        source, target = _with_equal_norm(before[..., rotary_dim:], after[..., rotary_dim:])
        error = max(error, _distance(source, target))
    if pairing == "none":
        return error
    first, second = KeyTransform(pairing, rotary_dim).halves
    pairs = [
        _with_equal_norm(*(torch.complex(x[..., first], x[..., second]) for x in (before, after)))
        for before, after in before_after
    ]
    correlations = [(source.conj() * target).sum(1, keepdim=True) for source, target in pairs]
    if correlations[0].shape == correlations[1].shape:  # queries and keys of one token share a position
        correlations = [correlations[0] + correlations[1]] * 2
    for (source, target), correlation in zip(pairs, correlations, strict=True):
        rotation = correlation / correlation.abs().clamp_min(torch.finfo(torch.float64).tiny)
        error = max(error, _distance(rotation * source, target))
    return error


def _with_equal_norm(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return source, target * (source.norm() / target.norm().clamp_min(torch.finfo(torch.float64).tiny))


def _distance(reference: Tensor, other: Tensor) -> float:
    return float((reference - other).norm() / reference.norm().clamp_min(torch.finfo(torch.float64).tiny))
