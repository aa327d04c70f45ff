"""QK-clip bounds the logits of exactly the heads that exceed the threshold, in every layout."""

from __future__ import annotations

import copy
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import polyhead
from polyhead import Mask, MultiHeadAttention
from polyhead.errors import OptionError
from polyhead.layers import LatentAttention
from polyhead.layers.positions import Rotary
from polyhead.observation import torch_modules
from polyhead.training import HeadMonitor, QKClip

WIDTH, HEADS = 32, 4
HF = {"vocab_size": 61, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 1}
GPT2 = {"vocab_size": 61, "n_embd": WIDTH, "n_layer": 1, "n_head": HEADS, "n_positions": 64}
MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}


def torch_layer(**options) -> nn.MultiheadAttention:
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)
    nn.init.normal_(layer.in_proj_bias)
    return layer


def deepseek(**options) -> nn.Module:
    sizes = {**HF, **MLA, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "first_k_dense_replace": 1}
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**{**sizes, **options}))


LAYERS = {
    "multi-head": lambda: MultiHeadAttention(WIDTH, HEADS, causal=True),
    "grouped": lambda: MultiHeadAttention(WIDTH, HEADS, num_kv_heads=2, positions=Rotary(8)),
    "multi-query, partial rotary": lambda: MultiHeadAttention(
        WIDTH, HEADS, num_kv_heads=1, positions=Rotary(8, rotary_dim=4)
    ),
    "latent": lambda: LatentAttention(WIDTH, HEADS, kv_lora_rank=16, positions=Rotary(4, interleaved=True)),
    "latent, compressed queries": lambda: LatentAttention(WIDTH, HEADS, kv_lora_rank=16, q_lora_rank=24),
    "nn.MultiheadAttention": torch_layer,
    "nn.MultiheadAttention, other widths": lambda: torch_layer(kdim=24, vdim=20),
}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**HF, num_attention_heads=HEADS, num_key_value_heads=2)
    ),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**HF, num_attention_heads=HEADS)),
    "gpt2, fused": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
    "neox, interleaved": lambda: transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(**HF, num_attention_heads=HEADS)
    ),
    "phi3, fused and grouped": lambda: transformers.Phi3ForCausalLM(
        transformers.Phi3Config(**HF, num_attention_heads=HEADS, num_key_value_heads=2, pad_token_id=0)
    ),
    "deepseek": deepseek,
    "deepseek, plain queries": lambda: deepseek(q_lora_rank=None),
}


