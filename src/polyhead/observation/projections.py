"""Find the Q/K/V/O projection matrices of a model's heads from activations, without a table of model families.

One short call is traced. A linear layer whose output contains a head's value vectors holds that head's W_V in its
columns; the layer whose input is the concatenation of the head outputs holds W_O in its rows. Queries and keys are
compared at the first token, where rotary embeddings are the identity, and by norm at every token, which rotations
preserve. The matrix is None where the weight alone would not describe the head: if something in between (a norm of the
queries, a gate) breaks the match, or if the layer computes more than its weight and bias, as with an adapter. Only LoRA
of PEFT on the output projection is supported: it is added to the matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from polyhead.layers import MultiHeadAttention
from polyhead.layers.joint_projection import is_plain_linear
from polyhead.layers.multi_head.projected import ProjectedHeads
from polyhead.layers.variants.collaborative.layer import CollaborativeAttention
from polyhead.layers.variants.differential.layer import DifferentialAttention
from polyhead.layers.variants.routed.layer import RoutedHeads
from polyhead.layers.variants.talking import TalkingHeads
from polyhead.observation.collectors import BatchMetadata, CallRecorder
from polyhead.observation.evaluation_mode import evaluating
from polyhead.observation.output_projections import (
    has_plain_weight,
    is_linear,
    linear_matrix,
    output_matrix,
    wrapper_of,
)
from polyhead.observation.session import observe
from polyhead.observation.statistics import AttentionSite
from polyhead.ops.attended import Attended

# Relative tolerance for vectors that were rescaled or rounded to another dtype.
TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True, eq=False)
class HeadProjections:
    """Projection matrices of a site's heads, as stored in its layers; None where no layer matched.

    A query is x @ query[head], and a head's contribution is its output @ output[head]. A scale applied to the queries
    is included.
    """

    query: Tensor | None = None  # [heads, embed_dim, head_dim]
    key: Tensor | None = None  # [kv_heads, embed_dim, head_dim]
    value: Tensor | None = None  # [kv_heads, embed_dim, value_dim]
    output: Tensor | None = None  # [heads, value_dim, embed_dim]


def find_projections(model: nn.Module, run: Callable[[], object]) -> dict[AttentionSite, HeadProjections]:
    """Return the Q/K/V/O projections of every attention site that `run`, a short call of the model, executes.

    Args:
        model: the model.
        run: function without arguments that calls the model.
    """
    tracer = _Tracer(model, {name or type(module).__name__: module for name, module in model.named_modules()})
    session = observe(model, statistics=False, collect=[CallRecorder(tracer.record_attention)])
    with torch.no_grad(), evaluating(model), tracer.recording(model), session:
        run()
    tracer.materialised = session.materialised
    return {site: tracer.head_projections(site) for site in tracer.first_attended}


@dataclass(eq=False)
class _LinearCall:
    """Input and output of one call of a linear layer, [rows, features]."""

    module: nn.Module
    input: Tensor
    output: Tensor

    @property
    def matrix(self) -> Tensor | None:
        """The weight, [in, out]; None if the layer computes more than its weight and bias."""
        matrix, bias = linear_matrix(self.module), getattr(self.module, "bias", None)
        if has_plain_weight(self.module):
            computed = self.input.to(matrix.dtype) @ matrix
            computed = computed if bias is None else computed + bias.detach()
            if float((computed - self.output).double().norm()) > TOLERANCE * float(self.output.double().norm()):
                return None
        return matrix


@dataclass(eq=False)
class _Tracer:
    """Calls of linear layers, and the first attention call of each site with the number of linear calls before it."""

    model: nn.Module
    modules: Mapping[str, nn.Module]
    linear_calls: list[_LinearCall] = field(default_factory=list)
    first_attended: dict[AttentionSite, tuple[int, Attended]] = field(default_factory=dict)
    materialised: list[str] = field(default_factory=list)  # sites of hand-written attention

    def record_attention(
        self, site: AttentionSite, attended: Attended, non_padding: Tensor | None, metadata: BatchMetadata
    ) -> None:
        self.first_attended.setdefault(site, (len(self.linear_calls), attended))

    @contextmanager
    def recording(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as undo:
            for module in model.modules():
                if is_linear(module):
                    undo.callback(module.register_forward_hook(self._record).remove)
            yield

    def _record(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if len(inputs) and isinstance(inputs[0], Tensor) and isinstance(output, Tensor) and inputs[0].numel():
            self.linear_calls.append(
                _LinearCall(module, *(x.detach().reshape(-1, x.shape[-1]) for x in (inputs[0], output)))
            )

    def head_projections(self, site: AttentionSite) -> HeadProjections:
        module = self.modules.get(site.name)
        if getattr(module, "is_head_parallel", False):
            return HeadProjections()  # no rank has the matrices of all heads
        if isinstance(module, ProjectedHeads):
            return _of_projected(module) if _is_plain(module) else HeadProjections()
        if isinstance(module, RoutedHeads):
            return _of_routed(module)
        if isinstance(module, nn.MultiheadAttention):
            return _of_projected(MultiHeadAttention.from_torch(module))
        num_before, attended = self.first_attended[site]
        before, after = self.linear_calls[:num_before], self.linear_calls[num_before:]
        if site.name in self.materialised:  # hand-written attention is recorded after the output projection ran
            after = self.linear_calls
        output = self._matching_rows(after, _flatten_rows(attended.result.output), site.name)

        def projection(vectors: Tensor) -> Tensor | None:
            matrix = _matching_columns(before, _flatten_rows(vectors))
            # A layer that does not read the residual stream, as in latent attention, is only part of the projection.
            is_complete = matrix is None or output is None or matrix.shape[1] == output.shape[2]
            return matrix if is_complete else None

        return HeadProjections(projection(attended.query), projection(attended.key), projection(attended.value), output)

    def _matching_rows(self, calls: Sequence[_LinearCall], vectors: Tensor, site: str) -> Tensor | None:
        """Return the weight rows [heads, dim, out] of the one layer that read these vectors [rows, heads, dim]."""
        concatenated = vectors.flatten(1).double()
        matching: dict[nn.Module, _LinearCall] = {}
        for call in calls:
            inputs = call.input.double()
            is_comparable = inputs.shape == concatenated.shape and inputs.device == concatenated.device
            if is_comparable and float((inputs - concatenated).norm()) <= TOLERANCE * float(concatenated.norm()):
                matching.setdefault(call.module, call)
        if not len(matching):
            return None
        linear, call = next(iter(matching.items()))
        path = next(name for name, module in self.modules.items() if module is linear)
        # The second attention call of a module in one forward is the site `path#2`.
        attention = self.modules.get(site, self.modules.get(site.partition("#")[0]))
        wrapper = linear if attention is None else wrapper_of(self.model, path, {id(attention)})
        if wrapper is not linear:  # None, unless it is LoRA of PEFT
            matrix = output_matrix(linear, wrapper, vectors.device)
        else:
            matrix = call.matrix if len(matching) == 1 else None  # a second one is part of an adapter or a gate
        return None if matrix is None else matrix.unflatten(0, vectors.shape[1:])


def _is_plain(layer: ProjectedHeads) -> bool:
    """Return whether the projections of a layer compute nothing but their weights and biases."""
    projections = (getattr(layer, name, None) for name in ("q_proj", "k_proj", "v_proj", "out_proj"))
    return all(x is None or is_plain_linear(x) or is_parametrized(x) for x in projections)


def _of_projected(layer: ProjectedHeads) -> HeadProjections:
    if isinstance(layer, DifferentialAttention):  # each map has half of the channels and no output of its own
        query, key, value = _qkv_projections(layer)
        query, key = (torch.cat(x.chunk(2, -1)) for x in (query, key))
        return HeadProjections(query, key, torch.cat((value, value)))
    if isinstance(layer, CollaborativeAttention):
        query, key = (linear.weight.detach().mT for linear in (layer.q_proj, layer.k_proj))
        heads = layer.layout.num_heads
        value = layer.v_proj.weight.detach().unflatten(0, (heads, -1)).mT
        query = query * layer.mixing.detach()[:, None]
        return HeadProjections(query, key.expand(heads, -1, -1), value, _output_projection(layer))
    if isinstance(layer, TalkingHeads):  # each map reads the queries and keys of all heads
        query, key, value = _qkv_projections(layer)
        query = torch.einsum("hed,hg->gehd", query, layer.logits_mix.detach()).flatten(2)
        key = key.repeat_interleave(layer.layout.group_size, 0).transpose(0, 1).flatten(1)[None]
        return HeadProjections(query, key, value, _output_projection(layer))
    if layer.combine is not None:  # the output projection does not read single heads
        return HeadProjections(*_qkv_projections(layer))
    return HeadProjections(*_qkv_projections(layer), _output_projection(layer))


def _output_projection(layer: ProjectedHeads) -> Tensor:
    """Return the output projection, [heads, value_dim, embed_dim]."""
    return layer.out_proj.weight.detach().mT.unflatten(0, (layer.layout.num_heads, -1))


def _qkv_projections(layer: ProjectedHeads) -> tuple[Tensor, Tensor, Tensor]:
    """Return the query, key and value projections, each [heads, embed_dim, dim]."""
    layout = layer.layout
    parts = ((layer.q_proj, layout.num_heads), (layer.k_proj, layout.num_kv_heads), (layer.v_proj, layout.num_kv_heads))
    query, key, value = (linear.weight.detach().unflatten(0, (size, -1)).mT for linear, size in parts)
    if layout.key_heads is not None:  # with uneven groups, collectors receive one key and value per head
        key, value = key[list(layout.key_heads)], value[list(layout.key_heads)]
    return query, key, value


def _of_routed(layer: RoutedHeads) -> HeadProjections:
    """Return the projections of routed heads; a head that reads several KV heads becomes one row per KV head."""
    query = layer.query_weight.detach().unflatten(2, (layer.rows_per_head, -1)).permute(2, 0, 1, 3).flatten(0, 1)
    output = layer.output_weight.detach().unflatten(1, (layer.rows_per_head, -1)).transpose(0, 1).flatten(0, 1)
    key, value = (
        linear.weight.detach().unflatten(0, (layer.layout.num_kv_heads, -1)).mT
        for linear in (layer.k_proj, layer.v_proj)
    )
    return HeadProjections(query, key, value, output)


def _flatten_rows(x: Tensor) -> Tensor:
    """Reshape [batch, heads, tokens, dim] to [rows, heads, dim]."""
    return x.detach().transpose(1, 2).flatten(0, 1)


def _matching_columns(calls: Sequence[_LinearCall], vectors: Tensor) -> Tensor | None:
    """Return the weight columns [heads, in, dim] of the latest layer that output these vectors [rows, heads, dim]."""
    count, dim = vectors.shape[1:]
    for call in reversed(calls):
        is_comparable = call.output.shape[0] == vectors.shape[0] and call.output.device == vectors.device
        if not is_comparable or call.output.shape[1] < dim:
            continue
        starts = _find_windows(call.output[0], vectors[0])
        if len(starts) < count:
            continue
        windows = torch.stack([call.output[:, start : start + dim] for start in starts], 1)
        ratio = vectors.double().norm(dim=-1) / windows.double().norm(dim=-1)
        if bool((ratio / ratio[0, 0] - 1).abs().max() <= TOLERANCE):
            scale, matrix = float(ratio[0, 0]), call.matrix
            if matrix is None:
                return None
            columns = torch.stack([matrix[:, start : start + dim] for start in starts])
            return columns if abs(scale - 1) <= TOLERANCE else columns * scale
    return None


def _find_windows(row: Tensor, vectors: Tensor) -> list[int]:
    """Return where in a row positive multiples of the vectors [heads, dim] start, for the vectors that occur in it."""
    windows, targets = row.double().unfold(0, vectors.shape[1], 1), vectors.double()
    dots = targets @ windows.mT  # [vectors, offsets]
    squared_norms = windows.square().sum(-1) * targets.square().sum(-1, keepdim=True)
    # Squared sine of the angle between the two.
    squared_sine = (1 - dots.square() / squared_norms.clamp_min(torch.finfo(torch.float64).tiny)).clamp_min(0)
    least, best = torch.where(dots > 0, squared_sine, 1.0).min(-1)
    return best[least <= TOLERANCE**2].tolist()
