"""What stands between a layer's projections and its logits: positions that turn channels in pairs, norms, or nothing.

Found by watching numbers pass and never by names: what the projections (or the norms after them) gave is held against
what the attention was given. Pairs of channels that turned by one angle for all heads of a token are rotary positions,
in one of two pairings; whatever is neither that nor the same is refused.
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
from polyhead.ops.attended import Attended
from polyhead.surgery.adapters.attention_layer import AttentionLayer
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.adapters.projection_formats import NORMS
from polyhead.surgery.calibration.layer_capture import AttentionRecorder
from polyhead.surgery.calibration.temporary import evaluating

Pairing = Literal["none", "half", "interleaved"]
Norm = Literal["none", "rms", "layer"]
KEY_FORMS: Registry[KeyForm] = Registry("a key form")


@KEY_FORMS.register("key_form")
@dataclass(frozen=True, slots=True)
class KeyForm:
    """How queries and keys get from their projections to the logits.

    The first `rotary_dim` channels turn in pairs: "half" pairs channel i with i + rotary_dim / 2, "interleaved" 2 i
    with 2 i + 1. Where there is a norm, `classes` has a number for each channel, and channels of one number have the
    same weights in the norms of queries and keys.

    >>> KeyForm("half", 4).pairs
    ((0, 2), (1, 3))
    """

    pairing: Pairing = "none"
    rotary_dim: int = 0
    norm: Norm = "none"
    classes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.pairing not in ("none", "half", "interleaved") or self.norm not in ("none", "rms", "layer"):
            raise OptionError(
                "channels are paired none, half or interleaved and normed none, rms or layer, got "
                f"{self.pairing!r} and {self.norm!r}"
            )
        if isinstance(self.rotary_dim, bool) or not isinstance(self.rotary_dim, int) or self.rotary_dim % 2:
            raise OptionError(f"rotary_dim is an even number of channels, got {self.rotary_dim!r}")
        if (self.pairing == "none") != (self.rotary_dim == 0) or self.rotary_dim < 0:
            raise OptionError(f"pairing {self.pairing!r} does not go with a rotary_dim of {self.rotary_dim}")
        object.__setattr__(self, "classes", tuple(self.classes))
        if (self.norm == "rms") != bool(self.classes):
            raise OptionError(f"classes of channels are given for an rms norm, got {self.norm!r} and {self.classes}")

    @property
    def halves(self) -> tuple[list[int], list[int]]:
        """The channels that turn: the first of every pair, and the second."""
        return [one for one, _ in self.pairs], [two for _, two in self.pairs]

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The channels that turn together."""
        half = self.rotary_dim // 2
        if self.pairing == "interleaved":
            return tuple((2 * i, 2 * i + 1) for i in range(half))
        return tuple((i, i + half) for i in range(half))

    def check(self, layout: HeadLayout) -> None:
        """That heads of this layout can have this form."""
        if self.rotary_dim > layout.head_dim or (self.classes and len(self.classes) != layout.head_dim):
            raise OptionError(
                f"a form is of heads of one width, got rotary_dim {self.rotary_dim} and {len(self.classes)} classes "
                f"for heads of {layout.head_dim} channels"
            )


def find_key_forms(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, KeyForm]:
    """The form of every attention layer whose heads can be edited and that this call of the model passes, by path.

    Args:
        batch: what the model is called with, as `model(**batch)`: a few tokens, more than one of them.
    """
    layers = [layer for layer in find_layers(model) if not layer.refusals]
    noted, caught = _ProjectionRecorder(), [AttentionRecorder(layer.site) for layer in layers]
    watching = observe(model, statistics=False, collect=caught)
    with evaluating(model), torch.no_grad(), noted.listening(model, layers), watching:
        model(**batch)
    seen = zip(layers, caught, strict=True)
    return {layer.path: _form_of(layer, noted, x.attended) for layer, x in seen if x.attended is not None}


@dataclass(eq=False)
class _ProjectionRecorder:
    """What each layer projected and normed in its first call."""

    made: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # by path: "query", "key" [batch, n, heads, dim]
    normed: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    norms: dict[str, dict[str, nn.Module]] = field(default_factory=dict)

    @contextmanager
    def listening(self, model: nn.Module, layers: Sequence[AttentionLayer]) -> Iterator[None]:
        with ExitStack() as undo:
            for layer in layers:
                assert layer.layout is not None
                for source in layer.sources:
                    for part, rows in source.rows(layer.layout).items():
                        if part != "value":
                            hook = _keep(self.made.setdefault(layer.path, {}), part, rows)
                            undo.callback(model.get_submodule(source.path).register_forward_hook(hook).remove)
                for name, child in layer.module.named_children():
                    if name in NORMS:
                        part = "query" if name.startswith("q") else "key"
                        self.norms.setdefault(layer.path, {})[part] = child
                        hook = _keep(self.normed.setdefault(layer.path, {}), part)
                        undo.callback(child.register_forward_hook(hook).remove)
            yield


def _keep(into: dict[str, Tensor], part: str, rows: Tensor | None = None) -> Any:
    def note(module: nn.Module, given: object, gave: Tensor) -> None:
        if part not in into:
            into[part] = gave.detach() if rows is None else gave.detach()[..., rows.to(gave.device)]

    return note


