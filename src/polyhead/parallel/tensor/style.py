"""`HeadParallel`: the parallel style of attention layers, and plans of whole models."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from polyhead.errors import OptionError
from polyhead.geometry import HeadLayout
from polyhead.layers.base_attention import BaseAttention
from polyhead.layers.blocks import Block, FeedForward
from polyhead.layers.checks import layout_integers
from polyhead.parallel.tensor.collectives import MeshRanks, check_same
from polyhead.parallel.tensor.head_split import HeadSplit, local_layout
from polyhead.parallel.tensor.layer import LAYER_OPTIONS, HeadParallelism, HeadParallelLayer, parallel_class
from polyhead.parallel.tensor.rules import check_supported
from polyhead.parallel.tensor.shards import shards_of


class _MeshStyle(ParallelStyle):
    """Options of the styles of attention layers and feed-forward networks."""

    def __init__(self, *, sequence_parallel: bool = False, mesh_dim: str | None = None) -> None:
        super().__init__()
        if not isinstance(sequence_parallel, bool):
            raise OptionError(f"sequence_parallel must be True or False, got {sequence_parallel!r}")
        if mesh_dim is not None and not isinstance(mesh_dim, str):
            raise OptionError(f"mesh_dim must be the name of a mesh dimension, got {mesh_dim!r}")
        self.sequence_parallel = sequence_parallel
        self.mesh_dim = mesh_dim

    def __repr__(self) -> str:
        options = f"sequence_parallel={self.sequence_parallel}, mesh_dim={self.mesh_dim!r}"
        return f"{type(self).__name__}({options})"


class HeadParallel(_MeshStyle):
    """Distribute the heads of an attention layer over the ranks of a mesh dimension.

    Each rank holds and computes a block of the heads: rows of the query, key, value and gate projections, columns of
    the output projection, sinks. What all heads share (norms, position tables, the latents of `LatentAttention`) is
    replicated. One all-reduce sums the outputs, and one all-reduce of the backward sums the gradients of the input.

    Parameters become DTensors under their old names. A call takes and returns what the whole layer would: masks, gates,
    statistics, weights and log-sum-exp have all heads, in order; those that are requested are gathered. Caches and
    memories hold the KV heads of the rank; `layer.cache_layout` is their layout.

    With fewer KV heads than ranks, or where the heads of a rank read only some heads of a block of KV heads, the key
    and value projections are replicated; a rank computes the KV heads that it reads, and gradients are summed. Where
    heads do not divide the ranks, zero heads follow the last head. They are neither computed (a rank without any head
    computes one), trained nor saved.

    `MultiHeadAttention`, `DifferentialAttention`, `CollaborativeAttention` and `LatentAttention` are supported. Layers
    whose heads interact are refused, with the collective that they would need.

    Args:
        sequence_parallel: inputs and output are shards of the sequence (`Shard(1)`): the inputs are gathered, and the
            sum of the outputs is scattered. Masks, gates and positions remain those of the whole sequence.
        mesh_dim: name of the mesh dimension, for meshes with several; the only one by default.

    >>> from torch.distributed.tensor.parallel import parallelize_module
    >>> plan = {"layers.*.attention": HeadParallel()}
    >>> parallelize_module(model, mesh, plan)  # doctest: +SKIP
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks = MeshRanks(one_dimension(device_mesh, self.mesh_dim))
        issue, facts = None, {}
        try:
            _check_layer(module)
            assert isinstance(module, BaseAttention)
            parallelism = _parallelism(module, ranks, self.sequence_parallel)
            facts = _facts(module, self)
        except OptionError as error:
            issue = str(error)
        check_same(ranks, facts, issue, f"the {type(module).__name__} to distribute")
        assert isinstance(module, BaseAttention)
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            path, _, leaf = name.rpartition(".")
            value = parallelism.shards[name].distribute(parameter, ranks, self.src_data_rank)
            module.get_submodule(path).register_parameter(leaf, value)
        module.__class__ = parallel_class(parallelism.layer_class)  # type: ignore[arg-type]  # classes are hashable
        vars(module)["parallelism"] = parallelism
        module._join_projections()
        return module


