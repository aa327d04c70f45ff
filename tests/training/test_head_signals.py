"""Outputs of heads and the gradients through them, against materialised attention in float64."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import polyhead
from polyhead.errors import OptionError
from polyhead.layers import LatentAttention
from polyhead.training import DropHead, HeadGates, HeadMonitor, QKClip
from polyhead.training.head_signals import COLUMNS
from tests.integrations.huggingface import models

VOCABULARY = 61
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        **TOKENS, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=10,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        **TOKENS, n_embd=24, n_layer=2, n_head=3, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        **TOKENS, **NO_DROPOUT, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=3
    )
    return transformers.BertForMaskedLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        **TOKENS, d_model=24, d_kv=7, d_ff=20, num_layers=1, num_heads=3, dropout_rate=0.0, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


FAMILIES = {
    "llama": (llama, "{}.o_proj"),
    "gpt2": (gpt2, "{}.c_proj"),
    "bert": (bert, "{}.output.dense"),
    "t5": (t5, "{}.o"),
}


def seeded(create: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = create().double().train()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(4)  # sharp attention and outputs that differ
    return model


def batches(count: int = 2) -> list[dict[str, Tensor]]:
    """Micro-batches of one step; sequences of the second end in padding."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(count):
        ids = torch.randint(1, VOCABULARY, (2, 11), generator=generator)
        mask = torch.ones_like(ids)
        mask[:, 8:] = index % 2 == 0
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask == 1, -100)})
    return found


class Reference:
    """Head outputs, as the output projections read them, and their gradients."""

    def __init__(self, model: nn.Module, projections: dict[str, tuple[nn.Module, int]]) -> None:
        self.projections = projections
        self.read: dict[str, list[Tensor]] = {name: [] for name in projections}
        for name, (linear, _) in projections.items():
            linear.register_forward_pre_hook(lambda _, inputs, name=name: self._add(name, inputs[0]))

    def _add(self, name: str, read: Tensor) -> None:
        read.retain_grad()
        self.read[name].append(read)

    def matrices(self, name: str) -> Tensor:
        linear, heads = self.projections[name]
        weight = linear.weight.detach() if type(linear).__name__ == "Conv1D" else linear.weight.detach().T
        return weight.unflatten(0, (heads, -1))

    def of(self, name: str, masks: list[Tensor]) -> dict[str, Tensor]:
        """Return the columns of a site, and the matrices of cosines."""
        weights = self.matrices(name)
        counted = [mask.bool().flatten() for mask in masks]
        by_head = [x.flatten(0, 1).unflatten(-1, weights.shape[:2]) for x in self.read[name]]
        grads = [x.grad.flatten(0, 1).unflatten(-1, weights.shape[:2]) for x in self.read[name]]
        z, g = (torch.cat([x[m] for x, m in zip(parts, counted, strict=True)]).detach() for parts in (by_head, grads))
        written, changed = (torch.einsum("thd,hdw->htw", x, weights) for x in (z, g))
        squares = written.square().sum((1, 2))
        return {
            "output_norm": (squares / len(z)).sqrt(),
            "output_norm_share": squares / squares.sum(),
            "gradient_norm": g.square().sum((0, 2)).sqrt(),
            "outputs": cosines(written),
            "gradients": cosines(changed),
        }


def cosines(vectors: Tensor) -> Tensor:
    flat = nn.functional.normalize(vectors.flatten(1), dim=-1)
    return flat @ flat.T


def strongest(matrix: Tensor) -> Tensor:
    """Return the cosine of largest magnitude with another head."""
    found = []
    for head, row in enumerate(matrix):
        others = torch.cat((row[:head], row[head + 1 :]))
        found.append(others[others.abs().argmax()])
    return torch.stack(found)


def assert_matches(
    monitor: HeadMonitor, reference: Reference, masks: dict[str, list[Tensor]], rtol: float = 1e-9
) -> None:
    history = monitor.history
    assert {head.site for head in history.heads} == set(reference.projections)
    for name in reference.projections:
        expected = reference.of(name, masks[name])
        index = [i for i, head in enumerate(history.heads) if head.site == name]
        kind = history.heads[index[0]].kind
        for column in ("output_norm", "output_norm_share", "gradient_norm"):
            torch.testing.assert_close(history[column][0, index], expected[column], rtol=rtol, atol=1e-12)
        for column, matrix in (("output_cosine", "outputs"), ("gradient_cosine", "gradients")):
            found = history.cosines(column)[0][name, kind]
            torch.testing.assert_close(found, expected[matrix], rtol=rtol, atol=rtol)
            torch.testing.assert_close(history[column][0, index], strongest(expected[matrix]), rtol=rtol, atol=rtol)


def projections_of(model: nn.Module, family: str) -> dict[str, tuple[nn.Module, int]]:
    pattern, found = FAMILIES[family][1], {}
    with torch.no_grad(), polyhead.observe(model, statistics="entropy") as session:
        model(**batches(1)[0])
    for site in session.observations.calls:
        around = site.name.removesuffix(".self") if family == "bert" else site.name
        found[site.name] = (model.get_submodule(pattern.format(around)), site.num_heads)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_of_transformers_models(family):
    model = seeded(FAMILIES[family][0])
    with HeadMonitor(model) as monitor:
        for batch in batches():
            model(**batch).loss.backward()
        monitor.step()
    plain = seeded(FAMILIES[family][0])
    projections = projections_of(plain, family)
    plain.set_attn_implementation("eager")
    reference = Reference(plain, projections)
    for batch in batches():
        plain(**batch).loss.backward()
    masks = [batch["attention_mask"] for batch in batches()]
    unpadded = [torch.ones_like(mask) for mask in masks]  # of T5's decoder, whose tokens are all real
    by_site = {name: unpadded if "decoder" in name else masks for name in projections}
    assert_matches(monitor, reference, by_site, rtol=1e-6)  # the softmax of eager Llama is in float32
    assert monitor.history.first_nonfinite() is None


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "gpt_neox", "phi3", "modernbert", "distilbert", "whisper"])
def test_the_output_projection_is_found_without_a_table_of_families(name):
    family = next(family for family in models.FAMILIES if family.name == name)
    model = models.build(family).train()
    with HeadMonitor(model) as monitor:
        model(**models.inputs(family))
        monitor.step()
    assert monitor.history["output_norm"].isfinite().all()


