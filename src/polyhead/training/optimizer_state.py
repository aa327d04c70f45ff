"""`edit_heads`: edits of heads during training, with which the state of the optimizer is edited alike."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.observation.nested_sessions import is_observed
from polyhead.surgery.adapters.attention_layer import AttentionLayer
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.adapters.head_weights import HeadWeights, pack_heads, read_heads
from polyhead.surgery.edits.applying import apply, changed, edits_by_layer
from polyhead.surgery.edits.head_edits import HeadEdit, checked_edits
from polyhead.surgery.edits.records import EditRecord

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
_GRADIENT = "gradient"  # of a parameter, edited like a tensor of its state
# Means and sums (Adagrad) of squared gradients, and step sizes (Rprop). Adam's bias correction is that of the whole
# tensor: from 0, a new head would start with updates of up to six times the learning rate (betas of 0.9 and 0.999).
_OF_OTHER_HEADS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "step_size")


def edit_heads(model: nn.Module, optimizer: Optimizers, edits: Sequence[HeadEdit] | HeadEdit) -> EditRecord:
    """Apply edits to a model in training, and keep the optimizer's state of the heads that remain.

    Edited parameters are new ones, which replace the old in the optimizer's groups. Every tensor of its state that has
    a value per weight (moments of Adam, momentum of SGD and Muon) is edited as the weights are: values of a head stay
    with the head, and so do gradients. A new head (`AddHeads`) has no momentum, and the mean second moments of the
    layer's other heads (of Rprop the mean step sizes); a head that was merged or pooled counts as new. Step counters
    are kept.

    Args:
        model: the model, which is edited in place; outside of any `polyhead.observe`.
        optimizer: the optimizer, or several that share the parameters, e.g. Muon and AdamW.
        edits: edits of `polyhead.surgery`, as for its `apply`.

    Returns:
        The record of the edits.

    Raises:
        OptionError: an edit that is not possible, an optimizer without the edited parameters or whose state cannot be
            split by heads (Adafactor, LBFGS), parameters that are tied, sharded or held by a `DistributedDataParallel`
            around any part of the model, which must be deleted before. Model and optimizer are then unchanged.

    >>> import torch, polyhead
    >>> from polyhead.surgery import PruneHeads
    >>> from polyhead.training import edit_heads
    >>> layer = polyhead.MultiHeadAttention(16, 4)
    >>> optimizer = torch.optim.AdamW(layer.parameters())
    >>> layer(torch.randn(2, 5, 16)).output.square().mean().backward()
    >>> optimizer.step()
    >>> record = edit_heads(layer, optimizer, PruneHeads(layer=0, heads=(1,)))
    >>> optimizer.state[layer.q_proj.weight]["exp_avg"].shape
    torch.Size([12, 16])
    """
    optimizers, edits = checked_optimizers(optimizer), checked_edits(edits)
    check_unobserved(model)
    before, owners = dict(model.named_parameters()), _owners(optimizers)
    carried: dict[str, dict[str, Tensor]] = {}
    for layer, layer_edits in edits_by_layer(find_layers(model), edits):
        assert layer.layout is not None
        after = changed(layer, HeadWeights.blank(layer.layout), layer_edits)
        states = states_of(model, layer, optimizers)
        carried |= {name: {} for name in states}
        for key in {key for state in states.values() for key in state}:
            # Parameters of another optimizer, whose state has no such key, are read as zeros and not written.
            tensors = {name: state.get(key, before[name].new_zeros(())) for name, state in states.items()}
            tensors = {name: x.expand(before[name].shape) for name, x in tensors.items()}
            heads = _of_heads(read_heads(model, layer, tensors=tensors), after, mean=key in _OF_OTHER_HEADS)
            for name, x in pack_heads(model, layer, heads).items():
                if key in states[name]:
                    carried[name][key] = x
    check_unwrapped(before[name] for name in carried)
    record = apply(model, edits)
    for name, tensors in carried.items():
        old, new = before[name], model.get_parameter(name)
        owner = owners.get(id(old))
        new.grad = tensors.pop(_GRADIENT, None)
        if owner is None:
            continue
        for group in owner.param_groups:
            group["params"] = [new if x is old else x for x in group["params"]]
        if old in owner.state:
            owner.state[new] = {**owner.state.pop(old), **tensors}
    return record


def states_of(
    model: nn.Module, layer: AttentionLayer, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, dict[str, Tensor]]:
    """Return gradients and optimizer states of a layer's projections by parameter; raise if they cannot be edited."""
    owners, states = _owners(optimizers), {}
    for name in pack_heads(model, layer, read_heads(model, layer, "meta")):
        parameter = model.get_parameter(name)
        states[name] = _state_by_weight(name, parameter, owners.get(id(parameter)))
        if parameter.grad is not None:
            states[name][_GRADIENT] = parameter.grad
    return states