class FeedForwardParallel(_MeshStyle):
    """Distribute a `polyhead.layers.FeedForward`: columns of `up` and `gate`, rows of `down`.

    Args:
        sequence_parallel: inputs and output are shards of the sequence, as in `HeadParallel`.
        mesh_dim: name of the mesh dimension, for meshes with several.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh = one_dimension(device_mesh, self.mesh_dim)
        if type(module) is not FeedForward:
            raise OptionError(f"FeedForwardParallel takes a FeedForward, got {type(module).__name__}")
        if module.up.out_features % mesh.size():
            raise OptionError(
                f"hidden_dim must be a multiple of the number of ranks, got {module.up.out_features} and "
                f"{mesh.size()}; leave the feed-forward network out of the plan, or use another hidden_dim"
            )
        if module.dropout.p:
            raise OptionError(
                "dropout between columns and rows must be 0, since ranks would drop the same of different channels, "
                f"got {module.dropout.p}; leave the feed-forward network out of the plan"
            )
        outside = Shard(1) if self.sequence_parallel else Replicate()
        plan: dict[str, ParallelStyle] = {"up": ColwiseParallel(input_layouts=outside)}
        if module.gate is not None:
            plan["gate"] = ColwiseParallel(input_layouts=outside)
        plan["down"] = RowwiseParallel(output_layouts=outside)
        return parallelize_module(module, mesh, plan, src_data_rank=self.src_data_rank)


def head_parallel_plan(
    model: nn.Module, *, sequence_parallel: bool = False, mesh_dim: str | None = None
) -> dict[str, ParallelStyle]:
    """Return the plan for `parallelize_module` that distributes the heads of every attention layer of a model.

    The feed-forward networks of polyhead's blocks are distributed by columns and rows. With `sequence_parallel`, the
    norms of the blocks work on shards of the sequence, as the blocks' inputs and outputs are; embeddings and outputs of
    a model are the caller's.

    Args:
        model: a module that contains attention layers.
        sequence_parallel, mesh_dim: as in `HeadParallel`.

    Returns:
        Parallel styles by the paths of modules.

    Raises:
        OptionError: the model has no attention layer, or one that cannot be distributed.
    """
    options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "mesh_dim": mesh_dim}
    plan: dict[str, ParallelStyle] = {}
    for path, module in model.named_modules():
        if isinstance(module, BaseAttention | nn.MultiheadAttention):
            _check_layer(module)
            plan[path] = HeadParallel(**options)
        elif isinstance(module, Block):
            prefix = f"{path}." if path else ""
            plan[f"{prefix}feed_forward"] = FeedForwardParallel(**options)
            norms = ("attention_norm", "cross_attention_norm", "feed_forward_norm") if sequence_parallel else ()
            plan |= {
                f"{prefix}{name}": SequenceParallel(use_local_output=True) for name in norms if hasattr(module, name)
            }
    if not any(isinstance(style, HeadParallel) for style in plan.values()):
        raise OptionError(f"a plan needs attention layers of polyhead.layers, got {type(model).__name__} without any")
    return plan


def one_dimension(mesh: DeviceMesh, name: str | None) -> DeviceMesh:
    """Return the named dimension of a mesh, or a mesh that has only one.

    Args:
        mesh: mesh of devices.
        name: name of the dimension; None for a mesh with one.

    Raises:
        OptionError: the mesh has no such dimension, or several and no name.
    """
    if not isinstance(mesh, DeviceMesh):
        raise OptionError(f"heads are distributed over a torch DeviceMesh, got {type(mesh).__name__}")
    names = mesh.mesh_dim_names or ()
    if name is None:
        if mesh.ndim != 1:
            raise OptionError(
                f"heads are distributed over one mesh dimension, got a mesh with {mesh.ndim}"
                + (f" ({', '.join(names)}); pass mesh[{names[-1]!r}], or mesh_dim=" if names else "; pass one of them")
            )
    elif name not in names:
        raise OptionError(f"the mesh must have the dimension {name!r}, got dimensions {', '.join(names) or 'unnamed'}")
    elif mesh.ndim > 1:
        mesh = mesh[name]
    members = mesh.mesh.tolist()
    if members != sorted(members):  # process groups have theirs in this order, DTensors in that of the mesh
        raise OptionError(f"the ranks of a mesh dimension must be in ascending order, got {members}")
    return mesh


def _check_layer(module: nn.Module) -> None:
    if isinstance(module, HeadParallelLayer):
        raise OptionError("a layer is distributed once, got a layer that is head-parallel already")
    check_supported(module)
    if module._compiled_call_impl is not None:
        raise OptionError(
            f"layers are distributed before they are compiled, got a compiled {type(module).__name__}; compile the "
            "model afterwards"
        )
    if module._listener is not None:
        raise OptionError("layers are distributed before they are observed, got an observed one; leave its session")


def _parallelism(layer: BaseAttention, ranks: MeshRanks, sequence_parallel: bool) -> HeadParallelism:
    layout = layer.layout
    split = HeadSplit(layout.num_heads, ranks.size)
    return HeadParallelism(
        ranks=ranks,
        split=split,
        layer_class=type(layer),
        layout=local_layout(layout, split.computed(ranks.rank)),
        shards=shards_of(layer, ranks.size, ranks.rank),
        sequence_parallel=sequence_parallel,
        maps=layer.num_maps // layout.num_heads,
        is_multi_query=isinstance(layout, HeadLayout) and layout.num_kv_heads == 1 and layout.num_heads > 1,
    )


def _facts(layer: BaseAttention, style: HeadParallel) -> dict[str, str]:
    """Return what all ranks must agree on."""
    facts = {name: repr(getattr(layer, name)) for name in LAYER_OPTIONS}
    facts |= {name: str(size) for name, size in layout_integers(layer.layout).items()}
    facts["positions"] = repr(layer.positions)
    facts["sequence_parallel"] = str(style.sequence_parallel)
    facts["src_data_rank"] = str(style.src_data_rank)
    for name, parameter in layer.named_parameters(remove_duplicate=False):
        facts[name] = f"{list(parameter.shape)} {parameter.dtype}"
    return facts