def _form_of(layer: AttentionLayer, noted: _ProjectionRecorder, attended: Attended) -> KeyForm:
    layout, path = layer.layout, layer.path
    assert layout is not None
    tokens = attended.query.shape[2]
    if tokens < 2 or attended.key.shape[2] < 2:
        raise OptionError(f"how positions turn queries and keys shows from the second token on, got {tokens} token")
    norm, classes = _norm_of(layer, noted.norms.get(path, {}))
    stages = noted.made[path] if norm == "none" else noted.normed[path]
    if set(stages) != {"query", "key"}:
        found = sorted(stages)
        raise OptionError(f"queries and keys of {path!r} are normed alike or not at all, got a norm of {found}")
    held: list[tuple[Tensor, Tensor]] = []
    for part, given in (("query", attended.query), ("key", attended.key)):
        before = _by_head(stages[part], given, layout if part == "key" else None)
        if before is None:
            raise OptionError(
                f"what {path!r} projects must be what its attention is given, got {part} of {list(stages[part].shape)} "
                f"and then {list(given.shape)}"
            )
        held.append((before, given.double()))
    exact = attended.key.dtype in (torch.float32, torch.float64)
    tolerance = 1e-4 if exact else 3e-2
    for pairing, rotary_dim in _candidates(layout.head_dim, _last_changed(*held[1]) if exact else layout.head_dim):
        if _rotation_error(held, pairing, rotary_dim) <= tolerance:
            return KeyForm(pairing, rotary_dim, norm, classes)
    raise OptionError(
        f"between the projections of {path!r} and its logits there must be nothing but positions that turn channels in "
        "pairs, half-split or interleaved, and norms before them; got queries and keys that are changed in another way"
    )


def _norm_of(layer: AttentionLayer, norms: Mapping[str, nn.Module]) -> tuple[Norm, tuple[int, ...]]:
    """Which norm there is, by what it does to a vector with one sign changed; and which channels it weights alike."""
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
            level = module(torch.ones_like(x)).flatten()
        if not torch.allclose(flipped, plain * signs, rtol=1e-4, atol=1e-5):
            return "layer", ()
        weights.append(level.double().cpu())
    seen: dict[tuple[float, ...], int] = {}
    columns = torch.stack(weights, 1).tolist()
    return "rms", tuple(seen.setdefault(tuple(column), len(seen)) for column in columns)


def _by_head(stage: Tensor, given: Tensor, keys: HeadLayout | None) -> Tensor | None:
    """A stage as [batch, heads, tokens, dim] like what the attention was given; whichever order lies nearer."""
    if stage.ndim == 3:  # a norm that is given all heads' rows at once
        stage = stage.unflatten(0, (given.shape[0], -1)) if stage.shape[0] != given.shape[0] else stage
    if stage.ndim != 4:
        return None
    orders = [stage.transpose(1, 2), stage]
    if keys is not None and given.shape[1] != keys.num_kv_heads:  # who watches sees a KV head for every query head
        readers = [keys.key_head(head) for head in range(keys.num_heads)]
        orders = [x[:, readers] for x in orders if x.shape[1] == keys.num_kv_heads]
    fitting = [x.double() for x in orders if x.shape == given.shape]
    return min(fitting, key=lambda x: float((x - given).norm()), default=None)


def _last_changed(before: Tensor, after: Tensor) -> int:
    """How many channels are turned: those up to the last one of which a bit is changed."""
    changed = (before != after).flatten(0, -2).any(0).nonzero()
    return 0 if not len(changed) else int(changed[-1]) + 1


def _candidates(head_dim: int, moved: int) -> Iterator[tuple[Pairing, int]]:
    yield "none", 0
    for rotary_dim in range(head_dim - head_dim % 2, 0, -2):
        yield "half", rotary_dim
        # Neighbours that do not turn would pass for pairs of any number; halves are told apart by who is whose partner.
        if rotary_dim <= moved + moved % 2:
            yield "interleaved", rotary_dim


def _rotation_error(held: list[tuple[Tensor, Tensor]], pairing: Pairing, rotary_dim: int) -> float:
    """How far what was given is from the best turn, one for each token and pair and for queries and keys alike.

    As a share of its size. Scales are left out of it: some families scale their queries, some what they turn.
    """
    off = 0.0
    for before, after in held:
        was, now = _with_equal_norm(before[..., rotary_dim:], after[..., rotary_dim:])
        off = max(off, _distance(was, now))
    if pairing == "none":
        return off
    first, second = KeyForm(pairing, rotary_dim).halves
    turned = [
        _with_equal_norm(*(torch.complex(x[..., first], x[..., second]) for x in (before, after)))
        for before, after in held
    ]
    along = [(was.conj() * now).sum(1, keepdim=True) for was, now in turned]
    if along[0].shape == along[1].shape:  # queries and keys of one token stand at one place
        along = [along[0] + along[1]] * 2
    for (was, now), one in zip(turned, along, strict=True):
        turn = one / one.abs().clamp_min(torch.finfo(torch.float64).tiny)
        off = max(off, _distance(turn * was, now))
    return off


def _with_equal_norm(was: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
    return was, now * (was.norm() / now.norm().clamp_min(torch.finfo(torch.float64).tiny))


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / one.norm().clamp_min(torch.finfo(torch.float64).tiny))
