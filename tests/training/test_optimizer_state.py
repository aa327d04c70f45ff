"""Edits of heads during training: the remaining heads learn on as if nothing had happened."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from polyhead import MultiHeadAttention
from polyhead.errors import OptionError
from polyhead.surgery import AddHeads, MergeHeads, PruneHeads, ReorderHeads, find_layers
from polyhead.training import DynamicHeads, HeadChange, edit_heads

WIDTH, HEADS, DIM = 24, 4, 6


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MultiHeadAttention(WIDTH, HEADS, bias=True, causal=True) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).output
        return x


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=61, n_embd=WIDTH, n_layer=2, n_head=HEADS, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=WIDTH, intermediate_size=31, num_hidden_layers=2, num_attention_heads=HEADS
    )
    return transformers.LlamaForCausalLM(config)


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0, amsgrad=True)]


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)]


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [x for x in model.parameters() if x.ndim == 2]
    vectors = [x for x in model.parameters() if x.ndim != 2]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, lr=0.01, weight_decay=0.0)]
    return [*optimizers, torch.optim.AdamW(vectors, lr=0.01)] if vectors else optimizers


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    if isinstance(model, Blocks):
        x = torch.randn(2, 7, WIDTH, generator=generator, dtype=torch.float64)
        return (model(x) - x.roll(1, 1)).square().mean()
    ids = torch.randint(61, (2, 7), generator=generator)
    return model(ids, labels=ids).loss


def silence(model: nn.Module, head: int) -> None:
    """Give a head of layer 1 no output, forever: W_O is zero and has no gradient."""
    path = find_layers(model)[1].output
    linear, rows = model.get_submodule(path), slice(head * DIM, (head + 1) * DIM)
    is_conv1d = type(linear).__name__ == "Conv1D"
    linear.weight.data[rows if is_conv1d else (slice(None), rows)] = 0

    def hook(grad: torch.Tensor) -> torch.Tensor:
        masked = grad.clone()
        masked[rows if is_conv1d else (slice(None), rows)] = 0
        return masked

    linear.weight.register_hook(hook)


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("build", "optimize"), [(Blocks, adamw), (gpt2, adamw), (llama, adamw), (Blocks, sgd)])
def test_pruning_a_silent_head_leaves_the_rest_of_training_as_it_was(build, optimize):
    model = build().double()
    silence(model, 2)
    optimizers = optimize(model)
    train(model, optimizers, range(5))
    whole = copy.deepcopy(model)
    silence(whole, 2)
    others = optimize(whole)
    for one, other in zip(optimizers, others, strict=True):
        other.load_state_dict(copy.deepcopy(one.state_dict()))
    edit_heads(model, optimizers, PruneHeads(1, (2,), stack=find_layers(model)[1].stack))
    assert [layer.layout.num_heads for layer in find_layers(model)] == [HEADS, HEADS - 1]
    expected = train(whole, others, range(5, 15))
    assert train(model, optimizers, range(5, 15)) == pytest.approx(expected, rel=1e-9)
    fresh = optimize(model)  # what a new optimizer would do is something else
    assert train(model, fresh, range(5, 8)) != pytest.approx(train(whole, others, range(5, 8)), rel=1e-9)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
@pytest.mark.parametrize(("build", "optimize"), [(Blocks, adamw), (gpt2, adamw), (llama, adamw), (Blocks, muon)])
def test_growing_keeps_outputs_and_the_states_of_the_other_heads(build, optimize):
    model = build().double()
    optimizers = optimize(model)
    train(model, optimizers, range(4))
    layer = find_layers(model)[1]
    before, loss = copy.deepcopy(model), loss_of(model, 9).item()
    states = {name: copy.deepcopy(dict(state_of(optimizers, x))) for name, x in model.named_parameters()}
    edit_heads(model, optimizers, AddHeads(1, 2, stack=layer.stack))
    assert loss_of(model, 9).item() == pytest.approx(loss, rel=1e-12)
    parameters = dict(model.named_parameters())
    assert {id(x) for each in optimizers for group in each.param_groups for x in group["params"]} == {
        id(x) for x in parameters.values()
    }
    for name, x in parameters.items():
        state = state_of(optimizers, x)
        assert state.keys() == states[name].keys()
        for key, old in states[name].items():
            new = state[key]
            if x.shape == before.get_parameter(name).shape or old.numel() == 1:
                torch.testing.assert_close(new, old, rtol=0, atol=0)
                continue
            assert new.shape == x.shape
            grown, size = by_head(name, new, HEADS + 2), by_head(name, old, HEADS)
            torch.testing.assert_close(grown[:HEADS], size, rtol=0, atol=0)
            fresh = size.mean(0).expand_as(grown[HEADS:]) if "sq" in key else torch.zeros_like(grown[HEADS:])
            torch.testing.assert_close(grown[HEADS:], fresh)
    train(model, optimizers, range(4, 8))
    assert by_head(layer.output, model.get_submodule(layer.output).weight, HEADS + 2)[HEADS:].abs().min() > 0


def state_of(optimizers: list[torch.optim.Optimizer], parameter: nn.Parameter) -> dict:
    (owner,) = [x for x in optimizers if any(y is parameter for group in x.param_groups for y in group["params"])]
    return owner.state[parameter]


def by_head(name: str, x: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the values of every head of a projection, [heads, ...]."""
    if "c_attn" in name:  # query, key and value side by side, in the columns of a Conv1D
        return x.unflatten(-1, (3, heads, -1)).movedim(-2, 0)
    if "c_proj" in name or x.ndim == 1:
        return x.unflatten(0, (heads, -1))
    is_output = any(part in name for part in ("out_proj", "o_proj"))
    return x.T.unflatten(0, (heads, -1)) if is_output else x.unflatten(0, (heads, -1))


def test_values_of_a_reordered_head_move_with_it_and_a_merged_head_starts_anew():
    model = Blocks().double()
    optimizers = adamw(model)
    train(model, optimizers, range(3))
    old = copy.deepcopy(optimizers[0].state[model.layers[0].q_proj.weight])
    edit_heads(model, optimizers, [ReorderHeads(0, (2, 0, 3, 1))])
    new = optimizers[0].state[model.layers[0].q_proj.weight]
    for key in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(new[key], by_head("q_proj", old[key], HEADS)[[2, 0, 3, 1]].flatten(0, 1))
    assert new["step"] == old["step"]
    edit_heads(model, optimizers, [MergeHeads(0, (0, 1))])
    merged = by_head("q_proj", optimizers[0].state[model.layers[0].q_proj.weight]["exp_avg"], HEADS - 1)
    assert not merged[0].any()
    torch.testing.assert_close(merged[1:], by_head("q_proj", new["exp_avg"], HEADS)[2:])


def test_gradients_of_micro_batches_before_an_edit_are_kept():
    model = Blocks().double()
    optimizers = adamw(model)
    loss_of(model, 0).backward()
    old = {name: x.grad.clone() for name, x in model.named_parameters()}
    edit_heads(model, optimizers, [PruneHeads(0, (1,)), AddHeads(0, 1), AddHeads(1, 1)])
    for name, x in model.named_parameters():
        if x.shape == old[name].shape and "layers.1" in name:
            torch.testing.assert_close(x.grad, old[name], rtol=0, atol=0)
    for layer, kept in enumerate(([0, 2, 3], [0, 1, 2, 3])):
        name = f"layers.{layer}.out_proj.weight"
        grads = by_head(name, model.get_parameter(name).grad, len(kept) + 1)
        torch.testing.assert_close(grads[:-1], by_head(name, old[name], HEADS)[kept], rtol=0, atol=0)
        assert not grads[-1].any()


def test_pruning_of_grouped_queries_keeps_the_states_of_the_keys_that_remain():
    layer = MultiHeadAttention(WIDTH, HEADS, num_kv_heads=2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.randn(2, 5, WIDTH)).output.square().sum().backward()
    optimizer.step()
    old = optimizer.state[layer.k_proj.weight]["exp_avg"].clone()
    edit_heads(layer, optimizer, PruneHeads(0, (0, 1)))
    torch.testing.assert_close(optimizer.state[layer.k_proj.weight]["exp_avg"], old[DIM:])


def adamw_of_the_first(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.layers[0].parameters())


def tied() -> nn.Module:
    model = Blocks()
    model.layers[1].q_proj.weight = model.layers[0].q_proj.weight
    return model


def distributed() -> nn.Module:
    model = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(model)
    model.module = Blocks()
    return model


