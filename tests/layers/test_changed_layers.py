"""A layer computes with the options, weights and modules it has at the call, and leaves a cache whole if it fails."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from polyhead import KVCache, LatentAttention, Mask, MultiHeadAttention
from polyhead.errors import CacheError, OptionError
from polyhead.layers.kv_cache import GrowingCache, LatentCache, PagedCache, PreallocatedCache, RollingCache
from polyhead.layers.positions import ALiBi, QuadraticRelative1D, T5Bias
from polyhead.layers.transformer import LanguageModel
from polyhead.layers.variants import (
    CollaborativeAttention,
    DifferentialAttention,
    GroupedHeads,
    HeadMix,
    RoutedHeads,
    TalkingHeads,
)

TOKENS = torch.randn(2, 7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def built(**options: object) -> MultiHeadAttention:
    torch.manual_seed(0)
    return MultiHeadAttention(12, 4, causal=True, dtype=torch.float64, **options).eval()  # type: ignore[arg-type]


CHANGES: dict[str, Callable[[], object]] = {
    "softcap": lambda: 0.5,
    "mask": lambda: Mask.window(2),
    "sinks": lambda: nn.Parameter(torch.tensor([1.0, 0.0, -1.0, 2.0], dtype=torch.float64)),
    "gate_proj": lambda: nn.Linear(12, 4, dtype=torch.float64),
    "positions": lambda: ALiBi(4),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_option_that_is_set_later_counts_from_the_next_call(name: str) -> None:
    layer = built()
    before = layer(TOKENS).output
    setattr(layer, name, CHANGES[name]())
    changed = layer(TOKENS).output
    torch.testing.assert_close(changed, layer(TOKENS, backend="reference").output)
    assert not torch.allclose(changed, before)
    setattr(layer, name, Mask.causal() if name == "mask" else None)
    torch.testing.assert_close(layer(TOKENS).output, before)


def test_a_causal_edge_that_is_set_or_removed_later_counts() -> None:
    layer = built()
    causal = layer(TOKENS).output
    layer.mask = None
    full = layer(TOKENS).output
    torch.testing.assert_close(full, layer(TOKENS, backend="reference").output)
    assert not torch.allclose(full, causal)
    layer.mask = Mask.causal()
    torch.testing.assert_close(layer(TOKENS).output, causal)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def patched(linear: nn.Linear) -> None:
    forward = linear.forward
    linear.forward = lambda x: 2 * forward(x)  # type: ignore[method-assign]


def swapped(linear: nn.Linear) -> None:
    linear.__class__ = Doubled


@pytest.mark.parametrize("change", [patched, swapped])
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "out_proj"])
def test_a_projection_whose_forward_is_replaced_is_called(name: str, change: Callable[[nn.Linear], None]) -> None:
    layer, doubled = built(), built()
    layer(TOKENS)
    change(layer.get_submodule(name))  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in doubled.get_submodule(name).parameters():
            parameter.mul_(2)
    torch.testing.assert_close(layer(TOKENS).output, doubled(TOKENS).output)


def test_a_forward_of_every_linear_layer_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, doubled = built(), built()
    with torch.no_grad():
        for parameter in doubled.parameters():
            parameter.mul_(2)
    expected = doubled(TOKENS).output
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * forward(self, x))
    torch.testing.assert_close(layer(TOKENS).output, expected)


def test_the_absorbed_form_calls_a_replaced_forward() -> None:
    torch.manual_seed(0)
    layer = LatentAttention(12, 4, kv_lora_rank=3, bias=False, causal=True, dtype=torch.float64).eval()
    before = layer(TOKENS, form="expanded").output
    patched(layer.kv_b_proj)
    cache = LatentCache(value_dim=3)
    with torch.no_grad():
        first, rest = (layer(x, cache=cache).output for x in TOKENS.split([6, 1], 1))
    after = layer(TOKENS, form="expanded").output
    assert not torch.allclose(after, before)
    torch.testing.assert_close(torch.cat([first, rest], 1), after)


def test_hooks_of_all_modules_in_the_backward_are_called() -> None:
    called: list[str] = []
    handle = nn.modules.module.register_module_full_backward_hook(lambda m, _, __: called.append(type(m).__name__))
    try:
        layer = nn.Sequential(built())
        x = TOKENS.clone().requires_grad_()
        q, k, v = layer[0]._project_self(x)
        (q.sum() + k.sum() + v.sum()).backward()
    finally:
        handle.remove()
    assert called.count("Linear") == 3


@pytest.mark.parametrize("positions", [ALiBi, T5Bias])
def test_a_bias_by_distance_goes_as_far_as_stated_positions(positions: type[ALiBi] | type[T5Bias]) -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(12, 4, causal=True, positions=positions(4), dtype=torch.float64).eval()
    for parameter in layer.positions.parameters():
        nn.init.normal_(parameter)
    tokens = torch.randn(1, 31, 12, dtype=torch.float64)
    places = torch.tensor([0, 7, 19, 29])
    kept = torch.zeros(31, dtype=torch.bool)
    kept[places] = True
    expected = layer(tokens, mask=Mask.dense(kept[None])).output[:, places]
    torch.testing.assert_close(layer(tokens[:, places], mask=Mask.positions(places, places)).output, expected)
    with pytest.raises(OptionError, match="pass them on the CPU"):
        layer(tokens[:, places], mask=Mask.positions(places.to("meta"), places.to("meta")))


FRESH: dict[str, Callable[[], nn.Module]] = {
    "multi-head": lambda: MultiHeadAttention(12, 4, qk_norm="layer", output_gate="head", sinks=True),
    "grouped": lambda: GroupedHeads(12, 4, num_groups=2, qk_norm="rms"),
    "mixed": lambda: HeadMix(12, 4, row_attention="projected", qk_norm="rms"),
    "talking": lambda: TalkingHeads(12, 4, qk_norm="layer"),
    "differential": lambda: DifferentialAttention(12, 3, sinks=True),
    "collaborative": lambda: CollaborativeAttention(12, 4, shared_dim=5, sinks=True),
    "latent": lambda: LatentAttention(12, 4, kv_lora_rank=5, q_lora_rank=3, sinks=True),
    "routed": lambda: RoutedHeads(12, 4, shape="full", top_k=2, qk_norm="layer", sinks=True),
    "convolutional": lambda: MultiHeadAttention(
        12, 3, value_dim=12, qk_norm="layer", init="conv", positions=QuadraticRelative1D(3)
    ),
}


@pytest.mark.parametrize("name", FRESH)
def test_resetting_the_parameters_of_an_empty_layer_makes_it_a_new_one(name: str) -> None:
    expected, layer = FRESH[name]().state_dict(), FRESH[name]()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(torch.nan)
    layer.reset_parameters()
    for key, value in layer.state_dict().items():
        assert value.isfinite().all(), key
        if "norm" in key:
            assert torch.equal(value, expected[key])


# ---- caches


def caches(layer: MultiHeadAttention) -> Iterator[KVCache]:
    options = {"batch_size": 2, "dtype": torch.float64}
    yield GrowingCache()
    yield GrowingCache(batch_size=2)
    yield PreallocatedCache.for_layout(layer.layout, capacity=9, **options)  # type: ignore[arg-type]
    yield PagedCache.for_layout(layer.layout, num_pages=9, page_size=2, **options)  # type: ignore[arg-type]
    yield RollingCache.for_layout(layer.layout, window=9, **options)  # type: ignore[arg-type]


FAILING: dict[str, dict[str, object]] = {
    "mask": {"mask": Mask.dense(torch.ones(11, 11, dtype=torch.bool))},
    "backend": {"backend": "fused"},
    "gate": {"head_gate": torch.ones(3)},
    "seed": {"seed": "one"},
}


@pytest.mark.parametrize("reason", FAILING)
@pytest.mark.parametrize("first", [0, 3])
@torch.no_grad()
def test_a_call_that_fails_leaves_the_cache_as_it_was(reason: str, first: int) -> None:
    layer = built()
    for cache in caches(layer):
        if first:
            layer(TOKENS[:, :first], cache=cache)
        before = cache.lengths
        with pytest.raises((ValueError, RuntimeError, TypeError)):
            layer(TOKENS[:, first:], cache=cache, **FAILING[reason])
        assert cache.lengths == before
        output = layer(TOKENS[:, first:], cache=cache).output
        torch.testing.assert_close(output, layer(TOKENS).output[:, first:])


@torch.no_grad()
def test_a_rolling_cache_goes_on_after_a_failed_step_and_refuses_after_a_failed_block_it_cannot_take_back() -> None:
    layer = built(window=3)
    expected = layer(TOKENS).output
    cache = RollingCache.for_layout(layer.layout, window=3, batch_size=2, dtype=torch.float64)
    layer(TOKENS[:, :5], cache=cache)
    with pytest.raises(ValueError, match="gate"):
        layer(TOKENS[:, 5:6], cache=cache, head_gate=torch.ones(3))
    torch.testing.assert_close(layer(TOKENS[:, 5:6], cache=cache).output, expected[:, 5:6])
    cache.reset()
    layer(TOKENS[:, :4], cache=cache)
    with pytest.raises(ValueError, match="gate"):
        layer(TOKENS[:, 4:], cache=cache, head_gate=torch.ones(3))
    with pytest.raises(CacheError, match="reset the cache"):
        layer(TOKENS[:, 4:], cache=cache)
    cache.reset()
    torch.testing.assert_close(layer(TOKENS, cache=cache).output, expected)


@torch.no_grad()
def test_a_block_that_fails_leaves_the_caches_of_all_blocks_as_they_were() -> None:
    torch.manual_seed(0)
    model = LanguageModel(13, 8, 2, 2).double().eval()
    ids = torch.tensor([[3, 5, 7, 11, 2]])
    caches = model.new_caches("growing", 1)
    model(ids[:, :3], caches=caches)
    handle = model.blocks[1].feed_forward.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(ids[:, 3:], caches=caches)
    handle.remove()
    assert [cache.lengths for cache in caches] == [(3,), (3,)]
    torch.testing.assert_close(model(ids[:, 3:], caches=caches), model(ids)[:, 3:])


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt
