"""Heads over ranks: everything equals the same layer in one process, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import polyhead
from polyhead import Mask, MultiHeadAttention
from polyhead.errors import MaskError, OptionError, ShapeError
from polyhead.layers import LatentAttention
from polyhead.layers.blocks import DecoderBlock, FeedForward
from polyhead.layers.config import config_of
from polyhead.layers.kv_cache import GrowingCache
from polyhead.layers.positions import ALiBi, Learned, Rotary, T5Bias
from polyhead.layers.transformer import LanguageModel
from polyhead.layers.variants import (
    CollaborativeAttention,
    DifferentialAttention,
    GroupedHeads,
    HeadMix,
    RoutedHeads,
    TalkingHeads,
)
from polyhead.observation import AttentionMaps
from polyhead.parallel import (
    FeedForwardParallel,
    HeadParallel,
    context_parallel,
    head_parallel_plan,
    shard_positions,
    shard_sequence,
)
from tests.ranks import Failure, Ranks

WIDTH = 23
BATCH, LENGTH = 2, 7
F64 = torch.float64
FULL = StateDictOptions(full_state_dict=True)
close = torch.testing.assert_close
EXACT: dict[str, float] = {"rtol": 1e-11, "atol": 1e-12}


def tp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def multi_head(heads: int, kv_heads: int | None = None, **options: Any) -> MultiHeadAttention:
    return perturbed(MultiHeadAttention(WIDTH, heads, num_kv_heads=kv_heads, head_dim=4, **options, dtype=F64))


def perturbed(layer: nn.Module) -> Any:
    """Give every parameter the same values on all ranks, so that no zero or one of an initialisation hides an error."""
    generator = torch.Generator().manual_seed(2)
    for parameter in layer.parameters():
        parameter.data = 0.3 + 0.4 * torch.randn(parameter.shape, dtype=F64, generator=generator)
    return layer


def distributed(layer: nn.Module, mesh: DeviceMesh, **options: Any) -> Any:
    """Return the layer over the ranks, with the weights of rank 0 alone."""
    copied = copy.deepcopy(layer)
    if mesh.get_local_rank():
        for parameter in copied.parameters():
            parameter.data.normal_()
    return parallelize_module(copied, mesh, HeadParallel(**options))


def tokens(length: int = LENGTH, width: int = WIDTH, seed: int = 3) -> Tensor:
    return torch.randn(BATCH, length, width, dtype=F64, generator=torch.Generator().manual_seed(seed))


def whole_gradient(parameter: Tensor, like: Tensor) -> Tensor:
    """Return the gradient of a distributed parameter; that of the zero heads must be zero."""
    assert isinstance(parameter.grad, DTensor)
    gradient = parameter.grad.full_tensor()
    whole = gradient[tuple(slice(size) for size in like.shape)]
    assert gradient.count_nonzero() == whole.count_nonzero()
    return whole


def loss_of(result: Any) -> Tensor:
    weight = torch.randn(result.output.shape, dtype=F64, generator=torch.Generator().manual_seed(5))
    loss = (result.output * weight).sum()
    if result.statistics is not None:  # a different factor for each head
        for name, rows in result.statistics.items():
            if name != "visible_keys":
                heads = torch.arange(1, rows.shape[1] + 1, dtype=F64)
                loss = loss + 0.1 * (rows.nan_to_num(0, 0, 0) * heads[:, None]).sum()
    return loss


def compare(reference: Any, layer: Any, *inputs: Tensor, **options: Any) -> None:
    """Compare results and the gradients of inputs and parameters with those of the whole layer."""
    mine = [x.clone().requires_grad_() for x in inputs]
    theirs = [x.clone().requires_grad_() for x in inputs]
    requested = {"statistics": True, "weights": True, "logsumexp": True, **options}
    expected, actual = reference(*theirs, **requested), layer(*mine, **requested)
    close(actual.output, expected.output, **EXACT)
    close(actual.weights, expected.weights, **EXACT)
    close(actual.logsumexp, expected.logsumexp, **EXACT)
    assert [*dict(actual.statistics.items())] == [*dict(expected.statistics.items())]
    for name, rows in expected.statistics.items():
        close(getattr(actual.statistics, name), rows, **EXACT)
    loss_of(expected).backward()
    loss_of(actual).backward()
    for x, y in zip(mine, theirs, strict=True):
        close(x.grad, y.grad, **EXACT)
    names = dict(reference.named_parameters())
    assert names.keys() == dict(layer.named_parameters()).keys()
    for name, parameter in layer.named_parameters():
        if names[name].grad is not None:
            close(whole_gradient(parameter, names[name]), names[name].grad, **EXACT, msg=lambda m, n=name: f"{n}: {m}")
    compare_states(reference, layer)


def compare_steps(reference: Any, layer: Any) -> None:
    """Compare the parameters after a step of AdamW with the gradients that `compare` left."""
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    actual = nn.utils.clip_grad_norm_(layer.parameters(), 0.1)
    assert isinstance(actual, DTensor)
    close(actual.full_tensor(), expected, **EXACT)
    for module in (reference, layer):
        torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1, foreach=True).step()
    compare_states(reference, layer)


def compare_states(reference: nn.Module, layer: nn.Module) -> None:
    expected, actual = reference.state_dict(), get_model_state_dict(layer, options=FULL)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        close(actual[name], value, **EXACT)


def cases(world: int) -> dict[str, Callable[[], Any]]:
    """Return layers of every kind whose heads divide the ranks, do not, or are fewer."""

    def latent(heads: int, **options: Any) -> Any:
        sizes: dict[str, Any] = {"kv_lora_rank": 5, "qk_nope_head_dim": 4, "value_head_dim": 3}
        return perturbed(LatentAttention(WIDTH, heads, **sizes, **options, causal=True, dtype=F64))

    def differential(heads: int, **options: Any) -> Any:
        return perturbed(DifferentialAttention(WIDTH, heads, head_dim=4, causal=True, **options, dtype=F64))

    def collaborative(heads: int, **options: Any) -> Any:
        return perturbed(CollaborativeAttention(WIDTH, heads, head_dim=4, shared_dim=6, **options, dtype=F64))

    heads = 2 * world
    return {
        "mha": lambda: multi_head(heads, causal=True),
        "mha without biases": lambda: multi_head(heads, bias=False),
        "output bias alone": lambda: multi_head(heads, bias=False, output_bias=True, value_dim=3),
        "gqa": lambda: multi_head(heads, world, causal=True),
        "fewer kv heads than ranks": lambda: multi_head(heads, max(world // 2, 1), qk_norm="rms"),
        "mqa": lambda: multi_head(heads, 1, sinks=True, positions=Rotary(4), causal=True),
        "uneven": lambda: multi_head(world + 1, sinks=True, output_gate="channel", positions=ALiBi(world + 1)),
        "uneven gqa": lambda: multi_head(6, 2, output_gate="head", positions=T5Bias(6), softcap=3.0),
        "uneven mqa": lambda: multi_head(3, 1, qk_norm="layer", window=3, causal=True),
        "fewer heads than ranks": lambda: multi_head(world - 1, positions=ALiBi(world - 1, learnable=True)),
        "key_heads": lambda: multi_head(5, key_heads=(0, 1, 0, 0, 1), positions=Learned(11, WIDTH)),
        "latent": lambda: latent(heads, positions=Rotary(2), sinks=True),
        "latent absorbed": lambda: latent(3, q_lora_rank=6, positions=Rotary(2), form="absorbed"),
        "differential": lambda: differential(heads, sinks=True, positions=Rotary(2)),
        "differential uneven": lambda: differential(3, sinks=True, num_kv_heads=1),
        "collaborative": lambda: collaborative(3, positions=ALiBi(3)),
    }


def compare_layers() -> None:
    mesh = tp_mesh()
    world = dist.get_world_size()
    for name, build in cases(world).items():
        if world < 4 and name not in ("gqa", "uneven", "uneven mqa", "latent", "differential uneven"):
            continue
        try:
            reference = build()
            layer = distributed(reference, mesh)
            compare(reference, layer, tokens())
            if name == "uneven gqa":
                compare_steps(reference, layer)
        except Exception as error:
            error.add_note(f"in the case {name!r}")
            raise


@pytest.mark.parametrize("world", [1, 2, 4])
def test_results_gradients_and_a_step_of_every_layer_equal_those_of_one_process(ranks: Ranks, world: int) -> None:
    ranks.run(compare_layers, world=world)


def compare_arguments() -> None:
    mesh = tp_mesh()
    generator = torch.Generator().manual_seed(7)
    for heads, kv_heads in ((8, 2), (5, 5)):
        reference = multi_head(heads, kv_heads)
        layer = distributed(reference, mesh)
        allowed = torch.rand(BATCH, heads, LENGTH, LENGTH, generator=generator) > 0.3
        compare(reference, layer, tokens(), mask=Mask.dense(allowed) & Mask.lengths([7, 4]))
        layer.zero_grad()
        reference.zero_grad()
        compare(reference, layer, tokens(), tokens(5, seed=8), tokens(5, seed=9), mask=Mask.lengths([5, 2]))
        for shape in ((heads,), (BATCH, heads), (BATCH, heads, LENGTH)):
            gates = [torch.rand(shape, dtype=F64, generator=generator) for _ in range(2)]
            mine, theirs = ([x.clone().requires_grad_() for x in gates] for _ in range(2))
            layer.head_gate, reference.head_gate = mine[1], theirs[1]
            bias = torch.randn(1, heads, LENGTH, LENGTH, dtype=F64, generator=generator)
            my_bias, their_bias = bias.clone().requires_grad_(), bias.clone().requires_grad_()
            loss_of(layer(tokens(), head_gate=mine[0], mask=Mask.bias(my_bias))).backward()
            loss_of(reference(tokens(), head_gate=theirs[0], mask=Mask.bias(their_bias))).backward()
            for x, y in zip((*mine, my_bias), (*theirs, their_bias), strict=True):
                close(x.grad, y.grad, **EXACT)
        layer.head_gate = reference.head_gate = None
        empty = layer(tokens()[:0], statistics="entropy")
        assert empty.output.shape == (0, LENGTH, WIDTH)
        assert empty.statistics.entropy.shape == (0, heads, LENGTH)
        x, source = tokens(), tokens(5, seed=8).requires_grad_()
        other = source.detach().clone().requires_grad_()
        actual, expected = layer(x, layer.remember(source)), reference(x, reference.remember(other))
        close(actual.output, expected.output, **EXACT)
        loss_of(actual).backward()
        loss_of(expected).backward()
        close(source.grad, other.grad, **EXACT)
        with pytest.raises(ShapeError, match=rf"\[{heads}\], \[2, {heads}\] or .* got \[2\]"):
            layer(x, head_gate=torch.ones(2, dtype=F64))
        with pytest.raises(MaskError, match=f"1 head or all {heads} heads of the layer, got 2"):
            layer(x, mask=Mask.dense(torch.ones(BATCH, 2, LENGTH, LENGTH, dtype=torch.bool)))
        distributed_input = DTensor.from_local(x, mesh, [Replicate()])
        close(layer(distributed_input).output, reference(x).output, **EXACT)
        assert config_of(layer) == config_of(reference)
        gates = torch.rand(heads, dtype=F64, generator=generator)
        for when in ("before", "after"):  # a learned gate, added before the layer is distributed or after
            reference = multi_head(heads, kv_heads)
            reference.head_gate = nn.Parameter(gates.clone())
            layer = distributed(reference if when == "before" else multi_head(heads, kv_heads), mesh)
            if when == "after":
                layer.head_gate = nn.Parameter(gates.clone())
            loss_of(layer(tokens())).backward()
            loss_of(reference(tokens())).backward()
            gradient = layer.head_gate.grad
            close(gradient.full_tensor() if when == "before" else gradient, reference.head_gate.grad, **EXACT)
        layer.extra = nn.Parameter(torch.zeros(()))
        with pytest.raises(OptionError, match="with which it was distributed, got extra as well"):
            layer(x)
        with pytest.raises(polyhead.errors.DtypeError, match="query must be a tensor"):
            layer(None)


def test_masks_gates_and_sources_are_those_of_the_whole_layer(ranks: Ranks) -> None:
    ranks.run(compare_arguments, world=4)


def decode() -> list[int]:
    mesh = tp_mesh()
    stored = []
    for heads, kv_heads in ((8, 4), (8, 2), (6, 6), (5, 1)):
        reference = multi_head(heads, kv_heads, causal=True, positions=Rotary(4)).eval()
        layer = distributed(reference, mesh)
        x = tokens(9)
        cache = GrowingCache.for_layout(layer.cache_layout, batch_size=BATCH, dtype=F64)
        with torch.no_grad():
            steps = [layer(part, cache=cache, statistics="entropy") for part in x.split((4, 2, 1, 1, 1), 1)]
            expected = reference(x, statistics="entropy")
        close(torch.cat([step.output for step in steps], 1), expected.output, **EXACT)
        entropy = torch.cat([step.statistics.entropy for step in steps], 2)
        close(entropy, expected.statistics.entropy, **EXACT)
        stored.append(layer.cache_layout.num_kv_heads)
        if stored[-1] != kv_heads:
            whole = GrowingCache.for_layout(reference.layout, batch_size=BATCH, dtype=F64)
            with pytest.raises(polyhead.errors.PolyheadError):
                layer(x, cache=whole)
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_kv_heads": 2, "positions": lambda: Rotary(6), "activation": "swiglu"}
    model = LanguageModel(31, 24, 4, 2, **options).double().eval()
    prompts = torch.randint(31, (BATCH, 5), generator=torch.Generator().manual_seed(1))
    expected_logits, expected_tokens = model(prompts), model.generate(prompts, 6)
    parallelize_module(model, mesh, head_parallel_plan(model))
    close(model(prompts), expected_logits, **EXACT)
    assert torch.equal(model.generate(prompts, 6), expected_tokens)
    return stored


def test_decoding_with_the_kv_heads_of_a_rank_equals_a_pass_over_the_sequence(ranks: Ranks) -> None:
    by_rank = ranks.run(decode, world=4)
    assert by_rank == [[1, 1, 2, 1], [1, 1, 2, 1], [1, 1, 2, 1], [1, 1, 1, 1]]


def compare_sequence_shards() -> None:
    mesh = tp_mesh()
    world, rank = dist.get_world_size(), dist.get_rank()
    length = 3 * world
    for heads, kv_heads in ((4, 2), (5, 5)):
        reference = multi_head(heads, kv_heads, causal=True, positions=Rotary(4), qk_norm="rms")
        layer = distributed(reference, mesh, sequence_parallel=True)
        x, y = tokens(length).requires_grad_(), tokens(length).chunk(world, 1)[rank].clone().requires_grad_()
        mask = Mask.lengths([length, length - 4])
        expected, actual = (module(z, mask=mask, statistics=True) for module, z in ((reference, x), (layer, y)))
        close(actual.output, expected.output.chunk(world, 1)[rank], **EXACT)
        close(actual.statistics.entropy, expected.statistics.entropy, **EXACT)
        weight = tokens(length, seed=11)
        (expected.output * weight).sum().backward()
        (actual.output * weight.chunk(world, 1)[rank]).sum().backward()
        assert x.grad is not None
        close(y.grad, x.grad.chunk(world, 1)[rank], **EXACT)
        names = dict(reference.named_parameters())
        for name, parameter in layer.named_parameters():
            close(whole_gradient(parameter, names[name]), names[name].grad, **EXACT)
        whole = DTensor.from_local(tokens(length), mesh, [Replicate()])
        close(layer(whole, mask=mask).output, expected.output.chunk(world, 1)[rank], **EXACT)
        with pytest.raises(OptionError, match=f"that {world} ranks divide, got {length + 1} tokens"):
            layer(DTensor.from_local(tokens(length + 1), mesh, [Replicate()]))
        with pytest.raises(OptionError, match="takes no cache"):
            layer(y, cache=GrowingCache.for_layout(layer.cache_layout, batch_size=BATCH, dtype=F64))
        with pytest.raises(OptionError, match="whole sequence"), polyhead.observe(layer):
            layer(y)
    torch.manual_seed(0)
    block = DecoderBlock(24, 4, norm="layer").double()
    sharded = copy.deepcopy(block)
    parallelize_module(sharded, mesh, head_parallel_plan(sharded, sequence_parallel=True))
    x = tokens(length, 24).requires_grad_()
    y = tokens(length, 24).chunk(world, 1)[rank].clone().requires_grad_()
    expected, actual = block(x), sharded(y)
    close(actual, expected.chunk(world, 1)[rank], **EXACT)
    expected.square().sum().backward()
    actual.square().sum().backward()
    assert x.grad is not None
    close(y.grad, x.grad.chunk(world, 1)[rank], **EXACT)


@pytest.mark.parametrize("world", [2, 4])
def test_sequence_parallel_takes_and_returns_shards_of_the_sequence(ranks: Ranks, world: int) -> None:
    ranks.run(compare_sequence_shards, world=world)


def save_and_load(folder: str) -> None:
    mesh = tp_mesh()
    for index, (heads, kv_heads) in enumerate(((8, 2), (5, 5), (6, 3), (3, 1))):
        reference = multi_head(heads, kv_heads, sinks=True, output_gate="head")
        model = nn.ModuleDict({"attention": distributed(reference, mesh)})
        saved = get_model_state_dict(model)
        for name, value in reference.state_dict().items():
            if name != "_extra_state":
                assert isinstance(saved[f"attention.{name}"], DTensor)
                assert saved[f"attention.{name}"].shape == value.shape
        path = str(Path(folder) / str(index))
        dcp.save(saved, checkpoint_id=path)
        other = nn.ModuleDict({"attention": distributed(reference, mesh)})
        for parameter in other.parameters():
            parameter.data.to_local().normal_()  # the zero heads as well
        loaded = get_model_state_dict(other)
        dcp.load(loaded, checkpoint_id=path)
        set_model_state_dict(other, loaded)
        compare_states(reference, other["attention"])
        close(other["attention"](tokens()).output, reference(tokens()).output, **EXACT)
        for parameter in other.parameters():
            parameter.data.to_local().fill_(torch.nan)
        full = {f"attention.{name}": value for name, value in reference.state_dict().items()}
        set_model_state_dict(other, dict(full), options=FULL)
        compare_states(reference, other["attention"])
        other["attention"].load_state_dict(perturbed(reference).state_dict())
        compare_states(reference, other["attention"])
        if not other["attention"].parallelism.split.padding:  # of which PyTorch's broadcast does not know
            broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(other, dict(full) if dist.get_rank() == 0 else {}, options=broadcast)
            close(get_model_state_dict(other, options=FULL), full, **EXACT)
        with pytest.raises(polyhead.errors.CheckpointError, match="different head layout"):
            other["attention"].load_state_dict(multi_head(7).state_dict())


def test_checkpoints_are_those_of_the_whole_layer_and_load_back(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save_and_load, str(tmp_path), world=4)
    for index, (heads, kv_heads) in enumerate(((8, 2), (5, 5), (6, 3), (3, 1))):
        reference = multi_head(heads, kv_heads, sinks=True, output_gate="head")
        expected = reference.state_dict()
        single = {f"attention.{name}": torch.zeros_like(x) for name, x in expected.items()}
        with pytest.warns(UserWarning, match="in a single process"):
            dcp.load(single, checkpoint_id=str(tmp_path / str(index)))
        for name, value in expected.items():
            close(single[f"attention.{name}"], value, **EXACT)


def fill_padding(value: float) -> None:
    mesh = tp_mesh()
    for heads in (3, 5):
        reference = multi_head(heads, sinks=True, output_gate="channel")
        layer = distributed(reference, mesh)
        for name, parameter in layer.named_parameters():
            shard = layer.parallelism.shards[name]
            if shard.padding:
                local = parameter.data.to_local()
                held = len(layer.parallelism.heads) * (shard.length // shard.units)
                local.narrow(shard.dim, held, local.shape[shard.dim] - held).fill_(value)
        compare(reference, layer, tokens(), statistics="entropy")


def test_padding_is_never_read(ranks: Ranks) -> None:
    ranks.run(fill_padding, 3.0, world=4)


def observe_heads() -> None:
    from polyhead.surgery import find_layers
    from polyhead.training import QKClip

    mesh = tp_mesh()
    builds = cases(dist.get_world_size())
    for name in ("gqa", "uneven", "uneven gqa", "key_heads", "latent", "latent absorbed", "differential uneven"):
        reference = builds[name]()
        model = nn.ModuleDict({"attention": distributed(reference, mesh)})
        whole = nn.ModuleDict({"attention": reference})
        profiles, maps = [], []
        for observed in (whole, model):
            with polyhead.observe(observed, collect=[AttentionMaps(4)], statistics=True) as session:
                result = observed["attention"](tokens(), mask=Mask.lengths([7, 5]))
            assert result.statistics is None
            profiles.append(session.profile)
            (collected,) = session.observations.collected.values()
            maps.append(collected[AttentionMaps(4).name].state())
        assert profiles[0].heads == profiles[1].heads
        for column in profiles[0].columns:
            close(profiles[1][column], profiles[0][column], **EXACT, equal_nan=True)
        close(maps[1], maps[0], **EXACT)
    layer = distributed(multi_head(5), mesh)
    with pytest.raises(OptionError, match="views of whole parameters"):
        _ = layer.heads
    with pytest.raises(OptionError, match="cannot be changed"):
        layer.layout = layer.layout
    (found,) = find_layers(layer)
    assert found.refusals == ("its heads are distributed over ranks; edit heads before the model is distributed",)
    with pytest.raises(OptionError, match="distributed over ranks"):
        QKClip(layer, torch.optim.SGD(layer.parameters()))


def test_observed_heads_are_those_of_the_whole_layer(ranks: Ranks) -> None:
    ranks.run(observe_heads, world=4)


def compose() -> None:
    mesh, grid = tp_mesh(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for heads, kv_heads in ((4, 1), (3, 3)):  # 2-D parallel
        reference = multi_head(heads, kv_heads, sinks=True, causal=True)
        layer = parallelize_module(copy.deepcopy(reference), grid, HeadParallel(mesh_dim="tp"))
        fully_shard(layer, mesh=grid["dp"])
        optimizers = [torch.optim.SGD(x.parameters(), lr=0.01) for x in (reference, layer)]
        for _ in range(2):
            expected, actual = reference(tokens()).output, layer(tokens()).output
            close(actual, expected, **EXACT)
            expected.square().mean().backward()
            actual.square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        compare_states(reference, layer)
        layer.reshard()
        layer.load_state_dict(perturbed(reference).state_dict())
        close(layer(tokens()).output, reference(tokens()).output, **EXACT)
    reference = multi_head(5, causal=True)
    layer = distributed(reference, mesh)
    gradients = []
    for module in (reference, layer):
        x = tokens().requires_grad_()
        checkpoint(lambda x, module=module: module(x).output, x, use_reentrant=False).square().sum().backward()
        y = tokens().requires_grad_()
        output = module(y, backend="reference").output
        (first,) = torch.autograd.grad(output.square().sum(), y, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), y)
        z = tokens().requires_grad_()
        with polyhead.observe(module, statistics="entropy", keep_statistics=True) as session:
            module(z)
            (session.statistics.mean("entropy") * torch.arange(5)).sum().backward()
        gradients.append((x.grad, second, z.grad))
    close(gradients[1], gradients[0], rtol=1e-9, atol=1e-9)
    copied = copy.deepcopy(layer)
    layer.q_proj.weight.data.to_local().zero_()
    close(copied(tokens()).output, reference(tokens()).output, **EXACT)
    with torch.device("meta"):
        empty = MultiHeadAttention(WIDTH, 5, head_dim=4, dtype=F64)
    built = parallelize_module(empty, mesh, HeadParallel()).to_empty(device="cpu")
    built.reset_parameters()  # also of the zero heads
    other = MultiHeadAttention(WIDTH, 5, head_dim=4, dtype=F64)
    other.load_state_dict(get_model_state_dict(built, options=FULL))
    close(built(tokens()).output, other(tokens()).output, **EXACT)


def test_it_composes_with_fsdp_checkpointing_second_derivatives_copies_and_meta_devices(ranks: Ranks) -> None:
    ranks.run(compose, world=4)


def train_model() -> None:
    """Train a model of which only a part is distributed, with position biases that its layers share."""
    torch.manual_seed(0)
    reference = LanguageModel(31, 24, 6, 2, positions=ALiBi(6, learnable=True)).double()
    assert reference.blocks[0].attention.positions is reference.blocks[1].attention.positions
    model = copy.deepcopy(reference)
    parallelize_module(model, tp_mesh(), head_parallel_plan(model))
    text = torch.randint(31, (BATCH, 9), generator=torch.Generator().manual_seed(1))
    optimizers = [torch.optim.AdamW(x.parameters(), lr=0.01, foreach=False) for x in (reference, model)]
    for _ in range(2):
        for each, optimizer in zip((reference, model), optimizers, strict=True):
            logits = each(text)
            nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    expected, actual = reference.state_dict(), get_model_state_dict(model, options=FULL)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        close(actual[name], value, rtol=1e-9, atol=1e-9)


def test_a_model_trains_as_in_one_process(ranks: Ranks) -> None:
    ranks.run(train_model, world=4)


def share_modules() -> None:
    """Use one layer twice, and its projection in another layer; five heads are padded."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = multi_head(5, causal=True), multi_head(5, qk_norm="rms")
            self.again, self.second.q_proj = self.first, self.first.q_proj

        def forward(self, x: Tensor) -> Tensor:
            outputs = [layer(x).output for layer in (self.first, self.again, self.second)]
            return torch.cat(outputs, 1)

    reference = Shared()
    model = copy.deepcopy(reference)
    parallelize_module(model, tp_mesh(), head_parallel_plan(model))
    for each in (reference, model):
        each(tokens()).square().mean().backward()
    close(model(tokens()), reference(tokens()), **EXACT)
    parameters = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        close(whole_gradient(parameter, parameters[name]), parameters[name].grad, **EXACT)


def test_layers_may_share_projections(ranks: Ranks) -> None:
    ranks.run(share_modules, world=4)


def combine_with_context() -> None:
    """Distribute the heads over two ranks and the tokens over two."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    reference = multi_head(3, causal=True, positions=Rotary(4), window=5)
    layer = parallelize_module(copy.deepcopy(reference), grid["tp"], HeadParallel())
    x, where = tokens(8), {"mesh": grid["cp"]}
    for module in (reference, layer):
        is_whole = module is reference
        with nullcontext() if is_whole else context_parallel(layer, method="ring", **where):
            shard = x if is_whole else shard_sequence(x, dim=1, **where)
            positions = None if is_whole else shard_positions(shard.shape[1], **where)
            result = module(shard, token_positions=positions, statistics="entropy")
            weights = torch.arange(1, 4, dtype=F64)[:, None]
            (result.output.square().sum() + (result.statistics.entropy * weights).sum()).backward()
        if is_whole:
            expected = result
    close(result.output, shard_sequence(expected.output, dim=1, **where), **EXACT)
    close(result.statistics.entropy, shard_sequence(expected.statistics.entropy, dim=2, **where), **EXACT)
    for name, parameter in layer.named_parameters():
        dist.all_reduce(parameter.grad.to_local(), group=grid["cp"].get_group())
        whole = dict(reference.named_parameters())[name]
        close(whole_gradient(parameter, whole), whole.grad, **EXACT)


def test_heads_and_tokens_are_distributed_together(ranks: Ranks) -> None:
    ranks.run(combine_with_context, world=4)


# ---- bad input


def refuse() -> None:
    mesh = tp_mesh()
    world = dist.get_world_size()
    layer = multi_head(4)
    grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "cp"))
    with pytest.raises(OptionError, match=r"one mesh dimension, got a mesh with 2 \(dp, cp\)"):
        parallelize_module(layer, grid, HeadParallel())
    with pytest.raises(OptionError, match="must have the dimension 'tp', got dimensions dp, cp"):
        parallelize_module(layer, grid, HeadParallel(mesh_dim="tp"))
    over_one = parallelize_module(copy.deepcopy(layer), grid, HeadParallel(mesh_dim="cp"))
    close(over_one(tokens()).output, layer(tokens()).output, **EXACT)
    rank = dist.get_rank()
    different = multi_head(6, 2, dropout=0.5) if rank == 2 else multi_head(4, 2)
    with pytest.raises(
        OptionError, match=r"rank 2 with dropout 0\.5 instead of 0\.0.* num_heads 6 instead of 4.*rank 0"
    ):
        parallelize_module(different, mesh, HeadParallel())
    interacting = TalkingHeads(WIDTH, 4, head_dim=4) if rank == 1 else multi_head(4)
    with pytest.raises(OptionError, match=r"which would need an all-gather .* \(on rank 1\)"):
        parallelize_module(interacting, mesh, HeadParallel())
    done = distributed(layer, mesh)
    with pytest.raises(OptionError, match="head-parallel already"):
        parallelize_module(done, mesh, HeadParallel())
    dropping = distributed(multi_head(4, dropout=0.5), mesh)
    with pytest.raises(OptionError, match=r"must be 0 in training.*got dropout 0.5"):
        dropping(tokens())
    close(dropping.eval()(tokens()).output, multi_head(4)(tokens()).output, **EXACT)
    with pytest.raises(OptionError, match="takes padded sequences, got a nested query"):
        done(torch.nested.nested_tensor([tokens()[0]], layout=torch.jagged))
    other_length = tokens(LENGTH - (rank == 3))
    with pytest.raises(OptionError, match=r"rank 3 with query \[2, 6, 23\] torch.float64 instead of \[2, 7, 23\]"):
        done(other_length)
    with pytest.raises(OptionError, match="rank 1 with statistics True instead of None of rank 0"):
        done(tokens(), statistics=True if rank == 1 else None)
    done(tokens(), **({"mask": None, "weights": False} if rank == 1 else {}))  # defaults may be passed or not
    with pytest.raises(OptionError, match=r"rank 2 with mask None instead of Mask\(causal\)"):
        done(tokens(), mask=None if rank == 2 else Mask.causal())
    with pytest.raises(OptionError, match="rank 1 with values of mask"):
        done(tokens(), mask=Mask.lengths(torch.tensor([LENGTH, 3 + (rank == 1)])))
    with pytest.raises(OptionError, match="rank 3 with values of head_gate"):
        done(tokens(), head_gate=torch.full((4,), 0.5 + 0.25 * (rank == 3), dtype=torch.float64))
    with pytest.raises(OptionError, match="rank 1 with gradient of query None instead of required"):
        done(tokens().requires_grad_(rank != 1))
    bias = torch.full((1, 4, LENGTH, LENGTH), 0.5, dtype=F64).requires_grad_(rank == 2)
    with pytest.raises(OptionError, match="rank 2 with gradient of mask 0 required instead of None"):
        done(tokens(), mask=Mask.bias(bias))
    with (
        pytest.raises(OptionError, match=r"rank 1 with autocast torch\.bfloat16 instead of off"),
        torch.autocast("cpu", torch.bfloat16, enabled=rank == 1),
    ):
        done(tokens())
    for change, words in (  # of the layer of one rank, after it was distributed
        (lambda layer: setattr(layer, "softcap", 3.0), r"rank 1 with softcap of the layer 3\.0 instead of None"),
        (lambda layer: setattr(layer, "head_gate", torch.ones(4, dtype=F64)), "values of head_gate of the layer"),
        (lambda layer: layer.k_proj.weight.requires_grad_(False), "gradient of k_proj.weight None instead of required"),
        (lambda layer: layer.float(), "dtype of the layer torch.float32 instead of torch.float64"),
    ):
        changed = copy.deepcopy(done)
        if rank == 1:
            change(changed)
        with pytest.raises(OptionError, match=words):
            changed(tokens())
    with pytest.raises(OptionError, match=r"must be in ascending order, got \[1, 0, 3, 2\]"):
        parallelize_module(copy.deepcopy(layer), DeviceMesh("cpu", [1, 0, 3, 2]), HeadParallel())
    with pytest.raises(TypeError, match="too many positional"):
        done(tokens(), None, None, Mask.causal())
    with pytest.raises(OptionError, match="a multiple of the number of ranks, got 6 and 4"):
        parallelize_module(FeedForward(3, 6), mesh, FeedForwardParallel())
    with pytest.raises(OptionError, match=r"must be 0, since .* got 0\.1"):
        parallelize_module(FeedForward(3, 8, dropout=0.1), mesh, FeedForwardParallel())
    with pytest.raises(OptionError, match="takes a FeedForward, got Linear"):
        parallelize_module(nn.Linear(3, 8), mesh, FeedForwardParallel())
    with pytest.raises(OptionError, match="distributed over mesh dimension 'tp'"):
        done(DTensor.from_local(tokens(), grid["cp"], [Replicate()]))


def test_bad_input_is_refused_on_every_rank(ranks: Ranks) -> None:
    ranks.run(refuse, world=4)


def one_rank_is_missing(when: str) -> None:
    mesh = tp_mesh()
    if when == "distributing" and dist.get_rank() == 1:
        raise ValueError("this rank fails")
    layer = distributed(multi_head(4), mesh)
    if dist.get_rank() == 1:
        raise ValueError("this rank fails")
    layer(tokens())


@pytest.mark.parametrize(
    ("when", "rule"),
    [
        ("distributing", "rank 0 waited 1 seconds, got no answer of rank 1"),
        ("calling", "every rank must call the same layers.*: rank 0 failed in the comparison of the arguments"),
    ],
)
def test_a_missing_rank_is_an_error_and_not_a_hang(ranks: Ranks, when: str, rule: str) -> None:
    first, second = ranks.outcomes(one_rank_is_missing, when, world=2, collective_seconds=1)
    assert isinstance(first, Failure)
    assert first.error == "CommunicationError"
    with pytest.raises(AssertionError, match=rule):
        raise AssertionError(first.message)
    assert isinstance(second, Failure)
    assert second.error == "ValueError"


@pytest.mark.parametrize(
    ("layer", "collective"),
    [
        (TalkingHeads(24, 4), "an all-gather of the queries and keys of all heads"),
        (HeadMix(24, 4), "an all-gather of the outputs of all heads"),
        (GroupedHeads(24, 4, num_groups=2), "an all-reduce of the hidden layer"),
        (RoutedHeads(24, 4, top_k=2), "an all-to-all of the rows"),
        (nn.MultiheadAttention(24, 4), "convert it with polyhead.MultiHeadAttention.from_torch"),
        (MultiHeadAttention(24, 4, combine=GroupedHeads(24, 4, num_groups=2).combine), "which HeadGroups combines"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else "",
)
def test_layers_whose_heads_interact_are_refused_with_their_collective(layer: nn.Module, collective: str) -> None:
    with pytest.raises(OptionError, match=collective):
        head_parallel_plan(nn.Sequential(layer))


def test_a_plan_has_every_attention_layer_and_feed_forward_network() -> None:
    model = LanguageModel(31, 24, 4, 2)
    plan = head_parallel_plan(model)
    assert {*plan} == {f"blocks.{i}.{name}" for i in range(2) for name in ("attention", "feed_forward")}
    sharded = head_parallel_plan(model, sequence_parallel=True)
    assert {*sharded} - {*plan} == {f"blocks.{i}.{x}_norm" for i in range(2) for x in ("attention", "feed_forward")}
    with pytest.raises(OptionError, match="got Linear without any"):
        head_parallel_plan(nn.Linear(2, 2))
    for style in (HeadParallel, FeedForwardParallel):
        with pytest.raises(OptionError, match="sequence_parallel must be True or False, got 1"):
            style(sequence_parallel=1)  # type: ignore[arg-type]