@pytest.mark.parametrize(
    ("build", "optimize", "edit", "words"),
    [
        (Blocks, adamw_of_the_first, PruneHeads(1, (0,)), r"layers\.1\.q_proj"),
        (Blocks, lambda model: [], PruneHeads(0, (0,)), "got none"),
        (Blocks, lambda model: torch.optim.LBFGS(model.parameters()), PruneHeads(0, (0,)), "got LBFGS"),
        (Blocks, lambda model: torch.optim.lr_scheduler.ConstantLR(adamw(model)[0]), PruneHeads(0, (0,)), "ConstantLR"),
        (Blocks, lambda model: torch.optim.Adafactor(model.parameters()), PruneHeads(0, (0,)), "got Adafactor"),
        (Blocks, lambda model: transformers.Adafactor(model.parameters()), PruneHeads(0, (0,)), "'exp_avg_sq_row'"),
        (Blocks, adamw, PruneHeads(0, (0, 1, 2, 3)), "keep at least one head"),
        (Blocks, adamw, PruneHeads(0, (7,)), "heads 0 to 3"),
        (Blocks, adamw, PruneHeads(5, (0,)), "got layer 5"),
        (tied, adamw, PruneHeads(1, (0,)), "shared with another module"),
        (distributed, adamw, PruneHeads(0, (0,)), "wrap it again"),
    ],
)  # fmt: skip
def test_what_cannot_be_carried_over_is_refused_and_changes_nothing(build, optimize, edit, words):
    model = build()
    optimizer = optimize(model)
    if isinstance(optimizer, torch.optim.Optimizer) and isinstance(model, Blocks):
        model.layers[0](torch.randn(2, 3, WIDTH)).output.sum().backward()
        if not isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step()
    parameters = list(model.parameters())
    values = [x.detach().clone() for x in parameters]
    with pytest.raises(OptionError, match=words):
        edit_heads(model, optimizer, edit)
    assert all(x is y for x, y in zip(model.parameters(), parameters, strict=True))
    assert all(map(torch.equal, parameters, values))


def test_frozen_parameters_need_no_optimizer():
    model = Blocks()
    for x in model.layers[0].parameters():
        x.requires_grad_(False)
    optimizer = torch.optim.AdamW(x for x in model.parameters() if x.requires_grad)
    edit_heads(model, optimizer, [PruneHeads(0, (1,)), PruneHeads(1, (1,))])
    owned = [x for group in optimizer.param_groups for x in group["params"]]
    assert [id(x) for x in owned] == [id(x) for x in model.layers[1].parameters()]
    assert not any(x.requires_grad for x in model.layers[0].parameters())


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_model_that_a_wrapper_holds_is_refused_until_the_wrapper_is_deleted():
    """The model is passed itself and does not know the wrapper, whose hooks are on the parameters that are replaced."""
    model = Blocks()
    optimizer, before = adamw(model)[0], dict(model.named_parameters())
    around = nn.Sequential(model, nn.Linear(WIDTH, 3))
    for wrapped in (model, around, model.layers[0]):
        replica = nn.parallel.DistributedDataParallel(wrapped)
        with pytest.raises(OptionError, match="delete the wrapper"):
            edit_heads(model, optimizer, PruneHeads(0, (1,)))
        with pytest.raises(OptionError, match="delete the wrapper"):
            DynamicHeads(model, optimizer, {1: HeadChange(prune=1)})
        assert dict(model.named_parameters()) == before
        del replica
    dynamic = DynamicHeads(model, optimizer, {1: HeadChange(prune=1)})
    replica = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(OptionError, match="delete the wrapper"), dynamic:
        pass
    replica.cycle = [replica]  # until it is collected
    del replica
    other = nn.parallel.DistributedDataParallel(model.layers[1])  # holds none of the edited parameters
    edit_heads(model, optimizer, PruneHeads(0, (1,)))
    assert other.module.layout.num_heads == HEADS
    assert model.layers[0].layout.num_heads == HEADS - 1


@pytest.mark.usefixtures("one_rank")
def test_parameters_of_a_fully_sharded_wrapper_are_refused():
    model = Blocks()
    options = {"use_orig_params": True, "device_id": torch.device("cpu")}
    sharded = FullyShardedDataParallel(model, sharding_strategy=ShardingStrategy.NO_SHARD, **options)
    with pytest.raises(OptionError, match="part of a FlatParameter"):
        edit_heads(model, torch.optim.SGD(sharded.parameters(), lr=0.1), PruneHeads(0, (1,)))


@pytest.mark.parametrize(
    ("create", "key"),
    [
        (lambda x: torch.optim.Adagrad(x, lr=0.01), "sum"),
        (lambda x: torch.optim.Rprop(x, lr=0.01), "step_size"),
        (lambda x: torch.optim.RMSprop(x, lr=0.01), "square_avg"),
    ],
    ids=["Adagrad", "Rprop", "RMSprop"],
)
def test_new_heads_learn_at_the_rate_of_the_others(create, key):
    torch.manual_seed(0)
    layer = MultiHeadAttention(WIDTH, HEADS)
    optimizer = create(layer.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        layer(torch.randn(2, 7, WIDTH)).output.square().mean().backward()
        optimizer.step()
    before = optimizer.state[layer.out_proj.weight][key].unflatten(1, (HEADS, DIM))
    edit_heads(layer, optimizer, AddHeads(0, 1))
    after = optimizer.state[layer.out_proj.weight][key].unflatten(1, (HEADS + 1, DIM))
    torch.testing.assert_close(after[:, :HEADS], before, rtol=0, atol=0)
    torch.testing.assert_close(after[:, HEADS], before.mean(1))
    assert (after[:, HEADS] > 0).all()