def with_spread_heads(model: nn.Module) -> nn.Module:
    """Larger weights, and biases that count."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name and "wte" not in name:
                parameter.mul_(8)
            elif name.endswith("bias") and "norm" not in name and "ln" not in name:
                nn.init.normal_(parameter)
    return model


def inputs_of(name: str, model: nn.Module) -> tuple[torch.Tensor, ...]:
    if name in MODELS:
        return (torch.randint(1, 61, (2, 9)),)
    x = torch.randn(2, 9, WIDTH)
    if isinstance(model, nn.MultiheadAttention):
        return x, torch.randn(2, 9, model.kdim), torch.randn(2, 9, model.vdim)
    return (x,)


def max_logits(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    was_training = model.training
    with torch.no_grad(), polyhead.observe(model.eval(), statistics="max_logit") as session:
        model(*inputs)
    model.train(was_training)
    return session.profile["max_logit_max"]


def stopped(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose step changes nothing, so that the weights are those that produced the logits."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


@pytest.mark.parametrize("name", [*LAYERS, *MODELS])
def test_logits_of_heads_above_the_threshold_become_the_threshold(name):
    model = with_spread_heads({**LAYERS, **MODELS}[name]()).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    inputs = inputs_of(name, model)
    before = max_logits(model, inputs)
    threshold = float(before.sort().values[1:3].mean())  # two heads above, two below
    assert threshold > 0
    optimizer = stopped(model)
    with QKClip(model, optimizer, threshold) as clip:
        model(*inputs)
        optimizer.step()
    (found,), (factors,) = clip.latest.max_logit.values(), clip.latest.factor.values()
    torch.testing.assert_close(found, before)
    above = before > threshold
    assert above.sum() == 2
    torch.testing.assert_close(factors, torch.where(above, threshold / before, 1.0).double())
    after = max_logits(model, inputs)
    assert (after <= threshold * (1 + 1e-3)).all()
    torch.testing.assert_close(after[above], torch.full_like(after[above], threshold), rtol=1e-4, atol=0)
    assert torch.equal(after[~above], before[~above])  # bit for bit


def test_a_head_with_its_own_key_is_scaled_on_both_sides_and_others_bit_for_bit_not_at_all():
    """By hand: the logits of a layer from its weights, biases included."""
    layer = with_spread_heads(MultiHeadAttention(WIDTH, HEADS)).double().train()
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)

    def logits() -> torch.Tensor:
        query, key = (p(x).unflatten(-1, (HEADS, 8)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj))
        return query @ key.mT / 8**0.5

    before, weights = logits().detach(), dict(copy.deepcopy(layer).named_parameters())
    largest = before.amax((0, 2, 3))
    threshold = float(largest.sort().values[2:].mean())
    optimizer = stopped(layer)
    with QKClip(layer, optimizer, threshold):
        layer(x)
        optimizer.step()
    head = int(largest.argmax())
    factor = threshold / largest[head]
    torch.testing.assert_close(logits()[:, head], before[:, head] * factor, rtol=1e-6, atol=1e-6)
    for name, tensor in layer.named_parameters():
        ours, theirs = (w.unflatten(0, (HEADS, 8)) for w in (tensor, weights[name]))
        is_scaled = name.startswith(("q_proj", "k_proj"))
        assert torch.equal(ours[[i for i in range(HEADS) if i != head]], theirs[[i for i in range(HEADS) if i != head]])
        expected = theirs[head] * (factor.sqrt() if is_scaled else 1.0)
        torch.testing.assert_close(ours[head], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("absolute", [False, True])
def test_negative_logits_count_by_their_absolute_value_if_requested(absolute):
    layer = MultiHeadAttention(8, 1, bias=False).train()
    with torch.no_grad():
        layer.q_proj.weight.copy_(torch.eye(8))
        layer.k_proj.weight.copy_(-torch.eye(8))
    x = torch.full((1, 3, 8), 2.0)  # every logit is -32 / sqrt(8)
    optimizer = stopped(layer)
    with QKClip(layer, optimizer, 1.0, absolute=absolute) as clip:
        layer(x)
        optimizer.step()
    largest = 32 / 8**0.5
    assert clip.latest.max_logit["MultiHeadAttention"].item() == pytest.approx(largest if absolute else -largest)
    assert clip.latest.heads() == ({("MultiHeadAttention", 0): pytest.approx(1 / largest)} if absolute else {})


def test_all_forwards_of_a_step_count_and_no_others():
    layer = MultiHeadAttention(WIDTH, HEADS).train()
    optimizer = stopped(layer)
    small, large, largest = (scale * torch.randn(2, 5, WIDTH) for scale in (0.1, 1.0, 3.0))
    expected = {scale: max_logits(layer, (x,)) for scale, x in (("small", small), ("large", large))}
    with QKClip(layer, optimizer, 1e6) as clip:
        layer(small)
        layer(large)  # gradient accumulation
        layer.eval()
        layer(largest)
        layer.train()
        optimizer.step()
        torch.testing.assert_close(clip.latest.max_logit["MultiHeadAttention"], expected["large"])
        layer(small)
        optimizer.step()
        torch.testing.assert_close(clip.latest.max_logit["MultiHeadAttention"], expected["small"])


def test_checkpointed_layers_are_counted_once():
    model = MODELS["llama"]().train()
    model.gradient_checkpointing_enable()
    optimizer = stopped(model)
    ids = torch.randint(1, 61, (2, 9))
    expected = max_logits(model, (ids,))
    with QKClip(model, optimizer, 1e6) as clip:
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    (found,) = clip.latest.max_logit.values()
    torch.testing.assert_close(found, expected)


def test_heads_with_nonfinite_logits_keep_their_weights():
    layer = MultiHeadAttention(WIDTH, HEADS).train()
    with torch.no_grad():
        layer.q_proj.weight[0, 0] = torch.nan  # of head 0
    before = copy.deepcopy(layer.state_dict())
    optimizer = stopped(layer)
    with QKClip(layer, optimizer, 1e-6) as clip:
        layer(torch.randn(2, 5, WIDTH))
        optimizer.step()
    factor = clip.latest.factor["MultiHeadAttention"]
    assert factor[0] == 1
    assert (factor[1:] < 1).all()
    weight = layer.q_proj.weight.unflatten(0, (HEADS, 8))
    torch.testing.assert_close(weight[0], before["q_proj.weight"][:8], equal_nan=True, rtol=0, atol=0)
    assert weight[1:].isfinite().all()


def test_master_weights_are_scaled_with_their_copies():
    layer = with_spread_heads(MultiHeadAttention(WIDTH, HEADS, num_kv_heads=2)).to(torch.float16).train()
    masters = {x: nn.Parameter(x.detach().float()) for x in layer.parameters()}
    optimizer = torch.optim.SGD(masters.values(), lr=0.0)
    x = torch.randn(2, 9, WIDTH, dtype=torch.float16)
    before = masters[layer.q_proj.weight].detach().clone()
    with QKClip(layer, optimizer, 1.0, master_weights=masters) as clip:
        layer(x)
        optimizer.step()
    (factor,) = clip.latest.factor.values()
    master = masters[layer.q_proj.weight]
    torch.testing.assert_close(master, before * factor.float().repeat_interleave(8)[:, None], rtol=1e-6, atol=0)
    assert torch.equal(layer.q_proj.weight, master.to(torch.float16))
    assert (max_logits(layer, (x,)) <= 1.0 + 0.01).all()  # 16-bit weights and activations


def test_a_skipped_step_scales_nothing():
    """GradScaler skips a step with infinite gradients; the logits count for the next one."""
    layer = MultiHeadAttention(WIDTH, HEADS).train()
    optimizer, scaler = stopped(layer), torch.amp.GradScaler("cpu")
    with QKClip(layer, optimizer, 1e-6) as clip:
        (scaler.scale(layer(torch.randn(2, 5, WIDTH)).output.sum()) * torch.inf).backward()
        before = copy.deepcopy(layer.state_dict())
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(x, before[name]) for name, x in layer.state_dict().items())
        with pytest.raises(OptionError, match="no step"):
            clip.latest  # noqa: B018
        optimizer.zero_grad()
        optimizer.step()
        assert len(clip.latest.heads()) == HEADS


def test_a_step_that_a_fused_optimizer_skips_scales_nothing():
    """GradScaler calls the step of a fused optimizer, which skips it; its logits count for the next one."""
    layer, scaler = MultiHeadAttention(WIDTH, HEADS).train(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0, fused=True)
    large, small = 3.0 * torch.randn(2, 5, WIDTH), 0.01 * torch.randn(2, 5, WIDTH)
    expected = max_logits(layer, (large,))
    before = copy.deepcopy(layer.state_dict())
    with QKClip(layer, optimizer, 1e-6) as clip:
        for x, factor in ((large, torch.inf), (small, torch.inf), (small, 1.0)):
            (scaler.scale(layer(x).output.sum()) * factor).backward()
            if factor == 1.0:
                assert all(torch.equal(x, before[name]) for name, x in layer.state_dict().items())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            torch.testing.assert_close(clip.latest.max_logit["MultiHeadAttention"], expected)
            assert len(clip.latest.heads()) == (HEADS if factor == 1.0 else 0)
        layer(small)
        optimizer.step()
    assert (clip.latest.max_logit["MultiHeadAttention"] < expected).all()


@pytest.mark.parametrize("source", ["bias", "relative bias", "two biases"])
def test_what_the_mask_adds_is_not_scaled_and_logits_are_at_most_the_threshold(source):
    layer, x = with_spread_heads(MultiHeadAttention(WIDTH, HEADS)).train(), torch.randn(2, 9, WIDTH)
    added = torch.tensor([0.0, 3.0, 5.0, -4.0])[None, :, None, None].expand(1, HEADS, 9, 9).clone()
    added[..., 0] = -1e9  # hidden; weights of these keys are 0
    added[:, 1, :, 4:] = -2.0
    if source == "bias":
        mask = Mask.bias(added)
    elif source == "relative bias":
        mask = Mask.relative(torch.tensor([0.0, 3.0, 5.0, -4.0])[:, None].expand(HEADS, 17), zero=8)
    else:
        mask = Mask.bias(added) & Mask.bias(torch.full((1, 1, 9, 9), 0.5))

    def largest() -> torch.Tensor:
        with torch.no_grad(), polyhead.observe(layer, statistics="max_logit") as session:
            layer(x, mask=mask)
        return session.profile["max_logit_max"]

    before = largest()
    threshold = 6.5
    assert (before > threshold).all()
    optimizer = stopped(layer)
    with QKClip(layer, optimizer, threshold) as clip:
        layer(x, mask=mask)
        optimizer.step()
    torch.testing.assert_close(clip.latest.max_logit["MultiHeadAttention"], before)
    after = largest()
    assert (after <= threshold * (1 + 1e-4)).all()
    assert (clip.latest.factor["MultiHeadAttention"] < 1).all()
    if source != "two biases":  # exact where the largest number is added to the largest logit
        torch.testing.assert_close(after[0], torch.tensor(threshold).double(), rtol=1e-4, atol=0)
        torch.testing.assert_close(after[2], torch.tensor(threshold).double(), rtol=1e-4, atol=0)


def test_heads_to_which_the_mask_adds_the_threshold_keep_their_weights():
    layer, x = with_spread_heads(MultiHeadAttention(WIDTH, HEADS)).train(), torch.randn(2, 9, WIDTH)
    before, optimizer = copy.deepcopy(layer.state_dict()), stopped(layer)
    added = torch.tensor([0.0, 50.0, 2.0, 0.0])[None, :, None, None].expand(1, HEADS, 9, 9)
    with QKClip(layer, optimizer, 2.0) as clip:
        layer(x, mask=Mask.bias(added))
        optimizer.step()
    factor = clip.latest.factor["MultiHeadAttention"]
    assert (factor < 1).tolist() == [True, False, False, True]
    ours, theirs = (w.unflatten(0, (HEADS, 8)) for w in (layer.q_proj.weight, before["q_proj.weight"]))
    assert torch.equal(ours[1:3], theirs[1:3])
    assert clip.latest.max_logit["MultiHeadAttention"][1] > 50


def test_a_bias_in_the_mask_has_no_absolute_bound():
    layer = MultiHeadAttention(WIDTH, HEADS).train()
    mask = Mask.bias(torch.zeros(1, 1, 9, 9).masked_fill_(torch.eye(9) > 0, -1e9))
    with (
        QKClip(layer, stopped(layer), absolute=True),
        pytest.raises(OptionError, match="got biases in MultiHeadAttention; pass hidden keys as a"),
    ):
        layer(torch.randn(2, 9, WIDTH), mask=mask)


def test_training_stays_below_the_threshold():
    """A learning rate at which logits grow without bound: the largest of the next step is near the threshold."""

    def largest_after_training(threshold: float) -> float:
        torch.manual_seed(0)
        layer, x, y = MultiHeadAttention(16, 2, causal=True).train(), torch.randn(8, 6, 16), torch.randn(8, 6, 16)
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
        with QKClip(layer, optimizer, threshold) as clip:
            for _ in range(60):
                optimizer.zero_grad()
                (layer(x).output - y).square().mean().backward()
                optimizer.step()
            return float(torch.cat(list(clip.latest.max_logit.values())).max())

    assert largest_after_training(1e6) > 20
    assert largest_after_training(2.0) < 4


def test_it_leaves_the_optimizer_and_the_model_as_they_were():
    layer = MultiHeadAttention(WIDTH, HEADS).train()
    optimizer = stopped(layer)
    clip = QKClip(layer, optimizer, 1e-6)
    with pytest.raises(RuntimeError, match="stop here"), clip:
        raise RuntimeError("stop here")
    before = copy.deepcopy(layer.state_dict())
    layer(torch.randn(2, 5, WIDTH))
    optimizer.step()
    assert all(torch.equal(x, before[name]) for name, x in layer.state_dict().items())
    assert not optimizer._optimizer_step_post_hooks
    with clip:  # again
        layer(torch.randn(2, 5, WIDTH))
        optimizer.step()
        with pytest.raises(OptionError, match="already entered"):
            clip.__enter__()
    assert len(clip.latest.heads()) == HEADS


class Adapted(nn.Linear):
    """A projection that is more than its weight, as of LoRA."""


def with_adapter() -> nn.Module:
    model = MODELS["llama"]()
    model.model.layers[0].self_attn.q_proj = Adapted(WIDTH, WIDTH, bias=False)
    return model


def with_tied_layers() -> nn.Module:
    layers = nn.ModuleList(MultiHeadAttention(WIDTH, HEADS) for _ in range(2))
    layers[1].q_proj.weight = layers[0].q_proj.weight
    return layers


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: nn.Linear(3, 3), "without any: Linear"),
        (lambda: MultiHeadAttention(WIDTH, HEADS, qk_norm="rms"), "q_norm normalises"),
        (
            lambda: transformers.Qwen3ForCausalLM(
                transformers.Qwen3Config(**HF, num_attention_heads=HEADS, num_key_value_heads=2, head_dim=8)
            ),
            "q_norm normalises",
        ),
        (lambda: MultiHeadAttention(WIDTH, HEADS, softcap=30.0), "soft cap"),
        (with_adapter, "q_proj is a tests.training.test_qk_clip.Adapted"),
        (with_tied_layers, "is shared with another module"),
        (lambda: transformers.T5Model(transformers.T5Config(vocab_size=61, d_model=32, d_kv=8, num_layers=1)), "got "),
    ],
)
def test_models_whose_logits_do_not_scale_with_their_weights_are_refused(model, words):
    model = model()
    with pytest.raises(OptionError, match=words):
        QKClip(model, stopped(model))


class TwoLayers(nn.Module):
    def __init__(self, create) -> None:
        super().__init__()
        self.first, self.second = create(), create()


def test_tied_weights_of_layers_that_cannot_be_edited_are_refused():
    across, latent, within = TwoLayers(torch_layer), TwoLayers(LAYERS["latent"]), torch_layer(kdim=WIDTH, vdim=20)
    across.second.in_proj_weight = across.first.in_proj_weight
    latent.second.kv_b_proj.weight = latent.first.kv_b_proj.weight
    within.k_proj_weight = within.q_proj_weight
    names = ("first.in_proj_weight", "first.kv_b_proj.weight", "q_proj_weight")
    for model, name in zip((across, latent, within), names, strict=True):
        with pytest.raises(OptionError, match=f"{name} is shared with another module"):
            QKClip(model, stopped(model))
    computed = torch.nn.utils.parametrizations.weight_norm(torch_layer(), "in_proj_weight")
    with pytest.raises(OptionError, match="computed by a parametrization"):
        QKClip(computed, stopped(computed))
    siamese = TwoLayers(torch_layer)
    siamese.second = siamese.first  # one module under two names
    QKClip(siamese, stopped(siamese))


class CalledTwice(nn.MultiheadAttention):
    """Attends twice in one forward, the second time with larger logits."""

    def forward(self, query, key, value, **options):
        return super().forward(query, key, value, **options)[0] + super().forward(3 * query, 3 * key, value)[0], None


def test_every_attention_call_of_a_forward_counts():
    layer, x = CalledTwice(WIDTH, HEADS, batch_first=True).train(), 8 * torch.randn(2, 7, WIDTH)
    before = max_logits(layer, (x, x, x)).unflatten(0, (2, HEADS))
    assert (before[0] < before[1]).all()
    optimizer = stopped(layer)
    with QKClip(layer, optimizer, 5.0) as clip:
        layer(x, x, x)
        optimizer.step()
    torch.testing.assert_close(clip.latest.max_logit["CalledTwice"], before[1])
    after = max_logits(layer, (x, x, x))[HEADS:]
    torch.testing.assert_close(after, torch.full((HEADS,), 5.0).double(), rtol=1e-5, atol=0)


class OwnAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.known, self.other = torch_layer(), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.other(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.known(x, x, x)[0] + y.transpose(1, 2).flatten(2)


def test_attention_whose_logits_are_not_bounded_is_named_once():
    model = OwnAttention().train()
    optimizer = stopped(model)
    with QKClip(model, optimizer, 5.0) as clip:
        model(torch.randn(2, 7, WIDTH))
        with pytest.warns(RuntimeWarning, match="observed attention in OwnAttention, whose logits are not bounded"):
            optimizer.step()
        model(torch.randn(2, 7, WIDTH))
        optimizer.step()
    assert list(clip.latest.max_logit) == ["known"]


@pytest.mark.parametrize("threshold", [0, -1.0, float("nan"), float("inf"), True, "100"])
def test_a_threshold_must_be_positive(threshold):
    layer = MultiHeadAttention(WIDTH, HEADS)
    with pytest.raises(OptionError, match="positive number"):
        QKClip(layer, stopped(layer), threshold)


def test_an_optimizer_must_own_the_weights():
    layer = MultiHeadAttention(WIDTH, HEADS)
    with pytest.raises(OptionError, match=r"without q_proj\.weight, k_proj\.weight$"):
        QKClip(layer, torch.optim.SGD(layer.out_proj.parameters(), lr=0.1))
    QKClip(layer, torch.optim.SGD([x for x in layer.parameters() if x.ndim == 2], lr=0.1))  # as Muon beside AdamW
    with pytest.raises(OptionError, match="not a wrapper"):
        QKClip(layer, torch.optim.lr_scheduler.ConstantLR(stopped(layer)))


def test_a_step_without_a_forward_is_an_error():
    layer = MultiHeadAttention(WIDTH, HEADS).eval()
    optimizer = stopped(layer)
    with QKClip(layer, optimizer):
        layer(torch.randn(2, 5, WIDTH))
        with pytest.raises(OptionError, match="forward of the model in training mode"):
            optimizer.step()


def _replica(rank: int, folder: Path) -> None:
    """One of two processes with the same weights and other data."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder / 'store'}", rank=rank, world_size=2)
    torch.manual_seed(0)
    layer = MultiHeadAttention(WIDTH, HEADS).train()
    optimizer = stopped(layer)
    with QKClip(layer, optimizer, 0.1) as clip:
        if rank == 0:  # a process may have no data left
            layer(3 * torch.randn(2, 5, WIDTH))
        optimizer.step()
        first = clip.latest.max_logit["MultiHeadAttention"]
        layer((1 + rank) * torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(rank)))
        optimizer.step()
        second = clip.latest.max_logit["MultiHeadAttention"]
    torch.save((first, second, layer.state_dict()), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_replicas_in_several_processes_stay_equal(tmp_path):
    processes = [get_context("fork").Process(target=_replica, args=(rank, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)
        assert process.exitcode == 0
    (first, second, weights), others = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first.isfinite().all()
    assert torch.equal(first, others[0])
    assert torch.equal(second, others[1])
    assert all(torch.equal(x, others[2][name]) for name, x in weights.items())


def test_heads_that_were_edited_before_the_block_are_those_that_are_scaled():
    layer = with_spread_heads(MultiHeadAttention(WIDTH, HEADS)).train()
    clip = QKClip(layer, stopped(layer), 1e-3)
    polyhead.surgery.apply(layer, [polyhead.surgery.PruneHeads(0, (0,))])
    with pytest.raises(OptionError, match="must own the weights"):
        clip.__enter__()
    optimizer = stopped(layer)
    with QKClip(layer, optimizer, 1e-3) as clip:
        layer(torch.randn(2, 5, WIDTH))
        optimizer.step()
    assert len(clip.latest.heads()) == HEADS - 1


@pytest.mark.parametrize("build", ["torch", "transformers"])
def test_evaluation_costs_no_attention(build, monkeypatch):
    model = torch_layer() if build == "torch" else MODELS["llama"]()
    inputs = (torch.randn(2, 9, WIDTH),) * 3 if build == "torch" else (torch.randint(1, 61, (2, 9)),)
    calls = []
    compute = torch_modules.attention
    monkeypatch.setattr(
        torch_modules, "attention", lambda *args, **options: calls.append(1) or compute(*args, **options)
    )
    heard = []
    with (
        QKClip(model, torch.optim.SGD(model.parameters())) as clip,
        HeadMonitor(model, statistics=("max_logit", "output_norm")) as monitor,
    ):
        listeners = [clip._session, monitor._session]
        for session in listeners:
            listen = session.listener
            session.listener = lambda *args, listen=listen: heard.append(1) or listen(*args)
        model.eval()
        model(*inputs)  # with gradients, as for a saliency map
        assert not calls
        assert not heard
        model.train()
        model(*inputs)
        assert len(heard) == 2
        assert len(calls) == 2 * (build == "torch")
        monitor.step()