LAYERS = {
    "grouped": lambda: polyhead.MultiHeadAttention(24, 4, num_kv_heads=2, head_dim=7, value_dim=5, causal=True),
    "gated": lambda: polyhead.MultiHeadAttention(24, 3, output_gate="channel"),
    "latent": lambda: LatentAttention(24, 3, kv_lora_rank=9, qk_nope_head_dim=5, value_head_dim=7),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_outputs_and_gradients_of_polyhead_layers(kind):
    layer = seeded(LAYERS[kind])
    reference = Reference(layer, {type(layer).__name__: (layer.out_proj, layer.num_maps)})
    generator = torch.Generator().manual_seed(2)
    with HeadMonitor(layer) as monitor:
        for tokens in (11, 5):
            x = torch.randn(2, tokens, 24, dtype=torch.float64, generator=generator)
            layer(x).output.square().sum().backward()
        monitor.step()
    masks = [torch.ones(2, tokens) for tokens in (11, 5)]
    if kind != "gated":
        assert_matches(monitor, reference, {type(layer).__name__: masks})
    else:  # the gradient is that before the gate
        expected = reference.of(type(layer).__name__, masks)
        torch.testing.assert_close(monitor.history["output_norm"][0], expected["output_norm"])
        assert (monitor.history["gradient_norm"][0] < expected["gradient_norm"]).all()


def torch_reference(layer: nn.MultiheadAttention, x: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what an encoder layer returns from its attention, and the head outputs, [batch, queries, heads, dim]."""
    q, k, v = (
        part.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
        for part in nn.functional.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
    )
    logits = q @ k.mT / q.shape[-1] ** 0.5
    if padding is not None:
        logits = logits.masked_fill(padding[:, None, None], -torch.inf)
    heads = (logits.softmax(-1) @ v).transpose(1, 2)
    heads.retain_grad()
    return layer.out_proj(heads.flatten(2)), heads


@pytest.mark.parametrize("batch_first", [True, False])
def test_outputs_and_gradients_of_torch_layers(batch_first):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24), nn.MultiheadAttention(24, 3, batch_first=batch_first)).double().train()
    linear, layer = model
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    padding = torch.arange(7) >= torch.tensor([[7], [4]])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.attention = linear, layer

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.linear(x if batch_first else x.transpose(0, 1))
            output = self.attention(hidden, hidden, hidden, key_padding_mask=padding)[0]
            return output if batch_first else output.transpose(0, 1)

    whole = Model().train()
    with HeadMonitor(whole) as monitor:
        whole(x).pow(3).sum().backward()
        monitor.step()
    output, heads = torch_reference(layer, linear(x), padding)
    output.pow(3).sum().backward()
    weights = layer.out_proj.weight.detach().T.unflatten(0, (3, -1))
    z, g = heads.detach()[~padding], heads.grad[~padding]
    squares = torch.einsum("thd,hdw->htw", z, weights).square().sum((1, 2))
    torch.testing.assert_close(monitor.history["output_norm"][0], (squares / len(z)).sqrt())
    torch.testing.assert_close(monitor.history["gradient_norm"][0], g.square().sum((0, 2)).sqrt())
    found = monitor.history.cosines("gradient_cosine")[0]["attention", "self"]
    torch.testing.assert_close(found, cosines(torch.einsum("thd,hdw->htw", g, weights)))


@pytest.mark.parametrize("order", ["outside", "inside"])
def test_gated_torch_layers_have_no_outputs(order):
    layer, x = nn.MultiheadAttention(24, 3, batch_first=True).train(), torch.randn(2, 5, 24)
    monitor, drop = HeadMonitor(layer), DropHead(layer, 0.5)
    first, second = (drop, monitor) if order == "outside" else (monitor, drop)
    with first, second:
        layer(x, x, x)[0].square().sum().backward()
        monitor.step()
    for column in COLUMNS[1:]:
        assert monitor.history[column].isnan().all()
    assert monitor.history.first_nonfinite() is None


def test_the_lowest_decile_of_the_entropy_is_within_half_a_bin():
    def sharp() -> nn.Module:
        model = llama()
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.data.mul_(20)
        return model

    model = seeded(sharp)
    with HeadMonitor(model) as monitor:
        for batch in batches():
            model(**batch)
        monitor.step()
    plain = seeded(sharp)
    plain.set_attn_implementation("eager")
    rows: list[list[Tensor]] = [[], []]
    for batch in batches():
        mask = batch["attention_mask"].bool()
        for layer, weights in enumerate(plain(**batch, output_attentions=True).attentions):
            entropy = torch.special.entr(weights.detach()).sum(-1).transpose(1, 2)[mask]  # [tokens, heads]
            keys = (torch.arange(11) + 1).expand_as(mask)[mask]
            rows[layer].append((entropy / keys.log()[:, None])[keys > 1])
    exact = torch.cat([torch.cat(x).quantile(0.1, dim=0) for x in rows])
    found = monitor.history["normalized_entropy_p10"][0]
    assert ((found - exact).abs() <= 1 / 512 + 1e-6).all()
    assert (monitor.history["normalized_entropy"][0] - found > 0.05).all()  # it is not the mean


def small(model: nn.Module, batch: dict[str, Tensor], weight: float = 1.0) -> None:
    (weight * model(**batch).loss).backward()


def columns(monitor: HeadMonitor, step: int = 0) -> dict[str, Tensor]:
    return {name: monitor.history[name][step] for name in COLUMNS}


def recorded(model: nn.Module, run: Callable[[], None], **options: Any) -> dict[str, Tensor]:
    with HeadMonitor(model, **options) as monitor:
        run()
        monitor.step()
    return columns(monitor)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_layers_count_once(use_reentrant):
    model, batch = seeded(llama), batches()[1]
    expected = recorded(model, lambda: small(model, batch))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    found = recorded(model, lambda: small(model, batch))
    for name in COLUMNS:
        torch.testing.assert_close(found[name], expected[name])


def test_a_checkpointed_torch_layer_counts_once():
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(24, 3).double().train(), torch.randn(5, 2, 24, dtype=torch.float64)
    expected = recorded(layer, lambda: layer(x, x, x)[0].square().sum().backward())
    for use_reentrant in (True, False):
        inputs = x.clone().requires_grad_()

        def run(inputs: Tensor = inputs, use_reentrant: bool = use_reentrant) -> None:
            checkpoint(lambda y: layer(y, y, y)[0], inputs, use_reentrant=use_reentrant).square().sum().backward()

        found = recorded(layer, run)
        for name in COLUMNS:
            torch.testing.assert_close(found[name], expected[name])


def test_a_step_without_backward_has_no_gradient_and_nothing_is_reported_as_nonfinite():
    model, (first, second) = seeded(llama), batches()
    with HeadMonitor(model, pairs_every=2) as monitor:
        for step in range(5):
            loss = model(**first).loss
            if step != 3:
                loss.backward()
            model.eval()
            small(model, second)  # of an evaluation
            model.train()
            monitor.step()
            if step == 1:
                late = model(**second).loss
        late.backward()
    history = monitor.history
    has = {name: (~history[name].isnan()).all(1).tolist() for name in COLUMNS}
    assert has["output_norm"] == has["output_norm_share"] == [True] * 5
    assert has["gradient_norm"] == [True, True, True, False, True]
    assert has["output_cosine"] == has["gradient_cosine"] == [True, False, True, False, True]
    assert torch.equal(history["gradient_norm"][0], history["gradient_norm"][4])
    assert set(history.cosines("output_cosine")) == {0, 2, 4}
    assert history.first_nonfinite() is None


def test_rows_that_see_no_key_do_not_count():
    """Under a bias of the dtype's minimum such a row attends to all keys alike."""
    layer = seeded(t5).decoder.block[0].layer[1]  # cross-attention
    x, source = torch.randn(2, 2, 7, 24, dtype=torch.float64)
    bias = torch.zeros(2, 1, 1, 7, dtype=torch.float64)
    bias[1] = torch.finfo(torch.float64).min

    def run(batch: int) -> None:
        output = layer(x[:batch], key_value_states=source[:batch], attention_mask=bias[:batch])[0]
        output.square().sum().backward()

    expected, found = recorded(layer, lambda: run(1)), recorded(layer, lambda: run(2))
    for name in COLUMNS:
        torch.testing.assert_close(found[name], expected[name])


def test_packed_sequences_are_those_of_a_batch():
    model = seeded(llama)
    ids = torch.randint(1, VOCABULARY, (1, 18), generator=torch.Generator().manual_seed(1))
    positions = torch.cat((torch.arange(11), torch.arange(7)))[None]
    expected = recorded(model, lambda: [model(input_ids=part) for part in ids.split((11, 7), 1)])
    found = recorded(model, lambda: model(input_ids=ids, position_ids=positions, use_cache=False))
    for name in ("normalized_entropy_p10", "output_norm", "output_norm_share", "output_cosine"):
        torch.testing.assert_close(found[name], expected[name])


def test_gradients_through_a_torch_layer_are_those_before_a_hook_that_changes_its_output():
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(15, 3, batch_first=True).double().train(), torch.randn(2, 7, 15).double()
    output, heads = torch_reference(layer, x, None)
    (2 * output).pow(3).sum().backward()
    layer.register_forward_hook(lambda module, inputs, output: (2 * output[0], output[1]))
    with HeadMonitor(layer, statistics="gradient_norm") as monitor:
        layer(x, x, x)[0].pow(3).sum().backward()
        monitor.step()
    torch.testing.assert_close(monitor.history["gradient_norm"][0], heads.grad.square().sum((0, 1, 3)).sqrt())


def test_gradients_are_unknown_in_a_torch_layer_with_a_forward_of_its_own():
    class Doubled(nn.MultiheadAttention):
        def forward(self, *inputs: Any, **options: Any) -> tuple[Tensor, Any]:
            output, weights = super().forward(*inputs, **options)
            return 2 * output, weights

    layer, x = Doubled(15, 3, batch_first=True).train(), torch.randn(2, 7, 15)
    with HeadMonitor(layer, pairs_every=1) as monitor:
        for _ in range(2):
            layer(x, x, x)[0].square().sum().backward()
            monitor.step()
    for name in ("gradient_norm", "gradient_cosine"):
        assert monitor.history[name].isnan().all()
    assert monitor.history["output_norm"].isfinite().all()
    assert monitor.history.first_nonfinite() is None


def test_an_unbatched_torch_layer_is_a_batch_of_one():
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(24, 3).double().train(), torch.randn(5, 24, dtype=torch.float64)
    expected = recorded(layer, lambda: layer(*[x[:, None]] * 3)[0].square().sum().backward())
    found = recorded(layer, lambda: layer(x, x, x)[0].square().sum().backward())
    for name in COLUMNS:
        torch.testing.assert_close(found[name], expected[name])


def test_a_nan_in_one_gradient_is_reported():
    layer = polyhead.MultiHeadAttention(24, 3).train()
    with HeadMonitor(layer, pairs_every=2) as monitor:
        for step in range(4):
            output = layer(torch.randn(2, 5, 24)).output
            (output * (torch.nan if step == 3 else 1.0)).sum().backward()
            monitor.step()
    step, head, column = monitor.history.first_nonfinite()
    assert (step, head.head, column) == (3, 0, "gradient_norm")
    with torch.no_grad():
        layer.out_proj.weight[0, 9] = torch.nan  # of head 1, from the first step on
    with HeadMonitor(layer) as monitor:
        for _ in range(2):
            layer(torch.randn(2, 5, 24))
            monitor.step()
    step, head, column = monitor.history.first_nonfinite()
    assert (step, head.head, column) == (0, 1, "output_norm")


def test_two_backwards_through_one_forward_have_no_gradient_norm():
    model = seeded(llama)

    def run() -> None:
        loss = model(**batches()[0]).loss
        loss.backward(retain_graph=True)
        loss.backward()

    found = recorded(model, run)
    assert found["gradient_norm"].isnan().all()
    assert found["output_norm"].isfinite().all()


def test_the_scale_of_a_grad_scaler_is_taken_out():
    model, data = seeded(llama).float(), batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    expected = recorded(model, lambda: [small(model, batch) for batch in data])

    def run() -> None:
        for batch in data:
            scaler.scale(model(**batch).loss).backward()
        scaler.step(optimizer)
        scaler.update()  # the scale changes before the step of the monitor

    found = recorded(model, run, grad_scaler=scaler)
    assert scaler.get_scale() == 2048
    torch.testing.assert_close(found["gradient_norm"], expected["gradient_norm"])
    with HeadMonitor(model, grad_scaler=scaler, pairs_every=1) as monitor:  # an overflow is what the scaler looks for
        for factor in (torch.inf, 1.0):
            scaler.scale(factor * model(**data[0]).loss).backward()
            monitor.step()
    assert not monitor.history["gradient_norm"][0].isfinite().any()
    assert monitor.history.first_nonfinite() is None
    with HeadMonitor(model) as monitor, torch.autocast("cpu", torch.float16):
        model(**data[0])
        with pytest.raises(OptionError, match="GradScaler"):
            monitor.step()
        state = types.SimpleNamespace(stateful_callbacks={}, global_step=0)
        optimizer = types.SimpleNamespace(scaler=scaler)
        monitor.trainer_callback().on_train_begin(None, state, None, optimizer=optimizer)
        model(**data[0])
        monitor.step()
    with pytest.raises(OptionError, match=r"must be a torch\.amp\.GradScaler, got float"):
        HeadMonitor(model, grad_scaler=1024.0)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_autocast_changes_the_columns_by_rounding_only():
    model, batch = seeded(llama).float(), batches()[0]
    expected = recorded(model, lambda: small(model, batch))

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()

    found = recorded(model, run)
    for name in ("output_norm", "output_norm_share"):
        torch.testing.assert_close(found[name], expected[name], rtol=0.05, atol=0.01)
    assert not torch.equal(found["output_norm"], expected["output_norm"])


def test_gates_count_as_part_of_what_a_head_writes():
    model, batch = seeded(llama), batches()[0]
    plain = recorded(model, lambda: small(model, batch))
    gates = HeadGates(model)
    with torch.no_grad():
        for name in gates.log_alpha:
            gates.log_alpha[name].fill_(50.0)  # open, but for one head
            gates.log_alpha[name][2] = -50.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with QKClip(model, optimizer, 100.0), gates, DropHead(model, 0.0), HeadMonitor(model) as monitor:
        small(model, batch)
        optimizer.step()
        monitor.step()
    found = columns(monitor)
    closed = torch.tensor([False, False, True, False] * 2)
    for name in ("output_norm", "output_norm_share", "gradient_norm"):
        assert torch.equal(found[name] == 0, closed)
    assert torch.equal(found["output_cosine"] == 0, closed)
    first = ~closed & (torch.arange(8) < 4)
    torch.testing.assert_close(found["output_norm"][first], plain["output_norm"][first])
    assert monitor.history.first_nonfinite() is None


def test_frozen_layers_have_gradients_where_any_passes_through_them():
    model, batch = seeded(llama), batches()[0]
    expected = recorded(model, lambda: small(model, batch))
    model.requires_grad_(False)
    model.model.layers[0].self_attn.v_proj.weight.requires_grad_()
    found = recorded(model, lambda: small(model, batch))
    torch.testing.assert_close(found["gradient_norm"], expected["gradient_norm"])
    model.requires_grad_(False)
    model.model.layers[1].self_attn.v_proj.weight.requires_grad_()
    found = recorded(model, lambda: small(model, batch))
    assert found["gradient_norm"][:4].isnan().all()
    torch.testing.assert_close(found["gradient_norm"][4:], expected["gradient_norm"][4:])


def test_a_forward_that_raises_does_not_count():
    model, (first, second) = seeded(llama), batches()
    expected = recorded(model, lambda: small(model, first))

    def run() -> None:
        small(model, first)
        hook = model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**second)
        hook.remove()

    found = recorded(model, run)
    for name in COLUMNS:
        assert torch.equal(found[name], expected[name])


def test_outputs_that_are_read_in_another_form_are_not_averaged_over_the_rest():
    model, batch = seeded(llama), batches()[0]
    attention = model.model.layers[0].self_attn
    with HeadMonitor(model) as monitor:
        for parts in (1, 2, 1):
            small(model, batch)
            if parts == 2:
                hook = attention.o_proj.register_forward_pre_hook(lambda _, x: (x[0][:, :5],), prepend=True)
                with torch.no_grad(), pytest.raises(RuntimeError):
                    model(**batch)  # half of the tokens: the layers do not fit
                attention(
                    torch.randn(2, 11, 24, dtype=torch.float64),
                    model.model.rotary_emb(torch.empty(2, 11, 24, dtype=torch.float64), torch.arange(11)[None]),
                    None,
                )
                hook.remove()
            monitor.step()
    has = (~monitor.history["output_norm"].isnan()).tolist()
    assert has == [[True] * 8, [False] * 4 + [True] * 4, [True] * 8]
    assert monitor.history.first_nonfinite() is None


class TwoAttentions(nn.Module):
    """Two attention calls whose heads one projection reads, in either order."""

    def __init__(self, order: tuple[int, int]) -> None:
        super().__init__()
        self.inputs, self.order = nn.ModuleList(nn.Linear(15, 45) for _ in range(2)), order
        self.output = nn.Linear(15, 15)

    def forward(self, x: Tensor) -> Tensor:
        heads = []
        for linear in self.inputs:
            query, key, value = (part.unflatten(-1, (3, 5)).transpose(1, 2) for part in linear(x).chunk(3, -1))
            y = nn.functional.scaled_dot_product_attention(query, key, value)
            heads.append(y.transpose(1, 2).flatten(2))
        return sum(self.output(heads[index]) for index in self.order)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_projection_that_two_attentions_share_reads_each_of_them(order):
    model, x, read = TwoAttentions(order).double().train(), torch.randn(2, 7, 15, dtype=torch.float64), []
    with torch.no_grad():
        model.inputs[1].weight.mul_(5)
    with HeadMonitor(model) as monitor:
        for _ in range(3):
            model(x).square().sum().backward()
            monitor.step()
    model.output.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].detach()))
    model(x)
    weights = model.output.weight.detach().T.unflatten(0, (3, -1))
    by_call = [
        torch.einsum("bthd,hdw->bthw", read[order.index(call)].unflatten(-1, (3, 5)), weights) for call in (0, 1)
    ]
    expected = torch.cat([y.square().sum(-1).mean((0, 1)).sqrt() for y in by_call])
    assert [head.site for head in monitor.history.heads] == ["TwoAttentions"] * 3 + ["TwoAttentions#2"] * 3
    torch.testing.assert_close(monitor.history["output_norm"], expected.expand(3, -1), rtol=1e-9, atol=0)


def test_cosines_of_gradients_are_those_of_the_weights_that_the_forward_used():
    layer, x = polyhead.MultiHeadAttention(15, 3).double().train(), torch.randn(2, 7, 15, dtype=torch.float64)
    other = polyhead.MultiHeadAttention(15, 3).double().train()
    histories = []
    for model in (layer, other):
        with HeadMonitor(model, pairs_every=1) as monitor:
            for _ in range(2):
                weights = dict(other.named_parameters())
                torch.func.functional_call(model, weights, (x,)).output.square().sum().backward()
                monitor.step()
        histories.append(monitor.history)
    assert not torch.equal(layer.out_proj.weight, other.out_proj.weight)
    for name in ("output_cosine", "gradient_cosine"):
        torch.testing.assert_close(histories[0][name], histories[1][name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("is_inside", [False, True])
def test_hooks_that_change_what_the_projection_reads_count_wherever_they_are_registered(is_inside):
    layer, x = polyhead.MultiHeadAttention(15, 3).double().train(), torch.randn(2, 7, 15, dtype=torch.float64)
    with HeadMonitor(layer, statistics="output_norm") as monitor:
        layer(x)
        monitor.step()
    expected = monitor.history["output_norm"][0]
    monitor = HeadMonitor(layer, statistics="output_norm")
    if not is_inside:
        layer.out_proj.register_forward_pre_hook(lambda _, inputs: (inputs[0] / 2,))
    with monitor:
        for step in range(2):
            if is_inside and step == 0:
                layer.out_proj.register_forward_pre_hook(lambda _, inputs: (inputs[0] / 2,))
            layer(x)
            monitor.step()
    torch.testing.assert_close(monitor.history["output_norm"], expected.expand(2, -1) / 2)


def test_unknown_projections_are_nan_and_not_an_error():
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = seeded(llama)
    attention = model.model.layers[0].self_attn
    scaled = Scaled(40, 24, bias=False).double()
    scaled.load_state_dict(attention.o_proj.state_dict())
    attention.o_proj = scaled
    with HeadMonitor(model) as monitor:
        for _ in range(2):
            small(model, batches()[0])
            monitor.step()
    found = columns(monitor)
    for name in ("output_norm", "output_norm_share", "output_cosine", "gradient_cosine"):
        assert found[name].isnan().tolist() == [True] * 4 + [False] * 4
    assert found["gradient_norm"].isfinite().all()
    assert monitor.history.first_nonfinite() is None


class LoraLinear(nn.Module):
    """A linear layer with an adapter, with the attributes of a LoRA layer of PEFT."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.merged, self.disable_adapters = base, False, False
        self.active_adapters, self.scaling, self.use_dora = ["default"], {"default": 0.5}, {"default": False}
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 3, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(3, base.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * self.scaling["default"]


def test_adapters_of_the_output_projection_are_part_of_it():
    model = seeded(llama)
    for layer in model.model.layers:
        layer.self_attn.o_proj = LoraLinear(layer.self_attn.o_proj)
    model = model.double()
    found = recorded(model, lambda: small(model, batches()[0]))
    for layer in model.model.layers:
        wrapper = layer.self_attn.o_proj
        delta = wrapper.lora_B["default"].weight @ wrapper.lora_A["default"].weight * 0.5
        wrapper.base_layer.weight.data += delta.detach()
        layer.self_attn.o_proj = wrapper.base_layer
    expected = recorded(model, lambda: small(model, batches()[0]))
    for name in COLUMNS:
        torch.testing.assert_close(found[name], expected[name])


class HandwrittenLora(nn.Module):
    """A linear layer with an adapter, as it is written by hand."""

    def __init__(self, base: nn.Linear, kind: str) -> None:
        super().__init__()
        self.linear, shape = base, (base.in_features, base.out_features)
        self.lora_A = self.delta = None
        if kind == "layers":
            self.lora_A = nn.Sequential(nn.Linear(shape[0], 3, bias=False), nn.Linear(3, shape[1], bias=False))
        else:
            self.delta = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + (x @ self.delta if self.lora_A is None else self.lora_A(x))


@pytest.mark.parametrize("kind", ["layers", "parameter"])
def test_outputs_are_unknown_where_another_adapter_changes_the_output_projection(kind):
    model = seeded(llama)
    for layer in model.model.layers:
        layer.self_attn.o_proj = HandwrittenLora(layer.self_attn.o_proj, kind)
    model = model.double()
    found = recorded(model, lambda: small(model, batches()[0]))
    assert found["output_norm"].isnan().all()
    assert found["gradient_cosine"].isnan().all()


@pytest.mark.parametrize("kind", ["layers", "parameter"])
def test_outputs_are_unknown_under_an_adapter_of_a_model_that_calls_the_attention_function(kind):
    model, x = TwoAttentions((0, 1)), torch.randn(2, 7, 15)
    model.output = HandwrittenLora(model.output, kind)
    with HeadMonitor(model.train()) as monitor:
        for _ in range(2):
            model(x).square().sum().backward()
            monitor.step()
    assert monitor.history["output_norm"].isnan().all()
    assert monitor.history["gradient_norm"].isfinite().all()


def test_a_torch_layer_has_outputs_beside_a_module_that_calls_the_attention_function():
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(15, 3, batch_first=True).train(), torch.randn(2, 7, 15)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = layer, TwoAttentions((0, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, x, x)[0] + self.other(x)

    values = []
    for model, inputs in ((layer, (x, x, x)), (Both().train(), (x,))):
        with HeadMonitor(model, statistics="output_norm") as monitor:
            for _ in range(2):
                model(*inputs)
                monitor.step()
        heads = [index for index, head in enumerate(monitor.history.heads) if not head.site.startswith("other")]
        values.append(monitor.history["output_norm"][:, heads])
    torch.testing.assert_close(values[1], values[0])


def test_lora_of_peft_is_part_of_the_output_projection():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=3, lora_alpha=12, target_modules=["q_proj", "v_proj", "o_proj"])
    model = peft.get_peft_model(seeded(llama), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first
            nn.init.normal_(parameter, std=0.3)
    model = model.double().train()
    found = recorded(model, lambda: small(model, batches()[0]))
    merged = model.merge_and_unload().requires_grad_()
    expected = recorded(merged, lambda: small(merged, batches()[0]))
    assert expected["output_norm"].isfinite().all()
    for name in COLUMNS:
        torch.testing.assert_close(found[name], expected[name])


def test_resumed_steps_have_the_same_columns_and_cosines(tmp_path):
    def train(model: nn.Module, monitor: HeadMonitor, steps: range) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with monitor:
            for step in steps:
                small(model, batches()[step % 2])
                optimizer.step()
                optimizer.zero_grad()
                monitor.step()

    model = seeded(llama)
    whole = HeadMonitor(model, every=2, pairs_every=2)
    train(model, whole, range(9))
    model = seeded(llama)
    first, second = (HeadMonitor(model, every=2, pairs_every=2) for _ in range(2))
    train(model, first, range(3))
    torch.save(first.state_dict(), tmp_path / "monitor.pt")
    second.load_state_dict(torch.load(tmp_path / "monitor.pt", weights_only=True))
    train(model, second, range(3, 9))
    for name in COLUMNS:
        assert torch.equal(whole.history[name].nan_to_num(7.0), second.history[name].nan_to_num(7.0))
    assert set(whole.history.cosines("gradient_cosine")) == {0, 4, 8}
    for name in ("output_cosine", "gradient_cosine"):
        one, other = (x.history.cosines(name) for x in (whole, second))
        assert one.keys() == other.keys()
        for step, matrices in one.items():
            assert all(torch.equal(x, other[step][key]) for key, x in matrices.items())


def test_a_layer_that_writes_nothing_has_no_share_and_no_cosine():
    layer = seeded(lambda: polyhead.MultiHeadAttention(24, 3))
    nn.init.zeros_(layer.out_proj.weight)
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    found = recorded(layer, lambda: layer(x).output.square().sum().backward())
    for name in ("output_norm", "output_norm_share", "output_cosine", "gradient_cosine"):
        assert torch.equal(found[name], torch.zeros(3, dtype=torch.float64))


def test_single_heads_have_no_cosine():
    layer = polyhead.MultiHeadAttention(24, 1).train()
    found = recorded(layer, lambda: layer(torch.randn(2, 5, 24)).output.square().sum().backward())
    assert found["output_norm_share"].tolist() == [1.0]
    assert found["output_cosine"].isnan().all()


def test_the_model_is_left_as_it_was():
    model = seeded(llama)
    with HeadMonitor(model) as monitor:
        small(model, batches()[0])
        other = copy.deepcopy(model)  # as for a moving average of the weights
        other(**batches()[1])
        monitor.step()
    expected = recorded(model, lambda: small(model, batches()[0]))
    assert all(torch.equal(x, expected[name]) for name, x in columns(monitor).items())
    assert not any(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())
    with pytest.raises(OptionError, match=r"pairs_every must be at least 1, got 0"):
        HeadMonitor(model, pairs_every=0)
    with pytest.raises(OptionError, match=r"cosines are those of output_cosine and gradient_cosine, got 'entropy'"):
        HeadMonitor(model).history.cosines("entropy")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_on_a_gpu(dtype):
    """Nothing waits for the device after the first step, and the columns are those of a CPU."""
    from tests.waiting import waiting_is_an_error

    layer = seeded(lambda: polyhead.MultiHeadAttention(64, 4, num_kv_heads=2, causal=True)).to(dtype)
    x = torch.randn(3, 37, 64, dtype=dtype)
    expected = recorded(layer, lambda: layer(x).output.float().square().sum().backward())
    layer, on_device = layer.cuda(), x.cuda()
    with HeadMonitor(layer, pairs_every=2) as monitor:
        for step in range(5):
            if step < 3:  # kernels are compiled, and W_O is found
                layer(on_device).output.float().square().sum().backward()
                monitor.step()
                continue
            monitor._pending.clear()  # a record that is two steps late is waited for
            with waiting_is_an_error():
                layer(on_device).output.float().square().sum().backward()
                monitor.step()
    rtol = 1e-3 if dtype is torch.float32 else 0.05
    for name in COLUMNS:
        torch.testing.assert_close(columns(monitor, -1)[name], expected[name], rtol=rtol, atol=rtol)
