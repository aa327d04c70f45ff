"""Attention layers whose heads are distributed over ranks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from polyhead.errors import OptionError
from polyhead.layers.base_attention import BaseAttention, Memory
from polyhead.layers.checks import check_input, check_saved_layout
from polyhead.layers.config import CONFIGS
from polyhead.layers.kv_cache import KVCache
from polyhead.layers.latent.layer import LatentAttention
from polyhead.layers.positions import BiasesLogits
from polyhead.layers.steps import layer_forward
from polyhead.masks import Mask
from polyhead.ops.attended import Attended
from polyhead.ops.attention import AttentionOutput
from polyhead.parallel.agreement import checksum
from polyhead.parallel.tensor.collectives import (
    MeshRanks,
    check_same_call,
    gather,
    scatter_sum,
    sum_gradients,
    sum_over_ranks,
)
from polyhead.parallel.tensor.head_split import HeadSplit
from polyhead.parallel.tensor.local_inputs import LocalMasks, local_gate
from polyhead.parallel.tensor.shards import GATE, OUTPUT_BIAS, ParameterShard
from polyhead.parallel.tensor.whole_heads import WholeHeads

LAYER_OPTIONS = ("mask", "softcap", "scale", "dropout", "backend", "finite")
_COMPARED = ("mask", "head_gate", "token_positions")  # arguments whose values are compared, besides their shapes


@dataclass(frozen=True, eq=False)
class HeadParallelism:
    """Distribution of one layer over the ranks of a mesh dimension, as seen by one of them."""

    ranks: MeshRanks
    split: HeadSplit
    layer_class: type[BaseAttention]
    layout: Any  # of the heads of this rank
    shards: dict[str, ParameterShard]
    sequence_parallel: bool
    maps: int  # attention maps per head, 2 in differential attention
    is_multi_query: bool  # all heads read one KV head, which every rank has

    @property
    def heads(self) -> range:
        """Heads of this rank, as indices of the whole layer; empty on a rank that stores only padding."""
        return self.split.heads(self.ranks.rank)

    @property
    def computed(self) -> range:
        """Heads whose masks, gates and biases this rank uses: its own, or head 0 on a rank that stores only padding."""
        return self.split.computed(self.ranks.rank)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # process groups cannot be copied


class HeadParallelLayer(BaseAttention):
    """Base class of attention layers whose heads are distributed; `HeadParallel` sets a subclass as the layer's class.

    `layout`, configs and state dicts are those of the whole layer, and so are the results of a call.
    """

    parallelism: HeadParallelism
    is_head_parallel = True

    # ---- the computation

    def _run(self, arguments: dict[str, Any]) -> AttentionOutput:
        """Compute the heads of this rank; the result is that of all heads."""
        parallelism = self.parallelism
        arguments = dict(arguments)
        names = [name for name in ("query", "key", "value") if isinstance(arguments.get(name), Tensor)]
        self._check_call(arguments, names)
        inputs = self._inputs(*(arguments[name] for name in names))
        arguments |= zip(names, inputs, strict=True)
        shape = (inputs[0].shape[0], inputs[0].shape[1])
        masks = self._masks()
        if isinstance(arguments.get("mask"), Mask):
            arguments["mask"] = masks.local(arguments["mask"])
        if arguments.get("head_gate") is not None:
            arguments["head_gate"] = self._gate(arguments["head_gate"], shape)
        local = self._local_layer(masks, shape)
        whole = WholeHeads(parallelism, logsumexp=bool(arguments.get("logsumexp")))
        if self._listener is not None:
            local.__dict__["_listener"] = functools.partial(self._notify_whole, whole, masks)
        result: AttentionOutput = parallelism.layer_class.forward(local, **arguments)
        return whole.result(result, self._output(result.output))

    def _check_call(self, arguments: dict[str, Any], names: list[str]) -> None:
        parallelism = self.parallelism
        query = arguments.get("query")
        if isinstance(query, Tensor) and query.is_nested:
            raise OptionError("a head-parallel layer takes padded sequences, got a nested query; use Mask.lengths")
        self._check_ranks(arguments, names)
        check_input("query", query, self.layout.embed_dim, self.out_proj)  # type: ignore[arg-type]
        if self.training and self.dropout:
            raise OptionError(
                "attention dropout of a head-parallel layer must be 0 in training, since it is a hash of the head's "
                f"index and ranks would drop the same weights of different heads, got dropout {self.dropout}; set "
                "layer.dropout = 0, or call model.eval()"
            )
        if self._listener is not None and parallelism.sequence_parallel:
            raise OptionError(
                "observed layers need their whole sequence, got a layer with sequence_parallel=True; observe a model "
                "that is distributed without it"
            )
        if parallelism.sequence_parallel and arguments.get("cache") is not None:
            raise OptionError(
                "a layer with sequence_parallel=True takes no cache, whose tokens every rank appends in whole; decode "
                "with a model that is distributed without it"
            )

    def _check_ranks(self, arguments: dict[str, Any], names: list[str]) -> None:
        """Raise the same error on every rank if their calls differ.

        Calls with inputs on a GPU are not checked, because the check would synchronise with it.
        """
        if not all(arguments[name].is_cpu for name in names):
            return
        # None and False are the defaults; without dropout a seed has no effect.
        given = {name: x for name, x in arguments.items() if x is not None and x is not False and name != "seed"}
        facts = {name: _described(x) for name, x in given.items()}
        facts |= {"observed": str(self._listener is not None), "training": str(self.training)}
        facts |= {"autocast": str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else "off"}
        compared = {name: given[name] for name in _COMPARED if name in given}
        # Attributes of the layer may have been changed since it was distributed.
        facts |= {f"{name} of the layer": repr(getattr(self, name)) for name in LAYER_OPTIONS}
        facts["dtype of the layer"] = str(self.out_proj.weight.dtype)  # type: ignore[union-attr]
        compared |= {f"{name} of the layer": getattr(self, name) for name in (GATE, "mask")}
        tensors = {name: _tensors(x) for name, x in compared.items()}
        facts |= {f"values of {name}": _hash(values) for name, values in tensors.items() if len(values)}
        if torch.is_grad_enabled():
            learned = {name: arguments[name] for name in names} | dict(self.named_parameters(remove_duplicate=False))
            learned |= {f"{name} {i}": x for name, values in tensors.items() for i, x in enumerate(values)}
            facts |= {f"gradient of {name}": "required" for name, x in learned.items() if x.requires_grad}
        check_same_call(self.parallelism.ranks, facts, f"the arguments of a {type(self).__name__}")

    def _inputs(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs over the whole sequence; their gradients are summed over the ranks."""
        parallelism = self.parallelism
        ranks, sequence = parallelism.ranks, parallelism.sequence_parallel
        placement = Shard(1) if sequence else Replicate()
        plain = []
        for x in inputs:
            if isinstance(x, DTensor):
                if x.device_mesh != ranks.mesh:
                    raise OptionError(f"inputs must be distributed over {ranks!r}, got one over {x.device_mesh}")
                if sequence and x.shape[1] % ranks.size:
                    raise OptionError(
                        f"sequence parallel needs a sequence that {ranks.size} ranks divide, got {x.shape[1]} tokens; "
                        "pad it"
                    )
                x = x.redistribute(placements=[placement]).to_local()
            plain.append(x)
        if sequence:
            return tuple(gather(ranks, x, 1, "the gather of the sequence", same_use=False) for x in plain)
        return self._shared(*plain)

    def _shared(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return replicated tensors, unchanged, with gradients that are summed over the ranks."""
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
            return tensors
        return sum_gradients(self.parallelism.ranks, *tensors)

    def _masks(self) -> LocalMasks:
        parallelism = self.parallelism
        return LocalMasks(parallelism.computed, parallelism.split.num_heads, lambda term: self._shared(term)[0])

    def _gate(self, gate: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return the factors of this rank's heads from a gate of the whole layer; `shape` is batch and queries."""
        parallelism = self.parallelism
        if isinstance(gate, Tensor):
            (gate,) = self._shared(gate)
        return local_gate(gate, parallelism.computed, parallelism.split.num_heads, parallelism.maps, shape)

    def _local_layer(self, masks: LocalMasks, shape: tuple[int, int]) -> Any:
        """Return a layer of the original class with the heads of this rank alone; `shape` is batch and queries."""
        parallelism = self.parallelism
        local = _copied(self, "", self._local_parameters(), parallelism.layer_class)
        attributes = local.__dict__
        # Joint projections would read the parameters of the whole layer.
        attributes |= {"layout": parallelism.layout, "_of_self": None, "_of_source": None}
        attributes.pop("_listener", None)
        gate = attributes["_parameters"].pop(GATE, None)
        gate = attributes["_buffers"].get(GATE) if gate is None else gate
        local_buffers = {GATE: None if gate is None else self._gate(gate, shape)}
        attributes["_buffers"] = {**attributes["_buffers"], **local_buffers}
        positions = local.positions
        if isinstance(positions, BiasesLogits):
            # The instance attribute is set on the copy of the module; it selects this rank's heads from all biases.
            biases = type(positions).forward.__get__(positions)
            positions.__dict__["forward"] = lambda *sizes, **options: masks.local(
                biases(*sizes, **options), of_parameters=True
            )
        return local

    def _local_parameters(self) -> dict[str, Tensor | None]:
        """Return the tensors of this rank's heads by parameter name, with None for the output bias."""
        parallelism = self.parallelism
        rank = parallelism.ranks.rank
        parameters = dict(self.named_parameters(remove_duplicate=False))
        new = [name for name in parameters if name not in parallelism.shards and name != GATE]
        if new:
            raise OptionError(
                f"a head-parallel layer has the parameters with which it was distributed, got {new[0]} as well, whose "
                "gradient would be that of this rank's heads; add it before"
            )
        shards = {name: parallelism.shards[name] for name in parameters if name in parallelism.shards}
        local = {name: shard.local(parameters[name], rank) for name, shard in shards.items()}
        # The output bias is added in `_output`; gradients of gates are summed in `_gate`.
        shared = [name for name, shard in shards.items() if shard.is_summed]
        summed = self._shared(*(local[name] for name in shared)) if shared else ()
        local |= {name: parallelism.shards[name].select(x) for name, x in zip(shared, summed, strict=True)}
        return {**local, OUTPUT_BIAS: None}

    def _output(self, output: Tensor) -> Tensor:
        """Return the sum of the outputs of all ranks' heads, plus the output bias."""
        parallelism = self.parallelism
        what = "the sum of the heads' outputs"
        bias = self.out_proj.bias  # type: ignore[union-attr]
        if parallelism.sequence_parallel:
            output = scatter_sum(parallelism.ranks, output, 1, what)
        else:
            output = sum_over_ranks(parallelism.ranks, output, what)
        if bias is None:
            return output
        bias = parallelism.shards[OUTPUT_BIAS].local(bias, parallelism.ranks.rank)  # type: ignore[arg-type]
        if parallelism.sequence_parallel:
            (bias,) = self._shared(bias)
        return output + bias.to(output.dtype)

    def _notify_whole(self, whole: WholeHeads, masks: LocalMasks, attended: Attended) -> None:
        """Gather the attention of all ranks' heads and pass it to the observer."""
        assert self._listener is not None
        mask = None if attended.mask is None else masks.whole(attended.mask)
        self._listener(replace(whole.attended(attended), mask=mask))

    def remember(self, key: Tensor, *args: Tensor, **kwargs: Tensor) -> Memory:
        """Project a source once, for repeated cross-attention; see the layer's own method.

        Args:
            key: source [batch, keys, key_input_dim].
            args, kwargs: `value`, the source of the values, where the layer's own method has it.

        Returns:
            Keys and values of the KV heads of this rank.
        """
        inputs = self._inputs(key, *args, *kwargs.values())
        count = 1 + len(args)
        local = self._local_layer(self._masks(), (key.shape[0], 0))
        keywords = dict(zip(kwargs, inputs[count:], strict=True))
        memory: Memory = self.parallelism.layer_class.remember(local, *inputs[:count], **keywords)  # type: ignore[attr-defined]
        # A new `Memory`, which every layer takes: the other belongs to `local`, which exists for this call alone.
        return Memory(memory.key, memory.value)

    @property
    def cache_layout(self) -> Any:
        """Head layout of the keys and values in a cache: of the KV heads of this rank."""
        layout = self.parallelism.layout
        if isinstance(self, LatentAttention):
            return layout.absorbed
        local = object.__new__(self.parallelism.layer_class)
        local.__dict__ = {**self.__dict__, "layout": layout}
        return local.cache_layout

    @property
    def heads(self) -> Any:
        """Raise an OptionError: matrices of a head are views of whole parameters, and these are distributed."""
        raise OptionError(
            "matrices of heads are views of whole parameters, got a head-parallel layer; edit heads before the "
            "layer is distributed, or read torch.distributed.checkpoint.state_dict.get_model_state_dict"
        )

    # ---- attributes and checkpoints

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "layout":
            raise OptionError(
                "the heads of a head-parallel layer cannot be changed, got another layout; edit heads before the layer "
                "is distributed"
            )
        super().__setattr__(name, value)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """Return the state dict of the whole layer, with DTensors as parameters and without zero heads.

        Args:
            args, options: as in `torch.nn.Module.state_dict`.
        """
        states = super().state_dict(*args, **options)
        prefix = options.get("prefix", args[1] if len(args) > 1 else "")
        for name, shard in self.parallelism.shards.items():
            if prefix + name in states:
                states[prefix + name] = shard.unpadded(states[prefix + name])
        return states

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}_extra_state" in state_dict:
            check_saved_layout(state_dict[f"{prefix}_extra_state"], self.layout)
        parameters = dict(self.named_parameters(remove_duplicate=False))
        for name, shard in self.parallelism.shards.items():
            if prefix + name in state_dict and name in parameters:
                state_dict[prefix + name] = shard.padded_like(state_dict[prefix + name], parameters[name])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        parallelism = self.parallelism
        heads, split = parallelism.heads, parallelism.split
        stored = f"heads {heads[0]} to {heads[-1]}" if heads else "no head"
        stored += f" of {split.num_heads} on rank {parallelism.ranks.rank} of {split.ranks}"
        return f"{super().extra_repr()}, {stored}"


