"""Work of a layer, piece by piece: it adds up to the counts, and its sizes are those of the operators that run."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import polyhead
from polyhead import Mask
from polyhead.costs import (
    AttentionCore,
    Product,
    Traffic,
    Work,
    Workload,
    estimate_cost,
    estimate_memory,
    layer_work,
)
from polyhead.costs.descriptions import DESCRIPTIONS
from polyhead.costs.work import backward_pieces
from polyhead.errors import DtypeError, MaskError, OptionError, ShapeError
from polyhead.layers.config import CONFIGS, AttentionConfig, build_attention
from polyhead.layers.latent.config import LatentConfig
from polyhead.layers.multi_head.config import MultiHeadConfig
from polyhead.layers.positions.config import RotaryConfig
from polyhead.layers.variants import GroupedHeadsConfig, HeadMixConfig
from polyhead.layers.variants import mixing as mixing_layer
from polyhead.layers.variants.collaborative.layer import CollaborativeConfig
from polyhead.layers.variants.differential.layer import DifferentialConfig
from polyhead.layers.variants.routed.config import RoutedConfig
from polyhead.layers.variants.talking import TalkingHeadsConfig
from tests.costs.pytorch_counts import BATCH, EMBED, HEADS, QUERIES, WORKLOADS, workloads


def made(kind: type, **options: Any) -> AttentionConfig:
    config = kind(EMBED, HEADS, **options)
    assert isinstance(config, AttentionConfig)
    return config


LATENT = {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "value_head_dim": 5}
LAYERS: dict[str, AttentionConfig] = {
    "multi-head": made(MultiHeadConfig),
    "one head": MultiHeadConfig(EMBED, 1),
    "grouped": made(MultiHeadConfig, num_kv_heads=2, value_dim=7),
    "multi-query, rotary": made(MultiHeadConfig, num_kv_heads=1, positions=RotaryConfig(), qk_norm="rms"),
    "causal": made(MultiHeadConfig, causal=True, head_dim=10),
    "window": made(MultiHeadConfig, causal=True, window=4),
    "sinks and a gate": made(MultiHeadConfig, sinks=True, output_gate="channel"),
    "uneven": made(MultiHeadConfig, key_heads=(0, 0, 1, 2, 2, 2)),
    "grouped heads": made(GroupedHeadsConfig, num_groups=3, num_kv_heads=2),
    "head mix": made(HeadMixConfig, num_rows=4),
    "head mix, full": made(HeadMixConfig, mix="full", row_attention=None, causal=True),
    "head mix, projected": made(HeadMixConfig, num_rows=5, row_attention="projected"),
    "latent": made(LatentConfig, **LATENT),
    "latent, all": made(LatentConfig, **LATENT, q_lora_rank=9, qk_rope_head_dim=4, positions=RotaryConfig()),
    "latent, expanded": made(LatentConfig, **LATENT, form="expanded", causal=True),
    "latent, absorbed": made(LatentConfig, **LATENT, form="absorbed", sinks=True),
    "collaborative": made(CollaborativeConfig, shared_dim=10, causal=True),
    "differential": made(DifferentialConfig, num_kv_heads=2, sinks=True),
    "routed": made(RoutedConfig, top_k=2, causal=True),
    "routed, full": made(RoutedConfig, shape="full", top_k=2, num_kv_heads=2, always_on=2, sinks=True),
    "talking": made(TalkingHeadsConfig, causal=True),
}
layers = pytest.mark.parametrize("config", LAYERS.values(), ids=LAYERS)
FUSED = ("scores", "values")


def test_every_kind_of_layer_is_described():
    assert {type(config) for config in LAYERS.values()} == set(CONFIGS._classes.values()) == set(DESCRIPTIONS)


@workloads
@layers
def test_the_pieces_add_up_to_the_counts(config, work):
    cost, found = estimate_cost(config, work), layer_work(config, work)
    assert found.flops == found.matrix_flops.total == cost.matrix_flops
    assert found.exponentials == cost.exponentials
    for stage in ("projection", "output"):
        assert found.only(stage).flops == getattr(cost.forward, stage) + getattr(cost.backward, stage)
    attention = sum(getattr(flops, name) for flops in (cost.forward, cost.backward) for name in FUSED)
    mixing = cost.forward.mixing + cost.backward.mixing
    assert found.only("attention", "mixing").flops == attention + mixing


@layers
def test_a_mask_of_the_call_spares_pairs_as_it_does_in_the_counts(config):
    work, mask = Workload.training_step(QUERIES, batch=BATCH), Mask.window(3)
    assert layer_work(config, work, mask=mask).flops == estimate_cost(config, work, mask=mask).matrix_flops


@workloads
@layers
def test_memory_of_every_arrangement_is_made_of_what_it_keeps(config, work):
    for form in ("fused", "materialised"):
        found = estimate_memory(config, work, form=form)
        assert min(found.to_dict().values()) >= 0
        assert found.parameters == 2 * estimate_cost(config, work).parameters
        assert found.cache == (estimate_cost(config, work).cache_bytes if work.past or work.remembered else 0)
        assert (found.kept > 0) == (found.gradients > 0) == work.training
        written = estimate_cost(config, work, form=form).weights_bytes
        assert (written > 0) == (form == "materialised")
        copies = (6 if work.training else 3) * written
        # Of several attentions that follow one another, one is at work at a time.
        several = isinstance(config, DifferentialConfig) or getattr(config, "row_attention", None) is not None
        several |= getattr(config, "key_heads", None) is not None and not work.past  # few queries, by group size
        assert (0 < found.weights < copies) if several and written else found.weights == copies


class _Exponentials(TorchDispatchMode):
    """The number of exponentials of softmaxes that run; those of rotary frequencies and lambdas have one axis."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += result.numel() if func is torch.ops.aten.exp.default and result.dim() > 1 else 0
        return result


@layers
def test_exponentials_are_those_of_the_formula(monkeypatch, config):
    monkeypatch.setattr(mixing_layer, "attention", partial(polyhead.attention, backend="reference"))
    # Without a mask, under which the formula leaves out blocks of routed rows.
    config = dataclasses.replace(config, backend="reference", causal=False, window=None)
    layer = build_attention(config)
    with torch.no_grad(), _Exponentials() as exponentials:
        layer(torch.randn(BATCH, QUERIES, EMBED))
    assert estimate_cost(config, WORKLOADS["forward"], form="materialised").exponentials == exponentials.count


class _RotaryTransfers(TorchDispatchMode):
    """Bytes that the operators of RoPE on queries and keys read and write, without cos and sin, and their number."""

    FUNCTIONS = (torch.ops.aten.roll.default, torch.ops.aten.mul.Tensor, torch.ops.aten.addcmul.default)
    FUNCTIONS += (torch.ops.aten.cat.default, torch.ops.aten._to_copy.default)

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self.FUNCTIONS and result.dim() == 4:
            tensors = [x for x in (*tree_leaves(args), result) if isinstance(x, torch.Tensor) and x.dim() == 4]
            self.bytes += sum(x.nbytes for x in tensors)
            self.launches += 1
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary_dim", [2, 6, 8])
def test_rotary_passes_are_those_of_the_rotated_channels(rotary_dim, dtype):
    config = MultiHeadConfig(48, 6, num_kv_heads=2, positions=RotaryConfig(rotary_dim=rotary_dim))
    positions = build_attention(config).positions
    for work in (WORKLOADS["forward"], WORKLOADS["cross"]):
        heads = [torch.randn(BATCH, n, t, 8, dtype=dtype) for n, t in ((6, work.queries), (2, work.keys))]
        with _RotaryTransfers() as transfers:
            for each in heads:
                positions(each)
        found = layer_work(config, work, dtype=dtype).only("positions")
        assert (found.bytes, found.launches) == (transfers.bytes, transfers.launches)


CONTIGUOUS = torch.contiguous_format


