"""`trace_layers`: heads of hand-written layers and of other libraries, found by tracing and checked by trial edits.

A layer is editable if the channels of its heads are in a known order, and if the model without some heads equals the
model with their outputs multiplied by 0, on a batch that was not traced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError, PolyheadError
from polyhead.files import in_one_line
from polyhead.geometry import HeadLayout
from polyhead.observation.evaluation_mode import evaluating
from polyhead.observation.session import observe
from polyhead.observation.statistics import AttentionSite
from polyhead.surgery.adapters.attention_layer import SIZES, TRACED, AttentionLayer, TracedHeads
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.adapters.traced_projections import flows_of, refused, traced_heads
from polyhead.surgery.edits.applying import edited
from polyhead.surgery.edits.head_edits import PruneHeads

TOLERANCE = 1e-5  # of outputs, relative to the larger of 1 and the largest output
_EFFECT = 10 * TOLERANCE  # of removed heads on the outputs
_RAISES = "its code raises"
_ASSIGNMENTS = 64  # of meanings to size attributes that are tried


def trace_layers(
    model: nn.Module, batch: Mapping[str, Any], other_batch: Mapping[str, Any]
) -> tuple[AttentionLayer, ...]:
    """Find attention layers of any model that can be observed, so that `PruneHeads` edits them.

    For layers that `find_layers` does not know: hand-written ones, and those of other libraries. What is found is kept
    on the modules, so that `find_layers`, `apply` and `undo` know these layers from then on, in this process and in
    copies of the model. A saved model is loaded into a traced one (`take_shape`, `load_state_dict`).

    Args:
        model: a model in float32 or float64.
        batch: keyword arguments of the model, with two tokens or more.
        other_batch: other ones, on which edited models are compared with gated ones.

    Returns:
        All layers, as `find_layers` returns them; those that cannot be edited have the reason in `refusals`.

    Raises:
        OptionError: the model has another dtype, or no attention that can be observed.

    >>> import torch
    >>> from transformers import RoFormerConfig, RoFormerModel
    >>> config = RoFormerConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    ...                         num_attention_heads=4, initializer_range=0.5)
    >>> model = RoFormerModel(config).eval()
    >>> from polyhead.surgery import PruneHeads, apply, trace_layers
    >>> batches = [{"input_ids": torch.randint(61, (2, 9))} for _ in range(2)]
    >>> [layer.layout.num_heads for layer in trace_layers(model, *batches)]
    [4, 4]
    >>> record = apply(model, [PruneHeads(layer=0, heads=(1, 2))])
    >>> attention = model.encoder.layer[0].attention
    >>> attention.self.query.weight.shape, attention.output.dense.weight.shape
    (torch.Size([16, 32]), torch.Size([32, 16]))
    """
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if not dtypes <= {torch.float32, torch.float64}:
        raise OptionError(
            "layers are traced in float32 or float64, in which an edited model can be compared with a gated one, got "
            f"{', '.join(sorted(map(str, dtypes)))}; trace a copy: copy.deepcopy(model).float()"
        )
    for module in model.modules():
        vars(module).pop(TRACED, None)
    known = {layer.path for layer in find_layers(model)}
    paths = {name or type(module).__name__: name for name, module in model.named_modules()}
    with evaluating(model):
        flows = flows_of(model, batch)
        calls: Counter[str] = Counter()
        for site, outputs in flows.heads.items():
            calls[site.name.partition("#")[0]] += len(outputs)
        for site, outputs in flows.heads.items():
            path = paths.get(site.name)
            if path is None or path in known:
                continue
            module = model.get_submodule(path)
            if calls[site.name] > 1:
                traced = refused("it attends more than once in a forward")
            else:
                traced = traced_heads(path, module, flows, outputs[0])
            setattr(module, TRACED, traced if traced.refusals else _checked(model, path, site, traced, other_batch))
    return find_layers(model)


def _checked(
    model: nn.Module, path: str, site: AttentionSite, projections: TracedHeads, batch: Mapping[str, Any]
) -> TracedHeads:
    """Return the projections with the size attributes by which the model without some heads equals the gated one."""
    module, reasons = model.get_submodule(path), []
    try:
        setattr(module, TRACED, projections)
        layer = _layer_at(model, path)
        if layer.layout is None:
            return refused(*layer.refusals)
        for sizes in islice(_assignments(module, layer.layout), _ASSIGNMENTS):
            traced = replace(projections, sizes=sizes)
            setattr(module, TRACED, traced)
            failed = _failed_edit(model, _layer_at(model, path), layer.layout, site, batch)
            if not failed:
                return traced
            reasons.append(failed)
        return refused(min(reasons, key=lambda reason: _RAISES in reason))
    finally:
        vars(module).pop(TRACED, None)


def _layer_at(model: nn.Module, path: str) -> AttentionLayer:
    return next(x for x in find_layers(model) if x.path == path)


def _assignments(module: nn.Module, layout: HeadLayout) -> list[dict[str, str]]:
    """Return the meanings that the integers of a module may have, by attribute, in the order of preference.

    An attribute has the meaning that its name and its value suggest. One that has the value alone, such as the width of
    the model or a window, has the meaning only if the model cannot be edited without.
    """
    choices: dict[str, list[str | None]] = {}
    for name, value in vars(module).items():
        if type(value) is not int or value < 2:
            continue
        meanings = [meaning for meaning, size in SIZES.items() if size(layout) == value]
        if layout.num_heads == layout.num_kv_heads:
            meanings = [x for x in meanings if x in ("heads", "width")]
        if len(meanings):
            choices[name] = [*meanings, None]
    suggested = [next((x for x in meanings if x and _suggests(name, x)), None) for name, meanings in choices.items()]

    def unlikely(meanings: tuple[str | None, ...]) -> int:
        return sum(meaning != likely for meaning, likely in zip(meanings, suggested, strict=True))

    return [
        {name: meaning for name, meaning in zip(choices, meanings, strict=True) if meaning is not None}
        for meanings in sorted(product(*choices.values()), key=unlikely)
    ]


def _suggests(attribute: str, meaning: str) -> bool:
    """Return whether an attribute is named after this size: `n_head` after a number, `all_head_size` after a width."""
    name = attribute.lower()
    is_width = any(word in name for word in ("dim", "size", "width", "channels", "per_head", "d_head"))
    return any(word in name for word in ("head", "group", "rep", "kv")) and is_width == meaning.endswith("width")


def _failed_edit(
    model: nn.Module, layer: AttentionLayer, layout: HeadLayout, site: AttentionSite, batch: Mapping[str, Any]
) -> str:
    """Return how the model without some heads differs from the one with their outputs multiplied by 0."""
    if layout.num_heads == 1:
        return "it has a single head"
    intact = _run(model, batch)
    for heads in _trials(layout):
        gate = torch.ones(layout.num_heads, device=next(model.parameters()).device)
        gate[list(heads)] = 0
        try:
            with torch.no_grad(), observe(model, statistics=False) as session:
                session.gates[site.name, site.kind] = gate
                expected = model(**batch)
            with edited(model, [PruneHeads(layer.number, heads, stack=layer.stack)]):
                actual = _run(model, batch)
        except PolyheadError as error:
            return str(error)
        if (effect := _difference(intact, expected)) < _EFFECT:
            return f"edits cannot be checked, as the outputs depend on heads {heads} by {effect:.1e} only"
        if isinstance(actual, str):
            return f"without heads {heads} {_RAISES} {actual}"
        difference = _difference(expected, actual)
        if not difference <= TOLERANCE:
            return f"without heads {heads} its outputs differ by {difference:.1e} from those with these heads gated"
    return ""


def _run(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """Return the outputs of an edited model, or what its code raises at these sizes."""
    try:
        with torch.no_grad():
            return model(**batch)
    except Exception as error:  # noqa: BLE001 - anything, since it was not written for these sizes
        return in_one_line(error)


def _trials(layout: HeadLayout) -> list[tuple[int, ...]]:
    """Return heads that are removed together: of the first KV head, the last one and all but one; or one of each."""
    size, heads = layout.group_size, layout.num_heads
    whole = [range(size), range(heads - size, heads), range(size, heads)] if layout.num_kv_heads > 1 else []
    one_of_each = [range(0, heads, size), range(size - 1, heads, size)] if size > 1 else []
    return [tuple(x) for x in dict.fromkeys((*whole, *one_of_each))]


def _difference(one: Any, other: Any) -> float:
    """Return the largest difference of all tensors of two outputs, relative to the larger of 1 and their largest."""
    first, second = list(_tensors(one)), list(_tensors(other))
    if [x.shape for x in first] != [x.shape for x in second]:
        return float("inf")
    worst = 0.0
    for x, y in zip(first, second, strict=True):
        if x.numel():
            error = (x.double() - y.double()).abs().max() / x.double().abs().max().clamp_min(1)
            worst = max(worst, float("inf") if bool(error.isnan()) else float(error))
    return worst


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, Mapping):  # weights and caches have fewer heads in an edited model
        parts = [part for name, part in x.items() if "attentions" not in name and "key_values" not in name]
        yield from (tensor for part in parts for tensor in _tensors(part))
    elif isinstance(x, list | tuple):
        yield from (tensor for part in x for tensor in _tensors(part))