def _described(argument: Any) -> str:
    """Return the text of an argument that ranks compare: for tensors shape and dtype, without values."""
    if isinstance(argument, Tensor):
        return f"{list(argument.shape)} {argument.dtype}"
    return type(argument).__name__ if isinstance(argument, Memory | KVCache) else repr(argument)


def _tensors(argument: Any) -> list[Tensor]:
    tensors = argument.tensors if isinstance(argument, Mask) else [argument]
    return [x for x in tensors if isinstance(x, Tensor)]


def _hash(tensors: list[Tensor]) -> str:
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]  # a learned gate is replicated
    return f"{checksum(local, torch.device('cpu')).item():x}"


def _copied(module: nn.Module, prefix: str, tensors: dict[str, Any], cls: type[nn.Module] | None = None) -> Any:
    """Return a shallow copy of a module and its submodules with other tensors as parameters."""
    copied = object.__new__(cls or type(module))
    copied.__dict__ = {
        **module.__dict__,
        "_parameters": {name: tensors.get(prefix + name, x) for name, x in module._parameters.items()},
        "_modules": {
            name: None if child is None else _copied(child, f"{prefix}{name}.", tensors)
            for name, child in module._modules.items()
        },
    }
    return copied


@functools.cache
def parallel_class(layer_class: type[BaseAttention]) -> type[HeadParallelLayer]:
    """Return the head-parallel class of a layer's class."""
    signature = inspect.signature(layer_class.forward)

    @layer_forward
    @torch.compiler.disable  # collectives and copies of modules; code around the layer is compiled
    @functools.wraps(layer_class.forward)
    def forward(self: HeadParallelLayer, *positional: Any, **keywords: Any) -> AttentionOutput:
        arguments = signature.bind(self, *positional, **keywords).arguments
        arguments.pop("self")
        return self._run(arguments)

    namespace: dict[str, Any] = {"forward": forward, "__doc__": layer_class.__doc__, "__module__": __name__}
    if hasattr(layer_class, "explain"):
        explain: Callable[..., Any] = layer_class.explain

        def explain_local(self: HeadParallelLayer, *positional: Any, **keywords: Any) -> Any:
            return explain(self._local_layer(self._masks(), (0, 0)), *positional, **keywords)

        namespace["explain"] = functools.wraps(explain)(explain_local)
    name = f"HeadParallel{layer_class.__name__}"
    created: Any = type(name, (HeadParallelLayer, layer_class), namespace)
    CONFIGS.describe_like(created, layer_class)
    return created