class _Transfers(TorchDispatchMode):
    """Elements of tensors of one size that elementwise operators read and write."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.count, self.launches = elements, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.addcmul.default, torch.ops.aten.clone.default, torch.ops.aten.mul.Tensor):
            tensors = [x for x in (*args, result) if isinstance(x, torch.Tensor) and x.numel() == self.elements]
            self.count += len(tensors)
            self.launches += len(tensors) > 0
        return result


def test_the_difference_of_two_maps_its_norm_and_its_scale_are_passes_over_memory(monkeypatch):
    config = LAYERS["differential"]
    elements = BATCH * QUERIES * config.num_heads * config.layout.value_dim
    # The norm as one kernel, as on a GPU: it reads once and writes once.
    monkeypatch.setattr(torch.nn.functional, "rms_norm", lambda x, *_, **__: x.clone(memory_format=CONTIGUOUS))
    with torch.no_grad(), _Transfers(elements) as transfers:
        build_attention(config)(torch.randn(BATCH, QUERIES, EMBED))
    work = layer_work(config, WORKLOADS["forward"], dtype=torch.float32)
    (passes,) = [x for x in work.pieces if isinstance(x, Traffic) and x.launches == 3]
    assert (passes.bytes, passes.launches) == (4 * elements * transfers.count, transfers.launches)
    assert transfers.count == 7


class _Shapes(TorchDispatchMode):
    """The sizes of the matrix products that run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            left, right = args[-2:]
            self.found.append((left.shape[0], right.shape[1], left.shape[1]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["multi-head", "one head", "grouped", "causal"])
def test_products_have_the_sizes_of_those_that_run(name):
    config = LAYERS[name]
    work = layer_work(config, WORKLOADS["forward"])
    expected = [(x.rows, x.columns, x.inner) for x in work.pieces if isinstance(x, Product)]
    layer = build_attention(config)
    with torch.no_grad(), _Shapes() as shapes:
        layer(torch.randn(BATCH, QUERIES, EMBED))
    assert shapes.found == expected


def test_the_two_gradients_of_a_product_have_its_flops_and_each_the_shape_of_its_factor():
    product = Product("output", 5, 7, 11, torch.float32, 3)
    left, right = product.gradients
    assert (left.rows, left.columns, left.inner) == (5, 11, 7)
    assert (right.rows, right.columns, right.inner) == (11, 7, 5)
    assert left.flops == right.flops == product.flops == 2 * 3 * 5 * 7 * 11
    assert product.bytes == left.bytes == right.bytes == 4 * 3 * (5 * 11 + 11 * 7 + 5 * 7)


@pytest.mark.parametrize(("queries", "keys"), [(1, 13), (7, 7), (5, 13), (13, 5)])
def test_visible_keys_are_those_that_some_query_sees(queries, keys):
    for left, right, first in itertools.product((None, 0, 2, 30), (None, 0, 1, 30), (0, 2)):
        if left is None and first:
            continue
        core = AttentionCore("forward", 1, 2, 1, queries, keys, 3, 5, torch.float32, left, right, first_keys=first)
        seen, pairs = set(), 0
        for query, key in itertools.product(range(queries), range(keys)):
            distance = key - (query + keys - queries)
            near = left is None or distance >= -left or key < first
            if near and (right is None or distance <= right):
                seen.add(key)
                pairs += 1
        assert (core.visible_keys, core.pairs) == (len(seen), pairs), (left, right, first)


def test_a_core_reads_keys_once_for_a_group_and_latents_once_for_keys_and_values():
    core = AttentionCore("decode", 3, 8, 2, 1, 100, 16, 16, torch.bfloat16, right=0)
    rows = 2 * 3 * 8 * (16 + 16)
    assert core.bytes == rows + 2 * 3 * 2 * 100 * (16 + 16)
    assert dataclasses.replace(core, left=9).bytes == rows + 2 * 3 * 2 * 10 * (16 + 16)
    assert dataclasses.replace(core, cache_dtype=torch.int8).bytes == rows + 3 * 2 * 100 * (16 + 16)
    assert dataclasses.replace(core, shared=True).bytes == rows + 2 * 3 * 2 * 100 * 16


def test_decoding_reads_the_cache_and_all_weights_once():
    config = MultiHeadConfig(512, 8, num_kv_heads=2, bias=False, causal=True)
    work = layer_work(config, Workload.decode(past=4095, batch=1))
    cost = estimate_cost(config, Workload.decode(past=4095, batch=1))
    assert work.phase == "decode"
    assert [piece.direction for piece in work.pieces if isinstance(piece, AttentionCore)] == ["decode"]
    weights = 2 * cost.parameters
    assert cost.cache_bytes + weights < work.bytes < 1.01 * (cost.cache_bytes + weights)
    assert work.intensity < 10 < layer_work(config, Workload.prefill(4096)).intensity


def test_a_promise_of_finite_keys_spares_one_pass_in_16_bits_and_two_in_32():
    numbers = BATCH * QUERIES * EMBED
    of_keys_and_values, of_outputs = 2 * numbers, numbers
    # In 16 bits outputs are read, in 32 bits keys, values and outputs are read and written.
    spared = {torch.bfloat16: (2 * of_outputs, 1), torch.float32: (4 * 2 * (of_keys_and_values + of_outputs), 3)}
    for dtype, (size, launches) in spared.items():
        careful, trusting = (
            layer_work(MultiHeadConfig(EMBED, HEADS, causal=True, finite=finite), WORKLOADS["forward"], dtype=dtype)
            for finite in (False, True)
        )
        assert careful.bytes - trusting.bytes == size
        assert careful.launches - trusting.launches == launches


def test_a_training_step_lays_projections_and_their_gradients_side_by_side():
    config = MultiHeadConfig(EMBED, HEADS, num_kv_heads=2, causal=True)
    work = layer_work(config, WORKLOADS["training"])
    columns = (HEADS + 2 * 2) * 4
    copies = [piece for piece in work.only("projection").pieces if isinstance(piece, Traffic)]
    assert [piece.bytes for piece in copies] == [2 * 2 * columns * EMBED, 2 * 2 * BATCH * QUERIES * columns]
    # What keeps NaN in its place hands a gradient on as it is: two passes in the forward and none in the backward.
    guards = [piece for piece in work.only("attention").pieces if isinstance(piece, Traffic)]
    assert len(guards) == 2
    rotated = Traffic("positions", 100)
    assert [piece.bytes for piece in backward_pieces([rotated])] == [200]


def test_layers_in_a_row_cost_so_many_times_as_much():
    one, many = (layer_work(LAYERS["grouped"], WORKLOADS["training"], layers=count) for count in (1, 5))
    for name in ("flops", "bytes", "exponentials", "launches"):
        assert getattr(many, name) == 5 * getattr(one, name) > 0
    assert many.intensity == one.intensity
    assert Work("decode", ()).intensity == 0.0


def test_what_cannot_be_is_refused():
    with pytest.raises(OptionError, match="rows must be a non-negative integer, got -1"):
        Product("output", -1, 2, 3, torch.float32)
    with pytest.raises(OptionError, match=r"bytes must be a non-negative integer, got 2\.5"):
        Traffic("output", 2.5)
    with pytest.raises(DtypeError, match="got 'bfloat16'"):
        Product("output", 1, 2, 3, "bfloat16")
    with pytest.raises(OptionError, match="direction must be one of forward, backward, decode; got 'sideways'"):
        AttentionCore("sideways", 1, 1, 1, 1, 1, 1, 1, torch.float32)
    with pytest.raises(OptionError, match="phase must be one of training, prefill, decode; got 'rest'"):
        Work("rest", ())
    with pytest.raises(OptionError, match="got cached=False with past 5"):
        layer_work(LAYERS["grouped"], WORKLOADS["decode"], cached=False)
    with pytest.raises(OptionError, match="got cached=True for training"):
        layer_work(LAYERS["grouped"], WORKLOADS["training"], cached=True)
    with pytest.raises(MaskError, match="a causal mask or a sliding window"):
        layer_work(LAYERS["grouped"], WORKLOADS["forward"], mask=Mask.lengths([3, 2, 7]))
    with pytest.raises(ShapeError, match=r"inputs of width 24, 10 and 10; count it with Workload\.cross"):
        layer_work(made(MultiHeadConfig, key_input_dim=10, value_input_dim=10), WORKLOADS["forward"])