def check_unobserved(model: nn.Module) -> None:
    """Raise if a session observes the model: it would attribute the values of edited heads to those before them."""
    if is_observed(model):
        raise OptionError(
            f"heads must not be changed while a session observes the model, got {type(model).__name__} inside the "
            "block of a HeadMonitor, QKClip, HeadGates, DropHead or polyhead.observe; exit the block first and enter a "
            "new one afterwards (DynamicHeads takes a monitor itself)"
        )


def check_unwrapped(parameters: Iterable[nn.Parameter]) -> None:
    """Raise if a `DistributedDataParallel` holds one of the parameters: it would never average those that replace them.

    A module has no reference to its wrappers, so they are searched for among the objects that the garbage collector
    tracks; a wrapper frozen by `gc.freeze` is not found.
    """
    kind, edited = nn.parallel.DistributedDataParallel, {id(x) for x in parameters}

    def holds_any() -> bool:
        wrapped = (vars(x).get("_modules", {}).get("module") for x in gc.get_objects() if issubclass(type(x), kind))
        return any(id(x) in edited for module in wrapped if module is not None for x in module.parameters())

    if holds_any():
        gc.collect()  # free wrappers that were deleted but are in a reference cycle
    if holds_any():
        raise OptionError(
            "DistributedDataParallel keeps the parameters that it was created with, got a model inside of it; delete "
            "the wrapper (model = replica.module; del replica), edit the model itself and wrap it again"
        )


def _owners(optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, torch.optim.Optimizer]:
    return {id(x): each for each in optimizers for group in each.param_groups for x in group["params"]}


def _state_by_weight(name: str, parameter: nn.Parameter, owner: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Return the state of a parameter that has a value per weight; raise for a state that has others."""
    is_flat = getattr(parameter, "_fsdp_flattened", False)  # the mark of FullyShardedDataParallel
    if type(parameter) is not nn.Parameter or is_flat:
        what = "part of a FlatParameter" if is_flat else f"a {type(parameter).__name__}"
        raise OptionError(f"edited parameters must be plain, not sharded; got {name}, {what}")
    if owner is None:
        if parameter.requires_grad:
            raise OptionError(
                f"the optimizer must own the parameters of the edited heads, got one without {name}; pass every "
                "optimizer of the model, and the optimizers themselves, not wrappers around them"
            )
        return {}
    state = {}
    for key, x in owner.state.get(parameter, {}).items():
        if isinstance(x, Tensor) and x.shape == parameter.shape:
            state[key] = x
        elif not (x is None or isinstance(x, int | float | str) or (isinstance(x, Tensor) and x.numel() == 1)):
            shape = f"of shape {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise OptionError(
                f"the state of an optimizer must have one value per weight to be split by heads, got {key!r} of "
                f"{type(owner).__name__}, {shape} for {name} of shape {list(parameter.shape)}"
            )
    return state


def _of_heads(state: HeadWeights, after: HeadWeights, *, mean: bool) -> HeadWeights:
    """Return the state of the heads after an edit: that of their origins; zeros or the mean for new ones."""
    kv_origins = {
        after.key_heads[new]: state.key_heads[old] for new, old in enumerate(after.origins) if old is not None
    }
    origins = dict.fromkeys(("query", "output", "query_bias"), after.origins)
    origins |= {
        name: tuple(map(kv_origins.get, range(after.key.shape[0])))
        for name in ("key", "value", "key_bias", "value_bias")
    }
    taken: dict[str, Any] = {"key_heads": after.key_heads}
    for name, heads in origins.items():
        x = getattr(state, name)
        if x is not None:
            new = x.mean(0) if mean else torch.zeros_like(x[0])
            taken[name] = torch.stack([new if head is None else x[head] for head in heads])
    return replace(state, **taken)


def checked_optimizers(optimizer: Any) -> tuple[torch.optim.Optimizer, ...]:
    optimizers = (optimizer,) if not isinstance(optimizer, Sequence) else tuple(optimizer)
    for each in optimizers:
        # Adafactor keeps means over rows and columns, LBFGS past steps of all parameters together.
        if not isinstance(each, torch.optim.Optimizer) or isinstance(each, torch.optim.LBFGS | torch.optim.Adafactor):
            raise OptionError(
                "an optimizer must be a torch.optim.Optimizer, not a wrapper around one, whose state has a value per "
                f"weight, got {type(each).__name__}"
            )
    if not optimizers:
        raise OptionError("heads are edited together with the state of an optimizer, got none")
    return optimizers
